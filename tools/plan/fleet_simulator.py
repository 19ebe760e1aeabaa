"""Simulates replicas behind one queue: throughput, waiting times, the cost of failures. Step times are
tools/plan/roofline.py's; requests go to the least loaded replica, as in the daemon. Pure and seeded; no torch.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from .roofline import Load, SimulatedGroup


@dataclass(frozen=True, slots=True)
class Replica:
    """`step_s` holds (sequences, seconds of a step) at rising counts, read off in between by straight lines; a prompt
    holds all of a replica's sequences up for `prompt_s`, and its first token takes `later_s` more (a pipeline's other
    stages); `slots` run at once."""

    step_s: Sequence[tuple[int, float]]
    prompt_s: float
    slots: int
    later_s: float = 0.0

    def __post_init__(self) -> None:
        counts = [n for n, _ in self.step_s]
        if not counts or counts != sorted(set(counts)) or self.slots < 1:
            raise ValueError(f"slots={self.slots}, step_s at {counts}: give a slot or more, and steps at rising counts")

    def step(self, running: int) -> float:
        i = bisect_right(self.step_s, (running, float("inf")))
        if i == 0 or i == len(self.step_s):
            return self.step_s[min(i, len(self.step_s) - 1)][1]
        (low, a), (high, b) = self.step_s[i - 1], self.step_s[i]
        return a + (b - a) * (running - low) / (high - low)


def replica_of(group: SimulatedGroup, slots: int, prompt: int, context: float, chunk: int) -> Replica:
    counts = [n for n in (1, 2, 4, 8, 16, 32, 64, 128, 256) if n < slots] + [slots]
    steps = [(n, group.step(Load(decodes=n, context=context)).total_s) for n in counts]
    return Replica(steps, group.prefill(prompt, chunk).total_s, slots)


@dataclass(frozen=True, slots=True)
class Demand:
    """`requests` at `per_s` on average (None: all at the start), with 0.5 to 1.5 times `output` tokens."""

    requests: int
    output: int
    per_s: float | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Faults:
    """A replica fails every `mtbf_s` on average (None: never), returns after `relaunch_s`; its requests start over
    first."""

    mtbf_s: float | None = None
    relaunch_s: float = 300.0


@dataclass(frozen=True, slots=True)
class FleetOutcome:
    """Seconds and tokens of a whole run, times as median and 99th percentile. `wait` is from arrival to the first
    admission, `first` to the first token, `took` to the last; `each` is a request's mean time a token after the first;
    `lost_tokens` were computed and thrown away with a replica; `busy` is the share of replicas' time with something
    running."""

    replicas: int
    requests: int
    tokens: int
    span_s: float
    wait_s: tuple[float, float]
    first_s: tuple[float, float]
    each_s: tuple[float, float]
    took_s: tuple[float, float]
    losses: int
    lost_tokens: int
    down_s: float
    busy: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.span_s

    @property
    def commits_per_s(self) -> float:
        """Results that the one queue has to store."""
        return self.requests / self.span_s


@dataclass(slots=True)
class _Request:
    arrived: float
    tokens: int
    admitted: float | None = None
    first: float = 0.0


class _Live:
    """A running replica: tokens per sequence so far (`counter`), `ends`: (counter at the end, number, request)."""

    __slots__ = ("busy_s", "counter", "down", "ends", "seen", "stalled", "version")

    def __init__(self) -> None:
        self.counter = self.seen = self.stalled = self.busy_s = 0.0
        self.ends: list[tuple[float, int, _Request]] = []
        self.version = 0
        self.down = False


def simulate_fleet(replica: Replica, replicas: int, demand: Demand, faults: Faults = Faults()) -> FleetOutcome:
    """Runs all requests to their ends. The same arguments give the same outcome."""
    if replicas < 1:
        raise ValueError(f"replicas={replicas}: a fleet has 1 or more")
    return _Simulation(replica, replicas, demand, faults).outcome()


class _Simulation:
    def __init__(self, replica: Replica, replicas: int, demand: Demand, faults: Faults) -> None:
        self.replica, self.faults, self.random = replica, faults, Random(demand.seed)
        self.step_s = [replica.step(n) for n in range(replica.slots + 1)]
        self.live = [_Live() for _ in range(replicas)]
        self.events: list[tuple[float, int, str, int, int]] = []
        self.number = 0
        self.queue: deque[_Request] = deque()
        self.idle = [(0, i) for i in range(replicas)]  # (running, replica): entries that are out of date are skipped
        self.waits: list[float] = []
        self.firsts: list[float] = []
        self.eaches: list[float] = []
        self.tooks: list[float] = []
        self.tokens = self.losses = self.lost_tokens = 0
        self.down_s = 0.0
        low, high = (demand.output + 1) // 2, demand.output + demand.output // 2
        self.left = demand.requests
        at = 0.0
        self.coming: deque[_Request] = deque()
        for _ in range(demand.requests):
            if demand.per_s is not None:
                at += self.random.expovariate(demand.per_s)
            self.coming.append(_Request(at, self.random.randint(max(1, low), max(1, high))))
        if faults.mtbf_s is not None:
            for i in range(replicas):
                self._at(self.random.expovariate(1.0 / faults.mtbf_s), "loss", i)

    def outcome(self) -> FleetOutcome:
        now = 0.0
        while self.left:
            arrival = self.coming[0].arrived if self.coming else float("inf")
            if self.events and self.events[0][0] < arrival:
                now, _, kind, i, version = heapq.heappop(self.events)
                self._happens(now, kind, i, version)
            else:
                now = arrival
                self.queue.append(self.coming.popleft())
            self._dispatch(now)
        span = max(now, 1e-12)
        for live in self.live:
            self._advance(live, now)
        busy = sum(live.busy_s for live in self.live) / (span * len(self.live))
        return FleetOutcome(
            len(self.live), len(self.tooks), self.tokens, span, _percentiles(self.waits), _percentiles(self.firsts),
            _percentiles(self.eaches), _percentiles(self.tooks),
            self.losses, self.lost_tokens, self.down_s, min(1.0, busy),
        )  # fmt: skip

    def _at(self, time: float, kind: str, i: int, version: int = 0) -> None:
        self.number += 1
        heapq.heappush(self.events, (time, self.number, kind, i, version))

    def _happens(self, now: float, kind: str, i: int, version: int) -> None:
        live = self.live[i]
        if kind == "end":
            if version == live.version:
                self._advance(live, now)
                while live.ends and live.ends[0][0] <= live.counter + 1e-6:
                    self._finish(now, heapq.heappop(live.ends)[2])
                self._expect(now, i)
        elif kind == "loss":
            self._advance(live, now)
            self.losses += 1
            for end, _, request in sorted(live.ends, reverse=True):
                self.lost_tokens += max(0, request.tokens - int(end - live.counter))
                self.queue.appendleft(request)
            live.ends.clear()
            live.down, live.version = True, live.version + 1
            self.down_s += self.faults.relaunch_s
            self._at(now + self.faults.relaunch_s, "back", i)
        else:
            live.down, live.seen = False, now
            heapq.heappush(self.idle, (0, i))
            if self.faults.mtbf_s is not None:
                self._at(now + self.random.expovariate(1.0 / self.faults.mtbf_s), "loss", i)

    def _finish(self, now: float, request: _Request) -> None:
        self.tokens += request.tokens
        self.firsts.append(request.first - request.arrived)
        if request.tokens > 1:
            self.eaches.append((now - request.first) / (request.tokens - 1))
        self.tooks.append(now - request.arrived)
        self.left -= 1

    def _advance(self, live: _Live, now: float) -> None:
        if live.ends and now > live.seen:
            live.busy_s += now - live.seen
            began = max(live.seen, live.stalled)
            if now > began:
                live.counter += (now - began) / self.step_s[len(live.ends)]
        live.seen = now

    def _expect(self, now: float, i: int) -> None:
        """Predicts the replica's next end, and offers its free slots."""
        live = self.live[i]
        live.version += 1
        if live.ends:
            after = (live.ends[0][0] - live.counter) * self.step_s[len(live.ends)]
            self._at(max(now, live.stalled) + max(0.0, after), "end", i, live.version)
        if len(live.ends) < self.replica.slots:
            heapq.heappush(self.idle, (len(live.ends), i))

    def _dispatch(self, now: float) -> None:
        while self.queue and self.idle:
            running, i = heapq.heappop(self.idle)
            live = self.live[i]
            if live.down or running != len(live.ends):
                continue
            request = self.queue.popleft()
            self._advance(live, now)
            live.stalled = max(now, live.stalled) + self.replica.prompt_s
            if request.admitted is None:
                request.admitted, request.first = now, live.stalled + self.replica.later_s
                self.waits.append(now - request.arrived)
            self.number += 1
            heapq.heappush(live.ends, (live.counter + request.tokens, self.number, request))
            self._expect(now, i)


def _percentiles(values: Sequence[float]) -> tuple[float, float]:
    """Median and 99th."""
    ordered = sorted(values)
    return (ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]) if ordered else (0, 0)
