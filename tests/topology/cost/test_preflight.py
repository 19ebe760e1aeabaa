"""What preflight measures and whom it names: pure."""

from __future__ import annotations

from dataclasses import replace

import pytest
from laddertron.engine.config.schema import Deployment, ModelSection, ParallelConfig
from laddertron.launchers.measure.preflight_plan import (
    LinkTime,
    NodeTransport,
    Pair,
    RankReport,
    Setup,
    judge,
    make_preflight_plan,
    slowest,
    unlike,
)
from laddertron.launchers.rank.rank import require_transport
from laddertron.topology.cost.cost import Costs, Regime, Shape, shape_of
from laddertron.topology.cost.fit import Fit, Point, Residual
from laddertron.topology.hardware.presets import preset
from laddertron.topology.link_cost import LinkCost
from laddertron.topology.placement.placement import place
from laddertron.topology.placement.world import World

IB = NodeTransport("NET/IB", ("/dev/infiniband/uverbs0",), None, "libibverbs.so.1", 8 << 30)


def setup(rank: int) -> Setup:
    versions = {"nccl": "2.27.3", "cuda": "12.8", "driver": "570.1", "laddertron": "0.1.0"}
    return Setup(rank, f"node{rank // 8}", "c0ffee", versions)


def report(rank: int) -> RankReport:
    return RankReport(rank, f"node{rank // 8}", IB, 1000.0 + rank * 1e-4, 0.010 + rank * 1e-5)


ALIKE = [setup(rank) for rank in range(16)]
HEALTHY = [report(rank) for rank in range(16)]


def test_health_has_no_findings() -> None:
    assert judge(HEALTHY, require_transport="ib") == ()
    assert judge([], (), None) == ()
    assert unlike(ALIKE) == unlike([]) == ()


def test_the_plan_covers_every_link_and_size() -> None:
    """2 x 8: each neighbouring pair inside and each of eight rails across, nobody twice in a round, inner and outer
    links apart; every strategy that there is at every size from 32 KiB to 8 MiB and the model's own."""
    fabric = preset("2x8xH100")
    placement = place(fabric, World(16))
    found = make_preflight_plan(fabric, placement, shape_of(fabric, placement), "native", message_bytes=(48 << 10,))
    pairs = [p for r in found.rounds for p in r]
    inner = [p for p in pairs if p.rail is None]
    assert sorted((p.a, p.b) for p in inner) == [(i, i + 1) for i in range(15) if i != 7]
    assert {(p.a, p.b, p.rail) for p in pairs if p.rail is not None} == {(i, i + 8, i) for i in range(8)}
    assert len(pairs) == 14 + 8
    for rounds in found.rounds:
        ends = [rank for p in rounds for rank in (p.a, p.b)]
        assert len(ends) == len(set(ends))
        assert len({p.rail is None for p in rounds}) == 1
    sizes = sorted({n for _, n in found.sweep})
    assert sizes[0] == 32 << 10
    assert sizes[-1] == 8 << 20
    assert 48 << 10 in sizes
    by_size = {n: {s for s, m in found.sweep if m == n} for n in sizes}
    assert by_size[128 << 10] == {"exchange", "two_level", "pipeline"}
    assert by_size[256 << 10] == by_size[8 << 20] == {"pipeline"}


def test_every_group_is_measured() -> None:
    """Four nodes of two, groups of four: both groups' pairs, in as few rounds as one group takes alone, nobody twice in
    a round."""
    fabric = preset("4x2xH100")
    placement = place(fabric, World(4, replicas=2))
    pair = preset("2x2xH100")
    found = make_preflight_plan(fabric, placement, shape_of(fabric, placement), "native")
    pairs = {(p.a, p.b, p.rail) for r in found.rounds for p in r}
    first = {(0, 1, None), (2, 3, None), (0, 2, 0), (1, 3, 1)}
    assert pairs == first | {(a + 4, b + 4, rail) for a, b, rail in first}
    assert len(found.rounds) == len(make_preflight_plan(pair, place(pair, World(4)), Shape(2, 2), "native").rounds)
    for rounds in found.rounds:
        ends = [rank for p in rounds for rank in (p.a, p.b)]
        assert len(ends) == len(set(ends))


