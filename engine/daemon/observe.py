"""What the daemon tells whoever keeps metrics. `Observer` itself keeps none: launchers/ hands in one that does."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Mapping
from dataclasses import dataclass

from ..job import JobState, RankHeartbeat
from ..request import TokensEvent

Figures = Mapping[str, Mapping[tuple[str, ...], float]]


@dataclass(frozen=True, slots=True)
class BatchView:
    """Lines of the batches under way, as of now. `oldest` is when the oldest batch with lines left was created,
    `first_expiry` when the first expires, in unix seconds, None where there is none. `windows`: each batch's lines left
    and when it expires."""

    left: int = 0
    completed: int = 0
    failed: int = 0
    oldest: float | None = None
    first_expiry: float | None = None
    windows: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class AnswerTimes:
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


class SteadyTime:
    """Unix seconds that go on evenly from when this was made: differences are durations, though the clock be set."""

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()

    def __call__(self) -> float:
        return self._offset + time.monotonic()


class Observer:
    """Every method is called on the event loop but `commit` and `store_error` (the store's thread) and `render` (the
    probe listener's), and must return at once."""

    def tokens(self, replica: int, events: list[TokensEvent], counted: int) -> None:
        """Events of a replica, as they came; `counted`: how many tokens of them the answers' usage counts."""

    def report(self, replica: int, report: RankHeartbeat) -> None:
        """A rank's heartbeat."""

    def state(self, replica: int, state: JobState) -> None:
        """A replica's new state."""

    def failure(self, replica: int, kind: str, reason: str, culprit: Mapping[str, object]) -> None:
        """A launch ended badly: its kind (a closed set), why, and who is to blame (engine/job.py: CULPRIT)."""

    def reloaded(self, outcome: str) -> None:
        """A reload of the configuration is over: done, refused or failed."""

    def request(self, times: AnswerTimes) -> None:
        """A body was answered."""

    def used(self, owner: str, requests: int, prompt: int, completion: int) -> None:
        """Requests of a key, or lines, were computed; `owner`: the key's id, "" where there are none."""

    def limited(self, owner: str, limit: str) -> None:
        """A request was refused by one of its key's limits."""

    def quarantined(self) -> None:
        """A request was given up because ranks died of it."""

    def commit(self, seconds: float) -> None:
        """The store committed a group."""

    def store_error(self) -> None:
        """A commit, or the writing of a file, failed."""

    def http(self, route: str, code: int, seconds: float) -> None:
        """A response: `route` is the template, never what was asked for."""

    def store(self, fault: str | None) -> None:
        """Whether the store takes writes; about once a second, and whenever that changes."""

    def clock(self, jump: float) -> None:
        """Seconds that the wall clock has jumped by, 0 while it is trusted; about once a second."""

    def batches(self, view: BatchView) -> None:
        """How far the batches under way are; about once a second."""

    def queues(self, batches: Mapping[str, int], waiting: int, in_flight: int) -> None:
        """Batches by status, and bodies in the dispatcher; about once a second."""

    def figures(self) -> Figures:
        """Counters and gauges as they stand, by name of engine/metrics/catalogue.py and values of labels."""
        return {}

    def render(self, accept: str) -> tuple[bytes, str]:
        """The exposition, and its content type."""
        return b"", "text/plain; version=0.0.4; charset=utf-8"


_LIVE = ("validating", "in_progress", "finalizing", "cancelling")


def batch_view(db: sqlite3.Connection) -> BatchView:
    """A query for the store: how far the batches under way are."""
    marks = ", ".join("?" for _ in _LIVE)
    rows = db.execute(
        f"SELECT total, completed, failed, created_at, expires_at FROM batches WHERE status IN ({marks})", _LIVE
    ).fetchall()
    windows = tuple((max(0, total - completed - failed), expiry) for total, completed, failed, _, expiry in rows)
    left = sum(lines for lines, _ in windows)
    return BatchView(
        left,
        sum(row[1] for row in rows),
        sum(row[2] for row in rows),
        min((row[3] for row in rows), default=None) if left else None,
        min((row[4] for row in rows), default=None),
        windows,
    )
