"""The benchmarks' arithmetic and their lines; what they measure is theirs to say."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from laddertron.tools.plan.step_simulator import law

BENCHMARKS = Path(__file__).resolve().parents[3] / "tools" / "benchmarks"


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.syspath_prepend(str(BENCHMARKS / "cross_node"))
    import cross_report

    return cross_report


def line(wiring: str, step_ms: float, delay_s: float = 1e-3, batch: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "model": "toy",
        "delay_s": delay_s,
        "aimed": None,
        "batch": batch,
        "wiring": wiring,
        "step_s": step_ms * 1e-3,
        "prompt": 128,
        "all_reduce_s": 1e-3,
        "sub_blocks": 32,
        "sub_blocks_s": [1e-3, 1e-3],
        "run": 1,
        "switch_share": 0.05,
        "other_threads_share": 0.004,
        **more,
    }


def steps(standard: float, ladder: float, silent: float, **more: Any) -> list[dict[str, Any]]:
    times = {"standard": standard, "parallel": (standard + silent) / 2, "ladder": ladder, "no-communication": silent}
    times |= {"carried": silent, "delay-2": ladder}
    return [line(wiring, ms, **more) for wiring, ms in times.items()]


def all_reduce(nodes: int, per_node: int, lane: str, ms: float, nbytes: int = 16384) -> dict[str, Any]:
    return {
        "nodes": nodes,
        "per_node": per_node,
        "delay_s": 1e-3,
        "lane": lane,
        "bytes": nbytes,
        "median_s": ms * 1e-3,
        "p90_s": ms * 1.1e-3,
        "calls": 100,
    }


def results() -> dict[str, Any]:
    """A run in which everything is as it should be: c = 1 ms and L = 1 ms, of which ladder hides nine tenths."""
    reduce = [
        all_reduce(*shape, lane, ms)
        for shape, base in (((2, 1), 1.1), ((2, 2), 1.2), ((4, 1), 1.5))
        for lane, ms in (("native", base), ("gloo", 5.0), ("openmpi", 1.3))
    ]
    rest = steps(32.1, 32.0, 32.0, delay_s=0.0)
    parts = {"reduce": reduce, "wirings": rest + steps(64.0, 35.2, 32.0)}
    return {name: {"load_before": 0.1, "lines": lines} for name, lines in parts.items()}


def test_bars_are_met_and_missed(report: Any) -> None:
    """A good run meets all; spoilt ones miss the bar that was spoilt, and say with what figure."""
    good = results()
    assert all(row.startswith("met") for row in report.bars(good)), report.bars(good)
    assert len(report.bars(good)) >= 7
    slow = results()
    slow["reduce"]["lines"][0]["median_s"] = 1.6e-3
    assert any(row.startswith("MISSED 16 KB over 2 x 1: 1.60 ms") for row in report.bars(slow))
    exposed = results()
    exposed["wirings"]["lines"] = steps(64.0, 45.0, 32.0)
    missed = [row for row in report.bars(exposed) if row.startswith("MISSED")]
    assert missed == [
        "MISSED ladder 1 ms, batch 1: 0.73 of the law, at least 0.85",
        "MISSED ladder 1 ms, batch 1: 1.42x, at least 1.5x",
    ]
    large = results()
    large["reduce"]["lines"] += [all_reduce(4, 1, "native", 30.0, 8 << 20), all_reduce(4, 1, "gloo", 40.0, 8 << 20)]
    assert "met    8 MB over 4 x 1 at 1 ms: 0.75 of gloo's time, at most 1" in report.bars(large)
    assert "| 4 x 1, 1 ms | 8 MB | 30.0 | 40.0 | 1.33 |" in report.prompt_table(large["reduce"]["lines"])
    large["reduce"]["lines"][-2]["median_s"] = 41e-3
    assert any(row.startswith("MISSED 8 MB over 4 x 1") for row in report.bars(large))


def test_drafts_are_compared_turn_by_turn(report: Any) -> None:
    """`auto` over the better of on and off in each turn, missed where no turn reaches 0.9; of the law is what all
    drafts gain over as many wrong ones, by their tokens a round."""

    def runs(*rates: float, rounds: float = 1.0, rows: float = 1.0) -> list[dict[str, float]]:
        return [{"rate": rate, "rounds": rounds, "rows": rows, "accepted": 0.6} for rate in rates]

    cell = {"layout": "tp 2", "delay_s": 1e-3, "batch": 1, "accepted": 0.0}
    lines = [
        cell | {"off": runs(30, 30), "on": runs(20, 20, rows=9.0), "auto": runs(26, 24), "no-communication": runs(90)},
        cell | {
            "accepted": 0.7, "off": runs(30, 30), "on": runs(54, 54, rounds=1 / 3, rows=3.0),
            "auto": runs(50, 46, rounds=0.5, rows=2.0),
        },
    ]  # fmt: skip
    wrong, right = report.drafts_table(lines)[2:]
    assert wrong == "| tp 2, 1, 0% | 26.00 | 1.00 | 25; 0.83; 0.83 (0.80 to 0.87), missed | - | 0.28 to 0.28 |"
    assert right == "| tp 2, 1, 70% | 13.00 | 2.00 | 48; 1.60; 0.89 (0.85 to 0.93) | 0.90 to 0.90 | 0.53 to 0.53 |"
    twice = report.drafts_table([*lines, *({**line, "delay_s": 2e-3} for line in lines)])
    assert twice[0].endswith(" | 1 ms | 2 ms | of the law | over *silent* |")
    assert len(twice) == 4
    heads = {"form": "GLM-4.5", "layout": "pp 2", "delay_s": 1e-3, "off": runs(20, 20), "mtp": runs(30, 32, rows=1.5)}
    assert report.mtp_table([heads])[2].endswith(" | 31.0 (30.0 to 32.0) | 1.55 (1.50 to 1.60) | 1.50 |")


def test_the_pages_are_renewed_in_their_places(report: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice over, the words around the tables and a table that was not measured stay as they were, and the picture is
    an SVG of every point."""
    monkeypatch.setattr(report, "DOCS", tmp_path)
    page, other = tmp_path / "cross_node.md", tmp_path / "layouts.md"
    blocks = "".join(
        f"before {name}\n<!-- measured by cross_node.py: {name}: begin -->\nstale {name}\n<!-- end -->\nafter {name}\n"
        for name in ("reduce", "law", "drafts", "bars")
    )
    page.write_text(blocks)
    other.write_text("<!-- measured by cross_node.py: layouts: begin -->\nas it was\n<!-- end -->\n")
    report.write_docs(results())
    once = page.read_text()
    report.write_docs(results())
    assert page.read_text() == once
    assert [line for line in once.splitlines() if line.startswith("stale")] == ["stale drafts"]
    assert [line for line in once.splitlines() if line.startswith(("before", "after"))] == [
        line for line in blocks.splitlines() if line.startswith(("before", "after"))
    ]
    assert "| 2 x 1 | 1.10 (1.21) | 5.00 (5.50) | 1.30 (1.43) |" in once
    assert "bars are met" in once
    assert "as it was" in other.read_text()
    drawn = ET.fromstring((tmp_path / "pictures" / "law.svg").read_text())
    (measured,) = [e for e in drawn.iter("{http://www.w3.org/2000/svg}g") if str(e.get("id")).startswith("batch-")]
    assert len(list(measured.iter("{http://www.w3.org/2000/svg}use"))) == 2


