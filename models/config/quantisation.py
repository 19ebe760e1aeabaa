"""Reads the quantisation in config.json, without torch: fp8 (E4M3) with one scale per tensor, output channel or block,
in FBGEMM's, compressed-tensors' and fp8's layouts, and 4-bit codes: INT4 (pack-quantized), NVFP4 and MXFP4 of
compressed-tensors, and gpt-oss's MXFP4; errors name others. Activations are scaled per token, not by calibrated scales.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from math import gcd
from pathlib import Path
from typing import Literal

from .json_fields import ConfigFields, read_json

Method = Literal["fbgemm_fp8", "compressed-tensors", "fp8", "mxfp4"]
Code = Literal["e4m3", "int4", "e2m1"]
ScaleType = Literal["float32", "bfloat16", "float16", "e8m0", "e4m3"]
BYTES = {
    "float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5, "nvfp4": 0.5, "mxfp4": 0.5,
}  # fmt: skip
"""Bytes of an element in memory, without scales."""


@dataclass(frozen=True, slots=True)
class Quantisation:
    """The interpretation of quantised weights. `activations`: products may use fp8 activations (W8A8), else only the
    weights are quantised. `activation_bound`: FBGEMM's upper bound of a token's largest activation; infinite if none.
    `block`: rows and columns that share a scale; None for scales of tensors or rows. `code`: of a weight; those of 4
    bits are two a byte, the lower half first, INT4 with 8 added. `scale`: the type of stored scales, of fp8 always
    float32; scales in e4m3 are divided by a global scale. `zeros`: whether a scale has a zero point."""

    method: Method
    activations: bool = True
    activation_bound: float = math.inf
    block: tuple[int, int] | None = None
    code: Code = "e4m3"
    scale: ScaleType = "float32"
    zeros: bool = False

    @property
    def per_byte(self) -> int:
        """Weights in a byte."""
        return 1 if self.code == "e4m3" else 2

    @property
    def scale_type(self) -> Literal["float32", "bfloat16", "float16"]:
        """The type of scales in memory, which represents all of them exactly."""
        return "bfloat16" if self.scale == "e8m0" else "float32" if self.scale == "e4m3" else self.scale

    @property
    def scale_bytes(self) -> int:
        """Bytes of a scale, with its zero point, in memory."""
        return int(BYTES[self.scale_type]) + self.zeros

    @property
    def title(self) -> str:
        """fp8, INT4, NVFP4 or MXFP4."""
        names = {"e4m3": "fp8", "int4": "INT4", "e2m1": "NVFP4" if self.scale == "e4m3" else "MXFP4"}
        return names[self.code]


GPT_OSS = Quantisation("mxfp4", activations=False, block=(1, 32), code="e2m1", scale="e8m0")
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The values of the codes 0 to 7; the others are their negatives."""


def scale_width(columns: int, block: tuple[int, int] | None) -> int:
    """The number of columns of a rank's matrix that share a scale, chosen so that none of these groups crosses a block
    of the checkpoint: where a rank's columns cut a block, its scale is repeated, which is exact."""
    return columns if block is None else gcd(columns, block[1])


def scale_shape(shape: tuple[int, ...], block: tuple[int, int] | None) -> tuple[int, int]:
    """Shape of the scales of a quantised product [rows, columns]: one a row and `scale_width` columns."""
    return shape[0], shape[1] // scale_width(shape[1], block)


def read_quantisation(folder: Path) -> Quantisation | None:
    """Reads the quantisation of a checkpoint; None if it has none. Raises FileNotFoundError, or ValueError, which names
    the unsupported key."""
    return quantisation_in(read_json(folder / "config.json"))


