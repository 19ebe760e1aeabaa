"""Reads the quantisation in config.json, without torch: fp8 (E4M3) with one scale per tensor, output channel or block,
in FBGEMM's, compressed-tensors' and fp8's layouts, and 4-bit codes: INT4 (pack-quantized), NVFP4 and MXFP4 of
compressed-tensors, and gpt-oss's MXFP4. A key or value that is not read is an error, which names it, unless weights
mean the same without it. Activations are scaled per token, not by calibrated scales.
"""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import dataclass, replace
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
    float32; scales in e4m3 are divided by a global scale. `zeros`: whether a scale has a zero point. `unused`: parts of
    the config that only quantise activations, keys and values, and are not computed; results are more exact for it."""

    method: Method
    activations: bool = True
    activation_bound: float = math.inf
    block: tuple[int, int] | None = None
    code: Code = "e4m3"
    scale: ScaleType = "float32"
    zeros: bool = False
    unused: tuple[str, ...] = ()

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


_FREE = frozenset(
    (
        "quant_method", "version", "ignore", "ignored_layers", "modules_to_convert", "modules_to_not_convert",
        "global_compression_ratio", "run_compressed", "dequantize", "use_optimized_inference",
    )
)  # fmt: skip
"""Keys that do not change what stored tensors mean: the files say which matrices are quantised."""
_SEPARATE = {"hf_quant_config.json": "ModelOpt", "quantize_config.json": "GPTQ", "quant_config.json": "AWQ"}
"""Files of methods that do not need a quantization_config in config.json."""


def read_quantisation(folder: Path) -> Quantisation | None:
    """Reads the quantisation of a checkpoint; None if it has none. Raises FileNotFoundError, or ValueError, which names
    the unsupported key or file."""
    quantisation = quantisation_in(read_json(folder / "config.json"))
    for name, method in _SEPARATE.items() if quantisation is None else ():
        if (folder / name).exists():
            raise ValueError(
                f"{folder / name}: weights quantised by {method} are not read; {_OTHERS}. If the weights are not "
                "quantised, remove this file"
            )
    return quantisation


def quantisation_in(fields: ConfigFields) -> Quantisation | None:
    """Like read_quantisation, for a parsed config.json. Raises ValueError."""
    places = (fields, fields.object("text_config")) if "text_config" in fields else (fields,)
    configs = [p.object(k) for p in places for k in ("quantization_config", "compression_config") if k in p]
    for other in configs[1:]:
        if other.data != configs[0].data:
            raise other.fail(f"contradicts {configs[0].where}: keep the one that the files were written with")
    return _read(configs[0]) if configs else None


_OTHERS = (
    "fbgemm_fp8, fp8, compressed-tensors and mxfp4 are (use an engine made for it, a checkpoint of these forms, or the "
    "unquantised one)"
)


def _read(words: ConfigFields) -> Quantisation:
    implied = "compressed-tensors" if "config_groups" in words else ""
    if {"load_in_4bit", "load_in_8bit"} & words.data.keys():
        implied = "bitsandbytes"
    match words.string("quant_method", implied):
        case "fbgemm_fp8":
            _refuse_others(words, {"activation_scale_ub"})
            return Quantisation("fbgemm_fp8", activation_bound=words.number("activation_scale_ub", 1200.0))
        case "fp8":
            return _fp8(words)
        case "compressed-tensors":
            return _compressed_tensors(words)
        case "mxfp4":
            _refuse_others(words)
            return GPT_OSS
        case other:
            raise words.fail(f"quant_method {other!r} is not read; {_OTHERS}")


def _refuse_others(words: ConfigFields, read: Set[str] = frozenset()) -> None:
    """Raises ValueError for a key that is neither in `read` nor without effect, unless it says none, false or empty."""
    for key, value in words.data.items():
        if key not in read and key not in _FREE and value not in (None, False, "", [], {}):
            raise words.fail(
                f"{key} is not read: use an engine that does, or remove the key if the stored weights mean the same "
                "without it"
            )


def _choice(words: ConfigFields, key: str, *allowed: str) -> str:
    """The value of `key`; the first of `allowed` if it is not given."""
    if (value := words.string(key, allowed[0])) not in allowed:
        raise words.fail(f"{key}={value!r} is not read; {' and '.join(allowed)} {'is' if len(allowed) == 1 else 'are'}")
    return value


def _fp8(words: ConfigFields) -> Quantisation:
    _refuse_others(
        words, {"activation_scheme", "expert_dtype", "fmt", "kv_cache_scheme", "scale_fmt", "weight_block_size"}
    )
    _choice(words, "fmt", "e4m3", "float8_e4m3fn")
    _choice(words, "scale_fmt", "float", "ue8m0")
    _choice(words, "expert_dtype", "fp8")
    static = _choice(words, "activation_scheme", "dynamic", "static") == "static"
    unused = (_CALIBRATED,) * static + _cached(words)
    return Quantisation("fp8", block=_block(words, "weight_block_size"), unused=unused)


_CALIBRATED = "calibrated scales of activations (each token is scaled by its largest value)"


def _cached(words: ConfigFields) -> tuple[str, ...]:
    """The part of the config that quantises keys and values, if there is one."""
    if "kv_cache_scheme" not in words:
        return ()
    if not isinstance(words.data["kv_cache_scheme"], str):  # AutoFP8 writes "static"
        words.object("kv_cache_scheme")
    return ("kv_cache_scheme (engine.kv_cache_dtype determines the cache)",)


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
    read = {"config_groups", "format", "kv_cache_scheme", "quantization_status", "sparsity_config", "transform_config"}
    _refuse_others(words, read)
    status = words.string("quantization_status", "compressed")
    if status not in ("compressed", "frozen"):
        raise words.fail(
            f"quantization_status={status!r} is not read; compressed and frozen are (write the model again with "
            "save_compressed=True)"
        )
    sparse = words.object("sparsity_config") if words.data.get("sparsity_config") else None
    if sparse is not None and sparse.string("format") != "dense":
        raise words.fail("sparsity_config is not computed here; dense weights are")
    if "transform_config" in words and any(words.object("transform_config").data.values()):
        raise words.fail(
            "transform_config is not computed here: use a checkpoint whose rotations are multiplied into its weights"
        )
    mixed = words.data.get("format") == "mixed-precision"  # each group names its own
    default = "float-quantized" if mixed else _choice(words, "format", *_PACKED)
    groups = words.object("config_groups")
    parts = [_group(groups.object(name), default) for name in groups.data]
    forms = {replace(part, activations=True, unused=()) for part in parts}
    if len(forms) != 1:
        kinds = ", ".join(sorted({f"{form.title} with {form.block or 'row'} scales" for form in forms})) or "no weights"
        raise groups.fail(f"{kinds}: one kind for all weights is read; remove quantization_config if there is none")
    unused = dict.fromkeys((*(one for part in parts for one in part.unused), *_cached(words)))
    return replace(parts[0], activations=all(part.activations for part in parts), unused=(*unused,))


def _group(group: ConfigFields, default: str) -> Quantisation:
    """The interpretation of one of config_groups; default: the format of groups that name none."""
    _refuse_others(group, {"targets", "weights", "input_activations", "output_activations", "format"})
    code, expected, scale, strategies = _PACKED[_choice(group, "format", *_PACKED) if "format" in group else default]
    if "weights" not in group:
        raise group.fail("weights=null: a group that quantises activations alone is not read: remove it")
    weights = group.object("weights")
    _refuse_others(
        weights,
        {
            "num_bits", "type", "symmetric", "group_size", "strategy", "block_structure", "actorder", "scale_dtype",
            "zp_dtype", "observer", "observer_kwargs",
        },
    )  # fmt: skip
    kind, strategy = _kind(weights), weights.string("strategy")
    zeros = not weights.boolean("symmetric", True)
    if kind != expected or strategy not in strategies or (zeros and code != "int4"):
        raise weights.fail(
            f"{'asymmetric ' * zeros}{kind} by {strategy} is not read; {'' if code == 'int4' else 'symmetric '}"
            f"{expected} by {' or '.join(strategies)} is"
        )
    if str(order := weights.data.get("actorder")).lower() not in ("none", "false", "weight", "static"):
        raise weights.fail(f"actorder={order!r} (columns in the order of weight_g_idx) is not read; 'static' is")
    if zeros:
        _choice(weights, "zp_dtype", "torch.int8")
    unused = tuple(
        f"{key} ({_kind(group.object(key))})"
        for key in ("input_activations", "output_activations")
        if key in group and (key, code, _kind(group.object(key))) != ("input_activations", "e4m3", "8-bit float")
    )
    activations = "input_activations" in group and not any(one.startswith("input") for one in unused)
    if activations and group.object("input_activations").data.get("dynamic") is not True:
        unused = (_CALIBRATED, *unused)
    block = _sharing(weights, strategy, _GROUPS.get(scale))
    return Quantisation("compressed-tensors", activations, math.inf, block, code, scale, zeros, unused)


def _kind(args: ConfigFields) -> str:
    return f"{args.integer('num_bits')}-bit {args.string('type')}"


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
