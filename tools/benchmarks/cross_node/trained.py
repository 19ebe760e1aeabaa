"""Wirings that public weights were trained for, over two nodes that tests/cluster makes on this machine, a core each:
LongCat's form with its experts spread, and lanes in the proportions of Laneformer 2B. Random weights in bfloat16.

    python tools/benchmarks/cross_node/trained.py longcat      one way 1 ms, 1 and 8 sequences, five runs; as root
    python tools/benchmarks/cross_node/trained.py lanes-2      two lanes beside a Llama, 0.1, 1 and 2 ms; lanes-8: eight
    python tools/benchmarks/cross_node/trained.py alone-8      eight lanes in one process beside a Llama

Carried: every message is sent and taken, and no rank waits for one. Prints a JSON line a case, then the table: medians,
in brackets the least and the most.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[2] / "tests"), str(HERE.parent), str(HERE)]

from cluster.nodes import CONTROL, Control, why_not  # noqa: E402
from common import spread, table  # noqa: E402
from cross_layouts import SHAPE, measure, on_two_nodes  # noqa: E402
from cross_node import MS, on_cluster  # noqa: E402
from cross_wirings import cells, lanes_of_the_law, step_of  # noqa: E402
from cross_wirings import median as middle  # noqa: E402
from laddertron.engine.config.schema import ParallelConfig  # noqa: E402
from laddertron.launchers.measure.rank_job import BENCH_RANK, BenchJob  # noqa: E402

LONGCAT: dict[str, Any] = {
    key: value for key, value in SHAPE.items() if key not in ("num_hidden_layers", "intermediate_size")
} | {
    "model_type": "longcat_flash", "architectures": ["LongcatFlashForCausalLM"], "num_layers": 4, "hidden_size": 1024,
    "num_key_value_heads": 16, "ffn_hidden_size": 2048, "expert_ffn_hidden_size": 1024, "n_routed_experts": 16,
    "zero_expert_num": 8, "moe_topk": 4, "routed_scaling_factor": 1.5, "q_lora_rank": 512, "kv_lora_rank": 256,
    "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64, "head_dim": 32,
}  # fmt: skip
"""293M: 4 layers of two attentions, two MLPs and a mixture."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "spread": {"tensor_parallel_size": 2, "expert_layout": "spread", "dense_path": "node"},
    "carried": {"tensor_parallel_size": 2, "expert_layout": "spread", "dense_path": "node"},
    "flat": {"tensor_parallel_size": 2, "expert_layout": "tensor", "dense_path": "whole"},
    "pp 2": {"tensor_parallel_size": 1, "pipeline_parallel_size": 2},
}
LANEFORMER = {
    "name": "150M, bfloat16", "hidden": 768, "layers": 15, "heads": 16, "kv_heads": 8, "ffn": 3072, "vocab": 8192,
    "dtype": "bfloat16", "tied": False, "positions": 256,
}  # fmt: skip
"""Laneformer 2B at a quarter of its width."""
STOCK = ("standard", "ladder", "delay-2", "carried", "no-communication")
WIRINGS = (*STOCK, *(f"lanes {kind}" for kind in ("delay-1", "delay-2", "carried", "no-communication")))
ALONE = ("standard", "no-communication", "lanes delay-1")
CARRIED_RANK = "laddertron.tools.benchmarks.cross_node.trained"
SHARE_BAR, LAW_BAR = 0.92, 0.90


def carried_rank() -> int:
    """A rank of `laddertron bench` that waits for no sum: nodes may choose other experts for a row."""
    from laddertron.launchers.measure.rank_work import main as be_rank
    from laddertron.tools.bench.bench_rank import _lead, bench
    from variants import Unawaited

    def work(built: Any, communicator: Any) -> None:
        built.runner.model.all_reduce = Unawaited(built.runner.model.all_reduce)
        built.runner.sampler.follow(bytes, None, 1)
        bench(built, communicator, _lead)

    return be_rank(work)


