"""The daemon's requests over its replicas: interactive ones first, each to the least loaded, lost ones again.

A replica that dies takes nothing with it but time: what it had in flight is submitted again with the next epoch. A
body that was in a dying step time and again runs alone; if a rank dies of it there, it is given up. asyncio; no HTTP,
no store.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence

from ..request import ModelLimits, TokensEvent
from .flight import Flight
from .job import EngineJob, JobState, RankReport
from .lines import AnswerFault, unmade
from .observe import Observer

log = logging.getLogger(__name__)

SUSPECT_DEATHS = 2
"""In a step that a rank died in so often: from then on it runs alone."""
_WINDOW = 4  # batch choices in a replica, in times of its max_num_seqs


class _Replica:
    """Listens to one job; knows what is aboard."""

    def __init__(self, dispatcher: Dispatcher, index: int, job: EngineJob) -> None:
        self._dispatcher, self.index, self.job = dispatcher, index, job
        self.flights: dict[str, Flight] = {}  # by request id: a body of several prompts stands here several times
        self.load = 0
        self.alone: Flight | None = None

    def on_tokens(self, events: list[TokensEvent]) -> None:
        for event in events:
            flight = self.flights.get(event.request_id)
            if flight is None or event.epoch != flight.epoch:
                continue
            try:
                delta, stop = flight.answer.take(event)
            except Exception as error:  # whoever calls us goes on regardless: the request would wait for ever
                log.exception("an answer could not be made")
                delta, stop, flight.answer.fault = None, None, unmade(error)
            if stop is not None:
                self.job.stop_choice(stop.request_id, stop.choice, stop.n_tokens)
            if delta is not None:
                flight.owner.progressed(flight, delta)
            if flight.answer.done:
                self.leave(flight, cancel=flight.answer.fault is not None)
                flight.owner.landed(flight)
        self._dispatcher.observer.tokens(events)
        self._dispatcher.pump()

    def on_lost(self, request_ids: list[str], reason: str, running: int) -> None:
        self._dispatcher.lost(self, request_ids, reason, running)

    def on_state(self, state: JobState) -> None:
        self._dispatcher.moved(self, state)

    def on_report(self, report: RankReport) -> None:
        self._dispatcher.observer.report(self.index, report)

    def board(self, flight: Flight) -> None:
        flight.replica = self.index
        self.load += flight.choices
        for request in flight.requests:
            self.flights[request.request_id] = flight
            self.job.submit(request)

    def leave(self, flight: Flight, cancel: bool) -> None:
        """Forgets it; `cancel`: what still runs of it, too."""
        if flight.replica != self.index:
            return
        flight.replica = None
        self.load -= flight.choices
        for request in flight.requests:
            self.flights.pop(request.request_id, None)
            if cancel:
                self.job.cancel(request.request_id)
        if self.alone is flight:
            self.alone = None


class Dispatcher:
    """`jobs`: one a replica, not started. Everything on one event loop."""

    def __init__(self, jobs: Sequence[EngineJob], observer: Observer | None = None) -> None:
        self.observer = observer or Observer()
        self._replicas = [_Replica(self, index, job) for index, job in enumerate(jobs)]
        self._interactive: deque[Flight] = deque()
        self._lines: deque[Flight] = deque()
        self._suspects: deque[Flight] = deque()
        self._rooms: deque[asyncio.Future[None]] = deque()
        self.limits: ModelLimits | None = None
        self.draining = False
        self.over: str | None = None
        """Why nothing will run any more, once every replica has failed."""
        self.on_over: Callable[[str], None] = lambda reason: None
        self.changed = asyncio.Event()
        """Set whenever a replica's state has changed; whoever waits on it clears it."""

    async def start(self) -> None:
        for replica in self._replicas:
            await replica.job.start(replica)

    async def close(self) -> None:
        """Ends every process of every replica."""
        await asyncio.gather(*(replica.job.close() for replica in self._replicas))

    async def drain(self, timeout_s: float) -> bool:
        """Lets what runs come to its end; True if all did."""
        self.draining = True
        self._end_interactive("the daemon is stopping")
        return all(await asyncio.gather(*(replica.job.drain(timeout_s) for replica in self._replicas)))

    @property
    def states(self) -> list[JobState]:
        return [replica.job.state for replica in self._replicas]

    @property
    def ready(self) -> bool:
        return not self.draining and any(state.phase == "ready" for state in self.states)

    @property
    def in_flight(self) -> int:
        """Bodies in the engines and waiting for them."""
        aboard = {id(flight) for replica in self._replicas for flight in replica.flights.values()}
        return len(aboard) + len(self._interactive) + len(self._lines) + len(self._suspects)

    @property
    def waiting(self) -> int:
        return len(self._interactive) + len(self._lines) + len(self._suspects)

    async def bundle(self) -> list[dict[str, object]]:
        return [await replica.job.bundle() for replica in self._replicas]

    def submit(self, flight: Flight) -> None:
        """Runs it as soon as there is a replica for it."""
        (self._lines if flight.batch else self._interactive).append(flight)
        if flight.batch and flight.deaths >= SUSPECT_DEATHS:
            self._lines.remove(flight)
            self._suspects.append(flight)
        self.pump()

    async def room(self) -> None:
        """Waits, in turn, until another batch line would run soon."""
        if not self._rooms and self._has_room():
            return
        waiter = asyncio.get_running_loop().create_future()
        self._rooms.append(waiter)
        try:
            await waiter
        finally:
            if waiter in self._rooms:
                self._rooms.remove(waiter)

    def drop(self, flight: Flight) -> None:
        """Nobody wants it any more: its owner hears nothing of it again."""
        for waiting in (self._interactive, self._lines, self._suspects):
            if flight in waiting:
                waiting.remove(flight)
        if flight.replica is not None:
            self._replicas[flight.replica].leave(flight, cancel=True)
            self.pump()

    def pump(self) -> None:
        """Boards what waits."""
        if self.draining or self.limits is None:
            return
        ready = [replica for replica in self._replicas if replica.job.state.phase == "ready"]
        for replica in ready:
            self._board_suspect(replica)
        free = [replica for replica in ready if replica.alone is None]
        window = _WINDOW * self.limits.max_num_seqs
        while free and self._interactive:
            min(free, key=lambda replica: replica.load).board(self._interactive.popleft())
        while free and self._lines:
            replica = min(free, key=lambda replica: replica.load)
            if replica.load and replica.load + self._lines[0].choices > window:
                break
            replica.board(self._lines.popleft())
        if self._rooms and self._has_room():
            for _ in range(self.limits.max_num_seqs - len(self._lines)):
                if self._rooms and not (waiter := self._rooms.popleft()).done():
                    waiter.set_result(None)

    def _board_suspect(self, replica: _Replica) -> None:
        if replica.alone is None and self._suspects:
            replica.alone = self._suspects.popleft()
        if replica.alone is not None and not replica.flights:
            replica.board(replica.alone)

    def _has_room(self) -> bool:
        return (
            not self.draining
            and self.limits is not None
            and len(self._lines) < self.limits.max_num_seqs
            and any(replica.job.state.phase == "ready" for replica in self._replicas)
        )

    # what replicas tell

    def moved(self, replica: _Replica, state: JobState) -> None:
        self.observer.state(replica.index, state)
        if state.limits is not None:
            self.limits = state.limits
        self.changed.set()
        if state.phase == "failed" and all(s.phase in ("failed", "stopped") for s in self.states) and not self.draining:
            self.over = state.reason or "every replica has failed"
            self._end_interactive(self.over)
            self.on_over(self.over)
        self.pump()

    def lost(self, replica: _Replica, request_ids: list[str], reason: str, running: int) -> None:
        """Counts what was in the step, and queues all of it again; the suspects in the order in which they entered
        the step, the latest first."""
        aboard = list(dict.fromkeys(replica.flights[name] for name in request_ids if name in replica.flights))
        in_step = {replica.flights[name] for name in request_ids[:running] if name in replica.flights}
        # a launcher that was killed, or a link that was cut, is no line's doing
        blamed = replica.job.state.rank is not None
        waiting_alone = replica.alone if replica.alone is not None and replica.alone.replica is None else None
        alone = replica.alone if waiting_alone is None else None
        replica.flights.clear()
        replica.load, replica.alone = 0, waiting_alone
        log.warning(
            "%d requests were lost, %d of them in the step: %s",
            len(aboard),
            len(in_step),
            reason,
            extra={"event": "lost", "replica": replica.index},
        )
        again: list[Flight] = []
        for flight in aboard:
            flight.replica = None
            if blamed and flight in in_step:
                flight.deaths += 1
                if self._guilty(flight, flight is alone, len(in_step)):
                    self._quarantine(flight, reason)
                    continue
                flight.owner.died(flight)
            if flight.sent:
                self._fail(flight, "engine_lost", f"the engine was lost in the middle of the answer ({reason})", 503)
            else:
                flight.again()
                again.append(flight)
        suspects = [f for f in again if f.deaths >= SUSPECT_DEATHS]
        self._suspects.extend(suspects)
        for flight in reversed([f for f in again if f.deaths < SUSPECT_DEATHS]):
            (self._lines if flight.batch else self._interactive).appendleft(flight)
        self.pump()

    @staticmethod
    def _guilty(flight: Flight, alone: bool, company: int) -> bool:
        """A rank died of it twice with nothing else to blame, or a third time when it ran alone on purpose."""
        return flight.deaths >= SUSPECT_DEATHS and (alone or company == 1)

    def _quarantine(self, flight: Flight, reason: str) -> None:
        message = f"a rank died {flight.deaths} times while this request ran, the last time alone: {reason}"
        log.error("quarantined: %s", message, extra={"event": "quarantined", "request": flight.requests[0].request_id})
        self.observer.quarantined()
        self._fail(flight, "quarantined", message, 500)

    def _end_interactive(self, reason: str) -> None:
        for waiting in (self._interactive, self._suspects):
            for flight in [f for f in waiting if not f.batch]:
                waiting.remove(flight)
                self._fail(flight, "engine_failed", reason, 503)

    @staticmethod
    def _fail(flight: Flight, code: str, message: str, status: int) -> None:
        flight.answer.fault = AnswerFault(code, message, status)
        flight.owner.landed(flight)
