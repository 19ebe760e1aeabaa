"""The control channel: frames, messages, the daemon's end and the ranks' end, and what strangers may try on it."""

from __future__ import annotations

import asyncio
import json
import queue
import subprocess
import sys
import textwrap
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from laddertron import __version__
from laddertron.engine.job import MetricRow
from laddertron.engine.request import ModelLimits, Request, SamplingParams, TokenLogprob, TokensEvent
from laddertron.launchers.control import control, frames, messages
from laddertron.launchers.control.control import ControlServer, new_secret
from laddertron.launchers.control.control_client import ControlClient
from laddertron.launchers.control.frames import FrameError, FrameReader, FrameWriter
from laddertron.launchers.control.messages import (
    Announce,
    Answer,
    Beat,
    Cancel,
    Drain,
    Dump,
    DumpReply,
    Failure,
    Hello,
    Loading,
    Message,
    Ping,
    RankMessage,
    Ready,
    Running,
    Shutdown,
    StopChoice,
    Submit,
    Tokens,
    Welcome,
    from_unproven,
    from_wire,
    to_wire,
)
from laddertron.topology.json_codec import ReadError
from waiting import FOR_EVER_S, HANG_S

LIMITS = ModelLimits(4096, 50000, 8, 65536, (2, 7))
PARAMS = SamplingParams(16, 2**64 - 1, top_p=0.9, logit_bias=((5, -1.5),), stop_token_ids=(2,), n=2, logprobs=0)
REQUEST = Request("line-1", (1, 2, 4294967295), PARAMS, queue="batch_1", deadline=1.5)
EVENT = TokensEvent(
    "line-1",
    1,
    7,
    (11, 12),
    "stop",
    (TokenLogprob(11, -0.5, ((11, -0.5), (9, -2.0))), TokenLogprob(12, 0.0)),
    (None, TokenLogprob(3, -1.0)),
    2,
    "why",
    5,
)
SERVER_MESSAGES: list[Message] = [
    Welcome('{"a": 1}', 1, 4, "1"),
    Ping(),
    Submit(REQUEST),
    Cancel("x"),
    StopChoice("x", 1, 9),
    Drain(),
    Shutdown(),
    Dump(4),
]
RANK_MESSAGES: list[Message] = [
    Hello(1, 0, "node-b", 77, 123456, "boot", "0.1", ("10.0.0.2", "fd00::2")),
    Announce({"weights": "feed"}),
    Loading(0.25, "embedding"),
    Ready(LIMITS),
    Tokens((EVENT, TokensEvent("b", 0, 0, (5,)))),
    Running(("a",), ("b", "c")),
    Beat(
        5, 0.5, 8, 4, 0.25, 99, "all_reduce 99", (MetricRow("a", (), 5.0), MetricRow("b", ("x", "é/y"), 0.5, (1, 0, 2)))
    ),
    Failure("Traceback ...", True),
    DumpReply(4, {"stacks": {"main": "..."}}),
]


class Recorder:
    """A handler that keeps what it is told."""

    def __init__(self) -> None:
        self.messages: list[tuple[int, RankMessage]] = []
        self.gone: list[tuple[int, str]] = []
        self.news = asyncio.Event()

    def on_message(self, rank: int, message: RankMessage) -> None:
        self.messages.append((rank, message))
        self.news.set()

    def on_gone(self, rank: int, reason: str) -> None:
        self.gone.append((rank, reason))
        self.news.set()

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(HANG_S):
            while not condition():
                self.news.clear()
                await self.news.wait()

    def of(self, kind: type) -> list[Any]:
        return [message for _, message in self.messages if isinstance(message, kind)]


class Channel:
    """A server on loopback, and what a test needs to reach it."""

    def __init__(self, world_size: int = 2, handshake_s: float = HANG_S) -> None:
        self.secret, self.heard = new_secret(), Recorder()
        welcome = Welcome("{}", 0, world_size, __version__)
        self.server = ControlServer(self.heard, self.secret, welcome, handshake_s=handshake_s)
        self.address = ""

    def client(self, rank: int = 0, **options: Any) -> ControlClient:
        options = {"watchdog": False, "silence_s": HANG_S, "end": lambda reason: None, "beat": Beat, **options}
        return ControlClient(self.address, self.secret, rank, rank, **options)


def with_channel(story: Callable[[Channel], Awaitable[None]], world_size: int = 2, handshake_s: float = HANG_S) -> None:
    async def run() -> None:
        channel = Channel(world_size, handshake_s)
        channel.address = await channel.server.start()
        try:
            async with asyncio.timeout(2 * HANG_S):
                await story(channel)
        finally:
            await channel.server.close()

    asyncio.run(run())


