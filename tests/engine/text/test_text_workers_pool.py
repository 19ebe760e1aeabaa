"""Text workers that die, stop, print or cannot be started: no text is blamed for it, and they come back."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import os
import resource
import signal
import socket
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from laddertron.engine import child
from laddertron.engine.text import process
from laddertron.engine.text.pool import PoolLimits, TextPool, TextUnavailable
from laddertron.engine.text.process import STILL_LOOKS, Progress, WorkerProcess
from laddertron.engine.text.tokenizer import ChatOptions, TextError
from laddertron.engine.text.worker import frame, read_frame
from laddertron.launchers.control.processes import descendants, words_of
from tiny_text import write_folder
from waiting import HANG_S

MODULE = "laddertron.engine.text.worker"


def children() -> list[int]:
    """Pids of this process's text workers."""
    return [p.pid for p in descendants(os.getpid()) if MODULE in words_of(p.pid)]


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(HANG_S):
        while not condition():
            await asyncio.sleep(0.01)


def in_pool(folder: Path, use: Callable[[TextPool], Awaitable[None]], **limits: Any) -> None:
    """Runs `use` in a pool whose workers are all ready; afterwards no worker is left."""

    async def go() -> None:
        async with TextPool(folder, PoolLimits(**limits)) as pool, asyncio.timeout(HANG_S):
            await until(lambda: all(slot.worker for slot in pool.slots))
            await use(pool)

    asyncio.run(go())
    assert children() == []


@contextmanager
def no_tokenizer(folder: Path) -> Iterator[None]:
    (folder / "tokenizer.json").rename(folder / "away")
    yield
    (folder / "away").rename(folder / "tokenizer.json")


@contextmanager
def no_descriptors(folder: Path) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free + 1, hard))  # for `children`
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def no_processes(folder: Path) -> Iterator[None]:
    async def refused(module: str, settings: dict[str, Any]) -> WorkerProcess:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WorkerProcess, "start", refused)
        yield


