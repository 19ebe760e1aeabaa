"""The ASGI middleware before every route: authentication, limits, timeouts, audit. Refuses before it reads a body."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import time
from collections.abc import Collection
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...config.schema import LimitsConfig
from ...metrics.observer import Observer
from ...openai.answers import EventWriter
from ...openai.body import TOKENIZE
from ...openai.errors import ApiError
from ...openai.responses import ResponseWriter
from ...openai.schema import GENERATING, RESPONSES
from ..keys import MAX_KEY, Key, KeyRing, digest_of
from ..logs import Sparse
from ..usage import Usage
from .authority import check_local
from .bodies import SMALL_BYTES, Unread, UnreadAnswers
from .connections import MAX_HEADER_BYTES
from .errors import failed, response_of, stopping
from .exchanges import Exchanges, Place

log = logging.getLogger(__name__)
audit_log = logging.getLogger("laddertron.audit")

OPEN = ("/health", "/ready", "/", "/ping")
"""Paths that need no key; without one they return only a status. The page at / contains no data."""
_METRICS = ("/metrics",)
"""Paths only for keys of the kind metrics."""
_USAGE = "/v1/usage"
_FILES = "/v1/files"
_MULTIPART = 64 << 10  # what a form adds to the file in it
_LEAST_BYTES = 4096  # a body that brings less in `body_timeout` is too slow
_GRACE_SECONDS, _GRACE_BYTES = 0.02, 64 << 10  # for the rest of a refused request's body
_EVENTS, _LAST_EVENT_SECONDS = b"text/event-stream", 1.0
_AUDITED = ("POST", "DELETE")
_POLLED = ("/v1/batches/{batch_id}", "/v1/overview", "/load", "/version")
"""Polled paths, which are logged only if they fail."""
_REASON_BYTES = 4096
_UNKNOWN_LINES = 120  # a minute, of requests without a key that were refused


class Guard:
    """Wraps the application. `keys=None`: all clients are the same anonymous owner."""

    def __init__(
        self,
        app: ASGIApp,
        limits: LimitsConfig,
        keys: KeyRing | None,
        observer: Observer | None = None,
        usage: Usage | None = None,
        local_names: Collection[str] | None = None,
    ) -> None:
        """`local_names`: what hosts a request may name besides this machine's, else any (see check_local)."""
        self._usage, self._local_names = usage, local_names
        self._app, self._limits, self._keys = app, limits, keys
        self._observer = observer or Observer()
        self._sparse = Sparse(_UNKNOWN_LINES)
        self.unread_answers = UnreadAnswers(limits.max_held_bytes)
        self._exchanges = Exchanges(limits.max_connections, limits.max_connections_per_address)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        if len(scope["path"]) > 1:  # a redirect would name the wrong scheme behind a proxy
            scope["path"] = scope["path"].rstrip("/") or "/"
        exchange = _Exchange(scope, receive, send, Unread(self.unread_answers, ""))
        began = time.perf_counter()
        owner = None
        try:
            most = self._admit(scope)
            key: Key | None = scope["state"]["key"]
            exchange.unread.owner = asker = "" if key is None else key.id
            if self._usage is not None and scope["method"] == "POST":
                self._usage.enter(asker, scope["path"] in GENERATING)
                owner = asker
            exchange.key, exchange.secret = key, scope["state"].get("secret", "")
            if scope["path"] not in OPEN:
                address = (scope.get("client") or ("",))[0]
                self._exchanges.enter(exchange, Place(asker or address, address))
            exchange.read(most, self._limits.body_timeout)
            await self._app(scope, exchange.receive, exchange.send)
        except ApiError as error:
            await exchange.refuse(error)
        except (ConnectionError, ClientDisconnect):
            pass  # the client is gone
        except asyncio.CancelledError:  # the server stops and has waited for this one, or it was ended
            await exchange.cut()
        except Exception:
            log.exception("request failed", extra={"event": "error", "request": exchange.name})
            await exchange.refuse(failed())
        finally:
            self._exchanges.leave(exchange)
            self.unread_answers.close(exchange.unread)
            if owner is not None and self._usage is not None:
                self._usage.leave(owner)
            self._tell(scope, exchange, time.perf_counter() - began)

    def end_revoked(self, keys: KeyRing) -> None:
        """Ends the requests in flight whose key, or secret, no longer works."""
        revoked = [one for one in self._exchanges if one.key is not None and not keys.works(one.key, one.secret)]
        message = "this API key was revoked or replaced while the request ran"
        self._exchanges.end(revoked, ApiError(message, "invalid_api_key", status=401, close=True))

    def _admit(self, scope: Scope) -> int:
        """Checks a request before its body; returns the most bytes that the body may have. Raises ApiError."""
        headers = Headers(scope=scope)
        scope.setdefault("state", {})["key"] = None
        if sum(len(name) + len(value) + 4 for name, value in headers.raw) > MAX_HEADER_BYTES:
            raise ApiError(f"headers of more than {MAX_HEADER_BYTES} bytes", None, status=431, close=True)
        if self._local_names is not None:
            check_local(headers.getlist("host"), headers.getlist("origin"), self._local_names)
        path: str = scope["path"]
        state = scope["state"]
        state["known"], state["keys"] = self._keys is None, self._keys
        if self._keys is not None:
            self._identify(self._keys, path, headers, state)
        if headers.get("content-encoding", "identity").strip().lower() != "identity":
            raise ApiError("send the body uncompressed: no content-encoding is accepted", None, status=415, close=True)
        length = headers.get("content-length", "").strip()
        if "content-length" in headers and "transfer-encoding" in headers:  # RFC 9112, 6.1
            raise ApiError("content-length and transfer-encoding conflict: send one", "invalid_http", close=True)
        most = SMALL_BYTES
        if path == _FILES:
            most = self._limits.max_body_bytes + _MULTIPART
        elif path in (*GENERATING, TOKENIZE):
            most = self._limits.max_line_bytes
        if length.isdecimal() and int(length[:20]) > most:
            raise too_large(most)
        return most

    def _identify(self, keys: KeyRing, path: str, headers: Headers, state: dict[str, Any]) -> None:
        """Finds the request's key, and checks that its kind allows this path. Raises ApiError."""
        given = headers.getlist("authorization")
        scheme, _, key = given[0].partition(" ") if len(given) == 1 else ("", "", "")
        holder = keys.holder(key.strip()) if scheme.lower() == "bearer" else None
        if holder is None and path not in OPEN:
            raise ApiError("a valid API key is required: Authorization: Bearer KEY", "invalid_api_key", status=401)
        state["key"], state["known"], state["secret"] = holder, holder is not None, digest_of(key.strip()[:MAX_KEY])
        if holder is not None and path not in (*OPEN, _USAGE) and (holder.kind == "metrics") != (path in _METRICS):
            takes = "a key of the kind metrics" if path in _METRICS else "a client's key"
            message = f"{path[:80]} requires {takes}, this key is of the kind {holder.kind}: laddertron keys add --kind"
            raise ApiError(message, "wrong_kind_of_key", status=403)

    def _tell(self, scope: Scope, exchange: _Exchange, seconds: float) -> None:
        key: Key | None = scope.get("state", {}).get("key")
        log_fields = {
            "event": "http",
            "request": exchange.name,
            "method": scope["method"],
            "path": scope["path"][:256],
            "status": exchange.status,
            "seconds": round(seconds, 4),
            "client": (scope.get("client") or ("",))[0],
            "key": key.id if key else None,
        }
        route = getattr(scope.get("route"), "path", "other")
        self._observer.http(route, exchange.status, seconds)
        if key is None and self._keys is not None and exchange.status >= 400:
            if (left := self._sparse.take()) is None:
                return
            if left:
                audit_log.warning("%d requests without a key were not logged", left, extra={"left_out": left})
        polled = scope["path"] in (*OPEN, *_METRICS) or (route in _POLLED and scope["method"] == "GET")
        told = exchange.status >= 400 and scope["path"] != "/ready"  # what is not ready says so itself
        level = logging.DEBUG if polled and not told else logging.INFO
        reason = exchange.reason()
        text = f"{log_fields['method']} {log_fields['path']} {log_fields['status']}"
        shown = f"{text}: {reason}" if reason else text
        log.log(level, "%s", shown, extra=log_fields | ({"reason": reason} if reason else {}))
        if scope["method"] in _AUDITED or exchange.status == 401:
            audit_log.info("%s", text, extra=log_fields)


