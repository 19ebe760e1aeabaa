"""What `parallel.deterministic` costs: a 150M Llama of random weights, its values taking turns case by case.

    python tools/benchmarks/determinism.py --cases 1x128,8x128,1x1024,8x1024 --repeats 5
    python tools/benchmarks/determinism.py --dtype float32 --tp 2 --json rows.json

One process for each value holds the weights; a case is batch x prompt, and generates --generate tokens. Prints a
markdown table: tokens a second without it, and the share that each value keeps, medians of interleaved runs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from laddertron.engine.config.schema import Deployment, EngineConfig, ModelSection, ParallelConfig
from laddertron.launchers.measure.rank_job import BenchJob
from laddertron.tools.bench.bench import Case
from laddertron.tools.bench.bench_measure import Row, measure, roomy
from peers.model import write

VALUES: tuple[Any, ...] = (False, True, "everywhere")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", default="1x128,8x128,64x128,1x1024,8x1024,64x1024")
    parser.add_argument("--generate", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2, help="compute threads a rank")
    parser.add_argument("--json", dest="file")
    args = parser.parse_args()
    sizes = [case.split("x") for case in args.cases.split(",")]
    cases = [Case(int(batch), int(prompt), args.generate) for batch, prompt in sizes]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        write(Path(folder))
        jobs = []
        for value in VALUES:
            deployment = roomy(deployment_of(folder, args, value), cases)
            jobs.append((str(value).lower(), stack.enter_context(BenchJob(deployment, f"deterministic {value}"))))
        print("| batch x prompt | prefill | true | everywhere | decode | true | everywhere |")
        print("|---|---|---|---|---|---|---|")
        rows: list[Row] = []
        for case in cases:  # one by one: what is done is shown
            rows += measure(jobs, [case], args.repeats, int(not rows), lambda said: print(said, file=sys.stderr))
            print(line(rows[-len(VALUES) :]), flush=True)
    if args.file:
        Path(args.file).write_text(json.dumps(rows, indent=1) + "\n")
    return 0


def deployment_of(folder: str, args: argparse.Namespace, value: Any) -> Deployment:
    return Deployment(
        model=ModelSection(folder, dtype=args.dtype, max_model_len=2048),
        parallel=ParallelConfig(tensor_parallel_size=args.tp, deterministic=value),
        engine=EngineConfig(device="cpu", threads=args.threads, kv_cache_memory=3 << 30),
    )


def line(rows: list[Row]) -> str:
    cells = [f"{rows[0]['batch']} x {rows[0]['prompt']}"]
    for key in ("prefill_tok_s", "decode_tok_s"):
        off, *others = (row[key][0] for row in rows)
        cells += [f"{off:,.0f}", *(f"{other / off:.2f}" for other in others)]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
