"""Formats the measurements of gpu_shard.py and the published speeds as a Markdown table. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from common import table
from laddertron.tools.plan.published import TOKENS
from laddertron.tools.plan.step_simulator import law

Line = dict[str, Any]
HEAD = (
    "model | fabric | batch | L alone / predicted, us | c, us | L/c | law | "
    "ladder | hidden | parallel | tokens/s: standard, ladder, parallel, none | predicted | "
    "published: ladder | hidden | tokens/s"
)


def hidden(standard_s: float, ladder_s: float, silent_s: float) -> float:
    """The share of what communication costs standard that ladder saves."""
    return (standard_s - ladder_s) / (standard_s - silent_s) if standard_s > silent_s else float("nan")


def _published(key: tuple[str, str, int]) -> list[str]:
    published = TOKENS.get(key)
    if published is None:
        return ["", "", ""]
    share = ""
    if "none" in published:
        share = f"{hidden(*(1 / published[name] for name in ('standard', 'ladder', 'none'))):.0%}"
    rates = " / ".join(
        f"{published[name]:g}" for name in ("standard", "ladder", "parallel", "none") if name in published
    )
    return [f"{published['ladder'] / published['standard']:.2f}", share, rates]


def row(lines: Sequence[Line]) -> list[object]:
    """The row of one model, fabric, batch and k, from the standard, parallel and ladder lines, and the one of no
    communication."""
    by = {line["wiring"]: line for line in lines}
    four = standard, ladder, parallel, silent = [by[w] for w in ("standard", "ladder", "parallel", "no-communication")]
    # Embedding and head are counted in: c is a sub-block's share of the whole silent step.
    c_us = silent["step_ms"] * 1e3 / (2 * silent["layers"])
    ratio = standard["alone_us"] / c_us
    gain, share = standard["step_ms"] / ladder["step_ms"], hidden(*(x["step_ms"] for x in (standard, ladder, silent)))
    all_layers = standard["layers"] == standard["of_layers"]
    depth = "" if all_layers else f" ({standard['layers']} of {standard['of_layers']} layers)"
    return [
        standard["model"] + depth,
        f"{standard['fabric']}" + ("" if standard["k"] else ", pure delay"),
        standard["batch"],
        f"{standard['alone_us']:.1f} / {standard['predicted_us']:.1f}",
        f"{c_us:.1f}",
        f"{ratio:.2f}",
        f"{law(1.0, ratio):.2f}",
        f"{gain:.2f}",
        f"{share:.0%}",
        f"{standard['step_ms'] / parallel['step_ms']:.2f}",
        " / ".join(f"{x['tokens_s']:.1f}" for x in four),
        " / ".join(f"{x['batch'] / x['plan_ms'] * 1e3:.1f}" for x in four if x["plan_ms"]),
        *_published((standard["model"], standard["interconnect"], standard["batch"])),
    ]


def shard_table(lines: Sequence[Line]) -> str:
    """Rows by model, interconnect and batch, one for each k; the line without communication belongs to all k."""
    groups: dict[tuple[Any, ...], list[Line]] = {}
    for line in lines:
        groups.setdefault((line["model"], line["interconnect"], line["batch"]), []).append(line)
    rows = []
    for group in groups.values():
        silent = [line for line in group if line["wiring"] == "no-communication"]
        for k in sorted({line["k"] for line in group}):
            rows.append(row([line for line in group if line["k"] == k and line not in silent] + silent))
    about = f"All-reduces are emulated ({lines[0]['timed_by']}) on one {lines[0]['device']}; no two ranks ever spoke."
    return "\n".join([about, "", *table(HEAD, rows)])
