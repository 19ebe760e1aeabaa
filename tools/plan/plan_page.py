"""A plan as one self-contained HTML page: style, plots and tables inside, no script, nothing fetched."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import Path

from ...engine.step.memory import GIB
from .advice import describe
from .answer import Sheet, basis, headline
from .charts import ChartSeries, Stack, lines, stacks
from .estimate import CapacityEstimate
from .layouts import Layout, by_cost
from .tables import sheets

COLOURS = {
    "standard": "--c1",
    "standard, split": "--c8",
    "ladder": "--c2",
    "hybrid": "--c3",
    "parallel": "--c4",
    "no-communication": "--c5",
}
PALETTE = ("--c1", "--c2", "--c3", "--c4", "--c6", "--c7", "--c8", "--c5")
MEMORY = {
    "weights": "--c1",
    "KV cache": "--c2",
    "activations, buffers": "--c4",
    "CUDA": "--c6",
    "reserve": "--c5",
}
STEP = {"computing": "--c1", "slowed": "--c3", "waited": "--c7"}
LISTED = 8

STYLE = Path(__file__).with_name("plan_page.css")


def plan_page(plan: CapacityEstimate) -> str:
    """The page's text. The same plan gives the same bytes."""
    q, room, style = plan.question, plan.memory, STYLE.read_text(encoding="utf-8")
    title, facts, _ = headline(plan).split(": ", 2)
    verdict = f'<span class="verdict {"good" if room.fits else "bad"}">{escape(room.verdict)}</span>'
    advice = "".join(f"<li>{escape(s)}</li>" for s in plan.recommendation)
    rests = "".join(f"<li>{escape(s)}</li>" for s in plan.assumptions)
    tables = "".join(_table(sheet) for sheet in sheets(plan) if sheet.rows)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>Plan of {escape(q.name)}</title><style>\n{style}</style></head><body><main>"
        f'<h1>{escape(title)}</h1><p class="sub">{escape(facts)}</p><p>{verdict}</p>'
        f'<p class="sub">{escape(basis(plan))}</p>'
        f'<div class="advice"><ul>{advice}</ul></div><div class="plots">{"".join(_plots(plan))}</div>{tables}'
        f'<h2>What this rests on</h2><ul class="small">{rests}</ul></main></body></html>\n'
    )


def _plots(plan: CapacityEstimate) -> list[str]:
    speed = [
        ChartSeries(name, tuple((p.batch, p.tokens_per_s) for p in plan.predictions if p.wiring == name and p.fits),
               COLOURS.get(name, "--c6"), name == "no-communication")
        for name in plan.wirings
    ]  # fmt: skip
    found = [
        ("Memory of a rank", _memory_plot(plan), "The line is what the device has."),
        ("Decoding on this layout", lines(speed, "sequences at once", "tokens/s"), "One replica, by wiring."),
    ]
    if any(t.messages for t in plan.traffic):
        note = "Slowed and waited are what communication costs."
        found.append(("Where a step's time goes", _step_plot(plan), note))
    shown = _listed(plan)
    if len(shown) > 1:
        output, dollars = [], []
        for i, layout in enumerate(shown):
            name, colour, dashed = _brief(layout), PALETTE[i % len(PALETTE)], layout.stages > 1
            output.append(ChartSeries(name, tuple((s.batch, s.output_per_s) for s in layout.speeds), colour, dashed))
            dollars.append(ChartSeries(name, tuple((s.batch, s.dollars) for s in layout.speeds), colour, dashed))
        w, x = plan.question.work, "sequences at once"
        note = f"Prompts of {w.prompt} and answers of {w.output} tokens; dashed: pipelines."
        price = f"${w.gpu_hour:g} a GPU hour."
        found += [
            ("Layouts of the same GPUs", lines(output, x, "output tokens/s"), note),
            ("What a million output tokens costs", lines(dollars, x, "dollars"), price),
        ]
    return [_figure(title, plot, note) for title, plot, note in found if plot]


