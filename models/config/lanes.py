"""Lanes (delayed tensor parallelism): reads the two dialects of config.json, as a Llama's ModelConfig and `Lanes`.
Dialect (a) is `laneformer_tp`; (b), `LaneformerForCausalLM`, is known from a description of the published file. No
torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .json_fields import ConfigFields

HeadKind = Literal["replicate", "lane", "vocab_parallel"]
FAMILIES = ("laneformer_tp", "laneformer")
MAX_LANE_DELAY = 3
"""Layers: 2d + 1 sums are in flight, and our own transport carries eight (topology/transport)."""

_SHARED = {
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("intermediate_size", "vocab_size", "max_position_embeddings", "hidden_act", "attention_bias", "mlp_bias"),
    *("norm_eps", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings"),
    *("num_lanes", "broadcast_delay", "use_early_comm", "lm_head_type", "pre_norm_lane_agg", "replicated_rmsn_scale"),
    *("sliding_window", "tie_word_embeddings", "dtype", "torch_dtype", "bos_token_id", "eos_token_id"),
}
_OWN = (
    {"use_comm", "sliding_window_n_layers", "unclamped_layers"},
    {"use_attention_comm", "use_mlp_comm", "swa_layers"},
)
_NEUTRAL = {
    *("model_type", "architectures", "auto_map", "transformers_version", "_name_or_path", "pad_token_id", "use_cache"),
    *("multiple_of", "depth_init", "use_flex_attn", "attn_mask_type", "initializer_range", "attention_dropout"),
    *("_attn_implementation", "return_dict", "output_attentions", "output_hidden_states", "is_encoder_decoder"),
    *("id2label", "label2id", "problem_type", "chunk_size_feed_forward", "pretraining_tp"),
}
"""Keys that change no result: how weights were initialised, which program wrote the file."""


@dataclass(frozen=True, slots=True)
class Lanes:
    """`count` lanes, whose sums arrive `delay` layers late. `early`: the first `delay` layers sum at once;
    `attention`, `mlp`: whether later layers exchange those outputs. `norm_each`: norms have a scale for each lane.
    `sum_first`: the final norm is of the lanes' sum. `layers`: of the whole model; `first`: where a stage begins."""

    count: int
    delay: int
    layers: int
    early: bool = True
    attention: bool = True
    mlp: bool = True
    head: HeadKind = "replicate"
    norm_each: bool = False
    sum_first: bool = False
    first: int = 0

    def sums_at_once(self, layer: int) -> bool:
        """Whether the layer waits for its own sums. `layer`, here and below: counted from where the stage begins."""
        return self.early and self.first + layer < self.delay

    def reads(self, layer: int, mlp: bool) -> bool:
        """Whether the layer adds the sum of the layer `delay` before it."""
        return (self.mlp if mlp else self.attention) and self.first + layer >= self.delay

    def read_later(self, layer: int, mlp: bool) -> bool:
        """Whether the layer `delay` after it adds its sum."""
        return self.first + layer + self.delay < self.layers and self.reads(layer + self.delay, mlp)


def is_laneformer(fields: ConfigFields) -> bool:
    named = fields.data.get("architectures")
    return fields.data.get("model_type") in FAMILIES or (isinstance(named, list) and "LaneformerForCausalLM" in named)


