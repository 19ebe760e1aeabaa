"""The interface of a layer's operators. `TorchOps` is portable and defines them; models/cpu/ops.py has the same
signatures. Tensors: T tokens of a step, D hidden, H query heads, K key/value heads, C head dimension, F feed-forward
(all this rank's).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from .config.experts import Router
from .experts import Biased, Choice, ExpertProduct, TorchChoice, TorchExperts
from .packed import Packed
from .pages import HugePages

Product = Callable[[Tensor], Tensor]
"""x [T, in] -> y [T, out], contiguous."""
Lookup = Callable[[Tensor], Tensor]
"""ids [T] -> rows [T, D] of a table."""


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm: its scale [C] and epsilon."""

    weight: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class Tree:
    """The summation tree of a row-parallel product under `deterministic: everywhere`. This rank's inputs are `leaves`
    equal shares. A share's sum, in fp32, with the bias in the first, times `factor`, is rounded to x's type; two
    neighbours are added and rounded, until one is left. Ranks hold subtrees of one tree: its upper levels the
    all-reduce adds."""

    leaves: int
    factor: float = 1.0


class RunningSum:
    """A residual whose last summand is added by its first reader: a norm does both in one kernel."""

    __slots__ = ("_added", "_whole")

    def __init__(self, total: Tensor, added: Tensor | None = None) -> None:
        self._whole, self._added = total, added

    def __add__(self, y: Tensor) -> RunningSum:
        return RunningSum(self.whole(), y)

    def whole(self) -> Tensor:
        if self._added is not None:
            self.settle(self._whole + self._added)
        return self._whole

    def parts(self) -> tuple[Tensor, Tensor | None]:
        """The sum so far, and the summand still to be added."""
        return self._whole, self._added

    def settle(self, total: Tensor) -> None:
        self._whole, self._added = total, None


def whole(x: Tensor | RunningSum) -> Tensor:
    return x.whole() if isinstance(x, RunningSum) else x


@dataclass(frozen=True, slots=True)
class OtherLanes:
    """The other lanes' outputs: the sum [T, D] of all, and the own outputs [k, T, D] that are in it."""

    total: Tensor
    own: Tensor


class LaneStream:
    """The residuals [k, T, D] of k lanes. What was added last is summed by the first reader, in one call."""

    __slots__ = ("_added", "_ops", "_whole")

    def __init__(self, ops: TorchOps, total: Tensor, added: tuple[Tensor | OtherLanes, ...] = ()) -> None:
        self._ops, self._whole, self._added = ops, total, added

    def __add__(self, y: Tensor | OtherLanes) -> LaneStream:
        return LaneStream(self._ops, self._whole, (*self._added, y))

    def whole(self) -> Tensor:
        match self._added:
            case ():
                pass
            case (Tensor() as own, OtherLanes() as others) if own.shape == self._whole.shape:
                self._whole = self._ops.join_lanes(self._whole, own, others)
            case summands:
                for y in summands:
                    if isinstance(y, OtherLanes):
                        self._whole = self._ops.join_lanes(self._whole, None, y)
                    else:
                        self._whole = self._whole + y
        self._added = ()
        return self._whole


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


def wide_product(x: Tensor, weight: Tensor) -> Tensor:
    return functional.linear(x.float(), weight.float())


def tree_product(
    weight: Tensor, bias: Tensor | None, tree: Tree, multiply: Callable[[Tensor, Tensor], Tensor] = wide_product
) -> Product:
    """multiply(x [T, in], weight [out, in]): a share's sum in fp32."""

    def product(x: Tensor) -> Tensor:
        shares = zip(x.chunk(tree.leaves, 1), weight.chunk(tree.leaves, 1), strict=True)
        sums = torch.stack([multiply(a, b) for a, b in shares])
        if bias is not None:
            sums[0] += bias
        level = (sums * tree.factor).to(x.dtype)
        while len(level) > 1:
            level = level[0::2] + level[1::2]
        return level[0]

    return product


