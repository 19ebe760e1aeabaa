"""Ranks that start late, or cannot reach one another, on emulated nodes: who waits is not blamed."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from laddertron.launchers.control import control

from cluster.launching import Job
from cluster.nodes import Cluster, kill
from cluster.slurm import until

pytestmark = pytest.mark.cluster
QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def three(possible: None) -> Iterator[Cluster]:
    with Cluster(3) as cluster:
        yield cluster


def job_of(cluster: Cluster, folder: Path, more: str = "", lines: int = 2, tokens: int = 4) -> Job:
    hosts = ", ".join(f"'{name}:1'" for name in cluster.names)
    keys = f"launcher: openmpi, hosts: [{hosts}], rsh_agent: {cluster.agent}, interface: eth0{more}"
    return Job(folder, keys, 1, lines, tokens, f", pipeline_parallel_size: {len(cluster.names)}")


def python_after(folder: Path, commands: dict[str, str]) -> Path:
    """A Python that starts ranks after a command of the shell on some nodes."""
    cases = "\n".join(f"{name}) {command} ;;" for name, command in commands.items())
    program = folder / "python"
    program.write_text(f'#!/bin/sh\ncase "$(hostname)" in\n{cases}\nesac\nexec {sys.executable} "$@"\n')
    program.chmod(0o755)
    return program


def test_ranks_that_start_late_are_waited_for(three: Cluster, tmp_path: Path) -> None:
    """The second and third node start their ranks 15 and 30 seconds after the first: longer than a rank may be silent,
    and the job comes up at the first launch."""
    job = job_of(three, tmp_path, f", python: {python_after(tmp_path, {'n1': 'sleep 15', 'n2': 'sleep 30'})}")
    done = three.run(0, job.command(sys.executable, launch=False), QUIET, timeout=180.0)
    assert done.returncode == 0, done.stdout + done.stderr
    assert job.answered() == job.names


def test_a_rank_that_may_open_too_few_files_is_named(three: Cluster, tmp_path: Path) -> None:
    """By the rank itself, with the limit and what to do; none of those that wait for it is blamed."""
    job = job_of(three, tmp_path, f", python: {python_after(tmp_path, {'n1': 'ulimit -n 24'})}")
    done = three.run(0, job.command(sys.executable, launch=False), QUIET, timeout=180.0)
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(r"error: rank 1 .*node n1.* it may open only 24 files \(`ulimit -n`\): raise", done.stderr), (
        done.stderr
    )


def test_a_cut_network_is_named_though_ranks_may_be_silent_for_long(three: Cluster, tmp_path: Path) -> None:
    """With a long `heartbeat_timeout`, as a loaded machine needs, the node that is cut off while the job computes is
    named as soon as its kernel acknowledges nothing, and none of those that wait for it."""
    job = job_of(three, tmp_path, lines=400, tokens=40)
    arguments = ("--set", "daemon.heartbeat_timeout=60s")
    command = job.command(sys.executable, launch=False, arguments=arguments)
    process = three.start(0, command, QUIET, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    until("first answers", lambda: process.poll() is not None or len(job.answered()) > 2, 90.0)
    try:
        for other in (0, 2):
            three.control.cut(1, other)
        began = time.monotonic()
        lines = iter(process.stderr.readline, "")
        said = next(line for line in lines if "WARNING" in line and "rank" in line)
        assert "node n1" in said, said
        assert control.UNREACHABLE in said, said
        assert time.monotonic() - began < 15.0
    finally:
        kill(process)
        for other in (0, 2):
            three.control.fix(1, other)


def test_hosts_that_cannot_reach_each_other_are_named_before_mpi_starts(three: Cluster, tmp_path: Path) -> None:
    """The daemon's node reaches both others, which do not reach one another."""
    job = job_of(three, tmp_path)
    three.control.cut(1, 2)
    try:
        done = three.run(0, job.command(sys.executable, launch=False), QUIET, timeout=180.0)
    finally:
        three.control.fix(1, 2)
    assert done.returncode == 1, done.stdout + done.stderr
    said = " ".join(done.stderr.split())
    pairs = ("rank 2 .*node n2", "10.213.0.3", "n1 to n2"), ("rank 1 .*node n1", "10.213.0.2", "n2 to n1")
    lines = (rf"error: {who}.* cannot be reached at {at} port \d+, from {way}: timed out" for who, at, way in pairs)
    assert any(re.search(line, said) for line in lines), said


@pytest.mark.parametrize(
    ("command", "fault", "says"),
    [("run", "firewall", "from n[12] to n0"), ("preflight", "largest", "a message of 128 KiB from n0 to n1")],
)
def test_a_blocked_way_is_named_though_no_rank_starts(
    three: Cluster, tmp_path: Path, command: str, fault: str, says: str
) -> None:
    """mpirun's own daemons cannot reach it, through a firewall or where large packets are lost, and it waits: the hosts
    are asked, long before the time for ranks to start has passed."""
    job = job_of(three, tmp_path)
    words = job.command(sys.executable, launch=False)
    if command == "preflight":
        words = [*words[: words.index("run")], "preflight", str(job.config)]
    if fault == "firewall":
        three.control.firewall(range(40000, 40100))
    else:
        three.control.largest(0, 1, 1500)
    try:
        done = three.run(0, words, QUIET, timeout=180.0)
    finally:
        three.control.firewall()
        three.control.largest(0, 1)
    assert done.returncode == 1, done.stdout + done.stderr
    errors = " ".join(done.stderr.split())
    assert re.search(rf"error: n[12]: .* cannot be reached at 10.213.0.1 port \d+, .*{says}", errors), errors
    assert "did not start" not in errors


def test_preflight_names_ranks_that_do_not_reach_each_other(three: Cluster, tmp_path: Path) -> None:
    job = job_of(three, tmp_path)
    words = job.command(sys.executable, launch=False)
    three.control.cut(1, 2)
    try:
        done = three.run(0, [*words[: words.index("run")], "preflight", str(job.config)], QUIET, timeout=180.0)
    finally:
        three.control.fix(1, 2)
    assert done.returncode == 1, done.stdout + done.stderr
    errors = " ".join(done.stderr.split())
    assert re.search(r"rank 2 on n2 cannot be reached at 10.213.0.3 port \d+, from n1 to n2: timed out", errors), errors
