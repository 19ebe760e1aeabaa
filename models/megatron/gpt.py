"""Builds Megatron-core's GPTModel of a model folder's config, with its wiring. Refuses by name what GPTModel cannot
express."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.nn import functional

from ..config.model_config import ModelConfig
from .layer import SpecError, ladder_spec, wiring_of

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig


def make_gpt(config: ModelConfig, groups: Any, spec: Any = None, **options: Any) -> Any:
    """This rank's share of the model, with random weights, on the current CUDA device unless `use_cpu_initialization`.
    groups: Megatron-core's ProcessGroupCollection. spec: default: the config's wiring. options: of TransformerConfig.
    Raises SpecError."""
    _check(config)
    tp = groups.tp.size()
    wiring = config.wiring
    layers = tuple(i for i, kind in enumerate(wiring.kinds) if kind == "ladder") if wiring.name == "hybrid" else None
    wiring_of(wiring.name, config.num_layers, layers)
    words: dict[str, Any] = {
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_heads,
        "num_query_groups": config.num_kv_heads,
        "kv_channels": config.head_dim,
        "ffn_hidden_size": config.ffn_size,
        "layernorm_epsilon": config.norm_eps,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": functional.silu,
        "add_bias_linear": False,
        "add_qkv_bias": config.qkv_bias,
        "qk_layernorm": config.qk_norm,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "tensor_model_parallel_size": tp,
        "params_dtype": getattr(torch, config.dtype),
        "bf16": config.dtype == "bfloat16",
        "fp16": config.dtype == "float16",
    }
    rope = config.rope
    return GPTModel(
        TransformerConfig(**(words | options)),
        spec or ladder_spec(wiring.name, layers, config.qk_norm),
        vocab_size=-(-config.vocab_size // tp) * tp,
        max_sequence_length=config.max_position_embeddings,
        share_embeddings_and_output_weights=config.tied_embeddings,
        position_embedding_type="rope",
        rotary_base=rope.theta,
        rope_scaling=rope.kind == "llama3",
        rope_scaling_factor=rope.factor,
        pg_collection=groups,
    )


def _check(config: ModelConfig) -> None:
    rope = config.rope
    llama3 = (rope.low_freq_factor, rope.high_freq_factor, rope.original_max_position_embeddings) == (1.0, 4.0, 8192)
    unlike = {
        "a mixture of experts": config.experts is not None,
        "latent attention": config.latent is not None,
        "output biases": config.o_bias or config.mlp_bias,
        "sliding windows": any(window is not None for window in config.sliding_window),
        "multipliers of a ladder_residual model": (
            (config.residual_multiplier, config.embedding_multiplier, config.logits_divisor) != (1.0, 1.0, 1.0)
            or config.attention_scale not in (None, config.head_dim**-0.5)
        ),
        f"rope_type {rope.kind!r}": not (rope.kind == "default" or (rope.kind == "llama3" and llama3)) or rope.rotated,
    }
    if named := [name for name, used in unlike.items() if used]:
        raise SpecError(f"{', '.join(named)}: not built here as Megatron-core's GPTModel")
