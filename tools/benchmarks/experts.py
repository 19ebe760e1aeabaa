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
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import product
from math import inf
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE / "cross_node"), str(HERE)]

from common import table, to_and_fro  # noqa: E402
from laddertron.engine.step.memory import MemoryKeys  # noqa: E402
from laddertron.models.config.model_config import from_folder  # noqa: E402
from laddertron.tools.plan.layouts import Devices, Work, fullest_stage, group_of  # noqa: E402
from laddertron.tools.plan.memory import StoredTypes  # noqa: E402
from laddertron.tools.plan.mixtures import BATCHES, mixture_layouts  # noqa: E402
from laddertron.tools.plan.roofline import ComputeRates, Links, Load  # noqa: E402
from laddertron.tools.plan.step_simulator import Wire  # noqa: E402
from laddertron.topology.cost.cost import Shape  # noqa: E402
from peers.model import SIZES  # noqa: E402
from two_nodes import MS, Row, Site, insist, on_nodes, rate  # noqa: E402
from two_nodes import SHAPE as LLAMA  # noqa: E402

SHAPE = LLAMA | SIZES["qwen3-moe"] | {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}
LAYERS, ROW = SHAPE["num_hidden_layers"], 2 * SHAPE["hidden_size"]
DELAYS_MS, TOKENS = (0.1, 1.0, 2.0), {1: 32, 8: 24, 32: 16, 128: 12}
BUILT: dict[str, dict[str, Any]] = {
    "flat": {}, "split": {"split_steps": "always"}, "spread": {"dense_path": "node"},
    "pp": {"tensor_parallel_size": 1, "pipeline_parallel_size": 2},
}  # fmt: skip
KINDS = BUILT | {"no communication": {}, "spread, no communication": {"dense_path": "node"}}


def layouts(site: Site, delays: Sequence[float], batches: Sequence[int], runs: int) -> Iterator[Row]:
    """A row a run of a case, with each kind's time of a sequence for a token, and of an all-reduce of the batch."""
    with ExitStack() as stack:
        jobs = {}
        for kind, parallel in KINDS.items():
            wiring = "auto" if kind in BUILT else "no-communication"
            room = {"max_num_seqs": 128, "max_num_batched_tokens": 1024, "kv_cache_memory": 512 << 20}
            jobs[kind] = stack.enter_context(site.job(kind, site.deployment("model", wiring, parallel, **room)))
        for job, batch in product(jobs.values(), batches):
            rate(job, batch, 8, 8)
        for run, delay, batch in product(range(runs), delays, batches):
            site.switch.link(delay)
            floor = jobs["flat"].ask("floor", nodes=2)["floor"]
            alone = median(jobs["flat"].ask("all_reduce", bytes=ROW * batch, count=64)["seconds"])
            took = {kind: batch / rate(jobs[kind], batch, 8, TOKENS[batch]) for kind in to_and_fro(KINDS, run)}
            yield {"delay_s": delay, "batch": batch, "floor": floor, "all_reduce_s": alone, "step_s": took}


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
    devices = Devices(2, 1, 8 << 30, False, lambda kind: rates, lambda n, per_node: links(sums), Shape, gpu=False)
    room = MemoryKeys(gpu=False, max_num_seqs=most, max_num_batched_tokens=512, max_model_len=64)
    options = mixture_layouts(config, StoredTypes(), room, devices, Work(prompt=8, output=16), "native")
    times = {x.name: x.step_s for x in options if x.name in BUILT}
    return {b: min(times, key=lambda name: times[name][BATCHES.index(b)] or inf) for b in silent}


def report(config: Any, rows: Sequence[Row]) -> list[str]:
    cells, floor = [], max(row["floor"] for row in rows)
    for delay in dict.fromkeys(row["delay_s"] for row in rows):
        at = {b: [r for r in rows if (r["delay_s"], r["batch"]) == (delay, b)] for b in TOKENS}
        steps = {b: {k: median(r["step_s"][k] for r in runs) for k in KINDS} for b, runs in at.items() if runs}
        sums = {ROW * b: median(r["all_reduce_s"] for r in at[b]) for b in steps}
        planned = choices(config, floor, {b: step["no communication"] for b, step in steps.items()}, sums)
        for batch, step in steps.items():
            alone, best = sums[ROW * batch], min(BUILT, key=step.__getitem__)
            law = (step["spread, no communication"] + LAYERS * alone) / step["spread"]
            plan = f"{planned[batch]} ({step[best] / step[planned[batch]]:.2f})"
            rates = (f"{batch / step[kind]:,.1f}" for kind in KINDS)
            cells.append((f"{delay / MS:g} ms, {batch}", *rates, f"{alone / MS:.2f}", f"{law:.2f}", best, plan))
    return table(f"one way, batch | {' | '.join(KINDS)} | all-reduce, ms | spread, of c + L | best | plan", cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", choices=["two"], nargs="?")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--batches", type=int, nargs="+", choices=BATCHES, default=list(BATCHES))
    parser.add_argument("--delays", type=float, nargs="+", default=DELAYS_MS, help="one way, ms")
    args = parser.parse_args()
    insist()
    delays = [delay * MS for delay in args.delays]
    rows = list(on_nodes(layouts, {"model": SHAPE}, delays, args.batches, args.repeats))
    with TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(SHAPE))
        print("\n".join(report(from_folder(folder), rows)))


if __name__ == "__main__":
    main()
