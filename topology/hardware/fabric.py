"""The fabric as frozen data: nodes, devices, HCAs, network interfaces, NUMA nodes and the paths between them; saved as
JSON. No torch.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

from .. import json_codec
from ..json_codec import ReadError, layered, unbuild, write_file
from .cpu_tier import Tier

KIND, VERSION = "laddertron.fabric", 1
MAX_CPUS = 1 << 16

LinkClass = Literal["nvlink", "pcie", "shm", "ib", "roce", "tcp"]
"""How two ranks reach each other: three kinds inside a node, three between nodes."""

PATHS = ("PIX", "PXB", "PHB", "NODE", "SYS")
"""PCIe paths, nearest first, in nvidia-smi's words: one bridge, several, through a host bridge, between host bridges
of one NUMA node, between NUMA nodes. `NV4` is a path of four NVLinks."""

_PATH = re.compile(r"NV[1-9][0-9]?|" + "|".join(PATHS))


@dataclass(frozen=True, slots=True)
class NumaNode:
    """`cores` has one logical CPU per physical core, `siblings` the other threads; both as `0-55,112`."""

    index: int
    cores: str
    siblings: str = ""
    memory_bytes: int = 0

    def __post_init__(self) -> None:
        parse_cpus(self.cores)
        parse_cpus(self.siblings)

    @property
    def core_ids(self) -> tuple[int, ...]:
        return parse_cpus(self.cores)


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU. `index` is its CUDA ordinal in PCI order. Bandwidths are bytes/s, `nvlink_bandwidth` of all its links in
    one direction; FLOP/s are dense. None: not known."""

    index: int
    name: str
    memory_bytes: int
    pci: str = ""
    uuid: str = ""
    numa: int | None = None
    memory_bandwidth: float | None = None
    nvlink_bandwidth: float | None = None
    bf16_flops: float | None = None
    fp8_flops: float | None = None
    multiprocessors: int | None = None

    @property
    def key(self) -> str:
        """Its name in `Link`."""
        return f"GPU{self.index}"


@dataclass(frozen=True, slots=True)
class Hca:
    """One port of an RDMA adapter: `mlx5_0` port 1. `interface` is its network device, if it has one."""

    name: str
    link_layer: Literal["InfiniBand", "Ethernet"]
    gbit_per_s: float
    state: str = "ACTIVE"
    port: int = 1
    pci: str = ""
    numa: int | None = None
    interface: str = ""

    @property
    def active(self) -> bool:
        return self.state == "ACTIVE"

    @property
    def key(self) -> str:
        """Its name in `Link` and for NCCL_IB_HCA."""
        return self.name if self.port == 1 else f"{self.name}:{self.port}"

    @property
    def bytes_per_s(self) -> float:
        return self.gbit_per_s * 1e9 / 8


@dataclass(frozen=True, slots=True)
class Nic:
    """A network interface. `addresses` are `10.0.0.1/24` or IPv6 alike; no speed: the kernel does not say."""

    name: str
    addresses: tuple[str, ...] = ()
    gbit_per_s: float | None = None
    up: bool = True
    mtu: int = 1500
    physical: bool = True
    pci: str = ""
    numa: int | None = None


@dataclass(frozen=True, slots=True)
class Link:
    """The path between two devices or a device and an HCA port of one node, by their keys; a path has no direction."""

    a: str
    b: str
    path: str

    def __post_init__(self) -> None:
        if not _PATH.fullmatch(self.path):
            raise ValueError(f"path {self.path!r} between {self.a} and {self.b}: expected NV1…NV99, {', '.join(PATHS)}")


