"""The daemon as a process with fake ranks: its log removed, and more connections than it may have descriptors."""

from __future__ import annotations

import contextlib
import random
import resource
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import HANG_S

from faults.night import Night, line, until

DESCRIPTORS = 900


@pytest.fixture
def night(tmp_path: Path) -> Iterator[Night]:
    made = Night(tmp_path, real=False, sets=exported(tmp_path))
    yield made
    made.close()


def exported(folder: Path) -> tuple[str]:
    return (f"daemon.export_dir={folder / 'export'}",)


def test_a_removed_log_ends_the_daemon_and_the_next_start_names_the_export(night: Night, tmp_path: Path) -> None:
    """1. A batch completes, the daemon is killed, its log is removed: `serve` exits with 2. 2. It is rebuilt from
    the export. 3. The log is removed under that daemon: it exits with 1."""
    data = tmp_path / "data"
    night.start()
    night.ready()
    batch_id = night.submit([line(f"line-{n}", 2, n) for n in range(20)])
    until("the batch's end", lambda: night.batch(batch_id)["status"] == "completed", HANG_S)
    night.process.kill()
    night.process.wait()
    (data / "store.db-wal").unlink()
    refused = Night(tmp_path, real=True, sets=exported(tmp_path))
    refused.start()
    assert refused.process.wait(HANG_S) == 2
    refused.close()
    assert f"rebuild the store from the export {tmp_path / 'export'}" in night.tail()

    data.rename(tmp_path / "lost")
    night.start()
    night.ready()
    assert len(night.rows(night.batch(batch_id), "output")) == 20
    (data / "store.db-wal").unlink()
    assert night.process.wait(HANG_S) == 1
    assert "store.db-wal was removed or replaced while the store was open" in night.tail()


@pytest.mark.skipif(shutil.which("prlimit") is None, reason="no prlimit")
def test_a_killed_rank_is_relaunched_during_a_flood_of_connections(night: Night) -> None:
    """More connections that send nothing than the daemon may have descriptors."""
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 2 * DESCRIPTORS:
        pytest.skip("this test holds 900 connections: raise the hard limit of `ulimit -n`")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * DESCRIPTORS), hard))
    night.argv[:0] = ["prlimit", f"--nofile={DESCRIPTORS}:{DESCRIPTORS}"]
    night.start()
    night.ready()
    with contextlib.ExitStack() as stack:
        for _ in range(DESCRIPTORS):
            stack.enter_context(socket.create_connection(("127.0.0.1", night.port), timeout=HANG_S))
        assert night.strike("rank", random.Random(1)) is not None
        until("the failure", lambda: night.events("failure"), HANG_S)
        night.ready(HANG_S)
    assert night.stop() == 0


def test_equal_lines_that_share_a_computation_survive_kills(tmp_path: Path) -> None:
    """A rank is killed, then the daemon, while one computation is for 40 lines: each has one answer, the same."""
    night = Night(tmp_path, real=False, sets=("batch.deduplicate=true",))
    try:
        night.start()
        night.ready()
        batch_id = night.submit([line(f"line-{n}", 400, n) for n in range(40)])
        until("a line in the engine", lambda: night.starts.read_bytes(), HANG_S)
        assert night.strike("rank", random.Random(1)) is not None
        until("the failure", lambda: night.events("failure"), HANG_S)
        night.ready(HANG_S)
        assert night.committed() == set()
        assert night.strike("daemon", random.Random(1)) is not None
        night.process.wait()
        night.start()
        night.ready()
        until("the batch's end", lambda: night.batch(batch_id)["status"] == "completed", HANG_S)
        rows = night.rows(night.batch(batch_id), "output")
        assert sorted(row["custom_id"] for row in rows) == sorted(f"line-{n}" for n in range(40))
        assert len({row["response"]["body"]["choices"][0]["text"] for row in rows}) == 1
        assert len({row["response"]["body"]["id"] for row in rows}) == 40
        usage = [row["response"]["body"]["usage"] for row in rows]
        shared = [u for u in usage if u["prompt_tokens_details"]["cached_tokens"] == u["prompt_tokens"]]
        assert len(shared) == 39
        assert night.stop() == 0
    finally:
        night.close()
