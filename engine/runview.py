"""How far a run is and what it did, as data: for those who show it. Made by engine/batchrun.py; knows no terminal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from .daemon.job import RankReport

HIDDEN, EXPOSED = "collective_hidden_seconds", "collective_exposed_seconds"
LAYER_HIDDEN, LAYER_EXPOSED = "layer_hidden_seconds/", "layer_exposed_seconds/"


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
class LayerTime:
    """All-reduces of one kind of layer ("ladder attention") over one link class, in seconds, means over the ranks."""

    layer: str
    link: str
    hidden_seconds: float
    exposed_seconds: float


@dataclass(frozen=True, slots=True)
class Summary:
    """What a run did. `requests` are the file's lines, `skipped` those finished earlier; `reason` says why it stopped
    before the end (`stopped`: it was told to), `lost` how many lines were under way then. Communication: seconds, mean
    over the ranks, None where no rank reported it; `layers` divides the all-reduces' share of it."""

    requests: int
    ok: int
    failed: int
    skipped: int
    prompt_tokens: int
    tokens: int
    seconds: float
    hidden_seconds: float | None = None
    exposed_seconds: float | None = None
    layers: tuple[LayerTime, ...] = ()
    reason: str | None = None
    lost: int = 0
    stopped: bool = False

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


class Communication:
    """What ranks reported of their collectives, before the first request and last."""

    def __init__(self) -> None:
        self._first: dict[int, RankReport] = {}
        self._last: dict[int, RankReport] = {}

    @property
    def reported(self) -> bool:
        return bool(self._last)

    def add(self, report: RankReport, before: bool) -> None:
        """`before`: no request has been submitted yet."""
        self._last[report.rank] = report
        if before:
            self._first[report.rank] = report

    def newer_than(self, moment: float) -> bool:
        """Whether every rank has reported since (unix seconds)."""
        return all(report.received_at >= moment for report in self._last.values())

    def seconds(self) -> tuple[float | None, float | None]:
        """(hidden, exposed), means over the ranks that count them."""
        return self._mean(HIDDEN), self._mean(EXPOSED)

    def layers(self) -> tuple[LayerTime, ...]:
        """By kind of layer and link class, what travelled longest first."""
        counted = {name for report in self._last.values() for name in report.counters}
        names = {name.removeprefix(LAYER_HIDDEN) for name in counted if name.startswith(LAYER_HIDDEN)}
        found = []
        for name in names:
            layer, _, link = name.partition("/")
            hidden, exposed = self._mean(LAYER_HIDDEN + name), self._mean(LAYER_EXPOSED + name)
            if hidden is not None and exposed is not None:
                found.append(LayerTime(layer, link, hidden, exposed))
        return tuple(sorted(found, key=lambda t: (-t.hidden_seconds - t.exposed_seconds, t.layer, t.link)))

    def _mean(self, name: str) -> float | None:
        grown = [
            report.counters[name] - (self._first[rank].counters.get(name, 0.0) if rank in self._first else 0.0)
            for rank, report in self._last.items()
            if name in report.counters
        ]
        return sum(grown) / len(grown) if grown else None
