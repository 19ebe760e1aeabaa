"""From a tuning file to the strategy of each message size. Rank 0 alone reads the file and sends the table, so that
ranks with different files cannot disagree.
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
from ...topology.placement.layout import GroupLayout
from ...topology.placement.placement import Placement, place
from ...topology.transport import transport

log = logging.getLogger(__name__)

SIZES = tuple(round(256 * 2 ** (step / 4)) for step in range(4 * 19))
"""256 B to 128 MiB, four to a doubling: where a chooser is asked."""


def backend_here(deployment: Deployment) -> Backend:
    """The backend that `auto` comes to on this rank."""
    said = deployment.parallel.backend
    if said != "auto":
        return said
    if deployment.engine.device != "cpu":
        import torch

        if torch.cuda.is_available():
            return "nccl"
    return "native" if transport.available() else "gloo"


def fabric_of_job(deployment: Deployment, bootstrap: Bootstrap, nodes: Sequence[str]) -> Fabric:
    """The configured fabric, else what the ranks see, host by host; every rank calls it. Raises ReadError, OSError,
    DiscoveryError, ValueError; where one rank cannot see its host, on all."""
    if deployment.launch.fabric is not None:
        return fabrics.load(Path(deployment.launch.fabric)).only(dict.fromkeys(nodes))
    try:
        node = discover(os.environ.get("CUDA_VISIBLE_DEVICES")).node
    except (OSError, ValueError):
        bootstrap.all_gather(b"")  # for which the others wait
        raise
    return gather(node, bootstrap.all_gather)


def placed(fabric: Fabric, deployment: Deployment, nodes: Sequence[str]) -> Placement:
    """The job's ranks on the fabric as they were started: `nodes` is each rank's host. Raises PlacementError."""
    parallel = deployment.parallel
    return place(
        fabric,
        parallel.tensor_parallel_size,
        len(nodes) // parallel.ranks,
        stages=parallel.pipeline_parallel_size,
        slots=Counter(nodes),
    )


def group_hosts(fabric: Fabric, nodes: Sequence[str], layout: GroupLayout) -> Fabric:
    """This group's hosts: the fabric that a tuning file is made for and compared with."""
    return fabric.only(dict.fromkeys(nodes[rank] for rank in layout.ranks))


def versions() -> dict[str, str]:
    import torch

    found = {"laddertron": __version__, "torch": torch.__version__}
    if torch.cuda.is_available():
        found["cuda"] = torch.version.cuda or "none"
        nccl: Any = torch.cuda.nccl
        found["nccl"] = ".".join(map(str, nccl.version()))
    return found


def tabulate(choose: Chooser) -> tuple[tuple[int, str], ...]:
    """(largest bytes, strategy), rising, neighbours of one strategy joined; the last holds for all above. Pure."""
    table: list[tuple[int, str]] = []
    for size in SIZES:
        strategy = choose.strategy(size)
        if table and table[-1][1] == strategy:
            table[-1] = (size, strategy)
        else:
            table.append((size, strategy))
    return tuple(table)


def look_up(table: Sequence[tuple[int, str]]) -> Callable[[int], str]:
    """`choose` of topology.groups.connect. Raises ValueError on a table without rows."""
    if not table:
        raise ValueError("an empty table of strategies: nothing to choose from")
    bounds = [bound for bound, _ in table]
    return lambda nbytes: table[min(bisect_left(bounds, nbytes), len(table) - 1)][1]


def tuned_choice(
    deployment: Deployment, bootstrap: Bootstrap, nodes: Sequence[str], layout: GroupLayout
) -> Callable[[int], str] | None:
    """The strategy by size where the native backend is to choose, and a tuning file is configured or groups span nodes;
    for NCCL and gloo, which need no advice unless it was measured, where both is so; else None, and the backend goes by
    size alone. No file, or one that does not fit, is warned of on rank 0, and untuned prices take its place. Every rank
    calls it."""
    parallel, backend = deployment.parallel, backend_here(deployment)
    if parallel.collective != "auto" or parallel.deterministic or backend == "mpi":
        return None
    # Of any group, not of this one: either all ranks go on to the gathering, or none.
    size = parallel.tensor_parallel_size
    spans = any(len(set(nodes[at : at + size])) > 1 for at in range(0, len(nodes), size))
    reasons = (parallel.tuning_file is not None, spans)
    if not (any(reasons) if backend == "native" else all(reasons)):
        return None
    table: tuple[tuple[int, str], ...] = ()
    try:
        # a configured fabric is a file, which other nodes need not have
        if deployment.launch.fabric is None or bootstrap.rank == 0:
            fabric = fabric_of_job(deployment, bootstrap, nodes)
        if bootstrap.rank == 0:
            shape = shape_of(fabric, placed(fabric, deployment, nodes), layout.ranks[0] // layout.size)
            path = None if parallel.tuning_file is None else Path(parallel.tuning_file)
            choose, warnings = chooser(path, group_hosts(fabric, nodes, layout), shape, backend, versions())
            for warning in warnings:
                log.warning("%s", warning)
            log.info("collectives by %s prices", choose.source)
            table = tabulate(choose)
    except (OSError, ValueError) as error:
        if bootstrap.rank == 0:
            log.warning("collectives go by message size alone, the group's place on the fabric is not known: %s", error)
    told = json.loads(bootstrap.all_gather(json.dumps(table).encode() if bootstrap.rank == 0 else b"")[0])
    return look_up([(int(bound), str(strategy)) for bound, strategy in told]) if told else None
