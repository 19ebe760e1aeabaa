"""What crossing nodes costs and what the wirings hide of it, on nodes that tests/cluster makes on this machine.

    python tools/benchmarks/cross_node/cross_node.py    everything, about a quarter of an hour; as root
        --only reduce                             or wirings
        --only wirings --repeat 1 --more          one more run of the wirings, two minutes
        --only split-prefill                      two streams against whole steps: prompts; or split-decode; minutes
        --only drafts                             speculation with drafts of a stated hit rate, five minutes
        --write                                   and renews docs/cross_node.md and its picture

Prints a JSON line a measurement and, at the end, tables with the bars that they are held to. The wirings are measured
in five runs, each with ranks of its own: what one run says of them is the machine's as well. Results are in
tools/benchmarks/results/cross_node.json, from which `--report` makes the tables again without measuring.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TESTS = HERE.parents[2] / "tests"
sys.path[:0] = [str(TESTS), str(HERE.parent)]

from cluster.nodes import Cluster, kill, why_not  # noqa: E402
from cross_report import bars, tables, write_docs  # noqa: E402
from cross_wirings import LATER  # noqa: E402

RESULTS = HERE.parent / "results" / "cross_node.json"
MS = 1e-3
WIRINGS = ["standard", "parallel", "ladder", "no-communication"]
WIDE = {
    "name": "hidden 1024, 16 layers, float32",
    "hidden": 1024,
    "layers": 16,
    "heads": 16,
    "kv_heads": 8,
    "ffn": 2816,
    "vocab": 8192,
    "dtype": "float32",
    "positions": 256,
}
LLAMA150M = {**WIDE, "name": "Llama 150M, bfloat16", "layers": 12, "dtype": "bfloat16"}
LARGE = [1 << 20, 2 << 20, 4 << 20, 8 << 20]
"""Messages of a prompt."""
MTU = 65000
"""A message of a decode step is one frame: an InfiniBand adapter, too, is given it whole."""
TUNED = {"OMPI_MCA_coll_tuned_use_dynamic_rules": "1", "OMPI_MCA_coll_tuned_allreduce_algorithm": "3"}
"""Open MPI's recursive doubling: its best at these sizes, better than what it picks itself."""


def one_core_each(nodes: int) -> list[list[int]]:
    """The first cores, one for each node."""
    cores = sorted(os.sched_getaffinity(0))
    return [[cores[i % len(cores)]] for i in range(nodes)]


def lines_of(process: Any, what: str) -> Iterator[dict[str, Any]]:
    """The JSON lines among what it says, all of which is shown; then it has ended."""
    try:
        for line in process.stdout:
            print(line, end="", flush=True)
            if line.startswith("{"):
                yield json.loads(line)
        if process.wait(60.0) != 0:
            raise RuntimeError(f"{what} ended with status {process.returncode}")
    finally:
        kill(process)


