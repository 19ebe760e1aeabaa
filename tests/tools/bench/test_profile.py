"""Spans of a step: named by layer and sub-block, taken off without a trace, drawn as bars."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from laddertron.engine.job import RankHeartbeat
from laddertron.engine.metrics.ranks import Windows
from laddertron.launchers.cli.__main__ import group
from laddertron.launchers.rank.rank_status import collective_rows
from laddertron.models.config.model_config import Wiring
from laddertron.models.residual import flow, interleave, plan
from laddertron.tools.bench.bench_rank import communication
from laddertron.tools.bench.spans import Span, SpanRecorder, chrome_trace, in_flight, watch
from laddertron.tools.bench.timeline import TimelineError, read_trace, timeline
from laddertron.topology.comm.ledger import Entry, Record, overlap_ratio

STAGE = SimpleNamespace(first_layer=0)


class Number(float):
    nbytes = 8

    def __add__(self, other: float) -> Number:
        return Number(float(self) + other)

    def __truediv__(self, other: float) -> Number:
        return Number(float(self) / other)


class Pending:
    def __init__(self, x: Number) -> None:
        self._x = x

    def wait(self) -> Number:
        return Number(self._x * 2)


class Model:
    """Two sub-blocks on plain numbers; a group of two whose other rank says the same."""

    def __init__(self) -> None:
        self.all_reduce: Any = self
        self.boundary: Any = None
        self.stage = STAGE

    def receive(self, shape: tuple[int, int], dtype: Any, count: int) -> list[Pending]:
        return [Pending(Number(5.0))] * count

    def send(self, x: Number) -> None: ...

    def start(self, x: Number, *_: object) -> Pending:
        return Pending(x)

    def attention(self, layer: int, residual: Number) -> Number:
        return Number(residual * 0.5 + layer)

    def mlp(self, layer: int, residual: Number) -> Number:
        return Number(residual * 0.25 - layer)

    def shortcut(self, layer: int, residual: Number) -> Number:
        raise AssertionError("no layer has experts beside its MLP")

    def attention_and_mlp(self, layer: int, residual: Number) -> Number:
        return self.attention(layer, residual) + self.mlp(layer, residual)


def forward(model: Any, kind: Any = "ladder", layers: int = 3) -> Number:
    way = flow(Number(1.0), plan(Wiring((kind,) * layers)), model, {"group": model.all_reduce}, 2)
    ends: list[tuple[Number, Any]] = interleave([way])
    return ends[0][0]


@pytest.mark.parametrize("kind", ["standard", "ladder", "parallel"])
def test_a_watched_model_computes_the_same_and_names_everything(kind: str) -> None:
    """One step under watch: every sub-block, flight and wait with its name, in an order that the wiring allows; the
    numbers are the same."""
    model, recorder = Model(), SpanRecorder()
    plain = forward(model, kind)
    watch(model, recorder)
    assert forward(model, kind) == plain
    assert recorder.spans == []
    recorder.begin_step(0)
    assert forward(model, kind) == plain
    recorder.end_step(time.monotonic(), [])
    blocks = ["attention and mlp"] if kind == "parallel" else ["attention", "mlp"]
    names = [f"layer {layer} {block}" for layer in range(3) for block in blocks]
    spans = {category: [s.name for s in recorder.spans if s.category == category] for category in ("compute", "wait")}
    # the parallel wiring's one sub-block is seen from inside as well
    inside = [name for layer in range(3) for name in (f"layer {layer} attention", f"layer {layer} mlp")]
    assert [name for name in spans["compute"] if name in names] == names
    assert [name for name in spans["compute"] if name not in names] == (inside if kind == "parallel" else [])
    assert spans["wait"] == [f"wait for {name}" for name in names]
    flights = [s for s in recorder.spans if s.category == "all_reduce"]
    assert [s.name for s in flights] == [f"all-reduce, {name}" for name in names]
    assert all(s.end >= s.start and s.bytes == 8 for s in flights)


def test_a_watched_stage_counts_the_model_s_layers_and_says_what_it_waits_for() -> None:
    model, recorder = Model(), SpanRecorder()
    model.stage, model.boundary = SimpleNamespace(first_layer=7), model
    watch(model, recorder)
    recorder.begin_step(0)
    (rows,) = model.boundary.receive((1, 1), None, 1)
    assert rows.wait() == 10.0
    model.attention(1, rows.wait())
    assert [span.name for span in recorder.spans] == [*["wait for hidden rows"] * 2, "layer 8 attention"]


def test_flights_end_when_the_backend_saw_them() -> None:
    """The ledger's last records are the step's; an emulated link's are taken before those of what carries it; records
    of other sizes belong to somebody else, and the waits' ends stay."""
    flights = [Span("all-reduce, a", "all_reduce", t, t + 5.0, 0, bytes=8) for t in (10.0, 11.0)]
    link = [Record(i, "all_reduce", "emulated", 8, 9.0 + i, 0.5, 0.1) for i in range(3)]
    carried = [Record(i, "all_reduce", "exchange", 8, 9.0 + i, 0.001, 0.0) for i in range(3)]
    gather = [Record(9, "gather", "exchange", 8, 12.0, 0.1, 0.1)]
    assert [(s.start, s.end) for s in in_flight(flights, [*carried, *link, *gather])] == [(10.0, 10.5), (11.0, 11.5)]
    assert [s.end for s in in_flight(flights, carried)] == [10.001, 11.001]
    assert in_flight(flights, []) == flights
    assert in_flight(flights, [Record(0, "all_reduce", "nccl", 16, 0.0, 1.0, 0.0)] * 2) == flights
    assert in_flight([], link) == []


