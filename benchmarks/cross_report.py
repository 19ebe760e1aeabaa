"""From cross_node.py's measurements to tables, verdicts and docs/performance.md. Pure but for `write_docs`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cross_cost import BAR as MODEL_BAR
from cross_cost import cost_table, fits
from cross_large import large_bars, large_table
from cross_picture import picture

Results = Mapping[str, Any]
Line = Mapping[str, Any]
DOCS = Path(__file__).resolve().parent.parent / "docs"
BEGIN, END = "<!-- measured by benchmarks/cross_node.py: begin -->", "<!-- end -->"
SMALL = 16384
"""Bytes of a decode step's message; larger ones beside it are a prompt's."""
REDUCE_BARS = {(2, 1): 1.5e-3, (4, 1): 2.6e-3}
TWO_LEVEL_BAR = 1.3
WIRINGS = ("standard", "parallel", "ladder", "carried", "no-communication")
HIDDEN_BAR, SPEED_BAR, REST_BAR = 0.85, 1.5, 0.98
PUBLISHED = {
    (1e-4, 1): (15.6, 13.6, 13.5),
    (1e-4, 8): (118, 97, 102),
    (1e-3, 1): (7.2, 6.8, 11.5),
    (1e-3, 8): (55, 52, 89),
}
"""Tokens/s of the same model by vLLM's CPU build, and by the paper's code as standard and as ladder: (delay, batch)."""
PUBLISHED_PREFILL = {(0.0, 1): "3,350 (inside one machine)", (1e-3, 1): "709"}
"""Prefilled tokens/s of the same model by vLLM's CPU build on another machine: (delay, batch)."""
LLAMA_BARS = {(1e-3, 1): (20, 38), (1e-3, 8): (150, 280), (1e-4, 1): (38, 50), (1e-4, 8): (280, 360)}
"""Tokens/s wanted of standard and ladder."""


def law(ratio: float) -> float:
    """The speed-up of ladder over standard that hiding alone can give, at L/c = ratio; never above 2."""
    return (1 + ratio) / max(1.0, (1 + ratio) / 2)


def ladder_layer_s(c: float, all_reduce: float, larger: float) -> float:
    """Seconds of a ladder layer whose larger sub-block has that share of its computation 2 c: the layer's output of one
    kind is on its way while only the other kind computes, so a kind repeats no sooner than after itself and its
    all-reduce. With equal sub-blocks this is the law."""
    return max(2 * c, 2 * c * larger + all_reduce)


def can_be_hidden(case: Mapping[str, Line]) -> float:
    """What `hidden_share` would be with a ladder step of the least that these cores allow: the messages carried and
    nobody waiting for them, but for what attention is too short to hide and the last all-reduce of a step."""
    t = {name: float(case[name]["step_s"]) for name in ("standard", "no-communication", "carried")}
    sub_blocks, all_reduce = case["standard"]["sub_blocks"], float(case["ladder"]["all_reduce_s"])
    c, larger = t["carried"] / sub_blocks, float(case["standard"]["larger_share"])
    layer = ladder_layer_s(c, all_reduce, larger)
    least = sub_blocks / 2 * layer + max(0.0, all_reduce - (layer - 2 * c))
    return float((t["standard"] - least) / (t["standard"] - t["no-communication"]))


def cases(lines: list[Line]) -> dict[tuple[float, int], dict[str, Line]]:
    """By (delay, batch), each with its wirings' lines."""
    found: dict[tuple[float, int], dict[str, Line]] = {}
    for line in lines:
        found.setdefault((line["delay_s"], line["batch"]), {})[line["wiring"]] = line
    return dict(sorted(found.items()))


def hidden_share(case: Mapping[str, Line]) -> float:
    """(t_standard - t_ladder) / (t_standard - t_no-communication): what of the communication's cost ladder removes."""
    t = {name: case[name]["step_s"] for name in ("standard", "ladder", "no-communication")}
    return float((t["standard"] - t["ladder"]) / (t["standard"] - t["no-communication"]))


def compute_s(case: Mapping[str, Line]) -> float:
    """c: a sub-block's computation."""
    return float(case["no-communication"]["step_s"] / case["standard"]["sub_blocks"])


def speed_up(case: Mapping[str, Line]) -> float:
    return float(case["standard"]["step_s"] / case["ladder"]["step_s"])


def effective_ratio(case: Mapping[str, Line]) -> float:
    """L/c as the steps themselves say it: what communication adds to what computation takes."""
    return float(case["standard"]["step_s"] / case["no-communication"]["step_s"] - 1.0)


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
        "turns in one set of ranks. Open MPI is told to use recursive doubling, its best here.",
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


