"""`laddertron topo`: nodes, devices and links as they are (or as a saved fabric says), and where a deployment's ranks
go.

Under mpirun, srun or torchrun every rank looks at its own host and rank 0 speaks for all.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from ...engine.config import ConfigError, Deployment, load
from ...engine.config_schema import PLACEMENT
from ...topology import fabric as fabrics
from ...topology.bootstrap import bootstrap_of
from ...topology.cost import Backend, Shape, choose, predict, shape_of, untuned
from ...topology.discover import DiscoveryError, discover, gather
from ...topology.fabric import Fabric
from ...topology.grid import Suits
from ...topology.identity import Identity, IdentityError, identify
from ...topology.mapping import explain
from ...topology.placement import Placement, PlacementError, place
from ...topology.presets import preset
from ...topology.prices import reference
from ...topology.reading import ReadError, unbuild
from ..hosts import LaunchError, read_hosts

MESSAGE_BYTES = 32 << 10
"""The size for which an all-reduce is foretold: one token of a model 16,384 wide, in bf16."""


def read_fabric(text: str) -> Fabric:
    """A fabric file, or a preset such as 2x8xH100 where no file is called so. Raises ReadError, OSError, ValueError."""
    path = Path(text)
    if path.suffix == ".json" or path.exists():
        return fabrics.load(path)
    return preset(text)


def live_fabric(environ: Mapping[str, str], me: Identity | None) -> tuple[Fabric, tuple[str, ...]]:
    """The hosts of all ranks, or this host alone, and notes on what could not be looked at. Every rank calls it."""
    found = discover(environ.get("CUDA_VISIBLE_DEVICES"))
    if me is None or me.world_size == 1:
        return Fabric((found.node,)), found.notes
    bootstrap = bootstrap_of(me, environ)
    try:
        return gather(found.node, bootstrap.all_gather), found.notes
    finally:
        bootstrap.close()


def lay_out(deployment: Deployment, fabric: Fabric, environ: Mapping[str, str]) -> tuple[Fabric, Placement]:
    """The deployment's placement, and the part of the fabric that it was asked to use. Raises PlacementError,
    LaunchError, ValueError."""
    parallel = deployment.parallel
    allotment = read_hosts(deployment, environ, fabric)
    slots: dict[str, int] | None = None
    if deployment.launch.hosts or deployment.launch.hostfile or allotment.allocation:
        slots = {host.name: host.slots for host in allotment.hosts}
        fabric = fabric.only(slots)
    placement = place(
        fabric,
        parallel.tensor_parallel_size,
        parallel.replicas,
        slots=slots,
        ranks_per_node=deployment.launch.ranks_per_node,
        suits=model_suits(deployment),
    )
    return fabric, placement


def model_suits(deployment: Deployment) -> Suits | None:
    """Whether the deployment's model splits over so many ranks; None where its folder is not on this machine."""
    from ...models.config import from_folder
    from ...models.shapes import ShapeError, check_shapes, splits

    folder = Path(deployment.model.path)
    if not (folder / "config.json").is_file():
        return None
    model = from_folder(folder)

    def suits(size: int) -> str | None:
        if splits(model, size):
            return None
        try:
            check_shapes(model, size)
        except ShapeError as error:
            return str(error).partition(": ")[2].rpartition(": use ")[0]
        return None

    return suits


def backend_of(deployment: Deployment, shape: Shape) -> Backend:
    """The backend whose prices hold: the configured one, or what `auto` comes to on these links."""
    said = deployment.parallel.backend
    if said != "auto":
        return said
    return "nccl" if shape.intra in ("nvlink", "pcie") and deployment.engine.device != "cpu" else "native"


def foretold(backend: Backend, shape: Shape) -> str:
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


def as_json(fabric: Fabric, placement: Placement | None, shapes: list[Shape]) -> dict[str, Any]:
    """Everything that the tables show, and the whole fabric."""
    found: dict[str, Any] = {"fabric": json.loads(fabric.to_json()), "digest": fabric.digest}
    if placement is not None:
        found["placement"] = {
            "tensor_parallel_size": placement.tensor_parallel_size,
            "replicas": placement.replicas,
            "hosts": [{"hostname": host, "ranks": ranks} for host, ranks in placement.hosts],
            "groups": [
                {"nodes": g.nodes, "rails": g.rails, "shape": unbuild(s)}
                for g, s in zip(placement.groups, shapes, strict=True)
            ],
            "ranks": [unbuild(row) for row in explain(placement)],
            "notes": placement.notes,
        }
    return found


