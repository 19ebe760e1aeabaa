"""`parallel.split_steps: always` through the real engine: the bits of unsplit steps under `deterministic`, and the
oracle's tokens without it. tests/engine/step/test_deterministic.py holds every sub-block of random cuts to its bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import torch
from laddertron.models.cpu.kernels import Kernels
from test_oracle import assert_greedy, reference_logits, transformers_logits

Ranks = Callable[..., list[Any]]


def answers(run_seed: int, ranks: Ranks, size: int, folder: Path, split: str, **how: Any) -> dict[str, Any]:
    args = {"folder": str(folder), "split": split, "seed": run_seed % 1000} | how
    told: dict[str, Any] = ranks(size, "split_cases:answers", args)[0]
    return told


@pytest.mark.skipif(Kernels.find() is None, reason="the C kernels were not built here")
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "parallel"])
def test_every_answer_and_every_score_has_the_same_bits(
    ranks: Ranks, family: str, dtype: str, size: int, tmp_path: Path, run_seed: int
) -> None:
    """Two dozen requests of all kinds, prompts in chunks beside decodes, prefixes in the cache: every step of eight
    rows is split, and no reported number changes."""
    folder = checkpoints.save(tmp_path / "m", family, dtype=dtype)
    whole, split = (answers(run_seed, ranks, size, folder, how) for how in ("never", "always"))
    assert split["answers"] == whole["answers"]
    assert whole["split"] == 0
    assert split["split"] >= split["large"] > 0


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "parallel"])
def test_split_steps_answer_as_the_oracle(ranks: Ranks, family: str, tmp_path: Path) -> None:
    folder = checkpoints.save(tmp_path / "m", family)
    prompts = checkpoints.prompts()
    args = {"folder": str(folder), "prompts": prompts, "parallel": {"split_steps": "always"}}
    said = ranks(2, "engine_cases:generate", args)[0]
    with torch.inference_mode():
        logits = reference_logits(folder) if family in checkpoints.DECLARED else transformers_logits(folder)
        assert_greedy(logits, prompts, said, 32)
