"""A picture of one pair of axes, by matplotlib (extra `plot`), which is imported when one is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def picture(path: Path) -> Iterator[Any]:
    """Axes to draw on, written to `path` at the end: PNG, SVG or PDF by its name's end (ValueError for another). Raises
    RuntimeError where matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RuntimeError("--plot needs matplotlib: install laddertron[plot]") from error
    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    yield axes
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