def too_large(most: int) -> ApiError:
    message = f"the body is larger than the {most} bytes that are allowed"
    return ApiError(message, "body_too_large", status=413, close=True)


class _Exchange:
    """One request and its response."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, unread: Unread) -> None:
        self._scope, self._receive, self._send, self.unread = scope, receive, send, unread
        self.name = f"req_{secrets.token_hex(12)}"
        scope.setdefault("state", {}).update(request_name=self.name, unread=unread)
        unread.end = scope.get("abort", unread.end)
        self._start: Message | None = None  # sent with the first bytes: until then the answer may be refused
        self.status = 0
        self._most, self._seen, self._timeout = 0, 0, 10.0
        self._window, self._window_bytes = 0.0, 0
        headers = dict(scope["headers"])
        bodiless = headers.get(b"content-length", b"0").strip(b"0") == b"" and b"transfer-encoding" not in headers
        self._whole, self._ended = bodiless, False
        self._refusal = b""
        self.key: Key | None = None
        self.secret = ""
        self._task = asyncio.current_task()
        self._ending: ApiError | None = None
        self._events = self._divided = False

    @property
    def waiting(self) -> bool:
        """Whether its body has not arrived completely."""
        return not self._whole

    def end(self, error: ApiError) -> None:
        """Cancels the request; `cut` then answers with the error."""
        if self._ending is None and self._task is not None:
            self._ending = error
            self._task.cancel()

    def reason(self) -> str:
        """The reason of a refusal, as in the response; "" if the request was not refused."""
        try:
            return str(json.loads(self._refusal)["error"]["message"])[:500] if self._refusal else ""
        except (ValueError, KeyError, TypeError):
            return ""

    def read(self, most: int, timeout: float) -> None:
        """Allows to read the body, of at most `most` bytes, within `timeout` seconds."""
        self._most, self._timeout = most, timeout
        self._window = time.monotonic() + timeout

    async def receive(self) -> Message:
        if self._whole:
            return await self._receive()
        try:
            async with asyncio.timeout(max(0.0, self._window - time.monotonic())):
                message = await self._receive()
        except TimeoutError:
            raise ApiError("the body arrived too slowly", "request_timeout", status=408, close=True) from None
        if message["type"] == "http.request":
            size = len(message.get("body", b""))
            self._seen += size
            self._window_bytes += size
            self._whole = not message.get("more_body", False)
            if self._seen > self._most:
                raise too_large(self._most)
            if self._window_bytes >= _LEAST_BYTES:
                self._window, self._window_bytes = time.monotonic() + self._timeout, 0
        return message

    async def send(self, message: Message) -> None:
        if self.status >= 400 and len(self._refusal) < _REASON_BYTES:
            self._refusal += message.get("body", b"")
        if message["type"] == "http.response.start":
            self.status = message["status"]
            if self.status >= 400 and not self._whole:
                await self._drop_rest()
            extra = [(b"x-request-id", self.name.encode()), (b"x-content-type-options", b"nosniff")]
            headers = [*message.get("headers", []), *extra]
            if self.status >= 400 and not self._whole and not any(name == b"connection" for name, _ in headers):
                headers.append((b"connection", b"close"))
            message["headers"] = headers
            self._events = any(name == b"content-type" and value.startswith(_EVENTS) for name, value in headers)
            self._start = message
            return
        self._ended = not message.get("more_body", False)
        await self._send_body(message)

    async def _send_body(self, message: Message) -> None:
        """Sends a body in pieces, so that the number of unread bytes is known."""
        body, at = message.get("body", b""), 0
        try:
            self.unread.hold("unsent", len(body))
        except ApiError as error:
            if self._start is not None:
                self._start, self.status, self._ended = None, 0, False
                await self.refuse(error)
            raise ConnectionError(error.message) from error
        if self._start is not None:
            start, self._start = self._start, None
            await self._send(start)
        self._divided = len(body) > SMALL_BYTES
        while len(body) - at > SMALL_BYTES:
            await self._send({"type": "http.response.body", "body": body[at : at + SMALL_BYTES], "more_body": True})
            at += SMALL_BYTES
            self.unread.hold("unsent", len(body) - at)
            if self.unread.ended:
                raise ConnectionError("the client does not read")
        await self._send({**message, "body": body[at:]} if at else message)
        self._divided = False
        self.unread.hold("unsent", 0)

    async def refuse(self, error: ApiError) -> None:
        """Sends the error as the response, if none has begun."""
        if self.status:
            if not self._ended:
                raise ConnectionError("the response had begun")
            return
        await response_of(error)(self._scope, self._receive, self.send)

    async def cut(self) -> None:
        """Ends the exchange now: by an error, as a stream's last event if one has begun, else by closing the
        connection."""
        error = self._ending or stopping()
        if self._start is not None:
            self._start, self.status, self._ended = None, 0, False
        if not self.status:
            await self.refuse(error)
        elif not self._ended:
            if self._ending is not None and self._events and not self._divided:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LAST_EVENT_SECONDS):
                        writer = ResponseWriter() if self._scope["path"] == RESPONSES else EventWriter()
                        body = writer.failed(error)
                        await self._send({"type": "http.response.body", "body": body, "more_body": False})
                        return
            self.unread.end()
            while (await self._receive())["type"] != "http.disconnect":
                pass

    async def _drop_rest(self) -> None:
        """Reads the body of a refused request if it is short and nearly complete, to keep the connection."""
        seen = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_GRACE_SECONDS):
                while not self._whole and seen < _GRACE_BYTES:
                    message = await self._receive()
                    seen += len(message.get("body", b""))
                    self._whole = message["type"] != "http.request" or not message.get("more_body", False)
