"""One matrix product on this machine's cores: models/cpu/products.c on bf16 and int8 weights, oneDNN, torch; all cold.

    python tools/benchmarks/products.py --threads 1 --tokens 1,8,128

GB/s of weights as stored in bf16 and GFLOP/s, each the best of many calls over weights that no cache holds together.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

import torch
from laddertron.models.cpu.ops import CpuOps, Kernels, read_bandwidth
from laddertron.models.ops import TorchOps
from torch import Tensor

SHAPES = ((2048, 1024), (1024, 1024), (5632, 1024), (1024, 2816), (8192, 1024))
COLD_BYTES = 128 << 20


def best(calls: Sequence[Callable[[Tensor], Tensor]], x: Tensor, seconds: float) -> float:
    """Seconds of the quickest call, going round all of them."""
    quickest, until = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < until:
        for call in calls:
            started = time.perf_counter()
            call(x)
            quickest = min(quickest, time.perf_counter() - started)
    return quickest


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", default="1,8,128")
    parser.add_argument("--seconds", type=float, default=0.3, help="for each figure")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_grad_enabled(False)
    kernels = Kernels.find()
    floor = read_bandwidth()
    print(f"{args.threads} threads read {0.0 if floor is None else floor / 1e9:.1f} GB/s")
    makers = {"oneDNN, packed": CpuOps(None), "torch": TorchOps()}
    if kernels is not None and kernels.int8:
        makers = {"products.c, int8": CpuOps(kernels, int8=True), **makers}
    if kernels is not None and torch.bfloat16 in kernels.served:
        makers = {"products.c": CpuOps(kernels), **makers}
    for outputs, inputs in SHAPES:
        size = 2 * outputs * inputs
        weights = [torch.randn(outputs, inputs).to(torch.bfloat16) for _ in range(-(-COLD_BYTES // size))]
        for name, ops in makers.items():
            calls = [ops.product(weight, None) for weight in weights]
            for tokens in map(int, args.tokens.split(",")):
                took = best(calls, torch.randn(tokens, inputs).to(torch.bfloat16), args.seconds)
                rates = f"{size / took / 1e9:6.1f} GB/s {2 * tokens * outputs * inputs / took / 1e9:6.0f} GFLOP/s"
                print(
                    f"{outputs:5} x {inputs:<5} {tokens:5} tokens  {name:16} {took * 1e3:8.3f} ms  {rates}", flush=True
                )


if __name__ == "__main__":
    main()
