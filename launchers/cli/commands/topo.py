"""`laddertron topo`: nodes, devices and links of this machine, of a job's ranks or of a saved fabric, and a
deployment's placement on them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from ....engine.config.load import load
from ....engine.config.schema import PLACEMENT
from ....topology.comm.bootstrap import bootstrap_of
from ....topology.cost.cost import Backend, Shape, choose, predict, shape_of, untuned
from ....topology.cost.prices import reference
from ....topology.hardware.cpu_tier import VARIABLE
from ....topology.hardware.cuda_stack import look, stack_faults
from ....topology.hardware.discover import discover, gather
from ....topology.hardware.fabric import Fabric, counted
from ....topology.json_codec import unbuild
from ....topology.placement.identity import Identity, identify
from ....topology.placement.mapping import explain
from ....topology.placement.placement import Placement
from ..fabric_source import backend_of, faults_of, lay_out, read_fabric, set_option

MESSAGE_BYTES = 32 << 10
"""The size for which an all-reduce is predicted: one token of a model 16,384 wide, in bf16."""


def live_fabric(environ: Mapping[str, str], me: Identity | None) -> tuple[Fabric, tuple[str, ...]]:
    """The hosts of all ranks, or this host alone, and notes on what could not be looked at. Every rank calls it."""
    discovery = discover(environ.get("CUDA_VISIBLE_DEVICES"))
    if me is None or me.size == 1:
        return Fabric((discovery.node,)), discovery.notes
    return gather(discovery.node, bootstrap_of(me, environ).all_gather), discovery.notes


def predicted(backend: Backend, shape: Shape) -> str:
    """One line: the untuned price of a small all-reduce, flat and by the cheapest strategy."""
    if shape.size == 1:
        return ""
    costs = reference(backend, shape)
    flat = predict(costs, shape, "flat", MESSAGE_BYTES)
    best, seconds = choose(costs, shape, MESSAGE_BYTES, untuned(backend, shape, MESSAGE_BYTES))
    cheaper = f", {best} {seconds * 1e6:.0f} us" if seconds < flat else ""
    return (
        f"  all-reduce of {MESSAGE_BYTES >> 10} KiB, predicted ({backend}, untuned): flat {flat * 1e6:.0f} us{cheaper}"
    )


def as_json(fabric: Fabric, placement: Placement | None, shapes: list[Shape], forced: str | None) -> dict[str, Any]:
    """The tables and the whole fabric. `forced`: the CPU tier that ranks use instead of their hosts'."""
    tables: dict[str, Any] = {
        "fabric": json.loads(fabric.to_json()),
        "digest": fabric.digest,
        "forced_cpu_tier": forced,
    }
    if placement is not None:
        tables["placement"] = {
            "tensor_parallel_size": placement.world.tp,
            "replicas": placement.world.replicas,
            "stages": placement.world.stages,
            "hosts": [{"hostname": host, "ranks": ranks} for host, ranks in placement.hosts],
            "groups": [
                {"nodes": g.nodes, "rails": g.rails, "shape": unbuild(s)}
                for g, s in zip(placement.groups, shapes, strict=True)
            ],
            "ranks": explain(placement),
            "notes": placement.notes,
        }
    return tables


@click.command()
@click.argument("config", required=False, type=click.Path())
@click.option(
    "--plan", "plan", type=click.Path(), metavar="CONFIG", help="Show the placement of this deployment's ranks."
)
@click.option(
    "--fabric",
    "fabric_file",
    metavar="FILE",
    help="A saved fabric, or a preset such as 2x8xH100, instead of this machine.",
)
@click.option("--save", type=click.Path(dir_okay=False), metavar="FILE", help="Write the fabric, for launch.fabric.")
@set_option
@click.option("--json", "json_out", is_flag=True, help="Print everything as JSON.")
def command(
    config: str | None, plan: str | None, fabric_file: str | None, save: str | None, overrides: tuple[str, ...],
    json_out: bool,
) -> None:  # fmt: skip
    """Show hosts, GPUs, HCAs, NUMA nodes and the paths between them; with a CONFIG, the placement of its ranks.

    \b
      laddertron topo
      laddertron topo --fabric 2x8xH100 --plan deploy.yaml
      mpirun --hostfile hosts --map-by ppr:1:node \\
        laddertron topo --save fabric.json
      laddertron launch deploy.yaml topo
    """
    environ = dict(os.environ)
    config_path = plan or config
    deployment = load(config_path, overrides) if config_path else None
    with faults_of(config_path or "topo", "parallel: "):
        me = identify(environ)
        # The deployment's own file is what --save makes again.
        source = fabric_file or (deployment.launch.fabric if deployment and save is None else None)
        notes: tuple[str, ...] = ()
        forced = environ.get(VARIABLE) or None
        if source is not None:
            if me is not None and me.rank:
                return
            fabric = read_fabric(source)
        else:
            fabric, notes = live_fabric(environ, me)
            if me is not None and me.rank:
                return
            notes = (*notes, *stack_faults(look()))
        if save is not None:
            fabric.save(Path(save))
        placed, shapes, lines = None, [], []
        if deployment is not None:
            # A fabric named on the command line replaces the machines: an allocation's are not queried.
            part, placed = lay_out(deployment, fabric, environ if fabric_file is None else {})
            shapes = [shape_of(part, placed, g) for g in range(placed.world.groups)]
            lines = [predicted(backend_of(deployment, s), s) for s in shapes]
    if json_out:
        click.echo(json.dumps(as_json(fabric, placed, shapes, forced), indent=1))
        return
    from rich.console import Console

    from ..topo_view import fabric_view, placement_view

    if forced is not None:
        notes = (*notes, f"{VARIABLE}: ranks are limited to the CPU tier {forced}")
    # Open MPI gives ranks a terminal of its own: its colours are not the user's
    terminal = None if me is None else False
    console = Console(highlight=False, force_terminal=terminal)
    if deployment is None or placed is None:
        console.print(fabric_view(fabric, console.width))
    else:  # a row that is cut cannot be read: rather let a very narrow terminal break lines
        console = Console(highlight=False, force_terminal=terminal, width=max(console.width, 100))
        console.print(placement_view(placed, shapes, lines, deployment.launch.bind_to == PLACEMENT))
    for note in notes:
        console.print(f"note: {note}", style="yellow")
    if save is not None:
        console.print(f"saved {save}: {counted(len(fabric.nodes), 'host')}, digest {fabric.digest}")
