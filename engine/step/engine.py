"""The step loop: rank 0 schedules, runs and commits (launchers/rank/worker.py); the other ranks receive plans and run.

Plan n+1 is made and broadcast while step n's first all-reduce is in flight. Tokens of step n are released only when
step n+1's gather has shown that every rank sampled the same ids. If the runner overlaps steps, the result of step n
arrives while step n+1 computes, and plan n+2 is made then; a pipeline has as many steps in flight as micro-batches.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..batch import Batch, StepResult, decode, encode
from ..metrics.histogram import STEP_SECONDS, STEP_TOKENS, Buckets
from ..request import Request, TokensEvent
from ..schedule.scheduler import Scheduler

Ahead = Callable[[Sequence[StepResult]], None]

TIMEOUT_FACTOR = 30.0
"""The timeout as a multiple of the longest step: a rank that is ten times slower must raise an alert, not a timeout."""
LEAST_S = 10.0
FORGET = 0.98
"""Factor by which the longest step's time decays at each step of its size, so that an outlier is forgotten."""


class CollectiveTimeouts:
    """Sets the group's collective timeout from the durations of its steps: a library's default of half an hour detects
    nothing, and a fixed limit of seconds mistakes a long prompt for a hang. `longest`: seconds, by the bit length of
    the step's number of tokens."""

    def __init__(self, first: float, set_timeout: Callable[[float], None], least: float = LEAST_S) -> None:
        """first: the limit [s] before the first measurement."""
        self.least, self.set_to, self._set_timeout = least, first, set_timeout
        self.longest: dict[int, float] = {}
        set_timeout(first)

    def before(self, tokens: int) -> None:
        limit = self.limit(tokens)
        if not 0.8 < limit / self.set_to < 1.25:
            self._set_timeout(limit)
            self.set_to = limit

    def after(self, tokens: int, seconds: float) -> None:
        size = max(1, tokens).bit_length()
        self.longest[size] = max(seconds, FORGET * self.longest.get(size, 0.0))

    def limit(self, tokens: int) -> float:
        """Timeout [s] of each collective of a step of `tokens` tokens. A size that was never measured is extrapolated
        in proportion from the next smaller one; without a smaller one, it gets the limit of the next larger one."""
        if not self.longest:
            return self.set_to
        size = max(1, tokens).bit_length()
        measured = max((s for s in self.longest if s <= size), default=min(self.longest))
        return max(self.least, TIMEOUT_FACTOR * self.longest[measured] * 2.0 ** max(0, size - measured))


class StepRunner(Protocol):
    """The runner (engine/step/runner.py) as the loop uses it."""

    def run(self, batch: Batch, ahead: Ahead | None = None) -> StepResult | None:
        """Starts a step and returns its result, or None while the result is pending. Calls `ahead` during the step,
        with the results of earlier steps that have arrived, oldest first."""

    def wait_result(self) -> StepResult | None:
        """Waits for the oldest pending result; None if none is pending."""


class PlanSender(Protocol):
    def send(self, frame: bytes) -> None:
        """Sends a frame to every other rank, in order; returns at once."""


class PlanReceiver(Protocol):
    def receive(self) -> bytes:
        """Waits, without polling, for the next frame from rank 0."""


@dataclass(slots=True)
class StepProgress:
    """This rank's progress, in plain attributes that a heartbeat thread may read at any time. Times in seconds."""

    step: int = 0
    busy_since: float | None = None
    """Start of the running step; None outside a step."""
    turn_since: float | None = None
    """Outside a step: since when this thread has been busy; None while it waits for work. Without it a thread that
    hangs between steps would look idle."""
    step_tokens: int = 0
    behind: deque[int] = field(default_factory=deque)
    """Tokens of the further steps that were started while the first one runs."""
    last_tokens: int = 0
    last_seconds: float = 0.0
    finished_at: float = 0.0
    durations: Buckets = field(default_factory=lambda: Buckets(STEP_SECONDS))
    sizes: Buckets = field(default_factory=lambda: Buckets(STEP_TOKENS))

    def start(self, tokens: int) -> None:
        """Records the start of a step; the previous one may still run."""
        if self.busy_since is None:
            self.step_tokens, self.busy_since = tokens, time.monotonic()
        else:
            self.behind.append(tokens)

    def turn(self, working: bool) -> None:
        """Records that the loop stops waiting for work (True) or starts to wait (False)."""
        self.turn_since = time.monotonic() if working else None

    def finish(self) -> None:
        """Records the result of the oldest running step; the time of the next one counts from now."""
        now = time.monotonic()
        if self.turn_since is not None:
            self.turn_since = now
        self.last_seconds = now - (self.busy_since or now)
        self.durations.observe(self.last_seconds)
        self.sizes.observe(self.step_tokens)
        self.last_tokens, self.step_tokens = self.step_tokens, 0
        self.step, self.busy_since, self.finished_at = self.step + 1, None, time.time()
        if self.behind:
            self.step_tokens, self.busy_since = self.behind.popleft(), now


