"""Measures what crossing nodes costs and how much of it the wirings hide, on nodes that tests/cluster emulates here.

    python tools/benchmarks/cross_node/cross_node.py    everything, about a quarter of an hour; as root
        --only reduce                             or wirings
        --only wirings --repeat 1 --more          one more run of the wirings, two minutes
        --only split-prefill                      two streams against whole steps: prompts; or split-decode; minutes
        --only drafts                             drafts of a stated hit rate; or drafts-staged: minutes
        --write                                   and renews docs/cross_node.md and its picture

Prints a JSON line for each measurement and, at the end, tables with the thresholds they must reach. Every variant has
ranks of its own; variants alternate. The wirings are measured in five runs, because one run also depends on the
machine's state. Results are in tools/benchmarks/results/cross_node.json, from which `--report` makes the tables again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[2] / "tests")]

from cluster.nodes import Cluster  # noqa: E402
from common import in_turns  # noqa: E402
from cross_report import bars, tables, write_docs  # noqa: E402
from cross_wirings import LATER, WIRINGS  # noqa: E402
from laddertron.engine.schedule.split import TRIAL  # noqa: E402
from laddertron.launchers.measure.rank_job import BenchJob  # noqa: E402
from laddertron.tools.bench.bench import random_mix, spread  # noqa: E402
from two_nodes import MS, MTU, SHAPE, TESTS, Row, Site, declaring, insist, lines_of, on_nodes, rate  # noqa: E402

RESULTS = HERE.parent / "results" / "cross_node.json"
WIDE = {**SHAPE, "num_hidden_layers": 16, "torch_dtype": "float32", "tie_word_embeddings": True}
LARGE = [1 << 20, 2 << 20, 4 << 20, 8 << 20]
"""Messages of a prompt."""
TUNED = {"OMPI_MCA_coll_tuned_use_dynamic_rules": "1", "OMPI_MCA_coll_tuned_allreduce_algorithm": "3"}
"""Open MPI's recursive doubling: its best at these sizes, better than what it picks itself."""
DELAYS = [0.0, 0.1 * MS, 1 * MS]
WARM = len(TRIAL) + 2
"""Steps until split_steps auto has made its choice."""
SPLITS = {"whole": "never", "split": "always", "auto": "auto", "carried": "never"}
DRAFTS: dict[str, tuple[Any, float]] = {
    "off": (False, 0.0), "ngram, 70%": ("ngram", 0.7), "auto, 70%": ("auto", 0.7), "auto, 0%": ("auto", 0.0),
}  # fmt: skip
"""engine.speculation, and how many of the drafts are right."""
SILENT = "no-communication"
"""The same ranks, each with half of every product, without messages and without drafts."""
STAGES = {"tensor_parallel_size": 1, "pipeline_parallel_size": 2}


def sums(nodes: int, per_node: int, nice: int, **spec: Any) -> Iterator[Row]:
    """Runs reduce_ranks.py on `nodes` nodes and yields its rows."""
    cores = sorted(os.sched_getaffinity(0))
    crowded = nodes * per_node > len(cores)
    node_cores = None if crowded else [[cores[i]] for i in range(nodes)]
    with Cluster(nodes, cores=node_cores, mtu=MTU, nice=nice) as cluster:
        path = [str(TESTS), str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        env = TUNED | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path), "TORCH_CPP_LOG_LEVEL": "ERROR"}
        if crowded:
            env["OMPI_MCA_mpi_yield_when_idle"] = "1"  # else its spinning ranks starve one another
        ranks = [sys.executable, "-W", "ignore", str(HERE / "reduce_ranks.py"), json.dumps(spec)]
        command = cluster.mpirun(ranks, per_node, names=tuple(env))
        yield from lines_of(cluster.start(0, command, env, stdout=subprocess.PIPE))


