"""From cross_node.py's measurements to tables, verdicts and docs/cross_node.md. Pure but for `write_docs`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from common import renewed, spread, table
from cross_picture import picture
from cross_wirings import later_table, law_points, wiring_bars, wiring_tables

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


# all-reduces


def _sums(lines: Sequence[Line], small: bool) -> dict[tuple[str, float, int], dict[str, Line]]:
    """Measurements of our and other libraries' all-reduce, for a decode step's message (`small`) or a prompt's, by
    (nodes x ranks, delay, bytes) and lane."""
    by_case: dict[tuple[str, float, int], dict[str, Line]] = {}
    for line in lines:
        if (line["bytes"] == SMALL) == small:
            key = (f"{line['nodes']} x {line['per_node']}", line["delay_s"], line["bytes"])
            by_case.setdefault(key, {})[line["lane"]] = line
    return by_case


def reduce_tables(lines: Sequence[Line]) -> list[str]:
    small = []
    for (shape, _, _), lanes in _sums(lines, True).items():
        chosen = (lanes[name] for name in ("native", "gloo", "openmpi"))
        small.append((shape, *(f"{line['median_s'] * 1e3:.2f} ({line['p90_s'] * 1e3:.2f})" for line in chosen)))
    rows = [
        "### One all-reduce of 16 KB, 1 ms one way",
        "",
        "Milliseconds, median (90th percentile), from the last rank's entry to the last one's return. Open MPI is set "
        "to use recursive doubling, its best here.",
        "",
        *table("nodes x ranks | laddertron | gloo | Open MPI", small),
    ]
    large = []
    for (shape, delay, nbytes), lanes in _sums(lines, False).items():
        ours, gloo = (lanes[name]["median_s"] * 1e3 for name in ("native", "gloo"))
        where = f"{shape}, {delay * 1e3:g} ms"
        large.append((where, f"{nbytes >> 20} MB", f"{ours:.1f}", f"{gloo:.1f}", f"{gloo / ours:.2f}"))
    if large:
        rows += [
            "",
            "### One all-reduce of a prompt",
            "",
            "Milliseconds, median. Both send the fewest bytes possible, and the link's bandwidth is not limited: the "
            "limit is the processor time of ranks and switch on their shared cores.",
            "",
            *table("nodes x ranks, one-way delay | size | laddertron | gloo | gloo / laddertron", large),
        ]
    return rows


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


def drafts_table(lines: Sequence[Line]) -> list[str]:
    """Tokens/s, and how many times as many as without drafts."""
    kinds = [name for name, value in lines[0].items() if isinstance(value, list)]
    rows = []
    for line in lines:
        cells = [f"{spread(line[k], '.1f')}, {line[k][0] / line['off'][0]:.2f}x" for k in kinds]
        rows.append((f"{line['delay_s'] * 1e3:g} ms, {line['batch']}", *cells))
    return table(f"one way, sequences | {' | '.join(kinds)}", rows)


TABLES: dict[str, Callable[[Sequence[Line]], list[str]]] = {
    "reduce": reduce_tables,
    "wirings": lambda lines: [*wiring_tables(lines), "", *later_table(lines)],
    "split-prefill": lambda lines: ["### Split prompts", "", *split_table(lines)],
    "split-decode": lambda lines: ["### Split decodes", "", *split_table(lines)],
    "drafts": lambda lines: ["### Drafts", "", *drafts_table(lines)],
    "drafts-staged": lambda lines: ["### Drafts through two stages", "", *drafts_table(lines)],
}


def tables(results: Results) -> list[str]:
    """Markdown of every part that was measured."""
    rows: list[str] = []
    for name, make in TABLES.items():
        if (part := results.get(name)) is not None:
            how = f"Load before: {part['load_before']}, ranks at nice {part['nice']}."
            rows += [*make(part["lines"]), "", how, ""]
    return rows


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


def write_docs(results: Results) -> None:
    """Renews the measured part of docs/cross_node.md, and the picture."""
    page, verdicts = DOCS / "cross_node.md", bars(results)
    missed = [f"- {row}" for row in verdicts if row.startswith("MISSED")]
    met = f"{len(verdicts) - len(missed)} of {len(verdicts)} bars are met (`bars` in `{SOURCE}`)."
    page.write_text(renewed(page.read_text(), [*tables(results), "### Bars", "", met, "", *missed]))
    (DOCS / "pictures").mkdir(exist_ok=True)
    (DOCS / "pictures" / "law.svg").write_text(picture(law_points(results["wirings"]["lines"])))
