"""When ladder pays: tokens/s of stock layouts (tensor parallelism, whole and split steps, a pipeline of two stages) and
of trained wirings against L/c, on two nodes that tests/cluster makes on this machine, a core each. A Llama of 150M in
bfloat16 with dummy weights, measured by `laddertron bench`'s ranks in turns.

    python tools/benchmarks/cross_node/cross_layouts.py            three runs, a quarter of an hour; as root
    python tools/benchmarks/cross_node/cross_layouts.py --write    and renews docs/layouts.md, figure and data
    python tools/benchmarks/cross_node/cross_layouts.py --report   the table of what was measured

Each point of each run becomes a line of tools/benchmarks/results/cross_layouts.jsonl, from which an interrupted call
resumes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
TESTS = HERE.parents[2] / "tests"
sys.path[:0] = [str(TESTS), str(HERE.parent)]

from cluster.nodes import CONTROL, Cluster, Control, why_not  # noqa: E402
from common import renewed, table  # noqa: E402
from cross_node import MTU, lines_of  # noqa: E402
from cross_picture import layouts_picture  # noqa: E402
from laddertron.engine.config import schema as keys  # noqa: E402
from laddertron.launchers.measure.rank_job import BenchJob  # noqa: E402
from laddertron.tools.plan.advice import STOCK  # noqa: E402
from laddertron.tools.plan.step_simulator import law  # noqa: E402
from peers.model import LLAMA_150M  # noqa: E402

RESULTS = HERE.parent / "results" / "cross_layouts.jsonl"
DOCS = HERE.parents[2] / "docs"
SHAPE: dict[str, Any] = {
    **LLAMA_150M, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16",
    "hidden_act": "silu", "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "eos_token_id": 1,
}  # fmt: skip
LANES: dict[str, Any] = {
    **SHAPE, "model_type": "laneformer_tp", "architectures": ["LaneformerTPForCausalLM"], "norm_eps": 1e-5,
    "num_lanes": 2, "broadcast_delay": 2,
}  # fmt: skip
SUB_BLOCKS = 2 * LLAMA_150M["num_hidden_layers"]
BATCHES, RATIOS = (1, 8, 32), (0.25, 0.5, 1.0, 2.0, 4.0)
KINDS = (*STOCK, "ladder", "delay-2", "lanes", "no-communication")
Row = dict[str, Any]
"""A run's point: run, batch, aimed (L/c), delay_s, and tokens/s of each kind."""


def deployment(folder: Path, agent: str, kind: str) -> keys.Deployment:
    wiring = {"split": "standard", "pipeline": "standard", "lanes": "auto"}.get(kind, kind)
    stages = 2 if kind == "pipeline" else 1
    parallel = keys.ParallelConfig(
        2 // stages, pipeline_parallel_size=stages, split_steps="always" if kind == "split" else "never"
    )
    return on_two_nodes(folder, agent, "lanes" if kind == "lanes" else "llama", wiring, parallel)


def on_two_nodes(folder: Path, agent: str, model: str, wiring: str, parallel: keys.ParallelConfig) -> keys.Deployment:
    """Of a folder's model, on the nodes of its host file."""
    return keys.Deployment(
        keys.ModelSection(str(folder / model), wiring=wiring, load_format="dummy", max_model_len=256),
        parallel,
        keys.LaunchConfig(hostfile=str(folder / "hosts"), rsh_agent=agent, interface="eth0"),
        keys.EngineConfig(
            device="cpu", threads=1, max_num_seqs=max(BATCHES), max_num_batched_tokens=256, speculation=False,
            enable_prefix_caching=False, kv_cache_memory=128 << 20,
        ),
    )  # fmt: skip


def inside(folder: Path, agent: str, todo: list[list[Any]], tokens: int) -> None:
    """On the first node: a JSON line for each (run, batch, L/c) of `todo`."""
    switch = Control(os.environ[CONTROL])
    with ExitStack() as stack:
        jobs = {kind: stack.enter_context(BenchJob(deployment(folder, agent, kind), kind)) for kind in KINDS}

        def rate(kind: str, batch: int) -> float:
            found = jobs[kind].ask("case", batch=batch, prompt=8, generate=tokens)
            return float(found["decode_tokens"] / found["decode_s"])

        switch.link(0.0)
        rest: dict[int, tuple[float, float]] = {}
        for batch in sorted({batch for _, batch, _ in todo}):
            for kind in KINDS:
                jobs[kind].ask("case", batch=batch, prompt=8, generate=8)
            silent, standard = (batch / rate(kind, batch) / SUB_BLOCKS for kind in ("no-communication", "standard"))
            rest[batch] = silent, standard - silent
        for run, batch, aimed in todo:
            c, without_delay = rest[batch]
            delay_s = max(0.0, aimed * c - without_delay)
            switch.link(delay_s)
            rates = {kind: rate(kind, batch) for kind in sorted(KINDS, reverse=run % 2 == 1)}
            print(
                json.dumps({"run": run, "batch": batch, "aimed": aimed, "delay_s": delay_s, "rates": rates}), flush=True
            )


