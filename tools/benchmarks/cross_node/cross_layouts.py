"""Tokens/s of stock layouts (tensor parallelism, whole and split steps, a pipeline of two stages) and of trained
wirings against L/c: the part `layouts` of cross_node.py. A Llama of 150M in bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise, product
from statistics import median
from typing import Any

from common import svg, table, to_and_fro
from laddertron.engine.config.schema import Deployment
from laddertron.tools.plan.advice import STOCK
from matplotlib.figure import Figure
from two_nodes import SHAPE, Row, Site, rate

SUB_BLOCKS = 2 * SHAPE["num_hidden_layers"]
BATCHES, RATIOS, TOKENS = (1, 8, 32), (0.25, 0.5, 1.0, 2.0, 4.0), 32
KINDS = (*STOCK, "ladder", "delay-2", "lanes", "no-communication")
"""The kinds of layouts, and of trained wirings. A row has batch, aimed (L/c), delay_s, and rates by kind."""


def deployment(site: Site, kind: str) -> Deployment:
    stages, split = (2, "never") if kind == "pipeline" else (1, "always" if kind == "split" else "never")
    wiring = {"split": "standard", "pipeline": "standard", "lanes": "auto"}.get(kind, kind)
    parallel = {"tensor_parallel_size": 2 // stages, "pipeline_parallel_size": stages, "split_steps": split}
    return site.deployment("lanes" if kind == "lanes" else "llama", wiring, parallel)


def layouts(site: Site) -> Iterator[Row]:
    return at_ratios(site, {kind: deployment(site, kind) for kind in KINDS}, BATCHES, RATIOS, TOKENS)


def at_ratios(
    site: Site,
    deployments: Mapping[str, Deployment],
    batches: Sequence[int],
    ratios: Sequence[float],
    tokens: int,
    runs: int = 1,
) -> Iterator[Row]:
    """A row for each run, batch and L/c, with tokens/s of each kind. "standard" and "no-communication" set the link's
    delay."""
    with ExitStack() as stack:
        jobs = {kind: stack.enter_context(site.job(kind, deployments[kind])) for kind in deployments}
        site.switch.link(0.0)
        rest: dict[int, tuple[float, float]] = {}
        for batch in batches:
            for job in jobs.values():
                rate(job, batch, 8, 8)
            silent, standard = (
                batch / rate(jobs[kind], batch, 8, tokens) / SUB_BLOCKS for kind in ("no-communication", "standard")
            )
            rest[batch] = silent, standard - silent
        for turn, (_, batch, aimed) in enumerate(product(range(runs), batches, ratios)):
            c, without_delay = rest[batch]
            delay_s = max(0.0, aimed * c - without_delay)
            site.switch.link(delay_s)
            rates = {kind: rate(jobs[kind], batch, 8, tokens) for kind in to_and_fro(jobs, turn)}
            yield {"batch": batch, "aimed": aimed, "delay_s": delay_s, "rates": rates}


def points(rows: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Medians over the runs: batch, ratio (L/c, as what communicating adds to computing) and tokens/s of each kind."""
    medians = []
    for batch, aimed in sorted({(row["batch"], row["aimed"]) for row in rows}):
        runs = [row["rates"] for row in rows if (row["batch"], row["aimed"]) == (batch, aimed)]
        rates = {kind: round(median(run[kind] for run in runs), 1) for kind in KINDS}
        ratio = median(run["no-communication"] / run["standard"] - 1 for run in runs)
        medians.append({"batch": batch, "ratio": round(ratio, 2), "rates": rates})
    return medians


def crossing(mine: Sequence[Row]) -> str:
    """The L/c of one batch from which on stock weights are faster than ladder, between two points by a line."""
    gaps = sorted((p["ratio"], p["rates"]["ladder"] / max(p["rates"][kind] for kind in STOCK) - 1) for p in mine)
    for (left, before), (right, after) in pairwise(gaps):
        if before > 0 >= after:
            return f"{left + (right - left) * before / (before - after):.1f}"
    return f"{gaps[-1][0]:.1f} and more" if gaps[-1][1] > 0 else "0"


def layouts_table(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    medians, cells = points(lines), []
    for p in medians:
        rates, best = p["rates"], max(STOCK, key=p["rates"].__getitem__)
        shown = (f"{rates[kind]:,.0f}" for kind in KINDS)
        cells.append((f"{p['batch']}, {p['ratio']:.2f}", *shown, best))
    ups = ", ".join(f"{crossing([p for p in medians if p['batch'] == b])} (batch {b})" for b in BATCHES)
    head = f"batch, L/c | {' | '.join(KINDS)} | best stock"
    return [*table(head, cells), "", f"Ladder decodes faster than the best stock layout up to an L/c of: {ups}."]


def layouts_picture(points: Sequence[Row]) -> str:
    """Tokens/s against L/c, a panel a batch; dashed is the law of ladder and delay-2, from each point's speed without
    communication."""
    batches = sorted({point["batch"] for point in points})
    figure = Figure(figsize=(3.6 * len(batches), 4.2), layout="constrained")
    panels = figure.subplots(1, len(batches), squeeze=False)[0]
    for axes, batch in zip(panels, batches, strict=True):
        mine = sorted((p for p in points if p["batch"] == batch), key=lambda p: p["ratio"])
        ratios = [p["ratio"] for p in mine]
        stock = [max(p["rates"][kind] for kind in STOCK) for p in mine]
        axes.plot(ratios, stock, color="#bbbbbb", linewidth=6, label="best stock layout")
        for index, kind in enumerate(mine[0]["rates"]):
            rates = [p["rates"][kind] for p in mine]
            axes.plot(ratios, rates, "o-", color=f"C{index}", markersize=4, linewidth=1, label=kind)
        for delay, name in ((1, "ladder"), (2, "delay-2")):
            bound = [p["rates"]["no-communication"] / max(1.0, (1 + p["ratio"]) / (delay + 1)) for p in mine]
            axes.plot(ratios, bound, "--", color=f"C{list(mine[0]['rates']).index(name)}", linewidth=1)
        axes.set(title=f"batch {batch}", xlabel="L / c", ylim=(0, None))
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("tokens/s")
    panels[0].legend(fontsize="x-small")
    return svg(figure)
