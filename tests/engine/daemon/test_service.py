"""The daemon put together: its end, where that comes early."""

from __future__ import annotations

import asyncio
from pathlib import Path

from daemon_tools import LIMITS, deployment
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
        started = "" if job._listener is None else "started"
        return code, started

    assert asyncio.run(stopped()) == (0, "")
