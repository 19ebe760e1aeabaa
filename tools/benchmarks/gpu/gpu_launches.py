"""The host's time for each kind of launch alone, as the engine makes them: a torch operator, a matrix product, Triton's
kernels, FlashInfer's plan and run, an all-reduce of a group of one, replays of graphs, events, streams, and copies of a
step's integers and of entries of the page table. CALLS of each, in bursts that no queue of the device delays. Prints a
JSON line for each: the host's time of a call, and with the device's.

    python tools/benchmarks/gpu/gpu_launches.py                     a minute at most, FlashInfer compiled
    python tools/benchmarks/gpu/gpu_launches.py --device cpu --tiny the same code, of what needs no GPU
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from common import say
from gpu_model import BLOCK, device_of, of_layers
from laddertron.engine.step.cuda_graphs import CudaRecorder
from laddertron.models.attention import AttentionBackend, Capturable, KVCache, StepLayout
from laddertron.models.attention_choice import make_attention
from laddertron.models.config.known_models import known
from laddertron.models.ops import Norm
from laddertron.models.ops_choice import make_ops
from laddertron.models.stages import RankShard
from laddertron.models.transfer import download, stage, upload
from laddertron.tools.bench.bench_rank import wait_for
from laddertron.topology.comm.backends import GlooCollective
from laddertron.topology.comm.collectives import Collective
from laddertron.topology.comm.ledger import Ledger
from laddertron.topology.comm.nccl import nccl_collective
from laddertron.topology.hardware.cuda_stack import triton_missing

Call = Callable[[], object]
CALLS, BURST, WARM_UP = 1000, 100, 20
"""A burst is a tenth of what the driver queues before a launch waits for the device."""
MODEL, RANKS, CONTEXT = "llama-3.1-70b", 8, 512
DECODES, RECORDED = 16, 1000
"""Sequences of a step, and kernels of the larger graph."""


def time_of(call: Call, calls: int, device: torch.device) -> dict[str, float]:
    """Microseconds of a call: on the host, the median burst and the slowest; the median burst with the device's end."""
    for _ in range(WARM_UP):
        call()
    host, to_end = list[float](), list[float]()
    for _ in range(max(1, calls // BURST)):
        wait_for(device)
        began = time.perf_counter()
        for _ in range(min(calls, BURST)):
            call()
        launched = time.perf_counter()
        wait_for(device)
        host.append((launched - began) / min(calls, BURST) * 1e6)
        to_end.append((time.perf_counter() - began) / min(calls, BURST) * 1e6)
    return {"host_us": round(median(host), 2), "most_us": round(max(host), 2), "whole_us": round(median(to_end), 2)}


def kinds(device: torch.device, tiny: bool) -> Iterator[tuple[str, Call | str]]:
    """Each kind's name with its call, or with the reason why it is not measured here. The shapes are those of a rank's
    step of DECODES sequences."""
    gpu, config = device.type == "cuda", of_layers(known(MODEL), 1, CONTEXT)
    width, dtype = 256 if tiny else config.hidden_size, torch.bfloat16
    x, y = (torch.zeros(DECODES, width, dtype=dtype, device=device) for _ in range(2))
    weight = torch.zeros(width // RANKS, width, dtype=dtype, device=device)
    yield "nothing", lambda: None
    yield "torch operator in place", lambda: x.add_(1.0)
    yield "torch operator into new memory", lambda: x + 1.0
    yield "matrix product", lambda: torch.nn.functional.linear(x, weight)
    norm = Norm(torch.ones(width, dtype=dtype, device=device), 1e-5)
    missing = triton_missing() if gpu else "the device is a CPU"
    ops = make_ops(device, dtype)
    normed = ops.around(lambda rows: rows, norm)
    yield f"norm ({ops.name})", lambda: normed(x)
    if missing is None:
        from laddertron.models.cuda.ops import silu_and_mul

        wide = torch.zeros(DECODES, 2 * width, dtype=dtype, device=device)
        yield "gate (triton)", lambda: silu_and_mul(wide)
    else:
        yield "gate (triton)", missing
    yield from attention_kinds(RankShard(config, RANKS, 0), device)
    yield "all-reduce of a group of one", all_reduce(device, x)
    if gpu:
        yield from gpu_kinds(device, x, y)
    else:
        for name in ("graph of one kernel", f"graph of {RECORDED} kernels", "event", "wait for an event", "stream"):
            yield name, "the device is a CPU"
    yield from copies(device)


def attention_kinds(shard: RankShard, device: torch.device) -> Iterator[tuple[str, Call | str]]:
    """A step's plan, and a layer's rotation, cache write and attention, together and the attention alone."""
    blocks, dtype = CONTEXT // BLOCK, torch.bfloat16
    cache = KVCache(shard, DECODES * blocks, BLOCK, dtype, device)
    attention: AttentionBackend
    attention, _ = make_attention("auto", shard, cache, dtype)
    table = torch.arange(DECODES * blocks, device=device).view(DECODES, blocks)
    at = torch.full((DECODES,), CONTEXT - 1, device=device)
    layout = StepLayout(
        at, list(range(DECODES + 1)), [CONTEXT] * DECODES, table, table[:, -1].clone(), at % BLOCK, DECODES,
        rows=np.arange(DECODES),
    )  # fmt: skip
    dim, heads = shard.config.head_dim, shard.num_heads
    angles = torch.ones(DECODES, 1, dim // 2, device=device)
    qkv = torch.zeros(DECODES, (heads + 2 * shard.num_kv_heads) * dim, dtype=dtype, device=device)
    yield f"plan ({attention.name})", lambda: attention.prepare(layout, angles, angles)
    attention.prepare(layout, angles, angles)
    yield f"attention of a layer ({attention.name})", lambda: attention.attend(0, qkv, None, None)
    if isinstance(attention, Capturable):
        (wrapper,) = vars(attention)["_decoders"].values()
        q = qkv[:, : heads * dim].reshape(DECODES, heads, dim)
        stored, out = (cache.keys[0], cache.values[0]), torch.empty_like(q)
        yield "FlashInfer's run", lambda: wrapper.run(q, stored, out=out)
    else:
        yield "FlashInfer's run", f"attention is {attention.name}"


def all_reduce(device: torch.device, x: torch.Tensor) -> Call:
    """A sum as a layer's, with its events, over NCCL or gloo."""
    make: Any = vars(dist)["HashStore"]  # torch leaves its stores without public types
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=make(), rank=0, world_size=1, timeout=timedelta(seconds=30))
    group, ledger = dist.group.WORLD, Ledger()
    collective: Collective = GlooCollective(group, ledger, "net", [30.0])
    if device.type == "cuda":
        collective = nccl_collective(group, ledger, "net")
    return lambda: collective.start(x).wait()


def gpu_kinds(device: torch.device, x: torch.Tensor, y: torch.Tensor) -> Iterator[tuple[str, Call | str]]:
    cuda: Any = torch.cuda  # torch leaves streams and events without types
    recorder, side, event = CudaRecorder(device, Ledger()), cuda.Stream(device), cuda.Event()

    def many() -> None:
        for _ in range(RECORDED):
            y.add_(1.0)

    def on_side() -> None:
        with cuda.stream(side):
            pass

    yield "graph of one kernel", recorder.record(lambda: y.copy_(x))  # type: ignore[arg-type]
    yield f"graph of {RECORDED} kernels", recorder.record(many)
    yield "event", lambda: event.record()
    yield "timed event", lambda: cuda.Event(enable_timing=True).record()
    event.record()
    yield "wait for an event", lambda: side.wait_event(event)
    yield "stream", on_side


def copies(device: torch.device) -> Iterator[tuple[str, Call | str]]:
    """Of entries of the page table and of a step's integers to the device, and of drawn ids to the host."""
    table = torch.zeros(256, CONTEXT // BLOCK, dtype=torch.int32, device=device)
    entries = np.stack((np.arange(DECODES) * table.shape[1], np.arange(DECODES)))
    inputs, staged = torch.zeros(5 * DECODES, dtype=torch.int64, device=device), torch.zeros(5 * DECODES).long()
    ids = torch.zeros(DECODES, dtype=torch.int64, device=device)

    def change() -> None:
        at, values = upload(entries, device)
        table.view(-1)[at] = values.int()

    yield "copy to the device", lambda: upload(entries, device)
    yield "entries of the page table", change
    yield "integers of a step", lambda: stage(inputs, staged)
    yield "copy to the host", lambda: download(ids)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="narrow rows, for the code and not for figures")
    parser.add_argument("--calls", type=int, default=CALLS, help="of each kind")
    args = parser.parse_args()
    device = device_of(args.device)
    with torch.inference_mode():
        for name, call in kinds(device, args.tiny):
            figures = {"skipped": call} if isinstance(call, str) else time_of(call, args.calls, device)
            say(part="launches", kind=name, **figures)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
