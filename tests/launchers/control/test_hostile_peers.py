"""Peers without the secret, or that break the channel's protocol: dropped with the reason; none holds up others."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
from laddertron.launchers.control import control, frames
from laddertron.launchers.control.control import ControlServer, new_secret
from laddertron.launchers.control.control_client import ControlClient, address_and_secret
from laddertron.launchers.control.frames import FrameWriter
from laddertron.launchers.control.messages import (
    Beat,
    Dump,
    Hello,
    Submit,
    Welcome,
    to_wire,
)
from test_control import RANK_MESSAGES, REQUEST, Channel, Recorder, dumped, with_channel
from waiting import FOR_EVER_S


def test_another_secret_gets_nowhere() -> None:
    """A rank of an older launch: refused, and the handler hears nothing of it."""

    async def story(channel: Channel) -> None:
        with pytest.raises(ConnectionError, match="another secret"):
            await asyncio.to_thread(ControlClient, channel.address, new_secret(), 0, 0, Beat, watchdog=False)
        assert (channel.heard.messages, channel.heard.gone) == ([], [])

    with_channel(story)


def test_a_server_without_the_secret_is_refused_by_the_rank() -> None:
    """Someone else listens where the daemon did: the rank must not take its orders."""
    listener = socket.create_server(("127.0.0.1", 0))

    def impostor() -> None:
        connection, _ = listener.accept()
        with connection:
            writer = FrameWriter()
            connection.sendall(writer.frame(dumped({"nonce": "00" * 32})))
            connection.recv(4096)
            connection.sendall(writer.frame(dumped({"mac": "00" * 32})))
            connection.recv(1)

    thread = threading.Thread(target=impostor)
    thread.start()
    with pytest.raises(ConnectionError, match="not this launch's daemon"):
        ControlClient(f"127.0.0.1:{listener.getsockname()[1]}", new_secret(), 0, 0, Beat, watchdog=False)
    thread.join()
    listener.close()


@pytest.mark.parametrize(("rank", "why"), [(0, "connected already"), (7, "not one of 2")])
def test_a_second_rank_0_or_a_rank_beyond_the_world_is_refused(
    rank: int, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def story(channel: Channel) -> None:
        first = await asyncio.to_thread(channel.client, 0)
        with pytest.raises(ConnectionError):
            await asyncio.to_thread(channel.client, rank)
        assert why in caplog.text
        assert channel.server.connected == {0}
        assert channel.heard.gone == []
        await asyncio.to_thread(first.close)

    with_channel(story)


async def prove(channel: Channel, rank: int = 1) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, FrameWriter]:
    """By hand: a proven rank's connection, to say wrong things on."""
    host, _, port = channel.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    theirs = bytes.fromhex(json.loads(await read_frame(reader))["nonce"])
    ours = bytes(32)
    mac = frames.answer_mac(channel.secret, theirs, ours, rank)
    writer.write(FrameWriter().frame(dumped({"nonce": ours.hex(), "rank": rank, "mac": mac})))
    await read_frame(reader)
    sealed = FrameWriter()
    sealed.key = frames.direction_key(channel.secret, theirs, ours, "rank")
    return reader, writer, sealed


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    return await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big"))


async def ended(reader: asyncio.StreamReader) -> None:
    """Reads until the other side ends the connection."""
    try:
        while await reader.read(1 << 16):
            pass
    except ConnectionResetError:
        pass


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (to_wire(Beat()), "Hello comes first"),
        (to_wire(Hello(0, 0, "x", 1, 1, "", "")), "Hello of rank 0 on the connection of rank 1"),
        (b'{"type": "submit", "request": {}}', "type: expected one of"),
        (b'{"type": "hello"}', "hello.rank: missing"),
    ],
)
def test_a_proven_rank_that_breaks_the_protocol_is_dropped_with_the_reason(data: bytes, why: str) -> None:
    async def story(channel: Channel) -> None:
        reader, writer, sealed = await prove(channel)
        writer.write(sealed.frame(data))
        await ended(reader)
        writer.close()
        await channel.heard.until(lambda: channel.heard.gone)
        ((rank, reason),) = channel.heard.gone
        assert rank == 1
        assert why in reason

    with_channel(story)


