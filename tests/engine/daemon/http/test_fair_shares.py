"""What one key asks for delays nobody else: files of many lines or of blanks, long lists, huge answers.

The loop's stalls are measured in its processor time: how much work it did in one turn, however busy the machine is.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from daemon_tools import LIMITS, NAME, Served, deployment, line, lines_of, served, submit, wait_batch
from fake_job import FakeJob
from laddertron.engine.config.schema import LimitsConfig
from laddertron.engine.daemon import batch_feed, line_flights, service
from laddertron.engine.daemon.http import generate
from laddertron.engine.daemon.http.app import make_app
from laddertron.engine.daemon.http.bodies import Unread, UnreadAnswers
from laddertron.engine.daemon.http.guard import Guard
from laddertron.engine.daemon.keys import add_key
from laddertron.engine.daemon.store import records
from laddertron.engine.daemon.store.rows import BatchRow, FileRow
from laddertron.engine.daemon.store.schema import Rows
from laddertron.engine.text.tokenizer import TextModel
from openai import OpenAI
from test_connections import ask, ninetieth
from tiny_text import write_folder
from waiting import HANG_S, until

STALL_S = 0.2
PROBE_S = 1.0
"""Under load too; docs/reliability.md has an idle machine's figures."""
CLIENTS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("tiny"))


@contextlib.contextmanager
def watched(daemon: Served, probe_s: float = PROBE_S, stall_s: float = STALL_S) -> Iterator[None]:
    """Asserts that the daemon's loop does no more than `stall_s` of work in a turn, and that both ports answer, nine in
    ten within `probe_s`."""
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

    gc.collect()
    gc.freeze()  # as the daemon does: a collection over all that the tests imported would be counted as the loop's work
    watching = asyncio.run_coroutine_threadsafe(turn(), daemon.loop)
    probing = threading.Thread(target=probe)
    probing.start()
    try:
        yield
    finally:
        ended.set()
        probing.join()
        watching.result()
        gc.unfreeze()
    print(f"longest turn {max(turns):.3f} s", *(f"nine in ten {ninetieth(found):.3f} s" for found in asked.values()))
    assert max(turns) < stall_s
    for found in asked.values():
        assert {status for status, _ in found} == {200}
        assert ninetieth(found) < probe_s


def test_a_key_with_large_files_does_not_hold_up_anothers(folder: Path, tmp_path: Path) -> None:
    """Five lines are answered while most of four large files still are validated."""
    keys = tmp_path / "keys.json"
    alice, bob = (add_key(keys, name)[1] for name in ("alice", "bob"))
    with served(deployment(tmp_path), folder, keys=keys, probes=True) as daemon:
        one, other = daemon.client(alice), daemon.client(bob)
        data = b"".join(line(str(number), "x" * 300) for number in range(12_000))

        def create(client: OpenAI, file_id: str) -> Any:
            return client.batches.create(input_file_id=file_id, endpoint="/v1/completions", completion_window="24h")

        with watched(daemon):  # uploads first: they take longer than validation
            files = [one.files.create(file=("in.jsonl", data), purpose="batch").id for _ in range(4)]
            few = b"".join(line(str(number)) for number in range(5))
            file = other.files.create(file=("in.jsonl", few), purpose="batch").id
            large = [create(one, name) for name in files]
            small = create(other, file)
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
    """A hundred failed batches of a hundred errors each, and ten thousand files; a dozen clients ask at once."""
    error = {"code": "invalid_json_line", "message": "x" * 300, "param": None, "line": 1}
    now = int(time.time())  # none is old enough to be deleted
    with served(deployment(tmp_path), folder, probes=True) as daemon:

        def fill(rows: Rows) -> None:
            for number in range(10_000):
                records.add_file(rows, FileRow(f"file-{number}", "", "batch", "x" * 200, 0, now))
            for number in range(101):
                id_, errors = f"batch_{number}", [error] * 100
                batch = BatchRow(id_, "", "/v1/completions", "file-0", "24h", "failed", now, now, errors=errors)
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
    words = [f"{number} zebras" for number in range(64)]
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


MANY = replace(LIMITS, max_num_seqs=64, kv_tokens=1 << 20)
HUGE: dict[str, Any] = {"prompt": ["x"] * 64, "n": 8, "logprobs": 20, "max_tokens": 16, "ignore_eos": True}


