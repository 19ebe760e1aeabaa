"""Records for every collective how long it was in flight and how long the rank waited for it; the difference was
hidden. Backends add entries, or count in C and are read here; metrics and `run` read them. Knows no tensors.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

HISTORY = 256
Place = Callable[[], tuple[int, str]]
"""Returns the number of collectives started, and the name of the one being waited for or ""."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Sums over one kind of collective. `op`: all_reduce, gather, boundary (hidden rows from the pipeline stage before)
    or stage_wait (that stage had not sent them yet). `link`: the slowest link it crossed: node (shared memory), net, or
    "emulated …". Seconds are this rank's: in flight is from start to completion, waited is the part inside `wait`.
    `layer`: the wiring and sub-block whose output it reduced, as in "ladder attention"; "" if unknown."""

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
    """One group's collectives on one rank. The callers of `add` also maintain `started`, the number of collectives
    started, and `waiting`, the name of the one being waited for; it stays set if that wait fails."""

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
        """Registers a backend that keeps its own counts. `place` may be called from any thread at any time."""
        self._sources.append((entries, records, place))

    def place(self) -> tuple[int, str]:
        """The number of collectives started so far, in program order, and the name of the one being waited for ("" if
        none). Reads plain attributes, so the heartbeat's thread can call it."""
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
        """Adds one collective whose wait ended at `now` (default: the present). All times are from `time.monotonic`.
        `arrived`: when it completed (`now` or later if unknown); `asked`: when `wait` was called. `size` in bytes."""
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
        """The sums so far. They never decrease: the difference of two calls is what happened between them."""
        # NOTE: the heartbeat's thread calls this while kinds are added, so the copy must be atomic: creating tuples
        # could run the garbage collector and thereby switch threads.
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
    """Leaves out the collectives that carry an emulated link's data: their time is part of the emulated entry's."""
    listed = list(entries)
    emulated = {entry.op for entry in listed if entry.link.startswith("emulated")}
    return [entry for entry in listed if entry.op not in emulated or entry.link.startswith("emulated")]


def overlap_ratio(hidden_s: float, exposed_s: float) -> float | None:
    """The hidden share of the seconds in flight; None if nothing was in flight. The only definition, used by metrics,
    `bench`, `run` and the demo."""
    flight = hidden_s + exposed_s
    return hidden_s / flight if flight > 0 else None
