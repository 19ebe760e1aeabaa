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
from .cuda.fp8 import StoredProducts, converts_fp8, multiplies_fp8
from .ops import TorchOps
from .pages import HugePages
from .stages import RankShard
from .weights.mapping import Source
from .weights.quantised import DEPTH, WORD, is_expert
from .weights.slices import EXPERTS, product_columns

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
            return CpuOps(kernels, pages=pages, dtype=dtype)
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
    source: Source,
    shard: RankShard,
    device: torch.device,
    deterministic: Deterministic = False,
    weights: str = "stored",
) -> StoredProducts | None:
    """The products that keep quantised weights; None where all are widened while loading: without kernels, or for
    `model.weights: int8`. Raises WeightsError."""
    q = source.quantisation
    if q is None or weights != "stored":
        return None
    if device.type == "cpu":
        return (
            None
            if Kernels.find() is None
            else StoredProducts(_kept_on_cpus(source, shard), False, quantisation=q, packs=True)
        )
    if deterministic == "everywhere":
        raise WeightsError(
            "parallel.deterministic=everywhere: quantised products on a GPU are not added up in a tree: use true, or "
            "weights in bfloat16"
        )
    native = q.activations and multiplies_fp8(device)
    triton, products = _triton_ops(), source.quantised_products(shard)
    if deterministic:
        triton = _needed(triton, deterministic)
    every, wide = source.quantised_products(shard, None), ""
    by_kernel = every if q.code != "e4m3" or q.block is not None else frozenset(filter(is_expert, every))
    if by_kernel and (triton is None or (q.code == "e4m3" and not converts_fp8(device))):
        wide = "kernels for them need Triton" + ", and compute capability 8.9 or more for fp8" * (q.code == "e4m3")
        products -= by_kernel
    elif every - products:
        wide = (
            f"a rank's columns of {', '.join(sorted({name.split('.', 2)[2] for name in every - products}))} and blocks "
            f"of {q.block} share no part or multiple of {DEPTH}; use parallel.expert_layout=spread or another "
            "tensor_parallel_size"
        )
    return StoredProducts(products, native, q.activation_bound, triton, bool(deterministic), q, wide)


def _kept_on_cpus(source: Source, shard: RankShard) -> frozenset[str]:
    """The products that stay quantised for models/cpu/products_packed.h. Of a layer's experts both or none."""
    columns = product_columns(shard)
    products = {p for p in source.quantised_products(shard, WORD) if columns[p.split(".", 2)[2]] % WORD == 0}
    both = {name.rpartition(".")[0] for name in products if is_expert(name)}
    both = {layer for layer in both if all(f"{layer}.{p.rpartition('.')[2]}" in products for p in EXPERTS)}
    return frozenset(p for p in products if not is_expert(p) or p.rpartition(".")[0] in both)


def _needed(triton: Any, deterministic: Deterministic) -> Any:
    if triton is None:
        value = str(deterministic).lower()
        raise WeightsError(f"parallel.deterministic={value} on a GPU needs Triton: {triton_missing()}, or use false")
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
