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
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import spread, table
from cross_node import wirings
from cross_wirings import cells, lanes_of_the_law
from two_nodes import LANES, MS, SHAPE, Row, Site, insist, on_nodes, rate

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
    "spread": {"expert_layout": "spread", "dense_path": "node"},
    "carried": {"expert_layout": "spread", "dense_path": "node"},
    "flat": {"expert_layout": "tensor", "dense_path": "whole"},
    "pp 2": {"tensor_parallel_size": 1, "pipeline_parallel_size": 2},
}
LANEFORMER = {
    "hidden_size": 768, "num_hidden_layers": 15, "num_attention_heads": 16, "num_key_value_heads": 8,
    "intermediate_size": 3072, "vocab_size": 8192,
}  # fmt: skip
"""Laneformer 2B at a quarter of its width."""
STOCK = ("standard", "ladder", "delay-2", "carried", "no-communication")
WIRINGS = (*STOCK, *(f"lanes {kind}" for kind in ("delay-1", "delay-2", "carried", "no-communication")))
ALONE = ("standard", "no-communication", "lanes delay-1")
SHARE_BAR, LAW_BAR = 0.92, 0.90


def longcat(site: Site, runs: int, tokens: int) -> Iterator[Row]:
    """A row a run and batch, with tokens/s of each layout."""
    with ExitStack() as stack:
        jobs = {}
        for kind, words in LAYOUTS.items():
            deployment = site.deployment("longcat", parallel=words)
            jobs[kind] = stack.enter_context(site.job(kind, deployment, carried=kind == "carried"))
        site.switch.link(MS)
        for run in range(-1, runs):  # the first one warms up
            for batch in (1, 8):
                rates = {kind: rate(job, batch, 8, tokens) for kind, job in jobs.items()}
                if run >= 0:
                    yield {"run": run, "batch": batch, "rates": rates}


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
    for cell in cells(lines):
        laws = [[lanes_of_the_law(case, lanes, d) for case in cell.runs] for d in (1, 2) if not alone]
        ratios = laws or [cell.gains(names[-1])]
        rows.append((cell.where, *cell.rates(names), *(spread(shares, ".2f") for shares in ratios)))
    shares = "lanes over standard" if alone else "delay-1, of the law | delay-2, of the law"
    bars = "bars: 0.95 for one sequence, 0.90 for eight" if alone else f"bar: {LAW_BAR} of the law"
    return [*table(f"one way, batch | {' | '.join(names)} | {shares}", rows), "", f"{lanes} lanes; {bars}"]


def lanes_lines(lanes: int, alone: bool, args: argparse.Namespace) -> Iterator[Row]:
    fields = LANEFORMER | ({"hidden_size": 128, "num_hidden_layers": 4, "intermediate_size": 256} if args.tiny else {})
    models = {"llama": SHAPE | fields}
    models |= {f"lanes-{d}": LANES | fields | {"num_lanes": lanes, "broadcast_delay": d} for d in (1, 2)}
    delays = [0.0] if alone else [delay * MS for delay in args.delays]
    words: tuple[Any, ...] = (
        (ALONE if alone else WIRINGS),
        delays,
        [],
        models["llama"],
        1 if alone else 2,
        -(-args.tokens // 10),
    )
    for run in range(args.runs):
        for line in on_nodes(wirings, models, *words, nodes=1 if alone else 2):
            yield {**line, "run": run}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parts = ("longcat", *(f"{kind}-{n}" for kind in ("lanes", "alone") for n in (2, 8)))
    parser.add_argument("part", nargs="?", default="longcat", choices=parts)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=32, help="decode steps a case")
    parser.add_argument("--delays", type=float, nargs="+", default=[0.1, 1.0, 2.0], help="of lanes, one way, ms")
    parser.add_argument("--tiny", action="store_true", help="a model of nothing, to try the script")
    args = parser.parse_args()
    insist()
    if args.part == "longcat":
        fields = LONGCAT | ({"num_layers": 2, "expert_ffn_hidden_size": 64} if args.tiny else {})
        rows = longcat_table(list(on_nodes(longcat, {"longcat": fields}, args.runs, args.tokens)))
    else:
        kind, count = args.part.split("-")
        rows = lanes_table(list(lanes_lines(int(count), kind == "alone", args)), int(count))
    print("\n".join(rows))


if __name__ == "__main__":
    main()
