"""A plan as tables of text, which the terminal and Markdown show alike, and as JSON. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from ...engine.step.memory import GIB
from .advice import describe
from .answer import Sheet, binary, headline, mixture_sheets, ms, verdicts
from .estimate import CapacityEstimate
from .layouts import MOST_SEQUENCES, Layout, by_cost

_CHEAPEST = 6
_RANK = {
    "replica": "group", "stage": "stage", "rank": "rank", "host": "hostname", "device": "device", "HCA": "hca",
    "path": "path", "NUMA": "numa", "cores": "cores",
}  # fmt: skip
_ALWAYS = ("replica", "rank", "host", "device")


def brief(plan: CapacityEstimate) -> tuple[Sheet, ...]:
    """The decisive figures, in 80 columns: where a rank's memory goes, how fast the layout is, and what is cheaper."""
    names = dict.fromkeys(("standard", plan.question.config.wiring.name, "ladder"))
    fitting = sorted({p.batch for p in plan.predictions if p.fits})
    batches = dict.fromkeys((*fitting[:1], *fitting[len(fitting) // 2 :][:1], *fitting[-1:]))
    decoding = _speeds(plan, [name for name in names if name in plan.wirings], batches)
    cheapest = [_layouts(plan, by_cost(plan.layouts)[:_CHEAPEST], "Cheapest layouts")] if plan.layouts else []
    return (_memory(plan), decoding, *cheapest, *mixture_sheets(plan), *verdicts(plan, priced=False)[:2])


def sheets(plan: CapacityEstimate) -> tuple[Sheet, ...]:
    """All tables, in the order in which they answer questions."""
    speeds = _speeds(plan, plan.wirings, sorted({p.batch for p in plan.predictions}))
    all_sheets = [_memory(plan), _depths(plan), speeds, _exposure(plan), _prefill(plan), _traffic(plan)]
    all_sheets += mixture_sheets(plan)
    if plan.layouts:
        all_sheets += [_layouts(plan, plan.layouts, "Layouts"), *verdicts(plan)]
    return (*all_sheets, _ranks(plan))


def _memory(plan: CapacityEstimate) -> Sheet:
    m = plan.memory
    shown = [(name, size) for name, size in m.parts.items() if size]
    rows = [(name, binary(size), f"{size / m.device_bytes:.1%}") for name, size in shown]
    rows.append(("KV cache", binary(m.kv_bytes), f"{m.kv_bytes / m.device_bytes:.1%}"))
    used = sum(m.parts.values()) + m.kv_bytes
    if m.device_bytes > used:
        rows.append(("not used", binary(m.device_bytes - used), f"{1 - used / m.device_bytes:.1%}"))
    rows.append(("total", binary(m.device_bytes), ""))
    note = f"KV takes {binary(m.kv_bytes_per_token)} per position and rank. {m.verdict[:1].upper()}{m.verdict[1:]}."
    return Sheet("Memory of a rank", ("part", "bytes", "share"), tuple(rows), 1, note)


def _depths(plan: CapacityEstimate) -> Sheet:
    rows = []
    for d in plan.depths:
        then = ms(d.step_s) if d.sequences else "-"
        rows.append((f"{d.context:,}", f"{d.sequences}{'+' if d.sequences == MOST_SEQUENCES else ''}", then))
    limit = plan.question.keys
    note = (
        f"The longest single sequence: {plan.memory.largest_context:,} positions by memory, "
        f"{plan.question.config.max_position_embeddings:,} by the model; configured: max_model_len "
        f"{limit.max_model_len:,}, max_num_seqs {limit.max_num_seqs}."
    )
    columns = ("context", "sequences that fit", "step ms")
    return Sheet("Context and batch", columns, tuple(rows), 1, note)


def _speeds(plan: CapacityEstimate, names: Sequence[str], batches: Iterable[int]) -> Sheet:
    by_key = {(p.wiring, p.batch): p for p in plan.predictions}
    rows = []
    for batch in batches:
        cells = [f"{batch}{'' if by_key[names[0], batch].fits else ' *'}"]
        for name in names:
            p = by_key[name, batch]
            cells.append(ms(p.time.total_s) + (f" ({p.speedup:.2f}x)" if name != "standard" else ""))
        rows.append(tuple(cells))
    note = "Milliseconds in which each running sequence gets a token, and how much faster than standard."
    if any(row[0].endswith("*") for row in rows):
        note += " *: these sequences do not fit."
    return Sheet("Decoding: ms per token", ("batch", *names), tuple(rows), 1, note)


def _exposure(plan: CapacityEstimate) -> Sheet:
    rows = []
    for p in plan.predictions:
        if p.batch in (1, 8, 64, 512) and p.wiring != "no-communication":
            t = p.time
            rows.append(
                (p.wiring, str(p.batch), ms(t.total_s), ms(t.compute_s), ms(t.flight_s), ms(t.hidden_s),
                 ms(t.waited_s), ms(t.slowed_s), f"{t.exposed_s / t.total_s:.0%}")
            )  # fmt: skip
    columns = ("wiring", "batch", "step ms", "compute", "in flight", "hidden", "waited", "slowed", "exposed of step")
    note = "Exposed = waits, and computation slowed by a concurrent collective."
    return Sheet("What is hidden", columns, tuple(rows), 1, note)


def _prefill(plan: CapacityEstimate) -> Sheet:
    rows = []
    for p in plan.prefills:
        share = f"{p.time.exposed_s / p.time.total_s:.0%}"
        rows.append((f"{p.tokens:,}", p.wiring, ms(p.time.total_s), f"{p.tokens_per_s:,.0f}", share))
    return Sheet("One prompt alone", ("tokens", "wiring", "ms", "tokens/s", "exposed"), tuple(rows), 2)


def _traffic(plan: CapacityEstimate) -> Sheet:
    rows = []
    for t in plan.traffic:
        if t.wiring == "no-communication":
            continue
        ratio = f"{t.all_reduce_s / t.sub_block_s:.2f}" if t.sub_block_s else "-"
        rows.append(
            (t.wiring, str(t.batch), str(t.messages), binary(t.message_bytes), t.strategy, binary(t.intra_bytes),
             binary(t.inter_bytes), f"{t.all_reduce_s * 1e6:.0f}", f"{t.sub_block_s * 1e6:.0f}", ratio, f"{t.law:.2f}x")
        )  # fmt: skip
    columns = (
        "wiring", "batch", "messages", "each", "strategy", "inside node", "between nodes", "L us", "c us", "L/c",
        "law's most",
    )  # fmt: skip
    note = "A decode step of one rank: L is one all-reduce, c a mean sub-block; the law: (c + L) / max(c, (c + L) / 2)."
    return Sheet("Bytes and messages a step", columns, tuple(rows), 1, note)


def _layouts(plan: CapacityEstimate, candidates: Sequence[Layout], title: str) -> Sheet:
    rows = []
    for x in candidates:
        name, weights = describe(x).replace(" replicas of ", " x "), f"{x.memory.weight_bytes / GIB:.1f}"
        best, quick = x.cheapest, x.fastest
        if best is None or quick is None:
            rows.append((name, weights, "-", "-", "-", "-", "-"))
            continue
        kv_tokens = f"{x.memory.kv_tokens * x.replicas:,}"
        speed = (f"{quick.step_s * 1e3:.1f}", f"{best.batch:,}", f"{best.output_per_s:,.0f}", f"{best.dollars:.2f}")
        rows.append((name, weights, kv_tokens, *speed))
    columns = ("layout", "GiB", "KV tokens", "ms", "batch", "tokens/s", "$/million")
    work = plan.question.work
    note = (
        "GiB: weights of a rank; -: does not fit; KV tokens: of all replicas; ms: per token at batch 1; then the batch "
        f"with most output tokens/s, each request's prompt of {work.prompt} included, and their price at "
        f"${work.gpu_hour:g} per GPU hour. Ladder needs weights trained for it."
    )
    return Sheet(f"{title} of these GPUs", columns, tuple(rows), 1, note)


def _ranks(plan: CapacityEstimate) -> Sheet:
    shown = [(n, key) for n, key in _RANK.items() if n in _ALWAYS or any(r[key] for r in plan.ranks)]
    rows = tuple(tuple(str(r[key]) for _, key in shown) for r in plan.ranks)
    return Sheet("Ranks", tuple(name for name, _ in shown), rows, len(shown))


def markdown(plan: CapacityEstimate) -> str:
    """The whole plan as Markdown, the same for the same question."""
    lines = [f"**{headline(plan)}.**", ""]
    lines += [f"- {sentence}" for sentence in plan.recommendation]
    for sheet in sheets(plan):
        lines += ["", *sheet_lines(sheet)] if sheet.rows else []
    lines += ["", "## Assumptions", ""]
    lines += [f"- {text}" for text in plan.assumptions]
    return "\n".join(lines) + "\n"


def sheet_lines(sheet: Sheet) -> list[str]:
    lines = [f"## {sheet.title}", "", _line(sheet.columns)]
    lines.append("|" + "|".join("---" if i < sheet.left else "---:" for i in range(len(sheet.columns))) + "|")
    lines += [_line(row) for row in sheet.rows]
    return [*lines, "", sheet.note] if sheet.note else lines


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def as_json(plan: CapacityEstimate) -> dict[str, Any]:
    """The plan's numbers in base units, and its sentences."""
    q, m = plan.question, plan.memory
    return {
        "model": q.name,
        "parameters": q.config.num_parameters,
        "wiring": q.config.wiring.name,
        "stored": q.stored.summary(),
        "tensor_parallel_size": q.placement.world.tp,
        "replicas": q.placement.world.replicas,
        "stages": q.placement.world.stages,
        "fits": m.fits,
        "verdict": m.verdict,
        "memory": {**asdict(m), "weight_bytes": m.weight_bytes, "largest_context": m.largest_context},
        "ranks": plan.ranks,
        "traffic": [{**asdict(t), "law": t.law} for t in plan.traffic],
        "decoding": [
            {**asdict(p), "tokens_per_s": p.tokens_per_s, "hidden_s": p.time.hidden_s, "exposed_s": p.time.exposed_s}
            for p in plan.predictions
        ],
        "prefill": [{**asdict(p), "tokens_per_s": p.tokens_per_s} for p in plan.prefills],
        "contexts": [{**asdict(d), "tokens_per_s": d.tokens_per_s} for d in plan.depths],
        "layouts": [
            {
                "layout": describe(x), "tp": x.tp, "replicas": x.replicas, "stages": x.stages, "gpus": x.gpus,
                "stored": x.stored.summary(), "wiring": x.wiring.name, "fits": bool(x.speeds),
                "weight_bytes": x.memory.weight_bytes, "kv_tokens": x.memory.kv_tokens,
                "speeds": [asdict(s) for s in x.speeds],
                "contexts": [{**asdict(d), "tokens_per_s": d.tokens_per_s} for d in x.depths],
            }
            for x in plan.layouts
        ],
        "expert_layouts": [
            {
                "layout": x.name, "keys": x.keys, "refused": x.refused, "messages": x.messages, "sent": x.sent,
                "step_s": x.step_s, "weight_bytes": x.memory and x.memory.weight_bytes, "built": x.built,
            }
            for x in plan.mixtures
        ],
        "recommendation": list(plan.recommendation),
        "assumptions": list(plan.assumptions),
    }  # fmt: skip
