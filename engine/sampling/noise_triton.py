"""The noise of sampling over a vocabulary shard, drawn and maximised in one Triton kernel, never written to memory. The
bits of engine/sampling/philox.py and engine/sampling/noise.c: IEEE operations in one order, never contracted. Importing
this needs Triton: engine/sampling/logits_shard.py does so when the logits are on a GPU.
"""

# Triton takes annotations of kernels for types of its own: there are none for others.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

jit: Any = triton.jit

BLOCK = 1024
"""Columns of one program."""
EXACT = {"enable_fp_fusion": False}
"""A contracted product and sum rounds once where the definition rounds twice."""

_M0: Any = tl.constexpr(0xD2511F53)
_M1: Any = tl.constexpr(0xCD9E8D57)
_W0: Any = tl.constexpr(0x9E3779B9)
_W1: Any = tl.constexpr(0xBB67AE85)
_LN2: Any = tl.constexpr(0.6931471805599453)
_ROOT_HALF: Any = tl.constexpr(0x3FE6A09E667F3BCD)
_ONE: Any = tl.constexpr(0x3FF0000000000000)


@jit
def _logarithm(x):
    bits = x.to(tl.int64, bitcast=True)
    k = (bits - _ROOT_HALF) >> 52
    f = (bits - (k << 52)).to(tl.float64, bitcast=True) - 1.0
    s = f / (f + 2.0)
    q = s * s
    p = q * (1.0 / 19.0) + 1.0 / 17.0
    for odd in tl.static_range(15, 0, -2):
        p = p * q + 1.0 / odd
    return k.to(tl.float64) * _LN2 + s * 2.0 * p


@jit
def _gumbel(seed, position, choice, ids):
    """philox.gumbel: scalars of 64 bits, ids uint32 [columns] -> float64 [columns]."""
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    c1 = ids
    c0 = (ids * 0 + position.to(tl.uint32)).to(tl.uint32)
    c2 = (ids * 0 + choice.to(tl.uint32)).to(tl.uint32)
    c3 = (ids * 0).to(tl.uint32)
    for _ in tl.static_range(10):
        high0, low0 = tl.umulhi(c0, _M0), c0 * _M0
        high1, low1 = tl.umulhi(c2, _M1), c2 * _M1
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + _W0, k1 + _W1
    bits = (c0.to(tl.uint64) << 20) | (c1.to(tl.uint64) >> 12) | _ONE
    uniform = (bits.to(tl.float64, bitcast=True) - 1.0) + 1.1102230246251565e-16
    return -_logarithm(-_logarithm(uniform))


@jit(
    do_not_specialize=["count"]
)  # else batches of 1 and of multiples of 16 compile kernels of their own, after warm-up
def scan(x, stride, rows, scales, best, at, columns, first, count, BLOCK: tl.constexpr):
    """Program (r, b): the best of row r's columns [b * BLOCK, (b + 1) * BLOCK), noise added, and its column, the first
    of equals; NaN if one of them is. rows: seed, position and choice, int64 [3, count]; scales float64 [count]."""
    row, block = tl.program_id(0), tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    logits = tl.load(x + row.to(tl.int64) * stride + column, inside, other=float("-inf")).to(tl.float64)
    seed, position = tl.load(rows + row), tl.load(rows + count + row)
    choice, scale = tl.load(rows + 2 * count + row), tl.load(scales + row)
    noise = _gumbel(seed, position, choice, (column + first).to(tl.uint32))
    score = logits * scale + noise
    broken = tl.max((inside & (score != score)).to(tl.int32), 0)
    value, where = tl.max(
        tl.where(inside & (score == score), score, float("-inf")),
        0,
        return_indices=True,
        return_indices_tie_break_left=True,
    )
    out = row * tl.num_programs(1) + block
    tl.store(best + out, tl.where(broken > 0, float("nan"), value))
    tl.store(at + out, block * BLOCK + where)


def noisiest(x: Tensor, scale: Tensor, rows: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """x fp32 [R, n] whose column 0 is the global id `first`, scale float64 [R], rows int64 [3, R] of seeds, positions
    and choices -> (max over columns of x * scale + Gumbel, float64 [R]; its column, the first of equals, [R]). NaN
    where a row has one."""
    count, columns = x.shape
    blocks = triton.cdiv(columns, BLOCK)
    best = torch.empty((count, blocks), dtype=torch.float64, device=x.device)
    at = torch.empty((count, blocks), dtype=torch.int64, device=x.device)
    scan[(count, blocks)](x, x.stride(0), rows, scale, best, at, columns, first, count, BLOCK=BLOCK, **EXACT)
    value, block = best.max(1)
    return value, at.gather(1, block[:, None])[:, 0]
