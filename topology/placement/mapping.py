"""Compares the placement with the launched ranks, and formats the placement as tables. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ..hardware.fabric import Fabric, counted, format_cpus
from .identity import Launcher
from .placement import Placement

Observed = tuple[int, str, int]
"""(rank, hostname, local rank) as a rank itself saw it."""

MAX_NAMED = 8


class MappingError(ValueError):
    """Ranks do not have their placed host and local rank; the message names them and the launcher's option that fixes
    it."""


def verify(placement: Placement, observed: Sequence[Observed], launcher: Launcher) -> None:
    """Raises MappingError unless every rank runs where it was placed. `node1` and `node1.example.org` are one host."""
    seen = {rank: (host, local) for rank, host, local in observed}
    if sorted(seen) != list(range(placement.world.size)) or len(seen) != len(observed):
        raise MappingError(
            f"{counted(len(observed), 'rank')} answered for a placement of {placement.world.size}: "
            f"{mapping_option(placement, launcher)}"
        )
    wrong = [
        (seat, *seen[seat.rank])
        for seat in placement.seats
        if not same_host(seat.hostname, seen[seat.rank][0]) or seat.local_rank != seen[seat.rank][1]
    ]
    if not wrong:
        return
    lines = [
        f"rank {seat.rank} belongs on {seat.hostname} as local rank {seat.local_rank}, runs on {host} as {local}"
        for seat, host, local in wrong[:MAX_NAMED]
    ]
    more = f"; and {len(wrong) - MAX_NAMED} more" if len(wrong) > MAX_NAMED else ""
    be = "is" if len(wrong) == 1 else "are"
    raise MappingError(
        f"{len(wrong)} of {placement.world.size} ranks {be} misplaced{_diagnosis(placement, seen)}: "
        f"{'; '.join(lines)}{more}. {mapping_option(placement, launcher)}"
    )


def mapping_option(placement: Placement, launcher: Launcher) -> str:
    """The launcher's option by which ranks fill the hosts in the placement's order."""
    counts = [count for _, count in placement.hosts]
    names = ",".join(host for host, _ in placement.hosts)
    listed = " ".join(f"{host} slots={count}" for host, count in placement.hosts)
    per_node = counts[0] if len(set(counts)) == 1 else None
    if launcher == "openmpi":
        how = f"--map-by ppr:{per_node}:node" if per_node else "--map-by slot"
        return f"Use mpirun {how} with the hostfile lines in this order: {listed}"
    if launcher == "mpich":
        if per_node:
            return f"Use mpiexec -ppn {per_node} -hosts {names}"
        hosts = ",".join(f"{host}:{count}" for host, count in placement.hosts)
        return f"Use mpiexec -hosts {hosts}"
    if launcher == "slurm":
        # Slurm sorts a node list; only a distribution by host file keeps an order of one's own.
        if per_node and [h for h, _ in placement.hosts] == sorted(h for h, _ in placement.hosts):
            return f"Use srun --ntasks-per-node={per_node} --distribution=block -w {names}"
        return "Use srun --distribution=arbitrary with SLURM_HOSTFILE naming, a line a rank: " + ", ".join(
            f"{host} ({counted(count, 'time')})" for host, count in placement.hosts
        )
    per = f"--nproc-per-node={per_node}" if per_node else "--nproc-per-node as many as listed here"
    return f"Use torchrun --nnodes={len(counts)} {per} with --node-rank in this order: {listed}"


def same_host(a: str, b: str) -> bool:
    """Whether two host names mean one host: equal, or one is the other without its domain."""
    a, b = a.lower().rstrip("."), b.lower().rstrip(".")
    return a == b or a.startswith(b + ".") or b.startswith(a + ".")


def _diagnosis(placement: Placement, seen: dict[int, tuple[str, int]]) -> str:
    hosts = placement.hosts
    dealt = all(same_host(seen[rank][0], hosts[rank % len(hosts)][0]) for rank in seen)
    if len(hosts) > 1 and dealt:
        return " (they were dealt round the nodes one by one)"
    if len(hosts) > 1 and len({host for host, _ in seen.values()}) == 1:
        return f" (all run on {seen[0][0]})"
    return ""


def explain(placement: Placement) -> tuple[dict[str, Any], ...]:
    """The explain table, group by group, in tensor-parallel order: each rank's `group` (its replica), `stage`,
    `tp_rank` and Seat, of which `device` is written as `GPU3` or `cores`."""
    rows = []
    for g, group in enumerate(placement.groups):
        replica, stage = placement.world.replica_and_stage(g)
        for tp_rank, rank in enumerate(group.ranks):
            seat = placement.seats[rank]
            written = {
                "device": "cores" if seat.device is None else f"GPU{seat.device}",
                "hca": seat.hca or "",
                "numa": "" if seat.numa is None else str(seat.numa),
                "cores": format_cpus(seat.cores),
            }
            rows.append({"group": replica, "stage": stage, "tp_rank": tp_rank} | asdict(seat) | written)
    return tuple(rows)


def matrix(fabric: Fabric, index: int) -> tuple[tuple[str, ...], ...]:
    """Node `index` as `nvidia-smi topo -m` prints it: a header row, then a row for each GPU and HCA port with the path
    to every other, the cores and the NUMA node."""
    node = fabric.nodes[index]
    keys = [d.key for d in node.devices] + [h.key for h in node.hcas]
    numa = {d.key: d.numa for d in node.devices} | {h.key: h.numa for h in node.hcas}
    cores = {n.index: n.cores for n in node.numa}
    rows = [("", *keys, "CPU affinity", "NUMA")]
    for a in keys:
        on = numa[a]
        where = ("", "") if on is None else (cores.get(on, ""), str(on))
        rows.append((a, *("X" if a == b else node.path(a, b) for b in keys), *where))
    return tuple(rows)
