"""A rank's share of the parallel layers, without all-reduces. On CPUs they are plain parameters for the operators; on
GPUs Megatron-core's layers (models/cuda/megatron_layers.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from .cuda.fp8 import StoredProducts
from .ops import Lookup, Norm, Product, TorchOps, Tree
from .packed import packed_of, release

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from .stages import RankShard


class Layers(Protocol):
    """Makes linear layers with uninitialised parameters `weight` and `bias` (or None), to be read from a checkpoint."""

    def column(self, inputs: int, outputs: int, bias: bool) -> nn.Module:
        """A layer from [T, D] to this rank's output columns [T, out / tp]."""

    def row(self, inputs: int, outputs: int, bias: bool) -> nn.Module:
        """A layer from this rank's input columns [T, in / tp] to a partial sum [T, D]. Only rank 0 has the bias."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The ranks that layers are split over: the size and rank of a ProcessGroup, without the group."""

    ranks: int
    index: int

    def size(self) -> int:
        return self.ranks

    def rank(self) -> int:
        return self.index


def make_layers(group: ProcessGroup | Cut, dtype: torch.dtype, device: torch.device) -> Layers:
    """Megatron-core's layers on GPUs, plain ones on CPUs: there the operators repack the weights, and importing
    Megatron-core takes 2.8 s and 137 MB per rank. Parameters are made on torch's default device."""
    if device.type != "cuda" or isinstance(group, Cut):
        return PlainLayers(group, dtype)
    from .cuda.megatron_layers import MegatronLayers

    return MegatronLayers(group, dtype)


class PlainLayers:
    """Makes layers that are only parameters; `prepare` passes them to the operators."""

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
    """weight [out, in] and bias [out] (or None) of this rank."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)


class Scale(nn.Module):
    """A parameter that operators do not repack: the weight of a norm, a router's bias, or a whole table."""

    def __init__(self, *shape: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


class ScaleAndShift(Scale):
    """The weight and bias of a norm."""

    def __init__(self, *shape: int, dtype: torch.dtype) -> None:
        super().__init__(*shape, dtype=dtype)
        self.bias = nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


class VocabEmbedding(nn.Module):
    """This rank's rows of the vocabulary; other ids yield zeros, so that an all-reduce completes the lookup. It is not
    Megatron-core's embedding, whose forward includes an all-reduce that laddertron could neither choose nor time."""

    def __init__(self, shard: RankShard, dtype: torch.dtype) -> None:
        super().__init__()
        weight = torch.empty((len(shard.embedded), shard.config.hidden_size), dtype=dtype)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self._rows, self._whole = shard.embedded, shard.dense_size == 1
        self._lookup: Lookup | None = None

    def repacked(self, lookup: Lookup) -> None:
        """Uses `lookup` from now on, and frees the parameter."""
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
    stored: StoredProducts | None = None,
    tree: Tree | None = None,
    quantised_output: bool = False,
) -> Product:
    """The layer's product including its norm, from loaded weights. gated: a [gate | up] layer. tree: adds a
    row-parallel product in a tree. Frees the parameter if the operators hold a repacked copy. stored: computes
    quantised weights with a scale a row, if it does; quantised_output: see StoredProducts.product."""
    weight: Tensor = layer.weight.detach()
    bias: Tensor | None = None if layer.bias is None else layer.bias.detach()
    if (packed := packed_of(layer)) is not None and stored is not None and stored.serves(packed):
        return stored.product(packed.codes, packed.scale, bias, norm, gated=gated, quantised_output=quantised_output)
    if packed is not None:
        product = ops.packed_product(packed, bias, norm, gated=gated, tree=tree)
    elif gated:
        product = ops.gated_product(weight, bias, norm)
    else:
        product = ops.product(weight, bias, norm, tree)
    if ops.repacks:
        release(layer)
    return product


def prepare_lanes(
    layer: Any, ops: TorchOps, count: int, norms: Sequence[Norm | None] | None = None, gated: bool = False
) -> Product:
    """A product from x [k, T, in] to y [k, T, out], for the `count` = k matrices that are contiguous in the weight,
    each including its norm. Frees the parameter as `prepare` does."""
    weights = layer.weight.detach().view(count, -1, layer.weight.shape[1])
    product = ops.lane_products(weights, norms or [None] * count, gated)
    if ops.repacks:
        layer.weight.data = layer.weight.new_empty(0)
    return product
