"""What adapting costs and brings back, by size: a standard model, laddered in its upper half or in all layers, trained
on by a hard switch, with annealing, with distillation, beside the standard model given the same extra steps.

    python tools/benchmarks/adaptation.py --only demo --minutes 30     what is missing, as much as fits; call it again
    python tools/benchmarks/adaptation.py --report  the tables of what there is; --plot FILE draws them

Held-out perplexity: of the original, of each target before any training, and after every fifth of the extra steps. A
run is one target, one way and one seed; results lie in tools/benchmarks/results/adaptation.json beside the budget
that they
were made with, and another budget starts anew. Each size's original is trained from scratch first.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import table
from laddertron.models.config.dialects import stock_json
from laddertron.models.config.model_config import Wiring, from_folder, make_wiring
from laddertron.tools.train import corpus, train
from laddertron.tools.train.build import adapted, build, load
from laddertron.tools.train.data_parallel import DataParallel
from laddertron.tools.train.export import export
from laddertron.tools.train.fit import Settings, TrainProgress, fit
from laddertron.tools.train.loss import Distil, held_out
from laddertron.tools.train.tokens import Batches
from quality import CONTEXT, SEEDS, VOCAB, go_on, model

RESULTS = Path(__file__).resolve().parent / "results" / "adaptation.json"
ORIGINALS = Path(__file__).resolve().parents[2] / "build" / "adaptation"
SIZES = {"demo": (6, 96, 4, 256), "4M": (8, 192, 6, 512), "10M": (12, 256, 8, 704)}
"""Layers, hidden, heads, FFN."""
WAYS = ("hard", "anneal", "distil")
KINDS = (("standard", "hard"), *product(("upper half", "all layers"), WAYS))
POINTS = 5
HELD_OUT = 32_768
"""Tokens of the held-out text that a point is measured on."""


def targets(layers: int) -> dict[str, Wiring]:
    return {
        "standard": make_wiring("standard", layers),
        "upper half": make_wiring("hybrid", layers, range(layers // 2, layers)),
        "all layers": make_wiring("ladder", layers),
    }


def recovery(folder: Path, wiring: Wiring, way: str, seed: int, tokens: int, ids: Any, apart: Any) -> list[float]:
    """Perplexity before training and after each fifth of it."""
    ranks, stored = DataParallel(), from_folder(folder)
    settings = Settings(tokens, context=CONTEXT, learning_rate=1e-3, seed=seed, dtype="bfloat16")
    teacher = None
    if way == "anneal":
        settings = replace(settings, anneal=settings.steps // 2)
    elif way == "distil":
        settings, teacher = replace(settings, distil=Distil(0.5)), build(stored, ranks)
        load(teacher, folder, ranks)
    taught = build(adapted(stored, wiring), ranks, before=stored.wiring if way == "anneal" else None)
    load(taught, folder, ranks)
    found = [held_out(taught, apart, CONTEXT).perplexity]

    def on_step(progress: TrainProgress) -> None:
        if progress.step * POINTS // progress.steps > (progress.step - 1) * POINTS // progress.steps:
            fade, taught.fade = taught.fade, 0.0  # as it would be served
            found.append(held_out(taught, apart, CONTEXT).perplexity)
            taught.fade = fade

    fit(taught, Batches(ids, settings.batch, CONTEXT, seed), settings, ranks, teacher, on_step=on_step)
    return found


def size_table(results: dict[str, Any], size: str) -> list[str]:
    """Means over the seeds there are, the last point's sample deviation behind it."""
    steps, rows = [f"{100 * i // POINTS} %" for i in range(1, POINTS + 1)], []
    for target, way in KINDS:
        found = [results["runs"].get(f"{size}/{target}/{way}/{seed}") for seed in SEEDS]
        curves = [curve for curve in found if curve]
        if curves:
            means = [f"{statistics.mean(points):.2f}" for points in zip(*curves, strict=True)]
            last = [curve[-1] for curve in curves]
            spread = f" ± {statistics.stdev(last):.2f}" if len(last) > 1 else ""
            name = "standard, trained on" if target == "standard" else f"{target}, {way}"
            rows.append((name, len(curves), *means[:-1], means[-1] + spread))
    return table(" | ".join((size, "seeds", "untrained", *steps)), rows) if rows else []


def draw_recovery(axes: Any, results: dict[str, Any]) -> None:
    """The means of each kind over seeds, of the largest size there is."""
    size = next(
        (size for size in reversed(SIZES) if any(key.startswith(f"{size}/") for key in results["runs"])), "demo"
    )
    for kind, (target, way) in enumerate(KINDS):
        curves = [results["runs"].get(f"{size}/{target}/{way}/{seed}") for seed in SEEDS]
        means = [statistics.mean(points) for points in zip(*(curve for curve in curves if curve), strict=True)]
        line = {"standard": ":", "upper half": "--", "all layers": "-"}[target]
        axes.plot(
            [20 * i for i in range(len(means))],
            means,
            line,
            marker=".",
            color=f"C{kind}",
            label="standard, trained on" if target == "standard" else f"{target}, {way}",
        )
    axes.set_xlabel("% of the extra steps")
    axes.set_yscale("log")
    axes.set_ylabel("held-out perplexity")
    axes.set_title(f"{size}: {results['tokens']:,} tokens after as many")
    axes.legend()


def prepare(tokens: int) -> Callable[[str], list[float]]:
    documents = corpus.python_documentation()
    words = corpus.train_tokenizer(documents, VOCAB)
    ids, apart = (train.encode(words, documents, side) for side in (False, True))

    def run(key: str) -> list[float]:
        size, target, way, seed = key.split("/")
        folder = ORIGINALS / f"{size}-{tokens}"
        if not (folder / "config.json").exists():
            original = train.train(
                model("standard", *SIZES[size]), Settings(tokens, dtype="bfloat16"), words, documents
            )
            folder.mkdir(parents=True, exist_ok=True)
            export(folder, original.model, "float32", stock_json(original.model.config, {}))
        wiring = targets(SIZES[size][0])[target]
        found = recovery(folder, wiring, way, int(seed), tokens, ids, np.asarray(apart)[:HELD_OUT])
        return [round(value, 3) for value in found]

    return run


def main() -> None:
    torch.set_num_threads(1)
    keys = [f"{size}/{target}/{way}/{seed}" for seed, size, (target, way) in product(SEEDS, SIZES, KINDS)]
    results = go_on(__doc__ or "", RESULTS, 400_000, keys, prepare, draw_recovery)
    print(f"{results['tokens']:,} tokens an original, and as many more a run")
    for size in SIZES:
        print("\n".join(["", *size_table(results, size)]))


if __name__ == "__main__":
    main()
