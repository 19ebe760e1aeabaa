"""The model on one page: embedding, layers through a wiring, norm, head; one rank's share of it.

Llama and its kin (Mistral, Qwen2, Qwen3, the ladder checkpoints): what differs is in ModelConfig. Takes groups and
collectives as arguments and tensors as they come; knows no requests. Called by engine/runner.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..topology.collectives import Collective
from . import residual
from .attention import AttentionBackend, StepLayout
from .config import ModelConfig
from .layers import ColumnLinear, RowLinear, VocabEmbedding, megatron_config, prepare
from .ops import Norm, Ops, Product
from .quantised import Fp8, make_fp8
from .rotary import RotaryTable
from .shard import Shard
from .weights import Source
from .weights_exchange import Exchange
from .weights_load import Loaded, Progress, load

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class LayerWeights(nn.Module):
    """One layer's parameters on this rank, under the names that models/weights_load.py fills."""

    def __init__(self, shard: Shard, layer: int, megatron: object, group: ProcessGroup, make: _Maker) -> None:
        super().__init__()
        c, dim = shard.config, shard.config.head_dim
        outputs = c.num_heads * dim + 2 * shard.kv_heads_in_all * dim
        self.attention_norm = _Scale(make(c.hidden_size))
        self.qkv = ColumnLinear(c.hidden_size, outputs, c.qkv_bias, megatron, group)
        if c.qk_norm:
            self.q_norm, self.k_norm = _Scale(make(dim)), _Scale(make(dim))
        self.o = RowLinear(c.num_heads * dim, c.hidden_size, c.o_bias, megatron, group)
        if c.wiring.kinds[layer] != "parallel":
            self.mlp_norm = _Scale(make(c.hidden_size))
        self.gate_up = ColumnLinear(c.hidden_size, 2 * c.ffn_size, c.mlp_bias, megatron, group)
        self.down = RowLinear(c.ffn_size, c.hidden_size, c.mlp_bias, megatron, group)


_Maker = Callable[..., Tensor]


