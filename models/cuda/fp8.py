"""Products on fp8 weights, as the checkpoint has them: for GPUs, where memory is what limits.

y = x @ (q * scale).T. Where the device multiplies fp8 natively, each token is scaled to fp8 as well (two row
scales, bf16 out); elsewhere the weight is widened at each use. Knows tensors, not checkpoints.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..ops import Norm, Product, rms_norm, silu_and_mul
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

    @property
    def widens(self) -> bool:
        return not self.native

    @property
    def warnings(self) -> tuple[str, ...]:
        """That fp8 weights save memory here and no reading."""
        if self.native:
            return ()
        return (
            "fp8 weights are widened at each use, every product's by way of a copy: only a GPU of compute capability "
            "9.0 or more multiplies them as they are, from a checkpoint whose activations are quantised",
        )

    def replace_parameters(self, layer: nn.Module) -> None:
        """`weight` in fp8, of the shape it had, and `weight_scale` [rows] in fp32."""
        rows, columns = layer.get_parameter("weight").shape
        device = layer.get_parameter("weight").device
        layer.weight = nn.Parameter(torch.empty((rows, columns), dtype=FP8, device=device), requires_grad=False)
        layer.weight_scale = nn.Parameter(torch.empty(rows, dtype=torch.float32, device=device), requires_grad=False)

    def product_of(self, layer: nn.Module, bias: Tensor | None, norm: Norm | None, *, gated: bool) -> Product | None:
        weight = layer.get_parameter("weight").detach()
        if weight.dtype != FP8:
            return None
        return self.product(weight, layer.get_parameter("weight_scale").detach(), bias, norm, gated=gated)

    def product(self, weight: Tensor, scale: Tensor, bias: Tensor | None, norm: Norm | None, *, gated: bool) -> Product:
        """weight [out, in] in fp8, scale [out]; norm and gate as models/ops.py means them."""
        matmul = self._native(weight, scale, bias) if self.native else _widened(weight, scale, bias)
        if norm is None:
            return matmul
        if gated:
            return lambda x: silu_and_mul(matmul(rms_norm(x, norm)))
        return lambda x: matmul(rms_norm(x, norm))

    def _native(self, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Product:
        transposed, columns = weight.t(), scale.view(1, -1)
        bound = self.activation_bound

        def multiply(x: Tensor) -> Tensor:
            quantised, rows = quantise_rows(x, bound)
            y = torch._scaled_mm(quantised, transposed, rows, columns, out_dtype=torch.bfloat16)
            y = y if bias is None else y + bias
            return y if x.dtype == torch.bfloat16 else y.to(x.dtype)

        return multiply


def quantise_rows(x: Tensor, bound: float = math.inf) -> tuple[Tensor, Tensor]:
    """x [T, in] -> fp8 [T, in] and its scales [T, 1] in fp32: each row's largest value becomes the largest fp8."""
    largest = x.abs().amax(-1, keepdim=True).float()
    scale = largest.clamp(min=1e-12, max=bound) / LARGEST
    # Row after row of zeros would divide by zero; NaN stays NaN, so that the sampler sees it.
    return (x.float() / scale).clamp(-LARGEST, LARGEST).to(FP8), scale


def _widened(weight: Tensor, scale: Tensor, bias: Tensor | None) -> Product:
    """Beside the weight there is one copy of it in x's type (engine/estimate/memory.py counts it): scaled in place it
    is rounded as a product in fp32 would be, and a GPU keeps no such product in memory."""
    columns = scale.view(-1, 1)
    return lambda x: functional.linear(x, weight.to(x.dtype).mul_(columns), bias)


def multiplies_fp8(device: torch.device) -> bool:
    """Whether torch._scaled_mm takes row scales here: NVIDIA from compute capability 9.0 on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
