"""Logs that nobody reads, or that somebody floods, stop nothing: lines are dropped and counted."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from daemon_tools import deployment, served
from laddertron.engine.daemon.keys import add_key
from laddertron.engine.daemon.logs import QueuedHandler, Sparse, to_stream
from laddertron.engine.daemon.store import store
from laddertron.engine.daemon.store.disk_watch import DiskWatch
from laddertron.launchers.control import control
from laddertron.launchers.control.messages import Welcome
from test_probes import get
from tiny_text import write_folder
from waiting import HANG_S, until


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("tiny"))


def test_a_log_that_nobody_reads_stops_nothing() -> None:
    """More lines than pipe and queue have room for; once it is read, the first new line says how many are missing."""
    read, write = os.pipe()
    with open(write, "w") as stream, open(read, "rb", buffering=0) as pipe:
        handler = QueuedHandler(to_stream(stream, DiskWatch()), most=100)
        logger = logging.Logger("unread")
        logger.addHandler(handler)
        for number in range(3000):
            logger.warning("%d %s", number, "x" * 100)
        handler.flush()  # returns though nothing is read
        came, ended = bytearray(), threading.Event()

        def take() -> None:
            while b"the end" not in came:
                came.extend(pipe.read(1 << 16))
            ended.set()

        reading = threading.Thread(target=take)
        reading.start()
        until(lambda: not handler.lines.unfinished_tasks)
        logger.warning("the end")
        assert ended.wait(HANG_S)
        reading.join()
        lines = came.decode().splitlines()
        assert lines[-1] == "the end"
        dropped = [int(one.split()[0]) for one in lines if one.endswith("log lines were dropped: the log was not read")]
        assert sum(dropped) == 3000 - (len(lines) - 1 - len(dropped)) > 0
        assert lines[:100] == [f"{number} {'x' * 100}" for number in range(100)]


def test_a_process_whose_log_is_not_read_ends() -> None:
    """The pipe stays full: neither a lock nor the last flush holds the end up."""
    code = (
        "import logging, sys; from laddertron.engine.daemon.logs import set_up\n"
        "set_up(sys.stderr, 'info')\n"
        "for number in range(20_000): logging.warning('x' * 100)\n"
        "print('logged', flush=True)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"logged\n"
            assert process.wait(HANG_S) == 0
        finally:
            process.kill()


def test_sparse_lines() -> None:
    now = [0.0]
    sparse = Sparse(2, 60.0, lambda: now[0])
    assert [sparse.take() for _ in range(5)] == [0, 0, None, None, None]
    now[0] = 60.0
    assert [sparse.take() for _ in range(3)] == [3, 0, None]


def test_requests_without_a_key_are_logged_sparsely(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    keys = tmp_path / "keys.json"
    alice = add_key(keys, "alice")[1]
    with served(deployment(tmp_path), folder, keys=keys) as daemon:
        for _ in range(200):
            assert get(daemon, "/v1/models")[0] == 401
        assert get(daemon, "/v1/models", alice)[0] == 200
    said = [record for record in caplog.records if "/v1/models" in record.getMessage()]
    assert len([record for record in said if "401" in record.getMessage()]) == 2 * 120  # log and audit
    assert [record.getMessage() for record in said][-1] == "GET /v1/models 200"


def test_a_folder_that_cannot_be_looked_at_pauses_batches(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a descriptor, say; the daemon goes on, and batches do once it can."""
    failing = True

    def room(path: Path) -> tuple[int, int] | str:
        return "Too many open files" if failing else (1 << 40, 1 << 41)

    monkeypatch.setattr(store, "room_of", room)
    with served(deployment(tmp_path), folder) as daemon:
        gate = daemon.daemon.services.batches.gate
        until(lambda: "Too many open files" in gate.why)
        failing = False
        until(lambda: not gate.why)
    assert daemon.code == 0


def test_the_control_channel_logs_one_line_without_descriptors(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each try fails, and asyncio would log each; once there is a descriptor a rank is accepted."""
    left, accept = [20], socket.socket.accept

    def scarce(self: socket.socket) -> Any:
        if left[0]:
            left[0] -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(self)

    async def scene() -> None:
        handler: Any = None
        server = control.ControlServer(handler, control.new_secret(), Welcome("", 0, 1, "v"))
        host, port = (await server.start()).rsplit(":", 1)
        reader, writer = await asyncio.open_connection(host, int(port))
        assert await reader.read(1)  # the challenge
        writer.close()
        await server.close()

    monkeypatch.setattr("asyncio.constants.ACCEPT_RETRY_DELAY", 0.01)
    monkeypatch.setattr(socket.socket, "accept", scarce)
    asyncio.run(asyncio.wait_for(scene(), HANG_S))
    said = [record.getMessage() for record in caplog.records if "accept" in record.getMessage()]
    assert len(said) == 1
    assert left == [0]


def test_a_hangup_while_serve_starts_does_not_end_it() -> None:
    """While the commands are imported: it waits until a reload is possible. Another command ends as ever."""
    code = """
import importlib.abc, os, signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup's children ignore it
class Hangup(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "laddertron.launchers.cli.__main__":
            os.kill(os.getpid(), signal.SIGHUP)
sys.meta_path.insert(0, Hangup())
sys.argv = ["laddertron", sys.argv[1], "--help"]
from laddertron.launchers.cli import main
sys.exit(main())
"""
    for command, status in (("serve", 0), ("check", -1)):
        done = subprocess.run([sys.executable, "-c", code, command], capture_output=True, timeout=HANG_S, check=False)
        assert done.returncode == status
