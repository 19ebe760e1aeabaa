"""`laddertron launch` and `run` on emulated nodes with real launchers, from a YAML file and a hostfile alone: the job
comes up over every node, answers its batch and leaves nothing behind. `make launch-test`; all but one are slow."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cluster.launching import Job, processes, ranks_on, running
from cluster.nodes import Cluster
from cluster.slurm import until
from cluster.test_over_nodes import library, mpich

pytestmark = pytest.mark.cluster
CLI = [sys.executable, "-m", "laddertron.launchers.cli"]
QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def nodes(possible: None) -> Iterator[Callable[[int], Cluster]]:
    """`nodes(4)`: a cluster of four; the last one asked for is kept."""
    running: list[Cluster] = []

    def get(count: int) -> Cluster:
        if not running or len(running[0].names) != count:
            while running:
                running.pop().__exit__(None, None, None)
            running.append(Cluster(count).__enter__())
        return running[0]

    yield get
    while running:
        running.pop().__exit__(None, None, None)


def launch_section(cluster: Cluster, folder: Path, launcher: str, slots: int = 1, more: str = "") -> str:
    """The launch section's keys, beside a hostfile in `folder`. Skips where there is no MPICH."""
    (folder / "hosts").write_text("".join(f"{name} slots={slots}\n" for name in cluster.names))
    keys = f"launcher: {launcher}, hostfile: ./hosts, rsh_agent: {cluster.agent}{more}"
    if launcher == "mpich":
        root = mpich()
        if root is None:
            pytest.skip("no MPICH: make cluster-test fetches one into build/mpich")
        # the nodes share a kernel, by which UCX takes them for one host and looks for shared memory between them
        env = f"{{MPI4PY_LIBMPI: '{library(root)}', UCX_TLS: 'tcp,self', UCX_NET_DEVICES: eth0}}"
        keys += f", mpirun: {root / 'bin' / 'mpiexec'}, env: {env}"
    return keys


def none_left(cluster: Cluster) -> None:
    """Nothing of the job runs on any node, or stops doing so within a few seconds: mpirun does not wait for the last
    word of its agents."""
    until(lambda: f"processes are gone: {processes(cluster)}", lambda: not processes(cluster), 10.0)


@contextmanager
def serving(cluster: Cluster, job: Job, folder: Path) -> Iterator[Path]:
    """`launch CONFIG serve` on the first node once it listens, and its log; SIGTERM at the end, and exit 0."""
    log = folder / "serve.log"
    with log.open("w") as stream:
        process = cluster.start(0, [*CLI, "launch", str(job.config), "serve"], QUIET, stdout=stream, stderr=stream)

    def listening() -> bool:
        assert process.poll() is None, log.read_text()
        return cluster.run(0, ["bash", "-c", "</dev/tcp/127.0.0.1/8000"]).returncode == 0

    until("a daemon that listens", listening, 60.0)
    yield log
    (daemon,) = ranks_on(cluster, 0, "laddertron.launchers.cli serve")
    os.kill(daemon, signal.SIGTERM)
    assert process.wait(60.0) == 0, log.read_text()[-4000:]


def completed(cluster: Cluster) -> int:
    """Lines of the daemon's only batch that have an answer."""
    code = "import sys, urllib.request as u; sys.stdout.write(u.urlopen(sys.argv[1]).read().decode())"
    done = cluster.run(0, [sys.executable, "-c", code, "http://127.0.0.1:8000/v1/batches"])
    batches = json.loads(done.stdout)["data"] if done.returncode == 0 else []
    assert all(batch["request_counts"]["failed"] == 0 for batch in batches)
    return sum(batch["request_counts"]["completed"] for batch in batches)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("launcher", "count", "launch"),
    [
        pytest.param("openmpi", 2, True),
        pytest.param("openmpi", 2, False, marks=SLOW),
        pytest.param("mpich", 2, False, marks=SLOW),
        pytest.param("mpich", 2, True, marks=SLOW),
        pytest.param("openmpi", 4, False, marks=SLOW),
        pytest.param("openmpi", 4, True, marks=SLOW),
        pytest.param("mpich", 4, False, marks=SLOW),
        pytest.param("mpich", 4, True, marks=SLOW),
    ],
)
def test_a_batch_from_a_file_and_a_hostfile(
    nodes: Callable[[int], Cluster], tmp_path: Path, launcher: str, count: int, launch: bool
) -> None:
    """`run` starts its ranks and leads them over its control channel; `launch` becomes the launcher, and the ranks are
    `run` itself. Either way: exit 0, one answer a line, traffic between all neighbours, no process left."""
    cluster = nodes(count)
    job = Job(tmp_path, launch_section(cluster, tmp_path, launcher), tp=count, lines=8, tokens=8)
    before = cluster.control.stats().carried
    done = cluster.run(0, job.command(sys.executable, launch=launch), QUIET, timeout=180.0)
    assert done.returncode == 0, done.stdout + done.stderr
    assert job.answered() == job.names
    assert done.stderr.startswith("+ ") == launch
    after = cluster.control.stats().carried
    for a in range(count):
        assert sum(after[a]) - sum(before[a]) > 20_000, f"node {a} sent nothing"
    none_left(cluster)


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "count"), [("openmpi", 2), ("mpich", 2), ("openmpi", 4), ("mpich", 4)])
def test_the_daemon_over_nodes(nodes: Callable[[int], Cluster], tmp_path: Path, launcher: str, count: int) -> None:
    """1. `launch CONFIG serve` on the first node brings the daemon up, and it its ranks on every node. 2. A batch is
    submitted over HTTP and waited for: every line has its answer. 3. SIGTERM: exit 0, nothing left on any node."""
    cluster = nodes(count)
    job = Job(tmp_path, launch_section(cluster, tmp_path, launcher), tp=count, lines=8, tokens=8)
    with serving(cluster, job, tmp_path) as log:
        submit = [*CLI, "batch", "submit", str(job.input), "--wait", "-o", str(job.output)]
        done = cluster.run(0, submit, QUIET, timeout=180.0)
        assert done.returncode == 0, done.stdout + done.stderr + log.read_text()[-4000:]
        assert job.answered() == job.names
        for node in range(count):
            assert ranks_on(cluster, node, "laddertron.launchers.rank.worker")
    none_left(cluster)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["openmpi", "mpich"])
