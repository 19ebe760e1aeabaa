"""Drafts over two nodes: the parts `drafts`, `drafts-staged` and `mtp` of cross_node.py. Random weights in bfloat16.

With random weights nothing can be predicted, so drafts are looked up (law_rank.py's `right`), and of predicting layers
checkpoints are made that agree with their model at a stated rate.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[2] / "tests" / "helpers")]

from common import in_turns, spread, table  # noqa: E402
from laddertron.engine.config import schema as keys  # noqa: E402
from laddertron.launchers.measure.rank_job import BenchJob  # noqa: E402
from laddertron.tools.bench.bench import random_mix  # noqa: E402
from two_nodes import SHAPE, Row, Site  # noqa: E402

PROMPT, ANSWER, TURNS = 16, 48, 3
ACCEPTED = (0.0, 0.4, 0.7, 0.9)
RULES: dict[str, Any] = {"off": False, "on": "ngram", "auto": "auto"}
"""engine.speculation: no drafts, all that are found, those that pay."""
SILENT = "no-communication"
"""The same ranks, each with half of every product, without messages and without drafts."""
STAGES = {"tensor_parallel_size": 1, "pipeline_parallel_size": 2}
CROSSINGS = {"tp 2": 2 * SHAPE["num_hidden_layers"] + 2, "pp 2": 2}
"""A round's, of the 150M Llama."""
LEAST = 0.9
"""The least share of the better of on and off that `auto` must reach."""
FORMS: dict[str, tuple[str, float]] = {"DeepSeek-V3": ("deepseek_v3", 0.0007), "GLM-4.5": ("glm4_moe", 0.0007)}
"""The family, and what its layers add to their residual, as a factor."""
MIXTURE: Row = {
    "num_hidden_layers": 8, "hidden_size": 1024, "intermediate_size": 2816, "moe_intermediate_size": 512,
    "num_attention_heads": 16, "vocab_size": 8192, "max_position_embeddings": 2048, "initializer_range": 0.04,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
SIZES: dict[str, Row] = {
    "deepseek_v3": {
        "kv_lora_rank": 256, "q_lora_rank": 512, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64,
        "num_key_value_heads": 16,
    },
    "glm4_moe": {"num_key_value_heads": 8, "head_dim": 64},
}  # fmt: skip


def asked(job: BenchJob, batch: int, level: int = 0) -> Row:
    """One run of `batch` sequences whose drafts are right with ACCEPTED[level]: tokens/s, and rounds, drafts and rows a
    token of a sequence."""
    mix = random_mix(batch, (PROMPT, PROMPT), (ANSWER, ANSWER), None, SHAPE["vocab_size"], 0)
    first = [item.prompt[0] - item.prompt[0] % len(ACCEPTED) + level for item in mix]
    answer = ANSWER // (1 + batch // 32)
    items = [((at, *item.prompt[1:]), answer, 0.0) for at, item in zip(first, mix, strict=True)]
    run, tokens = job.ask("mix", items=items), batch * (answer - 1)
    rounds = 1 - run["accepted"] / tokens
    return {
        "rate": sum(1 / seconds for seconds in run["between_s"]),
        "rounds": rounds,
        "rows": rounds + run["drafted"] / tokens,
        "accepted": run["accepted"] / max(1, run["drafted"]),
    }


def _asked_of(jobs: Mapping[str, BenchJob], kind: str, batch: int, level: int = 0) -> Row:
    return asked(jobs[kind], batch, level)


def drafts(site: Site, parallel: Row, delays_s: Sequence[float], batches: Sequence[int]) -> Iterator[Row]:
    """A row a delay, batch and level: each turn's `asked` by kind."""
    with ExitStack() as stack:
        jobs = {SILENT: stack.enter_context(site.job(SILENT, site.deployment("llama", SILENT)))}
        for kind, rule in RULES.items():
            deployment = site.deployment("llama", "standard", parallel, speculation=rule)
            jobs[kind] = stack.enter_context(site.job(kind, deployment, prompt=PROMPT, right=ACCEPTED))
        for delay_s in delays_s:
            for batch in batches:
                site.switch.link(0.0)
                for level, kind in ((level, kind) for level in range(len(ACCEPTED)) for kind in ("on", "auto")):
                    asked(jobs[kind], batch, level)  # records the answers
                site.switch.link(delay_s)
                for level, accepted in enumerate(ACCEPTED):
                    jobs["auto"].ask("forget")
                    asked(jobs["auto"], batch, level)
                    kinds = [kind for kind in jobs if kind != SILENT or not level]
                    turns = in_turns(kinds, TURNS, partial(_asked_of, jobs, batch=batch, level=level))
                    yield {
                        "layout": "pp 2" if parallel else "tp 2", "delay_s": delay_s, "batch": batch,
                        "accepted": accepted, **turns,
                    }  # fmt: skip


def _rates(line: Mapping[str, Any], kind: str) -> list[float]:
    return [run["rate"] for run in line[kind]]


def drafts_table(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """A row a batch and acceptance: `auto`'s crossings and rows a token (medians over the delays too); by delay its
    tokens/s, these over off's, and turn by turn over the better of on and off; what all drafts gain over the same rows
    none of which is right, of the law's tokens a round; and `auto` over the same ranks without communication and
    drafts. Of the last two the least and the most over the delays."""
    delays = sorted({line["delay_s"] for line in lines})
    cells: dict[tuple[str, int, float], dict[float, Mapping[str, Any]]] = {}
    for line in lines:
        cells.setdefault((line["layout"], line["batch"], line["accepted"]), {})[line["delay_s"]] = line
    rows = []
    for (layout, batch, accepted), by_delay in sorted(cells.items()):
        wrong = cells.get((layout, batch, 0.0), {})
        rounds, count = (median(run[key] for c in by_delay.values() for run in c["auto"]) for key in ("rounds", "rows"))
        of_law, of_silent = [], []
        for delay_s, line in by_delay.items():
            if accepted and delay_s in wrong:
                tokens = 1 / median(run["rounds"] for run in line["on"])
                of_law.append(median(_rates(line, "on")) / median(_rates(wrong[delay_s], "on")) / tokens)
            if SILENT in wrong.get(delay_s, {}):
                of_silent.append(median(_rates(line, "auto")) / median(_rates(wrong[delay_s], SILENT)))
        rows.append(
            (
                f"{layout}, {batch}, {accepted:.0%}",
                f"{rounds * CROSSINGS[layout]:.2f}",
                f"{count:.2f}",
                *(_drafts_cell(by_delay[delay_s]) if delay_s in by_delay else "-" for delay_s in delays),
                *(f"{min(shares):.2f} to {max(shares):.2f}" if shares else "-" for shares in (of_law, of_silent)),
            )
        )
    head = " | ".join(f"{delay_s * 1e3:g} ms" for delay_s in delays)
    return table(f"layout, batch, accepted | crossings | rows | {head} | of the law | over *silent*", rows)


def _drafts_cell(line: Mapping[str, Any]) -> str:
    off, on, auto = (_rates(line, kind) for kind in RULES)
    best = on if median(on) > median(off) else off
    of_best = [a / b for a, b in zip(auto, best, strict=True)]
    missed = "" if max(of_best) >= LEAST else ", missed"
    return f"{median(auto):.0f}; {median(auto) / median(off):.2f}; {spread(of_best, '.2f')}{missed}"


def mtp(site: Site, delays_s: Sequence[float]) -> Iterator[Row]:
    """A row a form and layout: tokens/s without drafts and with those of the predicting layer that pay."""
    from predictors import save

    for form, (family, calm) in FORMS.items():
        save(site.folder / family, family, calm, dtype="bfloat16", **MIXTURE, **SIZES[family])
        for layout, parallel in {"tp 2": {}, "pp 2": STAGES}.items():
            with ExitStack() as stack:
                jobs: dict[str, BenchJob] = {}
                for kind, rule in {"off": False, "mtp": "mtp"}.items():
                    deployment = site.deployment(family, "auto", parallel, speculation=rule)
                    deployment = replace(deployment, model=keys.ModelSection(str(site.folder / family)))
                    jobs[kind] = stack.enter_context(site.job(kind, deployment))
                for delay_s in delays_s:
                    site.switch.link(delay_s)
                    ask = partial(_asked_of, jobs, batch=1)
                    in_turns(jobs, 2, ask)
                    yield {"form": form, "layout": layout, "delay_s": delay_s, **in_turns(jobs, TURNS + 2, ask)}


def mtp_table(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = []
    for line in lines:
        off, drafted = _rates(line, "off"), _rates(line, "mtp")
        accepted, count = (median(run[key] for run in line["mtp"]) for key in ("accepted", "rows"))
        gain = [a / b for a, b in zip(drafted, off, strict=True)]
        where = f"{line['form']}, {line['layout']}, {line['delay_s'] * 1e3:g} ms"
        rows.append(
            (where, f"{accepted:.0%}", spread(off, ".1f"), spread(drafted, ".1f"), spread(gain, ".2f"), f"{count:.2f}")
        )
    return table("form, layout, one way | drafts accepted | off | mtp | mtp / off | rows", rows)