def measure(script: str, models: dict[str, Any], words: list[Any], nice: int = 0) -> Iterator[Row]:
    """What `script --inside` says on the first of two nodes of a core each, behind a folder with these models'
    configurations, the agent and `words`."""
    cores = sorted(os.sched_getaffinity(0))
    with Cluster(2, cores=[[cores[0]], [cores[-1]]], mtu=MTU, nice=nice) as cluster:
        for name, fields in models.items():
            (cluster.scratch / name).mkdir()
            (cluster.scratch / name / "config.json").write_text(json.dumps(fields))
        (cluster.scratch / "hosts").write_text("".join(f"{name} slots=1\n" for name in cluster.names))
        command = [sys.executable, "-W", "ignore", script, "--inside"]
        command.append(json.dumps([str(cluster.scratch), str(cluster.agent), *words]))
        process = cluster.start(0, command, {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}, stdout=-1)
        yield from lines_of(process, "the ranks")


def points(rows: Sequence[Row]) -> list[Row]:
    """Medians over the runs: batch, ratio (L/c, as what communicating adds to computing) and tokens/s of each kind."""
    found = []
    for batch, aimed in sorted({(row["batch"], row["aimed"]) for row in rows}):
        runs = [row["rates"] for row in rows if (row["batch"], row["aimed"]) == (batch, aimed)]
        rates = {kind: round(median(run[kind] for run in runs), 1) for kind in KINDS}
        ratio = median(run["no-communication"] / run["standard"] - 1 for run in runs)
        found.append({"batch": batch, "ratio": round(ratio, 2), "rates": rates})
    return found


def crossing(mine: Sequence[Row]) -> str:
    """The L/c of one batch from which on stock weights are faster than ladder, between two points by a line."""
    gaps = sorted((p["ratio"], p["rates"]["ladder"] / max(p["rates"][kind] for kind in STOCK) - 1) for p in mine)
    for (left, before), (right, after) in pairwise(gaps):
        if before > 0 >= after:
            return f"{left + (right - left) * before / (before - after):.1f}"
    return f"{gaps[-1][0]:.1f} and more" if gaps[-1][1] > 0 else "0"


def report(found: Sequence[Row]) -> list[str]:
    """Markdown; of the law: the share of ladder's step that the law predicts."""
    cells = []
    for p in found:
        rates, best = p["rates"], max(STOCK, key=p["rates"].__getitem__)
        of_law = rates["ladder"] / (rates["standard"] * law(1.0, p["ratio"]))
        shown = (f"{rates[kind]:,.0f}" for kind in KINDS)
        cells.append((f"{p['batch']}, {p['ratio']:.2f}", *shown, best, f"{of_law:.2f}"))
    ups = ", ".join(f"{crossing([p for p in found if p['batch'] == b])} (batch {b})" for b in BATCHES)
    head = f"batch, L/c | {' | '.join(KINDS)} | best stock | ladder, of the law"
    return [
        "![tokens/s of layouts against L/c](pictures/layouts.svg)", "", *table(head, cells), "",
        f"Ladder decodes faster than the best stock layout up to an L/c of: {ups}.",
    ]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=32, help="of each sequence")
    parser.add_argument("--nice", type=int, default=0, help="of all ranks: below 0 where the machine has other work")
    parser.add_argument("--report", action="store_true", help="no measuring")
    parser.add_argument("--write", action="store_true", help="renew docs/layouts.md, its figure and its data")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        folder, *rest = json.loads(args.inside)
        inside(Path(folder), *rest)
        return 0
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    done = {(row["run"], row["batch"], row["aimed"]) for row in rows}
    todo = [[run, b, r] for run in range(args.runs) for b in BATCHES for r in RATIOS if (run, b, r) not in done]
    RESULTS.parent.mkdir(exist_ok=True)
    if todo and not args.report:
        if (why := why_not()) is not None:
            print(f"no emulated cluster here: {why}", file=sys.stderr)
            return 2
        for row in measure(__file__, {"llama": SHAPE, "lanes": LANES}, [todo, args.tokens], args.nice):
            rows.append(row)
            with RESULTS.open("a") as file:
                file.write(json.dumps(row) + "\n")
    found = points(rows)
    lines = report(found)
    print("\n".join(lines))
    if args.write:
        page, pictures = DOCS / "layouts.md", DOCS / "pictures"
        page.write_text(renewed(page.read_text(), lines))
        (pictures / "layouts.json").write_text("[\n" + ",\n".join(map(json.dumps, found)) + "\n]\n")
        (pictures / "layouts.svg").write_text(layouts_picture(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
