"""A deployment's fabric and placement, for the commands that plan. Reads files, measures nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ...engine.config.load import ConfigError, Deployment
from ...topology.cost.cost import Backend, Shape
from ...topology.hardware import fabric as fabrics
from ...topology.hardware.fabric import Fabric
from ...topology.hardware.presets import preset
from ...topology.placement.grid import Suits
from ...topology.placement.placement import Placement, PlacementError, place
from ..compose.hosts import read_hosts

if TYPE_CHECKING:
    from ...models.config.model_config import ModelConfig


@contextmanager
def faults_of(what: str, section: str = "") -> Iterator[None]:
    """Raises errors of planning and placement as a ConfigError about `what`; placement errors name its `section`."""
    try:
        yield
    except (ValueError, OSError) as error:
        where = section if isinstance(error, PlacementError) else ""
        raise ConfigError([f"{what}: {where}{' '.join(str(error).split())}"]) from None


def read_fabric(text: str) -> Fabric:
    """Reads a fabric file, else a preset such as 2x8xH100. Raises ReadError, OSError, ValueError."""
    path = Path(text)
    if path.suffix == ".json" or path.exists():
        return fabrics.load(path)
    return preset(text)


def lay_out(deployment: Deployment, fabric: Fabric, environ: Mapping[str, str]) -> tuple[Fabric, Placement]:
    """The deployment's placement and its part of the fabric. Raises PlacementError, LaunchError, ValueError."""
    available = read_hosts(deployment, environ, fabric)
    slots: dict[str, int] | None = None
    if deployment.launch.hosts or deployment.launch.hostfile or available.allocation:
        slots = {host.name: host.slots for host in available.hosts}
        fabric = fabric.only(slots)
    placement = place(
        fabric,
        deployment.parallel.world,
        slots=slots,
        ranks_per_node=deployment.launch.ranks_per_node,
        suits=model_suits(deployment),
    )
    return fabric, placement


def model_suits(deployment: Deployment) -> Suits | None:
    """The function that checks sizes for the deployment's model; None if its folder is not on this machine."""
    from ...models.config.model_config import from_folder

    folder = Path(deployment.model.path)
    return suits(from_folder(folder)) if (folder / "config.json").is_file() else None


def suits(model: ModelConfig) -> Suits:
    """Makes the function that checks whether the model can be split over a number of ranks."""
    from ...models.config.shapes import why_not

    return lambda size: why_not(model, size) or None


def backend_of(deployment: Deployment, shape: Shape) -> Backend:
    """The backend whose prices apply: the configured one, or the one that `auto` selects on these links."""
    backend = deployment.parallel.backend
    if backend != "auto":
        return backend
    return "nccl" if shape.intra in ("nvlink", "pcie") and deployment.engine.device != "cpu" else "native"


set_option = click.option(
    "--set", "overrides", multiple=True, metavar="SECTION.KEY=VALUE", help="Override one key of CONFIG."
)
