"""How far a load or a copy of weights is, in words and as a bar: bytes, GB/s and time left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def loading_words(done: int, total: int, seconds: float) -> str:
    """`weights 12.3 of 50.6 GB, 2.10 GB/s, 0:18 left`; sizes in bytes."""
    words = f"weights {done / 1e9:.1f} of {total / 1e9:.1f} GB"
    if seconds <= 0 or not done:
        return words
    left = round(seconds * (total - done) / done)
    return f"{words}, {done / seconds / 1e9:.2f} GB/s, {left // 60}:{left % 60:02d} left"


@contextmanager
def byte_bar(console: Console, what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar to call with (done, total) in bytes; on no terminal it shows nothing."""
    # Ranks use loading_words alone: they are spared the import.
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