def test_a_huge_answer_is_made_off_the_loop(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 512 choices with 20 log probabilities a token, asked for alone and as a batch's line; in pieces it has the
    bytes that it has whole."""
    limits = LimitsConfig()

    def job() -> list[FakeJob]:
        return [FakeJob(MANY)]

    # the fake engine's steps are on the loop too
    with served(deployment(tmp_path, limits), folder, job, probes=True) as daemon, watched(daemon, HANG_S, 2 * STALL_S):
        client = daemon.client()
        data = json.dumps({"model": NAME, "seed": 3, **HUGE}).encode()
        large = json.loads(posted(daemon, data))["choices"]
        batch = wait_batch(client, submit(client, line("a", seed=3, **HUGE)).id)
        assert lines_of(client, batch.output_file_id)["a"]["response"]["body"]["choices"] == large
        assert len(large) == 512
    for module in (generate, line_flights, batch_feed):
        monkeypatch.setattr(module, "LARGE_VALUES", 1 << 60)
    with served(deployment(tmp_path / "again", limits), folder, job) as daemon:
        assert json.loads(posted(daemon, data))["choices"] == large


def posted(daemon: Served, data: bytes, path: str = "/v1/completions") -> bytes:
    request = urllib.request.Request(f"{daemon.url}{path}", data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=HANG_S) as answer:
        found: bytes = answer.read()
        return found


def test_answers_that_nobody_reads_are_bounded(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two keys' clients ask for long lists and read nothing: each key holds its share at most, both no more than all,
    and the clients that read are answered all the while."""
    keys = tmp_path / "keys.json"
    alice, bob, carol = (add_key(keys, name) for name in ("alice", "bob", "carol"))
    limits = replace(LimitsConfig(), max_held_bytes=16 << 20)
    apps = list[Guard]()

    def make(*arguments: Any) -> Guard:
        apps.append(make_app(*arguments))
        return apps[0]

    gave_up, give_up = list[str](), UnreadAnswers.give_up

    def count(self: UnreadAnswers, owner: str, asking: Unread) -> None:
        gave_up.append(owner)
        give_up(self, owner, asking)

    monkeypatch.setattr(service, "make_app", make)
    monkeypatch.setattr(UnreadAnswers, "give_up", count)
    with served(deployment(tmp_path, limits), folder, keys=keys, probes=True) as daemon:

        def fill(rows: Rows) -> None:
            for key, _ in (alice, bob, carol):
                for number in range(10_000):
                    row = FileRow(f"file-{key.id}-{number}", key.id, "batch", "x" * 200, 0, int(time.time()))
                    records.add_file(rows, row)

        daemon.on_loop(daemon.daemon.services.store.write(fill))
        sizes, ended = list[tuple[int, int]](), threading.Event()
        unread = apps[0].unread_answers.unread_bytes

        async def look() -> None:
            while not ended.is_set():
                sizes.append((max(unread.values(), default=0), unread.total()))
                await asyncio.sleep(0.005)

        looking = asyncio.run_coroutine_threadsafe(look(), daemon.loop)
        request = "GET /v1/files HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {}\r\n\r\n"
        with contextlib.ExitStack() as stack:
            for _, secret in (alice, bob):
                for _ in range(12):
                    one = stack.enter_context(socket.socket())
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # what the system keeps is not held
                    one.connect(("127.0.0.1", daemon.port))
                    one.sendall(request.format(secret).encode())
            reader = daemon.client(carol[1])
            for key, _ in (alice, bob):
                until(lambda key=key: gave_up.count(key.id) > 3)  # type: ignore[misc]
            for _ in range(2):
                assert len(reader.files.list().data) == 10_000
        ended.set()
        looking.result()
        until(lambda: not unread)
        print(f"held at most: {max(sizes)[0] >> 20} MiB a key, {max(total for _, total in sizes) >> 20} MiB in all")
        assert max(sizes)[0] <= 8 << 20
        assert max(total for _, total in sizes) <= 16 << 20


def test_a_stream_that_nobody_reads_is_ended(folder: Path, tmp_path: Path) -> None:
    """Its events are held like any answer's: the choices that go on do not fill the memory."""
    limits = replace(LimitsConfig(), max_held_bytes=1 << 20)
    model = replace(LIMITS, max_model_len=20_000)
    with served(deployment(tmp_path, limits), folder, lambda: [FakeJob(model)], probes=True) as daemon:
        body = {"model": NAME, "prompt": "x", "stream": True, "max_tokens": 10_000, "logprobs": 20, "ignore_eos": True}
        data = json.dumps({**body, "n": 8}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(data)}\r\n\r\n".encode()
        with contextlib.ExitStack() as stack:
            for _ in range(2):
                one = stack.enter_context(socket.socket())
                one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                one.connect(("127.0.0.1", daemon.port))
                one.sendall(head + data)
            until(lambda: len(daemon.jobs[0].cancels) == 2)
        assert daemon.jobs[0].steps < 10_000