def test_the_slowest_group_is_kept() -> None:
    """By what all groups measured; a size that one of them lacks says nothing."""
    quick, slow = ([Point("exchange", n, n * each, Shape(2, 2)) for n in (1 << 15, 1 << 16)] for each in (1e-9, 2e-9))
    odd = [*quick, Point("two_level", 1 << 15, 9.0, Shape(2, 2))]
    assert slowest([quick, slow, odd]) == 1
    assert slowest([odd, quick]) == 0
    assert slowest([[], []]) == 0


def test_a_ring_of_nodes_closes() -> None:
    """Over three nodes each rail is measured from the last node to the first as well; of NCCL its own all-reduce and
    that in two levels, at every size, and one_shot up to its largest."""
    fabric = preset("3x2xH100")
    placement = place(fabric, World(6))
    found = make_preflight_plan(fabric, placement, Shape(3, 2, "nvlink", "ib", 2), "nccl")
    across = {(p.a, p.b) for r in found.rounds for p in r if p.rail is not None}
    assert across == {(0, 2), (2, 4), (4, 0), (1, 3), (3, 5), (5, 1)}
    by_size = {n: {s for s, m in found.sweep if m == n} for _, n in found.sweep}
    assert all(strategies - {"one_shot"} == {"flat", "two_level"} for strategies in by_size.values())
    assert {n for n, strategies in by_size.items() if "one_shot" in strategies} == {n for n in by_size if n <= 4 << 20}


def test_other_versions_are_named() -> None:
    odd = replace(ALIKE[9], versions={**ALIKE[9].versions, "nccl": "2.26.2"})
    (finding,) = unlike([*ALIKE[:9], odd, *ALIKE[10:]])
    assert str(finding) == (
        "error: rank 9 on node1: nccl is 2.26.2, on the others 2.27.3: install one nccl on every node"
    )


def test_another_config_is_named() -> None:
    odd = [replace(s, config="bad") if s.hostname == "node1" and s.rank < 11 else s for s in ALIKE]
    (finding,) = unlike(odd)
    assert finding.culprit == "rank 8 on node1, rank 9 on node1, rank 10 on node1"
    assert "config is bad, on the others c0ffee: start all ranks with one file" in finding.message


@pytest.mark.parametrize(
    ("transport", "words"),
    [
        (NodeTransport("NET/Socket", (), None, "x"), "no /dev/infiniband device (in a container: mount it)"),
        (NodeTransport("NET/Socket", ("uverbs0",), 64 << 10, "x"), "memlock is limited to 64 KiB (ulimit -l unlimited"),
        (NodeTransport("NET/Socket", ("uverbs0",), None, ""), "libibverbs is not installed"),
        (NodeTransport("NET/Socket", ("uverbs0",), None, "x"), "is the port active"),
    ],
)
def test_sockets_where_ib_is_required(transport: NodeTransport, words: str) -> None:
    """The culprit, what it uses and exactly what it lacks; without the requirement it is no fault."""
    ranks = [*HEALTHY[:15], replace(HEALTHY[15], transport=transport)]
    (finding,) = judge(ranks, require_transport="ib")
    assert (finding.severity, finding.culprit) == ("error", "rank 15 on node1")
    assert "traffic goes by NET/Socket, parallel.require_transport is ib" in finding.message
    assert words in finding.message
    assert judge(ranks) == ()


