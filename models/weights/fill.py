"""Reads one slice of a stored tensor into rows of a parameter: slices.py plans it, tensor_reader.py reads the bytes."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor

from .checkpoint import CheckpointError, StoredTensor, shown
from .quantised import is_quantised, is_scale, scale_of, scale_rows, scaled_by
from .slices import Fill
from .tensor_reader import DTYPES, Reader


def fill_target(reader: Reader, tensors: Mapping[str, StoredTensor], fill: Fill, target: Tensor) -> None:
    """Reads a fill. target: its rows of the parameter. Raises CheckpointError."""
    if fill.tensor is None:
        target.zero_()
        return
    stored = tensors[fill.tensor]
    if is_scale(fill.parameter):
        _fill_scale(reader, tensors, fill, target)
        return
    shape = stored.shape[::-1] if fill.transposed else stored.shape
    rows, columns = shape[0], fill.columns or (shape[1] if len(shape) == 2 else 1)
    if fill.source_row + fill.count > rows or (target.ndim == 2 and target.shape[1] != columns):
        raise CheckpointError(
            f"{stored.file}: tensor {shown(stored.name)} {stored.shape} does not hold rows {fill.source_row} to "
            f"{fill.source_row + fill.count} of {fill.parameter} {tuple(target.shape)}"
        )
    scale = None
    if is_quantised(stored) and target.dtype != DTYPES[stored.dtype]:
        scale = _scale(reader, tensors[scale_of(fill.tensor)], fill, range(fill.source_col, fill.source_col + columns))
    if not fill.pairs and not fill.transposed:
        reader.read(stored, fill.source_row, fill.source_col, target, scale)
        return
    if fill.transposed:
        read = target.new_empty((columns, fill.count))
        reader.read(stored, fill.source_col, fill.source_row, read)
        read = read.T
    else:
        read = torch.empty_like(target)
        reader.read(stored, fill.source_row, fill.source_col, read, scale)
    if fill.pairs:
        read = read.reshape(-1, fill.pairs // 2, 2, columns).transpose(1, 2).reshape(target.shape)
    target.copy_(read)


def _fill_scale(reader: Reader, tensors: Mapping[str, StoredTensor], fill: Fill, target: Tensor) -> None:
    """Reads scales into target: [n], or for experts [n, scales a row]."""
    assert fill.tensor is not None
    columns = fill.columns or tensors[scaled_by(fill.tensor)].shape[1]
    step = columns // target.shape[1] if target.ndim == 2 else columns
    scale = _scale(reader, tensors[fill.tensor], fill, range(fill.source_col, fill.source_col + columns, step))
    target.copy_(scale if scale.ndim == target.ndim else scale.view(-1, 1))


def _scale(reader: Reader, stored: StoredTensor, fill: Fill, columns: range) -> Tensor:
    """The scale of a fill: one number, one a row, or one for each row and each of `columns`."""
    row, block = fill.source_row, stored.block
    if block is None or prod(stored.shape) == 1:
        return scale_rows(reader.whole(stored), row, fill.count)
    first, end = row // block[0], -(-(row + fill.count) // block[0])
    values = torch.empty((end - first, stored.shape[1]), dtype=DTYPES[stored.dtype])
    reader.read(stored, first, 0, values)
    top = torch.arange(row, row + fill.count) // block[0] - first
    left = torch.tensor(columns) // block[1]
    return values.float().index_select(1, left).index_select(0, top)
