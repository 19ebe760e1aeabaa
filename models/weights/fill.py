"""One slice of a stored tensor into its rows of a parameter: slices.py says which, tensor_reader.py reads."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .checkpoint import CheckpointError, StoredTensor, shown
from .quantised import is_quantised, is_scale, scale_blocks, scale_of, scale_rows
from .slices import Fill
from .tensor_reader import DTYPES, Reader


def fill_target(reader: Reader, tensors: Mapping[str, StoredTensor], fill: Fill, target: Tensor) -> None:
    """target: the fill's rows of its parameter. Raises CheckpointError."""
    if fill.tensor is None:
        target.zero_()
        return
    stored = tensors[fill.tensor]
    if is_scale(fill.parameter):
        target.copy_(scale_rows(reader.whole(stored), fill.source_row, fill.count))
        return
    rows, columns = stored.shape[0], fill.columns or (stored.shape[1] if len(stored.shape) == 2 else 1)
    if fill.source_row + fill.count > rows or (target.ndim == 2 and target.shape[1] != columns):
        raise CheckpointError(
            f"{stored.file}: tensor {shown(stored.name)} {stored.shape} does not hold rows {fill.source_row} to "
            f"{fill.source_row + fill.count} of {fill.parameter} {tuple(target.shape)}"
        )
    scale = None
    if is_quantised(stored) and target.dtype != DTYPES[stored.dtype]:
        scale = _scale(reader, tensors[scale_of(fill.tensor)], fill, columns)
    if not fill.pairs:
        reader.read(stored, fill.source_row, fill.source_col, target, scale)
        return
    neighbours = torch.empty_like(target)
    reader.read(stored, fill.source_row, fill.source_col, neighbours, scale)
    heads = neighbours.view(-1, fill.pairs // 2, 2, columns)
    target.copy_(heads.transpose(1, 2).reshape(target.shape))


def _scale(reader: Reader, stored: StoredTensor, fill: Fill, columns: int) -> Tensor:
    """One number, one a row of the fill, or one an element."""
    values, row = reader.whole(stored), fill.source_row
    if stored.block is None or values.numel() == 1:
        return scale_rows(values, row, fill.count)
    wanted = range(row, row + fill.count), range(fill.source_col, fill.source_col + columns)
    return scale_blocks(values, stored.block, *wanted)