@pytest.mark.parametrize("backend", ["native", "gloo"])
def test_a_backend_of_sockets_where_ib_is_required(backend: str) -> None:
    """Whatever the nodes have: the words are those with which a rank of `run` refuses, and sockets are sockets."""
    ranks = [replace(r, transport=replace(IB, used=backend)) for r in HEALTHY[:2]]
    (finding,) = judge(ranks, require_transport="ib")
    assert (finding.severity, finding.culprit) == ("error", "rank 0 on node0, rank 1 on node0")
    asks = Deployment(model=ModelSection(path="nowhere"), parallel=ParallelConfig(require_transport="ib"))
    with pytest.raises(ValueError, match="sends over sockets") as refused:
        require_transport(asks, backend, True)
    assert finding.message == str(refused.value)
    assert judge(ranks, require_transport="socket") == judge(ranks) == ()


def test_ib_where_sockets_are_required() -> None:
    (finding,) = judge(HEALTHY[:2], require_transport="socket")
    assert "NET/IB, parallel.require_transport is socket" in finding.message


def test_a_small_shared_memory_is_named() -> None:
    small = replace(IB, shm_bytes=64 << 20)
    (finding,) = judge([*HEALTHY[:7], replace(HEALTHY[7], transport=small)])
    assert finding.culprit == "rank 7 on node0"
    assert "/dev/shm holds 64 MiB" in finding.message
    assert judge([replace(HEALTHY[7], transport=small)]) == (), "one rank alone on its node does not need it"


def test_clocks_and_slow_gpus_are_named() -> None:
    """A clock 2 s off is a warning; a GPU 30 % slower than the median is an error, and comes first."""
    ranks = list(HEALTHY)
    ranks[3] = replace(ranks[3], clock_s=1002.0)
    ranks[12] = replace(ranks[12], matmul_s=0.0131)
    slow, skew = judge(ranks)
    assert (slow.severity, slow.culprit, skew.severity, skew.culprit) == (
        "error", "rank 12 on node1", "warning", "rank 3 on node0",
    )  # fmt: skip
    assert "13.10 ms, 1.30 times the median" in slow.message
    assert judge(ranks, max_spread=1.4) == (skew,)
    assert "+2.0 s off" in skew.message


@pytest.mark.parametrize(("off", "severity"), [(0.4, None), (0.6, "warning"), (-4.9, "warning"), (3600.0, "error")])
def test_a_clock_far_off_is_broken(off: float, severity: str | None) -> None:
    """Half a second is nothing, above it a warning, above five an error; the rank and by how much are named."""
    found = judge([*HEALTHY[:3], replace(HEALTHY[3], clock_s=HEALTHY[2].clock_s + off)])
    assert [(f.severity, f.culprit) for f in found] == ([(severity, "rank 3 on node0")] if severity else [])
    assert all(f"its clock is {off:+.1f} s off" in f.message for f in found)


def test_the_slower_of_two_is_found() -> None:
    two = [HEALTHY[0], replace(HEALTHY[8], matmul_s=0.02)]
    assert [f.culprit for f in judge(two)] == ["rank 8 on node1"]


@pytest.mark.parametrize(("times", "severity"), [(1.1, None), (1.18, "warning"), (1.49, "warning"), (1.6, "error")])
def test_two_ranks_have_no_median(times: float, severity: str | None) -> None:
    """A fifth more is no error with nobody else to compare with, and nobody calls it a median."""
    found = judge([HEALTHY[0], replace(HEALTHY[8], matmul_s=times * HEALTHY[0].matmul_s)])
    assert [f.severity for f in found] == ([severity] if severity else [])
    assert all(f"{times:.2f} times the quickest's of 2" in f.message for f in found)


def test_slow_links_are_named() -> None:
    """One rail at half its rate and one with ten times the latency, each with its ends; NVLink is not compared with
    InfiniBand."""
    links = [LinkTime(Pair(i, i + 8, i), 5e-6, 45e9) for i in range(8)] + [
        LinkTime(Pair(0, 1, path="NV18"), 1e-6, 300e9)
    ] * 3
    links[2] = replace(links[2], bytes_per_s=22e9)
    links[5] = replace(links[5], latency_s=50e-6)
    rate, latency = judge(HEALTHY, links)
    assert judge(HEALTHY, links, max_spread=100.0) == ()
    assert rate.culprit == "link node0 rank 2 to node1 rank 10 on rail 2"
    assert "22.0 GB/s, others 45.0 GB/s" in rate.message
    assert latency.culprit == "link node0 rank 5 to node1 rank 13 on rail 5"
    assert "latency 50.0 us, others 5.0 us" in latency.message


