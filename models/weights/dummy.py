"""Weights of `model.load_format: dummy`: drawn from a seed, in the shapes that config.json gives. Norms are one, and
matrices keep the size of what they multiply.

A weight depends on the seed, its tensor's name and its place in it: every layout of ranks has the same model.
"""

from __future__ import annotations

from functools import cache
from zlib import crc32

import torch
from torch import Tensor

from .checkpoint import StoredTensor
from .tensor_reader import Reader

LENGTH = 1 << 20
"""Normal numbers that a row begins at one of; as many again follow, for its length."""
STRIDE = 48271
"""Numbers between the beginnings of two neighbouring rows."""


class DummyReader(Reader):
    """Draws what a Reader reads."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed

    def prefetch(self, stored: StoredTensor, row: int, count: int) -> None:
        """There is no file."""

    def read(self, stored: StoredTensor, row: int, column: int, target: Tensor, scale: Tensor | None = None) -> None:
        self.taken += target.nbytes
        if len(stored.shape) == 1 or "norm" in stored.name:
            target.fill_(0.0 if stored.name.endswith("bias") else 1.0)
            return
        table = _normal(self._seed, target.device, target.dtype)
        places = torch.arange(row, row + len(target), device=target.device) * STRIDE + crc32(stored.name.encode())
        windows = table.as_strided((LENGTH, target.shape[1]), (1, 1), column)
        torch.index_select(windows, 0, places % LENGTH, out=target).mul_(stored.shape[1] ** -0.5)


@cache
def _normal(seed: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Of a standard distribution, the same on every device."""
    return torch.randn(2 * LENGTH, generator=torch.Generator().manual_seed(seed)).to(device, dtype)
