"""Rows of the matrix on the daemon as a process: crash loop, poison, the second SIGTERM, going on with 10,000 lines,
and a cut link. Fake ranks but for the last. Part of `make fault-test`."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import sqlite3
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster.launching import Job, ranks_on
from cluster.nodes import Cluster, why_not
from job_tools import MPIRUN
from laddertron.launchers.control import processes
from laddertron.topology.hardware.cpu_quota import memory_bytes

from faults.night import ROOT, Night, line, until

pytestmark = pytest.mark.slow


@pytest.fixture
def night(tmp_path: Path) -> Iterator[Night]:
    made = Night(tmp_path, real=False)
    yield made
    made.close()


def test_a_crash_loop_ends_the_daemon(night: Night) -> None:
    """Rank 1 fails in every launch: after the fourth the daemon ends with 1 within a minute and nothing is left."""
    began = time.monotonic()
    night.start(FAULT="loading")
    assert night.process.wait(60) == 1
    print(f"crash loop: exit 1 after {time.monotonic() - began:.1f} s")
    assert len([e for e in night.events("failure") if "replica" in e]) == 4
    assert "4 failures in a row without progress" in night.tail()


@pytest.mark.skipif(not MPIRUN.exists(), reason=f"no Open MPI at {MPIRUN}")
@pytest.mark.parametrize("fault", ["truncated", "too large for the memory"])
def test_what_cannot_be_loaded_ends_the_daemon_at_the_first_launch(fault: str, tmp_path: Path) -> None:
    """Real ranks: a shard cut short, a cache that fits nowhere. The daemon ends with 1 after one launch, with the
    file and tensor, or need and have, as its last words; nothing is left."""
    all_of_it = memory_bytes() - 2**20  # as much as `check` lets pass
    too_large = ("parallel.tensor_parallel_size=1", f"engine.kv_cache_memory={all_of_it}")
    sets = {"truncated": (), "too large for the memory": too_large}[fault]
    config = tmp_path / "demo.yaml"
    shutil.copy(ROOT / "configs" / "demo.yaml", config)
    shutil.copytree(ROOT / "configs" / "demo" / "demo-ladder", tmp_path / "demo" / "demo-ladder")
    if fault == "truncated":
        with (tmp_path / "demo" / "demo-ladder" / "model.safetensors").open("r+b") as file:
            file.truncate(1_000_000)
    night = Night(tmp_path, real=True, sets=sets, config=config)
    began = time.monotonic()
    night.start()
    try:
        until("ranks", lambda: night.victims("rank"), 60)
        started, known = time.monotonic(), night.everyone()
        assert night.process.wait(120) == 1
        print(f"{fault}: exit 1, {time.monotonic() - began:.1f} s in all, {time.monotonic() - started:.1f} s of ranks")
        assert [e["kind"] for e in night.events("failure") if "replica" in e] == ["refused"]
        last = night.events("failed")[-1]["message"]
        for words in {
            "truncated": ("model.safetensors", "model.layers.2.self_attn.k_proj.weight"),
            "too large for the memory": ("kv_cache_memory", f"{all_of_it >> 20} MiB for KV"),
        }[fault]:
            assert words in last
        assert not any(processes.is_alive(p) for p in known)
    finally:
        night.close()


def test_a_poison_line_is_given_up_and_the_rest_completes(night: Night) -> None:
    """One prompt kills a rank whenever it is in a step: it is in the error file, the other 39 lines are answered."""
    night.start(POISON="1999")
    night.ready()
    lines = [line(f"line-{n}", 8, n, [1999] if n == 17 else [5, 6, 7]) for n in range(40)]
    batch_id = night.submit(lines)
    took = until("the batch's end", lambda: night.batch(batch_id)["status"] == "completed", 60)
    batch = night.batch(batch_id)
    assert [(row["custom_id"], row["response"]["body"]["error"]["code"]) for row in night.rows(batch, "error")] == [
        ("line-17", "quarantined")
    ]
    assert sorted(row["custom_id"] for row in night.rows(batch, "output")) == sorted(
        f"line-{n}" for n in range(40) if n != 17
    )
    print(f"poison: quarantined, the rest done after {took:.1f} s")
    assert night.stop() == 0


def test_a_second_sigterm_ends_at_once(night: Night) -> None:
    """A long request drains; asked again, the daemon is gone within a second, and its ranks with it within three."""
    night.start()
    night.ready()
    night.submit([line("long", 1000, 1)])
    until("a line in the engine", lambda: night.starts.read_bytes(), 20)
    known = night.everyone()
    night.process.send_signal(signal.SIGTERM)
    until("the drain", lambda: night.events("drain"), 5)
    assert night.process.poll() is None
    began = time.monotonic()
    night.process.send_signal(signal.SIGTERM)
    assert night.process.wait(5) == 128 + signal.SIGTERM
    assert time.monotonic() - began < 1.0
    took = until("no orphan", lambda: not any(processes.is_alive(p) for p in known), 3.0)
    print(f"second SIGTERM: ranks gone after {took:.2f} s")


def test_ten_thousand_lines_go_on_within_five_seconds(tmp_path: Path) -> None:
    """The daemon is killed half way through 10,000 lines: started again, the next line is in an engine within 5 s of
    the engine being ready, and at the end there is one answer a line."""
    seed = random.SystemRandom().randrange(2**32)
    night = Night(tmp_path, real=False, step_s=0.002)
    try:
        night.start()
        night.ready()
        batch_id = night.submit([line(f"line-{n}", 1, n) for n in range(10_000)])
        until("half of it", lambda: len(night.committed()) >= 5000, 120, 0.2)
        assert night.strike("daemon", random.Random(seed)) is not None
        night.process.wait()
        before = night.starts.stat().st_size
        night.start()
        night.ready()
        took = until("the next line", lambda: night.starts.stat().st_size > before, 5.0)
        print(f"10,000 lines: going on {took:.2f} s after ready")
        until("the end", lambda: night.batch(batch_id)["status"] == "completed", 120, 0.5)
        names = [row["custom_id"] for row in night.rows(night.batch(batch_id), "output")]
        assert sorted(names) == sorted(f"line-{n}" for n in range(10_000))
        assert night.stop() == 0
    finally:
        night.close()


def answered(store: Path) -> int:
    with contextlib.closing(sqlite3.connect(f"file:{store}?mode=ro", uri=True)) as db:
        return int(db.execute("SELECT count(*) FROM results").fetchone()[0])


@pytest.mark.cluster
@pytest.mark.skipif(why_not() is not None, reason=why_not() or "")
def test_a_cut_link_is_found_and_leaves_no_orphan(tmp_path: Path) -> None:
    """The daemon on node 0, ranks on nodes 0 and 1, the link between them cut in decode: the far rank is named and
    the launch given up within 15 s, no worker is left on node 1 after 30 s; the link fixed, the batch completes."""
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}
    with Cluster(2) as cluster:
        (tmp_path / "hosts").write_text("".join(f"{name} slots=1\n" for name in cluster.names))
        launch = f"launcher: openmpi, hostfile: ./hosts, rsh_agent: {cluster.agent}"
        job = Job(tmp_path, launch, tp=2, lines=400, tokens=64)
        cli = [sys.executable, "-m", "laddertron.launchers.cli"]
        log_path = tmp_path / "serve.log"
        with log_path.open("w") as log:
            serving = cluster.start(0, [*cli, "launch", str(job.config), "serve"], quiet, stdout=log, stderr=log)
        probe = ["bash", "-c", "</dev/tcp/127.0.0.1/8000"]
        until("a daemon", lambda: cluster.run(0, probe).returncode == 0, 90, 0.2)
        submit = [*cli, "batch", "submit", str(job.input), "--wait", "-o", str(job.output)]
        client = cluster.start(0, submit, quiet)
        until("two workers", lambda: ranks_on(cluster, 1, "laddertron.launchers.rank.worker"), 90, 0.2)
        until("answers", lambda: answered(tmp_path / "data" / "store.db") >= 20, 90, 0.2)
        old = {pid: processes.start_time(pid) for pid in ranks_on(cluster, 1, "laddertron.launchers.rank.worker")}
        cluster.control.cut(0, 1)
        found = until("a silent rank", lambda: '"kind": "silent"' in log_path.read_text(), 15)
        gone = until("no orphan", lambda: all(processes.start_time(pid) != at for pid, at in old.items()), 30 - found)
        ended = until("the launch's end", lambda: '"event": "failure"' in log_path.read_text(), 60)
        print(f"cut link: found after {found:.1f} s, far ranks gone {gone:.1f} s, ended {ended:.1f} s later")
        cluster.control.fix(0, 1)
        assert client.wait(180) == 0, log_path.read_text()[-4000:]
        assert job.answered() == job.names
        (daemon,) = ranks_on(cluster, 0, "laddertron.launchers.cli serve")
        os.kill(daemon, signal.SIGTERM)
        assert serving.wait(60) == 0
