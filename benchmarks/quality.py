"""What the wirings are worth at equal budget, from scratch at demo size, over seeds: held-out perplexity with spread.

    python benchmarks/quality.py --minutes 8     as many runs as fit, those that are missing; call it again to go on
    python benchmarks/quality.py --report        the table of what there is

A run is one wiring and one seed, some minutes of one core; results lie in benchmarks/results/quality.json beside the
budget that they were made with, and another budget starts anew.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from itertools import product
from pathlib import Path
from typing import Any

import torch
from laddertron.models.config.known_models import architecture
from laddertron.models.config.model_config import ModelConfig, make_wiring
from laddertron.models.training import corpus, train

RESULTS = Path(__file__).resolve().parent / "results" / "quality.json"
LAYERS, HIDDEN, HEADS, FFN, VOCAB, CONTEXT = 6, 96, 4, 256, 2048, 256
WIRINGS = ("standard", "parallel", "ladder", "hybrid", "desync-2", "desync-4", "delay-2")
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


def table(results: dict[str, Any]) -> list[str]:
    """Markdown: mean and sample standard deviation over the seeds that there are."""
    rows = ["| wiring | " + " | ".join(f"seed {seed}" for seed in SEEDS) + " | mean | deviation |", "|---" * 6 + "|"]
    for wiring in WIRINGS:
        found = [results["runs"].get(f"{wiring}/{seed}") for seed in SEEDS]
        there = [value for value in found if value is not None]
        if there:
            spread = f"{statistics.stdev(there):.2f}" if len(there) > 1 else ""
            cells = ["" if value is None else f"{value:.2f}" for value in found]
            rows.append(f"| {wiring} | {' | '.join(cells)} | {statistics.mean(there):.2f} | {spread} |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0, help="start no run after these")
    parser.add_argument("--tokens", type=int, default=1_600_000, help="budget of a run")
    parser.add_argument("--report", action="store_true", help="no training: the table of what there is")
    args = parser.parse_args()
    results: dict[str, Any] = (
        json.loads(RESULTS.read_text()) if RESULTS.exists() else {"tokens": args.tokens, "runs": {}}
    )
    if not args.report:
        if results["tokens"] != args.tokens:
            results = {"tokens": args.tokens, "runs": {}}
        torch.set_num_threads(1)
        documents = corpus.python_documentation()
        words = corpus.train_tokenizer(documents, VOCAB)
        end = time.monotonic() + 60 * args.minutes
        for seed, wiring in product(SEEDS, WIRINGS):
            if f"{wiring}/{seed}" in results["runs"] or time.monotonic() > end:
                continue
            settings = train.Settings(tokens=args.tokens, seed=seed, dtype="bfloat16")
            found = train.train(model(wiring), settings, words, documents).held_out_perplexity
            results["runs"][f"{wiring}/{seed}"] = found
            RESULTS.parent.mkdir(exist_ok=True)
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
            print(f"{wiring}, seed {seed}: {found:.3f}", flush=True)
    print("\n".join([f"{results['tokens']:,} tokens a run", *table(results)]))


if __name__ == "__main__":
    main()
