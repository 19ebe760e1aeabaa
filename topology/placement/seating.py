"""Assigns ranks inside the chosen nodes: devices near one another, the nearest HCA, a share of the NUMA node's cores,
and the network interface that all nodes can meet on. Pure; placement.py asks.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from ..hardware.fabric import PATHS, Device, Hca, Nic, Node

_NEAR = {path: distance for distance, path in enumerate(PATHS)}


def pick_devices(node: Node, free: Sequence[Device], count: int) -> tuple[Device, ...]:
    """`count` of the free devices: within one NVLink clique if one has room, else within one NUMA node, else any; of
    several with room, the fullest, so that large ones stay whole for the next group."""
    for parts in (_cliques(node), _numa_parts(node)):
        rooms = [[d for d in free if d.index in part] for part in parts]
        rooms = [room for room in rooms if len(room) >= count]
        if rooms:
            room = min(rooms, key=lambda room: (len(room), room[0].index))
            return tuple(sorted(room, key=_by_numa)[:count])
    return tuple(sorted(free, key=_by_numa)[:count])


def _by_numa(device: Device) -> tuple[int, int]:
    return (-1 if device.numa is None else device.numa, device.index)


def _cliques(node: Node) -> list[set[int]]:
    """Sets of device indices that NVLink joins, directly or in steps; devices without NVLink are in none."""
    index = {d.key: d.index for d in node.devices}
    parts: list[set[int]] = []
    for link in node.links:
        if link.path.startswith("NV") and link.a in index and link.b in index:
            joined = {index[link.a], index[link.b]}
            for part in [p for p in parts if p & joined]:
                joined |= part
                parts.remove(part)
            parts.append(joined)
    return sorted(parts, key=min)


def _numa_parts(node: Node) -> list[set[int]]:
    return [{d.index for d in node.devices if d.numa == numa.index} for numa in node.numa]


def common_layer(nodes: Sequence[Node]) -> str | None:
    """InfiniBand if every node has an active port of it, else Ethernet (RoCE) if every node has, else None."""
    for layer in ("InfiniBand", "Ethernet"):
        if all(any(h.active and h.link_layer == layer for h in node.hcas) for node in nodes):
            return layer
    return None


def assign_hcas(
    node: Node, seats: Sequence[tuple[Device | None, int | None]], layer: str | None
) -> tuple[tuple[Hca, str] | None, ...]:
    """For every seat (its device, its NUMA node) the nearest active port of `layer` with the path to it; among equally
    near ones the least used, the fastest, the first: so GPUs and HCAs that come in pairs stay paired."""
    ports = [h for h in node.hcas if h.active and h.link_layer == layer]
    load: Counter[str] = Counter()
    nearest: list[tuple[Hca, str] | None] = []
    paths = {frozenset((k.a, k.b)): k.path for k in node.links}
    for device, numa in seats:
        choices = []
        for order, port in enumerate(ports):
            same = "NODE" if numa is not None and numa == port.numa else "SYS"
            path = same if device is None else paths.get(frozenset((device.key, port.key)), same)
            choices.append((_NEAR.get(path, -1), load[port.key], -port.gbit_per_s, order, path))
        if not choices:
            nearest.append(None)
            continue
        best = min(choices)
        load[ports[best[3]].key] += 1
        nearest.append((ports[best[3]], best[4]))
    return tuple(nearest)


def share_cores(node: Node, numas: Sequence[int | None]) -> tuple[tuple[int, ...], ...]:
    """For every seat, given its NUMA node (None: not known), its own share of that node's cores: the seats of a NUMA
    node divide it evenly, the first ones taking what is left over. With more seats than cores, seats share."""
    everywhere = node.cores
    by_index = {n.index: n.core_ids for n in node.numa}
    cores_of_seats = [by_index.get(-1 if numa is None else numa) or everywhere for numa in numas]
    sharers = Counter(cores_of_seats)
    seen: Counter[tuple[int, ...]] = Counter()
    shares = []
    for cores in cores_of_seats:
        shares.append(_share(cores, seen[cores], sharers[cores]))
        seen[cores] += 1
    return tuple(shares)


def _share(cores: tuple[int, ...], turn: int, of: int) -> tuple[int, ...]:
    if of > len(cores):
        return (cores[turn % len(cores)],)
    share, over = divmod(len(cores), of)
    start = turn * share + min(turn, over)
    return cores[start : start + share + (turn < over)]


def spread_over_numa(node: Node, seats: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """For a host without devices: (first NUMA node, cores) of each seat. Fewer seats than NUMA nodes take several
    whole ones each; more seats divide a NUMA node's cores."""
    numa = [n for n in node.numa if n.core_ids]
    if seats <= len(numa):
        bounds = [i * len(numa) // seats for i in range(seats + 1)]
        parts = [numa[a:b] for a, b in pairwise(bounds)]
        return tuple((part[0].index, tuple(core for n in part for core in n.core_ids)) for part in parts)
    chosen = [numa[i * len(numa) // seats].index for i in range(seats)]
    return tuple(zip(chosen, share_cores(node, chosen), strict=True))


def common_interfaces(nodes: Sequence[Node]) -> tuple[Nic | None, ...]:
    """For each node the interface to meet the others on: up, with an address in a network that every node has an
    address of its own in (a bridge that repeats the same address on every host leads nowhere), physical before
    virtual, fastest first. One node alone: its loopback. None everywhere if there is no such network."""
    if len(nodes) == 1:
        return (next((n for n in nodes[0].nics if n.name == "lo"), None),)
    networks: dict[str, list[tuple[Nic, str] | None]] = {}
    for i, node in enumerate(nodes):
        for nic in node.nics:
            for text in nic.addresses if nic.up else ():
                address = ipaddress.ip_interface(text)
                if not address.is_loopback and not address.is_link_local:
                    row = networks.setdefault(str(address.network), [None] * len(nodes))
                    current = row[i]
                    if current is None or _speed(nic) > _speed(current[0]):
                        row[i] = (nic, str(address.ip))
    best: tuple[tuple[bool, bool, float], tuple[Nic, ...]] | None = None
    for name, row in networks.items():
        here = [entry for entry in row if entry is not None]
        if len(here) < len(nodes) or len({ip for _, ip in here}) < len(nodes):
            continue
        nics = tuple(nic for nic, _ in here)
        rank = (all(n.physical for n in nics), ":" not in name, min(_speed(n) for n in nics))
        if best is None or rank > best[0]:
            best = (rank, nics)
    return best[1] if best else (None,) * len(nodes)


def _speed(nic: Nic) -> float:
    return nic.gbit_per_s or 0.0
