"""Seats: what the composer tells ranks of where they belong, and how they find out that they are elsewhere."""

from __future__ import annotations

import socket

import pytest
from laddertron.engine.config.schema import Deployment, LaunchConfig, ModelSection
from laddertron.launchers.compose.hosts import Host
from laddertron.launchers.compose.rank_mapping import (
    ENV_INTERFACES,
    cores_here,
    cores_text,
    expected,
    interfaces_text,
    of_host,
    seats_text,
)
from laddertron.launchers.rank.network import local_address
from laddertron.topology.placement.mapping import MappingError, verify


def test_ranks_in_their_places_pass_and_dealt_ones_are_told_the_mend() -> None:
    """Two hosts of two. In order all is well, domains or not; dealt round the hosts, every rank refuses with the
    launcher's own option."""
    text = seats_text((Host("a", 2), Host("b", 2)))
    assert text == "a:2,b:2"
    verify(expected(text), [(0, "a", 0), (1, "a.example.org", 1), (2, "b", 0), (3, "b", 1)], "openmpi")
    with pytest.raises(MappingError, match=r"dealt round the nodes.*--map-by ppr:2:node"):
        verify(expected(text), [(0, "a", 0), (1, "b", 0), (2, "a", 1), (3, "b", 1)], "openmpi")
    with pytest.raises(MappingError, match=r"-ppn 2 -hosts a,b"):
        verify(expected(text), [(0, "b", 0), (1, "b", 1), (2, "a", 0), (3, "a", 1)], "mpich")


@pytest.mark.parametrize("text", ["", "a", "a:0", "a:x", ":2", "a:2,b:1", "a:99999999"])
def test_what_is_not_ours_is_refused(text: str) -> None:
    with pytest.raises(MappingError, match="LADDERTRON_SEATS"):
        expected(text)


def test_each_host_is_told_the_interface_of_its_own() -> None:
    """Hosts that call theirs differently, with domains or not; one host alone, or one without, is told nothing."""
    text = interfaces_text((Host("a", 2, interface="ib0"), Host("b", 2, interface="bond0")))
    assert [of_host(ENV_INTERFACES, text, name) for name in ("a", "a.example.org", "b", "c")] == [
        "ib0",
        "ib0",
        "bond0",
        None,
    ]
    assert of_host(ENV_INTERFACES, None, "a") is None
    assert interfaces_text((Host("a", 2, interface="lo"),)) == ""
    assert interfaces_text((Host("a", 2, interface="ib0"), Host("b", 2))) == ""


@pytest.mark.parametrize("text", ["", "a", "a=", "=ib0", "a=ib0,b"])
def test_interfaces_that_are_not_ours_are_refused(text: str) -> None:
    with pytest.raises(MappingError, match=r"LADDERTRON_INTERFACES.*expected node1=ib0,node2=ib0"):
        of_host(ENV_INTERFACES, text, "a")


def test_a_rank_binds_to_the_placements_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over nodes, whatever the host's own name resolves to; launch.interface is the operator's and wins; an interface
    that is not here is named with the fix; on one node it is loopback."""
    here, nodes = socket.gethostname(), [socket.gethostname(), "elsewhere"]
    monkeypatch.setattr("laddertron.launchers.rank.network.resolve", lambda name: ("127.0.1.1", "192.0.2.1"))
    addresses = {"lo": "127.0.0.1", "ib0": "10.1.0.1", "eth7": "10.7.0.1"}

    def address(interface: str) -> str:
        if interface not in addresses:
            raise ValueError(f"interface {interface} has no address on this host")
        return addresses[interface]

    monkeypatch.setattr("laddertron.launchers.rank.network.address_of", address)
    plain = Deployment(model=ModelSection(path="m"))
    monkeypatch.delenv(ENV_INTERFACES, raising=False)
    assert local_address(plain, nodes) == "192.0.2.1"
    monkeypatch.setenv(ENV_INTERFACES, f"elsewhere=ib9,{here}=ib0")
    assert local_address(plain, nodes) == "10.1.0.1"
    assert (
        local_address(Deployment(model=ModelSection(path="m"), launch=LaunchConfig(interface="eth7")), nodes)
        == "10.7.0.1"
    )
    assert local_address(plain, [here, here]) == "127.0.0.1"
    monkeypatch.setenv(ENV_INTERFACES, f"{here}=ib9")
    with pytest.raises(ValueError, match=r"ib9 has no address.*save it again.*or set launch.interface"):
        local_address(plain, nodes)


def test_each_rank_is_told_the_cores_of_its_seat() -> None:
    """By host and local rank, with gaps; a host whose seats nobody placed leaves the whole job untold."""
    hosts = (Host("a", 2, cores=((0, 1, 8), (2, 3))), Host("b", 2, cores=((0,), (1,))))
    text = cores_text(hosts)
    assert text == "a=0-1+8/2-3,b=0/1"
    assert [cores_here(text, host, local) for host in ("a.example.org", "b") for local in (0, 1)] == [
        (0, 1, 8), (2, 3), (0,), (1,),
    ]  # fmt: skip
    assert cores_here(None, "a", 0) is None
    assert cores_text((*hosts, Host("c", 2))) == ""


@pytest.mark.parametrize("text", ["", "a", "a=", "a=1/x", "a=1", "a=0//1"])
def test_cores_that_are_not_ours_are_refused(text: str) -> None:
    with pytest.raises(MappingError, match="LADDERTRON_CORES"):
        cores_here(text, "a", 1)
