"""What the daemon tells whoever keeps metrics. `Observer` itself keeps none: launchers/ hands in one that does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..request import TokensEvent
from .job import JobState, RankReport


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """One answered body, in unix seconds; `first` is None where no token came. `finish`: the first choice's."""

    arrived: float
    submitted: float
    first: float | None
    ended: float
    prompt_tokens: int
    completion_tokens: int
    finish: str
    interactive: bool


class Observer:
    """Every method is called on the event loop but `commit` (the store's thread), and must return at once."""

    def tokens(self, events: list[TokensEvent]) -> None:
        """Events of a replica, as they came."""

    def report(self, replica: int, report: RankReport) -> None:
        """A rank's heartbeat."""

    def state(self, replica: int, state: JobState) -> None:
        """A replica's new state."""

    def request(self, times: RequestTimes) -> None:
        """A body was answered."""

    def quarantined(self) -> None:
        """A request was given up because ranks died of it."""

    def commit(self, seconds: float) -> None:
        """The store committed a group."""

    def queues(self, batches: Mapping[str, int], waiting: int, in_flight: int) -> None:
        """Batches by status, and bodies in the dispatcher; a few times a minute."""

    def render(self, accept: str) -> tuple[bytes, str]:
        """The exposition, and its content type."""
        return b"", "text/plain; version=0.0.4; charset=utf-8"
