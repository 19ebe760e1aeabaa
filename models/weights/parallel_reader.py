"""Reads pieces of tensors on several threads, in order and with bounded read-ahead, while the caller repacks complete
layers.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import TypeVar

from ...topology.hardware.cpu_quota import usable_cpus
from .slices import Fill
from .tensor_reader import Reader

_Piece = TypeVar("_Piece")
PIECE_BYTES = 16 << 20
MOST_THREADS = 4
"""Threads of each rank: the ranks of a node read at the same time."""


def reading_threads() -> int:
    """The number of reading threads: this rank's processors, at most MOST_THREADS."""
    return min(MOST_THREADS, usable_cpus())


def cut(fill: Fill, row_bytes: int) -> Iterator[Fill]:
    """Divides a fill into pieces of about PIECE_BYTES; a row of the parameter has `row_bytes`."""
    unit = fill.pairs or 1
    rows = max(unit, PIECE_BYTES // max(1, row_bytes) // unit * unit)
    for first in range(0, fill.count, rows):
        count = min(rows, fill.count - first)
        yield replace(fill, row=fill.row + first, source_row=fill.source_row + first, count=count)


class Readers:
    """Threads with a Reader each. A context manager, which cancels reads that have not begun and closes the files."""

    def __init__(self, threads: int, make: Callable[[], Reader] = Reader) -> None:
        self._ahead, self._make = threads + 2, make
        self._own = threading.local()
        self._readers: list[Reader] = []
        self._open = ExitStack()
        self._pool = ThreadPoolExecutor(threads, "weights")

    def __enter__(self) -> Readers:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._open.close()

    @property
    def taken(self) -> int:
        """Bytes read by all threads."""
        return sum(reader.taken for reader in self._readers)

    def each(self, pieces: Iterable[_Piece], read: Callable[[Reader, _Piece], None]) -> Iterator[_Piece]:
        """Yields every piece, in order, once it has been read. Raises an error of `read` in place of its piece."""
        waiting: deque[tuple[_Piece, Future[None]]] = deque()
        for piece in pieces:
            waiting.append((piece, self._pool.submit(self._read, read, piece)))
            if len(waiting) > self._ahead:
                yield _done(waiting)
        while waiting:
            yield _done(waiting)

    def _read(self, read: Callable[[Reader, _Piece], None], piece: _Piece) -> None:
        reader: Reader | None = getattr(self._own, "reader", None)
        if reader is None:
            reader = self._own.reader = self._open.enter_context(self._make())
            self._readers.append(reader)
        read(reader, piece)


def _done(waiting: deque[tuple[_Piece, Future[None]]]) -> _Piece:
    piece, future = waiting.popleft()
    future.result()
    return piece
