"""Distributes requests over the replicas: interactive ones first, each to the least loaded replica. Requests of a
failed launch are submitted again and resume after the last reported token. Nothing else knows which are in flight.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ..job import EngineJob, JobState, RankHeartbeat
from ..openai.errors import ApiError, unmade
from ..request import MAX_NAME, ModelLimits, Request, TokensEvent
from .flight import DispatchObserver, Flight, Suspicion

log = logging.getLogger(__name__)

_WINDOW = 4  # batch choices in a replica, in times of its max_num_seqs
_TURN_IDS = 1 << 16
"""Prompts' ids submitted in one turn of the event loop: an engine encodes them in it, which takes 0.1 µs each."""


@dataclass(eq=False, slots=True)
class _Submission:
    """A request in an engine, until all its choices have ended there. `flight`: None once the flight has left;
    `prompt`: which of the flight's requests it is; `entered`: sequence number of its entry into a step, 0 while it is
    queued there."""

    flight: Flight | None
    prompt: int
    launch: int
    open_choices: set[int]
    entered: int = 0


class _Replica:
    """Listens to one job; has its flights."""

    def __init__(self, dispatcher: Dispatcher, index: int, job: EngineJob) -> None:
        self._dispatcher, self.index, self.job = dispatcher, index, job
        self.flights: dict[Flight, list[str]] = {}
        """With the names of their submissions."""
        self.load = 0
        self.groups: Counter[tuple[str, int]] = Counter()
        """The groups of its batch lines."""
        self.alone: Flight | None = None
        self._submissions: dict[str, _Submission] = {}  # by name
        self._unsent: deque[tuple[Flight, str, int]] = deque()  # aboard, but not submitted: (flight, name, prompt)
        self._ids_left = _TURN_IDS
        self._next_turn: asyncio.Handle | None = None
        self._entries = 0
        self._left = asyncio.Event()

    def on_tokens(self, events: list[TokensEvent]) -> None:
        # NOTE: the one filter of late tokens; each submission has a name of its own
        taken = [(event, sent) for event in events if (sent := self._submissions.get(event.request_id)) is not None]
        counted = 0
        for event, submission in taken:
            self._end_choice(event, submission)
            if (flight := submission.flight) is None:
                continue
            before, delta = flight.answer.completion_tokens, None
            try:
                if (delta := flight.answer.take(event, submission.prompt)) is not None:
                    flight.owner.progressed(flight, delta)
            except Exception as error:  # else the request would wait for ever
                log.exception("a response could not be built")
                flight.answer.error = unmade(error)
            counted += flight.answer.completion_tokens - before
            if delta is not None and delta.stop_after is not None:
                self.job.stop_choice(event.request_id, event.choice, delta.stop_after)
            if flight.answer.done:
                self.leave(flight, cancel=flight.answer.error is not None)
                _call(flight.owner.finished, flight)
            elif self.alone is flight and not flight.isolated:
                self._dispatcher.passed(self, flight)
        self._dispatcher.observer.tokens(self.index, [event for event, _ in taken], counted)
        self._dispatcher.pump()

    def _end_choice(self, event: TokensEvent, submission: _Submission) -> None:
        if event.finish is not None:
            submission.open_choices.discard(event.choice)
            if not submission.open_choices:
                self._submissions.pop(event.request_id, None)
                self._left.set()

    def on_running(self, started: Sequence[str], parked: Sequence[str]) -> None:
        for request_id in parked:
            if (submission := self._submissions.get(request_id)) is not None:
                submission.entered = 0
        for request_id in started:
            if (submission := self._submissions.get(request_id)) is not None:
                self._entries += 1
                submission.entered = self._entries

    def on_lost(self, launch: int, reason: str, by_request: bool) -> None:
        lost = {name: sent for name, sent in self._submissions.items() if sent.launch == launch}
        for name in lost:
            del self._submissions[name]
        self._left.set()
        latest_first = sorted(lost.values(), key=lambda submission: -submission.entered)
        # None: a flight that has left, whose requests had not ended
        in_step = [submission.flight for submission in latest_first if submission.entered and by_request]
        aboard = [submission.flight for submission in latest_first if submission.flight is not None]
        if aboard:
            self._dispatcher.lost(self, list(dict.fromkeys(aboard)), reason, list(dict.fromkeys(in_step)))

    async def idle(self, launch: int) -> bool:
        aboard = [submission for submission in self._submissions.values() if submission.launch == launch]
        while any(submission.launch == launch for submission in self._submissions.values()):
            self._left.clear()
            await self._left.wait()
        return not any(submission.open_choices and submission.flight for submission in aboard)

    def on_state(self, state: JobState) -> None:
        if state.phase != "ready":
            self._dispatcher.queue_again(self)
        self._dispatcher.moved(self, state)

    def on_report(self, report: RankHeartbeat) -> None:
        self._dispatcher.observer.report(self.index, report)

    def board(self, flight: Flight) -> None:
        model = self.job.state.model
        if flight.answer.place and model != flight.model:  # a reload replaced the model of an interrupted request
            if not flight.batch:
                self.alone = None if self.alone is flight else self.alone
                self._dispatcher.give_up(flight, "its model was replaced by a reload after a failure")
                return
            flight.restart()
        flight.replica, flight.model = self.index, model
        self.load += flight.choices
        self.groups[flight.group_key] += 1
        names = self.flights[flight] = []
        for prompt, request in enumerate(flight.requests):
            if request.open_choices:
                names.append(self._dispatcher.name(request))
                self._unsent.append((flight, names[-1], prompt))
        self._send()

    def _send(self) -> None:
        """Submits requests of flights aboard: as many as a turn of the event loop may have, then those of the next."""
        while self._unsent and self._next_turn is None:
            if self._ids_left <= 0:
                self._ids_left = _TURN_IDS
                self._next_turn = asyncio.get_running_loop().call_soon(self._take_turn)
                return
            flight, name, prompt = self._unsent.popleft()
            request = flight.requests[prompt]
            self._submissions[name] = _Submission(flight, prompt, self.job.launch, set(request.open_choices))
            self._ids_left -= len(request.prompt)
            self.job.submit(dataclasses.replace(request, request_id=name))

    def _take_turn(self) -> None:
        self._next_turn = None
        self._send()

    @property
    def boarding(self) -> list[Flight]:
        """Flights with requests that are not submitted yet."""
        return list(dict.fromkeys(flight for flight, _, _ in self._unsent))

    def leave(self, flight: Flight, cancel: bool) -> None:
        """Removes the flight; `cancel`: also cancels its requests that still run."""
        if flight.replica != self.index:
            return
        flight.replica = None
        self.load -= flight.choices
        self.groups[flight.group_key] -= 1
        if self.groups[flight.group_key] <= 0:
            del self.groups[flight.group_key]
        if self._unsent:
            self._unsent = deque(entry for entry in self._unsent if entry[0] is not flight)
        for name in self.flights.pop(flight):
            if (submission := self._submissions.get(name)) is not None:
                submission.flight = None
                if cancel:
                    self.job.cancel(name)
        if self.alone is flight:
            self.alone = None


