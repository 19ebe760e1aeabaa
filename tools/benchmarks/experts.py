"""Layouts of a mixture of experts of Qwen3-MoE's form, 470M in bf16, on two nodes that tests/cluster makes on this
machine, a core each.

    python tools/benchmarks/experts.py two     as root, ten minutes

Prints JSON lines and Markdown: medians of interleaved runs, tokens/s. The law's step of spread: that of the same ranks
without communication, and an all-reduce by itself for each layer. plan: its choice among these layouts, with rates
fitted to the steps without communication and all-reduces as measured; in brackets, its tokens/s over the best's.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from math import inf
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "tests"), str(HERE / "cross_node"), str(HERE)]

from cluster.nodes import CONTROL, Control, why_not  # noqa: E402
from common import table  # noqa: E402
from cross_layouts import SHAPE as LLAMA  # noqa: E402
from cross_layouts import measure, on_two_nodes  # noqa: E402
from cross_node import MS, on_cluster  # noqa: E402
from laddertron.engine.config.schema import ParallelConfig  # noqa: E402
from laddertron.engine.step.memory import MemoryKeys, StoredTypes  # noqa: E402
from laddertron.launchers.measure.rank_job import BenchJob  # noqa: E402
from laddertron.models.config.model_config import from_folder  # noqa: E402
from laddertron.tools.plan.layouts import Devices, Work, fullest_stage, group_of  # noqa: E402
from laddertron.tools.plan.mixtures import BATCHES, mixture_layouts  # noqa: E402
from laddertron.tools.plan.roofline import ComputeRates, Links, Load  # noqa: E402
from laddertron.tools.plan.step_simulator import Wire  # noqa: E402
from laddertron.topology.cost.cost import Shape  # noqa: E402
from peers.model import SIZES  # noqa: E402

SHAPE = LLAMA | SIZES["qwen3-moe"] | {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}
LAYERS, ROW = SHAPE["num_hidden_layers"], 2 * SHAPE["hidden_size"]
DELAYS_MS, TOKENS = (0.1, 1.0, 2.0), {1: 32, 8: 24, 32: 16, 128: 12}
TWO: dict[str, Any] = {"tensor_parallel_size": 2, "split_steps": "never"}
BUILT: dict[str, dict[str, Any]] = {
    "flat": {}, "split": {"split_steps": "always"}, "spread": {"dense_path": "node"},
    "pp": {"tensor_parallel_size": 1, "pipeline_parallel_size": 2},
}  # fmt: skip
KINDS = BUILT | {"no communication": {}, "spread, no communication": {"dense_path": "node"}}


def inside(folder: Path, agent: str, delays: Sequence[float], batches: Sequence[int], runs: int) -> None:
    """On the first node: a JSON line a run of a case, with each kind's time of a sequence for a token."""
    switch = Control(os.environ[CONTROL])
    with ExitStack() as stack:
        jobs = {}
        for kind, parallel in KINDS.items():
            keys = ParallelConfig(**TWO | parallel)
            d = on_two_nodes(folder, agent, "model", "auto" if kind in BUILT else "no-communication", keys)
            room = replace(d.engine, max_num_seqs=128, max_num_batched_tokens=1024, kv_cache_memory=512 << 20)
            jobs[kind] = stack.enter_context(BenchJob(replace(d, engine=room), kind))

        def step_s(kind: str, batch: int, tokens: int) -> float:
            found = jobs[kind].ask("case", batch=batch, prompt=8, generate=tokens)
            return batch * float(found["decode_s"]) / float(found["decode_tokens"])

        for kind, batch in product(KINDS, batches):
            step_s(kind, batch, 8)
        for run, delay, batch in product(range(runs), delays, batches):
            switch.link(delay)
            floor = jobs["flat"].ask("floor", nodes=2)["floor"]
            took = {kind: step_s(kind, batch, TOKENS[batch]) for kind in sorted(KINDS, reverse=run % 2 == 1)}
            print(json.dumps({"delay_s": delay, "batch": batch, "floor": floor, "step_s": took}), flush=True)


