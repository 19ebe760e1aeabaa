"""A rank's measurements in preflight: its reach, clock and speed, point-to-point links, all-reduces of every strategy
and size. Every rank calls with the same plan; a watchdog ends what does not answer.
"""

from __future__ import annotations

import ctypes.util
import logging
import os
import resource
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from ...topology.comm.bootstrap import Bootstrap
from ...topology.comm.groups import CommOptions, Communicator, OneShotImpossible
from ...topology.connect import connect
from ...topology.cost.cost import Backend, Shape, Strategy
from ...topology.cost.fit import Point
from ...topology.cost.links import PointToPoint, measure
from ...topology.hardware.sysfs import Sysfs, cpu_name
from ...topology.placement.identity import Identity
from ...topology.placement.layout import GroupLayout
from .preflight_job import Watch
from .preflight_plan import NodeTransport, PreflightPlan, RankReport

log = logging.getLogger(__name__)

SLACK_S = 10.0
"""Added to the limit, because other ranks may be busy."""
_SECONDS = 0.25  # for each strategy and size


def measure_links(
    plan: PreflightPlan,
    bootstrap: Bootstrap,
    line: PointToPoint | None,
    nodes: Sequence[str],
    watch: Watch,
) -> list[tuple[int, int, int | None, str, float, float]]:
    """Pairs whose first rank this is: both ranks, the rail, the path, seconds one way, bytes/s.
    Every rank calls it; all end a round before any begins the next. `nodes`: each rank's host, for the words of the
    watch."""
    links: list[tuple[int, int, int | None, str, float, float]] = []
    for pairs in plan.rounds:
        for pair in pairs:
            if line is not None and bootstrap.rank in (pair.a, pair.b):
                first = bootstrap.rank == pair.a
                ends = " to ".join(f"rank {end} on {nodes[end]}" for end in (pair.a, pair.b))
                with watch.over(f"nothing came over the link from {ends}".__str__):
                    latency, rate = measure(line, pair.b if first else pair.a, first)
                if first:
                    links.append((pair.a, pair.b, pair.rail, pair.path, latency, rate))
        bootstrap.all_gather(b"")
    return links


def sweep(
    plan: PreflightPlan,
    control: Communicator,
    bootstrap: Bootstrap,
    layout: GroupLayout,
    options: CommOptions,
    shape: Shape,
    device: torch.device,
    together: Sequence[tuple[Strategy, int]],
    watch: Watch,
) -> list[Point]:
    """Measures every strategy and size of the plan; each strategy has its own connections. `together`: with several
    groups, the strategies of all groups, in whose order every rank connects and measures."""
    points = []
    mine = set(plan.sweep)
    for strategy in dict.fromkeys(s for s, _ in together or plan.sweep):
        own = control
        if strategy in ("exchange", "two_level", "one_shot", "doubling", "pipeline"):
            collective = strategy if strategy in {s for s, _ in mine} else "auto"
            with watch.over(unconnected, watch.limit_s + SLACK_S):
                try:
                    own = connect(bootstrap, layout, replace(options, collective=collective, process_groups=False))
                except OneShotImpossible as error:  # all ranks of the group raise it
                    mine = {row for row in mine if row[0] != strategy}
                    if bootstrap.rank == layout.ranks[0]:
                        log.warning("%s", error)
        try:
            for nbytes in (n for s, n in together or plan.sweep if s == strategy):
                if (strategy, nbytes) in mine:
                    took = _all_reduce_s(own, control, nbytes, device, watch)
                    points.append(Point(strategy, nbytes, took, shape))
                if together:
                    bootstrap.all_gather(b"")
        finally:
            if own is not control:
                own.close()
    return points


def unconnected() -> str:
    return "the ranks of its group did not connect"


def _all_reduce_s(own: Communicator, control: Communicator, nbytes: int, device: torch.device, watch: Watch) -> float:
    """Seconds an all-reduce, calls back to back: the median of a few batches of them, the slowest rank's."""
    x = torch.zeros(nbytes // 4, device=device)

    def calls(count: int) -> float:
        # the backends' own waits end earlier and name the peer; NCCL's do not
        with watch.over(f"all-reduces of {nbytes} bytes did not end".__str__, watch.limit_s + SLACK_S):
            began = time.perf_counter()
            for _ in range(count):
                own.all_reduce.start(x).wait()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            return (time.perf_counter() - began) / count

    calls(2)
    count = int(min(200, max(2, _SECONDS / 5 / _slowest(control, calls(3)))))
    return _slowest(control, statistics.median(calls(count) for _ in range(5)))


def _slowest(control: Communicator, seconds: float) -> float:
    mine: NDArray[np.uint8] = np.array([seconds]).view(np.uint8)
    return float(np.ascontiguousarray(control.gather(mine)).view(np.float64).max())


def report(
    identity: Identity,
    bootstrap: Bootstrap,
    backend: Backend,
    device: torch.device,
    spans: bool,
    log: Path | None,
) -> RankReport:
    used: str = backend if spans else ""
    if spans and backend == "nccl":
        used = transport_in(log.read_text(errors="replace") if log is not None and log.is_file() else "")
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    infiniband = Path("/dev/infiniband")
    shm = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    seconds = matmul_s(device)
    bootstrap.all_gather(b"")
    return RankReport(
        rank=bootstrap.rank,
        hostname=identity.node,
        transport=NodeTransport(
            used=used,
            devices=tuple(sorted(map(str, infiniband.glob("uverbs*")))) if infiniband.is_dir() else (),
            memlock_bytes=None if limit == resource.RLIM_INFINITY else limit,
            library=ctypes.util.find_library("ibverbs") or "",
            # NCCL's rings inside a node use it; the native backend brings memory of its own
            shm_bytes=shm.f_blocks * shm.f_frsize if shm is not None and backend == "nccl" else None,
        ),
        clock_s=time.time(),
        matmul_s=seconds,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(Sysfs()),
    )


def matmul_s(device: torch.device) -> float:
    """Seconds of a short matrix product, the best of a hundred: the rate of an idle device."""
    side, dtype = (4096, torch.bfloat16) if device.type == "cuda" else (384, torch.float32)
    a = torch.ones(side, side, dtype=dtype, device=device)
    best = float("inf")
    for _ in range(100):
        began = time.perf_counter()
        a @ a
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - began)
    return best


def transport_in(log: str) -> str:
    """The transport in NCCL's log: NET/IB, NET/Socket or the name of a plugin. NET/Socket, the slow one, if the log
    names none, so that it is refused if InfiniBand is required."""
    for line in log.splitlines():
        if "Using network" in line:
            name = line.partition("Using network")[2].split()[0]
            return name if name.startswith("NET/") else f"NET/{name}"
    return "NET/Socket"
