"""Spans of a step on one rank: sub-blocks that compute, all-reduces in flight, waits, named by layer and sub-block.

`watch` lays a thin wrapper over a model's sub-blocks and its collective; a model that is not watched runs the code it
always runs. `chrome_trace` makes of all ranks' spans what Perfetto and chrome://tracing open. Times: CLOCK_MONOTONIC.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

from ...topology.comm.collectives import CollectiveOf
from ...topology.comm.ledger import Record

Category = Literal["step", "compute", "wait", "all_reduce"]
SUB_BLOCKS = ("attention", "mlp", "attention_and_mlp", "shortcut")
COMPUTE_TID, FLIGHT_TID, KERNEL_TID = 1, 10, 100


@dataclass(frozen=True, slots=True)
class Span:
    """`start` and `end` in seconds. `layer` -1: outside the layers (embedding, the step itself)."""

    name: str
    category: Category
    start: float
    end: float
    step: int
    layer: int = -1
    sub_block: str = ""
    bytes: int = 0


@dataclass(slots=True)
class SpanRecorder:
    """Collects spans while `step` is not None. `annotate` opens a named range in another profiler."""

    annotate: Callable[[str], AbstractContextManager[Any]] = lambda name: nullcontext()
    spans: list[Span] = field(default_factory=list)
    step: int | None = None
    place: tuple[int, str] = (-1, "embedding")
    """Layer and sub-block whose partial sum was computed last."""
    flights: list[Span] = field(default_factory=list)
    """All-reduces of the step under way, in program order; their ends are known when the step is over."""

    def begin_step(self, step: int) -> None:
        self.step, self.place, self.flights = step, (-1, "embedding"), []

    def end_step(self, started: float, records: Iterable[Record]) -> None:
        """`records`: the ledger's, of which the last as many all-reduces as were started are this step's."""
        assert self.step is not None
        self.spans.append(Span(f"step {self.step}", "step", started, time.monotonic(), self.step))
        self.spans += in_flight(self.flights, records)
        self.step = None


def in_flight(flights: Sequence[Span], records: Iterable[Record]) -> list[Span]:
    """The flights with the ends that the backend saw; where it keeps no such records, they end with their wait."""
    reduces = [record for record in records if record.op == "all_reduce"]
    emulated = [record for record in reduces if record.strategy == "emulated"]
    records_of_flights = (emulated or reduces)[-len(flights) :] if flights else []
    if len(records_of_flights) != len(flights) or any(
        r.bytes != f.bytes for r, f in zip(records_of_flights, flights, strict=True)
    ):
        return list(flights)
    return [
        Span(f.name, f.category, r.start_s, r.start_s + r.in_flight_s, f.step, f.layer, f.sub_block, f.bytes)
        for r, f in zip(records_of_flights, flights, strict=True)
    ]


class _Watched:
    """The collective, with every start and wait noted."""

    def __init__(self, inner: CollectiveOf[Any], recorder: SpanRecorder) -> None:
        self.inner, self.recorder = inner, recorder

    def start(self, x: Any, layer: str = "", at_once: bool = False, /) -> Any:
        began = time.monotonic()
        pending = self.inner.start(x, layer)
        if self.recorder.step is None:
            return pending
        return _WatchedPending(pending, self.recorder, x.nbytes, began)


class _WatchedBoundary:
    """Every wait for rows of the stage before is noted."""

    def __init__(self, inner: Any, recorder: SpanRecorder) -> None:
        self.inner, self.recorder, self.send = inner, recorder, inner.send

    def receive(self, *what: Any) -> list[Any]:
        return [_WatchedRows(rows, self.recorder) for rows in self.inner.receive(*what)]


class _WatchedRows:
    def __init__(self, inner: Any, recorder: SpanRecorder) -> None:
        self._inner, self._recorder = inner, recorder

    def wait(self) -> Any:
        started = time.monotonic()
        x = self._inner.wait()
        if (step := self._recorder.step) is not None:
            self._recorder.spans.append(Span("wait for hidden rows", "wait", started, time.monotonic(), step))
        return x


class _WatchedPending:
    def __init__(self, inner: Any, recorder: SpanRecorder, size: int, began: float) -> None:
        self._inner, self._recorder, self._size = inner, recorder, size
        self._start, self._step, self._place = began, recorder.step or 0, recorder.place
        self._index = len(recorder.flights)
        recorder.flights.append(self._flight(self._start))

    def _flight(self, end: float) -> Span:
        layer, sub_block = self._place
        name = f"all-reduce, {_words(layer, sub_block)}"
        return Span(name, "all_reduce", self._start, end, self._step, layer, sub_block, self._size)

    def wait(self) -> Any:
        recorder, (layer, sub_block) = self._recorder, self._place
        name = f"wait for {_words(layer, sub_block)}"
        started = time.monotonic()
        with recorder.annotate(name):
            x = self._inner.wait()
        ended = time.monotonic()
        recorder.spans.append(Span(name, "wait", started, ended, self._step, layer, sub_block, self._size))
        recorder.flights[self._index] = self._flight(ended)
        return x


def watch(model: Any, recorder: SpanRecorder) -> None:
    """From now on the model's sub-blocks, all-reduces and waits for another stage are recorded."""
    model.all_reduce = _Watched(model.all_reduce, recorder)
    model.boundary = None if model.boundary is None else _WatchedBoundary(model.boundary, recorder)
    for name in SUB_BLOCKS:
        setattr(model, name, _spanned(getattr(model, name), name, recorder, model.stage.first_layer))


