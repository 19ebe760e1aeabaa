"""Quantised weights of a checkpoint: fp8 with a scale for each tensor, row or block, and 4-bit codes with one for each
group of columns. Names and shapes of scales, and the parameters of products that stay quantised. Without torch:
tensor_reader.py widens rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence, Set
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from ..config.quantisation import Quantisation, scale_shape, scale_width
from .checkpoint import CheckpointError, StoredTensor

if TYPE_CHECKING:
    from torch import Tensor

    from .slices import Fill

PLAIN = ("F32", "BF16", "F16")
READABLE = f"{', '.join(PLAIN)}, and F8_E4M3 or packed matrices where config.json has a quantization_config"
DEPTH = 64
"""Columns that the kernels on GPUs multiply at once."""
WORD = 8
"""Columns that the kernels on CPUs widen at once, and the fewest that may share a scale."""
CALIBRATION = re.compile(
    r".*(\.(input|output)_(scale|global_scale|zero_point|scale_ub)|\.[qkv]_(scale|zero_point)|_proj\.weight_scale_ub)"
)
"""Calibrated scales: those of activations are ignored, which are not quantised or scaled per token; those of keys and
values are read by kv_scales.py."""


def is_quantised(stored: StoredTensor) -> bool:
    return stored.dtype == "F8_E4M3" or stored.per_byte > 1


def scale_of(tensor: str) -> str:
    """The name of the scale of a quantised tensor or parameter."""
    return f"{tensor}_scale"


def zero_of(tensor: str) -> str:
    """The name of the zero points that belong to scales."""
    return f"{tensor}_zero"


def scaled_by(scale: str) -> str:
    """The name of the tensor to which scales or zero points belong."""
    return scale.rpartition("_")[0]


def is_scale(parameter: str) -> bool:
    """Whether a parameter is of scales or zero points."""
    return parameter.endswith((scale_of(""), zero_of("")))


_SCALES = {"e8m0": ("U8", "F8_E8M0"), "e4m3": ("F8_E4M3",)}
"""Types of scales that are no plain numbers."""


def describe_packed(tensors: dict[str, StoredTensor], name: str, shape: tuple[int, ...], q: Quantisation) -> set[str]:
    """Describes 4-bit codes as a matrix `name` [out, in / 2] of bytes, with its scales and zero points. Returns the
    names of all tensors that belong to it; none if it is not packed. Raises CheckpointError, which names the tensor,
    its type and shape, and those that are read."""
    if (described := tensors.get(name)) is not None and described.code is not None:  # by describe_blocks
        return {name, scale_of(name)}
    module = name.removesuffix("weight")
    packed = tensors.get(f"{module}weight_packed")
    if packed is None or name in tensors or q.per_byte == 1 or len(shape) != 2:
        return set()
    (rows, columns), group = shape, shape[1] if q.block is None else q.block[1]
    if columns % group or columns % 8:
        raise CheckpointError(
            f"{packed.file}: tensor {packed.name}: {columns} columns % {group} = {columns % group}, % 8 = "
            f"{columns % 8}: only whole groups, and whole words of 8 codes, are read"
        )

    def part(leaf: str, types: tuple[str, ...], *shapes: tuple[int, ...]) -> StoredTensor:
        stored = tensors.get(f"{module}{leaf}")
        if stored is None:
            raise CheckpointError(f"{packed.file}: tensor {packed.name} is {q.title} without {module}{leaf}")
        if stored.dtype not in types or stored.shape not in shapes:
            raise CheckpointError(
                f"{stored.file}: tensor {stored.name} is {stored.dtype} {stored.shape}; {q.title} with {columns} "
                f"columns in groups of {group} has {' or '.join(types)} {shapes[0]}"
            )
        return stored

    codes = part(
        "weight_packed", *(("I32",), (rows, columns // 8)) if q.code == "int4" else (("U8",), (rows, columns // 2))
    )
    scale = part("weight_scale", _SCALES.get(q.scale, PLAIN), (rows, columns // group))
    used = {name, scale.name}
    if q.scale == "e8m0":
        scale = replace(scale, dtype="F8_E8M0")
    elif q.scale == "e4m3":
        scale = replace(scale, divisor=part("weight_global_scale", ("F32",), (1,), ()))
        used.add(f"{module}weight_global_scale")
    if q.zeros:
        zero = part("weight_zero_point", ("I32",), (-(-rows // 8), columns // group))
        tensors[zero_of(name)] = replace(tensors.pop(zero.name), name=zero_of(name), block=(1, group))
        used.add(zero_of(name))
    if f"{module}weight_shape" in tensors:
        scale = replace(scale, declared=part("weight_shape", ("I64", "I32"), (2,)))
        used.add(f"{module}weight_shape")
    tensors[name] = replace(codes, name=name, dtype="U8", shape=(rows, columns // 2), code=q.code)
    tensors[scale.name] = replace(scale, block=(1, group))
    del tensors[codes.name]
    return used


def describe_blocks(
    tensors: dict[str, StoredTensor], fused: str, names: Sequence[str], shape: tuple[int, ...], q: Quantisation | None
) -> bool:
    """Describes a layer's experts in gpt-oss's MXFP4, `fused`_blocks [E, out, groups, bytes] and `fused`_scales
    [E, out, groups], as a matrix of codes [out, in / 2] and its scales for each of `names`; shape: [in, out]. Returns
    whether there are any. Raises CheckpointError, as describe_packed does."""
    blocks, scales = tensors.get(f"{fused}_blocks"), tensors.get(f"{fused}_scales")
    if blocks is None or len(shape) != 2:
        return False
    if q is None or q.block is None or q.method != "mxfp4":
        raise CheckpointError(
            f"{blocks.file}: tensor {blocks.name} is MXFP4, and config.json has no quantization_config of quant_method "
            "mxfp4: restore the published one"
        )
    if scales is None:
        raise CheckpointError(f"{blocks.file}: tensor {blocks.name} is MXFP4 without {fused}_scales")
    (columns, rows), group = shape, q.block[1]
    if columns % group:
        raise CheckpointError(
            f"{blocks.file}: tensor {blocks.name}: {columns} columns % {group} = {columns % group}: only whole groups "
            "are read"
        )
    groups = (len(names), rows, columns // group)
    for stored, expected in ((blocks, (*groups, group // 2)), (scales, groups)):
        if stored.dtype != "U8" or stored.shape != expected:
            raise CheckpointError(
                f"{stored.file}: tensor {stored.name} is {stored.dtype} {stored.shape}; MXFP4 with {columns} columns "
                f"in groups of {group} has U8 {expected}"
            )
        del tensors[stored.name]
    for name, part in zip(names, divided(blocks, names, (rows, columns // 2)), strict=True):
        tensors[name] = replace(part, code=q.code)
    for part in divided(scales, [scale_of(name) for name in names], groups[1:]):
        tensors[part.name] = replace(part, dtype="F8_E8M0", block=(1, group))
    return True


def divided(stored: StoredTensor, names: Sequence[str], shape: tuple[int, ...]) -> list[StoredTensor]:
    """The equal parts of a tensor, which follow one another."""
    size = (stored.end - stored.begin) // len(names)
    begins = (stored.begin + number * size for number in range(len(names)))
    return [
        replace(stored, name=name, shape=shape, begin=begin, end=begin + size)
        for name, begin in zip(names, begins, strict=True)
    ]


def check_scale(stored: StoredTensor, scale: StoredTensor | None, block: tuple[int, int] | None = None) -> str:
    """Checks the shape of a tensor's scale: one number, one a row, or one a block. Returns its name. Raises
    CheckpointError."""
    if scale is None:
        raise CheckpointError(
            f"{stored.file}: tensor {stored.name} is fp8 without {scale_of(stored.name)}: its scale is missing"
        )
    rows, columns = stored.shape
    read: tuple[tuple[int, ...], ...] = ((), (1,), (rows,), (rows, 1))
    if block is not None:
        read = ((), (1,), (-(-rows // block[0]), -(-columns // block[1])))
    if scale.shape not in read or scale.dtype not in (*PLAIN, "F8_E8M0"):
        raise CheckpointError(
            f"{scale.file}: tensor {scale.name} is {scale.dtype} {scale.shape}; one number or {read[-1]} is read"
        )
    return scale.name


def is_expert(product: str) -> bool:
    """Whether a product ("layers.3.experts.down") belongs to experts that tokens choose."""
    return "experts." in product and "shared" not in product


def may_stay(columns: int, q: Quantisation, step: int) -> bool:
    """Whether a product of `columns` columns may stay quantised for a kernel that multiplies `step` columns at once:
    each group of columns must be a part or a multiple of a step."""
    width = scale_width(columns, q.block)
    if columns % q.per_byte or (q.block is not None and width < WORD):
        return False
    return width == columns or width % step == 0 or step % width == 0


def kept_bytes(shape: tuple[int, ...], q: Quantisation) -> int:
    """Bytes of a quantised product [rows, columns]: its codes, scales and zero points."""
    return prod(shape) // q.per_byte + q.scale_bytes * prod(scale_shape(shape, q.block))


def scale_fills(fills: Iterable[Fill], quantised: Set[str], zeros: bool = False) -> list[Fill]:
    """Fills for the scales and zero points of the products in `quantised` ("layers.3.gate_up"), which stay
    quantised."""
    return [
        replace(fill, parameter=name(fill.parameter), tensor=name(fill.tensor))
        for name in (scale_of, zero_of)[: 1 + zeros]
        for fill in fills
        if fill.tensor is not None and fill.parameter.removesuffix(".weight") in quantised
    ]


def scale_rows(scale: Tensor, row: int, count: int) -> Tensor:
    """The scale of rows [row, row + count) in fp32: one number for all, or one a row."""
    values = scale.view(-1).float()
    return values if values.numel() == 1 else values[row : row + count]
