"""A rank's share of the parallel layers, un-reduced: each yields its partial product. Plain parameters, for the
operators of a CPU; Megatron-core's layers on GPUs (models/cuda/megatron_layers.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from .cuda.fp8 import Fp8
from .ops import Lookup, Norm, Product, TorchOps, Tree

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from .stages import RankShard


class Layers(Protocol):
    """Makes linear layers with the parameters `weight` and `bias` (or None), unfilled: the checkpoint fills them."""

    def column(self, inputs: int, outputs: int, bias: bool) -> nn.Module:
        """[T, D] -> this rank's output columns [T, out / tp]."""

    def row(self, inputs: int, outputs: int, bias: bool) -> nn.Module:
        """This rank's input columns [T, in / tp] -> partial sum [T, D]. Rank 0 alone has the bias."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The ranks that layers are cut over: a ProcessGroup's size and rank, without the group."""

    ranks: int
    index: int

    def size(self) -> int:
        return self.ranks

    def rank(self) -> int:
        return self.index


def make_layers(group: ProcessGroup | Cut, dtype: torch.dtype, device: torch.device) -> Layers:
    """Megatron-core's for GPUs. On CPUs its product would unpack what the operators pack, and importing it would cost
    every rank 2.8 s and 137 MB. Either makes parameters where torch's default device is."""
    if device.type != "cuda" or isinstance(group, Cut):
        return PlainLayers(group, dtype)
    from .cuda.megatron_layers import MegatronLayers

    return MegatronLayers(group, dtype)


class PlainLayers:
    """Parameters alone: `prepare` hands them to the operators."""

    def __init__(self, group: ProcessGroup | Cut, dtype: torch.dtype) -> None:
        self._size, self._rank, self._dtype = group.size(), group.rank(), dtype

    def column(self, inputs: int, outputs: int, bias: bool) -> Linear:
        return self._linear(inputs, outputs // self._size, bias)

    def row(self, inputs: int, outputs: int, bias: bool) -> Linear:
        return self._linear(inputs // self._size, outputs, bias and self._rank == 0)

    def _linear(self, inputs: int, outputs: int, bias: bool) -> Linear:
        weight = torch.empty((outputs, inputs), dtype=self._dtype)
        return Linear(weight, weight.new_empty(outputs) if bias else None)


class Linear(nn.Module):
    """weight [out, in] and bias [out] of this rank."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)


class Scale(nn.Module):
    """The weight of a norm, a router's bias, or a whole table: operators read it as it is given."""

    def __init__(self, *shape: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


class VocabEmbedding(nn.Module):
    """This rank's rows of the vocabulary; other ids yield zeros, so that the all-reduce completes the lookup. Not
    Megatron-core's: its forward reduces by itself, past the collective that is chosen, timed and counted."""

    def __init__(self, shard: RankShard, dtype: torch.dtype) -> None:
        super().__init__()
        weight = torch.empty((len(shard.embedded), shard.config.hidden_size), dtype=dtype)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self._rows, self._whole = shard.embedded, shard.dense_size == 1
        self._lookup: Lookup | None = None

    def repacked(self, lookup: Lookup) -> None:
        """The rows are elsewhere from now on: the parameter is given up."""
        self._lookup, self.weight.data = lookup, self.weight.new_empty(0)

    def _look_up(self, ids: Tensor) -> Tensor:
        return functional.embedding(ids, self.weight) if self._lookup is None else self._lookup(ids)

    def forward(self, tokens: Tensor) -> Tensor:
        """ids [T] -> partial embeddings [T, D]."""
        if self._whole:
            return self._look_up(tokens)
        local = tokens - self._rows.start
        elsewhere = (local < 0) | (local >= len(self._rows))
        rows = self._look_up(local.masked_fill_(elsewhere, 0))
        return rows.masked_fill_(elsewhere.unsqueeze(-1), 0.0)


def prepare(
    layer: Any,
    ops: TorchOps,
    norm: Norm | None = None,
    *,
    gated: bool = False,
    stored: Fp8 | None = None,
    tree: Tree | None = None,
    hands_on: bool = False,
) -> Product:
    """The layer's product behind its norm, once the weights are loaded; [gate | up] layers are gated, row-parallel ones
    may be summed in a tree. The parameter itself is given up where the operators hold a repacked copy; weights that
    `stored` computes stay where they are; hands_on: see Fp8.product_of."""
    weight: Tensor = layer.weight.detach()
    bias: Tensor | None = None if layer.bias is None else layer.bias.detach()
    if (
        stored is not None
        and (quantised := stored.product_of(layer, bias, norm, gated=gated, hands_on=hands_on)) is not None
    ):
        return quantised
    if gated:
        product = ops.gated_product(weight, bias, norm)
    else:
        product = ops.product(weight, bias, norm, tree)
    if ops.repacks:
        layer.weight.data = weight.new_empty(0)
    return product


def prepare_lanes(
    layer: Any, ops: TorchOps, count: int, norms: Sequence[Norm | None] | None = None, gated: bool = False
) -> Product:
    """x [k, T, in] -> y [k, T, out] for the `count` = k matrices that are contiguous in the weight, each
    behind its norm. The parameter is given up as in `prepare`."""
    weights = layer.weight.detach().view(count, -1, layer.weight.shape[1])
    product = ops.lane_products(weights, norms or [None] * count, gated)
    if ops.repacks:
        layer.weight.data = layer.weight.new_empty(0)
    return product