def test_the_daemon_outlives_a_replica(nodes: Callable[[int], Cluster], tmp_path: Path, launcher: str) -> None:
    """Two replicas, a node each. 1. Both work on a batch; the second one's rank is killed. 2. The first goes on: lines
    are completed while the second is gone or starting. 3. The second comes back as another process; the batch ends with
    every line answered once and none failed. 4. SIGTERM: exit 0, nothing left."""
    cluster = nodes(2)
    job = replicas(cluster, tmp_path, launcher, lines=400)

    def workers(node: int) -> list[int]:
        """Without the keepers, whose command lines name what they keep."""
        known = running(cluster)
        own = ranks_on(cluster, node, "laddertron.launchers.rank.worker")
        words = ["-P", "-m", "laddertron.launchers.rank.worker"]
        return [pid for pid in own if known.get(pid, "").split()[1:] == words]

    with serving(cluster, job, tmp_path) as log:
        submit = cluster.start(0, [*CLI, "batch", "submit", str(job.input), "--wait", "-o", str(job.output)], QUIET)
        until("both at work", lambda: bool(workers(0) and workers(1)) and completed(cluster) > 4, 90.0)
        (first,), (second,) = workers(0), workers(1)
        os.kill(second, signal.SIGKILL)
        then = completed(cluster)
        assert then < len(job.names) // 2, "the batch was nearly over before the replica was lost"
        until("more lines", lambda: completed(cluster) > then + 8, 30.0)
        assert workers(0) == [first]
        assert submit.wait(180.0) == 0, log.read_text()[-4000:]
        assert job.answered() == job.names
        until("another second", lambda: bool(set(workers(1)) - {second}), 60.0)
        assert workers(0) == [first], "the replica that was well is the same process"
    none_left(cluster)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["openmpi", "mpich"])
def test_with_a_fabric_ranks_look_where_they_are(
    nodes: Callable[[int], Cluster], tmp_path: Path, launcher: str
) -> None:
    """1. `launch … topo` over both nodes saves their fabric. 2. With it the interface is chosen and named, and a run of
    two ranks a node goes through. 3. With Open MPI the user's own map_by deals ranks round the nodes: every rank is
    where it does not belong, and the run ends with the launcher's fix in its reason, not with slow all-reduces."""
    cluster = nodes(2)
    section = launch_section(cluster, tmp_path, launcher, slots=2)
    job = Job(tmp_path, section, tp=4, lines=4, tokens=4)
    fabric = tmp_path / "fabric.json"
    words = [sys.executable, "-m", "laddertron.launchers.cli", "launch", str(job.config), "topo", "--save", str(fabric)]
    done = cluster.run(0, words, QUIET, timeout=120.0)
    assert done.returncode == 0, done.stdout + done.stderr
    said = ("--set", f"launch.fabric={fabric}")
    shown = cluster.run(0, [*job.command(sys.executable, launch=True), *said, "--dry-run"], QUIET)
    assert "LADDERTRON_SEATS=n0:2,n1:2" in shown.stdout
    assert "LADDERTRON_INTERFACES=n0=eth0,n1=eth0" in shown.stdout
    assert "eth0" in shown.stdout
    done = cluster.run(0, job.command(sys.executable, launch=False, arguments=said), QUIET, timeout=180.0)
    assert done.returncode == 0, done.stdout + done.stderr
    assert job.answered() == job.names
    if launcher == "mpich":  # Hydra's order of hosts is fixed by -hosts: no option of the config deals ranks out
        return
    dealt = (*said, "--overwrite", "--set", "launch.map_by=node")
    done = cluster.run(0, job.command(sys.executable, launch=False, arguments=dealt), QUIET, timeout=120.0)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "are misplaced (they were dealt round the nodes one by one)" in " ".join(done.stderr.split())
    assert job.answered() == []
    none_left(cluster)


