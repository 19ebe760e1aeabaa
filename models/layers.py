"""Megatron-core's parallel layers, un-reduced: each yields its partial product and leaves the all-reduce to the wiring.

Megatron-core decides what each rank of the group holds; the subclasses override `forward` alone, since its own would
reduce (blocking, and silently not at all for non-contiguous inputs). Groups are arguments, never globals.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from .ops import Lookup, Norm, Ops, Product
from .quantised import Fp8
from .readers import FP8

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it warns about every accelerator library that is not installed
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.tensor_parallel.layers import (
        ColumnParallelLinear,
        RowParallelLinear,
        VocabParallelEmbedding,
    )

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def megatron_config(size: int, dtype: torch.dtype, device: torch.device) -> Any:
    """Parameters allocated once, uninitialised: the checkpoint fills them in place."""
    return ModelParallelConfig(
        tensor_model_parallel_size=size,
        params_dtype=dtype,
        use_cpu_initialization=device.type == "cpu",
        perform_initialization=False,
        gradient_accumulation_fusion=False,
    )


def _no_init(weight: Tensor) -> Tensor:
    return weight


class VocabEmbedding(VocabParallelEmbedding):  # type: ignore[misc]
    """This rank's rows of the vocabulary; other ids yield zeros, so that the all-reduce completes the lookup."""

    def __init__(self, vocab: int, hidden: int, config: Any, group: ProcessGroup) -> None:
        super().__init__(vocab, hidden, init_method=_no_init, config=config, tp_group=group)
        self.weight.requires_grad_(False)
        self.whole = group.size() == 1
        self._lookup: Lookup | None = None

    def repacked(self, lookup: Lookup) -> None:
        """The rows are elsewhere from now on: the parameter is given up."""
        self._lookup, self.weight.data = lookup, self.weight.new_empty(0)

    def _rows(self, ids: Tensor) -> Tensor:
        return functional.embedding(ids, self.weight) if self._lookup is None else self._lookup(ids)

    def forward(self, tokens: Tensor) -> Tensor:
        """ids [T] -> partial embeddings [T, D]."""
        if self.whole:
            return self._rows(tokens)
        local = tokens - self.vocab_start_index
        elsewhere = (local < 0) | (local >= self.num_embeddings_per_partition)
        rows = self._rows(local.masked_fill_(elsewhere, 0))
        return rows.masked_fill_(elsewhere.unsqueeze(-1), 0.0)


class ColumnLinear(ColumnParallelLinear):  # type: ignore[misc]
    """[T, D] -> this rank's output columns [T, out / tp]."""

    def __init__(self, inputs: int, outputs: int, bias: bool, config: Any, group: ProcessGroup) -> None:
        super().__init__(inputs, outputs, config=config, init_method=_no_init, bias=bias, tp_group=group)
        for parameter in self.parameters():
            parameter.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


class RowLinear(RowParallelLinear):  # type: ignore[misc]
    """This rank's input columns [T, in / tp] -> partial sum [T, D]. A bias stands on rank 0 alone."""

    def __init__(self, inputs: int, outputs: int, bias: bool, config: Any, group: ProcessGroup) -> None:
        super().__init__(
            inputs,
            outputs,
            config=config,
            init_method=_no_init,
            bias=bias and group.rank() == 0,
            input_is_parallel=True,
            skip_bias_add=False,
            tp_group=group,
        )
        for parameter in self.parameters():
            parameter.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


def prepare(
    layer: ColumnLinear | RowLinear, ops: Ops, norm: Norm | None = None, *, gated: bool = False, fp8: Fp8 | None = None
) -> Product:
    """The layer's product behind its norm, once the weights are loaded; [gate | up] layers are gated. The parameter
    itself is given up where the operators hold a repacked copy; fp8 weights stay where they are."""
    weight, bias = layer.weight.detach(), None if layer.bias is None else layer.bias.detach()
    if fp8 is not None and weight.dtype == FP8:
        return fp8.product(weight, layer.weight_scale.detach(), bias, norm, gated=gated)
    if gated and norm is not None:
        product = ops.gated_product(weight, bias, norm)
    else:
        product = ops.product(weight, bias, norm)
    if ops.repacks:
        layer.weight.data = layer.weight.new_empty(0)
    return product
