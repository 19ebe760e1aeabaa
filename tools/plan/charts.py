"""Plots as inline SVG, from numbers to text: lines over logarithmic axes, stacked bars. Pure.

Colours and type come from the page's style sheet (classes and CSS variables), so that a page can be light or dark.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

WIDTH, HEIGHT = 520, 300
LEFT, RIGHT, TOP, BOTTOM = 58, 150, 14, 42
LABEL_STEP = 14.0


@dataclass(frozen=True, slots=True)
class ChartSeries:
    """A named line; `colour` is a CSS variable's name, `dashed` marks what is not on offer."""

    name: str
    points: tuple[tuple[float, float], ...]
    colour: str
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Stack:
    """A bar of parts (name, value), drawn from the axis outwards."""

    name: str
    parts: tuple[tuple[str, float], ...]
    total: str = ""


Scale = Callable[[float], float]


def lines(series: Sequence[ChartSeries], x_title: str, y_title: str) -> str:
    """Lines over two logarithmic axes; names stand at their ends."""
    shown = [s for s in series if s.points]
    xs = [x for s in shown for x, _ in s.points]
    ys = [y for s in shown for _, y in s.points if y > 0]
    if not xs or not ys:
        return ""
    x_at = _log_scale(min(xs), max(xs), LEFT, WIDTH - RIGHT)
    y_at = _log_scale(min(ys), max(ys), HEIGHT - BOTTOM, TOP)
    out = [_grid_y(_decades(min(ys), max(ys)), y_at)]
    out += [_tick_x(x, x_at(x)) for x in _thinned(sorted(set(xs)))]
    ends = []
    for s in shown:
        path = " ".join(f"{x_at(x):.1f},{y_at(y):.1f}" for x, y in s.points)
        dash = ' stroke-dasharray="4 3"' if s.dashed else ""
        out.append(f'<polyline points="{path}" fill="none" stroke="var({s.colour})" stroke-width="2"{dash}/>')
        out += [
            f'<circle cx="{x_at(x):.1f}" cy="{y_at(y):.1f}" r="2.6" fill="var({s.colour})">'
            f"<title>{escape(s.name)}: {x:g} → {y:,.4g}</title></circle>"
            for x, y in s.points
        ]
        ends.append((x_at(s.points[-1][0]), y_at(s.points[-1][1]), s))
    out += _end_labels(ends)
    return _svg("".join(out) + _axis_titles(x_title, y_title), HEIGHT)


def stacks(bars: Sequence[Stack], colours: dict[str, str], unit: str, limit: tuple[str, float] | None = None) -> str:
    """Horizontal stacked bars with a legend; `limit` draws a line, such as what there is."""
    if not bars:
        return ""
    label = 10 + 6.4 * max(len(b.name) for b in bars)
    highest = max([sum(v for _, v in b.parts) for b in bars] + ([limit[1]] if limit else []))
    x_at = _scale(0.0, highest, label, WIDTH - 64)
    row, top = 24.0, 8.0
    bottom = top + row * len(bars)
    out = []
    for tick in _ticks(0.0, highest):
        x = x_at(tick)
        out.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom:.1f}" class="grid"/>')
        out.append(f'<text x="{x:.1f}" y="{bottom + 15:.1f}" class="t muted" text-anchor="middle">{tick:g}</text>')
    for i, bar in enumerate(bars):
        y, at = top + row * i + 4, 0.0
        out.append(f'<text x="{label - 8:.1f}" y="{y + 12:.1f}" class="t" text-anchor="end">{escape(bar.name)}</text>')
        for name, value in bar.parts:
            if value <= 0:
                continue
            x, wide = x_at(at), x_at(at + value) - x_at(at)
            out.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(wide, 0.6):.1f}" height="16" fill="var({colours[name]})">'
                f"<title>{escape(bar.name)}, {escape(name)}: {value:.3g} {escape(unit)}</title></rect>"
            )
            at += value
        out.append(f'<text x="{x_at(at) + 5:.1f}" y="{y + 12:.1f}" class="t muted">{escape(bar.total)}</text>')
    if limit:
        x = x_at(limit[1])
        out.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom:.1f}" class="limit"/>')
    out.append(f'<text x="{WIDTH - 64}" y="{bottom + 30:.1f}" class="t muted" text-anchor="end">{escape(unit)}</text>')
    legend, height = _legend([name for name in colours if any(n == name and v > 0 for b in bars for n, v in b.parts)],
                             colours, bottom + 46)  # fmt: skip
    return _svg("".join(out) + legend, height)


