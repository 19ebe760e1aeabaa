"""What the wirings are worth at equal budget, from scratch at demo size, over seeds: held-out perplexity with spread.

    python tools/benchmarks/quality.py --minutes 8  as many runs as fit, those that are missing; call it again to go on
    python tools/benchmarks/quality.py --report        the table of what there is

A run is one wiring and one seed, minutes of one core; tools/benchmarks/results/quality.json keeps the results; another
budget discards them.
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
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = go_on(path, [f"{wiring}/{seed}" for seed, wiring in product(SEEDS, WIRINGS)], args)
    print("\n".join([f"{results['tokens']:,} tokens a run", *wiring_table(results)]))


if __name__ == "__main__":
    main()
