"""Lanes: several runners in one set of ranks that take turns, so that a busy machine is unfair to all of them alike.

Rank 0 leads and has each lane's engine; the other ranks follow. Frames on the plan channel: a lane's plan, "run a
lane's next plans", a call that means something to its sender alone, the end. Imported by rank programs alone.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...engine.batch import Batch, StepResult, decode
from ...engine.schedule.scheduler import Scheduler, SchedulerLimits
from ...engine.step.engine import Ahead, Engine, StepProgress
from ...topology.comm.groups import Communicator
from ...topology.comm.ledger import Entry

_PLAN, _STEP, _CALL, _END = b"P", b"S", b"C", b"E"
Obey = Callable[[bytes], object]


@dataclass(slots=True)
class Lane:
    """One model on one rank; `awaited`: whether its all-reduces are waited for."""

    index: int
    name: str
    runner: Any
    limits: SchedulerLimits
    awaited: bool = True
    waiting: deque[Batch] = field(default_factory=deque)


class Turns:
    """The plan channel and the runner of one lane on rank 0, as its engine sees them."""

    def __init__(self, lane: Lane, communicator: Communicator) -> None:
        self._lane, self._plans, self._announced = lane, communicator.plans, 0
        self.engine = Engine(Scheduler(lane.limits), self, self, StepProgress())

    def announce(self, steps: int) -> None:
        """Lets the other ranks run that many plans of this lane, each as soon as it is there: in the engine, too, no
        rank waits until rank 0 begins a step."""
        self._plans.send(_STEP + struct.pack("<BI", self._lane.index, steps))
        self._announced = steps

    def send(self, frame: bytes) -> None:
        self._plans.send(_PLAN + bytes([self._lane.index]) + frame)

    def run(self, batch: Batch, ahead: Ahead | None = None) -> StepResult:
        if not self._announced:
            self.announce(1)
        self._announced -= 1
        result: StepResult = self._lane.runner.run_through(batch, ahead)
        return result

    def wait_result(self) -> None:
        """Nothing is ever pending: the lanes share a device."""


def communication(entries: Iterable[Entry]) -> tuple[float, float]:
    """Seconds of all-reduces hidden and exposed; under an emulated link its own, not those of what carries it."""
    listed = [e for e in entries if e.op == "all_reduce"]
    listed = [e for e in listed if e.link.startswith("emulated")] or listed
    return sum(e.hidden_s for e in listed), sum(e.waited_s for e in listed)


def call(communicator: Communicator, payload: bytes) -> None:
    """Rank 0, between two turns: every other rank obeys this."""
    communicator.plans.send(_CALL + payload)


def play(
    lanes: Sequence[Lane], communicator: Communicator, lead: Callable[[], object], obey: Obey = lambda payload: None
) -> None:
    """Rank 0 leads; the others follow until it is done, however that ends."""
    if communicator.rank != 0:
        _follow(lanes, communicator, obey)
        return
    try:
        lead()
    finally:
        communicator.plans.send(_END)


def _follow(lanes: Sequence[Lane], communicator: Communicator, obey: Obey) -> None:
    while (frame := communicator.plans.receive())[:1] != _END:
        kind, rest = frame[:1], frame[1:]
        if kind == _PLAN:
            lanes[rest[0]].waiting.append(decode(rest[1:]))
        elif kind == _STEP:
            index, steps = struct.unpack("<BI", rest)
            for _ in range(steps):
                if not lanes[index].waiting:  # nothing but this lane's plans is sent before the last of these steps
                    lanes[index].waiting.append(decode(communicator.plans.receive()[2:]))
                lanes[index].runner.run_through(lanes[index].waiting.popleft())
        else:
            obey(rest)
