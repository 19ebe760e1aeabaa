"""Reads one slice of a stored tensor into rows of a parameter: slices.py plans it, tensor_reader.py reads the bytes."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor

from .checkpoint import CheckpointError, StoredTensor, shown
from .quantised import is_quantised, is_scale, scale_of, scale_rows, scaled_by, zero_of
from .slices import Fill
from .tensor_reader import DTYPES, Reader, widened


def fill_target(reader: Reader, tensors: Mapping[str, StoredTensor], fill: Fill, target: Tensor) -> None:
    """Reads a fill. target: its rows of the parameter. Raises CheckpointError."""
    if fill.tensor is None:
        target.zero_()
        return
    read = _read_scale if is_scale(fill.parameter) else _read_weight
    if not fill.pairs:
        read(reader, tensors, fill, fill.tensor, target)
        return
    neighbours = torch.empty_like(target)
    read(reader, tensors, fill, fill.tensor, neighbours)
    heads = neighbours.view(-1, fill.pairs // 2, 2, *target.shape[1:])
    target.copy_(heads.transpose(1, 2).reshape(target.shape))


def _read_weight(reader: Reader, tensors: Mapping[str, StoredTensor], fill: Fill, name: str, target: Tensor) -> None:
    """Reads a fill without regard to `pairs`: codes as stored if that is target's type, else widened."""
    stored = tensors[name]
    transposed = fill.transposed and stored.code is None
    shape = stored.shape[::-1] if transposed else stored.shape
    per_byte, as_stored = stored.per_byte, target.dtype == DTYPES[stored.dtype]
    rows, columns = shape[0], fill.columns or (shape[1] * per_byte if len(shape) == 2 else 1)
    width = columns // per_byte if as_stored else columns
    if fill.source_row + fill.count > rows or (target.ndim == 2 and target.shape[1] != width):
        raise CheckpointError(
            f"{stored.file}: tensor {shown(stored.name)} {stored.shape} does not hold rows {fill.source_row} to "
            f"{fill.source_row + fill.count} of {fill.parameter} {tuple(target.shape)}"
        )
    first, end = fill.source_col, fill.source_col + columns
    if transposed:
        turned = target.new_empty((columns, fill.count))
        reader.read(stored, first, fill.source_row, turned)
        target.copy_(turned.T)
        return
    if as_stored or not is_quantised(stored):
        reader.read(stored, fill.source_row, first // per_byte, target)
        return
    scale = _factors(reader, tensors, name, fill, range(first, end))
    if stored.code is None:
        reader.read(stored, fill.source_row, first, target, scale)
        return
    begin = first // per_byte * per_byte
    codes = torch.empty((fill.count, -(-(end - begin) // per_byte)), dtype=torch.uint8)
    reader.read(stored, fill.source_row, begin // per_byte, codes)
    values = widened(codes, torch.ones(1), stored.code)[:, first - begin : end - begin]
    if zero_of(name) in tensors:
        values = values - _scale(reader, tensors[zero_of(name)], fill, range(first, end))
    target.copy_(values * (scale if scale.ndim == 2 else scale.view(-1, 1)))


def _read_scale(reader: Reader, tensors: Mapping[str, StoredTensor], fill: Fill, name: str, target: Tensor) -> None:
    """Reads scales or zero points into target [n, scales a row], in its type."""
    weight = tensors[scaled_by(name)]
    columns = fill.columns or weight.shape[1] * weight.per_byte
    step = columns // target.shape[1]
    places = range(fill.source_col, fill.source_col + columns, step)
    if name == zero_of(weight.name):
        scale = _scale(reader, tensors[name], fill, places)
    else:
        scale = _factors(reader, tensors, weight.name, fill, places)
    target.copy_(scale if scale.ndim == 2 else scale.view(-1, 1))


def _factors(reader: Reader, tensors: Mapping[str, StoredTensor], name: str, fill: Fill, columns: range) -> Tensor:
    """The scale of a fill of tensor `name`, as _scale returns it, divided by a global scale. Raises CheckpointError for
    one that is not finite and above 0, or a stored shape that is not the matrix's."""
    weight, stored = tensors[name], tensors[scale_of(name)]
    if stored.declared is not None:
        says, shape = reader.whole(stored.declared).tolist(), [weight.shape[0], weight.shape[1] * weight.per_byte]
        if says != shape:
            raise CheckpointError(
                f"{stored.file}: tensor {shown(stored.declared.name)} says {says}, config.json and the packed tensors "
                f"say {shape}: fetch the file again"
            )
    scale = _scale(reader, stored, fill, columns)
    if stored.divisor is not None:
        scale = scale / _positive(stored.divisor, reader.whole(stored.divisor).float())
    return _positive(stored, scale, some_zero=weight.code == "e2m1")


def _positive(stored: StoredTensor, scale: Tensor, some_zero: bool = False) -> Tensor:
    """The scale. some_zero: NVFP4 rounds the smallest ones to 0."""
    least, most = scale.aminmax()
    if not 0 <= least <= most < torch.inf or (most if some_zero else least) == 0:
        raise CheckpointError(
            f"{stored.file}: tensor {shown(stored.name)} has scales from {least:g} to {most:g}, which must be above 0 "
            "and finite: fetch the file again"
        )
    return scale


def _scale(reader: Reader, stored: StoredTensor, fill: Fill, columns: range) -> Tensor:
    """The scale, or zero points, of a fill: one number, one a row, or one for each row and each of `columns`."""
    row, block = fill.source_row, stored.block
    if block is None or prod(stored.shape) == 1:
        return scale_rows(reader.whole(stored), row, fill.count)
    height = 8 if stored.dtype == "I32" else block[0]  # zero points are packed along the rows
    first, end = row // height, -(-(row + fill.count) // height)
    values = torch.empty((end - first, stored.shape[1]), dtype=DTYPES[stored.dtype])
    reader.read(stored, first, 0, values)
    values = values.index_select(1, torch.tensor(columns) // block[1])
    rows = torch.arange(row, row + fill.count)
    if stored.dtype == "I32":
        words = values.index_select(0, rows // 8 - first)
        return ((words >> (rows % 8 * 4)[:, None]) & 15).float() - 8.0
    return values.float().index_select(0, rows // height - first)
