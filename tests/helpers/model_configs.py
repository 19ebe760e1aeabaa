"""config.json of each family, and those that are refused, with messages as in golden/snapshots/model_errors.txt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from laddertron.models.config.model_config import ModelConfig, from_folder

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 300,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "torch_dtype": "bfloat16",
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
MOE: dict[str, Any] = LLAMA | {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "norm_topk_prob": True,
}
GLM: dict[str, Any] = LLAMA | {
    "model_type": "glm4_moe",
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "routed_scaling_factor": 2.5,
    "attention_bias": True,
}
DEEPSEEK: dict[str, Any] = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"} | {
    "model_type": "deepseek_v3",
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
YARN = {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 0.5, "original_max_position_embeddings": 32}
LONGCAT: dict[str, Any] = {
    **{key: DEEPSEEK[key] for key in DEEPSEEK if key not in ("n_group", "topk_group", "first_k_dense_replace")},
    "model_type": "longcat_flash",
    "num_layers": 2,
    "ffn_hidden_size": 96,
    "expert_ffn_hidden_size": 40,
    "moe_topk": 3,
    "zero_expert_num": 4,
}
MIXER = {"sequence_mixer_type": "softmax_attention", "num_attention_heads": 8, "num_key_value_heads": 2}
MLP = {"mlp_type": "MLP", "intermediate_size": 96, "activation_function": "swiglu"}
DOLOMITE: dict[str, Any] = {
    "model_type": "ladder_residual",
    "num_layers": 4,
    "hidden_size": 64,
    "vocab_size": 300,
    "max_position_embeddings": 128,
    "normalization_function": "rmsnorm",
    "layer_norm_epsilon": 1e-6,
    "position_embedding_type": "rope",
    "rope_theta": 10000,
    "sequence_mixer_blocks": [MIXER] * 4,
    "mlp_blocks": [MLP] * 4,
    "eos_token_id": 0,
}


def read(folder: Path, data: dict[str, Any], **changes: Any) -> ModelConfig:
    """None in `changes` removes a key; the string "null" sets it to null."""
    merged = {k: (None if v == "null" else v) for k, v in {**data, **changes}.items() if v is not None}
    (folder / "config.json").write_text(json.dumps(merged))
    return from_folder(folder)


REFUSED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (LLAMA, {"model_type": "jetmoe"}),
    ({"model_type": "kimi_k25", "text_config": LLAMA | {"model_type": "kimi_linear"}}, {}),
    (LLAMA, {"model_type": "mimo"}),
    (MOE, {"num_local_experts": 4}),
    (MOE, {"num_experts": None}),
    (MOE, {"num_experts_per_tok": 9}),
    (MOE, {"moe_intermediate_size": None}),
    (GLM, {"n_group": 3}),
    (GLM, {"n_group": 4, "topk_group": 5}),
    (GLM, {"n_group": 4, "num_experts_per_tok": 3}),
    (GLM, {"partial_rotary_factor": 0.1}),
    (GLM, {"rope_scaling": {"rope_type": "linear", "factor": 2}}),
    (DEEPSEEK, {"scoring_func": "softmax"}),
    (DEEPSEEK, {"topk_method": "greedy"}),
    (LONGCAT, {"zero_expert_type": "copy"}),
    (LONGCAT, {"mla_scale_q_lora": False}),
    (LONGCAT, {"moe_topk": 13}),
    (DEEPSEEK, {"moe_layer_freq": 2}),
    (DEEPSEEK, {"num_key_value_heads": 4}),
    (DEEPSEEK, {"qk_rope_head_dim": 7}),
    (DEEPSEEK, {"model_type": "laddertron", "laddertron_family": "deepseek_v3"}),
    (MOE, {"mlp_only_layers": [9]}),
    (LLAMA, {"model_type": None}),
    (LLAMA, {"model_type": 3}),
    (LLAMA, {"num_local_experts": 8}),
    (LLAMA, {"hidden_act": "gelu"}),
    (LLAMA, {"quantization_config": {"quant_method": "gptq"}}),
    (LLAMA, {"num_key_value_heads": 3}),
    (LLAMA, {"num_attention_heads": 7, "num_key_value_heads": 7}),
    (LLAMA, {"head_dim": 7}),
    (LLAMA, {"hidden_size": None}),
    (LLAMA, {"hidden_size": "64"}),
    (LLAMA, {"hidden_size": True}),
    (LLAMA, {"num_hidden_layers": 0}),
    (LLAMA, {"num_hidden_layers": 2**31 - 1}),
    (LLAMA, {"vocab_size": 10**12}),
    (LLAMA, {"rms_norm_eps": -1.0}),
    (LLAMA, {"tie_word_embeddings": "yes"}),
    (LLAMA, {"torch_dtype": "float8_e4m3fn"}),
    (LLAMA, {"eos_token_id": 300}),
    (LLAMA, {"eos_token_id": [1, "2"]}),
    (LLAMA, {"bos_token_id": -1}),
    (LLAMA, {"rope_scaling": {"rope_type": "longrope"}}),
    (LLAMA, {"rope_scaling": {"type": "linear"}}),
    (LLAMA, {"rope_scaling": {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}}),
    (LLAMA, {"rope_scaling": 2.0}),
    (LLAMA, {"rope_parameters": {"full_attention": {"rope_type": "default"}}}),
    (LLAMA, {"rope_scaling": {"type": "yarn", "factor": 2, "truncate": 1}}),
    (LLAMA, {"rope_theta": 1, "rope_scaling": YARN}),
    (LLAMA, {"rope_parameters": {**YARN, "rope_theta": 0.5}}),
    (LLAMA, {"partial_rotary_factor": 0.5}),
    (LLAMA, {"rope_theta": 0}),
    (LLAMA, {"ladder_layers": 2}),
    (LLAMA, {"model_type": "llamaLadder"}),
    (LLAMA, {"model_type": "llamaLadder", "ladder_layers": 5}),
    (LLAMA, {"model_type": "llamaLadder", "ladder_layers": [0, 4]}),
    (LLAMA, {"model_type": "llamaLadder", "ladder_layers": [1, 1]}),
    (LLAMA, {"model_type": "llamaLadder", "ladder_layers": 1, "laddertron_wiring": {"kind": "ladder"}}),
    (LLAMA, {"laddertron_wiring": "ladder"}),
    (LLAMA, {"laddertron_wiring": {}}),
    (LLAMA, {"laddertron_wiring": {"kind": "rope"}}),
    (LLAMA, {"laddertron_wiring": {"kind": "none"}}),
    (LLAMA, {"laddertron_wiring": {"kind": "hybrid"}}),
    (LLAMA, {"laddertron_wiring": {"kind": "parallel", "ladder_layers": [1]}}),
    (LLAMA, {"laddertron_wiring": {"kind": "desync", "every": 2}}),
    (LLAMA, {"laddertron_wiring": {"kind": "ladder", "every": 2}}),
    (LLAMA, {"laddertron_wiring": {"kind": "ladder", "colour": 2}}),
    (LLAMA, {"mlp_bias": True, "laddertron_wiring": {"kind": "desync", "every": 2, "tensor_parallel_size": 2}}),
    ({**LLAMA, "model_type": "mistral"}, {"layer_types": ["full_attention"] * 4}),
    ({**LLAMA, "model_type": "mistral"}, {"num_key_value_heads": None}),
    ({**LLAMA, "model_type": "qwen2"}, {"layer_types": ["full_attention"] * 3}),
    ({**LLAMA, "model_type": "qwen2"}, {"layer_types": ["sliding_attention"] * 4}),
    ({**LLAMA, "model_type": "qwen3"}, {"num_experts": 128}),
    (DOLOMITE, {"normalization_function": "layernorm"}),
    (DOLOMITE, {"position_embedding_type": "nope"}),
    (DOLOMITE, {"sequence_mixer_blocks": [MIXER] * 3}),
    (DOLOMITE, {"sequence_mixer_blocks": [{"sequence_mixer_type": "mamba2"}] * 4}),
    (DOLOMITE, {"sequence_mixer_blocks": [MIXER] * 3 + [MIXER | {"num_key_value_heads": 4}]}),
    (DOLOMITE, {"mlp_blocks": [{**MLP, "mlp_type": "MoE"}] * 4}),
    (DOLOMITE, {"mlp_blocks": [{**MLP, "activation_function": "gelu"}] * 4}),
    (DOLOMITE, {"mlp_blocks": [{**MLP, "use_interleaved_weights": True}] * 4}),
    (DOLOMITE, {"rope_scaling": {"rope_type": "linear", "factor": 2}}),
    (DOLOMITE, {"rope_dim": 4}),
]
"""A family's config.json, and changes (see `read`) that make it one that is refused."""
