"""What one client may take: connections, held bytes, the loop's time, the text workers. Others are served meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import json
import mmap
import socket
import traceback
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from daemon_tools import LIMITS, NAME, Served, deployment, served
from fake_job import FakeJob
from laddertron.engine.config.schema import LimitsConfig
from laddertron.engine.daemon.http.bodies import HeldBodies
from laddertron.engine.openai import body_worker
from laddertron.engine.openai.errors import ApiError
from laddertron.engine.text.pool import PoolLimits, TextPool, _Item, _Queues
from laddertron.engine.text.tokenizer import ChatOptions
from tiny_text import write_folder
from waiting import FOR_EVER_S, HANG_S, until

TIGHT = replace(
    LimitsConfig(),
    max_connections=8,
    max_connections_per_address=6,
    max_held_bytes=300_000,
    max_interactive_requests=2,
    header_timeout=FOR_EVER_S,
    body_timeout=FOR_EVER_S,
)
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"

HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Iterator[Served]:
    with served(deployment(tmp_path_factory.mktemp("tight"), TIGHT), folder) as running:
        yield running


@contextlib.contextmanager
def sent(daemon: Served, *what: bytes) -> Iterator[list[socket.socket]]:
    """Connections that stay open, each with what was sent on it."""
    with contextlib.ExitStack() as stack:
        made = []
        for data in what:
            made.append(stack.enter_context(socket.create_connection(("127.0.0.1", daemon.port), timeout=HANG_S)))
            made[-1].sendall(data)
        yield made


def post(daemon: Served, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    answer = daemon.raw(head.encode() + body)
    status = int(answer.split(b" ", 2)[1])
    return status, json.loads(answer.partition(b"\r\n\r\n")[2])


# connections


def test_silent_connections_give_way(daemon: Served) -> None:
    """As many as there is room for, none of which asks anything: whoever asks is answered."""
    with sent(daemon, *[b""] * 6):
        until(lambda: daemon.raw(HEALTH).startswith(b"HTTP/1.1 200"))


def test_an_address_has_its_share(daemon: Served) -> None:
    """Connections that have asked do not give way; the next is turned away, until one of them has gone."""
    until(lambda: daemon.raw(HEALTH).startswith(b"HTTP/1.1 200"))  # those of the test before have gone
    with sent(daemon, *[HEAD + b"content-length: 9\r\n\r\n"] * 6) as made:
        answers: list[bytes] = []

        def turned_away() -> bool:
            answers.append(daemon.raw(HEALTH))
            return answers[-1].startswith(b"HTTP/1.1 503")

        until(turned_away)
        assert b"6 connections of 127.0.0.1 are open" in answers[-1]
        made[0].close()
        until(lambda: not turned_away())


def test_length_and_transfer_encoding_together_are_refused(daemon: Served) -> None:
    """RFC 9112, 6.1: and nothing that follows on the connection is a request."""
    smuggled = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n"
    body = b"0\r\n\r\n" + smuggled
    both = HEAD + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n" + body
    answer = daemon.raw(both)
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"connection: close" in answer
    assert answer.count(b"HTTP/1.1") == 1


def test_chunk_extensions_do_not_go_on_for_ever(daemon: Served) -> None:
    """Each within the bound on a line, together without end: cut off."""
    chunk = b"1;" + b"x" * 8000 + b"\r\n \r\n"
    with sent(daemon, HEAD + b"transfer-encoding: chunked\r\n\r\n") as (one,), contextlib.suppress(ConnectionError):
        for _ in range(8 * 300_000 // len(chunk)):
            one.sendall(chunk)
        assert one.recv(1) == b""


# bodies


def test_who_has_no_room_is_refused_before_the_body_is_read(folder: Path, tmp_path: Path) -> None:
    with served(deployment(tmp_path, TIGHT), folder, lambda: [FakeJob(LIMITS, hold=True)]) as daemon:
        body = json.dumps({"model": NAME, "prompt": "x"}).encode()
        with sent(daemon, *[HEAD + b"content-length: %d\r\n\r\n" % len(body) + body] * 2):
            until(lambda: len(daemon.jobs[0].submitted) == 2)
            with sent(daemon, HEAD + b"content-length: 9000000\r\n\r\n") as (one,):
                assert one.recv(1 << 16).startswith(b"HTTP/1.1 429")


def test_held_bytes_are_bounded_for_all_together(daemon: Served) -> None:
    """Two bodies of which 140,000 bytes have come: a third large one is 429, a small one is not."""
    half = HEAD + b"content-length: 200000\r\n\r\n" + b" " * 140_000
    small = json.dumps({"model": NAME, "prompt": "x"}).encode()
    with sent(daemon, half, half):
        until(lambda: daemon.on_loop(lambda: held(daemon)) >= 270_000)
        status, value = post(daemon, "/v1/completions", b" " * 200_000)
        assert (status, value["error"]["code"]) == (429, "too_many_bytes")
        assert post(daemon, "/v1/completions", small)[0] == 200
    until(lambda: daemon.on_loop(lambda: held(daemon)) == 0)


def test_what_is_refused_is_not_held() -> None:
    """Its client may send on for seconds, while the refusal is answered: none of it counts any longer, nor is there."""

    class Sending:
        async def stream(self) -> AsyncIterator[bytes]:
            for _ in range(20):
                yield bytes(10_000)

    async def go() -> None:
        bodies = HeldBodies(150_000, 200_000)
        request: Any = Sending()
        with pytest.raises(ApiError) as refused:
            async with bodies.read(request):
                raise AssertionError("taken")
        assert refused.value.code == "too_many_bytes"
        frames = [frame for frame, _ in traceback.walk_tb(refused.value.__traceback__)]
        kept = [value for frame in frames for value in frame.f_locals.values()]
        assert (
            sum(len(one) for one in kept if isinstance(one, bytes | bytearray | mmap.mmap)) == 10_000
        )  # the last chunk
        assert bodies.bytes_open == 0

    asyncio.run(go())


def held(daemon: Served) -> int:
    return daemon.daemon.services.bodies.bytes_open


def test_other_routes_take_small_bodies_alone(daemon: Served) -> None:
    assert post(daemon, "/v1/batches", b" " * 70_000)[0] == 413


BODIES = [
    ("/v1/completions", {"prompt": "hello"}),
    ("/v1/completions", {"prompt": ["hello", "there"], "n": 2, "stop": ["e"], "logit_bias": {"7": 1.5}}),
    ("/v1/completions", {"prompt": "hello there", "echo": True, "logprobs": 1}),
    ("/v1/completions", {"prompt": [[5, 6], [7]], "echo": True}),
    ("/v1/completions", {"prompt": [5, 6, 7], "truncate_prompt_tokens": 2}),
    ("/v1/chat/completions", {"messages": [{"role": "developer", "content": "a"}, {"role": "user", "content": "b"}]}),
    ("/v1/chat/completions", {"messages": [], "stop": []}),
    ("/v1/completions", {"prompt": "hello", "temperature": 3}),
    ("/v1/completions", {"prompt": "hello", "model": "other"}),
    ("/v1/completions", {"prompt": "hello", "spare": 1}),
]


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_a_large_body_is_answered_as_a_small_one(daemon: Served, path: str, body: dict[str, Any]) -> None:
    """The same body with and without 70,000 blanks, which take it to a text worker."""
    raw = json.dumps({"model": NAME, "seed": 5, "max_tokens": 8, **body}).encode()
    small, large = post(daemon, path, raw), post(daemon, path, raw + b" " * 70_000)
    for _, value in (small, large):
        for name in ("id", "created"):
            value.pop(name, None)
    assert small == large


@pytest.mark.parametrize(
    "body",
    [
        b'{"model": "tiny", "prompt": [' + b"1," * 100_000 + b"1]}",
        b'{"model": "tiny", "prompt": [[' + b"1," * 100_000 + b"1]]}",
        json.dumps({"model": "tiny", "prompt": "and the " * 30_000}).encode(),
        b'{"model": "tiny", "prompt": "x", "logit_bias": {' + b",".join(b'"%d":1' % i for i in range(20_000)) + b"}}",
        b'{"model": "tiny", ' + b",".join(b'"f%d":1' % i for i in range(20_000)) + b"}",
        b" " * 70_000 + b"[" * 70_000,
        b'{"model": "tiny"' + b" " * 70_000,
    ],
    ids=["ids", "lists", "text", "biases", "fields", "nesting", "cut"],
)
def test_hostile_bodies_are_refused_away_from_the_loop(
    daemon: Served, body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This process neither parses nor checks them."""

    def parsed(*_: Any) -> Any:
        raise AssertionError("a large body was parsed on the loop")

    monkeypatch.setattr(body_worker, "parse_body", parsed)
    monkeypatch.setattr(body_worker, "check_body", parsed)
    status, value = post(daemon, "/v1/completions", body)
    assert (status, value["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize("blanks", [0, 70_000])
def test_tokenize_answers_out_of_a_text_worker(daemon: Served, blanks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A body of some KB may ask for tens of thousands of ids by name: this process neither checks nor writes them."""

    def made(*_: Any) -> Any:
        raise AssertionError("made on the loop")

    monkeypatch.setattr(body_worker, "check_tokenize", made)
    body = json.dumps({"prompt": "hello there", "return_token_strs": True}).encode() + b" " * blanks
    status, found = post(daemon, "/tokenize", body)
    assert (status, found["max_model_len"]) == (200, LIMITS.max_model_len)
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"]) > 2


# the text workers


def test_owners_take_turns() -> None:
    """And the streams of one owner among themselves: three batches of one get no more than another's one."""
    queues = _Queues()

    def put(owner: str, stream: str, size: int) -> None:
        queues.put(_Item({}, size, asyncio.Future(loop=asyncio.new_event_loop()), owner, stream))

    for owner, size in (("a", 1), ("a", 2), ("a", 3), ("b", 4), ("b", 5), ("c", 70_000)):
        put(owner, "", size)
    order = [queues.next(small=turn < 3) for turn in range(6)]
    assert [item.size if item else 0 for item in order] == [1, 4, 2, 70_000, 5, 3]
    for owner, stream, size in (("a", "x", 1), ("a", "x", 2), ("a", "y", 3), ("a", "z", 4), ("b", "", 5), ("b", "", 6)):
        put(owner, stream, size)
    order = [queues.next() for _ in range(6)]
    assert [item.size if item else 0 for item in order] == [1, 5, 3, 6, 4, 2]
    assert queues.next() is None
    assert queues.count == 0


def test_costly_texts_leave_a_worker_to_the_others(tmp_path: Path) -> None:
    """Two chats that render for ever, both large, and two workers: short texts are tokenised all the while."""
    loop = "{% for i in range(10 ** 5) %}{% for j in range(10 ** 5) %}{% endfor %}{% endfor %}"
    long = "{% if messages[0].content|length > 1000 %}"
    write_folder(tmp_path, template=f"{long}{loop}{{% endif %}}{{{{ messages[0].content }}}}")

    async def go() -> None:
        async with TextPool(tmp_path, PoolLimits(workers=2, cpu_seconds=FOR_EVER_S)) as pool:
            message = [{"role": "user", "content": "x" * 70_000}]
            large = [asyncio.ensure_future(pool.of("a").encode_chat(message, ChatOptions())) for _ in range(2)]
            await asyncio.sleep(0)
            for owner in ("a", "b"):
                assert len(await pool.of(owner).encode("x")) == 2
            assert not any(task.done() for task in large)
        for task in large:
            task.cancel()

    asyncio.run(go())
