"""Variants: several runners in one set of ranks that take turns, so that other load on the machine affects all alike;
and their drivers, which time each step, prefill and all-reduce.

Rank 0 leads and has each variant's engine; the other ranks follow. Frames on the plan channel: a variant's plan, "run a
variant's next plans", all-reduces alone, the end. Imported by rank programs alone.
"""

from __future__ import annotations

import itertools
import statistics
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from laddertron.engine.batch import Batch, StepResult, decode
from laddertron.engine.request import Request, SamplingParams
from laddertron.engine.schedule.scheduler import Scheduler, SchedulerLimits
from laddertron.engine.schedule.split import SplitChoice
from laddertron.engine.step.engine import Ahead, Engine, StepProgress
from laddertron.tools.bench.bench_rank import communication
from laddertron.topology.comm.collectives import Collective, Done, Pending
from laddertron.topology.comm.groups import Communicator
from laddertron.topology.comm.ledger import Record

_PLAN, _STEP, _PROBE, _END = b"P", b"S", b"A", b"E"


@dataclass(slots=True)
class Variant:
    """One model on one rank; `awaited`: whether its all-reduces are waited for."""

    index: int
    name: str
    runner: Any
    limits: SchedulerLimits
    awaited: bool = True
    waiting: deque[Batch] = field(default_factory=deque)


class Turns:
    """The plan channel and the runner of one variant on rank 0, as its engine sees them."""

    def __init__(self, variant: Variant, communicator: Communicator) -> None:
        self._variant, self._plans, self._announced = variant, communicator.plans, 0
        self.engine = Engine(Scheduler(variant.limits), self, self, StepProgress())

    def announce(self, steps: int) -> None:
        """Lets the other ranks run that many plans of this variant, each as soon as it is there: in the engine, too, no
        rank waits until rank 0 begins a step."""
        self._plans.send(_STEP + struct.pack("<BI", self._variant.index, steps))
        self._announced = steps

    def send(self, frame: bytes) -> None:
        self._plans.send(_PLAN + bytes([self._variant.index]) + frame)

    def run(self, batch: Batch, ahead: Ahead | None = None) -> StepResult:
        if not self._announced:
            self.announce(1)
        self._announced -= 1
        result: StepResult = self._variant.runner.run_through(batch, ahead)
        return result

    def wait_result(self) -> None:
        """Nothing is ever pending: the variants share a device."""


def probe(communicator: Communicator, nbytes: int, count: int) -> list[float]:
    """Rank 0, between two turns: seconds of each of `count` all-reduces of nbytes, alone."""
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


def play(variants: Sequence[Variant], communicator: Communicator, lead: Callable[[], object]) -> None:
    """Rank 0 leads; the others follow until it is done, however that ends."""
    if communicator.rank != 0:
        _follow(variants, communicator)
        return
    try:
        lead()
    finally:
        communicator.plans.send(_END)


def _follow(variants: Sequence[Variant], communicator: Communicator) -> None:
    while (frame := communicator.plans.receive())[:1] != _END:
        kind, rest = frame[:1], frame[1:]
        if kind == _PLAN:
            variants[rest[0]].waiting.append(decode(rest[1:]))
        elif kind == _STEP:
            index, steps = struct.unpack("<BI", rest)
            variant = variants[index]
            for _ in range(steps):
                if not variant.waiting:  # only this variant's plans are sent before the last of these steps
                    variant.waiting.append(decode(communicator.plans.receive()[2:]))
                variant.runner.run_through(variant.waiting.popleft())
        else:
            _all_reduces(communicator, *struct.unpack("<II", rest))


@dataclass(frozen=True, slots=True)
class Steps:
    """What a variant did: seconds of each decode step and of each prefill, seconds of communication hidden and exposed,
    processor seconds of all threads but the main one; seconds of an attention and of an MLP, see `sub_blocks`."""

    decode_s: tuple[float, ...]
    prefills_s: tuple[float, ...]
    hidden_s: float
    exposed_s: float
    other_cpu_s: float
    sub_blocks_s: tuple[float, float]


class Unawaited:
    """A Collective that sends, carries and takes every message, and never makes anyone wait: `start` gives back its own
    part, the sum is taken six starts later (eight may travel). What communicating costs the core that computes."""

    def __init__(self, inner: Collective) -> None:
        self._inner = inner
        self._in_flight: deque[Pending] = deque()

    def start(self, x: torch.Tensor, layer: str = "", at_once: bool = False, /) -> Pending:
        if len(self._in_flight) == 6:
            self._in_flight.popleft().wait()
        self._in_flight.append(self._inner.start(x, layer))
        return Done(x)


