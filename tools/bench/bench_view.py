"""Prints and draws the measurements of `laddertron bench`. Takes plain rows, the same that --json writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from rich.box import SIMPLE
from rich.table import Table

from .bench_measure import Row
from .picture import picture


def _figure(spread: Sequence[float], digits: int = 1) -> str:
    """The median, and half the distance between the lowest and the highest."""
    median, low, high = spread
    half = f"±{(high - low) / 2 / median:.0%}" if median else ""
    return f"[bold]{median:,.{digits}f}[/] [dim]{half}[/]"


def case_table(rows: Sequence[Row]) -> Table:
    """One line a case: rates, the share of the floor, what was hidden; within 80 columns."""
    table = Table(
        title="tokens a second: median, ± half the spread of the runs; ms a step",
        title_style="dim", title_justify="left", padding=(0, 1, 0, 0), pad_edge=False, box=SIMPLE,
    )  # fmt: skip
    table.add_column("variant", min_width=14)
    for name in ("batch", "tokens", "prefill", "decode", "ms", "share", "hidden"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row["variant"],
            str(row["batch"]),
            f"{row['prompt']}+{row['generate']}",
            _figure(row["prefill_tok_s"], 0),
            _figure(row["decode_tok_s"], int(row["decode_tok_s"][0] < 1000)),
            f"{row['step_ms'][0]:,.1f}",
            "" if row["floor_share"] is None else f"{row['floor_share']:.0%}",
            "" if row["hidden_share"] is None else f"{row['hidden_share']:.0%}",
        )
    return table


def mix_table(rows: Sequence[Row]) -> Table:
    title = "a mix of requests: median, ± half the spread"
    table = Table("", title=title, title_style="dim", title_justify="left", box=SIMPLE)
    for row in rows:
        table.add_column(row["variant"], justify="right")
    figures: dict[str, Callable[[Row], str]] = {
        "requests": lambda row: str(row["requests"]),
        "generated tokens/s": lambda row: _figure(row["generated_tok_s"]),
        "all tokens/s": lambda row: _figure(row["total_tok_s"]),
        "share of pure decoding": lambda row: (
            "" if row["pure_decode_share"] is None else f"{row['pure_decode_share']:.0%}"
        ),
        "drafts right": lambda row: "" if row["drafts_right"] is None else f"{row['drafts_right']:.0%}",
        "first token, ms, p50 / p99": lambda row: _pair(row["first_s"]),
        "between tokens, ms, p50 / p99": lambda row: _pair(row["between_s"]),
    }
    for name, figure in figures.items():
        if any(cells := [figure(row) for row in rows]):
            table.add_row(name, *cells)
    return table


def _pair(seconds: Sequence[float]) -> str:
    return f"{seconds[0] * 1e3:,.0f} / {seconds[1] * 1e3:,.0f}"


def plot(rows: Sequence[Row], path: Path) -> None:
    """Decode rates by batch, a line a variant and pair of lengths, under the floor. Raises RuntimeError, ValueError."""
    with picture(path) as axes:
        lines = sorted({(row["variant"], row["prompt"], row["generate"]) for row in rows})
        for colour, line in enumerate(lines):
            mine = [r for r in rows if (r["variant"], r["prompt"], r["generate"]) == line]
            mine.sort(key=lambda r: r["batch"])
            batches, figures = [r["batch"] for r in mine], [r["decode_tok_s"] for r in mine]
            middle = [f[0] for f in figures]
            bars = [[f[0] - f[1] for f in figures], [f[2] - f[0] for f in figures]]
            name = f"{line[0]}, {line[1]} + {line[2]}"
            axes.errorbar(batches, middle, yerr=bars, marker="o", capsize=3, color=f"C{colour}", label=name)
            if all(r["floor_tok_s"] for r in mine):
                axes.plot(batches, [r["floor_tok_s"] for r in mine], ":", color=f"C{colour}", alpha=0.6)
        axes.set(xlabel="sequences at once", ylabel="decoded tokens a second", xscale="log", yscale="log")
        batches = sorted({row["batch"] for row in rows})
        axes.set_xticks(batches, [str(batch) for batch in batches])
        axes.minorticks_off()
        axes.legend(title="dotted: the floor of memory bandwidth", fontsize="small")
