"""The operators of a layer behind one interface: what the model page calls, and what a faster set may fuse.

`TorchOps` is portable and says what each operator means; models/cpu_ops.py keeps its signatures. Tensors: T tokens of
a step, D hidden, H query heads, K key/value heads, C head dimension, F feed-forward (all this rank's).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

Product = Callable[[Tensor], Tensor]
"""x [T, in] -> y [T, out], contiguous."""
Lookup = Callable[[Tensor], Tensor]
"""ids [T] -> rows [T, D] of a table."""


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm: its scale [C] and epsilon."""

    weight: Tensor
    eps: float


class Ops(Protocol):
    """Each maker takes weights that stay alive and unchanged, and returns the product to call every step."""

    name: str
    repacks: bool
    """Whether products hold a repacked copy, so that the caller may drop its own weight."""

    @property
    def exact(self) -> Ops:
        """The same operators on weights as they are given, if these round them: for the head."""

    def product(self, weight: Tensor, bias: Tensor | None, norm: Norm | None = None) -> Product:
        """x -> norm(x) @ weight.T + bias; weight [out, in]."""

    def gated_product(self, weight: Tensor, bias: Tensor | None, norm: Norm) -> Product:
        """x -> silu(gate) * up, with [gate | up] = norm(x) @ weight.T + bias; weight [2F, in]."""

    def tied(self, table: Tensor, norm: Norm) -> tuple[Product, Lookup | None]:
        """A tied head behind its norm, and what looks rows up in a repacked table [V, D] (then the caller may drop its
        own), None where the table stays as it lies."""


def rms_norm(x: Tensor, norm: Norm) -> Tensor:
    """Over x's last dimension; statistics in fp32, rounded to x's dtype before the scale (as transformers does)."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(norm.eps))
    return (wide * scale).to(x.dtype) * norm.weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [T, H, C]; cos and sin [T, 1, R / 2] in fp32, R <= C rotated dimensions."""
    half = cos.shape[-1]
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat((turned[0].to(x.dtype), turned[1].to(x.dtype), x[..., 2 * half :]), -1)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """[T, 2F] -> silu(gate) * up [T, F]."""
    gate, up = gate_up.chunk(2, -1)
    return functional.silu(gate) * up


class TorchOps:
    """Plain torch, on any device."""

    name = "torch"
    repacks = False

    @property
    def exact(self) -> Ops:
        return self

    def _matmul(self, weight: Tensor, bias: Tensor | None) -> Product:
        return lambda x: functional.linear(x, weight, bias)

    def product(self, weight: Tensor, bias: Tensor | None, norm: Norm | None = None) -> Product:
        matmul = self._matmul(weight, bias)
        if norm is None:
            return matmul
        return lambda x: matmul(rms_norm(x, norm))

    def gated_product(self, weight: Tensor, bias: Tensor | None, norm: Norm) -> Product:
        matmul = self._matmul(weight, bias)
        return lambda x: silu_and_mul(matmul(rms_norm(x, norm)))

    def tied(self, table: Tensor, norm: Norm) -> tuple[Product, Lookup | None]:
        return TorchOps.product(self, table, None, norm), None
