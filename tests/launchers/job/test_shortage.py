"""A host without free descriptors, processes or threads for a while: its jobs are launched once there are some."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import threading
from typing import Any

import pytest
from job_tools import bounded, story
from laddertron.launchers.job import replica
from laddertron.launchers.job.bundle import FailureBundles
from laddertron.launchers.job.detect import JobFailure, no_launch

SHORT = 6  # attempts: more than daemon.max_restarts allows


class Shortage:
    """Makes a function fail with `error`, `SHORT` times once `begin` was called."""

    def __init__(self, error: Exception, inner: Any) -> None:
        self.error, self.inner, self.left, self.failed = error, inner, 0, 0

    def begin(self) -> None:
        self.left = SHORT

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        if self.left:
            self.left, self.failed = self.left - 1, self.failed + 1
            raise self.error
        return self.inner(*arguments, **options)


@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("asyncio.create_subprocess_exec", OSError(errno.EMFILE, "Too many open files")),
        ("asyncio.create_subprocess_exec", BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")),
        ("asyncio.create_subprocess_exec", RuntimeError("can't start new thread")),
        ("asyncio.new_event_loop", OSError(errno.EMFILE, "Too many open files")),
    ],
)
def test_a_launch_waits_until_the_shortage_is_over(
    monkeypatch: pytest.MonkeyPatch, where: str, error: Exception
) -> None:
    """A rank is killed while nothing can be started: the job says why it is not ready, and is ready afterwards."""
    monkeypatch.setattr(replica, "_SHORTAGE_S", 0.0)

    async def run() -> None:
        shortage = Shortage(error, getattr(asyncio, where.removeprefix("asyncio.")))
        monkeypatch.setattr(where, shortage)
        async with story() as s:
            await s.phase("ready")
            shortage.begin()
            os.kill(await s.pid(1), signal.SIGKILL)
            await s.listener.until(lambda: s.listener.phases.count("ready") == 2)
            assert shortage.failed == SHORT
            reasons = [state.reason for state in s.listener.states if state.phase == "restarting"]
            assert any(str(error) in reason for reason in reasons)
            assert [failure.kind for failure in s.job.failures] == ["rank_lost", "shortage"]
        monkeypatch.undo()

    bounded(run)


def test_which_failures_pass() -> None:
    assert no_launch(FileNotFoundError(errno.ENOENT, "No such file")).kind == "launch"
    assert no_launch(OSError(errno.ENOMEM, "Cannot allocate memory")).kind == "shortage"


def test_a_failure_without_a_thread_for_its_bundle_is_only_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    bundles = FailureBundles.__new__(FailureBundles)
    monkeypatch.setattr(threading.Thread, "start", start)
    assert bundles.failed(0, JobFailure("rank_lost", "gone")) is None
    assert "no bundle was written: can't start new thread" in caplog.text
