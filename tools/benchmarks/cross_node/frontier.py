"""Quality against speed of the wirings: Llamas of the demo's shape (configs/demo), trained alike from several seeds,
and decoded tokens/s of a Llama of 150M over two nodes that tests/cluster makes on this machine, at fixed L/c.

    python tools/benchmarks/cross_node/frontier.py            half an hour or more of two quiet cores; as root
    python tools/benchmarks/cross_node/frontier.py --write    and renews the section of docs/layouts.md, figure and data

A trained model stays in build/frontier, and an interrupted call continues with the next one. Another wiring enters by a
line of WIRINGS.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from common import renewed, spread, svg, table  # noqa: E402
from cross_layouts import at_ratios  # noqa: E402
from laddertron.tools.plan.published import SPEEDUPS  # noqa: E402
from laddertron.tools.plan.step_simulator import law  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from two_nodes import SHAPE, Row, Site, declaring, insist, on_nodes  # noqa: E402

ROOT = HERE.parents[2]
MODELS, DOCS = ROOT / "build" / "frontier", ROOT / "docs"
WIRINGS: dict[str, tuple[str, ...]] = {
    "standard": (), "parallel": (), "ladder": (), "hybrid": ("--ladder-layers", "3,4,5"), "delay-2": (),
    "desync-4": ("--tensor-parallel-size", "2"),
}  # fmt: skip
"""What `laddertron train` needs besides --wiring; hybrid: ladder in the upper half. desync-4 synchronises as a Parallel
Track model (arXiv 2602.07306) of two tracks and blocks of two layers."""
DECLARED = {"parallel": None, "desync-4": 2}
"""Those that weights must declare, and the ranks that they are for."""
LAYERS = SHAPE["num_hidden_layers"]
SILENT, BATCH, RATIOS = "no-communication", 1, (0.3, 0.6, 1.2)
TOKENS = 400_000
PUBLISHED = {"1B": (18.54, 18.42), "3B": (14.48, 14.90)}
"""WikiText perplexity of standard and ladder, trained alike (arXiv 2501.06589)."""


def trained(wiring: str, seed: int, tokens: int) -> float:
    """The held-out loss in nats a token. Trains the model if it is not there. Raises CalledProcessError."""
    folder = MODELS / f"{wiring}-{seed}-{tokens}"
    if not (folder / "training.json").exists():
        words = ["train", "-o", str(folder), "--wiring", wiring, "--seed", str(seed), "--tokens", str(tokens)]
        words += ["--threads", "1", *WIRINGS[wiring]]
        subprocess.run([sys.executable, "-m", "laddertron.launchers.cli", *words], check=True)
    return math.log(json.loads((folder / "training.json").read_text())["held_out_perplexity"])


def speeds(site: Site, runs: int) -> Iterator[Row]:
    """See at_ratios."""
    deployments = {
        wiring: site.deployment(wiring) if wiring in DECLARED else site.deployment("llama", wiring)
        for wiring in (*WIRINGS, SILENT)
    }
    hybrid = deployments["hybrid"]
    upper = tuple(range(LAYERS // 2, LAYERS))
    deployments["hybrid"] = replace(hybrid, model=replace(hybrid.model, ladder_layers=upper))
    return at_ratios(site, deployments, (BATCH,), RATIOS, 32, runs)


def gains(rows: Sequence[Row], aimed: float) -> dict[str, list[float]]:
    """Tokens/s over standard's, by wiring, of each run."""
    runs = [row["rates"] for row in rows if row["aimed"] == aimed]
    return {wiring: [run[wiring] / run["standard"] for run in runs] for wiring in (*WIRINGS, SILENT)}


def ratio(rows: Sequence[Row], aimed: float) -> float:
    """L/c, as what communicating adds to computing."""
    return median(gain - 1 for gain in gains(rows, aimed)[SILENT])


