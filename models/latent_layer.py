"""A layer's latent attention: the parameters of this rank, and what the forward pass calls. The projections of keys and
values are multiplied into queries and outputs (absorbed); chunks that gain by it have their keys and values expanded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, pad

from .attention import AttentionBackend
from .config.latent import Latent
from .cpu.ops import CpuOps
from .cuda.fp8 import StoredProducts
from .latent import Chunk, LatentAttention
from .layers import Linear, Scale, ScaleAndShift, prepare
from .ops import Norm, Product, TorchOps
from .stages import RankShard

INDEX_EPS = 1e-6
"""Of the layer norm of index keys, in every family."""


@dataclass(frozen=True, slots=True)
class IndexProducts:
    """What a layer chooses positions by: queries of what the attention's queries are made of; keys and, in fp32,
    weights of the normed residual. scale, bias: of the keys' layer norm."""

    sizes: Latent
    normed: Product
    queries: Product
    keys: Product
    weights: Product
    scale: Tensor
    bias: Tensor

    def __call__(self, attention: LatentAttention, layer: int, x: Tensor, residual: Tensor) -> Tensor | None:
        """x: the first product's output. Returns the choice's digest, None if all tokens attend to all positions."""
        index, turned = self.sizes.index, self.sizes.rotated
        assert index is not None
        normed = self.normed(residual)
        attention.store_index(layer, layer_norm(self.keys(normed), (index.dim,), self.scale, self.bias, INDEX_EPS))
        if not attention.sparse:
            return None
        made, tokens = self.queries(x[:, : self.sizes.query_rank]), len(x)
        queries = made.new_empty((tokens, index.heads, index.dim))
        queries[..., :turned] = made[:, : index.heads * turned].view(tokens, index.heads, -1)
        queries[..., turned:] = made[:, index.heads * turned :].view(tokens, index.heads, -1)
        weights = self.weights(normed.float()) * (index.heads * index.dim) ** -0.5
        return attention.choose(layer, queries, weights)


@dataclass(frozen=True, slots=True)
class LatentProducts:
    """A layer's attention between its first product, of queries, or what they are made of, then latent and key, and
    its last. queries: of what they are made of; keys, values: [H, T, in] -> [H, T, out], a matrix each head; expand: a
    head's keys of latents, None where no chunk is expanded."""

    sizes: Latent
    heads: int
    queries: Product | None
    keys: Product
    values: Product
    norm: Norm
    expand: Product | None = None
    index: IndexProducts | None = None

    def __call__(
        self, attention: AttentionBackend, layer: int, x: Tensor, residual: Tensor, note: Callable[[Tensor], None]
    ) -> Tensor:
        """The first product's output of the residual -> [T, H * value]. note: called with the digest [T] of the
        positions that the layer chose."""
        assert isinstance(attention, LatentAttention)
        if self.index is not None and (chosen := self.index(attention, layer, x, residual)) is not None:
            note(chosen)
        if not attention.expanded:
            return self._absorbed(attention, layer, x)
        out = x.new_empty((len(x), self.heads * self.sizes.value))
        if len(rest := attention.absorbed):
            out[rest] = self._absorbed(attention, layer, x[rest])
        for chunk in attention.expanded:
            out[chunk.rows] = self._expanded(attention, layer, chunk, x[chunk.rows])
        return out

    def _expanded(self, attention: LatentAttention, layer: int, chunk: Chunk, x: Tensor) -> Tensor:
        sizes, heads = self.sizes, self.heads
        assert self.expand is not None
        tokens, plain, key = len(x), heads * sizes.plain, sizes.plain + sizes.rotated
        q = x[:, : -sizes.width]
        q = q if self.queries is None else self.queries(q)
        latents = attention.extend(layer, chunk, x[:, -sizes.width :], self.norm)
        shared = latents[:, : sizes.rank].expand(heads, -1, -1)
        queries, keys = (x.new_empty((heads, n, key)) for n in (tokens, len(latents)))
        queries[..., : sizes.plain] = q[:, :plain].view(tokens, heads, -1).transpose(0, 1)
        queries[..., sizes.plain :] = q[:, plain:].view(tokens, heads, -1).transpose(0, 1)
        keys[..., : sizes.plain], keys[..., sizes.plain :] = self.expand(shared), latents[:, sizes.rank :]
        values = pad(self.values(shared), (0, key - sizes.value))  # SDPA's kernel for CPUs needs one width
        return attention.expanded_attend(chunk, queries, keys, values)[..., : sizes.value].flatten(1)

    def _absorbed(self, attention: AttentionBackend, layer: int, x: Tensor) -> Tensor:
        sizes, heads = self.sizes, self.heads
        tokens, plain = len(x), heads * sizes.plain
        q, own = x[:, : -sizes.width], x[:, -sizes.width :]
        q = q if self.queries is None else self.queries(q)
        rows = x.new_empty((tokens, heads + 1, sizes.width))
        absorbed = self.keys(q[:, :plain].view(tokens, heads, -1).transpose(0, 1))
        rows[:, :heads, : sizes.rank] = absorbed.transpose(0, 1)
        rows[:, :heads, sizes.rank :] = q[:, plain:].view(tokens, heads, -1)
        rows[:, heads] = own
        seen = attention.attend(layer, rows.flatten(1), None, self.norm)
        return self.values(seen.view(tokens, heads, -1).transpose(0, 1)).transpose(0, 1).flatten(1)


