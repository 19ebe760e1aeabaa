"""Two ranks on one GPU over NCCL's sockets, as launch.share_gpu connects them: sums of 16 KB, eager and in a CUDA graph
beside a product, and who learns of a rank that exits within a replay. Prints a JSON line a measurement.

    python tools/benchmarks/gpu/gpu_ranks.py                     two processes, twice, two minutes at most
    python tools/benchmarks/gpu/gpu_ranks.py --device cpu        the same ranks over gloo, without graphs
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from laddertron.engine.step.cuda_graphs import CudaRecorder
from laddertron.launchers.rank.shared_gpu import gpu_index, separate
from laddertron.topology.comm.backends import GlooCollective
from laddertron.topology.comm.collectives import Collective, CommunicationError
from laddertron.topology.comm.ledger import Ledger
from laddertron.topology.comm.nccl import DeviceWait, Roll, join, nccl_collective
from laddertron.topology.placement.identity import Identity

RANKS, VALUES, SUMS, REPLAYS, LIMIT_S = 2, 8192, 8, 50, 60.0
SIDE = 2048
LOST = 7
"""Exit status of the rank that leaves within a replay."""


def say(**line: object) -> None:
    print(json.dumps(line), flush=True)


def one_rank(rank: int, folder: str, device: str, mixing: str) -> None:
    """Runs one rank and, on rank 0, prints what it measured."""
    os.environ.update(GLOO_SOCKET_IFNAME="lo", TORCH_NCCL_ASYNC_ERROR_HANDLING="0", NCCL_GRAPH_MIXING_SUPPORT=mixing)
    separate(Identity(RANKS, rank, rank, RANKS, "box", "torchrun"), os.environ)
    gpu, ledger = device == "cuda", Ledger()
    if gpu:
        index = gpu_index(rank, torch.cuda.device_count(), True)
        torch.cuda.set_device(index or 0)
    make: Any = vars(dist)["FileStore"]  # torch leaves its stores without public types
    store = make(str(Path(folder) / "store"), RANKS)
    limit = timedelta(seconds=30)
    dist.init_process_group("nccl" if gpu else "gloo", store=store, rank=rank, world_size=RANKS, timeout=limit)
    group = dist.group.WORLD
    x = torch.full((VALUES,), float(rank + 1), dtype=torch.bfloat16, device=device)
    collective: Collective
    if not gpu:
        collective = GlooCollective(group, ledger, "net", [30.0])
    else:
        wait = DeviceWait([group], ledger, [30.0], Roll(store, rank, ["box-0", "box-1"]))
        join(group, None, wait)
        collective = nccl_collective(group, ledger, "net")
    began = time.perf_counter()
    for _ in range(REPLAYS):
        total = collective.start(x.clone()).wait()
    right = bool((total == 3.0).all())
    if rank == 0:
        say(
            part="eager",
            right=right,
            us=round((time.perf_counter() - began) / REPLAYS * 1e6, 1),
            started=ledger.started,
        )
    if gpu:
        replayed(rank, x, collective, wait, ledger, mixing)
    elif rank == 1:
        os._exit(LOST)
    else:
        lost(lambda: collective.start(x).wait())


def replayed(rank: int, x: Any, collective: Collective, wait: DeviceWait, ledger: Ledger, mixing: str) -> None:
    """SUMS all-reduces in one graph, each beside a product; then rank 1 exits and rank 0 replays."""
    a, out = torch.randn(SIDE, SIDE, dtype=torch.bfloat16, device="cuda"), torch.zeros_like(x)

    def step() -> None:
        pending = collective.start(x.clone())
        for _ in range(SUMS - 1):
            a.matmul(a)
            out.copy_(pending.wait())
            pending = collective.start(x.clone())
        out.copy_(pending.wait())

    replay = CudaRecorder(torch.device("cuda"), ledger).record(step)
    launched, before, began = list[float](), ledger.started, time.perf_counter()
    for _ in range(REPLAYS):
        start = time.perf_counter()
        replay()
        launched.append(time.perf_counter() - start)
        wait(None, "a replay")
    seconds = (time.perf_counter() - began) / REPLAYS
    if rank == 0:
        median, counted = sorted(launched)[REPLAYS // 2], ledger.started - before == SUMS * REPLAYS
        say(
            part="graph", mixing=mixing, right=bool((out == 3.0).all()), counted=counted,
            replay_us=round(seconds * 1e6, 1), launch_us=round(median * 1e6, 1),
        )  # fmt: skip
    if rank == 1:
        replay()
        os._exit(LOST)
    replay()

    def wait_for_lost() -> None:
        for _ in range(4):
            replay()
            wait(None, "a replay")

    lost(wait_for_lost)


def lost(call: Any) -> None:
    """Waits in vain for rank 1, and reports what ended the wait and when; leaves without ending NCCL's group."""
    began = time.perf_counter()
    try:
        call()
        outcome = "nothing"
    except CommunicationError as error:
        outcome = f"{type(error).__name__}: {error}"
    say(part="lost", outcome=outcome, seconds=round(time.perf_counter() - began, 2))
    os._exit(0)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="ignored: the messages are small")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--folder", default="")
    parser.add_argument("--mixing", default="1")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for a pair of ranks")
    args = parser.parse_args()
    if args.rank is not None:
        one_rank(args.rank, args.folder, args.device, args.mixing)
        return 0
    codes: list[int] = []
    for mixing in ("1", "0") if args.device == "cuda" else ("1",):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, __file__, "--device", args.device, "--folder", folder, "--mixing", mixing]
            ranks = [subprocess.Popen([*command, "--rank", str(rank)]) for rank in range(RANKS)]
            until = time.monotonic() + args.limit
            try:
                codes += [rank.wait(max(1.0, until - time.monotonic())) for rank in ranks]
            except subprocess.TimeoutExpired:
                codes.append(124)
            finally:
                for rank in ranks:
                    rank.kill()
                    rank.wait()
    return 0 if codes == [0, LOST] * (len(codes) // 2) else 1


if __name__ == "__main__":
    sys.exit(main())
