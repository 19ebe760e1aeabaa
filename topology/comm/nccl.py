"""All-reduces on GPUs: NCCL on a stream beside the computing one (gpu_stream.py), and its gathers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from .gpu_stream import StreamCollective
from .ordered import Ordered

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from .groups import Deterministic
    from .ledger import Ledger
    from .two_level import TwoLevel

_DEVICE = "cuda"


def nccl_collective(
    group: Any, ledger: Ledger, link: str, deterministic: Deterministic = False, levels: TwoLevel | None = None
) -> StreamCollective:
    """All-reduces over a torch group of NCCL; its own order of summation depends on the size, that of `deterministic`
    does not. `levels`: what carries some messages instead. Its communicators are made here, on every rank: what they
    hold must be gone before free memory is counted, and nothing can connect within a capture."""
    if levels is not None:
        levels(torch.zeros(levels.ranks, device=_DEVICE))

    def issue(x: Tensor) -> str | None:
        if levels is not None and levels.carries(x):
            levels(x)
            return "nccl two_level"
        dist.all_reduce(x, group=group)
        return None

    def issue_ordered(x: Tensor) -> None:
        Ordered(x, group, False, deterministic).add_up()

    return StreamCollective(issue_ordered if deterministic else issue, ledger, "nccl", link)


class NcclGather:
    """Gathers of bytes that lie on the host, there and back through the device, and of what lies on devices."""

    def __init__(self, group: Any, ledger: Ledger) -> None:
        self._group, self._ledger = group, ledger

    def start(self, payload: NDArray[np.uint8]) -> _NcclGathering:
        mine = torch.from_numpy(np.ascontiguousarray(payload, dtype=np.uint8)).cuda(non_blocking=True)
        out = torch.empty((dist.get_world_size(self._group), len(mine)), dtype=torch.uint8, device=mine.device)
        self._ledger.started += 1
        work = dist.all_gather_into_tensor(out, mine, group=self._group, async_op=True)
        return _NcclGathering(work, out, self._ledger)

    def gather_tensor(self, x: Tensor) -> Tensor:
        """As DeviceGather says."""
        out = torch.empty((dist.get_world_size(self._group), len(x)), dtype=x.dtype, device=x.device)
        self._ledger.started += 1
        dist.all_gather_into_tensor(out, x, group=self._group)
        return out


class _NcclGathering:
    def __init__(self, work: Any, out: Tensor, ledger: Ledger) -> None:
        self._work, self._out, self._ledger = work, out, ledger

    def wait(self) -> NDArray[np.uint8]:
        self._work.wait()
        # Here the host waits for the device, and with it for every all-reduce before.
        self._ledger.waiting = "gather"
        gathered = self._out.cpu().numpy()
        self._ledger.waiting = ""
        return gathered
