"""Triton kernels of a layer, each in place of several torch operators and passes over memory. Equivalent to
models/ops.py and models/attention.py including roundings, except for the order of sums.

Importing this needs Triton, which CUDA builds of torch contain; models/cuda/ops.py imports it if the device is a GPU.
"""

# NOTE: kernels have no annotations, because Triton interprets them as its own types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from functools import partial
from typing import Any

import triton
import triton.language as tl

jit: Any = triton.jit

LARGEST_FP8: Any = tl.constexpr(448.0)


@jit
def _normed(x, weight, inside, width, eps):
    """Norms and scales a row in fp32, with the roundings of ops.rms_norm to weight's dtype."""
    x = tl.where(inside, x, 0.0)
    factor = 1.0 / tl.sqrt(tl.sum(x * x, 0) / width + eps)
    kind: tl.constexpr = weight.dtype
    return ((x * factor).to(kind).to(tl.float32) * weight.to(tl.float32)).to(kind).to(tl.float32)


@jit
def _store_fp8(out, scales, values, row, column, inside, width, bound):
    """fp8.quantise_rows of one row; values outside `inside` must be 0. NaN stays NaN."""
    largest = tl.max(tl.abs(values), 0)
    scale = tl.minimum(tl.maximum(largest, 1e-12), bound) / LARGEST_FP8
    q = values / scale
    q = tl.where(q > LARGEST_FP8, LARGEST_FP8, tl.where(q < -LARGEST_FP8, -LARGEST_FP8, q))
    tl.store(out + row * width + column, q.to(out.dtype.element_ty), inside)
    tl.store(scales + row, scale)