def test_a_slow_rank_may_greet_after_the_time_for_a_handshake() -> None:
    """It is no stranger any more: on a busy machine its Hello takes longer. A stranger who came later is dropped."""

    async def story(channel: Channel) -> None:
        _, writer, sealed = await prove(channel)
        host, _, port = channel.address.rpartition(":")
        idle, stranger = await asyncio.open_connection(host, int(port))
        await ended(idle)
        writer.write(sealed.frame(to_wire(Hello(1, 1, "x", 1, 1, "", ""))))
        await channel.heard.until(lambda: channel.heard.of(Hello))
        writer.close()
        stranger.close()

    with_channel(story, handshake_s=0.5)


def test_a_quiet_rank_hears_nothing_until_it_speaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that says nothing is pinged for a while and then no more, so that its end can be told; a word of it, and
    it is pinged at once. A Submit is sent in any case."""
    monkeypatch.setattr(control, "PING_S", 0.02)
    monkeypatch.setattr(control, "QUIET_S", FOR_EVER_S)

    async def story(channel: Channel) -> None:
        reader, writer, sealed = await prove(channel)
        ticked, tick = asyncio.Event(), channel.server.tick

        def told() -> None:
            tick()
            ticked.set()

        async def ticks(count: int) -> None:
            for _ in range(count):
                ticked.clear()
                await ticked.wait()

        monkeypatch.setattr(channel.server, "tick", told)
        writer.write(sealed.frame(to_wire(Hello(1, 1, "x", 1, 1, "", ""))))
        await channel.heard.until(lambda: channel.heard.of(Hello))
        (peer,) = channel.server.peers.values()
        while peer.sent_at <= peer.heard_at:  # until it is pinged after its last word
            await ticks(1)
        peer.heard_at -= FOR_EVER_S + 1.0
        assert peer.quiet
        last = peer.sent_at
        await ticks(30)
        channel.server.send(Dump(1))
        assert peer.sent_at == last
        assert await reader.read(1 << 16)  # what came until then
        channel.server.send(Submit(REQUEST), 1)
        assert len(await reader.read(1 << 16)) > len(to_wire(Submit(REQUEST)))
        monkeypatch.setattr(control, "PING_S", FOR_EVER_S)
        await ticks(1)
        writer.write(sealed.frame(to_wire(Beat())))
        assert await reader.read(1 << 16)
        writer.close()

    with_channel(story)


def test_a_rank_without_an_end_is_gone_once_it_must_have_ended_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut off an hour after the last that was sent to it, which here is all but half a second ago: that long, and no
    longer, the launch waits for its end; a rank that ended is not waited for."""
    monkeypatch.setattr(control, "PING_S", FOR_EVER_S)
    monkeypatch.setattr(control, "WATCHDOG_S", FOR_EVER_S)

    async def story(channel: Channel) -> None:
        channel.server.welcome = replace(channel.server.welcome, silence_s=0.0)
        for rank in (0, 1):
            reader, writer, sealed = await prove(channel, rank)
            writer.write(sealed.frame(to_wire(Hello(rank, rank, "x", 1, 1, "", ""))))
            if rank == 0:
                writer.close()
        await channel.heard.until(lambda: channel.heard.gone and len(channel.heard.messages) == 2)
        began = time.monotonic()
        channel.server.send(Submit(REQUEST), 1)
        (peer,) = channel.server.peers.values()
        assert peer.sent_at >= began
        channel.server.finish_sending()
        peer.sent_at -= FOR_EVER_S - 0.5
        assert await channel.server.all_gone() == frozenset({1})
        assert time.monotonic() - began >= 0.5
        del reader
        writer.close()

    with_channel(story)


def test_a_recorded_session_cannot_be_replayed() -> None:
    """What an honest rank sent is sent again, byte for byte, on a new connection: the new nonce makes it worthless."""

    async def story(channel: Channel) -> None:
        host, _, port = channel.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        theirs = bytes.fromhex(json.loads(await read_frame(reader))["nonce"])
        mac = frames.answer_mac(channel.secret, theirs, bytes(32), 0)
        answer = FrameWriter().frame(dumped({"nonce": bytes(32).hex(), "rank": 0, "mac": mac}))
        writer.write(answer)
        await read_frame(reader)
        writer.close()
        await channel.heard.until(lambda: channel.heard.gone)
        reader, writer = await asyncio.open_connection(host, int(port))
        await read_frame(reader)
        writer.write(answer)
        await ended(reader)
        writer.close()
        assert len(channel.heard.gone) == 1
        assert channel.heard.messages == []

    with_channel(story)


