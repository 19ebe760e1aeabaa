"""Discovery from small file trees and a scripted driver: what the kernel says becomes a Node, ranks' hosts a Fabric."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
from laddertron.topology.hardware.cpu_quota import memory_bytes
from laddertron.topology.hardware.cpu_tier import VARIABLE
from laddertron.topology.hardware.discover import Discovery, DiscoveryError, discover, gather, read_host
from laddertron.topology.hardware.fabric import Fabric, Node, NumaNode
from laddertron.topology.hardware.interfaces import addresses
from laddertron.topology.hardware.nvml import gpus, pci_name
from laddertron.topology.hardware.sysfs import Sysfs, nics, numa_nodes, pci_path
from laddertron.topology.json_codec import unbuild
from laddertron.topology.placement.placement import place
from laddertron.topology.placement.world import World


class Tree:
    """A root folder with the parts of /sys and /proc that discovery reads."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, text: object) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def cpus(self, numa: dict[int, str], threads: int = 1) -> None:
        """NUMA nodes by their cpulist; with two threads a core, the siblings lie half of all CPUs further on."""
        count = sum(len(range(int(t.split("-")[0]), int(t.split("-")[1]) + 1)) for t in numa.values())
        total = count * threads
        self.write("sys/devices/system/cpu/online", f"0-{total - 1}")
        self.write("proc/meminfo", "MemTotal:       2000000 kB\nMemFree: 1 kB")
        self.write("proc/cpuinfo", "processor\t: 0\nmodel name\t: A Processor\n\nprocessor\t: 1")
        for index, text in numa.items():
            first, last = map(int, text.split("-"))
            more = f",{first + count}-{last + count}" if threads == 2 else ""
            self.write(f"sys/devices/system/node/node{index}/cpulist", text + more)
            self.write(f"sys/devices/system/node/node{index}/meminfo", f"Node {index} MemTotal:       1000000 kB")
        for cpu in range(total):
            siblings = f"{cpu % count},{cpu % count + count}" if threads == 2 else cpu
            self.write(f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", siblings)

    def pci(self, *branch: str, numa: int = 0, vendor: str = "0x15b3") -> str:
        """A PCI function at the end of a branch of bridges, from the host bridge (`pci0000:00`) down."""
        folder = "sys/devices/" + "/".join(branch)
        self.write(f"{folder}/numa_node", numa)
        self.write(f"{folder}/vendor", vendor)
        link = self.root / "sys/bus/pci/devices" / branch[-1]
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(self.root / folder)
        return branch[-1]

    def hca(self, name: str, pci: str, rate: str, state: str, layer: str, port: int = 1, netdev: str = "") -> None:
        base = self.root / "sys/class/infiniband" / name
        base.mkdir(parents=True, exist_ok=True)
        if not (base / "device").exists():
            (base / "device").symlink_to(self.root / "sys/bus/pci/devices" / pci)
        folder = f"sys/class/infiniband/{name}/ports/{port}"
        self.write(f"{folder}/rate", rate)
        self.write(f"{folder}/state", state)
        self.write(f"{folder}/link_layer", layer)
        if netdev:
            self.write(f"{folder}/gid_attrs/ndevs/0", netdev)

    def nic(
        self, name: str, speed: object, state: str = "up", flags: str = "0x1003", pci: str = "", mtu: int = 1500
    ) -> None:
        base = f"sys/class/net/{name}"
        self.write(f"{base}/speed", speed)
        self.write(f"{base}/operstate", state)
        self.write(f"{base}/flags", flags)
        self.write(f"{base}/mtu", mtu)
        if pci:
            (self.root / base / "device").symlink_to(self.root / "sys/bus/pci/devices" / pci)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


class NVMLError(Exception):
    pass


class Driver:
    """NVML as far as discovery calls it: cards by (bus id, name, far ends of their NVLinks)."""

    NVMLError = NVMLError
    NVML_NVLINK_MAX_LINKS = 18

    def __init__(self, cards: list[tuple[str, str, list[str]]], broken: bool = False) -> None:
        self.cards, self.broken, self.open = cards, broken, 0

    def nvmlInit(self) -> None:
        if self.broken:
            raise NVMLError("Driver/library version mismatch")
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetPciInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(busId=self.cards[handle][0].encode())

    def nvmlDeviceGetName(self, handle: int) -> str:
        return self.cards[handle][1]

    def nvmlDeviceGetUUID(self, handle: int) -> bytes:
        return f"GPU-{self.cards[handle][0]}".encode()

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(total=80 << 30)

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
        if link >= len(self.cards[handle][2]):
            raise NVMLError("Not Supported")
        return int(bool(self.cards[handle][2][link]))

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle: int, link: int) -> SimpleNamespace:
        return SimpleNamespace(busId=self.cards[handle][2][link])

    def nvmlSystemGetDriverVersion(self) -> str:
        return "570.1"


