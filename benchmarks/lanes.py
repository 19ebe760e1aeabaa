"""Lanes: several runners in one set of ranks that take turns, so that a busy machine is unfair to all of them alike.

Rank 0 leads: each lane has its engine and its clock. The other ranks `follow`. Frames on the plan channel: a lane's
plan, "run a lane's next plan", "all-reduce so many bytes so often", the end. Imported by rank programs alone.
"""

from __future__ import annotations

import statistics
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from laddertron.engine.batch import Batch, StepResult, decode
from laddertron.engine.engine import Engine, Progress
from laddertron.engine.request import Request, SamplingParams
from laddertron.engine.runner import Runner
from laddertron.engine.scheduler import Scheduler, SchedulerLimits
from laddertron.topology.collectives import Collective, Done, Pending
from laddertron.topology.groups import Communicator
from laddertron.topology.ledger import Entry, Record

PLAN, STEP, PROBE, END = b"P", b"S", b"R", b"E"


@dataclass(slots=True)
class Lane:
    """One wiring on one rank."""

    index: int
    name: str
    runner: Runner
    limits: SchedulerLimits
    waiting: deque[Batch] = field(default_factory=deque)


@dataclass(frozen=True, slots=True)
class Steps:
    """What a lane did: seconds of each decode step and of each prefill, seconds of communication hidden and exposed,
    processor seconds of the main thread and of all others; the larger sub-block's share of a layer's computation (of
    standard wiring: elsewhere communication is not what stands between two sub-blocks)."""

    decode_s: tuple[float, ...]
    prefills_s: tuple[float, ...]
    hidden_s: float
    exposed_s: float
    main_cpu_s: float
    other_cpu_s: float
    larger_share: float

    @property
    def prefill_s(self) -> float:
        """The median."""
        return statistics.median(self.prefills_s)


class Unawaited:
    """A Collective that sends, carries and takes every message, and never makes anyone wait: `start` gives back its own
    part, the sum is taken three starts later. What communicating costs the core that computes, whatever hides it."""

    def __init__(self, inner: Collective) -> None:
        self._inner = inner
        self._travelling: deque[Pending] = deque()

    def start(self, x: torch.Tensor) -> Pending:
        if len(self._travelling) == 3:
            self._travelling.popleft().wait()
        self._travelling.append(self._inner.start(x))
        return Done(x)


class _Turns:
    """The plan channel and the runner of one lane on rank 0, as its engine sees them."""

    def __init__(self, lane: Lane, communicator: Communicator) -> None:
        self._lane, self._plans = lane, communicator.plans

    def send(self, frame: bytes) -> None:
        self._plans.send(PLAN + bytes([self._lane.index]) + frame)

    def run(self, batch: Batch, ahead: Callable[[StepResult | None], None] | None = None) -> StepResult:
        self._plans.send(STEP + bytes([self._lane.index]))
        return self._lane.runner.run_through(batch, ahead)

    def settle(self) -> None:
        """Nothing is ever owed: the lanes share a device."""


def communication(entries: Iterable[Entry]) -> tuple[float, float]:
    """Seconds of all-reduces hidden and exposed; under an emulated link its own, not those of what carries it."""
    listed = [e for e in entries if e.op == "all_reduce"]
    listed = [e for e in listed if e.link.startswith("emulated")] or listed
    return sum(e.hidden_s for e in listed), sum(e.waited_s for e in listed)


def larger_share(records: Sequence[Record]) -> float:
    """Of the last steps' all-reduces, attention and MLP in turns, a gather after each step: how much of a layer's
    computation the larger of both takes. 0.5 where there is nothing to see."""
    kinds: tuple[list[float], list[float]] = ([], [])
    index, before = 0, None
    for record in records:
        if record.op != "all_reduce":
            index, before = 0, None
            continue
        if before is not None:
            kinds[index % 2].append(record.start_s - before.start_s - before.in_flight_s)
        index, before = index + 1, record
    if not all(kinds):
        return 0.5
    attention, mlp = (statistics.median(each) for each in kinds)
    return max(attention, mlp) / (attention + mlp)


