"""The owner's end of the control channel: one authenticated TCP connection per rank. One server and one secret per
launch; unauthenticated peers are bounded in number, bytes and time.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar, cast

from ...engine.daemon.logs import Sparse
from ...topology.hardware.ports import ANY_PORT, listen, require_one_address
from ...topology.json_codec import ReadError
from . import frames, messages
from .frames import FrameError

T = TypeVar("T")

log = logging.getLogger(__name__)

ENV_ADDRESS = "LADDERTRON_CONTROL"
"""The channel's address, as host:port."""
ENV_SECRET = "LADDERTRON_SECRET"
"""The launch's secret as hex. Never on a command line: those can be read by everyone on a node."""

PING_S = 1.0
WATCHDOG_S = 2.0
"""Seconds after a rank's silence_s by which it has exited, even if only its watchdog could end it."""
QUIET_S = 3.0
"""A rank that has sent nothing for this long gets no pings until it sends again. If only the direction from it is
broken, each ping would delay its exit, and with it the time at which it can be replaced."""
UNREACHABLE_S = 8.0
"""Seconds after which a host whose kernel acknowledges nothing is cut off. Shorter than the least time after which
other ranks give up a collective, so that the host is named and not those that wait for it."""
UNREACHABLE = f"its host has acknowledged nothing for {UNREACHABLE_S:g} s (node down, link cut or packets dropped)"
_NO_ROUTE = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN)
_KEEPALIVE = (
    (socket.TCP_KEEPIDLE, 1),
    (socket.TCP_KEEPINTVL, 1),
    (socket.TCP_USER_TIMEOUT, round(UNREACHABLE_S * 1e3)),
)
"""Also a quiet rank, which gets no pings, is asked by the kernel whether its host is there."""
HANDSHAKE_S = 5.0
SPARE_PEERS = 32
"""Unauthenticated connections in addition to one for each rank. If there are more, the oldest is dropped: a handshake
takes a millisecond, so the oldest one is most likely idle on purpose."""
BACKLOG_LIMIT = 256 << 20
LOGGED_REFUSALS = 20


def new_secret() -> bytes:
    return secrets.token_bytes(frames.SECRET_BYTES)


class ControlHandler(Protocol):
    """Callbacks of the server's owner, on the event loop."""

    def on_message(self, rank: int, message: messages.RankMessage) -> None:
        """Called with a valid message of an authenticated rank; the first one is Hello."""

    def on_gone(self, rank: int, reason: str) -> None:
        """Called when the rank's connection has ended. `reason`: "" for a normal end, else the error; UNREACHABLE: its
        host acknowledges nothing, but the connection has no end yet."""


