"""The picture of docs/performance.md: speed-up of ladder over standard against L/c, as SVG. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

WIDTH, HEIGHT = 720, 440
LEFT, RIGHT, TOP, BOTTOM = 64, 20, 24, 56
X_END, Y_FROM, Y_TO = 3.0, 0.9, 2.1
PAPER = {
    "405B, TP16 over 2 nodes": ((28.5, 38.8, 43.3), (97.3, 127.2, 147.0), (163.6, 228.0, 271.1), (290.2, 391.6, 473.6)),
    "70B, TP8": ((77.4, 101.2, 110.6), (258.6, 331.5, 355.8), (843, 1004, 1110), (1941, 2242, 2474)),
    "70B, TP8, P2P off": ((51.7, 82.6, 110.6), (173.6, 271.8, 355.8), (547, 739, 1110), (1454, 1864, 2474)),
}
"""Published tokens/s on H100: standard, ladder, no communication, by batch (arXiv 2501.06589)."""
PAPER_COLOURS = ("#b35806", "#f1a340", "#998ec3")


def paper_points() -> dict[str, list[tuple[float, float]]]:
    """(L/c, speed-up) of the published rows: L/c as what communication adds to what computation takes."""
    return {name: [(top / std - 1, fast / std) for std, fast, top in rows] for name, rows in PAPER.items()}


def _x(ratio: float) -> float:
    return LEFT + min(ratio, X_END) / X_END * (WIDTH - LEFT - RIGHT)


def _y(speed: float) -> float:
    return HEIGHT - BOTTOM - (speed - Y_FROM) / (Y_TO - Y_FROM) * (HEIGHT - TOP - BOTTOM)


def _text(x: float, y: float, words: str, extra: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {extra}>{words}</text>'


def _axes() -> list[str]:
    parts = []
    for tenth in range(10, 21, 2):
        y = _y(tenth / 10)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(_text(LEFT - 8, y + 4, f"{tenth / 10:.1f}x", 'text-anchor="end"'))
    for half in range(int(X_END * 2) + 1):
        x = _x(half / 2)
        parts.append(_text(x, HEIGHT - BOTTOM + 18, f"{half / 2:g}", 'text-anchor="middle"'))
    parts.append(
        _text(
            (LEFT + WIDTH - RIGHT) / 2,
            HEIGHT - 14,
            "L / c: one all-reduce over a sub-block's computation",
            'text-anchor="middle"',
        )
    )
    parts.append(_text(LEFT, TOP - 8, "ladder over standard"))
    return parts


def _line(law: Callable[[float], float]) -> list[str]:
    steps = [X_END * i / 300 for i in range(301)]
    path = " ".join(f"{_x(r):.1f},{_y(law(r)):.1f}" for r in steps)
    return [
        f'<polyline points="{path}" fill="none" stroke="#222" stroke-width="2"/>',
        _text(_x(1.05), _y(2.0) - 8, "the law (c + L) / max(c, (c + L) / 2): never above 2"),
        _text(
            _x(1.05),
            _y(1.93),
            "the gap below the line: contention, and unlike sub-blocks",
            'fill="#666" font-style="italic"',
        ),
    ]


def picture(points: Sequence[tuple[float, float, int]], law: Callable[[float], float]) -> str:
    """points: (L/c, speed-up, batch) of the emulated cluster."""
    parts = [*_axes(), *_line(law)]
    legend: list[tuple[str, str]] = []
    for (name, found), colour in zip(paper_points().items(), PAPER_COLOURS, strict=True):
        for ratio, speed in found:
            x, y = _x(ratio), _y(speed)
            parts.append(f'<path d="M{x:.1f} {y - 5:.1f} l5 9 h-10 z" fill="{colour}"/>')
        legend.append((f'<path d="M0 -5 l5 9 h-10 z" fill="{colour}"/>', f"published, H100: {name}"))
    for batch, colour in ((1, "#2166ac"), (8, "#67a9cf")):
        for ratio, speed, of in points:
            if of == batch:
                parts.append(f'<circle cx="{_x(ratio):.1f}" cy="{_y(speed):.1f}" r="5" fill="{colour}"/>')
        if any(of == batch for *_, of in points):
            legend.append((f'<circle r="5" fill="{colour}"/>', f"laddertron, emulated nodes, batch {batch}"))
    for index, (mark, words) in enumerate(legend):
        y = _y(1.42) + 20 * index
        parts.append(f'<g transform="translate({_x(1.55):.1f} {y:.1f})">{mark}</g>')
        parts.append(_text(_x(1.55) + 12, y + 4, words))
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="13"><rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>'
    )
    return "\n".join([head, *parts, "</svg>"]) + "\n"