@click.command(short_help="Show nodes, devices, links and where ranks go.")
@click.argument("config", required=False, type=click.Path())
@click.option("--plan", "plan", type=click.Path(), metavar="CONFIG", help="Show where this deployment's ranks go.")
@click.option(
    "--fabric",
    "fabric_file",
    metavar="FILE",
    help="A saved fabric, or a preset such as 2x8xH100, instead of this machine.",
)
@click.option(
    "--save", type=click.Path(dir_okay=False), metavar="FILE", help="Write the fabric for other commands' --fabric."
)
@click.option("--set", "overrides", multiple=True, metavar="SECTION.KEY=VALUE", help="Override one key of CONFIG.")
@click.option("--json", "json_out", is_flag=True, help="Everything as JSON.")
def command(
    config: str | None,
    plan: str | None,
    fabric_file: str | None,
    save: str | None,
    overrides: tuple[str, ...],
    json_out: bool,
) -> None:
    """Show what there is: hosts, GPUs, HCAs, NUMA nodes and the paths between them; with a CONFIG, where its ranks go.

    \b
      laddertron topo
      laddertron topo --fabric 2x8xH100 --plan deploy.yaml
      mpirun --hostfile hosts --map-by ppr:1:node laddertron topo --save fabric.json
      laddertron launch deploy.yaml topo
    """
    environ = dict(os.environ)
    wanted = plan or config
    deployment = load(wanted, overrides) if wanted else None
    what = wanted or "topo"
    try:
        me = identify(environ)
        # The deployment's own file is what --save makes anew.
        source = fabric_file or (deployment.launch.fabric if deployment and save is None else None)
        notes: tuple[str, ...] = ()
        if source is not None:
            if me is not None and me.rank:
                return
            fabric = read_fabric(source)
        else:
            fabric, notes = live_fabric(environ, me)
            if me is not None and me.rank:
                return
        if save is not None:
            fabric.save(Path(save))
        placed, shapes, lines = None, [], []
        if deployment is not None:
            # A fabric named on the command line stands for the machines: an allocation's are not asked about.
            part, placed = lay_out(deployment, fabric, environ if fabric_file is None else {})
            shapes = [shape_of(part, placed, g) for g in range(placed.replicas)]
            lines = [foretold(backend_of(deployment, s), s) for s in shapes]
    except PlacementError as error:
        raise ConfigError([f"{what}: parallel: {error}"]) from None
    except (LaunchError, ReadError, IdentityError, DiscoveryError, ValueError, OSError) as error:
        raise ConfigError([f"{what}: {error}"]) from None
    if json_out:
        click.echo(json.dumps(as_json(fabric, placed, shapes), indent=1))
        return
    bound = deployment is not None and deployment.launch.bind_to == PLACEMENT
    show(fabric, placed, shapes, lines, notes, save, bound)


def show(
    fabric: Fabric,
    placement: Placement | None,
    shapes: list[Shape],
    lines: list[str],
    notes: tuple[str, ...],
    saved: str | None,
    bound: bool,
) -> None:
    """Prints tables; the fabric only if there is no placement to explain. `bound`: ranks keep to their seats' cores."""
    from rich.console import Console

    from ..topo_view import fabric_view, placement_view

    # A matrix row that is cut or folded cannot be read: rather let the terminal break lines, as nvidia-smi does.
    console = Console(highlight=False)
    console = Console(highlight=False, width=max(console.width, 240))
    console.print(fabric_view(fabric) if placement is None else placement_view(placement, shapes, lines, bound))
    for note in notes:
        console.print(f"note: {note}", style="yellow")
    if saved is not None:
        console.print(
            f"saved {saved}: {len(fabric.nodes)} host{'s' if len(fabric.nodes) > 1 else ''}, digest {fabric.digest}"
        )
