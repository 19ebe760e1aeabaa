"""The law beside what cross_node.py measures: its prices, its predictions against hand numbers, table and bars."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[3] / "tools" / "benchmarks"
sys.path[:0] = [str(BENCHMARKS), str(BENCHMARKS / "cross_node"), str(BENCHMARKS.parents[1] / "tests")]

import cross_node  # noqa: E402
import cross_wirings  # noqa: E402
import law_rank  # noqa: E402
from cross_wirings import Prices, lanes_of_the_law, of_the_law, predicted_step, prices  # noqa: E402
from laddertron.engine.batch import Batch  # noqa: E402
from laddertron.engine.sampling.drafts import ComputedStep  # noqa: E402
from laddertron.tools.plan.step_simulator import law  # noqa: E402
from laddertron.topology.comm.collectives import Done  # noqa: E402
from laddertron.topology.comm.ledger import Record  # noqa: E402

MS = 1e-3


def case(delay_ms: float = 1.0, run: int = 1, aimed: float | None = None, **steps_ms: float) -> list[dict[str, Any]]:
    """Lines of one run: two layers, attention 1 ms and MLP 2 ms with 0.2 ms of carrying each, L = 2.2 ms and 1.4 ms
    outside; so 8.2 ms with everything carried and 7.4 ms silent. Others as given."""
    times = {"standard": 17.0, "parallel": 13.0, "ladder": 12.0, "carried": 8.2, "no-communication": 7.4}
    times |= {name.replace("_", "-"): value for name, value in steps_ms.items()}
    return [
        {
            "model": "toy",
            "run": run,
            "delay_s": delay_ms * MS,
            "aimed": aimed,
            "batch": 1,
            "wiring": wiring,
            "step_s": ms * MS,
            "all_reduce_s": 2.2 * MS,
            "sub_blocks": 4,
            "sub_blocks_s": [1.2 * MS, 2.2 * MS],
            "switch_share": 0.05,
            "other_threads_share": 0.004,
        }
        for wiring, ms in times.items()
    ]


def only(lines: list[dict[str, Any]]) -> dict[str, Any]:
    (cell,) = cross_wirings.cells(lines)
    return dict(cell.runs[0])


def test_the_law_has_its_values_and_its_ceiling() -> None:
    """1.5 and 1.66 at the two ratios of a 405B model, 2 at L = c and for ever after."""
    assert law(1.0, 0.0) == 1.0
    assert law(1.0, 0.5) == pytest.approx(1.5)
    assert law(1.0, 0.66) == pytest.approx(1.66)
    assert [law(1.0, r) for r in (1.0, 1.5, 100.0)] == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("ratio", [0.0, 0.2, 0.66, 1.0, 1.7, 3.0])
def test_of_equal_sub_blocks_and_nothing_else_the_prediction_is_the_law(ratio: float) -> None:
    """Hundreds of layers, so that the last all-reduces weigh nothing."""
    p = Prices(1.0, 1.0, ratio, 0.0, 0.0, 400)
    assert predicted_step(p, "standard") == pytest.approx(800 * (1 + ratio))
    assert predicted_step(p, "standard") / predicted_step(p, "ladder") == pytest.approx(law(1.0, ratio), rel=0.01)


def test_a_step_by_hand() -> None:
    """Attention 1, MLP 2, L 2, two layers, 0.5 outside. Ladder: attention 0 to 1, MLP 1 to 3, attention (the first sum
    came at 3) 3 to 4, MLP (the other MLP's came at 5) 5 to 7, the last sum at 9. Standard waits for every sum."""
    p = Prices(1.0, 2.0, 2.0, 0.0, 0.5, 2)
    assert predicted_step(p, "ladder") == pytest.approx(9.5)
    assert predicted_step(p, "standard") == pytest.approx(4 * 2 + 6 + 0.5)


def test_what_is_carried_is_paid_once() -> None:
    """Of an L of 2, 0.5 are the core's: they lengthen the four sub-blocks, and 1.5 travel. Attention 0 to 1.5, MLP to
    4, attention (a sum at 3) to 5.5, MLP (a sum at 5.5) to 8, the last sum at 9.5. An L that is all carrying does not
    travel."""
    p = Prices(1.0, 2.0, 2.0, 0.5, 0.0, 2)
    assert predicted_step(p, "ladder") == pytest.approx(9.5)
    assert predicted_step(p, "standard") == pytest.approx(6 + 4 * 2)
    assert predicted_step(Prices(1.0, 2.0, 0.3, 0.5, 0.0, 2), "ladder") == pytest.approx(8.0)


def test_prices_are_the_run_s_own() -> None:
    p = prices(only(case()))
    assert (p.attention_s, p.mlp_s, p.carrying_s) == pytest.approx((1 * MS, 2 * MS, 0.2 * MS))
    assert (p.all_reduce_s, p.outside_s, p.layers) == pytest.approx((2.2 * MS, 1.4 * MS, 2))
    assert p.compute_s == pytest.approx(1.5 * MS)
    assert p.ratio == pytest.approx(2.2 / 1.5)
    noisy = prices(only(case(no_communication=8.3)))
    assert noisy.carrying_s == 0.0, "noise makes no message's price negative"
    assert noisy.outside_s == pytest.approx(1.4 * MS)


def test_of_the_law_is_one_where_the_step_is_the_law_s() -> None:
    """Sub-blocks of 1.2 and 2.2 with carrying, 2 travel: 0 to 1.2, to 3.4, to 4.6 (a sum at 3.2), to 7.6 (a sum at
    5.4), the last sum at 9.6, and 1.4 outside."""
    assert of_the_law(only(case(ladder=11.0)), "ladder") == pytest.approx(1.0)
    assert of_the_law(only(case(ladder=22.0)), "ladder") == pytest.approx(0.5)
    assert of_the_law(only(case(standard=6 + 4 * 2.2 + 1.4)), "standard") == pytest.approx(1.0)


def test_lanes_of_the_law_by_hand() -> None:
    """Two layers with a delay of 1; L = 2.2, outside 1.4, nothing to carry. The first layer waits for both sums, 0 to
    1 + 2.2 and on to 7.4; the second sends nothing, to 10.4; the head's sum, to 12.6. Without delays to hide behind a
    step twice as long is half of the law. Sub-blocks are as much longer as the silent step is."""
    steps: dict[str, Any] = {"lanes no-communication": 7.4, "lanes carried": 7.4, "lanes delay-1": 14.0}
    assert lanes_of_the_law(only(case(**steps)), 2, 1) == pytest.approx(1.0)
    assert lanes_of_the_law(only(case(**steps | {"lanes delay-1": 28.0})), 2, 1) == pytest.approx(0.5)
    longer: dict[str, Any] = {"lanes no-communication": 13.4, "lanes carried": 13.4, "lanes delay-1": 20.0}
    assert lanes_of_the_law(only(case(**longer)), 2, 1) == pytest.approx(1.0)


def test_the_table_has_the_median_run_with_its_spread() -> None:
    """Three runs; a delay that was aimed at an L/c is one cell although it differed."""
    lines = [one for run, ladder in ((1, 11.0), (2, 12.5), (3, 20.0)) for one in case(run=run, ladder=ladder)]
    lines += [one for run in (1, 2, 3) for one in case(1.4 + run / 10, run, 1.0, ladder=11.0)]
    rows = cross_wirings.speeds_table(lines)
    assert any("medians of 3 runs" in row for row in rows)
    assert "| 1 ms, 1 | 58.8 | 76.9 | 80.0 | 122.0 | 135.1 | 1.36 (0.85 to 1.55) |" in rows
    law_row = "| 1.00 | 2.00 | 2.20 | 1.47 | 0.20 | 1.40 | 11.0 | 12.5 | 0.88 (0.55 to 1.00) | 0.95 (0.95 to 0.95) |"
    assert f"| 1 ms, 1 {law_row}" in cross_wirings.law_table(lines)
    assert any(row.startswith("| L = 1 c, 1 |") for row in rows)


def test_the_law_s_bar_is_met_and_missed() -> None:
    """By the median of the runs, not by the worst; below L/c = 0.2 there is no such bar."""
    one_bad = [one for run, ladder in ((1, 11.0), (2, 12.5), (3, 20.0)) for one in case(2.0, run, ladder=ladder)]
    assert cross_wirings.wiring_bars(one_bad) == [
        (True, "ladder 2 ms, batch 1: 0.88 (0.55 to 1.00) of the law, at least 0.85")
    ]
    two_bad = [one for run, ladder in ((1, 11.0), (2, 15.0), (3, 20.0)) for one in case(2.0, run, ladder=ladder)]
    assert [met for met, _ in cross_wirings.wiring_bars(two_bad)] == [False]
    short = [{**one, "all_reduce_s": 0.29 * MS} for one in case(2.0, ladder=99.0)]
    assert cross_wirings.wiring_bars(short) == []


def test_runs_are_added_to_those_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--repeat 2 --more` after one run: three, numbered, each there as soon as it was measured; without --more they
    are measured anew, as often as is usual."""
    monkeypatch.setitem(cross_node.RUNS, "wirings", (lambda: iter([{"wiring": "ladder"}]), 4))

    def runs(before: Any, **words: Any) -> list[list[int]]:
        args = argparse.Namespace(**{"repeat": None, "more": False, **words})
        return [[line["run"] for line in part["lines"]] for part in cross_node.measured("wirings", args, before)]

    before = {"load_before": 0.1, "lines": [{"wiring": "ladder", "run": 1}]}
    assert runs(None, repeat=1, more=True) == [[1]]
    assert runs(json.loads(json.dumps(before)), repeat=2, more=True) == [[1, 2], [1, 2, 3]]
    assert runs(before) == [[1], [1, 2], [1, 2, 3], [1, 2, 3, 4]]


def test_a_report_without_results_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_node, "RESULTS", tmp_path / "none.json")
    monkeypatch.setattr("sys.argv", ["cross_node.py", "--report", "--write"])
    with pytest.raises(SystemExit, match=r"none\.json: no results"):
        cross_node.main()


def messages(wait: float) -> Iterator[Record]:
    """Two steps of six sub-blocks and a gather: attention takes 1 s, MLP 3 s, each all-reduce 0.5 s, of which the core
    waits `wait`."""
    at, seq = 0.0, 0
    for _ in range(2):
        for kind in range(6):
            at += 3.0 if kind % 2 else 1.0
            yield Record(seq, "all_reduce", "exchange", 4, at, 0.5, wait)
            at, seq = at + wait, seq + 1
        yield Record(seq, "gather", "exchange", 4, at, 0.1, 0.1)
        at, seq = at + 50.0, seq + 1


def test_sub_blocks_are_read_from_the_ledger() -> None:
    """Whether their messages are waited for or not."""
    assert law_rank.sub_blocks(list(messages(0.5)), awaited=True) == pytest.approx((1.0, 3.0))
    assert law_rank.sub_blocks(list(messages(0.0)), awaited=False) == pytest.approx((1.0, 3.0))
    assert law_rank.sub_blocks(list(messages(0.5))[3:], awaited=True) == pytest.approx((1.0, 3.0)), "a whole step alone"
    assert law_rank.sub_blocks(list(messages(0.0))[:2], awaited=True) == (0.0, 0.0)


def test_nobody_waits_for_what_is_carried() -> None:
    """Each sum is taken six starts later, in order, and the last six with the next step's."""
    log: list[str] = []

    class Travels:
        def __init__(self, number: int) -> None:
            self.number = number

        def wait(self) -> None:
            log.append(f"wait {self.number}")

    class Wire:
        started = 0

        def start(self, *_: object) -> Travels:
            self.started += 1
            log.append(f"start {self.started}")
            return Travels(self.started)

    carried = law_rank.Unawaited(Wire())  # type: ignore[arg-type]
    tensors = [torch.ones(1) for _ in range(8)]
    assert all(carried.start(x).wait() is x for x in tensors)
    assert log == [*(f"start {n}" for n in range(1, 7)), "wait 1", "start 7", "wait 2", "start 8"]


def test_drafts_are_the_answers_of_freed_slots() -> None:
    """A prompt that was answered before has its answer as drafts, right or wrong as its first id says; another one has
    none."""
    runner = SimpleNamespace(
        tokens=np.arange(20, dtype=np.int32).reshape(2, 10),
        length=[6, 0],
        apply_changes=lambda batch: None,
        proposer=SimpleNamespace(),
    )

    def look_up(ids: list[int], most: int) -> Any:
        tokens = np.array([ids], np.int32)
        unused: Any = None
        return runner.proposer.propose(ComputedStep((), (), {0: most}, tokens, np.array([len(ids)]), unused))[0]

    for right, drafts in (((1.0, 0.0), [3, 4, 5]), ((0.0, 1.0), [4, 5, 6])):
        law_rank.give_drafts(runner, 2, right)
        assert look_up([0, 1, 2], 8) == []
        runner.apply_changes(Batch(step=1, released=(0,)))
        assert look_up([0, 1, 2], 8) == drafts
        assert look_up([0, 1, 2], 1) == drafts[:1]
        assert look_up([0, 1, 9], 8) == look_up([10, 11], 8) == []


def test_rank_0_has_all_ranks_start_all_reduces() -> None:
    """A frame of eight bytes is an order, everything else a plan."""
    frames: list[bytes] = []

    class Reduce:
        sizes: ClassVar[list[int]] = []

        def start(self, x: torch.Tensor, *_: object) -> Any:
            self.sizes.append(x.numel())
            return Done(x)

    channel = SimpleNamespace(send=frames.append, receive=lambda timeout_s: frames.pop(0), close=lambda: None)
    plans = law_rank.Plans(SimpleNamespace(plans=channel, all_reduce=Reduce()))  # type: ignore[arg-type]
    assert len(plans.all_reduces(64, 2)) == 2
    plans.send(b"a plan of a step")
    assert plans.receive() == b"a plan of a step"
    assert Reduce.sizes == [16] * 4