class TorchOps:
    """Plain torch, on any device. Makers take weights that stay unchanged and return the product of a step."""

    name = "torch"
    repacks = False
    """Whether products hold a repacked copy, so that the caller may drop its own weight."""
    matrix_bytes: int | None = None
    """Bytes of a matrix element there; None: as in the model's type."""
    sums_late = False
    """Whether products after a norm accept a RunningSum."""
    pages: HugePages | None = None
    """Where repacked weights are stored."""

    @property
    def exact(self) -> TorchOps:
        """The same operators on weights as they are given, if these round them: for the head."""
        return self

    def _matmul(self, weight: Tensor, bias: Tensor | None) -> Product:
        return lambda x: functional.linear(x, weight, bias)

    def around(self, matmul: Product, norm: Norm | None, *, gated: bool = False) -> Product:
        """x -> matmul(norm(x)), or silu(gate) * up of it, of another set's product."""
        normed = matmul if norm is None else lambda x: matmul(rms_norm(whole(x), norm))
        return (lambda x: silu_and_mul(normed(x))) if gated else normed

    def product(
        self, weight: Tensor, bias: Tensor | None, norm: Norm | None = None, tree: Tree | None = None
    ) -> Product:
        """x -> norm(x) @ weight.T + bias; weight [out, in]. A tree has no norm."""
        return self.around(self._matmul(weight, bias) if tree is None else tree_product(weight, bias, tree), norm)

    def joined(self, first: Product, last: Product) -> Product:
        """x -> last(first(x)), of products that these operators made."""
        return lambda x: last(first(x))

    def gated_product(self, weight: Tensor, bias: Tensor | None, norm: Norm | None) -> Product:
        """x -> silu(gate) * up, with [gate | up] = norm(x) @ weight.T + bias; weight [2F, in]."""
        return self.around(self._matmul(weight, bias), norm, gated=True)

    def choice(self, router: Router, k: int, bias: Tensor | None, local: Tensor) -> Choice:
        """As TorchChoice."""
        return TorchChoice(router, k, bias, local)

    def experts(
        self, gate_up: Tensor | Packed, down: Tensor | Packed, routed: int, biased: Biased | None = None
    ) -> ExpertProduct:
        """The product over this rank's experts, gate_up [E, 2F, D] and down [E, D, F], of `routed` on all ranks. Torch
        computes no quantised ones: make_stored_products keeps them for kernels alone."""
        assert isinstance(gate_up, Tensor)
        assert isinstance(down, Tensor)
        return TorchExperts(gate_up, down, biased)

    def packed_product(
        self, weight: Packed, bias: Tensor | None, norm: Norm | None, *, gated: bool = False, tree: Tree | None = None
    ) -> Product:
        """Like `product` and `gated_product`, with a quantised weight, which torch widens at each use."""
        return self.around(lambda x: functional.linear(x, weight.widened(x.dtype), bias), norm, gated=gated)

    def lane_products(self, weights: Tensor, norms: Sequence[Norm | None], gated: bool) -> Product:
        """x [k, T, in] -> y [k, T, out]: each input by its own weight [k, out, in], after its own norm."""
        products = [
            self.gated_product(weight, None, norm) if gated else self.product(weight, None, norm)
            for weight, norm in zip(weights, norms, strict=True)
        ]
        return lambda x: torch.stack([product(one) for product, one in zip(products, x, strict=True)])

    def join_lanes(self, x: Tensor, own: Tensor | None, others: OtherLanes | None) -> Tensor:
        """x [k, T, D] and each lane's own output, then what the others computed."""
        x = x if own is None else x + own
        return x if others is None else x + (others.total - others.own)

    def sum_lanes(self, x: Tensor) -> Tensor:
        """x [k, T, D] -> [T, D] in fp32 and one order, rounded once; of memory of its own."""
        total = x[0].float()
        for one in x[1:]:
            total = total + one
        return total.to(x.dtype, copy=True)

    def by_head(self, qkv: Tensor, heads: int, kv_heads: int, dim: int) -> Tensor:
        """qkv [k, T, (H + 2K) / k * C], lane by lane -> [T, (H + 2K) * C]: all queries, all keys, all values."""
        lanes, tokens, _ = qkv.shape
        out, parts = qkv.new_empty((tokens, heads + 2 * kv_heads, dim)), qkv.view(lanes, tokens, -1, dim)
        to = of = 0
        for count in (heads, kv_heads, kv_heads):
            target, part = out[:, to : to + count], parts[:, :, of : of + count // lanes]
            target.view(tokens, lanes, -1, dim).copy_(part.transpose(0, 1))
            to, of = to + count, of + count // lanes
        return out.flatten(1)

    def normed(self, norm: Norm) -> Product:
        """x [T, D] -> norm(x)."""
        return self.around(lambda x: x, norm)

    def tied(self, table: Tensor, norm: Norm | None) -> tuple[Product, Lookup | None]:
        """A tied head after its norm, and the lookup of rows in a repacked table [V, D] (the caller may then free its
        own); None if the table is not repacked."""
        return TorchOps.product(self, table, None, norm), None
