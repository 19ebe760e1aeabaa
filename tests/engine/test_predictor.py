"""`engine.speculation: mtp`: the layer that predicts further tokens drafts what transformers' own does, and changes no
answer."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import checkpoints
import predictors
import pytest
import torch
from laddertron.engine.step.predictor import PredictorShare
from laddertron.launchers.cli import __main__ as cli
from laddertron.models.config.model_config import from_folder
from laddertron.models.cpu.kernels import Kernels
from laddertron.models.stages import RankShard, predictor_stage
from laddertron.models.weights.mapping import open_checkpoint
from laddertron.models.weights.slices import expected_shapes
from rank_pool import RankError
from test_drafted_answers import answers

Ranks = Callable[..., list[Any]]
TOLERANCE = 1e-3


def assert_drafts(folder: Path, result: dict[str, Any], least: int) -> None:
    """Each draft is the one that is most likely after the known ids and the drafts before it, up to a tie."""
    logits, excused, count = predictors.oracle(folder), 0, 0
    with torch.inference_mode():
        for ids, drafts in result["drafts"]:
            for scores, draft in zip(logits(ids, drafts), drafts, strict=True):
                gap, count = float(scores.max() - scores[draft]), count + 1
                assert gap < TOLERANCE, (ids, drafts)
                excused += gap > 0
    assert count >= least
    assert excused * 100 <= count


@pytest.mark.parametrize(
    ("family", "size", "stages"),
    [
        ("deepseek_v3", 1, 1),
        ("deepseek_v3", 2, 1),
        ("deepseek_v3", 2, 2),
        ("glm4_moe", 2, 1),
        ("deepseek_v32", 1, 1),
        ("glm_moe_dsa", 2, 1),
        ("longcat_flash", 2, 1),
        *(pytest.param(family, 4, 2, marks=pytest.mark.slow) for family in (*predictors.FAMILIES, "longcat_flash")),
        pytest.param("deepseek_v3", 4, 1, marks=pytest.mark.slow),
    ],
)
def test_it_drafts_what_transformers_drafts(ranks: Ranks, family: str, size: int, stages: int, tmp_path: Path) -> None:
    """Experts in the layer; latent and sparse attention; over ranks and stages."""
    folder = predictors.save(tmp_path / "m", family)
    args = {"folder": str(folder), "prompts": checkpoints.prompts(3), "stages": stages, "max_tokens": 16}
    results = ranks(size, "predictor_cases:drafts", args, timeout_s=240.0)
    assert_drafts(folder, next(result for result in results if result["drafts"]), 200)


@pytest.mark.parametrize(
    ("family", "size", "per_node", "stages"),
    [
        ("deepseek_v3", 2, 1, 1),
        *(pytest.param(family, 4, 2, 1, marks=pytest.mark.slow) for family in ("glm_moe_dsa", "longcat_flash")),
        pytest.param("glm4_moe", 4, 1, 2, marks=pytest.mark.slow),
    ],
)
def test_each_node_drafts_alone(
    ranks: Ranks, family: str, size: int, per_node: int, stages: int, tmp_path: Path
) -> None:
    """Nodes have the whole layer, with embedding and head: the same drafts, and no more messages between nodes
    than without any."""
    folder = predictors.save(tmp_path / "m", family)
    args = {"folder": str(folder), "prompts": checkpoints.prompts(2), "stages": stages, "per_node": per_node}
    args["max_tokens"] = 16
    none, *_ = ranks(size, "predictor_cases:drafts", args | {"every": 1 << 30}, timeout_s=240.0)
    first, *others = ranks(size, "predictor_cases:drafts", args, timeout_s=240.0)
    assert first["answers"] == none["answers"]
    assert 0 < first["messages"] <= none["messages"]
    drafted = [result["drafts"] for result in (first, *others) if result["drafts"]]
    assert drafted == [drafted[0]] * (size // stages)
    assert_drafts(folder, {"drafts": drafted[0]}, 100)


@pytest.mark.parametrize(("family", "every"), [("deepseek_v3", 1), ("deepseek_v3", 7), ("glm_moe_dsa", 3)])
def test_shared_and_preempted_blocks_hold_its_rows_too(ranks: Ranks, family: str, every: int, tmp_path: Path) -> None:
    """Prompts in pieces, with beginnings in common that end at a block's end and differ in the next token; two choices
    of each, in a cache too small for all, drafts for some decodes alone: what it drafts is what it would draft of a
    sequence computed alone."""
    folder = predictors.save(tmp_path / "m", family)
    head = list(range(20, 60))
    prompts = [[*head[:length], 60 + i, *range(70, 75)] for i, length in enumerate((4, 8, 8, 16, 16, 16, 17, 32, 32))]
    engine = {"max_num_batched_tokens": 12, "max_num_seqs": 4}
    args = {"folder": str(folder), "prompts": prompts * 2, "engine": engine, "blocks": 36, "n": 2, "every": every}
    result = ranks(1, "predictor_cases:drafts", args | {"most": 3}, timeout_s=240.0)[0]
    assert result["preemptions"] > 0
    assert result["hits"] > 0
    some = result["drafts"][:: -(-len(result["drafts"]) // 60)]
    assert_drafts(folder, {"drafts": some}, 90)


@pytest.mark.parametrize(
    ("family", "size", "calm"), [("deepseek_v3", 1, 0.1), pytest.param("glm4_moe", 2, 0.01, marks=pytest.mark.slow)]
)
def test_as_many_drafts_are_accepted_as_by_transformers(
    ranks: Ranks, family: str, size: int, calm: float, tmp_path: Path
) -> None:
    """One draft a step, of a layer that is often right: answers and numbers of accepted drafts are the same."""
    folder, most = predictors.save(tmp_path / "m", family, calm=calm), 60
    prompts = checkpoints.prompts(3)
    engine = {"max_num_seqs": 1}
    for prompt in prompts:
        args = {"folder": str(folder), "prompts": [prompt], "engine": engine, "most": 1, "max_tokens": most}
        result = ranks(size, "predictor_cases:drafts", args)[0]
        ids, accepted = predictors.accepted_by_transformers(folder, prompt, most)
        assert result["answers"] == {"r0/0": ids}
        assert result["accepted"] == accepted
        assert 0 < accepted < most // 2


@pytest.mark.parametrize(
    ("family", "size", "stages", "per_node"),
    [
        ("deepseek_v3", 2, 2, None),
        ("glm4_moe", 2, 1, 1),
        pytest.param("longcat_flash", 4, 1, 2, marks=pytest.mark.slow),
        pytest.param("glm_moe_dsa", 4, 2, None, marks=pytest.mark.slow),
    ],
)
def test_per_rank_files_have_the_layer(
    ranks: Ranks, family: str, size: int, stages: int, per_node: int | None, tmp_path: Path
) -> None:
    """Split over a group, or whole on each node: the same drafts as from the checkpoint, which is not read. Files
    without the layer, or with another share of it, are refused with the command that writes the right ones."""
    folder, written = predictors.save(tmp_path / "m", family), tmp_path / "w"
    args: dict[str, Any] = {"prompts": checkpoints.prompts(2), "stages": stages, "max_tokens": 12, "per_node": per_node}
    want = ranks(size, "predictor_cases:drafts", args | {"folder": str(folder)}, timeout_s=240.0)
    keys: dict[str, Any] = {"parallel.tensor_parallel_size": size // stages, "parallel.pipeline_parallel_size": stages}
    keys |= {"parallel.embedding": "replicate"} if per_node else {}

    def write(*more: str) -> None:
        words = [f"--set={key}={value}" for key, value in keys.items()]
        assert cli.main(["shard", str(folder), *words, "-o", str(written), *more]) == 0

    write()
    with pytest.raises(RankError, match=r"no layer that predicts further tokens.*speculation=mtp --overwrite"):
        ranks(size, "predictor_cases:drafts", args | {"folder": str(written)}, timeout_s=240.0)
    keys["engine.speculation"] = "mtp"
    if per_node:
        write("--overwrite")
        with pytest.raises(RankError, match=rf"speculation=mtp --set launch\.ranks_per_node={per_node}"):
            ranks(size, "predictor_cases:drafts", args | {"folder": str(written)}, timeout_s=240.0)
        keys |= {"launch.ranks_per_node": per_node, "parallel.expert_layout": "tensor"}
    write("--overwrite")
    assert not list(written.glob("*.safetensors"))
    found = ranks(size, "predictor_cases:drafts", args | {"folder": str(written)}, timeout_s=240.0)
    assert [result["drafts"] for result in found] == [result["drafts"] for result in want]
    assert any(result["drafts"] for result in found)
    assert found[0]["answers"] == want[0]["answers"]


@pytest.mark.skipif(Kernels.find() is None, reason="the C kernels were not built here")
@pytest.mark.parametrize(
    ("size", "stages", "how"),
    [
        (1, 1, {"dtype": "bfloat16"}),
        (2, 2, {"blocks": 70}),
        (2, 1, {"blocks": 70, "family": "glm4_moe"}),
        pytest.param(2, 1, {}, marks=pytest.mark.slow),
        pytest.param(4, 2, {"microbatches": 3}, marks=pytest.mark.slow),
        pytest.param(4, 1, {"family": "deepseek_v32"}, marks=pytest.mark.slow),
        pytest.param(2, 2, {"family": "glm_moe_dsa", "blocks": 70}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_it_changes_no_answer(
    ranks: Ranks, size: int, stages: int, how: dict[str, Any], tmp_path: Path, run_seed: int
) -> None:
    """Greedy, filtered and plain sampling, penalties, log-probabilities, prompts scored, several choices, stop ids,
    grammars, shared prefixes, chunked prompts, blocks for less than the running sequences: every id, score and end is
    the one that comes without drafts."""
    how = dict[str, Any](family="deepseek_v3", dtype="float32", most=24) | how
    folder = predictors.save(tmp_path / "m", how.pop("family"), calm=0.1, dtype=how.pop("dtype"))
    plain = answers(run_seed, ranks, size, folder, stages=stages, **how)
    drafted = answers(run_seed, ranks, size, folder, stages=stages, speculation="mtp", **how)
    assert drafted["answers"] == plain["answers"]
    assert 0 < drafted["accepted"] < drafted["drafts"]
    assert drafted["hits"] > 0
    assert drafted["preemptions"] > 0 or "blocks" not in how


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_nothing_that_is_not_finite_stays_in_its_cache(ranks: Ranks, family: str, tmp_path: Path) -> None:
    """An id whose embedding is NaN, in prompts and after them: the layer's keys and values stay finite, so that others
    may use the blocks."""
    folder, poisoned = predictors.save(tmp_path / "m", family), 9
    prompts = [[7, 8, 10], [7, poisoned, 8, 10, 11], [10, 11, poisoned], [poisoned], [12, 13]]
    args = {"folder": str(folder), "prompts": prompts, "poisoned": poisoned, "max_tokens": 16}
    result = ranks(1, "predictor_cases:drafts", args)[0]
    assert result["finite"]
    assert [name for name, ids in result["answers"].items() if ids] == ["r0/0", "r4/0"]
    clean = [(ids, drafts) for ids, drafts in result["drafts"] if poisoned not in (*ids, *drafts)]
    assert_drafts(folder, {"drafts": clean}, 100)


@pytest.mark.parametrize("embeds", [False, True])
def test_a_start_counts_its_weights_and_its_cache(embeds: bool, tmp_path: Path) -> None:
    """All elements of its tensors, with the embedding on a stage that has none; of each position one latent and key."""
    folder = predictors.save(tmp_path / "m", "deepseek_v3", tokenizer=False)
    config = from_folder(folder)
    stage = predictor_stage(config, embeds)
    source, shard = open_checkpoint(folder, config, stage), RankShard(stage.config, 1, 0, stage)
    share = PredictorShare(shard, source, torch.float32, "stored", False, torch.device("cpu"))
    own = expected_shapes(config, stage).items() - expected_shapes(config).items()
    embedding = checkpoints.VOCAB * checkpoints.HIDDEN * embeds
    assert share.bytes == 4 * (sum(prod(shape) for _, shape in own) + embedding)
    assert share.block_bytes(16, torch.float32) == 16 * 4 * (32 + 8)