class _Scale(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer as the forward pass uses it. gate_up and qkv stand behind their norm, gate_up is gated."""

    q_norm: Norm | None
    k_norm: Norm | None
    qkv: Product
    o: Product
    gate_up: Product
    down: Product


class LlamaModel(nn.Module):
    """One rank's share. Construct, `load`, then `forward` a step at a time (under torch.inference_mode)."""

    def __init__(
        self,
        config: ModelConfig,
        group: ProcessGroup,
        all_reduce: Collective,
        ops: Ops,
        *,
        dtype: torch.dtype,
        device: torch.device,
        positions: int,
        replicate_embedding: bool = False,
        fp8: Fp8 | None = None,
    ) -> None:
        """positions: the longest sequence. Shapes must have passed models/shapes.py. fp8: products that keep fp8
        weights ("layers.3.gate_up"), and how they are computed."""
        super().__init__()
        self.config, self.ops, self.all_reduce = config, ops, all_reduce
        self.shard = Shard(config, group.size(), group.rank())
        self.replicate_embedding = replicate_embedding
        megatron = megatron_config(group.size(), dtype, device)

        def make(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        self.embedding: VocabEmbedding | _Scale
        if replicate_embedding:
            self.embedding = _Scale(make(config.vocab_size, config.hidden_size))
        else:
            self.embedding = VocabEmbedding(self.shard.padded_vocab, config.hidden_size, megatron, group)
        layers = [LayerWeights(self.shard, i, megatron, group, make) for i in range(config.num_layers)]
        self.layers = nn.ModuleList(layers)
        self.fp8 = fp8
        for name in fp8.products if fp8 is not None else ():
            make_fp8(self.get_submodule(name))
        self.norm = _Scale(make(config.hidden_size))
        self.head: ColumnLinear | None = None
        if not config.tied_embeddings or replicate_embedding:
            self.head = ColumnLinear(config.hidden_size, self.shard.padded_vocab, False, megatron, group)
        self.rotary = RotaryTable(config.rope, config.head_dim, positions, device)
        self._layers: dict[int, _Layer] = {}
        self._head: Product | None = None
        self._attention: AttentionBackend | None = None

    def load(
        self,
        source: Source,
        progress: Progress | None = None,
        verify: tuple[int, int] | None = None,
        exchange: Exchange | None = None,
    ) -> Loaded:
        """Reads this rank's slices into place and prepares each layer as soon as it is there, so that a repacked copy
        never stands beside more than its own layer. progress, verify, exchange: see weights_load.load. Raises
        CheckpointError."""
        loaded = load(
            source,
            self.shard,
            dict(self.named_parameters()),
            replicate_embedding=self.replicate_embedding,
            kept=frozenset() if self.fp8 is None else self.fp8.products,
            progress=progress,
            on_module=self._prepare_layer,
            verify=verify,
            exchange=exchange,
        )
        self._prepare_head()
        return loaded

    def prepare(self) -> None:
        """Hands parameters that were filled by other means to the operators."""
        for i in range(self.config.num_layers):
            self._prepare_layer(f"layers.{i}")
        self._prepare_head()

    def _prepare_layer(self, module: str) -> None:
        number = module.removeprefix("layers.")
        if number.isdecimal():
            layer = self.layers[int(number)]
            assert isinstance(layer, LayerWeights)
            self._layers[int(number)] = self._prepared(layer)

    def _prepare_head(self) -> None:
        if self.head is not None:
            self._head = prepare(self.head, self.ops.exact, self._norm(self.norm))
        else:
            # A tied table is looked up in as well: as it lies or repacked, it is held once.
            self._head, lookup = self.ops.exact.tied(self._table(), self._norm(self.norm))
            if lookup is not None:
                assert isinstance(self.embedding, VocabEmbedding)
                self.embedding.repacked(lookup)

    def _prepared(self, layer: LayerWeights) -> _Layer:
        shared = getattr(layer, "mlp_norm", layer.attention_norm)  # the parallel wiring has one norm a layer
        return _Layer(
            q_norm=self._norm(layer.q_norm) if self.config.qk_norm else None,
            k_norm=self._norm(layer.k_norm) if self.config.qk_norm else None,
            qkv=prepare(layer.qkv, self.ops, self._norm(layer.attention_norm), fp8=self.fp8),
            o=prepare(layer.o, self.ops, fp8=self.fp8),
            gate_up=prepare(layer.gate_up, self.ops, self._norm(shared), gated=True, fp8=self.fp8),
            down=prepare(layer.down, self.ops, fp8=self.fp8),
        )

    def _norm(self, scale: _Scale) -> Norm:
        return Norm(scale.weight.detach(), self.config.norm_eps)

    def _table(self) -> Tensor:
        """The embedding's rows on this rank."""
        table: Tensor = self.embedding.get_parameter("weight").detach()
        return table

    def forward(
        self,
        tokens: Tensor,
        layout: StepLayout,
        attention: AttentionBackend,
        rows: Tensor,
        on_travelling: Callable[[], None] | None = None,
    ) -> Tensor:
        """ids [T] -> this rank's logits [R, V / tp] in fp32 of the token rows [R].

        on_travelling is called once, while the first sub-block's all-reduce travels: host work that fits there costs
        nothing.
        """
        attention.plan(layout, self.rotary.cos[layout.positions], self.rotary.sin[layout.positions])
        return self.compute(tokens, attention, rows, on_travelling)

    def compute(
        self,
        tokens: Tensor,
        attention: AttentionBackend,
        rows: Tensor | None,
        on_travelling: Callable[[], None] | None = None,
    ) -> Tensor:
        """`forward` once the step has been planned; rows None: all of them. Reads nothing of the step but tensors, so
        that it may be captured (engine/graphs.py)."""
        self._attention = attention
        stream = residual.flow(self._embed(tokens), self.config.wiring, self, self.all_reduce, self.shard.size)
        if on_travelling is not None and "none" in self.config.wiring.kinds:
            on_travelling()  # nothing will travel: the work is due all the same
            on_travelling = None
        try:
            next(stream)
            if on_travelling is not None:
                on_travelling()
            while True:
                next(stream)
        except StopIteration as end:
            x: Tensor = end.value
        if self._head is None:
            raise RuntimeError("forward before load")
        logits = self._head(x if rows is None else x[rows]).float()
        return logits if self.config.logits_divisor == 1.0 else logits / self.config.logits_divisor

    def _embed(self, tokens: Tensor) -> Tensor:
        if self.replicate_embedding:
            x = functional.embedding(tokens, self._table())
        else:
            x = self.embedding(tokens)
            if self.config.wiring.kinds[0] != "none":
                x = residual.named(self.all_reduce, "embedding").start(x).wait()
        return x if self.config.embedding_multiplier == 1.0 else x * self.config.embedding_multiplier

    # The sub-blocks, as models/residual.py wires them: residual [T, D] -> partial sum [T, D].

    def attention(self, layer: int, residual: Tensor) -> Tensor:
        part = self._layers[layer]
        if self._attention is None:
            raise RuntimeError("attention outside of forward")
        heads = self._attention.attend(layer, part.qkv(residual), part.q_norm, part.k_norm)
        return self._scaled(part.o(heads))

    def mlp(self, layer: int, residual: Tensor) -> Tensor:
        part = self._layers[layer]
        return self._scaled(part.down(part.gate_up(residual)))

    def attention_and_mlp(self, layer: int, residual: Tensor) -> Tensor:
        return self.attention(layer, residual) + self.mlp(layer, residual)

    def _scaled(self, partial: Tensor) -> Tensor:
        m = self.config.residual_multiplier
        return partial if m == 1.0 else partial * m
