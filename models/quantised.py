"""Products on quantised weights: fp8 from the checkpoint on a GPU, int8 made while loading on a CPU.

fp8: y = x @ (q * scale).T. Where the device multiplies fp8 natively, each token is scaled to fp8 as well (two row
scales, bf16 out); elsewhere the weight is widened at each use. Knows tensors, not checkpoints.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from .cpu_ops import CpuOps
from .ops import Norm, Product, rms_norm, silu_and_mul
from .readers import FP8
from .refusal import Refusal

LARGEST = torch.finfo(FP8).max
FEW_ROWS = 4
"""Up to so many tokens int8 weights are read in place of bf16 ones: half of the bytes. Beyond, the kernel's arithmetic
costs more than the bytes that it saves (measured on AVX-512: 2.2 times faster with 1 token, 1.15 with 4, 0.55 with 8).
"""


class QuantisationError(Refusal, ValueError):
    """A quantisation that is not computed here; the message has the mend."""


def make_fp8(layer: nn.Module) -> None:
    """Replaces a linear layer's weight by an unfilled fp8 one of its shape, with `weight_scale` [rows] in fp32."""
    rows, columns = layer.get_parameter("weight").shape
    device = layer.get_parameter("weight").device
    layer.weight = nn.Parameter(torch.empty((rows, columns), dtype=FP8, device=device), requires_grad=False)
    layer.weight_scale = nn.Parameter(torch.empty(rows, dtype=torch.float32, device=device), requires_grad=False)


@dataclass(frozen=True, slots=True)
class Fp8:
    """Which products ("layers.3.gate_up") keep fp8 weights, and how they are computed."""

    products: frozenset[str]
    native: bool
    """Activations are scaled to fp8, each token by its own largest value."""
    activation_bound: float = math.inf
    """A token's largest value counts as at most this; what is beyond is clipped."""

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
    columns = scale.view(-1, 1)
    return lambda x: functional.linear(x, (weight.to(x.dtype) * columns).to(x.dtype), bias)


def multiplies_fp8(device: torch.device) -> bool:
    """Whether torch._scaled_mm takes row scales here: NVIDIA from compute capability 9.0 on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


class Int8Ops(CpuOps):
    """CpuOps with int8 weights, one scale an output channel, for steps of few tokens; larger steps multiply the same
    int8 values held as packed bf16, so that answers do not depend on the size of a step beyond rounding. Holds three
    bytes a weight in place of two. bf16 only."""

    name = "int8"

    def _matmul(self, weight: Tensor, bias: Tensor | None) -> Product:
        if weight.dtype != torch.bfloat16:
            raise QuantisationError(f"int8 weights are computed with bfloat16, not {weight.dtype}: set model.dtype")
        values, scale = int8_rows(weight)
        few = torch.ops.aten._weight_int8pack_mm
        many = super()._matmul(values.to(torch.bfloat16), None)

        def multiply(x: Tensor) -> Tensor:
            y = few(x, values, scale) if x.shape[0] <= FEW_ROWS else many(x) * scale
            return y if bias is None else y + bias

        return multiply


def int8_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [out, in] -> int8 [out, in] and scales [out] in its type, the scale rounded before it divides."""
    scale = (weight.abs().amax(-1).float().clamp(min=1e-12) / 127).to(weight.dtype)
    rounded = (weight.float() / scale.float().view(-1, 1)).round_()
    return rounded.clamp_(-127, 127).to(torch.int8), scale
