"""Reads the quantisation in config.json, without torch: fp8 (E4M3) with one scale per tensor, output channel or block,
in FBGEMM's, compressed-tensors' (float-quantized) and fp8's layouts; errors name others. Activations are scaled per
token, not by calibrated scales.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .json_fields import ConfigFields, read_json

Method = Literal["fbgemm_fp8", "compressed-tensors", "fp8"]
BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "fp8": 1.0, "int8": 1.0}
"""Bytes of an element in memory. fp8's scales (one a row) are left out: under a thousandth."""


@dataclass(frozen=True, slots=True)
class Quantisation:
    """The interpretation of weights stored as F8_E4M3. `activations`: products may use fp8 activations (W8A8), else
    only the weights are 8-bit. `activation_bound`: FBGEMM's upper bound of a token's largest activation; infinite if
    none. `block`: rows and columns that share a scale; None for scales of tensors or rows."""

    method: Method
    activations: bool = True
    activation_bound: float = math.inf
    block: tuple[int, int] | None = None


def read_quantisation(folder: Path) -> Quantisation | None:
    """Reads the quantisation of a checkpoint; None if it has none. Raises FileNotFoundError, or ValueError, which names
    the unsupported key."""
    return quantisation_in(read_json(folder / "config.json"))


def quantisation_in(fields: ConfigFields) -> Quantisation | None:
    """Like read_quantisation, for a parsed config.json. Raises ValueError."""
    key = next((k for k in ("quantization_config", "compression_config") if k in fields), None)
    return None if key is None else _read(fields.object(key))


def _read(words: ConfigFields) -> Quantisation:
    match words.string("quant_method", "compressed-tensors" if "config_groups" in words else ""):
        case "fbgemm_fp8":
            bound = words.number("activation_scale_ub") if "activation_scale_ub" in words else math.inf
            return Quantisation("fbgemm_fp8", activation_bound=bound)
        case "fp8":
            return Quantisation("fp8", block=_block(words, "weight_block_size"))
        case "compressed-tensors":
            return _compressed_tensors(words)
        case other:
            raise words.fail(
                f"quant_method {other!r} is not read; fbgemm_fp8, fp8 and compressed-tensors' float-quantized are "
                "(use an engine made for it, or the unquantised checkpoint)"
            )


def _block(words: ConfigFields, key: str) -> tuple[int, int] | None:
    if key not in words:
        return None
    sizes = words.integers(key, 1 << 20)
    if len(sizes) != 2 or 0 in sizes:
        raise words.fail(f"{key}={list(sizes)} must be two numbers above 0: the rows and columns of a block")
    return sizes[0], sizes[1]


def _compressed_tensors(words: ConfigFields) -> Quantisation:
    if (layout := words.string("format", "float-quantized")) not in ("float-quantized", "naive-quantized"):
        named = " (INT4, as Kimi-K2 Thinking is published)" if layout == "pack-quantized" else ""
        raise words.fail(f"format {layout!r}{named} is not read; float-quantized is")
    for key in ("sparsity_config", "transform_config"):
        if key in words and words.object(key).data.get("format", key) != "dense" and words.object(key).data:
            raise words.fail(f"{key} is not computed here; dense weights are")
    groups, activations, blocks = words.object("config_groups"), True, set[tuple[int, int] | None]()
    for name in groups.data:
        group = groups.object(name)
        weights = group.object("weights")
        kind = (weights.integer("num_bits"), weights.string("type"), weights.string("strategy"))
        supported = kind[:2] == (8, "float") and kind[2] in ("tensor", "channel", "block")
        if not supported or not weights.boolean("symmetric", True):
            raise weights.fail(
                f"{kind[0]}-bit {kind[1]} by {kind[2]} is not read; symmetric 8-bit float by tensor, channel or block "
                "is"
            )
        activations = activations and "input_activations" in group
        blocks.add(_block(weights, "block_structure") if kind[2] == "block" else None)
    if len(blocks) > 1:
        raise words.fail("config_groups with scales by block and others: one kind for all is read")
    return Quantisation("compressed-tensors", activations=activations, block=next(iter(blocks), None))
