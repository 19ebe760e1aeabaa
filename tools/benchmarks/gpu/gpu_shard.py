"""One rank's shard of 70B at tp 8 and 405B at tp 16 on one GPU: random weights, real kernels, all-reduces emulated at
NVLink's and InfiniBand's untuned prices. Prints a JSON line a case, then a table with the published speeds.

    python tools/benchmarks/gpu_day.py --only shard             with what else a GPU is measured by
    PYTHONPATH=tools/benchmarks python tools/benchmarks/gpu/gpu_shard.py --device cpu --tiny    a toy model, a timer

Emulated: the other ranks' all-reduces (k multiprocessors held, k = 0 a pure delay) and the gather of candidates. Left
out: sampling, the scheduler, late ranks. Every step decodes one token for each sequence at the same position.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from common import numbers, say
from emulated_gpu import EmulatedOnGpu
from gpu_model import BLOCK, NAMES, TINY, device_of, make_model, of_layers, predicted_ms, rewired
from gpu_shard_report import shard_table
from laddertron.engine.step.cuda_graphs import CudaRecorder, StepGraphs
from laddertron.engine.step.share import DTYPES
from laddertron.models.attention import AttentionBackend, Capturable, KVCache, StepLayout
from laddertron.models.attention_choice import make_attention
from laddertron.models.config.known_models import known
from laddertron.models.config.model_config import ModelConfig
from laddertron.models.llama import LlamaModel
from laddertron.models.stages import RankShard
from laddertron.tools.bench.bench_rank import wait_for
from laddertron.tools.plan.published import SHAPES
from laddertron.tools.plan.roofline import Load
from laddertron.topology.comm.collectives import Alone, Collective, Pending
from laddertron.topology.comm.emulated import Emulated
from laddertron.topology.comm.ledger import Ledger
from laddertron.topology.cost.prices import emulation_of
from torch import Tensor

WARM_UP = 3
WIRINGS = ("standard", "parallel", "ladder")
HELD = (0, 4, 16)
"""Multiprocessors that an all-reduce holds."""
ALONE = 50
"""All-reduces in a row that say how long one takes alone."""


@dataclass(frozen=True, slots=True)
class Case:
    """A model on a fabric; `paper`: model and interconnect in the published table."""

    model: str
    ranks: int
    fabric: str
    paper: tuple[str, str]


CASES = {
    "70b": Case("llama-3.1-70b", 8, "8xH100", ("70B", "p2p")),
    "405b": Case("llama-3.1-405b", 16, "2x8xH100", ("405B", "2 nodes")),
}


class Counted:
    """A collective that counts what is started."""

    def __init__(self, inner: Collective) -> None:
        self.inner, self.started = inner, 0

    def start(self, x: Tensor, layer: str = "", at_once: bool = False, /) -> Pending:
        self.started += 1
        return self.inner.start(x, "", at_once)


def lone_group(size: int) -> Any:
    """torch's own stand-in: this process is rank 0 of `size`, and nothing is sent."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    return dist.group.WORLD


