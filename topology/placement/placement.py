"""(Fabric, World) -> Placement: every rank's node, device, HCA, NUMA node and cores, and the
groups. A group stays on one node if it fits, else takes as few nodes as possible, evenly. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..hardware.fabric import Device, Fabric, Node
from .grid import Problem, Suits
from .layout import GroupLayout
from .seating import assign_hcas, common_interfaces, common_layer, pick_devices, share_cores, spread_over_numa
from .world import World


class PlacementError(ValueError):
    """The layout is impossible; the message has the arithmetic and the nearest possible layouts."""


@dataclass(frozen=True, slots=True)
class Seat:
    """One rank's place. `device`: CUDA ordinal (None: the rank computes on `cores`); `hca`: key of the port for traffic
    between nodes; `path`: PCIe path to it; `interface`: the one that connects to the other nodes."""

    rank: int
    hostname: str
    local_rank: int
    device: int | None
    hca: str | None
    path: str
    numa: int | None
    cores: tuple[int, ...]
    interface: str


@dataclass(frozen=True, slots=True)
class Placement:
    """`seats[rank]`; `groups[i]` is a tensor-parallel group, replica i's or, of several `stages`, the stages' of one
    replica after another. Ranks are numbered node by node, as launchers fill them. `notes` say in words what is less
    than ideal."""

    world: World
    seats: tuple[Seat, ...]
    groups: tuple[GroupLayout, ...]
    notes: tuple[str, ...] = ()

    @property
    def hosts(self) -> tuple[tuple[str, int], ...]:
        """(hostname, ranks on it) in rank order: the lines of a hostfile."""
        return tuple(Counter(seat.hostname for seat in self.seats).items())

    def replica(self, index: int) -> Placement:
        """Replica `index` as its own job: ranks and local ranks from 0, without the notes."""
        groups = [self.groups[group] for group in self.world.groups_of(index)]
        number = {rank: new for new, rank in enumerate(rank for group in groups for rank in group.ranks)}
        local: Counter[str] = Counter()
        seats = []
        for rank, new in number.items():
            seat = self.seats[rank]
            seats.append(replace(seat, rank=new, local_rank=local[seat.hostname]))
            local[seat.hostname] += 1
        layouts = (GroupLayout(tuple(tuple(number[rank] for rank in n) for n in group.nodes)) for group in groups)
        return Placement(self.world.one_replica(), tuple(seats), tuple(layouts))


def place(
    fabric: Fabric,
    world: World,
    *,
    slots: Mapping[str, int] | None = None,
    ranks_per_node: int | None = None,
    suits: Suits | None = None,
) -> Placement:
    """Lays the groups of `world` over the fabric, one rank a GPU, a replica's stages on neighbouring nodes
    or one. `slots` (by hostname) and `ranks_per_node` bound the ranks of a host; without them a CPU host gets one rank
    a NUMA node, and more only if that is too few. Raises PlacementError."""
    problem = Problem(fabric, world, slots or {}, ranks_per_node, suits)
    unknown = set(problem.slots) - {n.hostname for n in fabric.nodes}
    if unknown:
        raise PlacementError(f"slots name the host {min(unknown)!r}, the fabric has {_hosts(fabric)}")
    chosen = problem.layout(world.tp)
    if chosen is None:
        raise PlacementError(problem.refusal(world.tp))
    placement = _seat(fabric, world, chosen)
    if world.stages > 1 and any(group.ranks[-1] - group.ranks[0] >= group.size for group in placement.groups):
        raise PlacementError(
            f"{world.one_replica().keys}: two stages would share "
            "several nodes, and their ranks would not be neighbours: use a tensor_parallel_size that fills whole nodes "
            "or divides one"
        )
    return placement


def _seat(fabric: Fabric, world: World, chosen: tuple[tuple[int, ...], ...]) -> Placement:
    size = world.tp
    used = list(dict.fromkeys(i for group in chosen for i in group))
    nodes = [fabric.nodes[i] for i in used]
    layer = common_layer(nodes)
    interfaces = common_interfaces(nodes)
    seats: list[Seat] = []
    ranks: dict[tuple[int, int], tuple[int, ...]] = {}
    for i, node, nic in zip(used, nodes, interfaces, strict=True):
        here = [g for g, group in enumerate(chosen) if i in group]
        places = _places(node, [size // len(chosen[g]) for g in here])
        ports = assign_hcas(node, [(device, numa) for device, numa, _ in places], layer)
        first = len(seats)
        for local_rank, ((device, numa, cores), port) in enumerate(zip(places, ports, strict=True)):
            seats.append(
                Seat(
                    rank=first + local_rank,
                    hostname=node.hostname,
                    local_rank=local_rank,
                    device=None if device is None else device.index,
                    hca=port[0].key if port else None,
                    path=port[1] if port else "",
                    numa=numa,
                    cores=cores,
                    interface=nic.name if nic else "",
                )
            )
        for group in here:
            ranks[group, i] = tuple(range(first, first + size // len(chosen[group])))
            first += size // len(chosen[group])
    layouts = (GroupLayout(tuple(ranks[g, i] for i in group)) for g, group in enumerate(chosen))
    groups = tuple(sorted(layouts, key=lambda layout: layout.ranks))
    notes = (*_notes(fabric, groups, seats, layer, nodes), *_unmet(groups, seats))
    return Placement(world, tuple(seats), groups, notes)


def _places(node: Node, counts: Sequence[int]) -> list[tuple[Device | None, int | None, tuple[int, ...]]]:
    """(device, NUMA node, cores) of each seat of a node, for groups of these counts one after another."""
    if not node.devices:
        return [(None, numa, cores) for numa, cores in spread_over_numa(node, sum(counts))]
    free, picked = list(node.devices), list[Device]()
    for count in counts:
        chosen = pick_devices(node, free, count)
        picked.extend(chosen)
        free = [d for d in free if d not in chosen]
    cores = share_cores(node, [d.numa for d in picked])
    return [(device, device.numa, share) for device, share in zip(picked, cores, strict=True)]


def _notes(
    fabric: Fabric, groups: Sequence[GroupLayout], seats: Sequence[Seat], layer: str | None, nodes: Sequence[Node]
) -> list[str]:
    notes = []
    gpus = {n.hostname: n.traits()["gpus"] for n in nodes}
    for g, group in enumerate(groups):
        kinds = dict.fromkeys(gpus[seats[ranks[0]].hostname] for ranks in group.nodes)
        if len(kinds) > 1:
            notes.append(f"group {g} mixes {' with '.join(kinds)}: its slowest device sets the pace")
    if any(n.devices for n in fabric.nodes):
        bare = [n.hostname for n in fabric.nodes if not n.devices]
        notes += [f"left out, having no GPU: {', '.join(bare)}"] if bare else []
    if any(len(g.nodes) > 1 for g in groups) and layer is None and any(n.devices for n in nodes):
        without = [n.hostname for n in nodes if not any(h.active for h in n.hcas)]
        why = f"no active HCA on {', '.join(without)}" if without else "no link layer that all nodes share"
        notes.append(f"{why}: traffic between nodes goes over TCP")
    return notes


def _unmet(groups: Sequence[GroupLayout], seats: Sequence[Seat]) -> list[str]:
    notes = []
    if any(len(g.nodes) > 1 for g in groups) and not seats[0].interface:
        notes.append("no network that all nodes have an address in: name one with launch.interface")
    torn = [g for g, group in enumerate(groups) if group.ranks[-1] - group.ranks[0] >= group.size]
    if torn:
        notes.append(
            f"the ranks of group {torn[0]} are not contiguous, as groups share the nodes they span: "
            "start each replica as a job of its own (serve does)"
        )
    return notes


def _hosts(fabric: Fabric) -> str:
    return ", ".join(n.hostname for n in fabric.nodes)
