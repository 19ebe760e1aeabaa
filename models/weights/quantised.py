"""Quantised weights of a checkpoint: fp8 with a scale for each tensor, row or block. Names and shapes of scales, and
the parameters of products that stay quantised. Without torch: tensor_reader.py widens rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Set
from dataclasses import replace
from math import gcd, prod
from typing import TYPE_CHECKING

from .checkpoint import CheckpointError, StoredTensor

if TYPE_CHECKING:
    from torch import Tensor

    from .slices import Fill

PLAIN = ("F32", "BF16", "F16")
READABLE = f"{', '.join(PLAIN)}, and F8_E4M3 matrices where config.json has a quantization_config"
EXPERT_DEPTH = 64
"""Columns that the expert kernels on GPUs multiply at once."""
CALIBRATION = re.compile(r".*(\.input_scale|\.input_scale_ub|\.output_scale|\.[qkv]_scale|_proj\.weight_scale_ub)")
"""Ignored tensors of fp8 checkpoints: activations are scaled per token, and KV by the cache."""


def is_quantised(stored: StoredTensor) -> bool:
    return stored.dtype == "F8_E4M3"


def scale_of(tensor: str) -> str:
    """The name of the scale of a quantised tensor or parameter."""
    return f"{tensor}_scale"


def scaled_by(scale: str) -> str:
    """The name of the tensor to which a scale belongs."""
    return scale.removesuffix(scale_of(""))


def is_scale(parameter: str) -> bool:
    return parameter.endswith("_scale")


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
    if scale.shape not in read or scale.dtype not in PLAIN:
        raise CheckpointError(
            f"{scale.file}: tensor {scale.name} is {scale.dtype} {scale.shape}; one number or {read[-1]} is read"
        )
    return scale.name


def is_expert(product: str) -> bool:
    """Whether a product ("layers.3.experts.down") belongs to experts."""
    return "experts." in product


def scale_width(columns: int, block: tuple[int, int] | None) -> int:
    """The number of columns of an expert's matrix that share a scale on a rank, chosen so that none of these groups
    crosses a block of the checkpoint."""
    return columns if block is None else gcd(columns, block[1])


def may_stay(columns: int, block: tuple[int, int] | None) -> bool:
    """Whether experts' products of `columns` columns may stay quantised: a kernel's step needs one scale a row."""
    return block is None or scale_width(columns, block) % EXPERT_DEPTH == 0


def scale_shape(product: str, shape: tuple[int, ...], block: tuple[int, int] | None) -> tuple[int, ...]:
    """Shape of a quantised product's fp32 scales: one a row; for experts one a row and `scale_width` columns."""
    return (shape[0], shape[1] // scale_width(shape[1], block)) if is_expert(product) else (shape[0],)


def kept_bytes(product: str, shape: tuple[int, ...], block: tuple[int, int] | None) -> int:
    """Bytes of a quantised product's weights and scales."""
    return prod(shape) + 4 * prod(scale_shape(product, shape, block))


def scale_fills(fills: Iterable[Fill], quantised: Set[str]) -> list[Fill]:
    """Fills for the scales of the products in `quantised` ("layers.3.gate_up"), which stay quantised."""
    of_products = []
    for fill in fills:
        product = fill.parameter.removesuffix(".weight")
        if fill.tensor is not None and product in quantised:
            scales = replace(fill, parameter=scale_of(fill.parameter), tensor=scale_of(fill.tensor))
            of_products.append(scales if is_expert(product) else replace(scales, source_col=0, columns=None))
    return of_products


def scale_rows(scale: Tensor, row: int, count: int) -> Tensor:
    """The scale of rows [row, row + count) in fp32: one number for all, or one a row."""
    values = scale.view(-1).float()
    return values if values.numel() == 1 else values[row : row + count]