def test_links_inside_are_compared_along_one_path() -> None:
    """A two-socket machine without NVLink: 24 GB/s between neighbours and 11 GB/s between sockets is health; a
    neighbour with 11 GB/s is not, nor NVLink at half its rate beside others."""
    fabric = preset("1x8xH100-PCIe")
    placement = place(fabric, World(8))
    pairs = [p for r in make_preflight_plan(fabric, placement, shape_of(fabric, placement), "nccl").rounds for p in r]
    assert {p.path for p in pairs} == {fabric.nodes[0].path(f"GPU{i}", f"GPU{i + 1}") for i in range(7)}
    assert "SYS" in {p.path for p in pairs}
    links = [LinkTime(p, 5e-6, 11e9 if p.path == "SYS" else 24e9) for p in pairs]
    assert judge(HEALTHY[:8], links) == ()
    slow = next(i for i, k in enumerate(links) if k.pair.path != "SYS")
    links[slow] = replace(links[slow], bytes_per_s=11e9)
    (finding,) = judge(HEALTHY[:8], links)
    assert (finding.severity, "11.0 GB/s, others 24.0 GB/s" in finding.message) == ("error", True)
    assert finding.culprit == f"link node0 rank {links[slow].pair.a} to node0 rank {links[slow].pair.b}"


def test_ranks_on_cores_have_the_path_of_their_numa_nodes() -> None:
    fabric = preset("1x4xcpu")
    placement = place(fabric, World(4))
    seats = placement.seats
    pairs = [p for r in make_preflight_plan(fabric, placement, shape_of(fabric, placement), "native").rounds for p in r]
    assert [p.path for p in pairs] == ["NODE" if seats[p.a].numa == seats[p.b].numa else "SYS" for p in pairs]


def test_a_link_alone_is_compared_with_its_port() -> None:
    """5 ms and 1 MB/s is warned of though there is no other link; so are ports that all have a tenth of what is printed
    on them. Healthy ones are not, nor what is inside a node."""
    two = [HEALTHY[0], HEALTHY[8]]
    rate, far = judge(two, [LinkTime(Pair(0, 8, 0), 5e-3, 1e6)])
    assert {rate.culprit, far.culprit} == {"link node0 rank 0 to node1 rank 8 on rail 0"}
    assert {rate.severity, far.severity} == {"warning"}
    assert "0.001 GB/s, even 1 Gb/s are 0.125 GB/s" in rate.message
    assert "latency 5000.0 us" in far.message
    alike = [LinkTime(Pair(i, i + 8, i), 5e-6, 5e9 - i) for i in range(8)]
    (all_poor,) = judge(HEALTHY, alike, port_bytes_per_s=50e9)
    assert all_poor.culprit == "link node0 rank 7 to node1 rank 15 on rail 7 and 7 more"
    assert "5 GB/s, a port has 50 GB/s" in all_poor.message
    assert judge(HEALTHY, alike, port_bytes_per_s=12.5e9) == judge(HEALTHY, alike) == ()
    assert judge(HEALTHY, [LinkTime(Pair(0, 1, path="NODE"), 5e-3, 1e6)], port_bytes_per_s=50e9) == ()


def test_what_the_model_does_not_explain_is_a_warning() -> None:
    costs = Costs("native", (Regime(0.0, None, LinkCost(1e-3, 1e9)),))
    point = Point("exchange", 1 << 15, 1e-3, Shape(2, 1))
    fitted = Fit(costs, (Residual(point, 1e-3), Residual(point, 2e-3)))
    (finding,) = judge(HEALTHY[:1], (), fitted)
    assert finding.severity == "warning"
    assert "1 of 2 measured all-reduces" in finding.message
    assert "exchange of 32768 bytes (+100%)" in finding.message
