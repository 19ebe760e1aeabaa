"""`engine.speculation` on the GPU path, with a GPU's stand-ins: recorded steps of 1 + k rows a sequence, rows drawn on
the device, and steps set off ahead of the ids before wherever no drafts are due."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import checkpoints
import predictors
import pytest
from laddertron.engine.sampling import grammar

Ranks = Callable[..., list[Any]]


def answers(ranks: Ranks, size: int, folder: Path, **how: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = ranks(size, "split_cases:answers", {"folder": str(folder)} | how, timeout_s=400.0)
    return found


@pytest.mark.parametrize(
    ("size", "deterministic", "kind"),
    [
        (1, False, "ngram"),
        (2, False, "auto"),
        (1, True, "ngram"),
        pytest.param(2, True, "ngram", marks=pytest.mark.slow),
    ],
)
def test_drafts_change_no_answer(
    ranks: Ranks, size: int, deterministic: bool, kind: str, tmp_path: Path, run_seed: int
) -> None:
    """Greedy, filtered and plain sampling, penalties, log-probabilities, scored prompts, several choices, stop ids,
    grammars, shared prefixes, chunked prompts, random seats, preemption: the ids and ends are those of the same steps
    without drafts."""
    dice = Random(f"{run_seed} {size} {kind}")
    folder = checkpoints.save(tmp_path / "m", "llama")
    how: dict[str, Any] = {
        "seed": dice.randrange(1000), "most": 40, "gpu": "overlapped", "deterministic": deterministic,
        "budget": dice.randrange(48, 80), "seats": dice.randrange(3, 13),
    }  # fmt: skip
    if kind == "ngram":
        how |= {"blocks": 70, "seats": 12}
    plain = answers(ranks, size, folder, **how)[0]
    drafted = answers(ranks, size, folder, speculation=kind, **how)[0]
    assert drafted["answers"] == plain["answers"], how
    assert 0 < drafted["accepted"] < drafted["drafts"], how
    assert kind != "ngram" or drafted["preemptions"] > 0, how
    assert drafted["noted"]["joined"] > 0, how
    assert kind != "auto" or drafted["noted"]["late"] > 0, how
    assert plain["reasoned"] > 0 or not grammar.available


@pytest.mark.parametrize(
    ("size", "stages"),
    [(1, 1), (2, 1), (2, 2), *(pytest.param(*how, marks=pytest.mark.slow) for how in ((3, 3), (4, 2)))],
)
def test_steps_with_drafts_are_recorded(ranks: Ranks, size: int, stages: int, tmp_path: Path, run_seed: int) -> None:
    """Sequences that repeat three ids: no step is computed eagerly; with drafts there are fewer steps (in a pipeline
    micro-batches are counted)."""
    prompts, how = checkpoints.prompts(9, seed=run_seed), "overlapped" if stages == 1 else "recorded"
    params = {"allowed_token_ids": (5, 6, 7), "max_tokens": 24}
    folder = str(checkpoints.save(tmp_path / "m", "llama", num_hidden_layers=3))
    args: dict[str, Any] = {"folder": folder, "params": params, "prompts": prompts}
    plain = ranks(1, "recorded_graph:generate", args | {"how": "eager"})[0]
    drafted = ranks(size, "recorded_graph:generate", args | {"how": how, "stages": stages, "speculation": "ngram"})
    assert drafted[0]["answers"] == plain["answers"]
    assert {each["eager"] for each in drafted} == {0}
    assert {each["replayed"] for each in drafted} == {drafted[0]["replayed"]}
    assert {each["steps"]["joined"] for each in drafted} == {drafted[0]["steps"]["joined"]}
    assert drafted[0]["steps"]["joined"] > 5
    assert stages > 1 or drafted[0]["replayed"] < 0.8 * plain["eager"]


@pytest.mark.parametrize(("how", "size", "stages"), [("eager", 1, 1), ("overlapped", 2, 1), ("recorded", 2, 2)])
def test_the_predicting_layer_reads_the_states_of_recorded_steps(
    ranks: Ranks, how: str, size: int, stages: int, tmp_path: Path, run_seed: int
) -> None:
    """A model without experts and its layer, whose attention is the library's, too: after steps of any shape, padded,
    with prompts or with drafts, it drafts what it drafts on a CPU."""
    folder = predictors.save(tmp_path / "m", "glm4_moe", first_k_dense_replace=checkpoints.LAYERS + 1)
    args: dict[str, Any] = {"folder": str(folder), "prompts": checkpoints.prompts(9, seed=run_seed), "max_tokens": 16}
    args |= {"engine": {"max_num_seqs": 5}, "most": 3}
    args["stages"] = stages
    want, found = (ranks(size, "predictor_cases:drafts", args | more) for more in ({}, {"gpu": how}))
    assert found[0]["answers"] == want[0]["answers"]
    assert [result["drafts"] for result in found] == [result["drafts"] for result in want]
    assert sum(len(result["drafts"]) for result in want) > 20
    assert (found[0]["eager"] == 0) == (how != "eager")