@jit
def rms_norm(
    out, x, added, total, weight, scales, width, x_row, added_row, eps, bound,
    ADD: tl.constexpr, FP8: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program t: row t of x [T, width], whose row stride is x_row; one block has a whole row. ADD: norms x + added, and
    stores the sum in total. FP8: quantises out, with scales [T]."""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside, at = column < width, row * width + column
    values = tl.load(x + row * x_row + column, inside, other=0.0).to(tl.float32)
    if ADD:
        kind: tl.constexpr = x.dtype.element_ty
        values = (values + tl.load(added + row * added_row + column, inside, other=0.0).to(tl.float32)).to(kind)
        tl.store(total + at, values, inside)
        values = values.to(tl.float32)
    scale = tl.load(weight + column, inside, other=0.0)
    normed = _normed(values, scale, inside, width, eps)
    if FP8:
        _store_fp8(out, scales, normed, row, column, inside, width, bound)
    else:
        tl.store(out + at, normed.to(out.dtype.element_ty), inside)


TILE = 64
"""Tokens, outputs and inputs that a program of row_product multiplies at once. Equal for every product, because another
tile uses another instruction with another order of summation."""


@partial(jit, do_not_specialize=["tokens"])
def row_product(
    out, x, weight, x_scale, weight_scale, tokens, outputs, x_row, weight_row, INPUTS: tl.constexpr,
    SCALED_X: tl.constexpr, SCALED_WEIGHT: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Program (t, o): tile (t, o) of x [T, in] @ weight [out, in].T in fp32, times x_scale [T] and weight_scale
    [out]. Row strides are x_row and weight_row. The loop over inputs is the same for each token, regardless of T."""
    row = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    column = tl.program_id(1).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    here, there = row < tokens, column < outputs
    kind: tl.constexpr = x.dtype.element_ty if x.dtype.element_ty.primitive_bitwidth > 8 else tl.bfloat16
    total = tl.zeros((SIZE, SIZE), tl.float32)
    for start in range(0, INPUTS, SIZE):
        at = start + tl.arange(0, SIZE)
        inside = at < INPUTS
        a = tl.load(x + row[:, None] * x_row + at[None, :], here[:, None] & inside[None, :], other=0.0)
        b = tl.load(weight + column[None, :] * weight_row + at[:, None], there[None, :] & inside[:, None], other=0.0)
        total = tl.dot(a.to(kind), b.to(kind), total, input_precision="ieee")
    if SCALED_X:
        total *= tl.load(x_scale + row, here, other=0.0)[:, None]
    if SCALED_WEIGHT:
        total *= tl.load(weight_scale + column, there, other=0.0)[None, :]
    to = out + row[:, None] * outputs + column[None, :]
    tl.store(to, total.to(out.dtype.element_ty), here[:, None] & there[None, :])


@jit
def quantise(out, scales, x, width, bound, GATED: tl.constexpr, BLOCK: tl.constexpr):
    """Program t quantises row t of x [T, width] to fp8: out [T, width] and scales [T]. GATED: quantises silu(gate) * up
    of x [T, 2 * width]."""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = column < width
    if GATED:
        gate, up = x + row * 2 * width + column, x + row * 2 * width + width + column
        values = _silu_and_mul(tl.load(gate, inside, other=0.0), tl.load(up, inside, other=0.0)).to(tl.float32)
    else:
        values = tl.load(x + row * width + column, inside, other=0.0).to(tl.float32)
    _store_fp8(out, scales, values, row, column, inside, width, bound)


@jit
def _silu_and_mul(gate, up):
    """silu(gate) * up with the roundings of ops.silu_and_mul to their type."""
    kind: tl.constexpr = gate.dtype
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(kind).to(tl.float32)
    return (silu * up.to(tl.float32)).to(kind)


@jit
def silu_and_mul(out, gate_up, width, BLOCK: tl.constexpr):
    """Program (t, b): columns [b * BLOCK, (b + 1) * BLOCK) of row t of gate_up [T, 2 * width]."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up + row * 2 * width + column, inside, other=0.0)
    up = tl.load(gate_up + row * 2 * width + width + column, inside, other=0.0)
    tl.store(out + row * width + column, _silu_and_mul(gate, up), inside)


@partial(jit, do_not_specialize=["size"])
def join_lanes(out, x, own, total, taken, size, lane, OWN: tl.constexpr, BLOCK: tl.constexpr):
    """Program (k, b): block b of lane k of out [k, size] = x + own + (total [size] - taken), each sum rounded; x has
    lane stride `lane`. Without OWN: x + (total - taken)."""
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, to = at < size, tl.program_id(0).to(tl.int64) * size + at
    kind: tl.constexpr = x.dtype.element_ty
    y = tl.load(x + tl.program_id(0).to(tl.int64) * lane + at, inside, other=0.0).to(tl.float32)
    if OWN:
        y = (y + tl.load(own + to, inside, other=0.0).to(tl.float32)).to(kind).to(tl.float32)
    late = tl.load(total + at, inside, other=0.0).to(tl.float32) - tl.load(taken + to, inside, other=0.0).to(tl.float32)
    tl.store(out + to, (y + late.to(kind).to(tl.float32)).to(kind), inside)


@partial(jit, do_not_specialize=["size"])
def sum_lanes(out, x, size, LANES: tl.constexpr, BLOCK: tl.constexpr):
    """Program b: block b of out [size], the sum of x [LANES, size] in fp32 in the order of lanes, rounded once."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for lane in tl.static_range(LANES):
        total += tl.load(x + lane * size.to(tl.int64) + at, at < size, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), at < size)