def test_every_table_of_the_pages_is_one_that_is_made(report: Any) -> None:
    """The markers in docs and TABLES are of the same names, and each part that is measured has a table."""
    import cross_node

    pages = [(report.DOCS / name).read_text() for name in ("cross_node.md", "layouts.md")]
    marked = re.findall(r"cross_node\.py: ([\w-]+): begin", "".join(pages))
    assert marked == [
        "reduce", "prompts", "wirings", "law", "delay-2", "bars", "layouts", "drafts", "drafts-staged",
    ]  # fmt: skip
    assert set(marked) <= {*report.TABLES, "bars"}
    assert {part for part, _ in report.TABLES.values()} == set(cross_node.RUNS)


def test_published_points_lie_below_the_law(report: Any) -> None:
    points = [point for row in report.paper_points().values() for point in row]
    assert len(points) == 12
    assert all(speed < law(1.0, ratio) for ratio, speed in points)
    assert min(r for r, _ in report.paper_points()["405B, TP16 over 2 nodes"]) == pytest.approx(0.51, abs=0.01)


def layout_rows(ladder: float, pipeline: float, aimed: float, batch: int = 1) -> list[dict[str, Any]]:
    """Three runs of a point whose median is what is given; no communication takes 100 tokens/s."""
    rates = {"standard": 100 / (1 + aimed), "split": 20.0, "pipeline": pipeline, "ladder": ladder, "delay-2": 90.0}
    rates |= {"lanes": 95.0, "no-communication": 100.0}
    runs = (0.5, 1.0, 1.2)
    return [
        {"run": run, "batch": batch, "aimed": aimed, "delay_s": 0.0, "rates": {k: v * by for k, v in rates.items()}}
        for run, by in enumerate(runs)
    ]