def wiring_tables(results: Results) -> list[str]:
    lines = results["wirings"]["lines"]
    rows = [
        f"### Wirings ({lines[0]['model']}, tp 2 over 2 nodes, one core a rank)",
        "",
        "Decode tokens/s; c is a sub-block's computation (the no-communication step over its sub-blocks), L one "
        "all-reduce of the step's size, measured by itself; speed-up is ladder over standard. Attention and MLP take "
        "unlike times: the law is given for them as they are. Carried: every message sent, delivered and taken, and "
        "nobody waits for any: what it is slower than no communication is what communicating costs the cores, "
        "which nothing hides. In brackets what could be hidden beside that: but for the last all-reduce of a step, and "
        "what attention is too short for.",
        "",
        "| one way, batch | c | L | L/c | standard | parallel | ladder | carried | no-comm. | speed-up | the law | "
        "hidden (of) |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (delay, batch), case in cases(lines).items():
        c, all_reduce, larger = compute_s(case), case["ladder"]["all_reduce_s"], case["standard"]["larger_share"]
        most = 2 * (c + all_reduce) / ladder_layer_s(c, all_reduce, larger)
        speeds = [f"{batch / case[w]['step_s']:.1f}" if w in case else "" for w in WIRINGS]
        of = f" ({can_be_hidden(case):.0%})" if "carried" in case else ""
        rows.append(
            f"| {delay * 1e3:.3g} ms, {batch} | {c * 1e3:.2f} ms | {all_reduce * 1e3:.2f} ms | {all_reduce / c:.2f} | "
            f"{' | '.join(speeds)} | {speed_up(case):.2f} | {most:.2f} | {hidden_share(case):.0%}{of} |"
        )
    larger = sorted(case["standard"]["larger_share"] for case in cases(lines).values())
    shares = [line["switch_share"] for line in lines]
    others = [line["other_threads_share"] for line in lines]
    rows += [
        "",
        f"The switch between the nodes, which a real cluster does not have, took {min(shares):.1%} to "
        f"{max(shares):.1%} of one core, and a rank's threads beside its main one {min(others):.1%} to "
        f"{max(others):.1%}: both on the cores that compute. The MLP took {larger[0]:.0%} to {larger[-1]:.0%} of a "
        "layer's computation.",
    ]
    return rows


def llama_tables(results: Results) -> list[str]:
    lines = results["llama150m"]["lines"]
    rows = [
        f"### {lines[0]['model']}, tp 2, one core and one node a rank, prompt {lines[0]['prompt']}",
        "",
        "Decode tokens/s. In brackets, as a share of the no-communication speed. vLLM and the paper's code were "
        "measured over such a link on another day: compare magnitudes, not digits.",
        "",
        "| one way, batch | standard | parallel | ladder | no-comm. | vLLM | paper's standard | paper's ladder |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (delay, batch), case in cases(lines).items():
        top = batch / case["no-communication"]["step_s"]
        speeds = [batch / case[w]["step_s"] if w in case else None for w in ("standard", "parallel", "ladder")]
        others = PUBLISHED.get((delay, batch), ("", "", ""))
        cells = ["" if s is None else f"{s:.1f} ({s / top:.0%})" for s in speeds] + [f"{top:.1f}", *map(str, others)]
        rows.append(f"| {delay * 1e3:.3g} ms, {batch} | {' | '.join(cells)} |")
    return [*rows, "", *prefill_table(lines)]


def prefill_table(lines: list[Line]) -> list[str]:
    samples = min(line.get("prefills", 1) for line in lines)
    how = f"median of {samples}, in turns (slowest to fastest)" if samples > 1 else "one sample a cell"
    rows = [
        f"Prefill, tokens/s of prompts computed in one step: {how}. vLLM's were taken on another machine, with AMX: "
        "context, no comparison.",
        "",
        "| one way, batch | standard | parallel | ladder | no-comm. | vLLM, another machine with AMX |",
        "|---|---|---|---|---|---|",
    ]
    for (delay, batch), case in cases(lines).items():
        cells = [_prefill(case.get(w)) for w in ("standard", "parallel", "ladder", "no-communication")]
        cells.append(PUBLISHED_PREFILL.get((delay, batch), ""))
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


TABLES = {"reduce": reduce_tables, "wirings": wiring_tables, "llama150m": llama_tables}


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
        for (delay, batch), case in cases(results["wirings"]["lines"]).items():
            where = f"at {delay * 1e3:.3g} ms, batch {batch}"
            if delay and compute_s(case) >= case["ladder"]["all_reduce_s"]:
                share, of = hidden_share(case), f" of {can_be_hidden(case):.0%}" if "carried" in case else ""
                held(share >= HIDDEN_BAR, f"hidden {where}: {share:.0%}{of}, at least {HIDDEN_BAR:.0%}")
            if delay == 1e-3:
                held(speed_up(case) >= SPEED_BAR, f"ladder {where}: {speed_up(case):.2f}x, at least {SPEED_BAR}x")
            if delay == 0.0:
                held(speed_up(case) >= REST_BAR, f"ladder {where}: {speed_up(case):.2f}x, at least {REST_BAR}x")
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
    points = [
        (effective_ratio(case), speed_up(case), batch)
        for (delay, batch), case in cases(results["wirings"]["lines"]).items()
    ]
    (DOCS / "pictures").mkdir(exist_ok=True)
    (DOCS / "pictures" / "law.svg").write_text(picture(points, law))