def quantisation_in(fields: ConfigFields) -> Quantisation | None:
    """Like read_quantisation, for a parsed config.json. Raises ValueError."""
    key = next((k for k in ("quantization_config", "compression_config") if k in fields), None)
    if key is None and "text_config" in fields:
        return quantisation_in(fields.object("text_config"))
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
        case "mxfp4":
            return GPT_OSS
        case other:
            raise words.fail(
                f"quant_method {other!r} is not read; fbgemm_fp8, fp8, compressed-tensors and mxfp4 are "
                "(use an engine made for it, or the unquantised checkpoint)"
            )


def _block(words: ConfigFields, key: str) -> tuple[int, int] | None:
    if key not in words:
        return None
    sizes = words.integers(key, 1 << 20)
    if len(sizes) != 2 or 0 in sizes:
        raise words.fail(f"{key}={list(sizes)} must be two numbers above 0: the rows and columns of a block")
    return sizes[0], sizes[1]


_PACKED: dict[str, tuple[Code, str, ScaleType, tuple[str, ...]]] = {
    "float-quantized": ("e4m3", "8-bit float", "float32", ("tensor", "channel", "block")),
    "naive-quantized": ("e4m3", "8-bit float", "float32", ("tensor", "channel", "block")),
    "pack-quantized": ("int4", "4-bit int", "bfloat16", ("channel", "group")),
    "nvfp4-pack-quantized": ("e2m1", "4-bit float", "e4m3", ("tensor_group",)),
    "mxfp4-pack-quantized": ("e2m1", "4-bit float", "e8m0", ("group",)),
}
"""For each format of compressed-tensors: code, number of bits and type, type of scales, strategies."""
_GROUPS = {"e8m0": 32, "e4m3": 16}
"""Columns that share a scale, where the format determines it."""


def _compressed_tensors(words: ConfigFields) -> Quantisation:
    layout = words.string("format", "float-quantized")
    if layout not in _PACKED:
        raise words.fail(f"format {layout!r} is not read; {', '.join(_PACKED)} are")
    code, expected, scale, strategies = _PACKED[layout]
    for key in ("sparsity_config", "transform_config"):
        if key in words and words.object(key).data.get("format", key) != "dense" and words.object(key).data:
            raise words.fail(f"{key} is not computed here; dense weights are")
    groups, activations, forms = words.object("config_groups"), True, set[tuple[tuple[int, int] | None, bool]]()
    for name in groups.data:
        group = groups.object(name)
        weights = group.object("weights")
        kind, strategy = f"{weights.integer('num_bits')}-bit {weights.string('type')}", weights.string("strategy")
        zeros = not weights.boolean("symmetric", True)
        if kind != expected or strategy not in strategies or (zeros and code != "int4"):
            raise weights.fail(
                f"{'asymmetric ' * zeros}{kind} by {strategy} is not read; {'' if code == 'int4' else 'symmetric '}"
                f"{expected} by {' or '.join(strategies)} is"
            )
        if str(order := weights.data.get("actorder")).lower() not in ("none", "false", "weight", "static"):
            raise weights.fail(f"actorder={order!r} (columns in the order of weight_g_idx) is not read; 'static' is")
        activations = activations and "input_activations" in group
        forms.add((_sharing(weights, strategy, _GROUPS.get(scale)), zeros))
    if len(forms) > 1:
        raise words.fail("config_groups with scales by block and others, or several blocks: one kind for all is read")
    block, zeros = next(iter(forms), (None, False))
    return Quantisation("compressed-tensors", activations=activations, block=block, code=code, scale=scale, zeros=zeros)


def _sharing(weights: ConfigFields, strategy: str, only: int | None) -> tuple[int, int] | None:
    """The rows and columns that share a scale; None: a row or all. only: the one size of a group."""
    if strategy == "block":
        return _block(weights, "block_structure")
    if not strategy.endswith("group"):
        return None
    size = weights.integer("group_size")
    if size != (only or size) or size < 8 or size & (size - 1):
        raise weights.fail(f"group_size={size} is not read; {only or 'a power of two from 8 on'} is")
    return 1, size
