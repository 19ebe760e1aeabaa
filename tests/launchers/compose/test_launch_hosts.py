"""Where hosts come from and how replicas share them: lists, files, allocations, placement, spares."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from laddertron.engine.config.load import Deployment, load
from laddertron.launchers.compose.host_allocation import JobHosts, divide, together
from laddertron.launchers.compose.host_names import HostNames
from laddertron.launchers.compose.hosts import (
    Host,
    HostAllocation,
    LaunchError,
    expand_nodelist,
    parse_hostfile,
    parse_nodefile,
    read_hosts,
)
from laddertron.launchers.job.fleet import Fleet, spare_places, substitute
from laddertron.topology.hardware.presets import preset
from laddertron.topology.placement.world import World

CONFIGS = Path(__file__).parents[3] / "configs"


def deployment(*overrides: str) -> Deployment:
    return load(CONFIGS / "demo.yaml", overrides)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n0", "n0"),
        ("n0,n1", "n0 n1"),
        ("gpu[01-03,7],login", "gpu01 gpu02 gpu03 gpu7 login"),
        ("gpu[098-101]", "gpu098 gpu099 gpu100 gpu101"),
        ("r[1-2]n[0-1]", "r1n0 r1n1 r2n0 r2n1"),
        ("r[1-2]-x", "r1-x r2-x"),
        ("a-b[3],c.example.org", "a-b3 c.example.org"),
    ],
)
def test_slurm_node_lists(text: str, names: str) -> None:
    """SLURM_JOB_NODELIST's ranges, paddings and products."""
    assert " ".join(expand_nodelist(text)) == names


@pytest.mark.parametrize(
    "text", ["", "n[1-", "n[a-b]", "n[1-2-3]", "m,n[3-1]", "n[1-999999999]", "n[]", "n1]", "a[1-9999]b[1-9999]"]
)
def test_broken_node_lists(text: str) -> None:
    """Refused, the huge ones before anything is built."""
    with pytest.raises(LaunchError, match="node list"):
        expand_nodelist(text)


def test_hostfiles() -> None:
    """The forms people write, and one line for what they should not."""
    text = "# two nodes\nnode1 slots=8\nnode2:4 # half\n\nnode3\nnode4 slots=2 max_slots=4\n"
    assert parse_hostfile(text, "hosts") == (Host("node1", 8), Host("node2", 4), Host("node3", 0), Host("node4", 2))
    for bad, says in (
        ("node1 slots=x", "hosts:1"),
        ("a\nnode1 cores=3", "hosts:2: 'cores=3'"),
        ("a\na", "hosts:2: duplicate host a"),
        ("a slots=0", "hosts:1"),
        ("-oProxyCommand=x", "hosts:1"),
        ("# nobody", "no hosts in it"),
    ):
        with pytest.raises(LaunchError, match=says):
            parse_hostfile(bad, "hosts")
    assert parse_nodefile("a\na\nb\nb\n", "PBS_NODEFILE") == (Host("a", 2), Host("b", 2))
    with pytest.raises(LaunchError, match="no hosts"):
        parse_nodefile("\n", "PBS_NODEFILE")


def source(d: Deployment, environ: Mapping[str, str]) -> tuple[str, str, bool]:
    found = read_hosts(d, environ, None)
    return " ".join(f"{h.name}:{h.slots}" for h in found.hosts), found.source, found.allocation


def test_where_hosts_come_from(tmp_path: Path) -> None:
    """The config before its hostfile before the allocation before this host; ranks spread evenly where nobody says."""
    slurm = {"SLURM_JOB_NODELIST": "n[0-1]"}
    file = tmp_path / "hosts"
    file.write_text("x slots=2\ny slots=2\n", encoding="utf-8")
    assert source(deployment(), {}) == ("localhost:2", "this host, since none is listed", False)
    assert source(deployment(), slurm) == ("n0:1 n1:1", "SLURM_JOB_NODELIST", True)
    assert source(deployment(), slurm | {"SLURM_GPUS_ON_NODE": "8"})[0] == "n0:8 n1:8"
    assert source(deployment("launch.ranks_per_node=4"), slurm)[0] == "n0:4 n1:4"
    assert source(deployment(f"launch.hostfile={file}"), slurm) == ("x:2 y:2", "launch.hostfile", False)
    assert source(deployment("launch.hosts=[a, b]"), slurm) == ("a:1 b:1", "launch.hosts", False)
    assert source(deployment("launch.hosts=['a:2', 'b:2']"), {})[0] == "a:2 b:2"
    file.write_text("a\na\nb\nb\n", encoding="utf-8")
    assert source(deployment(), {"PBS_NODEFILE": str(file)}) == ("a:1 b:1", "PBS_NODEFILE", True)
    assert source(deployment("parallel.tensor_parallel_size=3"), {"LSB_DJOB_HOSTFILE": str(file)})[0] == "a:2 b:2"
    with pytest.raises(LaunchError, match="PBS_NODEFILE: /none cannot be read"):
        read_hosts(deployment(), {"PBS_NODEFILE": "/none"}, None)
    fabric = preset("2x8xH100")
    found = read_hosts(deployment(), {}, fabric)
    assert (found.source, found.hosts) == ("launch.fabric", (Host("node0", 8), Host("node1", 8)))


