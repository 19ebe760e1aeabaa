"""Sparse attention over latents on a GPU by Triton kernels (sparse_kernels.py): index keys and queries are rotated, all
rows' positions scored and chosen, and the chosen latents attended to, in grids of fixed shapes, which can be recorded.
Steps with few positions are computed so too: then every position is chosen. Equivalent to models/latent.py.

Importing this needs Triton; models/attention_choice.py imports it if the device is a GPU.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor

from ..attention import Captured, StepLayout
from ..config.latent import Latent
from ..config.shapes import Shape
from ..latent import ODD_FACTOR, LatentAttention, LatentCache
from ..ops import Norm
from ..transfer import carry, download, stage, upload
from . import sparse_kernels
from .ops import store_latents
from .workspace import MULTIPROCESSORS, SCORE_BYTES, SPARSE_HEADS, prompts_of

_POSITIONS = 64
"""That a program scores at once."""
_LATENTS = 32
"""That a program attends to at once."""
_ORDERED = 2048
"""Scores that a program of `choose` reads at once."""
_MOST_PARTS = 16
_TOLERANCE = 0.05
"""Of an output that is compared with torch's, over the largest: sums in 16 bits differ by less, faults by more."""


def _power(width: int) -> int:
    return int(max(16, triton.next_power_of_2(width)))  # a product of matrices needs 16


