"""Where ranks go: over real shapes by name, over random fabrics by their laws, and what is said when they cannot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from laddertron.topology.hardware.fabric import PATHS, Fabric, Hca, Nic, Node, NumaNode, load
from laddertron.topology.hardware.presets import GPU_MODELS, gpu_node, preset
from laddertron.topology.placement.identity import Launcher
from laddertron.topology.placement.mapping import MappingError, explain, matrix, same_host, verify
from laddertron.topology.placement.placement import Placement, PlacementError, place
from laddertron.topology.placement.world import World

FIXTURES = Path(__file__).parents[2] / "fixtures/fabrics"
H100, A100, L40S = GPU_MODELS["H100"], GPU_MODELS["A100"], GPU_MODELS["L40S"]


def mixed(*counts: int) -> Fabric:
    """H100 hosts with these numbers of GPUs."""
    return Fabric(tuple(gpu_node(f"node{i}", i, H100, count) for i, count in enumerate(counts)))


def llama_405b(size: int) -> str | None:
    """128 heads, 8 KV heads, FFN 53248."""
    return (
        None
        if 128 % size == 0 and (8 % size == 0 or size % 8 == 0)
        else f"128 heads, 8 KV heads do not split by {size}"
    )


# fabric, tensor_parallel_size, replicas -> ranks of each group by host index and count
LAID_OUT: list[tuple[str | Fabric, int, int, list[list[tuple[str, int]]]]] = [
    ("8xH100", 8, 1, [[("node0", 8)]]),
    ("8xH100", 1, 8, [[("node0", 1)]] * 8),
    ("8xH100", 4, 2, [[("node0", 4)]] * 2),
    ("8xH100", 2, 1, [[("node0", 2)]]),
    ("1x4xA100", 4, 1, [[("node0", 4)]]),
    ("2x8xH100", 16, 1, [[("node0", 8), ("node1", 8)]]),
    ("2x8xH100", 8, 2, [[("node0", 8)], [("node1", 8)]]),
    ("2x8xH100", 8, 1, [[("node0", 8)]]),
    ("2x8xH100", 4, 4, [[("node0", 4)]] * 2 + [[("node1", 4)]] * 2),
    ("4x4xH100", 16, 1, [[("node0", 4), ("node1", 4), ("node2", 4), ("node3", 4)]]),
    ("4x4xH100", 8, 2, [[("node0", 4), ("node1", 4)], [("node2", 4), ("node3", 4)]]),
    ("4x8xH200", 32, 1, [[("node0", 8), ("node1", 8), ("node2", 8), ("node3", 8)]]),
    ("4x8xB200", 16, 2, [[("node0", 8), ("node1", 8)], [("node2", 8), ("node3", 8)]]),
    ("3x8xH100", 24, 1, [[("node0", 8), ("node1", 8), ("node2", 8)]]),
    ("3x8xH100", 12, 2, [[("node0", 4), ("node1", 4), ("node2", 4)]] * 2),  # 6 + 6 would leave 2 + 2 + 8
    ("3x8xH100", 8, 3, [[("node0", 8)], [("node1", 8)], [("node2", 8)]]),
    ("2x6xA100", 12, 1, [[("node0", 6), ("node1", 6)]]),
    ("2x6xA100", 4, 1, [[("node0", 4)]]),
    ("8x1xA100", 8, 1, [[(f"node{i}", 1) for i in range(8)]]),
    ("16x1xH100", 16, 1, [[(f"node{i}", 1) for i in range(16)]]),
    ("2x4xL40S", 8, 1, [[("node0", 4), ("node1", 4)]]),
    ("1x8xL40S", 4, 2, [[("node0", 4)]] * 2),
    ("2x2xH100-PCIe", 4, 1, [[("node0", 2), ("node1", 2)]]),
    ("1x2xcpu", 2, 1, [[("node0", 2)]]),
    ("2x2xcpu", 2, 1, [[("node0", 1), ("node1", 1)]]),
    ("2x2xcpu", 4, 1, [[("node0", 2), ("node1", 2)]]),
    ("4x16xcpu", 4, 1, [[(f"node{i}", 1) for i in range(4)]]),
    ("4x16xcpu", 8, 2, [[("node0", 4), ("node1", 4)], [("node2", 4), ("node3", 4)]]),
    (mixed(8, 4, 4), 8, 2, [[("node0", 8)], [("node1", 4), ("node2", 4)]]),
    (mixed(4, 8, 4), 4, 4, [[("node1", 4)], [("node1", 4)], [("node0", 4)], [("node2", 4)]]),
    (mixed(2, 2, 8), 4, 3, [[("node2", 4)], [("node2", 4)], [("node0", 2), ("node1", 2)]]),
    (mixed(8, 8, 4, 4), 8, 3, [[("node0", 8)], [("node1", 8)], [("node2", 4), ("node3", 4)]]),
    (Fabric((gpu_node("a", 0, L40S, 8), gpu_node("b", 1, H100, 8))), 8, 1, [[("b", 8)]]),
    (Fabric((gpu_node("a", 0, A100, 4), gpu_node("b", 1, H100, 8), gpu_node("c", 2, A100, 4))), 8, 2,
     [[("b", 8)], [("a", 4), ("c", 4)]]),
    (Fabric((*mixed(8).nodes, preset("1x64xcpu").nodes[0].__class__("login", (NumaNode(0, "0-7"),), 1 << 34))), 8, 1,
     [[("node0", 8)]]),
    (Fabric(tuple(gpu_node(f"node{i}", i, H100, 8, hcas=0) for i in range(2))), 16, 1, [[("node0", 8), ("node1", 8)]]),
    (Fabric(tuple(gpu_node(f"node{i}", i, H100, 8, hcas=1) for i in range(2))), 16, 1, [[("node0", 8), ("node1", 8)]]),
]  # fmt: skip


def hosts_of(placement: Placement, group: int) -> list[tuple[str, int]]:
    return [(placement.seats[node[0]].hostname, len(node)) for node in placement.groups[group].nodes]


@pytest.mark.parametrize(("fabric", "size", "replicas", "expected"), LAID_OUT)
def test_groups_stay_on_a_node_before_they_span(
    fabric: str | Fabric, size: int, replicas: int, expected: list[list[tuple[str, int]]]
) -> None:
    """Each of these fabrics has one right answer; and every answer keeps the laws."""
    fabric = preset(fabric) if isinstance(fabric, str) else fabric
    placement = place(fabric, World(size, replicas=replicas))
    assert [hosts_of(placement, g) for g in range(replicas)] == expected
    check_laws(fabric, placement)


def check_laws(fabric: Fabric, placement: Placement) -> None:
    """What holds of every placement."""
    nodes = {n.hostname: n for n in fabric.nodes}
    seats = placement.seats
    assert [s.rank for s in seats] == list(range(placement.world.size))
    assert sorted(r for g in placement.groups for r in g.ranks) == list(range(len(seats)))
    assert list(placement.groups) == sorted(placement.groups, key=lambda g: g.ranks[0])
    assert list(dict.fromkeys(s.hostname for s in seats)) == [h for h, _ in placement.hosts]
    for host, count in placement.hosts:
        here = [s for s in seats if s.hostname == host]
        node = nodes[host]
        ranks = [s.rank for s in here]
        assert ranks == list(range(ranks[0], ranks[0] + count)), "a node's ranks are contiguous"
        assert [s.local_rank for s in here] == list(range(count))
        known = {d.index: d for d in node.devices}
        if known:
            assert len({s.device for s in here}) == count, "a device of its own for every rank"
        for s in here:
            assert s.cores
            assert set(s.cores) <= set(node.cores)
            if s.device is not None:
                assert s.numa == known[s.device].numa
        if count <= len(node.cores) and len(node.numa) == 1:
            assert sum(len(s.cores) for s in here) == len({c for s in here for c in s.cores}), "cores are not shared"
        for s in here:
            if s.hca is None:
                continue
            port = next(h for h in node.hcas if h.key == s.hca)
            assert port.active
            if s.device is not None:
                key = f"GPU{s.device}"
                alike = [h for h in node.hcas if h.active and h.link_layer == port.link_layer]
                nearest = min(PATHS.index(node.path(key, h.key)) for h in alike)
                assert PATHS.index(s.path) == nearest, "the nearest port"
    for group in placement.groups:
        assert len({s.hostname for s in (seats[n[0]] for n in group.nodes)}) == len(group.nodes)
        for node_ranks in group.nodes:
            assert list(node_ranks) == list(range(node_ranks[0], node_ranks[0] + group.per_node))


def can(capacity: list[int], size: int, replicas: int) -> int:
    """The largest number of a group's ranks on each of its nodes for which all groups fit; 0 if there is none. With
    `room` groups on a node at most, `replicas` groups over distinct nodes exist exactly if the rooms, none counted
    beyond `replicas`, suffice."""
    for each in range(size, 0, -1):
        room = [min(c // each, replicas) for c in capacity]
        if size % each == 0 and sum(room) >= replicas * (size // each):
            return each
    return 0


@settings(max_examples=120, deadline=None, print_blob=True)
@given(
    counts=st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any),
    size=st.integers(1, 24),
    replicas=st.integers(1, 6),
    hcas=st.integers(0, 9),
)
def test_random_fabrics(counts: list[int], size: int, replicas: int, hcas: int) -> None:
    """Over random mixes of hosts: it is laid out exactly when arithmetic says it can be, with as many ranks on a node
    as possible; and what a refusal suggests can be done."""
    fabric = Fabric(
        tuple(
            gpu_node(f"node{i}", i, H100, count, hcas=hcas)
            if count
            else Node(f"node{i}", (NumaNode(0, "0-3"),), 1 << 34)
            for i, count in enumerate(counts)
        )
    )
    each = can(counts, size, replicas) if sum(counts) % size == 0 else 0
    if each:
        placement = place(fabric, World(size, replicas=replicas))
        check_laws(fabric, placement)
        widest = max(n for n in range(1, size + 1) if size % n == 0 and can(counts, size, 1) >= n)
        assert max(g.per_node for g in placement.groups) <= widest
        if len(set(counts)) == 1:
            assert {g.per_node for g in placement.groups} == {each}, "alike hosts: as many ranks on a node as can be"
    else:
        try:
            placement = place(fabric, World(size, replicas=replicas))
        except PlacementError as error:
            text = str(error)
        else:
            check_laws(fabric, placement)
            assert sum(counts) % size == 0
            assert len({g.per_node for g in placement.groups}) > 1, "only by unequal groups can it go further"
            return
        assert f"tensor_parallel_size={size}" in text
        if ": use " in text:
            for word in text.rpartition(": use ")[2].removeprefix("for example ").replace(" or ", ", ").split(", "):
                if word.isdecimal():
                    place(fabric, World(int(word), replicas=replicas))
                else:
                    break


@settings(max_examples=40, deadline=None, print_blob=True)
@given(
    numa=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    hosts=st.integers(1, 4),
    size=st.integers(1, 12),
    replicas=st.integers(1, 3),
)
def test_random_cpu_hosts(numa: list[int], hosts: int, size: int, replicas: int) -> None:
    """CPU hosts alike: laid out exactly if there are cores enough for equal shares; no core belongs to two ranks."""
    bounds = [sum(numa[:i]) for i in range(len(numa) + 1)]
    parts = tuple(NumaNode(i, f"{a}-{b - 1}") for i, (a, b) in enumerate(pairwise(bounds)))
    fabric = Fabric(tuple(Node(f"node{i}", parts, 1 << 34) for i in range(hosts)))
    try:
        placement = place(fabric, World(size, replicas=replicas))
    except PlacementError:
        assert not can([bounds[-1]] * hosts, size, replicas)
        return
    check_laws(fabric, placement)
    for host, count in placement.hosts:
        shares = Counter(c for s in placement.seats if s.hostname == host for c in s.cores)
        assert max(shares.values()) == 1 or count > len(numa), "only NUMA nodes with too few cores share them"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: place(preset("3x8xH100"), World(16)),
            "tensor_parallel_size=16 does not divide 24 ranks (3 nodes x 8): use 1, 2, 3, 4, 6, 8, 12 or 24, "
            "or only the hosts node0, node1 (launch.hosts)",
        ),
        (
            lambda: place(preset("3x8xH100"), World(16), suits=llama_405b),
            "tensor_parallel_size=16 does not divide 24 ranks (3 nodes x 8): use 1, 2, 4 or 8, "
            "or only the hosts node0, node1 (launch.hosts)",
        ),
        (
            lambda: place(preset("3x8xH100"), World(24), suits=llama_405b),
            "tensor_parallel_size=24: 128 heads, 8 KV heads do not split by 24: use 1, 2, 4 or 8",
        ),
        (
            lambda: place(preset("2x8xH100"), World(8, replicas=3)),
            "tensor_parallel_size=8 x replicas=3 needs 24 ranks, the fabric has 16 ranks (2 nodes x 8): use 1, 2 or 4, "
            "or replicas=2",
        ),
        (lambda: place(preset("8xH100"), World(16)), "tensor_parallel_size=16 needs 16 ranks, the fabric has 8 ranks"),
        (
            lambda: place(mixed(8, 4), World(12)),
            "tensor_parallel_size=12 does not fit on 12 ranks (1 node x 8 + 1 node x 4) with equally many ranks on "
            "each node of a group: use 1, 2, 3, 4 or 6",
        ),
        (lambda: place(preset("1x1xcpu"), World(2)), "needs 2 ranks, the fabric has 1 rank (1 node x 1): use 1"),
        (lambda: place(preset("2x2xcpu"), World(8)), "the fabric has 4 ranks (2 nodes x 2): use 1, 2 or 4"),
        (lambda: place(preset("8xH100"), World(2), slots={"elsewhere": 8}), "slots name the host 'elsewhere'"),
        (lambda: place(preset("2x8xH100"), World(8), ranks_per_node=3), "the fabric has 6 ranks (2 nodes x 3)"),
    ],
)  # fmt: skip
def test_refusals_show_the_arithmetic(make: Callable[[], Placement], message: str) -> None:
    with pytest.raises(PlacementError) as caught:
        make()
    assert str(caught.value).startswith(message) or message in str(caught.value)


def test_slots_and_ranks_per_node_bound_a_host() -> None:
    """A hostfile with `slots=1` a line spreads two ranks over two CPU hosts; `slots=2` keeps them together."""
    fabric = preset("2x4xcpu")
    assert place(fabric, World(2), slots={"node0": 1, "node1": 1}).hosts == (("node0", 1), ("node1", 1))
    assert place(fabric, World(2), slots={"node0": 2, "node1": 2}).hosts == (("node0", 2),)
    assert place(fabric, World(2), ranks_per_node=1).hosts == (("node0", 1), ("node1", 1))
    assert place(fabric, World(12), slots={"node0": 6, "node1": 6}).hosts == (
        ("node0", 6),
        ("node1", 6),
    )  # oversubscribed
    assert place(preset("2x8xH100"), World(8), slots={"node1": 8}).hosts == (("node1", 8),)
    assert place(preset("2x8xH100"), World(8), slots={"node0": 4, "node1": 4}).hosts == (("node0", 4), ("node1", 4))


def test_dgx_rails() -> None:
    """On a DGX pair every GPU takes the port on its own PCIe switch, never the storage ports, down ports or RoCE."""
    placement = place(load(FIXTURES / "dgx-h100-pair.json"), World(16))
    ports = ["mlx5_0", "mlx5_3", "mlx5_4", "mlx5_5", "mlx5_6", "mlx5_9", "mlx5_10", "mlx5_11"]
    assert [s.hca for s in placement.seats] == ports * 2
    assert {s.path for s in placement.seats} == {"PXB"}
    assert {s.interface for s in placement.seats} == {"bond0"}
    assert placement.groups[0].rails == tuple((i, i + 8) for i in range(8))
    assert placement.notes == ()


def test_one_hca_serves_a_whole_box() -> None:
    """The PCIe box has one port near two of its four GPUs: all use it, each at its own distance, and pairs of ranks
    stay within a NUMA node."""
    placement = place(load(FIXTURES / "pcie-box.json"), World(2, replicas=2))
    assert [s.hca for s in placement.seats] == ["mlx5_0"] * 4
    assert [s.path for s in placement.seats] == ["NODE", "NODE", "SYS", "SYS"]
    assert [s.numa for s in placement.seats] == [0, 0, 1, 1]
    assert placement.seats[3].cores == tuple(range(48, 64))


def test_a_pair_leaves_the_bridge_whole() -> None:
    """NVLink bridges join GPUs 0-2 and 1-3: each pair of ranks gets a bridge, though they are no neighbours."""
    node = gpu_node("a", 0, GPU_MODELS["H100-PCIe"], 4)
    links = tuple(
        replace(k, path="NV12") if (k.a, k.b) in {("GPU0", "GPU2"), ("GPU1", "GPU3")} else k for k in node.links
    )
    placement = place(Fabric((replace(node, links=links),)), World(2, replicas=2))
    assert [s.device for s in placement.seats] == [0, 2, 1, 3]


def test_hosts_without_hcas_say_so() -> None:
    bare = Fabric(tuple(gpu_node(f"node{i}", i, H100, 8, hcas=0) for i in range(2)))
    placement = place(bare, World(16))
    assert placement.notes == ("no active HCA on node0, node1: traffic between nodes goes over TCP",)
    assert {s.hca for s in placement.seats} == {None}
    layers = Fabric((gpu_node("a", 0, H100, 8), gpu_node("b", 1, H100, 8, link_layer="Ethernet")))
    assert "no link layer that all nodes share" in place(layers, World(16)).notes[0]
    assert place(bare, World(8)).notes == (), "one node needs none"


def test_mixed_groups_and_bare_hosts_are_noted() -> None:
    fabric = Fabric((gpu_node("a", 0, H100, 4), gpu_node("b", 1, A100, 4), Node("c", (NumaNode(0, "0"),), 1 << 30)))
    notes = place(fabric, World(8)).notes
    assert notes[0].startswith("group 0 mixes 4 x NVIDIA H100 80GB HBM3 with 4 x NVIDIA A100")
    assert notes[1] == "left out, having no GPU: c"


def test_interfaces_meet() -> None:
    """Chosen is the fastest network that every host has its own address in: never a bridge that repeats one address
    everywhere, a link-local one, or an interface that is down."""

    def node(i: int, *more: Nic) -> Node:
        docker = Nic("docker0", ("172.17.0.1/16",), 100.0, physical=False)
        slow = Nic("eno1", (f"10.1.0.{i + 1}/24",), 1.0)
        local = Nic("usb0", (f"169.254.0.{i + 1}/16",), 50.0)
        return Node(f"node{i}", (NumaNode(0, "0-1"),), 1 << 34, nics=(docker, local, slow, *more))

    def fast(i: int, up: bool = True) -> Nic:
        return Nic(f"ens{i}", (f"10.2.0.{i + 1}/24",), 100.0, up=up)

    both = place(Fabric((node(0, fast(0)), node(1, fast(1)))), World(2))
    assert [s.interface for s in both.seats] == ["ens0", "ens1"]
    down = place(Fabric((node(0, fast(0)), node(1, fast(1, up=False)))), World(2))
    assert [s.interface for s in down.seats] == ["eno1", "eno1"]
    strangers = Fabric((node(0), replace(node(1), nics=(Nic("eth0", ("10.9.0.1/24",)),))))
    assert "no network that all nodes have an address in" in place(strangers, World(2)).notes[0]


def test_two_ports_of_one_adapter_are_two_rails() -> None:
    node = gpu_node("a", 0, H100, 2, hcas=0)
    ports = tuple(Hca("mlx5_0", "InfiniBand", 400.0, port=p, numa=0) for p in (1, 2))
    seats = place(Fabric((replace(node, hcas=ports),)), World(2)).seats
    assert [s.hca for s in seats] == ["mlx5_0", "mlx5_0:2"]


def test_groups_that_share_the_nodes_they_span_are_noted() -> None:
    """Two groups of 12 over three nodes of 8: no numbering node by node makes both contiguous; each alone is."""
    placement = place(preset("3x8xH100"), World(12, replicas=2))
    assert placement.groups[0].ranks == (0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19)
    assert "start each replica as a job of its own" in placement.notes[0]
    assert placement.replica(1).groups[0].ranks == tuple(range(12))
    assert [s.device for s in placement.replica(1).seats] == [4, 5, 6, 7] * 3


def test_a_replica_is_a_job_of_its_own() -> None:
    """The second of two replicas on one host starts at GPU 4, with ranks and local ranks counted from 0."""
    second = place(preset("8xH100"), World(4, replicas=2)).replica(1)
    assert [(s.rank, s.local_rank, s.device) for s in second.seats] == [(i, i, i + 4) for i in range(4)]
    assert second.groups[0].nodes == ((0, 1, 2, 3),)
    wide = place(preset("4x8xH100"), World(16, replicas=2)).replica(1)
    assert wide.groups[0].nodes == (tuple(range(8)), tuple(range(8, 16)))
    assert wide.hosts == (("node2", 8), ("node3", 8))


OPTIONS: list[tuple[Launcher, str]] = [
    ("openmpi", "mpirun --map-by ppr:8:node"),
    ("mpich", "mpiexec -ppn 8 -hosts node0,node1"),
    ("slurm", "srun --ntasks-per-node=8 --distribution=block -w node0,node1"),
    ("torchrun", "--nproc-per-node=8"),
]


@pytest.mark.parametrize(("launcher", "option"), OPTIONS)
def test_a_launcher_that_deals_round_the_nodes_is_told_how(launcher: Launcher, option: str) -> None:
    """Ranks placed 0-7 on node0 and 8-15 on node1, started round-robin: the message names ranks, pattern and option."""
    placement = place(preset("2x8xH100"), World(16))
    with pytest.raises(MappingError) as caught:
        verify(placement, [(r, f"node{r % 2}", r // 2) for r in range(16)], launcher)
    text = str(caught.value)
    assert text.startswith("14 of 16 ranks are misplaced (they were dealt round the nodes one by one): ")
    assert "rank 1 belongs on node0 as local rank 1, runs on node1 as 0; " in text
    assert "and 6 more" in text
    assert option in text


def test_verify_accepts_what_is_right() -> None:
    placement = place(preset("2x8xH100"), World(16))
    right = [(s.rank, s.hostname, s.local_rank) for s in placement.seats]
    verify(placement, right, "openmpi")
    verify(placement, [(r, f"{h}.cluster.example", n) for r, h, n in reversed(right)], "slurm")


def test_verify_counts_ranks() -> None:
    placement = place(preset("2x2xH100"), World(4))
    seen = [(s.rank, s.hostname, s.local_rank) for s in placement.seats]
    with pytest.raises(MappingError, match="3 ranks answered for a placement of 4"):
        verify(placement, seen[:3], "openmpi")
    with pytest.raises(MappingError, match=r"3 of 4 ranks|2 of 4 ranks are misplaced \(all run on node0\)"):
        verify(placement, [(r, "node0", r) for r in range(4)], "openmpi")


@pytest.mark.parametrize(
    ("launcher", "option"),
    [
        ("openmpi", "--map-by slot with the hostfile lines in this order: node2 slots=8 node0 slots=2 node1 slots=2"),
        ("mpich", "-hosts node2:8,node0:2,node1:2"),
        ("slurm", "--distribution=arbitrary"),
    ],
)
def test_uneven_hosts_need_other_options(launcher: Launcher, option: str) -> None:
    placement = place(mixed(2, 2, 8), World(4, replicas=3))
    with pytest.raises(MappingError) as caught:
        verify(placement, [(s.rank, "node0", s.rank) for s in placement.seats], launcher)
    assert option in str(caught.value)


def test_host_names() -> None:
    assert same_host("node1", "node1.example.org")
    assert same_host("Node1.example.org", "node1")
    assert not same_host("node1", "node10")
    assert not same_host("node1.a.org", "node1.b.org")


def test_explain_and_matrix() -> None:
    """The explain table has a row a rank, group by group; the matrix is symmetric and reads like nvidia-smi's."""
    fabric = load(FIXTURES / "dgx-h100-pair.json")
    rows = explain(place(fabric, World(8, replicas=2)))
    assert [(r["group"], r["tp_rank"], r["rank"]) for r in rows] == [(i // 8, i % 8, i) for i in range(16)]
    assert [rows[9][k] for k in ("hostname", "device", "hca", "cores")] == ["dgx-02", "GPU1", "mlx5_3", "14-27"]
    header, *body = matrix(fabric, 0)
    assert header[1:9] == tuple(f"GPU{i}" for i in range(8))
    cells = [row[1:-2] for row in body]
    assert cells == [tuple(column) for column in zip(*cells, strict=True)]
    assert body[1][:5] == ("GPU1", "NV18", "X", "NV18", "NV18")
    assert body[0][-2:] == ("0-55", "0")


def test_large_fabrics_are_quick_to_lay_out() -> None:
    """512 hosts: laid out, and refused with suggestions."""
    fabric = preset("512x8xH100")
    assert len(place(fabric, World(8, replicas=512)).groups) == 512
    with pytest.raises(PlacementError, match=r"4096 ranks \(512 nodes x 8\): use for example"):
        place(fabric, World(13))