def _timed(runner: StepRunner, batch: Batch, progress: StepProgress, hook: Ahead | None = None) -> StepResult | None:
    """Calls runner.run and records the progress of this step and of earlier pending ones."""

    def ahead(results: Sequence[StepResult]) -> None:
        for _ in results:
            progress.finish()
        if hook is not None:
            hook(results)

    progress.start(batch.num_tokens)
    try:
        result = runner.run(batch, ahead)
    except BaseException:
        while progress.busy_since is not None:
            progress.finish()
        raise
    if result is not None:
        progress.finish()
    return result


def _settled(runner: StepRunner, progress: StepProgress) -> StepResult | None:
    """Calls runner.wait_result and records the progress."""
    result = runner.wait_result()
    if result is not None:
        progress.finish()
    return result


class Engine:
    """The step loop of rank 0. All methods are called on one thread, the one that runs steps."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: StepRunner,
        plans: PlanSender,
        progress: StepProgress,
        on_running: Callable[[list[str], list[str]], None] | None = None,
    ) -> None:
        """on_running is called before a step runs, with the ids of the requests that enter a slot and of those that
        were preempted."""
        self.scheduler, self.runner, self.plans, self.progress = scheduler, runner, plans, progress
        self._on_running = on_running
        self._planned: Batch | None = None
        self._pending: deque[Batch] = deque()
        """Started plans whose results are not known yet."""
        self._alone = False
        """Whether only this rank has waited for the last step's result; the other ranks take it with the next plan."""
        self._unverified_events: list[TokensEvent] = []
        self._refused: list[TokensEvent] = []

    def add(self, request: Request) -> None:
        """Queues a request. One that can never run ends at once with the finish reason "error"."""
        try:
            self.scheduler.add(request, time.time())
        except ValueError as fault:
            self._refused.extend(
                TokensEvent(request.request_id, choice, 0, (), "error", message=str(fault))
                for choice in range(request.params.n)
            )

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to run or to release."""
        return bool(
            self.scheduler.has_work
            or self._unverified_events
            or self._refused
            or self._planned
            or self._pending
            or self._alone
        )

    def step(self) -> list[TokensEvent]:
        """Runs one step; returns the events that are verified on all ranks. Raises what the runner raises; no event of
        this step or of the previous one has then been returned."""
        batch, self._planned = self._planned or self._plan(), None
        if batch is None:
            if self._pending:
                self._alone = True
                return self._commit(_settled(self.runner, self.progress))
            if self._unverified_events or self._alone:
                self._prove()
            return self._release(self.scheduler.take_events())
        shown: list[TokensEvent] = []

        def ahead(results: Sequence[StepResult]) -> None:
            for result in results:
                shown.extend(self._commit(result))
            self._planned = self._plan()

        try:
            result = _timed(self.runner, batch, self.progress, ahead)
        except BaseException:
            self._planned = None  # the group is broken: it will not run
            self._pending.clear()
            raise
        self._pending.append(batch)
        return shown if result is None else shown + self._commit(result)

    def _commit(self, result: StepResult | None) -> list[TokensEvent]:
        """Commits the result of the oldest pending step. It verifies the step before, whose events are returned."""
        if not self._pending or result is None:
            raise RuntimeError("a result without a step, or a step without its result: the runner lost count")
        return self._release(self.scheduler.commit(self._pending.popleft(), result, time.time()))

    def _prove(self) -> None:
        """Runs an empty step. Its gather compares the digests of the last step, and with its plan the other ranks take
        the result of that step: otherwise they would seem to hang in it while there is no work."""
        self._alone = False
        frame = Batch(step=self.progress.step)
        self.plans.send(encode(frame))
        _timed(self.runner, frame, self.progress)

    def _release(self, newly: list[TokensEvent]) -> list[TokensEvent]:
        ready = self._refused + self._unverified_events
        self._refused, self._unverified_events = [], newly
        return ready

    def _plan(self) -> Batch | None:
        batch = self.scheduler.schedule(time.time())
        parked = self.scheduler.parked
        if self._on_running is not None and (parked or (batch is not None and batch.admitted)):
            entered = () if batch is None else (sequence.slot for sequence in batch.admitted)
            self._on_running(self.scheduler.request_ids(entered), parked)
        if batch is not None:
            self._alone = False
            self.plans.send(encode(batch))
        return batch

    def close(self) -> None:
        """Ends `follow` on the other ranks. A plan that was already sent runs first: the other ranks wait in its
        collectives and would report this rank as lost."""
        batch, self._planned = self._planned, None
        if batch is not None:
            _timed(self.runner, batch, self.progress)
            self._pending.append(batch)
        while self._pending:
            _settled(self.runner, self.progress)  # no step may be in flight when the group ends
            self._pending.popleft()
        self.plans.send(b"")


def follow(runner: StepRunner, plans: PlanReceiver, progress: StepProgress) -> None:
    """Runs the plans that rank 0 sends, until it ends them: the loop of all other ranks. Raises what the runner
    raises."""
    while frame := plans.receive():
        progress.turn(True)
        _timed(runner, decode(frame), progress)
        progress.turn(False)
    while _settled(runner, progress) is not None:
        pass


def drain(engine: Engine) -> Iterable[TokensEvent]:
    """Runs steps until no work is left; for benchmarks and tests."""
    while engine.has_work:
        yield from engine.step()