class ControlServer:
    """Listens on `host` (loopback, or the address of the interface that the ranks' nodes reach) and one of `ports`."""

    def __init__(
        self,
        handler: ControlHandler,
        secret: bytes,
        welcome: messages.Welcome,
        host: str = "127.0.0.1",
        handshake_s: float = HANDSHAKE_S,
        ports: range = ANY_PORT,
    ) -> None:
        require_one_address(host)
        self.handler, self.secret, self.welcome, self.handshake_s = handler, secret, welcome, handshake_s
        self._host, self._ports = host, ports
        self._server: asyncio.Server | None = None
        self._unproven: dict[_Peer, None] = {}
        self.peers: dict[int, _Peer] = {}
        self.pulses: dict[int, _Peer] = {}
        self._greeted: dict[int, str] = {}
        self._doors: dict[int, str] = {}
        self._ticker: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()
        self._refused = 0
        self._sparse = Sparse(1)

    async def start(self) -> str:
        """Returns the address as host:port. Raises OSError if it cannot listen there."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Peer(self), sock=listen(self._host, self._ports))
        loop.set_exception_handler(self._failed)
        self.tick()
        port = self._server.sockets[0].getsockname()[1]
        return f"[{self._host}]:{port}" if ":" in self._host else f"{self._host}:{port}"

    def _failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Limits log lines: while no descriptor is free, the loop retries to accept each second and would log each."""
        error = context.get("exception")
        if not (isinstance(error, OSError) and "accept" in context.get("message", "")):
            loop.default_exception_handler(context)
        elif (left := self._sparse.take()) is not None:
            message = "control channel: no connection can be accepted: %s (%d failures since the last such line)"
            log.error(message, error.strerror, left + 1, extra={"event": "accept"})

    @property
    def connected(self) -> frozenset[int]:
        return frozenset(self.peers)

    @property
    def _peers(self) -> list[_Peer]:
        return [*self.peers.values(), *self.pulses.values(), *self._unproven]

    def send(self, message: messages.ServerMessage, rank: int | None = None) -> None:
        """Sends to one rank, or to all. Skips ranks that are not connected (their end was or will be reported), and
        sends no Ping and Dump to quiet ones."""
        peers = list(self.peers.values()) if rank is None else [p for p in [self.peers.get(rank)] if p]
        if isinstance(message, messages.Ping | messages.Dump):
            peers = [peer for peer in peers if not peer.quiet]
        if isinstance(message, messages.Ping):
            peers += [pulse for at, pulse in self.pulses.items() if self.peers.get(at) in peers]
        payload = messages.to_wire(message)
        for peer in peers:
            peer.send_payload(payload)

    def finish_sending(self) -> None:
        """Closes the sending direction of every connection: a rank that detects it exits, which closes the other."""
        for peer in self._peers:
            peer.finish_sending()

    async def all_gone(self, timeout_s: float | None = None) -> frozenset[int]:
        """Waits for every rank's connection to end; returns the ranks whose did not within timeout_s. None: until each
        rank without an end must have ended itself, since nothing is sent to it any more."""
        if timeout_s is None:
            last = max((peer.sent_at for peer in self._peers), default=0.0)
            timeout_s = max(0.0, last + self.welcome.silence_s + WATCHDOG_S - time.monotonic())
        try:
            async with asyncio.timeout(timeout_s):
                while self.peers:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            pass
        return frozenset(self.peers)

    async def close(self) -> None:
        if self._ticker is not None:
            self._ticker.cancel()
        for peer in self._peers:
            peer.drop("the channel was closed")
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    def tick(self) -> None:
        self._ticker = asyncio.get_running_loop().call_later(PING_S, self.tick)
        self.send(messages.Ping())

    # what peers report

    def peer_came(self, peer: _Peer) -> None:
        if len(self._unproven) >= self.welcome.peers + SPARE_PEERS:
            oldest = next(iter(self._unproven))
            del self._unproven[oldest]
            oldest.drop("too many unauthenticated connections")
        self._unproven[peer] = None

    def peer_proved(self, peer: _Peer, rank: int, pulse: bool) -> None:
        peers = self.pulses if pulse else self.peers
        if not 0 <= rank < self.welcome.peers:
            raise FrameError(f"rank {rank} is not one of {self.welcome.peers}")
        if rank in peers:
            raise FrameError(f"rank {rank} is connected already")
        self._unproven.pop(peer, None)
        peers[rank] = peer

    def peer_greeted(self, rank: int, hostname: str) -> None:
        self._greeted[rank] = hostname
        if len(self._greeted) == self.welcome.peers:
            self.send(messages.Assembled(tuple(self._greeted[at] for at in sorted(self._greeted))))

    def peer_listens(self, rank: int, place: str) -> None:
        self._doors[rank] = place
        if len(self._doors) == self.welcome.peers:
            self.send(messages.Doors(tuple(self._doors[at] for at in sorted(self._doors))))

    def pulse_heard(self, rank: int) -> None:
        if (peer := self.peers.get(rank)) is not None:
            peer.heard()
            self.handler.on_message(rank, messages.Pulse())

    def peer_went(self, peer: _Peer, rank: int | None, reason: str) -> None:
        self._unproven.pop(peer, None)
        if rank is not None and self.pulses.get(rank) is peer:
            del self.pulses[rank]
            if reason == UNREACHABLE and rank in self.peers:
                self.handler.on_gone(rank, reason)
            return
        if rank is None or self.peers.get(rank) is not peer:
            self._refused += 1  # strangers must not fill the log either
            # a caller that only looks whether the port is open, as hosts of missing ranks do, is no stranger
            level = logging.WARNING if peer.spoke and self._refused <= LOGGED_REFUSALS else logging.DEBUG
            log.log(
                level, "control channel: refused %s (number %d): %s", peer.where, self._refused, reason or "it left"
            )
            return
        del self.peers[rank]
        self._changed.set()
        self.handler.on_gone(rank, reason)