def links(sums: Mapping[int, float]) -> Links:
    """sums: seconds of an all-reduce by its bytes."""
    wire = lambda size: Wire(sums[min((n for n in sums if n >= size), default=max(sums))])  # noqa: E731
    return Links(wire, lambda size: "exchange", "measured")


def choices(config: Any, floor: float, silent: Mapping[int, float], sums: Mapping[int, float]) -> dict[int, str]:
    """plan's layout by batch. silent: the flat step without communication by batch; the smallest gives what a call
    takes, the largest the FLOP/s."""
    few, most, calls = min(silent), max(silent), 2 * LAYERS + 1

    def seconds(batch: int, flops: float, read: float) -> float:
        rates = ComputeRates(flops, read, read, 1e-12, 1e-12, "")
        group = group_of(fullest_stage(config, 1), 2, StoredTypes(), rates, links({1: 0.0}))
        return group.step(Load(decodes=batch, context=16.0)).total_s

    call = max(1e-6, (silent[few] - seconds(few, inf, floor)) / calls)
    flops = seconds(most, 1.0, inf) / max(1e-6, silent[most] - calls * call)
    rates = ComputeRates(flops, floor, floor, call, call, "measured")
    devices = Devices(2, 1, 8 << 30, False, lambda kind: rates, lambda n, each: links(sums), Shape, gpu=False)
    room = MemoryKeys(gpu=False, max_num_seqs=most, max_num_batched_tokens=512, max_model_len=64)
    found = mixture_layouts(config, StoredTypes(), room, devices, Work(prompt=8, output=16), "native")
    times = {x.name: x.step_s for x in found if x.name in BUILT}
    return {b: min(times, key=lambda name: times[name][BATCHES.index(b)] or inf) for b in silent}


def report(config: Any, rows: Sequence[Mapping[str, Any]], sums: Mapping[float, Mapping[int, float]]) -> list[str]:
    cells, floor = [], max(row["floor"] for row in rows)
    for delay in sums:
        at = {b: [r["step_s"] for r in rows if (r["delay_s"], r["batch"]) == (delay, b)] for b in TOKENS}
        steps = {b: {k: median(run[k] for run in runs) for k in KINDS} for b, runs in at.items() if runs}
        planned = choices(config, floor, {b: step["no communication"] for b, step in steps.items()}, sums[delay])
        for batch, step in steps.items():
            alone, best = sums[delay][ROW * batch], min(BUILT, key=step.__getitem__)
            law = (step["spread, no communication"] + LAYERS * alone) / step["spread"]
            plan = f"{planned[batch]} ({step[best] / step[planned[batch]]:.2f})"
            rates = (f"{batch / step[kind]:,.1f}" for kind in KINDS)
            cells.append((f"{delay / MS:g} ms, {batch}", *rates, f"{alone / MS:.2f}", f"{law:.2f}", best, plan))
    return table(f"one way, batch | {' | '.join(KINDS)} | all-reduce, ms | spread, of c + L | best | plan", cells)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", choices=["two"], nargs="?")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--batches", type=int, nargs="+", choices=BATCHES, default=list(BATCHES))
    parser.add_argument("--delays", type=float, nargs="+", default=DELAYS_MS, help="one way, ms")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        folder, *order = json.loads(args.inside)
        inside(Path(folder), *order)
    elif (why := why_not()) is not None:
        print(f"no emulated cluster here: {why}", file=sys.stderr)
        return 2
    else:
        delays = [delay * MS for delay in args.delays]
        sums: dict[float, dict[int, float]] = {delay: {} for delay in delays}
        spec = {"task": "collectives", "delays_s": delays, "sizes": [ROW * b for b in args.batches]}
        for line in on_cluster(2, 1, spec | {"lanes": ["native"], "seconds": 0.5}, 0):
            sums[line["delay_s"]][line["bytes"]] = line["median_s"]
        rows = list(measure(__file__, {"model": SHAPE}, [delays, args.batches, args.repeats]))
        with TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(SHAPE))
            print("\n".join(report(from_folder(folder), rows, sums)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
