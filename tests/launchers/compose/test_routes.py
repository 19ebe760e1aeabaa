"""The interface that routes to the other hosts: found, passed to the launcher, used by ranks, overridden."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from laddertron.engine.config.load import load
from laddertron.launchers.compose import routes
from laddertron.launchers.compose.host_allocation import JobHosts, Route, together
from laddertron.launchers.compose.host_names import HostNames
from laddertron.launchers.compose.hosts import Host
from laddertron.launchers.compose.mpi import Kind, Site, compose
from laddertron.launchers.compose.rank_mapping import ENV_ROUTE
from laddertron.launchers.compose.routes import find_route
from laddertron.launchers.rank import network
from laddertron.launchers.rank.network import local_address, use_route
from laddertron.topology.hardware.interfaces import address_towards
from laddertron.topology.hardware.sysfs import Sysfs

DEMO = Path(__file__).parents[3] / "configs" / "demo.yaml"
INTERFACES = {"eth0": ["10.0.0.1/24"], "docker0": ["172.17.0.1/16"], "ib0": ["10.9.0.1/16"], "lo": ["127.0.0.1/8"]}
ROUTE = Route("10.0.0.2", "b", "eth0", "10.0.0.1", "10.0.0.0/24")

HELD = {"10.0.0.1": "eth0", "10.9.0.1": "ib0", "10.8.0.1": "lo", "127.0.0.1": "lo"}


@pytest.fixture(autouse=True)
def kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interfaces as above; 10.9 goes over InfiniBand, 10.8 from lo, 192.0.2.1 nowhere, the rest by eth0."""

    def towards(peer: str) -> str:
        if peer == "192.0.2.1":
            raise OSError("Network is unreachable")
        if peer.startswith("127."):
            return peer
        return {"10.9": "10.9.0.1", "10.8": "10.8.0.1"}.get(peer[:4], "10.0.0.1")

    for module in (routes, network):
        monkeypatch.setattr(module, "address_towards", towards)
        monkeypatch.setattr(module, "interface_of", HELD.__getitem__)
    monkeypatch.setattr(routes, "addresses", lambda: INTERFACES)


def route(*names: str, **places: str) -> Route | None:
    known = HostNames(names, "a", lambda name: tuple(places.get(name, "").split()))
    return find_route(known, [Host(name, 1) for name in names])


def test_the_route_to_the_other_hosts() -> None:
    """With the subnet that holds all of them, else without; by the first name that resolves and has a route."""
    assert route("a", "b", b="10.0.0.2") == ROUTE
    assert route("a", "b", "c", b="10.0.0.2", c="10.0.1.3") == Route("10.0.0.2", "b", "eth0", "10.0.0.1")
    assert route("a", "b", b="10.9.0.2") == Route("10.9.0.2", "b", "ib0", "10.9.0.1", "10.9.0.0/16")
    assert route("a", "b", b="192.0.2.1 10.0.0.2") == ROUTE
    assert route("a", "c", "b", b="10.0.0.2") == Route("10.0.0.2", "b", "eth0", "10.0.0.1")
    assert route("b", "c", b="10.0.0.2", c="10.0.0.3") == ROUTE, "this machine is no host of the job"
    assert route("a", "b") is None
    assert route("a", "b", b="127.0.1.1") is None
    assert route("a") is None


def composed(kind: Kind, *overrides: str, shell: frozenset[str] = frozenset()) -> Any:
    site = Site(kind, "mpirun", (5, 0, 1), "python", shell=shell, host="a")
    share = JobHosts((Host("a", 1), Host("b", 1)), route=ROUTE)
    return compose(load(DEMO, overrides), site, share, ("rank",))