def spans(step: int = 0, at: float = 5.0, stretch: float = 1.0) -> list[Span]:
    """A step of two sub-blocks whose all-reduces overlap for a while; 30 of 50 ms of travel are hidden."""

    def span(name: str, category: Any, start: float, end: float, layer: int, block: str) -> Span:
        return Span(name, category, at + start * stretch, at + end * stretch, step, layer, block, 8)

    return [
        span(f"step {step}", "step", 0.0, 0.1, -1, ""),
        span("layer 0 attention", "compute", 0.0, 0.02, 0, "attention"),
        span("all-reduce, layer 0 attention", "all_reduce", 0.02, 0.045, 0, "attention"),
        span("layer 0 mlp", "compute", 0.02, 0.04, 0, "mlp"),
        span("all-reduce, layer 0 mlp", "all_reduce", 0.04, 0.065, 0, "mlp"),
        span("wait for layer 0 attention", "wait", 0.04, 0.045, 0, "attention"),
        span("layer 1 attention", "compute", 0.045, 0.05, 1, "attention"),
        span("wait for layer 0 mlp", "wait", 0.05, 0.065, 0, "mlp"),
    ]


def trace(**about: Any) -> dict[str, Any]:
    first = [s for step, stretch in enumerate((1.0, 3.0, 2.0)) for s in spans(step, 5.0 + step, stretch)]
    return chrome_trace({0: ("n0", 0.0, first), 1: ("n1", -100.0, spans(0, 105.0))}, about)


def test_all_ranks_stand_on_one_clock_in_tracks_of_their_own() -> None:
    """Rank 1's clock is 100 s ahead: its step begins where rank 0's does. What overlaps is in two tracks."""
    events = [e for e in trace()["traceEvents"] if e["ph"] == "X"]
    begins = {e["pid"]: e["ts"] for e in events if e["name"] == "step 0"}
    assert begins[0] == begins[1] == 0.0
    flights = {e["name"]: e["tid"] for e in events if e["cat"] == "all_reduce" and e["pid"] == 1}
    assert set(flights.values()) == {10, 11}
    for pid, tid in {(e["pid"], e["tid"]) for e in events if e["cat"] == "all_reduce"}:
        track = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if (e["pid"], e["tid"]) == (pid, tid))
        assert all(end <= start + 1e-6 for (_, end), (start, _) in pairwise(track))
    named = {(e["pid"], e["args"]["name"]) for e in trace()["traceEvents"] if e["ph"] == "M"}
    assert {(1, "rank 1 on n1"), (0, "compute and waits"), (0, "all-reduce in flight (1)")} <= named


def test_metrics_bench_and_timeline_have_one_overlap_ratio() -> None:
    """One step's all-reduces as the heartbeat, `bench` and `timeline` see them, on an emulated link whose carrier does
    not count; without all-reduces there is no ratio, rather than 0 % or 100 %."""
    flight, waited = 0.05, 0.02
    entries = [
        Entry("all_reduce", "exchange", "node", 2, 64, 0.04, 0.04),
        Entry("all_reduce", "emulated", "emulated link 1 ms", 2, 64, flight, waited),
        Entry("gather", "exchange", "node", 1, 8, 0.3, 0.3),
    ]
    windows = Windows()
    for at, listed in ((10.0, []), (11.0, entries)):
        rows = tuple(collective_rows(listed))
        windows.add(0, RankHeartbeat(0, "n0", 1, 1, at, rows))
    (known,) = (ratio for (_, op, _), ratio in windows.overlap_ratios(11.0).items() if op == "all_reduce")
    drawn = timeline(trace()).hidden
    assert overlap_ratio(*communication(entries)) == pytest.approx(known) == pytest.approx(drawn) == pytest.approx(0.6)

    alone = [Entry("gather", "exchange", "node", 1, 8, 0.3, 0.3)]
    silent = trace()
    silent["traceEvents"] = [e for e in silent["traceEvents"] if e.get("cat") not in ("all_reduce", "wait")]
    assert timeline(silent).hidden is overlap_ratio(*communication(alone)) is None


