"""Digests of rows, to compare results bit for bit; not against an attacker who constructs a collision."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Digests = npt.NDArray[np.uint64]

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_ROUNDS = ((30, 0xBF58476D1CE4E5B9 - (1 << 64)), (27, 0x94D049BB133111EB - (1 << 64)))
"""Shifts and factors of splitmix64 (Steele, Lea, Flood, 2014), as signed integers."""
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)


def row_digests(x: Tensor, first: int = 0) -> Digests:
    """64 bits for each row of x [T, C], any float type: the sum, modulo 2^64, of a mix of every value's bits and its
    column. `first`: the column of x[:, 0]; so the digests of parts of a row add up to that of the whole."""
    columns = torch.arange(first + 1, first + 1 + x.shape[1], device=x.device, dtype=torch.int64)
    mixed = (x.contiguous().view(_BITS[x.element_size()]).long() & 0xFFFFFFFF) + columns * _GOLDEN
    for shift, factor in _ROUNDS:
        mixed = (mixed ^ (mixed >> shift & (1 << 64 - shift) - 1)) * factor
    digests: Digests = (mixed ^ (mixed >> 31 & (1 << 33) - 1)).sum(1).cpu().numpy().view(np.uint64)
    return digests