def _legend(names: Sequence[str], colours: dict[str, str], y: float) -> tuple[str, float]:
    out, x = [], 10.0
    for name in names:
        wide = 24 + 6.2 * len(name)
        if x + wide > WIDTH:
            x, y = 10.0, y + 18
        out.append(f'<rect x="{x:.1f}" y="{y - 9:.1f}" width="10" height="10" rx="2" fill="var({colours[name]})"/>')
        out.append(f'<text x="{x + 14:.1f}" y="{y:.1f}" class="t">{escape(name)}</text>')
        x += wide
    return "".join(out), y + 10


def _end_labels(ends: Sequence[tuple[float, float, ChartSeries]]) -> list[str]:
    """Names at the lines' ends, pushed apart where they would overlap, and back up from the axis's numbers."""
    placed = sorted(ends, key=lambda end: end[1])
    ys: list[float] = []
    for _, y, _ in placed:
        ys.append(max(y, ys[-1] + LABEL_STEP) if ys else y)
    limit = float(HEIGHT - BOTTOM)
    for i in reversed(range(len(ys))):
        ys[i] = min(ys[i], limit)
        limit = ys[i] - LABEL_STEP
    right = WIDTH - RIGHT + 8
    out = []
    for (x, y, s), at in zip(placed, ys, strict=True):
        out.append(
            f'<path d="M{x + 3:.1f},{y:.1f} L{right - 2},{at:.1f}" stroke="var({s.colour})" fill="none" opacity=".45"/>'
        )
        out.append(f'<text x="{right}" y="{at + 4:.1f}" class="t" style="fill:var({s.colour})">{escape(s.name)}</text>')
    return out


def _scale(low: float, high: float, start: float, end: float) -> Scale:
    span = (high - low) or 1.0
    return lambda value: start + (value - low) / span * (end - start)


def _log_scale(low: float, high: float, start: float, end: float) -> Scale:
    linear = _scale(log10(low), log10(high), start, end)
    return lambda value: linear(log10(max(value, low)))


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers from low to high, about five."""
    raw = (high - low) / 5 or 1.0
    size = 10.0 ** floor(log10(raw))
    step = next(size * m for m in (1, 2, 2.5, 5, 10) if size * m >= raw)
    first = ceil(low / step)
    return [round(i * step, 10) for i in range(first, floor(high / step) + 1)]


def _decades(low: float, high: float) -> list[float]:
    found = [m * 10.0**d for d in range(floor(log10(low)), ceil(log10(high)) + 1) for m in (1, 2, 5)]
    inside = [v for v in found if low <= v <= high]
    return inside if len(inside) <= 8 else [v for v in inside if round(log10(v), 9).is_integer()]


def _thinned(values: Sequence[float]) -> Sequence[float]:
    return values if len(values) <= 10 else values[::2]


def _grid_y(values: Sequence[float], y_at: Scale) -> str:
    out = []
    for value in values:
        y = y_at(value)
        out.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        out.append(f'<text x="{LEFT - 7}" y="{y + 4:.1f}" class="t muted" text-anchor="end">{_short(value)}</text>')
    return "".join(out)


def _tick_x(value: float, x: float) -> str:
    return f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 17}" class="t muted" text-anchor="middle">{_short(value)}</text>'


def _short(value: float) -> str:
    return f"{value / 1000:g}k" if value >= 1000 else f"{value:g}"


def _axis_titles(x: str, y: str) -> str:
    across, up = (LEFT + WIDTH - RIGHT) / 2, (TOP + HEIGHT - BOTTOM) / 2
    centred = 'class="t muted" text-anchor="middle"'
    return (
        f'<text x="{across}" y="{HEIGHT - 6}" {centred}>{escape(x)}</text>'
        f'<text x="14" y="{up}" {centred} transform="rotate(-90 14 {up})">{escape(y)}</text>'
    )


def _svg(body: str, height: float) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img">{body}</svg>'
