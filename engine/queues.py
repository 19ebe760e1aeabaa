"""Who waits, and whose turn it is: priorities with ageing, fairness between queues, O(log n) a request.

Knows requests by the `Sequence` that stands for them, nothing of slots or blocks. Only the scheduler calls it. Within a
priority, sequences that ran before come first, oldest first; then the queue that was served fewest tokens has its turn.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

from .sequence import Group, Sequence

AGED_TURN = 4
"""While lines wait for longer than the ageing time, every fourth admission at least is theirs."""


class Flow:
    """One queue within one priority: its waiting sequences in order of arrival, and the tokens it was served."""

    __slots__ = ("groups", "items", "listed", "name", "number", "served")

    def __init__(self, name: str, number: int) -> None:
        self.name, self.number = name, number
        self.served = 0
        self.groups = 0
        self.items: OrderedDict[int, Sequence] = OrderedDict()
        self.listed = False


class Turn(NamedTuple):
    """Whose turn it is, with which rank (priority after ageing), and whether lines waited past the ageing time."""

    sequence: Sequence
    rank: int
    aged: bool


class _Class:
    """All flows of one priority."""

    __slots__ = ("arrivals", "clock", "flows", "made", "priority", "resumed", "turns")

    def __init__(self, priority: int) -> None:
        self.priority = priority
        self.flows: dict[str, Flow] = {}
        self.turns: list[tuple[int, int, Flow]] = []
        self.arrivals: OrderedDict[int, Sequence] = OrderedDict()
        self.resumed: list[Sequence] = []
        self.clock = 0
        self.made = 0

    def __len__(self) -> int:
        return len(self.arrivals) + len(self.resumed)

    def flow(self, name: str) -> Flow:
        flow = self.flows.get(name)
        if flow is None:
            flow = self.flows[name] = Flow(name, self.made)
            self.made += 1
        return flow

    def push(self, sequence: Sequence) -> None:
        flow = sequence.group.flow
        flow.items[sequence.number] = sequence
        self.arrivals[sequence.number] = sequence
        if not flow.listed:
            # A queue that was away, or is new, starts level: it neither saves up turns nor owes any.
            flow.served = max(flow.served, self.clock)
            flow.listed = True
            heapq.heappush(self.turns, (flow.served, flow.number, flow))

    def head(self) -> Sequence | None:
        if self.resumed:
            return self.resumed[0]
        turns = self.turns
        while turns:
            served, number, flow = turns[0]
            if not flow.items:
                heapq.heappop(turns)
                flow.listed = False
            elif flow.served != served:
                # Only ever served more, so the other entries are lower bounds and this lazy repair finds the least.
                heapq.heapreplace(turns, (flow.served, number, flow))
            else:
                return next(iter(flow.items.values()))
        return None

    def remove(self, sequence: Sequence) -> bool:
        """True if it had its first turn still before it."""
        if self.arrivals.get(sequence.number) is sequence:
            del self.arrivals[sequence.number], sequence.group.flow.items[sequence.number]
            return True
        self.resumed.remove(sequence)
        return False

    def oldest(self) -> float:
        """Arrival of who has waited longest; there is one."""
        times = [sequence.group.arrival for sequence in self.resumed[:1]]
        if self.arrivals:
            times.append(next(iter(self.arrivals.values())).group.arrival)
        return min(times)


class WaitingQueues:
    """`peek` says whose turn it is, `pop` takes it. A waiting class of lower priority is aged once its oldest has
    waited `ageing_s` for each priority between; it then has every AGED_TURN-th turn, and what it sends runs as if it
    had the better priority."""

    def __init__(self, ageing_s: float) -> None:
        self.ageing_s = ageing_s
        self._classes: list[_Class] = []
        self._passed_over = 0

    def __len__(self) -> int:
        return sum(map(len, self._classes))

    def __iter__(self) -> Iterator[Sequence]:
        for waiting in self._classes:
            yield from waiting.resumed
            yield from waiting.arrivals.values()

    def join(self, group: Group) -> None:
        """A request enters: it gets its flow, which lives as long as one of its requests does."""
        group.flow = self._class(group.request.priority).flow(group.request.queue)
        group.flow.groups += 1

    def leave(self, group: Group) -> None:
        """The request has ended."""
        flow = group.flow
        flow.groups -= 1
        if flow.groups == 0:
            del self._class(group.request.priority).flows[flow.name]

    def push(self, sequence: Sequence) -> None:
        """A request's first sequence waits."""
        self._class(sequence.group.request.priority).push(sequence)

    def push_back(self, sequence: Sequence) -> None:
        """A sequence of an admitted request waits: preempted, or a further choice. It goes before new requests."""
        insort(self._class(sequence.group.request.priority).resumed, sequence, key=Sequence.age)

    def remove(self, sequence: Sequence) -> None:
        self._class(sequence.group.request.priority).remove(sequence)

    def peek(self, now: float) -> Turn | None:
        """Whose turn it is; None if nobody waits."""
        waiting = [candidate for candidate in self._classes if len(candidate)]
        if not waiting:
            return None
        best = waiting[0]
        aged = [
            other for other in waiting[1:] if now - other.oldest() >= self.ageing_s * (other.priority - best.priority)
        ]
        turn = min(aged, key=_Class.oldest) if aged and self._passed_over >= AGED_TURN - 1 else best
        head = turn.head()
        assert head is not None
        return Turn(head, best.priority, bool(aged))

    def pop(self, turn: Turn) -> None:
        """The turn is taken: by what `peek` said now or, for a sequence that still waits, a moment ago."""
        sequence = turn.sequence
        if turn.rank != sequence.group.request.priority:
            self._passed_over = 0
        elif turn.aged:
            self._passed_over += 1
        waiting = self._class(sequence.group.request.priority)
        if waiting.remove(sequence):
            waiting.clock = max(waiting.clock, sequence.group.flow.served)

    def oldest_arrival(self) -> float | None:
        """Unix seconds; None if nobody waits."""
        return min((waiting.oldest() for waiting in self._classes if len(waiting)), default=None)

    def _class(self, priority: int) -> _Class:
        for found in self._classes:
            if found.priority == priority:
                return found
        made = _Class(priority)
        insort(self._classes, made, key=lambda waiting: waiting.priority)
        return made
