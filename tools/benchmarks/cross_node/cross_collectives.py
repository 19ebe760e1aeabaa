"""Ranks of cross_node.py: all-reduces of every backend in turns, over sizes and delays. Rank 0 sets the link itself and
prints a JSON line a case."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from cluster.nodes import CONTROL, Control
from common import say
from laddertron.topology.comm.bootstrap import MpiBootstrap
from laddertron.topology.comm.groups import CommOptions, Communicator
from laddertron.topology.connect import connect
from laddertron.topology.placement.layout import GroupLayout
from numpy.typing import NDArray
from rank_task import Spec, be_rank, of_all


def collectives(spec: Spec, bootstrap: MpiBootstrap, layout: GroupLayout, address: str) -> None:
    """spec: delays_s, sizes (bytes), lanes (native, gloo, openmpi), seconds (each lane, size and delay)."""
    opened: list[Communicator] = []

    def joined(backend: Any) -> Communicator:
        options = CommOptions(backend=backend, process_groups=backend == "gloo", address=address)
        opened.append(connect(bootstrap, layout, options))
        return opened[-1]

    control = joined("native")
    lanes: dict[str, Callable[[torch.Tensor], object]] = {}
    for name in spec["lanes"]:
        lanes[name] = _raw_mpi(bootstrap) if name == "openmpi" else _waiting(joined(name))
    switch = Control(os.environ[CONTROL]) if control.rank == 0 else None
    for delay in spec["delays_s"]:
        if switch is not None:
            switch.link(delay)
        control.gather(np.zeros(1, np.uint8))
        for size in spec["sizes"]:
            for name, times in _turns(lanes, control, size, spec["seconds"]).items():
                if control.rank == 0:
                    say(
                        nodes=len(layout.nodes),
                        per_node=layout.per_node,
                        delay_s=delay,
                        lane=name,
                        bytes=size,
                        median_s=float(np.median(times)),
                        p90_s=float(np.quantile(times, 0.9)),
                        calls=len(times),
                    )
    for communicator in reversed(opened):
        communicator.close()


def _waiting(communicator: Communicator) -> Callable[[torch.Tensor], object]:
    return lambda x: communicator.all_reduce.start(x).wait()


def _raw_mpi(bootstrap: MpiBootstrap) -> Callable[[torch.Tensor], object]:
    """The library's own blocking all-reduce, from this thread."""
    out: dict[int, NDArray[np.float32]] = {}

    def call(x: torch.Tensor) -> None:
        given = x.numpy()
        bootstrap.comm.Allreduce(given, out.setdefault(given.size, np.empty_like(given)))

    return call


def _turns(
    lanes: dict[str, Callable[[torch.Tensor], object]], control: Communicator, size: int, seconds: float
) -> dict[str, NDArray[np.float64]]:
    """Seconds of each call, from the last rank's entry to the last one's return (the nodes share a clock: without
    that, ranks that fall into step a delay apart would show nought and twice the delay in turns). Five rounds, every
    lane in each."""
    x = torch.zeros(size // 4)
    rounds, times = {}, {name: list[NDArray[np.float64]]() for name in lanes}
    for name, call in lanes.items():
        once = float(np.median(_timed(control, call, x, 5)))
        rounds[name] = int(min(200, max(3, seconds / 5 / once)))
    for _ in range(5):
        for name, call in lanes.items():
            times[name].append(_timed(control, call, x, rounds[name]))
    return {name: np.concatenate(parts) for name, parts in times.items()}


def _timed(
    control: Communicator, call: Callable[[torch.Tensor], object], x: torch.Tensor, count: int
) -> NDArray[np.float64]:
    began, ended = np.empty(count), np.empty(count)
    for i in range(count):
        began[i] = time.monotonic()
        call(x)
        ended[i] = time.monotonic()
    found: NDArray[np.float64] = of_all(control, ended).max(0) - of_all(control, began).max(0)
    return found


if __name__ == "__main__":
    be_rank(collectives)