def sealed_pair() -> tuple[FrameWriter, FrameReader]:
    writer, reader = FrameWriter(), FrameReader()
    writer.key = b"k" * 32
    reader.key = b"k" * 32
    return writer, reader


def dumped(data: dict[str, Any]) -> bytes:
    return json.dumps(data).encode()


def drain(reader: FrameReader) -> list[bytes]:
    payloads = []
    while (payload := reader.next()) is not None:
        payloads.append(payload)
    return payloads


# frames


def test_frames_survive_any_cutting() -> None:
    """Three frames arrive byte by byte, and as one lump: the same payloads come out, in order."""
    payloads = [b"{}", b"x" * 5000, b""]
    for size in (1, 7, 10**6):
        writer, reader = sealed_pair()
        data = b"".join(writer.frame(payload) for payload in payloads)
        out = []
        for at in range(0, len(data), size):
            reader.feed(data[at : at + size])
            out += drain(reader)
        assert out == payloads


def test_a_forged_replayed_or_reordered_frame_is_refused() -> None:
    writer, _ = sealed_pair()
    first, second = writer.frame(b"one"), writer.frame(b"two")
    flipped = bytearray(first)
    flipped[-1] ^= 1
    for bad in (first + first, second, bytes(flipped)):
        _, reader = sealed_pair()
        reader.feed(bad)
        with pytest.raises(FrameError, match="wrong seal"):
            drain(reader)


@pytest.mark.parametrize(("sealed", "limit"), [(False, frames.HANDSHAKE_LIMIT), (True, frames.MESSAGE_LIMIT)])
def test_a_length_beyond_the_limit_is_refused_before_the_payload_comes(sealed: bool, limit: int) -> None:
    reader = sealed_pair()[1] if sealed else FrameReader()
    reader.feed((limit + 1).to_bytes(4, "big"))
    with pytest.raises(FrameError, match=f"longer than {limit}"):
        reader.next()


def test_what_is_no_json_object_is_refused() -> None:
    deep = b"[" * 100_000
    for bad in (b"", b"[]", b"1", b"\xff", b'{"a":NaN}', b'{"a":Infinity}', b"{", deep, b'{"a":' + deep):
        with pytest.raises(ReadError):
            from_wire(bad, "rank")
        with pytest.raises(ReadError):
            from_unproven(Answer, bad)


def test_a_handshake_holds_each_key_once() -> None:
    answer = to_wire(Answer("0" * 64, 1, "f" * 64))
    assert from_unproven(Answer, answer) == Answer("0" * 64, 1, "f" * 64)
    with pytest.raises(ReadError, match="duplicate key 'rank'"):
        from_unproven(Answer, answer[:-1] + b',"rank":2}')
    with pytest.raises(ReadError, match="nonce: expected String should match"):
        from_unproven(Answer, answer.replace(b"000", b"x00"))


# messages


@pytest.mark.parametrize("message", SERVER_MESSAGES + RANK_MESSAGES, ids=lambda message: type(message).__name__)
def test_every_message_comes_back_as_it_was(message: Message) -> None:
    sender: messages.Direction = "server" if message in SERVER_MESSAGES else "rank"
    other: messages.Direction = "rank" if sender == "server" else "server"
    data = to_wire(message)
    assert from_wire(data, sender) == message
    with pytest.raises(ReadError, match="type: expected one of '"):
        from_wire(data, other)
    with pytest.raises(ReadError, match="extra: unknown key"):
        from_wire(data[:-1] + b',"extra":1}', sender)


WRONG: list[Any] = [None, True, -1, 1.5, 10**30, "text", [], [None], {}, {"a": "b"}, [[1]], "x" * 100_000]


def test_wrong_values_anywhere_are_schema_errors() -> None:
    """Every field of every message, one level down too, is replaced by every kind of wrong value, and removed: the
    outcome is a message or a ReadError, never another exception."""
    refused = 0

    def attempt(data: dict[str, Any], sender: messages.Direction) -> int:
        try:
            from_wire(dumped(data), sender)
        except ReadError:
            return 1
        return 0

    for message in SERVER_MESSAGES + RANK_MESSAGES:
        sender: messages.Direction = "server" if message in SERVER_MESSAGES else "rank"
        data = json.loads(to_wire(message))
        for name in [key for key in data if key != "type"]:
            refused += attempt({key: value for key, value in data.items() if key != name}, sender)
            for wrong in WRONG:
                refused += attempt({**data, name: wrong}, sender)
                inner = data[name][0] if isinstance(data[name], list) and data[name] else data[name]
                if isinstance(inner, dict):
                    for key in inner:
                        changed: Any = {**inner, key: wrong}
                        refused += attempt(
                            {**data, name: [changed] if isinstance(data[name], list) else changed}, sender
                        )
    assert refused > 500


