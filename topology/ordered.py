"""One order of summation for every message, over libraries whose own order depends on its size: every rank gathers the
others' whole vectors and adds them up in rank order. Size times the bytes: what `deterministic` costs there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch import Tensor


class Ordered:
    """The sum of x (contiguous, any float type) over a torch group, set off at once."""

    def __init__(self, x: Tensor, group: Any, async_op: bool) -> None:
        self._x = x
        self._parts = torch.empty((dist.get_world_size(group), x.nbytes), dtype=torch.uint8, device=x.device)
        mine = x.view(-1).view(torch.uint8)
        self.work = dist.all_gather_into_tensor(self._parts.view(-1), mine, group=group, async_op=async_op)

    def add_up(self) -> None:
        """Into x, accumulated in float32 and rounded once; the gather must be there."""
        parts = self._parts.view(self._x.dtype)
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part
        self._x.view(-1).copy_(total)
