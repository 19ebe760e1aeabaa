"""Assigns hosts, devices, interfaces and HCAs to replicas. Pure. Without a fabric a group stays on one host where it
fits, else spans the fewest whole hosts evenly; with one, topology/placement/placement.py decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...topology.hardware.fabric import Fabric, counted
from ...topology.placement.placement import Placement, place
from ...topology.placement.world import World
from .hosts import Host, HostAllocation, LaunchError


@dataclass(frozen=True, slots=True)
class Route:
    """How this machine reaches the other hosts of a job: `interface` with its `address` routes to `peer`, an address of
    the listed host `name`. `subnet`: of the interface, if every host has an address in it, else ""."""

    peer: str
    name: str
    interface: str
    address: str
    subnet: str = ""

    @property
    def reason(self) -> str:
        return f"{self.interface} ({self.address}) routes to {self.name}; launch.interface overrides it"


@dataclass(frozen=True, slots=True)
class JobHosts:
    """One job's hosts in the order of its ranks. `interfaces` and `hcas` (port keys, `mlx5_0`, `mlx5_0:2`): chosen by
    the placement; () without a fabric. `route`: where neither placement nor configuration chooses an interface."""

    hosts: tuple[Host, ...]
    interfaces: tuple[str, ...] = ()
    hcas: tuple[str, ...] = ()
    route: Route | None = None

    @property
    def ranks(self) -> int:
        return sum(host.slots for host in self.hosts)


def divide(available: HostAllocation, world: World, fabric: Fabric | None) -> tuple[JobHosts, ...]:
    """Each replica's share, by stage. Raises LaunchError or PlacementError if it does not fit or leaves allocated nodes
    unused."""
    if fabric is not None:
        slots = {h.name: h.slots for h in available.hosts}
        try:
            seated = fabric.only(slots)
        except ValueError as error:
            raise LaunchError(f"{error}; or remove launch.fabric") from None
        placement = place(seated, world, slots=slots)
        shares = tuple(_placed(placement.replica(index), seated) for index in range(world.replicas))
    else:
        shares = _in_order(available, world)
    used = {h.name for share in shares for h in share.hosts}
    idle = [h.name for h in available.hosts if h.name not in used]
    if available.allocation and idle:
        total = len(available.hosts)
        raise LaunchError(
            f"{world.product} ranks use {total - len(idle)} of {total} allocated nodes: "
            f"{', '.join(idle[:8])}{' …' if len(idle) > 8 else ''} would be unused: allocate fewer nodes, or "
            f"raise parallel.tensor_parallel_size or parallel.replicas, or lower launch.ranks_per_node"
        )
    return shares


def _placed(placement: Placement, fabric: Fabric) -> JobHosts:
    hosts = []
    all_devices = {n.hostname: tuple(d.index for d in n.devices) for n in fabric.nodes}
    for name, count in placement.hosts:
        seats = [seat for seat in placement.seats if seat.hostname == name]
        devices = tuple(seat.device for seat in seats if seat.device is not None)
        usual = not devices or devices == all_devices[name]
        cores = tuple(seat.cores for seat in seats)
        hosts.append(Host(name, count, None if usual else devices, seats[0].interface, cores))
    interfaces = dict.fromkeys(seat.interface for seat in placement.seats if seat.interface)
    hcas = dict.fromkeys(seat.hca for seat in placement.seats if seat.hca)
    if len(hosts) == 1:
        return JobHosts(tuple(hosts))
    return JobHosts(tuple(hosts), tuple(interfaces), tuple(sorted(hcas)))


def _in_order(available: HostAllocation, world: World) -> tuple[JobHosts, ...]:
    hosts, tp = available.hosts, world.tp
    used = [0] * len(hosts)
    shares: list[JobHosts] = []
    at = 0
    for replica, stage in map(world.replica_and_stage, range(world.groups)):
        chosen = _next(hosts, used, at, tp)
        if chosen is None:
            have = " + ".join(str(h.slots) for h in hosts[:12]) + (" + …" if len(hosts) > 12 else "")
            slots = "1 slot" if have == "1" else f"{have} slots"
            which = f"stage {stage} of replica {replica}" if world.stages > 1 else f"replica {replica}"
            taken = f", {counted(replica, 'replica')} placed before it" if replica else ""
            raise LaunchError(
                f"{which} of {world.replicas} does not fit: need {counted(tp, 'slot')} on one host or in equal numbers "
                f"on several, have {slots} on {counted(len(hosts), 'host')} ({available.source}){taken}: add hosts or "
                "slots, or lower parallel.tensor_parallel_size or parallel.replicas"
            )
        if stage == 0:
            begun: dict[int, tuple[int, int]] = {}  # host -> its first slot of this replica, and how many
        for index, count in chosen:
            first, before = begun.get(index, (used[index], 0))
            begun[index] = first, before + count
            used[index] += count
        at = chosen[-1][0]
        if stage == world.stages - 1:
            shares.append(JobHosts(tuple(_part(hosts[index], *slots) for index, slots in begun.items())))
    return tuple(shares)


def _part(host: Host, first: int, count: int) -> Host:
    return Host(host.name, count, None if count == host.slots else tuple(range(first, first + count)))


def _next(hosts: Sequence[Host], used: Sequence[int], at: int, tp: int) -> list[tuple[int, int]] | None:
    for index in range(at, len(hosts)):
        if hosts[index].slots - used[index] >= tp:
            return [(index, tp)]
    free = [i for i in range(at, len(hosts)) if used[i] == 0]
    for count in range(2, len(free) + 1):
        part, rest = divmod(tp, count)
        if rest == 0 and part and all(hosts[i].slots >= part for i in free[:count]):
            return [(i, part) for i in free[:count]]
    return None


def together(shares: Sequence[JobHosts]) -> JobHosts:
    """All replicas as one job: each host once, its ranks and devices added up. Raises LaunchError if hosts differ."""
    by_name: dict[str, Host] = {}
    for host in (h for share in shares for h in share.hosts):
        before = by_name.get(host.name)
        if before is None:
            by_name[host.name] = host
        else:
            both = before.devices is not None and host.devices is not None
            devices = (*(before.devices or ()), *(host.devices or ())) if both else None
            cores = (*before.cores, *host.cores)
            by_name[host.name] = replace(before, slots=before.slots + host.slots, devices=devices, cores=cores)
    if len({h.slots for h in by_name.values()}) > 1:
        counts = ", ".join(f"{h.name} {h.slots}" for h in by_name.values())
        raise LaunchError(f"a job needs the same number of ranks on each host, got {counts}: change hosts or replicas")
    interfaces = dict.fromkeys(name for share in shares for name in share.interfaces)
    hcas = {name for share in shares for name in share.hcas}
    route = next((share.route for share in shares if share.route is not None), None)
    return JobHosts(tuple(by_name.values()), tuple(interfaces), tuple(sorted(hcas)), route)
