"""The one-shot all-reduce on one GPU, its ranks streams of one process: whether sums are right, and the time of a call
in a graph (with the copy that refills its message), for 2, 4 and 8 ranks and messages of 8 KiB to 4 MiB. Prints a JSON
line for each. Peers' memory is the GPU's own: the time is of launches, flags and sums, not of a link.

    python tools/benchmarks/gpu/gpu_one_shot.py
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from typing import Any

import torch

RANKS, SIZES, CALLS, REPLAYS = (2, 4, 8), (8 << 10, 32 << 10, 256 << 10, 1 << 20, 4 << 20), 50, 20
LIMIT_S = 20.0
"""After which the kernels of a size are ended; its sums are then wrong."""


def measure(ranks: int, nbytes: int) -> dict[str, Any]:
    """CALLS sums on each rank's stream in one graph, replayed; every rank's last sum is compared."""
    from laddertron.topology.comm.one_shot import REGION_BYTES, OneShot

    make: Any = torch.cuda.Stream  # torch leaves it without types
    regions = [torch.zeros(REGION_BYTES, dtype=torch.uint8, device="cuda") for _ in range(ranks)]
    one_shots, streams = [OneShot(rank, regions) for rank in range(ranks)], [make() for _ in range(ranks)]
    given = torch.randn(ranks, nbytes // 2, device="cuda").to(torch.bfloat16)
    total = given[0].float()
    for other in given[1:]:
        total = total + other.float()
    xs = given.clone()

    def end() -> None:
        """Streams may be run one behind another, which no sum would survive."""
        for one_shot in one_shots:
            one_shot.abort()

    guard = threading.Timer(LIMIT_S, end)
    guard.start()

    def step(calls: int) -> None:
        # Call by call over the ranks: a stream's queue need not hold all of one rank's kernels.
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
        for _ in range(calls):
            for one_shot, stream, x, mine in zip(one_shots, streams, xs, given, strict=True):
                with torch.cuda.stream(stream):
                    x.copy_(mine)
                    one_shot(x)
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)

    step(1)
    torch.cuda.synchronize()
    eager = torch.equal(xs, total.to(xs.dtype).expand_as(xs))
    graph: Any = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(CALLS)
    graph.replay()
    xs.zero_()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(REPLAYS):
        graph.replay()
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - began) / (CALLS * REPLAYS)
    replayed = torch.equal(xs, total.to(xs.dtype).expand_as(xs))
    guard.cancel()
    line = {"part": "one_shot", "ranks": ranks, "bytes": nbytes, "eager": eager, "replayed": replayed}
    return line | {"us": round(seconds * 1e6, 2)}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: nothing is measured")
    parser.add_argument("--tiny", action="store_true", help="ignored: the messages are small")
    if parser.parse_args().device == "cpu":
        return 0
    right = True
    for ranks in RANKS:
        for nbytes in SIZES:
            line = measure(ranks, nbytes)
            right &= line["eager"] and line["replayed"]
            print(json.dumps(line), flush=True)
    return int(not right)


if __name__ == "__main__":
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # kernels of all streams must run at one time
    sys.exit(main())