@contextmanager
def no_interpreter(folder: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.executable", "/bin/false")
        yield


@pytest.mark.parametrize(
    ("shortage", "reason"),
    [
        (no_tokenizer, "tokenizer.json is missing"),
        (no_descriptors, "Too many open files"),
        (no_processes, "temporarily unavailable"),
        (no_interpreter, "exit code 1"),
    ],
)
def test_workers_that_cannot_be_started_for_a_while_come_back(
    tmp_path: Path, shortage: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Both are killed meanwhile: the pool says why none runs, a request is refused, a batch's line waits, and both are
    answered afterwards."""
    caplog.set_level("INFO")
    write_folder(tmp_path)

    async def use(pool: TextPool) -> None:
        waiting = asyncio.ensure_future(pool.of("", "batch", math.inf).encode("x"))
        assert len(await waiting) == 2
        with shortage(tmp_path):
            for pid in children():
                os.kill(pid, signal.SIGKILL)
            await until(lambda: pool.failure)  # noticed without a request
            assert reason in pool.failure
            waiting = asyncio.ensure_future(pool.of("", "batch", math.inf).encode("x"))
            with pytest.raises(TextUnavailable, match=reason):
                await pool.of("").encode("x")
            with pytest.raises(TextUnavailable, match=reason):
                await pool.of("", patience_s=0.2).encode("x")
            assert not waiting.done()
        assert len(await waiting) == 2
        await until(lambda: not pool.failure)
        assert len(await pool.of("").encode("x")) == 2

    in_pool(tmp_path, use)
    assert "a text worker runs again" in {record.message for record in caplog.records}


def test_a_request_that_waits_as_the_last_start_fails_is_refused(tmp_path: Path) -> None:
    """It was accepted before anybody knew that no worker can be started."""
    write_folder(tmp_path)

    async def use(pool: TextPool) -> None:
        with no_processes(tmp_path):
            for slot in pool.slots:
                assert slot.worker is not None
                await slot.worker.kill()
            with pytest.raises(TextUnavailable, match="temporarily unavailable"):
                await pool.of("").encode("x")

    in_pool(tmp_path, use)


def test_stopped_workers_are_replaced_and_their_texts_encoded(tmp_path: Path) -> None:
    """Both are stopped while they have nothing to do: each takes a text, and neither text is too costly."""
    write_folder(tmp_path)

    async def use(pool: TextPool) -> None:
        stopped = children()
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        texts = [pool.of("").encode("x" * n) for n in range(1, 9)]
        assert [len(ids) for ids in await asyncio.gather(*texts)] == [n + 1 for n in range(1, 9)]
        await until(lambda: not set(children()) & set(stopped))

    in_pool(tmp_path, use)


def test_a_worker_stopped_while_it_starts_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path)
    start, stopped = WorkerProcess.start, list[int]()

    async def stop_first(module: str, settings: dict[str, Any]) -> WorkerProcess:
        worker = await start(module, settings)
        if not stopped:
            stopped.append(worker.pid)
            os.kill(worker.pid, signal.SIGSTOP)
        return worker

    async def use(pool: TextPool) -> None:
        assert len(await pool.of("").encode("x")) == 2
        assert stopped[0] not in children()

    monkeypatch.setattr(WorkerProcess, "start", stop_first)
    in_pool(tmp_path, use)


def test_what_counts_as_progress() -> None:
    """Processor time, an answer, or only the wish to run do, for ever; neither does not, and being stopped ends it."""
    moving, answering, starved = Progress(3), Progress(3), Progress(3)
    for look in range(1000):
        assert moving.look(look, 0, "S") == ""
        assert answering.look(0, look, "S") == ""
        assert starved.look(0, 0, "R") == ""
    still = Progress(3)
    looks = [still.look(7, 1, state) for state in "RSDSS"]
    assert [bool(look) for look in looks] == [False, False, False, True, True]
    assert "no progress" in looks[-1]
    assert "stopped" in Progress(STILL_LOOKS).look(0, 0, "T")


def test_a_frozen_worker_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a frozen cgroup: not stopped, but without progress. Its text is not too costly."""
    write_folder(tmp_path)
    monkeypatch.setattr(process, "LOOK_S", 0.01)
    frozen = set[int]()
    look = process.cpu_and_state
    monkeypatch.setattr(process, "cpu_and_state", lambda pid: (1, "S") if pid in frozen else look(pid))

    async def use(pool: TextPool) -> None:
        for pid in children():
            frozen.add(pid)
            os.kill(pid, signal.SIGSTOP)
        assert len(await pool.of("").encode("x")) == 2

    in_pool(tmp_path, use)


def test_a_pool_that_closes_waits_for_a_worker_that_is_being_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folder(tmp_path)
    kill, entered = process.WorkerProcess.kill, asyncio.Event()

    async def slow(worker: process.WorkerProcess) -> None:
        if not entered.is_set():
            entered.set()
            await asyncio.Event().wait()  # until the pool's closing cancels it
        await kill(worker)

    async def broken(worker: process.WorkerProcess) -> dict[str, Any]:
        raise RuntimeError("no answer")

    async def use(pool: TextPool) -> None:
        monkeypatch.setattr(process.WorkerProcess, "kill", slow)
        monkeypatch.setattr(process.WorkerProcess, "receive", broken)
        asking = asyncio.create_task(pool.of("").encode("x"))
        await entered.wait()
        asking.cancel()

    in_pool(tmp_path, use)


def test_workers_killed_again_and_again_are_no_texts_fault(tmp_path: Path) -> None:
    """Each of four is killed while it computes the same text, which then is encoded."""
    loop = "{% for i in range(10**5) %}{% for j in range(10**5) %}{% endfor %}{% endfor %}"
    told = "{{ messages[0].content }}"
    write_folder(tmp_path, template=f"{{% if messages[0].content == 'x' %}}{loop}{{% endif %}}{told}")
    config = tmp_path / "tokenizer_config.json"
    quick = {**json.loads(config.read_text()), "chat_template": told}

    async def use(pool: TextPool) -> None:
        chat = asyncio.ensure_future(pool.of("").encode_chat([{"role": "user", "content": "x"}], ChatOptions()))
        (slot,) = pool.slots
        for deaths in range(1, 5):
            await until(lambda: slot.worker and not pool.waiting.count and cpu_of(slot.worker) > 20)
            worker = slot.worker
            assert worker is not None
            if deaths == 4:
                config.write_text(json.dumps(quick))
                pool.checked_files = None  # else a changed folder is refused
            os.kill(worker.pid, signal.SIGKILL)
            await worker.exit
            await until(lambda: slot.worker is not worker)  # noqa: B023
        assert await chat

    def cpu_of(worker: WorkerProcess) -> int:
        """Clock ticks since its start, of which an idle one takes few more."""
        return process.cpu_and_state(worker.pid)[0] - idle.setdefault(worker.pid, process.cpu_and_state(worker.pid)[0])

    idle = dict[int, int]()
    in_pool(tmp_path, use, workers=1, cpu_seconds=3600.0)


def test_what_a_library_prints_in_a_worker_is_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A sitecustomize that prints, and reads its input: the worker has its own socket."""
    hook = tmp_path / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text("import sys\nprint('{' * 100)\nprint(sys.stdin.read(), end='')\n")
    monkeypatch.setenv("PYTHONPATH", str(hook))
    write_folder(tmp_path)

    async def use(pool: TextPool) -> None:
        assert len(await pool.of("").encode("x")) == 2

    in_pool(tmp_path, use)
    out, err = capfd.readouterr()
    assert "{{{" in err
    assert not out


def test_a_signal_to_every_process_of_the_service_ends_no_worker(tmp_path: Path) -> None:
    """As systemd sends it: the daemon still drains, and its workers encode meanwhile."""
    write_folder(tmp_path)

    async def use(pool: TextPool) -> None:
        before = children()
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            for pid in before:
                os.kill(pid, number)
        assert len(await pool.of("").encode("x")) == 2
        assert children() == before

    in_pool(tmp_path, use)


@pytest.mark.parametrize("unread", [False, True])
def test_a_worker_whose_pool_is_gone_ends_without_a_traceback(tmp_path: Path, unread: bool) -> None:
    """The daemon was killed while its worker computed, or before it had read an answer."""
    settings = {"folder": str(write_folder(tmp_path)), **dataclasses.asdict(PoolLimits())}
    ours, theirs = socket.socketpair()
    with ours, theirs, ours.makefile("rb") as answers:
        argv = child.command(MODULE, str(theirs.fileno()), json.dumps(settings))
        worker = subprocess.Popen(argv, **child.options(pass_fds=[theirs.fileno()]), stderr=subprocess.PIPE)
        theirs.close()
        assert read_frame(answers)["ready"]
        ours.sendall(frame([{"text": "hello"}]))
        if unread:
            ours.recv(1, socket.MSG_PEEK)
    with worker:
        assert worker.stderr is not None
        assert worker.stderr.read() == b""
        assert worker.wait(HANG_S) in (0, -signal.SIGPIPE)


def test_a_pool_that_cannot_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        async with TextPool(tmp_path, PoolLimits()):
            pass

    with pytest.raises(TextError, match=r"tokenizer.json is missing"):
        asyncio.run(go())
    write_folder(tmp_path)
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(TextError, match="failed to start 3 times"):
        asyncio.run(go())
    assert children() == []
