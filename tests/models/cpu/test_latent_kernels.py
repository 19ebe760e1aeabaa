"""Attention over latents by the C kernels against the portable backend, in every tier that this processor can play."""

from __future__ import annotations

from bisect import bisect
from dataclasses import dataclass, replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernel_tiers import NEEDS_KERNELS, kernels, seed, tier
from laddertron.models.attention import StepLayout
from laddertron.models.config.latent import EXPANDED_SPACE, Expansion, Latent
from laddertron.models.cpu.kernels import Kernels
from laddertron.models.cpu.latent import CpuLatentAttention, fits_kernels
from laddertron.models.cpu.ops import CpuOps
from laddertron.models.latent import LatentAttention, LatentCache
from laddertron.models.latent_layer import LatentProducts, _by_head
from laddertron.models.ops import Norm
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = [(64, 16, 5), (96, 8, 16), (24, 8, 3), (512, 64, 40)]
"""Rank, rotary, heads: on the dot products' grid and off it, fewer heads than a vector has places and more."""
CHUNKS = [(4, 5), (700, 701), (255, 256), (0, 61), (230, 291)]
"""Positions [first, last) of each sequence's new tokens: three decodes, then prompts and chunks of them."""

__all__ = ["kernels", "seed", "tier"]
pytestmark = NEEDS_KERNELS


