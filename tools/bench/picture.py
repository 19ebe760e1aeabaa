"""Draws with matplotlib (extra `plot`), which is imported when a picture is requested: plain axes, and timelines one
above the other on a common axis. The file's suffix chooses SVG, PNG or PDF.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .timeline import Bar, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {"attention": "#2f6db3", "mlp": "#3aa38f", "both": "#5d6fb8", "other": "#8a8f98", "flight": "#e0a030"}
WAIT = "#c8402f"
WORDS = {
    "attention": "attention",
    "mlp": "MLP",
    "both": "attention and MLP",
    "other": "other",
    "flight": "all-reduce in flight",
}


class PlotError(RuntimeError):
    """matplotlib is not installed; the message names the extra."""


def _figure(width: float, height: float) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlotError("pictures need matplotlib: pip install 'laddertron[plot]'") from error
    return Figure(figsize=(width, height), layout="constrained")


@contextmanager
def picture(path: Path) -> Iterator[Any]:
    """Yields axes to draw on and writes the file at the end. Raises PlotError, ValueError for an unknown suffix."""
    figure = _figure(7.5, 4.5)
    axes = figure.add_subplot()
    yield axes
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


def draw(timelines: Sequence[Timeline], path: Path) -> None:
    """Writes the picture of the timelines. Raises PlotError, ValueError for an unknown suffix."""
    tracks = [2 + max((bar.track for bar in one.bars if bar.kind == "flight"), default=0) for one in timelines]
    figure = _figure(11, 0.9 + sum(0.75 + 0.42 * count for count in tracks))
    from matplotlib.patches import Patch

    axes = figure.subplots(
        len(timelines), 1, sharex=True, squeeze=False, height_ratios=[0.75 + 0.42 * n for n in tracks]
    )
    longest = max(one.length for one in timelines)
    unit, factor = ("ms", 1e3) if longest >= 2e-3 else ("µs", 1e6)
    for one, (axis,) in zip(timelines, axes, strict=True):
        _draw_one(axis, one, factor)
    axes[-1][0].set_xlabel(f"time, {unit}")
    axes[-1][0].set_xlim(0, longest * factor * 1.01)
    kinds = [kind for kind in WORDS if any(bar.kind == kind for one in timelines for bar in one.bars)]
    handles: list[Any] = [Patch(facecolor=COLOURS[kind], label=WORDS[kind]) for kind in kinds]
    handles.append(Patch(facecolor="white", edgecolor=WAIT, hatch="////", label="waits for an all-reduce"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
    figure.savefig(path, dpi=160, metadata={"Date": None} if path.suffix == ".svg" else None)


def _draw_one(axis: Axes, one: Timeline, factor: float) -> None:
    tracks = 1 + max((bar.track for bar in one.bars if bar.kind == "flight"), default=0)
    for bar in one.bars:
        left, width = bar.start * factor, bar.length * factor
        if bar.kind == "flight":
            axis.barh(
                -1 - bar.track, width, left=left, height=0.62, color=COLOURS["flight"], edgecolor="white", linewidth=0.5
            )
        elif bar.kind == "wait":
            axis.barh(0, width, left=left, height=0.72, facecolor="white", edgecolor=WAIT, hatch="////", linewidth=0.6)
        else:
            axis.barh(0, width, left=left, height=0.72, color=COLOURS[bar.kind], edgecolor="white", linewidth=0.5)
            _number(axis, bar, left, width, one.length * factor)
    axis.set_yticks([0, -1 - (tracks - 1) / 2], ["computes", "travels"])
    axis.tick_params(axis="y", length=0)
    axis.set_ylim(-tracks - 0.55, 0.6)
    share = "no all-reduce" if one.hidden is None else f"{one.hidden:.0%} of the all-reduces' time is hidden"
    axis.set_title(f"{one.title}: a step takes {one.step_s * 1e3:.2f} ms, {share}", loc="left", fontsize=10)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)


def _number(axis: Axes, bar: Bar, left: float, width: float, whole: float) -> None:
    """The layer's number, where the bar is wide enough for it."""
    if width > whole * 0.011 and bar.layer >= 0:
        axis.text(left + width / 2, 0, str(bar.layer), ha="center", va="center", color="white", fontsize=7)
