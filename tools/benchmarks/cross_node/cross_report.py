"""From cross_node.py's measurements to tables, verdicts, pages and the law's picture. Pure but for `write_docs`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from common import renewed, spread, svg, table
from cross_drafts import drafts_table, mtp_table
from cross_layouts import layouts_picture, layouts_table, points
from cross_wirings import later_table, law_points, law_table, speeds_table, wiring_bars
from laddertron.tools.plan.published import TOKENS
from laddertron.tools.plan.step_simulator import law
from matplotlib.figure import Figure
from trained import lanes_table, longcat_table

Results = Mapping[str, Any]
Line = Mapping[str, Any]
DOCS = Path(__file__).resolve().parents[3] / "docs"
SMALL = 16384
"""Bytes of a decode step's message; larger ones are a prompt's."""
REDUCE_BARS = {"2 x 1": 1.5e-3, "4 x 1": 2.6e-3}
TWO_LEVEL_BAR = 1.3
SOURCE = "tools/benchmarks/cross_node/cross_report.py"
SPLIT_KINDS = ("whole", "split", "auto", "carried")
LARGE_BAR = 1.0
"""The largest share of gloo's time with a prompt's message."""

X_END = 3.0
PUBLISHED = {
    "405B, TP16 over 2 nodes": ("405B", "2 nodes", "#b35806"),
    "70B, TP8": ("70B", "p2p", "#f1a340"),
    "70B, TP8, P2P off": ("70B", "no p2p", "#998ec3"),
}
MEASURED = {1: "#2166ac", 8: "#67a9cf"}
"""By batch."""


def _sums(lines: Sequence[Line], small: bool) -> dict[tuple[str, float, int], dict[str, Line]]:
    """Measurements of our and other libraries' all-reduce, for a decode step's message (`small`) or a prompt's, by
    (nodes x ranks, delay, bytes) and lane."""
    by_case: dict[tuple[str, float, int], dict[str, Line]] = {}
    for line in lines:
        if (line["bytes"] == SMALL) == small:
            key = (f"{line['nodes']} x {line['per_node']}", line["delay_s"], line["bytes"])
            by_case.setdefault(key, {})[line["lane"]] = line
    return by_case


def small_table(lines: Sequence[Line]) -> list[str]:
    """Milliseconds, median (90th percentile), from the last rank's entry to the last one's return."""
    rows = []
    for (shape, _, _), lanes in _sums(lines, True).items():
        chosen = (lanes[name] for name in ("native", "gloo", "openmpi"))
        rows.append((shape, *(f"{line['median_s'] * 1e3:.2f} ({line['p90_s'] * 1e3:.2f})" for line in chosen)))
    return table("nodes x ranks | laddertron | gloo | Open MPI", rows)


def prompt_table(lines: Sequence[Line]) -> list[str]:
    """Milliseconds, median."""
    rows = []
    for (shape, delay, nbytes), lanes in _sums(lines, False).items():
        ours, gloo = (lanes[name]["median_s"] * 1e3 for name in ("native", "gloo"))
        where = f"{shape}, {delay * 1e3:g} ms"
        rows.append((where, f"{nbytes >> 20} MB", f"{ours:.1f}", f"{gloo:.1f}", f"{gloo / ours:.2f}"))
    return table("nodes x ranks, one-way delay | size | laddertron | gloo | gloo / laddertron", rows)


def split_table(lines: Sequence[Line]) -> list[str]:
    """Milliseconds a step: medians with the least and the most, and the share of the gap between whole and carried
    (every message sent and taken, none waited for) that splitting closes."""
    rows = []
    for line in lines:
        cells = [spread([seconds * 1e3 for seconds in line[k]], ".1f") for k in SPLIT_KINDS]
        unsplit, split, carried = (line[k][0] for k in ("whole", "split", "carried"))
        closed = f"{(unsplit - split) / (unsplit - carried):.0%}" if unsplit > carried else "-"
        rows.append((f"{line['delay_s'] * 1e3:g} ms, {line['case']}", *cells, f"{unsplit / split:.2f}", closed))
    return table("one way, case | whole | split | auto | carried | whole / split | gap closed", rows)


TABLES: dict[str, tuple[str, Callable[[Sequence[Line]], list[str]]]] = {
    "reduce": ("reduce", small_table),
    "prompts": ("reduce", prompt_table),
    "wirings": ("wirings", speeds_table),
    "law": ("wirings", law_table),
    "delay-2": ("wirings", later_table),
    "split-prefill": ("split-prefill", split_table),
    "split-decode": ("split-decode", split_table),
    "drafts": ("drafts", drafts_table),
    "drafts-staged": ("drafts-staged", drafts_table),
    "mtp": ("mtp", mtp_table),
    "layouts": ("layouts", layouts_table),
    "longcat": ("longcat", longcat_table),
    "lanes-2": ("lanes-2", partial(lanes_table, lanes=2)),
    "lanes-8": ("lanes-8", partial(lanes_table, lanes=8)),
    "alone-8": ("alone-8", partial(lanes_table, lanes=8)),
}
"""The part that each table is of, and what makes it. In a page it is between comments with its name."""


def tables(results: Results) -> dict[str, list[str]]:
    """Markdown of what was measured, by TABLES' names and `bars`."""
    made = {}
    for name, (part, make) in TABLES.items():
        if (measured := results.get(part)) is not None:
            made[name] = [*make(measured["lines"]), "", f"Load before: {measured['load_before']}."]
    if {"reduce", "wirings"} <= results.keys():
        verdicts = bars(results)
        missed = [f"- {row}" for row in verdicts if row.startswith("MISSED")]
        met = f"{len(verdicts) - len(missed)} of {len(verdicts)} bars are met (`bars` in `{SOURCE}`)."
        made["bars"] = [met, "", *missed]
    return made