def reduce_runs(nice: int) -> Iterator[Row]:
    """16 KB over 2 x 1, 2 x 2 and 4 x 1 ranks against gloo and Open MPI, and messages of a prompt over 4 x 1 against
    gloo."""
    small: Row = {"delays_s": [MS], "sizes": [16384], "backends": ["native", "gloo", "openmpi"], "seconds": 1.5}
    for nodes, per_node in ((2, 1), (2, 2), (4, 1)):
        yield from sums(nodes, per_node, nice, **small)
    yield from sums(4, 1, nice, delays_s=[0.0, MS], sizes=LARGE, backends=["native", "gloo"], seconds=2.0)


def wiring_job(site: Site, kind: str, ranks: int) -> BenchJob:
    """A job with the model `llama` or `parallel`; for a kind "lanes ..." with `lanes-1` or `lanes-2`, whose broadcasts
    have this delay."""
    name = kind.removeprefix("lanes ")
    if name != kind:
        model = "lanes-2" if name == LATER else "lanes-1"
    else:
        model = "parallel" if name == "parallel" else "llama"
    wiring = name if model == "llama" or name == "no-communication" else "auto"
    wiring = "standard" if wiring == "carried" else wiring
    deployment = site.deployment(model, wiring, {"tensor_parallel_size": ranks}, max_num_seqs=8)
    return site.job(kind, deployment, carried=name == "carried")


def wirings(
    site: Site, kinds: list[str], delays_s: list[float], ratios: list[float], shape: Row, ranks: int = 2, turns: int = 3
) -> Iterator[Row]:
    """Decode steps of each kind in turns, over delays and those that give an L/c of `ratios`."""
    sub_blocks, row = 2 * shape["num_hidden_layers"], {"float32": 4, "bfloat16": 2}[shape["torch_dtype"]]
    row *= shape["hidden_size"]
    with ExitStack() as stack:
        jobs = {kind: stack.enter_context(wiring_job(site, kind, ranks)) for kind in kinds}

        def run(batch: int, kind: str) -> Row:
            timing = jobs[kind].ask("case", batch=batch, prompt=32, generate=11)
            # a rank that begins a delay earlier waits twice as long for every other one: their mean
            alone_s = fmean(jobs[kind].ask("all_reduce", bytes=batch * row, count=8)["seconds"])
            return timing | {"alone_s": alone_s, "step_s": batch * timing["decode_s"] / timing["decode_tokens"]}

        site.switch.link(0.0)
        first = in_turns(jobs, 3, partial(run, 1))
        c = median(run["step_s"] for run in first["no-communication"]) / sub_blocks
        at_rest = median(run["alone_s"] for run in first["standard"])
        delays = [(d, None) for d in delays_s] + [(max(0.0, r * c - at_rest), r) for r in ratios]
        for (delay_s, aimed), batch in product(delays, (1, 8)):
            site.switch.link(delay_s)
            before, began = site.switch.stats().cpu_s, time.perf_counter()
            runs_by_kind = in_turns(jobs, turns, partial(run, batch))
            switch_share = (site.switch.stats().cpu_s - before) / (time.perf_counter() - began)
            all_reduce_s = median(timing["alone_s"] for runs in runs_by_kind.values() for timing in runs)
            for kind, runs in runs_by_kind.items():
                busy_s = sum(timing["prefill_s"] + timing["decode_s"] for timing in runs)
                yield {
                    "model": f"hidden {shape['hidden_size']}, {sub_blocks // 2} layers, {shape['torch_dtype']}",
                    "delay_s": delay_s, "aimed": aimed, "batch": batch, "wiring": kind, "sub_blocks": sub_blocks,
                    "step_s": median(timing["step_s"] for timing in runs), "all_reduce_s": all_reduce_s,
                    "sub_blocks_s": [median(timing["sub_blocks_s"][at] for timing in runs) for at in (0, 1)],
                    "switch_share": switch_share,
                    "other_threads_share": sum(timing["other_threads_s"] for timing in runs) / busy_s,
                }  # fmt: skip


