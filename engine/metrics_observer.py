"""The daemon's Observer that keeps metrics: its calls become series, and answered bodies spans where traces are wanted.

launchers/serve.py makes one and hands it to the daemon; a test may do the same with a registry of its own.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from prometheus_client import CollectorRegistry

from .daemon.job import JobState, RankReport
from .daemon.observe import Observer, RequestTimes
from .metrics import BatchView, Metrics
from .request import TokensEvent

_LIVE = ("validating", "in_progress", "finalizing", "cancelling")
_MAX_CHOICES = 1 << 16


class MetricsObserver(Observer):
    """`data_dir`: whose disk is looked at for every scrape. `on_request`: told every answered body too (traces)."""

    def __init__(
        self,
        registry: CollectorRegistry,
        data_dir: Path | None = None,
        on_request: Callable[[RequestTimes], None] = lambda times: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.metrics = Metrics(registry, clock)
        self._data_dir, self._on_request, self._clock = data_dir, on_request, clock
        self._last: dict[tuple[str, int], float] = {}

    def tokens(self, events: list[TokensEvent]) -> None:
        now, last = self._clock(), self._last
        for event in events:
            key = (event.request_id, event.choice)
            if event.tokens:
                if (before := last.get(key)) is not None:
                    self.metrics.observe_gap(now - before, len(event.tokens))
                if len(last) < _MAX_CHOICES:
                    last[key] = now
            if event.finish is not None:
                last.pop(key, None)
                self.metrics.observe_finish(event.finish)

    def report(self, replica: int, report: RankReport) -> None:
        self.metrics.observe_report(report, replica)

    def state(self, replica: int, state: JobState) -> None:
        self.metrics.observe_state(state, replica)
        if state.phase in ("restarting", "failed", "stopped"):
            self._last.clear()  # whose choices are lost is not known here: the next gap of the others is not counted

    def failure(self, replica: int, kind: str, reason: str) -> None:
        """A launch ended badly: its JobFailure's kind and reason."""
        self.metrics.observe_failure(kind, reason, replica)

    def request(self, times: RequestTimes) -> None:
        first = None if times.first is None else times.first - times.arrived
        self.metrics.observe_request(first, times.ended - times.arrived, times.prompt_tokens, times.completion_tokens)
        self._on_request(times)

    def quarantined(self) -> None:
        self.metrics.observe_quarantine()

    def commit(self, seconds: float) -> None:
        self.metrics.observe_commit(seconds)

    def http(self, route: str, code: int, seconds: float) -> None:
        """`route`: the template of the route that answered."""
        self.metrics.observe_http(route, code, seconds)

    def store(self, fault: str | None) -> None:
        """Whether the store takes writes, a few times a minute and whenever that changes."""
        self.metrics.observe_store(fault is None)

    def queues(self, batches: Mapping[str, int], waiting: int, in_flight: int) -> None:
        self.metrics.observe_queues(batches, waiting, in_flight)

    def batches(self, view: BatchView) -> None:
        """What `batch_view` read."""
        self.metrics.observe_batches(view)

    def render(self, accept: str) -> tuple[bytes, str]:
        if self._data_dir is not None:
            disk = os.statvfs(self._data_dir)
            self.metrics.observe_disk(disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize)
        return self.metrics.render(accept)


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
