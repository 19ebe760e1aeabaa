"""uvicorn with limits on connections, header bytes and header time. HTTP is parsed by h11, without C code."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import ssl
import time
from collections import deque
from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from ...openai.errors import ApiError
from .authority import authority_of, origin_form
from .connections import MAX_HEADER_BYTES, Acceptor, Room, ServerOptions, Slot
from .tls import TlsFault, check_pair, load_pair

log = logging.getLogger(__name__)
_FRAMING_BYTES, _FRAMING = 256 << 10, 16
"""Limits on framing in addition to a body: bytes, and a multiple of its size, since chunk headers may have extensions.
"""
_PARSED_BYTES, _PARSING_SECONDS = 4096, 0.02
"""Bytes of heads and chunked bodies that are parsed at once; seconds of one turn of the event loop."""
_LEAVING_SECONDS = 1.0
_RENEWAL_TICKS = 100  # of uvicorn's, ten a second
_GRACEFUL_SECONDS = 3  # requests have been drained by then: what is left are clients that do not read


class ParsingTurns:
    """Divides the time to parse what has arrived between connections and turns of the event loop: h11 takes 10 us for a
    chunk, and 256 KiB may be 40,000 chunks."""

    def __init__(self) -> None:
        self._waiting: deque[_Bounded] = deque()
        self._began: float | None = None  # in this turn of the loop

    def enter(self, connection: _Bounded) -> None:
        """Parses now, in order, as far as this turn has time left."""
        if connection not in self._waiting:
            self._waiting.append(connection)
        if self._began is None:
            self._begin()
        else:
            self._parse()

    def _begin(self) -> None:
        self._began = time.perf_counter()
        asyncio.get_running_loop().call_soon(self._next)
        self._parse()

    def _next(self) -> None:
        self._began = None
        if self._waiting:
            self._begin()

    def _parse(self) -> None:
        assert self._began is not None
        while self._waiting and time.perf_counter() - self._began < _PARSING_SECONDS:
            connection = self._waiting.popleft()
            if connection.parse():
                self._waiting.append(connection)


class _Bounded(H11Protocol):
    """A connection with the limits of `options`. uvicorn makes the instances and passes no other arguments."""

    options: ServerOptions
    room: Room
    slot: Slot
    turns: ParsingTurns
    _chunked = False
    _fault = "not an HTTP request"
    _timer: asyncio.TimerHandle | None = None
    _writing: asyncio.TimerHandle | None = None
    _leaving: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.slot.end = transport.abort
        self._h11_next, self.conn.next_event = self.conn.next_event, self._next_event  # type: ignore[method-assign]
        self._came = self._body = 0
        self._unparsed = b""
        self._arm()

    def data_received(self, data: bytes) -> None:
        self._unparsed += data
        self.turns.enter(self)

    def parse(self) -> bool:
        """Parses some of the data that has arrived; True if there is more."""
        one_event = self.conn.their_state is h11.SEND_BODY and not self._chunked
        data = self._unparsed[: None if one_event else _PARSED_BYTES]
        self._unparsed = self._unparsed[len(data) :]
        if not data or self.transport.is_closing() or self._leaving is not None:
            self._unparsed = b""
            return False
        self._came += len(data)
        super().data_received(data)
        self._dress()
        if self.conn.their_state is h11.IDLE:
            self._arm()  # headers have begun, and are not whole
        else:
            self._disarm()
        self.room.moved(self.slot, self.idle)
        if self._came > _FRAMING_BYTES + _FRAMING * self._body:
            self.transport.abort()
        if self._unparsed:
            self.transport.pause_reading()
        elif not self.flow.read_paused:
            self.transport.resume_reading()
        return bool(self._unparsed)

    def _dress(self) -> None:
        """Adds laddertron's fields to a request's scope, before its task begins."""
        if self.cycle is not None:
            # what ends the connection after the response ends it politely
            write, is_closing = self.transport.write, self.transport.is_closing
            own: Any = SimpleNamespace(write=write, is_closing=is_closing, close=self._leave)
            self.cycle.transport = own
            self.cycle.scope["abort"] = self.transport.abort  # type: ignore[typeddict-unknown-key]

    def _next_event(self) -> Any:
        """Returns h11's next event, and counts the bytes of the body. A request is changed to origin form."""
        event = self._h11_next()
        if isinstance(event, h11.Data):
            self._body += len(event.data)
        elif isinstance(event, h11.Request):
            self._came = self._body = 0
            self._chunked = any(name == b"transfer-encoding" for name, _ in event.headers)
            try:
                return _in_origin_form(event)
            except ValueError as error:
                self._fault = f"not an HTTP request: {error}"
                raise h11.RemoteProtocolError(str(error)) from error
        return event

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        if self._leaving is not None:
            self._leaving.cancel()
        self.room.left(self.slot)
        super().connection_lost(exc)
        self.resume_writing()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._dress()  # the next one may have been sent already
        self.room.moved(self.slot, self.idle)

    def _leave(self) -> None:
        """Closes the connection after a response that ends it. If the request's body is still arriving, a close would
        send a reset, which the client may see before the answer: half-closes, and discards input for a moment."""
        if self.conn.their_state is not h11.SEND_BODY or self.transport.is_closing():
            self.transport.close()
            return
        self._leaving = self.loop.call_later(_LEAVING_SECONDS, self.transport.abort)
        self.room.linger(self.slot)
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()

    @property
    def idle(self) -> bool:
        """True between requests: the last one is answered, and the head of the next one is not complete."""
        return self.cycle is None or self.cycle.response_complete

    def pause_writing(self) -> None:
        super().pause_writing()
        # a client that does not read: a writer would wait for ever
        self._writing = self.loop.call_later(self.options.write_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None

    def send_400_response(self, msg: str) -> None:
        self._disarm()
        too_long = self.conn.their_state is h11.ERROR and len(self.conn.trailing_data[0]) > MAX_HEADER_BYTES
        status = 431 if too_long else 400
        message = f"headers of more than {MAX_HEADER_BYTES} bytes" if too_long else self._fault
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


def _in_origin_form(request: h11.Request) -> h11.Request:
    """Takes the authority out of a request's target; it replaces the Host field. Raises ValueError."""
    for name, value in request.headers:
        if name == b"host":
            authority_of(value.decode("latin-1"))
    target, authority = origin_form(request.method, request.target)
    if authority is None:
        return request
    others = [(name, value) for name, value in request.headers if name != b"host"]
    headers = [(b"host", authority), *others]
    return h11.Request(method=request.method, headers=headers, target=target, http_version=request.http_version)


class HttpServer(uvicorn.Server):
    """Serves until `should_exit`; signals are left to the caller."""

    def __init__(self, config: uvicorn.Config, options: ServerOptions) -> None:
        super().__init__(config)
        self._options, self._room, self._turns = options, Room(options), ParsingTurns()
        self._pair = self._stamp()
        self._renewal: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        for one in sockets or []:
            acceptor = Acceptor(one, self._room, self.protocol, self.config.ssl, self._options.header_timeout)
            self.servers.append(acceptor)  # type: ignore[arg-type]

    async def on_tick(self, counter: int) -> bool:
        idle = self._renewal is None or self._renewal.done()
        if self.config.ssl is not None and counter % _RENEWAL_TICKS == 0 and idle:
            self._renewal = asyncio.create_task(self._renew(self.config.ssl))
        return await super().on_tick(counter)

    def _stamp(self) -> list[tuple[int, int]]:
        """A stamp of the certificate and its key, which changes when one is replaced."""
        stamps = []
        for path in (self._options.tls_cert, self._options.tls_key):
            with contextlib.suppress(OSError, TypeError):  # missing for a moment; no TLS
                status = os.stat(path)  # type: ignore[arg-type]
                stamps.append((status.st_ctime_ns, status.st_ino))
        return stamps

    async def _renew(self, context: ssl.SSLContext) -> None:
        """Loads a renewed certificate for new connections; reports an unusable one once."""
        cert = self._options.tls_cert
        try:
            if (pair := await asyncio.to_thread(self._renewed)) is not None:
                load_pair(context, *pair)
        except (TlsFault, OSError) as error:  # ssl.SSLError is one
            log.warning("the earlier certificate stays in use: %s", error, extra={"event": "tls"})
        else:
            if pair is not None:
                log.info("%s is in use", cert, extra={"event": "tls"})

    def _renewed(self) -> tuple[bytes, bytes] | None:
        """The contents of the certificate and its key if they have changed. Raises TlsFault or OSError."""
        cert, key = self._options.tls_cert, self._options.tls_key
        assert cert is not None
        assert key is not None
        with self._options.watch.call(Path(cert)):
            if (stamp := self._stamp()) == self._pair:
                return None
            self._pair = stamp
            check_pair(cert, key)
            return Path(cert).read_bytes(), Path(key).read_bytes()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if self.server_state.tasks:  # cancelled: the gate answers each
            await asyncio.wait(self.server_state.tasks, timeout=_LEAVING_SECONDS)

    def protocol(self, slot: Slot) -> asyncio.Protocol:
        made = _Bounded(self.config, self.server_state, {})
        made.options, made.room, made.slot, made.turns = self._options, self._room, slot, self._turns
        return made

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def listen(host: str, port: int) -> socket.socket:
    """Opens the listening socket before anything is launched, so that a port in use fails at once. Raises OSError."""
    addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = addresses[0]
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
    """Makes the server. Raises OSError or ssl.SSLError if the certificate cannot be used."""
    config = uvicorn.Config(
        app,
        http=_Bounded,
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        timeout_keep_alive=round(options.keep_alive),
        timeout_graceful_shutdown=_GRACEFUL_SECONDS,
        ssl_certfile=options.tls_cert,
        ssl_keyfile=options.tls_key,
        ssl_version=ssl.PROTOCOL_TLS_SERVER,
    )
    server = HttpServer(config, options)  # its stamp before the certificate is read: a renewal in between is seen
    config.load()
    return server
