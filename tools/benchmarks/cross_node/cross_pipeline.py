"""A pipeline between nodes beside tensor parallelism over them: a random Llama of 150M in bfloat16 on nodes that
tests/cluster makes on this machine, a core each, measured by `laddertron bench`'s ranks in turns.

    python tools/benchmarks/cross_node/cross_pipeline.py               2 nodes x 1 rank; as root, some ten minutes
    python tools/benchmarks/cross_node/cross_pipeline.py --per-node 2  2 x 2 at 1 ms, where two ranks share a core
    python tools/benchmarks/cross_node/cross_pipeline.py --report      tables and bars of what is there

Each delay of each run is a line of tools/benchmarks/results/cross_pipeline.jsonl once it is measured: what was cut
off goes
on there. `alone` is the whole model on one idle core: half of its step is the ideal of a stage.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
TESTS = HERE.parents[2] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "helpers"), str(HERE.parent)]

from cluster.nodes import CONTROL, Cluster, Control, why_not  # noqa: E402
from common import table  # noqa: E402
from cross_node import MTU, lines_of  # noqa: E402
from laddertron.engine.config import schema as keys  # noqa: E402
from laddertron.launchers.measure.rank_job import BenchJob  # noqa: E402
from peers.model import LLAMA_150M  # noqa: E402

RESULTS = HERE.parent / "results" / "cross_pipeline.jsonl"
SHAPE: dict[str, Any] = {**LLAMA_150M, "max_position_embeddings": 2304, "head_dim": 64}
SEQUENCES, PROMPT, CHUNK = 32, 2048, 128
MICROBATCHES, WIRINGS = (2, 3, 4), ("standard", "ladder", "no-communication")
ROWS = {m: -(-SEQUENCES // m) for m in MICROBATCHES}
Row = dict[str, Any]


def lanes(per_node: int) -> dict[str, tuple[int, int, int | None, str]]:
    """By name: ranks of a group, stages, micro-batches, wiring."""
    if per_node > 1:
        return {f"tp {4 // n} x pp {n} {wiring}": (4 // n, n, None, wiring) for n in (1, 2) for wiring in WIRINGS[:2]}
    found = {f"tp {wiring}": (2, 1, None, wiring) for wiring in WIRINGS}
    return {**found, "alone": (1, 1, None, "standard")} | {f"pp, {m}": (1, 2, m, "standard") for m in MICROBATCHES}


def deployment(
    folder: Path, agent: str, tp: int, stages: int, microbatches: int | None, wiring: str
) -> keys.Deployment:
    apart = keys.LaunchConfig(hostfile=str(folder / "hosts"), rsh_agent=agent, interface="eth0")
    return keys.Deployment(
        keys.ModelSection(str(folder), wiring=wiring, allow_untrained_ladder=True),
        keys.ParallelConfig(tp, pipeline_parallel_size=stages, pipeline_microbatches=microbatches),
        keys.LaunchConfig() if tp * stages == 1 else apart,
        keys.EngineConfig(
            device="cpu", threads=1, max_num_seqs=SEQUENCES, max_num_batched_tokens=CHUNK, speculation=False,
            enable_prefix_caching=False, kv_cache_memory=256 << 20,
        ),
    )  # fmt: skip


def inside(folder: Path, agent: str, per_node: int, todo: list[list[Any]], tokens: int) -> None:
    """On the first node: a JSON line for each (run, delay) of `todo`."""
    switch = Control(os.environ[CONTROL])
    with ExitStack() as stack:
        made = {name: BenchJob(deployment(folder, agent, *lane), name) for name, lane in lanes(per_node).items()}
        jobs = {name: stack.enter_context(job) for name, job in made.items()}
        for job in jobs.values():
            job.ask("case", batch=2, prompt=CHUNK, generate=4)
        for run, delay_ms in todo:
            switch.link(delay_ms * 1e-3)
            line: Row = {"per_node": per_node, "run": run, "delay_ms": delay_ms}
            for name, job in sorted(jobs.items(), reverse=run % 2 == 1):
                for rows in ROWS.values() if name == "alone" else (SEQUENCES,):
                    found = job.ask("case", batch=rows, prompt=8, generate=tokens)
                    line[name if rows == SEQUENCES else f"{name}, {rows}"] = {
                        "rate": found["decode_tokens"] / found["decode_s"], "step_s": found["step_s"],
                    }  # fmt: skip
                if delay_ms == 1 and name != "alone":
                    line[name]["prefill_s"] = job.ask("case", batch=1, prompt=PROMPT, generate=1)["prefill_s"]
            print(json.dumps(line), flush=True)


def measure(per_node: int, todo: list[list[Any]], tokens: int) -> Iterator[Row]:
    import checkpoints

    cores = sorted(os.sched_getaffinity(0))
    with Cluster(2, cores=[[cores[0]], [cores[-1]]], mtu=MTU) as cluster:
        folder = checkpoints.save(cluster.scratch / "model", dtype="bfloat16", tokenizer=False, **SHAPE)
        (folder / "hosts").write_text("".join(f"{name} slots={per_node}\n" for name in cluster.names))
        words = [sys.executable, "-W", "ignore", __file__, "--inside"]
        words.append(json.dumps([str(folder), str(cluster.agent), per_node, todo, tokens]))
        process = cluster.start(0, words, {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}, stdout=-1)
        yield from lines_of(process, "the ranks")


def report(rows: list[Row], per_node: int) -> Iterator[str]:
    """Medians over the runs; then the bars, of one rank a node."""
    mine = [row for row in rows if row["per_node"] == per_node]
    delays = sorted({row["delay_ms"] for row in mine})
    names = [name for name in (mine[0] if mine else ()) if name not in ("per_node", "run", "delay_ms")]

    def of(name: str, delay_ms: float, what: str = "rate") -> float:
        values: list[float] = [row[name][what] for row in mine if row["delay_ms"] == delay_ms]
        return median(values)

    head = " | ".join((f"tokens/s of {SEQUENCES} sequences", *(f"{d:g} ms" for d in delays)))
    yield from table(head, ((name, *(f"{of(name, d):.1f}" for d in delays)) for name in names))
    if per_node > 1 or not {0, 1, 10} <= set(delays):
        return
    best = {d: max(of(f"pp, {m}", d) for m in MICROBATCHES) for d in delays}
    ideal = max(2 * rows / of(f"alone, {rows}", 0, "step_s") for rows in ROWS.values())
    silent = of("tp no-communication", 1, "prefill_s")
    prefill = min(of(f"pp, {m}", 1, "prefill_s") for m in MICROBATCHES)
    bars = [
        ("pp over tp standard at 1 ms", best[1] / of("tp standard", 1), 1.25),
        *((f"pp over the ideal at {d} ms", best[d] / ideal, 0.85) for d in (0, 1)),
        ("pp at 10 ms over its best at 0 ms", best[10] / best[0], 0.85),
        (f"a prompt of {PROMPT}: tp without communication over pp at 1 ms", silent / prefill, 0.85),
    ]
    for name, value, least in bars:
        yield f"{'met   ' if value >= least else 'MISSED'} {name}: {value:.2f} (bar {least})"
    for d in delays:
        # as tools/plan/layouts.py reckons: each stage's step, and a crossing, one after another
        said = of(f"alone, {ROWS[2]}", 0, "step_s") + 2 * d * 1e-3
        off = said / of("pp, 2", d, "step_s") - 1
        yield f"{'met   ' if abs(off) <= 0.15 else 'MISSED'} simulated round at {d:g} ms: {off:+.0%} (bar 15 %)"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--per-node", type=int, default=1, choices=(1, 2))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument(
        "--tokens", type=int, default=48, help="of each sequence; few show the pipeline filling and emptying"
    )
    parser.add_argument("--report", action="store_true", help="no measuring")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        folder, *rest = json.loads(args.inside)
        inside(Path(folder), *rest)
        return 0
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    done = {(row["per_node"], row["run"], row["delay_ms"]) for row in rows}
    delays = (0, 1, 10) if args.per_node == 1 else (1,)
    todo = [[run, d] for run in range(args.runs) for d in delays if (args.per_node, run, d) not in done]
    RESULTS.parent.mkdir(exist_ok=True)
    if todo and not args.report:
        if (why := why_not()) is not None:
            print(f"no emulated cluster here: {why}", file=sys.stderr)
            return 2
        for row in measure(args.per_node, todo, args.tokens):
            rows.append(row)
            with RESULTS.open("a") as file:
                file.write(json.dumps(row) + "\n")
    print("\n".join(report(rows, args.per_node)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
