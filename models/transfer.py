"""Copies small arrays between host and device through pinned memory, without waiting for the device: with pageable
memory the driver may wait for all of the device's work, and `.cpu()` always does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Arriving = Callable[[], NDArray[Any]]
"""A copy to the host in flight: the call waits for it and returns the values."""


def carry(x: Tensor, device: torch.device) -> Tensor:
    """Copies x to `device`; returns x itself if it is already there. torch keeps the pinned memory until the copy is
    complete."""
    if x.device == device:
        return x
    return (x.pin_memory() if device.type == "cuda" else x).to(device, non_blocking=True)


def pinned(values: NDArray[Any], device: torch.device) -> Tensor:
    """The values in host memory (pinned for CUDA) from which copies to `device` start without waiting for it."""
    x = torch.from_numpy(values)
    return x.pin_memory() if device.type == "cuda" else x


def upload(values: NDArray[Any], device: torch.device) -> Tensor:
    """Copies the values to `device` in their dtype; on a CPU it shares the array's memory."""
    return carry(torch.from_numpy(values), device)


def stage(target: Tensor, source: Tensor) -> None:
    """Copies source (on the host) into target, whose address stays the same; source may be overwritten at once."""
    target.copy_(source.pin_memory() if target.is_cuda else source, non_blocking=True)


def download(x: Tensor, wait: Callable[[Any], None] = lambda event: event.synchronize()) -> Arriving:
    """Starts a copy of x to the host; x may then be overwritten. wait: how the host waits for an event."""
    if not x.is_cuda:
        there: NDArray[Any] = np.array(x.numpy())
        return lambda: there
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    host.copy_(x, non_blocking=True)
    event: Any = torch.cuda.Event
    written = event(blocking=True)
    written.record()

    def read() -> NDArray[Any]:
        wait(written)
        values: NDArray[Any] = host.numpy()
        return values

    return read
