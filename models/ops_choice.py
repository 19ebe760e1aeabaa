"""Chooses the operators of a rank's products, and the form of the weights: as stored, or 8-bit."""

from __future__ import annotations

import logging
from typing import Any

import torch

from ..topology.comm.groups import Deterministic
from ..topology.hardware.cpu_tier import current, described, own
from ..topology.hardware.cuda_stack import triton_missing
from .config.json_fields import Refusal
from .cpu.kernels import Kernels
from .cpu.ops import CpuOps
from .cuda.fp8 import Fp8, converts_fp8, multiplies_fp8
from .ops import TorchOps
from .pages import HugePages
from .stages import RankShard
from .weights.mapping import Source
from .weights.quantised import EXPERT_DEPTH
from .weights.slices import expert_columns

log = logging.getLogger(__name__)


class WeightsError(Refusal, ValueError):
    """This rank does not support the value of `model.weights`."""


def make_ops(
    device: torch.device,
    dtype: torch.dtype,
    weights: str = "stored",
    deterministic: Deterministic = False,
    pages: HugePages | None = None,
) -> TorchOps:
    """The fastest operators that are right on this device; `weights` as `model.weights`. deterministic: a row's result
    must not depend on the other rows. pages: as CpuOps takes them. Raises WeightsError."""
    kernels = Kernels.find(bool(deterministic)) if device.type == "cpu" else None
    if weights == "stored":
        if device.type == "cpu":
            if deterministic and kernels is None:
                raise WeightsError(
                    "parallel.deterministic=true: the C kernels were not built here: build them, or use false"
                )
            return CpuOps(kernels, pages=pages)
        triton = _triton_ops()
        if deterministic:
            ops: TorchOps = _needed(triton, deterministic).RowOps()
            return ops
        return TorchOps() if triton is None else triton.TritonOps()
    if kernels is None or not kernels.int8 or dtype != torch.bfloat16:
        if device.type != "cpu":
            why = f"this rank computes on {device.type}"
        elif dtype != torch.bfloat16:
            why = f"this model computes in {str(dtype).removeprefix('torch.')}"
        else:
            lower = f"this rank's tier is {described(current(), own())}"
            why = lower if kernels else "the C kernels were not built here"
        raise WeightsError(f"model.weights={weights} needs bfloat16 on a CPU with AVX2; {why}: use stored")
    return CpuOps(kernels, int8=True, pages=pages)


def make_stored_products(
    source: Source, shard: RankShard, device: torch.device, deterministic: Deterministic = False
) -> Fp8 | None:
    """The product over quantised weights; None where they are widened while loading, as on CPUs: there a widened copy
    is quicker than widening at each use by far, and memory is what there is most of. Experts stay quantised where
    models/cuda/experts.py reads them. Raises WeightsError."""
    if source.quantisation is None or device.type != "cuda":
        return None
    if deterministic == "everywhere":
        raise WeightsError(
            "parallel.deterministic=everywhere: fp8 products on a GPU scale a token by the largest value that its rank "
            "sees, which another tensor_parallel_size changes: use true, or weights in bfloat16"
        )
    q = source.quantisation
    native = q.activations and multiplies_fp8(device)
    triton, products, wide = _triton_ops(), source.quantised_products(shard), ""
    if deterministic:
        triton = _needed(triton, deterministic)
    experts = source.quantised_experts(shard)
    if experts and (triton is None or not converts_fp8(device)):
        wide = "they stay fp8 with Triton on a GPU of compute capability 8.9 or more"
        products -= experts
    elif experts - products:
        wide = (
            f"a rank's {expert_columns(shard)} columns of each and blocks of {source.block} share no multiple of "
            f"{EXPERT_DEPTH}; use parallel.expert_layout=spread or another tensor_parallel_size"
        )
    return Fp8(products, native, q.activation_bound, triton, bool(deterministic), source.block, wide)


def _needed(triton: Any, deterministic: Deterministic) -> Any:
    if triton is None:
        value = str(deterministic).lower()
        fix = triton_missing() or "make env ACCEL=cuda"
        raise WeightsError(f"parallel.deterministic={value} on a GPU needs Triton: {fix}, or use false")
    return triton


def _triton_ops() -> Any:
    """models/cuda/ops.py; None without Triton, or where Triton could compile nothing."""
    try:
        from .cuda import ops
    except ImportError:
        return None
    if fault := triton_missing():
        log.warning("torch's operators are used, which are slower: %s", fault)
        return None
    return ops
