"""What adapting costs and brings back, by size: a standard model, laddered in its upper half or in all layers, trained
on by a hard switch, with annealing, with distillation, beside the standard model given the same extra steps.

    python benchmarks/adaptation.py --sizes demo,4M --minutes 30     what is missing, as much as fits; call it again
    python benchmarks/adaptation.py --report                         the tables of what there is

Held-out perplexity: of the original, of each target before any training, and after every fifth of the extra steps. A
run is one target, one way and one seed; results lie in benchmarks/results/adaptation.json beside the budget that they
were made with, and another budget starts anew. Each size's original is trained from scratch first.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from laddertron.models.config.dialects import stock_json
from laddertron.models.config.model_config import ModelConfig, Wiring, from_folder, make_wiring
from laddertron.models.training import corpus, train
from laddertron.models.training.build import adapted, build, load
from laddertron.models.training.export import export
from laddertron.models.training.fit import Settings, TrainProgress, fit
from laddertron.models.training.loss import Distil, held_out
from laddertron.models.training.tokens import Batches
from laddertron.topology.comm.data_parallel import DataParallel
from quality import CONTEXT, SEEDS, VOCAB, model

RESULTS = Path(__file__).resolve().parent / "results" / "adaptation.json"
ORIGINALS = Path(__file__).resolve().parents[1] / "build" / "adaptation"
SIZES = {"demo": (6, 96, 4, 256), "4M": (8, 192, 6, 512), "10M": (12, 256, 8, 704)}
"""Layers, hidden, heads, FFN."""
WAYS = ("hard", "anneal", "distil")
POINTS = 5
HELD_OUT = 32_768
"""Tokens of the held-out text that a point is measured on."""


def config_of(size: str) -> ModelConfig:
    return model("standard", *SIZES[size])


def targets(layers: int) -> dict[str, Wiring]:
    return {
        "standard": make_wiring("standard", layers),
        "upper half": make_wiring("hybrid", layers, range(layers // 2, layers)),
        "all layers": make_wiring("ladder", layers),
    }


def runs(sizes: list[str]) -> list[tuple[str, str, str, int]]:
    """Size, target, way, seed; the first seed of everything first."""
    ways = [("standard", "hard"), *((target, way) for target in ("upper half", "all layers") for way in WAYS)]
    return [(size, *kind, seed) for size in sizes for seed in SEEDS for kind in ways]


def recovery(folder: Path, wiring: Wiring, way: str, seed: int, tokens: int, ids: Any, apart: Any) -> list[float]:
    """Perplexity before training and after each fifth of it."""
    ranks, stored = DataParallel(), from_folder(folder)
    settings = Settings(tokens, context=CONTEXT, learning_rate=1e-3, seed=seed, dtype="bfloat16")
    shares: dict[str, dict[str, Any]] = {"anneal": {"anneal": settings.steps // 2}, "distil": {"distil": Distil(0.5)}}
    settings = Settings(tokens, context=CONTEXT, learning_rate=1e-3, seed=seed, dtype="bfloat16", **shares.get(way, {}))
    taught = build(adapted(stored, wiring), ranks, before=stored.wiring if way == "anneal" else None)
    load(taught, folder, ranks)
    teacher = build(stored, ranks)
    load(teacher, folder, ranks)
    found = [held_out(taught, apart, CONTEXT).perplexity]

    def on_step(progress: TrainProgress) -> None:
        if progress.step * POINTS // progress.steps > (progress.step - 1) * POINTS // progress.steps:
            fade, taught.fade = taught.fade, 0.0  # as it would be served
            found.append(held_out(taught, apart, CONTEXT).perplexity)
            taught.fade = fade

    fit(taught, Batches(ids, settings.batch, CONTEXT, seed), settings, ranks, teacher, on_step=on_step)
    return found


def table(results: dict[str, Any], size: str) -> list[str]:
    """Markdown: means over the seeds there are, the last point's sample deviation behind it."""
    steps = [f"{100 * i // POINTS} %" for i in range(1, POINTS + 1)]
    rows = [f"| {size} | seeds | untrained | {' | '.join(steps)} |", "|---" * (POINTS + 3) + "|"]
    for target, way in dict.fromkeys(run[1:3] for run in runs([size])):
        found = [results["runs"].get(f"{size}/{target}/{way}/{seed}") for seed in SEEDS]
        curves = [curve for curve in found if curve]
        if curves:
            means = [f"{statistics.mean(points):.2f}" for points in zip(*curves, strict=True)]
            last = [curve[-1] for curve in curves]
            spread = f" ± {statistics.stdev(last):.2f}" if len(last) > 1 else ""
            name = "standard, trained on" if target == "standard" else f"{target}, {way}"
            rows.append(f"| {name} | {len(curves)} | {' | '.join(means)}{spread} |")
    return rows if len(rows) > 2 else []


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", default="demo,4M,10M")
    parser.add_argument("--minutes", type=float, default=60.0, help="start no run after these")
    parser.add_argument("--tokens", type=int, default=400_000, help="that an original is trained on, and again after")
    parser.add_argument("--report", action="store_true", help="no training: the tables of what there is")
    args = parser.parse_args()
    sizes = args.sizes.split(",")
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if results.get("tokens") != args.tokens and not args.report:
        results = {"tokens": args.tokens, "runs": {}}
    if not args.report:
        torch.set_num_threads(1)
        documents = corpus.python_documentation()
        words = corpus.train_tokenizer(documents, VOCAB)
        ids, apart = (train.encode(words, documents, side) for side in (False, True))
        end = time.monotonic() + 60 * args.minutes
        for size, target, way, seed in runs(sizes):
            key, folder = f"{size}/{target}/{way}/{seed}", ORIGINALS / f"{size}-{args.tokens}"
            if key in results["runs"] or time.monotonic() > end:
                continue
            if not (folder / "config.json").exists():
                original = train.train(config_of(size), Settings(args.tokens, dtype="bfloat16"), words, documents)
                folder.mkdir(parents=True, exist_ok=True)
                export(folder, original.model, "float32", stock_json(original.model.config, {}))
            wiring = targets(SIZES[size][0])[target]
            results["runs"][key] = recovery(folder, wiring, way, seed, args.tokens, ids, np.asarray(apart)[:HELD_OUT])
            RESULTS.parent.mkdir(exist_ok=True)
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
            print(f"{key}: {' '.join(f'{value:.2f}' for value in results['runs'][key])}", flush=True)
    print(f"{results['tokens']:,} tokens an original, and as many more a run")
    for size in SIZES:
        print("\n".join(["", *table(results, size)]))


if __name__ == "__main__":
    main()
