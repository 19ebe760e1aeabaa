"""Layouts of experts against transformers and the reference: fp32 tokens and logits, on emulated nodes as well."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import torch
from safetensors.torch import save_file
from test_oracle import TOLERANCE, assert_greedy, reference_logits, transformers_logits

Ranks = Callable[..., list[Any]]
SPREAD, NODE = {"expert_layout": "spread"}, {"dense_path": "node"}
LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "spread_2": (2, 2, SPREAD),
    "spread_4": (4, 4, SPREAD),
    "node_2x1": (2, 1, NODE),
    "node_2x2": (4, 2, NODE),
    "node_tensor_2x2": (4, 2, NODE | {"expert_layout": "tensor"}),
}
"""Ranks, ranks a node, keys."""
OFTEN = {
    *[("qwen3_moe_mixed", layout) for layout in LAYOUTS],
    *[("mixtral", "spread_2"), ("moe_ladder", "node_2x1"), ("moe_hybrid", "node_2x2")],
    *[
        ("gpt_oss", "spread_2"),
        ("gpt_oss", "node_tensor_2x2"),
        ("deepseek_v32", "node_2x2"),
        ("deepseek_v3", "node_2x2"),
        ("longcat_flash", "node_2x2"),
        ("longcat_flash", "spread_2"),
    ],
}
"""Pairwise; the others are in `make slow-test`."""
RECIPES = ("qwen3_moe", "qwen3_moe_mixed", "mixtral", "glm4_moe", "moe_ladder", "moe_hybrid", "moe_delay2")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def make(recipe: str) -> Path:
        return checkpoints.save(tmp_path_factory.mktemp(recipe), recipe)

    return make


def ask(ranks: Ranks, folder: Path, recipe: str, layout: str, tmp_path: Path, **more: Any) -> list[Any]:
    """Runs the layout, holds tokens and logits to the oracle, and returns what each rank said."""
    size, per_node, parallel = LAYOUTS[layout]
    prompts = checkpoints.prompts(6)
    logits = transformers_logits(folder) if recipe in checkpoints.STOCK else reference_logits(folder)
    with torch.inference_mode():
        want = torch.cat([logits(prompt) for prompt in prompts])
        save_file({"logits": want.contiguous()}, tmp_path / "want.safetensors")
        args: dict[str, Any] = {
            "folder": str(folder),
            "prompts": prompts,
            "expected": str(tmp_path / "want.safetensors"),
        }
        args |= {"parallel": parallel | more.pop("parallel", {}), "per_node": per_node, **more}
        said = ranks(size, "expert_cases:answers", args)
        assert_greedy(logits, prompts, said[0]["tokens"], 32)
    for rank, result in enumerate(said):
        assert result["distance"] < TOLERANCE * max(1.0, result["scale"] / 10), f"rank {rank}: {result}"
    return said


@pytest.mark.parametrize(
    ("recipe", "layout"),
    [
        pytest.param(recipe, layout, marks=() if (recipe, layout) in OFTEN else pytest.mark.slow)
        for recipe in (*RECIPES, "gpt_oss", "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "longcat_flash")
        for layout in LAYOUTS
    ],
)
def test_every_layout_answers_as_the_oracle_does(
    ranks: Ranks, checkpoint: Callable[[str], Path], recipe: str, layout: str, tmp_path: Path
) -> None:
    """And each rank holds its share: 8 experts whole or cut, 8 heads over all ranks or those of a node; only the
    experts' sums cross nodes."""
    size, per_node, keys = LAYOUTS[layout]
    said = ask(ranks, checkpoint(recipe), recipe, layout, tmp_path)
    spread, inner = keys.get("expert_layout") != "tensor", 96 if recipe in ("mixtral", "moe_delay2", "gpt_oss") else 40
    for result in said:
        assert result["held"] == [8 // size if spread else 8, inner if spread else inner // size, 8 // per_node]
        across = {layer for layer, link in result["accounts"] if link == "net"}
        assert across == ({layer for layer in across if layer.endswith("experts")} if per_node < size else set())
        assert per_node == size or across, "the experts' sums cross the nodes"
    ((whole, experts),) = {tuple(result["rows"]["expert_rows"]) for result in said}
    returned = recipe == "longcat_flash"  # some went through experts that return their input
    assert returned or whole % sum(map(len, checkpoints.prompts(6))) == 0
    assert experts % 8 == 0
    own = [result["rows"]["rank_expert_rows_total"][0] for result in said]
    assert sum(own) == whole if spread else own == [whole] * size


@pytest.mark.parametrize(
    ("size", "per_node", "culprit", "said"),
    [
        (4, 1, 2, "node 2 (rank 2 of 4) chose other experts or positions for the same rows than the others"),
        (2, 1, 1, "node 0 (rank 0 of 2) and node 1 (rank 1 of 2) chose other experts or positions for the same rows"),
    ],
)
def test_a_planted_bit_is_named_by_node_before_anything_is_released(
    ranks: Ranks, checkpoint: Callable[[str], Path], size: int, per_node: int, culprit: int, said: str
) -> None:
    """In the fifth pass one bit of a router's logits differs on one node: every rank stops with the node's name, and no
    token that was drawn then, or later, has been released."""
    args = {"folder": str(checkpoint("qwen3_moe")), "prompt": [7, 9, 20, 41], "parallel": NODE, "per_node": per_node}
    found = ranks(size, "expert_cases:planted", args | {"culprit": culprit, "at": 4})
    for error, _ in found:
        assert said in error, found
        assert "sampling step 4" in error
    assert found[0][1] == 4


def test_another_choice_of_positions_is_named_before_anything_is_released(
    ranks: Ranks, checkpoint: Callable[[str], Path]
) -> None:
    """On one node sparse attention chooses by other weights, in the fifth pass."""
    args = {"folder": str(checkpoint("deepseek_v32")), "prompt": list(range(20, 34)), "parallel": NODE, "per_node": 1}
    found = ranks(2, "expert_cases:planted", args | {"culprit": 1, "at": 4})
    for error, _ in found:
        assert "node 0 (rank 0 of 2) and node 1 (rank 1 of 2) chose other experts or positions" in error, found
    assert found[0][1] == 4


@pytest.mark.parametrize(
    ("recipe", "layout", "more"),
    [
        ("qwen3_moe_mixed", "node_2x1", {"parallel": {"split_steps": "always"}}),
        ("glm4_moe", "spread_2", {"parallel": {"split_steps": "always"}, "engine": {"max_num_batched_tokens": 16}}),
        ("deepseek_v3", "node_2x1", {"parallel": {"split_steps": "always"}, "engine": {"max_num_batched_tokens": 16}}),
        ("qwen3_moe", "node_2x1", {"engine": {"speculation": "ngram", "max_num_batched_tokens": 8}}),
        ("gpt_oss", "spread_2", {"engine": {"speculation": "ngram", "max_num_batched_tokens": 8}}),
        ("glm_moe_dsa", "spread_2", {"engine": {"speculation": "ngram", "max_num_batched_tokens": 8}}),
        (
            "deepseek_v32",
            "node_2x1",
            {
                "parallel": {"split_steps": "always"},
                "engine": {"kv_cache_memory": 48 << 10},
                "model": {"max_model_len": 64},
            },
        ),
        (
            "mixtral",
            "node_2x1",
            {"engine": {"kv_cache_memory": 192 << 10}, "model": {"max_model_len": 64}},
        ),
    ],
)
def test_what_the_engine_does_else_works_over_experts(
    ranks: Ranks, checkpoint: Callable[[str], Path], recipe: str, layout: str, more: dict[str, Any], tmp_path: Path
) -> None:
    """Steps in two streams, prompts in chunks, drafts, preemption: the oracle's tokens."""
    ask(ranks, checkpoint(recipe), recipe, layout, tmp_path, **more)


@pytest.mark.parametrize(
    ("recipe", "size", "per_node", "parallel"),
    [
        ("qwen3_moe_mixed", 2, 1, {}),
        ("moe_ladder", 4, 2, SPREAD),
        ("deepseek_v3", 4, 1, NODE | {"split_steps": "always"}),
        ("longcat_flash", 2, 1, {}),
    ],
)
def test_stages_answer_as_the_oracle_does(
    ranks: Ranks, checkpoint: Callable[[str], Path], recipe: str, size: int, per_node: int, parallel: dict[str, Any]
) -> None:
    """Two stages: of one rank, of two ranks with whole experts each, and of two nodes each with a dense path of its
    own. Each has the experts of its own layers."""
    folder, prompts = checkpoint(recipe), checkpoints.prompts(4)
    logits = transformers_logits(folder) if recipe in checkpoints.STOCK else reference_logits(folder)
    args = {
        "folder": str(folder),
        "prompts": prompts,
        "per_node": per_node,
        "parallel": {"pipeline_parallel_size": 2, **parallel},
        "comm": {"node_group": parallel.get("dense_path") == "node"},
    }
    with torch.inference_mode():
        assert_greedy(logits, prompts, ranks(size, "engine_cases:generate", args)[0], 32)


def test_a_planted_bit_in_an_earlier_stage_is_named(ranks: Ranks, checkpoint: Callable[[str], Path]) -> None:
    """The last stage compares what its peers chose in each stage; the first one's ranks see it end."""
    args = {"folder": str(checkpoint("qwen3_moe")), "prompt": [7, 9, 20, 41], "per_node": 1, "culprit": 1}
    args["parallel"] = NODE | {"pipeline_parallel_size": 2}
    said = (
        "of stage 0, node 0 (rank 0 of 2) and node 1 (rank 1 of 2) chose other experts or positions for the same rows"
    )
    found = ranks(4, "expert_cases:planted", args | {"at": 4})
    assert all(said in error for error, _ in found[2:]), found
    assert found[0][1] <= 4


def test_a_router_that_sends_all_rows_to_one_rank(
    ranks: Ranks, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """Its bias puts expert 0 first for each row and expert 4 second, of one rank where four hold two each; then
    experts 0 and 1, of which neither is on the second node."""
    folder = checkpoints.save(tmp_path / "m", "glm4_moe", n_group=1, topk_group=1)
    for pair, layouts in (((0, 4), ("spread_4", "node_2x2")), ((0, 1), ("node_2x2",))):

        def skew(tensors: dict[str, torch.Tensor], pair: tuple[int, int] = pair) -> dict[str, torch.Tensor]:
            biases = [tensor for name, tensor in tensors.items() if name.endswith("e_score_correction_bias")]
            assert biases
            for bias in biases:
                bias.fill_(0.0)[list(pair)] = torch.tensor([200.0, 100.0])
            return tensors

        checkpoints.edit_tensors(folder, skew)
        for layout in layouts:
            ask(ranks, folder, "glm4_moe", layout, tmp_path)


@pytest.mark.parametrize("layout", ["spread_2", "node_2x1"])
def test_a_row_has_the_same_bits_in_any_company(ranks: Ranks, checkpoint: Callable[[str], Path], layout: str) -> None:
    """`deterministic`: logits of prompts, each in a step of its own, against those of all in one."""
    size, per_node, keys = LAYOUTS[layout]
    args = {"folder": str(checkpoint("qwen3_moe_mixed")), "prompts": checkpoints.prompts(5), "per_node": per_node}
    for alone, together in ranks(size, "expert_cases:row_bits", args | {"parallel": keys | {"deterministic": True}}):
        assert alone == together
