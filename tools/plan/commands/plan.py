"""`laddertron plan`: predicts whether a model fits and how fast it is. No torch, MPI, weights or GPU."""

from __future__ import annotations

import json
from pathlib import Path

import click

from ....launchers.cli.fabric_source import faults_of, set_option
from ..advice import deployment_text
from ..estimate import CapacityEstimate, make_plan
from ..layouts import Work
from ..plan_source import question
from ..tables import as_json, markdown


@click.command()
@click.argument("config", required=False, type=click.Path())
@click.option(
    "--model",
    metavar="NAME|FOLDER",
    help="A known architecture, such as llama-3.1-405b, deepseek-v3-bf16 or llama-3.1-70b-ladder, or a model's folder, "
    "in place of CONFIG.",
)
@click.option("--nodes", "--fabric", "fabric", metavar="SPEC|FILE", help="2x8xH100, or a file of `topo --save`.")
@click.option("--fp8", is_flag=True, help="Plan with fp8 weights.")
@click.option("--prompt", type=click.IntRange(1), default=1024, show_default=True, help="Tokens of a request's prompt.")
@click.option("--output", type=click.IntRange(1), default=512, show_default=True, help="Tokens of an answer.")
@click.option(
    "--gpu-hour",
    type=click.FloatRange(0),
    default=2.5,
    show_default=True,
    metavar="DOLLARS",
    help="Price of a GPU hour.",
)
@set_option
@click.option("--all", "all_tables", is_flag=True, help="Print every table and the assumptions.")
@click.option("--json", "json_out", is_flag=True, help="Print every number as JSON, in base units.")
@click.option("--markdown", "markdown_out", is_flag=True, help="Print the tables as Markdown.")
@click.option(
    "--write",
    "write",
    type=click.Path(dir_okay=False),
    metavar="FILE",
    help="Write a deployment file with the cheapest layout.",
)
def command(
    config: str | None, model: str | None, fabric: str | None, fp8: bool, prompt: int, output: int, gpu_hour: float,
    overrides: tuple[str, ...], all_tables: bool, json_out: bool, markdown_out: bool, write: str | None,
) -> None:  # fmt: skip
    """Predict memory, speed and cost of a deployment, and compare it with other layouts of the same GPUs.

    \b
      laddertron plan deploy.yaml
      laddertron plan deploy.yaml --fabric fabric.json --all
      laddertron plan --model llama-3.1-405b --nodes 2x8xH100 --write deploy.yaml
      laddertron plan --model llama-3.1-405b-ladder --nodes 2x8xH100 \\
        --gpu-hour 1.90 --set parallel.tensor_parallel_size=16
    """
    with faults_of(config or model or "plan", "parallel: "):
        plan = make_plan(question(config, model, fabric, Work(prompt, output, gpu_hour), fp8, overrides))
    if write is not None:
        with faults_of(f"--write {write}"):
            text = deployment_text(plan, config)
        Path(write).write_text(text, encoding="utf-8")
        click.echo(f"wrote {write}", err=True)
    if json_out:
        click.echo(json.dumps(as_json(plan), indent=1))
    elif markdown_out:
        click.echo(markdown(plan), nl=False)
    else:
        _show(plan, all_tables)


def _show(plan: CapacityEstimate, all_tables: bool) -> None:
    from rich.console import Console

    from ..plan_view import plan_view

    console = Console(highlight=False)
    if all_tables:  # a table row that is folded cannot be read: rather let the terminal break lines
        console = Console(highlight=False, width=max(console.width, 200))
    console.print(plan_view(plan, all_tables))