class LatentWeights(nn.Module):
    """The parameters that LatentProducts has on this rank: its own heads', and whole what all heads share."""

    def __init__(self, shard: RankShard, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        config, heads = shard.config, shard.num_heads
        assert config.latent is not None
        self._sizes, self._heads = (sizes := config.latent), heads
        made = heads * (sizes.plain + sizes.rotated)

        def matrix(rows: int, columns: int, bias: bool = False) -> Linear:
            weight = torch.empty((rows, columns), dtype=dtype)
            return Linear(weight, weight.new_empty(rows) if bias else None)

        self.down = matrix((sizes.query_rank or made) + sizes.width, config.hidden_size, config.qkv_bias)
        self.q: Linear | None = None
        if sizes.query_rank:
            self.q_norm, self.q = Scale(sizes.query_rank, dtype=dtype), matrix(made, sizes.query_rank)
        self.norm = Scale(sizes.rank, dtype=dtype)
        self.keys, self.values = matrix(heads * sizes.plain, sizes.rank), matrix(heads * sizes.value, sizes.rank)
        self._chooses = (index := sizes.index) is not None and index.full[layer]
        if index is not None and self._chooses:
            self.index_q = matrix(index.heads * index.dim, sizes.query_rank)
            self.index_k = matrix(index.dim, config.hidden_size)
            wide = torch.empty((index.heads, config.hidden_size), dtype=torch.float32)
            self.index_weights = Linear(wide, None)
            self.index_norm = ScaleAndShift(index.dim, dtype=dtype)

    def prepare(
        self, ops: TorchOps, norm: Norm, stored: StoredProducts | None = None
    ) -> tuple[Product, LatentProducts]:
        """The first product and the rest. Weights are given up where the operators hold a repacked copy. stored: as in
        layers.prepare."""
        sizes, heads, queries = self._sizes, self._heads, None
        down = prepare(self.down, ops, norm, stored=stored)
        index: IndexProducts | None = None
        if self.q is not None:
            q_norm = Norm(self.q_norm.weight.detach(), sizes.norm_eps)
            queries = prepare(self.q, ops, q_norm, stored=stored)
            index = self._index(ops, norm, q_norm)
        keys, values = (part.weight.detach().view(heads, -1, sizes.rank) for part in (self.keys, self.values))
        scale = self.norm.weight.detach()
        scale = scale if sizes.scale == 1.0 else (scale.float() * sizes.scale).to(scale.dtype)
        expands = isinstance(ops, CpuOps) and ops.kernels is not None and not ops.kernels.deterministic
        products = LatentProducts(
            sizes, heads, queries, _by_head(ops, keys.transpose(1, 2)), _by_head(ops, values),
            Norm(scale, sizes.norm_eps), _by_head(ops, keys) if expands else None, index,
        )  # fmt: skip
        if ops.repacks:
            for part in (self.keys, self.values):
                part.weight.data = part.weight.new_empty(0)
        return down, products

    def _index(self, ops: TorchOps, norm: Norm, q_norm: Norm) -> IndexProducts | None:
        if not self._chooses:
            return None
        scale, bias = self.index_norm.weight.detach(), self.index_norm.bias.detach()
        queries, keys = prepare(self.index_q, ops, q_norm), prepare(self.index_k, ops)
        weights = prepare(self.index_weights, ops.exact)
        return IndexProducts(self._sizes, ops.normed(norm), queries, keys, weights, scale, bias)


def _by_head(ops: TorchOps, weights: Tensor) -> Product:
    """x [H, T, in] -> [H, T, out] by weights [H, out, in]."""
    if isinstance(ops, CpuOps):
        return ops.lane_products(weights, [None] * len(weights), False)
    return lambda x: torch.bmm(x, weights.transpose(1, 2))
