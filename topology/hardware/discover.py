"""This host as a Node and all ranks' hosts as a Fabric: NVML for GPUs, sysfs for everything else."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..json_codec import ReadError, build, layered, parse, unbuild
from .cpu_quota import memory_bytes
from .cpu_tier import cpu_flags, detect
from .fabric import Device, Fabric, Hca, Link, Node, NumaNode, format_cpus, parse_cpus
from .interfaces import addresses
from .nvml import Gpus, gpus, load_nvml
from .sysfs import Sysfs, cpu_name, hcas, nics, numa_nodes, pci_numa, pci_path

AllGather = Callable[[bytes], list[bytes]]
"""Every rank's bytes, in rank order, on every rank."""

MAX_NODE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Discovery:
    """A host, and notes about what could not be read."""

    node: Node
    notes: tuple[str, ...] = ()


class DiscoveryError(ValueError):
    """The host's description, or the ranks' descriptions of it, are inconsistent; the message has the fix."""


def discover(visible_devices: str | None = None) -> Discovery:
    """Discovers this machine. `visible_devices`: CUDA_VISIBLE_DEVICES, which NVML ignores."""
    allowed = os.sched_getaffinity(0)
    return read_host(Sysfs(), load_nvml(), addresses(), socket.gethostname(), allowed, visible_devices)


def read_host(
    fs: Sysfs,
    nvml: Any | None,
    interface_addresses: dict[str, list[str]],
    hostname: str,
    allowed: set[int] | None = None,
    visible_devices: str | None = None,
) -> Discovery:
    """Reads a host as Node, from a file tree, an NVML module, its interfaces' addresses and the allowed CPUs."""
    gpu_set = select(gpus(nvml), visible_devices)
    numa = numa_nodes(fs, allowed)
    numa_ids = {n.index for n in numa}
    devices = tuple(replace(d, numa=_known(pci_numa(fs, d.pci), numa_ids)) for d in gpu_set.devices)
    ports = tuple(replace(h, numa=_known(h.numa, numa_ids)) for h in hcas(fs))
    node = Node(
        hostname=hostname,
        numa=numa,
        memory_bytes=memory_bytes(fs),
        cpu=cpu_name(fs),
        devices=devices,
        hcas=ports,
        nics=nics(fs, interface_addresses),
        links=_links(fs, gpu_set, devices, ports),
        driver=gpu_set.driver,
        nvswitch=gpu_set.nvswitch,
        cpu_tier=detect(cpu_flags(fs.root / "proc/cpuinfo"), platform.machine()),
    )
    has_gpus = any(
        fs.text(f"sys/bus/pci/devices/{name}/vendor") == "0x10de" for name in fs.names("sys/bus/pci/devices")
    )
    return Discovery(node, (gpu_set.note,) if gpu_set.note and has_gpus else ())


def _known(numa: int | None, indices: set[int]) -> int | None:
    return numa if numa in indices else None


def select(available: Gpus, visible_devices: str | None) -> Gpus:
    """The GPUs of CUDA_VISIBLE_DEVICES in CUDA's order. Raises DiscoveryError for an unknown entry."""
    if visible_devices is None:
        return available
    order: list[int] = []
    for entry in filter(None, (part.strip() for part in visible_devices.split(","))):
        if entry == "-1":
            break
        match = [
            d.index for d in available.devices if entry == str(d.index) or (len(entry) > 4 and d.uuid.startswith(entry))
        ]
        if len(match) != 1 or match[0] in order:
            raise DiscoveryError(
                f"CUDA_VISIBLE_DEVICES={visible_devices!r}: {entry!r} is not one of this host's "
                f"{len(available.devices)} GPUs: use each index or UUID once"
            )
        order.append(match[0])
    number = {old: new for new, old in enumerate(order)}
    devices = tuple(replace(available.devices[old], index=new) for old, new in number.items())
    pairs = sorted((*sorted((number[a], number[b])), n) for a, b, n in available.nvlinks if a in number and b in number)
    return replace(available, devices=devices, nvlinks=tuple((a, b, n) for a, b, n in pairs))


def _links(fs: Sysfs, available: Gpus, devices: Sequence[Device], ports: Sequence[Hca]) -> tuple[Link, ...]:
    nvlinks = {(a, b): count for a, b, count in available.nvlinks}
    ends = [(d.key, d.pci, d.numa) for d in devices] + [(h.key, h.pci, h.numa) for h in ports]
    links = []
    for i, (a, a_pci, a_numa) in enumerate(ends[: len(devices)]):
        for j, (b, b_pci, b_numa) in enumerate(ends[i + 1 :], i + 1):
            count = nvlinks.get((i, j), 0)
            same = a_numa is not None and a_numa == b_numa
            links.append(Link(a, b, f"NV{count}" if count else pci_path(fs, a_pci, b_pci, same)))
    return tuple(links)


def gather(node: Node, all_gather: AllGather) -> Fabric:
    """Gathers all ranks' hosts in the order of their first ranks. Raises DiscoveryError if ranks of a host differ."""
    mine = layered(unbuild(node)).encode()
    if len(mine) > MAX_NODE_BYTES:
        all_gather(b"")  # for which the others wait
        raise DiscoveryError(f"host {node.hostname} is {len(mine)} bytes of JSON, at most {MAX_NODE_BYTES} are sent")
    merged: dict[str, Node] = {}
    first: dict[str, int] = {}
    for rank, data in enumerate(all_gather(mine)):
        if len(data) > MAX_NODE_BYTES:
            raise DiscoveryError(f"rank {rank} sent {len(data)} bytes, at most {MAX_NODE_BYTES} are read")
        try:
            other = build(Node, parse(data))
        except ReadError as error:
            raise DiscoveryError(f"rank {rank} sent no host: {error}") from None
        host = other.hostname
        if host in merged:
            merged[host] = _merge(merged[host], other, first[host], rank)
        else:
            merged[host], first[host] = other, rank
    return Fabric(tuple(merged.values()))


def _merge(one: Node, two: Node, first: int, rank: int) -> Node:
    """Merges the nodes of two ranks on one host: a launcher may bind them to different cores, but both must see the
    same GPUs."""
    if [d.uuid or d.pci for d in one.devices] != [d.uuid or d.pci for d in two.devices]:
        raise DiscoveryError(
            f"ranks {first} and {rank} on host {one.hostname} see different GPUs "
            f"({len(one.devices)} and {len(two.devices)}): let every rank see all of its node's GPUs "
            f"(srun --gpu-bind=none, no CUDA_VISIBLE_DEVICES a rank): placement gives each its own"
        )
    numa = {n.index: n for n in one.numa}
    for other in two.numa:
        mine = numa.get(other.index, NumaNode(other.index, "", "", other.memory_bytes))
        cores = set(parse_cpus(mine.cores)) | set(parse_cpus(other.cores))
        siblings = (set(parse_cpus(mine.siblings)) | set(parse_cpus(other.siblings))) - cores
        numa[other.index] = replace(mine, cores=format_cpus(cores), siblings=format_cpus(siblings))
    return replace(one, numa=tuple(numa[index] for index in sorted(numa)))
