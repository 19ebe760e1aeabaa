"""Hosts as ranks report them, on emulated nodes: one hostname twice, spares listed by other names, other interfaces."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from waiting import HANG_S

from cluster.launching import Job, ranks_on
from cluster.nodes import Cluster
from cluster.slurm import until
from cluster.test_launch import launch_section

pytestmark = pytest.mark.cluster
QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}


def section(cluster: Cluster, more: str = "") -> str:
    return f"launcher: openmpi, hosts: [{', '.join(cluster.names)}], rsh_agent: {cluster.agent}{more}"


@pytest.fixture
def namesakes(link: Cluster) -> Iterator[Cluster]:
    """Both nodes have the hostname of the first, as machines of one image do."""
    assert link.run(1, ["hostname", "n0"]).returncode == 0
    yield link
    assert link.run(1, ["hostname", "n1"]).returncode == 0


@pytest.mark.parametrize("command", ["run", "launch run", "launch topo"])
def test_one_hostname_on_two_machines_is_refused_at_once(namesakes: Cluster, tmp_path: Path, command: str) -> None:
    """A collective of the MPI looks for the other rank in its own machine's shared memory, and waits for ever: by the
    owner of the ranks, or by the ranks of an mpirun among themselves."""
    job = Job(tmp_path, section(namesakes, ", interface: eth0"), tp=2, lines=2)
    words = job.command(sys.executable, launch=command != "run")
    if command == "launch topo":
        words = [*words[: words.index("run")], "topo"]
    done = namesakes.run(0, words, QUIET, timeout=HANG_S)
    said = " ".join((done.stdout + done.stderr).split())
    assert done.returncode == (2 if command == "launch topo" else 1), said
    assert "two machines have the hostname n0: 10.213.0.1 (rank 0) and 10.213.0.2 (rank 1)" in said or (
        "10.213.0.2 (rank 1) and 10.213.0.1 (rank 0)" in said
    ), said
    assert job.answered() == []


def also_called(cluster: Cluster, names: Mapping[str, int]) -> None:
    """Further names of nodes: for the nodes' resolver, and for the agent in place of ssh."""
    with (cluster.scratch / "hosts").open("a") as file:
        for name, node in names.items():
            file.write(f"{cluster.addresses[node]} {name}\n")
            for kind in ("pid", "cores", "tmp"):
                (cluster.scratch / f"{name}.{kind}").symlink_to(cluster.scratch / f"{cluster.names[node]}.{kind}")


def ready(cluster: Cluster) -> bool:
    code = "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/ready')"
    return cluster.run(0, [sys.executable, "-c", code]).returncode == 0


def test_a_spare_replaces_a_host_that_is_listed_by_another_name(possible: None, tmp_path: Path) -> None:
    """Hosts by the names of other interfaces, the spare by its address, while ranks report hostnames. 1. No frame
    reaches the second node: the log says what replaces it. 2. Ranks start on the spare, and the daemon is ready."""
    with Cluster(3) as cluster:
        also_called(cluster, {"n1-ib": 1, "10.213.0.3": 2})
        keys = f"launcher: openmpi, hosts: [n0, n1-ib], spare_hosts: [10.213.0.3], rsh_agent: {cluster.agent}"
        job, log = Job(tmp_path, keys, tp=2), tmp_path / "log"
        command = [sys.executable, "-m", "laddertron.launchers.cli", "serve", str(job.config)]
        with log.open("w") as stream:
            daemon = cluster.start(0, command, QUIET, stdout=stream, stderr=subprocess.STDOUT)
        try:
            until("ready", lambda: ready(cluster), HANG_S)
            for other in (0, 2):
                cluster.control.cut(1, other)
            until("ranks on the spare", lambda: bool(ranks_on(cluster, 2, "launchers.rank.worker")), HANG_S)
            until("ready again", lambda: ready(cluster), HANG_S)
        finally:
            for pid in ranks_on(cluster, 0, "launchers.cli serve"):
                os.kill(pid, signal.SIGTERM)
            daemon.wait(HANG_S)
        assert "n1-ib is excluded: 10.213.0.3 replaces it" in log.read_text()


