"""Connections: counted before TLS, refused at the limit, closed in a fixed order under pressure."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import resource
import socket
import ssl
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from ...openai.errors import ApiError
from ..logs import Sparse
from ..store.disk_watch import DiskWatch

log = logging.getLogger(__name__)

_DESCRIPTORS = 512  # of this process besides its connections: store, workers, ranks, probes
_ACCEPTS = 32  # in one turn of the loop: a closed socket's descriptor is free a turn later
_REFUSED, _REFUSED_SECONDS = 32, 1.0  # half closed connections that were refused, so that their clients read why
_WAITING, _WAITING_SECONDS, _AGAIN_SECONDS = 32, 0.2, 0.02  # for room, before a connection is refused
_LINGERING = 32
_RETRY_SECONDS = 0.1


MAX_HEADER_BYTES = 16 << 10


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Limits of a connection. Seconds, bytes."""

    max_connections: int = 1024
    max_per_address: int = 512
    header_timeout: float = 10.0
    keep_alive: float = 75.0
    tls_cert: str | None = None
    tls_key: str | None = None
    write_timeout: float = 60.0
    keyed: bool = False
    """Whether an address may have clients with several keys."""
    gives_way: float = 1.0
    """Seconds for which an idle connection is kept at the limit: its request may not have been read yet."""
    watch: DiskWatch = field(default_factory=DiskWatch)


def spare(most: int) -> int:
    """The part of a limit on connections that is for clients whose request has not arrived yet."""
    return most // 16


class Slot:
    """The slot of one connection; `end` closes it at once."""

    def __init__(self, address: str, end: Callable[[], object]) -> None:
        self.address, self.end = address, end


