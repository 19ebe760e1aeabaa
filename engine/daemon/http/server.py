"""uvicorn with bounds: connections, bytes of headers, seconds that headers may take; signals are the daemon's own.

The only file that knows uvicorn. Its HTTP protocol is h11's, in Python: no C parser to keep patched.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import resource
import socket
import ssl
import time
from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Protocol

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from ...openai.errors import ApiError

log = logging.getLogger(__name__)

_FRAMING_BYTES, _FRAMING = 256 << 10, 16
"""What may come beyond a body, and how often a body's size may: chunks have headers, whose extensions have no end."""
_DESCRIPTORS = 256  # of this process beside its connections: store, workers, ranks, probes
_GRACEFUL_SECONDS = 3  # requests have been drained by then: what is left are clients that do not read


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """What a connection may do. Seconds, bytes."""

    max_connections: int = 1024
    max_per_address: int = 512
    max_header_bytes: int = 16384
    header_timeout: float = 10.0
    tls_cert: str | None = None
    tls_key: str | None = None
    write_timeout: float = 60.0
    gives_way: float = 1.0
    """How long a connection that asks nothing is kept though there is no room: what it has sent may not be read yet."""


class _Idler(Protocol):
    client: tuple[str, int] | None
    transport: asyncio.Transport

    @property
    def idle(self) -> bool: ...


class _Room:
    """Which connections are open. Where there is no room for one more, the one that has asked nothing for longest
    gives way, so that silent connections keep nobody out."""

    def __init__(self, options: ServerOptions) -> None:
        self._options = options
        self._open: dict[_Idler, None] = {}
        self._idle: dict[_Idler, float] = {}  # since when; the longest idle one first
        self._of: Counter[str] = Counter()

    def refuse(self, one: _Idler) -> str:
        """Takes it in, or says why not."""
        most, address = self._options.max_per_address, _address(one)
        if self._of[address] >= most and not self._drop(address):
            return f"{most} connections of {address} are open"
        if len(self._open) >= self._options.max_connections and not self._drop(None):
            return "too many open connections"
        self._open[one], self._idle[one] = None, time.monotonic()
        self._of[address] += 1
        return ""

    def moved(self, one: _Idler) -> None:
        """It has asked, or was answered."""
        if one in self._open and one.idle != (one in self._idle):
            if one.idle:
                self._idle[one] = time.monotonic()
            else:
                del self._idle[one]

    def left(self, one: _Idler) -> None:
        if one in self._open:
            del self._open[one]
            self._idle.pop(one, None)
            self._of[address := _address(one)] -= 1
            if not self._of[address]:
                del self._of[address]

    def _drop(self, address: str | None) -> bool:
        old = time.monotonic() - self._options.gives_way
        found = next((one for one, at in self._idle.items() if at < old and address in (None, _address(one))), None)
        if found is not None:
            self.left(found)
            found.transport.abort()
        return found is not None


def _address(one: _Idler) -> str:
    return one.client[0] if one.client else ""


class _Bounded(H11Protocol):
    """A connection within `options`; uvicorn makes one for each and passes no arguments of ours."""

    options: ServerOptions
    room: _Room
    _timer: asyncio.TimerHandle | None = None
    _writing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._h11_next, self.conn.next_event = self.conn.next_event, self._next_event  # type: ignore[method-assign]
        self._came = self._body = 0
        if why := self.room.refuse(self):
            body = json.dumps(ApiError(why, "busy", status=503).to_json())
            head = f"HTTP/1.1 503 Service Unavailable\r\ncontent-length: {len(body)}\r\n"
            rest = "content-type: application/json\r\nretry-after: 5\r\nconnection: close\r\n\r\n"
            transport.write((head + rest + body).encode())
            transport.close()
            return
        self._arm()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._came += len(data)
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:
            self._arm()  # headers have begun, and are not whole
        else:
            self._disarm()
        self.room.moved(self)
        if self._came > _FRAMING_BYTES + _FRAMING * self._body:
            self.transport.abort()

    def _next_event(self) -> Any:
        """h11's next event; counts what of the bytes that came is body."""
        event = self._h11_next()
        if isinstance(event, h11.Data):
            self._body += len(event.data)
        elif isinstance(event, h11.Request):
            self._came = self._body = 0
        return event

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self.room.left(self)
        super().connection_lost(exc)
        self.resume_writing()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.room.moved(self)

    @property
    def idle(self) -> bool:
        """Nothing is asked here, or not yet in whole."""
        return self.cycle is None or self.cycle.response_complete

    def pause_writing(self) -> None:
        super().pause_writing()
        # a client that does not read: whoever writes to it would wait for ever
        self._writing = self.loop.call_later(self.options.write_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None

    def send_400_response(self, msg: str) -> None:
        self._disarm()
        too_long = (
            self.conn.their_state is h11.ERROR and len(self.conn.trailing_data[0]) > self.options.max_header_bytes
        )
        status = 431 if too_long else 400
        message = f"headers of more than {self.options.max_header_bytes} bytes" if too_long else "not an HTTP request"
        body = json.dumps(ApiError(message, "invalid_http", status=status).to_json()).encode()
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
        ]
        with contextlib.suppress(h11.LocalProtocolError):  # a response is under way
            self.transport.write(self.conn.send(h11.Response(status_code=status, headers=headers)) or b"")
            self.transport.write(self.conn.send(h11.Data(data=body)) or b"")
        self.transport.close()

    def _arm(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self.options.header_timeout, self.transport.close)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def protocol_of(options: ServerOptions) -> type[H11Protocol]:
    """The class of a server's connections."""
    return type("Bounded", (_Bounded,), {"options": options, "room": _Room(options)})


class HttpServer(uvicorn.Server):
    """Serves until `should_exit`; signals are left to whoever runs it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def connections_within(wanted: int) -> int:
    """How many connections this process may hold, `wanted` at most: its limit on descriptors is raised as far as the
    system lets it. Beyond it not even the probes' connections could be accepted."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = wanted + _DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < need:
        soft = need if hard == resource.RLIM_INFINITY else min(need, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    fit = wanted if soft == resource.RLIM_INFINITY else max(1, min(wanted, soft - _DESCRIPTORS))
    if fit < wanted:
        log.warning("%d connections at most, not limits.max_connections=%d: raise `ulimit -n` to %d", fit, wanted, need)
    return fit


def listen(host: str, port: int) -> socket.socket:
    """The listening socket: bound before anything is launched, so that a port in use is known at once. Raises
    OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def make_server(app: Any, options: ServerOptions) -> HttpServer:
    """Raises OSError or ssl.SSLError if the certificate cannot be used."""
    config = uvicorn.Config(
        app,
        http=protocol_of(options),
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=options.max_header_bytes,
        timeout_keep_alive=15,
        timeout_graceful_shutdown=_GRACEFUL_SECONDS,
        ssl_certfile=options.tls_cert,
        ssl_keyfile=options.tls_key,
        ssl_version=ssl.PROTOCOL_TLS_SERVER,
    )
    config.load()
    return HttpServer(config)