def on_cluster(nodes: int, per_node: int, spec: dict[str, Any], nice: int) -> list[dict[str, Any]]:
    """Runs cross_ranks.py over that many nodes; what its rank 0 said."""
    crowded = nodes * per_node > len(os.sched_getaffinity(0))
    with Cluster(nodes, cores=None if crowded else one_core_each(nodes), mtu=MTU, nice=nice) as cluster:
        ranks = [sys.executable, "-W", "ignore", str(HERE / "cross_ranks.py"), json.dumps(spec)]
        path = [str(TESTS), str(HERE.parent), os.environ.get("PYTHONPATH", "")]
        env = {
            **TUNED,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
        if crowded:
            env["OMPI_MCA_mpi_yield_when_idle"] = "1"  # else its spinning ranks starve one another
        command = cluster.mpirun(ranks, per_node, names=tuple(env))
        process = cluster.start(0, command, env, stdout=subprocess.PIPE)
        return list(lines_of(process, f"{spec['task']} on {nodes} x {per_node}"))


def reduce_runs(nice: int) -> list[dict[str, Any]]:
    """16 KB over 2 x 1, 2 x 2 and 4 x 1 ranks against gloo and Open MPI, and messages of a prompt over 4 x 1 against
    gloo."""
    found = []

    def sums(nodes: int, per_node: int, delays_ms: list[float], sizes: list[int], lanes: list[str], s: float) -> None:
        delays = [delay * MS for delay in delays_ms]
        spec = {"task": "collectives", "delays_s": delays, "sizes": sizes, "lanes": lanes, "seconds": s}
        found.extend(on_cluster(nodes, per_node, spec, nice))

    for nodes, per_node in ((2, 1), (2, 2), (4, 1)):
        sums(nodes, per_node, [1], [16384], ["native", "gloo", "openmpi"], 1.5)
    sums(4, 1, [0, 1], LARGE, ["native", "gloo"], 2.0)
    return found


def wiring_runs(nice: int) -> list[dict[str, Any]]:
    spec = {
        "task": "decode",
        "size": WIDE,
        "wirings": [*WIRINGS, "carried", LATER],
        "batches": [1, 8],
        "delays_s": [0.0, 0.1 * MS, 0.5 * MS, 1 * MS, 2 * MS],
        "ratios": [0.5, 0.66, 1.0],
        "prompt": 32,
        "steps": 16,
        "turn": 4,
    }
    return on_cluster(2, 1, spec, nice)


SPLIT: dict[str, dict[str, Any]] = {
    "split-prefill": {"positions": 1040, "seats": 8, "prompts": [(8, 128), (1, 1024)], "repeats": 5},
    "split-decode": {"positions": 128, "seats": 64, "decodes": [1, 8, 64], "turns": 3},
    "drafts": {"positions": 720, "batches": [1, 8], "prompt": 16, "answer": 700, "steps": 24, "turns": 5},
}


def split_runs(name: str, nice: int) -> list[dict[str, Any]]:
    spec = {**SPLIT[name], "task": name.partition("-")[0], "delays_s": [0.0, 0.1 * MS, 1 * MS]}
    spec["size"] = {**LLAMA150M, "positions": spec.pop("positions")}
    return on_cluster(2, 1, spec, nice)


RUNS: dict[str, Callable[[int], list[dict[str, Any]]]] = {
    "reduce": reduce_runs,
    "wirings": wiring_runs,
    **{name: partial(split_runs, name) for name in SPLIT},
}


def measured(name: str, args: argparse.Namespace, before: dict[str, Any] | None) -> dict[str, Any]:
    """One part's measurements; of the wirings added to those of `before`, if more are asked for."""
    began, load = time.monotonic(), round(os.getloadavg()[0], 1)
    part: dict[str, Any] = {"load_before": load, "nice": args.nice, "lines": [], "seconds": 0}
    if name == "wirings" and args.more and before is not None:
        part |= {key: before[key] for key in ("lines", "seconds")}
        part["load_before"] = max(load, before["load_before"])
    first = max((line["run"] for line in part["lines"]), default=0) + 1
    for run in range(first, first + (args.repeat if name == "wirings" else 1)):
        part["lines"] += [{**line, "run": run} for line in RUNS[name](args.nice)]
    part["seconds"] += round(time.monotonic() - began)
    return part


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=sorted(RUNS), action="append", help="one part; the rest stays as it was")
    parser.add_argument("--repeat", type=int, default=5, help="runs of the wirings")
    parser.add_argument("--more", action="store_true", help="these runs are added to the last results' ones")
    parser.add_argument("--nice", type=int, default=0, help="of all ranks: below 0 where the machine has other work")
    parser.add_argument("--report", action="store_true", help="no measuring: tables from the last results")
    parser.add_argument("--write", action="store_true", help="renew docs/cross_node.md and its picture")
    args = parser.parse_args()
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if not args.report:
        if (why := why_not()) is not None:
            print(f"no emulated cluster here: {why}", file=sys.stderr)
            return 2
        for name in args.only or ("reduce", "wirings"):
            results[name] = measured(name, args, results.get(name))
            RESULTS.parent.mkdir(exist_ok=True)
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print("\n".join(tables(results)))
    print("\n".join(bars(results)))
    if args.write:
        write_docs(results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