@jit
def store_latents(
    latents, rows, cos, sin, weight, blocks, offsets, eps, size,
    HEADS: tl.constexpr, RANK: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, HALF_BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (t, h): head h of token t of rows [T, HEADS + 1, RANK + 2 * HALF]. Rotates a query's last 2 * HALF values
    in place; norms and rotates the last head, a latent and its key, into (blocks[t], offsets[t]) of latents [blocks,
    size, RANK + 2 * HALF]."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    source = rows + (token * (HEADS + 1) + head) * (RANK + 2 * HALF)
    half, column = tl.arange(0, HALF_BLOCK), tl.arange(0, BLOCK)
    turned, inside = half < HALF, column < RANK
    first = tl.load(source + RANK + half, turned, other=0.0).to(tl.float32)
    second = tl.load(source + RANK + HALF + half, turned, other=0.0).to(tl.float32)
    c = tl.load(cos + token * HALF + half, turned, other=0.0)
    s = tl.load(sin + token * HALF + half, turned, other=0.0)
    a, b = first * c - second * s, second * c + first * s
    if head < HEADS:
        tl.store(source + RANK + half, a.to(rows.dtype.element_ty), turned)
        tl.store(source + RANK + HALF + half, b.to(rows.dtype.element_ty), turned)
    else:
        to = latents + (tl.load(blocks + token) * size + tl.load(offsets + token)) * (RANK + 2 * HALF)
        kind: tl.constexpr = latents.dtype.element_ty
        x = tl.load(source + column, inside, other=0.0).to(tl.float32)
        scale = tl.load(weight + column, inside, other=0.0)
        tl.store(to + column, _normed(x, scale, inside, RANK, eps).to(kind), inside)
        tl.store(to + RANK + half, a.to(kind), turned)
        tl.store(to + RANK + HALF + half, b.to(kind), turned)


@jit
def rotate_and_store(
    queries, keys, values, qkv, cos, sin, q_weight, k_weight, blocks, offsets, key_scale, value_scale, eps, size,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr,
    FP8: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (t, h): head h of token t of qkv [T, HEADS + 2 * KV_HEADS, DIM]. Writes queries to queries [T, HEADS,
    DIM], keys and values to (blocks[t], offsets[t]) of the cache [blocks, KV_HEADS, size, DIM]. Rotates the first
    2 * HALF dimensions of queries and keys by cos and sin [T, HALF], in pairs (j, j + HALF). SCALED: stores keys and
    values divided by key_scale and value_scale [KV_HEADS], and queries times the key_scale of their KV head."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < DIM
    source = qkv + (token * (HEADS + 2 * KV_HEADS) + head) * DIM
    kind: tl.constexpr = qkv.dtype.element_ty
    x = tl.load(source + column, inside, other=0.0).to(tl.float32)
    if head < HEADS + KV_HEADS:
        turned = column < 2 * HALF
        partner = tl.where(column < HALF, column + HALF, tl.where(turned, column - HALF, column))
        other = tl.load(source + partner, inside, other=0.0).to(tl.float32)
        if NORM:
            weight = q_weight
            if head >= HEADS:
                weight = k_weight
            scale = tl.load(weight + column, inside, other=0.0)
            # the partner's row is the same row in another order, so its norm has the same factor
            other = _normed(other, tl.load(weight + partner, inside, other=0.0), inside, DIM, eps)
            x = _normed(x, scale, inside, DIM, eps)
        angle = token * HALF + column % HALF
        c = tl.load(cos + angle, turned, other=1.0)
        s = tl.load(sin + angle, turned, other=0.0)
        x = x * c + tl.where(column < HALF, -other, other) * s
    x = x.to(kind)
    if head < HEADS:
        if SCALED:
            x = (x.to(tl.float32) * tl.load(key_scale + head // (HEADS // KV_HEADS))).to(kind)
        tl.store(queries + (token * HEADS + head) * DIM + column, x, inside)
    else:
        is_key = head < HEADS + KV_HEADS
        kv_head = tl.where(is_key, head - HEADS, head - HEADS - KV_HEADS)
        block, offset = tl.load(blocks + token), tl.load(offsets + token)
        to = ((block * KV_HEADS + kv_head) * size + offset) * DIM + column
        if FP8:
            wide = x.to(tl.float32)
            if SCALED:
                factors = key_scale
                if head >= HEADS + KV_HEADS:
                    factors = value_scale
                wide = wide / tl.load(factors + kv_head)
            bounded = tl.where(wide > LARGEST_FP8, LARGEST_FP8, tl.where(wide < -LARGEST_FP8, -LARGEST_FP8, wide))
            stored = bounded.to(keys.dtype.element_ty)
        else:
            stored = x.to(keys.dtype.element_ty)
        tl.store(keys + to, stored, inside & is_key)
        tl.store(values + to, stored, inside & (head >= HEADS + KV_HEADS))
