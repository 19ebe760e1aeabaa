"""laddertron over the link: collectives whose every byte crosses it, whole runs, preflight; Open MPI and MPICH."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from waiting import HANG_S

from cluster.launching import processes
from cluster.nodes import Cluster, kill

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).resolve().parents[2]
RANKS = str(Path(__file__).with_name("rank_cases.py"))
QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}


def mpich() -> Path | None:
    """The folder of an MPICH: where `make cluster-test` put one, else the system's."""
    ours = ROOT / "build" / "mpich"
    if (ours / "bin" / "mpiexec").exists():
        return ours
    found = shutil.which("mpiexec.hydra")
    return Path(found).resolve().parents[1] if found else None


def library(folder: Path) -> str:
    """MPICH's library, for mpi4py, which would otherwise load the Open MPI beside it."""
    found = sorted(folder.glob("lib/**/libmpi.so.12")) + sorted(folder.glob("lib/**/libmpich.so.12"))
    if not found:
        pytest.skip(f"no libmpi.so.12 under {folder}")
    return str(found[0])


def ranks(cluster: Cluster, case: str, **arguments: Any) -> dict[str, Any]:
    """A case of rank_cases.py on one rank a node, under Open MPI."""
    program = [sys.executable, "-W", "ignore", RANKS, case, json.dumps(arguments)]
    done = cluster.run(0, cluster.mpirun(program, names=tuple(QUIET)), QUIET)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


@pytest.mark.parametrize("backend", ["native", "gloo"])
def test_no_byte_goes_around_the_link(link: Cluster, backend: str) -> None:
    """200 all-reduces of 16 KB between two nodes: the link carries every byte in both directions, loopback and
    /dev/shm none, and each all-reduce takes at least the link's delay."""
    count, nbytes, delay = 200, 16384, 0.5e-3
    link.control.link(delay_s=delay)
    before = link.control.stats()
    found = ranks(link, "all_reduces", backend=backend, count=count, nbytes=nbytes)
    after = link.control.stats()
    assert found["nodes"] == ["n0", "n1"]
    assert found["seconds"] >= count * delay
    for a, b in ((0, 1), (1, 0)):
        # an all-reduce of two ranks cannot do with less than the half of the vector each way twice, or the whole once
        assert after.carried[a][b] - before.carried[a][b] >= count * nbytes
    for first, last in found["around"]:
        assert last["loopback"] - first["loopback"] < nbytes, "bytes went through loopback"
        assert last["shm"] == first["shm"]


def test_without_the_link_there_is_no_sum(link: Cluster) -> None:
    """All-reduces run; then the cable is pulled, and the one under way ends with an error that names the peer: no other
    way was left."""
    program = [sys.executable, "-W", "ignore", RANKS, "until_broken", json.dumps({"timeout_s": 1.0})]
    process = link.start(0, link.mpirun(program, names=tuple(QUIET)), QUIET, stdout=subprocess.PIPE)
    try:
        assert json.loads(process.stdout.readline()) == {"ready": True}
        link.control.cut(0, 1)
        found = json.loads(process.stdout.readline())
    finally:
        kill(process)
    assert found["error"] == "CollectiveTimeout"
    assert "rank 1" in found["words"]
    assert 0.9 <= found["seconds"] < HANG_S


def deployment(cluster: Cluster, folder: Path, **launch: Any) -> Path:
    """The demo's ladder model on one rank a node."""
    path = folder / "deploy.yaml"
    keys = {"hosts": ["n0", "n1"], "interface": "eth0", "rsh_agent": str(cluster.agent), **launch}
    engine = {"device": "cpu", "threads": 1, "max_num_seqs": 8, "max_num_batched_tokens": 256}
    model = {"path": str(ROOT / "configs/demo/demo-ladder"), "served_model_name": "demo", "dtype": "float32"}
    parts = {
        "model": model,
        "parallel": {"tensor_parallel_size": 2},
        "launch": keys,
        "engine": {**engine, "kv_cache_memory": "64MiB"},
        "daemon": {"data_dir": str(folder / "data")},
    }
    path.write_text(json.dumps(parts))  # YAML holds JSON
    return path


def laddertron(cluster: Cluster, *words: str) -> subprocess.CompletedProcess[str]:
    """The command on n0, as an operator types it there."""
    command = [sys.executable, "-m", "laddertron.launchers.cli", *words]
    return cluster.run(0, command, QUIET, timeout=600.0)


def quiet_preflight(cluster: Cluster, config: Path, tuning: Path) -> subprocess.CompletedProcess[str]:
    """Again, a few times, while all it finds is a rank that computes slowly: other tests share the cores."""
    for _ in range(5):
        done = laddertron(cluster, "preflight", str(config), "--save", str(tuning))
        errors = [row for row in (done.stdout + done.stderr).splitlines() if "error: " in row]
        if not errors or not all("a matmul takes" in row for row in errors):
            break
    return done


