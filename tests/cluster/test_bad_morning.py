"""Each fault of a first morning is named by the first line of the error."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from laddertron.launchers.job import missing
from laddertron.launchers.job.options import JobOptions, JobTimeouts
from laddertron.topology.placement.world import World

from cluster.bad_morning import FAULTS, LATE_S, NAMED_S, QUIET, SIBLINGS, Fault, meet, odd_hosts
from cluster.launching import Job
from cluster.nodes import Cluster


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS + SIBLINGS, ids=lambda fault: fault.name)
def test_each_fault_is_named(link: Cluster, tmp_path: Path, fault: Fault) -> None:
    """The times are the rehearsal's: here other tests share the cores, and starting processes takes most of them."""
    meet(fault, link, tmp_path)


@pytest.mark.cluster
@pytest.mark.slow
def test_hosts_may_be_odd(link: Cluster, tmp_path: Path) -> None:
    with odd_hosts(link, tmp_path) as keys:
        job = Job(tmp_path, f"launcher: openmpi, hosts: ['n0:1', 'n1:1']{keys}", tp=2, lines=2, tokens=4)
        done = link.run(0, job.command(sys.executable, launch=False), QUIET)
    assert done.returncode == 0, done.stderr
    assert job.answered() == job.names


def test_what_is_waited_for_leaves_time_to_start_processes() -> None:
    """Of the longest ways to a line: a host that is asked and does not reach its owner, a rank that does not start."""
    options = JobOptions(World(2))
    ending_s = options.settle_s + options.kill_grace_s
    assert missing.AFTER_S + missing.TEST_S + ending_s <= 0.75 * NAMED_S
    assert JobTimeouts().launch_s + ending_s < LATE_S
