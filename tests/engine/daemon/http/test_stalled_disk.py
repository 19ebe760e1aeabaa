"""A disk that does not answer: not ready, named; what needs no disk is answered, and nothing is lost."""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from daemon_tools import NAME, deployment, served
from laddertron.engine.daemon.keys import add_key
from laddertron.engine.daemon.logs import to_file
from laddertron.engine.daemon.store.disk_watch import DiskWatch
from laddertron.engine.daemon.store.store import StoreOptions
from laddertron.engine.metrics.observer import Observer
from prometheus_client import CollectorRegistry
from test_probes import get
from tiny_text import write_folder
from waiting import HANG_S, until

CALLS = ("open", "rename", "stat", "listdir", "statvfs")


class Disk:
    """Calls that hang from `hang` to `answer`, and a watch whose time passes only by `pass_time`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.hangs = 0.0, threading.Event()
        self._where: Callable[[str, str], bool] | None = None
        self._answers = threading.Event()
        self.watch = DiskWatch(monotonic=lambda: self.now)
        for name in CALLS:
            monkeypatch.setattr(os, name, self._patched(name, getattr(os, name)))

    def _patched(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *args: Any, **options: Any) -> Any:
            if isinstance(path, str | os.PathLike):
                self.at(name, os.fspath(path))
            return real(path, *args, **options)

        return call

    def at(self, name: str, path: str) -> None:
        if (where := self._where) is not None and where(name, path):
            self.hangs.set()
            assert self._answers.wait(HANG_S)

    def hang(self, name: str, part: str) -> None:
        self._where = lambda called, path: called == name and part in path

    def pass_time(self) -> None:
        assert self.hangs.wait(HANG_S)
        self.now += 60.0

    def answer(self) -> None:
        self._where = None
        self._answers.set()

    # the calls of the store

    def write(self, descriptor: int, data: memoryview) -> int:
        self.at("write", os.readlink(f"/proc/self/fd/{descriptor}"))
        return os.write(descriptor, data)

    def fsync(self, descriptor: int) -> None:
        self.at("fsync", os.readlink(f"/proc/self/fd/{descriptor}"))
        os.fsync(descriptor)

    def connect(self, path: Path, **options: Any) -> sqlite3.Connection:
        disk = self

        class Connection(sqlite3.Connection):
            def execute(self, query: str, *args: Any) -> sqlite3.Cursor:
                if query == "COMMIT":
                    disk.at("commit", str(path))
                return super().execute(query, *args)

        return sqlite3.connect(path, factory=Connection, **options)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


@pytest.mark.parametrize(
    ("call", "part", "named"),
    [
        ("commit", "store.db", "/data ("),
        ("write", "store.count", "store.count ("),
        ("open", "/data/files/", "/data ("),
        ("write", "/data/files/", ".part ("),
        ("fsync", "/data/files/", ".part ("),
        ("rename", "/data/files/", "/data ("),
        ("statvfs", "/data", "/data ("),
        ("stat", "/data/store.count", "/data ("),
        ("write", "/export/seg-", ".ltx ("),
        ("fsync", "/export/seg-", ".ltx ("),
        ("listdir", "/export", "/export ("),
        ("open", "/export/files/", "/export ("),
        ("fsync", "/export/files/", ".part ("),
        ("stat", "keys.json", "keys.json ("),
    ],
)
def test_a_disk_that_does_not_answer_is_named(tmp_path: Path, disk: Disk, call: str, part: str, named: str) -> None:
    """Nothing is lost: what waited for the disk is stored when it answers. What needs no disk is answered meanwhile."""
    keys = tmp_path / "keys.json"
    key = add_key(keys, "alice")[1]
    config = deployment(tmp_path, export_dir=str(tmp_path / "export"), api_key_file=str(keys))
    options = StoreOptions(files=disk, connect=disk.connect, watch=disk.watch)
    folder, observer = write_folder(tmp_path / "tiny"), Observer(CollectorRegistry())
    with (
        ThreadPoolExecutor() as threads,
        served(config, folder, store=options, keys=keys, observer=observer, probes=True) as daemon,
    ):
        client = daemon.client(key)

        def upload() -> Any:
            return client.files.create(file=("a.jsonl", b"{}\n"), purpose="batch")

        def reason() -> str:
            status, body = get(daemon, "/ready", key)
            return str(json.loads(body)["reason"]) if status == 503 else ""

        until(lambda: not reason())
        try:
            disk.hang(call, part)
            sent = threads.submit(upload)
            disk.pass_time()
            until(lambda: named in reason())
            assert " mounted at /" in reason()
            assert "does not answer since" in reason()
            answer = client.completions.create(model=NAME, prompt="a", max_tokens=2)
            assert answer.usage is not None
            assert answer.usage.completion_tokens in (1, 2), (
                "it may end at once, and its text may be empty: the seed is drawn"
            )
            with pytest.raises(openai.InternalServerError, match="does not answer"):
                upload()
            assert get(daemon, "/health")[0] == 200
            until(lambda: observer.figures()["store_writable"][()] == 0.0)
        finally:
            disk.answer()
        until(lambda: not reason())
        until(lambda: observer.figures()["store_writable"][()] == 1.0)
        try:
            name = sent.result(HANG_S).id
        except openai.InternalServerError:  # it came when the disk had been named
            name = upload().id
        assert name in [file.id for file in client.files.list()]


def test_logs_on_a_disk_that_does_not_answer_are_named(tmp_path: Path, disk: Disk) -> None:
    """A pipe may block for as long as its reader likes."""
    audit = to_file(tmp_path / "audit.jsonl", disk.watch)
    disk.hang("stat", "audit.jsonl")
    writing = threading.Thread(target=audit, args=(b"{}\n",))
    writing.start()
    disk.pass_time()
    assert "audit.jsonl (" in str(disk.watch.stalled())
    disk.answer()
    writing.join(HANG_S)
    assert disk.watch.stalled() is None
    assert (tmp_path / "audit.jsonl").read_bytes() == b"{}\n"


def test_a_call_within_another_is_the_one_that_is_named(tmp_path: Path) -> None:
    now = [0.0]
    watch = DiskWatch(5.0, lambda: now[0], lambda: 100.0)
    with watch.call(tmp_path):
        with watch.call(Path("/proc")):
            now[0] = 5.0
            assert str(watch.stalled()).startswith(
                "/proc (proc mounted at /proc, proc) does not answer since 1970-01-01"
            )
        assert watch.stalled() is None  # the outer call's time begins again
        now[0] = 10.0
        assert str(watch.stalled()).startswith(f"{tmp_path} (")
    with watch.call(tmp_path, job=True):
        now[0] = 29.0
        assert watch.stalled() is None
    assert watch.stalled() is None
