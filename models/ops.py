"""The small operators between the matrix products, and the products themselves, behind one interface.

`TorchOps` is portable and says what each operator means; a faster set (models/cpu_ops.py) keeps its signatures.
Tensors: T tokens of a step, D hidden, H query heads, K key/value heads, C head dimension, F feed-forward (this rank's).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

Product = Callable[[Tensor], Tensor]
"""x [T, in] -> x @ weight.T (+ bias) [T, out], contiguous."""


class Ops(Protocol):
    name: str

    def product(self, weight: Tensor, bias: Tensor | None) -> Product:
        """Prepares a weight [out, in]; it may be repacked, so the caller drops its own reference."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [..., C] over its last dimension, statistics in fp32."""

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotary embedding of x [T, H, C]; cos and sin [T, 1, R/2] in fp32, R <= C rotated dimensions."""

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """[T, 2F] -> silu(gate) * up [T, F]."""


class TorchOps:
    """Plain torch, on any device."""

    name = "torch"

    def product(self, weight: Tensor, bias: Tensor | None) -> Product:
        return lambda x: functional.linear(x, weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
        return (wide * scale).to(x.dtype) * weight

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = cos.shape[-1]
        first, second = x[..., :half].float(), x[..., half : 2 * half].float()
        turned = (first * cos - second * sin, second * cos + first * sin)
        return torch.cat((turned[0].to(x.dtype), turned[1].to(x.dtype), x[..., 2 * half :]), -1)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return functional.silu(gate) * up


class PackedOps(TorchOps):
    """torch on a CPU with bf16 weights packed once by oneDNN: its plain bf16 product repacks at every call."""

    name = "packed"

    def product(self, weight: Tensor, bias: Tensor | None) -> Product:
        if weight.dtype != torch.bfloat16 or weight.device.type != "cpu":
            return super().product(weight, bias)
        mkldnn = torch.ops.mkldnn
        packed = mkldnn._reorder_linear_weight(weight, 1)
        return lambda x: mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
