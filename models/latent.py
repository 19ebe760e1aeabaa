"""Latent attention (arXiv 2405.04434, MLA): a token's cache is one latent and one rotated key, the same for all heads.

In absorbed form: the part of the key's projection that belongs to a head is multiplied into its query, that of the
value's into its output, so that heads attend to latents. In expanded form each head's keys and values are made of the
latents, which long chunks of prompts gain by. R: the latent's width, r: the rotated key's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .attention import KVCache, StepLayout, TorchAttention
from .config.latent import GATHERED, Expansion
from .ops import Norm, rms_norm, rotate
from .stages import RankShard
from .transfer import upload

ODD_FACTOR = 0x1E3779B97F4A7C15
"""Odd, so that its multiples differ modulo 2^64. Numbers are mixed into digests by such multiples, with the high bits
mixed into the low ones."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk in expanded form: its `rows` of the step, its sequence's positions and blocks, its tokens' places in the
    cache and angles; mask [T, length], None: causal."""

    rows: slice
    length: int
    table: Tensor
    blocks: Tensor
    offsets: Tensor
    cos: Tensor
    sin: Tensor
    mask: Tensor | None


class LatentCache(KVCache):
    """`latents[l]` is [blocks, block_size, R + r]: the normed latent, then the rotated key. As keys they are of one
    head, and values are their first R columns. With sparse attention `index_keys[l]` is [blocks, block_size, dim] in
    layers that choose positions, else None."""

    values_are_keys = True

    def __init__(
        self, shard: RankShard, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(shard, num_blocks, block_size, dtype, device)
        self.latents = [latent.squeeze(1) for latent in self.keys]
        index = None if (latent := shard.config.latent) is None else latent.index
        shape = (num_blocks, block_size, 0 if index is None else index.dim)
        self.index_keys = [self._zeros(shape, dtype) if full else None for full in (index.full if index else ())]

    @property
    def tensors(self) -> list[Tensor]:
        return [*self.keys, *(keys for keys in self.index_keys if keys is not None)]

    def store(self, layer: int, blocks: Tensor, offsets: Tensor, latents: Tensor) -> None:
        """Stores latents [T, R + r] at (blocks[t], offsets[t])."""
        self.latents[layer][blocks, offsets] = self._stored(latents)


class LatentAttention(TorchAttention):
    """The portable backend. `attend` takes [T, (H + 1) * (R + r)]: queries in latent space and the part to be rotated
    of each, then the latent, not yet normed, and the key, not yet rotated -> [T, H * R]. k_norm is the latent's."""

    name = "torch, latent"

    def __init__(
        self, cache: LatentCache, scale: float, expansion: Expansion | None = None, topk: int | None = None
    ) -> None:
        """expansion: None where every token is computed in absorbed form; topk: of the positions that a token's index
        chooses, None: it attends to all."""
        super().__init__(cache, (None,) * len(cache.latents), scale)
        self.latents, self._expansion = cache, expansion
        self.expanded: list[Chunk] = []
        self.absorbed = torch.empty(0, dtype=torch.int64)
        """Rows of the step that are in no expanded chunk, if there is one: those that `attend` takes."""
        self._topk = topk
        self._rows: tuple[StepLayout, Tensor, Tensor]
        self._sequences: Tensor
        """Of the rows that `attend` takes of a sparse step, [T]."""
        self.sparse = False
        """Whether a token of the step has more positions than it may attend to."""
        self.chosen = torch.empty(0, 0, dtype=torch.int32)
        """Positions [T, topk] of the step's tokens, ascending, then -1; those of the last layer that chose."""

    def prepare(self, layout: StepLayout, cos: Tensor, sin: Tensor) -> None:
        start, prompts = layout.query_start, range(layout.decode, len(layout.kv_len))
        rule, self._rows = self._expansion, (layout, cos, sin)
        most = max(layout.kv_len) if self._topk is None else self._topk
        self.sparse, sequences = max(layout.kv_len) > most, [i for i in prompts if layout.kv_len[i] <= most]
        chosen = [i for i in sequences if rule and rule.pays(start[i + 1] - start[i], layout.kv_len[i])]
        self.expanded = [self._chunk(layout, i, cos, sin) for i in chosen]
        if chosen:
            layout, self.absorbed = _without(layout, set(chosen))
            cos, sin = cos[self.absorbed], sin[self.absorbed]
        super().prepare(layout, cos, sin)
        if self.sparse:
            lengths = np.diff(np.asarray(layout.query_start))
            self._sequences = upload(np.repeat(np.arange(len(lengths)), lengths), layout.block_table.device)

    def _chunk(self, layout: StepLayout, i: int, cos: Tensor, sin: Tensor) -> Chunk:
        rows, length = slice(layout.query_start[i], layout.query_start[i + 1]), layout.kv_len[i]
        begins = rows.stop - rows.start == length
        mask = None if begins else self._seen(layout.positions[rows, None], length, None)
        table, where = layout.block_table[i : i + 1], (layout.blocks[rows], layout.offsets[rows])
        return Chunk(rows, length, table, *where, cos[rows], sin[rows], mask)

    def extend(self, layer: int, chunk: Chunk, own: Tensor, norm: Norm) -> Tensor:
        """Stores the chunk's latents and keys, of its rows own [T, R + r]; returns its sequence's [length, R + r]."""
        rank = norm.weight.numel()
        key = rotate(own[:, None, rank:], chunk.cos, chunk.sin)[:, 0]
        self.latents.store(layer, chunk.blocks, chunk.offsets, torch.cat((rms_norm(own[:, :rank], norm), key), -1))
        return self._gathered(layer, chunk.table, chunk.length, own.dtype)[0]

    def store_index(self, layer: int, keys: Tensor) -> None:
        """Stores the index keys [T, dim] of all rows, which are not yet rotated."""
        (layout, cos, sin), cached = self._rows, self.latents.index_keys[layer]
        assert cached is not None
        cached[layout.blocks, layout.offsets] = self.latents._stored(rotate(keys[:, None], cos, sin)[:, 0])

    def choose(self, layer: int, queries: Tensor, weights: Tensor) -> Tensor:
        """Chooses each token's positions by queries [T, H, dim], not yet rotated, and weights [T, H] in fp32, after
        store_index. Of equal sums the lower position comes first. Returns a digest [T] int64 of the choice."""
        _, cos, sin = self._rows
        self.chosen = self._choose(layer, rotate(queries, cos, sin), weights)
        mixed = (self.chosen.long() + 1) * ODD_FACTOR
        return (mixed ^ (mixed >> 29)).mul_(ODD_FACTOR).sum(-1)

    def _choose(self, layer: int, queries: Tensor, weights: Tensor) -> Tensor:
        layout, cached, topk = self._rows[0], self.latents.index_keys[layer], self._topk
        assert cached is not None
        assert topk is not None
        chosen = torch.full((len(queries), topk), -1, dtype=torch.int32, device=queries.device)
        for i, (first, last) in enumerate(pairwise(layout.query_start)):
            table = layout.block_table[i, : -(-layout.kv_len[i] // self.cache.block_size)]
            keys = cached[table].flatten(0, 1)[: layout.kv_len[i]].float()
            rows = max(1, GATHERED // (4 * queries.shape[1] * len(keys)))
            for at in range(first, last, rows):
                some = slice(at, min(at + rows, last))
                scores = (queries[some].float() @ keys.T).relu_().mul_(weights[some, :, None]).sum(1)
                positions = layout.positions[some, None]
                scores.masked_fill_(torch.arange(len(keys), device=keys.device) > positions, -torch.inf)
                best = torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :topk]
                best = best.masked_fill(best > positions, len(keys)).sort(-1).values
                chosen[some, : best.shape[1]] = best.masked_fill(best == len(keys), -1).int()
        return chosen

    def _attend_chosen(self, q: Tensor, layer: int, rank: int) -> Tensor:
        """latent_attend, over each token's own positions."""
        layout, size = self._layout(), self.cache.block_size
        positions = self.chosen[self.absorbed] if self.expanded else self.chosen
        cached, parts = self.latents.latents[layer].flatten(0, 1), []
        rows = max(1, GATHERED // (positions.shape[1] * cached.shape[1] * q.element_size()))
        for at in range(0, len(q), rows):
            some = positions[at : at + rows].long()
            own = some.clamp(min=0)  # without a position: its sequence's first, which counts nothing
            tables = layout.block_table[self._sequences[at : at + rows]]
            slots = tables.gather(1, own // size) * size + own % size
            keys, mask = cached[slots].to(q.dtype).unsqueeze(1), (some >= 0)[:, None, None]
            out = scaled_dot_product_attention(q[at : at + rows, None], keys, keys, mask, scale=self.scale)
            parts.append(out[:, 0, :, :rank])
        return torch.cat(parts)

    def attend(self, layer: int, qkv: Tensor, q_norm: Norm | None, k_norm: Norm | None) -> Tensor:
        assert k_norm is not None
        queries = self._rotate_and_store(layer, qkv, k_norm)
        return self.latent_attend(queries, layer, k_norm.weight.numel()).flatten(1)

    def _rotate_and_store(self, layer: int, qkv: Tensor, norm: Norm) -> Tensor:
        """Rotated queries [T, H, R + r], once the tokens' latents and keys are stored."""
        layout, rank = self._layout(), norm.weight.numel()
        x = qkv.view(len(qkv), -1, self.latents.latents[layer].shape[2])
        turned = rotate(x[..., rank:], self._cos, self._sin)
        latent = torch.cat((rms_norm(x[:, -1, :rank], norm), turned[:, -1]), -1)
        self.latents.store(layer, layout.blocks, layout.offsets, latent)
        return torch.cat((x[:, :-1, :rank], turned[:, :-1]), -1)

    def latent_attend(self, q: Tensor, layer: int, rank: int) -> Tensor:
        """Rotated queries [T, H, R + r] -> [T, H, R] over what is stored of each token's sequence up to itself."""
        if self.sparse:
            return self._attend_chosen(q, layer, rank)
        layout, (decode_mask, masks) = self._layout(), self._masks[None]
        parts, decode, start = [], layout.decode, layout.query_start
        if decode:
            # NOTE: heads as rows: torch would copy the one key head for each query head.
            keys = self._gathered(layer, self._decode_table, max(layout.kv_len[:decode]), q.dtype).unsqueeze(1)
            out = scaled_dot_product_attention(q[:decode].unsqueeze(1), keys, keys, decode_mask, scale=self.scale)
            parts.append(out[:, 0, :, :rank])
        for i, mask in enumerate(masks, decode):
            keys = self._gathered(layer, layout.block_table[i : i + 1], layout.kv_len[i], q.dtype)
            queries = q[start[i] : start[i + 1]].transpose(0, 1)
            keys = keys.expand(len(queries), -1, -1)
            out = scaled_dot_product_attention(queries, keys, keys, mask, is_causal=mask is None, scale=self.scale)
            parts.append(out[..., :rank].transpose(0, 1))
        return torch.cat(parts)

    def expanded_attend(self, chunk: Chunk, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [H, T, C], its last r not yet rotated, k and v [H, length, C] -> [T, H, C]."""
        rotated = 2 * chunk.cos.shape[-1]
        q[..., -rotated:] = rotate(q[..., -rotated:].transpose(0, 1), chunk.cos, chunk.sin).transpose(0, 1)
        causal = chunk.mask is None
        out = scaled_dot_product_attention(q[None], k[None], v[None], chunk.mask, is_causal=causal, scale=self.scale)
        return out[0].transpose(0, 1)

    def _gathered(self, layer: int, table: Tensor, length: int, dtype: torch.dtype) -> Tensor:
        """The latents and keys [N, length, R + r] of the sequences in table [N, blocks]."""
        table = table[:, : -(-length // self.cache.block_size)]
        return self.latents.latents[layer][table].flatten(1, 2)[:, :length].to(dtype)


def _without(layout: StepLayout, left: set[int]) -> tuple[StepLayout, Tensor]:
    """The step without these sequences, and which of its rows remain."""
    start, rest = layout.query_start, [i for i in range(len(layout.kv_len)) if i not in left]
    rows = torch.tensor([row for i in rest for row in range(start[i], start[i + 1])], dtype=torch.int64)
    return replace(
        layout,
        positions=layout.positions[rows],
        query_start=[0, *accumulate(start[i + 1] - start[i] for i in rest)],
        kv_len=[layout.kv_len[i] for i in rest],
        block_table=layout.block_table[rest],
        blocks=layout.blocks[rows],
        offsets=layout.offsets[rows],
    ), rows
