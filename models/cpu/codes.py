"""Packs quantised matrices for models/cpu/products_packed.h."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..packed import Packed
from .kernels import FORMS, ROWS, TYPES, Kernels


class PackedCodes(NamedTuple):
    """Addresses of a packed matrix's parts, and what they are (struct product in kernels.h)."""

    codes: int
    scale: int
    zero: int | None
    group: int
    form: int
    scale_type: int


def packed_size(weight: Packed, gated: bool) -> int:
    """Bytes of the packed matrix [rows, columns]."""
    return sum(_rows(len(weight.codes), gated) * size for size in _sizes(weight))


def pack_codes(kernels: Kernels, address: int, weight: Packed, gated: bool, filled: bool = False) -> PackedCodes:
    """Packs a matrix [rows, columns] to `address`, unless that is already filled."""
    places, rows = [address], _rows(len(weight.codes), gated)
    for size in _sizes(weight)[:-1]:
        places.append(places[-1] + rows * size)
    if not filled:
        codes, scale = weight.codes.view(torch.uint8).contiguous(), weight.scale.contiguous()
        if weight.code == "int4":
            codes = codes ^ 0x88
        elif weight.code == "e4m3":
            scale = _poisoned(codes, scale) * 256
        kernels.pack(places[0], codes, gated, unit=1 if weight.code == "e4m3" else 4)
        kernels.pack(places[1], scale, gated, unit=scale.element_size())
        if weight.zero is not None:
            kernels.pack(places[2], weight.zero.contiguous(), gated, unit=1)
    zero = None if weight.zero is None else places[2]
    return PackedCodes(places[0], places[1], zero, weight.width, FORMS[weight.code], TYPES[weight.scale.dtype])


def _rows(rows: int, gated: bool) -> int:
    """Whole blocks' rows; a block of a gated matrix has as many of gate and up."""
    return -(-rows // ROWS) * ROWS if not gated else -(-rows // 2 // (ROWS // 2)) * ROWS


def _sizes(weight: Packed) -> tuple[int, ...]:
    """Bytes of a row's codes, scales and zero points."""
    scales = weight.scale.shape[-1]
    return weight.codes.shape[-1], scales * weight.scale.element_size(), 0 if weight.zero is None else scales


def _poisoned(codes: Tensor, scale: Tensor) -> Tensor:
    """NaN for groups that have a NaN, which the kernel would widen to a number."""
    bad = ((codes & 0x7F) == 0x7F).view(*scale.shape, -1).any(-1)
    return scale.masked_fill(bad, torch.nan)
