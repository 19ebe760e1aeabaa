"""The open requests and the waiting queues of the scheduler: O(log n) per request. Within a priority (after ageing)
sequences that ran before come first, oldest first. The others come from the owner that was served the fewest tokens,
from that owner's queue that was served the fewest, and within it by `order` and arrival.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import OrderedDict, deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from math import inf
from typing import NamedTuple

from ..request import FinishReason, Request, TokenLogprob, TokensEvent
from .kv_manager import Residency
from .limits import SchedulerLimits, check_request
from .sequence import DigestChain, FairShare, RequestGroup, RequestQueue, RequestTimes, Sequence

AGED_TURN = 4
"""While a class has waited longer than the ageing time, at least every fourth admission is one of its sequences."""


class NextSequence(NamedTuple):
    """The next sequence, its rank (priority after ageing), and whether a class waited past the ageing time."""

    sequence: Sequence
    rank: int
    aged: bool


class _FairOrder:
    """Waiting queues, or owners of queues; the one that was served the fewest tokens comes first."""

    __slots__ = ("clock", "heap")

    def __init__(self) -> None:
        self.heap: list[tuple[int, int, RequestQueue | _Owner]] = []
        self.clock = 0

    def add(self, one: RequestQueue | _Owner, away: bool) -> None:
        if away:
            # A new or returning one starts at the current level: no credit and no debt from the time it was away.
            one.served = max(one.served, self.clock)
        if not one.listed:
            one.listed = True
            heapq.heappush(self.heap, (one.served, one.number, one))

    def first(self) -> Sequence | None:
        heap = self.heap
        while heap:
            served, number, one = heap[0]
            if one.served != served:
                # `served` only grows, so all entries are lower bounds, and this lazy repair finds the least.
                heapq.heapreplace(heap, (one.served, number, one))
            elif (sequence := one.first()) is not None:
                return sequence
            else:
                heapq.heappop(heap)
                one.listed = False
        return None


class _Owner(FairShare):
    """All queues of one owner within one priority; they take turns among themselves."""

    __slots__ = ("queues", "turns", "waiting")

    def __init__(self, name: str, number: int) -> None:
        super().__init__(name, number)
        self.waiting = 0
        self.queues: dict[str, RequestQueue] = {}
        self.turns = _FairOrder()

    def first(self) -> Sequence | None:
        return self.turns.first()


class _Class:
    """All owners of one priority."""

    __slots__ = ("arrivals", "made", "owners", "priority", "resumed", "turns")

    def __init__(self, priority: int) -> None:
        self.priority = priority
        self.owners: dict[str, _Owner] = {}
        self.turns = _FairOrder()
        self.arrivals: OrderedDict[int, Sequence] = OrderedDict()
        self.resumed: list[Sequence] = []
        self.made = 0

    def __len__(self) -> int:
        return len(self.arrivals) + len(self.resumed)

    def queue(self, owner: str, name: str) -> RequestQueue:
        self.made += 1
        of = self.owners.get(owner)
        if of is None:
            of = self.owners[owner] = _Owner(owner, self.made)
        queue = of.queues.get(name)
        if queue is None:
            queue = of.queues[name] = RequestQueue(name, self.made, of)
        return queue

    def forget(self, queue: RequestQueue) -> None:
        owner = self.owners[queue.owner.name]
        del owner.queues[queue.name]
        if not owner.queues:
            del self.owners[owner.name]

    def push(self, sequence: Sequence, ageing_s: float) -> None:
        queue = sequence.group.queue
        owner = self.owners[queue.owner.name]
        owner.turns.add(queue, not queue.items)
        self.turns.add(owner, not owner.waiting)
        queue.push(sequence, ageing_s)
        owner.waiting += 1
        self.arrivals[sequence.number] = sequence

    def resume(self, sequence: Sequence) -> None:
        """Returns a deferred sequence to its place."""
        sequence.deferred = False
        if self.arrivals.get(sequence.number) is sequence:
            queue = sequence.group.queue
            queue.resume(sequence)
            owner = self.owners[queue.owner.name]
            owner.turns.add(queue, False)
            self.turns.add(owner, False)

    def head(self) -> Sequence | None:
        """The first waiting sequence that is not deferred."""
        return next((sequence for sequence in self.resumed if not sequence.deferred), None) or self.turns.first()

    def taken(self, queue: RequestQueue) -> None:
        """Records that the queue's first sequence was admitted."""
        owner = self.owners[queue.owner.name]
        owner.turns.clock = max(owner.turns.clock, queue.served)
        self.turns.clock = max(self.turns.clock, owner.served)

    def remove(self, sequence: Sequence) -> bool:
        """Removes a waiting sequence; True if it was never admitted."""
        if self.arrivals.get(sequence.number) is sequence:
            queue = sequence.group.queue
            del self.arrivals[sequence.number], queue.items[sequence.number]
            self.owners[queue.owner.name].waiting -= 1
            return True
        self.resumed.remove(sequence)
        return False

    def oldest(self) -> float:
        """Arrival of the oldest waiting sequence; the class must not be empty."""
        times = [sequence.group.arrival for sequence in self.resumed[:1]]
        if self.arrivals:
            times.append(next(iter(self.arrivals.values())).group.arrival)
        return min(times)


