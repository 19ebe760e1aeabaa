"""The two parts of a ModelConfig that have rules of their own: the rotary embedding and the residual wiring, each
with its reader from the checkpoint's words. Data only, no torch. models/config/model_config.py passes them on.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

from .json_fields import ConfigFields
from .lanes import Lanes

WiringKind = Literal["standard", "parallel", "ladder", "delay", "desync", "lanes", "shortcut", "none"]
RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn"]
MAX_DELAY = 7
"""The largest d of delay-d: the native transport carries eight all-reduces at once (topology/transport)."""


@dataclass(frozen=True, slots=True)
class Wiring:
    """How each layer's two sub-blocks read and write the residual: one kind a layer (a mix of standard and ladder is
    the paper's hybrid). `desync_every` is desync-n's n (0 unless every layer is desync; the last sub-block
    reduces for any 2L % n). `trained_tp` is the tensor-parallel size desync weights belong to. `delay` is delay-d's
    d (0 unless every layer is delay): an output is read d sub-blocks later; ladder is d = 1. Every other layer may be
    shortcut: the output of its experts is read three sub-blocks later, behind the next layer. `lanes`: of a model
    whose residual has several copies, also where its kinds are none."""

    kinds: tuple[WiringKind, ...]
    desync_every: int = 0
    trained_tp: int | None = None
    delay: int = 0
    lanes: Lanes | None = None

    @property
    def name(self) -> str:
        """standard, parallel, ladder, hybrid, delay-d, desync-n, lanes, shortcut or no-communication."""
        distinct = set(self.kinds)
        if distinct == {"none"}:
            return "no-communication"
        if distinct == {"desync"}:
            return f"desync-{self.desync_every}"
        if distinct == {"delay"}:
            return f"delay-{self.delay}"
        if "shortcut" in distinct:
            return "shortcut"
        if len(distinct) > 1:
            return "hybrid"
        return next(iter(distinct))

    @property
    def waits(self) -> bool:
        """Whether every sub-block waits for the one before it: what a step in two streams is for."""
        return not self.desync_every and set(self.kinds) <= {"standard", "parallel"}

    @property
    def drifts(self) -> bool:
        """Whether ranks have unlike residuals between all-reduces."""
        return self.desync_every > 0 or "none" in self.kinds


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding over the first `rotated` dimensions of a head; 0: over all. kind "default", "linear", "dynamic",
    "llama3" or "yarn"; the factors as transformers names them. For yarn `attention_factor` is always resolved (it
    scales cosine and sine)."""

    theta: float = 10000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    rotated: int = 0
    fractional: bool = False  # yarn: the corrected dimensions' ends are not rounded to whole numbers


def make_wiring(
    kind: str,
    num_layers: int,
    ladder_layers: Collection[int] | None = None,
    every: int = 0,
    tensor_parallel_size: int | None = None,
    delay: int = 0,
) -> Wiring:
    """The wiring of all layers. kind: standard, parallel, ladder, hybrid (standard but for `ladder_layers`), desync
    (with `every` = n and the tensor-parallel size its weights were trained for), delay (with d) or none; also desync-n
    and delay-d. Raises ValueError."""
    stem, _, number = kind.partition("-")
    if stem == "desync" and number.isdecimal() and not every:
        kind, every = stem, int(number)
    if stem == "delay" and number.isdecimal() and not delay:
        kind, delay = stem, int(number)
    if kind == "delay":
        if not 1 <= delay <= MAX_DELAY:
            raise ValueError(f"delay needs a delay of 1 to {MAX_DELAY} sub-blocks, not {delay}")
        kind, delay = ("ladder", 0) if delay == 1 else (kind, delay)
    elif delay:
        raise ValueError(f"a delay belongs to delay, not to {kind}")
    if kind == "desync":
        if every < 1 or tensor_parallel_size is None or tensor_parallel_size < 1:
            raise ValueError(f"desync needs every >= 1 and tensor_parallel_size, not {every}, {tensor_parallel_size}")
        drifting: WiringKind = "desync"
        return Wiring((drifting,) * num_layers, every, tensor_parallel_size)
    if every or tensor_parallel_size is not None:
        raise ValueError(f"every and tensor_parallel_size belong to desync, not to {kind}")
    if kind == "hybrid" and ladder_layers is None:
        raise ValueError("hybrid needs ladder_layers, the list of layers that are ladder")
    if ladder_layers is not None:
        if kind not in ("ladder", "hybrid"):
            raise ValueError(f"ladder_layers belong to ladder and hybrid, not to {kind}")
        listed = set(ladder_layers)
        if len(listed) != len(ladder_layers) or not all(0 <= i < num_layers for i in listed):
            raise ValueError(f"ladder_layers {sorted(ladder_layers)} must be different layers of 0 to {num_layers - 1}")
        mixed: list[WiringKind] = ["ladder" if i in listed else "standard" for i in range(num_layers)]
        return Wiring(tuple(mixed))
    match kind:
        case "standard" | "parallel" | "ladder" | "none" | "delay":
            return Wiring((kind,) * num_layers, delay=delay)
    raise ValueError(f"wiring {kind!r} must be standard, parallel, ladder, hybrid, delay-d, desync-n or none")


def ladder_last(fields: ConfigFields, num_layers: int) -> Wiring:
    """llamaLadder's `ladder_layers`: an integer (the last N layers) or a list of indices."""
    listed = fields.integers("ladder_layers", num_layers)
    if not isinstance(fields.data["ladder_layers"], list):
        listed = tuple(range(num_layers - listed[0], num_layers))
    try:
        return make_wiring("hybrid", num_layers, listed)
    except ValueError as error:
        raise fields.fail(str(error)) from error