class _Peer(asyncio.Protocol):
    """One connection: handshake, Hello, then messages."""

    def __init__(self, server: ControlServer) -> None:
        self._server = server
        self._reader, self._writer = frames.FrameReader(), frames.FrameWriter()
        self._nonce = secrets.token_bytes(frames.NONCE_BYTES)
        self._rank: int | None = None
        self._greeted = self._pulse = False
        self._reason = ""
        self._ended = self._sent_all = self.spoke = False
        self.heard_at = self.sent_at = time.monotonic()
        self.where = "?"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.where = str(self._transport.get_extra_info("peername"))
        self._transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._expect("authentication", self._server.handshake_s)
        self._server.peer_came(self)
        self._send_plain(messages.Challenge(self._nonce.hex()))

    def _expect(self, what: str, seconds: float) -> None:
        text = f"no {what} within {seconds:g} s"
        self._deadline = asyncio.get_running_loop().call_later(seconds, self.drop, text)

    @property
    def quiet(self) -> bool:
        return time.monotonic() - self.heard_at > QUIET_S

    def heard(self) -> None:
        was_quiet, self.heard_at = self.quiet, time.monotonic()
        if was_quiet and self._greeted:
            self.send_payload(messages.to_wire(messages.Ping()))

    def data_received(self, data: bytes) -> None:
        self.heard()
        self.spoke = True
        self._reader.feed(data)
        try:
            while not self._ended and (payload := self._reader.next()) is not None:
                self._take(payload)
        except (FrameError, ReadError) as error:
            self.drop(str(error))

    def connection_lost(self, error: Exception | None) -> None:
        self._ended = True
        self._deadline.cancel()
        if self._pulse and isinstance(error, OSError) and error.errno in _NO_ROUTE:
            self._reason = UNREACHABLE
        self._server.peer_went(self, self._rank, self._reason or (str(error) if error else ""))

    def send_payload(self, payload: bytes) -> None:
        if self._ended or self._sent_all or self._transport.is_closing():
            return
        if self._transport.get_write_buffer_size() > BACKLOG_LIMIT:
            self.drop(f"does not read: {BACKLOG_LIMIT >> 20} MiB wait to be sent")
            return
        self.sent_at = time.monotonic()
        self._transport.write(self._writer.frame(payload))

    def finish_sending(self) -> None:
        if not (self._ended or self._sent_all or self._transport.is_closing()):
            self._sent_all = True
            self._transport.write_eof()

    def drop(self, reason: str) -> None:
        """Closes the connection at once; `connection_lost` reports it. Ignores later bytes of the peer."""
        if self._ended:
            return
        self._ended = True
        self._reason = reason
        self._transport.abort()

    def _send_plain(self, message: messages.Challenge | messages.Proof) -> None:
        self._transport.write(self._writer.frame(messages.to_wire(message)))

    def _take(self, payload: bytes) -> None:
        if self._rank is None:
            self._prove(messages.from_unproven(messages.Answer, payload))
            return
        message = cast(messages.RankMessage, messages.from_wire(payload, "rank"))
        if isinstance(message, messages.Pulse) != self._pulse:
            raise FrameError("a pulse has a connection of its own")
        if self._pulse:
            self._server.pulse_heard(self._rank)
            return
        if isinstance(message, messages.Hello) == self._greeted:
            raise FrameError("Hello comes first, and once")
        if isinstance(message, messages.Hello):
            if message.rank != self._rank:
                raise FrameError(f"Hello of rank {message.rank} on the connection of rank {self._rank}")
            self._greeted = True
            self._deadline.cancel()
            self._server.peer_greeted(self._rank, message.hostname)
        if isinstance(message, messages.Door):
            self._server.peer_listens(self._rank, message.place)
        self._server.handler.on_message(self._rank, message)

    def _prove(self, answer: messages.Answer) -> None:
        secret, theirs, rank = self._server.secret, bytes.fromhex(answer.nonce), answer.rank
        if not frames.same_mac(answer.mac, frames.answer_mac(secret, self._nonce, theirs, rank, answer.pulse)):
            raise FrameError("it does not know this launch's secret")
        self._server.peer_proved(self, rank, answer.pulse)
        self._rank, self._pulse = rank, answer.pulse
        self._send_plain(messages.Proof(frames.proof_mac(secret, self._nonce, theirs, rank)))
        self._reader.key = frames.direction_key(secret, self._nonce, theirs, "rank")
        self._writer.key = frames.direction_key(secret, self._nonce, theirs, "server")
        self._deadline.cancel()
        if not self._pulse:
            self._expect("Hello", max(self._server.handshake_s, self._server.welcome.silence_s))
            self.send_payload(messages.to_wire(self._server.welcome))
            return
        line = self._transport.get_extra_info("socket")
        line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            line.setsockopt(socket.IPPROTO_TCP, option, value)