H100 = "NVIDIA H100 80GB HBM3"
SWITCH = "00000000:0A:00.0"


def two_sockets(tree: Tree) -> Driver:
    """Two GPUs behind one PCIe switch with an InfiniBand port between them, two more on the other socket, one of which
    shares its root port's switch cascade with a RoCE port; NVSwitch joins all four."""
    tree.cpus({0: "0-3", 1: "4-7"}, threads=2)
    top = ("pci0000:17", "0000:17:01.0", "0000:18:00.0")
    tree.pci(*top, "0000:19:00.0", "0000:1b:00.0", vendor="0x10de")
    tree.pci(*top, "0000:19:01.0", "0000:1c:00.0", vendor="0x10de")
    tree.pci(*top, "0000:19:02.0", "0000:1d:00.0")
    far = ("pci0000:97", "0000:97:01.0", "0000:98:00.0")
    tree.pci(*far, "0000:99:00.0", "0000:9d:00.0", numa=1, vendor="0x10de")
    tree.pci(*far, "0000:99:01.0", "0000:a0:00.0", "0000:a1:00.0", "0000:a2:00.0", numa=1)
    tree.pci("pci0000:97", "0000:97:02.0", "0000:b1:00.0", numa=1, vendor="0x10de")
    tree.hca("mlx5_0", "0000:1d:00.0", "400 Gb/sec (4X NDR)", "4: ACTIVE", "InfiniBand")
    tree.hca("mlx5_1", "0000:a2:00.0", "100 Gb/sec (4X EDR)", "1: DOWN", "Ethernet", netdev="ens9")
    links = [SWITCH] * 18
    buses = ("1B", "9D", "1C", "B1")  # not in PCI order: the driver's order is no promise
    return Driver([(f"00000000:{bus}:00.0", H100, links) for bus in buses])


def test_a_host_of_two_sockets(tree: Tree) -> None:
    """Every number of the tree arrives where it belongs, and the paths are what nvidia-smi would print."""
    driver = two_sockets(tree)
    tree.nic("ens9", 100000, pci="0000:a2:00.0", mtu=9000)
    found = read_host(Sysfs(tree.root), driver, {"ens9": ["10.0.0.7/24"]}, "a")
    node = found.node
    assert found.notes == ()
    assert driver.open == 0
    assert node.numa == (NumaNode(0, "0-3", "8-11", 1000000 << 10), NumaNode(1, "4-7", "12-15", 1000000 << 10))
    assert (node.cpu, node.memory_bytes, node.driver) == ("A Processor", 2000000 << 10, "570.1")
    assert [(d.pci, d.numa) for d in node.devices] == [
        ("0000:1b:00.0", 0), ("0000:1c:00.0", 0), ("0000:9d:00.0", 1), ("0000:b1:00.0", 1),
    ]  # fmt: skip
    assert node.devices[0].memory_bandwidth == 3.35e12
    assert node.nvswitch
    assert {node.path(f"GPU{a}", f"GPU{b}") for a in range(4) for b in range(a)} == {"NV18"}
    assert [node.path(f"GPU{i}", "mlx5_0") for i in range(4)] == ["PIX", "PIX", "SYS", "SYS"]
    assert [node.path(f"GPU{i}", "mlx5_1") for i in range(4)] == ["SYS", "SYS", "PXB", "PHB"]
    one, two = node.hcas
    assert (one.link_layer, one.gbit_per_s, one.state, one.numa, one.pci) == (
        "InfiniBand",
        400,
        "ACTIVE",
        0,
        "0000:1d:00.0",
    )
    assert (two.link_layer, two.state, two.active, two.interface) == ("Ethernet", "DOWN", False, "ens9")
    assert node.nics[0].addresses == ("10.0.0.7/24",)
    assert (node.nics[0].gbit_per_s, node.nics[0].numa, node.nics[0].physical, node.nics[0].mtu) == (100, 1, True, 9000)
    seats = place(Fabric((node,)), World(4)).seats
    assert [s.hca for s in seats] == ["mlx5_0"] * 4