@pytest.mark.slow
def test_preflight_tunes_a_run_over_nodes(link: Cluster, tmp_path: Path) -> None:
    """1. preflight over two nodes measures the link's delay and writes a tuning file.
    2. A run with that file answers every line, each rank on its node, and warns of nothing."""
    delay = 20e-3
    link.control.link(delay_s=delay)
    config, tuning = deployment(link, tmp_path), tmp_path / "tuning.json"
    done = quiet_preflight(link, config, tuning)
    assert done.returncode == 0, done.stdout + done.stderr
    saved = json.loads(tuning.read_text())
    assert saved["shape"]["nodes"] == 2
    small = min((p for p in saved["points"] if p["strategy"] == "exchange"), key=lambda p: p["nbytes"])
    assert delay <= small["seconds"] < 2 * delay
    link.control.link(delay_s=0)  # the same fabric, sooner done
    said = run_of_four(link, config, tmp_path, "--set", f"parallel.tuning_file={tuning}")
    assert "WARNING" not in said, said


def test_a_run_without_a_tuning_file_says_so(link: Cluster, tmp_path: Path) -> None:
    """Rank 0's warning is on the terminal of whoever runs it, once, with its rank and host, and the fix in it."""
    said = run_of_four(link, deployment(link, tmp_path), tmp_path)
    assert said.count("WARNING") == said.count("WARNING rank 0 on n0: collectives go by untuned prices") == 1, said
    assert "`laddertron preflight CONFIG --save FILE`" in said


def run_of_four(cluster: Cluster, config: Path, folder: Path, *words: str) -> str:
    """A run of four lines, all of them answered; what it said, a terminal's folded lines as one."""
    prompts, out = folder / "in.jsonl", folder / "out.jsonl"
    prompts.write_text("".join((ROOT / "configs/demo/prompts.jsonl").read_text().splitlines(True)[:4]))
    done = laddertron(cluster, "run", str(config), "-i", str(prompts), "-o", str(out), *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(out.read_text().splitlines()) == 4
    return " ".join(done.stderr.split())


@pytest.mark.slow
def test_preflight_names_who_cannot_have_rdma(link: Cluster, tmp_path: Path) -> None:
    """require_transport: ib on a cluster of sockets: exit 1, every rank named with its node, no tuning file."""
    tuning = tmp_path / "tuning.json"
    words = ["preflight", str(deployment(link, tmp_path)), "--save", str(tuning)]
    done = laddertron(link, *words, "--set", "parallel.require_transport=ib")
    assert done.returncode == 1, done.stdout + done.stderr
    why = "parallel.require_transport is ib, backend native sends over sockets between nodes"
    assert f"error: rank 0 on n0, rank 1 on n1: {why}" in done.stdout
    assert not tuning.exists()


@pytest.mark.slow
def test_preflight_ends_on_a_cut_link(link: Cluster, tmp_path: Path) -> None:
    """Pulled while ranks measure: an error that names the other end, exit 1, and nothing is left on any node."""
    config, before = deployment(link, tmp_path), link.control.stats().bytes
    words = ["launch", str(config), "preflight"]
    command = [sys.executable, "-m", "laddertron.launchers.cli", *words]
    process = link.start(0, command, QUIET, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        while link.control.stats().bytes < before + 2_000_000:
            assert process.poll() is None, "it ended before it measured"
            time.sleep(0.05)  # the switch has no event for it
        link.control.cut(0, 1)
        said, _ = process.communicate(timeout=HANG_S)
    finally:
        kill(process)
    assert process.returncode == 1, said
    assert "error: rank 0 on n0: " in said
    assert "rank 1" in said.partition("error: rank 0 on n0: ")[2].partition("\n")[0]
    assert not [line for line in processes(link) if "preflight" in line]


def test_a_run_under_mpich(link: Cluster, tmp_path: Path) -> None:
    """The same job with Hydra for mpirun and MPICH's library under mpi4py."""
    folder = mpich()
    if folder is None:
        pytest.skip("no MPICH: make cluster-test fetches one into build/mpich")
    config = deployment(
        link,
        tmp_path,
        launcher="mpich",
        mpirun=str(folder / "bin" / "mpiexec"),
        env={"MPI4PY_LIBMPI": library(folder)},
    )
    out = tmp_path / "out.jsonl"
    done = laddertron(link, "run", str(config), "-i", str(ROOT / "configs/demo/prompts.jsonl"), "-o", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(out.read_text().splitlines()) == 16