class Room:
    """The open connections. At the limit, a new connection replaces that of a refused request, or the one that has been
    idle for longest, so that idle connections do not lock out other clients."""

    def __init__(self, options: ServerOptions) -> None:
        self._options = options
        self._open: set[Slot] = set()
        self._idle: dict[Slot, float] = {}  # since when; the longest idle one first
        self._lingering: dict[Slot, None] = {}
        self._of: Counter[str] = Counter()

    def refuse(self, slot: Slot) -> str:
        """Admits a connection, or returns the reason why not."""
        most, address = self._options.max_per_address, slot.address
        if self._of[address] >= most and not self.give_up(address) and not self._all_busy(address):
            return f"{most} connections of {address} are open"
        if len(self._open) >= self._options.max_connections and not self.give_up():
            return "too many open connections"
        self._open.add(slot)
        self._idle[slot] = time.monotonic()
        self._of[address] += 1
        return ""

    def _all_busy(self, address: str) -> bool:
        """Whether a connection beyond the address's limit may be another key's or a probe's: the others have requests,
        and few are beyond it."""
        most = self._options.max_per_address
        fits = self._options.keyed and self._of[address] < most + spare(most)
        return fits and not any(slot.address == address for slot in self._idle)

    def moved(self, slot: Slot, idle: bool) -> None:
        """Records that the connection has sent a request, or was answered."""
        if slot not in self._open or slot in self._lingering:
            return
        if not idle:
            self._idle.pop(slot, None)
        else:
            self._idle.setdefault(slot, time.monotonic())

    def linger(self, slot: Slot) -> None:
        """Keeps the connection of a request that was refused before its body was read for a moment; it is the first to
        be closed at the limit."""
        if len(self._lingering) >= min(_LINGERING, max(1, self._options.max_connections // 4)):
            self._end(next(iter(self._lingering)))
        if slot in self._open:
            self._idle.pop(slot, None)
            self._lingering[slot] = None

    def left(self, slot: Slot) -> None:
        if slot in self._open:
            self._open.discard(slot)
            self._idle.pop(slot, None)
            self._lingering.pop(slot, None)
            self._of[slot.address] -= 1
            if not self._of[slot.address]:
                del self._of[slot.address]

    def give_up(self, address: str | None = None) -> bool:
        """Closes one connection (of `address`) that may be closed; False if there is none."""
        old = time.monotonic() - self._options.gives_way
        oldest = next((one for one in self._lingering if address in (None, one.address)), None) or next(
            (one for one, at in self._idle.items() if at < old and address in (None, one.address)), None
        )
        if oldest is not None:
            self._end(oldest)
        return oldest is not None

    def _end(self, slot: Slot) -> None:
        self.left(slot)
        slot.end()


class Acceptor:
    """Accepts the connections on `listener` that `room` admits, on the running loop. Has the interface of uvicorn's
    asyncio servers."""

    def __init__(
        self,
        listener: socket.socket,
        room: Room,
        make: Callable[[Slot], asyncio.Protocol],
        tls: ssl.SSLContext | None,
        handshake_seconds: float,
    ) -> None:
        self._listener, self._room, self._make = listener, room, make
        self._tls, self._handshake_seconds = tls, handshake_seconds
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[None]] = set()
        self._refused: deque[socket.socket] = deque()
        self._waiting: dict[socket.socket, asyncio.TimerHandle] = {}
        self._sparse = Sparse(1)
        self._retry: asyncio.TimerHandle | None = None
        self._listen()

    def close(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
        self._loop.remove_reader(self._listener)
        for task in self._opening:
            task.cancel()
        for timer in self._waiting.values():
            timer.cancel()
        for connection in (*self._waiting, *self._refused):
            connection.close()
        self._waiting.clear()
        self._refused.clear()

    async def wait_closed(self) -> None:
        await asyncio.gather(*self._opening, return_exceptions=True)

    def _listen(self) -> None:
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(_ACCEPTS):
            try:
                connection, peer = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._fail(error)
                return
            connection.setblocking(False)
            self._take(connection, str(peer[0]), self._loop.time() + _WAITING_SECONDS)

    def _fail(self, error: OSError) -> None:
        if (left := self._sparse.take()) is not None:
            message = "no connection can be accepted: %s (%d failures since the last such line)"
            log.error(message, error.strerror, left + 1, extra={"event": "accept"})
        if self._refused:
            self._refused.popleft().close()
        else:
            self._room.give_up()
        self._loop.remove_reader(self._listener)
        self._retry = self._loop.call_later(_RETRY_SECONDS, self._listen)

    def _take(self, connection: socket.socket, address: str, until: float) -> None:
        slot = Slot(address, connection.close)
        self._waiting.pop(connection, None)
        if why := self._room.refuse(slot):
            if self._loop.time() < until and len(self._waiting) < _WAITING:
                again = self._loop.call_later(_AGAIN_SECONDS, self._take, connection, address, until)
                self._waiting[connection] = again
            else:
                self._refuse(connection, why)
            return
        task = self._loop.create_task(self._open(connection, slot))
        slot.end = task.cancel
        self._opening.add(task)
        task.add_done_callback(lambda _: self._opened(task, connection, slot))

    async def _open(self, connection: socket.socket, slot: Slot) -> None:
        """Gives the connection to the protocol, after the handshake if it uses TLS."""
        seconds = None if self._tls is None else self._handshake_seconds
        await self._loop.connect_accepted_socket(
            lambda: self._make(slot), connection, ssl=self._tls, ssl_handshake_timeout=seconds
        )

    def _opened(self, task: asyncio.Task[None], connection: socket.socket, slot: Slot) -> None:
        self._opening.discard(task)
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is not None:  # no handshake, or given up before its end
            self._room.left(slot)
            connection.close()
        if error is not None and not isinstance(error, (OSError, asyncio.CancelledError)):
            log.error("a connection of %s could not be opened", slot.address, exc_info=error)

    def _refuse(self, connection: socket.socket, why: str) -> None:
        if self._tls is not None:
            connection.close()
            return
        body = json.dumps(ApiError(why, "busy", status=503).to_json())
        head = f"HTTP/1.1 503 Service Unavailable\r\ncontent-length: {len(body)}\r\n"
        rest = "content-type: application/json\r\nretry-after: 5\r\nconnection: close\r\n\r\n"
        with contextlib.suppress(OSError):
            connection.send((head + rest + body).encode())
            connection.shutdown(socket.SHUT_WR)
        if len(self._refused) >= _REFUSED:
            self._refused.popleft().close()
        self._refused.append(connection)
        self._loop.call_later(_REFUSED_SECONDS, self._forget, connection)

    def _forget(self, connection: socket.socket) -> None:
        with contextlib.suppress(ValueError):
            self._refused.remove(connection)
        connection.close()


def connections_within(limit: int) -> int:
    """The number of connections that this process may have, at most `limit`. Raises its limit on descriptors as far as
    the system allows; beyond that limit even the probes' connections could not be accepted."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = limit + _DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < need:
        soft = need if hard == resource.RLIM_INFINITY else min(need, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    fit = limit if soft == resource.RLIM_INFINITY else max(1, min(limit, soft - _DESCRIPTORS))
    if fit < limit:
        log.warning("%d connections at most, not limits.max_connections=%d: raise `ulimit -n` to %d", fit, limit, need)
    return fit
