"""Preflight's outcome on a terminal: links, all-reduces by size, and what is wrong."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from ...topology.cost.fit import Fit
from .preflight import PreflightOutcome

_MARKS = {"error": "red", "warning": "yellow"}


def size_name(nbytes: int) -> str:
    for unit, scale in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= scale:
            return f"{nbytes / scale:.4g} {unit}"
    return f"{nbytes} B"


def links_table(outcome: PreflightOutcome) -> Table:
    host = {r.rank: r.hostname for r in outcome.reports}
    table = Table(
        "link", "rail", "one way", "rate", title=f"Links, {outcome.carrier}, point to point", title_justify="left"
    )
    for link in outcome.links:
        pair = link.pair
        table.add_row(
            f"{host[pair.a]} rank {pair.a} - {host[pair.b]} rank {pair.b}",
            "" if pair.rail is None else str(pair.rail),
            f"{link.latency_s * 1e6:.1f} us",
            f"{link.bytes_per_s / 1e9:.2f} GB/s",
        )
    return table


def sweep_table(fitted: Fit, backend: str) -> Table:
    """Microseconds of every strategy, the fastest of a size marked, and what the fitted model says of it."""
    residuals = fitted.residuals
    strategies = list(dict.fromkeys(r.point.strategy for r in residuals))
    title = f"All-reduces, {backend}, us (the cost model's)"
    table = Table("size", *strategies, title=title, title_justify="left")
    for nbytes in sorted({r.point.nbytes for r in residuals}):
        row = {r.point.strategy: r for r in residuals if r.point.nbytes == nbytes}
        best = min(r.point.seconds for r in row.values())
        cells = []
        for strategy in strategies:
            r = row.get(strategy)
            if r is None:
                cells.append("")
                continue
            text = f"{r.point.seconds * 1e6:.1f} ({r.predicted_s * 1e6:.1f})"
            cells.append(f"[bold]{text}[/]" if r.point.seconds == best and len(row) > 1 else text)
        table.add_row(size_name(nbytes), *cells)
    return table


def show(outcome: PreflightOutcome, saved: Path | None, console: Console | None = None) -> None:
    """Prints everything; findings last, where they are read."""
    # mpirun hands ranks a terminal of its own making: neither its width nor its colours are the user's
    console = console or Console(highlight=False, width=120, force_terminal=False)
    nodes = len(outcome.fabric.nodes)
    ranks = len(outcome.reports)
    console.print(f"{ranks} rank{'s' if ranks > 1 else ''} on {nodes} node{'s' if nodes > 1 else ''}")
    if outcome.links:
        console.print(links_table(outcome))
    if outcome.fitted is not None:
        console.print(sweep_table(outcome.fitted, outcome.backend))
        if ranks > (size := outcome.shape.size):
            first = outcome.group * size
            console.print(f"of {ranks // size} groups the slowest: ranks {first} to {first + size - 1}")
        console.print(f"cost model: {outcome.fitted.report()}", markup=False)
    else:
        console.print("tensor_parallel_size is 1: no all-reduce to measure, no tuning file to write")
    slowest = max(outcome.reports, key=lambda r: r.matmul_s)
    console.print(f"slowest matmul: {slowest.matmul_s * 1e3:.2f} ms, rank {slowest.rank} on {slowest.hostname}")
    for finding in outcome.findings:
        console.print(str(finding), style=_MARKS[finding.severity], markup=False, soft_wrap=True)
    if saved is not None:
        console.print(f"saved {saved}: name it as parallel.tuning_file", soft_wrap=True)
    elif outcome.broken:
        console.print("no tuning file: a broken fabric is not worth one", style="red")
