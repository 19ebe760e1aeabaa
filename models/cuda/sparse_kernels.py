"""Triton kernels of sparse attention over latents (DeepSeek-V3.2's DSA): what models/latent.py computes with torch, in
grids that do not depend on a step's contexts. Every row is a token; `sequences` [T] has its row of the block table, -1
for padding, which chooses nothing and whose output is zero.

Importing this needs Triton; models/cuda/sparse_latent.py is imported only where it is available.
"""

# NOTE: kernels have no annotations, because Triton interprets them as its own types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from functools import partial
from typing import Any

import triton
import triton.language as tl

jit: Any = triton.jit


@jit
def rotate_index(
    out, x, cos, sin, blocks, offsets, size,
    HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, STORE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (t, h): head h of token t of x [T, HEADS, DIM], whose first 2 * HALF values are rotated. STORE: the only
    head goes to (blocks[t], offsets[t]) of out [blocks, size, DIM]; else into out of x's shape."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside, turned = column < DIM, column < 2 * HALF
    source = x + (token * HEADS + head) * DIM
    values = tl.load(source + column, inside, other=0.0).to(tl.float32)
    partner = tl.where(column < HALF, column + HALF, tl.where(turned, column - HALF, column))
    other = tl.load(source + partner, inside, other=0.0).to(tl.float32)
    angle = token * HALF + column % HALF
    c = tl.load(cos + angle, turned, other=1.0)
    s = tl.load(sin + angle, turned, other=0.0)
    values = values * c + tl.where(column < HALF, -other, other) * s
    if STORE:
        to = out + (tl.load(blocks + token) * size + tl.load(offsets + token)) * DIM
    else:
        to = out + (token * HEADS + head) * DIM
    tl.store(to + column, values.to(out.dtype.element_ty), inside)


@partial(jit, do_not_specialize=["first", "table_row"])
def index_scores(
    scores, queries, weights, keys, sequences, positions, table, first, table_row, size, width, topk,
    HEADS: tl.constexpr, DIM: tl.constexpr, HEAD_BLOCK: tl.constexpr, DIM_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (t, p), of P: every P-th block of positions of row t of scores [rows, width], of token first + t:
    relu(queries [T, HEADS, DIM] @ keys) summed over heads by weights [T, HEADS]. Tokens with at most topk positions
    have no scores: all are chosen."""
    score_row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = first + score_row
    sequence, last = tl.load(sequences + row).to(tl.int64), tl.load(positions + row)
    end = tl.where((sequence >= 0) & (last >= topk), last + 1, 0).to(tl.int32)
    head, column = tl.arange(0, HEAD_BLOCK), tl.arange(0, DIM_BLOCK)
    real, inside = head < HEADS, column < DIM
    at_head = row * HEADS + head
    query = tl.load(queries + at_head[:, None] * DIM + column[None, :], real[:, None] & inside[None, :], other=0.0)
    weight = tl.load(weights + at_head, real, other=0.0)
    for start in range(part * BLOCK, end, tl.num_programs(1) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        seen = at < end
        block = tl.load(table + sequence * table_row + at // size, seen, other=0).to(tl.int64)
        slot = (block * size + at % size) * DIM
        key = tl.load(keys + slot[None, :] + column[:, None], seen[None, :] & inside[:, None], other=0.0)
        products = tl.dot(query, key, input_precision="ieee")
        total = tl.sum(tl.maximum(products, 0.0) * weight[:, None], 0)
        # -0.0 equals 0.0, of which the lower position comes first
        tl.store(scores + score_row * width + at, tl.where(total == 0.0, 0.0, total), seen)


@jit
def _order(score):
    """Numbers from 0 to 2^32 in the order of the scores."""
    bits = score.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648


@partial(jit, do_not_specialize=["first"])
def choose(
    chosen, digest, scores, sequences, positions, first, width, FACTOR: tl.constexpr, TOPK: tl.constexpr,
    BLOCK: tl.constexpr, TOPK_BLOCK: tl.constexpr,
):  # fmt: skip
    """Program t: the positions of the TOPK highest of row t of scores [rows, width], of equal ones the lower positions,
    of token first + t: chosen [T, TOPK], ascending, then -1; and their digest [T] (LatentAttention.choose). Finds the
    least chosen score by its four bytes, from the highest: a histogram each."""
    own = scores + tl.program_id(0).to(tl.int64) * width
    row = first + tl.program_id(0).to(tl.int64)
    sequence, last = tl.load(sequences + row), tl.load(positions + row)
    length = tl.where(sequence >= 0, last + 1, 0).to(tl.int32)
    scored = tl.where(length > TOPK, length, 0)
    digit, least, mask = tl.arange(0, 256), tl.zeros((), tl.int64), tl.zeros((), tl.int64)
    left = tl.full((), TOPK, tl.int32)
    for byte in tl.static_range(4):
        counts = tl.zeros((256,), tl.int32)
        for start in range(0, scored, BLOCK):
            at = start + tl.arange(0, BLOCK)
            seen = at < scored
            order = _order(tl.load(own + at, seen, other=0.0))
            alike = seen & ((order & mask) == least)
            counts += tl.histogram(((order >> (24 - 8 * byte)) & 255).to(tl.int32), 256, alike)
        above = tl.sum(counts, 0) - tl.cumsum(counts, 0)
        holds = (above < left) & (above + counts >= left)
        least += tl.sum(tl.where(holds, digit, 0), 0).to(tl.int64) << (24 - 8 * byte)
        left -= tl.sum(tl.where(holds, above, 0), 0)
        mask += tl.full((), 255, tl.int64) << (24 - 8 * byte)
    count, equals, total = tl.zeros((), tl.int32), tl.zeros((), tl.int32), tl.zeros((), tl.int64)
    for start in range(0, length, BLOCK):
        at = start + tl.arange(0, BLOCK)
        order = _order(tl.load(own + at, at < scored, other=0.0))
        equal = (at < scored) & (order == least)
        rank = equals + tl.cumsum(equal.to(tl.int32), 0)
        taken = (at < length) & ((scored == 0) | (order > least) | (equal & (rank <= left)))
        to = count + tl.cumsum(taken.to(tl.int32), 0) - 1
        tl.store(chosen + row * TOPK + to, at, taken)
        mixed = (at.to(tl.int64) + 1) * FACTOR
        total += tl.sum(tl.where(taken, (mixed ^ (mixed >> 29)) * FACTOR, 0), 0)
        count += tl.sum(taken.to(tl.int32), 0)
        equals += tl.sum(equal.to(tl.int32), 0)
    rest = tl.arange(0, TOPK_BLOCK)
    tl.store(chosen + row * TOPK + rest, tl.full((TOPK_BLOCK,), -1, tl.int32), (rest >= count) & (rest < TOPK))
    tl.store(digest + row, total)


@partial(jit, do_not_specialize=["table_row"])
def attend_chosen(
    out, sums, queries, latents, chosen, sequences, positions, table, table_row, size, heads, query_row, scale, topk,
    RANK: tl.constexpr, TURNED: tl.constexpr, HEAD_BLOCK: tl.constexpr, RANK_BLOCK: tl.constexpr,
    TURNED_BLOCK: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Program (t, h, p), of P: block h of the heads of queries [T, heads, RANK + TURNED] (row stride query_row) over
    every P-th block of the positions chosen [T, topk] of latents [blocks, size, RANK + TURNED]. Writes out
    [P, T, heads, RANK] and, unless one part is the WHOLE, the logarithm of its sum of weights to sums [P, T, heads]."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(2)
    head = tl.program_id(1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)
    sequence, last = tl.load(sequences + row).to(tl.int64), tl.load(positions + row)
    count = tl.where(sequence >= 0, tl.minimum(last + 1, topk), 0).to(tl.int32)
    column, turned = tl.arange(0, RANK_BLOCK), tl.arange(0, TURNED_BLOCK)
    real, inside, on = head < heads, column < RANK, turned < TURNED
    source = queries + row * query_row + head[:, None] * (RANK + TURNED)
    query = tl.load(source + column[None, :], real[:, None] & inside[None, :], other=0.0)
    query_turned = tl.load(source + RANK + turned[None, :], real[:, None] & on[None, :], other=0.0)
    peak, total = tl.full((HEAD_BLOCK,), float("-inf"), tl.float32), tl.zeros((HEAD_BLOCK,), tl.float32)
    acc = tl.zeros((HEAD_BLOCK, RANK_BLOCK), tl.float32)
    for start in range(part * BLOCK, count, tl.num_programs(2) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        seen = at < count
        position = tl.load(chosen + row * topk + at, seen, other=0)
        block = tl.load(table + sequence * table_row + position // size, seen, other=0).to(tl.int64)
        slot = latents + ((block * size + position % size) * (RANK + TURNED))[:, None]
        latent = tl.load(slot + column[None, :], seen[:, None] & inside[None, :], other=0.0)
        key = tl.load(slot + RANK + turned[None, :], seen[:, None] & on[None, :], other=0.0)
        scores = tl.dot(query, tl.trans(latent), input_precision="ieee")
        scores = tl.dot(query_turned, tl.trans(key), scores, input_precision="ieee") * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        weights, decay = tl.exp(scores - higher[:, None]), tl.exp(peak - higher)
        total = total * decay + tl.sum(weights, 1)
        acc = tl.dot(weights.to(latent.dtype), latent, acc * decay[:, None], input_precision="ieee")
        peak = higher
    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    at_head = (part * tl.num_programs(0) + row) * heads + head
    to = out + at_head[:, None] * RANK + column[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), real[:, None] & inside[None, :])
    if not WHOLE:
        tl.store(sums + at_head, tl.where(total > 0.0, peak + tl.log(total), float("-inf")), real)


@partial(jit, do_not_specialize=["count"])
def join_parts(out, parts, sums, count, RANK: tl.constexpr, BLOCK: tl.constexpr):
    """Program r: row r of out [rows, RANK], the mean of parts [count, rows, RANK] by exp(sums [count, rows]); zero if
    every part is empty."""
    rows = tl.num_programs(0)
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = column < RANK
    peak = tl.full((), float("-inf"), tl.float32)
    for part in range(count):
        peak = tl.maximum(peak, tl.load(sums + part * rows + row))
    peak = tl.where(peak == float("-inf"), 0.0, peak)
    total, acc = tl.zeros((), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for part in range(count):
        weight = tl.exp(tl.load(sums + part * rows + row) - peak)
        acc += weight * tl.load(parts + (part * rows + row) * RANK + column, inside, other=0.0)
        total += weight
    mean = acc / tl.where(total > 0.0, total, 1.0)
    tl.store(out + row * RANK + column, mean.to(out.dtype.element_ty), inside)
