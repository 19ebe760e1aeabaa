"""When ladder pays: tokens/s of stock layouts (tensor parallelism, whole and split steps, a pipeline of two stages) and
of trained wirings against L/c, on two nodes that tests/cluster makes on this machine, a core each. A Llama of 150M in
bfloat16 with dummy weights, measured by `laddertron bench`'s ranks in turns.

    python tools/benchmarks/cross_node/cross_layouts.py            three runs, a quarter of an hour; as root
    python tools/benchmarks/cross_node/cross_layouts.py --write    and renews docs/layouts.md, figure and data
    python tools/benchmarks/cross_node/cross_layouts.py --report   the table of what was measured

Each point of each run becomes a line of tools/benchmarks/results/cross_layouts.jsonl, from which an interrupted call
resumes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from common import renewed, table, to_and_fro  # noqa: E402
from cross_picture import layouts_picture  # noqa: E402
from laddertron.engine.config.schema import Deployment  # noqa: E402
from laddertron.tools.plan.advice import STOCK  # noqa: E402
from two_nodes import LANES, SHAPE, Row, Site, insist, on_nodes, rate  # noqa: E402

RESULTS = HERE.parent / "results" / "cross_layouts.jsonl"
DOCS = HERE.parents[2] / "docs"
SUB_BLOCKS = 2 * SHAPE["num_hidden_layers"]
BATCHES, RATIOS = (1, 8, 32), (0.25, 0.5, 1.0, 2.0, 4.0)
KINDS = (*STOCK, "ladder", "delay-2", "lanes", "no-communication")
"""The kinds of layouts, and of trained wirings. A row has run, batch, aimed (L/c), delay_s, and rates by kind."""


def deployment(site: Site, kind: str) -> Deployment:
    stages, split = (2, "never") if kind == "pipeline" else (1, "always" if kind == "split" else "never")
    wiring = {"split": "standard", "pipeline": "standard", "lanes": "auto"}.get(kind, kind)
    parallel = {"tensor_parallel_size": 2 // stages, "pipeline_parallel_size": stages, "split_steps": split}
    return site.deployment("lanes" if kind == "lanes" else "llama", wiring, parallel)


def layouts(site: Site, todo: list[list[Any]], tokens: int) -> Iterator[Row]:
    return at_ratios(site, {kind: deployment(site, kind) for kind in KINDS}, todo, tokens)


def at_ratios(site: Site, deployments: Mapping[str, Deployment], todo: list[list[Any]], tokens: int) -> Iterator[Row]:
    """A row for each (run, batch, L/c) of `todo`, with tokens/s of each kind. "standard" and "no-communication" set the
    link's delay."""
    with ExitStack() as stack:
        jobs = {kind: stack.enter_context(site.job(kind, deployments[kind])) for kind in deployments}
        site.switch.link(0.0)
        rest: dict[int, tuple[float, float]] = {}
        for batch in sorted({batch for _, batch, _ in todo}):
            for job in jobs.values():
                rate(job, batch, 8, 8)
            silent, standard = (
                batch / rate(jobs[kind], batch, 8, tokens) / SUB_BLOCKS for kind in ("no-communication", "standard")
            )
            rest[batch] = silent, standard - silent
        for run, batch, aimed in todo:
            c, without_delay = rest[batch]
            delay_s = max(0.0, aimed * c - without_delay)
            site.switch.link(delay_s)
            rates = {kind: rate(jobs[kind], batch, 8, tokens) for kind in to_and_fro(jobs, run)}
            yield {"run": run, "batch": batch, "aimed": aimed, "delay_s": delay_s, "rates": rates}


def points(rows: Sequence[Row]) -> list[Row]:
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


def report(medians: Sequence[Row]) -> list[str]:
    """Markdown."""
    cells = []
    for p in medians:
        rates, best = p["rates"], max(STOCK, key=p["rates"].__getitem__)
        shown = (f"{rates[kind]:,.0f}" for kind in KINDS)
        cells.append((f"{p['batch']}, {p['ratio']:.2f}", *shown, best))
    ups = ", ".join(f"{crossing([p for p in medians if p['batch'] == b])} (batch {b})" for b in BATCHES)
    head = f"batch, L/c | {' | '.join(KINDS)} | best stock"
    return [
        "![tokens/s of layouts against L/c](pictures/layouts.svg)", "", *table(head, cells), "",
        f"Ladder decodes faster than the best stock layout up to an L/c of: {ups}.",
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=32, help="of each sequence")
    parser.add_argument("--nice", type=int, default=0, help="of all ranks: below 0 where the machine has other work")
    parser.add_argument("--report", action="store_true", help="no measuring")
    parser.add_argument("--write", action="store_true", help="renew docs/layouts.md, its figure and its data")
    args = parser.parse_args()
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    done = {(row["run"], row["batch"], row["aimed"]) for row in rows}
    todo = [[run, b, r] for run in range(args.runs) for b in BATCHES for r in RATIOS if (run, b, r) not in done]
    RESULTS.parent.mkdir(exist_ok=True)
    if todo and not args.report:
        insist()
        for row in on_nodes(layouts, {"llama": SHAPE, "lanes": LANES}, todo, args.tokens, nice=args.nice):
            rows.append(row)
            with RESULTS.open("a") as file:
                file.write(json.dumps(row) + "\n")
    if not rows:
        sys.exit(f"{RESULTS}: no results; measure first, without --report")
    medians = points(rows)
    lines = report(medians)
    print("\n".join(lines))
    if args.write:
        page, pictures = DOCS / "layouts.md", DOCS / "pictures"
        page.write_text(renewed(page.read_text(), lines))
        (pictures / "layouts.json").write_text("[\n" + ",\n".join(map(json.dumps, medians)) + "\n]\n")
        (pictures / "layouts.svg").write_text(layouts_picture(medians))


if __name__ == "__main__":
    main()
