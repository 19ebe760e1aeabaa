"""Small random checkpoints for tests: one for each model family and quirk, saved by transformers itself, and the
ladder formats made from them. Norms and biases are random too: what is one or zero hides mistakes.

    folder = checkpoints.save(tmp_path / "m", "qwen2")              # config.json, model.safetensors, tokenizer
    folder = checkpoints.save(tmp_path / "m", "ladder", dtype="bfloat16")
    oracle = checkpoints.oracle(folder)                             # transformers' model in fp32 (stock families only)

8 heads of 8 on 4 key/value heads, FFN 96, 3 layers: tensor-parallel 1, 2 and 4 divide all, 8 replicates key/value
heads. 323 tokens: no size but 1 divides them, so the vocabulary is padded.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

LAYERS, HIDDEN, HEADS, KV_HEADS, FFN, VOCAB, POSITIONS = 3, 64, 8, 4, 96, 323, 256
SMALL: dict[str, Any] = {
    "num_hidden_layers": LAYERS,
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "intermediate_size": FFN,
    "vocab_size": VOCAB,
    "max_position_embeddings": POSITIONS,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
}


MOE = {"head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 2}


GLM = {"moe_intermediate_size": 40, "n_routed_experts": 8, "routed_scaling_factor": 2.5, "num_mtp_layers": 0}


MLA = {
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "num_key_value_heads": HEADS,
    "rms_norm_eps": 1e-3,
    **{key: value for key, value in (MOE | GLM).items() if key != "head_dim"},
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
"""eps is that of the other norms, not of the latents'."""


DSA = {"index_n_heads": 24, "index_head_dim": 12, "index_topk": 9}
"""Heads enough that no position has a sum of exactly zero, where transformers breaks ties in any order."""


def rope(kind: str, **factors: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **factors}}


STOCK: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, {}),
    "llama_tied": (transformers.LlamaConfig, {"tie_word_embeddings": True}),
    "llama_mha": (transformers.LlamaConfig, {"num_key_value_heads": 8, "rms_norm_eps": 1e-5}),
    "llama_mqa": (transformers.LlamaConfig, {"num_key_value_heads": 1}),
    "llama_bias": (transformers.LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "llama_llama3_rope": (
        transformers.LlamaConfig,
        rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32),
    ),
    "llama_linear_rope": (transformers.LlamaConfig, rope("linear", factor=2.0)),
    "llama_dynamic_rope": (transformers.LlamaConfig, rope("dynamic", factor=2.0) | {"max_position_embeddings": 32}),
    "llama_yarn_rope": (
        transformers.LlamaConfig,
        rope("yarn", factor=4.0, original_max_position_embeddings=64) | {"head_dim": 16},
    ),
    "mistral": (transformers.MistralConfig, {"sliding_window": 7}),
    "mistral_head_dim": (transformers.MistralConfig, {"sliding_window": None, "head_dim": 16}),
    "qwen2": (transformers.Qwen2Config, {}),
    "qwen2_window": (
        transformers.Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "tie_word_embeddings": True},
    ),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3_bias": (transformers.Qwen3Config, {"head_dim": 8, "attention_bias": True}),
    "qwen3_moe": (transformers.Qwen3MoeConfig, MOE | {"moe_intermediate_size": 40, "norm_topk_prob": True}),
    "qwen3_moe_mixed": (
        transformers.Qwen3MoeConfig,
        MOE | {"moe_intermediate_size": 40, "mlp_only_layers": [0], "num_experts_per_tok": 3},
    ),
    "mixtral": (transformers.MixtralConfig, MOE),
    "glm4_moe": (
        transformers.Glm4MoeConfig,
        MOE | GLM | {"n_group": 4, "topk_group": 2, "use_qk_norm": True, "attention_bias": True},
    ),
    "glm4_moe_plain": (transformers.Glm4MoeConfig, MOE | GLM | {"first_k_dense_replace": 0, "n_shared_experts": 2}),
    "gpt_oss": (
        transformers.GptOssConfig,
        MOE
        | rope("yarn", factor=4.0, original_max_position_embeddings=64, truncate=False)
        | {"sliding_window": 6, "swiglu_limit": 1.0},
    ),
    "deepseek_v3": (
        transformers.DeepseekV3Config,
        MLA
        | rope("yarn", factor=4.0, original_max_position_embeddings=64, mscale=1.0, mscale_all_dim=0.7)
        | {"attention_bias": True},
    ),
    "deepseek_v3_plain": (
        transformers.DeepseekV3Config,
        MLA | {"q_lora_rank": None, "rope_interleave": False, "first_k_dense_replace": 2, "n_shared_experts": 2},
    ),
    "deepseek_v32": (
        transformers.DeepseekV32Config,
        MLA
        | DSA
        | rope("yarn", factor=4.0, original_max_position_embeddings=64, mscale=1.0, mscale_all_dim=0.7)
        | {"attention_bias": True},
    ),
    "glm_moe_dsa": (
        transformers.GlmMoeDsaConfig,
        MLA | DSA | {"indexer_types": ["full", "shared", "shared"]},
    ),
    "longcat_flash": (
        transformers.LongcatFlashConfig,
        {key: MLA[key] for key in MLA if key not in ("num_local_experts", "num_experts_per_tok", "rms_norm_eps")}
        | {
            "num_hidden_layers": 4,
            "ffn_hidden_size": FFN,
            "moe_topk": 3,
            "expert_ffn_hidden_size": 40,
            "zero_expert_num": 4,
        }
        | {"rms_norm_eps": 1e-3, "head_dim": 8, "routed_scaling_factor": 1.5},
    ),
}
"""What transformers computes, too."""

