"""Measures what crossing nodes costs and how much of it the wirings hide, on nodes that tests/cluster emulates here.

    python tools/benchmarks/cross_node/cross_node.py    all-reduces and wirings, 20 to 50 minutes; as root
        --only wirings --repeat 1 --more          one more run of a part; --only has the others
        --only drafts                             drafts of a stated hit rate; or drafts-staged, mtp: minutes
        --write                                   and renews what docs/cross_node.md and docs/layouts.md have of it
        --report                                  the tables of what was measured

Prints a JSON line for each measurement and, at the end, tables with the thresholds they must reach. Every variant has
ranks of its own; variants alternate. What also depends on the machine's state is measured in several runs. Results are
in tools/benchmarks/results/cross_node.json after each of them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[2] / "tests")]

from cluster.nodes import Cluster  # noqa: E402
from common import in_turns  # noqa: E402
from cross_drafts import STAGES, drafts, mtp  # noqa: E402
from cross_layouts import layouts  # noqa: E402
from cross_report import tables, write_docs  # noqa: E402
from cross_wirings import wiring_runs  # noqa: E402
from laddertron.engine.schedule.split import TRIAL  # noqa: E402
from laddertron.launchers.measure.rank_job import BenchJob  # noqa: E402
from laddertron.tools.bench.bench import spread  # noqa: E402
from trained import ALONE, LONGCAT, WIRINGS, lanes_runs, longcat  # noqa: E402
from two_nodes import LANES, MS, MTU, SHAPE, TESTS, Row, Site, insist, lines_of, on_nodes, rate  # noqa: E402

RESULTS = HERE.parent / "results" / "cross_node.json"
LARGE = [1 << 20, 2 << 20, 4 << 20, 8 << 20]
"""Messages of a prompt."""
TUNED = {"OMPI_MCA_coll_tuned_use_dynamic_rules": "1", "OMPI_MCA_coll_tuned_allreduce_algorithm": "3"}
"""Open MPI's recursive doubling: its best at these sizes, better than what it picks itself."""
DELAYS = [0.0, 0.1 * MS, 1 * MS]
WARM = len(TRIAL) + 2
"""Steps until split_steps auto has made its choice."""
SPLITS = {"whole": "never", "split": "always", "auto": "auto", "carried": "never"}


def sums(nodes: int, per_node: int, **spec: Any) -> Iterator[Row]:
    """Runs reduce_ranks.py on `nodes` nodes and yields its rows."""
    cores = sorted(os.sched_getaffinity(0))
    crowded = nodes * per_node > len(cores)
    node_cores = None if crowded else [[cores[i]] for i in range(nodes)]
    with Cluster(nodes, cores=node_cores, mtu=MTU) as cluster:
        path = [str(TESTS), str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        env = TUNED | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path), "TORCH_CPP_LOG_LEVEL": "ERROR"}
        if crowded:
            env["OMPI_MCA_mpi_yield_when_idle"] = "1"  # else its spinning ranks starve one another
        ranks = [sys.executable, "-W", "ignore", str(HERE / "reduce_ranks.py"), json.dumps(spec)]
        command = cluster.mpirun(ranks, per_node, names=tuple(env))
        yield from lines_of(cluster.start(0, command, env, stdout=subprocess.PIPE))


def reduce_runs() -> Iterator[Row]:
    """16 KB over 2 x 1, 2 x 2 and 4 x 1 ranks against gloo and Open MPI, and messages of a prompt over 4 x 1 against
    gloo."""
    small: Row = {"delays_s": [MS], "sizes": [16384], "backends": ["native", "gloo", "openmpi"], "seconds": 1.5}
    for nodes, per_node in ((2, 1), (2, 2), (4, 1)):
        yield from sums(nodes, per_node, **small)
    yield from sums(4, 1, delays_s=[0.0, MS], sizes=LARGE, backends=["native", "gloo"], seconds=2.0)


def step_s(jobs: Mapping[str, BenchJob], case: tuple[int, int, int], kind: str) -> float:
    """Seconds of a step of (batch, prompt, steps): of the prompts', or of so many decodes."""
    batch, prompt, steps = case
    if steps:
        return batch / rate(jobs[kind], batch, prompt, steps + 1)
    return float(jobs[kind].ask("case", batch=batch, prompt=prompt, generate=2)["prefill_s"])


