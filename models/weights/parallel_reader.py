"""Reads pieces of tensors on several threads, in order and a bounded distance ahead, and repacks a complete layer
meanwhile.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import TypeVar

from .slices import Fill
from .tensor_reader import Reader

_Piece = TypeVar("_Piece")
PIECE_BYTES = 16 << 20
MOST_THREADS = 4
"""Threads of each rank: the ranks of a node read at the same time."""


def reading_threads() -> int:
    """As many as this rank has cores, up to MOST_THREADS."""
    return min(MOST_THREADS, len(os.sched_getaffinity(0)))


def cut(fill: Fill, row_bytes: int) -> Iterator[Fill]:
    """The fill in runs of rows of about PIECE_BYTES, `row_bytes` each in the parameter."""
    unit = fill.pairs or 1
    rows = max(unit, PIECE_BYTES // max(1, row_bytes) // unit * unit)
    for first in range(0, fill.count, rows):
        count = min(rows, fill.count - first)
        yield replace(fill, row=fill.row + first, source_row=fill.source_row + first, count=count)


class Readers:
    """Threads with a Reader each. A context manager: leaving it drops what has not begun and closes the files."""

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
        """Bytes that all of them have read."""
        return sum(reader.taken for reader in self._readers)

    def each(self, pieces: Iterable[_Piece], read: Callable[[Reader, _Piece], None]) -> Iterator[_Piece]:
        """Every piece in its order, once it has been read. Raises what `read` did, at that piece's turn."""
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
