"""`laddertron simulate`: step times and scaling on hypothetical hardware. No torch, MPI, weights or GPU."""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from ....launchers.cli.fabric_source import faults_of
from ..layouts import Work
from ..plan_source import question
from ..plan_view import print_sheet
from ..roofline import Load
from ..simulations import delayed, scaling, scaling_sheet, steps


@click.group()
def command() -> None:
    """Simulate steps and scaling: the engine's wirings on a virtual clock, with published or measured rates.

    \b
      laddertron simulate step --model llama-3.1-405b --nodes 2x8xH100 --batch 4
      laddertron simulate scale --model llama-3.1-405b --nodes 16x8xH100
    """


@command.command("step")
@click.argument("config", required=False, type=click.Path())
@click.option("--model", metavar="NAME|FOLDER", help="A known architecture, or a model's folder.")
@click.option("--nodes", "--fabric", "fabric", metavar="SPEC|FILE", help="2x8xH100, or a file of `topo --save`.")
@click.option("--tp", type=click.IntRange(1), help="With --model: ranks of a replica.")
@click.option("--batch", type=click.IntRange(1), default=1, show_default=True, help="Sequences that decode.")
@click.option(
    "--context", type=click.IntRange(0), default=1280, show_default=True, help="Context length of each sequence."
)
@click.option("--prompt", type=click.IntRange(0), default=0, show_default=True, help="Prompt tokens in the same step.")
@click.option("--delay", type=click.FloatRange(0), metavar="MS", help="Delay added to each all-reduce.")
@click.option("--json", "json_out", is_flag=True, help="Print every number as JSON, in seconds.")
def step_command(
    config: str | None, model: str | None, fabric: str | None, tp: int | None, batch: int, context: int, prompt: int,
    delay: float | None, json_out: bool,
) -> None:  # fmt: skip
    """Simulate one step of every wiring: times of computation, and of all-reduces in flight, hidden and exposed."""
    if config is not None and tp is not None:
        raise click.UsageError("--tp needs --model: a CONFIG has parallel.tensor_parallel_size")
    load = Load(decodes=batch, context=context, prompt=prompt, prompt_context=prompt / 2)
    with faults_of("simulate"):
        q = question(config, model, fabric, Work(), size=tp)
        times, cost, sheet = steps(q if delay is None else delayed(q, delay * 1e-3), load)
    if json_out:
        standard_s = times["standard"].total_s
        variants = {
            name: {**asdict(t), "hidden_s": t.hidden_s, "exposed_s": t.exposed_s, "speedup": standard_s / t.total_s}
            for name, t in times.items()
        }
        out = {"all_reduce_s": cost.all_reduce.seconds, "sub_block_s": cost.sub_block_s, "wirings": variants}
        click.echo(json.dumps(out, indent=1))
    else:
        print_sheet(sheet)


@command.command("scale")
@click.option("--model", required=True, metavar="NAME", help="A known architecture.")
@click.option("--nodes", default="16x8xH100", show_default=True, metavar="SPEC", help="Largest fabric to simulate.")
@click.option("--batch", type=click.IntRange(1), default=8, show_default=True, help="Sequences of one replica.")
@click.option(
    "--context", type=click.IntRange(0), default=1280, show_default=True, help="Context length of each sequence."
)
@click.option("--fp8", is_flag=True, help="Weights in fp8.")
@click.option("--json", "json_out", is_flag=True, help="Print every number as JSON, in seconds.")
def scale_command(model: str, nodes: str, batch: int, context: int, fp8: bool, json_out: bool) -> None:
    """Simulate one replica over an increasing number of nodes, for every wiring."""
    with faults_of("simulate"):
        spans = scaling(model, nodes, batch, context, fp8)
    if json_out:
        click.echo(json.dumps([asdict(span) for span in spans], indent=1))
    else:
        print_sheet(scaling_sheet(model, batch, context, spans))
