"""Weights that a checkpoint stores quantised: fp8 with a scale a tensor, a row or a block. What their scales are called
and look like, which parameters a kept product has. No torch: tensor_reader.py widens rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Set
from dataclasses import replace
from typing import TYPE_CHECKING

from .checkpoint import CheckpointError, StoredTensor

if TYPE_CHECKING:
    from torch import Tensor

    from .slices import Fill

PLAIN = ("F32", "BF16", "F16")
READABLE = f"{', '.join(PLAIN)}, and F8_E4M3 matrices where config.json has a quantization_config"
CALIBRATION = re.compile(r".*(\.input_scale|\.input_scale_ub|\.output_scale|\.[qkv]_scale|_proj\.weight_scale_ub)")
"""Ignored tensors of fp8 checkpoints: activations are scaled per token here, and keys and values by the cache."""


def is_quantised(stored: StoredTensor) -> bool:
    return stored.dtype == "F8_E4M3"


def scale_of(tensor: str) -> str:
    """The name of a quantised tensor's scale, stored or a parameter."""
    return f"{tensor}_scale"


def is_scale(parameter: str) -> bool:
    return parameter.endswith("_scale")


def check_scale(stored: StoredTensor, scale: StoredTensor | None, block: tuple[int, int] | None = None) -> str:
    """The scale's name, once it fits its tensor: one number, one a row, or one a block. Raises CheckpointError."""
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


def scale_fills(fills: Iterable[Fill], kept: Set[str]) -> list[Fill]:
    """What fills the scales of products that stay quantised ("layers.3.gate_up"): one fp32 number a row."""
    return [
        replace(fill, parameter=scale_of(fill.parameter), tensor=scale_of(fill.tensor), source_col=0, columns=None)
        for fill in fills
        if fill.tensor is not None and fill.parameter.removesuffix(".weight") in kept
    ]


def scale_rows(scale: Tensor, row: int, count: int) -> Tensor:
    """fp32, of rows [row, row + count): one number for all of them, or one each."""
    values = scale.view(-1).float()
    return values if values.numel() == 1 else values[row : row + count]


def scale_blocks(scale: Tensor, block: tuple[int, int], rows: range, columns: range) -> Tensor:
    """fp32 [rows, columns]: of those elements of a tensor whose blocks have one each."""
    spread = scale.float()[rows.start // block[0] : -(-rows.stop // block[0])]
    spread = spread[:, columns.start // block[1] : -(-columns.stop // block[1])]
    spread = spread.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    top, left = rows.start % block[0], columns.start % block[1]
    return spread[top : top + len(rows), left : left + len(columns)]
