"""The status page `/`, a static file that needs no key, and its data, `/v1/overview`, which needs one."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from ...openai.errors import ApiError
from ..batches import UNANSWERED_CODES
from ..overview import engine_view, take_sample
from ..store import records
from ..store.rows import BatchRow
from .probes import readiness
from .state import Services, owner_of, reach_of

MAX_VIEWERS, MAX_OF_KEY = 16, 4
_BATCHES, _FAILED_LINES = 20, 1000
_CAUSES_SECONDS = 10.0


class Overview:
    """Makes the view, at most once a second for all clients. For one event loop."""

    def __init__(self, services: Services, version: str) -> None:
        self._services, self._version = services, version
        self._view: dict[str, Any] = {}
        self._made = float("-inf")
        self._causes: dict[str, tuple[int, float, dict[str, int], int]] = {}
        self.viewers: Counter[str] = Counter()

    def enter(self, owner: str, most: int) -> Callable[[], None]:
        """Counts one more open stream of the owner, which may have `most`; returns what ends it. Raises ApiError."""
        if self.viewers.total() >= MAX_VIEWERS or self.viewers[owner] >= most:
            message = f"{self.viewers.total()} pages are open, at most {most} per key: close one"
            raise ApiError(message, "too_many_viewers", status=503)
        self.viewers[owner] += 1

        def leave() -> None:
            self.viewers[owner] -= 1
            self.viewers += Counter()  # without those at 0

        return leave

    async def view(self, owner: str | None) -> dict[str, Any]:
        """The view with the owner's newest batches (None: of all owners). Raises ApiError (503) if the store cannot
        be read."""
        now = time.monotonic()
        if now - self._made >= 1.0:
            self._view, self._made = self._shared(now), now
        return {**self._view, "batches": await self._batches(owner, now)}

    def _shared(self, now: float) -> dict[str, Any]:
        services, figures = self._services, self._services.observer.figures()
        newest, before = take_sample(figures, now), services.samples.before(now)
        _, ready = readiness(services)
        return {
            "model": services.served_model_name,
            "version": self._version,
            "started_at": services.started_at,
            "now": time.time(),
            "status": ready["status"],
            "reason": ready["reason"],
            "batches_paused": services.batches.gate.why,
            "history": services.samples.history(now),
            **engine_view(figures, services.dispatcher.states, newest, *before, time.time()),
        }

    async def _batches(self, owner: str | None, now: float) -> list[dict[str, Any]]:
        rows = await self._services.read(lambda db: records.list_batches(db, owner, _BATCHES, None, damaged=[]))
        shown = []
        for row in (rows or [])[:_BATCHES]:
            names = ("id", "status", "total", "completed", "failed", "created_at")
            counts = {name: getattr(row, name) for name in names}
            errors, unanswered = await self._errors(row, now)
            name = (row.metadata or {}).get("name", "")
            counts |= {"name": name, "owner": row.owner or None, "unanswered": unanswered}
            shown.append(counts | {"errors": errors, "failure": _failure(row)})
        return shown

    async def _errors(self, batch: BatchRow, now: float) -> tuple[dict[str, int], int]:
        """The first error lines by code, and the number of lines that the batch's end left unanswered."""
        if not batch.failed:
            return {}, 0
        failed, at, causes, unanswered = self._causes.get(batch.id, (0, float("-inf"), {}, 0))
        if batch.failed != failed and now - at >= _CAUSES_SECONDS:
            causes = await self._services.read(partial(records.error_codes, batch_id=batch.id, limit=_FAILED_LINES))
            unanswered = await self._services.read(
                partial(records.count_codes, batch_id=batch.id, codes=UNANSWERED_CODES)
            )
            while len(self._causes) >= 64 * _BATCHES:
                self._causes.pop(next(iter(self._causes)))
            self._causes[batch.id] = batch.failed, now, causes, unanswered
        return causes, unanswered


class _Watched(StreamingResponse):
    """A stream of events. `left` is called at its end, even if nothing was sent."""

    def __init__(self, events: AsyncIterator[bytes], left: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"cache-control": "no-store"})
        self._left = left

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._left()


def _failure(batch: BatchRow) -> str | None:
    """The reason why a batch failed as a whole, in one line; else None."""
    if not batch.errors:
        return None
    more = f" (and {len(batch.errors) - 1} more)" if len(batch.errors) > 1 else ""
    return f"{batch.errors[0].get('message')}{more}"


@cache
def page_of_daemon() -> tuple[bytes, str]:
    """The page, and a content security policy that allows only its own style and script."""
    text = Path(__file__).with_name("page.html").read_text(encoding="utf-8")

    def digest(tag: str) -> str:
        [content] = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"

    policy = (
        f"default-src 'none'; style-src {digest('style')}; script-src {digest('script')}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return text.encode(), policy


def page_router(services: Services, version: str) -> APIRouter:
    router = APIRouter(tags=["operations"])
    overview = Overview(services, version)

    @router.get("/", response_class=Response, include_in_schema=False)
    async def page() -> Response:
        body, policy = page_of_daemon()
        headers = {
            "content-security-policy": policy,
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            "cache-control": "no-cache",
        }
        return Response(body, media_type="text/html; charset=utf-8", headers=headers)

    @router.get("/v1/overview", response_class=Response)
    async def view(request: Request, stream: bool = False) -> Response:
        """Replicas, ranks, links, requests and your newest batches; with `stream` once a second, as events."""
        owner = reach_of(request)
        if not stream:
            return JSONResponse(await overview.view(owner))
        leave = overview.enter(owner_of(request), MAX_VIEWERS if request.state.key is None else MAX_OF_KEY)
        try:
            await overview.view(owner)
        except BaseException:
            leave()
            raise
        return _Watched(events(owner), leave)

    async def events(owner: str | None) -> AsyncIterator[bytes]:
        while not services.dispatcher.ending:  # the guard ends those of a revoked key
            yield b"data: " + json.dumps(await overview.view(owner)).encode() + b"\n\n"
            await asyncio.sleep(1.0)

    return router
