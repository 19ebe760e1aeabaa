"""A ControlServer on a thread and an event loop of its own: pings go out, and signs of life are stamped, however busy
the caller's loop is. The handler is called on the caller's loop, in the order in which things came.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from .control import ControlHandler, ControlServer
from .messages import RankMessage, ServerMessage, Welcome

T = TypeVar("T")

log = logging.getLogger(__name__)


class ControlThread:
    """The methods of ControlServer, for the loop that calls `start`; `close` is always called last."""

    def __init__(self, handler: ControlHandler, secret: bytes, welcome: Welcome, host: str) -> None:
        self._handler = handler
        self._server = ControlServer(self, secret, welcome, host)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="control channel", daemon=True)
        self._owner: asyncio.AbstractEventLoop
        self._news: deque[Callable[[], None]] = deque()
        self.heard: dict[int, float] = {}
        """When each rank last said something, in monotonic seconds: known even while the caller's loop is busy."""

    async def start(self) -> str:
        """Returns the address as host:port. Raises OSError if it cannot listen there."""
        self._owner = asyncio.get_running_loop()
        self._thread.start()
        return await self._run(self._server.start())

    @property
    def connected(self) -> frozenset[int]:
        return self._server.connected

    def send(self, message: ServerMessage, rank: int | None = None) -> None:
        self._loop.call_soon_threadsafe(self._server.send, message, rank)

    def finish_sending(self) -> None:
        self._loop.call_soon_threadsafe(self._server.finish_sending)

    async def all_gone(self) -> frozenset[int]:
        return await self._run(self._server.all_gone())

    async def close(self) -> None:
        if self._thread.is_alive():
            await self._run(self._server.close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            await asyncio.to_thread(self._thread.join)
        self._loop.close()

    async def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    # on the channel's thread

    def on_message(self, rank: int, message: RankMessage) -> None:
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
