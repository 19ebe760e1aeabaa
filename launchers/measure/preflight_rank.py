"""What a rank reports of itself in preflight: how it reaches other nodes, its clock, and how fast it computes alone."""

from __future__ import annotations

import ctypes.util
import os
import resource
import time
from pathlib import Path

import torch

from ...topology.comm.bootstrap import Bootstrap
from ...topology.cost.cost import Backend
from ...topology.cost.preflight import NodeTransport, RankReport
from ...topology.placement.identity import Identity


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
            # NCCL's rings inside a node lie there; the native backend brings memory of its own
            shm_bytes=shm.f_blocks * shm.f_frsize if shm is not None and backend == "nccl" else None,
        ),
        clock_s=time.time(),
        matmul_s=seconds,
    )


def matmul_s(device: torch.device, rounds: int = 100) -> float:
    """Seconds of a short matrix product, the best of some: what the device can do when nobody is in its way."""
    side, dtype = (4096, torch.bfloat16) if device.type == "cuda" else (384, torch.float32)
    a = torch.ones(side, side, dtype=dtype, device=device)
    best = float("inf")
    for _ in range(rounds):
        began = time.perf_counter()
        a @ a
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - began)
    return best


def transport_in(log: str) -> str:
    """NET/IB, NET/Socket or the name of a plugin, from NCCL's log; NET/Socket where it says none: the slow one is
    refused until it is known to be another."""
    for line in log.splitlines():
        if "Using network" in line:
            name = line.partition("Using network")[2].split()[0]
            return name if name.startswith("NET/") else f"NET/{name}"
    return "NET/Socket"