@pytest.mark.parametrize("kind", ["openmpi", "mpich", "slurm"])
def test_ranks_are_given_the_route(kind: Kind) -> None:
    """Under every launcher; a configured interface takes its place."""
    command = composed(kind)
    assert command.env[ENV_ROUTE] == "10.0.0.2"
    assert "launch.interface overrides it" in command.variables[ENV_ROUTE].reason
    assert "NCCL_SOCKET_IFNAME" not in command.env, "the interface may have another name on another host"
    assert ENV_ROUTE not in composed(kind, "launch.interface=ib0").env


def test_open_mpi_is_given_the_subnet_unless_it_is_restricted_otherwise() -> None:
    assert composed("openmpi").argv.count("10.0.0.0/24") == 2
    named = composed("openmpi", "launch.interface=ib0").argv
    assert (named.count("ib0"), named.count("10.0.0.0/24")) == (2, 0)
    assert "10.0.0.0/24" not in composed("openmpi", "launch.extra_args=[--mca, btl_tcp_if_exclude, docker0]").argv
    assert "10.0.0.0/24" not in composed("openmpi", shell=frozenset({"OMPI_MCA_btl_tcp_if_exclude"})).argv
    assert "10.0.0.0/24" not in composed("openmpi", "launch.env={OMPI_MCA_btl_tcp_if_exclude: docker0}").argv


def test_replicas_in_one_job_have_one_route() -> None:
    shares = [JobHosts((Host("a", 1),)), JobHosts((Host("b", 1), Host("c", 1)), route=ROUTE)]
    assert together(shares).route == ROUTE


def test_a_rank_uses_its_own_interface_on_the_route(tmp_path: Path) -> None:
    """What variables say already stays; RDMA ports are UCX's to choose; without a route libraries choose."""
    plain, environ = load(DEMO), {ENV_ROUTE: "10.0.0.2"}
    use_route(plain, environ, Sysfs(tmp_path))
    assert environ == {
        ENV_ROUTE: "10.0.0.2",
        "NCCL_SOCKET_IFNAME": "=eth0",
        "GLOO_SOCKET_IFNAME": "eth0",
        "FI_TCP_IFACE": "eth0",
        "UCX_NET_DEVICES": "eth0",
        "OMPI_MCA_btl_tcp_if_include": "eth0",
    }
    (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    environ = {ENV_ROUTE: "10.0.0.2", "GLOO_SOCKET_IFNAME": "bond0", "OMPI_MCA_btl_tcp_if_exclude": "docker0"}
    use_route(plain, environ, Sysfs(tmp_path))
    assert environ["GLOO_SOCKET_IFNAME"] == "bond0"
    assert not {"UCX_NET_DEVICES", "OMPI_MCA_btl_tcp_if_include"} & environ.keys()
    for environ in ({ENV_ROUTE: "192.0.2.1"}, {}):
        before = dict(environ)
        use_route(plain, environ, Sysfs(tmp_path))
        assert environ == before
    environ = {ENV_ROUTE: "10.8.0.2"}  # its way has this host's own address as source, which is on lo
    use_route(plain, environ, Sysfs(tmp_path))
    assert environ == {ENV_ROUTE: "10.8.0.2"}
    environ = {ENV_ROUTE: "10.0.0.2"}
    use_route(load(DEMO, ["launch.interface=ib0"]), environ, Sysfs(tmp_path))
    assert len(environ) == 1


def test_a_rank_listens_on_the_route(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its hostname resolves to, such as 127.0.1.1."""
    monkeypatch.setattr(network, "resolve", lambda name: ("127.0.1.1",))
    monkeypatch.setenv(ENV_ROUTE, "10.9.0.2")
    assert local_address(load(DEMO), ["a", "b"]) == "10.9.0.1"
    monkeypatch.delenv(ENV_ROUTE)
    with pytest.raises(ValueError, match=r"resolves to 127\.0\.1\.1: set launch\.interface"):
        local_address(load(DEMO), ["a", "b"])


def test_the_kernel_is_asked() -> None:
    assert address_towards("127.0.0.1") == "127.0.0.1"
