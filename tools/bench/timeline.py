"""From a trace of `laddertron profile` to the bars of a picture: one step of one rank, computing above, all-reduces in
flight below. Pure; tools/bench/picture.py draws.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

from ...topology.comm.ledger import overlap_ratio


class TimelineError(ValueError):
    """The file is no trace of `laddertron profile`, or does not hold what was asked for."""


@dataclass(frozen=True, slots=True)
class Bar:
    """`start` and `length` in seconds since the first bar; `kind`: attention, mlp, both, other, wait or flight; `track`
    counts from 0 within its kind's row."""

    start: float
    length: float
    kind: str
    layer: int
    track: int = 0


@dataclass(frozen=True, slots=True)
class Timeline:
    """`hidden`: the overlap ratio of the drawn all-reduces; None without any. `step_s`: the whole step."""

    title: str
    bars: tuple[Bar, ...]
    hidden: float | None
    step_s: float

    @property
    def length(self) -> float:
        return max(bar.start + bar.length for bar in self.bars)


_KINDS = {"attention": "attention", "mlp": "mlp", "attention_and_mlp": "both"}


def read_trace(path: Path) -> dict[str, Any]:
    try:
        trace = json.loads(path.read_text())
        events = trace["traceEvents"]
        if not all(isinstance(event["ph"], str) for event in events):
            raise TypeError("an event has no phase")
    except (OSError, ValueError, TypeError, KeyError) as fault:
        raise TimelineError(f"{path}: no trace of `laddertron profile` ({fault})") from fault
    return dict(trace)


def timeline(
    trace: Mapping[str, Any],
    rank: int = 0,
    step: int | Literal["median", "shortest"] = "median",
    layers: range | None = None,
) -> Timeline:
    """One step of one rank: the given one, or the one of median or shortest length. `layers`: only these (default: the
    whole step, what is no part of a layer as "other"). Raises TraceError naming what there is."""
    spans = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["pid"] == rank]
    steps = {e["args"]["step"]: e for e in spans if e["cat"] == "step"}
    if not steps:
        there = sorted({e["pid"] for e in trace["traceEvents"] if e["ph"] == "X"})
        raise TimelineError(f"rank {rank} is not in the trace: it has ranks {there}")
    if isinstance(step, str):
        wanted = (median if step == "median" else min)(e["dur"] for e in steps.values())
        step = min(steps, key=lambda number: abs(steps[number]["dur"] - wanted))
    if step not in steps:
        raise TimelineError(f"step {step} is not in the trace: it has steps {min(steps)} to {max(steps)}")
    chosen = [
        e
        for e in spans
        if e["cat"] != "step" and e["args"]["step"] == step and (layers is None or e["args"]["layer"] in layers)
    ]
    if not chosen:
        raise TimelineError(f"nothing of layers {layers} is in step {step}")
    zero = min(e["ts"] for e in chosen)
    if layers is None:
        zero = steps[step]["ts"]
        chosen += _rest(steps[step], chosen)
    first_track = min((e["tid"] for e in chosen if e["cat"] == "all_reduce"), default=0)
    bars = tuple(_bar(event, zero, first_track) for event in sorted(chosen, key=lambda e: float(e["ts"])))
    return Timeline(_title(trace.get("otherData", {})), bars, _hidden(chosen), steps[step]["dur"] * 1e-6)


def _rest(step: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Compute spans for the gaps between and around the events of a step's thread."""
    found, cursor, end = [], step["ts"], step["ts"] + step["dur"]
    for event in sorted((e for e in events if e["cat"] != "all_reduce"), key=lambda e: float(e["ts"])):
        found.append((cursor, event["ts"]))
        cursor = max(cursor, event["ts"] + event["dur"])
    args = {"layer": -1, "sub_block": "", "step": step["args"]["step"]}
    spans = ((start, stop) for start, stop in (*found, (cursor, end)) if stop > start)
    return [{"cat": "compute", "ts": start, "dur": stop - start, "args": args} for start, stop in spans]


def _bar(event: Mapping[str, Any], zero: float, first_track: int) -> Bar:
    kind = {"wait": "wait", "all_reduce": "flight"}.get(event["cat"]) or _KINDS.get(event["args"]["sub_block"], "other")
    track = event["tid"] - first_track if kind == "flight" else 0
    return Bar((event["ts"] - zero) * 1e-6, event["dur"] * 1e-6, kind, event["args"]["layer"], track)


def _hidden(events: Sequence[Mapping[str, Any]]) -> float | None:
    flight = sum(e["dur"] for e in events if e["cat"] == "all_reduce")
    waited = sum(e["dur"] for e in events if e["cat"] == "wait")
    return overlap_ratio(max(0.0, flight - waited), min(flight, waited))


def _title(about: Mapping[str, Any]) -> str:
    wiring, ranks, batch, link = (about.get(key, "?") for key in ("wiring", "ranks", "batch", "link"))
    return f"{wiring} — {ranks} ranks, batch {batch}, {link}"