class Driver:
    """Rank 0's side of a lane."""

    def __init__(self, lane: Lane, communicator: Communicator) -> None:
        turns = _Turns(lane, communicator)
        self.lane, self._communicator = lane, communicator
        self._engine = Engine(Scheduler(lane.limits), turns, turns, Progress())
        self._runs = 0
        self._new()

    def _new(self) -> None:
        self._decode: list[float] = []
        self._shares: list[float] = []
        self._prefills: list[float] = []
        self._sums = [0.0] * 4

    def begin(self, batch: int, prompt: int, gen: int) -> None:
        """Takes `batch` requests in and computes their prompts, of `prompt` tokens each: one more prefill."""
        self._runs += 1
        vocab = self.lane.runner.model.config.vocab_size
        for number in range(batch):
            ids = tuple((7 + 31 * (number + 1) * (i + self._runs)) % vocab for i in range(prompt))
            params = SamplingParams(max_tokens=gen, seed=number, temperature=0.0)
            self._engine.add(Request(f"{self._runs}/{number}", ids, params))
        started, tokens = time.perf_counter(), 0
        while tokens < batch * prompt:
            self._engine.step()
            tokens += self._engine.progress.last_tokens
        self._prefills.append(time.perf_counter() - started)

    def turn(self, steps: int) -> None:
        """Decodes for `steps` steps."""
        hidden, exposed = communication(self._communicator.ledger.entries())
        main, every, began = time.thread_time(), time.process_time(), time.monotonic()
        for _ in range(steps):
            started = time.perf_counter()
            self._engine.step()
            self._decode.append(time.perf_counter() - started)
        main, every = time.thread_time() - main, time.process_time() - every
        after = communication(self._communicator.ledger.entries())
        records = [r for r in self._communicator.ledger.history() if r.start_s >= began]
        self._shares.append(larger_share(records))
        for index, value in enumerate((after[0] - hidden, after[1] - exposed, main, every - main)):
            self._sums[index] += value

    def probe(self, nbytes: int, count: int) -> list[float]:
        """See `probe`; between two turns."""
        return probe(self._communicator, nbytes, count)

    def finish(self) -> None:
        """Lets the requests come to their end, untimed; others may begin."""
        while self._engine.has_work:
            self._engine.step()

    def end(self) -> Steps:
        """As finish; what was measured since the last end."""
        self.finish()
        hidden, exposed, main, other = self._sums
        share = statistics.median(self._shares or [0.5])
        steps = Steps(tuple(self._decode), tuple(self._prefills), hidden, exposed, main, other, share)
        self._new()
        return steps


def probe(communicator: Communicator, nbytes: int, count: int) -> list[float]:
    """Rank 0: seconds of each of `count` all-reduces of nbytes, beside nothing else."""
    communicator.plans.send(PROBE + struct.pack("<II", nbytes, count))
    return _all_reduces(communicator, nbytes, count)


def _all_reduces(communicator: Communicator, nbytes: int, count: int) -> list[float]:
    x = torch.zeros(nbytes // 4)
    times = []
    for _ in range(count):
        started = time.perf_counter()
        communicator.all_reduce.start(x).wait()
        times.append(time.perf_counter() - started)
    return times


def follow(lanes: Sequence[Lane], communicator: Communicator) -> None:
    """The other ranks' loop, until END."""
    while (frame := communicator.plans.receive())[:1] != END:
        kind, rest = frame[:1], frame[1:]
        if kind == PLAN:
            lanes[rest[0]].waiting.append(decode(rest[1:]))
        elif kind == STEP:
            lanes[rest[0]].runner.run_through(lanes[rest[0]].waiting.popleft())
        else:
            _all_reduces(communicator, *struct.unpack("<II", rest))