def _call(callback: Callable[[Flight], None], flight: Flight) -> None:
    """Calls an owner. Its error must not keep others from their events."""
    try:
        callback(flight)
    except Exception:
        log.exception("%s failed", getattr(callback, "__qualname__", callback))


class _LineQueue:
    """Queued batch lines. Owners take turns, regardless of how many batches each has."""

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

    def first(self) -> deque[Flight]:
        """The lines of the owner whose turn it is."""
        return next(iter(self._of.values()))

    def take(self, flight: Flight) -> None:
        """Removes a line of the owner whose turn it is, and gives the next one its turn."""
        owner, flights = self._of.popitem(last=False)
        flights.remove(flight)
        if flights:
            self._of[owner] = flights

    def remove(self, flight: Flight) -> None:
        flights = self._of[flight.owned_by]
        flights.remove(flight)
        if not flights:
            del self._of[flight.owned_by]


class Dispatcher:
    """`jobs`: one a replica, not started. `relaunches`: whether lost requests are submitted again."""

    def __init__(self, jobs: Sequence[EngineJob], observer: DispatchObserver, relaunches: bool = True) -> None:
        self.observer, self._relaunches = observer, relaunches
        self._numbers = itertools.count(1)
        self._replicas = [_Replica(self, index, job) for index, job in enumerate(jobs)]
        self._interactive: deque[Flight] = deque()
        self._lines = _LineQueue()
        self._isolated: deque[Flight] = deque()
        self.rooms: dict[str, deque[asyncio.Future[None]]] = {}
        self.given: Counter[str] = Counter()  # rooms whose waiters have not resumed yet
        self.limits: ModelLimits | None = None
        self.draining = False
        self.over: str | None = None
        """The reason why no request can run any more: every replica has failed, or `end` was called; else None."""
        self.on_over: Callable[[str], None] = lambda reason: None
        self.changed = asyncio.Event()
        """Set whenever a replica's state has changed; the waiter clears it."""
        self.complete = asyncio.Event()
        """Set once every replica has been ready at the same time."""

    async def start(self) -> None:
        for replica in self._replicas:
            await replica.job.start(replica)

    async def close(self) -> None:
        await asyncio.gather(*(replica.job.close() for replica in self._replicas))

    async def drain(self, timeout_s: float) -> bool:
        """Waits for the running requests; True if all ended in time."""
        self.draining = True
        for replica in self._replicas:
            self.queue_again(replica)
        self._end_interactive("the daemon is stopping")
        return all(await asyncio.gather(*(replica.job.drain(timeout_s) for replica in self._replicas)))

    @property
    def states(self) -> list[JobState]:
        return [replica.job.state for replica in self._replicas]

    @property
    def ready(self) -> bool:
        """Whether requests are accepted; while a replica reloads they are queued."""
        phases = {state.phase for state in self.states}
        return not self.ending and self.limits is not None and not phases.isdisjoint(("ready", "reloading"))

    @property
    def in_flight(self) -> int:
        """Number of bodies in the engines and queued for them."""
        return sum(len(replica.flights) for replica in self._replicas) + self.waiting

    @property
    def load(self) -> int:
        """Number of choices in the engines."""
        return sum(replica.load for replica in self._replicas)

    @property
    def model(self) -> str | None:
        """The digest of the model that every replica serves; None while they differ."""
        digests = {replica.job.state.model for replica in self._replicas}
        return digests.pop() if len(digests) == 1 else None

    def hungry(self) -> bool:
        """Whether a replica has too few choices to fill its steps."""
        ready = [replica.load for replica in self._replicas if replica.job.state.phase == "ready"]
        return self.limits is not None and bool(ready) and min(ready) < self.limits.max_num_seqs and not self._lines

    @property
    def waiting(self) -> int:
        return sum(map(len, self._waiting))

    @property
    def ending(self) -> bool:
        """True if no request is accepted or submitted to an engine any more."""
        return self.draining or self.over is not None

    def end(self, reason: str) -> None:
        """Ends every interactive request, queued or in an engine; batch lines are unaffected."""
        self.over = reason
        for replica in self._replicas:
            for flight in [flight for flight in replica.flights if not flight.batch]:
                replica.leave(flight, cancel=True)
                self._fail(flight, "engine_lost", reason, 503)
        self._end_interactive(reason)

    async def bundle(self) -> list[dict[str, object]]:
        return [await replica.job.bundle() for replica in self._replicas]

    def name(self, request: Request) -> str:
        """A name for a submission that no other one has, whatever ids clients choose, and that engines accept."""
        suffix = f"#{next(self._numbers)}"
        return request.request_id[: MAX_NAME - len(suffix)] + suffix

    def submit(self, flight: Flight) -> None:
        self._queue_of(flight).append(flight)
        self.pump()

    @property
    def _waiting(self) -> tuple[deque[Flight] | _LineQueue, ...]:
        return self._interactive, self._lines, self._isolated

    def _queue_of(self, flight: Flight) -> deque[Flight] | _LineQueue:
        if flight.isolated:
            return self._isolated
        return self._lines if flight.batch else self._interactive

    async def room(self, owner: str = "") -> None:
        """Waits until the queue has room for another line of the owner; the owner's batches take turns."""
        if owner not in self.rooms and self._has_room(owner):
            return
        waiter = asyncio.get_running_loop().create_future()
        self.rooms.setdefault(owner, deque()).append(waiter)
        try:
            await waiter
        except BaseException:
            if waiter in (left := self.rooms.get(owner, deque())):
                left.remove(waiter)
            elif not waiter.cancelled():
                self.given[owner] -= 1
            self.pump()  # gives its turn to the next
            raise
        self.given[owner] -= 1

    def _give_rooms(self, owner: str) -> None:
        waiters, seqs = self.rooms[owner], 0 if self.limits is None else self.limits.max_num_seqs
        if self._has_room(owner):
            for _ in range(min(len(waiters), seqs - self._lines.count(owner) - self.given[owner])):
                if not (waiter := waiters.popleft()).done():
                    waiter.set_result(None)
                    self.given[owner] += 1
        if not waiters:
            del self.rooms[owner]

    def drop(self, flight: Flight) -> None:
        """Discards a flight: its owner gets no more events."""
        for waiting in self._waiting:
            if flight in waiting:
                waiting.remove(flight)
        if flight.replica is not None:
            self._replicas[flight.replica].leave(flight, cancel=True)
        self.pump()

    def pump(self) -> None:
        if self.ending or self.limits is None:
            return
        free = self._board_isolated()
        while free and self._interactive:
            min(free, key=lambda replica: replica.load).board(self._interactive.popleft())
        while self._lines and self._board_line(sorted(free, key=lambda replica: replica.load)):
            pass
        for owner in list(self.rooms):
            self._give_rooms(owner)

    def _board_line(self, free: list[_Replica]) -> bool:
        """Submits the next line to the least loaded replica, but before it one of a group that is in this replica, or
        else in no other, so that a prefix is computed in one. A line of another replica's group waits for that one
        unless this one runs out of lines. False if no line can be submitted."""
        assert self.limits is not None
        flights, seqs = self._lines.first(), self.limits.max_num_seqs
        for replica in free:
            others = [other.groups for other in free if other is not replica]
            line = flights[0]
            if others:
                own = (line for line in flights if line.group_key in replica.groups)
                new = (line for line in flights if not any(line.group_key in groups for groups in others))
                fitting = next(own, None) or next(new, None)
                if fitting is None and replica.load >= 2 * seqs:
                    continue
                line = fitting or line
            if not replica.load or replica.load + line.choices <= _WINDOW * seqs:
                self._lines.take(line)
                replica.board(line)
                return True
        return False

    def _board_isolated(self) -> list[_Replica]:
        """Submits isolated requests, each to an empty replica; returns the replicas for other requests. One replica is
        reserved for each isolated request until it is empty; the request stays in its queue until then, because that
        replica may never be ready again."""
        ready = [replica for replica in self._replicas if replica.job.state.phase == "ready" and replica.alone is None]
        ready.sort(key=lambda replica: bool(replica.flights))
        reserved = len(self._isolated)
        for replica in ready[:reserved]:
            if not replica.flights:
                replica.alone = self._isolated.popleft()
                replica.board(replica.alone)
        return ready[reserved:]

    def _has_room(self, owner: str) -> bool:
        return (
            not self.ending
            and self.limits is not None
            and self._lines.count(owner) + self.given[owner] < self.limits.max_num_seqs
            and any(replica.job.state.phase == "ready" for replica in self._replicas)
        )

    # events of replicas

    def moved(self, replica: _Replica, state: JobState) -> None:
        self.observer.state(replica.index, state)
        if state.limits is not None:
            self.limits = state.limits
        self.changed.set()
        if all(state.phase == "ready" for state in self.states):
            self.complete.set()
        if state.phase == "failed" and all(s.phase in ("failed", "stopped") for s in self.states) and not self.ending:
            self.end(reason := state.reason or "every replica has failed")
            self.on_over(reason)
        self.pump()

    def queue_again(self, replica: _Replica) -> None:
        """Queues the flights again whose requests are not all submitted: the replica accepts none now."""
        for flight in reversed(replica.boarding):
            replica.leave(flight, cancel=True)
            flight.again()
            self._queue_of(flight).appendleft(flight)

    def passed(self, replica: _Replica, flight: Flight) -> None:
        """Called when an isolated flight is past the position at which ranks died: other requests may run with it, or
        the next isolated request replaces it."""
        replica.alone = None
        if self._isolated:
            replica.leave(flight, cancel=True)
            flight.again()
            self._queue_of(flight).appendleft(flight)

    def lost(
        self, replica: _Replica, flights: Sequence[Flight], reason: str, suspects: Sequence[Flight | None]
    ) -> None:
        """Queues the lost flights again, and quarantines those that killed their rank. `suspects`: those in the step,
        None for a flight that had left."""
        if not self._relaunches:
            return
        aboard = dict.fromkeys(flights)
        in_step = [flight for flight in suspects if flight is not None]
        log.warning(
            "%d requests were lost, %d of them possibly the cause: %s",
            len(aboard),
            len(in_step),
            reason,
            extra={"event": "lost", "replica": replica.index},
        )
        for flight in aboard:
            replica.leave(flight, cancel=False)
            flight.again()
        for flight in in_step:
            flight.died(alone=len(suspects) == 1)
            if not flight.suspicion.guilty:
                _call(flight.owner.died, flight)
                continue
            del aboard[flight]
            self._quarantine(flight, reason)
            for other in [other for other in self._isolated if not other.suspicion.alone]:
                self._isolated.remove(other)
                other.suspicion = Suspicion()  # the quarantined request killed their steps
                self._queue_of(other).appendleft(other)
        for flight in reversed(aboard):
            self._queue_of(flight).appendleft(flight)
        if self._isolated:
            # The least suspected runs first: its progress resets the count of restarts, which the guilty one uses up.
            ordered = sorted(self._isolated, key=lambda one: (-one.suspicion.alone, one.batch))
            self._isolated = deque((ordered.pop(), *ordered))
        if self.ending:
            self._end_interactive(self.over or reason)
        self.pump()

    def _quarantine(self, flight: Flight, reason: str) -> None:
        how = f"a rank exited {flight.suspicion.deaths} times while this request ran, twice with no other in its step"
        message = f"{how}: {reason}"
        log.error("quarantined: %s", message, extra={"event": "quarantined", "request": flight.requests[0].request_id})
        self.observer.quarantined()
        self._fail(flight, "quarantined", message, 500)

    def _end_interactive(self, reason: str) -> None:
        for waiting in self._waiting:
            for flight in [f for f in waiting if not f.batch]:
                waiting.remove(flight)
                self._fail(flight, "engine_lost" if flight.attempt else "engine_failed", reason, 503)

    def give_up(self, flight: Flight, reason: str) -> None:
        self._fail(flight, "engine_lost", reason, 503)

    @staticmethod
    def _fail(flight: Flight, code: str, message: str, status: int) -> None:
        flight.answer.error = ApiError(message, code, status=status)
        _call(flight.owner.finished, flight)