def test_infinite_logprobs_are_written_as_the_lowest() -> None:
    """A masked token's logprob is minus infinity, which JSON has not: the event must pass all the same."""
    event = TokensEvent("a", 0, 0, (1,), logprobs=(TokenLogprob(1, float("-inf"), ((2, float("nan")),)),))
    back = from_wire(to_wire(Tokens((event,))), "rank")
    assert isinstance(back, Tokens)
    assert back.events[0].logprobs == (TokenLogprob(1, -9999.0, ((2, -9999.0),)),)


# the channel


def test_a_request_goes_down_and_its_tokens_come_up() -> None:
    """A rank waits asleep, a request wakes it, tokens come back, Shutdown ends the channel in order: nobody calls it a
    loss."""

    async def story(channel: Channel) -> None:
        lost: list[str] = []

        def rank() -> None:
            client = channel.client(end=lost.append)
            assert client.config == "{}"
            client.send_state(Ready(LIMITS))
            (submit,) = client.poll(None)
            assert submit == Submit(REQUEST)
            assert client.poll(0.0) == []
            client.send_tokens([EVENT])
            assert client.poll(HANG_S) == [Shutdown()]
            client.close()

        running = asyncio.create_task(asyncio.to_thread(rank))
        await channel.heard.until(lambda: channel.heard.of(Ready))
        channel.server.send(Submit(REQUEST), 0)
        await channel.heard.until(lambda: channel.heard.of(Tokens))
        channel.server.send(Shutdown())
        await running
        assert await channel.server.all_gone(HANG_S) == frozenset()
        assert isinstance(channel.heard.messages[0][1], Hello)
        assert channel.heard.of(Tokens) == [Tokens((EVENT,))]
        assert channel.heard.gone == [(0, "")]
        assert lost == []

    with_channel(story)


def test_heartbeats_and_dumps_do_not_need_the_main_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that made the client is stuck: beats go on, and a Dump shows where it is stuck."""
    monkeypatch.setattr("laddertron.launchers.control.control_client.BEAT_S", 0.05)

    async def story(channel: Channel) -> None:
        free = threading.Event()

        def stuck_in_a_collective() -> None:
            client = channel.client(dump=lambda: {"collectives": ["all_reduce 7"]})
            free.wait(HANG_S)
            client.close()

        running = asyncio.create_task(asyncio.to_thread(stuck_in_a_collective))
        await channel.heard.until(lambda: len(channel.heard.of(Beat)) >= 5)
        channel.server.send(Dump(9))
        await channel.heard.until(lambda: channel.heard.of(DumpReply))
        (reply,) = channel.heard.of(DumpReply)
        assert reply.dump_id == 9
        assert reply.data["collectives"] == ["all_reduce 7"]
        assert any("stuck_in_a_collective" in stack for stack in reply.data["stacks"].values())
        free.set()
        await running

    with_channel(story)


def test_broken_figures_do_not_look_like_a_dead_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """`beat` raises, or yields NaN; `dump` yields what JSON has not: beats and dumps come all the same."""
    monkeypatch.setattr("laddertron.launchers.control.control_client.BEAT_S", 0.02)
    calls = iter(range(1000))

    def beat() -> Beat:
        if next(calls) == 0:
            raise ZeroDivisionError
        return Beat(step=1, rows=(MetricRow("good", (), 1.0), MetricRow("bad", (), float("nan"))))

    async def story(channel: Channel) -> None:
        client = await asyncio.to_thread(channel.client, beat=beat, dump=lambda: {"x": float("nan")})
        await channel.heard.until(lambda: len(channel.heard.of(Beat)) >= 2)
        assert channel.heard.of(Beat)[:2] == [Beat(), Beat(step=1, rows=(MetricRow("good", (), 1.0),))]
        channel.server.send(Dump(1))
        await channel.heard.until(lambda: channel.heard.of(DumpReply))
        assert "ValueError" in channel.heard.of(DumpReply)[0].data["error"]
        await asyncio.to_thread(client.close)

    with_channel(story)


def test_many_ends_at_once_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    """More choices are cancelled in one step than a message may have events: all arrive, in order."""
    monkeypatch.setattr(messages, "MAX_EVENTS", 10)
    ends = [TokensEvent("r", choice, 0, (), "cancelled") for choice in range(25)]

    async def story(channel: Channel) -> None:
        client = await asyncio.to_thread(channel.client)
        await asyncio.to_thread(client.send_tokens, ends)
        await channel.heard.until(lambda: sum(len(t.events) for t in channel.heard.of(Tokens)) >= len(ends))
        assert [e.choice for t in channel.heard.of(Tokens) for e in t.events] == list(range(len(ends)))
        await asyncio.to_thread(client.close)

    with_channel(story)


def test_an_event_too_long_for_a_message_costs_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logprobs of one request exceed a message: it ends with an error, the engine is told to drop it, its neighbour's
    event in the same list arrives untouched."""
    monkeypatch.setattr(frames, "MESSAGE_LIMIT", 2000)
    big = TokensEvent("big", 0, 0, (1,), prompt_logprobs=tuple(TokenLogprob(i, -0.5) for i in range(500)))
    small = TokensEvent("small", 0, 0, (1,))

    async def story(channel: Channel) -> None:
        client = await asyncio.to_thread(channel.client)
        await asyncio.to_thread(client.send_tokens, [big, small])
        await channel.heard.until(lambda: len(channel.heard.of(Tokens)) == 2)
        (error,), (kept,) = (tokens.events for tokens in channel.heard.of(Tokens))
        assert (error.request_id, error.finish) == ("big", "error")
        assert "logprobs" in error.message
        assert kept == small
        assert client.poll() == [Cancel("big")]
        await asyncio.to_thread(client.close)

    with_channel(story)


