"""docs/plans: the plan of every shipped deployment as Markdown, with an index, some as pages; scaling and fleets beside
them; and docs/pictures/regions.svg. `make plans`; the same configurations give the same bytes.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from common import renewed
from laddertron.engine.config.load import read
from laddertron.tools.plan.estimate import CapacityEstimate, make_plan
from laddertron.tools.plan.layouts import Work
from laddertron.tools.plan.plan_page import plan_page
from laddertron.tools.plan.plan_source import Asked, from_deployment, from_names
from laddertron.tools.plan.plan_view import plan_view
from laddertron.tools.plan.simulations import FleetAsked, fleet, scaling, scaling_sheet
from laddertron.tools.plan.tables import markdown, sheet_lines
from laddertron.topology.hardware.presets import preset
from plan_regions import picture
from rich.console import Console

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "plans"
CONFIGS = [path for kind in ("llama-*", "demo*") for path in sorted((ROOT / "configs").glob(f"{kind}.yaml"))]
PAGES = ("llama-3.1-405b-tp16", "llama-3.1-405b-tp16-ladder")
"""Plans that are written as a page as well."""

EXTRA = {
    "llama-3.1-405b-4-nodes-ladder": ("llama-3.1-405b", "4x8xH100", "ladder", 32),
    "llama-3.1-405b-h200": ("llama-3.1-405b", "1x8xH200", "auto", 8),
}
"""Planned though no file deploys them: the questions that come next."""


def all_plans() -> dict[str, CapacityEstimate]:
    """By name: one a deployment file, then EXTRA."""
    plans = {c.stem: make_plan(from_deployment(read(c), Asked(None, Work()))) for c in CONFIGS}
    for name, (model, fabric, wiring, size) in EXTRA.items():
        plans[name] = make_plan(from_names(model, Asked(preset(fabric), Work()), wiring, size))
    return plans


def written() -> dict[str, str]:
    """Every file's text by its name. Of the two pages that are prose as well, what stands between their comments."""
    plans = all_plans()
    texts = {f"{name}.md": f"# {name}\n\n{markdown(plan)}" for name, plan in plans.items()}
    texts |= {f"{name}.html": plan_page(plans[name]) for name in PAGES if name in plans}
    texts["../pictures/regions.svg"] = picture("llama-3.1-405b", "2x8xH100")
    for name, lines in (("fleets.md", fleets()), ("README.md", _index(plans))):
        texts[name] = renewed((FOLDER / name).read_text(encoding="utf-8"), lines)
    return texts


def fleets() -> list[str]:
    """405B over 1 to 16 nodes, and on a thousand."""
    model = "llama-3.1-405b"
    sheets = [scaling_sheet(model, batch, 1280, scaling(model, "16x8xH100", batch, 1280)) for batch in (1, 8, 64)]
    whole = FleetAsked(model, "1000x8xH100", 80_000)
    fragile = replace(whole, requests=40_000, output=4096, mtbf_hours=100.0)
    sheets += [fleet(asked)[1] for asked in (whole, replace(whole, wiring="ladder"), fragile)]
    return [line for sheet in sheets for line in (*sheet_lines(sheet), "")][:-1]


def _index(plans: dict[str, CapacityEstimate]) -> list[str]:
    lines = ["| plan | ranks | fits | ms a token, alone | advice |", "|---|---|---|---|---|"]
    for name, plan in plans.items():
        p, own = plan.question.placement, plan.question.config.wiring.name
        alone = next(x.time.total_s for x in plan.predictions if x.batch == 1 and x.wiring == own)
        page = f" ([page]({name}.html))" if name in PAGES else ""
        ranks = (
            f"tp {p.tensor_parallel_size}"
            + (f" x pp {p.stages}" if p.stages > 1 else "")
            + (f" x {p.replicas}" if p.replicas > 1 else "")
        )
        fits = f"{plan.memory.kv_tokens:,} KV positions" if plan.memory.fits else "no"
        lines.append(f"| [{name}]({name}.md){page} | {ranks} | {fits} | {alone * 1e3:.1f} | {plan.recommendation[0]} |")
    shown = next(name for name in PAGES if name in plans)
    console = Console(width=80, color_system=None, highlight=False)
    with console.capture() as captured:
        console.print(plan_view(plans[shown], whole=False))
    lines += ["", f"`laddertron plan configs/{shown}.yaml` in a terminal of 80 columns:", "", "```"]
    return [*lines, *map(str.rstrip, captured.get().splitlines()), "```"]


def main() -> None:
    texts = written()
    for name, text in texts.items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    print(f"{len(texts)} files in {FOLDER}")


if __name__ == "__main__":
    main()
