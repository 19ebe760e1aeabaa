"""A plan on the terminal."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from .answer import Sheet, basis, headline
from .estimate import CapacityEstimate
from .tables import brief, sheets


def plan_view(plan: CapacityEstimate, all_tables: bool) -> RenderableType:
    """Assumptions, verdict, advice and a few tables of 80 columns; `all_tables`: all tables."""
    style = "bold green" if plan.memory.fits else "bold red"
    parts: list[RenderableType] = [Text(basis(plan), style="dim"), Text(headline(plan), style=style), Text()]
    parts += [Padding(Text(f"- {sentence}"), (0, 0, 0, 2)) for sentence in plan.recommendation]
    for sheet in sheets(plan) if all_tables else brief(plan):
        if sheet.rows:
            parts += [Text(), sheet_view(sheet)]
    if not all_tables:
        return Group(*parts, Text("--all: every table, and the assumptions", style="dim"))
    parts += [Text(), Text("Assumptions", style="bold")]
    return Group(*parts, *(Text(f"  {text}", style="dim") for text in plan.assumptions))


def sheet_view(sheet: Sheet) -> RenderableType:
    table = Table(
        title=sheet.title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for i, name in enumerate(sheet.columns):  # words behind a row's name may be folded, numbers never
        table.add_column(name, justify="left" if i < sheet.left else "right", no_wrap=i == 0 or i >= sheet.left)
    for row in sheet.rows:
        table.add_row(*row)
    return Group(table, Text(sheet.note, style="dim")) if sheet.note else table
