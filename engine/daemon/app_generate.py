"""/v1/completions and /v1/chat/completions: one body in, an answer or a stream of server-sent events out.

Interactive: such requests go before every batch line. A client that goes away takes its request along.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from .. import request as engine
from .answers import Answer, Delta
from .app_errors import HttpFault, not_ready, of_bad_request
from .app_state import Services, owner_of
from .flight import Flight
from .observe import RequestTimes
from .requests import Origin, check_model, encode_prompts, to_requests
from .rules import BadRequest
from .schema import CHAT, COMPLETIONS, Body, Endpoint, json_schema, parse_body

_SLACK_SECONDS = 5.0  # the engine ends a request whose time is over; this is for an engine that is away
_STREAMED = {"text/event-stream": {"schema": {"type": "string"}}, "application/json": {"schema": {"type": "object"}}}


class _Reply:
    """One interactive body under way (the dispatcher's FlightOwner)."""

    def __init__(self, body: Body, services: Services, traceparent: str | None) -> None:
        self.body, self._services, self._traceparent = body, services, traceparent
        self.arrived, self.submitted = time.time(), 0.0
        self.first: float | None = None
        self.over = False
        self._chunks: list[bytes] = []
        self._news = asyncio.Event()

    def progressed(self, flight: Flight, delta: Delta) -> None:
        if self.first is None:
            self.first = time.time()
        if self.body.stream and (chunks := flight.answer.chunks(delta)):
            flight.sent = True
            self._chunks += [_event(chunk) for chunk in chunks]
            self._news.set()

    def landed(self, flight: Flight) -> None:
        answer = flight.answer
        self.over = True
        if self.body.stream:
            if answer.fault is not None:
                self._chunks.append(_event(answer.fault.to_json()))
            elif self.body.include_usage:
                self._chunks.append(_event(answer.usage_chunk()))
            self._chunks.append(b"data: [DONE]\n\n")
        self._news.set()
        times = (self.arrived, self.submitted, self.first, time.time())
        tokens = (answer.prompt_tokens, answer.completion_tokens)
        finish = "error" if answer.fault is not None else answer.finish or "stop"
        self._services.observer.request(RequestTimes(*times, *tokens, finish, True, self._traceparent))

    def died(self, flight: Flight) -> None:
        """It runs again by itself."""

    async def begun(self) -> None:
        """Until there is something to send."""
        while not self._chunks and not self.over:
            self._news.clear()
            await self._news.wait()

    async def events(self) -> AsyncIterator[bytes]:
        """Whatever has come, in one piece; slow readers get larger ones."""
        while True:
            await self.begun()
            if not self._chunks:
                return
            data, self._chunks = b"".join(self._chunks), []
            yield data


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


class Generator:
    """Takes bodies to the dispatcher and answers back."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._count = 0

    async def answer(self, request: Request, endpoint: Endpoint) -> Response:
        """Raises HttpFault."""
        raw = await request.body()
        try:
            body = parse_body(raw, endpoint)
            check_model(body, self._services.served_model_name)
            if not self._services.dispatcher.ready:
                raise not_ready("the engine is not ready: see /ready")
            if self._count >= self._services.limits.max_interactive_requests:
                raise HttpFault(429, f"{self._count} requests are being answered", "too_many_requests", retry_after=1)
            self._count += 1
            held = True
            try:
                flight, reply = await self._flight(request, body)
                deadline = asyncio.get_running_loop().time() + self._services.limits.request_timeout + _SLACK_SECONDS
                if not body.stream:
                    return await self._whole(request, flight, reply, deadline)
                await self._or_gone(request, flight, reply, deadline)
                if flight.answer.fault is not None and not flight.sent:
                    raise _fault(flight)
                held = False
                return _Events(_until(reply, deadline), lambda: self._left(flight, reply))
            finally:
                self._count -= held
        except BadRequest as bad:
            raise of_bad_request(bad) from None

    async def _flight(self, request: Request, body: Body) -> tuple[Flight, _Reply]:
        prompts = await encode_prompts(body, self._services.encoder)
        dispatcher, limits = self._services.dispatcher, self._services.limits
        if dispatcher.limits is None or not dispatcher.ready:
            raise not_ready("the engine is not ready: see /ready")
        name, now = secrets.token_hex(12), time.time()
        origin = Origin(
            name,
            "",
            name,
            priority=engine.INTERACTIVE,
            salt=owner_of(request),
            deadline=now + limits.request_timeout,
        )
        requests = to_requests(
            body, prompts, dispatcher.limits, origin, self._services.text.eos_ids, limits.max_choices
        )

        def make(of: Sequence[engine.Request]) -> Answer:
            return Answer(body, of, self._services.text, name, int(now))

        reply = _Reply(body, self._services, request.headers.get("traceparent"))
        flight = Flight(tuple(requests), make, reply)
        reply.submitted = time.time()
        dispatcher.submit(flight)
        return flight, reply

    async def _whole(self, request: Request, flight: Flight, reply: _Reply, deadline: float) -> Response:
        await self._or_gone(request, flight, reply, deadline)
        if flight.answer.fault is not None:
            raise _fault(flight)
        return JSONResponse(flight.answer.response())

    async def _or_gone(self, request: Request, flight: Flight, reply: _Reply, deadline: float) -> None:
        """Waits for the first thing to send; drops the request if the client goes, or the time."""
        gone = asyncio.create_task(_disconnected(request))
        begun = asyncio.create_task(reply.begun())
        done = False
        try:
            left = deadline - asyncio.get_running_loop().time()
            await asyncio.wait({gone, begun}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            done = begun.done()
            if not done:
                raise (
                    ConnectionError("the client is gone")
                    if gone.done()
                    else HttpFault(504, "the request's time was over", "request_timeout")
                )
        finally:
            gone.cancel()
            begun.cancel()
            if not done:
                self._services.dispatcher.drop(flight)

    def _left(self, flight: Flight, reply: _Reply) -> None:
        self._count -= 1
        if not reply.over:
            self._services.dispatcher.drop(flight)


class _Events(StreamingResponse):
    """`left` is called however it ends, even where nothing was ever sent."""

    def __init__(self, events: AsyncIterator[bytes], left: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"cache-control": "no-store"})
        self._left = left

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._left()


async def _until(reply: _Reply, deadline: float) -> AsyncIterator[bytes]:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout_at(deadline):
            async for data in reply.events():
                yield data


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _fault(flight: Flight) -> HttpFault:
    fault = flight.answer.fault
    assert fault is not None
    status = 504 if fault.code == "request_timeout" else fault.status or 500
    return HttpFault(status, fault.message, fault.code, retry_after=5 if status == 503 else None)


def _description(endpoint: Endpoint) -> dict[str, Any]:
    content = {"application/json": {"schema": json_schema(endpoint)}}
    return {"requestBody": {"required": True, "content": content}}


def generate_router(services: Services) -> APIRouter:
    router = APIRouter(tags=["generate"])
    generator = Generator(services)
    responses: dict[int | str, dict[str, Any]] = {200: {"content": _STREAMED}}

    @router.post(CHAT, openapi_extra=_description(CHAT), response_class=Response, responses=responses)
    async def chat(request: Request) -> Response:
        """Answer a chat; `stream: true` for server-sent events."""
        return await generator.answer(request, CHAT)

    @router.post(COMPLETIONS, openapi_extra=_description(COMPLETIONS), response_class=Response, responses=responses)
    async def complete(request: Request) -> Response:
        """Continue one or more prompts; `stream: true` for server-sent events."""
        return await generator.answer(request, COMPLETIONS)

    return router
