"""How far a run is and what it did, as data: for those who show it. Made by engine/batchrun.py; knows no terminal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from .daemon.job import RankReport

HIDDEN, EXPOSED = "collective_hidden_seconds", "collective_exposed_seconds"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """How far a run is. `total` counts the file's lines, blank ones included."""

    phase: str
    total: int
    skipped: int = 0
    ok: int = 0
    failed: int = 0
    in_flight: int = 0
    tokens: int = 0
    seconds: float = 0.0

    @property
    def done(self) -> int:
        return self.skipped + self.ok + self.failed


class Progress(Protocol):
    """Someone who shows how far a run is."""

    def update(self, snapshot: Snapshot) -> None:
        """Called on the event loop, often: must return at once."""


@dataclass(frozen=True, slots=True)
class Summary:
    """What a run did. `requests` are the lines read, `skipped` those finished earlier; `reason` says why it stopped
    before the end, `lost` how many lines were under way then. Communication: seconds, mean over the ranks, None where
    no rank reported it."""

    requests: int
    ok: int
    failed: int
    skipped: int
    prompt_tokens: int
    tokens: int
    seconds: float
    hidden_seconds: float | None = None
    exposed_seconds: float | None = None
    reason: str | None = None
    lost: int = 0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


def mean_growth(name: str, first: Mapping[int, RankReport], last: Mapping[int, RankReport]) -> float | None:
    """By how much a counter grew between two reports of each rank, as a mean over the ranks that have it."""
    grown = [
        report.counters[name] - (first[rank].counters.get(name, 0.0) if rank in first else 0.0)
        for rank, report in last.items()
        if name in report.counters
    ]
    return sum(grown) / len(grown) if grown else None
