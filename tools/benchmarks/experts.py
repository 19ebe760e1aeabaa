"""The experts' products of one layer on this machine's cores: models/cpu/experts.c and torch in turns, all cold.

    python tools/benchmarks/experts.py --rows 1,8,128

GB/s of the weights of the experts that were chosen, and the share of what a bare loop reads of as many bytes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial

import torch
from laddertron.models.cpu.experts import pack_experts
from laddertron.models.cpu.ops import CpuOps, Kernels
from laddertron.models.pages import HugePages
from torch import Tensor
from torch.nn import functional

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "int8": torch.bfloat16}


def torch_loop(gate_up: Tensor, down: Tensor, x: Tensor, chosen: Tensor, weight: Tensor) -> Tensor:
    """As transformers computes it."""
    out = torch.zeros_like(x)
    for expert in set(chosen.flatten().tolist()):
        rows, slots = torch.where(chosen == expert)
        gate, up = functional.linear(x[rows], gate_up[expert]).chunk(2, -1)
        y = functional.linear(functional.silu(gate) * up, down[expert])
        out.index_add_(0, rows, (y * weight[rows, slots, None]).to(x.dtype))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", default="1,8,128")
    parser.add_argument("--shape", default="1024,352,32,4", help="hidden, FFN of an expert, experts, chosen")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--layers", type=int, default=4, help="that take turns, so that no cache holds them")
    parser.add_argument("--rounds", type=int, default=40)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_grad_enabled(False)
    torch.manual_seed(0)
    hidden, inner, experts, k = map(int, args.shape.split(","))
    dtype, int8 = DTYPES[args.dtype], args.dtype == "int8"
    kernels = Kernels.find()
    if kernels is None:
        raise SystemExit("the kernels were not built")
    size = 3 * hidden * inner * (1 if int8 else dtype.itemsize)
    layers = []
    for _ in range(args.layers):
        gate_up = (torch.randn(experts, 2 * inner, hidden) / hidden**0.5).to(dtype)
        down = (torch.randn(experts, hidden, inner) / inner**0.5).to(dtype)
        packed = pack_experts(CpuOps(kernels, int8=int8), gate_up, down)
        if packed is None:
            raise SystemExit(f"the tier {kernels.tier} leaves {args.dtype} to torch")
        layers.append((packed, partial(torch_loop, gate_up, down)))
    bare = HugePages().take(args.layers * experts * size).fill_(1)
    for rows in map(int, args.rows.split(",")):
        took: dict[str, list[float]] = {"bare": [], "experts.c": [], "torch": []}
        read = 0
        for number in range(args.rounds):
            ours, plain = layers[number % args.layers]
            routed = torch.randn(rows, hidden).to(dtype), torch.rand(rows, experts).argsort(1)[:, :k].int()
            distinct = len(set(routed[1].flatten().tolist()))
            address, weight = bare.data_ptr() + number % args.layers * experts * size, torch.rand(rows, k)
            calls = {
                "bare": partial(kernels.read, address, distinct * size, kernels.threads),
                "experts.c": partial(ours, *routed, weight),
                "torch": partial(plain, *routed, weight),
            }
            for name, call in calls.items():
                started = time.perf_counter()
                call()
                took[name].append(time.perf_counter() - started)
            read += distinct
        nbytes, floor = read / args.rounds * size, statistics.median(took["bare"])
        print(f"{kernels.tier} {args.dtype}, {rows} rows, {read / args.rounds:.1f} experts, {nbytes / 1e6:.1f} MB")
        for name, times in took.items():
            median = statistics.median(times)
            rate = f"{median * 1e3:8.3f} ms {nbytes / median / 1e9:5.1f} GB/s, {floor / median:.2f} of the floor"
            print(f"  {name:9} median {rate}; best {min(times) * 1e3:.3f} ms", flush=True)


if __name__ == "__main__":
    main()