@dataclass(slots=True)
class Rank:
    """The shard, with a cache for `batch` sequences of `context` positions."""

    case: Case
    model: LlamaModel
    cache: KVCache
    attention: AttentionBackend
    device: torch.device
    context: int

    @staticmethod
    def make(case: Case, config: ModelConfig, group: Any, device: torch.device, batch: int) -> Rank:
        shard, dtype, context = RankShard(config, case.ranks, 0), DTYPES[config.dtype], config.max_position_embeddings
        blocks = batch * -(-context // BLOCK) + 1  # the last one is padding of recorded steps
        cache = KVCache(shard, blocks, BLOCK, dtype, device)
        attention, _ = make_attention("auto", shard, cache, dtype)
        return Rank(case, make_model(config, group, Alone(), device), cache, attention, device, context)

    def layout(self, batch: int, device: torch.device) -> tuple[StepLayout, Tensor]:
        """A step of `batch` decodes at the last position, and its token ids."""
        blocks = -(-self.context // BLOCK)
        table = torch.arange(batch * blocks, device=device).view(batch, blocks)
        at = torch.full((batch,), self.context - 1, device=device)
        layout = StepLayout(
            at, list(range(batch + 1)), [self.context] * batch, table, table[:, -1].clone(), at % BLOCK, batch,
            rows=np.arange(batch),
        )  # fmt: skip
        return layout, torch.arange(batch, device=device)

    def step(self, model: LlamaModel, batch: int, recorder: CudaRecorder | None) -> Callable[[], Tensor]:
        """Makes the function that computes one step's logits as the engine does, from a CUDA graph if available."""
        if recorder is not None and isinstance(self.attention, Capturable):
            most = -(-self.context // BLOCK)
            graphs = StepGraphs(
                model, self.attention, recorder, [(batch, 0)], scratch_block=self.cache.num_blocks - 1,
                most_blocks=most, block_size=self.cache.block_size,
            )  # fmt: skip
            graphs.record()
            layout, tokens = self.layout(batch, torch.device("cpu"))

            def replay() -> Tensor:
                out = graphs.run((batch, 0), layout, tokens, tokens)
                assert out is not None
                return out

            return replay
        layout, tokens = self.layout(batch, self.device)
        rows = torch.arange(batch, device=self.device)
        return lambda: model.forward(tokens, layout, self.attention, rows)


class Variant:
    """One wiring over one emulated fabric."""

    def __init__(self, rank: Rank, wiring: str, occupied: int, batch: int, recorder: CudaRecorder | None) -> None:
        case, self.device = rank.case, rank.device
        self.wiring, self.occupied = wiring, occupied
        self.emulation = emulation_of(case.fabric, case.ranks)
        self.collective = Counted(
            EmulatedOnGpu(Alone(), self.emulation, Ledger(), case.ranks, occupied)
            if rank.device.type == "cuda"
            else Emulated(Alone(), self.emulation, Ledger())
        )
        model = rewired(rank.model, wiring, self.collective)
        layout, tokens = rank.layout(batch, rank.device)
        model.forward(tokens, layout, rank.attention, tokens)
        self.all_reduces = self.collective.started
        self._step = rank.step(model, batch, recorder)
        self.seconds: list[float] = []

    def step(self) -> float:
        """Seconds of one step and its gather of candidates, the device's end waited for."""
        began = time.perf_counter()
        self.collective.start(self._step().amax(-1)).wait()
        wait_for(self.device)
        return time.perf_counter() - began

    def alone_s(self, message: Tensor, recorder: CudaRecorder | None) -> float:
        """One all-reduce alone: the fastest of some rows."""

        def some() -> None:
            for _ in range(ALONE):
                self.collective.start(message).wait()

        # On a GPU launches by the host would be slower than the messages.
        call = some if recorder is None else recorder.record(some)
        rows = []
        for _ in range(WARM_UP + 1):
            wait_for(self.device)
            began = time.perf_counter()
            call()
            wait_for(self.device)
            rows.append(time.perf_counter() - began)
        return min(rows) / ALONE


def measure(name: str, args: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    case = CASES[name]
    full = TINY if args.tiny else known(case.model)
    config, group = of_layers(full, args.layers, args.context), lone_group(case.ranks)
    try:
        rank = Rank.make(case, config, group, device, max(args.batch))
        recorder = CudaRecorder(device, Ledger()) if device.type == "cuda" else None
        for batch in args.batch:
            yield from _batch(rank, batch, args, recorder, full.num_layers)
    finally:
        dist.destroy_process_group()


def _batch(
    rank: Rank, batch: int, args: argparse.Namespace, recorder: CudaRecorder | None, num_layers: int
) -> Iterator[dict[str, Any]]:
    """All variants of one batch, in turns."""
    config, case, gpu = rank.model.config, rank.case, rank.device.type == "cuda"
    k, load, shape = HELD if gpu else HELD[:1], Load(decodes=batch, context=rank.context), SHAPES[case.paper[1]]
    variants = [Variant(rank, wiring, occupied, batch, recorder) for wiring in WIRINGS for occupied in k]
    variants.append(Variant(rank, "no-communication", 0, batch, recorder))
    for variant in variants:
        for _ in range(WARM_UP):
            variant.step()
    for _ in range(args.rounds):
        for variant in variants:
            variant.seconds += [variant.step() for _ in range(args.steps)]
    message = torch.zeros((batch, config.hidden_size), dtype=DTYPES[config.dtype], device=rank.device)
    alone = {variant.occupied: variant.alone_s(message, recorder) for variant in variants[: len(k)]}
    for variant in variants:
        step_s = statistics.median(variant.seconds)
        yield {
            "model": "tiny" if args.tiny else case.paper[0], "interconnect": case.paper[1], "tp": case.ranks,
            "fabric": variant.emulation.label, "timed_by": "kernel" if gpu else "host timer",
            "device": str(torch.cuda.get_device_name(rank.device)) if gpu else "CPU",
            "layers": config.num_layers, "of_layers": num_layers, "attention": rank.attention.name,
            "recorded": gpu and isinstance(rank.attention, Capturable),
            "batch": batch, "context": rank.context, "wiring": variant.wiring, "k": variant.occupied,
            "plan_ms": predicted_ms(config, shape, rank.device, load, NAMES.get(variant.wiring, variant.wiring)),
            "all_reduces": variant.all_reduces,
            "predicted_us": round(variant.emulation.seconds(message.nbytes) * 1e6, 2),
            "alone_us": round(alone[variant.occupied] * 1e6, 2),
            "step_ms": round(step_s * 1e3, 4), "fastest_ms": round(min(variant.seconds) * 1e3, 4),
            "tokens_s": round(batch / step_s, 2),
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", default=",".join(CASES), help=f"of {', '.join(CASES)}")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="a toy model in place of the real shapes")
    parser.add_argument("--layers", type=int, default=0, help="0: all of the model's; fewer are said in every line")
    parser.add_argument("--batch", type=numbers, default=[1, 4, 16, 64])
    parser.add_argument("--context", type=int, default=1280, help="positions that every token attends to")
    parser.add_argument("--steps", type=int, default=20, help="in a turn")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    names, lines = args.cases.split(","), []
    if unknown := set(names) - set(CASES):
        print(f"--cases {', '.join(sorted(unknown))}: there are {', '.join(CASES)}", file=sys.stderr)
        sys.exit(2)
    device = device_of(args.device)
    with torch.inference_mode():
        for line in (line for name in names for line in measure(name, args, device)):
            lines.append(line)
            say(**line)
    print(shard_table(lines))


if __name__ == "__main__":
    main()