class WaitingQueues:
    """`peek` returns the next turn, `pop` takes it. A waiting class of lower priority is aged when its oldest sequence
    has waited `ageing_s` for each priority in between; it then gets every AGED_TURN-th admission, and its sequences
    run with the better priority."""

    def __init__(self, ageing_s: float) -> None:
        self.ageing_s = ageing_s
        self.priority_classes: list[_Class] = []
        self._passed_over = 0

    def __len__(self) -> int:
        return sum(map(len, self.priority_classes))

    def join(self, group: RequestGroup) -> None:
        """Assigns a new request its queue, which exists as long as one of its requests is open."""
        request = group.request
        group.queue = self._class(request.priority).queue(request.owner, request.queue)
        group.queue.groups += 1

    def leave(self, group: RequestGroup) -> None:
        queue = group.queue
        queue.groups -= 1
        if queue.groups == 0:
            self._class(group.request.priority).forget(queue)

    def push(self, sequence: Sequence) -> None:
        """Queues the first sequence of a request."""
        self._class(sequence.group.request.priority).push(sequence, self.ageing_s)

    def push_back(self, sequence: Sequence) -> None:
        """Queues a sequence of an admitted request (preempted, or a further choice) before new requests."""
        insort(self._class(sequence.group.request.priority).resumed, sequence, key=Sequence.age)

    def remove(self, sequence: Sequence) -> None:
        self._class(sequence.group.request.priority).remove(sequence)

    def peek(self, now: float) -> NextSequence | None:
        waiting = {turn: head for turn in self.priority_classes if len(turn) and (head := turn.head()) is not None}
        if not waiting:
            return None
        best, *others = waiting
        aged = [other for other in others if now - other.oldest() >= self.ageing_s * (other.priority - best.priority)]
        turn = min(aged, key=_Class.oldest) if aged and self._passed_over >= AGED_TURN - 1 else best
        return NextSequence(waiting[turn], best.priority, bool(aged))

    @property
    def best_rank(self) -> float:
        """A lower bound of the rank of the next turn."""
        return min((waiting.priority for waiting in self.priority_classes if len(waiting)), default=inf)

    def resume(self, sequence: Sequence) -> None:
        """Makes a sequence with `deferred` set, which `peek` does not return, the one that it was before; ignores one
        that has ended."""
        if sequence.deferred and sequence.state == "waiting":
            self._class(sequence.group.request.priority).resume(sequence)

    def pop(self, turn: NextSequence) -> None:
        """Takes a turn that `peek` returned, now or earlier; its sequence must still wait."""
        sequence = turn.sequence
        if turn.rank != sequence.group.request.priority:
            self._passed_over = 0
        elif turn.aged:
            self._passed_over += 1
        waiting = self._class(sequence.group.request.priority)
        if waiting.remove(sequence):
            waiting.taken(sequence.group.queue)

    def oldest_arrival(self) -> float | None:
        """Arrival of the oldest waiting sequence, unix seconds; None if none waits."""
        return min((waiting.oldest() for waiting in self.priority_classes if len(waiting)), default=None)

    def _class(self, priority: int) -> _Class:
        for priority_class in self.priority_classes:
            if priority_class.priority == priority:
                return priority_class
        made = _Class(priority)
        insort(self.priority_classes, made, key=lambda waiting: waiting.priority)
        return made


_RECORDS = 4096


