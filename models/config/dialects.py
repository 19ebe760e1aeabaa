"""A model's config.json in another checkpoint format, or why that format cannot express it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .json_fields import Refusal
from .model_config import OWN_LAYOUTS, STOCK_FAMILIES, Layout, ModelConfig, description
from .parts import declaration

DIALECTS = ("hf", "laddertron", "llama-ladder", "ladder-residual")
MODELING_FILE = "modeling_laddertron.py"
_OURS = ("laddertron_wiring", "laddertron_family", "laddertron_model", "ladder_layers", "auto_map")


class DialectError(Refusal, ValueError):
    """A format cannot express this model; the message names the feature and a format that can."""


def dialect_of(config: ModelConfig) -> str:
    """The format for a model: "hf" if other programs compute its wiring, else "laddertron"."""
    stock = config.layout == _stock_layout(config.family)
    return "hf" if config.wiring.name == "standard" and stock else "laddertron"


def _stock_layout(family: str) -> Layout:
    return OWN_LAYOUTS.get(family, "huggingface")


def to_dialect(config: ModelConfig, data: Mapping[str, Any], dialect: str) -> dict[str, Any]:
    """The model's config.json in `dialect`. `data`: the folder's config.json. Raises DialectError."""
    if dialect not in DIALECTS:
        raise DialectError(f"format {dialect!r} must be one of {', '.join(DIALECTS)}")
    if config.lanes is not None:
        raise DialectError("a model of lanes has no words in any other format: keep the folder")
    if config.latent is not None:
        raise DialectError("latent attention has no words in any other format: keep the folder")
    if config.sinks:
        raise DialectError("attention sinks have no words in any other format: keep the folder")
    family = "llama" if config.family in ("llamaLadder", "ladder_residual") else config.family
    if dialect == "ladder-residual":
        return _ladder_residual(config, family, data)
    scaled = {
        "m_residual": config.residual_multiplier != 1.0,
        "m_emb": config.embedding_multiplier != 1.0,
        "m_width": config.logits_divisor != 1.0,
        "attention_multiplier": config.attention_scale not in (None, config.head_dim**-0.5),
    }
    if used := [name for name, is_used in scaled.items() if is_used]:
        raise DialectError(
            f"{', '.join(used)} of this ladder_residual model have no words in {dialect}: keep its format"
        )
    fields = _stock(config, data) if config.layout == "dolomite" else {k: v for k, v in data.items() if k not in _OURS}
    layout: Layout = _stock_layout(family) if dialect == "hf" else "huggingface"
    config, architecture = replace(config, layout=layout, attention_scale=None), STOCK_FAMILIES[family]
    if dialect == "hf":
        if config.wiring.name != "standard":
            raise DialectError(
                f"a stock {family} has no words for {config.wiring.name} wiring, and programs would compute it as a "
                "standard one: use --format laddertron, which transformers computes with trust_remote_code"
            )
        return {**fields, "architectures": [architecture], "model_type": family}
    if dialect == "laddertron":
        ours: dict[str, Any] = {"laddertron_family": family, "laddertron_wiring": declaration(config.wiring)}
        return _remote(config, fields, "laddertron", "Laddertron") | ours
    if family != "llama":
        raise DialectError(f"llamaLadder is a Llama, this is {family}: use --format laddertron")
    if config.wiring.name not in ("standard", "ladder", "hybrid"):
        raise DialectError(f"llamaLadder has no words for {config.wiring.name} wiring: use --format laddertron")
    layers = [i for i, kind in enumerate(config.wiring.kinds) if kind == "ladder"]
    count = len(layers)
    last = layers == list(range(config.num_layers - count, config.num_layers))
    return _remote(config, fields, "llamaLadder", "LlamaLadder") | {"ladder_layers": count if last else layers}


def declared_words(config: ModelConfig, data: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """The config.json of weights that were trained for `config.wiring`. `data`: the keys that a stock config.json has
    of this model."""
    words = to_dialect(config, data, dialect_of(config))
    words |= {"laddertron_wiring": declaration(config.wiring), "torch_dtype": dtype}
    words.pop("dtype", None)
    return words


def _remote(config: ModelConfig, data: Mapping[str, Any], model_type: str, name: str) -> dict[str, Any]:
    """A config.json with a model_type that other programs refuse as unknown, and remote code for transformers."""
    module = MODELING_FILE.removesuffix(".py")
    return {
        **data,
        "architectures": [f"{name}ForCausalLM"],
        "model_type": model_type,
        "auto_map": {"AutoConfig": f"{module}.{name}Config", "AutoModelForCausalLM": f"{module}.{name}ForCausalLM"},
        "laddertron_model": description(config),
    }


def _rope(config: ModelConfig) -> dict[str, Any]:
    rope = config.rope
    if rope.kind == "default":
        return {"rope_theta": rope.theta, "rope_scaling": None}
    scaling: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind in ("llama3", "yarn"):
        scaling["original_max_position_embeddings"] = rope.original_max_position_embeddings
    if rope.kind == "llama3":
        scaling |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        names = ("attention_factor", "beta_fast", "beta_slow")
        scaling |= {name: getattr(rope, name) for name in names} | {"truncate": not rope.fractional}
    return {"rope_theta": rope.theta, "rope_scaling": scaling}


def _common(config: ModelConfig, data: Mapping[str, Any]) -> dict[str, Any]:
    fields = {key: data[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in data}
    return {
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tied_embeddings,
        "torch_dtype": config.dtype,
        **_rope(config),
        **fields,
    }


def _stock(config: ModelConfig, data: Mapping[str, Any]) -> dict[str, Any]:
    """A stock Llama's keys for a model whose config.json has other keys."""
    if config.sliding_window or config.qkv_bias != config.o_bias:
        raise DialectError(
            "a Llama has no words for sliding windows, or for a bias of some of its attention's products"
        )
    return stock_json(config, data)


