"""How long an all-reduce takes on this machine: every backend, 16 B to 8 MB, 2, 4 and 8 ranks. Prints JSON lines.

    python benchmarks/collectives.py --ranks 2,4 --backends native,gloo,mpi
    python benchmarks/collectives.py --ranks 4 --per-node 2      as if on two nodes: TCP over loopback between them
    python benchmarks/collectives.py --ledger                    what the account of a call costs, and no all-reduce

The backends take turns in one run, so that a busy machine is unfair to all of them alike; medians and 90th percentiles
over the slowest rank of each call. `start_us` is what `start` alone costs the computing thread.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from laddertron.topology.groups import Communicator
    from torch import Tensor

Floats = NDArray[np.float64]

SIZES = [16, 256, 4096, 16 << 10, 32 << 10, 64 << 10, 128 << 10, 256 << 10, 1 << 20, 4 << 20, 8 << 20]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", default="2,4,8", help="numbers of ranks, one after another")
    parser.add_argument("--per-node", type=int, default=0, help="ranks a node (0: all)")
    parser.add_argument("--backends", default="native,gloo,mpi")
    parser.add_argument(
        "--strategies", default="auto", help="of the native backend: auto, exchange, two_level, doubling, pipeline"
    )
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="bytes")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--seconds", type=float, default=0.3, help="for each backend and size")
    parser.add_argument("--spin-us", type=float, default=-1.0, help="of the native backend; -1: its own choice")
    parser.add_argument("--chunk", type=int, default=256 << 10, help="bytes; of the native backend")
    parser.add_argument("--ledger", action="store_true", help="only what the accounts cost a call")
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.ledger:
        print(json.dumps(ledger_cost()))
        return
    if args.as_rank:
        measure(args)
        return
    for ranks in args.ranks.split(","):
        mpirun = Path(sys.executable).with_name("mpirun")
        command = [str(mpirun) if mpirun.exists() else "mpirun", "--allow-run-as-root", "--oversubscribe"]
        command += ["--bind-to", "none", "-np", ranks, sys.executable, "-W", "ignore", __file__, "--as-rank"]
        subprocess.run([*command, *sys.argv[1:]], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


def ledger_cost(calls: int = 20_000) -> dict[str, float]:
    """Microseconds a call, quickest of five rounds: `Ledger.add` (backends whose accounts Python keeps) and one reading
    of the clock, of which the native transport's accounts are three and little else."""
    from laddertron.topology.ledger import Ledger

    ledger, start = Ledger(), time.monotonic()
    rounds: dict[str, list[float]] = {"add_us": [], "clock_us": []}
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(calls):
            ledger.add("all_reduce", "flat", "net", 16384, start, start, start)
        rounds["add_us"].append((time.perf_counter() - began) / calls * 1e6)
        began = time.perf_counter()
        for _ in range(calls):
            time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        rounds["clock_us"].append((time.perf_counter() - began) / calls * 1e6)
    return {name: round(min(times), 3) for name, times in rounds.items()}


def measure(args: argparse.Namespace) -> None:
    import torch
    from laddertron.topology.bootstrap import MpiBootstrap
    from laddertron.topology.groups import CommOptions, connect
    from laddertron.topology.layout import GroupLayout

    torch.set_num_threads(1)
    bootstrap = MpiBootstrap()
    size = bootstrap.size
    each = args.per_node or size
    layout = GroupLayout(tuple(tuple(range(at, at + each)) for at in range(0, size, each)))
    dtype = getattr(torch, args.dtype)
    names: list[tuple[Any, Any]] = []
    for backend in args.backends.split(","):
        names += [(backend, s) for s in (args.strategies.split(",") if backend == "native" else ["auto"])]
    comms = {}
    for backend, strategy in names:
        spin = None if args.spin_us < 0 else args.spin_us
        options = CommOptions(
            backend=backend, collective=strategy, process_groups=backend == "gloo", spin_us=spin, chunk_bytes=args.chunk
        )
        comms[backend, strategy] = connect(bootstrap, layout, options)
    control = comms[names[0]]
    for bytes_ in map(int, args.sizes.split(",")):
        x = torch.zeros(max(1, bytes_ // dtype.itemsize), dtype=dtype)
        totals: dict[tuple[str, str], list[Floats]] = {name: [] for name in names}
        starts: dict[tuple[str, str], list[Floats]] = {name: [] for name in names}
        rounds = {}
        for name, comm in comms.items():  # warm up, and agree how many calls fit into the time
            once = float(np.median(_calls(comm, x, 9)[0]))
            rounds[name] = _fit(control, once, args.seconds / 5)
        for _ in range(5):
            for name, comm in comms.items():
                total, start = _calls(comm, x, rounds[name])
                totals[name].append(control.gather(total.view(np.uint8)).view(np.float64).max(0))
                starts[name].append(start)
        if control.rank == 0:
            for backend, strategy in names:
                t, s = np.concatenate(totals[backend, strategy]), np.concatenate(starts[backend, strategy])
                line = {
                    "ranks": size,
                    "nodes": len(layout.nodes),
                    "backend": backend,
                    "strategy": strategy,
                    "dtype": args.dtype,
                    "bytes": x.nbytes,
                    "median_us": round(float(np.median(t)) * 1e6, 1),
                    "p90_us": round(float(np.quantile(t, 0.9)) * 1e6, 1),
                    "start_us": round(float(np.median(s)) * 1e6, 1),
                    "calls": len(t),
                }
                print(json.dumps(line), flush=True)
    for comm in comms.values():
        comm.close()


def _fit(control: Communicator, once: float, seconds: float) -> int:
    """Calls that fit into `seconds`, as the slowest rank sees it: the same number everywhere."""
    slowest = control.gather(np.array([once]).view(np.uint8)).view(np.float64).max()
    return int(min(500, max(3, seconds / slowest)))


def _calls(comm: Communicator, x: Tensor, count: int) -> tuple[Floats, Floats]:
    """Seconds of each start-and-wait, and of its start."""
    total, start = np.empty(count), np.empty(count)
    for i in range(count):
        began = time.perf_counter()
        pending = comm.all_reduce.start(x)
        start[i] = time.perf_counter() - began
        pending.wait()
        total[i] = time.perf_counter() - began
    return total, start


if __name__ == "__main__":
    main()