def bars(results: Results) -> list[str]:
    """Each bar, met or missed, with its figure."""
    rows: list[str] = []

    def held(met: bool, text: str) -> None:
        rows.append(f"{'met   ' if met else 'MISSED'} {text}")

    if "reduce" in results:
        lines = results["reduce"]["lines"]
        ours = {shape: lanes["native"]["median_s"] for (shape, _, _), lanes in _sums(lines, True).items()}
        for shape, bar in REDUCE_BARS.items():
            held(ours[shape] <= bar, f"16 KB over {shape}: {ours[shape] * 1e3:.2f} ms, at most {bar * 1e3:g} ms")
        for (shape, delay, nbytes), lanes in _sums(lines, False).items():
            share, what = lanes["native"]["median_s"] / lanes["gloo"]["median_s"], f"{nbytes >> 20} MB over {shape}"
            held(share <= LARGE_BAR, f"{what} at {delay * 1e3:g} ms: {share:.2f} of gloo's time, at most {LARGE_BAR:g}")
        ratio = ours["2 x 2"] / ours["2 x 1"]
        held(ratio <= TWO_LEVEL_BAR, f"16 KB over 2 x 2: {ratio:.2f} times 2 x 1, at most {TWO_LEVEL_BAR}")
    if "wirings" in results:
        for met, text in wiring_bars(results["wirings"]["lines"]):
            held(met, text)
    return rows


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


def write_docs(results: Results) -> None:
    """Renews the tables that docs/cross_node.md and docs/layouts.md have, and the pictures and data of these."""
    made = tables(results)
    for page in (DOCS / "cross_node.md", DOCS / "layouts.md"):
        text = page.read_text()
        for name, lines in made.items():
            if f" {name}: begin -->" in text:
                text = renewed(text, lines, f" {name}(?=:)")
        page.write_text(text)
    pictures = DOCS / "pictures"
    pictures.mkdir(exist_ok=True)
    if "wirings" in results:
        (pictures / "law.svg").write_text(picture(law_points(results["wirings"]["lines"])))
    if "layouts" in results:
        medians = points(results["layouts"]["lines"])
        (pictures / "layouts.json").write_text("[\n" + ",\n".join(map(json.dumps, medians)) + "\n]\n")
        (pictures / "layouts.svg").write_text(layouts_picture(medians))