def stock_json(config: ModelConfig, data: Mapping[str, Any]) -> dict[str, Any]:
    """A Llama's config.json without its wiring; token ids are those of `data`."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.ffn_size,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": "silu",
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
        **_common(config, data),
    }


def _ladder_residual(config: ModelConfig, family: str, data: Mapping[str, Any]) -> dict[str, Any]:
    if config.layout == "dolomite":
        fields = {key: value for key, value in data.items() if key not in _OURS}
        return _remote(config, fields, "ladder_residual", "LadderResidual")
    reasons = {
        "mixtures of experts": config.experts is not None,
        f"{config.wiring.name} wiring (it is ladder throughout)": config.wiring.name != "ladder",
        f"{config.rope.kind} rotary embedding (default and yarn)": config.rope.kind not in ("default", "yarn"),
        "norms of queries and keys": config.qk_norm,
        "head_dim other than hidden_size / heads": config.head_dim * config.num_heads != config.hidden_size,
    }
    if refused := [reason for reason, holds in reasons.items() if holds]:
        raise DialectError(f"ladder_residual has no words for {'; '.join(refused)}: use --format laddertron")
    windows = config.sliding_window or (None,) * config.num_layers
    mixers = [
        {
            "sequence_mixer_type": "softmax_attention",
            "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.num_kv_heads,
            "add_bias": config.o_bias,
            "qkv_bias": config.qkv_bias,
            "attention_multiplier": None,
            "sliding_window": window,
            "dropout": 0,
            "softmax_dropout": 0,
        }
        for window in windows
    ]
    mlp = {
        "mlp_type": "MLP",
        "intermediate_size": config.ffn_size,
        "activation_function": "swiglu",
        "add_bias": config.mlp_bias,
        "dropout": 0,
    }
    words = {
        "num_layers": config.num_layers,
        "normalization_function": "rmsnorm",
        "layer_norm_epsilon": config.norm_eps,
        "position_embedding_type": "rope",
        "rope_dim": config.head_dim,
        "sequence_mixer_blocks": mixers,
        "mlp_blocks": [mlp] * config.num_layers,
        **_common(config, data),
    }
    return _remote(replace(config, layout="dolomite"), words, "ladder_residual", "LadderResidual")