def test_two_hundred_idle_connections_keep_nobody_out_and_end_in_time() -> None:
    """200 sockets connect and say nothing, or one byte: an honest rank still gets in, long before their time for a
    handshake is over; and all of them are closed when it is."""

    async def crowd(channel: Channel) -> list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        host, _, port = channel.address.rpartition(":")
        idle = [await asyncio.open_connection(host, int(port)) for _ in range(200)]
        for _, writer in idle[::2]:
            writer.write(b"\0")
        return idle

    async def honest(channel: Channel) -> None:
        idle = await crowd(channel)
        client = await asyncio.to_thread(channel.client)
        assert channel.server.connected == {0}
        await asyncio.to_thread(client.close)
        for _, writer in idle:
            writer.close()

    async def alone(channel: Channel) -> None:
        idle = await crowd(channel)
        await asyncio.gather(*(ended(reader) for reader, _ in idle))
        for _, writer in idle:
            writer.close()

    with_channel(honest, handshake_s=FOR_EVER_S)
    with_channel(alone, handshake_s=0.5)


def test_fuzz_2000_connections(run_seed: int) -> None:
    """Seeded garbage: half of it from strangers (random bytes, mutated handshakes), half from proven ranks (mutated
    messages under a right seal, random lengths). Every connection is ended by the server, nothing but ReadError and
    FrameError happens, memory stays, and afterwards an honest rank is served."""
    rng = random.Random(run_seed)
    crashes: list[dict[str, Any]] = []

    def garbage(size: int) -> bytes:
        return rng.randbytes(rng.randrange(1, size))

    def mutated(payload: bytes) -> bytes:
        data = bytearray(payload)
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(data))
            data[at : at + rng.randrange(3)] = garbage(4) if rng.random() < 0.5 else bytes([rng.choice(b'{}[]",:0-9e')])
        return bytes(data)

    async def stranger(channel: Channel) -> None:
        host, _, port = channel.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        nonce = json.loads(await read_frame(reader))["nonce"]
        answer = dumped({"nonce": nonce, "rank": 1, "mac": "00" * 32})
        plain = FrameWriter()
        attempts = [garbage(3000), plain.frame(mutated(answer)), garbage(5)]
        writer.write(rng.choice(attempts))
        await finish(reader, writer)

    async def traitor(channel: Channel) -> None:
        reader, writer, sealed = await prove(channel)
        writer.write(sealed.frame(to_wire(Hello(1, 0, "x", 1, 1, "b", "v"))))
        payload = to_wire(rng.choice(RANK_MESSAGES))
        writer.write(sealed.frame(mutated(payload)) if rng.random() < 0.8 else garbage(3000))
        await finish(reader, writer)

    async def finish(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if writer.can_write_eof():
            with contextlib.suppress(OSError):
                writer.write_eof()
        await ended(reader)
        writer.close()

    async def story(channel: Channel) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: crashes.append(context))
        for index in range(2000):
            await (stranger if index % 2 else traitor)(channel)
        await channel.heard.until(lambda: len(channel.heard.gone) == 1000)
        assert crashes == []
        assert channel.server.connected == frozenset()
        client = await asyncio.to_thread(channel.client)
        await channel.heard.until(lambda: channel.heard.of(Beat))
        await asyncio.to_thread(client.close)

    with_channel(story)


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::"])  # noqa: S104
def test_it_listens_on_one_named_address_only(host: str) -> None:
    with pytest.raises(ValueError, match="name one address"):
        ControlServer(Recorder(), new_secret(), Welcome("", 0, 1, ""), host)


def test_the_secret_is_taken_out_of_the_environment() -> None:
    """Children of a rank (tokenisers, compilers) must not inherit it."""
    environ = {"LADDERTRON_CONTROL": "127.0.0.1:9", "LADDERTRON_SECRET": "ab" * 32}
    assert address_and_secret(environ) == ("127.0.0.1:9", bytes.fromhex("ab" * 32))
    assert environ == {"LADDERTRON_CONTROL": "127.0.0.1:9"}
    with pytest.raises(ValueError, match="workers are started by"):
        address_and_secret(environ)
