"""The picture of the law in docs/layouts.md as SVG: speed-up of ladder over standard against L/c."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from common import svg
from laddertron.tools.plan.published import TOKENS
from laddertron.tools.plan.step_simulator import law
from matplotlib.figure import Figure

X_END = 3.0
PUBLISHED = {
    "405B, TP16 over 2 nodes": ("405B", "2 nodes", "#b35806"),
    "70B, TP8": ("70B", "p2p", "#f1a340"),
    "70B, TP8, P2P off": ("70B", "no p2p", "#998ec3"),
}
MEASURED = {1: "#2166ac", 8: "#67a9cf"}
"""By batch."""


def paper_points() -> dict[str, list[tuple[float, float]]]:
    """(L/c, speed-up) of the published rows: L/c as what communication adds to what computation takes."""
    published = {}
    for name, (model, links, _) in PUBLISHED.items():
        rows = {batch: rates for (of, by, batch), rates in TOKENS.items() if (of, by) == (model, links)}
        silent = {b: TOKENS[model, "p2p" if links == "no p2p" else links, b]["none"] for b in rows}
        published[name] = [(silent[b] / r["standard"] - 1, r["ladder"] / r["standard"]) for b, r in rows.items()]
    return published


def picture(points: Sequence[tuple[float, float, int]]) -> str:
    """points: (L/c, speed-up, batch) of the emulated cluster, drawn under the ids `batch-1` and `batch-8`."""
    figure = Figure(figsize=(7.2, 4.4), layout="constrained")
    axes = figure.add_subplot()
    ratios = np.linspace(0.0, X_END, 301)
    axes.plot(ratios, [law(1.0, r) for r in ratios], color="#222", label="the law (c + L) / max(c, (c + L) / 2)")
    for name, published in paper_points().items():
        axes.scatter(
            *zip(*published, strict=True), marker="^", color=PUBLISHED[name][2], label=f"published, H100: {name}"
        )
    for batch, colour in MEASURED.items():
        if mine := [(ratio, speed) for ratio, speed, of in points if of == batch]:
            label = f"laddertron, emulated nodes, batch {batch}"
            axes.scatter(*zip(*mine, strict=True), color=colour, label=label, gid=f"batch-{batch}")
    axes.set(xlim=(0, X_END), ylim=(0.9, 2.1), ylabel="ladder over standard")
    axes.set_xlabel("L / c: one all-reduce over a sub-block's computation")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    return svg(figure)
