"""A plan as one self-contained HTML page: style, plots and tables inside, no script, nothing fetched."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from ...engine.estimate.advice import describe
from ...engine.estimate.answer import Sheet, basis, headline
from ...engine.estimate.estimate import CapacityEstimate
from ...engine.estimate.layouts import Layout, by_cost
from ...engine.estimate.memory import GIB
from ...engine.estimate.step_simulator import law
from ...engine.estimate.tables import sheets
from .charts import ChartSeries, Stack, law_plot, lines, stacks

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

STYLE = """
:root{--bg:#fff;--ink:#1b1f24;--muted:#6a727c;--rule:#e3e6ea;--soft:#f6f7f9;--good:#1a7f4b;--bad:#b42318;
--c1:#5b6b7f;--c2:#0f8a6a;--c3:#c77d0a;--c4:#3b6fc4;--c5:#b9c0c9;--c6:#8a5fbf;--c7:#c2413b;--c8:#2a9fb0}
@media (prefers-color-scheme:dark){:root{--bg:#15181c;--ink:#e6e9ed;--muted:#98a1ac;--rule:#2c3239;--soft:#1d2126;
--good:#4cc38a;--bad:#ff6b5e;--c1:#9fb0c6;--c2:#35c79b;--c3:#f0a93b;--c4:#7aa5f0;--c5:#5a636e;--c6:#b892ea;
--c7:#f0776f;--c8:#5cc9d8}}
*{box-sizing:border-box}body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
main{max-width:1120px;margin:0 auto;padding:28px 20px 60px}
h1{font-size:22px;margin:0 0 2px}h2{font-size:16px;margin:34px 0 8px}
p{margin:6px 0}.sub{color:var(--muted)}.verdict{font-weight:600}.good{color:var(--good)}.bad{color:var(--bad)}
.advice{background:var(--soft);border-left:3px solid var(--c2);padding:10px 16px;margin:16px 0}.advice li{margin:4px 0}
.advice ul{margin:0;padding-left:18px}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(430px,1fr));gap:26px 34px}
figure{margin:0}figcaption{font-weight:600;margin-bottom:4px}figure p{color:var(--muted);font-size:13px;margin:2px 0 0}
svg{width:100%;height:auto;display:block}.t{font:11.5px system-ui,sans-serif;fill:var(--ink)}.t.muted{fill:var(--muted)}
.grid{stroke:var(--rule);stroke-width:1}.limit{stroke:var(--bad);stroke-width:1.5;stroke-dasharray:4 3}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:13px;font-variant-numeric:tabular-nums;white-space:nowrap}
th{font-weight:600;color:var(--muted);border-bottom:1px solid var(--rule)}th,td{padding:3px 12px 3px 0;text-align:right}
td{border-bottom:1px solid var(--soft)}.l{text-align:left}ul.small{color:var(--muted);font-size:13px}
@media (max-width:520px){.plots{grid-template-columns:1fr}}
"""


def plan_page(plan: CapacityEstimate) -> str:
    """The page's text. The same plan gives the same bytes."""
    q, room = plan.question, plan.memory
    title, facts, _ = headline(plan).split(": ", 2)
    verdict = f'<span class="verdict {"good" if room.fits else "bad"}">{escape(room.verdict)}</span>'
    advice = "".join(f"<li>{escape(s)}</li>" for s in plan.recommendation)
    rests = "".join(f"<li>{escape(s)}</li>" for s in plan.assumptions)
    tables = "".join(_table(sheet) for sheet in sheets(plan) if sheet.rows)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>Plan of {escape(q.name)}</title><style>{STYLE}</style></head><body><main>"
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
        found += [
            ("Where a step's time goes", _step_plot(plan), "Slowed and waited are what communication costs."),
            ("Ladder beside its law", _law_points(plan), "By batch. Contention and the ends keep it below."),
        ]
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


def _law_points(plan: CapacityEstimate) -> str:
    points = []
    for p in plan.predictions:
        if p.wiring != "ladder" or not p.fits or not p.time.collectives:
            continue
        layers = 2 * plan.question.config.num_layers
        ratio = p.time.flight_s / p.time.collectives / (p.time.compute_s / layers)
        points.append((f"{p.batch}", ratio, p.speedup, "--c2"))
    return law_plot(points, lambda x: law(1.0, x))


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
