"""Megatron-core's parallel layers, which hold a rank's weights on GPUs. models/layers.py multiplies by torch's linear:
the same bits as their forward in a quarter of the Python time.

They do not reduce: the wiring starts the all-reduces. Groups are arguments, parallel_state stays uninitialised.
Importing this imports all of Megatron-core; models/layers.py does so only if the device is a GPU.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it warns about every accelerator library that is not installed
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class MegatronLayers:
    def __init__(self, group: ProcessGroup, dtype: torch.dtype) -> None:
        self._group = group
        self._config: Any = ModelParallelConfig(
            tensor_model_parallel_size=group.size(),
            params_dtype=dtype,
            use_cpu_initialization=True,  # else it allocates on the GPU at once, whatever torch's default device
            perform_initialization=False,
            gradient_accumulation_fusion=False,
        )

    def column(self, inputs: int, outputs: int, bias: bool) -> nn.Module:
        return self._make(ColumnParallelLinear, inputs, outputs, bias=bias, disable_grad_reduce=True)

    def row(self, inputs: int, outputs: int, bias: bool) -> nn.Module:
        # NOTE: is_expert, because Megatron-core leaves an expert's reduction to the caller. Otherwise forward would
        # reduce: blocking, and silently not at all if its product is not contiguous.
        own = bias and self._group.rank() == 0
        more = {"input_is_parallel": True, "skip_bias_add": True, "is_expert": True}
        return self._make(RowParallelLinear, inputs, outputs, bias=own, **more)

    def _make(self, kind: Any, inputs: int, outputs: int, **more: Any) -> nn.Module:
        layer: nn.Module = kind(
            inputs, outputs, config=self._config, init_method=_no_init, tp_group=self._group, **more
        )
        return layer.requires_grad_(False)


def _no_init(weight: Tensor) -> Tensor:
    return weight
