"""The choice of positions under sparse attention by the C kernels, in every tier that this processor can play, against
the portable backend; and what attention then reads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernel_tiers import NEEDS_KERNELS, seed, tier
from laddertron.models.config.latent import Index
from laddertron.models.cpu.kernels import Kernels
from laddertron.models.cpu.latent import CpuLatentAttention
from laddertron.models.latent import LatentAttention, LatentCache
from laddertron.models.ops import Norm
from test_latent_kernels import make_layout
from torch import Tensor

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CHUNKS = [(12, 13), (300, 301), (8, 9), (0, 31), (20, 47), (1030, 1041)]
"""Contexts below, at and above the 13 positions of a choice; one of more than a job's."""
RANK, TURNED, HEADS = 32, 8, 3
SHAPES = [(3, 12), (33, 20), (64, 128)]
"""Heads and elements of the index."""

__all__ = ["seed", "tier"]
pytestmark = NEEDS_KERNELS


@pytest.fixture
def kernels(tier: str) -> Kernels:
    kernels = Kernels.find()
    assert kernels is not None
    return kernels


class Step:
    """Tokens of CHUNKS over caches that hold the same numbers for each backend."""

    def __init__(self, dtype: torch.dtype, heads: int, dim: int, topk: int = 13, chunks: list[Any] = CHUNKS) -> None:
        self.layout = make_layout(chunks, 16, sum(last - first == 1 for first, last in chunks))
        tokens, blocks = len(self.layout.positions), int(self.layout.block_table.max()) + 1
        # whole numbers: sums are exact in any order, so that equal sums are many, and the same everywhere
        self.queries, self.keys, self.past = (
            torch.randint(-2, 3, shape).to(dtype) for shape in ((tokens, heads, dim), (tokens, dim), (blocks, 16, dim))
        )
        self.weights = torch.randint(-2, 3, (tokens, heads)).float()
        self.x = torch.randn(tokens, (HEADS + 1) * (RANK + TURNED)).to(dtype)
        self.latents = torch.randn(blocks, 16, RANK + TURNED).to(dtype)
        self.angles = torch.ones(tokens, 1, TURNED // 2), torch.zeros(tokens, 1, TURNED // 2)
        self.norm, self.topk = Norm(torch.ones(RANK).to(dtype), 1e-6), topk
        index = Index(heads, dim, topk, False, (True,))
        config = SimpleNamespace(num_layers=1, head_dim=RANK + TURNED, latent=SimpleNamespace(index=index))
        self.shard: Any = SimpleNamespace(config=config, num_kv_heads=1)

    def backend(self, kernels: Kernels | None, **options: Any) -> LatentAttention:
        blocks, size, _ = self.past.shape
        cache = LatentCache(self.shard, blocks, size, self.x.dtype, torch.device("cpu"))
        cache.latents[0].copy_(self.latents)
        assert cache.index_keys[0] is not None
        cache.index_keys[0].copy_(self.past)
        if kernels is None:
            return LatentAttention(cache, 0.2, topk=self.topk)
        return CpuLatentAttention(cache, 0.2, kernels, topk=self.topk, **options)

    def run(self, attention: LatentAttention) -> tuple[Tensor, Tensor, Tensor]:
        """The choice, its digest, and what the tokens become."""
        attention.prepare(self.layout, *self.angles)
        attention.store_index(0, self.keys)
        digest = attention.choose(0, self.queries, self.weights)
        return (
            attention.chosen,
            digest,
            attention.attend(0, self.x.clone(), None, self.norm),
        )  # it may turn them in place


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernels_choose_as_the_portable_backend_does(
    kernels: Kernels, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    """With many equal sums; and attend to the same positions."""
    step = Step(dtype, *shape)
    (want, digest, out), (got, own, result) = step.run(step.backend(None)), step.run(step.backend(kernels))
    assert torch.equal(got, want)
    assert torch.equal(own, digest)
    counts = (step.layout.positions + 1).clamp(max=step.topk)
    assert ((got >= 0).sum(-1) == counts).all()
    bound = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}[dtype]
    assert (result.float() - out.flatten(1).float()).abs().max() <= bound * out.float().abs().max()


@pytest.mark.parametrize("portable", [True, False])
def test_of_equal_sums_the_lower_position_comes_first(kernels: Kernels, portable: bool) -> None:
    """Weights of zero: every sum is equal. A negative sum is below that of positions whose products are negative."""
    step = Step(torch.float32, 4, 12)
    step.weights.zero_()
    chosen = step.run(step.backend(None if portable else kernels))[0]
    for row, position in zip(chosen.tolist(), step.layout.positions.tolist(), strict=True):
        count = min(position + 1, step.topk)
        assert row == [*range(count), *[-1] * (step.topk - count)]
    step.weights.fill_(-1.0)
    step.queries.zero_()[:, :, 0] = 1.0
    step.keys.zero_()
    step.past.zero_()[:, ::2, 0] = 1.0  # positions of even offsets lose
    step.past[:, 1::2, 0] = -1.0
    row = step.run(step.backend(None if portable else kernels))[0][1].tolist()
    assert row == list(range(1, 2 * step.topk, 2))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_choice_does_not_depend_on_the_other_rows(kernels: Kernels, dtype: torch.dtype) -> None:
    """However many threads and waves: the same choice and the same bits."""
    step = Step(dtype, 8, 16)
    step.queries, step.weights = torch.randn(step.queries.shape).to(dtype), torch.randn(step.weights.shape)
    together = step.run(step.backend(kernels))
    for threads, space in ((1, 1 << 24), (3, 1 << 24), (2, 1), (2, 100_000)):
        kernels.threads = threads
        for part, same in zip(step.run(step.backend(kernels, space=space)), together, strict=True):
            assert torch.equal(part, same)


def test_attention_reads_no_latent_that_was_not_chosen(kernels: Kernels) -> None:
    """At 32k positions with V3.2's 2,048: every other latent is NaN, and would show. A decode so reads the index keys
    and 2,048 latents: 10.7 MB in place of 37.7 MB of latents at V3.2's sizes."""
    step = Step(torch.bfloat16, 4, 16, topk=2048, chunks=[(32767, 32768)])
    attention = step.backend(kernels)
    attention.prepare(step.layout, *step.angles)
    attention.store_index(0, step.keys)
    attention.choose(0, step.queries, step.weights)
    flat, table = attention.latents.latents[0].flatten(0, 1), step.layout.block_table[0]
    chosen = attention.chosen[0].long()
    assert len(set(chosen.tolist())) == 2048
    slots = table[chosen // 16] * 16 + chosen % 16
    own = step.layout.positions
    others = torch.ones(len(flat), dtype=torch.bool)
    others[slots] = False
    others[table[own // 16] * 16 + own % 16] = False
    flat[others] = torch.nan
    assert torch.isfinite(attention.attend(0, step.x, None, step.norm)).all()
    flat[slots[0]] = torch.nan
    assert not torch.isfinite(attention.attend(0, step.x, None, step.norm)).any(), "what is read shows"


@pytest.mark.parametrize("portable", [True, False])
def test_a_key_that_is_nan_reaches_no_other_sequence(kernels: Kernels, portable: bool) -> None:
    step = Step(torch.float32, 4, 12)
    backend = None if portable else kernels
    healthy = step.run(step.backend(backend))[0]
    step.keys[1] = torch.nan
    sick = step.run(step.backend(backend))[0]
    others = torch.arange(len(healthy)) != 1
    assert torch.equal(sick[others], healthy[others])
    assert ((sick[1] >= 0) & (sick[1] <= 300)).all()
