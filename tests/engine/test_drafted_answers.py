"""`engine.speculation` through the real engine: under `deterministic` no answer changes, whatever is drawn, scored,
penalised or stopped, and whoever runs beside it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import torch
from laddertron.engine.sampling import grammar
from laddertron.models.cpu.kernels import Kernels

Ranks = Callable[..., list[Any]]

pytestmark = pytest.mark.skipif(Kernels.find() is None, reason="the C kernels were not built here")


def answers(run_seed: int, ranks: Ranks, size: int, folder: Path, **how: Any) -> dict[str, Any]:
    args = {"folder": str(folder), "seed": run_seed % 1000, "most": 40} | how
    told: dict[str, Any] = ranks(size, "split_cases:answers", args, timeout_s=240.0)[0]
    return told


def near(run_seed: int, folder: Path, whole: Path, blur: float = 0.04) -> str:
    """A draft model: `whole` with noise in its weights, so that it often says the same, and often not."""
    noise = torch.Generator().manual_seed(run_seed % 1000)

    def blurred(x: torch.Tensor) -> torch.Tensor:
        return (x.float() + blur * torch.randn(x.shape, generator=noise)).to(x.dtype)

    shutil.copytree(whole, folder)
    checkpoints.edit_tensors(folder, lambda tensors: {name: blurred(x) for name, x in tensors.items()})
    return str(folder)


@pytest.mark.parametrize(
    ("size", "dtype"),
    [(2, "float32"), (1, "bfloat16")]
    + [pytest.param(*how, marks=pytest.mark.slow) for how in ((1, "float32"), (2, "bfloat16"), (4, "float32"))],
)
def test_speculation_changes_no_answer(ranks: Ranks, size: int, dtype: str, tmp_path: Path, run_seed: int) -> None:
    """Greedy, filtered and plain sampling, penalties, log-probabilities, prompts scored, several choices, stop ids,
    grammars; with prefixes in the cache and chunked prompts beside decodes: every id, every score and every end is the
    one that comes without drafts. Some drafts are right, some are not."""
    folder = checkpoints.save(tmp_path / "m", "llama", dtype=dtype)
    draft = near(run_seed, tmp_path / "d", folder)
    plain = answers(run_seed, ranks, size, folder)
    for kind, model in (("ngram", None), ("auto", None), ("model", draft), ("auto", draft)):
        drafted = answers(run_seed, ranks, size, folder, speculation=kind, draft=model)
        assert drafted["answers"] == plain["answers"], (kind, model)
        assert 0 < drafted["accepted"] < drafted["drafts"]
        assert sum(drafted["positions"]) == drafted["accepted"]
    assert plain["drafts"] == 0
    assert plain["hits"] > 0
    assert plain["reasoned"] > 0 or not grammar.available


def test_a_draft_model_survives_preemption(ranks: Ranks, tmp_path: Path, run_seed: int) -> None:
    """Blocks for less than the first four sequences: some are put back, and their slots and blocks become others'. What
    the draft model knows goes with them: the same model drafts as well as ever."""
    folder = checkpoints.save(tmp_path / "m", "llama")
    plain = answers(run_seed, ranks, 2, folder, blocks=70)
    drafted = answers(
        run_seed, ranks, 2, folder, blocks=70, speculation="model", draft=near(run_seed, tmp_path / "d", folder, 0.0)
    )
    assert drafted["answers"] == plain["answers"]
    assert drafted["preemptions"] > 0
    assert drafted["hits"] > 0
    assert drafted["accepted"] > 0.9 * drafted["drafts"]


@pytest.mark.parametrize(
    "family",
    [
        "ladder",
        "mistral",
        *(pytest.param(more, marks=pytest.mark.slow) for more in ("parallel", "hybrid", "desync2_tp2")),
    ],
)
def test_every_wiring_takes_drafts(ranks: Ranks, family: str, tmp_path: Path, run_seed: int) -> None:
    folder = checkpoints.save(tmp_path / "m", family)
    plain, drafted = (answers(run_seed, ranks, 2, folder, speculation=kind) for kind in (False, "ngram"))
    assert drafted["answers"] == plain["answers"]
    assert drafted["accepted"] > 0
    draft = near(run_seed, tmp_path / "d", checkpoints.save(tmp_path / "whole", "llama"))
    drafted = answers(run_seed, ranks, 2, folder, speculation="model", draft=draft)
    assert drafted["answers"] == plain["answers"]


def test_a_batch_of_one_and_split_steps(ranks: Ranks, tmp_path: Path, run_seed: int) -> None:
    """Alone a sequence takes fewer steps; drafts of one sequence may lie in both streams of a split step."""
    folder = checkpoints.save(tmp_path / "m", "llama")
    alone, drafted = (answers(run_seed, ranks, 2, folder, seats=1, speculation=kind) for kind in (False, "ngram"))
    assert drafted["answers"] == alone["answers"]
    assert drafted["steps"] < alone["steps"]
    for kind, draft in (("ngram", None), ("model", near(run_seed, tmp_path / "d", folder))):
        both = answers(run_seed, ranks, 2, folder, split="always", speculation=kind, draft=draft)
        assert both["answers"] == alone["answers"]
        assert both["split"] >= both["large"] > 0
