"""The filters of sampling on a GPU without a sort: the last id that each keeps is found digit by digit. Logit and id
make one unique key of 52 bits in engine/sampling/decide.py's order (falling logit, rising id); top_k and top_p keep the
keys from the smallest one that fewer than k ids, or less than top_p of the mass, precede. One launch sums up four bits.
Importing this needs Triton: engine/sampling/device_rule.py does so where there is one.
"""

# Triton takes annotations of kernels for types of its own: there are none for others.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

jit: Any = triton.jit

LEVELS: Any = tl.constexpr(13)
"""Digits of a key: 32 bits of the logit, 20 of the id."""
_IDS: Any = tl.constexpr(1 << 20)
CHUNK = 8192
"""Columns of one program."""
TILE = 512
"""Columns at once: sixteen sums of each thread's stay in its registers."""


@jit
def _key(x, column):
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)  # -0 and +0 are one value
    ordered = tl.where(bits < 0, -1 - (bits & 0x7FFFFFFF), bits).to(tl.int64) + 0x80000000
    return ordered * _IDS + (_IDS - 1 - column)


@jit
def _search_state(level, first, state, sums, row, chunks, top_k, top_p, CHUNKS: tl.constexpr):
    """State of the search in row `row` after the levels from `first` to before `level`: the key's digits so far; the
    count or mass of all keys before those that begin with them; the count or mass from which keys are dropped; top_k's
    key, 0 until it is found. state [R, 4] and sums [R, chunks, 16] are the previous level's."""
    digit, chunk, at = tl.arange(0, 16), tl.arange(0, CHUNKS), state + row * 4
    prefix, before = tl.load(at).to(tl.int64), tl.load(at + 1)
    limit, floor = tl.load(at + 2), tl.load(at + 3).to(tl.int64)
    where = sums + (row * chunks + chunk[:, None]) * 16 + digit[None, :]
    totals = tl.sum(tl.load(where, (chunk < chunks)[:, None] & (digit < 16)[None, :], other=0.0), 0)
    if level == LEVELS + 1:
        limit = tl.where(top_p < 1.0, top_p * tl.sum(totals, 0), float("inf"))
    higher = digit[None, :] > digit[:, None]
    cumulative = before + tl.sum(tl.where(higher, totals[None, :], 0.0), 1)
    chosen = tl.min(tl.where(cumulative < limit, digit, 15), 0)
    prefix, before = prefix * 16 + chosen, tl.sum(tl.where(digit == chosen, cumulative, 0.0), 0)
    begins = level == first  # before it there is nothing but what memory held
    ends = begins | (level == LEVELS)
    limit = tl.where(begins, tl.where(top_k > 0, top_k, float("inf")), limit)
    floor = tl.where(begins, 0, tl.where(ends, prefix, floor))
    prefix, before = tl.where(ends, 0, prefix), tl.where(ends, 0.0, before)
    return prefix, before, limit, floor


