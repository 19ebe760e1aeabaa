"""Pipelines against transformers (standard models), models/reference.py (every wiring) and the engine without
stages: pp 2 and 3, tp 2 x pp 2. fp32: greedy tokens identical, as in test_oracle.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import torch
from test_oracle import Logits, assert_greedy, checkpoint, reference_logits, transformers_logits

__all__ = ["checkpoint"]

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "pp2": (2, {"pipeline_parallel_size": 2}),
    "pp3": (3, {"pipeline_parallel_size": 3, "pipeline_layers": [1, 1, 1], "pipeline_microbatches": 4}),
    "tp2xpp2": (4, {"pipeline_parallel_size": 2, "pipeline_layers": [1, 2], "pipeline_microbatches": 3}),
}
USUAL = {"llama", "llama_tied", "qwen3", "ladder", "hybrid", "parallel", "glm_moe_dsa"}


def check(
    ranks: Callable[..., list[Any]], folder: Path, logits: Logits, layout: str, **args: Any
) -> dict[str, list[list[int]]]:
    size, stages = LAYOUTS[layout]
    prompts = checkpoints.prompts()
    with torch.inference_mode():
        answers: dict[str, list[list[int]]] = ranks(
            size, "engine_cases:generate", {"folder": str(folder), "prompts": prompts, "parallel": stages, **args}
        )[0]
        assert_greedy(logits, prompts, answers, 32)
    return answers


def cases(recipes: tuple[str, ...]) -> list[Any]:
    return [
        pytest.param(recipe, layout, marks=() if recipe in USUAL and layout != "pp3" else pytest.mark.slow)
        for recipe in recipes
        for layout in LAYOUTS
    ]


STOCK = tuple(r for r in checkpoints.STOCK if r not in ("llama_dynamic_rope", "longcat_flash"))
"""Of three layers, and positions enough; stages of LongCat are in test_oracle_experts.py."""


@pytest.mark.parametrize(("recipe", "layout"), cases(STOCK))
def test_every_family_answers_as_transformers_does(
    ranks: Callable[..., list[Any]], checkpoint: Callable[..., Path], recipe: str, layout: str
) -> None:
    folder = checkpoint(recipe)
    check(ranks, folder, transformers_logits(folder), layout)


WIRINGS = tuple(r for r in checkpoints.DECLARED if "tensor_parallel_size" not in checkpoints.DECLARED[r])


@pytest.mark.parametrize(("recipe", "layout"), cases((*WIRINGS, *checkpoints.LADDER_FORMATS)))
def test_every_wiring_answers_as_the_reference_does(
    ranks: Callable[..., list[Any]], checkpoint: Callable[..., Path], recipe: str, layout: str
) -> None:
    """A boundary carries what is still pending there."""
    folder = checkpoint(recipe)
    check(ranks, folder, reference_logits(folder), layout)


@pytest.mark.parametrize("recipe", ["llama", pytest.param("parallel", marks=pytest.mark.slow)])
def test_stages_split_their_steps(
    ranks: Callable[..., list[Any]], checkpoint: Callable[..., Path], recipe: str
) -> None:
    """Each stream crosses every boundary in messages of its own."""
    folder, stages = checkpoint(recipe), LAYOUTS["tp2xpp2"][1]
    logits = reference_logits(folder) if recipe in WIRINGS else transformers_logits(folder)
    check(ranks, folder, logits, "tp2xpp2", parallel={**stages, "split_steps": "always"})


def test_stages_change_no_bit(ranks: Callable[..., list[Any]], checkpoint: Callable[..., Path]) -> None:
    """deterministic: true: the logits of two stages, each of one rank and of two, are those of no stages, bit for bit;
    in every wiring, whatever a boundary carries."""
    for recipe in ("llama", "ladder", "hybrid", "parallel"):
        args = {
            "folder": str(checkpoint(recipe)),
            "prompts": checkpoints.prompts(4),
            "comm": {"deterministic": True},
            "per_node": 1,
        }
        whole, stages = (ranks(size, "engine_cases:logits_digest", args | {"stages": size}) for size in (1, 2))
        assert stages[-1] == whole[0], recipe
        pair, staged = (ranks(size, "engine_cases:logits_digest", args | {"stages": size // 2}) for size in (2, 4))
        assert staged[2:] == pair, recipe
