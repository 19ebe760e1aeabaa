"""Lanes: several runners in one set of ranks that take turns, so that a busy machine is unfair to all of them alike.

Rank 0 leads and has each lane's engine; the other ranks follow. Frames on the plan channel: a lane's plan, "run a
lane's next plans", all-reduces beside nothing else, the end. Imported by rank programs alone.
"""

from __future__ import annotations

import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from laddertron.engine.batch import Batch, StepResult, decode
from laddertron.engine.schedule.scheduler import Scheduler, SchedulerLimits
from laddertron.engine.step.engine import Ahead, Engine, StepProgress
from laddertron.topology.comm.groups import Communicator

_PLAN, _STEP, _PROBE, _END = b"P", b"S", b"A", b"E"


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


def probe(communicator: Communicator, nbytes: int, count: int) -> list[float]:
    """Rank 0, between two turns: seconds of each of `count` all-reduces of nbytes, beside nothing else."""
    communicator.plans.send(_PROBE + struct.pack("<II", nbytes, count))
    return _all_reduces(communicator, nbytes, count)


def _all_reduces(communicator: Communicator, nbytes: int, count: int) -> list[float]:
    x = torch.zeros(nbytes // 4)
    times = []
    for _ in range(count):
        started = time.perf_counter()
        communicator.all_reduce.start(x).wait()
        times.append(time.perf_counter() - started)
    return times


def play(lanes: Sequence[Lane], communicator: Communicator, lead: Callable[[], object]) -> None:
    """Rank 0 leads; the others follow until it is done, however that ends."""
    if communicator.rank != 0:
        _follow(lanes, communicator)
        return
    try:
        lead()
    finally:
        communicator.plans.send(_END)


def _follow(lanes: Sequence[Lane], communicator: Communicator) -> None:
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
            _all_reduces(communicator, *struct.unpack("<II", rest))
