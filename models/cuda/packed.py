"""Products with quantised weights by Triton kernels: codes are widened in registers. Equivalent to
TorchOps.packed_product (models/ops.py); models/cuda/experts.py uses the same widening. Importing this needs Triton.
"""

# NOTE: kernels have no annotations, because Triton interprets them as its own types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..packed import Packed
from ..weights.quantised import DEPTH

jit: Any = triton.jit
FULL: Any = (64, 64, 4)
"""Tokens and outputs that a program multiplies at once, and its warps."""
TILES = ((16, 32, 4), FULL, (128, 128, 8))


class Matrix(NamedTuple):
    """A kernel's arguments for a plain or quantised weight: pointers, scales a row, code."""

    weight: Tensor
    scale: Tensor
    zero: Tensor
    scales: int
    code: str

    @staticmethod
    def of(weight: Tensor | Packed) -> Matrix:
        if isinstance(weight, Tensor):
            return Matrix(weight, weight, weight, 0, "plain")
        zero, code = weight.zero, weight.code
        form = f"{code}, zeros" if zero is not None else code
        return Matrix(weight.codes, weight.scale, weight.scale if zero is None else zero, weight.scale.shape[-1], form)


@jit
def _values(codes, CODE: tl.constexpr):
    """The values of 4-bit codes in fp32."""
    if CODE == "e2m1":
        size = (codes & 7).to(tl.float32)  # 0, 1, 2, 3: halves; 4: 2, 5: 3, 6: 4, 7: 6
        size = tl.where(size < 4.0, size * 0.5, tl.where(size < 6.0, size - 2.0, size * 2.0 - 8.0))
        values = tl.where((codes & 8) > 0, -size, size)
    else:
        values = codes.to(tl.float32) - 8.0
    return values


@jit
def widened(
    weight, scale, zero, row, there, start, kind: tl.constexpr, WIDTH: tl.constexpr, SCALES: tl.constexpr,
    CODE: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Columns [start, start + DEPTH) of the rows `row` [COLUMNS] of a weight [.., WIDTH], transposed: [DEPTH, COLUMNS],
    with zeros where not `there`. Codes are multiplied by the row's SCALES; the bits equal those of widening while
    loading."""
    at = start + tl.arange(0, DEPTH)
    if SCALES == 0:
        inside = there[None, :] & (at < WIDTH)[:, None]
        tile = tl.load(weight + row[None, :] * WIDTH + at[:, None], inside, other=0.0)
    else:
        if CODE == "e4m3":
            inside = there[:, None] & (at < WIDTH)[None, :]
            values = tl.load(weight + row[:, None] * WIDTH + at[None, :], inside, other=0.0).to(tl.float32)
        else:
            byte = start // 2 + tl.arange(0, DEPTH // 2)
            inside = there[:, None] & (byte < WIDTH // 2)[None, :]
            codes = tl.load(weight + row[:, None] * (WIDTH // 2) + byte[None, :], inside, other=0)
            values = _values(tl.interleave(codes & 15, codes >> 4), CODE)
        EACH: tl.constexpr = WIDTH // SCALES
        GROUPS: tl.constexpr = 1 if EACH >= DEPTH else DEPTH // EACH
        group = start // EACH + tl.arange(0, GROUPS)
        places, exists = row[:, None] * SCALES + group[None, :], there[:, None] & (group < SCALES)[None, :]
        grouped = tl.reshape(values, (COLUMNS, GROUPS, DEPTH // GROUPS))
        if CODE == "int4, zeros":
            grouped -= tl.load(zero + places, exists, other=0).to(tl.float32)[:, :, None]
        grouped *= tl.load(scale + places, exists, other=0.0).to(tl.float32)[:, :, None]
        tile = tl.trans(tl.reshape(grouped, (COLUMNS, DEPTH)).to(kind))
    return tile


@partial(jit, do_not_specialize=["tokens"])
def packed_product(
    out, x, weight, scale, zero, tokens, outputs, x_row, INPUTS: tl.constexpr, SCALES: tl.constexpr,
    CODE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Program (t, o): tile (t, o) of x [T, INPUTS] @ weight [out, INPUTS].T, summed in fp32. x's row stride is x_row.
    The loop over inputs is the same for each token, regardless of T."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    here, there = row < tokens, column < outputs
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, INPUTS, DEPTH):
        at = start + tl.arange(0, DEPTH)
        a = tl.load(x + row[:, None] * x_row + at[None, :], here[:, None] & (at < INPUTS)[None, :], other=0.0)
        b = widened(weight, scale, zero, column, there, start, a.dtype, INPUTS, SCALES, CODE, COLUMNS, DEPTH)
        total = tl.dot(a, b, total, input_precision="ieee")
    to = out + row[:, None] * outputs + column[None, :]
    tl.store(to, total.to(out.dtype.element_ty), here[:, None] & there[None, :])


def packed_linear(x: Tensor, weight: Packed, bias: Tensor | None, by_row: bool = False) -> Tensor:
    """functional.linear of x [T, in] and a quantised weight [out, in]. by_row: one tile for any T, so that a row's bits
    do not depend on the other rows."""
    (tokens, inputs), outputs, m = x.shape, len(weight.codes), Matrix.of(weight)
    out = x.new_empty((tokens, outputs), dtype=x.dtype if bias is None else torch.float32)
    small = next((tile for tile in TILES if tokens <= tile[0]), TILES[-1])
    rows, columns, warps = FULL if by_row else small
    packed_product[(triton.cdiv(tokens, rows), triton.cdiv(outputs, columns))](
        out, x, m.weight, m.scale, m.zero, tokens, outputs, x.stride(0), INPUTS=inputs, SCALES=m.scales, CODE=m.code,
        ROWS=rows, COLUMNS=columns, DEPTH=DEPTH, num_warps=warps,
    )  # fmt: skip
    return out if bias is None else (out + bias).to(x.dtype)