def test_layouts_have_their_medians_crossing_and_figure(report: Any) -> None:
    """`report` sets the path. Ladder leads at an L/c of 0.5 and 1 and trails at 2: the lines cross between."""
    import cross_layouts

    rows = [
        *(row for batch in (1, 8) for row in layout_rows(90, 60, 0.5, batch)),
        *(row for batch in (1, 8) for row in layout_rows(75, 60, 1.0, batch)),
        *(row for batch in (1, 8) for row in layout_rows(45, 60, 2.0, batch)),
        *layout_rows(80, 90, 0.5, 32),
    ]
    medians = cross_layouts.points(rows)
    assert [(p["batch"], p["ratio"]) for p in medians[:3]] == [(1, 0.5), (1, 1.0), (1, 2.0)]
    assert medians[1]["rates"]["ladder"] == 75
    lines = cross_layouts.layouts_table(rows)
    assert "| 1, 2.00 | 33 | 20 | 60 | 45 | 90 | 95 | 100 | pipeline |" in lines
    assert lines[-1].endswith("up to an L/c of: 1.5 (batch 1), 1.5 (batch 8), 0 (batch 32).")
    drawn = ET.fromstring(cross_layouts.layouts_picture(medians))
    assert drawn.tag.endswith("svg")
    assert cross_layouts.layouts_picture(medians) == cross_layouts.layouts_picture(medians), "the same bytes each time"


def test_each_layout_is_a_deployment_that_check_accepts(report: Any, tmp_path: Path) -> None:
    """Stock ones of stock weights; all with dummy ones."""
    import cross_layouts
    from laddertron.engine.config.rules import broken_rules
    from laddertron.engine.step.share import model_config
    from laddertron.tools.plan.advice import STOCK
    from two_nodes import LANES, SHAPE, Site

    for name, fields in (("llama", SHAPE), ("lanes", LANES)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(fields))
    named = {}
    for kind in cross_layouts.KINDS:
        d = cross_layouts.deployment(Site(tmp_path, "agent"), kind)
        assert not list(broken_rules(d)), kind
        config = model_config(d.model, d.parallel)[0]
        assert (d.parallel.world.size, d.dummy_seed, config.num_layers) == (2, 0, 12)
        named[kind] = config.wiring.name
    assert named == {
        **dict.fromkeys(STOCK, "standard"),
        **{kind: kind for kind in ("ladder", "delay-2", "lanes", "no-communication")},
    }


def test_longcat_s_layouts_are_deployments_that_check_accepts(report: Any, tmp_path: Path) -> None:
    """293M; its experts spread, its dense path inside each node; and the bar is of the median share."""
    import trained
    from laddertron.engine.config.rules import broken_rules
    from laddertron.engine.step.share import model_config
    from two_nodes import Site

    (tmp_path / "longcat").mkdir()
    (tmp_path / "longcat" / "config.json").write_text(json.dumps(trained.LONGCAT))
    for kind, words in trained.LAYOUTS.items():
        d = Site(tmp_path, "agent").deployment("longcat", parallel=words)
        assert not list(broken_rules(d)), kind
        config = model_config(d.model, d.parallel)[0]
        assert (d.parallel.world.size, config.wiring.name, config.num_parameters // 10**6) == (2, "shortcut", 293)
    runs = [{"spread": 9.0, "carried": 10.0, "flat": 5.0, "pp 2": 7.0}, *[{**dict.fromkeys(trained.LAYOUTS, 1.0)}] * 2]
    (row,) = trained.longcat_table([{"batch": 1, "rates": rates} for rates in runs])[2:]
    assert row.endswith("| 1.00 (0.90 to 1.00) | met |")