class OpenRequests:
    """The open requests: adds them, emits their events and ends them. `spawn` makes a request's further choices.
    `now`: time of the scheduler's last call."""

    def __init__(
        self,
        limits: SchedulerLimits,
        waiting: WaitingQueues,
        residency: Residency,
        spawn: Callable[[RequestGroup], None],
    ) -> None:
        self.now = 0.0
        self.groups: dict[str, RequestGroup] = {}
        self.events: list[TokensEvent] = []
        self._limits, self._waiting, self._residency, self._spawn = limits, waiting, residency, spawn
        self.deadlines: list[tuple[float, int, str]] = []
        self.ended: deque[RequestTimes] = deque(maxlen=_RECORDS)
        self._arrivals = 0

    def add(self, request: Request, now: float) -> None:
        check_request(request, self._limits)
        if request.request_id in self.groups:
            raise ValueError(f"request {request.request_id} is running: ids are unique, choose another")
        group = RequestGroup(request, self._arrivals, now)
        self._arrivals += 1
        self.groups[request.request_id] = group
        self._waiting.join(group)
        for choice in range(len(request.emitted) or 1):
            chain: DigestChain | None = None
            if self._limits.enable_prefix_caching:
                chain = DigestChain(request.salt, self._limits.block_size, self._limits.tokens_ahead)
            sequence = Sequence(group, choice, chain, self._limits.max_model_len)
            group.sequences.append(sequence)
            if not request.emitted:
                self._waiting.push(sequence)
            elif sequence.state == "waiting":
                self._waiting.push_back(sequence)  # resumes as after a preemption
        if request.deadline is not None:
            heapq.heappush(self.deadlines, (request.deadline, group.number, request.request_id))

    def take_events(self) -> list[TokensEvent]:
        events, self.events = self.events, []
        return events

    def finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        *,
        tokens: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprob, ...] | None = None,
        stop_token: int | None = None,
        start: int | None = None,
        message: str | None = None,
    ) -> None:
        """Ends a choice: emits its last event and frees slot and blocks. start: index of the first of `tokens`;
        default: the number of tokens already sent."""
        group = sequence.group
        if sequence.state == "running":
            self._residency.running.remove(sequence)
            self._residency.vacate(sequence)
        elif sequence.state == "waiting":
            self._waiting.remove(sequence)
        sequence.state = "ended"
        if sequence.fresh:
            sequence.fresh = False
            group.unforked -= 1
        first = sequence.outputs - len(tokens) if start is None else start
        self.tell(sequence, reason, tokens, first, logprobs, stop_token, message)
        group.open -= 1
        if group.open == 0:
            self._close(group)

    def tell(
        self,
        sequence: Sequence,
        finish: FinishReason | None,
        tokens: tuple[int, ...],
        start: int,
        logprobs: tuple[TokenLogprob, ...] | None = None,
        stop_token: int | None = None,
        message: str | None = None,
    ) -> None:
        request = sequence.group.request
        prompt: Seq[TokenLogprob | None] | None = sequence.prompt_logprobs if sequence.prompt_scored else None
        if prompt is not None:
            sequence.prompt_logprobs = None
        self.events.append(
            TokensEvent(
                request.request_id,
                sequence.choice,
                start,
                tokens,
                finish,
                logprobs,
                None if prompt is None else tuple(prompt),
                stop_token,
                message,
                sequence.group.cached_tokens,
            )
        )

    def end_group(self, group: RequestGroup, reason: FinishReason, message: str | None = None) -> None:
        """Ends every open choice of a request, including those that were never made."""
        self._spawn(group)
        for sequence in group.sequences:
            if sequence.state != "ended":
                self.finish(sequence, reason, message=message)

    def _close(self, group: RequestGroup) -> None:
        self._residency.unhold(group)
        self._waiting.leave(group)
        del self.groups[group.request.request_id]
        self.ended.append(RequestTimes(group.arrival, group.admitted, group.first_token, self.now))

    def expire(self, now: float) -> None:
        """Ends requests past their deadline with "timeout"."""
        self.now = now
        deadlines = self.deadlines
        while deadlines and deadlines[0][0] <= now:
            _, number, request_id = heapq.heappop(deadlines)
            group = self.groups.get(request_id)
            if group is not None and group.number == number:
                self.end_group(group, "timeout")
        if len(deadlines) > 2 * len(self.groups) + 64:
            numbers = {group.number for group in self.groups.values()}
            self.deadlines = [entry for entry in deadlines if entry[1] in numbers]
            heapq.heapify(self.deadlines)
