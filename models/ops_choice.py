"""Which operators compute a rank's products, and on which form of the weights: as they are stored, or 8-bit."""

from __future__ import annotations

from typing import Any

import torch

from ..topology.comm.groups import Deterministic
from .cpu.ops import CpuOps, Kernels
from .cuda.fp8 import Fp8, multiplies_fp8
from .ops import TorchOps
from .rank_shard import RankShard
from .refusal import Refusal
from .weights.mapping import Source


class WeightsError(Refusal, ValueError):
    """`model.weights` asks for what this rank cannot compute."""


def make_ops(
    device: torch.device, dtype: torch.dtype, weights: str = "stored", deterministic: Deterministic = False
) -> TorchOps:
    """The fastest operators that are right on this device; `weights` as `model.weights`. deterministic: on a CPU a
    row's result must not depend on the other rows. Raises WeightsError."""
    if deterministic == "everywhere" and device.type != "cpu":
        raise WeightsError(f"parallel.deterministic=everywhere: this rank computes on {device.type}: use true or false")
    kernels = Kernels.find(bool(deterministic)) if device.type == "cpu" else None
    if weights == "stored":
        if device.type == "cpu":
            if deterministic and kernels is None:
                raise WeightsError(
                    "parallel.deterministic=true: the C kernels were not built here: build them, or use false"
                )
            return CpuOps(kernels)
        triton = _triton_ops()
        return TorchOps() if triton is None else triton.TritonOps()
    if kernels is None or not kernels.int8 or dtype != torch.bfloat16:
        if device.type != "cpu":
            why = f"this rank computes on {device.type}"
        elif dtype != torch.bfloat16:
            why = f"this model computes in {str(dtype).removeprefix('torch.')}"
        else:
            why = "this processor has no AVX2" if kernels else "the C kernels were not built here"
        raise WeightsError(f"model.weights={weights} needs bfloat16 on a CPU with AVX2; {why}: use stored")
    return CpuOps(kernels, int8=True)


def make_stored_products(source: Source, shard: RankShard, device: torch.device) -> Fp8 | None:
    """How quantised weights are computed; None where they are widened while loading, as on CPUs: there a widened copy
    is quicker than widening at each use by far, and memory is what there is most of."""
    if source.quantisation is None or device.type != "cuda":
        return None
    q, first = source.quantisation, 0 if shard.stage is None else shard.stage.first_layer
    native = q.activations and multiplies_fp8(device)
    return Fp8(source.quantised_products(shard.config, first), native, q.activation_bound, _triton_ops())


def _triton_ops() -> Any:
    """models/cuda/ops.py, None without Triton."""
    try:
        from .cuda import ops
    except ImportError:
        return None
    return ops
