"""The daemon's requests over its replicas: interactive ones first, each to the least loaded, lost ones again.

A replica that dies takes nothing with it but time: what it had in flight is submitted again with the next epoch. What
was in the dying step is on trial first (suspects.py): the one that kills a second time is given up. Where that decides
nothing, it runs alone. asyncio; no HTTP, no store.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence

from ..job import EngineJob, JobState, RankHeartbeat
from ..openai.batch_lines import AnswerFault, unmade
from ..request import ModelLimits, TokensEvent
from .flight import Flight
from .observe import Observer
from .suspects import SuspectTracker

log = logging.getLogger(__name__)

ALONE_DEATHS = 2
"""In a step that a rank died in so often, and not found guilty: from then on it runs alone."""
_TRIED = 8  # suspects that are looked at for one that may start now
_WINDOW = 4  # batch choices in a replica, in times of its max_num_seqs


class _Replica:
    """Listens to one job; knows what is aboard."""

    def __init__(self, dispatcher: Dispatcher, index: int, job: EngineJob) -> None:
        self._dispatcher, self.index, self.job = dispatcher, index, job
        self.flights: dict[str, Flight] = {}  # by request id: a body of several prompts stands here several times
        self.load = 0
        self.alone: Flight | None = None
        self.trials = SuspectTracker()

    def on_tokens(self, events: list[TokensEvent]) -> None:
        self.trials.stepped()
        counted = 0
        for event in events:
            flight = self.flights.get(event.request_id)
            if flight is None or event.epoch != flight.epoch:
                continue
            before = flight.answer.completion_tokens
            stop = None
            try:
                delta, stop = flight.answer.take(event)
                if delta is not None:
                    flight.owner.progressed(flight, delta)
            except Exception as error:  # whoever calls us goes on regardless: the request would wait for ever
                log.exception("an answer could not be made")
                flight.answer.fault = unmade(error)
            counted += flight.answer.completion_tokens - before
            if stop is not None:
                self.job.stop_choice(stop.request_id, stop.choice, stop.n_tokens)
            self.trials.passed(flight)
            if flight.answer.done:
                self.leave(flight, cancel=flight.answer.fault is not None)
                flight.owner.landed(flight)
        self._dispatcher.observer.tokens(self.index, events, counted)
        self._dispatcher.pump()

    def on_lost(self, request_ids: list[str], reason: str, running: int) -> None:
        self._dispatcher.lost(self, request_ids, reason, running)

    def on_state(self, state: JobState) -> None:
        self._dispatcher.moved(self, state)

    def on_report(self, report: RankHeartbeat) -> None:
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
        self.trials.leave(flight)
        self.load -= flight.choices
        for request in flight.requests:
            self.flights.pop(request.request_id, None)
            if cancel:
                self.job.cancel(request.request_id)
        if self.alone is flight:
            self.alone = None


class _Lines:
    """Batch lines that wait to be boarded; their owners take turns, however many batches each of them has."""

    def __init__(self) -> None:
        self._of: OrderedDict[str, deque[Flight]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._of.values()))

    def __iter__(self) -> Iterator[Flight]:
        return itertools.chain.from_iterable(self._of.values())

    def count(self, owner: str) -> int:
        return len(self._of.get(owner, ()))

    def append(self, flight: Flight) -> None:
        self._of.setdefault(flight.owned_by, deque()).append(flight)

    def appendleft(self, flight: Flight) -> None:
        self._of.setdefault(flight.owned_by, deque()).appendleft(flight)

    def first(self) -> Flight:
        return next(iter(self._of.values()))[0]

    def popleft(self) -> Flight:
        owner, flights = self._of.popitem(last=False)
        flight = flights.popleft()
        if flights:
            self._of[owner] = flights
        return flight

    def remove(self, flight: Flight) -> None:
        flights = self._of[flight.owned_by]
        flights.remove(flight)
        if not flights:
            del self._of[flight.owned_by]


class Dispatcher:
    """`jobs`: one a replica, not started. Everything on one event loop."""

    def __init__(self, jobs: Sequence[EngineJob], observer: Observer | None = None) -> None:
        self.observer = observer or Observer()
        self._replicas = [_Replica(self, index, job) for index, job in enumerate(jobs)]
        self._interactive: deque[Flight] = deque()
        self._lines = _Lines()
        self._suspects: deque[Flight] = deque()
        self._loners: deque[Flight] = deque()
        self._rooms: dict[str, deque[asyncio.Future[None]]] = {}
        self.limits: ModelLimits | None = None
        self.draining = False
        self.over: str | None = None
        """Why nothing will run any more, once every replica has failed."""
        self.on_over: Callable[[str], None] = lambda reason: None
        self.changed = asyncio.Event()
        """Set whenever a replica's state has changed; whoever waits on it clears it."""
        self.complete = asyncio.Event()
        """Set once every replica has been ready at the same time."""

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
        return len(aboard) + self.waiting

    @property
    def waiting(self) -> int:
        return sum(map(len, self._waiting))

    async def bundle(self) -> list[dict[str, object]]:
        return [await replica.job.bundle() for replica in self._replicas]

    def submit(self, flight: Flight) -> None:
        """Runs it as soon as there is a replica for it."""
        self._queue_of(flight).append(flight)
        self.pump()

    @property
    def _waiting(self) -> tuple[deque[Flight] | _Lines, ...]:
        return self._interactive, self._lines, self._suspects, self._loners

    def _queue_of(self, flight: Flight) -> deque[Flight] | _Lines:
        if flight.deaths >= ALONE_DEATHS:
            return self._loners
        if flight.deaths and not flight.cleared:
            return self._suspects
        return self._lines if flight.batch else self._interactive

    async def room(self, owner: str = "") -> None:
        """Waits, in turn with the owner's other batches, until another line of the owner would run soon."""
        if owner not in self._rooms and self._has_room(owner):
            return
        waiter = asyncio.get_running_loop().create_future()
        self._rooms.setdefault(owner, deque()).append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter in (left := self._rooms.get(owner, deque())):
                left.remove(waiter)
            self.pump()  # its turn may be the next one's
            raise

    def _give_rooms(self, owner: str) -> None:
        waiters, seqs = self._rooms[owner], 0 if self.limits is None else self.limits.max_num_seqs
        if self._has_room(owner):
            for _ in range(min(len(waiters), seqs - self._lines.count(owner))):
                if not (waiter := waiters.popleft()).done():
                    waiter.set_result(None)
        if not waiters:
            del self._rooms[owner]

    def drop(self, flight: Flight) -> None:
        """Nobody wants it any more: its owner hears nothing of it again."""
        for waiting in self._waiting:
            if flight in waiting:
                waiting.remove(flight)
        if flight.replica is not None:
            self._replicas[flight.replica].leave(flight, cancel=True)
        self.pump()

    def pump(self) -> None:
        """Boards what waits."""
        if self.draining or self.limits is None:
            return
        free = self._board_loners()
        for replica in free:
            self._board_suspects(replica)
        while free and self._interactive:
            min(free, key=lambda replica: replica.load).board(self._interactive.popleft())
        while free and self._lines:
            replica = min(free, key=lambda replica: replica.load)
            if replica.load and replica.load + self._lines.first().choices > self._window(replica):
                break
            replica.board(self._lines.popleft())
        for owner in list(self._rooms):
            self._give_rooms(owner)

    def _window(self, replica: _Replica) -> int:
        """Choices of lines that may be aboard. While there are suspects none waits aboard, so that a suspect starts
        when it is boarded: they go one after the other."""
        assert self.limits is not None
        seqs = self.limits.max_num_seqs
        return seqs - 1 if self._suspects or replica.trials.open else _WINDOW * seqs

    def _board_loners(self) -> list[_Replica]:
        """The replicas that take others. For each loner one is kept from them, and boarded once it is empty; until then
        the loner stays in its queue, as that replica may never be ready again."""
        ready = [replica for replica in self._replicas if replica.job.state.phase == "ready" and replica.alone is None]
        ready.sort(key=lambda replica: bool(replica.flights))
        kept = len(self._loners)
        for replica in ready[:kept]:
            if not replica.flights:
                replica.alone = self._loners.popleft()
                replica.board(replica.alone)
        return ready[kept:]

    def _board_suspects(self, replica: _Replica) -> None:
        for flight in list(itertools.islice(self._suspects, _TRIED)):
            if replica.trials.can_take(flight):
                self._suspects.remove(flight)
                replica.trials.take(flight)
                replica.board(flight)

    def _has_room(self, owner: str) -> bool:
        return (
            not self.draining
            and self.limits is not None
            and self._lines.count(owner) < self.limits.max_num_seqs
            and any(replica.job.state.phase == "ready" for replica in self._replicas)
        )

    # what replicas tell

    def moved(self, replica: _Replica, state: JobState) -> None:
        self.observer.state(replica.index, state)
        if state.limits is not None:
            self.limits = state.limits
        self.changed.set()
        if all(state.phase == "ready" for state in self.states):
            self.complete.set()
        if state.phase == "failed" and all(s.phase in ("failed", "stopped") for s in self.states) and not self.draining:
            self.over = state.reason or "every replica has failed"
            self._end_interactive(self.over)
            self.on_over(self.over)
        self.pump()

    def lost(self, replica: _Replica, request_ids: list[str], reason: str, running: int) -> None:
        """Counts what was in the step, and queues all of it again."""
        aboard = list(dict.fromkeys(replica.flights[name] for name in request_ids if name in replica.flights))
        in_step = dict.fromkeys(replica.flights[name] for name in request_ids[:running] if name in replica.flights)
        # a launcher that was killed, or a link that was cut, is no line's doing
        blamed = in_step if replica.job.state.rank is not None else {}
        guilty = replica.trials.end(blamed)
        replica.flights.clear()
        replica.load, replica.alone = 0, None
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
            if flight in blamed:
                flight.deaths += 1
                # a rank died of it twice: with nothing else in the step, or twice at the same place
                if flight is guilty or (flight.deaths >= ALONE_DEATHS and len(blamed) == 1):
                    self._quarantine(flight, reason)
                    continue
                flight.stood, flight.cleared = flight.answer.place, False
                flight.owner.died(flight)
            if flight.sent:
                self._fail(flight, "engine_lost", f"the engine was lost in the middle of the answer ({reason})", 503)
            else:
                flight.again()
                again.append(flight)
        # suspects in the order in which they entered the step, the latest first; who waits for an answer before all
        for flight in sorted(again, key=lambda one: one.batch):
            if flight.deaths:
                self._queue_of(flight).append(flight)
        for flight in reversed([f for f in again if not f.deaths]):
            self._queue_of(flight).appendleft(flight)
        self.pump()

    def _quarantine(self, flight: Flight, reason: str) -> None:
        how = f"a rank died {flight.deaths} times while this request ran, the last time alone or at the same place"
        message = f"{how}: {reason}"
        log.error("quarantined: %s", message, extra={"event": "quarantined", "request": flight.requests[0].request_id})
        self.observer.quarantined()
        self._fail(flight, "quarantined", message, 500)

    def _end_interactive(self, reason: str) -> None:
        for waiting in self._waiting:
            for flight in [f for f in waiting if not f.batch]:
                waiting.remove(flight)
                self._fail(flight, "engine_failed", reason, 503)

    @staticmethod
    def _fail(flight: Flight, code: str, message: str, status: int) -> None:
        flight.answer.fault = AnswerFault(code, message, status)
        flight.owner.landed(flight)
