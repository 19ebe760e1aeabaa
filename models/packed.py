"""Quantised matrices as they are in memory: a checkpoint's codes with a scale for each row and group of columns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from .config.quantisation import E2M1, Code, Quantisation, scale_shape


@dataclass(frozen=True, slots=True)
class Packed:
    """Codes [..., rows, bytes], fp8 or two of 4 bits in a byte (see Quantisation), scale [..., rows, n] for n equal
    groups of columns, and zero points, int8 of the same shape, or None. A weight is (code - zero) * scale."""

    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    code: Code

    @property
    def columns(self) -> int:
        return self.codes.shape[-1] * (1 if self.code == "e4m3" else 2)

    @property
    def width(self) -> int:
        """The columns that share a scale."""
        return self.columns // self.scale.shape[-1]

    def apart(self, count: int) -> Packed:
        """The matrices of `count` experts, whose rows follow one another: [count, rows, ...]."""
        codes, scale, zero = (
            None if part is None else part.view(count, -1, part.shape[1])
            for part in (self.codes, self.scale, self.zero)
        )
        assert codes is not None
        assert scale is not None
        return replace(self, codes=codes, scale=scale, zero=zero)

    def each(self) -> Iterator[Packed]:
        """The matrices of [count, rows, ...]."""
        for i in range(len(self.codes)):
            zero = None if self.zero is None else self.zero[i]
            yield replace(self, codes=self.codes[i], scale=self.scale[i], zero=zero)

    def widened(self, dtype: torch.dtype) -> Tensor:
        """[..., rows, columns], computed in fp32 and rounded once."""
        values = self.codes.float()
        if self.code != "e4m3":
            codes = torch.stack((self.codes & 15, self.codes >> 4), -1).flatten(-2)
            table = [*range(-8, 8)] if self.code == "int4" else [*E2M1, *(-value for value in E2M1)]
            values = torch.tensor(table, dtype=torch.float32, device=codes.device)[codes.long()]
        values = values.view(*self.scale.shape, -1)
        values = values if self.zero is None else values - self.zero.unsqueeze(-1)
        scaled: Tensor = values * self.scale.float().unsqueeze(-1)
        return scaled.flatten(-2).to(dtype)


def replace_parameters(layer: Any, q: Quantisation) -> None:
    """Replaces a layer's `weight` by one of codes, and adds `weight_scale` and, where there are zero points,
    `weight_zero`."""
    wide, kind = layer.get_parameter("weight"), torch.float8_e4m3fn if q.code == "e4m3" else torch.uint8
    (rows, columns), scales = wide.shape, scale_shape(tuple(wide.shape), q.block)

    def parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
        return nn.Parameter(torch.empty(shape, dtype=dtype, device=wide.device), requires_grad=False)

    layer.weight, layer.code = parameter(rows, columns // q.per_byte, dtype=kind), q.code
    layer.weight_scale = parameter(*scales, dtype=getattr(torch, q.scale_type))
    if q.zeros:
        layer.weight_zero = parameter(*scales, dtype=torch.int8)


def packed_of(layer: Any) -> Packed | None:
    """A layer's quantised weight; None if it is a plain one."""
    if not hasattr(layer, "weight_scale"):
        return None
    zero = layer.weight_zero.detach() if hasattr(layer, "weight_zero") else None
    return Packed(layer.weight.detach(), layer.weight_scale.detach(), zero, layer.code)


def release(layer: Any) -> None:
    """Frees the parameters of which the operators hold a repacked copy."""
    for name in ("weight", "weight_scale", "weight_zero"):
        if hasattr(layer, name):
            parameter = layer.get_parameter(name)
            parameter.data = parameter.new_empty(0)