def _listed(plan: CapacityEstimate) -> list[Layout]:
    """The layout asked about and the cheapest few that run, in the table's order."""
    running = [x for x in plan.layouts if x.cheapest]
    kept = by_cost(running)[: LISTED - 1]
    return [x for x in running if x in kept or x.key == plan.question.key]


def _brief(layout: Layout) -> str:
    pipeline = f" pp{layout.stages}" if layout.stages > 1 else ""
    many = f"{layout.replicas}x " if layout.replicas > 1 else ""
    kind = layout.stored.weights.replace("bfloat16", "bf16").replace("float", "fp")
    return f"{many}tp{layout.tp}{pipeline} {kind} {layout.wiring.name}"


def _memory_plot(plan: CapacityEstimate) -> str:
    """This layout's rank, and one of each other layout: a wiring takes no memory."""
    p, q = plan.question.placement, plan.question
    pipeline = f" x pp {p.stages}" if p.stages > 1 else ""
    bars = [
        _bar(
            f"tp {p.tensor_parallel_size}{pipeline}, {q.stored.weights} (asked about)",
            plan.memory.parts,
            plan.memory.kv_bytes,
        )
    ]
    others = {(x.tp, x.stages, x.stored): x for x in reversed(plan.layouts)}
    others.pop((p.tensor_parallel_size, p.stages, q.stored), None)
    for layout in list(reversed(others.values()))[:LISTED]:
        name = describe(layout).rpartition(", ")[0]
        bars.append(_bar(name, layout.memory.parts, layout.memory.kv_bytes))
    return stacks(bars, MEMORY, "GiB", ("there is", plan.memory.device_bytes / GIB))


def _bar(name: str, parts: Mapping[str, int], kv: int) -> Stack:
    sums = dict.fromkeys(MEMORY, 0.0)
    for part, size in parts.items():
        kind = (
            "weights" if part.startswith("weights") else "reserve" if part == "reserve"
            else "CUDA" if part.startswith(("CUDA", "NCCL")) else "activations, buffers"
        )  # fmt: skip
        sums[kind] += size / GIB
    sums["KV cache"] = kv / GIB
    return Stack(name, tuple(sums.items()), f"{sum(sums.values()):.1f}")


def _step_plot(plan: CapacityEstimate) -> str:
    bars = []
    fitting = sorted({p.batch for p in plan.predictions if p.fits})
    batches = dict.fromkeys((fitting[0], fitting[len(fitting) // 2], fitting[-1])) if fitting else {}
    for batch in batches:
        for p in plan.predictions:
            if p.batch == batch and p.wiring in ("standard", "hybrid", "ladder", "parallel"):
                t = p.time
                parts = (("computing", t.compute_s * 1e3), ("slowed", t.slowed_s * 1e3), ("waited", t.waited_s * 1e3))
                bars.append(Stack(f"{p.wiring}, {batch}", parts, f"{t.total_s * 1e3:.1f}"))
    return stacks(bars, STEP, "ms a step")


def _figure(title: str, plot: str, note: str) -> str:
    return f"<figure><figcaption>{escape(title)}</figcaption>{plot}<p>{escape(note)}</p></figure>"


def _table(sheet: Sheet) -> str:
    def row(tag: str, cells: tuple[str, ...]) -> str:
        left = ' class="l"'
        return "".join(f"<{tag}{left if i < sheet.left else ''}>{escape(c)}</{tag}>" for i, c in enumerate(cells))

    body = "".join(f"<tr>{row('td', cells)}</tr>" for cells in sheet.rows)
    note = f'<p class="sub">{escape(sheet.note)}</p>' if sheet.note else ""
    return (
        f'<h2>{escape(sheet.title)}</h2><div class="wide"><table><thead><tr>{row("th", sheet.columns)}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>{note}"
    )