def inside(folder: Path, agent: str, runs: int, tokens: int) -> None:
    """On the first node: a JSON line a run and batch, with tokens/s of each layout."""
    with ExitStack() as stack:
        jobs = {}
        for kind, words in LAYOUTS.items():
            d = on_two_nodes(folder, agent, "longcat", "auto", ParallelConfig(**words, split_steps="never"))
            module = CARRIED_RANK if kind == "carried" else BENCH_RANK
            jobs[kind] = stack.enter_context(BenchJob(d, kind, module))
        Control(os.environ[CONTROL]).link(MS)
        for run in range(-1, runs):  # the first one warms up
            for batch in (1, 8):
                asked = {kind: jobs[kind].ask("case", batch=batch, prompt=8, generate=tokens) for kind in LAYOUTS}
                rates = {kind: found["decode_tokens"] / found["decode_s"] for kind, found in asked.items()}
                if run >= 0:
                    print(json.dumps({"run": run, "batch": batch, "rates": rates}), flush=True)


def longcat_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    cells = []
    for batch in sorted({row["batch"] for row in rows}):
        runs = [row["rates"] for row in rows if row["batch"] == batch]
        share = [run["spread"] / run["carried"] for run in runs]
        met = "met" if median(share) >= SHARE_BAR else "missed"
        cells.append((batch, *(spread([run[k] for run in runs], ".1f") for k in LAYOUTS), spread(share, ".2f"), met))
    return table(f"batch | {' | '.join(LAYOUTS)} | spread, of carried | bar {SHARE_BAR}", cells)


def lanes_table(lines: Sequence[Mapping[str, Any]], lanes: int) -> list[str]:
    """Tokens/s of each wiring, and what share of the law lanes reach; of one process, how they compare with a Llama."""
    names, rows = list(dict.fromkeys(line["wiring"] for line in lines)), []
    alone = "carried" not in names
    for (delay, batch), runs in cells(lines).items():
        rates = (f"{batch / middle(step_of(name), runs):.1f}" for name in names)
        if alone:
            ratios = [[case["standard"]["step_s"] / case[names[-1]]["step_s"] for case in runs]]
        else:
            ratios = [[lanes_of_the_law(case, lanes, d) for case in runs] for d in (1, 2)]
        rows.append((f"{delay}, {batch}", *rates, *(spread(each, ".2f") for each in ratios)))
    shares = "lanes over standard" if alone else "delay-1, of the law | delay-2, of the law"
    bars = "bars: 0.95 for one sequence, 0.90 for eight" if alone else f"bar: {LAW_BAR} of the law"
    return [*table(f"one way, batch | {' | '.join(names)} | {shares}", rows), "", f"{lanes} lanes; {bars}"]


def lanes_lines(lanes: int, alone: bool, args: argparse.Namespace) -> list[dict[str, Any]]:
    size = LANEFORMER | ({"hidden": 128, "layers": 4, "ffn": 256, "vocab": 512} if args.tiny else {})
    spec = {
        "task": "decode", "size": size, "lanes": lanes, "wirings": ALONE if alone else WIRINGS, "batches": [1, 8],
        "delays_s": [0.0] if alone else [delay * MS for delay in args.delays], "ratios": [], "prompt": 16,
        "steps": args.tokens, "turn": 4,
    }  # fmt: skip
    found = []
    for run in range(args.runs):
        found += [{**line, "run": run} for line in on_cluster(1 if alone else 2, 1, spec, 0)]
    return found


def main() -> int:
    if sys.argv[-1].endswith(".json"):
        return carried_rank()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "part",
        nargs="?",
        default="longcat",
        choices=("longcat", *(f"{kind}-{n}" for kind in ("lanes", "alone") for n in (2, 8))),
    )
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=32, help="decode steps a case")
    parser.add_argument("--delays", type=float, nargs="+", default=[0.1, 1.0, 2.0], help="of lanes, one way, ms")
    parser.add_argument("--tiny", action="store_true", help="a model of nothing, to try the script")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        folder, *rest = json.loads(args.inside)
        inside(Path(folder), *rest)
        return 0
    if (why := why_not()) is not None:
        print(f"no emulated cluster here: {why}", file=sys.stderr)
        return 2
    if args.part == "longcat":
        fields = LONGCAT | ({"num_layers": 2, "expert_ffn_hidden_size": 64} if args.tiny else {})
        print("\n".join(longcat_table(list(measure(__file__, {"longcat": fields}, [args.runs, args.tokens])))))
        return 0
    kind, count = args.part.split("-")
    print("\n".join(lanes_table(lanes_lines(int(count), kind == "alone", args), int(count))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
