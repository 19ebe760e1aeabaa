"""One order of summation for every message, over libraries whose own order depends on its size: every rank gathers the
others' whole vectors and adds them up. Size times the bytes: what `deterministic` costs there.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .groups import Deterministic


def add_up(parts: Tensor, how: Deterministic) -> Tensor:
    if how == "everywhere":
        while len(parts) > 1:
            parts = parts[0::2] + parts[1::2]
        return parts[0]
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part
    return total


class Ordered:
    """The sum of x (contiguous, any float type) over a torch group, set off at once."""

    def __init__(self, x: Tensor, group: Any, async_op: bool, how: Deterministic) -> None:
        self._x, self._how = x, how
        self._parts = torch.empty((dist.get_world_size(group), x.nbytes), dtype=torch.uint8, device=x.device)
        mine = x.view(-1).view(torch.uint8)
        self.work = dist.all_gather_into_tensor(self._parts.view(-1), mine, group=group, async_op=async_op)

    def add_up(self) -> None:
        self._x.view(-1).copy_(add_up(self._parts.view(self._x.dtype), self._how))
