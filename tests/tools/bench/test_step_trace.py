"""Spans of a step: named by layer and sub-block, taken off without a trace, written for Perfetto."""

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
from laddertron.models.residual import flow, interleave, plan_sub_blocks
from laddertron.tools.bench import trace_rank
from laddertron.tools.bench.bench_rank import communication
from laddertron.tools.bench.spans import RankTrace, Span, SpanRecorder, chrome_trace, device_events, in_flight, watch
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
    way = flow(Number(1.0), plan_sub_blocks(Wiring((kind,) * layers)), model, {"group": model.all_reduce}, 2)
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


def trace() -> dict[str, Any]:
    first = [s for step, stretch in enumerate((1.0, 3.0, 2.0)) for s in spans(step, 5.0 + step, stretch)]
    return chrome_trace({0: RankTrace("n0", 0.0, first), 1: RankTrace("n1", -100.0, spans(0, 105.0))})


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


def test_metrics_and_bench_have_one_overlap_ratio() -> None:
    """One step's all-reduces as the heartbeat and `bench` see them, on an emulated link whose carrier does not count;
    without all-reduces there is no ratio, rather than 0 % or 100 %."""
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
    assert overlap_ratio(*communication(entries)) == pytest.approx(known) == pytest.approx(0.6)

    alone = [Entry("gather", "exchange", "node", 1, 8, 0.3, 0.3)]
    assert overlap_ratio(*communication(alone)) is None


def test_a_gpu_s_kernels_come_on_the_clock_of_the_spans() -> None:
    """torch's trace has another zero; the ranges of the steps are in both. Operators of the host are left out."""
    events = [
        {"ph": "X", "name": "step 0", "cat": "user_annotation", "ts": 7000.0, "dur": 1e5, "tid": 9, "pid": 4},
        {"ph": "X", "name": "gemm", "cat": "kernel", "ts": 7020.0, "dur": 5.0, "tid": 31, "pid": 0, "args": {}},
        {"ph": "X", "name": "aten::mm", "cat": "cpu_op", "ts": 7010.0, "dur": 50.0, "tid": 9, "pid": 4},
        {"ph": "M", "name": "process_name", "pid": 4, "args": {}},
    ]
    kernels = device_events({"traceEvents": events})
    assert [event["name"] for event in kernels] == ["step 0", "gemm"]
    merged = chrome_trace({0: RankTrace("n0", 0.0, spans(0, 5.0)), 1: RankTrace("n1", -99.0, spans(0, 105.0), kernels)})
    (gemm,) = (event for event in merged["traceEvents"] if event["name"] == "gemm")
    assert (gemm["pid"], gemm["ts"], gemm["dur"]) == (1, pytest.approx(1e6 + 20.0), 5.0)
    assert "GPU stream 31" in {e["args"]["name"] for e in merged["traceEvents"] if e["ph"] == "M"}
    assert "gemm" not in json.dumps(chrome_trace({0: RankTrace("n0", 0.0, [], kernels)}))


def test_torch_s_profiler_has_the_ranges_of_the_steps() -> None:
    kernels = trace_rank.Kernels()
    with kernels, kernels.annotate("step 3"), kernels.annotate("layer 0 mlp"):
        pass
    assert [event["name"] for event in kernels.events] == ["step 3"]


def record(path: Path, *words: str) -> dict[str, Any]:
    """The trace of the demo model under mpirun."""
    config = Path(__file__).resolve().parents[3] / "configs/demo.yaml"
    sizes = ["--prompt", "8", "--generate", "2", "--repeats", "1"]
    command = ["bench", "latency", str(config), *sizes, *words, "--trace", str(path)]
    done = CliRunner().invoke(group, command, standalone_mode=False)
    assert done.exception is None, done.output
    trace: dict[str, Any] = json.loads(path.read_text())
    return trace


@pytest.mark.slow
def test_a_trace_of_two_ranks(tmp_path: Path) -> None:
    """Over the emulated link: both ranks, every layer, all-reduces of at least 0.9 ms in every step."""
    trace = record(tmp_path / "trace.json")
    about = trace["otherData"]
    assert (about["wiring"], about["ranks"], about["batch"]) == ("ladder", 2, 1)
    flights = [event for event in trace["traceEvents"] if event.get("cat") == "all_reduce"]
    layers = {(e["pid"], e["args"]["step"], e["args"]["layer"]) for e in flights}
    assert layers == {(r, step, n) for r in (0, 1) for step in range(8) for n in range(-1, about["layers"])}
    assert min(event["dur"] for event in flights) >= 900


@pytest.mark.slow
def test_a_trace_of_two_stages(tmp_path: Path) -> None:
    """Each stage its own layers, by the model's numbers; the second one waits for the first one's rows."""
    sets = ["--set", "parallel.tensor_parallel_size=1", "--set", "parallel.pipeline_parallel_size=2"]
    trace = record(tmp_path / "trace.json", *sets)
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    layers = [{e["args"]["layer"] for e in spans if e["pid"] == rank} - {-1} for rank in (0, 1)]
    assert sorted(layers[0] | layers[1]) == list(range(trace["otherData"]["layers"]))
    assert max(layers[0]) < min(layers[1])
    assert {e["pid"] for e in spans if e["name"] == "wait for hidden rows"} == {1}
