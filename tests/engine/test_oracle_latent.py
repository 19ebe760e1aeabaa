"""Latent attention under everything that a scheduler does, and random configurations of each family that has it,
against transformers and the reference: fp32 tokens and logits, bf16 within its roundings."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import checkpoints
import pytest
import torch
from laddertron.models.config.latent import Expansion
from laddertron.models.config.model_config import from_folder
from test_oracle import TOLERANCE, Logits, assert_greedy, reference_logits, transformers_logits
from test_oracle_experts import LAYOUTS, ask, checkpoint

__all__ = ["checkpoint"]

Ranks = Callable[..., list[Any]]
SMALL = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "kv_cache_memory": 24 * 4 * 40 * 4}
"""Of a cache with 24 blocks of four positions, of one layer with 40 values in fp32."""


def random_index(family: str, words: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """Heads enough that no sum is exactly zero, which transformers would order in any way."""
    del words["rope_interleave"]
    words["q_lora_rank"] = words["q_lora_rank"] or 24
    rotated, layers = words["qk_rope_head_dim"], ["full", *(chance.choice(("full", "shared")) for _ in range(2))]
    types = {"indexer_types": layers} if family == "glm_moe_dsa" else {}
    sizes = {"index_n_heads": 24, "index_head_dim": rotated + chance.choice((0, 2, 16))}
    return words | sizes | types | {"index_topk": chance.choice((1, 7, 16, 100)), "num_key_value_heads": 8}


def first_near_tie(logits: Logits, ids: list[int]) -> int:
    """The first position at which a rounding may change the positions that transformers' indexers choose."""
    topk, first = torch.Tensor.topk, len(ids)

    def choose(scores: torch.Tensor, k: int, **options: Any) -> Any:
        nonlocal first
        if scores.shape == (1, len(ids), len(ids)) and k < len(ids):
            best = topk(scores[0], k + 1, dim=-1).values
            near = best[:, k - 1] - best[:, k] < 1e-5 * best[:, 0].abs()
            first = min([first, *(k + near[k:].nonzero().flatten()).tolist()])
        return topk(scores, k, **options)

    with patch.object(torch.Tensor, "topk", choose), torch.inference_mode():
        logits(ids)
    return first


def random_config(family: str, chance: random.Random) -> dict[str, Any]:
    """Of 8 heads on up to 4 ranks; every size that the checkpoint names is drawn."""
    rotated, groups = chance.choice((2, 4, 8, 16)), chance.choice((1, 2, 4))
    sizes: dict[str, Any] = {
        "hidden_size": chance.choice((48, 64, 80)),
        "kv_lora_rank": chance.choice((8, 16, 30, 64)),
        "q_lora_rank": chance.choice((6, 16, 40)),
        "qk_nope_head_dim": chance.choice((2, 6, 16, 20)),
        "qk_rope_head_dim": rotated,
        "v_head_dim": chance.choice((2, 6, 16, 24)),
        "rms_norm_eps": chance.choice((1e-6, 1e-5, 1e-2)),
        "n_routed_experts": 8,
        "routed_scaling_factor": chance.choice((1.0, 2.5)),
        "tie_word_embeddings": chance.random() < 0.3,
        **checkpoints.rope("default"),
    }
    if chance.random() < 0.6:
        factors = {"mscale": chance.choice((0.7, 1.0)), "mscale_all_dim": chance.choice((0, 0.5, 1.0))}
        sizes |= checkpoints.rope(
            "yarn", factor=chance.choice((2.0, 40.0)), original_max_position_embeddings=32, **factors
        )
    if family == "longcat_flash":
        identities = chance.choice((0, 1, 5))
        own = {
            "num_hidden_layers": chance.choice((2, 4)),
            "zero_expert_num": identities,
            "moe_topk": chance.choice((2, 3)),
        }
        return sizes | own | {"head_dim": rotated, "expert_ffn_hidden_size": 40}
    dense, shared = chance.choice((0, 1, 2)), chance.choice((1, 2))
    sizes["q_lora_rank"] = made = chance.choice((None, sizes["q_lora_rank"]))
    sizes |= {"attention_bias": made is not None and chance.random() < 0.5, "rope_interleave": chance.random() < 0.5}
    sizes |= {"n_group": groups, "topk_group": chance.randrange(1, groups + 1), "num_experts_per_tok": 2}
    sizes |= {"first_k_dense_replace": dense, "n_shared_experts": shared, "norm_topk_prob": chance.random() < 0.5}
    return random_index(family, sizes, chance) if family in ("deepseek_v32", "glm_moe_dsa") else sizes