LISTENING = """
import os, sys
for name in filter(str.isdecimal, os.listdir("/proc")):
    own = set()
    try:
        words = open(f"/proc/{name}/cmdline").read().replace(chr(0), " ")
        if os.readlink(f"/proc/{name}/ns/net") != os.readlink("/proc/self/ns/net"):
            continue
        own = {os.readlink(f"/proc/{name}/fd/{fd}") for fd in os.listdir(f"/proc/{name}/fd")}
    except OSError:
        continue
    # a node without any IPv6 address cannot be reached by it
    for table in ("tcp", "tcp6") if open("/proc/net/if_inet6").read() else ("tcp",):
        for row in open(f"/proc/net/{table}").read().splitlines()[1:]:
            fields = row.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                print(fields[1].split(":")[0], words[:60])
"""
ANY = ("00000000", "0" * 32)


@pytest.mark.parametrize(
    ("launcher", "narrow"), [("openmpi", True), pytest.param("openmpi", False, marks=pytest.mark.slow), ("mpich", True)]
)
def test_a_job_over_nodes_listens_on_the_chosen_interface_alone(
    nodes: Callable[[int], Cluster], tmp_path: Path, launcher: str, narrow: bool
) -> None:
    """While a run is at work, by the kernel's tables of each node: nobody of it listens on every address, and somebody
    does on eth0's. Without the preloaded library Open MPI does, so that the tables are shown to be read right."""
    cluster = nodes(2)
    job = Job(
        tmp_path, launch_section(cluster, tmp_path, launcher, more=", interface: eth0"), tp=2, lines=150, tokens=40
    )
    environ = QUIET if narrow else {**QUIET, "LD_PRELOAD": "libc.so.6"}
    process = cluster.start(0, job.command(sys.executable, launch=False), environ)
    until("first answers", lambda: process.poll() is not None or len(job.answered()) > 4, 90.0)
    assert process.poll() is None
    found = [cluster.run(node, [sys.executable, "-c", LISTENING]).stdout.splitlines() for node in (0, 1)]
    assert process.wait(120.0) == 0
    wide = [row for rows in found for row in rows if row.split()[0] in ANY]
    assert bool(wide) != narrow, wide
    if narrow:
        for rows in found:
            assert any(not row.startswith("0100007F") for row in rows), "the ranks' own transport, at least"
    none_left(cluster)


def replicas(cluster: Cluster, folder: Path, launcher: str = "openmpi", lines: int = 200) -> Job:
    section = launch_section(cluster, folder, launcher)
    return Job(folder, section, tp=1, lines=lines, tokens=40, more=", replicas: 2")


@pytest.mark.slow
@pytest.mark.parametrize("outer", [False, True], ids=["two jobs", "one mpirun"])
def test_a_replica_lost_ends_the_run_and_resume_finishes_it(
    nodes: Callable[[int], Cluster], tmp_path: Path, outer: bool
) -> None:
    """Two replicas, a node each: two jobs that `run` starts, or one mpirun around both. 1. Both are at work; the rank
    of the second is killed. 2. The run ends, not zero, and with it every process of both replicas; the file holds
    whole lines, each once. 3. Resumed, the rest is answered, nothing twice, nothing that stood there touched."""
    cluster = nodes(2)
    job = replicas(cluster, tmp_path)
    around = [*cluster.mpirun([], names=tuple(QUIET))] if outer else []
    command = [*around, *job.command(sys.executable, launch=False)]
    process = cluster.start(0, command, QUIET)
    until("first answers", lambda: process.poll() is not None or len(job.answered()) > 4, 90.0)
    assert process.poll() is None
    who = "launchers.cli run" if outer else "laddertron.launchers.rank.worker"
    (second,) = ranks_on(cluster, 1, who)
    os.kill(second, signal.SIGKILL)
    assert process.wait(60.0) != 0
    none_left(cluster)
    kept = job.output.read_bytes()
    whole = kept[: kept.rfind(b"\n") + 1]
    assert 4 < len(set(job.answered())) == len(job.answered()) < len(job.names)
    done = cluster.run(0, [*command, "--resume"], QUIET, timeout=180.0)
    assert done.returncode == 0, done.stdout + done.stderr
    assert job.output.read_bytes().startswith(whole)
    assert job.answered() == job.names
    none_left(cluster)
