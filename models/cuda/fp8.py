"""The products that keep a checkpoint's quantised weights, and those with fp8 weights and a scale a row, for GPUs.

y = x @ (q * scale).T. If the device multiplies fp8 natively, each token is also scaled to fp8 (two row scales, bf16
output); else the weight is widened at each use. Knows tensors, not checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..config.quantisation import Quantisation
from ..ops import Norm, Product, RunningSum, TorchOps, rms_norm, silu_and_mul, whole
from ..packed import Packed
from ..weights.quantised import is_expert
from ..weights.tensor_reader import FP8

LARGEST = torch.finfo(FP8).max
FP8_ROWS = Quantisation("fp8")


@dataclass(frozen=True, slots=True)
class StoredProducts:
    """The products ("layers.3.gate_up") that keep quantised weights, and how to compute those in fp8."""

    products: frozenset[str]
    native: bool
    """Whether activations are scaled to fp8, each token by its largest value."""
    activation_bound: float = math.inf
    """Upper bound of the largest value that scales a token; greater values are clipped."""
    fused: Any = None
    """models/cuda/ops.py if Triton is available: norm or gate and quantisation in one kernel."""
    by_row: bool = False
    """`parallel.deterministic`: products by `fused.row_product`."""
    quantisation: Quantisation = FP8_ROWS
    """The form of the weights; this class computes fp8 with a scale a row, the operators all others."""
    wide: str = ""
    """The reason why products were widened while loading; "" if they were not."""
    packs: bool = False
    """Whether the operators compute all products, as on CPUs."""

    @property
    def by_scaled_rows(self) -> bool:
        """Whether this class computes the products that are not experts'."""
        return not self.packs and self.quantisation.block is None and self.quantisation.code == "e4m3"

    @property
    def widens(self) -> bool:
        """Whether a product needs memory for a widened copy of its weight."""
        return self.by_scaled_rows and not self.native and not all(map(is_expert, self.products))

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings if fp8 weights save no memory here, or no memory traffic."""
        wide = (f"{self.quantisation.title} weights are widened while loading: {self.wide}",) if self.wide else ()
        if not self.widens:
            return wide
        return (
            *wide,
            "fp8 weights are widened at each use, every product's by way of a copy: only a GPU of compute capability "
            "8.9 or more multiplies them as they are, from a checkpoint whose activations are quantised",
        )

    def serves(self, weight: Packed) -> bool:
        return self.by_scaled_rows and weight.scale.shape[-1] == 1

    def product(
        self,
        weight: Tensor,
        scale: Tensor,
        bias: Tensor | None,
        norm: Norm | None,
        *,
        gated: bool,
        quantised_output: bool = False,
    ) -> Product:
        """The product of weight [out, in] in fp8 with scale [out]; norm and gate as in models/ops.py. quantised_output:
        only another product of this kind uses the output, which may therefore be Rows."""
        if self.native:
            return self._native(weight, scale, bias, norm, gated, quantised_output)
        matmul = _widened(weight, scale, bias, self.fused.row_linear if self.by_row else functional.linear)
        around = TorchOps().around if self.fused is None else self.fused.TritonOps().around
        return around(matmul, norm, gated=gated)

    def _native(
        self, weight: Tensor, scale: Tensor, bias: Tensor | None, norm: Norm | None, gated: bool, quantised_output: bool
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
            value = whole(x)
            values, scale = quantise_rows(value if norm is None else rms_norm(value, norm), bound)
            return Rows(values, scale, value.dtype)

        def multiply(x: Any) -> Any:
            rows = x if isinstance(x, Rows) else quantised(x)
            y = multiplied(rows)
            y = (y if bias is None else y + bias).to(rows.dtype)
            if gated and quantised_output and fused is not None and y.shape[1] // 2 <= fused.MOST_QUANTISED:
                values, scale = fused.quantise(y, bound, True)
                return Rows(values, scale, y.dtype)
            return gates(y) if gated else y

        return multiply


class Rows(NamedTuple):
    """Rows in fp8 with their scales [T, 1], and the type of their product."""

    values: Tensor
    scale: Tensor
    dtype: torch.dtype


def quantise_rows(x: Tensor, bound: float = math.inf) -> tuple[Tensor, Tensor]:
    """Quantises x [T, in] to fp8 [T, in] with scales [T, 1] in fp32: a row's largest value becomes the largest fp8."""
    largest = x.abs().amax(-1, keepdim=True).float()
    scale = largest.clamp(min=1e-12, max=bound) / LARGEST
    # the lower bound avoids a division by zero for rows of zeros; NaN stays NaN, so that the sampler detects it
    return (x.float() / scale).clamp(-LARGEST, LARGEST).to(FP8), scale


def _widened(weight: Tensor, scale: Tensor, bias: Tensor | None, linear: Callable[..., Tensor]) -> Product:
    """Multiplies by a widened copy of the weight in x's type, which engine/step/memory.py counts. Scaling the copy in
    place rounds like a product in fp32, without an fp32 tensor in memory."""
    columns = scale.view(-1, 1)
    return lambda x: linear(x, weight.to(x.dtype).mul_(columns), bias)


def converts_fp8(device: torch.device) -> bool:
    """Whether Triton's kernels can read fp8 on this device: NVIDIA from compute capability 8.9 on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def multiplies_fp8(device: torch.device) -> bool:
    """Whether torch._scaled_mm supports row scales on this device: NVIDIA from compute capability 8.9 on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
