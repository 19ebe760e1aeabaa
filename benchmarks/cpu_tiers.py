"""Every CPU tier that this machine can play, in every dtype, on the model of benchmarks/peers: one row each.

    python benchmarks/cpu_tiers.py --tiers avx2,avx512 --repeats 5 --transformers

Each tier is a process of its own with LADDERTRON_CPU_TIER set. In it the dtypes (and transformers, with what torch does
in that tier) are loaded at once and take turns; figures are medians with the spread of the repeats. The read
bandwidth is that of a bare loop over as many bytes as the weights have, after each run: the best of twelve rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from contextlib import ExitStack
from typing import Literal

from laddertron.engine.profiling.bench import Case, interleaved, step_bytes
from laddertron.topology.hardware import cpu_tier
from peers.compare import BUILD, HERE, Ours, Peer

DTYPES: tuple[Literal["bfloat16", "float16", "float32"], ...] = ("bfloat16", "float16", "float32")
HEAD = ("tier", "runs", "decode, batch 1", "of the read bandwidth", "batch 8", "prefill", "of fp32's")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tiers", default="", help="default: all that this machine can play")
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--generate", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--transformers", action="store_true", help="beside it, in bf16 and fp32")
    parser.add_argument("--within", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    args = parse()
    if args.within:
        measure(args)
        return 0
    folder = BUILD / "llama"
    if not (folder / "model.safetensors").exists():
        subprocess.run([sys.executable, str(HERE / "model.py"), str(folder)], check=True)
    offered = cpu_tier.TIERS[cpu_tier.TIERS.index(cpu_tier.own()) :]
    print(f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}", flush=True)
    for tier in filter(None, args.tiers.split(",")) if args.tiers else offered:
        environ = {**os.environ, cpu_tier.VARIABLE: tier}
        cpu_tier.limit_libraries(environ)
        subprocess.run([sys.executable, __file__, "--within", *sys.argv[1:]], env=environ, check=True)
    return 0


def spread(values: list[float], unit: float = 1.0) -> str:
    return f"{statistics.median(values) * unit:.0f} ({min(values) * unit:.0f} to {max(values) * unit:.0f})"


def measure(args: argparse.Namespace) -> None:
    folder, tier = BUILD / "llama", cpu_tier.current()
    cases = [Case(batch, args.prompt, args.generate) for batch in (1, 8)]
    with ExitStack() as stack:
        racers: list[Ours | Peer] = []
        for dtype in DTYPES:
            if dtype not in args.dtypes.split(","):
                continue
            racers.append(stack.enter_context(Ours(1, folder, args.threads, dtype)))
        if args.transformers:
            for dtype in ("bfloat16", "float32"):
                racers.append(stack.enter_context(Peer("transformers", folder, args.threads, None, dtype)))
        for racer in racers:
            racer.run(Case(8, args.prompt, 4))
        pairs = [(racer, case) for racer in racers for case in cases]
        rates: list[list[tuple[float, float]]] = [[] for _ in pairs]
        floors: list[list[float]] = [[] for _ in pairs]
        for _, index in interleaved(len(pairs), args.repeats):
            racer, case = pairs[index]
            rates[index].append(racer.run(case))
            if isinstance(racer, Ours) and case.batch == 1:
                floors[index].append(racer.job.ask("floor")["floor"] or float("nan"))
        prefills = {racer.name: statistics.median(r[0] for r in rates[2 * i + 1]) for i, racer in enumerate(racers)}
        base = next((prefills[r.name] for r in racers if isinstance(r, Ours) and r.dtype == "float32"), float("nan"))
        for i, racer in enumerate(racers):
            one, eight = rates[2 * i], rates[2 * i + 1]
            share = "-"
            if isinstance(racer, Ours):
                about = racer.job.about
                bytes_read = step_bytes(about["weights"], about["kv_per_token"], cases[0])
                shares = [rate[1] * bytes_read / floor for rate, floor in zip(one, floors[2 * i], strict=True)]
                share = f"{statistics.median(shares):.0%} of {statistics.median(floors[2 * i]) / 1e9:.1f} GB/s"
            row = (tier, racer.name, spread([r[1] for r in one]), share, spread([r[1] for r in eight]),
                   spread([r[0] for r in eight]), f"{prefills[racer.name] / base:.2f}")  # fmt: skip
            print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