def test_without_nvlink_paths_come_from_pci(tree: Tree) -> None:
    driver = two_sockets(tree)
    driver.cards = [(bus, "NVIDIA L40S", []) for bus, _, _ in driver.cards]
    node = read_host(Sysfs(tree.root), driver, {}, "a").node
    assert not node.nvswitch
    assert [node.path("GPU0", f"GPU{i}") for i in (1, 2, 3)] == ["PIX", "SYS", "SYS"]
    assert node.path("GPU2", "GPU3") == "PHB"


def test_bridged_pairs_are_joined_directly(tree: Tree) -> None:
    """Two cards with a bridge of four links, one link of which is down."""
    tree.cpus({0: "0-3"})
    for bus in ("10", "20", "30"):
        tree.pci("pci0000:00", f"0000:{bus}:00.0", vendor="0x10de")
    a, b, c = (f"00000000:{bus}:00.0" for bus in ("10", "20", "30"))
    node = read_host(
        Sysfs(tree.root), Driver([(a, "X", [b, b, "", b]), (b, "X", [a, a, a]), (c, "X", [])]), {}, "a"
    ).node
    assert [node.path("GPU0", "GPU1"), node.path("GPU0", "GPU2")] == ["NV3", "PHB"]
    assert node.devices[0].bf16_flops is None
    assert not node.nvswitch


