"""`laddertron timeline`: traces of `laddertron profile` as a picture, one below the other."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import click

from ....launchers.cli.errors import ended_by
from ..picture import PlotError, draw
from ..timeline import read_trace, timeline


def _layers(text: str | None) -> range | None:
    """`2` or `1-3`, both ends included. Raises BadParameter."""
    if text is None:
        return None
    first, _, last = text.partition("-")
    if not first.isdecimal() or not (last or first).isdecimal() or int(last or first) < int(first):
        raise click.BadParameter(f"{text!r}: a layer or a range of layers, such as 3 or 1-4")
    return range(int(first), int(last or first) + 1)


@click.command()
@click.argument("traces", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", required=True, type=click.Path(path_type=Path), help="A file ending in .svg, .png or .pdf."
)
@click.option("--rank", default=0, show_default=True, help="Rank to draw.")
@click.option("--step", type=int, help="Which recorded step.  [default: the one of median length]")
@click.option("--shortest", is_flag=True, help="Draw the shortest step: the least disturbed one on a busy machine.")
@click.option("--layers", metavar="FIRST-LAST", help="Only these layers.  [default: all]")
def command(
    traces: tuple[Path, ...], output: Path, rank: int, step: int | None, shortest: bool, layers: str | None
) -> None:
    """Draw one decode step of each TRACE: computation above, all-reduces in flight below.

    \b
      laddertron profile configs/demo-standard.yaml -o standard.json
      laddertron profile configs/demo.yaml -o ladder.json
      laddertron timeline standard.json ladder.json -o timeline.svg
    """
    wanted = _layers(layers)
    which: int | Literal["median", "shortest"] = step if step is not None else "shortest" if shortest else "median"
    with ended_by(PlotError, ValueError), ended_by(OSError, end=click.ClickException):
        draw([timeline(read_trace(path), rank, which, wanted) for path in traces], output)
    click.echo(f"{output}: {len(traces)} timeline{'s' * (len(traces) > 1)}")