@pytest.mark.slow
def test_a_host_that_its_peers_do_not_reach_is_replaced(possible: None, tmp_path: Path) -> None:
    """The daemon reaches both hosts, which do not reach one another: each launch names the way, and after the third a
    spare replaces the host that the failures name, and the daemon is ready."""
    with Cluster(3) as cluster:
        keys = f"launcher: openmpi, hosts: [n1, n2], spare_hosts: [n0], rsh_agent: {cluster.agent}, interface: eth0"
        job, log = Job(tmp_path, keys, tp=2), tmp_path / "log"
        command = [sys.executable, "-m", "laddertron.launchers.cli", "serve", str(job.config)]
        cluster.control.cut(1, 2)
        with log.open("w") as stream:
            daemon = cluster.start(0, command, QUIET, stdout=stream, stderr=subprocess.STDOUT)
        try:
            until("ready on the spare", lambda: daemon.poll() is not None or ready(cluster), 3 * HANG_S)
            assert daemon.poll() is None, log.read_text()
        finally:
            for pid in ranks_on(cluster, 0, "launchers.cli serve"):
                os.kill(pid, signal.SIGTERM)
            daemon.wait(HANG_S)
        text = log.read_text()
        assert re.search(r"cannot be reached at 10\.213\.0\.[23] port \d+, from n[12] to n[12]", text), text
        assert re.search(r"n[12] is excluded: n0 replaces it", text), text


@pytest.mark.parametrize(
    ("launcher", "launch"),
    [
        ("openmpi", False),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [("openmpi", True), ("mpich", False)]),
    ],
)
def test_a_bridge_on_every_host_is_not_taken_for_the_network(
    possible: None, tmp_path: Path, launcher: str, launch: bool
) -> None:
    """docker0 with one address on both hosts, and the network's interface has another name on the second."""
    rename = ["ip link set eth0 down", "ip link set eth0 name ens3", "ip link set ens3 up"]
    bridge = ["ip link add docker0 type bridge", "ip addr add 172.17.0.1/16 dev docker0", "ip link set docker0 up"]
    with Cluster(2) as cluster:
        for node, words in enumerate((bridge, bridge + rename)):
            done = cluster.run(node, ["sh", "-c", " && ".join(words)])
            assert done.returncode == 0, done.stderr
        keys = launch_section(cluster, tmp_path, launcher).replace(", UCX_NET_DEVICES: eth0", "")
        job = Job(tmp_path, keys, tp=2, lines=2, tokens=4)
        done = cluster.run(0, job.command(sys.executable, launch=launch), QUIET)
        assert done.returncode == 0, done.stdout + done.stderr
        assert job.answered() == job.names


def test_hosts_whose_addresses_are_on_no_link(possible: None, tmp_path: Path) -> None:
    """Each host announces an address of its own, which is on lo: gloo would connect to the 127.0.0.1 beside it."""
    with Cluster(2) as cluster:
        (cluster.scratch / "hosts").write_text("127.0.0.1 localhost\n10.99.0.1 n0\n10.99.0.2 n1\n")
        for node in (0, 1):
            own, other = f"10.99.0.{node + 1}", f"10.99.0.{2 - node}"
            route = f"ip route add {other}/32 via {cluster.addresses[1 - node]} src {own}"
            done = cluster.run(node, ["sh", "-c", f"ip addr add {own}/32 dev lo && {route}"])
            assert done.returncode == 0, done.stderr
        job = Job(tmp_path, section(cluster), tp=2, lines=2, tokens=4)
        done = cluster.run(0, job.command(sys.executable, launch=False), QUIET, timeout=HANG_S)
        assert done.returncode == 0, done.stdout + done.stderr
        assert job.answered() == job.names


def test_hosts_that_have_ipv6_alone(possible: None, tmp_path: Path) -> None:
    """Names of IPv6 addresses: launcher, control channel and ranks use them."""
    with Cluster(2) as cluster:
        places = [f"fd00:213::{node + 1} {name}" for node, name in enumerate(cluster.names)]
        (cluster.scratch / "hosts").write_text("\n".join(["127.0.0.1 localhost", *places, ""]))
        for node, place in enumerate(places):
            words = (
                "sysctl -qw net.ipv6.conf.eth0.disable_ipv6=0 net.ipv6.conf.lo.disable_ipv6=0 && "
                f"ip addr flush dev eth0 && ip -6 addr add {place.split()[0]}/64 dev eth0 nodad"
            )
            done = cluster.run(node, ["sh", "-c", words])
            if done.returncode:
                pytest.skip(f"no IPv6 here: {done.stderr}")
        job = Job(tmp_path, section(cluster), tp=2, lines=2, tokens=4)
        done = cluster.run(0, job.command(sys.executable, launch=False), QUIET)
        assert done.returncode == 0, done.stdout + done.stderr
        assert job.answered() == job.names
