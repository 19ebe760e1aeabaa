"""Hosts as ranks report them, on emulated nodes: one hostname twice, spares listed by other names, other interfaces."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.launching import Job
from cluster.nodes import Cluster

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


def test_one_hostname_on_two_machines_is_refused_at_once(namesakes: Cluster, tmp_path: Path) -> None:
    """The MPI looks for the other rank in its own machine's shared memory, and waits for ever."""
    job = Job(tmp_path, section(namesakes, ", interface: eth0"), tp=2, lines=2)
    done = namesakes.run(0, job.command(sys.executable, launch=False), QUIET)
    said = " ".join((done.stdout + done.stderr).split())
    assert done.returncode == 1, said
    assert "two machines have the hostname n0: 10.213.0.1 (rank 0) and 10.213.0.2 (rank 1)" in said or (
        "10.213.0.2 (rank 1) and 10.213.0.1 (rank 0)" in said
    ), said
    assert job.answered() == []
