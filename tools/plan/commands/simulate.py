"""`laddertron simulate`: step times, scaling and fleets on hypothetical hardware. No torch, MPI, weights or GPU."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import click

from ....launchers.cli.fabric_source import faults_of
from ....models.config.wiring import WIRINGS
from ..layouts import Work
from ..plan_source import question
from ..plan_view import print_sheet
from ..roofline import Load
from ..simulations import FleetAsked, delayed, fleet, scaling, scaling_sheet, steps


@click.group()
def command() -> None:
    """Simulate steps, scaling and fleets: the engine's wirings on a virtual clock, with published or measured rates.

    \b
      laddertron simulate step --model llama-3.1-405b --nodes 2x8xH100 --batch 4
      laddertron simulate scale --model llama-3.1-405b --nodes 16x8xH100
      laddertron simulate fleet --model llama-3.1-405b --nodes 1000x8xH100 --mtbf-hours 2000
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
        whole = times["standard"].total_s
        variants = {
            name: {**asdict(t), "hidden_s": t.hidden_s, "exposed_s": t.exposed_s, "speedup": whole / t.total_s}
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


@command.command("fleet")
@click.option("--model", required=True, metavar="NAME", help="A known architecture.")
@click.option(
    "--nodes", "spec", default="1000x8xH100", show_default=True, metavar="SPEC", help="All nodes of the fleet."
)
@click.option("--tp", type=click.IntRange(1), help="Ranks of a replica; default: as few nodes as the model fits on.")
@click.option("--wiring", type=click.Choice(WIRINGS), default="auto", show_default=True, help="Wiring of the weights.")
@click.option("--fp8", is_flag=True, help="Weights in fp8.")
@click.option("--requests", type=click.IntRange(1, 2_000_000), default=100_000, show_default=True)
@click.option(
    "--per-second",
    "per_s",
    type=click.FloatRange(0, min_open=True),
    help="Arrivals per second; default: all at the start.",
)
@click.option("--prompt", type=click.IntRange(1), default=1024, show_default=True, help="Tokens of a prompt.")
@click.option("--output", type=click.IntRange(1), default=512, show_default=True, help="Mean tokens of an answer.")
@click.option("--slots", type=click.IntRange(1), default=128, show_default=True, help="engine.max_num_seqs.")
@click.option(
    "--mtbf-hours",
    type=click.FloatRange(0, min_open=True),
    help="Mean time between failures of one node; default: no failures.",
)
@click.option(
    "--relaunch",
    "relaunch_s",
    type=click.FloatRange(0),
    default=300.0,
    show_default=True,
    metavar="SECONDS",
    help="Time to relaunch a replica after a failure.",
)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--json", "json_out", is_flag=True, help="Print every number as JSON, in seconds and tokens.")
def fleet_command(json_out: bool, **asked: Any) -> None:
    """Simulate replicas behind one queue: batch time, waiting time, the cost of failed nodes."""
    with faults_of("simulate"):
        outcome, sheet = fleet(FleetAsked(**asked))
    if json_out:
        rates = {"tokens_per_s": outcome.tokens_per_s, "commits_per_s": outcome.commits_per_s}
        click.echo(json.dumps({**asdict(outcome), **rates}, indent=1))
    else:
        print_sheet(sheet)
