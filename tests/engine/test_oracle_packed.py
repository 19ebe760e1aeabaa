"""Quantised checkpoints under every layout against transformers with the values that they mean: fp32 tokens and
logits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import torch
import transformers
from packing import FORMS, pack_experts, rewrite_config, twins
from safetensors.torch import load_file, save_file
from test_oracle import TOLERANCE, Logits, assert_greedy, transformers_logits
from test_oracle_experts import NODE, SPREAD
from test_oracle_stages import check

Ranks = Callable[..., list[Any]]
LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "tp1": (1, 1, {}),
    "tp2": (2, 2, {}),
    "tp4": (4, 4, {}),
    "spread_2": (2, 2, SPREAD),
    "node_2x2": (4, 2, NODE),
}
"""Ranks, ranks a node, keys."""
CASES = [
    *[("glm4_moe", "int4_32", layout) for layout in LAYOUTS],
    *[("deepseek_v3", form, "tp2") for form in ("int4_8", "int4_16_zeros", "int4_row_zeros", "mxfp4", "nvfp4")],
    *[("llama_bias", "int4_16_zeros", "tp4"), ("deepseek_v3", "nvfp4", "node_2x2"), ("mixtral", "mxfp4", "spread_2")],
]
SIZES: dict[str, dict[str, Any]] = {
    "glm4_moe": {"moe_intermediate_size": 64, "intermediate_size": 128},
    "deepseek_v3": {
        "moe_intermediate_size": 64, "intermediate_size": 128, "q_lora_rank": 32, "v_head_dim": 16,
    },
    "mixtral": {"intermediate_size": 128},
    "llama_bias": {"intermediate_size": 128},
}  # fmt: skip
"""Of each recipe: every matrix has whole groups of 32 columns, which ranks cut within."""


def projections(name: str) -> bool:
    return name.endswith(("proj.weight", "w1.weight", "w2.weight", "w3.weight"))


def ask(ranks: Ranks, folder: Path, logits: Logits, layout: str, tmp_path: Path) -> None:
    (size, per_node, parallel), prompts = LAYOUTS[layout], checkpoints.prompts(6)
    with torch.inference_mode():
        want = torch.cat([logits(prompt) for prompt in prompts])
        save_file({"logits": want.contiguous()}, tmp_path / "want.safetensors")
        args: dict[str, Any] = {"folder": str(folder), "prompts": prompts, "parallel": parallel, "per_node": per_node}
        case = "expert_cases:answers" if (parallel or size > 1) and "llama" not in folder.name else None
        if case is None:
            generated = ranks(size, "engine_cases:generate", {"folder": str(folder), "prompts": prompts})[0]
            assert_greedy(logits, prompts, generated, 32)
            args = {"folder": str(folder), "prompts": prompts, "expected": str(tmp_path / "want.safetensors")}
            answers = ranks(size, "engine_cases:logits_distance", args)
        else:
            answers = ranks(size, case, args | {"expected": str(tmp_path / "want.safetensors")})
            assert_greedy(logits, prompts, answers[0]["tokens"], 32)
    for rank, result in enumerate(answers):
        assert result["distance"] < TOLERANCE * max(1.0, result["scale"] / 10), f"rank {rank}: {result}"


@pytest.mark.parametrize(("recipe", "form", "layout"), CASES)
def test_every_layout_answers_as_transformers_does(
    ranks: Ranks, recipe: str, form: str, layout: str, tmp_path: Path
) -> None:
    folder, plain = twins(tmp_path, recipe, FORMS[form], projections, **SIZES[recipe])
    if recipe.startswith("llama"):
        folder = folder.rename(folder.with_name("packed-llama"))
    ask(ranks, folder, transformers_logits(plain), layout, tmp_path)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gpt_oss_as_published_answers_as_transformers_does(ranks: Ranks, layout: str, tmp_path: Path) -> None:
    """Ranks cut experts of 96 columns within groups of 32; transformers widens the same folder."""
    pack_experts(folder := checkpoints.save(tmp_path / "m", "gpt_oss"))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        quantization_config=transformers.Mxfp4Config(dequantize=True),
    ).eval()
    ask(ranks, folder, lambda ids: model(torch.tensor([ids])).logits[0], layout, tmp_path)


@pytest.mark.parametrize("layout", ["pp2", "tp2xpp2"])
def test_stages_answer_as_transformers_does(ranks: Ranks, layout: str, tmp_path: Path) -> None:
    folder, plain = twins(tmp_path, "deepseek_v3", FORMS["int4_32"], projections, **SIZES["deepseek_v3"])
    check(ranks, folder, transformers_logits(plain), layout)


def test_a_kimi_that_sees_answers_as_its_language_model(ranks: Ranks, tmp_path: Path) -> None:
    """Its text configuration is nested, its tensors have a prefix, and those of its vision part are not read."""

    def experts(name: str) -> bool:
        return ".experts." in name

    folder, plain = twins(tmp_path, "deepseek_v3", FORMS["int4_32"], experts, **SIZES["deepseek_v3"])
    tensors = {f"language_model.{n}": t.clone() for n, t in load_file(folder / "model.safetensors").items()}
    seeing = {"vision_tower.blocks.0.wqkv.weight": torch.ones(4, 4), "mm_projector.proj.0.bias": torch.ones(4)}
    save_file(tensors | seeing, folder / "model.safetensors")
    rewrite_config(folder, lambda words: {"model_type": "kimi_k25", "text_config": words | {"model_type": "kimi_k2"}})
    ask(ranks, folder, transformers_logits(plain), "tp2", tmp_path)


def test_the_start_names_once_what_only_quantises_activations_and_keys(ranks: Ranks, tmp_path: Path) -> None:
    """And answers as without: the weights mean the same."""
    folder, plain = twins(tmp_path, "mixtral", FORMS["int4_32"], projections, **SIZES["mixtral"])
    (before,) = ranks(1, "latent_cases:announced", {"folder": str(folder)})
    words = FORMS["int4_32"].words | {"kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor"}}
    words["config_groups"]["a"]["input_activations"] = {"num_bits": 8, "type": "int", "strategy": "token"}
    checkpoints.edit_config(folder, quantization_config=words)
    (said,) = ranks(1, "latent_cases:announced", {"folder": str(folder)})
    (line,) = (line for line in said if "quantization_config" in line)
    assert line.endswith(
        "more exact: input_activations (8-bit int), kv_cache_scheme (engine.kv_cache_dtype determines the cache)"
    )
    assert not any("quantization_config" in line for line in before)
    ask(ranks, folder, transformers_logits(plain), "tp2", tmp_path)
