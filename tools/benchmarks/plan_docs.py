"""Writes docs/plans: two plans as Markdown, an index of the plans of all shipped deployments, and the simulator's
validation; and draws docs/pictures/regions.svg. `make plans`; the same configurations give the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import simulate_published
from common import renewed, svg, table
from laddertron.engine.config.load import read
from laddertron.tools.plan.estimate import CapacityEstimate, devices_of, make_plan
from laddertron.tools.plan.layouts import Layout, Work, layouts
from laddertron.tools.plan.plan_source import Asked, from_deployment, from_names
from laddertron.tools.plan.plan_view import plan_view
from laddertron.tools.plan.tables import markdown
from laddertron.topology.hardware.fabric import LinkClass
from laddertron.topology.hardware.presets import preset
from rich.console import Console

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "plans"
CONFIGS = [path for kind in ("405b/*", "llama-*", "demo*") for path in sorted((ROOT / "configs").glob(f"{kind}.yaml"))]
SAMPLES = ("405b/ladder", "405b/stock")
"""Plans that are written in full."""

LINKS: Mapping[str, tuple[LinkClass, float]] = {
    "InfiniBand, 400 Gbit/s a GPU": ("ib", 50e9),
    "RoCE, 100 Gbit/s a GPU": ("roce", 12.5e9),
    "TCP, 25 Gbit/s a GPU": ("tcp", 3.1e9),
}
KINDS = {
    "bf16, stock": ("bfloat16", "standard"),
    "bf16, ladder": ("bfloat16", "ladder"),
    "fp8, stock": ("fp8", "standard"),
    "fp8, ladder": ("fp8", "ladder"),
}
ACROSS, STAGES, INSIDE, NONE = "tensor parallel across nodes", "pipeline across nodes", "replicas in nodes", "no room"
COLOURS = {ACROSS: "#0f8a6a", STAGES: "#3b6fc4", INSIDE: "#c77d0a", NONE: "#e3e6ea"}
CONTEXTS, BATCHES = tuple(1024 << i for i in range(8)), Work().batches


def written() -> dict[str, str]:
    """Every file's text by its name. In the pages that have prose, the part between the two comments is replaced."""
    plans = {_name(c): make_plan(from_deployment(read(c), Asked(None, Work()))) for c in CONFIGS}
    texts = {_page(name): f"# {name}\n\n{markdown(plans[name])}" for name in SAMPLES}
    validation = simulate_published.report()
    for name, lines in (("README.md", _index(plans)), ("validation.md", validation)):
        texts[name] = renewed((FOLDER / name).read_text(encoding="utf-8"), lines)
    return texts


def _name(config: Path) -> str:
    return config.relative_to(ROOT / "configs").with_suffix("").as_posix()


def _page(name: str) -> str:
    return f"{name.replace('/', '-')}.md"


def _index(plans: Mapping[str, CapacityEstimate]) -> list[str]:
    rows = []
    for name, plan in plans.items():
        world, own = plan.question.placement.world, plan.question.config.wiring.name
        alone = next(x.time.total_s for x in plan.predictions if x.batch == 1 and x.wiring == own)
        stages, copies = f" x pp {world.stages}" * (world.stages > 1), f" x {world.replicas}" * (world.replicas > 1)
        fits = f"{plan.memory.kv_tokens:,} KV positions" if plan.memory.fits else "no"
        shown = f"[{name}]({_page(name)})" if name in SAMPLES else name
        ranks = f"tp {world.tp}{stages}{copies}"
        rows.append((shown, ranks, fits, f"{alone * 1e3:.1f}", plan.recommendation[0]))
    console = Console(width=80, color_system=None, highlight=False)
    with console.capture() as captured:
        console.print(plan_view(plans[SAMPLES[1]], all_tables=False))
    view = ["", f"`laddertron plan configs/{SAMPLES[1]}.yaml` in a terminal of 80 columns:", "", "```"]
    view += map(str.rstrip, captured.get().splitlines())
    return [*table("plan | ranks | fits | ms per token, batch 1 | advice", rows), *view, "```"]


def crossing(candidates: Sequence[Layout], kind: tuple[str, str], batch: int, per_node: int) -> str:
    """How the layout with most output tokens a second, so the cheapest, crosses nodes, for these weights."""
    mine = [x for x in candidates if (x.stored.weights, x.wiring.name) == kind]
    offers = [(s.output_per_s, x.tp, x.stages) for x in mine for s in x.speeds if s.batch == batch]
    _, tp, stages = max(offers, default=(0.0, 0, 0))
    return NONE if not offers else ACROSS if tp > per_node else STAGES if tp * stages > per_node else INSIDE


def regions(model: str, nodes: str, link: str) -> dict[str, list[list[str]]]:
    """`crossing` by the name of KINDS: a row for each of CONTEXTS, a column for each of BATCHES."""
    q = from_names(model, Asked(preset(nodes), Work()), (f"model.max_model_len={CONTEXTS[-1]}",))
    inter, rate = LINKS[link]
    devices = devices_of(replace(q, shape=replace(q.shape, inter=inter, inter_bytes_per_s=rate)))
    rows: dict[str, list[list[str]]] = {name: [] for name in KINDS}
    for context in CONTEXTS:
        work = replace(q.work, prompt=context - q.work.output // 2, contexts=())
        candidates = layouts(q.config, devices.total, q.stored, q.keys, devices, work)
        for name, kind in KINDS.items():
            rows[name].append([crossing(candidates, kind, batch, devices.per_node) for batch in BATCHES])
    return rows


def draw(path: Path, model: str, nodes: str) -> None:
    """Draws the regions: a panel for each link (across) and kind of weights (down)."""
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(11, 9), layout="constrained")
    panels = figure.subplots(len(KINDS), len(LINKS), sharex=True, sharey=True)
    names, colours = list(COLOURS), ListedColormap(list(COLOURS.values()))
    for column, link in zip(panels.T, LINKS, strict=True):
        column[0].set_title(link, fontsize="medium")
        for axes, (kind, rows) in zip(column, regions(model, nodes, link).items(), strict=True):
            cells = [[names.index(how) for how in row] for row in rows]
            axes.imshow(cells, cmap=colours, vmin=-0.5, vmax=len(names) - 0.5, aspect="auto", interpolation="nearest")
            axes.set_xticks(range(len(BATCHES)), list(map(str, BATCHES)), fontsize="x-small")
            axes.set_yticks(range(len(CONTEXTS)), [f"{n >> 10}k" for n in CONTEXTS])
            axes.set_ylabel(kind)
            axes.label_outer()
    axes_are = "across: concurrent sequences; down: positions of context of each"
    figure.suptitle(f"{model} on {nodes}: the cheapest layout a token\n{axes_are}", fontsize="medium")
    handles = [Patch(color=colour, label=name) for name, colour in COLOURS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    path.write_text(svg(figure))


def main() -> None:
    texts = written()
    for name, text in texts.items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    draw(ROOT / "docs" / "pictures" / "regions.svg", "llama-3.1-405b", "2x8xH100")
    print(f"{len(texts)} files in {FOLDER}")


if __name__ == "__main__":
    main()
