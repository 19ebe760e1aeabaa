"""A mixture of experts on a GPU by Triton kernels, equivalent to models/experts.py: routing, and the products of this
rank's experts.

Rows are grouped by expert on the device. No size is read on the host, so a step with experts can be captured. Large
steps compute the grouped pairs in pieces: each expert's weights are read once, and pieces after this rank's last pair
cost their launches only.
N: rows, D: hidden size, E: experts of this rank, k: slots a row, F: feed-forward size of an expert (this rank's share);
a pair is a row and one of its slots. Importing this needs Triton.
"""

# NOTE: kernels have no annotations, because Triton interprets them as its own types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..config.experts import Router
from ..experts import Biased
from ..packed import Packed
from ..weights.quantised import DEPTH
from .kernels import _silu_and_mul
from .packed import Matrix, widened
from .workspace import expert_pairs

jit: Any = triton.jit

TILES = (16, 64)
"""Rows that a program multiplies at once: for few rows per expert, and for many."""
_COLUMNS, _DEPTH, _SCANNED = 64, DEPTH, 1024


@jit
def choose(
    chosen, numbers, weights, logits, bias, local, epsilon, scale, EXPERTS: tl.constexpr, SLOTS: tl.constexpr,
    GROUPS: tl.constexpr, KEPT: tl.constexpr, SOFTMAX: tl.constexpr, BIASED: tl.constexpr,
    NORMALISES: tl.constexpr, ROUNDS: tl.constexpr, BLOCK: tl.constexpr, SLOT_BLOCK: tl.constexpr,
):  # fmt: skip
    """Program n: experts.choose for row n of logits [N, EXPERTS] -> chosen, numbers (chosen mapped by local [EXPERTS])
    and weights [N, SLOTS]. GROUPS > 1 requires EXPERTS == BLOCK."""
    row, expert = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = expert < EXPERTS
    given = tl.load(logits + row * EXPERTS + expert, inside, other=float("-inf"))
    wide = given.to(tl.float32)
    if SOFTMAX:
        raised = tl.exp(wide - tl.max(wide, 0))
        scores = raised / tl.sum(raised, 0)
    else:
        scores = (1.0 / (1.0 + tl.exp(-wide.to(tl.float64)))).to(tl.float32)
    ranked = scores
    if BIASED:
        ranked += tl.load(bias + expert, inside, other=0.0)
    if GROUPS > 1:
        grouped = tl.reshape(ranked, (GROUPS, BLOCK // GROUPS))
        first, place = tl.max(grouped, 1, return_indices=True)
        others = tl.where(tl.arange(0, BLOCK // GROUPS)[None, :] == place[:, None], float("-inf"), grouped)
        best = first + tl.max(others, 1)
        group, keeps = tl.arange(0, GROUPS), tl.zeros((GROUPS,), tl.int32)
        for _ in tl.static_range(KEPT):
            at = tl.argmax(tl.where(keeps > 0, float("-inf"), best), 0)
            keeps = tl.where(group == at, 1, keeps)
        keeps_lanes = tl.broadcast_to(keeps[:, None], (GROUPS, BLOCK // GROUPS))
        ranked = tl.where(tl.reshape(keeps_lanes, (BLOCK,)) > 0, ranked, float("-inf"))
    ranked = tl.where(inside, ranked, float("-inf"))
    slot = tl.arange(0, SLOT_BLOCK)
    picked, weight = tl.zeros((SLOT_BLOCK,), tl.int32), tl.zeros((SLOT_BLOCK,), tl.float32)
    for number in tl.static_range(SLOTS):
        at = tl.minimum(tl.argmax(ranked, 0), EXPERTS - 1)  # argmax of NaN may be out of range
        picked = tl.where(slot == number, at, picked)
        weight = tl.where(slot == number, tl.sum(tl.where(expert == at, scores, 0.0), 0), weight)
        ranked = tl.where(expert == at, float("-inf"), ranked)
    if NORMALISES:
        weight = weight / (tl.sum(weight, 0) + epsilon)
    weight = weight * scale
    if ROUNDS:
        weight = weight.to(given.dtype).to(tl.float32)
    to, written = row * SLOTS + slot, slot < SLOTS
    tl.store(chosen + to, picked, written)
    tl.store(numbers + to, tl.load(local + picked, written, other=-1), written)
    tl.store(weights + to, weight, written)


@partial(jit, do_not_specialize=["pairs", "tiles"])
def group(
    starts, owners, order, places, numbers, pairs, tiles, EXPERTS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Program e writes the pairs of numbers [pairs] that chose expert e, in ascending order, into order from starts[e]
    on, and into places [pairs] where each of them is in order; the last entry of starts [EXPERTS + 1] is the number of
    all such pairs. owners [tiles]: the expert of each tile of at most ROWS pairs, or -1."""
    expert, lane = tl.program_id(0), tl.arange(0, BLOCK)
    before, own = 0, 0
    for first in range(0, pairs, BLOCK):
        number = tl.load(numbers + first + lane, first + lane < pairs, other=-1)
        before += tl.sum(((number >= 0) & (number < expert)).to(tl.int32), 0)
        own += tl.sum((number == expert).to(tl.int32), 0)
    to = before
    for first in range(0, pairs, BLOCK):
        hit = (tl.load(numbers + first + lane, first + lane < pairs, other=-1) == expert).to(tl.int32)
        place = to + tl.cumsum(hit, 0) - hit
        tl.store(order + place, first + lane, hit > 0)
        tl.store(places + first + lane, place, hit > 0)
        to += tl.sum(hit, 0)
    tl.store(starts + expert, before)
    end = _tiles_before(before + own, expert + 1, ROWS)
    if expert == EXPERTS - 1:
        tl.store(starts + EXPERTS, before + own)
        end = tiles
    begin = _tiles_before(before, expert, ROWS)
    full = tl.cdiv(own, ROWS)
    for first in range(begin, end, BLOCK):
        tile = first + lane
        tl.store(owners + tile, tl.where(tile - begin < full, expert, -1), tile < end)


@jit
def _tiles_before(pairs, expert, ROWS: tl.constexpr):
    """The first tile of an expert after `pairs` pairs: at least the number of tiles that the experts before it fill."""
    return pairs // ROWS + tl.minimum(expert, pairs)


@jit
def _places(starts, expert, tile, begin, end, ROWS: tl.constexpr):
    """Places of a tile's rows in the sorted order, and a mask of the expert's among places begin to end."""
    first = tl.load(starts + expert)
    place = first + (tile - _tiles_before(first, expert, ROWS)) * ROWS + tl.arange(0, ROWS)
    return place, (place >= begin) & (place < tl.minimum(end, tl.load(starts + expert + 1)))


@partial(jit, do_not_specialize=["begin", "end", "skipped"])
def up(
    inner, x, weight, scale, zero, bias, starts, owners, order, begin, end, skipped, alpha, limit, WIDTH: tl.constexpr,
    INNER: tl.constexpr, SLOTS: tl.constexpr, SCALES: tl.constexpr, CODE: tl.constexpr, CLAMPED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Program (t, f) writes silu(gate) * up (CLAMPED: with bias [E, 2 * INNER] and the gate of Clamped) of the rows of
    x [N, WIDTH] of tile skipped + t, column block f, into inner [end - begin, INNER]: the places begin to end
    of the sorted order. weight [E, 2 * INNER, WIDTH]; scale and zero [E, 2 * INNER, SCALES] if it is quantised."""
    tile = skipped + tl.program_id(0)
    expert = tl.load(owners + tile)
    if expert >= 0:
        place, here = _places(starts, expert, tile, begin, end, ROWS)
        row = (tl.load(order + place, here, other=0) // SLOTS).to(tl.int64)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        there = column < INNER
        kind: tl.constexpr = x.dtype.element_ty
        first = expert.to(tl.int64) * 2 * INNER + column
        gate, raised = tl.zeros((ROWS, COLUMNS), tl.float32), tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, WIDTH, DEPTH):
            at = start + tl.arange(0, DEPTH)
            inside = at < WIDTH
            a = tl.load(x + row[:, None] * WIDTH + at[None, :], here[:, None] & inside[None, :], other=0.0)
            b = widened(weight, scale, zero, first, there, start, kind, WIDTH, SCALES, CODE, COLUMNS, DEPTH)
            gate = tl.dot(a, b, gate, input_precision="ieee")
            b = widened(weight, scale, zero, first + INNER, there, start, kind, WIDTH, SCALES, CODE, COLUMNS, DEPTH)
            raised = tl.dot(a, b, raised, input_precision="ieee")
        to = inner + (place - begin).to(tl.int64)[:, None] * INNER + column[None, :]
        if CLAMPED:
            gate += tl.load(bias + first, there, other=0.0).to(tl.float32)[None, :]
            raised += tl.load(bias + first + INNER, there, other=0.0).to(tl.float32)[None, :]
            gate, raised = tl.minimum(gate, limit), tl.minimum(tl.maximum(raised, -limit), limit) + 1.0
            gated = (gate / (1.0 + tl.exp(-alpha * gate)) * raised).to(kind)
        else:
            gated = _silu_and_mul(gate.to(kind), raised.to(kind))
        tl.store(to, gated, here[:, None] & there[None, :])


@partial(jit, do_not_specialize=["begin", "end", "skipped"])
def down(
    out, inner, weight, scale, zero, bias, starts, owners, begin, end, skipped, WIDTH: tl.constexpr,
    INNER: tl.constexpr, SCALES: tl.constexpr, CODE: tl.constexpr, BIASED: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Program (t, d) multiplies the rows of inner [end - begin, INNER] of tile skipped + t by weight
    [E, WIDTH, INNER], column block d, into out [end - begin, WIDTH]. scale and zero [E, WIDTH, SCALES] if the weight is
    quantised; bias [E, WIDTH]."""
    tile = skipped + tl.program_id(0)
    expert = tl.load(owners + tile)
    if expert >= 0:
        place, here = _places(starts, expert, tile, begin, end, ROWS)
        row = (place - begin).to(tl.int64)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        there = column < WIDTH
        first = expert.to(tl.int64) * WIDTH + column
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, INNER, DEPTH):
            at = start + tl.arange(0, DEPTH)
            inside = at < INNER
            rows = inner + row[:, None] * INNER + at[None, :]
            a = tl.load(rows, here[:, None] & inside[None, :], other=0.0)
            b = widened(weight, scale, zero, first, there, start, a.dtype, INNER, SCALES, CODE, COLUMNS, DEPTH)
            total = tl.dot(a, b, total, input_precision="ieee")
        if BIASED:
            total += tl.load(bias + first, there, other=0.0).to(tl.float32)[None, :]
        to = out + row[:, None] * WIDTH + column[None, :]
        tl.store(to, total.to(out.dtype.element_ty), here[:, None] & there[None, :])


@partial(jit, do_not_specialize=["begin", "end", "pairs"])
def add_up(
    out, sums, given, places, numbers, weights, begin, end, pairs, WIDTH: tl.constexpr, SLOTS: tl.constexpr,
    SLOT_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (n, d) adds up column block d of row n: given [end - begin, WIDTH], the places begin to end, times
    weights over the slots that this rank computed, in fp32, in the order of experts, so that pieces do not change the
    bits. The sum starts from sums [N, WIDTH] (fp32) unless begin is 0, and is written to it, or with the last of
    `pairs` to out."""
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, slot = column < WIDTH, tl.arange(0, SLOT_BLOCK)
    own = tl.load(numbers + row * SLOTS + slot, slot < SLOTS, other=-1) >= 0
    place = tl.load(places + row * SLOTS + slot, own, other=0)
    place = tl.where(own & (place >= begin) & (place < end), place, end)
    weight = tl.load(weights + row * SLOTS + slot, own, other=0.0)
    total = tl.load(sums + row * WIDTH + column, inside & (begin > 0), other=0.0)
    for _ in tl.static_range(SLOTS):
        at = tl.min(place, 0)
        if at < end:
            y = tl.load(given + (at - begin).to(tl.int64) * WIDTH + column, inside, other=0.0)
            total += y.to(tl.float32) * tl.sum(tl.where(place == at, weight, 0.0), 0)
        place = tl.where(place == at, end, place)
    tl.store(sums + row * WIDTH + column, total, inside & (end < pairs))
    tl.store(out + row * WIDTH + column, total.to(out.dtype.element_ty), inside & (end >= pairs))


class TritonChoice:
    """experts.Choice by one kernel."""

    def __init__(self, router: Router, k: int, bias: Tensor | None, local: Tensor) -> None:
        self._router, self._k, self._bias, self._local = router, k, bias, local

    @staticmethod
    def serves(router: Router, count: int) -> bool:
        return router.groups == 1 or triton.next_power_of_2(count) == count

    def __call__(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        r, k, (rows, count) = self._router, self._k, logits.shape
        chosen, numbers = (logits.new_empty((rows, k), dtype=torch.int32) for _ in range(2))
        weights = logits.new_empty((rows, k), dtype=torch.float32)
        choose[(rows,)](
            chosen, numbers, weights, logits, weights if self._bias is None else self._bias, self._local,
            r.epsilon, r.scale, EXPERTS=count, SLOTS=k, GROUPS=r.groups, KEPT=r.chosen_groups,
            SOFTMAX=r.score == "softmax", BIASED=self._bias is not None, NORMALISES=r.normalises, ROUNDS=r.rounds,
            BLOCK=triton.next_power_of_2(count), SLOT_BLOCK=triton.next_power_of_2(k),
        )  # fmt: skip
        return chosen, numbers, weights


class GroupedExperts:
    """experts.ExpertProduct. tiles: a step uses one of them, depending on the number of rows per expert. With a single
    tile, a row's bits do not depend on the other rows."""

    def __init__(
        self,
        gate_up: Tensor | Packed,
        down: Tensor | Packed,
        routed: int,
        tiles: Sequence[int] = TILES,
        biased: Biased | None = None,
    ) -> None:
        """gate_up [E, 2F, D], down [E, D, F]; routed: number of experts of all ranks."""
        rows = down.codes if isinstance(down, Packed) else down
        self._shape = len(rows), rows.shape[1], down.columns if isinstance(down, Packed) else down.shape[2]
        self._up, self._down, self._routed, self._tiles = Matrix.of(gate_up), Matrix.of(down), routed, tiles
        self._compiled = False
        self._biases, self._clamped = (None, None) if biased is None else biased[:2], biased and biased.gate

    def __call__(self, x: Tensor, chosen: Tensor, weight: Tensor) -> Tensor:
        if not self._compiled:  # compiles the kernels of every tile at the first call, during warm-up
            self._compiled = True
            for tile in self._tiles[1:]:
                self._compute(x[:1], chosen[:1], weight[:1], tile)
        tile = self._tiles[-1 if 2 * chosen.numel() >= self._tiles[-1] * self._routed else 0]
        return self._compute(x, chosen, weight, tile)

    def _compute(self, x: Tensor, chosen: Tensor, weight: Tensor, tile: int) -> Tensor:
        (count, width, inner), pairs, k = self._shape, chosen.numel(), chosen.shape[1]
        tiles = pairs // tile + min(count, pairs)
        starts, owners, order, places = (chosen.new_empty(size) for size in (count + 1, tiles, pairs, pairs))
        group[(count,)](starts, owners, order, places, chosen, pairs, tiles, EXPERTS=count, ROWS=tile, BLOCK=_SCANNED)
        shape = {"WIDTH": width, "INNER": inner, "ROWS": tile, "DEPTH": _DEPTH}
        most = min(pairs, expert_pairs(width, inner, x.element_size()))
        raised, products, out = x.new_empty((most, inner)), x.new_empty((most, width)), torch.empty_like(x)
        sums = weight if most == pairs else x.new_empty(x.shape, dtype=torch.float32)
        first, second = self._up, self._down
        # E2M1 of both gate and up, widened for 64 rows or with a clamped gate, would need more registers than compute
        # capabilities 8.0 and 12.0, or 10.0, have
        narrow = first.code == "e2m1" and (tile == max(TILES) or self._clamped is not None)
        columns = _COLUMNS // 2 if narrow else _COLUMNS
        (up_bias, down_bias), (alpha, limit) = self._biases, self._clamped or (0.0, 0.0)
        for begin in range(0, pairs, most):
            end = min(pairs, begin + most)
            # A place p is in a tile from p // tile - 1 to p // tile plus the number of the expert.
            skipped = max(0, begin // tile - 1)
            used = min(tiles, (end - 1) // tile + min(count, end)) - skipped
            up[(used, triton.cdiv(inner, columns))](
                raised, x, first.weight, first.scale, first.zero, x if up_bias is None else up_bias, starts, owners,
                order, begin, end, skipped, alpha, limit, SLOTS=k, SCALES=first.scales, CODE=first.code,
                CLAMPED=up_bias is not None, COLUMNS=columns, **shape,
            )  # fmt: skip
            down[(used, triton.cdiv(width, _COLUMNS))](
                products, raised, second.weight, second.scale, second.zero, x if down_bias is None else down_bias,
                starts, owners, begin, end, skipped, SCALES=second.scales, CODE=second.code,
                BIASED=down_bias is not None, COLUMNS=_COLUMNS, **shape,
            )  # fmt: skip
            add_up[(len(x), triton.cdiv(width, _SCANNED))](
                out, sums, products, places, chosen, weight, begin, end, pairs, WIDTH=width, SLOTS=k,
                SLOT_BLOCK=triton.next_power_of_2(k), BLOCK=_SCANNED,
            )  # fmt: skip
        return out
