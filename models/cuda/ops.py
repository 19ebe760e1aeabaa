"""A layer's operators on a GPU: torch's matrix products, with Triton kernels (models/cuda/kernels.py) between them.

Equivalent to models/ops.py and models/attention.py. Importing this needs Triton; models/ops_choice.py and
models/attention_choice.py import it if the device is a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from ..attention import KVCache
from ..config.experts import Router
from ..experts import Biased, Choice, ExpertProduct
from ..latent import LatentCache
from ..ops import Norm, OtherLanes, Product, RunningSum, TorchOps, Tree, tree_product
from ..packed import Packed
from ..weights.tensor_reader import FP8
from . import kernels as gpu_kernels
from .experts import TILES, GroupedExperts, TritonChoice
from .packed import packed_linear

MOST_QUANTISED = 1 << 15
"""Columns of a row that one program quantises."""
LANE_BLOCK = 1024


class TritonOps(TorchOps):
    """Computes norms (with the sum before them) and gates by one kernel each."""

    name = "triton"
    sums_late = True

    def around(self, matmul: Product, norm: Norm | None, *, gated: bool = False) -> Product:
        normed = matmul if norm is None else lambda x: matmul(rms_norm(x, norm))
        return (lambda x: silu_and_mul(normed(x))) if gated else normed

    def lane_products(self, weights: Tensor, norms: Sequence[Norm | None], gated: bool) -> Product:
        """One product for all lanes, after one norm if they share it."""
        first = norms[0]
        if first is not None and any(n is None or n.weight.data_ptr() != first.weight.data_ptr() for n in norms):
            first = None
        alike = first is not None or norms[0] is None

        def product(x: Tensor) -> Tensor:
            if first is not None:
                x = rms_norm(x.flatten(0, 1), first).view_as(x)
            elif not alike:
                x = torch.stack([rms_norm(lane, norm) for lane, norm in zip(x, norms, strict=True) if norm is not None])
            y = torch.bmm(x, weights.transpose(1, 2))
            return silu_and_mul(y.flatten(0, 1)).view(len(y), y.shape[1], -1) if gated else y

        return product

    def join_lanes(self, x: Tensor, own: Tensor | None, others: OtherLanes | None) -> Tensor:
        if others is None:
            return super().join_lanes(x, own, others)
        out, size = torch.empty(x.shape, dtype=x.dtype, device=x.device), x[0].numel()
        gpu_kernels.join_lanes[(len(x), -(-size // LANE_BLOCK))](
            out, x, x if own is None else own, others.total, others.own, size, x.stride(0), OWN=own is not None,
            BLOCK=LANE_BLOCK,
        )  # fmt: skip
        return out

    def sum_lanes(self, x: Tensor) -> Tensor:
        out, size = torch.empty_like(x[0]), x[0].numel()
        gpu_kernels.sum_lanes[(-(-size // LANE_BLOCK),)](out, x, size, LANES=len(x), BLOCK=LANE_BLOCK)
        return out

    def choice(self, router: Router, k: int, bias: Tensor | None, local: Tensor) -> Choice:
        serves = TritonChoice.serves(router, len(local))
        return TritonChoice(router, k, bias, local) if serves else super().choice(router, k, bias, local)

    def experts(
        self, gate_up: Tensor | Packed, down: Tensor | Packed, routed: int, biased: Biased | None = None
    ) -> ExpertProduct:
        return GroupedExperts(gate_up, down, routed, biased=biased)

    def packed_product(
        self, weight: Packed, bias: Tensor | None, norm: Norm | None, *, gated: bool = False, tree: Tree | None = None
    ) -> Product:
        by_row = isinstance(self, RowOps)
        return self.around(lambda x: packed_linear(x, weight, bias, by_row), norm, gated=gated)


class RowOps(TritonOps):
    """`parallel.deterministic`: a fixed order of summation for every token, independent of the batch
    (kernels.row_product)."""

    name = "triton, a row by itself"
    lane_products = TorchOps.lane_products

    def _matmul(self, weight: Tensor, bias: Tensor | None) -> Product:
        return lambda x: row_linear(x, weight, bias)

    def experts(
        self, gate_up: Tensor | Packed, down: Tensor | Packed, routed: int, biased: Biased | None = None
    ) -> ExpertProduct:
        return GroupedExperts(gate_up, down, routed, TILES[-1:], biased)

    def product(
        self, weight: Tensor, bias: Tensor | None, norm: Norm | None = None, tree: Tree | None = None
    ) -> Product:
        if tree is None:
            return super().product(weight, bias, norm)
        return tree_product(weight, bias, tree, lambda a, b: row_product(a, b, torch.float32))


def row_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """functional.linear of x [T, in] and weight [out, in], by row_product, rounded once."""
    return row_product(x, weight, x.dtype) if bias is None else (row_product(x, weight) + bias).to(x.dtype)


def row_product(
    x: Tensor,
    weight: Tensor,
    dtype: torch.dtype = torch.float32,
    x_scale: Tensor | None = None,
    weight_scale: Tensor | None = None,
) -> Tensor:
    """x [T, in] @ weight [out, in].T, summed in fp32, times x_scale [T] and weight_scale [out] -> [T, out]. A row's
    bits do not depend on the other rows or their number. x and weight may be fp8, and columns of wider tensors."""
    (tokens, inputs), outputs = x.shape, len(weight)
    out = x.new_empty((tokens, outputs), dtype=dtype)
    tile = gpu_kernels.TILE
    # Tiles of tokens first: programs that run at the same time read the same weights.
    gpu_kernels.row_product[(-(-tokens // tile), -(-outputs // tile))](
        out, x, weight, x if x_scale is None else x_scale, weight if weight_scale is None else weight_scale,
        tokens, outputs, x.stride(0), weight.stride(0), INPUTS=inputs,
        SCALED_X=x_scale is not None, SCALED_WEIGHT=weight_scale is not None, SIZE=tile,
    )  # fmt: skip
    return out


def _warps(block: int) -> int:
    return max(4, min(16, block // 512))


def rms_norm(x: Tensor | RunningSum, norm: Norm) -> Tensor:
    """rms_norm of models/ops.py for x [T, D], which may be columns of a wider tensor; adds a RunningSum first."""
    return _normed(x, norm, None)[0]


def rms_norm_fp8(x: Tensor | RunningSum, norm: Norm, bound: float) -> tuple[Tensor, Tensor]:
    """fp8.quantise_rows of rms_norm."""
    return _normed(x, norm, bound)


def _normed(x: Tensor | RunningSum, norm: Norm, bound: float | None) -> tuple[Tensor, Tensor]:
    running = x if isinstance(x, RunningSum) else RunningSum(x)
    first, added = running.parts()
    rows, width = first.shape
    last = first if added is None else added
    if first.stride(1) != 1 or last.stride(1) != 1:
        raise ValueError(f"strides {first.stride()}, {last.stride()}: the values of a row must lie one behind another")
    total = first if added is None else first.new_empty(first.shape)
    out = first.new_empty(first.shape, dtype=first.dtype if bound is None else FP8)
    scales = first if bound is None else first.new_empty((rows, 1), dtype=torch.float32)
    block = triton.next_power_of_2(width)
    gpu_kernels.rms_norm[(rows,)](
        out, first, last, total, norm.weight, scales, width, first.stride(0), last.stride(0), norm.eps, bound or 0.0,
        ADD=added is not None, FP8=bound is not None, BLOCK=block, num_warps=_warps(block),
    )  # fmt: skip
    running.settle(total)
    return out, scales


def quantise(x: Tensor, bound: float, gated: bool = False) -> tuple[Tensor, Tensor]:
    """fp8.quantise_rows of x [T, F]; gated: of silu(gate) * up with x [T, 2F]."""
    x = x.contiguous()
    rows, width = len(x), x.shape[1] // (1 + gated)
    out, scales = x.new_empty((rows, width), dtype=FP8), x.new_empty((rows, 1), dtype=torch.float32)
    block = triton.next_power_of_2(width)
    gpu_kernels.quantise[(rows,)](out, scales, x, width, bound, GATED=gated, BLOCK=block, num_warps=_warps(block))
    return out, scales


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu_and_mul of models/ops.py for gate_up [T, 2F]."""
    gate_up = gate_up.contiguous()
    tokens, width = len(gate_up), gate_up.shape[1] // 2
    out = gate_up.new_empty((tokens, width))
    block = min(1024, triton.next_power_of_2(width))
    gpu_kernels.silu_and_mul[(tokens, -(-width // block))](out, gate_up, width, BLOCK=block)
    return out


def stores(cache: KVCache, capability: tuple[int, int]) -> bool:
    """Whether rotate_and_store supports this cache: fp8 conversions need compute capability 8.9."""
    return cache.keys[0].dtype != FP8 or capability >= (8, 9)


def rotate_and_store(
    cache: KVCache,
    layer: int,
    qkv: Tensor,
    norms: tuple[Norm | None, Norm | None],
    angles: tuple[Tensor, Tensor],
    blocks: Tensor,
    offsets: Tensor,
) -> Tensor:
    """rotate_and_store of models/attention.py in one kernel; returns the queries [T, H, C], as Store says. Both norms
    or neither."""
    keys, values = cache.keys[layer], cache.values[layer]
    kv_heads, size, dim = keys.shape[1:]
    tokens, heads = len(qkv), qkv.shape[1] // dim - 2 * kv_heads
    q_norm, k_norm = norms
    if (q_norm is None) != (k_norm is None):
        raise ValueError("queries and keys are both normed, or neither")
    q_weight, k_weight = (qkv if norm is None else norm.weight for norm in norms)
    cos, sin = angles
    queries = qkv.new_empty((tokens, heads, dim))
    key_scale, value_scale = (qkv, qkv) if cache.scales is None else (scale[layer] for scale in cache.scales)
    gpu_kernels.rotate_and_store[(tokens, heads + 2 * kv_heads)](
        queries, keys, values, qkv, cos, sin, q_weight, k_weight, blocks, offsets, key_scale, value_scale,
        0.0 if q_norm is None else q_norm.eps, size,
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, HALF=cos.shape[-1], NORM=q_norm is not None,
        FP8=keys.dtype == FP8, SCALED=cache.scales is not None, BLOCK=triton.next_power_of_2(dim), num_warps=1,
    )  # fmt: skip
    return queries


def store_latents(
    cache: LatentCache,
    layer: int,
    rows: Tensor,
    norm: Norm,
    angles: tuple[Tensor, Tensor],
    blocks: Tensor,
    offsets: Tensor,
) -> Tensor:
    """LatentAttention._rotate_and_store in one kernel, for rows [T, (H + 1) * (R + r)]; rotates queries in place."""
    latents, rank, (cos, sin) = cache.latents[layer], norm.weight.numel(), angles
    x = rows.view(len(rows), -1, latents.shape[2])
    half = cos.shape[-1]
    gpu_kernels.store_latents[(len(x), x.shape[1])](
        latents, x, cos, sin, norm.weight, blocks, offsets, norm.eps, cache.block_size,
        HEADS=x.shape[1] - 1, RANK=rank, HALF=half, BLOCK=triton.next_power_of_2(rank),
        HALF_BLOCK=triton.next_power_of_2(half), num_warps=1,
    )  # fmt: skip
    return x[:, :-1]