def splits(site: Site, cases: list[tuple[int, int, int]], turns: int) -> Iterator[Row]:
    """A step's seconds, whole, in two streams and as `auto` chooses; see step_s. Each delay has ranks of its own: what
    `auto` has learned is of that delay."""
    room = {"max_num_batched_tokens": max(batch * prompt for batch, prompt, _ in cases), "max_num_seqs": 64}
    for delay_s in DELAYS:
        with ExitStack() as stack:
            jobs = {}
            for kind, words in SPLITS.items():
                deployment = site.deployment("llama", "standard", {"split_steps": words}, **room)
                jobs[kind] = stack.enter_context(site.job(kind, deployment, carried=kind == "carried"))
            site.switch.link(delay_s)
            for case in cases:
                in_turns(jobs, WARM, partial(step_s, jobs, case))
                seconds = in_turns(jobs, turns, partial(step_s, jobs, case))
                batch, prompt, steps = case
                what = f"decode {batch}" if steps else f"prefill {batch} x {prompt}"
                yield {"delay_s": delay_s, "case": what, **{kind: spread(values) for kind, values in seconds.items()}}


LLAMA, DELAYS_LANES = {"llama": SHAPE}, (0.1 * MS, 1 * MS, 2 * MS)
DELAYS_DRAFTS = (0.1 * MS, 0.5 * MS, 1 * MS, 2 * MS)
RUNS: dict[str, tuple[Callable[[], Iterator[Row]], int]] = {
    "reduce": (reduce_runs, 1),
    "wirings": (wiring_runs, 5),
    "layouts": (partial(on_nodes, layouts, LLAMA | {"lanes": LANES}), 3),
    "longcat": (partial(on_nodes, longcat, {"longcat": LONGCAT}), 3),
    "lanes-2": (partial(lanes_runs, 2, WIRINGS, DELAYS_LANES, 2, 3), 3),
    "lanes-8": (partial(lanes_runs, 8, WIRINGS, DELAYS_LANES, 2, 3), 3),
    "alone-8": (partial(lanes_runs, 8, ALONE, (0.0,), 1, 5), 3),
    "split-prefill": (partial(on_nodes, splits, LLAMA, [(8, 128, 0), (1, 1024, 0)], 5), 1),
    "split-decode": (partial(on_nodes, splits, LLAMA, [(batch, 16, 4) for batch in (1, 8, 64)], 3), 1),
    "drafts": (partial(on_nodes, drafts, LLAMA, {}, DELAYS_DRAFTS, (1, 8, 32)), 1),
    "drafts-staged": (partial(on_nodes, drafts, LLAMA, STAGES, DELAYS_DRAFTS, (1, 8, 32)), 1),
    "mtp": (partial(on_nodes, mtp, {}, (1 * MS,)), 1),
}
"""What measures a part once, and how often it is measured."""


def measured(name: str, args: argparse.Namespace, before: Row | None) -> Iterator[Row]:
    """A part's measurements after each run, added to those of `before` if more are asked for."""
    load = round(os.getloadavg()[0], 1)
    part: Row = {"load_before": load, "lines": []}
    if args.more and before is not None:
        part |= {"lines": before["lines"], "load_before": max(load, before["load_before"])}
    measure, usual = RUNS[name]
    first = max((line["run"] for line in part["lines"]), default=0) + 1
    for run in range(first, first + (args.repeat or usual)):
        part["lines"] += [{**line, "run": run} for line in measure()]
        yield part


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=sorted(RUNS), action="append", help="one part; the rest stays as it was")
    parser.add_argument("--repeat", type=int, help="runs of a part")
    parser.add_argument("--more", action="store_true", help="these runs are added to the last results' ones")
    parser.add_argument("--report", action="store_true", help="no measuring: tables from the last results")
    parser.add_argument("--write", action="store_true", help="renew what the pages have of these parts")
    args = parser.parse_args()
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if not args.report:
        insist()
        RESULTS.parent.mkdir(exist_ok=True)
        for name in args.only or ("reduce", "wirings"):
            for part in measured(name, args, results.get(name)):
                results[name] = part
                RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    if not results:
        sys.exit(f"{RESULTS}: no results; measure first, without --report")
    for name, lines in tables(results).items():
        print("\n".join([f"### {name}", "", *lines, ""]))
    if args.write:
        write_docs(results)


if __name__ == "__main__":
    main()
