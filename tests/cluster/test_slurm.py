"""Slurm for real: slurmctld and two slurmd on the emulated cluster, srun over both nodes, and the emitted batch script
drained, requeued and resumed. `make slurm-test`; skipped where Slurm is not installed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.launching import Job, processes, ranks_on
from cluster.nodes import Cluster, why_not
from cluster.slurm import DAEMONS, PORTS, Slurm, missing, until
from cluster.test_over_nodes import library, mpich

SALLOC = ("salloc", "-N2", "--ntasks-per-node=1", "--quiet")
"""An allocation of two nodes with a rank each."""

pytestmark = [pytest.mark.slow, pytest.mark.cluster]


@pytest.fixture(scope="module")
def slurm() -> Iterator[tuple[Cluster, Slurm]]:
    if reason := why_not() or missing():
        pytest.skip(reason)
    with Cluster(2) as cluster, Slurm(cluster) as running:
        yield cluster, running


def none_left(cluster: Cluster) -> None:
    """Nothing runs on the nodes beside Slurm's daemons, or stops doing so within a few seconds."""

    def left() -> list[str]:
        return [words for words in processes(cluster) if not any(name in words for name in DAEMONS)]

    until(lambda: f"processes are gone: {left()}", lambda: not left(), 10.0)


@pytest.mark.parametrize("launch", [False, True], ids=["run", "launch"])
def test_srun_over_both_nodes(slurm: tuple[Cluster, Slurm], tmp_path: Path, launch: bool) -> None:
    """Inside an allocation `run` starts its ranks with srun and its own control channel; `launch` becomes srun, and
    `run` takes its place among the ranks. Hosts and launcher come from the allocation. One rank a node; both answer
    every line; nothing is left on either node."""
    cluster, running = slurm
    job = Job(tmp_path, "ranks_per_node: 1", tp=2)
    before = cluster.control.stats().bytes
    command = job.command(sys.executable, launch=launch)
    done = running.run([*SALLOC, *command], timeout=120)
    assert done.returncode == 0, done.stderr + running.logs()
    assert job.answered() == job.names
    assert ("srun --mpi=pmix" in done.stderr) == launch
    assert cluster.control.stats().bytes - before > 1_000_000  # the ranks did meet over the link
    none_left(cluster)


def test_srun_with_mpich(slurm: tuple[Cluster, Slurm], tmp_path: Path) -> None:
    """The same with MPICH's library and Slurm's PMI-2."""
    cluster, running = slurm
    root = mpich()
    if root is None:
        pytest.skip("no MPICH: make launch-test fetches one into build/mpich")
    keys = f"ranks_per_node: 1, slurm: {{mpi: pmi2}}, env: {{MPI4PY_LIBMPI: '{library(root)}'}}"
    job = Job(tmp_path, keys, tp=2, lines=4, tokens=4)
    command = job.command(sys.executable, launch=False)
    done = running.run([*SALLOC, *command], timeout=120)
    assert done.returncode == 0, done.stderr + running.logs()
    assert job.answered() == job.names
    none_left(cluster)


def test_a_blocked_way_is_named_though_no_rank_joins(slurm: tuple[Cluster, Slurm], tmp_path: Path) -> None:
    """A firewall lets Slurm's own ports through and no others: a step beside the ranks' names the way."""
    cluster, running = slurm
    job = Job(tmp_path, "ranks_per_node: 1", tp=2)
    cluster.control.firewall(PORTS)
    try:
        done = running.run([*SALLOC, *job.command(sys.executable, launch=False)], timeout=120)
    finally:
        cluster.control.firewall()
    assert done.returncode == 1, done.stderr + running.logs()
    errors = " ".join(done.stderr.split())
    assert re.search(r"error: n1: .* cannot be reached at 10.213.0.1 port \d+, .*from n1 to n0", errors), errors
    none_left(cluster)


def in_allocation(cluster: Cluster, running: Slurm, job: Job, folder: Path) -> tuple[subprocess.Popen[str], Path]:
    """`run` inside an allocation of two nodes with a rank each, started; and what it writes."""
    command = [*SALLOC, *job.command(sys.executable, launch=False)]
    log = folder / "run.log"
    with log.open("w") as stream:
        return cluster.start(0, command, running.env, stdout=stream, stderr=stream), log


