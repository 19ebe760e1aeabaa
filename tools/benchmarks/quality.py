"""What the wirings are worth at equal budget, from scratch at demo size, over seeds: held-out perplexity with spread.

    python tools/benchmarks/quality.py --minutes 8  as many runs as fit, those that are missing; call it again to go on
    python tools/benchmarks/quality.py --report        the table of what there is; --plot FILE draws it

A run is one wiring and one seed, some minutes of one core; results lie in tools/benchmarks/results/quality.json
beside the
budget that they were made with, and another budget starts anew.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from common import table
from laddertron.models.config.known_models import architecture
from laddertron.models.config.model_config import ModelConfig, make_wiring
from laddertron.tools.bench.picture import picture
from laddertron.tools.plan.step_simulator import law
from laddertron.tools.train import corpus, train
from laddertron.tools.train.fit import Settings

RESULTS = Path(__file__).resolve().parent / "results" / "quality.json"
LAYERS, HIDDEN, HEADS, FFN, VOCAB, CONTEXT = 6, 96, 4, 256, 2048, 256
WIRINGS = ("standard", "parallel", "ladder", "hybrid", "desync-2", "desync-4", "delay-2", "delay-3", "delay-4")
SEEDS = (0, 1, 2)


def model(
    wiring: str, num_layers: int = LAYERS, hidden: int = HIDDEN, heads: int = HEADS, ffn: int = FFN
) -> ModelConfig:
    """The demo models' shape, or another; hybrid ladders the upper half, desync drifts on two ranks."""
    layers = range(num_layers // 2, num_layers) if wiring == "hybrid" else None
    tp = 2 if wiring.startswith("desync") else None
    wired = make_wiring(wiring, num_layers, layers, tensor_parallel_size=tp)
    return architecture(
        "llama", num_layers, hidden, heads, heads, ffn, VOCAB, CONTEXT, tied=True, wiring=wired, dtype="float32"
    )


def wiring_table(results: dict[str, Any]) -> list[str]:
    """Mean and sample standard deviation over the seeds that there are."""
    rows = []
    for wiring in WIRINGS:
        found = [results["runs"].get(f"{wiring}/{seed}") for seed in SEEDS]
        there = [value for value in found if value is not None]
        if there:
            spread = f"{statistics.stdev(there):.2f}" if len(there) > 1 else ""
            cells = ["" if value is None else f"{value:.2f}" for value in found]
            rows.append((wiring, *cells, f"{statistics.mean(there):.2f}", spread))
    return table(" | ".join(("wiring", *(f"seed {seed}" for seed in SEEDS), "mean", "deviation")), rows)


def draw_wirings(axes: Any, results: dict[str, Any]) -> None:
    for at, wiring in enumerate(WIRINGS):
        there = [value for seed in SEEDS if (value := results["runs"].get(f"{wiring}/{seed}")) is not None]
        axes.plot([at] * len(there), there, "o", color="C0", alpha=0.5)
        axes.plot(at, _mean(results, wiring), "_", color="C1", markersize=28)
    axes.set_xticks(range(len(WIRINGS)), WIRINGS, rotation=30)
    axes.set_ylabel("held-out perplexity")
    axes.set_title(f"{results['tokens']:,} tokens from scratch, {len(SEEDS)} seeds and their mean")


def draw_delays(axes: Any, results: dict[str, Any]) -> None:
    """Quality against speed over d: the law's gain over standard for several L/c, each line from standard through
    ladder (d = 1) to the deepest delay."""
    delays = [wiring for wiring in WIRINGS if wiring == "ladder" or wiring.startswith("delay-")]
    for at, ratio in enumerate((4.0, 2.0, 1.0, 0.5)):
        points = [(1.0, _mean(results, "standard"))]
        points += [(law(1.0, ratio, d), _mean(results, wiring)) for d, wiring in enumerate(delays, 1)]
        width = 8 - 2 * at  # lines that run together stay visible
        axes.plot(*zip(*points, strict=True), "o-", linewidth=width, markersize=width + 4, label=f"L = {ratio:g} c")
    axes.grid(alpha=0.3)
    axes.set_title("the same over the speed that the law allows")
    axes.set_xlabel("the law's decode speed over standard's; at the points d = 0, 1, 2 ...")
    axes.legend()


def _mean(results: dict[str, Any], wiring: str) -> float:
    found = [results["runs"][key] for seed in SEEDS if (key := f"{wiring}/{seed}") in results["runs"]]
    return statistics.mean(found) if found else float("nan")


def draw(axes: Any, results: dict[str, Any]) -> None:
    grid = axes.figure.add_gridspec(1, 2)
    axes.figure.set_size_inches(13, 4.5)
    axes.set_subplotspec(grid[0])
    draw_wirings(axes, results)
    draw_delays(axes.figure.add_subplot(grid[1]), results)


def go_on(path: Path, keys: Sequence[str], args: argparse.Namespace) -> dict[str, Any]:
    """The results at `path` after as many of the missing runs as args.minutes allow, each kept as soon as it is done:
    {"tokens": budget of a run, "runs": {key: perplexity}}."""
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"tokens": args.tokens, "runs": {}}
    if args.report:
        return results
    if results["tokens"] != args.tokens:
        results = {"tokens": args.tokens, "runs": {}}
    missing = [key for key in keys if key.startswith(args.only) and key not in results["runs"]]
    end, run = time.monotonic() + 60 * args.minutes, prepare(args.tokens) if missing else None
    for key in missing:
        if run is None or time.monotonic() > end:
            break
        results["runs"][key] = run(key)
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(results, indent=1) + "\n")
        print(f"{key}: {results['runs'][key]}", flush=True)
    return results


def prepare(tokens: int) -> Callable[[str], float]:
    documents = corpus.python_documentation()
    words = corpus.train_tokenizer(documents, VOCAB)

    def run(key: str) -> float:
        wiring, seed = key.split("/")
        settings = Settings(tokens=tokens, seed=int(seed), dtype="bfloat16")
        return round(train.train(model(wiring), settings, words, documents).held_out_perplexity, 3)

    return run


def main(path: Path = RESULTS) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0, help="start no run after these")
    parser.add_argument("--tokens", type=int, default=1_600_000, help="budget of a run; a change discards the results")
    parser.add_argument("--only", default="", help="the runs whose key begins so")
    parser.add_argument("--report", action="store_true", help="no training: the tables of what there is")
    parser.add_argument("--plot", type=Path, help="draw what there is, at the end: .png or .svg")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = go_on(path, [f"{wiring}/{seed}" for seed, wiring in product(SEEDS, WIRINGS)], args)
    if args.plot is not None:
        with picture(args.plot) as axes:
            draw(axes, results)
    print("\n".join([f"{results['tokens']:,} tokens a run", *wiring_table(results)]))


if __name__ == "__main__":
    main()