def test_the_timeline_is_of_the_median_step() -> None:
    """Steps of 100, 300 and 200 ms: the third is drawn, from 0; the shortest and any other on demand."""
    one = timeline(trace(wiring="ladder", ranks=2, batch=4, link="net"))
    assert one.step_s == pytest.approx(0.2)
    assert one.title == "ladder — 2 ranks, batch 4, net"
    assert one.hidden == pytest.approx(1 - 0.02 / 0.05)
    assert min(bar.start for bar in one.bars) == 0.0
    assert one.length == pytest.approx(0.2)  # the whole step
    drawn = sorted((b.start, b.start + b.length) for b in one.bars if b.kind != "flight")
    assert drawn[0][0] == 0.0
    assert all(end == pytest.approx(start) for (_, end), (start, _) in pairwise(drawn))
    assert drawn[-1][1] == pytest.approx(one.step_s)
    assert max(b.start + b.length for b in timeline(trace(), layers=range(2)).bars) < 0.2
    assert [bar.kind for bar in one.bars].count("flight") == 2
    assert {bar.track for bar in one.bars if bar.kind == "flight"} == {0, 1}
    assert timeline(trace(), step="shortest").step_s == pytest.approx(0.1)
    assert timeline(trace(), step=1).step_s == pytest.approx(0.3)
    assert {bar.layer for bar in timeline(trace(), layers=range(1, 2)).bars} == {1}


def test_what_is_not_in_the_trace_is_said(tmp_path: Path) -> None:
    with pytest.raises(TimelineError, match=r"ranks \[0, 1\]"):
        timeline(trace(), rank=7)
    with pytest.raises(TimelineError, match="steps 0 to 2"):
        timeline(trace(), step=9)
    with pytest.raises(TimelineError, match="nothing of layers"):
        timeline(trace(), layers=range(5, 6))
    for text in ("", "[]", '{"traceEvents": 3}', '{"traceEvents": [{}]}'):
        (tmp_path / "t.json").write_text(text)
        with pytest.raises(TimelineError):
            read_trace(tmp_path / "t.json")


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_the_picture(tmp_path: Path, suffix: str) -> None:
    """Two traces in one picture. The SVG has both titles as they are."""
    pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
    for name in ("standard", "ladder"):
        (tmp_path / f"{name}.json").write_text(json.dumps(trace(wiring=name)))
    out = tmp_path / f"picture.{suffix}"
    files = [str(tmp_path / f"{name}.json") for name in ("standard", "ladder")]
    done = CliRunner().invoke(group, ["timeline", *files, "-o", str(out), "--layers", "0-1"], standalone_mode=False)
    assert done.exception is None
    assert out.stat().st_size > 4000
    bad = CliRunner().invoke(group, ["timeline", files[0], "-o", str(out), "--layers", "3-1"])
    assert bad.exit_code == 2
    gone = CliRunner().invoke(group, ["timeline", str(tmp_path / "no.json"), "-o", str(out)])
    assert "no trace of" in gone.output


@pytest.mark.slow
def test_a_real_profile_of_two_ranks(tmp_path: Path) -> None:
    """The demo model over its emulated link, under mpirun: both ranks, every layer, flights that last about 1 ms."""
    config = Path(__file__).resolve().parents[3] / "configs/demo.yaml"
    out = tmp_path / "trace.json"
    done = CliRunner().invoke(group, ["profile", str(config), "--steps", "3", "-o", str(out)], standalone_mode=False)
    assert done.exception is None, done.output
    found = read_trace(out)
    assert found["otherData"]["wiring"] == "ladder"
    for rank in (0, 1):
        for step in range(3):
            one = timeline(found, rank, step)
            flights = [bar for bar in one.bars if bar.kind == "flight"]
            assert {bar.layer for bar in flights} == {-1, *range(found["otherData"]["layers"])}
            assert min(bar.length for bar in flights) >= 0.0009


@pytest.mark.slow
def test_a_real_profile_of_two_stages(tmp_path: Path) -> None:
    """Each stage its own layers, by the model's numbers; the second one waits for the first one's rows."""
    config = Path(__file__).resolve().parents[3] / "configs/demo.yaml"
    out = tmp_path / "trace.json"
    sets = ["--set", "parallel.tensor_parallel_size=1", "--set", "parallel.pipeline_parallel_size=2"]
    words = ["profile", str(config), *sets, "--steps", "3", "-o", str(out)]
    done = CliRunner().invoke(group, words, standalone_mode=False)
    assert done.exception is None, done.output
    found = read_trace(out)
    spans = [event for event in found["traceEvents"] if event["ph"] == "X"]
    layers = [{e["args"]["layer"] for e in spans if e["pid"] == rank} - {-1} for rank in (0, 1)]
    assert sorted(layers[0] | layers[1]) == list(range(found["otherData"]["layers"]))
    assert max(layers[0]) < min(layers[1])
    assert {e["pid"] for e in spans if e["name"] == "wait for hidden rows"} == {1}