DECLARED: dict[str, dict[str, Any]] = {
    "ladder": {"kind": "ladder"},
    "parallel": {"kind": "parallel"},
    "hybrid": {"kind": "hybrid", "ladder_layers": [1, 2]},
    "hybrid_early": {"kind": "hybrid", "ladder_layers": [0, 1]},
    "delay2": {"kind": "delay", "delay": 2},
    "delay3": {"kind": "delay", "delay": 3},
    "desync2_tp2": {"kind": "desync", "every": 2, "tensor_parallel_size": 2},
    "desync4_tp2": {"kind": "desync", "every": 4, "tensor_parallel_size": 2},
    "desync5_tp2": {"kind": "desync", "every": 5, "tensor_parallel_size": 2},
    "desync3_tp4": {"kind": "desync", "every": 3, "tensor_parallel_size": 4},
    "desync4_tp4": {"kind": "desync", "every": 4, "tensor_parallel_size": 4},
}
"""A stock Llama's names with `laddertron_wiring` beside; of the six sub-blocks desync4's last comes after one that
drifted, desync5's straight after a reduce."""

MIXED: dict[str, tuple[str, dict[str, Any]]] = {
    "moe_ladder": ("qwen3_moe", {"kind": "ladder"}),
    "moe_hybrid": ("qwen3_moe_mixed", {"kind": "hybrid", "ladder_layers": [1, 2]}),
    "moe_parallel": ("mixtral", {"kind": "parallel"}),
    "moe_delay2": ("mixtral", {"kind": "delay", "delay": 2}),
    "moe_desync4_tp2": ("qwen3_moe", {"kind": "desync", "every": 4, "tensor_parallel_size": 2}),
}
"""A family with experts under a wiring: `laddertron_wiring` beside its own names."""

LADDER_FORMATS = ("llamaLadder_last", "llamaLadder_list", "dolomite", "dolomite_bias")
RECIPES = (*STOCK, *DECLARED, *MIXED, *LADDER_FORMATS)


def save(
    folder: Path,
    recipe: str = "llama",
    *,
    dtype: str = "float32",
    seed: int = 0,
    max_shard_size: str = "1GB",
    tokenizer: bool = True,
    **overrides: Any,
) -> Path:
    """Writes a checkpoint and returns its folder. `overrides` are keywords of transformers' configuration; a small
    `max_shard_size` ("40KB") makes several shards and an index."""
    family, declared = MIXED.get(recipe, (recipe, DECLARED.get(recipe)))
    kind, quirks = STOCK.get(family, STOCK["llama"])
    if recipe == "dolomite_bias":
        quirks = {"attention_bias": True, "mlp_bias": True}
    config = kind(**{**SMALL, **quirks, **overrides})
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.normal_(0.0 if name.endswith("bias") else 1.0, 0.3)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.3)
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=max_shard_size)
    if declared is not None:
        edit_config(folder, laddertron_wiring=declared)
        if declared["kind"] == "parallel":
            edit_tensors(folder, lambda tensors: {k: v for k, v in tensors.items() if "post_attention" not in k})
    elif recipe.startswith("llamaLadder"):
        layers: int | list[int] = 2 if recipe == "llamaLadder_last" else [0, 2]
        edit_config(folder, model_type="llamaLadder", architectures=["LlamaLadderForCausalLM"], ladder_layers=layers)
    elif recipe.startswith("dolomite"):
        _to_dolomite(folder, dtype, bias=recipe == "dolomite_bias")
    elif recipe not in STOCK:
        raise ValueError(f"recipe {recipe!r} must be one of {', '.join(RECIPES)}")
    if tokenizer:
        save_tokenizer(folder)
    return folder