@dataclass(frozen=True)
class Node:
    """One host. A host without devices computes on its cores; `cpu_tier` is their own, never a forced one."""

    hostname: str
    numa: tuple[NumaNode, ...]
    memory_bytes: int
    cpu: str = ""
    devices: tuple[Device, ...] = ()
    hcas: tuple[Hca, ...] = ()
    nics: tuple[Nic, ...] = ()
    links: tuple[Link, ...] = ()
    driver: str = ""
    nvswitch: bool = False
    cpu_tier: Tier | None = None

    def __post_init__(self) -> None:
        numa_ids = {n.index for n in self.numa}
        for what, names in (
            ("NUMA node", [str(n.index) for n in self.numa]),
            ("core", [str(c) for n in self.numa for c in parse_cpus(n.cores) + parse_cpus(n.siblings)]),
            ("device", [d.key for d in self.devices]),
            ("HCA port", [h.key for h in self.hcas]),
            ("interface", [n.name for n in self.nics]),
            ("link", ["-".join(sorted((k.a, k.b))) for k in self.links]),
        ):
            twice = [name for name, count in Counter(names).items() if count > 1]
            if twice:
                raise ValueError(f"host {self.hostname}: duplicate {what} {twice[0]}")
        if not self.hostname or not any(n.cores for n in self.numa):
            raise ValueError(f"host {self.hostname!r}: a host has a name and at least one core")
        for key, numa in [(d.key, d.numa) for d in self.devices] + [(h.key, h.numa) for h in self.hcas]:
            if numa is not None and numa not in numa_ids:
                raise ValueError(f"host {self.hostname}: {key} is on NUMA node {numa}, the host has {sorted(numa_ids)}")
        ends = {d.key for d in self.devices} | {h.key for h in self.hcas}
        for link in self.links:
            if link.a not in ends or link.b not in ends or link.a == link.b:
                raise ValueError(f"host {self.hostname}: link {link.a}-{link.b} joins no two of {sorted(ends)}")

    @property
    def cores(self) -> tuple[int, ...]:
        return tuple(core for numa in self.numa for core in numa.core_ids)

    def path(self, a: str, b: str) -> str:
        """The path between two keys; where no link is recorded, what the NUMA nodes say (NODE or SYS)."""
        if path := self._linked.get((a, b)):
            return path
        return "NODE" if self._numa[a] is not None and self._numa[a] == self._numa[b] else "SYS"

    @cached_property
    def _linked(self) -> dict[tuple[str, str], str]:
        return {ends: link.path for link in self.links for ends in ((link.a, link.b), (link.b, link.a))}

    @cached_property
    def _numa(self) -> dict[str, int | None]:
        return {d.key: d.numa for d in self.devices} | {h.key: h.numa for h in self.hcas}

    @property
    def nvlinks(self) -> int:
        """NVLinks between the node's devices, summed over pairs."""
        devices = {d.key for d in self.devices}
        return sum(int(k.path[2:]) for k in self.links if k.path.startswith("NV") and {k.a, k.b} <= devices)

    def traits(self) -> dict[str, str]:
        """The hardware of this node that determines the speed of collectives, in words; compared and hashed. Has no
        host names, addresses or serial numbers, so that another pair of the same machines is the same fabric."""
        paths = sorted(Counter(k.path for k in self.links if k.a.startswith("GPU") and k.b.startswith("GPU")).items())
        ports = [h.key for h in self.hcas if h.active]
        to_hcas = Counter(min((self.path(d.key, p) for p in ports), key=_distance) for d in self.devices if ports)
        rates = Counter(f"{h.link_layer} {h.gbit_per_s:g} Gb/s" for h in self.hcas if h.active)
        speeds = Counter(f"{n.gbit_per_s:g} Gb/s" for n in self.nics if n.up and n.physical and n.gbit_per_s)
        return {
            "gpus": _tally(Counter(d.name for d in self.devices)),
            "gpu paths": ", ".join(f"{count} x {path}" for path, count in paths) or "none",
            "paths to hcas": _tally(to_hcas),
            "hcas": _tally(rates),
            "nics": _tally(speeds),
            "cpu": self.cpu or "unknown",
            "cores": " + ".join(str(len(n.core_ids)) for n in self.numa),
        }


