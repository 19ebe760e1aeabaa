"""Takes the results of lines and has them stored in groups, one after another and in bounded memory: by a batch in the
store (batch_feed.py), by `laddertron run` in its output and journal (engine/run/run.py)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")
_UNSTORED, _UNSTORED_BYTES = 4096, 64 << 20


class ResultSink(Generic[T]):
    """`store` returns once a group of results is stored; what it raises is raised by `moved`, and it is not called
    again: who handles the failure changes what the results were stored in. For one event loop."""

    def __init__(self, store: Callable[[list[T]], Awaitable[None]]) -> None:
        self._store = store
        self._results: list[T] = []
        self._bytes = 0
        self._due = False
        self._moved = asyncio.Event()
        self._writer: asyncio.Task[None] | None = None
        self._failure: Exception | None = None

    @property
    def full(self) -> bool:
        """True while so much is not stored yet that no further line may be submitted."""
        return len(self._results) > _UNSTORED or self._bytes > _UNSTORED_BYTES

    @property
    def pending(self) -> bool:
        return bool(self._results) or (self._writer is not None and not self._writer.done())

    def add(self, result: T, size: int) -> None:
        """Takes a result of `size` bytes."""
        self._results.append(result)
        self._bytes += size
        self.wake()

    def wake(self) -> None:
        """Has `store` called, possibly without results, for what else it stores."""
        if self._failure is not None:
            return
        self._due = True
        if self._writer is None or self._writer.done():
            self._writer = asyncio.create_task(self._write())

    async def _write(self) -> None:
        try:
            while self._due:
                self._due = False
                results, self._results, self._bytes = self._results, [], 0
                await self._store(results)
                self._moved.set()
        except Exception as error:  # raised by `moved`
            self._failure = error
        finally:
            self._moved.set()

    async def moved(self) -> None:
        """Waits until something is stored. Raises what `store` raised, then and ever after."""
        self._check()
        self._moved.clear()
        await self._moved.wait()
        self._check()

    async def settled(self) -> None:
        """Waits until everything is stored. Raises what `store` raised."""
        while self.pending:
            await self.moved()
        self._check()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
