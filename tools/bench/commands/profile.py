"""`laddertron profile`: a short decode under the eye of a recorder, written as a trace for Perfetto."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from ....launchers.cli.commands.check import read_model
from ....launchers.cli.errors import ended_by
from ....launchers.cli.fabric_source import override_options
from ....launchers.control.processes import ended_by_term
from ....launchers.measure.rank_job import BenchError, BenchJob


@click.command()
@click.argument("config", type=click.Path())
@click.option("--steps", default=8, show_default=True, type=click.IntRange(1, 1000), help="Decode steps to record.")
@click.option("--batch", type=click.IntRange(1), help="Sequences.  [default: engine.max_num_seqs]")
@click.option("--prompt", default=32, show_default=True, type=click.IntRange(1), help="Prompt tokens of each.")
@click.option("--rank", "ranks", multiple=True, type=int, help="Record this rank; repeatable.  [default: all]")
@click.option(
    "--ops", is_flag=True, help="Also each rank's operators and kernels (torch.profiler), in files next to the trace."
)
@click.option("-o", "--output", default="trace.json", show_default=True, type=click.Path(path_type=Path))
@override_options
def command(config: str, overrides: tuple[str, ...], output: Path, **options: Any) -> None:
    """Decode a few steps with CONFIG's ranks and record when each rank computed, communicated and waited.

    \b
    Open the file at https://ui.perfetto.dev, or draw it:
      laddertron profile deploy.yaml --steps 4 -o ladder.json
      laddertron timeline ladder.json -o ladder.svg

    Every span is named by layer and sub-block. On GPUs the host's spans are launches: add --ops for the kernels.
    """
    deployment = read_model(config, overrides)
    size = deployment.parallel.ranks
    if unknown := [rank for rank in options["ranks"] if not 0 <= rank < size]:
        raise click.UsageError(f"--rank {unknown[0]}: the deployment has ranks 0 to {size - 1}")
    options["batch"] = options["batch"] or deployment.engine.max_num_seqs
    options["ranks"] = ranks = options["ranks"] or tuple(range(size))
    options |= {"output": str(output.resolve()), "model": deployment.served_model_name}
    job = BenchJob(deployment, config, "laddertron.tools.bench.profile_rank", (json.dumps(options),))
    with ended_by(BenchError, ValueError, OSError, end=click.ClickException), ended_by_term(), job:
        pass  # they answer once the trace is written
    click.echo(f"{output}: {options['steps']} steps of {len(ranks)} ranks; open it at https://ui.perfetto.dev")
