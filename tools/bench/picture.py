"""Draws axes with matplotlib (extra `plot`), which is imported when a picture is requested. The file's suffix chooses
SVG, PNG or PDF.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class PlotError(RuntimeError):
    """matplotlib is not installed; the message names the extra."""


@contextmanager
def picture(path: Path) -> Iterator[Any]:
    """Yields axes to draw on and writes the file at the end. Raises PlotError, ValueError for an unknown suffix."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlotError("pictures need matplotlib: pip install 'laddertron[plot]'") from error
    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.add_subplot()
    yield axes
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