def edit_config(folder: Path, **changes: Any) -> None:
    """Sets keys of config.json; None removes one."""
    path = folder / "config.json"
    data = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in data.items() if value is not None}))


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    """Rewrites every *.safetensors file of the folder (an index is not rewritten)."""
    for path in folder.glob("*.safetensors"):
        tensors = change({name: tensor.clone() for name, tensor in load_file(path).items()})
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})


def oracle(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' own model of a stock checkpoint, for inference."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    return model.eval()


def prompts(count: int = 16, longest: int = 24, seed: int = 0, vocab: int = VOCAB) -> list[list[int]]:
    """Random prompts of 1 to `longest` ids, none of them a special token."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(6, vocab, (length,), generator=generator).tolist() for length in lengths]


def save_tokenizer(folder: Path, vocab: int = 300) -> None:
    """tokenizer.json (byte-level BPE; 0 is <s>, 1 is </s>) and tokenizer_config.json with a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    text = ["the rungs of a ladder carry the weight of the climber, and the rails carry the rungs"] * 3
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(text, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = (
        "{{- bos_token }}{%- for message in messages %}"
        "{{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
    )
    words = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(words))


MULTIPLIERS = {"m_emb": 1.5, "m_residual": 0.7, "m_width": 2.0}
ATTENTION_MULTIPLIER = 0.25


def _to_dolomite(folder: Path, dtype: str, bias: bool) -> None:
    """A saved Llama as dolomite-engine writes a ladder_residual: fused tensors, block descriptions, multipliers."""
    stock = json.loads((folder / "config.json").read_text())
    heads, kv, layers = (stock[f"num_{what}"] for what in ("attention_heads", "key_value_heads", "hidden_layers"))
    tied = stock["tie_word_embeddings"]

    def fuse(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        out = {
            "transformer.wte.weight": tensors["model.embed_tokens.weight"],
            "transformer.ln_f.weight": tensors["model.norm.weight"],
        }
        if not tied:
            out["lm_head.weight"] = tensors["lm_head.weight"]
        for layer in range(layers):
            source, target = f"model.layers.{layer}.", f"transformer.h.{layer}."
            out[target + "ln_1.weight"] = tensors[source + "input_layernorm.weight"]
            out[target + "ln_2.weight"] = tensors[source + "post_attention_layernorm.weight"]
            for leaf in ("weight", "bias") if bias else ("weight",):
                read = {
                    name: tensors[f"{source}{place}.{name}.{leaf}"]
                    for place, names in (
                        ("self_attn", ("q_proj", "k_proj", "v_proj", "o_proj")),
                        ("mlp", ("gate_proj", "up_proj", "down_proj")),
                    )
                    for name in names
                }
                rows = read["q_proj"].shape[0] // heads
                q = torch.split(read["q_proj"], rows * heads // kv)
                k, v = torch.split(read["k_proj"], rows), torch.split(read["v_proj"], rows)
                groups = [part for group in zip(q, k, v, strict=True) for part in group]
                out[f"{target}sequence_mixer.c_attn.{leaf}"] = torch.cat(groups)
                out[f"{target}sequence_mixer.c_proj.{leaf}"] = read["o_proj"]
                out[f"{target}mlp_block.c_fc.{leaf}"] = torch.cat((read["up_proj"], read["gate_proj"]))
                out[f"{target}mlp_block.c_proj.{leaf}"] = read["down_proj"]
        return out

    edit_tensors(folder, fuse)
    mixer = {
        "sequence_mixer_type": "softmax_attention",
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "softmax_dropout": 0,
        "dropout": 0,
        "add_bias": bias,
        "attention_multiplier": ATTENTION_MULTIPLIER,
        "sliding_window": None,
        "qkv_bias": bias,
    }
    mlp = {
        "mlp_type": "MLP",
        "intermediate_size": stock["intermediate_size"],
        "activation_function": "swiglu",
        "dropout": 0,
        "add_bias": bias,
    }
    data = {
        "architectures": ["LadderResidualForCausalLM"],
        "model_type": "ladder_residual",
        "vocab_size": stock["vocab_size"],
        "max_position_embeddings": stock["max_position_embeddings"],
        "hidden_size": stock["hidden_size"],
        "num_layers": layers,
        "normalization_function": "rmsnorm",
        "layer_norm_epsilon": stock["rms_norm_eps"],
        "initializer_range": 0.02,
        "init_method": "normal",
        "position_embedding_type": "rope",
        "rope_theta": 10000,
        "rope_scaling": None,
        "rope_dim": stock["hidden_size"] // heads,
        "sequence_mixer_blocks": [mixer] * layers,
        "mlp_blocks": [mlp] * layers,
        "router_aux_loss_coef": 0.001,
        "tie_word_embeddings": tied,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 1,
        "torch_dtype": dtype,
        **MULTIPLIERS,
    }
    (folder / "config.json").write_text(json.dumps(data))
