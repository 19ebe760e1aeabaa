"""A prompt's all-reduces among cross_node.py's measurements, beside gloo's ring: table and bar. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Line = Mapping[str, Any]
BAR = 1.0
"""Of gloo's time, at most."""


def by_case(lines: Sequence[Line]) -> dict[tuple[int, int, float, int], dict[str, float]]:
    """By (nodes, ranks a node, delay, bytes), each lane's median in seconds."""
    found: dict[tuple[int, int, float, int], dict[str, float]] = {}
    for line in lines:
        key = (line["nodes"], line["per_node"], line["delay_s"], line["bytes"])
        found.setdefault(key, {})[line["lane"]] = line["median_s"]
    return found


def large_table(lines: Sequence[Line]) -> list[str]:
    """Markdown; nothing where nothing was measured."""
    if not lines:
        return []
    rows = [
        "",
        "### One all-reduce of a prompt",
        "",
        "Milliseconds, median, in turns as above. Both move the fewest bytes there can be, and the link has no rate of "
        "its own: what bounds them is the processor time of ranks and switch on the cores that they share.",
        "",
        "| nodes x ranks, one-way delay | size | laddertron | gloo | gloo / laddertron |",
        "|---|---|---|---|---|",
    ]
    for (nodes, per_node, delay, nbytes), s in by_case(lines).items():
        rows.append(
            f"| {nodes} x {per_node}, {delay * 1e3:g} ms | {nbytes >> 20} MB | {s['native'] * 1e3:.1f} | "
            f"{s['gloo'] * 1e3:.1f} | {s['gloo'] / s['native']:.2f} |"
        )
    return rows


def large_bars(lines: Sequence[Line]) -> list[tuple[bool, str]]:
    """(met, in words) of every case."""
    return [
        (
            s["native"] <= BAR * s["gloo"],
            f"{nbytes >> 20} MB over {nodes} x {per_node} at {delay * 1e3:g} ms: {s['native'] / s['gloo']:.2f} of "
            f"gloo's time, at most {BAR:g}",
        )
        for (nodes, per_node, delay, nbytes), s in by_case(lines).items()
    ]
