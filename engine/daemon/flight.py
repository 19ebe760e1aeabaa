"""One body on its way through the engine, and who wants its answer. Made by batch_feed.py and
engine/daemon/http/generate.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..openai.responses import Answer, Delta
from ..request import BATCH, Request


class FlightOwner(Protocol):
    """Whoever wants the answer."""

    def progressed(self, flight: Flight, delta: Delta) -> None:
        """A piece of a choice. After a relaunch an answer begins anew unless `sent` is set."""

    def landed(self, flight: Flight) -> None:
        """The answer is whole, or has its fault. Nothing follows."""

    def died(self, flight: Flight) -> None:
        """It was in a step that a rank died in; `deaths` has been counted. It will run again."""


@dataclass(eq=False, slots=True)
class Flight:
    """One body under way: its requests, and the answer in the making. `sent`: the client has seen part of it, so it
    cannot begin anew. `deaths`: steps that a rank died in with it; `stood`: where it stood in the last one (tokens);
    `cleared`: it has passed that place since."""

    requests: tuple[Request, ...]
    make: Callable[[Sequence[Request]], Answer]
    owner: FlightOwner
    deaths: int = 0
    sent: bool = False
    stood: int = 0
    cleared: bool = False
    answer: Answer = field(init=False)
    replica: int | None = None

    def __post_init__(self) -> None:
        self.answer = self.make(self.requests)

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

    def again(self) -> None:
        """As never begun, in the next epoch: events of the last one count no more."""
        self.requests = tuple(dataclasses.replace(r, epoch=r.epoch + 1) for r in self.requests)
        self.answer, self.replica = self.make(self.requests), None