def test_the_end_of_the_channel_ends_the_rank_at_once() -> None:
    """The daemon is killed: the kernel closes its sockets, and the rank ends although its main thread is stuck, long
    before it would for silence."""

    async def story(channel: Channel) -> None:
        lost: queue.Queue[str] = queue.Queue()
        client = await asyncio.to_thread(channel.client, end=lost.put, silence_s=FOR_EVER_S)
        await channel.server.close()
        await asyncio.to_thread(lost.get, timeout=HANG_S)
        assert lost.empty()
        await asyncio.to_thread(client.close)

    with_channel(story)


@pytest.mark.parametrize("own", [0.4, None], ids=["its own limit", "the daemon's limit"])
def test_a_silent_channel_ends_the_rank(monkeypatch: pytest.MonkeyPatch, own: float | None) -> None:
    """The link is cut: no end of the connection is ever seen, only that the pings stay away."""
    monkeypatch.setattr(control, "PING_S", 60.0)

    async def story(channel: Channel) -> None:
        lost: queue.Queue[str] = queue.Queue()
        channel.server.welcome = replace(channel.server.welcome, silence_s=FOR_EVER_S if own else 0.4)
        client = await asyncio.to_thread(channel.client, silence_s=own, end=lost.put)
        reason = await asyncio.to_thread(lost.get, timeout=HANG_S)
        assert reason == "nothing was heard on the control channel for 0.4 s"
        await asyncio.to_thread(client.close)

    with_channel(story)


def test_the_watchdog_ends_a_rank_that_never_lets_go_of_the_interpreter_lock() -> None:
    """A rank's main thread holds the interpreter's lock for ever (a pathological pattern stands for a stuck library):
    no Python thread of it runs again, the daemon has long closed the channel, and it ends all the same."""
    script = textwrap.dedent("""
        import re, sys
        from laddertron.launchers.control.control_client import ControlClient
        from laddertron.launchers.control.messages import Beat
        client = ControlClient(sys.argv[1], bytes.fromhex(sys.stdin.readline()), 0, 0, Beat, silence_s=1.0)
        client.poll(None)
        sys.setswitchinterval(1000)
        re.match("(a*)*b", "a" * 60)
    """)

    async def story(channel: Channel) -> None:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", script, channel.address),
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert process.stdin is not None
        process.stdin.write(channel.secret.hex().encode() + b"\n")
        ping = asyncio.create_task(keep_pinging(channel))
        await channel.heard.until(lambda: channel.heard.of(Beat))
        channel.server.send(Drain(), 0)
        await asyncio.sleep(0.1)
        ping.cancel()
        await channel.server.close()
        _, err = await asyncio.wait_for(process.communicate(), HANG_S)
        assert process.returncode != 0
        assert b"Timeout" in err or b"ends itself" in err

    async def keep_pinging(channel: Channel) -> None:
        while True:
            channel.server.send(Ping())
            await asyncio.sleep(0.05)

    with_channel(story)