class ControlThread:
    """A ControlServer on its own thread and event loop: it sends pings and records arrival times even if the caller's
    loop is busy. Its methods are for the loop that calls `start`, on which the handler is called in the order of
    arrival; `close` must be called last."""

    def __init__(
        self, handler: ControlHandler, secret: bytes, welcome: messages.Welcome, host: str, ports: range = ANY_PORT
    ) -> None:
        self._handler = handler
        self.server = ControlServer(self, secret, welcome, host, ports=ports)
        self._loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._loop.run_forever, name="control channel", daemon=True)
        self._owner: asyncio.AbstractEventLoop
        self._news: deque[Callable[[], None]] = deque()
        self.heard: dict[int, float] = {}
        """Arrival time of each rank's last message, in monotonic seconds; current even if the caller's loop is busy."""

    async def start(self) -> str:
        """Returns the address as host:port. Raises OSError if it cannot listen there, or start its thread."""
        self._owner = asyncio.get_running_loop()
        try:
            self.thread.start()
        except RuntimeError as error:
            raise OSError(errno.EAGAIN, str(error)) from error
        return await self._run(self.server.start())

    @property
    def connected(self) -> frozenset[int]:
        return self.server.connected

    def send(self, message: messages.ServerMessage, rank: int | None = None) -> None:
        with contextlib.suppress(RuntimeError):  # closed: the ranks are gone
            self._loop.call_soon_threadsafe(self.server.send, message, rank)

    def finish_sending(self) -> None:
        self._loop.call_soon_threadsafe(self.server.finish_sending)

    async def all_gone(self, timeout_s: float | None = None) -> frozenset[int]:
        return await self._run(self.server.all_gone(timeout_s)) if self.thread.is_alive() else frozenset()

    async def close(self) -> None:
        if self.thread.is_alive():
            await self._run(self.server.close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            await asyncio.to_thread(self.thread.join)
        self._loop.close()

    async def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    # on the channel's thread

    def on_message(self, rank: int, message: messages.RankMessage) -> None:
        self.heard[rank] = time.monotonic()
        self._pass(lambda: self._handler.on_message(rank, message))

    def on_gone(self, rank: int, reason: str) -> None:
        self._pass(lambda: self._handler.on_gone(rank, reason))

    def _pass(self, news: Callable[[], None]) -> None:
        self._news.append(news)
        if len(self._news) == 1:  # else the owner is on its way already
            with contextlib.suppress(RuntimeError):  # its loop was closed
                self._owner.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        for left in range(len(self._news) - 1, -1, -1):
            try:
                self._news[0]()
            except Exception:  # one message must not hold up those behind it
                log.exception("a message of a rank could not be taken")
            self._news.popleft()
            if left == 0 and self._news:
                self._owner.call_soon(self._deliver)  # others of this loop have their turn first
