"""Ranks of cross_node.py's all-reduces: every backend in turns, over sizes and delays. Rank 0 sets the link itself and
prints a JSON line a case. argv: a JSON spec of delays_s, sizes (bytes), backends (native, gloo, openmpi) and seconds
(of each backend, size and delay).
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from itertools import product
from typing import Any

import numpy as np
import torch
from cluster.nodes import CONTROL, Control
from common import say
from laddertron.topology.comm.bootstrap import MpiBootstrap
from laddertron.topology.comm.groups import CommOptions, Communicator
from laddertron.topology.connect import connect
from laddertron.topology.hardware.interfaces import address_of
from laddertron.topology.placement.identity import identify
from laddertron.topology.placement.world import World
from numpy.typing import NDArray

Call = Callable[[torch.Tensor], object]
ROUNDS = 5
"""Every backend has a turn in each."""


def timed(control: Communicator, call: Call, x: torch.Tensor, count: int) -> NDArray[np.float64]:
    """Seconds of each call, from the last rank's entry to the last one's return (the nodes share a clock: without that,
    ranks that fall into step a delay apart would show nought and twice the delay in turns)."""

    def latest(moments: list[float]) -> NDArray[np.float64]:
        every = np.ascontiguousarray(control.gather(np.array(moments).view(np.uint8))).view(np.float64)
        return np.asarray(every.max(0))

    began, ended = [], []
    for _ in range(count):
        began.append(time.monotonic())
        call(x)
        ended.append(time.monotonic())
    return latest(ended) - latest(began)


def raw_mpi(bootstrap: MpiBootstrap) -> Call:
    """The library's own blocking all-reduce, from this thread."""
    out: dict[int, NDArray[np.float32]] = {}

    def call(x: torch.Tensor) -> None:
        given = x.numpy()
        bootstrap.comm.Allreduce(given, out.setdefault(given.size, np.empty_like(given)))

    return call


def measure(spec: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    bootstrap, me = MpiBootstrap(), identify()
    assert me is not None
    nodes = tuple(name.decode() for name in bootstrap.all_gather(me.node.encode()))
    layout, address = World(bootstrap.size).on(nodes).layout(0), address_of("eth0")
    with ExitStack() as stack:

        def joined(backend: Any) -> Communicator:
            options = CommOptions(backend=backend, process_groups=backend == "gloo", address=address)
            return stack.enter_context(connect(bootstrap, layout, options))

        def waiting(communicator: Communicator) -> Call:
            return lambda x: communicator.all_reduce.start(x).wait()

        control, switch, calls = joined("native"), Control(os.environ[CONTROL]), dict[str, Call]()
        for name in spec["backends"]:
            calls[name] = raw_mpi(bootstrap) if name == "openmpi" else waiting(joined(name))
        for delay, size in product(spec["delays_s"], spec["sizes"]):
            if control.rank == 0:
                switch.link(delay)
            control.gather(np.zeros(1, np.uint8))
            x, times = torch.zeros(size // 4), {name: list[NDArray[np.float64]]() for name in calls}
            counts = {}
            for name, call in calls.items():
                once = float(np.median(timed(control, call, x, 5)))
                counts[name] = int(min(200, max(3, spec["seconds"] / ROUNDS / once)))
            for _ in range(ROUNDS):
                for name, call in calls.items():
                    times[name].append(timed(control, call, x, counts[name]))
            for name, parts in times.items():
                seconds, where = np.concatenate(parts), {"nodes": len(layout.nodes), "per_node": layout.per_node}
                figures = {"median_s": float(np.median(seconds)), "p90_s": float(np.quantile(seconds, 0.9))}
                if control.rank == 0:
                    say(**where, delay_s=delay, lane=name, bytes=size, **figures)


if __name__ == "__main__":
    try:
        measure(json.loads(sys.argv[1]))
    except BaseException:  # a rank that fails leaves at once, and mpirun ends those that wait for it
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
