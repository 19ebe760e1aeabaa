"""/v1/completions, /v1/chat/completions and /v1/responses: one body in, an answer or a stream of events out."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ... import request as engine
from ...metrics.observer import AnswerTimes
from ...openai.answers import LARGE_VALUES, Answer, EventWriter
from ...openai.body import Body
from ...openai.body_worker import Prepared, prepare
from ...openai.choice import Delta
from ...openai.errors import ApiError
from ...openai.responses import ResponseWriter, whole_answer
from ...openai.responses_body import ResponsesFields
from ...openai.schema import CHAT, COMPLETIONS, GENERATING, RESPONSES, Route, json_schema
from ...openai.to_engine import RequestOrigin, to_requests
from ...openai.validators import json_schema as schema_of
from ...openai.validators import takes
from ..flight import Flight, FlightOwner
from ..retained import RetainedResponses
from ..usage import tokens_of
from .bodies import GROWING, SMALL_BYTES, Unread
from .errors import not_ready, text_workers, unstored
from .state import Services, owner_of

_VALUE_BYTES = 100  # of a large answer: tokens and numbers as Python keeps them
_PIECE_SECONDS = 0.05
ALIVE_SECONDS = 15.0
_SLACK_SECONDS = 5.0  # the engine ends a request whose time is over; this is for an engine that is away
_STREAMED = {"text/event-stream": {"schema": {"type": "string"}}, "application/json": {"schema": {"type": "object"}}}


class _Reply(FlightOwner):
    """One interactive body in flight (the dispatcher's FlightOwner), and its waiters."""

    def __init__(self, body: Body, services: Services, unread: Unread, traceparent: str | None) -> None:
        self.body, self._services, self._unread, self._traceparent = body, services, unread, traceparent
        self._offset = time.time() - time.monotonic()  # differences are durations, though the clock be set
        self.arrived, self.submitted = self.now(), 0.0
        self.first: float | None = None
        self.over = self.gone = self.late = self.sent = self._said_late = False
        self._writer = EventWriter() if body.responses is None else ResponseWriter()
        self._events: list[bytes] = []
        self._ended: Answer | None = None
        self._backlog = 0
        self._pieces: Iterator[bytes] | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._alive: asyncio.TimerHandle | None = None
        self._watch: asyncio.Task[None] | None = None

    def now(self) -> float:
        return self._offset + time.monotonic()

    def progressed(self, flight: Flight, delta: Delta) -> None:
        if self.first is None:
            self.first = self.now()
        if self.body.stream and (data := self._writer.of(flight.answer, delta)):
            self.sent = True
            self._events.append(data)
            self._backlog += len(data)
            try:
                self._unread.hold(GROWING, self._backlog)
            except ApiError as error:
                flight.answer.error = error
            self._wake()

    def finished(self, flight: Flight) -> None:
        answer = flight.answer
        self.over = True
        if self.body.stream and self.body.stored_input is None:
            self._events.append(self._writer.end(answer))
        self._ended = answer
        self._wake()
        times = (self.arrived, self.submitted, self.first, self.now())
        tokens = (answer.prompt_tokens, answer.completion_tokens)
        finish = "error" if answer.error is not None else answer.finish or "stop"
        chat = self.body.endpoint == CHAT
        counts = (self.body.ignored_fields, answer.unparsed_calls)
        self._services.observer.request(AnswerTimes(*times, *tokens, finish, True, self._traceparent, chat, *counts))

    def watch(self, receive: Receive, deadline: float) -> None:
        """Makes `begun` also return when the client disconnects, or at `deadline` (of the loop's clock)."""
        loop = asyncio.get_running_loop()
        self._timer = loop.call_at(deadline, self._end_late)
        if self.body.stream:
            self._alive = loop.call_later(ALIVE_SECONDS, self._keep_alive)
        self._watch = loop.create_task(_disconnected(receive))
        self._watch.add_done_callback(self._left)

    def close(self) -> None:
        if self._timer is not None and self._watch is not None:
            self._timer.cancel()
            self._watch.cancel()
        if self._alive is not None:
            self._alive.cancel()

    def _keep_alive(self) -> None:
        """Sends a comment if nothing else waits to be sent: proxies close streams that are silent for a minute."""
        if not (self.over or self.gone or self.late):
            if not self._events:
                self._events.append(b": keep-alive\n\n")
                self.sent = True
                self._wake()
            self._alive = asyncio.get_running_loop().call_later(ALIVE_SECONDS, self._keep_alive)

    async def begun(self) -> None:
        """Waits until there is something to send, or there will be nothing: `over`, `gone` or `late`."""
        if not (self._events or self.over or self.gone or self.late):
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    async def next(self) -> bytes:
        """Returns the data so far in one piece, which is larger for a slow reader; b"" after the last. Raises
        ConnectionError once the client has disconnected."""
        await self.begun()
        if self.gone:
            raise ConnectionError("the client disconnected")
        if self._pieces is not None:
            return await self._services.store.in_turn(self._unread.owner, self._piece)
        if self._said_late:
            return b""  # its end was sent: later tokens are discarded
        if self._ended is not None and self.body.stored_input is not None:
            ended, self._ended = self._ended, None
            try:
                await self.stored(ended)
            except ApiError as error:
                ended.error = error
            self._events.append(self._writer.end(ended))
        if self.late and not self.over:
            self._said_late = True
            self._events.append(self._writer.failed(_late()))
        events, self._events, self._backlog = self._events, [], 0
        self._unread.hold(GROWING, 0)
        return events[0] if len(events) == 1 else b"".join(events)

    async def stored(self, answer: Answer) -> str:
        """Stores the response of an answer whose body has `stored_input`; returns it as JSON. Raises ApiError."""
        retained, owner = self._services.retained, self._unread.owner
        assert retained is not None
        row = retained.row(owner, answer, whole_answer(answer))
        await self._services.write(retained.add(row))
        return row.to_json()

    def send_in_pieces(self, answer: Answer) -> None:
        """Makes `next` return a large answer, piece by piece. Raises ApiError if too many unread bytes are in
        memory."""
        self._unread.hold("answer", answer.values * _VALUE_BYTES)
        self._pieces = answer.pieces()

    def _piece(self) -> bytes:
        piece, until = bytearray(), time.monotonic() + _PIECE_SECONDS
        for part in self._pieces or ():
            piece += part
            if len(piece) >= SMALL_BYTES or (piece and time.monotonic() > until):
                break
        return bytes(piece)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _end_late(self) -> None:
        self.late = True
        self._wake()

    def _left(self, watch: asyncio.Task[None]) -> None:
        if not watch.cancelled():
            self.gone = True
            self._wake()


class Generator:
    """Sends bodies to the dispatcher and returns answers."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._count = 0

    async def answer(self, request: Request, endpoint: Route) -> Response:
        self._admit()
        body, prompts = await self._prepare(request, endpoint)
        self._admit()  # it may have come slowly
        self._count += 1
        counted = True
        begun: Flight | None = None
        try:
            flight, reply = self._flight(request, body, prompts)
            begun = flight
            await self._begun(request, flight, reply)
            if flight.answer.error is not None and not reply.sent:
                raise _shown(flight.answer.error)
            kind, headers = "text/event-stream", _notes(body)
            if not body.stream:
                if body.stored_input is not None:
                    return Response(await reply.stored(flight.answer), 200, headers, "application/json")
                if flight.answer.values <= LARGE_VALUES or body.responses is not None:
                    return JSONResponse(whole_answer(flight.answer), headers=headers)
                reply.send_in_pieces(flight.answer)
                kind = "application/json"
            counted = False
            return _Pieces(reply, kind, lambda: self._left(flight, reply), headers)
        finally:
            self._count -= counted
            if counted and begun is not None:
                reply.close()
                self._used(begun)

    def _admit(self) -> None:
        if not self._services.dispatcher.ready:
            raise not_ready("the engine is not ready: see /ready")
        if self._count >= self._services.limits.max_interactive_requests:
            message = f"{self._count} requests are in flight"
            raise ApiError(message, "too_many_requests", status=429, retry_after=1)

    async def _prepare(self, request: Request, endpoint: Route) -> Prepared:
        """Reads and checks the body. Its bytes are freed when this returns, because the answer may take minutes."""
        services, limits = self._services, self._services.dispatcher.limits
        assert limits is not None
        owner, load = owner_of(request), None
        encoder, retained = services.encoder.of(owner), services.retained
        if retained is not None and endpoint == RESPONSES:
            load = partial(self._load, retained, owner)
        async with services.bodies.read(request) as raw:
            with text_workers():
                most = limits.max_model_len
                body, prompts = await prepare(raw, endpoint, services.served_model_name, most, encoder, load)
        if retained is not None and body.stored_input is not None:
            if why := services.batches.gate.why:
                raise unstored(f"{why}: send store: false, or wait")
            await services.write(retained.admit(owner, len(body.stored_input.input)))
        return body, prompts

    async def _load(
        self, retained: RetainedResponses, owner: str, previous: str | None, of_items: tuple[str, ...]
    ) -> bytes:
        return await self._services.write(retained.load(owner, previous, of_items))

    def _flight(self, request: Request, body: Body, prompts: list[tuple[int, ...]]) -> tuple[Flight, _Reply]:
        dispatcher, limits = self._services.dispatcher, self._services.limits
        assert dispatcher.limits is not None
        name, now = secrets.token_hex(12), time.time()
        origin = RequestOrigin(
            name,
            "",
            name,
            priority=engine.INTERACTIVE,
            salt=owner_of(request),
            deadline=now + limits.request_timeout,
        )
        requests = to_requests(body, prompts, dispatcher.limits, origin, self._services.text)
        reply = _Reply(body, self._services, request.state.unread, request.headers.get("traceparent"))
        flight = Flight(tuple(requests), Answer(body, requests, self._services.text, name, int(now)), reply)
        reply.submitted = reply.now()
        dispatcher.submit(flight)
        return flight, reply

    async def _begun(self, request: Request, flight: Flight, reply: _Reply) -> None:
        """Waits for the first data to send; drops the request if the client disconnects or the time is over."""
        seconds = self._services.limits.request_timeout + _SLACK_SECONDS
        reply.watch(request.receive, asyncio.get_running_loop().time() + seconds)
        done = False
        try:
            await reply.begun()
            if reply.gone:
                raise ConnectionError("the client disconnected")
            if reply.late and not reply.over:
                raise _late()
            done = True
        finally:
            if not done:
                self._services.dispatcher.drop(flight)

    def _used(self, flight: Flight) -> None:
        """Adds the computed tokens to the key's usage, whether or not the answer is complete."""
        self._services.usage.add(flight.requests[0].owner, tokens_of(flight.answer))

    def _left(self, flight: Flight, reply: _Reply) -> None:
        self._count -= 1
        self._used(flight)
        reply.close()
        if not reply.over:
            self._services.dispatcher.drop(flight)


class _Pieces(Response):
    """Sends a reply's events, or a large answer, as they arrive, without its own task or timeout. `left` is always
    called at the end, even if nothing was sent."""

    def __init__(self, reply: _Reply, kind: str, left: Callable[[], None], notes: dict[str, str] | None = None) -> None:
        headers = {"cache-control": "no-store", **(notes or {})}
        if kind == "text/event-stream":
            headers["x-accel-buffering"] = "no"  # nginx sends each event at once
        super().__init__(None, media_type=kind, headers=headers)
        self._reply, self._ended = reply, left

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            headers = [(name, value) for name, value in self.raw_headers if name != b"content-length"]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            while data := await self._reply.next():
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._ended()


def _notes(body: Body) -> dict[str, str]:
    """The header that names what of the body's schema is not enforced."""
    what = "; ".join(body.unenforced).encode("ascii", "backslashreplace")[:1000].decode()
    return {"x-laddertron-not-enforced": "".join(map(_printable, what))} if what else {}


def _printable(char: str) -> str:
    return char if char.isprintable() else "?"


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _late() -> ApiError:
    return ApiError("the request timed out (limits.request_timeout)", "request_timeout", status=504)


def _shown(error: ApiError) -> ApiError:
    """Converts an answer's error to the error of the response."""
    status = 504 if error.code == "request_timeout" else error.status or 500
    return ApiError(error.message, error.code, status=status, retry_after=5 if status == 503 else None)


def generate_router(generator: Generator) -> APIRouter:
    """The two routes, for the API's description; requests reach them by `Direct`."""
    router = APIRouter(tags=["generate"])
    answers: Any = {"response_class": Response, "responses": {200: {"content": _STREAMED}}}

    @router.post(CHAT, openapi_extra=takes(json_schema(CHAT)), **answers)
    async def chat(request: Request) -> Response:
        """Answer a chat; `stream: true` for server-sent events."""
        return await generator.answer(request, CHAT)

    @router.post(COMPLETIONS, openapi_extra=takes(json_schema(COMPLETIONS)), **answers)
    async def complete(request: Request) -> Response:
        """Continue one or more prompts; `stream: true` for server-sent events."""
        return await generator.answer(request, COMPLETIONS)

    @router.post(RESPONSES, openapi_extra=takes(schema_of(ResponsesFields)), **answers)
    async def respond(request: Request) -> Response:
        """Answer a conversation in the form of OpenAI's Responses API."""
        return await generator.answer(request, RESPONSES)

    return router


class Direct:
    """The application with a direct path to the most frequent routes: the framework's layers take as much time as
    the rest of a short request, on the event loop that all streams share. The guard answers errors."""

    def __init__(self, app: ASGIApp, generator: Generator) -> None:
        self._app, self._generator = app, generator
        self._routes: dict[str, tuple[Route, Any]] = {path: (path, SimpleNamespace(path=path)) for path in GENERATING}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self._routes.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if route is None:
            inner = scope
            if scope["type"] == "http" and scope["method"] == "HEAD":
                inner = {**scope, "method": "GET"}  # the server leaves the body out
            await self._app(inner, receive, send)
            if "route" in inner:
                scope["route"] = inner["route"]
            return
        endpoint, scope["route"] = route
        response = await self._generator.answer(Request(scope, receive), endpoint)
        await response(scope, receive, send)
