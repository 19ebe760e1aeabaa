"""What one key asks for delays nobody else: files of many lines or of blanks, long lists, huge answers.

The loop's stalls are measured in its processor time: how much work it did in one turn, however busy the machine is.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from daemon_tools import NAME, Served, deployment, line, served, submit, wait_batch
from laddertron.engine.config.schema import LimitsConfig
from laddertron.engine.daemon.http.keys import add_key
from laddertron.engine.daemon.store import records
from laddertron.engine.daemon.store.rows import BatchRow, FileRow
from laddertron.engine.daemon.store.schema import Rows
from laddertron.engine.text.tokenizer import TextModel
from test_connections import ask, ninetieth
from tiny_text import write_folder
from waiting import HANG_S, until

STALL_S = 0.2
PROBE_S = 0.25
CLIENTS = 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("tiny"))


@contextlib.contextmanager
def watched(daemon: Served) -> Iterator[None]:
    """Asserts that the daemon's loop does no more than STALL_S of work in a turn, and that both ports answer."""
    turns, ended = [0.0], threading.Event()
    asked: dict[int, list[tuple[int, float]]] = {daemon.port: [], daemon.probe_port: []}

    async def turn() -> None:
        before = time.thread_time()
        while not ended.is_set():
            await asyncio.sleep(0.001)
            now = time.thread_time()
            turns.append(now - before)
            before = now

    def probe() -> None:
        while not ended.is_set():
            for port, found in asked.items():
                found.append(ask(port))
            time.sleep(0.01)

    watching = asyncio.run_coroutine_threadsafe(turn(), daemon.loop)
    probing = threading.Thread(target=probe)
    probing.start()
    try:
        yield
    finally:
        ended.set()
        probing.join()
        watching.result()
    print(f"longest turn {max(turns):.3f} s", *(f"nine in ten {ninetieth(found):.3f} s" for found in asked.values()))
    assert max(turns) < STALL_S
    for found in asked.values():
        assert {status for status, _ in found} == {200}
        assert ninetieth(found) < PROBE_S


def test_a_key_with_large_files_does_not_hold_up_anothers(folder: Path, tmp_path: Path) -> None:
    """Five lines are answered while most of four large files still are validated."""
    keys = tmp_path / "keys.json"
    alice, bob = (add_key(keys, name)[1] for name in ("alice", "bob"))
    with served(deployment(tmp_path), folder, keys=keys, probes=True) as daemon:
        one, other = daemon.client(alice), daemon.client(bob)
        data = b"".join(line(str(number), "x" * 300) for number in range(20_000))
        with watched(daemon):
            large = [submit(one, data) for _ in range(4)]
            small = submit(other, b"".join(line(str(number)) for number in range(5)))
            assert wait_batch(other, small.id).status == "completed"
            left = [one.batches.retrieve(batch.id).status for batch in large]
            assert left.count("validating") >= 2, left
        for batch in large:
            one.batches.cancel(batch.id)
        until(lambda: all(one.batches.retrieve(batch.id).status == "cancelled" for batch in large))


def test_duplicates_are_found_among_large_lines_too(folder: Path, tmp_path: Path) -> None:
    long = "x" * 70_000
    lines = [("a", "x"), ("b", long), ("b", "x"), ("a", long), ("c", long), ("c", long)]
    with served(deployment(tmp_path), folder) as daemon:
        client = daemon.client()
        batch = wait_batch(client, submit(client, b"".join(line(*one) for one in lines)).id)
        assert batch.status == "failed"
        assert [(error.line, error.code) for error in batch.errors.data] == [
            (number, "duplicate_custom_id") for number in (3, 4, 6)
        ]


def test_blank_lines_are_passed_over_off_the_loop(folder: Path, tmp_path: Path) -> None:
    """While a batch is validated, computed and, once it is cancelled, wound up."""
    blank = b" " * 999_999 + b"\n"
    limits = replace(LimitsConfig(), max_line_bytes=1_000_000)
    with served(deployment(tmp_path, limits), folder, probes=True) as daemon, watched(daemon):
        client = daemon.client()
        batch = wait_batch(client, submit(client, blank * 190 + line("a")).id)
        assert batch.status == "completed"


def test_long_lists_are_made_off_the_loop(folder: Path, tmp_path: Path) -> None:
    """A hundred failed batches of a hundred errors each, and ten thousand files; 30 clients ask at once."""
    error = {"code": "invalid_json_line", "message": "x" * 300, "param": None, "line": 1}
    with served(deployment(tmp_path), folder, probes=True) as daemon:

        def fill(rows: Rows) -> None:
            for number in range(10_000):
                records.add_file(rows, FileRow(f"file-{number}", "", "batch", "x" * 200, 0, 0))
            for number in range(101):
                id_, errors = f"batch_{number}", [error] * 100
                batch = BatchRow(id_, "", "/v1/completions", "file-0", "24h", "failed", 0, 0, errors=errors)
                records.add_batch(rows, batch)

        daemon.on_loop(daemon.daemon.services.store.write(fill))
        with watched(daemon), ThreadPoolExecutor(CLIENTS) as clients:
            many = [*["/v1/files"] * CLIENTS, *["/v1/batches?limit=100"] * CLIENTS]
            found = list(clients.map(partial(body_of, daemon), many))
        files, batches = json.loads(found[0]), json.loads(found[-1])
        assert (len(files["data"]), files["has_more"], files["last_id"]) == (10_000, False, "file-0")
        assert (len(batches["data"]), batches["has_more"], batches["first_id"]) == (100, True, "batch_100")
        assert batches["data"][0]["errors"]["data"][0]["message"] == error["message"]


def body_of(daemon: Served, path: str) -> bytes:
    with urllib.request.urlopen(f"{daemon.url}{path}", timeout=HANG_S) as answer:
        found: bytes = answer.read()
        return found


def test_bad_words_are_spelt_in_a_text_worker(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a small and of a large body, and of a batch's lines: never on the loop."""
    words = [f"{number} zebras" for number in range(128)]
    want = TextModel.from_folder(folder).bad_word_ids(words)

    def on_the_loop(self: TextModel, words: object) -> None:
        raise AssertionError("bad words were spelt in the daemon")

    monkeypatch.setattr(TextModel, "bad_word_ids", on_the_loop)
    with served(deployment(tmp_path), folder) as daemon:
        client = daemon.client()
        large = {"bad_words": words, "metadata": "x" * 70_000}
        for extra in ({"bad_words": words}, large):
            client.completions.create(model=NAME, prompt="x", max_tokens=2, extra_body=extra)
        data = line("a", bad_words=words) + line("b", **large)
        assert wait_batch(client, submit(client, data).id).request_counts.completed == 2
        assert [request.params.bad_word_ids for request in daemon.jobs[0].submitted] == [want] * 4
