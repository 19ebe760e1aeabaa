"""uvicorn with bounds: connections, bytes of headers, seconds that headers may take; signals are the daemon's own.

The only file that knows uvicorn. Its HTTP protocol is h11's, in Python: no C parser to keep patched.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

_BUSY = json.dumps(
    {"error": {"message": "too many open connections", "type": "server_error", "param": None, "code": "busy"}}
).encode()


_GRACEFUL_SECONDS = 3  # requests have been drained by then: what is left are clients that do not read


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Where to listen and what a connection may do. Seconds, bytes."""

    host: str
    port: int
    max_connections: int = 1024
    max_header_bytes: int = 16384
    header_timeout: float = 10.0
    tls_cert: str | None = None
    tls_key: str | None = None
    write_timeout: float = 60.0


def protocol_of(options: ServerOptions) -> type[H11Protocol]:
    """uvicorn makes one for each connection and takes no arguments of ours."""

    class Bounded(H11Protocol):
        _timer: asyncio.TimerHandle | None = None
        _writing: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > options.max_connections:
                head = f"HTTP/1.1 503 Service Unavailable\r\ncontent-length: {len(_BUSY)}\r\n"
                rest = "content-type: application/json\r\nretry-after: 5\r\nconnection: close\r\n\r\n"
                transport.write((head + rest).encode() + _BUSY)
                transport.close()
                return
            self._arm()

        def data_received(self, data: bytes) -> None:
            if self.transport.is_closing():
                return
            super().data_received(data)
            if self.conn.their_state is h11.IDLE:
                self._arm()  # headers have begun, and are not whole
            else:
                self._disarm()

        def connection_lost(self, exc: Exception | None) -> None:
            self._disarm()
            super().connection_lost(exc)
            self.resume_writing()

        def pause_writing(self) -> None:
            super().pause_writing()
            # a client that does not read: whoever writes to it would wait for ever
            self._writing = self.loop.call_later(options.write_timeout, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            if self._writing is not None:
                self._writing.cancel()
                self._writing = None

        def send_400_response(self, msg: str) -> None:
            self._disarm()
            too_long = self.conn.their_state is h11.ERROR and len(self.conn.trailing_data[0]) > options.max_header_bytes
            status = 431 if too_long else 400
            message = f"headers of more than {options.max_header_bytes} bytes" if too_long else "not an HTTP request"
            error = {"message": message, "type": "invalid_request_error", "param": None, "code": "invalid_http"}
            body = json.dumps({"error": error}).encode()
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
                self._timer = self.loop.call_later(options.header_timeout, self._late)

        def _disarm(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _late(self) -> None:
            self.transport.close()

    return Bounded


class Server(uvicorn.Server):
    """Serves until `should_exit`; signals are left to whoever runs it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def listen(options: ServerOptions) -> socket.socket:
    """The listening socket: bound before anything is launched, so that a port in use is known at once. Raises
    OSError."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
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


def make_server(app: Any, options: ServerOptions) -> Server:
    """Raises OSError or ssl.SSLError if the certificate cannot be used."""
    config = uvicorn.Config(
        app,
        host=options.host,
        port=options.port,
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
    return Server(config)
