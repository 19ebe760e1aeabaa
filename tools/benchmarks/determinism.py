"""Measures the cost of `parallel.deterministic` with a 150M Llama of random weights.

    python tools/benchmarks/determinism.py --cases 1x128,8x128,1x1024,8x1024 --repeats 5
    python tools/benchmarks/determinism.py --tp 2 --threads 1 --dtype float32

One process for each value of the key holds the weights; they alternate case by case. A case is batch x prompt.
Prints a Markdown table of medians: tokens/s without it, and the share that each value reaches.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

from common import table
from laddertron.engine.config.schema import Deployment, EngineConfig, ModelSection, ParallelConfig
from laddertron.launchers.measure.rank_job import BenchJob
from laddertron.tools.bench.bench import Case
from laddertron.tools.bench.bench_measure import Row, measure, roomy
from peers.model import write

VALUES: dict[str, Literal["everywhere"] | bool] = {"false": False, "true": True, "everywhere": "everywhere"}


def shares(rows: list[Row]) -> list[str]:
    """A case's line; rows: one for each of VALUES."""
    cells = [f"{rows[0]['batch']} x {rows[0]['prompt']}"]
    for key in ("prefill_tok_s", "decode_tok_s"):
        off, *others = (row[key][0] for row in rows)
        cells += [f"{off:,.0f}", *(f"{other / off:.2f}" for other in others)]
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", default="1x128,8x128,64x128,1x1024,8x1024,64x1024")
    parser.add_argument("--generate", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2, help="compute threads a rank")
    args = parser.parse_args()
    sizes = [case.split("x") for case in args.cases.split(",")]
    cases = [Case(int(batch), int(prompt), args.generate) for batch, prompt in sizes]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        write(Path(folder))
        model = ModelSection(folder, dtype=args.dtype, max_model_len=2048)
        engine = EngineConfig(device="cpu", threads=args.threads, kv_cache_memory=3 << 30)
        jobs = []
        for name, value in VALUES.items():
            deployment = Deployment(model, ParallelConfig(args.tp, deterministic=value), engine=engine)
            jobs.append((name, stack.enter_context(BenchJob(roomy(deployment, cases), f"deterministic {name}"))))
        rows = measure(jobs, cases, args.repeats, 1, lambda line: print(line, file=sys.stderr))
    lines = [shares(rows[at : at + len(VALUES)]) for at in range(0, len(rows), len(VALUES))]
    print("\n".join(table("batch x prompt | prefill | true | everywhere | decode | true | everywhere", lines)))


if __name__ == "__main__":
    main()
