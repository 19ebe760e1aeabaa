"""Accounts of every collective: how long it was in flight, how long it was waited for. What was in flight and not
waited for was hidden. Backends write (or count in C and are read here), metrics and `run` read; knows no tensors.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

HISTORY = 256
Place = Callable[[], tuple[int, str]]
"""Collectives started, and the name of the one waited for or ""."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Sums over one kind of collective. `op`: all_reduce, gather, boundary (hidden rows from the pipeline stage before)
    or stage_wait (that stage had not sent them yet). `link`: the slowest link it crossed: node (shared
    memory), net, or "emulated …". Seconds are as one rank saw them: in flight runs from start until the result was
    there, waited is the part inside `wait`. `layer`: what it completed, wiring and sub-block as in "ladder attention";
    "" if unknown."""

    op: str
    strategy: str
    link: str
    count: int
    bytes: int
    in_flight_s: float
    waited_s: float
    layer: str = ""

    @property
    def hidden_s(self) -> float:
        return max(0.0, self.in_flight_s - self.waited_s)


@dataclass(frozen=True, slots=True)
class Record:
    """One collective. `start_s` is on CLOCK_MONOTONIC, `layer` as in Entry."""

    seq: int
    op: str
    strategy: str
    bytes: int
    start_s: float
    in_flight_s: float
    waited_s: float
    layer: str = ""


class Ledger:
    """One group's accounts on one rank. `started` and `waiting` are kept by those who call `add`: the number of
    collectives set off, and the name of the one that is waited for; left standing if that wait fails."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str, str, str], list[float]] = defaultdict(lambda: [0, 0, 0.0, 0.0])
        self._history: deque[Record] = deque(maxlen=HISTORY)
        self._sources: list[tuple[Callable[[], Iterable[Entry]], Callable[[], Iterable[Record]], Place]] = []
        self._seq = 0
        self.started = 0
        self.waiting = ""

    def add_source(
        self,
        entries: Callable[[], Iterable[Entry]],
        records: Callable[[], Iterable[Record]],
        place: Place = lambda: (0, ""),
    ) -> None:
        """A backend that keeps its own counts. `place` may be asked from any thread at any moment."""
        self._sources.append((entries, records, place))

    def place(self) -> tuple[int, str]:
        """Collectives set off so far, in program order, and the one that this rank waits in now ("" if it computes).
        From plain attributes: for a heartbeat on another thread."""
        started, waiting = self.started, self.waiting
        for _, _, place in self._sources:
            count, name = place()
            started, waiting = started + count, waiting or name
        return started, waiting

    def add(
        self,
        op: str,
        strategy: str,
        link: str,
        size: int,
        start: float,
        arrived: float,
        asked: float,
        layer: str = "",
        now: float | None = None,
    ) -> None:
        """Enters one collective whose wait ended `now`, if not at this moment. All times from `time.monotonic`;
        `arrived`: when the result was there (now or later than now if the caller cannot tell), `asked`: when `wait` was
        called. `size` in bytes."""
        now = time.monotonic() if now is None else now
        waited = now - asked
        in_flight = max(0.0, min(arrived, asked) - start) + waited
        sums = self._sums[op, strategy, link, layer]
        sums[0] += 1
        sums[1] += size
        sums[2] += in_flight
        sums[3] += waited
        self._history.append(Record(self._seq, op, strategy, size, start, in_flight, waited, layer))
        self._seq += 1

    def entries(self) -> list[Entry]:
        """The sums so far. They only grow: two calls subtract to what happened between them."""
        # Copied in one go, without making tuples (that may let the collector, and with it another thread, run): the
        # heartbeat's thread asks while kinds are added.
        sums = dict(self._sums)
        own = [
            Entry(op, strategy, link, int(n), int(size), flight, wait, layer)
            for (op, strategy, link, layer), (n, size, flight, wait) in sums.items()
        ]
        return own + [e for source, _, _ in self._sources for e in source() if e.count]

    def history(self) -> list[Record]:
        """The last collectives (at most HISTORY of each backend), oldest first."""
        out = list(self._history) + [r for _, source, _ in self._sources for r in source()]
        return sorted(out, key=lambda record: record.start_s)


def without_carriers(entries: Iterable[Entry]) -> list[Entry]:
    """The entries that count: under an emulated link the collective that does its arithmetic is left out, its time is
    part of the link's."""
    listed = list(entries)
    emulated = {entry.op for entry in listed if entry.link.startswith("emulated")}
    return [entry for entry in listed if entry.op not in emulated or entry.link.startswith("emulated")]


def overlap_ratio(hidden_s: float, exposed_s: float) -> float | None:
    """The share of the seconds in flight that was hidden; None where nothing was in flight. The one definition: of
    metrics, `bench`, `timeline`, `run` and the demo."""
    flight = hidden_s + exposed_s
    return hidden_s / flight if flight > 0 else None
