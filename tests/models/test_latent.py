"""Latent attention against plain attention over expanded keys and values, sequence by sequence."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from laddertron.models.attention import StepLayout
from laddertron.models.latent import LatentAttention, LatentCache
from laddertron.models.ops import Norm
from test_cpu_ops import assert_near, prompt_layout
from torch import Tensor

RANK, ROTARY, PLAIN, VALUE, HEADS = 24, 8, 12, 10, 6
WIDTH = RANK + ROTARY
SCALE = (PLAIN + ROTARY) ** -0.5
CPU = torch.device("cpu")


def make_cache(blocks: int, size: int, dtype: torch.dtype) -> LatentCache:
    """Of two layers, every block full of another sequence's numbers."""
    shard: Any = SimpleNamespace(config=SimpleNamespace(num_layers=2, head_dim=WIDTH, latent=None), num_kv_heads=1)
    cache = LatentCache(shard, blocks, size, dtype, CPU)
    for latents in cache.latents:
        latents.copy_(torch.randn(latents.shape))
    return cache


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def turned(x: Tensor, angle: Tensor) -> Tensor:
    """The pairs (j, j + r / 2) of [..., r] as complex numbers, times e^(i angle)."""
    half = ROTARY // 2
    out = torch.view_as_complex(torch.stack((x[..., :half], x[..., half:]), -1)) * torch.polar(angle * 0 + 1, angle)
    return torch.cat((out.real, out.imag), -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [4, 16])
def test_absorbed_means_what_expanded_means(dtype: torch.dtype, size: int) -> None:
    """Two decodes, a whole prompt, a chunk of one that began before and one token's prompt, in scattered blocks:
    softmax over expanded keys and values of each token's own sequence."""
    torch.manual_seed(3)
    chunks = [(4, 5), (70, 71), (0, 30), (20, 47), (0, 1)]
    layout = replace(prompt_layout(chunks, size), decode=2)

    check(layout, chunks, size, dtype)


def test_tokens_of_one_sequence_may_follow_one_another_as_decodes() -> None:
    torch.manual_seed(4)
    table = torch.tensor([[3, 1, 2]] * 3)
    at = torch.tensor([9, 10, 11])
    rows = torch.arange(3)
    layout = StepLayout(at, [0, 1, 2, 3], [10, 11, 12], table, table[rows, at // 4], at % 4, 3, chained=True)
    check(layout, [(9, 10), (10, 11), (11, 12)], 4, torch.float32, chained=True)


def check(
    layout: StepLayout, chunks: list[tuple[int, int]], size: int, dtype: torch.dtype, chained: bool = False
) -> None:
    cache = make_cache(int(layout.block_table.max()) + 1, size, dtype)
    tokens = layout.query_start[-1]
    keys, values = torch.randn(HEADS, PLAIN, RANK) / RANK**0.5, torch.randn(HEADS, VALUE, RANK) / RANK**0.5
    queries = torch.randn(tokens, HEADS, PLAIN + ROTARY)
    stored, norm = torch.randn(tokens, WIDTH), Norm(torch.randn(RANK).to(dtype), 1e-6)
    angle = torch.randn(tokens, 1, ROTARY // 2)
    absorbed = torch.einsum("thp,hpr->thr", queries[..., :PLAIN], keys)
    rows = torch.cat((torch.cat((absorbed, queries[..., PLAIN:]), -1), stored.unsqueeze(1)), 1)
    held = [latents.clone() for latents in cache.latents]
    attention = LatentAttention(cache, SCALE)
    attention.prepare(layout, angle.cos(), angle.sin())
    out = attention.attend(1, rows.flatten(1).to(dtype), None, norm)
    got = torch.einsum("thr,hvr->thv", out.view(tokens, HEADS, RANK).float(), values)

    own = torch.cat((rms(stored[:, :RANK], norm.weight.float()), turned(stored[:, RANK:], angle[:, 0])), -1)
    expected = []
    past = held[1].float()
    if chained:
        past[layout.blocks, layout.offsets] = own
    for i, (first, last) in enumerate(chunks):
        seen = past[layout.block_table[i]].flatten(0, 1)[:last].clone()
        seen[first:last] = own[layout.query_start[i] : layout.query_start[i + 1]]
        for place, at in enumerate(range(first, last), layout.query_start[i]):
            latents, rotated = seen[: at + 1, :RANK], seen[: at + 1, RANK:]
            query = torch.cat((queries[place, :, :PLAIN], turned(queries[place, :, PLAIN:], angle[place])), -1)
            key = torch.cat((torch.einsum("hpr,nr->hnp", keys, latents), rotated.expand(HEADS, -1, -1)), -1)
            weight = (torch.einsum("hc,hnc->hn", query, key) * SCALE).softmax(-1)
            expected.append(torch.einsum("hn,nr,hvr->hv", weight, latents, values))
    assert_near(got.to(dtype), torch.stack(expected).to(dtype))
    assert_near(cache.latents[1][layout.blocks, layout.offsets], own.to(dtype))
    held[1][layout.blocks, layout.offsets] = cache.latents[1][layout.blocks, layout.offsets]
    assert all(torch.equal(a, b) for a, b in zip(cache.latents, held, strict=True))


def test_blocks_are_copied_and_healed_once_for_keys_and_values() -> None:
    cache = make_cache(3, 4, torch.float32)
    cache.latents[1][1, 2, 5] = float("nan")
    cache.copy([(1, 2)])
    assert torch.equal(cache.latents[0][2], cache.latents[0][1])
    cache.zero_blocks([1])
    assert cache.latents[1][1].isfinite().all()
    assert cache.latents[1][2].isnan().sum() == 1
    assert cache.keys[1].data_ptr() == cache.values[1].data_ptr() == cache.latents[1].data_ptr()


def test_nan_of_one_sequence_stays_its_own() -> None:
    """A decode's block table is filled up behind the sequence's own blocks with another's."""
    cache = make_cache(4, 4, torch.float32)
    cache.latents[0][0] = float("nan")
    table = torch.tensor([[1, 0, 0], [0, 2, 3]])
    at = torch.tensor([1, 9])
    layout = StepLayout(at, [0, 1, 2], [2, 10], table, torch.tensor([1, 3]), torch.tensor([1, 1]), 2)
    attention = LatentAttention(cache, SCALE)
    attention.prepare(layout, torch.ones(2, 1, ROTARY // 2), torch.zeros(2, 1, ROTARY // 2))
    norm = Norm(torch.ones(RANK), 1e-6)
    healthy, sick = attention.attend(0, torch.ones(2, (HEADS + 1) * WIDTH), None, norm)
    assert healthy.isfinite().all()
    assert sick.isnan().any()
