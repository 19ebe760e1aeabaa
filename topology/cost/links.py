"""Measures latency and rate between two ranks, by the library that started the ranks or carries their collectives."""

from __future__ import annotations

import time
from typing import Any, Protocol

import numpy as np
import torch

from ..comm.bootstrap import Bootstrap, MpiBootstrap
from ..comm.groups import Communicator

_SMALL, _BULK = 8, 4 << 20
_WARM, _ROUNDS, _TRANSFERS = 5, 30, 3


class PointToPoint(Protocol):
    """Blocking messages between two ranks (global numbers); `carrier`: whose, in a word."""

    @property
    def carrier(self) -> str: ...

    def send(self, nbytes: int, peer: int) -> None: ...

    def receive(self, nbytes: int, peer: int) -> None: ...


class MpiLine:
    carrier = "MPI"

    def __init__(self, bootstrap: MpiBootstrap) -> None:
        self._comm = bootstrap.comm
        self._buffer = np.zeros(_BULK, np.uint8)

    def send(self, nbytes: int, peer: int) -> None:
        self._comm.Send(self._buffer[:nbytes], peer)

    def receive(self, nbytes: int, peer: int) -> None:
        self._comm.Recv(self._buffer[:nbytes], peer)


class TorchLine:
    """Through the group's own torch group, as the world's carries nothing: NCCL between devices, gloo between hosts."""

    def __init__(self, device: torch.device, comm: Communicator) -> None:
        import torch.distributed as dist

        self._dist: Any = dist
        self._group, self._ranks = comm.tp, comm.layout.ranks
        self._device = device
        self.carrier = "NCCL" if device.type == "cuda" else "gloo"
        self._buffer = torch.zeros(_BULK, dtype=torch.uint8, device=device)

    def send(self, nbytes: int, peer: int) -> None:
        self._dist.send(self._buffer[:nbytes], group=self._group, group_dst=self._ranks.index(peer))
        self._settle()

    def receive(self, nbytes: int, peer: int) -> None:
        self._dist.recv(self._buffer[:nbytes], group=self._group, group_src=self._ranks.index(peer))
        self._settle()

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def needs_torch_groups(bootstrap: Bootstrap, backend: str) -> bool:
    """Whether `line_of` sends through torch.distributed, which must be initialised for that."""
    return backend == "nccl" or not isinstance(bootstrap, MpiBootstrap)


def line_of(bootstrap: Bootstrap, backend: str, device: torch.device, comm: Communicator) -> PointToPoint:
    """By NCCL where it carries the collectives; else by MPI where it started the ranks, and by gloo under torchrun."""
    if backend == "nccl":
        return TorchLine(device, comm)
    return MpiLine(bootstrap) if isinstance(bootstrap, MpiBootstrap) else TorchLine(torch.device("cpu"), comm)


def measure(line: PointToPoint, peer: int, first: bool) -> tuple[float, float]:
    """(seconds one way, bytes/s) to `peer`, which calls this at the same time with the other `first`; what the second
    one returns is its own view, of no use. Half of a quick round trip (the tenth of them that is quickest: a link is
    not slow because a rank was not awake); the best of a few bulk transfers."""

    def there_and_back(nbytes: int) -> float:
        began = time.perf_counter()
        if first:
            line.send(nbytes, peer)
            line.receive(_SMALL, peer)
        else:
            line.receive(nbytes, peer)
            line.send(_SMALL, peer)
        return time.perf_counter() - began

    trips = [there_and_back(_SMALL) for _ in range(_WARM + _ROUNDS)]
    round_trip = float(np.quantile(trips[_WARM:], 0.1))
    best = min(there_and_back(_BULK) for _ in range(_TRANSFERS))
    # a transfer and its receipt take a round trip in addition to the bytes; on a link without latency that is noise
    return round_trip / 2, _BULK / max(best - round_trip, best / 10)
