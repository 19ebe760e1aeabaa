"""The daemon put together: its end, where that comes early or by its own fault."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from daemon_tools import LIMITS, deployment, served
from fake_job import FakeJob
from laddertron.engine.daemon.http.server import listen
from laddertron.engine.daemon.service import Daemon, Parts
from laddertron.engine.metrics.observer import Observer
from laddertron.engine.text.tokenizer import TextModel
from tiny_text import write_folder


def test_stopped_while_it_begins_it_launches_nothing(tmp_path: Path) -> None:
    """^C while the store is opened: no mpirun that would have to be ended again."""
    folder = write_folder(tmp_path / "tiny")

    async def stopped() -> tuple[int, str]:
        job = FakeJob(LIMITS)
        daemon = Daemon(deployment(tmp_path), Parts([job], TextModel.from_folder(folder), folder, "0", Observer()))
        daemon.stop()
        with listen("127.0.0.1", 0) as listener:
            code = await daemon.run(listener)
        started = "" if job.listener is None else "started"
        return code, started

    assert asyncio.run(stopped()) == (0, "")


def test_a_daemon_that_fails_itself_says_so_and_exits_with_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What it looks at each second raises: it would serve on with figures and checks that stand still."""

    class Broken(Observer):
        def queues(self, *_: object) -> None:
            raise ZeroDivisionError("no such figure")

    folder = write_folder(tmp_path / "tiny")
    with served(deployment(tmp_path), folder, lambda: [FakeJob(LIMITS)], observer=Broken()) as daemon:
        assert daemon.join() == 1
    assert "ending: internal error of the daemon: ZeroDivisionError('no such figure')" in caplog.text
