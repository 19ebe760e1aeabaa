"""One body on its way through the engine, and the owner of its answer."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass, field
from typing import Protocol

from ..job import JobState, RankHeartbeat
from ..openai.choice import Delta
from ..openai.responses import Answer
from ..request import BATCH, Request, TokensEvent

NEAR = 8
"""Tokens a choice: a request that has come no further is at the same place. The last ones before a death may not have
been reported, and what ends for lack of memory ends a little earlier when batched."""
APART_DEATHS = GUILTY_DEATHS = 2


@dataclass(slots=True)
class Suspicion:
    """Whether a request kills its rank. `deaths` in a row at about one place, `alone` of them with nothing else in the
    step; `stood`: the place, in tokens. After one death all requests of the step resume together. A request that a
    second death finds at the same place runs alone until it is past it; one that dies there twice alone is given up."""

    deaths: int = 0
    alone: int = 0
    stood: int = 0

    def died(self, place: int, near: int, alone: bool) -> None:
        if place > self.stood + near:
            self.deaths = self.alone = 0
        self.deaths, self.alone, self.stood = self.deaths + 1, self.alone + alone, place

    def apart(self, place: int, near: int) -> bool:
        """Whether it has to run alone."""
        return self.deaths >= APART_DEATHS and place <= self.stood + near

    @property
    def guilty(self) -> bool:
        return self.alone >= GUILTY_DEATHS


class FlightOwner(Protocol):
    """Receives the answer."""

    def progressed(self, flight: Flight, delta: Delta) -> None:
        """A piece of a choice. After a relaunch an answer resumes."""

    def finished(self, flight: Flight) -> None:
        """The answer is whole, or has its error. Nothing follows."""

    def died(self, flight: Flight) -> None:
        """It was in a step that a rank died in, perhaps of it; `suspicion` has it. It will go on."""


class DispatchObserver(Protocol):
    """Observes the replicas; every call returns at once."""

    def tokens(self, replica: int, events: list[TokensEvent], counted: int) -> None:
        """Events of a replica, as they came; `counted`: how many tokens of them the answers' usage counts."""

    def report(self, replica: int, report: RankHeartbeat) -> None: ...

    def state(self, replica: int, state: JobState) -> None: ...

    def quarantined(self) -> None:
        """A request was given up because ranks died of it."""


@dataclass(eq=False, slots=True)
class Flight:
    """One body under way: its requests, and the answer in the making, which outlives every engine."""

    requests: tuple[Request, ...]
    answer: Answer
    owner: FlightOwner
    suspicion: Suspicion = field(default_factory=Suspicion)
    replica: int | None = None
    submitted: float = field(default_factory=time.monotonic)

    @property
    def choices(self) -> int:
        return sum(request.params.n for request in self.requests)

    @property
    def owned_by(self) -> str:
        """The key's id."""
        return self.requests[0].owner

    @property
    def batch(self) -> bool:
        return self.requests[0].priority == BATCH

    @property
    def epoch(self) -> int:
        return self.requests[0].epoch

    @property
    def apart(self) -> bool:
        return self.suspicion.apart(self.answer.place, NEAR * self.choices)

    def died(self, alone: bool) -> None:
        """A rank died with it in the step; `alone`: with nothing else."""
        self.suspicion.died(self.answer.place, NEAR * self.choices, alone)

    def again(self) -> None:
        """Prepares the next epoch: resumes after the answer's last token; events of the last epoch are ignored."""
        self.replica = None
        self.requests = tuple(
            dataclasses.replace(request, epoch=request.epoch + 1, emitted=self.answer.emitted(prompt))
            for prompt, request in enumerate(self.requests)
        )
