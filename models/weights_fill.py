"""One slice of a stored tensor into its rows of a parameter: weights_plan.py says which, readers.py reads."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from .checkpoint import CheckpointError, Stored, shown
from .readers import FP8, Reader
from .weights_plan import Fill, scale_of


def fill_target(reader: Reader, tensors: Mapping[str, Stored], fill: Fill, target: Tensor) -> None:
    """target: the fill's rows of its parameter. Raises CheckpointError."""
    if fill.tensor is None:
        target.zero_()
        return
    stored = tensors[fill.tensor]
    if fill.parameter.endswith("_scale"):
        _fill_scale(reader, stored, fill, target)
        return
    check_fits(stored, fill, target)
    reader.read(stored, fill.source_row, fill.source_col, target, widening(reader, tensors, fill, target))


def check_fits(stored: Stored, fill: Fill, target: Tensor) -> None:
    """Raises CheckpointError unless the tensor holds the fill's rows and the target as many columns."""
    rows, columns = stored.shape[0], fill.columns or (stored.shape[1] if len(stored.shape) == 2 else 1)
    if fill.source_row + fill.count > rows or (target.ndim == 2 and target.shape[1] != columns):
        raise CheckpointError(
            f"{stored.file}: tensor {shown(stored.name)} {stored.shape} does not hold rows {fill.source_row} to "
            f"{fill.source_row + fill.count} of {fill.parameter} {tuple(target.shape)}"
        )


def widening(reader: Reader, tensors: Mapping[str, Stored], fill: Fill, target: Tensor) -> Tensor | None:
    """What multiplies the fill's rows where an fp8 tensor is widened: one number, or one a row; None elsewhere."""
    if fill.tensor is None or tensors[fill.tensor].dtype != "F8_E4M3" or target.dtype == FP8:
        return None
    scale = reader.whole(tensors[scale_of(fill.tensor)]).view(-1)
    return scale if scale.numel() == 1 else scale[fill.source_row : fill.source_row + fill.count]


def _fill_scale(reader: Reader, stored: Stored, fill: Fill, target: Tensor) -> None:
    values = reader.whole(stored).view(-1).float()
    target.copy_(values if values.numel() == 1 else values[fill.source_row : fill.source_row + fill.count])