@pytest.mark.parametrize(
    ("visible", "pci"),
    [
        (None, ["1b", "1c", "9d", "b1"]),
        ("2,0", ["9d", "1b"]),
        ("GPU-00000000:B1:00.0", ["b1"]),
        ("1,-1,3", ["1c"]),
        ("", []),
    ],
)
def test_visible_devices_are_numbered_as_cuda_does(tree: Tree, visible: str | None, pci: list[str]) -> None:
    node = read_host(Sysfs(tree.root), two_sockets(tree), {}, "a", visible_devices=visible).node
    assert [d.pci[5:7] for d in node.devices] == pci
    assert [d.index for d in node.devices] == list(range(len(pci)))
    assert node.nvlinks == 18 * (len(pci) * (len(pci) - 1) // 2)


@pytest.mark.parametrize("visible", ["7", "0,0", "GPU-none", "GPU-00000000"])
def test_visible_devices_that_are_not_there(tree: Tree, visible: str) -> None:
    with pytest.raises(DiscoveryError, match="is not one of this host's 4 GPUs"):
        read_host(Sysfs(tree.root), two_sockets(tree), {}, "a", visible_devices=visible)


def test_a_driver_that_does_not_answer_is_noted(tree: Tree) -> None:
    """GPUs on the bus without a working driver, or without pynvml: no devices, and a note; a host without GPUs needs
    neither."""
    two_sockets(tree)
    broken = read_host(Sysfs(tree.root), Driver([], broken=True), {}, "a")
    assert (broken.node.devices, broken.notes) == ((), ("NVML does not answer: Driver/library version mismatch",))
    assert "pip install nvidia-ml-py" in read_host(Sysfs(tree.root), None, {}, "a").notes[0]
    plain = Tree(tree.root / "plain")
    plain.cpus({0: "0-1"})
    assert read_host(Sysfs(plain.root), None, {}, "a").notes == ()


def test_a_driver_that_fails_midway_is_closed() -> None:
    class Midway(Driver):
        def nvmlDeviceGetName(self, handle: int) -> str:
            raise NVMLError("GPU is lost")

    driver = Midway([("00000000:10:00.0", H100, [])])
    assert gpus(driver).note == "NVML failed: GPU is lost"
    assert driver.open == 0


def test_pci_names() -> None:
    assert pci_name(b"00000000:1B:00.0") == "0000:1b:00.0"
    assert pci_name("00010000:1B:00.0") == "10000:1b:00.0"


def test_a_plain_host(tree: Tree) -> None:
    """No NUMA, no RDMA, no GPUs: one NUMA node of the online CPUs that this process may use."""
    tree.write("sys/devices/system/cpu/online", "0-3")
    tree.write("proc/meminfo", "MemTotal: 1024 kB")
    fs = Sysfs(tree.root)
    assert numa_nodes(fs) == (NumaNode(0, "0-3", "", 1024 << 10),)
    assert numa_nodes(fs, {1, 2, 9}) == (NumaNode(0, "1-2", "", 1024 << 10),)
    node = read_host(fs, None, {}, "a").node
    assert (node.hcas, node.nics, node.cpu, node.cpu_tier) == ((), (), "", "generic")


def test_a_hosts_cpu_tier_is_its_own(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is forced: a saved fabric says what machines have."""
    monkeypatch.setenv(VARIABLE, "generic")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    tree.cpus({0: "0-3"})
    tree.write("proc/cpuinfo", "processor\t: 0\nflags\t\t: fpu avx avx2 fma f16c")
    assert read_host(Sysfs(tree.root), None, {}, "a").node.cpu_tier == "avx2"


def test_cores_that_a_container_may_not_use_are_left_out(tree: Tree) -> None:
    """Bound to one hyperthread of two cores and nothing of the second socket."""
    tree.cpus({0: "0-3", 1: "4-7"}, threads=2)
    assert numa_nodes(Sysfs(tree.root), {9, 2}) == (NumaNode(0, "2,9", "", 1000000 << 10),)


def test_memory_is_what_the_container_has(tree: Tree) -> None:
    tree.write("proc/meminfo", "MemTotal: 4096 kB")
    fs = Sysfs(tree.root)
    assert memory_bytes(fs) == 4096 << 10
    tree.write("proc/self/cgroup", "0::/service")
    tree.write("proc/self/mountinfo", "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw")
    tree.write("sys/fs/cgroup/service/memory.max", "max")
    assert memory_bytes(fs) == 4096 << 10
    tree.write("sys/fs/cgroup/service/memory.max", "1048576")
    assert memory_bytes(fs) == 1 << 20


def test_interfaces_as_the_kernel_shows_them(tree: Tree) -> None:
    """Unknown speeds, a bond (virtual, yet the way out), a bridge, an interface that is down, a stray file."""
    tree.nic("eth2", -1)
    tree.nic("eth10", 4294967295, state="down", flags="0x1002")
    tree.nic("docker0", 10000)
    tree.nic("bond0", 200000)
    (tree.root / "sys/class/net/bond0/bonding").mkdir()
    tree.nic("lo", "", state="unknown", flags="0x9", mtu=65536)
    tree.write("sys/class/net/bonding_masters", "bond0")
    found = {n.name: n for n in nics(Sysfs(tree.root), {"lo": ["127.0.0.1/8"]})}
    assert list(found) == ["bond0", "docker0", "eth2", "eth10", "lo"]
    assert [(n.gbit_per_s, n.up, n.physical) for n in found.values()] == [
        (200, True, True), (10, True, False), (None, True, False), (None, False, False), (None, True, False),
    ]  # fmt: skip


def test_two_ports_are_two_entries(tree: Tree) -> None:
    tree.cpus({0: "0-1"})
    tree.pci("pci0000:00", "0000:10:00.0")
    tree.hca("mlx5_0", "0000:10:00.0", "200 Gb/sec (4X HDR)", "4: ACTIVE", "InfiniBand")
    tree.hca("mlx5_0", "0000:10:00.0", "2.5 Gb/sec", "2: INIT", "InfiniBand", port=2)
    ports = read_host(Sysfs(tree.root), None, {}, "a").node.hcas
    assert [(p.key, p.gbit_per_s, p.active) for p in ports] == [("mlx5_0", 200, True), ("mlx5_0:2", 2.5, False)]


def test_a_device_that_left_the_bus_has_no_path(tree: Tree) -> None:
    tree.pci("pci0000:00", "0000:10:00.0")
    assert pci_path(Sysfs(tree.root), "0000:10:00.0", "0000:99:00.0", same_numa=True) == "NODE"
    assert pci_path(Sysfs(tree.root), "", "0000:10:00.0", same_numa=False) == "SYS"


def test_this_host() -> None:
    """The machine that runs the test: its name, its cores, its loopback, and the same fabric from a file."""
    found = discover()
    assert isinstance(found, Discovery)
    assert found.node.hostname == socket.gethostname()
    assert found.node.cores
    assert found.node.memory_bytes > 1 << 20
    assert "127.0.0.1/8" in addresses().get("lo", [])
    assert place(Fabric((found.node,)), World(1)).world.size == 1


def host(name: str, cores: str = "0-3", **more: object) -> Node:
    return Node(name, (NumaNode(0, cores),), 1 << 30, **more)  # type: ignore[arg-type]


def test_gathering_keeps_each_host_once() -> None:
    """Four ranks on two hosts: what travels is JSON, and every rank gets the same fabric, hosts in rank order."""
    nodes = [host("b"), host("b"), host("a"), host("a")]
    sent: list[bytes] = []

    def all_gather(mine: bytes) -> list[bytes]:
        sent.append(mine)
        return [json.dumps(unbuild(n)).encode() for n in nodes]

    assert gather(nodes[0], all_gather).nodes == (host("b"), host("a"))
    assert json.loads(sent[0])["hostname"] == "b"


def test_ranks_bound_to_their_own_cores_make_one_host() -> None:
    nodes = [host("a", "0-1"), host("a", "2-3")]
    assert gather(nodes[0], lambda _: [json.dumps(unbuild(n)).encode() for n in nodes]).nodes == (host("a", "0-3"),)


def test_ranks_that_see_different_gpus_are_refused(tree: Tree) -> None:
    """srun bound a GPU to each task: placement could not give them out."""
    driver = two_sockets(tree)
    fs = Sysfs(tree.root)
    nodes = [read_host(fs, driver, {}, "a", visible_devices=text).node for text in ("0", "1")]
    with pytest.raises(DiscoveryError, match=r"ranks 0 and 1 on host a see different GPUs .*--gpu-bind=none"):
        gather(nodes[0], lambda _: [json.dumps(unbuild(n)).encode() for n in nodes])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"{", "rank 1 sent no host: not JSON"),
        (b'{"hostname": "b"}', "rank 1 sent no host: numa: missing"),
        (b" " * ((1 << 20) + 1), "rank 1 sent 1048577 bytes"),
    ],
)
def test_what_ranks_send_is_checked(data: bytes, message: str) -> None:
    mine = json.dumps(unbuild(host("a"))).encode()
    with pytest.raises(DiscoveryError, match=message):
        gather(host("a"), lambda _: [mine, data])
