"""launch.port_range on emulated nodes with a firewall: what a job's processes open, the preloaded library, two jobs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from laddertron.launchers.compose.ports import ENV_PORTS
from laddertron.topology.transport import native
from waiting import HANG_S

from cluster.launching import Job
from cluster.nodes import Cluster, kill
from cluster.test_starting import QUIET

pytestmark = pytest.mark.cluster
OPEN = range(40000, 40100)


@pytest.fixture
def walled(link: Cluster) -> Iterator[Cluster]:
    """A firewall between the nodes lets connections to OPEN through, and drops all others."""
    link.control.firewall(OPEN)
    yield link
    link.control.firewall()


def listening(cluster: Cluster, node: int) -> set[int]:
    """Ports of a node on which something listens for other hosts, by its kernel's tables."""
    tables = cluster.run(node, ["cat", "/proc/net/tcp", "/proc/net/tcp6"]).stdout.splitlines()
    places = [words[1].split(":") for line in tables if (words := line.split())[3] == "0A"]
    return {int(port, 16) for address, port in places if not address.endswith("0100007F")}


def test_two_jobs_behind_a_firewall(walled: Cluster, tmp_path: Path) -> None:
    """Two deployments with the same range on the same hosts, at the same time: both run to their end, and neither
    listens outside of the range, with the control channel, mpirun, its daemon, MPI, gloo and the ranks' transport."""
    jobs = []
    for name in ("a", "b"):
        (folder := tmp_path / name).mkdir()
        keys = f"launcher: openmpi, hosts: ['n0:1', 'n1:1'], rsh_agent: {walled.agent}"
        jobs.append(Job(folder, f"{keys}, interface: eth0, port_range: 40000-40099", tp=2, lines=40))
    commands = [job.command(sys.executable, launch=False) for job in jobs]
    running = [walled.start(0, command, QUIET, stderr=subprocess.PIPE) for command in commands]
    try:
        opened: list[set[int]] = [set(), set()]
        while any(process.poll() is None for process in running):
            for node in (0, 1):
                opened[node] |= listening(walled, node)
        for process, job in zip(running, jobs, strict=True):
            assert process.wait(HANG_S) == 0, process.stderr.read()
            assert job.answered() == job.names
    finally:
        for process in running:
            kill(process)
    for ports in opened:
        assert len(ports) >= 8, "control channel or daemon, MPI, gloo and transport of two jobs"
        assert ports <= set(OPEN)


SOCKETS = """
import json, os, socket, sys
wild, named, taken, out, back = (socket.socket() for _ in range(5))
wild.bind(("", 0)); wild.listen()
named.bind(("10.213.0.1", 0)); named.listen()
out.bind(("10.213.0.1", 0)); out.connect(named.getsockname())
loop = socket.create_server(("127.0.0.1", 0))
plain = socket.create_server(("10.213.0.1", 45000))
taken.bind(("10.213.0.1", 0)); before = taken.getsockname()[1]; taken.listen()
last = socket.socket(); last.bind(("10.213.0.1", 0))
try:
    last.listen()
    error = 0
except OSError as fault:
    error = fault.errno
print(json.dumps({
    "listen": [one.getsockname()[1] for one in (wild, named, taken)], "before": before,
    "other": [one.getsockname()[1] for one in (out, loop, plain)], "error": error,
}))
"""


def test_where_a_library_listens(pair: Cluster) -> None:
    """Sockets that leave the port to the kernel get one of the range when they listen or their name is read, and the
    last one, with none left, EADDRINUSE and a line that names host and range. Sockets that connect, listen on loopback
    or name their port are left alone."""
    library = native.locate("laddertron.launchers.compose._listen")
    assert library is not None, "launchers/compose/listen.c was not built"
    done = pair.run(0, [sys.executable, "-c", SOCKETS], {"LD_PRELOAD": str(library), ENV_PORTS: "41000-41002"})
    assert done.returncode == 0, done.stderr
    sockets = json.loads(done.stdout)
    assert sorted(sockets["listen"]) == [41000, 41001, 41002]
    assert sockets["before"] == sockets["listen"][2]
    assert not {41000, 41001, 41002} & set(sockets["other"])
    assert 45000 in sockets["other"]
    assert sockets["error"] == 98
    assert "n0: no port of launch.port_range=41000-41002 is free" in done.stderr
