"""The cost model against cross_node.py's sweeps: how well it fits them, and how far it misses what it was not fitted
to, be it a size or a delay. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from common import table
from laddertron.topology.cost.cost import Shape, Strategy, predict
from laddertron.topology.cost.fit import Fit, Point, fit
from laddertron.topology.link_cost import WHOLE_BYTES

Line = Mapping[str, Any]
Sweep = tuple[int, int, float]
"""Nodes, ranks a node, one-way delay in seconds."""
BAR = 0.25
"""Relative error of each measured all-reduce, at most."""


def fits(lines: Sequence[Line]) -> dict[Sweep, Fit]:
    """The cost model fitted to each sweep: lanes named backend/strategy, the others are left aside."""
    points: dict[Sweep, list[Point]] = {}
    for line in lines:
        _, fixed, name = line["lane"].partition("/")
        if fixed:
            strategy: Strategy = name if line["bytes"] <= WHOLE_BYTES else "pipeline"
            shape = Shape(line["nodes"], line["per_node"])
            key = (line["nodes"], line["per_node"], line["delay_s"])
            points.setdefault(key, []).append(Point(strategy, line["bytes"], line["median_s"], shape))
    return {key: fit(found, "native") for key, found in points.items()}


def left_out(fitted: Fit) -> list[float]:
    """Relative error at each inner point (neither the smallest nor the largest size of its strategy) of prices fitted
    to all the others: what the model is worth at a size that nobody measured."""
    points = [residual.point for residual in fitted.residuals]
    errors = []
    for index, point in enumerate(points):
        sizes = [p.nbytes for p in points if p.strategy == point.strategy]
        if min(sizes) < point.nbytes < max(sizes):
            costs = fit(points[:index] + points[index + 1 :], fitted.costs.backend).costs
            errors.append(abs(predict(costs, point.shape, point.strategy, point.nbytes) / point.seconds - 1.0))
    return errors


def at_other_delays(found: Mapping[Sweep, Fit]) -> list[tuple[str, float]]:
    """How far prices fitted at one delay miss another delay's measurements, worst point: (what, relative error)."""
    misses = []
    for (nodes, per_node, delay), there in found.items():
        near = found.get((nodes, per_node, 1e-4))
        if near is None or delay <= 1e-4:
            continue
        costs = near.costs.delayed(delay - 1e-4)
        errors = [
            abs(predict(costs, r.point.shape, r.point.strategy, r.point.nbytes) / r.point.seconds - 1.0)
            for r in there.residuals
        ]
        misses.append((f"{nodes} x {per_node}: prices fitted at 0.1 ms, asked about {delay * 1e3:g} ms", max(errors)))
    return misses


def cost_table(found: Mapping[Sweep, Fit]) -> list[str]:
    """Markdown."""
    rows = []
    for (nodes, per_node, delay), fitted in found.items():
        errors, out = sorted(abs(r.relative) for r in fitted.residuals), left_out(fitted)
        worst, median = f"{errors[-1]:.0%}", f"{errors[len(errors) // 2]:.0%}"
        beyond = f"{sum(error > BAR for error in out)} of {len(out)}"
        where, missed = f"{nodes} x {per_node}, {delay * 1e3:g} ms", f"{max(out):.0%}" if out else ""
        rows.append((where, len(errors), worst, median, missed, beyond))
    return [
        "",
        "### The cost model",
        "",
        "Fitted to each sweep (4 KB to 1 MB, every strategy): relative error of the worst and the median point. These "
        "are of the fitted points themselves. Left out: each size but a strategy's smallest and largest, predicted "
        f"from prices fitted to all the others: the worst of them, and how many are missed by more than {BAR:.0%}.",
        "",
        *table(
            "nodes x ranks, one-way delay | points | worst fitted | median fitted | worst left out | "
            f"left out beyond {BAR:.0%}",
            rows,
        ),
        "",
        *(f"- {what}: worst miss {miss:.0%}" for what, miss in at_other_delays(found)),
    ]
