"""Wirings that public weights were trained for, over two nodes: LongCat's form with its experts spread, and lanes in
the proportions of Laneformer 2B: the parts `longcat`, `lanes-N` and, in one process, `alone-N` of cross_node.py. Random
weights in bfloat16. Carried: every message is sent and taken, and no rank waits for one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import product
from statistics import median
from typing import Any

from common import spread, table
from cross_wirings import cells, lanes_of_the_law, wirings
from two_nodes import LANES, MS, SHAPE, Row, Site, on_nodes, rate

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


def longcat(site: Site) -> Iterator[Row]:
    """A row a batch, with tokens/s of each layout; the first rates warm up."""
    with ExitStack() as stack:
        jobs = {}
        for kind, words in LAYOUTS.items():
            deployment = site.deployment("longcat", parallel=words)
            jobs[kind] = stack.enter_context(site.job(kind, deployment, carried=kind == "carried"))
        site.switch.link(MS)
        for warm, batch in product((True, False), (1, 8)):
            rates = {kind: rate(job, batch, 8, 32) for kind, job in jobs.items()}
            if not warm:
                yield {"batch": batch, "rates": rates}


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


def lanes_runs(lanes: int, kinds: Sequence[str], delays_s: Sequence[float], nodes: int, turns: int) -> Iterator[Row]:
    models = {"llama": SHAPE | LANEFORMER}
    models |= {f"lanes-{d}": LANES | LANEFORMER | {"num_lanes": lanes, "broadcast_delay": d} for d in (1, 2)}
    return on_nodes(wirings, models, kinds, delays_s, [], models["llama"], nodes, turns, nodes=nodes)