def names(shares: tuple[JobHosts, ...]) -> list[str]:
    return [" ".join(f"{h.name}:{h.slots}" for h in share.hosts) for share in shares]


def pool(*slots: int, allocation: bool = False) -> HostAllocation:
    return HostAllocation(tuple(Host(f"n{i}", count) for i, count in enumerate(slots)), "launch.hosts", allocation)


def test_replicas_get_slices() -> None:
    """Inside a host where a group fits, over whole hosts in equal parts where it does not."""
    assert names(divide(pool(8, 8), World(16), None)) == ["n0:8 n1:8"]
    assert names(divide(pool(8, 8, 8, 8), World(16, replicas=2), None)) == ["n0:8 n1:8", "n2:8 n3:8"]
    assert names(divide(pool(8, 8), World(4, replicas=3), None)) == ["n0:4", "n0:4", "n1:4"]
    assert [s.hosts[0].devices for s in divide(pool(8, 8), World(4, replicas=3), None)] == [
        (0, 1, 2, 3),
        (4, 5, 6, 7),
        (0, 1, 2, 3),
    ]
    assert names(divide(pool(4, 4), World(6), None)) == ["n0:3 n1:3"]
    assert names(divide(pool(2, 2, 2), World(6), None)) == ["n0:2 n1:2 n2:2"]


def test_what_does_not_fit_is_refused_with_the_arithmetic() -> None:
    """Values, rule, fix."""
    for slots, tp, replicas in (((8,), 16, 1), ((8, 8, 8), 16, 2), ((5, 5), 7, 1), ((1,), 2, 1)):
        with pytest.raises(LaunchError, match=f"does not fit: need {tp} slots.*{' . '.join(map(str, slots))} slot"):
            divide(pool(*slots), World(tp, replicas=replicas), None)


def test_allocated_nodes_that_would_idle_are_refused() -> None:
    """Nodes billed and never used: refused for an allocation; hosts that a config names may wait."""
    with pytest.raises(LaunchError, match="8 x 1 = 8 ranks use 1 of 2 allocated nodes: n1 would be unused"):
        divide(pool(8, 8, allocation=True), World(8), None)
    assert names(divide(pool(8, 8), World(8), None)) == ["n0:8"]
    assert names(divide(pool(4, 4, allocation=True), World(8), None)) == ["n0:4 n1:4"]


def test_placement_decides_where_the_fabric_is_known() -> None:
    """Devices, HCAs and the interface are the placement's; hosts that it does not know are refused."""
    fabric = preset("2x8xH100")
    available = HostAllocation((Host("node0", 8), Host("node1", 8)), "launch.hosts")
    [share] = divide(available, World(16), fabric)
    assert names((share,)) == ["node0:8 node1:8"]
    assert len(share.hcas) == 8
    assert len(share.interfaces) == 1
    halves = divide(available, World(4, replicas=4), fabric)
    assert {d for s in halves[:2] for h in s.hosts for d in h.devices or ()} == set(range(8))
    assert not halves[0].hcas  # one host needs no wire
    with pytest.raises(LaunchError, match="host 'other' is not in the fabric"):
        divide(HostAllocation((Host("other", 8),), "launch.hosts"), World(8), fabric)
    with pytest.raises(ValueError, match="24"):
        divide(available, World(24), fabric)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 16), st.integers(1, 5))
