"""Derives the all-reduce strategy of each message size from a tuning file. Only rank 0 reads the file; it sends the
table to the others, so that ranks with different files cannot disagree.
"""

from __future__ import annotations

import json
import logging
import os
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ... import __version__
from ...engine.config.schema import Deployment
from ...topology.comm.bootstrap import Bootstrap
from ...topology.cost.cost import Backend, shape_of
from ...topology.cost.tuning import Chooser, chooser
from ...topology.hardware import fabric as fabrics
from ...topology.hardware.discover import discover, gather
from ...topology.hardware.fabric import Fabric
from ...topology.link_cost import SIZES
from ...topology.placement.layout import GroupLayout
from ...topology.placement.placement import Placement, place

log = logging.getLogger(__name__)


def backend_here(deployment: Deployment) -> Backend:
    """The configured backend; for `auto`, the one that this rank selects."""
    backend = deployment.parallel.backend
    if backend != "auto":
        return backend
    if deployment.engine.device != "cpu":
        import torch

        if torch.cuda.is_available():
            return "nccl"
    from ...topology.transport import transport  # imports torch

    return "native" if transport.available() else "gloo"


def fabric_of_job(deployment: Deployment, bootstrap: Bootstrap, nodes: Sequence[str]) -> Fabric:
    """The configured fabric, else the one that the ranks discover on their hosts. Every rank calls it. Raises
    ReadError, OSError, DiscoveryError, ValueError; if discovery fails on one rank, on all."""
    if deployment.launch.fabric is not None:
        return fabrics.load(Path(deployment.launch.fabric)).only(dict.fromkeys(nodes))
    try:
        node = discover(os.environ.get("CUDA_VISIBLE_DEVICES")).node
    except (OSError, ValueError):
        bootstrap.all_gather(b"")  # the other ranks wait for it
        raise
    return gather(node, bootstrap.all_gather)


def placed(fabric: Fabric, deployment: Deployment, nodes: Sequence[str]) -> Placement:
    """The placement of the job's running ranks on the fabric; `nodes`: each rank's host. Raises PlacementError."""
    return place(fabric, deployment.parallel.world.on(nodes), slots=Counter(nodes))


def group_hosts(fabric: Fabric, nodes: Sequence[str], layout: GroupLayout) -> Fabric:
    """The fabric of this group's hosts, for which a tuning file is made and with which it is compared."""
    return fabric.only(dict.fromkeys(nodes[rank] for rank in layout.ranks))


def versions() -> dict[str, str]:
    import torch

    versions_by_name = {"laddertron": __version__, "torch": torch.__version__}
    if torch.cuda.is_available():
        versions_by_name["cuda"] = torch.version.cuda or "none"
        nccl: Any = torch.cuda.nccl
        versions_by_name["nccl"] = ".".join(map(str, nccl.version()))
    return versions_by_name


def tabulate(choose: Chooser) -> tuple[tuple[int, str], ...]:
    """A table of (largest bytes, strategy) in ascending order, with equal neighbours merged; the last row also applies
    to all larger messages. Pure."""
    table: list[tuple[int, str]] = []
    for size in SIZES:
        strategy = choose.strategy(size)
        if table and table[-1][1] == strategy:
            table[-1] = (size, strategy)
        else:
            table.append((size, strategy))
    return tuple(table)


def look_up(table: Sequence[tuple[int, str]]) -> Callable[[int], str]:
    """The `choose` argument of topology.connect.connect, from a table. Raises ValueError if it has no rows."""
    if not table:
        raise ValueError("an empty table of strategies: nothing to choose from")
    bounds = [bound for bound, _ in table]
    return lambda nbytes: table[min(bisect_left(bounds, nbytes), len(table) - 1)][1]


def tuned_choice(
    deployment: Deployment, bootstrap: Bootstrap, nodes: Sequence[str], layout: GroupLayout
) -> Callable[[int], str] | None:
    """The strategy by message size, or None: then the backend chooses by size alone. With the native backend a table is
    made if a tuning file is configured or groups span nodes; with gloo, which chooses well without one, only if both
    hold; with NCCL always, for one_shot, unless ranks share GPUs. If the file is missing or does not match, rank 0
    warns and uses untuned prices. Every rank calls it."""
    parallel, backend = deployment.parallel, backend_here(deployment)
    if parallel.collective != "auto" or parallel.deterministic:
        return None
    # NOTE: tests all groups, not this rank's: either all ranks must reach all_gather, or none.
    world = parallel.world.on(nodes)
    reasons = (parallel.tuning_file is not None, world.spans_nodes)
    direct = backend == "nccl" and not deployment.launch.share_gpu
    if not (direct or (any(reasons) if backend == "native" else all(reasons))):
        return None
    table: tuple[tuple[int, str], ...] = ()
    try:
        # a configured fabric is a file that may exist only on rank 0's node
        if deployment.launch.fabric is None or bootstrap.rank == 0:
            fabric = fabric_of_job(deployment, bootstrap, nodes)
        if bootstrap.rank == 0:
            shape = shape_of(fabric, placed(fabric, deployment, nodes), world.group_of(0))
            path = None if parallel.tuning_file is None else Path(parallel.tuning_file)
            choose, warnings = chooser(path, group_hosts(fabric, nodes, layout), shape, backend, versions())
            for warning in warnings if any(reasons) else ():
                log.warning("%s", warning)
            log.info("collectives by %s prices", choose.source)
            table = tabulate(choose)
    except (OSError, ValueError) as error:
        if bootstrap.rank == 0:
            log.warning("collectives go by message size alone, the group's place on the fabric is not known: %s", error)
    rows = json.loads(bootstrap.all_gather(json.dumps(table).encode() if bootstrap.rank == 0 else b"")[0])
    if not rows or (backend != "native" and all(strategy == "flat" for _, strategy in rows)):
        return None
    return look_up([(int(bound), str(strategy)) for bound, strategy in rows])
