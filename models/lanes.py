"""The model whose residual has several copies, called lanes (delayed tensor parallelism): a lane has its own heads, KV
heads and share of the MLP, and a rank has one or more lanes. models/residual.py defines when lanes exchange their
outputs; this module has the differences to models/llama.py: residuals are [k, T, D] for the k lanes of this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..topology.comm.collectives import Boundary, DeviceGather, Later, Pending
from .config.lanes import Lanes
from .config.model_config import ModelConfig
from .layers import Layers, Scale, VocabEmbedding, prepare, prepare_lanes
from .llama import LayerProducts, LlamaModel
from .ops import LaneStream, Norm, OtherLanes, Product
from .stages import RankShard


def model_class(config: ModelConfig) -> type[LlamaModel]:
    return LlamaModel if config.lanes is None else LaneModel


class LaneWeights(nn.Module):
    """One layer's parameters on this rank. A lane's matrices are contiguous, and so are the fused products of
    each: o and down have an output of D for each lane, from its own inputs alone."""

    def __init__(self, shard: RankShard, lanes: Lanes, layers: Layers, dtype: torch.dtype) -> None:
        super().__init__()
        c, dim, count = shard.config, shard.config.head_dim, lanes.count
        self.attention_norm, self.mlp_norm = (_scale(shard, lanes.norm_each, dtype) for _ in range(2))
        self.qkv = layers.column(c.hidden_size, (c.num_heads + 2 * c.num_kv_heads) * dim, False)
        self.o = layers.column(c.num_heads * dim // count, c.hidden_size * count, False)
        self.gate_up = layers.column(c.hidden_size, 2 * c.ffn_size, False)
        self.down = layers.column(c.ffn_size // count, c.hidden_size * count, False)


def _scale(shard: RankShard, per_lane: bool, dtype: torch.dtype) -> Scale:
    return Scale(*[shard.num_lanes] * per_lane, shard.config.hidden_size, dtype=dtype)


class LaneModel(LlamaModel):
    """One rank's lanes, of all layers or of a stage's."""

    @property
    def _lanes(self) -> Lanes:
        assert self.config.lanes is not None
        return self.config.lanes

    @property
    def _communicates(self) -> bool:
        return self.shard.size > 1 and "none" not in self.config.wiring.kinds

    def _layer_weights(self, layer: int, layers: Layers) -> nn.Module:
        return LaneWeights(self.shard, self._lanes, layers, self.dtype)

    def _final_norm(self) -> Scale:
        return _scale(self.shard, self._lanes.norm_each and not self._lanes.sum_first, self.dtype)

    @property
    def _head_inputs(self) -> int:
        return self.config.hidden_size * (self._lanes.count if self._lanes.head == "lane" else 1)

    def _norms(self, scale: Scale) -> list[Norm]:
        weight = scale.weight.detach()
        scales = weight if weight.ndim == 2 else weight.expand(self.shard.num_lanes, -1)
        return [Norm(one, self.config.norm_eps) for one in scales]

    def _prepared(self, layer: Any, down_name: str) -> LayerProducts:
        product = partial(prepare_lanes, ops=self.ops, count=self.shard.num_lanes)
        return LayerProducts(
            q_norm=None,
            k_norm=None,
            qkv=product(layer.qkv, norms=self._norms(layer.attention_norm)),
            o=product(layer.o),
            mlp=self.ops.joined(
                product(layer.gate_up, norms=self._norms(layer.mlp_norm), gated=True), product(layer.down)
            ),
        )

    def _prepare_head(self) -> None:
        if not self.shard.samples:
            return
        lanes, exact = self._lanes, self.ops.exact
        norms = self._norms(self.norm)
        self._normed: list[Product] = [exact.normed(norm) for norm in norms]
        if lanes.head == "vocab_parallel":
            self._head = prepare_lanes(self.head, exact, len(norms), norms)
            return
        norm = norms[0] if lanes.sum_first else None
        if self.head is not None:
            self._head = prepare(self.head, exact, norm)
        else:
            self._head, lookup = exact.tied(self.embedding_table(), norm)
            if lookup is not None:
                assert isinstance(self.embedding, VocabEmbedding)
                self.embedding.repacked(lookup)

    def _embed(self, tokens: Tensor) -> Pending:
        embedding = super()._embed(tokens)
        return Later(lambda: embedding.wait().expand(self.shard.num_lanes, -1, -1))

    def _receive(self, boundary: Boundary, tokens: int, count: int) -> list[Pending]:
        k, d = self.shard.num_lanes, self.config.hidden_size
        messages = boundary.receive((k * tokens, d), self.dtype, count, own=True)
        return [Later(partial(lambda message: message.wait().view(k, tokens, d), message)) for message in messages]

    def _send_to_next_stage(self, boundary: Boundary, x: Tensor, pending: Sequence[Any]) -> Tensor:
        """Returns the first lane's rows: nothing reads the values."""
        boundary.send(x.flatten(0, 1), own=True)
        for output in pending:
            y = output.wait()  # of a stage before this one, or summed here
            late = y.total - y.own if isinstance(y, OtherLanes) else y
            boundary.send(late.flatten(0, 1), own=True)
        return x[0]

    def _running(self, x: Tensor) -> LaneStream:
        return LaneStream(self.ops, x)

    def attention(self, layer: int, residual: Any) -> Tensor:
        """[k, T, D] -> each lane's own output; the heads of all lanes attend in one call."""
        if self._attention is None:
            raise RuntimeError("attention outside of forward")
        part, shard, x = self.layer_products[layer], self.shard, residual.whole()
        qkv = part.qkv(x)
        if shard.num_lanes == 1:
            heads = qkv[0]
        else:
            heads = self.ops.by_head(qkv, shard.num_heads, shard.num_kv_heads, self.config.head_dim)
        out = self._attention.attend(layer, heads, None, None)
        return part.o(out.view(x.shape[1], shard.num_lanes, -1).transpose(0, 1))

    def mlp(self, layer: int, residual: Any) -> Tensor:
        part = self.layer_products[layer]
        assert part.mlp is not None
        return part.mlp(residual.whole())

    def sum_of_lanes(self, output: Tensor) -> Tensor:
        return self.ops.sum_lanes(output) if len(output) > 1 or self.shard.size > 1 else output[0]

    def of_others(self, total: Tensor, output: Tensor) -> OtherLanes:
        return OtherLanes(total, output)

    def _logits(self, ends: Sequence[Tensor], rows: Sequence[Tensor | None]) -> Tensor:
        if self._head is None:
            raise RuntimeError("forward before load")
        selected = [x if index is None else x[:, index] for x, index in zip(ends, rows, strict=True)]
        x = selected[0] if len(selected) == 1 else torch.cat(selected, 1)  # [k, R, D]
        if self._lanes.head == "vocab_parallel":
            return self._head(x).transpose(0, 1).flatten(1).float()
        if not self._lanes.sum_first:
            x = torch.stack([norm(one) for norm, one in zip(self._normed, x, strict=True)])
        if self._lanes.head == "replicate":
            mixed = self._sum(self.ops.sum_lanes(x))
            return self._head(mixed if self._lanes.sum_first else mixed / self._lanes.count).float()
        return self._head(self._all_lanes(x)).float()

    def _sum(self, x: Tensor) -> Tensor:
        return self.all_reduce.start(x, "head", self._at_once).wait() if self._communicates and len(x) else x

    def _all_lanes(self, x: Tensor) -> Tensor:
        """This rank's lanes [k, R, D] -> all lanes, each row's concatenated [R, L * D]."""
        if self._communicates and x.numel():
            x = self._gathered(x.contiguous()).flatten(0, 1)
        elif self.shard.size > 1:  # without communication: the other lanes are zeros
            all_lanes = x.new_zeros((self._lanes.count, *x.shape[1:]))
            all_lanes[self.shard.first_lane : self.shard.first_lane + len(x)] = x
            x = all_lanes
        return x.transpose(0, 1).flatten(1)

    def _gathered(self, x: Tensor) -> Tensor:
        """x of every rank, in rank order: [size, *x.shape]."""
        if isinstance(self.gathers, DeviceGather):
            return self.gathers.gather_tensor(x.flatten()).view(-1, *x.shape)
        ranks = self.gathers.start(x.flatten().view(torch.uint8).cpu().numpy()).wait()
        return torch.from_numpy(ranks).view(x.dtype).view(-1, *x.shape).to(x.device)