def declared_wiring(fields: ConfigFields, num_layers: int) -> Wiring:
    """The object `laddertron_wiring` of a config.json: kind and, where they belong, ladder_layers, every,
    tensor_parallel_size, delay. `declaration` is the way back."""
    allowed = {"kind", "ladder_layers", "every", "tensor_parallel_size", "delay"}
    if unknown := sorted(set(fields.data) - allowed):
        raise fields.fail(f"unknown key {unknown[0]!r}; known are {', '.join(sorted(allowed))}")
    kind = fields.string("kind")
    if kind == "none":
        raise fields.fail("kind 'none' (no communication) exists for timings alone; no weights are trained for it")
    layers = fields.integers("ladder_layers", num_layers) if "ladder_layers" in fields else None
    every = fields.integer("every", 0, maximum=2 * num_layers) if "every" in fields else 0
    tp = fields.integer("tensor_parallel_size") if "tensor_parallel_size" in fields else None
    delay = fields.integer("delay", 0) if "delay" in fields else 0
    try:
        return make_wiring(kind, num_layers, layers, every, tp, delay)
    except ValueError as error:
        raise fields.fail(str(error)) from error


def declaration(wiring: Wiring) -> dict[str, Any]:
    """The value of `laddertron_wiring` in config.json for a wiring. Raises ValueError for no-communication."""
    if wiring.desync_every:
        return {"kind": "desync", "every": wiring.desync_every, "tensor_parallel_size": wiring.trained_tp}
    if wiring.delay:
        return {"kind": "delay", "delay": wiring.delay}
    if wiring.name == "hybrid":
        return {"kind": "hybrid", "ladder_layers": [i for i, kind in enumerate(wiring.kinds) if kind == "ladder"]}
    if wiring.name == "no-communication":
        raise ValueError("no-communication exists for timings alone; no weights are trained for it")
    return {"kind": wiring.name}


def _mscale(factor: float, mscale: float = 1.0) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def _yarn(fields: ConfigFields, theta: float, original: int, max_positions: int) -> Rope:
    """YaRN (arXiv 2309.00071) with transformers' defaults."""
    if theta <= 1:
        raise fields.fail(f"rope_theta={theta:g} must be above 1: YaRN divides by its logarithm; most have 10000")
    factor = fields.number("factor") if "factor" in fields else max_positions / original
    attention = fields.number("attention_factor") if "attention_factor" in fields else None
    if attention is None:
        both = "mscale" in fields and "mscale_all_dim" in fields and fields.data["mscale_all_dim"] != 0
        attention = _mscale(factor)
        if both and fields.data["mscale"] != 0:
            attention = _mscale(factor, fields.number("mscale")) / _mscale(factor, fields.number("mscale_all_dim"))
    return Rope(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=attention,
        beta_fast=fields.number("beta_fast", 32.0),
        beta_slow=fields.number("beta_slow", 1.0),
        fractional=not fields.boolean("truncate", True),
    )


def read_rope(config: ConfigFields, max_positions: int, head_dim: int = 0, partial: bool = False) -> Rope:
    """From `rope_scaling` (and a top-level `rope_theta`) or from transformers 5's `rope_parameters`. partial: the
    family may rotate a share of `head_dim`, which it names. Raises ValueError on a kind, or a partial or per-layer
    rotation, that the model code does not compute."""
    named = [key for key in ("rope_scaling", "rope_parameters") if key in config]
    fields = config.object(named[0]) if named else ConfigFields(config.where, {})
    nested = sorted(key for key, value in fields.data.items() if isinstance(value, dict))
    if nested:
        raise fields.fail(f"rotary embeddings that differ by layer type ({', '.join(nested)}) are not computed here")
    kind, rotated = fields.string("rope_type", fields.string("type", "default")), 0
    if partial:
        holder = fields if "partial_rotary_factor" in fields else config
        rotated = int(head_dim * holder.number("partial_rotary_factor"))
        if rotated < 2 or rotated > head_dim or rotated % 2:
            raise holder.fail(f"partial_rotary_factor: {rotated} of {head_dim} dimensions must be an even number")
        if kind != "default":
            raise fields.fail(f"rope_type {kind!r} with a partial rotation is not computed here; default is")
    elif place := next((p for p in (fields, config) if p.number("partial_rotary_factor", 1.0) != 1.0), None):
        raise place.fail("a partial_rotary_factor other than 1 is not computed here")
    theta = fields.number("rope_theta") if "rope_theta" in fields else config.number("rope_theta", 1e4)
    holder = config if "original_max_position_embeddings" in config else fields
    match kind:
        case "default":
            return Rope(theta=theta, rotated=0 if rotated == head_dim else rotated)
        case "linear" | "dynamic":
            return Rope(theta, kind, fields.number("factor"), original_max_position_embeddings=max_positions)
        case "yarn":
            return _yarn(
                fields, theta, holder.integer("original_max_position_embeddings", max_positions), max_positions
            )
        case "llama3":
            low, high = fields.number("low_freq_factor"), fields.number("high_freq_factor")
            if high <= low:
                raise fields.fail(f"high_freq_factor={high:g} must be greater than low_freq_factor={low:g}")
            return Rope(
                theta=theta,
                kind="llama3",
                factor=fields.number("factor"),
                low_freq_factor=low,
                high_freq_factor=high,
                original_max_position_embeddings=holder.integer("original_max_position_embeddings", max_positions),
            )
    raise fields.fail(f"rope_type {kind!r} is not computed here; default, linear, dynamic, llama3 and yarn are")