@pytest.mark.parametrize(
    ("family", "number"),
    [
        pytest.param(family, number, marks=() if number == 0 else pytest.mark.slow)
        for family in ("deepseek_v3", "deepseek_v32", "glm_moe_dsa", "longcat_flash")
        for number in range(10)
    ],
)
def test_random_configurations_answer_as_transformers_does(
    ranks: Ranks, family: str, number: int, tmp_path: Path, run_seed: int
) -> None:
    chance = random.Random(f"{family} {number} {run_seed}")
    words, layout = random_config(family, chance), chance.choice(tuple(LAYOUTS))
    print(f"{words}, {layout}")
    folder = checkpoints.save(tmp_path / "m", family, seed=run_seed % 1000 + number, **words)
    ask(ranks, folder, family, layout, tmp_path)


@pytest.mark.parametrize(
    "engine",
    [{"max_num_batched_tokens": 24}, {"kv_cache_memory": 160 << 10, "speculation": "ngram"}],
    ids=["chunks", "small cache, drafts"],
)
def test_prompts_in_expanded_form_answer_as_transformers_does(
    ranks: Ranks, engine: dict[str, Any], tmp_path: Path
) -> None:
    """Of sizes that are quicker expanded: whole prompts together with decodes, chunks of what an earlier step began,
    prefixes from the cache; in a cache that is too small for all, with drafts."""
    words: dict[str, Any] = {"kv_lora_rank": 64, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 6}
    folder = checkpoints.save(tmp_path / "m", "deepseek_v3", **words)
    config = from_folder(folder)
    assert config.latent is not None
    assert Expansion(config.latent, 4, 4).pays(17, 24)
    prompts = [
        *checkpoints.prompts(6),
        *([7 + i, *range(20, 60)] for i in range(3)),
        [7, *range(20, 40), *range(90, 120)],
    ]
    args: dict[str, Any] = {"folder": str(folder), "prompts": prompts, "engine": engine, "model": {"max_model_len": 96}}
    with torch.inference_mode():
        assert_greedy(transformers_logits(folder), prompts, ranks(2, "engine_cases:generate", args)[0], 32)


