"""The layer behind the model's own that predicts one token more (multi-token prediction, MTP, arXiv 2412.19437). Row p
joins the model's state of position p, after the final norm, and the embedding of the token at p + 1, and predicts the
token at p + 2; with its own output as the state of p + 1 and a draft it predicts the next one. Its keys and values have
the model's positions. The model's embedding and head serve it too, unless its
ranks are others than the model's: those of one node.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..topology.comm.collectives import Collective, Later, Pending
from .attention import AttentionBackend, StepLayout
from .config.shapes import Sharing
from .cuda.fp8 import StoredProducts
from .layers import Cut, Layers, Linear, Scale, prepare
from .llama import LayerProducts, LayerWeights, LlamaModel
from .ops import TorchOps
from .stages import RankShard


class PredictorWeights(LayerWeights):
    """The parameters of the layer. `join` [D, 2D] is whole on each rank: split, it would cost one more all-reduce."""

    def __init__(self, shard: RankShard, layer: int, layers: Layers, dtype: torch.dtype) -> None:
        super().__init__(shard, layer, layers, dtype)
        d = shard.config.hidden_size
        self.embedding_norm, self.state_norm, self.last_norm = (Scale(d, dtype=dtype) for _ in range(3))
        self.join = Linear(torch.empty((d, 2 * d), dtype=dtype), None)


class Predictor(LlamaModel):
    """One rank's share of the predicting layer, split over the model's ranks or over those of one node."""

    def __init__(
        self,
        model: LlamaModel,
        shard: RankShard,
        all_reduce: Collective,
        ops: TorchOps,
        stored: StoredProducts | None,
        everywhere: bool,
    ) -> None:
        """model: the last stage, with `states`. shard: of models/stages.py's predictor_shard; it embeds if the model
        does not. all_reduce: of the ranks that it is split over. ops: without retained pages. The rest as the model has
        it."""
        assert shard.stage is not None
        super().__init__(
            shard.stage,
            Cut(shard.size, shard.rank),  # type: ignore[arg-type]  # of a group only size and rank are used
            all_reduce,
            ops,
            dtype=model.dtype,
            device=model.rotary.cos.device,
            positions=1,
            replicate_embedding=model.replicate_embedding and not shard.samples,
            stored=stored,
            everywhere=everywhere,
            sharing=Sharing(shard.spread, shard.per_node),
            node_reduce=model.dense_reduce,
            keeps_states=True,
        )
        self.rotary = model.rotary
        self._embedded = super()._embed if self.shard.embeds else model._embed
        self._logits_of = self.logits_of if self.shard.samples else model.logits_of
        self._given = torch.empty(0)

    def _layer_weights(self, layer: int, layers: Layers) -> nn.Module:
        return PredictorWeights(self.shard, layer, layers, self.dtype)

    def _prepared(self, layer: Any, down_name: str) -> LayerProducts:
        self._embedding_norm, self._state_norm, self._output_norm = (
            self.ops.normed(self._norm(scale)) for scale in (layer.embedding_norm, layer.state_norm, layer.last_norm)
        )
        self._join = prepare(layer.join, self.ops)
        return super()._prepared(layer, down_name)

    def _logits(self, ends: Sequence[Tensor], rows: object) -> Tensor:
        return ends[0]  # `predict` chooses the rows

    def _embed(self, tokens: Tensor) -> Pending:
        embedding, states = self._embedded(tokens), self._given

        def joined() -> Tensor:
            x = self._join(torch.cat((self._embedding_norm(embedding.wait()), self._state_norm(states)), -1))
            # A sequence that is not finite ends; its rows must not stay in blocks that others will read.
            return torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0)

        return Later(joined)

    def predict(
        self, states: Tensor, tokens: Tensor, layout: StepLayout, attention: AttentionBackend, rows: Tensor
    ) -> tuple[Tensor, Tensor]:
        """States [T, D] of the layout's positions and the ids [T] after them -> logits [R, V / tp] in fp32 and states
        [R, D] of the rows [R]."""
        self._given = states
        outputs = self._output_norm(self.forward(tokens, layout, attention, rows)[rows])
        return self._logits_of(outputs), outputs
