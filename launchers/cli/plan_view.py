"""A plan on the terminal."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...engine.estimate.estimate import CapacityEstimate
from ...engine.estimate.tables import Sheet, headline, sheets


def plan_view(plan: CapacityEstimate) -> RenderableType:
    """Headline, tables, what it rests on, and the advice last, where the eye is."""
    style = "bold green" if plan.memory.fits else "bold red"
    parts: list[RenderableType] = [Text(headline(plan), style=style), Text()]
    for sheet in sheets(plan):
        if sheet.rows:
            parts += [sheet_view(sheet), Text()]
    parts.append(Text("What this rests on", style="bold"))
    parts += [Text(f"  {text}", style="dim") for text in plan.assumptions]
    parts += [Text(), Text("Advice", style="bold")]
    parts += [Text(f"  {sentence}") for sentence in plan.recommendation]
    return Group(*parts)


def sheet_view(sheet: Sheet) -> RenderableType:
    """One table with its note."""
    table = Table(title=sheet.title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1))
    for i, name in enumerate(sheet.columns):
        table.add_column(name, justify="left" if i < sheet.left else "right", no_wrap=True)
    for row in sheet.rows:
        table.add_row(*row)
    return Group(table, Text(sheet.note, style="dim")) if sheet.note else table