def make_layout(chunks: list[tuple[int, int]], size: int, decode: int) -> StepLayout:
    """Scattered blocks; a table is filled up with block 0, which is no sequence's."""
    counts, starts = [-(-last // size) for _, last in chunks], [0]
    free = torch.randperm(sum(counts)) + 1
    table = torch.zeros(len(chunks), max(counts), dtype=torch.int64)
    positions, blocks = [], []
    for row, count, (first, last) in zip(table, counts, chunks, strict=True):
        row[:count], free = free[:count], free[count:]
        positions.append(torch.arange(first, last))
        blocks.append(row[positions[-1] // size])
        starts.append(starts[-1] + last - first)
    at = torch.cat(positions)
    return StepLayout(at, starts, [last for _, last in chunks], table, torch.cat(blocks), at % size, decode)


@dataclass(frozen=True)
class Step:
    """Tokens x [T, (heads + 1) * width] over a cache that holds other numbers."""

    layout: StepLayout
    rank: int
    x: Tensor
    held: Tensor
    angle: Tensor
    norm: Norm

    def cache(self) -> LatentCache:
        blocks, size, width = self.held.shape
        shard: Any = SimpleNamespace(config=SimpleNamespace(num_layers=1, head_dim=width, latent=None), num_kv_heads=1)
        cache = LatentCache(shard, blocks, size, self.held.dtype, torch.device("cpu"))
        cache.latents[0].copy_(self.held)
        return cache

    def torch(self) -> LatentAttention:
        return LatentAttention(self.cache(), self.held.shape[2] ** -0.5)

    def kernels(self, kernels: Kernels, **options: Any) -> CpuLatentAttention:
        return CpuLatentAttention(self.cache(), self.held.shape[2] ** -0.5, kernels, **options)

    def by(self, attention: LatentAttention, first: int = 0, last: int | None = None) -> Tensor:
        """What the tokens [first, last), all of them one sequence's unless it is all, become."""
        rows, layout = slice(first, last), self.layout
        if last is not None:
            s = bisect(layout.query_start, first) - 1
            length = int(layout.positions[last - 1]) + 1
            at, table = layout.positions[rows], layout.block_table[s : s + 1]
            decode = int(last - first == 1)
            layout = StepLayout(at, [0, len(at)], [length], table, layout.blocks[rows], layout.offsets[rows], decode)
        attention.prepare(layout, self.angle[rows].cos(), self.angle[rows].sin())
        return attention.attend(0, self.x[rows], None, self.norm)


def make_step(chunks: list[tuple[int, int]], shape: tuple[int, int, int], dtype: torch.dtype) -> Step:
    rank, rotary, heads = shape
    decode = next((i for i, (first, last) in enumerate(chunks) if last - first > 1), len(chunks))
    layout = make_layout(chunks, 16, decode)
    tokens, blocks = len(layout.positions), int(layout.block_table.max()) + 1
    return Step(
        layout,
        rank,
        torch.randn(tokens, (heads + 1) * (rank + rotary)).to(dtype),
        torch.randn(blocks, 16, rank + rotary).to(dtype),
        torch.randn(tokens, 1, rotary // 2),
        Norm((1 + torch.randn(rank) / 8).to(dtype), 1e-6),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_mean_what_the_portable_backend_means(
    kernels: Kernels, dtype: torch.dtype, shape: tuple[int, int, int]
) -> None:
    """Decodes, whole prompts and chunks that began before: the outputs are those in fp32, rounded, and the stored
    latents those of the same type."""
    step = make_step(CHUNKS, shape, dtype)
    portable, own = step.torch(), step.kernels(kernels)
    norm = Norm(step.norm.weight.float(), step.norm.eps)
    wide = replace(step, x=step.x.float(), held=step.held.float(), norm=norm)
    exact, got = wide.by(wide.torch()), step.by(own)
    step.by(portable)
    bound = {torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}[dtype]
    assert (got.float() - exact).abs().max() <= bound * exact.abs().max()
    stored, expected = own.latents.latents[0].float(), portable.latents.latents[0].float()
    assert (stored - expected).abs().max() <= bound * expected.abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_the_others(kernels: Kernels, dtype: torch.dtype) -> None:
    """As a decode, in a chunk of its prompt, among all; however many threads and waves: the same bits."""
    step = make_step(CHUNKS, SHAPES[0], dtype)
    together = step.by(step.kernels(kernels))
    for threads in (1, 3):
        kernels.threads = threads
        assert torch.equal(step.by(step.kernels(kernels)), together)
    for space in (1, 100_000):
        assert torch.equal(step.by(step.kernels(kernels, space=space)), together)
    alone = step.kernels(kernels)
    for start, end in pairwise(step.layout.query_start):
        middle = (start + end) // 2
        parts = [step.by(alone, first, last) for first, last in ((start, middle), (middle, end)) if first < last]
        assert torch.equal(torch.cat(parts), together[start:end])
        assert torch.equal(step.by(alone, end - 1, end)[0], together[end - 1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_reaches_no_other_row(kernels: Kernels, dtype: torch.dtype) -> None:
    """Not from behind a sequence's end, nor from one head's query or another sequence's latents."""
    heads = SHAPES[0][2]
    step = make_step(CHUNKS, SHAPES[0], dtype)
    step.held[0] = torch.nan
    step.x.view(len(step.x), heads + 1, -1)[0, 1, 3] = torch.nan
    step.held[step.layout.block_table[1, 2]] = torch.nan
    out = step.by(step.kernels(kernels)).view(len(step.x), heads, -1)
    assert out[0, 1].isnan().all()
    assert out[1].isnan().all()
    assert out[0, torch.arange(heads) != 1].isfinite().all()
    assert out[2:].isfinite().all()


def test_what_the_kernels_serve() -> None:
    """Latents in the model's own type, of a width for which they have room."""
    step = make_step([(0, 1)], (64, 16, 2), torch.bfloat16)
    assert fits_kernels(step.cache(), torch.bfloat16)
    assert not fits_kernels(step.cache(), torch.float32)
    assert not fits_kernels(make_step([(0, 1)], (2048, 2, 1), torch.bfloat16).cache(), torch.bfloat16)


SIZES = Latent(rank=64, rotated=8, plain=12, value=10, query_rank=0, interleaved=False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunks", [CHUNKS, [(0, 61), (100, 291)]], ids=["mixed", "prompts"])
def test_expanded_chunks_mean_what_absorbed_ones_do(dtype: torch.dtype, chunks: list[tuple[int, int]]) -> None:
    """A layer's products over a step with a whole prompt and a later chunk in expanded form: the same outputs and the
    same cache as with every token in absorbed form."""
    heads, kernels = 5, Kernels.find()
    assert kernels is not None
    decode = sum(last - first == 1 for first, last in chunks)
    layout, width = make_layout(chunks, 16, decode), SIZES.width
    tokens, scale = layout.query_start[-1], (SIZES.plain + SIZES.rotated) ** -0.5
    ops, keys = CpuOps(kernels), torch.randn(heads, SIZES.plain, SIZES.rank).to(dtype) / 8
    values = torch.randn(heads, SIZES.value, SIZES.rank).to(dtype) / 8
    queries, outputs = (_by_head(ops, weights) for weights in (keys.transpose(1, 2), values))
    norm, angle = Norm(torch.randn(SIZES.rank).to(dtype), 1e-6), torch.randn(tokens, 1, SIZES.rotated // 2)
    products = LatentProducts(SIZES, heads, None, queries, outputs, norm, _by_head(ops, keys))
    x = torch.randn(tokens, heads * (SIZES.plain + SIZES.rotated) + width).to(dtype)
    shard: Any = SimpleNamespace(config=SimpleNamespace(num_layers=1, head_dim=width, latent=None), num_kv_heads=1)
    past, found = torch.randn(int(layout.block_table.max()) + 1, 16, width), []
    for expansion in (None, Expansion(SIZES, heads, dtype.itemsize)):
        cache = LatentCache(shard, len(past), 16, dtype, torch.device("cpu"))
        cache.latents[0].copy_(past)
        attention = CpuLatentAttention(cache, scale, kernels, expansion=expansion)
        attention.prepare(layout, angle.cos(), angle.sin())
        assert len(attention.expanded) == (2 if expansion else 0)
        found.append((products(attention, 0, x, x, lambda digests: None).float(), cache.latents[0].float()))
    for absorbed, expanded in zip(*found, strict=True):
        bits = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]
        assert (absorbed - expanded).abs().max() < bits * absorbed.abs().max()


def test_the_form_with_fewer_multiplications_is_chosen() -> None:
    """DeepSeek-V3 on 16 ranks: whole prompts, chunks of 170 tokens and more, however long the context; never drafts,
    nor what has no room. The measured ratio of both forms crosses one at the same places."""
    v3 = Expansion(Latent(512, 64, 128, 128, 1536, True), 8, 2)
    cases = {(64, 64): True, (64, 1024): False, (128, 4096): False, (256, 1024): True, (256, 4096): True}
    cases |= {(1024, 4096): True, (8, 8): False, (1024, 1 << 17): False}
    assert {case: v3.pays(*case) for case in cases} == cases
    assert v3.bytes_for(4096) < EXPANDED_SPACE < v3.bytes_for(1 << 17)
    assert not Expansion(Latent(64, 2, 4, 8, 0, True), 8, 2).pays(64, 64), "values wider than keys"
