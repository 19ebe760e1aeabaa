"""A packed matrix product of models/cpu/products.c, and a sub-block of few tokens as one kernel call: the summand that
the residual still lacks, a product, attention in between, and a second product.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int32, c_int64, c_void_p

from torch import Tensor

from ..ops import RunningSum
from .kernels import Kernels

FEW_TOKENS = 64
"""Tokens of a step up to which sums, norms and gates are kernel calls on one thread; above, torch uses all threads."""


class ProductPlan(ctypes.Structure):
    """kernels.h's struct product."""

    _fields_ = [
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("norm", c_void_p),
        ("scale", c_void_p),
        ("zero", c_void_p),
        ("inputs", c_int64),
        ("outputs", c_int64),
        ("group", c_int64),
        ("eps", c_float),
        ("type", c_int32),
        ("form", c_int32),
        ("scale_type", c_int32),
        ("gated", c_int32),
        ("threads", c_int32),
        ("leaves", c_int32),
        ("factor", c_float),
        ("alpha", c_float),
        ("limit", c_float),
    ]


class CpuProduct:
    """x [T, in] -> y [T, out]. Holds the tensors that its plan points to."""

    __slots__ = ("_kept_alive", "address", "call", "inputs", "outputs")

    def __init__(self, kernels: Kernels, plan: ProductPlan, tensors: Sequence[Tensor | None]) -> None:
        self.call, self._kept_alive = kernels.sub_block, (plan, tensors)
        self.address, self.inputs, self.outputs = ctypes.addressof(plan), plan.inputs, plan.outputs

    def __call__(self, x: Tensor | RunningSum) -> Tensor:
        return sub_block(self, None, x)


def sub_block(
    first: CpuProduct, last: CpuProduct | None, x: Tensor | RunningSum, attention: tuple[int, int] = (0, 0)
) -> Tensor:
    """y [T, out] = last(attention(first(x))), without `last` first(x). attention: the addresses of kernels.h's
    attention_layer and attention_step, for at most FEW_TOKENS; 0: last(first(x))."""
    running = x if isinstance(x, RunningSum) else RunningSum(x)
    values, added = running.parts()
    tokens = values.shape[0]
    if tokens > FEW_TOKENS:
        values, added = running.whole(), None
        if last is not None:
            return last(first(values))
    values = total = values.contiguous()
    out = values.new_empty((tokens, first.outputs if last is None else last.outputs))
    if added is not None:
        added, total = added.contiguous(), values.new_empty(values.shape)
    if first.call(
        first.address, None if last is None else last.address, *attention, values.data_ptr(),
        None if added is None else added.data_ptr(), total.data_ptr(), out.data_ptr(), tokens,
    ):  # fmt: skip
        raise MemoryError(f"a kernel could not allocate its scratch space: {tokens} x {first.inputs} inputs")
    if added is not None:
        running.settle(total)
    return out
