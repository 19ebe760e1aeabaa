"""Small arrays between host and device through pinned memory, either way, without waiting: from pageable memory the
driver may wait for all the device's work, and `.cpu()` always does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Arriving = Callable[[], NDArray[Any]]
"""A copy on its way to the host: the call waits for it, asleep, and gives its values."""


def carry(x: Tensor, device: torch.device) -> Tensor:
    """x on `device`; itself where it is there already. torch keeps the pinned memory until the copy has left it."""
    if x.device == device:
        return x
    return (x.pin_memory() if device.type == "cuda" else x).to(device, non_blocking=True)


def pinned(values: NDArray[Any], device: torch.device) -> Tensor:
    """The values on the host, where copies to `device` begin without waiting for what it has still to do."""
    x = torch.from_numpy(values)
    return x.pin_memory() if device.type == "cuda" else x


def upload(values: NDArray[Any], device: torch.device) -> Tensor:
    """The values on `device`, in their type; on a CPU the array's own memory."""
    return carry(torch.from_numpy(values), device)


def stage(target: Tensor, source: Tensor) -> None:
    """Copies source (on the host) into target, which stays where it is; source may be written to at once."""
    target.copy_(source.pin_memory() if target.is_cuda else source, non_blocking=True)


def download(x: Tensor, wait: Callable[[Any], None] = lambda event: event.synchronize()) -> Arriving:
    """Starts the copy of x to the host; x may then be overwritten. wait: how the host waits for an event."""
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
