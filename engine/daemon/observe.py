"""What the daemon tells whoever keeps metrics. `Observer` itself keeps none: launchers/ hands in one that does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..request import TokensEvent
from .job import JobState, RankReport

if TYPE_CHECKING:
    from ..metrics import BatchView


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
    traceparent: str | None = None
    """The sender's W3C header, as it came."""


class Observer:
    """Every method is called on the event loop but `commit` (the store's thread), and must return at once."""

    def tokens(self, events: list[TokensEvent]) -> None:
        """Events of a replica, as they came."""

    def report(self, replica: int, report: RankReport) -> None:
        """A rank's heartbeat."""

    def state(self, replica: int, state: JobState) -> None:
        """A replica's new state."""

    def failure(self, replica: int, kind: str, reason: str) -> None:
        """A launch ended badly: its kind (a closed set) and why."""

    def request(self, times: RequestTimes) -> None:
        """A body was answered."""

    def quarantined(self) -> None:
        """A request was given up because ranks died of it."""

    def commit(self, seconds: float) -> None:
        """The store committed a group."""

    def http(self, route: str, code: int, seconds: float) -> None:
        """A response: `route` is the template, never what was asked for."""

    def store(self, fault: str | None) -> None:
        """Whether the store takes writes; about once a second, and whenever that changes."""

    def batches(self, view: BatchView) -> None:
        """How far the batches under way are; about once a second."""

    def queues(self, batches: Mapping[str, int], waiting: int, in_flight: int) -> None:
        """Batches by status, and bodies in the dispatcher; about once a second."""

    def render(self, accept: str) -> tuple[bytes, str]:
        """The exposition, and its content type."""
        return b"", "text/plain; version=0.0.4; charset=utf-8"