@settings(max_examples=300, deadline=None)
def test_slices_never_overlap(slots: list[int], tp: int, replicas: int) -> None:
    """Whatever fits: every rank has one device of its own, parts of a group are equal, no host is overfilled."""
    try:
        shares = divide(pool(*slots), World(tp, replicas=replicas), None)
    except LaunchError:
        # one replica always fits if it fits the first host that is big enough
        assert replicas > 1 or max(slots) < tp
        return
    used: set[tuple[str, int]] = set()
    for share in shares:
        assert share.ranks == tp
        assert len({h.slots for h in share.hosts}) == 1
        for host in share.hosts:
            mine = {(host.name, d) for d in host.devices or range(host.slots)}
            assert len(mine) == host.slots
            assert not mine & used
            assert all(d < slots[int(name[1:])] for name, d in mine)
            used |= mine


def test_all_replicas_in_one_job() -> None:
    """Under one mpirun, hosts add up; hosts with unequal numbers of ranks are refused."""
    joined = together(divide(pool(8, 8), World(4, replicas=4), None))
    assert joined.hosts == (Host("n0", 8, tuple(range(8))), Host("n1", 8, tuple(range(8))))
    with pytest.raises(LaunchError, match="n0 8, n1 4"):
        together(divide(pool(8, 8), World(4, replicas=3), None))


def plain(hostname: str) -> HostNames:
    """Names that are not listed do not resolve."""
    return HostNames((), hostname)


def test_spares_take_the_place_of_lost_hosts() -> None:
    """A host that cannot be cleared is replaced, for all that were on it, until spares run out."""
    share = JobHosts((Host("a", 8), Host("b", 8)))
    places = spare_places(share.hosts, ["b.example.org"], ["s1", "s2"], {}, plain("login"))
    assert places == {"b": "s1"}
    assert names((substitute(share, places),)) == ["a:8 s1:8"]
    again = spare_places(share.hosts, ["b", "s1"], ["s1", "s2"], places, plain("login"))
    assert again == {"b": "s2"}
    with pytest.raises(LaunchError, match="no spare is left"):
        spare_places(share.hosts, ["a", "b", "s1"], ["s1", "s2"], again, plain("login"))
    with pytest.raises(LaunchError, match="localhost is excluded"):
        spare_places((Host("localhost", 2),), ["laptop"], [], {}, plain("laptop"))


def test_a_fleet_is_ready_for_the_supervisor() -> None:
    """Commands by replica, loopback control while all is local, times from the config."""
    patient = Fleet(deployment("daemon.heartbeat_timeout=30s"), {}, "laptop").options(0, restart=True).timeouts
    assert (patient.dead_s, patient.silence_s) == (30.0, 30.0)
    fleet = Fleet(deployment("daemon.heartbeat_timeout=4s", "daemon.max_restarts=1"), {}, "laptop")
    assert fleet.local
    command = fleet.command(0)
    assert command.argv[-3:] == ("-P", "-m", "laddertron.launchers.rank.worker")
    assert command.env["OMP_NUM_THREADS"] == "1"
    options = fleet.options(0, restart=False)
    assert (options.world.size, options.control_host, options.max_failures) == (2, "127.0.0.1", 1)
    assert (options.timeouts.dead_s, options.timeouts.suspect_s) == (4.0, 2.0)
    with pytest.raises(LaunchError, match="is excluded"):
        fleet.command(0, frozenset({"laptop"}))


def test_a_fleet_over_hosts_names_its_control_address() -> None:
    """Remote ranks must reach the daemon: the config's address, the interface's, or the route's own; never a guess."""
    fleet = Fleet(
        deployment("launch.hosts=['127.0.0.1:1', '192.0.2.77:1']", "daemon.control_host=10.0.0.1"), {}, "here"
    )
    assert not fleet.local
    assert fleet.control_host() == "10.0.0.1"
    by_name = Fleet(deployment("launch.hosts=['127.0.0.1:1', '192.0.2.77:1']", "launch.interface=lo"), {}, "here")
    assert by_name.control_host() == "127.0.0.1"
    assert by_name.deployment.launch.interface == "lo"
    gone = Fleet(deployment("launch.hosts=[a.invalid, b.invalid]", "launch.interface=nope0"), {}, "here")
    with pytest.raises(LaunchError, match="interface nope0 has no address"):
        gone.control_host()


def test_a_host_without_an_address_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    fleet = Fleet(deployment("launch.hosts=[a.invalid, b.invalid]"), {}, "here")
    with pytest.raises(LaunchError, match=r"host a\.invalid: Name or service not known: correct launch\.hosts"):
        fleet.control_host()