def wiring_runs(nice: int) -> Iterator[Row]:
    models = {"llama": WIDE, "parallel": declaring(WIDE, "parallel")}
    delays, ratios = [delay * MS for delay in (0, 0.1, 0.5, 1, 2)], [0.5, 0.66, 1.0]
    return on_nodes(wirings, models, [*WIRINGS, LATER], delays, ratios, WIDE, nice=nice)


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


def drafts(
    site: Site, prompt: int, answer: int, turns: int, parallel: Row, delays_s: list[float], batches: list[int]
) -> Iterator[Row]:
    """Tokens/s of decodes without drafts, with all that are found and with those that pay; and of SILENT."""
    mix = random_mix(8, (prompt, prompt), (answer, answer), None, SHAPE["vocab_size"], 0)
    items = [(item.prompt, item.generate, 0.0) for item in mix]
    with ExitStack() as stack:
        jobs = {}
        for kind, (rule, right) in DRAFTS.items():
            deployment = site.deployment("llama", "standard", parallel, speculation=rule)
            jobs[kind] = stack.enter_context(site.job(kind, deployment, prompt=prompt, right=right))
        jobs[SILENT] = stack.enter_context(site.job(SILENT, site.deployment("llama", SILENT)))

        def tokens_s(batch: int, kind: str) -> float:
            return float(sum(1 / seconds for seconds in jobs[kind].ask("mix", items=items[:batch])["between_s"]))

        for delay_s in delays_s:
            site.switch.link(delay_s)
            for batch in batches:
                in_turns(jobs, 3, partial(tokens_s, batch))  # answers are recorded, and auto learns
                rates = in_turns(jobs, turns, partial(tokens_s, batch))
                yield {"delay_s": delay_s, "batch": batch, **{kind: spread(values) for kind, values in rates.items()}}


def split_prefills(nice: int) -> Iterator[Row]:
    return on_nodes(splits, {"llama": SHAPE}, [(8, 128, 0), (1, 1024, 0)], 5, nice=nice)


def split_decodes(nice: int) -> Iterator[Row]:
    return on_nodes(splits, {"llama": SHAPE}, [(batch, 16, 4) for batch in (1, 8, 64)], 3, nice=nice)


def draft_runs(nice: int) -> Iterator[Row]:
    return on_nodes(drafts, {"llama": SHAPE}, 16, 64, 5, {}, DELAYS, [1, 8], nice=nice)


def staged_draft_runs(nice: int) -> Iterator[Row]:
    return on_nodes(drafts, {"llama": SHAPE}, 16, 64, 5, STAGES, [2 * MS], [1, 8], nice=nice)


RUNS = {
    "reduce": reduce_runs, "wirings": wiring_runs, "split-prefill": split_prefills, "split-decode": split_decodes,
    "drafts": draft_runs, "drafts-staged": staged_draft_runs,
}  # fmt: skip


def measured(name: str, args: argparse.Namespace, before: Row | None) -> Row:
    """One part's measurements; of the wirings added to those of `before`, if more are asked for."""
    began, load = time.monotonic(), round(os.getloadavg()[0], 1)
    part: Row = {"load_before": load, "nice": args.nice, "lines": [], "seconds": 0}
    if name == "wirings" and args.more and before is not None:
        part |= {key: before[key] for key in ("lines", "seconds")}
        part["load_before"] = max(load, before["load_before"])
    first = max((line["run"] for line in part["lines"]), default=0) + 1
    for run in range(first, first + (args.repeat if name == "wirings" else 1)):
        part["lines"] += [{**line, "run": run} for line in RUNS[name](args.nice)]
    part["seconds"] += round(time.monotonic() - began)
    return part


def main() -> None:
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
        insist()
        for name in args.only or ("reduce", "wirings"):
            results[name] = measured(name, args, results.get(name))
            RESULTS.parent.mkdir(exist_ok=True)
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print("\n".join([*tables(results), *bars(results)]))
    if args.write:
        if missing := " and ".join(sorted({"reduce", "wirings"} - results.keys())):
            sys.exit(f"{RESULTS}: no results of {missing}, which the page has: measure them first")
        write_docs(results)


if __name__ == "__main__":
    main()