@pytest.mark.parametrize(
    ("family", "size", "engine"),
    [
        ("glm_moe_dsa", 2, {"max_num_batched_tokens": 8}),
        ("deepseek_v32", 1, {"max_num_batched_tokens": 16, "kv_cache_memory": 64 << 10, "max_num_seqs": 4}),
        pytest.param("deepseek_v32", 4, {"speculation": "ngram"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_contexts_cross_the_number_of_positions_that_attend(
    ranks: Ranks, checkpoint: Callable[[str], Path], family: str, size: int, engine: dict[str, Any]
) -> None:
    """Prompts of 7 to 11 tokens, where 9 attend, and answers beyond; chunks that cross it; prefixes from the cache; two
    choices of each prompt, which copy blocks; in a cache that is too small for all."""
    head = list(range(20, 40))
    prompts = [head[:length] for length in (7, 8, 9, 10, 11)] + [[*head[:12], 50 + i, 60] for i in range(3)]
    folder, words = checkpoint(family), {"max_tokens": 24, "n": 2}
    args = {
        "folder": str(folder),
        "prompts": prompts,
        "engine": engine,
        "model": {"max_model_len": 64},
        "params": words,
    }
    answers = ranks(size, "engine_cases:generate", args)[0]
    assert all(first == second for first, second in answers.values())
    with torch.inference_mode():
        single = {name: [first] for name, (first, _) in answers.items()}
        assert_greedy(transformers_logits(folder), prompts, single, 24)


@pytest.mark.parametrize(
    ("family", "speculation", "count"),
    [
        ("deepseek_v3_plain", False, 8),
        ("longcat_flash", "ngram", 8),
        ("glm_moe_dsa", "ngram", 48),  # drafts are accepted in some of them, for any seed
        pytest.param("deepseek_v32", False, 1000, marks=pytest.mark.slow),
        *[
            pytest.param(family, speculation, 1000, marks=pytest.mark.slow)
            for family in ("deepseek_v3_plain", "longcat_flash")
            for speculation in (False, "ngram")
        ],
    ],
)
def test_random_schedules_answer_as_the_reference_does(
    ranks: Ranks,
    checkpoint: Callable[[str], Path],
    family: str,
    speculation: str | bool,
    count: int,
    run_seed: int,
) -> None:
    """Prompts that share their beginnings come while others run, in a cache that is too small for them."""
    folder = checkpoint(family)
    layers = 4 if family == "longcat_flash" else 3
    engine = SMALL | {"speculation": speculation, "kv_cache_memory": layers * SMALL["kv_cache_memory"]}
    args = {"folder": str(folder), "seed": run_seed, "count": count, "engine": engine}
    (told,) = ranks(1, "latent_cases:schedules", args, timeout_s=1800.0)
    assert told["prefix_cache_hits_total"] > 0
    assert told["num_preemptions_total"] > 0
    assert (told["spec_decode_num_accepted_tokens_total"] > 0) == (speculation == "ngram")
    oracle = reference_logits if from_folder(folder).latent.index is None else transformers_logits  # type: ignore[union-attr]
    logits, excused, positions = oracle(folder), 0, 0
    for prompt, answer in told["answers"]:
        assert answer
        with torch.inference_mode():
            scores = logits(prompt + answer)[len(prompt) - 1 : -1]
        gaps = scores.amax(-1) - scores[torch.arange(len(answer)), torch.tensor(answer)]
        if wrong := (gaps >= TOLERANCE).nonzero().flatten().tolist():
            position = len(prompt) - 1 + wrong[0]
            assert first_near_tie(logits, prompt + answer) <= position, f"{prompt}: {answer}, position {position}"
            gaps = gaps[: wrong[0] + 1]
        excused, positions = excused + int((gaps > 0).sum()), positions + len(answer)
    print(f"{excused} of {positions} positions excused")
    assert excused * 1000 <= max(1000, positions)


def test_fp8_by_block_answers_as_its_widened_weights_do(ranks: Ranks, tmp_path: Path) -> None:
    """One scale for 16 x 16 elements of every product, as DeepSeek-V3 has one for 128 x 128: heads of 12 + 10 rows and
    ranks end inside of blocks."""
    wide = checkpoints.save(tmp_path / "wide", "deepseek_v3")
    narrow = checkpoints.save(tmp_path / "narrow", "deepseek_v3")
    meant: dict[str, torch.Tensor] = {}

    def quantised(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        out = dict(tensors)
        for name, tensor in tensors.items():
            if not name.endswith(("_proj.weight", "_with_mqa.weight")):
                continue
            scale = torch.rand([-(-size // 16) for size in tensor.shape]) * 0.02 + 0.001
            each = scale.repeat_interleave(16, 0).repeat_interleave(16, 1)[: tensor.shape[0], : tensor.shape[1]]
            out[name] = (tensor / each).clamp(-448, 448).to(torch.float8_e4m3fn)
            out[f"{name}_scale_inv"], meant[name] = scale, out[name].float() * each
        return out

    torch.manual_seed(2)
    checkpoints.edit_tensors(narrow, quantised)
    checkpoints.edit_tensors(wide, lambda tensors: tensors | meant)
    assert len(meant) > 50
    checkpoints.edit_config(narrow, quantization_config={"quant_method": "fp8", "weight_block_size": [16, 16]})
    prompts = checkpoints.prompts(6)
    answers = [ranks(2, "engine_cases:generate", {"folder": str(f), "prompts": prompts})[0] for f in (wide, narrow)]
    assert answers[0] == answers[1]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v32", "longcat_flash", "gpt_oss"])
def test_halves_answer_as_transformers_does(ranks: Ranks, family: str, dtype: str, tmp_path: Path) -> None:
    """Within 5 % of the logits' scale, on two ranks; but for rows whose experts the roundings change."""
    folder = checkpoints.save(tmp_path / "m", family, dtype=dtype)
    logits, prompts = transformers_logits(folder), checkpoints.prompts(6)
    with torch.inference_mode():
        want = torch.cat([logits(prompt) for prompt in prompts])
    args = {"folder": str(folder), "prompts": prompts}
    for result in ranks(2, "latent_cases:distances", args | {"expected": want.tolist()}):
        print(result)
        assert result["median"] < 0.05 * result["scale"]


@pytest.mark.parametrize(
    ("family", "name"), [("deepseek_v3", "model.layers.3.eh_proj.weight"), ("longcat_flash", "model.mtp.embed.weight")]
)
def test_weights_that_predict_more_tokens_are_skipped_and_the_start_says_so(
    ranks: Ranks, family: str, name: str, tmp_path: Path
) -> None:
    folder = checkpoints.save(tmp_path / "m", family)
    (before,) = ranks(1, "latent_cases:announced", {"folder": str(folder)})
    checkpoints.edit_config(folder, num_nextn_predict_layers=1)
    checkpoints.edit_tensors(folder, lambda tensors: tensors | {name: torch.zeros(2, 2)})
    (said,) = ranks(1, "latent_cases:announced", {"folder": str(folder)})
    line = f"weights: 1 tensors that predict more than one token are not used ({name}, …)"
    assert line in said
    assert not any("predict" in each for each in before)