def sub_blocks(records: Sequence[Record], awaited: bool) -> tuple[float, float]:
    """Seconds of a sub-block, from the last steps' all-reduces, attention and MLP in turns, a gather after each step:
    between one all-reduce and the next, which completes an attention or an MLP. From its end on where it is awaited
    (nothing but computation is between then: standard wiring), else from start to start. Each step's mean, of these the
    median; noughts where there is nothing to see."""
    steps: list[list[Record]] = [[]]
    for record in records:
        if record.op == "all_reduce":
            steps[-1].append(record)
        elif steps[-1]:
            steps.append([])
    kinds: tuple[list[float], list[float]] = ([], [])
    for step in steps:
        apart = [
            after.start_s - before.start_s - awaited * before.in_flight_s for before, after in itertools.pairwise(step)
        ]
        if len(apart) >= 2:
            kinds[0].append(statistics.fmean(apart[1::2]))
            kinds[1].append(statistics.fmean(apart[::2]))
    return (statistics.median(kinds[0]), statistics.median(kinds[1])) if kinds[0] else (0.0, 0.0)


class Driver:
    """Rank 0's side of a variant."""

    def __init__(self, variant: Variant, communicator: Communicator) -> None:
        self.variant, self._communicator = variant, communicator
        self._turns = Turns(variant, communicator)
        self._engine = self._turns.engine
        self._runs = 0
        self._new()

    def _new(self) -> None:
        self._decode: list[float] = []
        self._sub_blocks: list[tuple[float, float]] = []
        self._prefills: list[float] = []
        self._sums = [0.0] * 3

    def begin(self, batch: int, prompt: int, gen: int, prompts: int | None = None) -> None:
        """Takes `batch` requests in and computes their prompts, of `prompt` tokens each: one more prefill. prompts: the
        number of the prompts; others in each run unless it is given."""
        self._runs += 1
        prompts = self._runs if prompts is None else prompts
        vocab = self.variant.runner.model.config.vocab_size
        for number in range(batch):
            ids = tuple((7 + 31 * (number + 1) * (i + prompts)) % vocab for i in range(prompt))
            params = SamplingParams(max_tokens=gen, seed=number, temperature=0.0)
            self._engine.add(Request(f"{self._runs}/{number}", ids, params))
        started, tokens = time.perf_counter(), 0
        while tokens < batch * prompt:
            self._engine.step()
            tokens += self._engine.progress.last_tokens
        self._prefills.append(time.perf_counter() - started)

    def turn(self, steps: int) -> None:
        """Decodes for `steps` steps, of which none may be the requests' last."""
        self._turns.announce(steps)
        hidden, exposed = communication(self._communicator.ledger.entries())
        main, every, began = time.thread_time(), time.process_time(), time.monotonic()
        for _ in range(steps):
            started = time.perf_counter()
            self._engine.step()
            self._decode.append(time.perf_counter() - started)
        main, every = time.thread_time() - main, time.process_time() - every
        after = communication(self._communicator.ledger.entries())
        records = [r for r in self._communicator.ledger.history() if r.start_s >= began]
        self._sub_blocks.append(sub_blocks(records, self.variant.awaited))
        for index, value in enumerate((after[0] - hidden, after[1] - exposed, every - main)):
            self._sums[index] += value

    def probe(self, nbytes: int, count: int) -> list[float]:
        """See `probe`; between two turns."""
        return probe(self._communicator, nbytes, count)

    @property
    def tokens(self) -> int:
        """Tokens drawn and kept so far."""
        return self._engine.scheduler.counters.generation_tokens

    def forget(self) -> None:
        """What `auto` has learned of split steps."""
        scheduler, rule = self._engine.scheduler, self.variant.limits.split
        scheduler._split = None if rule is None else SplitChoice(rule)

    def cancel(self, batch: int) -> None:
        """Ends the last `begin`'s requests."""
        for number in range(batch):
            self._engine.scheduler.cancel(f"{self._runs}/{number}")
        self.finish()

    def finish(self) -> None:
        """Lets the requests come to their end, untimed; others may begin."""
        while self._engine.has_work:
            self._engine.step()

    def end(self) -> Steps:
        """As finish; what was measured since the last end."""
        self.finish()
        hidden, exposed, other = self._sums
        attention, mlp = (statistics.median(kind) for kind in zip(*self._sub_blocks or [(0.0, 0.0)], strict=True))
        steps = Steps(tuple(self._decode), tuple(self._prefills), hidden, exposed, other, (attention, mlp))
        self._new()
        return steps
