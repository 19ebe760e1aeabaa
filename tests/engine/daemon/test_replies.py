"""An interactive reply at its ends: late, or faulty before anything was sent. On a loop, without HTTP."""

from __future__ import annotations

import asyncio
import gc
import json
import weakref
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from door import completion
from laddertron.engine.config.schema import LimitsConfig
from laddertron.engine.daemon.http.bodies import HeldBodies, Unread, UnreadAnswers
from laddertron.engine.daemon.http.generate import Generator, _Pieces, _Reply
from laddertron.engine.metrics.observer import Observer
from laddertron.engine.openai.errors import ApiError
from laddertron.engine.openai.schema import COMPLETIONS
from waiting import HANG_S

BODY: Any = completion(stream=True)
SERVICES: Any = SimpleNamespace(
    observer=Observer(),
    limits=LimitsConfig(),
    served_model_name="m",
    dispatcher=SimpleNamespace(ready=True),
    bodies=HeldBodies(1 << 20, 1 << 20),
    usage=SimpleNamespace(add=lambda owner, tokens: None),
)


async def silence() -> Any:
    """A client that stays and says nothing."""
    await asyncio.Event().wait()


def test_nothing_follows_the_done_of_a_late_stream() -> None:
    """While a slow reader takes the last event, the engine goes on."""

    async def scene() -> list[bytes]:
        reply, sent = _Reply(BODY, SERVICES, Unread(UnreadAnswers(1 << 30), ""), None), list[bytes]()
        reply.watch(silence, asyncio.get_running_loop().time())

        async def send(message: Any) -> None:
            sent.append(message.get("body", b""))
            if b"request_timeout" in sent[-1]:
                flight: Any = SimpleNamespace(
                    answer=SimpleNamespace(divided=False, body=BODY, chunks=lambda delta: [{"text": "x"}])
                )
                delta: Any = SimpleNamespace(finish="length")
                reply.progressed(flight, delta)

        await _Pieces(reply, "text/event-stream", reply.close)({}, silence, send)
        return sent

    _, last, end = asyncio.run(scene())
    assert last.endswith(b"data: [DONE]\n\n")
    assert end == b""


def test_a_stream_that_failed_before_its_first_event_leaves_nothing_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its timer would keep it until the request timed out (limits.request_timeout)."""

    async def scene() -> None:
        generator, kept = Generator(SERVICES), list[weakref.ref[_Reply]]()

        async def prepared(*_: object) -> tuple[Any, list[tuple[int, ...]]]:
            return BODY, [(1,)]

        async def stream() -> AsyncIterator[bytes]:
            yield raw

        def flight_of(*_: object) -> tuple[Any, _Reply]:
            reply = _Reply(BODY, SERVICES, Unread(UnreadAnswers(1 << 30), ""), None)
            answer = SimpleNamespace(
                unparsed_calls=0,
                error=ApiError("as the test says", "engine_error", status=500),
                place=0,
                prompt_tokens=0,
                cached_tokens=0,
                completion_tokens=0,
            )
            flight: Any = SimpleNamespace(answer=answer, sent=False, requests=[SimpleNamespace(owner="")])
            reply.finished(flight)
            kept.append(weakref.ref(reply))
            return flight, reply

        monkeypatch.setattr(generator, "_prepare", prepared)
        monkeypatch.setattr(generator, "_flight", flight_of)
        raw = json.dumps({"model": "m", "prompt": "hi", "stream": True}).encode()
        request: Any = SimpleNamespace(stream=stream, receive=silence)
        said, before = "", len(asyncio.all_tasks())
        try:
            await generator.answer(request, COMPLETIONS)
        except ApiError as error:  # not pytest.raises, which keeps the frames and all that is in them
            said = str(error)
        assert "as the test says" in said
        while len(asyncio.all_tasks()) > before:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        gc.collect()
        assert kept[0]() is None

    asyncio.run(asyncio.wait_for(scene(), HANG_S))
