"""Products on fp8 weights, as the checkpoint has them: for GPUs, where memory is what limits.

y = x @ (q * scale).T. Where the device multiplies fp8 natively, each token is scaled to fp8 as well (two row
scales, bf16 out); elsewhere the weight is widened at each use. Knows tensors, not checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..ops import Norm, Product, RunningSum, TorchOps, rms_norm, silu_and_mul
from ..weights.quantised import is_expert, scale_shape
from ..weights.tensor_reader import FP8

LARGEST = torch.finfo(FP8).max


@dataclass(frozen=True, slots=True)
class Fp8:
    """Which products ("layers.3.gate_up") keep fp8 weights, and how they are computed."""

    products: frozenset[str]
    native: bool
    """Activations are scaled to fp8, each token by its own largest value."""
    activation_bound: float = math.inf
    """A token's largest value counts as at most this; what is beyond is clipped."""
    fused: Any = None
    """models/cuda/ops.py, where there is Triton: norm or gate and quantisation in one kernel."""
    by_row: bool = False
    """`parallel.deterministic`: products by `fused.row_product`."""
    block: tuple[int, int] | None = None
    """The checkpoint's, of experts alone."""
    wide: str = ""
    """What fp8 experts were widened for while loading."""

    @property
    def widens(self) -> bool:
        """Whether a product takes room for a copy of its weight."""
        return not self.native and not all(map(is_expert, self.products))

    @property
    def warnings(self) -> tuple[str, ...]:
        """That fp8 weights save no memory here, or no reading."""
        wide = (f"fp8 experts are widened while loading, to twice their bytes: {self.wide}",) if self.wide else ()
        if not self.widens:
            return wide
        return (
            *wide,
            "fp8 weights are widened at each use, every product's by way of a copy: only a GPU of compute capability "
            "9.0 or more multiplies them as they are, from a checkpoint whose activations are quantised",
        )

    def replace_parameters(self, layer: nn.Module, product: str = "") -> None:
        """`weight` in fp8, of the shape it had, and `weight_scale` in fp32."""
        wide = layer.get_parameter("weight")
        scales = scale_shape(product, tuple(wide.shape), self.block)
        layer.weight = nn.Parameter(torch.empty_like(wide, dtype=FP8), requires_grad=False)
        layer.weight_scale = nn.Parameter(torch.empty(scales, device=wide.device), requires_grad=False)

    def product_of(
        self, layer: nn.Module, bias: Tensor | None, norm: Norm | None, *, gated: bool, hands_on: bool = False
    ) -> Product | None:
        """As TorchOps.product and gated_product; None of a layer that is not stored so. hands_on: what it yields goes
        into another such product alone, and may be in that one's form."""
        weight = layer.get_parameter("weight").detach()
        if weight.dtype != FP8:
            return None
        scale = layer.get_parameter("weight_scale").detach()
        return self.product(weight, scale, bias, norm, gated=gated, hands_on=hands_on)

    def product(
        self,
        weight: Tensor,
        scale: Tensor,
        bias: Tensor | None,
        norm: Norm | None,
        *,
        gated: bool,
        hands_on: bool = False,
    ) -> Product:
        """weight [out, in] in fp8, scale [out]; norm and gate as models/ops.py means them."""
        if self.native:
            return self._native(weight, scale, bias, norm, gated, hands_on)
        matmul = _widened(weight, scale, bias, self.fused.row_linear if self.by_row else functional.linear)
        around = TorchOps().around if self.fused is None else self.fused.TritonOps().around
        return around(matmul, norm, gated=gated)

    def _native(
        self, weight: Tensor, scale: Tensor, bias: Tensor | None, norm: Norm | None, gated: bool, hands_on: bool
    ) -> Product:
        transposed, columns = weight.t(), scale.view(1, -1)
        bound, fused, by_row = self.activation_bound, self.fused, self.by_row
        gates = silu_and_mul if fused is None else fused.silu_and_mul

        def multiplied(rows: Rows) -> Tensor:
            if by_row:
                y: Tensor = fused.row_product(rows.values, weight, torch.bfloat16, rows.scale, scale)
                return y
            return torch._scaled_mm(
                rows.values, transposed, rows.scale, columns, out_dtype=torch.bfloat16, use_fast_accum=True
            )

        def quantised(x: Tensor | RunningSum) -> Rows:
            if fused is not None and transposed.shape[0] <= fused.MOST_QUANTISED:
                values, scale = fused.quantise(x, bound) if norm is None else fused.rms_norm_fp8(x, norm, bound)
                return Rows(values, scale, (x.parts()[0] if isinstance(x, RunningSum) else x).dtype)
            whole = x.whole() if isinstance(x, RunningSum) else x
            values, scale = quantise_rows(whole if norm is None else rms_norm(whole, norm), bound)
            return Rows(values, scale, whole.dtype)

        def multiply(x: Any) -> Any:
            rows = x if isinstance(x, Rows) else quantised(x)
            y = multiplied(rows)
            y = (y if bias is None else y + bias).to(rows.dtype)
            if gated and hands_on and fused is not None and y.shape[1] // 2 <= fused.MOST_QUANTISED:
                values, scale = fused.quantise(y, bound, True)
                return Rows(values, scale, y.dtype)
            return gates(y) if gated else y

        return multiply


class Rows(NamedTuple):
    """Rows in fp8 with their scales [T, 1], and the type that their product shall have."""

    values: Tensor
    scale: Tensor
    dtype: torch.dtype


def quantise_rows(x: Tensor, bound: float = math.inf) -> tuple[Tensor, Tensor]:
    """x [T, in] -> fp8 [T, in] and its scales [T, 1] in fp32: each row's largest value becomes the largest fp8."""
    largest = x.abs().amax(-1, keepdim=True).float()
    scale = largest.clamp(min=1e-12, max=bound) / LARGEST
    # Row after row of zeros would divide by zero; NaN stays NaN, so that the sampler sees it.
    return (x.float() / scale).clamp(-LARGEST, LARGEST).to(FP8), scale


def _widened(weight: Tensor, scale: Tensor, bias: Tensor | None, linear: Callable[..., Tensor]) -> Product:
    """Beside the weight there is one copy of it in x's type (engine/step/memory.py counts it): scaled in place it
    is rounded as a product in fp32 would be, and a GPU keeps no such product in memory."""
    columns = scale.view(-1, 1)
    return lambda x: linear(x, weight.to(x.dtype).mul_(columns), bias)


def converts_fp8(device: torch.device) -> bool:
    """Whether Triton's kernels read fp8 here: NVIDIA from compute capability 8.9 on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def multiplies_fp8(device: torch.device) -> bool:
    """Whether torch._scaled_mm takes row scales here: NVIDIA from compute capability 9.0 on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