def _spanned(
    compute: Callable[[int, Any], Any], sub_block: str, recorder: SpanRecorder, first_layer: int
) -> Callable[[int, Any], Any]:
    def spanned(number: int, residual: Any) -> Any:
        if recorder.step is None:
            return compute(number, residual)
        layer = first_layer + number
        name = _words(layer, sub_block)
        started = time.monotonic()
        with recorder.annotate(name):
            partial = compute(number, residual)
        recorder.spans.append(Span(name, "compute", started, time.monotonic(), recorder.step, layer, sub_block))
        recorder.place = (layer, sub_block)
        return partial

    return spanned


def _words(layer: int, sub_block: str) -> str:
    return sub_block if layer < 0 else f"layer {layer} {sub_block.replace('_', ' ')}"


@dataclass(frozen=True, slots=True)
class RankTrace:
    """`offset`: seconds to add to the clock of the node's `spans`; `kernels`: `device_events` of the same steps."""

    node: str
    offset: float
    spans: Sequence[Span]
    kernels: Sequence[Mapping[str, Any]] = ()


def device_events(trace: Mapping[str, Any]) -> list[dict[str, Any]]:
    """From a trace of torch.profiler: kernels and copies of the device, and the ranges of the steps."""
    cats = ("kernel", "gpu_memcpy", "gpu_memset")
    keys = ("name", "cat", "ts", "dur", "tid")
    return [
        {key: event[key] for key in keys}
        for event in trace["traceEvents"]
        if event.get("cat") in cats or (event.get("cat") == "user_annotation" and event["name"].startswith("step "))
    ]


def _kernel_events(rank: int, trace: RankTrace, zero: float) -> list[dict[str, Any]]:
    """The device's events on the clock of the spans: torch's own is another, on which the same steps are ranges."""
    began = {span.name: span.start + trace.offset - zero for span in trace.spans if span.category == "step"}
    ranges = [event for event in trace.kernels if event["cat"] == "user_annotation" and event["name"] in began]
    if not ranges:
        return []
    shift = began[ranges[0]["name"]] * 1e6 - ranges[0]["ts"]
    kernels = [event for event in trace.kernels if event["cat"] != "user_annotation"]
    streams = sorted({event["tid"] for event in kernels})
    moved = [
        {**event, "ph": "X", "pid": rank, "tid": KERNEL_TID + streams.index(event["tid"]), "ts": event["ts"] + shift}
        for event in kernels
    ]
    return moved + [_thread(rank, KERNEL_TID + i, f"GPU stream {stream}") for i, stream in enumerate(streams)]


def _thread(rank: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "thread_name", "pid": rank, "tid": tid, "args": {"name": name}}


def chrome_trace(ranks: Mapping[int, RankTrace], about: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """One trace of all ranks. All-reduces that overlap get tracks of their own."""
    starts = [span.start + trace.offset for trace in ranks.values() for span in trace.spans]
    zero = min(starts, default=0.0)
    events: list[dict[str, Any]] = []
    for rank, trace in ranks.items():
        busy_until: list[float] = []
        for span in sorted(trace.spans, key=lambda s: (s.start, -s.end)):
            tid = COMPUTE_TID
            if span.category == "all_reduce":
                track = next((i for i, free in enumerate(busy_until) if free <= span.start), len(busy_until))
                busy_until[track : track + 1] = [span.end]
                tid = FLIGHT_TID + track
            events.append(
                {
                    "ph": "X",
                    "name": span.name,
                    "cat": span.category,
                    "pid": rank,
                    "tid": tid,
                    "ts": (span.start + trace.offset - zero) * 1e6,
                    "dur": (span.end - span.start) * 1e6,
                    "args": {"step": span.step, "layer": span.layer, "sub_block": span.sub_block, "bytes": span.bytes},
                }
            )
        tracks = {COMPUTE_TID: "compute and waits"}
        tracks |= {FLIGHT_TID + i: f"all-reduce in flight ({i})" for i in range(len(busy_until))}
        events.append(
            {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank} on {trace.node}"}}
        )
        events += [_thread(rank, tid, name) for tid, name in tracks.items()]
        events += _kernel_events(rank, trace, zero)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": dict(about or {})}
