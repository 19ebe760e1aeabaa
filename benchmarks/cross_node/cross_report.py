"""From cross_node.py's measurements to tables, verdicts and docs/performance.md. Pure but for `write_docs`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cross_cost import BAR as MODEL_BAR
from cross_cost import cost_table, fits
from cross_large import large_bars, large_table
from cross_law import law
from cross_picture import picture
from cross_wirings import cases, law_points, wiring_bars, wiring_tables

Results = Mapping[str, Any]
Line = Mapping[str, Any]
DOCS = Path(__file__).resolve().parents[2] / "docs"
BEGIN, END = "<!-- measured by benchmarks/cross_node/cross_node.py: begin -->", "<!-- end -->"
SMALL = 16384
"""Bytes of a decode step's message; larger ones beside it are a prompt's."""
REDUCE_BARS = {(2, 1): 1.5e-3, (4, 1): 2.6e-3}
TWO_LEVEL_BAR = 1.3
LLAMA_BARS = {(1e-3, 1): (20, 38), (1e-3, 8): (150, 280), (1e-4, 1): (38, 50), (1e-4, 8): (280, 360)}
"""Tokens/s wanted of standard and ladder."""


# all-reduces


def _lanes(results: Results, small: bool) -> list[Line]:
    """What was measured beside other libraries: a decode step's message, or a prompt's."""
    lines: list[Line] = results["reduce"]["lines"]
    return [line for line in lines if "/" not in line["lane"] and (line["bytes"] == SMALL) == small]


def reduce_tables(results: Results) -> list[str]:
    rows = [
        "### One all-reduce of 16 KB, 1 ms one way",
        "",
        "Milliseconds, median (90th percentile), from the last rank's entry to the last one's return; all three take "
        "turns in one set of ranks. Open MPI is set to use recursive doubling, its best here.",
        "",
        "| nodes x ranks | laddertron | gloo | Open MPI |",
        "|---|---|---|---|",
    ]
    by: dict[tuple[int, int], dict[str, Line]] = {}
    for line in _lanes(results, True):
        by.setdefault((line["nodes"], line["per_node"]), {})[line["lane"]] = line
    for (nodes, per_node), lanes in by.items():
        cells = [
            f"{lanes[n]['median_s'] * 1e3:.2f} ({lanes[n]['p90_s'] * 1e3:.2f})" for n in ("native", "gloo", "openmpi")
        ]
        rows.append(f"| {nodes} x {per_node} | {' | '.join(cells)} |")
    return [*rows, *large_table(_lanes(results, False)), *cost_table(fits(results["reduce"]["lines"]))]


# decoding


def llama_tables(results: Results) -> list[str]:
    lines = results["llama150m"]["lines"]
    rows = [
        f"### {lines[0]['model']}, tp 2, one core and one node a rank, prompt {lines[0]['prompt']}",
        "",
        "Decode tokens/s. In brackets, as a share of the no-communication speed.",
        "",
        "| one way, batch | standard | parallel | ladder | no-comm. |",
        "|---|---|---|---|---|",
    ]
    for (delay, batch), case in cases(lines).items():
        top = batch / case["no-communication"]["step_s"]
        speeds = [batch / case[w]["step_s"] if w in case else None for w in ("standard", "parallel", "ladder")]
        cells = ["" if s is None else f"{s:.1f} ({s / top:.0%})" for s in speeds] + [f"{top:.1f}"]
        rows.append(f"| {delay * 1e3:.3g} ms, {batch} | {' | '.join(cells)} |")
    return [*rows, "", *prefill_table(lines)]


def prefill_table(lines: list[Line]) -> list[str]:
    samples = min(line.get("prefills", 1) for line in lines)
    how = f"median of {samples}, in turns (slowest to fastest)" if samples > 1 else "one sample a cell"
    rows = [
        f"Prefill, tokens/s of prompts computed in one step: {how}.",
        "",
        "| one way, batch | standard | parallel | ladder | no-comm. |",
        "|---|---|---|---|---|",
    ]
    for (delay, batch), case in cases(lines).items():
        cells = [_prefill(case.get(w)) for w in ("standard", "parallel", "ladder", "no-communication")]
        rows.append(f"| {delay * 1e3:.3g} ms, {batch} | {' | '.join(cells)} |")
    return rows


def _prefill(line: Line | None) -> str:
    """Tokens/s, and the range if there is one."""
    if line is None:
        return ""
    tokens = line["batch"] * line["prompt"]
    least, most = line.get("prefill_range_s", (0.0, 0.0))
    spread = f" ({tokens / most:.0f} to {tokens / least:.0f})" if line.get("prefills", 1) > 1 else ""
    return f"{tokens / line['prefill_s']:.0f}{spread}"


TABLES = {
    "reduce": reduce_tables,
    "wirings": lambda results: wiring_tables(results["wirings"]["lines"]),
    "llama150m": llama_tables,
}


def tables(results: Results) -> list[str]:
    """Markdown of every part that was measured."""
    rows: list[str] = []
    for name, make in TABLES.items():
        if name in results:
            note = " A first impression: a third of the calls." if results[name]["quick"] else ""
            how = f"Load before: {results[name]['load_before']}, ranks at nice {results[name]['nice']}.{note}"
            rows += [*make(results), "", how, ""]
    return rows


def bars(results: Results) -> list[str]:
    """Each bar, met or missed, with its figure."""
    rows: list[str] = []

    def held(met: bool, text: str) -> None:
        rows.append(f"{'met   ' if met else 'MISSED'} {text}")

    if "reduce" in results:
        ours = {(x["nodes"], x["per_node"]): x["median_s"] for x in _lanes(results, True) if x["lane"] == "native"}
        for (nodes, per_node), bar in REDUCE_BARS.items():
            took = ours[nodes, per_node]
            held(took <= bar, f"16 KB over {nodes} x {per_node}: {took * 1e3:.2f} ms, at most {bar * 1e3:g} ms")
        for met, text in large_bars(_lanes(results, False)):
            held(met, text)
        ratio = ours[2, 2] / ours[2, 1]
        held(ratio <= TWO_LEVEL_BAR, f"16 KB over 2 x 2: {ratio:.2f} times 2 x 1, at most {TWO_LEVEL_BAR}")
        worst = max(fitted.worst for fitted in fits(results["reduce"]["lines"]).values())
        held(worst <= MODEL_BAR, f"cost model's worst fitted point: {worst:.0%}, at most {MODEL_BAR:.0%}")
    if "wirings" in results:
        for met, text in wiring_bars(results["wirings"]["lines"]):
            held(met, text)
    if "llama150m" in results:
        for (delay, batch), case in cases(results["llama150m"]["lines"]).items():
            wanted = LLAMA_BARS.get((delay, batch), ())
            for wiring, bar in zip(("standard", "ladder"), wanted, strict=False):
                speed = batch / case[wiring]["step_s"]
                held(speed >= bar, f"150M {wiring} at {delay * 1e3:g} ms, batch {batch}: {speed:.1f}, at least {bar}")
    return rows


def write_docs(results: Results) -> None:
    """Renews the measured part of docs/performance.md, and the picture."""
    page = DOCS / "performance.md"
    text = page.read_text()
    head, _, rest = text.partition(BEGIN)
    tail = rest.partition(END)[2]
    verdicts = ["### Bars", "", "```", *bars(results), "```"]
    page.write_text(f"{head}{BEGIN}\n\n" + "\n".join([*tables(results), *verdicts]) + f"\n\n{END}{tail}")
    (DOCS / "pictures").mkdir(exist_ok=True)
    (DOCS / "pictures" / "law.svg").write_text(picture(law_points(results["wirings"]["lines"]), law))
