"""Hosts listed by other names than their own: InfiniBand names, addresses; which machine each of them means."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import pytest
from laddertron.engine.config.load import LoadedDeployment, load
from laddertron.launchers.cli.commands.check import address_faults
from laddertron.launchers.compose.host_names import HostNames, resolve
from laddertron.launchers.compose.hosts import Host, LaunchError, parse_hostfile
from laddertron.launchers.compose.mpi import Site
from laddertron.launchers.job.fleet import Fleet, spare_places
from laddertron.topology.placement.machines import Machine, own_addresses

BRIDGE = "172.17.0.1"
"""Of docker0, on every machine."""
PLACES = {"n1-ib": "10.1.0.1", "n2-ib": "10.1.0.2", "n3-ib": "10.1.0.3", "10.1.0.4": "10.1.0.4", "n1-eth": "10.2.0.1"}
MACHINES = [Machine(f"n{i}", f"boot-{i}", (f"10.1.0.{i}", f"10.2.0.{i}", BRIDGE)) for i in range(5)]


def names(*more: str) -> HostNames:
    return HostNames((*PLACES, *more), "login", lambda name: (PLACES[name],) if name in PLACES else ())


@pytest.mark.parametrize("order", [("n1-ib", "n2-ib", "10.1.0.4"), ("10.1.0.4", "n1-ib", "n2-ib")])
def test_listed_names_are_bound_at_first_contact(order: tuple[str, ...]) -> None:
    """By address, in whatever order the launcher starts ranks; then the hostname means the same host."""
    known = names()
    for rank, number in enumerate((1, 2, 4)):
        assert known.contact(order, rank, MACHINES[number]) == {1: "n1-ib", 2: "n2-ib", 4: "10.1.0.4"}[number]
    assert known.same("n1-ib", "n1")
    assert known.same("n1.example.org", "n1-ib")
    assert known.same("10.1.0.4", "n4")
    assert not known.same("n1-ib", "n2-ib"), "a bridge that both have makes them no one machine"
    assert known.same("n1-eth", "n1-ib"), "an address that the machine reported"


def test_a_name_that_only_ssh_knows_is_bound_by_the_order_of_ranks() -> None:
    known = names("left", "right")
    seats = ("left", "left", "right", "right")
    assert [known.contact(seats, rank, MACHINES[1 + rank // 2]) for rank in range(4)] == list(seats)
    assert known.same("n1", "left")
    assert not known.same("n1", "right")
    assert known.contact((), 0, MACHINES[3]) is None


def test_one_hostname_is_not_one_machine() -> None:
    """Clones in two replicas: excluding one keeps the other."""
    known = names()
    known.contact(("n1-ib",), 0, Machine("gpu", "boot-a", ("10.1.0.1",)))
    known.contact(("n2-ib",), 0, Machine("gpu", "boot-b", ("10.1.0.2",)))
    assert not known.same("n1-ib", "n2-ib")
    places = spare_places((Host("n1-ib", 1), Host("n2-ib", 1)), ["n1-ib"], ["n3-ib"], {}, known)
    assert places == {"n1-ib": "n3-ib"}


def test_a_spare_replaces_a_host_by_its_hostname_and_is_another_machine() -> None:
    """1. The lost node is known by its hostname alone. 2. A spare that is another name of it is not used, nor one that
    is a host in use. 3. Without another one the message names the host."""
    known = names()
    hosts = (Host("n1-ib", 1), Host("n2-ib", 1))
    for rank, host in enumerate(hosts):
        known.contact(("n1-ib", "n2-ib"), rank, MACHINES[1 + rank])
        assert host.name
    assert spare_places(hosts, ["n1"], ["n1-eth", "n2", "n3-ib"], {}, known) == {"n1-ib": "n3-ib"}
    with pytest.raises(LaunchError, match="n1-ib is excluded and no spare is left"):
        spare_places(hosts, ["n1"], ["n1-eth"], {}, known)


def test_one_machine_is_not_listed_by_two_names() -> None:
    """mpirun would count its slots twice or refuse them, without the names. Two that do not resolve may differ."""
    twins = HostNames(
        ["a", "b", "c", "d", "e"], "me", lambda name: {"a": ("10.1.0.1",), "c": ("10.1.0.1",)}.get(name, ())
    )
    assert twins.listed_twice(["a", "b", "c", "d"]) == ("a", "c")
    assert twins.listed_twice(["a", "b", "d", "e", "a"]) is None
    assert twins.listed_twice(["me", "b", "localhost"]) == ("me", "localhost")


def test_this_machine_is_known_by_any_of_its_addresses() -> None:
    here = HostNames(["me-ib", "other"], "me", lambda name: own_addresses()[:1] if name == "me-ib" else ("192.0.2.9",))
    assert here.is_here("localhost")
    assert here.is_here("me.example.org")
    assert here.is_here("me-ib") == bool(own_addresses())
    assert not here.is_here("other")


def test_ipv4_is_tried_first_and_launchers_without_ipv6_refuse_hosts_that_lack_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Open MPI reaches both; MPICH's mpiexec connects by IPv4 alone."""
    places = {"both": ["fd00::1", "10.0.0.1"], "six": ["fd00::2"], "four": ["10.0.0.2"]}
    monkeypatch.setattr(socket, "getaddrinfo", lambda name, *_, **__: [(0, 0, 0, "", (a, 9)) for a in places[name]])
    monkeypatch.setattr("laddertron.launchers.job.fleet.find_route", lambda names, hosts: None)
    assert resolve("both") == ("10.0.0.1", "fd00::1")
    known = HostNames(places, "login")
    assert known.only_ipv6(["both", "four"]) == ""
    assert known.only_ipv6(places) == "six has only IPv6 addresses (fd00::2)"
    site = Site("mpich", "mpiexec", (5,), "python")
    demo = Path(__file__).parents[3] / "configs" / "demo.yaml"
    for host, refused in (("six", True), ("both", False)):
        deployment = load(demo, [f"launch.hosts=['four:1', '{host}:1']", "launch.launcher=mpich"])
        if refused:
            with pytest.raises(LaunchError, match=r"six has only IPv6 addresses \(fd00::2\), and MPICH's"):
                Fleet(deployment, {}, "login", site)
            assert [*address_faults(LoadedDeployment(deployment, "f.yaml", {}))]
        else:
            Fleet(deployment, {}, "login", site)
    Fleet(load(demo, ["launch.hosts=['four:1', 'six:1']"]), {}, "login", replace(site, kind="openmpi"))


@pytest.mark.parametrize("text", ["fd00::2", "[fd00::2]:8", "fd00::2 slots=8"])
def test_a_literal_ipv6_address_is_refused_with_what_to_list(text: str) -> None:
    with pytest.raises(LaunchError, match="for IPv6 a name that resolves to it"):
        parse_hostfile(text, "hosts")


def test_what_does_not_resolve_has_no_address() -> None:
    assert resolve("a.invalid") == ()
    assert resolve("x" * 70) == (), "too long for a label"
    assert resolve("127.0.0.1") == ("127.0.0.1",)