def read_lanes(fields: ConfigFields) -> tuple[ConfigFields, Lanes, tuple[int | None, ...]]:
    """Reads the lanes; returns the rest of the model with a Llama's keys, the lanes, and each layer's window. Raises
    ValueError, also for unknown keys, which might change the result."""
    architectures = fields.strings("architectures") if "architectures" in fields else ()
    second = "LaneformerForCausalLM" in architectures or fields.string("model_type") == "laneformer"
    computed_keys = _SHARED | _OWN[second] | _NEUTRAL
    for key in fields.data:
        if key not in computed_keys:
            other = " (it belongs to the other dialect)" if key in _OWN[not second] else ""
            raise fields.fail(f"{key} of a laneformer is not computed here{other}; known are {_listed(computed_keys)}")
    for key in ("attention_bias", "mlp_bias"):
        if fields.boolean(key, False):
            raise fields.fail(f"{key}=true is not computed here: a laneformer's products have no bias")
    layers, lanes = fields.integer("num_hidden_layers", maximum=4096), fields.integer("num_lanes", 1)
    delay = fields.integer("broadcast_delay", 1)
    if delay > MAX_LANE_DELAY:
        raise fields.fail(
            f"broadcast_delay={delay}: 2 x {delay} + 1 = {2 * delay + 1} sums would be in flight, the transport "
            f"carries 8: at most {MAX_LANE_DELAY} is computed here"
        )
    _check_sizes(fields, lanes)
    both = fields.boolean("use_comm", True)
    result = Lanes(
        count=lanes,
        delay=delay,
        layers=layers,
        early=fields.boolean("use_early_comm", True),
        attention=fields.boolean("use_attention_comm", True) if second else both,
        mlp=fields.boolean("use_mlp_comm", True) if second else both,
        head=_head(fields, lanes),
        norm_each=not fields.boolean("replicated_rmsn_scale", True),
        sum_first=fields.boolean("pre_norm_lane_agg", False),
    )
    if result.sum_first and result.head != "replicate":
        raise fields.fail(f"pre_norm_lane_agg with lm_head_type {result.head!r} is not defined: it needs replicate")
    eps = fields.number("norm_eps", fields.number("rms_norm_eps", 1e-5))
    if "rms_norm_eps" in fields and fields.number("rms_norm_eps") != eps:
        raise fields.fail(f"rms_norm_eps={fields.number('rms_norm_eps'):g} and norm_eps={eps:g} must be equal")
    words = {**fields.data, "rms_norm_eps": eps}
    return ConfigFields(fields.where, words), result, _windows(fields, layers, second)


def _listed(keys: set[str]) -> str:
    return ", ".join(sorted(keys - _NEUTRAL))


def _check_sizes(fields: ConfigFields, lanes: int) -> None:
    heads, hidden = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    sizes = {
        "heads": heads,
        "key/value heads": fields.integer("num_key_value_heads", heads),
        "FFN": fields.integer("intermediate_size"),
    }
    for what, size in sizes.items():
        if size % lanes:
            raise fields.fail(f"num_lanes={lanes}: {size} {what} % {lanes} = {size % lanes}, must be 0")
    if hidden % heads or fields.integer("head_dim", hidden // heads or 1) * heads != hidden:
        raise fields.fail(f"hidden_size={hidden} must be num_attention_heads={heads} times head_dim")


def _head(fields: ConfigFields, lanes: int) -> HeadKind:
    match fields.string("lm_head_type", "replicate"):
        case "replicate":
            return "replicate"
        case "lane" | "vocab_parallel" as kind:
            if fields.boolean("tie_word_embeddings", False):
                raise fields.fail(f"tie_word_embeddings with lm_head_type {kind!r} is not defined: their shapes differ")
            vocabulary = fields.integer("vocab_size")
            if kind == "vocab_parallel" and vocabulary % lanes:
                raise fields.fail(
                    f"lm_head_type 'vocab_parallel': vocab_size {vocabulary} % {lanes} lanes = {vocabulary % lanes}, "
                    "must be 0"
                )
            return kind
        case other:
            raise fields.fail(f"lm_head_type {other!r} must be replicate, lane or vocab_parallel")


def _windows(fields: ConfigFields, layers: int, second: bool) -> tuple[int | None, ...]:
    """A window of w lets position i see j with 0 <= i - j < w."""
    if second:
        slides = set(fields.integers("swa_layers", layers - 1)) if "swa_layers" in fields else set()
    else:
        count = fields.data.get("sliding_window_n_layers") or 0
        if type(count) is not int or abs(count) > layers:
            raise fields.fail(f"sliding_window_n_layers={count!r} must be an integer from {-layers} to {layers}")
        slides = set(range(count) if count >= 0 else range(layers + count, layers))
        slides -= set(fields.integers("unclamped_layers", layers - 1)) if "unclamped_layers" in fields else set()
    if not slides:
        return ()
    window = fields.integer("sliding_window")
    return tuple(window if layer in slides else None for layer in range(layers))
