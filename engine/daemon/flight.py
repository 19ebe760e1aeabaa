"""One request body in flight through the engine, and the interface of its owner."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass, field
from typing import Protocol

from ..job import JobState, RankHeartbeat
from ..openai.answers import Answer
from ..openai.choice import Delta
from ..request import BATCH, Request, TokensEvent

SUSPECT_TOKENS = 8
"""Tokens a choice: a request that has advanced no further is at the same position. The last tokens before a death may
not have been reported, and a rank that runs out of memory dies a little earlier when batched."""
ISOLATION_DEATHS = GUILTY_DEATHS = 2


@dataclass(slots=True)
class Suspicion:
    """Evidence that a request kills its rank: `deaths` in a row at about the same position, `alone` of them with no
    other request in the step; `place_of_death`: the position, in tokens. After one death all requests of the step
    resume together. A request with a second death at the same position runs alone until it is past it; after two deaths
    alone there it is quarantined."""

    deaths: int = 0
    alone: int = 0
    place_of_death: int = 0

    def died(self, place: int, near: int, alone: bool) -> None:
        if place > self.place_of_death + near:
            self.deaths = self.alone = 0
        self.deaths, self.alone, self.place_of_death = self.deaths + 1, self.alone + alone, place

    def isolated(self, place: int, near: int) -> bool:
        """True if the request must run alone."""
        return self.deaths >= ISOLATION_DEATHS and place <= self.place_of_death + near

    @property
    def guilty(self) -> bool:
        return self.alone >= GUILTY_DEATHS


class FlightOwner:
    """Receives the events of a flight; those that it does not override are ignored."""

    def progressed(self, flight: Flight, delta: Delta) -> None:
        """Called for each addition to a choice; continues without repetition after a relaunch."""

    def finished(self, flight: Flight) -> None:
        """Called last: the answer is complete, or has its error."""

    def died(self, flight: Flight) -> None:
        """Called when a rank died in a step with this flight, possibly because of it (see `suspicion`). The dispatcher
        resumes it."""


class DispatchObserver(Protocol):
    """Observes the replicas; every call returns at once."""

    def tokens(self, replica: int, events: list[TokensEvent], counted: int) -> None:
        """A replica's events in order of arrival; `counted`: the number of their tokens in the answers' usage."""

    def report(self, replica: int, report: RankHeartbeat) -> None: ...

    def state(self, replica: int, state: JobState) -> None: ...

    def quarantined(self) -> None:
        """A request was quarantined because it killed ranks."""


@dataclass(eq=False, slots=True)
class Flight:
    """One body in flight: its requests, and its partial answer, which outlives the engine processes."""

    requests: tuple[Request, ...]
    answer: Answer
    owner: FlightOwner
    suspicion: Suspicion = field(default_factory=Suspicion)
    replica: int | None = None
    model: str = ""
    """The digest of the model that computed the answer's tokens."""
    submitted: float = field(default_factory=time.monotonic)
    attempt: int = 0
    group: int = 0
    """The same number for lines of one queue that share most of their prompts; 0: none."""

    @property
    def group_key(self) -> tuple[str, int]:
        return self.requests[0].queue, self.group

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
    def isolated(self) -> bool:
        return self.suspicion.isolated(self.answer.place, SUSPECT_TOKENS * self.choices)

    def died(self, alone: bool) -> None:
        """Records that a rank died while this flight was in its step; `alone`: no other flight was."""
        self.suspicion.died(self.answer.place, SUSPECT_TOKENS * self.choices, alone)

    def again(self) -> None:
        """Prepares the next attempt: it resumes after the answer's last token."""
        self.attempt, self.replica = self.attempt + 1, None
        self.requests = tuple(
            dataclasses.replace(request, emitted=self.answer.emitted(prompt))
            for prompt, request in enumerate(self.requests)
        )

    def restart(self) -> None:
        """Discards the answer's tokens: another model computes all."""
        self.answer = self.answer.restarted()
        self.requests = tuple(dataclasses.replace(request, emitted=()) for request in self.requests)
