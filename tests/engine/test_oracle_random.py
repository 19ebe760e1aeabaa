"""Random configurations of every family without latent attention (those with it: test_oracle_latent.py): answers are
those of transformers on one, two and four ranks."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import pytest
from test_oracle import check, transformers_logits

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral", "glm4_moe")


def random_rope(chance: random.Random) -> dict[str, Any]:
    theta = chance.choice((1e4, 5e5, 1e6))
    before = {"original_max_position_embeddings": chance.choice((16, 32, 64))}
    match chance.choice(("default", "linear", "dynamic", "llama3", "yarn")):
        case "linear" | "dynamic" as kind:
            factors: dict[str, Any] = {"factor": chance.choice((2.0, 8.0))}
        case "llama3" as kind:
            factors = before | {"factor": 8.0, "low_freq_factor": chance.choice((0.5, 1.0)), "high_freq_factor": 4.0}
        case "yarn" as kind:
            own: list[dict[str, Any]] = [{}, {"attention_factor": 0.8}, {"beta_fast": 16.0, "beta_slow": 2.0}]
            own.append({"mscale": 1.0, "mscale_all_dim": 0.5})
            factors = before | {"factor": chance.choice((2.0, 16.0))} | chance.choice(own)
        case kind:
            factors = {}
    return checkpoints.rope(kind, **factors | {"rope_theta": theta})


def random_config(family: str, chance: random.Random) -> dict[str, Any]:
    """Of heads that up to four ranks divide."""
    heads = chance.choice((4, 8, 12))
    words: dict[str, Any] = {
        "hidden_size": chance.choice((48, 72, 96)),
        "num_attention_heads": heads,
        "num_key_value_heads": chance.choice((1, 2, 4, heads)),
        "head_dim": chance.choice((4, 8, 16, 24, 32)),
        "intermediate_size": chance.choice((40, 96, 120, 200)),
        "num_hidden_layers": chance.choice((1, 2, 3, 5)),
        "rms_norm_eps": chance.choice((1e-6, 1e-5, 1e-2)),
        "tie_word_embeddings": chance.random() < 0.4,
    }
    if family != "glm4_moe":
        words |= random_rope(chance)
    if family == "llama":
        words |= {"attention_bias": chance.random() < 0.5, "mlp_bias": chance.random() < 0.5}
    if family in ("mistral", "mixtral"):
        words["sliding_window"] = chance.choice((None, 5, 33))
    if family.startswith("qwen") and chance.random() < 0.5:
        words |= {"use_sliding_window": True, "sliding_window": chance.choice((4, 9))}
        words |= {"max_window_layers": chance.choice((0, 1, 2))} if family != "qwen3_moe" else {}
    if family in ("qwen3", "qwen3_moe", "glm4_moe"):
        words["attention_bias"] = chance.random() < 0.5
    if family in ("qwen3_moe", "mixtral", "glm4_moe"):
        words |= {"num_local_experts": 8, "num_experts_per_tok": chance.choice((1, 2, 3))}
    if family in ("qwen3_moe", "glm4_moe"):
        words |= {"moe_intermediate_size": chance.choice((24, 40)), "norm_topk_prob": chance.random() < 0.5}
    if family == "qwen3_moe":
        words |= {"decoder_sparse_step": chance.choice((1, 2)), "mlp_only_layers": chance.choice(([], [0], [1]))}
    if family == "glm4_moe":
        groups = chance.choice((1, 2))
        words |= {
            "n_group": groups,
            "topk_group": chance.randrange(1, groups + 1),
            "use_qk_norm": chance.random() < 0.5,
        }
        words |= {"n_shared_experts": chance.choice((0, 1, 2)), "first_k_dense_replace": chance.choice((0, 1))}
        words |= {"routed_scaling_factor": chance.choice((1.0, 2.5))}
    return words


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("number", range(12))
def test_random_configurations_answer_as_transformers_does(
    ranks: Callable[..., list[Any]], family: str, number: int, tmp_path: Path, run_seed: int
) -> None:
    chance = random.Random(f"{family} {number} {run_seed}")
    size, words = chance.choice((1, 2, 4)), random_config(family, chance)
    print(f"{size} ranks, {words}")
    folder = checkpoints.save(tmp_path / "m", family, seed=run_seed % 1000 + number, **words)
    check(ranks, folder, transformers_logits(folder), size, tmp_path)
