"""The daemon without its text workers: it is not ready and says why, requests are refused for now, lines wait."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import openai
import pytest
from daemon_tools import NAME, Served, deployment, line, lines_of, served, submit, wait_batch
from laddertron.engine.openai.body_worker import MODULE
from laddertron.engine.text.pool import LARGE_BYTES
from laddertron.launchers.control.processes import descendants, words_of
from test_probes import get
from tiny_text import write_folder
from waiting import until


def workers() -> list[int]:
    return [p.pid for p in descendants(os.getpid()) if MODULE in words_of(p.pid)]


def counts(client: Any, batch_id: str) -> Any:
    return client.batches.retrieve(batch_id).request_counts


def ready(daemon: Served) -> tuple[int, str]:
    status, body = get(daemon, "/ready", port=daemon.port)
    return status, json.loads(body)["reason"]


def test_lines_wait_and_requests_are_refused_until_a_worker_runs_again(tmp_path: Path) -> None:
    """1. Both workers are killed while tokenizer.json is away: /ready is 503 with the reason. 2. A completion and
    /tokenize get 503; a batch, large lines among it, makes no error. 3. The file is back: every line is answered."""
    folder = write_folder(tmp_path / "tiny")
    names = [f"l{n}" for n in range(40)] + ["large"]
    data = b"".join(line(name, f"text {name}") for name in names[:-1])
    data += line("large", "x", metadata={"pad": "y" * 400}, stop=["z" * 100] * 4)[:-1].ljust(LARGE_BYTES + 1) + b"\n"
    with served(deployment(tmp_path), folder) as daemon, daemon.client() as client:
        until(lambda: ready(daemon)[0] == 200)
        (folder / "tokenizer.json").rename(folder / "away")
        for pid in workers():
            os.kill(pid, signal.SIGKILL)
        until(lambda: ready(daemon)[0] == 503)
        assert "no text worker runs" in ready(daemon)[1]
        assert "tokenizer.json is missing" in ready(daemon)[1]
        batch = submit(client, data)
        with pytest.raises(openai.APIStatusError, match="no text worker runs") as refused:
            client.completions.create(model=NAME, prompt="x", max_tokens=1)
        assert (refused.value.status_code, refused.value.code) == (503, "not_ready")
        assert refused.value.response.headers["retry-after"]
        body = b'{"prompt": "x"}'
        head = f"POST /tokenize HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
        assert b" 503 " in daemon.raw(head.encode() + body).split(b"\r\n")[0]
        (folder / "away").rename(folder / "tokenizer.json")
        until(lambda: ready(daemon)[0] == 200)
        batch = wait_batch(client, batch.id)
        assert batch.status == "completed"
        assert batch.request_counts.failed == 0
        assert set(lines_of(client, batch.output_file_id)) == set(names)
        assert client.completions.create(model=NAME, prompt="x", max_tokens=1).choices
    assert workers() == []


def test_a_running_batch_survives_the_same(tmp_path: Path) -> None:
    """The workers are lost in the middle of a file: no line gets an error."""
    folder = write_folder(tmp_path / "tiny")
    data = b"".join(line(f"l{n}", f"text {n}") for n in range(1000))
    with served(deployment(tmp_path), folder) as daemon, daemon.client() as client:
        until(lambda: ready(daemon)[0] == 200)
        batch = submit(client, data)
        until(lambda: counts(client, batch.id).completed > 10)
        (folder / "tokenizer.json").rename(folder / "away")
        for pid in workers():
            os.kill(pid, signal.SIGKILL)
        until(lambda: ready(daemon)[0] == 503)
        assert client.batches.retrieve(batch.id).status == "in_progress"
        (folder / "away").rename(folder / "tokenizer.json")
        batch = wait_batch(client, batch.id)
        assert (batch.status, batch.request_counts.failed, batch.request_counts.completed) == ("completed", 0, 1000)