@dataclass(frozen=True, slots=True)
class Fabric:
    """All nodes, in the order in which ranks are given out unless placement knows a better one."""

    nodes: tuple[Node, ...]
    name: str = ""

    def __post_init__(self) -> None:
        twice = [host for host, count in Counter(n.hostname for n in self.nodes).items() if count > 1]
        if twice:
            raise ValueError(f"duplicate host {twice[0]!r} in the fabric: name each host once")
        if not self.nodes:
            raise ValueError("nodes=[]: a fabric has at least one node")

    @property
    def digest(self) -> str:
        """32 hex digits over the nodes' traits: equal for fabrics that a tuning file may be shared between."""
        text = json.dumps(sorted(json.dumps(n.traits(), sort_keys=True) for n in self.nodes))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def only(self, hostnames: Iterable[str]) -> Fabric:
        """The fabric of these hosts, in this order. Raises ValueError naming a host that it does not have."""
        by_name = {n.hostname: n for n in self.nodes}
        chosen = []
        for host in hostnames:
            if host not in by_name:
                raise ValueError(
                    f"host {host!r} is not in the fabric, which has {', '.join(by_name)}: `laddertron launch CONFIG "
                    "topo` looks at all of CONFIG's hosts, `laddertron launch CONFIG topo --save FILE` keeps them"
                )
            chosen.append(by_name[host])
        return replace(self, nodes=tuple(chosen))

    def to_json(self) -> str:
        """A file that anyone can read back; one link or interface a line."""
        head = {"kind": KIND, "version": VERSION, "name": self.name}
        return layered({**head, **unbuild(self)})

    def save(self, path: Path) -> None:
        write_file(path, self.to_json() + "\n")


def load(path: Path) -> Fabric:
    """The fabric in the file at `path`. Raises ReadError naming the file and the place in it, OSError."""
    try:
        return json_codec.load(Fabric, path, KIND, VERSION)
    except FileNotFoundError:
        raise ReadError(f"{path}: no such file: `laddertron launch CONFIG topo --save` writes it") from None


def parse_cpus(text: str) -> tuple[int, ...]:
    """`0-3,8` -> (0, 1, 2, 3, 8). Raises ValueError."""
    cpus: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or int(last or first) >= MAX_CPUS:
            raise ValueError(f"cores {text!r}: expected a list such as 0-55,112 of numbers below {MAX_CPUS}")
        cpus.extend(range(int(first), int(last or first) + 1))
    return tuple(cpus)


def counted(number: int, noun: str) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{number} {noun}{'s' * (number != 1)}"


def format_cpus(cpus: Iterable[int]) -> str:
    """The inverse of `parse_cpus`: sorted, runs as ranges."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and runs[-1][1] == cpu - 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def differences(made_for: tuple[dict[str, str], ...], fabric: Fabric) -> list[str]:
    """In words, what differs between the traits a file was made for and this fabric; empty if nothing does."""
    here = [n.traits() for n in fabric.nodes]
    lines = []
    if len(made_for) != len(here):
        lines.append(f"nodes: {len(made_for)} there, {len(here)} here")
    there_sorted = sorted(made_for, key=lambda t: sorted(t.items()))
    here_sorted = sorted(here, key=lambda t: sorted(t.items()))
    for there, now in zip(there_sorted, here_sorted, strict=False):
        for key in sorted(there.keys() | now.keys()):
            if there.get(key) != now.get(key):
                lines.append(f"{key}: {there.get(key, 'not recorded')} there, {now.get(key, 'not recorded')} here")
    return list(dict.fromkeys(lines))


def _distance(path: str) -> int:
    """A path's rank by distance: less is nearer; NVLinks are nearest."""
    return PATHS.index(path) if path in PATHS else -1


def _tally(counts: Counter[str]) -> str:
    return ", ".join(f"{count} x {name}" for name, count in sorted(counts.items())) or "none"