@partial(jit, do_not_specialize=["chunks", "level", "first"])
def search(
    x, stride, columns, filters, peaks, state, sums, new_state, new_sums, chunks, level, first,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Program (r, c) sums columns [c * CHUNK, (c + 1) * CHUNK) of row r: the count (levels 0 to 12, for top_k) or mass
    (13 to 25, for top_p) of each digit of this level, into new_sums. It writes the search's state into new_state."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    scale, top_k = tl.load(filters + row * 4), tl.load(filters + row * 4 + 1)
    top_p, peak = tl.load(filters + row * 4 + 2), tl.load(peaks + row).to(tl.float64)
    prefix, before, limit, floor = _search_state(level, first, state, sums, row, chunks, top_k, top_p, CHUNKS)
    digit, shift = tl.arange(0, 16), 4 * (LEVELS - 1 - level % LEVELS)
    totals = tl.zeros((TILE, 16), tl.float64)
    for start in range(0, CHUNK, TILE):
        column = chunk * CHUNK + start + tl.arange(0, TILE)
        inside = column < columns
        logits = tl.load(x + row * stride + column, inside, other=0.0)
        key = _key(logits, column)
        inside &= (key >= floor) & ((key >> (shift + 4)) == prefix)
        if tl.max(inside.to(tl.int32), 0) > 0:
            weight = tl.where(level < LEVELS, 1.0, tl.exp((logits.to(tl.float64) - peak) * scale))
            mine = ((key >> shift) & 15).to(tl.int32)[:, None] == digit[None, :]
            totals += tl.where(inside[:, None] & mine, weight[:, None], 0.0)
    tl.store(new_sums + (row * chunks + chunk) * 16 + digit, tl.sum(totals, 0))
    if chunk == 0:
        at = new_state + row * 4
        tl.store(at, prefix.to(tl.float64))
        tl.store(at + 1, before)
        tl.store(at + 2, limit)
        tl.store(at + 3, floor.to(tl.float64))


@partial(jit, do_not_specialize=["chunks", "level", "first", "at", "own"])
def drop(
    out, x, stride, filters, peaks, state, sums, chunks, level, first, at, own, CHUNKS: tl.constexpr, TILE: tl.constexpr
):
    """Program (r, b): columns [b * TILE, (b + 1) * TILE) of out [R, own], which is x from column `at` on, -inf where a
    filter drops an id; as it is where the row's peak is not finite."""
    row = tl.program_id(0).to(tl.int64)
    scale, top_k, top_p = tl.load(filters + row * 4), tl.load(filters + row * 4 + 1), tl.load(filters + row * 4 + 2)
    peak = tl.load(peaks + row).to(tl.float64)
    prefix, _, _, floor = _search_state(level, first, state, sums, row, chunks, top_k, top_p, CHUNKS)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    logits = tl.load(x + row * stride + at + column, column < own, other=0.0)
    key = _key(logits, at + column)
    keep = (key >= prefix) & (key >= floor) & ((logits.to(tl.float64) - peak) * scale >= tl.load(filters + row * 4 + 3))
    some = tl.where(keep, logits, float("-inf"))
    tl.store(out + row * own + column, tl.where(peak - peak == 0.0, some, logits), column < own)


def filtered(x: Tensor, filters: Tensor, first: int, columns: int, top_k: bool, top_p: bool) -> Tensor:
    """device_rule.filtered; top_k and top_p: whether any row has one."""
    rows, vocab = x.shape
    if vocab > _IDS.value:
        raise ValueError(f"a vocabulary of {vocab} ids: filters have keys for {_IDS.value}")
    chunks, levels = triton.cdiv(vocab, CHUNK), LEVELS.value
    todo = [*range(levels * top_k), *range(levels, levels * (1 + top_p))]
    state, new_state = torch.empty((2, rows, 4), dtype=torch.float64, device=x.device)
    sums, new_sums = torch.empty((2, rows, chunks, 16), dtype=torch.float64, device=x.device)
    out = torch.empty((rows, columns), dtype=torch.float32, device=x.device)
    peaks, begin = x.amax(1), todo[0] if todo else 0
    wide, options = triton.next_power_of_2(chunks), {"enable_fp_fusion": False}
    for level in todo:
        search[(rows, chunks)](
            x, x.stride(0), vocab, filters, peaks, state, sums, new_state, new_sums, chunks, level, begin,
            CHUNK=CHUNK, CHUNKS=wide, TILE=TILE, num_warps=8, **options,
        )  # fmt: skip
        state, new_state, sums, new_sums = new_state, state, new_sums, sums
    if columns:
        drop[(rows, triton.cdiv(columns, 1024))](
            out, x, x.stride(0), filters, peaks, state, sums, chunks, todo[-1] + 1 if todo else 0, begin, first,
            columns, CHUNKS=wide, TILE=1024, **options,
        )  # fmt: skip
    return out
