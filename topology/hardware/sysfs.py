"""NUMA nodes, cores, memory, PCI paths, RDMA ports and network interfaces of this host, from files below one root. A
file that is absent or unreadable is an unknown fact, never an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .fabric import Hca, Nic, NumaNode, format_cpus, parse_cpus

_PCI = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


@dataclass(frozen=True, slots=True)
class Sysfs:
    """The tree below `root`, which holds `sys` and `proc`."""

    root: Path = Path("/")

    def text(self, path: str) -> str:
        """The file's content without the newline at its end; empty if it cannot be read."""
        try:
            return (self.root / path).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return ""

    def names(self, path: str) -> list[str]:
        """Entries of a folder, sorted with numbers in them counted: mlx5_2 before mlx5_10; empty if there is none."""
        try:
            entries = [entry.name for entry in (self.root / path).iterdir()]
        except OSError:
            return []
        return sorted(entries, key=lambda name: [int(p) if p.isdecimal() else p for p in re.split(r"([0-9]+)", name)])

    def number(self, path: str) -> int | None:
        """The file's decimal number; None if there is none or it is negative, as the kernel says "not known"."""
        text = self.text(path)
        return int(text) if text.isdecimal() else None


def numa_nodes(fs: Sysfs, allowed: Iterable[int] | None = None) -> tuple[NumaNode, ...]:
    """NUMA nodes with the `allowed` cores (None: all online). A kernel without NUMA has one node."""
    base = "sys/devices/system"
    online = set(_cpus(fs.text(f"{base}/cpu/online")))
    usable = online if allowed is None else online & set(allowed)
    names = [n for n in fs.names(f"{base}/node") if re.fullmatch(r"node[0-9]+", n)]
    lists = {int(n[4:]): _cpus(fs.text(f"{base}/node/{n}/cpulist")) for n in names} or {0: tuple(sorted(online))}
    nodes = []
    for index, cpus in sorted(lists.items()):
        here = [cpu for cpu in cpus if cpu in usable]
        if not here:
            continue
        first: dict[tuple[int, ...], int] = {}
        for cpu in here:
            threads = _cpus(fs.text(f"{base}/cpu/cpu{cpu}/topology/thread_siblings_list")) or (cpu,)
            first.setdefault(threads, cpu)
        cores = sorted(first.values())
        memory = _meminfo(fs.text(f"{base}/node/node{index}/meminfo")) or _meminfo(fs.text("proc/meminfo"))
        nodes.append(NumaNode(index, format_cpus(cores), format_cpus(set(here) - set(cores)), memory))
    return tuple(nodes)


def host_memory_bytes(fs: Sysfs) -> int:
    return _meminfo(fs.text("proc/meminfo"))


def available_bytes(fs: Sysfs) -> int:
    """Memory that processes could have now without swapping; 0 where the kernel does not say."""
    return _meminfo(fs.text("proc/meminfo"), "MemAvailable")


def resident_bytes(fs: Sysfs) -> int:
    """Resident bytes of this process; 0 where the kernel does not say."""
    words = fs.text("proc/self/statm").split()
    return int(words[1]) * 4096 if len(words) > 1 else 0


def cpu_name(fs: Sysfs) -> str:
    for line in fs.text("proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return ""


def hcas(fs: Sysfs) -> tuple[Hca, ...]:
    """Every port of every RDMA adapter, with its state, rate and link layer."""
    base = "sys/class/infiniband"
    ports = []
    for name in fs.names(base):
        for port in (p for p in fs.names(f"{base}/{name}/ports") if p.isdecimal()):
            folder = f"{base}/{name}/ports/{port}"
            layer: Literal["InfiniBand", "Ethernet"] = (
                "Ethernet" if fs.text(f"{folder}/link_layer") == "Ethernet" else "InfiniBand"
            )
            rate = re.match(r"[0-9.]+", fs.text(f"{folder}/rate"))  # "400 Gb/sec (4X NDR)"
            state = fs.text(f"{folder}/state").rpartition(":")[2].strip()  # "4: ACTIVE"
            interface = fs.text(f"{folder}/gid_attrs/ndevs/0") or next(iter(fs.names(f"{base}/{name}/device/net")), "")
            ports.append(
                Hca(
                    name,
                    layer,
                    float(rate[0]) if rate else 0.0,
                    state or "UNKNOWN",
                    int(port),
                    _pci_of(fs, f"{base}/{name}/device"),
                    fs.number(f"{base}/{name}/device/numa_node"),
                    interface,
                )
            )
    return tuple(ports)


def nics(fs: Sysfs, addresses: dict[str, list[str]]) -> tuple[Nic, ...]:
    """Every network interface with the addresses given for it."""
    interfaces = []
    for name in fs.names("sys/class/net"):
        base = f"sys/class/net/{name}"
        if not (fs.root / base).is_dir():  # bonding_masters is a file among the folders
            continue
        speed = fs.number(f"{base}/speed")  # Mbit/s; 2**32 - 1 and -1 mean that the driver does not know
        rate_valid = speed is not None and 0 < speed < 0xFFFFFFFF
        flags = fs.text(f"{base}/flags") or "0x0"
        interfaces.append(
            Nic(
                name,
                tuple(addresses.get(name, ())),
                speed / 1000 if rate_valid and speed is not None else None,
                bool(int(flags, 16) & 1) and fs.text(f"{base}/operstate") in ("up", "unknown"),
                fs.number(f"{base}/mtu") or 0,
                (fs.root / base / "device").exists() or (fs.root / base / "bonding").exists(),
                _pci_of(fs, f"{base}/device"),
                fs.number(f"{base}/device/numa_node"),
            )
        )
    return tuple(interfaces)


def pci_numa(fs: Sysfs, pci: str) -> int | None:
    return fs.number(f"sys/bus/pci/devices/{pci}/numa_node")


def pci_path(fs: Sysfs, a: str, b: str, same_numa: bool) -> str:
    """The path between two PCI functions in nvidia-smi's words, from where the two branches of the tree part."""
    one, two = _branch(fs, a), _branch(fs, b)
    if not one or not two or one[0] != two[0]:  # different host bridges (pci0000:00)
        return "NODE" if same_numa else "SYS"
    shared = 0
    while shared < min(len(one), len(two)) and one[shared] == two[shared]:
        shared += 1
    if shared <= 1:
        return "PHB"
    # Below one switch each end hangs on a downstream port of its own: at most two steps from where they part.
    return "PIX" if max(len(one), len(two)) - shared <= 2 else "PXB"


def _branch(fs: Sysfs, pci: str) -> list[str]:
    """From the host bridge down: [pci0000:00, 0000:00:01.0, …, the function]."""
    try:
        parts = (fs.root / f"sys/bus/pci/devices/{pci}").resolve(strict=True).parts
    except OSError:
        return []
    tops = [i for i, part in enumerate(parts) if re.fullmatch(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}", part)]
    return list(parts[tops[-1] :]) if tops else []


def _pci_of(fs: Sysfs, device: str) -> str:
    try:
        name = (fs.root / device).resolve(strict=True).name
    except OSError:
        return ""
    return name if _PCI.fullmatch(name) else ""


def _cpus(text: str) -> tuple[int, ...]:
    try:
        return parse_cpus(text)
    except ValueError:
        return ()


def _meminfo(text: str, name: str = "MemTotal") -> int:
    match = re.search(rf"{name}:\s*([0-9]+) kB", text)
    return int(match[1]) * 1024 if match else 0
