"""`engine.speculation` over pipeline stages: random configurations against the same engine without drafts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import checkpoints
import pytest
from laddertron.engine.sampling import grammar
from laddertron.models.cpu.kernels import Kernels
from test_drafted_answers import near

Ranks = Callable[..., list[Any]]

pytestmark = pytest.mark.skipif(Kernels.find() is None, reason="the C kernels were not built here")

LAYOUTS = {"pp2": (2, 2), "pp3": (3, 3), "tp2xpp2": (4, 2)}


def answers(ranks: Ranks, size: int, folder: Path, **how: Any) -> dict[str, Any]:
    told: dict[str, Any] = ranks(size, "split_cases:answers", {"folder": str(folder)} | how, timeout_s=400.0)[0]
    return told


@pytest.mark.parametrize("layout", ["pp2", "pp3", pytest.param("tp2xpp2", marks=pytest.mark.slow)])
def test_drafts_through_stages_change_no_answer(ranks: Ranks, layout: str, tmp_path: Path, run_seed: int) -> None:
    """Greedy, filtered and plain sampling, penalties, log-probabilities, prompts scored, several choices, stop ids,
    grammars from the start or after reasoning, shared prefixes, chunked prompts; random seats, budgets, micro-batches,
    and in one configuration blocks for less than the running sequences: ids, scores and ends are those without drafts.
    """
    size, stages = LAYOUTS[layout]
    dice = Random(f"{run_seed} {layout}")
    folder = checkpoints.save(tmp_path / "m", "llama", num_hidden_layers=3)
    draft = near(run_seed, tmp_path / "d", folder)
    for number, (kind, model) in enumerate((("ngram", None), ("auto", None), ("model", draft))):
        how: dict[str, Any] = {
            "seed": dice.randrange(1000), "most": 40, "stages": stages, "seats": dice.randrange(stages, 13),
            "microbatches": dice.choice((None, stages, stages + 1, stages + 3)), "budget": dice.randrange(24, 64),
        }  # fmt: skip
        how["microbatches"] = min(how["seats"], how["microbatches"] or stages)
        if number == 0:
            how |= {"blocks": 70, "seats": 12}
        plain = answers(ranks, size, folder, **how)
        drafted = answers(ranks, size, folder, speculation=kind, draft=model, **how)
        assert drafted["answers"] == plain["answers"], (kind, how)
        assert 0 < drafted["accepted"] < drafted["drafts"], how
        assert plain["drafts"] == 0
        assert plain["reasoned"] > 0 or not grammar.available
        assert number or drafted["preemptions"] > 0, how


def test_a_sequence_takes_fewer_rounds(ranks: Ranks, tmp_path: Path, run_seed: int) -> None:
    """Each step of one sequence is one crossing and one way back; drafts that hold save whole rounds."""
    folder = checkpoints.save(tmp_path / "m", "llama")
    how: dict[str, Any] = {"seed": run_seed % 1000, "most": 40, "stages": 2, "seats": 2, "microbatches": 2}
    plain = answers(ranks, 2, folder, **how)
    drafted = answers(ranks, 2, folder, speculation="model", draft=near(run_seed, tmp_path / "d", folder, 0.0), **how)
    assert drafted["answers"] == plain["answers"]
    assert drafted["accepted"] > 0.9 * drafted["drafts"]
    assert drafted["steps"] < 0.5 * plain["steps"]