def report(losses: Mapping[str, Sequence[float]], rows: Sequence[Row]) -> list[str]:
    """Markdown."""
    standard = losses["standard"]
    ratios = [f"speed at L/c {ratio(rows, aimed):.2f}" for aimed in RATIOS]
    cells = []
    for wiring, own in losses.items():
        more = [a - b for a, b in zip(own, standard, strict=True)]
        cells.append(
            (wiring, f"{fmean(own):.3f}", spread(more, "+.3f"),
             *(spread(gains(rows, aimed)[wiring], ".2f") for aimed in RATIOS))
        )  # fmt: skip
    return [
        "![held-out loss against speed, by wiring](pictures/frontier.svg)", "",
        *table(" | ".join(("wiring", "loss, nats a token", "over standard, by seed", *ratios)), cells),
    ]  # fmt: skip


def picture(losses: Mapping[str, Sequence[float]], rows: Sequence[Row]) -> str:
    """Speed over standard's against held-out loss over standard's, a panel for each L/c and one for published models;
    bars: all seeds and runs; hollow: the speed that the law gives."""
    figure = Figure(figsize=(3.3 * (len(RATIOS) + 1), 3.9), layout="constrained")
    *panels, last = figure.subplots(1, len(RATIOS) + 1, sharey=True)
    for axes, aimed in zip(panels, RATIOS, strict=True):
        at, by_wiring = ratio(rows, aimed), gains(rows, aimed)
        bounds = {"ladder": law(1.0, at), "delay-2": law(1.0, at, 2)}
        for index, (wiring, own) in enumerate(losses.items()):
            more = [a - b for a, b in zip(own, losses["standard"], strict=True)]
            x, y = median(by_wiring[wiring]), fmean(more)
            axes.errorbar(
                x, y, [[y - min(more)], [max(more) - y]],
                [[x - min(by_wiring[wiring])], [max(by_wiring[wiring]) - x]],
                fmt="o", color=f"C{index}", capsize=2, label=wiring,
            )  # fmt: skip
            if wiring in bounds:
                axes.plot(bounds[wiring], y, "o", mfc="none", color=f"C{index}")
        axes.set(title=f"L/c {at:.2f}", xlabel="tokens/s over standard")
    for size, (before, after) in PUBLISHED.items():
        point = SPEEDUPS["p2p"][size], math.log(after / before)
        last.plot(*point, "^", color="C2")
        last.annotate(f"ladder {size}", point, textcoords="offset points", xytext=(4, 4), fontsize="small")
    last.set(title="published, 8 H100", xlabel="tokens/s over standard", xlim=(1.0, 2.0))
    for axes in (*panels, last):
        axes.axhline(0.0, color="#888", linewidth=0.5)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("held-out loss over standard's, nats")
    panels[0].legend(fontsize="x-small")
    return svg(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="each model is trained on")
    parser.add_argument("--runs", type=int, default=3, help="of each speed")
    parser.add_argument("--processes", type=int, default=2, help="that train at once, on a core each")
    parser.add_argument("--write", action="store_true", help="renew docs/layouts.md, its figure and its data")
    args = parser.parse_args()
    insist()
    pairs = [(wiring, seed) for seed in range(args.seeds) for wiring in WIRINGS]
    with ThreadPoolExecutor(args.processes) as pool:
        results = list(pool.map(lambda pair: trained(pair[0], pair[1], args.tokens), pairs))
    losses = {w: [loss for (name, _), loss in zip(pairs, results, strict=True) if name == w] for w in WIRINGS}
    models = {"llama": SHAPE} | {wiring: declaring(SHAPE, wiring, ranks) for wiring, ranks in DECLARED.items()}
    rows = list(on_nodes(speeds, models, args.runs))
    lines = report(losses, rows)
    print("\n".join(lines))
    if args.write:
        page, pictures = DOCS / "layouts.md", DOCS / "pictures"
        page.write_text(renewed(page.read_text(), lines, "frontier.py"))
        (pictures / "frontier.json").write_text(json.dumps({"losses": losses, "speeds": rows}, indent=1) + "\n")
        (pictures / "frontier.svg").write_text(picture(losses, rows))


if __name__ == "__main__":
    main()