def test_two_replicas_share_an_allocation(slurm: tuple[Cluster, Slurm], tmp_path: Path) -> None:
    """`run` inside an allocation of two nodes starts a step for each replica, a node each: both have their rank at the
    same time, every line is answered once, nothing is left."""
    cluster, running = slurm
    job = Job(tmp_path, "ranks_per_node: 1", tp=1, lines=120, tokens=24, more=", replicas: 2")
    process, log = in_allocation(cluster, running, job, tmp_path)
    worker = "laddertron.launchers.rank.worker"

    def together() -> bool:
        assert process.poll() is None, log.read_text() + running.logs()
        return all(ranks_on(cluster, node, worker) for node in (0, 1))

    until("a rank on each node", together, 60)
    assert process.wait(120) == 0, log.read_text() + running.logs()
    assert job.answered() == job.names
    none_left(cluster)


def test_a_lost_replica_of_an_allocation_ends_the_run_and_resume_finishes_it(
    slurm: tuple[Cluster, Slurm], tmp_path: Path
) -> None:
    """The second replica's rank is killed: the run ends, not zero, with whole lines in the file; in an allocation anew
    the rest is answered, and nothing twice."""
    cluster, running = slurm
    job = Job(tmp_path, "ranks_per_node: 1", tp=1, lines=200, tokens=40, more=", replicas: 2")
    process, log = in_allocation(cluster, running, job, tmp_path)
    until("first answers", lambda: process.poll() is not None or len(job.answered()) > 4, 90)
    assert process.poll() is None, log.read_text() + running.logs()
    (second,) = ranks_on(cluster, 1, "laddertron.launchers.rank.worker")
    os.kill(second, signal.SIGKILL)
    assert process.wait(60) != 0
    none_left(cluster)
    assert 4 < len(set(job.answered())) == len(job.answered()) < len(job.names)
    done = running.run([*SALLOC, *job.command(sys.executable, launch=False), "--resume"], timeout=120)
    assert done.returncode == 0, done.stderr + running.logs()
    assert job.answered() == job.names
    none_left(cluster)


def test_a_node_that_would_be_billed_and_not_used_is_refused(slurm: tuple[Cluster, Slurm], tmp_path: Path) -> None:
    """Both nodes are allocated, the one rank needs one of them: exit 2, before anything starts."""
    _, running = slurm
    job = Job(tmp_path, "ranks_per_node: 1", tp=1)
    done = running.run(["salloc", "-N2", "--quiet", *job.command(sys.executable, launch=True)], timeout=60)
    assert done.returncode == 2
    assert "would be unused" in done.stderr


def test_the_batch_script_drains_is_requeued_and_resumes(slurm: tuple[Cluster, Slurm], tmp_path: Path) -> None:
    """1. The emitted script runs; some lines are answered. 2. Slurm signals USR1 to the batch shell, as it would before
    the time is up: admission stops, what is under way ends and is written. 3. The job requeues itself, starts again and
    finishes the rest. No line is lost, none answered twice, and what was written before the requeue stays as it was."""
    cluster, running = slurm
    keys = "launcher: slurm, ranks_per_node: 1, slurm: {extra_args: [--time=30]}"
    job = Job(tmp_path, keys, tp=2, lines=120, tokens=24)
    emitted = running.run(job.command(sys.executable, launch=True, arguments=("--emit", "slurm")))
    assert emitted.returncode == 0, emitted.stderr
    script, log = tmp_path / "job.sbatch", tmp_path / "job.log"
    script.write_text(emitted.stdout)
    number = running.submit(script, f"--output={log}", f"--chdir={os.getcwd()}")

    def words() -> str:
        return f"{log.read_text() if log.exists() else ''}\n{running.logs()}"

    until("first answers", lambda: bool(job.answered()), 60)
    assert running.run(["scancel", "--batch", "--signal=USR1", number]).returncode == 0
    until("a requeue", lambda: running.job(number).get("Restarts") == "1", 60)
    kept = job.output.read_bytes()
    assert kept.endswith(b"\n")
    assert 0 < len(job.answered()) < len(job.names), words()
    assert "draining" in log.read_text()
    assert "were lost" not in log.read_text()
    until("the end", lambda: running.job(number)["JobState"] in ("COMPLETED", "FAILED", "CANCELLED"), 120)
    assert running.job(number)["JobState"] == "COMPLETED", words()
    assert job.output.read_bytes().startswith(kept)
    assert job.answered() == job.names
    assert f"{len(job.names) - kept.count(10)} answered" in log.read_text()
    none_left(cluster)