class SparseLatent(LatentAttention):
    name = "triton, sparse latent"
    replayable = True
    _width: int | None = None
    """Of a recorded step, the most positions of a sequence."""

    def __init__(self, cache: LatentCache, scale: float, topk: int, score_bytes: int = SCORE_BYTES) -> None:
        super().__init__(cache, scale, topk=topk)
        self.sparse = True
        self._scores = torch.empty(score_bytes // 4, dtype=torch.float32, device=cache.latents[0].device)
        self._table = torch.empty(0, dtype=torch.int64)

    def twin(self) -> SparseLatent:
        """Both share the scores, because they compute on one stream."""
        return copy.copy(self)

    def prepare(self, layout: StepLayout, cos: Tensor, sin: Tensor) -> None:
        self.layout, self._cos, self._sin = layout, cos, sin
        rows, table = np.arange(len(layout.kv_len)) if layout.rows is None else layout.rows, layout.block_table
        counts, device = np.diff(np.asarray(layout.query_start)), layout.positions.device
        if self._width is None:
            self._sequences, self._table = upload(np.repeat(rows, counts).astype(np.int32), device), table
            return
        # the scratch block is the last row's, and what reads it is padding
        owners = np.where(rows == len(table) - 1, -1, np.arange(len(rows)))
        sequences = np.full(len(layout.positions), -1, np.int32)
        sequences[: layout.query_start[-1]] = np.repeat(owners, counts)
        stage(self._sequences, torch.from_numpy(sequences))
        blocks = carry(table, device).index_select(0, upload(rows, device))
        width = min(blocks.shape[1], self._table.shape[1])  # only padding has more blocks than a sequence
        self._table[: len(rows), :width].copy_(blocks[:, :width])

    def store_index(self, layer: int, keys: Tensor) -> None:
        cached, layout = self.latents.index_keys[layer], self._layout()
        assert cached is not None
        self._rotate(cached, keys.contiguous()[:, None], layout, store=True)

    def _rotate(self, out: Tensor, x: Tensor, layout: StepLayout, store: bool = False) -> None:
        """Rotates x [T, H, C] into out, of its shape; store: into the cache of index keys."""
        tokens, heads, dim = x.shape
        sparse_kernels.rotate_index[(tokens, heads)](
            out, x, self._cos, self._sin, layout.blocks, layout.offsets, self.cache.block_size, HEADS=heads, DIM=dim,
            HALF=self._cos.shape[-1], STORE=store, BLOCK=_power(dim), num_warps=1,
        )  # fmt: skip

    def choose(self, layer: int, queries: Tensor, weights: Tensor) -> Tensor:
        layout, keys, topk = self._layout(), self.latents.index_keys[layer], self._topk
        assert keys is not None
        assert topk is not None
        tokens, heads, dim = queries.shape
        rotated, weights = torch.empty_like(queries), weights.contiguous()
        self._rotate(rotated, queries, layout)
        self.chosen = torch.empty((tokens, topk), dtype=torch.int32, device=queries.device)
        digest = torch.empty(tokens, dtype=torch.int64, device=queries.device)
        longest = max(layout.kv_len) if self._width is None else self._width
        width = -(-longest // _POSITIONS) * _POSITIONS
        rows = max(1, len(self._scores) // width)
        for first in range(0, tokens, rows):
            count = min(rows, tokens - first)
            parts = max(1, min(width // _POSITIONS, 2 * MULTIPROCESSORS // count))
            sparse_kernels.index_scores[(count, parts)](
                self._scores, rotated, weights, keys, self._sequences, layout.positions, self._table, first,
                self._table.stride(0), self.cache.block_size, width, topk, HEADS=heads, DIM=dim,
                HEAD_BLOCK=_power(heads), DIM_BLOCK=_power(dim), BLOCK=_POSITIONS,
            )  # fmt: skip
            sparse_kernels.choose[(count,)](
                self.chosen, digest, self._scores, self._sequences, layout.positions, first, width, FACTOR=ODD_FACTOR,
                TOPK=topk, BLOCK=_ORDERED, TOPK_BLOCK=_power(topk), num_warps=8,
            )  # fmt: skip
        return digest

    def attend(self, layer: int, qkv: Tensor, q_norm: Norm | None, k_norm: Norm | None) -> Tensor:
        assert k_norm is not None
        layout, angles = self._layout(), (self._cos, self._sin)
        queries = store_latents(self.latents, layer, qkv, k_norm, angles, layout.blocks, layout.offsets)
        return self.latent_attend(queries, layer, k_norm.weight.numel()).flatten(1)

    def latent_attend(self, q: Tensor, layer: int, rank: int) -> Tensor:
        layout, latents, (tokens, heads, width) = self._layout(), self.latents.latents[layer], q.shape
        block = min(SPARSE_HEADS, _power(heads))
        groups = -(-heads // block)
        parts = max(1, min(_MOST_PARTS, 2 * MULTIPROCESSORS // (tokens * groups)))
        out = q.new_empty((tokens, heads, rank))
        partial = sums = out
        if parts > 1:
            partial = q.new_empty((parts, *out.shape), dtype=torch.float32)
            sums = partial.new_empty((parts, tokens, heads))
        sparse_kernels.attend_chosen[(tokens, groups, parts)](
            partial, sums, q, latents, self.chosen, self._sequences, layout.positions, self._table,
            self._table.stride(0), self.cache.block_size, heads, q.stride(0), self.scale, self.chosen.shape[1],
            RANK=rank, TURNED=width - rank, HEAD_BLOCK=block, RANK_BLOCK=_power(rank),
            TURNED_BLOCK=_power(width - rank), BLOCK=_LATENTS, WHOLE=parts == 1, num_warps=8, num_stages=2,
        )  # fmt: skip
        if parts > 1:
            sparse_kernels.join_parts[(tokens * heads,)](out, partial, sums, parts, RANK=rank, BLOCK=_power(rank))
        return out

    def captured(self, shapes: Sequence[Shape], most_blocks: int) -> dict[Shape, Captured]:
        device = self._scores.device
        most = max(shape[0] + prompts_of(shape) for shape in shapes)
        table = torch.zeros((most, most_blocks), dtype=torch.int32, device=device)
        sequences = torch.zeros(max(map(sum, shapes)), dtype=torch.int32, device=device)

        def of(shape: Shape) -> SparseLatent:
            recorded = copy.copy(self)
            recorded._table, recorded._sequences = table, sequences[: sum(shape)]
            recorded._width = most_blocks * self.cache.block_size
            return recorded

        return {shape: of(shape) for shape in shapes}


def kernels_fault(latent: Latent, heads: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Computes a step with the kernels and with torch: two decodes and a chunk whose positions exceed a choice, of many
    equal scores. The difference, or None. heads: of this rank."""
    assert latent.index is not None
    topk, size, dice = latent.index.topk, 16, torch.Generator().manual_seed(0)
    lengths, starts = [topk + 100, 9, topk + 40], [0, 1, 2, 7]
    blocks = -(-max(lengths) // size)
    positions = torch.tensor([lengths[0] - 1, lengths[1] - 1, *range(lengths[2] - 5, lengths[2])])
    table = torch.randperm(3 * blocks, generator=dice).view(3, blocks)
    owners = torch.tensor([0, 1, 2, 2, 2, 2, 2])
    angle = torch.rand((len(positions), 1, latent.rotated // 2), generator=dice)

    def there(x: Tensor) -> Tensor:
        return carry(x, device)

    def whole(*shape: int) -> Tensor:
        """Numbers of which sums are exact in any order."""
        return there(torch.randint(-2, 3, shape, generator=dice).to(dtype))

    layout = StepLayout(
        there(positions), starts, lengths, there(table), there(table[owners, positions // size]),
        there(positions % size), 2,
    )  # fmt: skip
    index = replace(latent.index, full=(True,))
    config = SimpleNamespace(num_layers=1, head_dim=latent.width, latent=SimpleNamespace(index=index))
    shard: Any = SimpleNamespace(config=config, num_kv_heads=1)
    cache = LatentCache(shard, 3 * blocks, size, dtype, device)
    index_keys = cache.index_keys[0]
    assert index_keys is not None
    stored, own = whole(*index_keys.shape), whole(len(positions), latent.index.dim)
    cache.latents[0].copy_(there(torch.randn(cache.latents[0].shape, generator=dice).to(dtype)))
    queries, weights = whole(len(positions), index.heads, index.dim), whole(len(positions), index.heads).float()
    x = there(torch.randn((len(positions), (heads + 1) * latent.width), generator=dice).to(dtype))
    norm = Norm(there(torch.ones(latent.rank, dtype=dtype)), latent.norm_eps)
    still = torch.ones_like(angle), torch.zeros_like(angle)  # so that index queries stay whole numbers
    results = list[list[Any]]()
    for attention in (LatentAttention(cache, 0.1, topk=topk), SparseLatent(cache, 0.1, topk)):
        index_keys.copy_(stored)
        attention.prepare(layout, there(still[0]), there(still[1]))
        attention.store_index(0, own)
        digest = attention.choose(0, queries, weights)
        attention.prepare(layout, there(angle.cos()), there(angle.sin()))
        out = attention.attend(0, x.clone(), None, norm)
        results.append([download(part)() for part in (attention.chosen, digest, out.float())])
    expected, computed = results
    for name, one, other in zip(("positions chosen", "digests"), expected, computed, strict=False):
        if not np.array_equal(one, other):
            return f"{name} differ from torch's"
    difference, largest = np.abs(expected[2] - computed[2]).max(), np.abs(expected[2]).max()
    return (
        None if difference <= _TOLERANCE * largest else f"outputs differ by {difference:g} of {largest:g} from torch's"
    )
