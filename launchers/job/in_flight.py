"""The requests of a job that are in flight, for the job's owner."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from dataclasses import dataclass

from ...engine.request import Request, TokensEvent
from ..control.messages import Running


@dataclass(slots=True)
class _Held:
    epoch: int
    open_choices: set[int]
    entered: int = 0
    """Sequence number of its entry into a step; 0 while it is queued."""


class InFlight:
    def __init__(self) -> None:
        self._held: dict[str, _Held] = {}
        self._entries = 0
        self._idle = asyncio.Event()

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._held

    def add(self, request: Request) -> None:
        """Adds a request; a later epoch replaces an earlier one. Raises ValueError for a duplicate."""
        before = self._held.get(request.request_id)
        if before is not None and before.epoch >= request.epoch:
            raise ValueError(f"request {request.request_id!r} is in flight already")
        self._held[request.request_id] = _Held(request.epoch, set(request.open_choices))
        self._idle.clear()

    def note(self, running: Running) -> None:
        """Records requests that entered a step, and those that were preempted."""
        for request_id in running.parked:
            if request_id in self._held:
                self._held[request_id].entered = 0
        for request_id in running.started:
            if request_id in self._held:
                self._entries += 1
                self._held[request_id].entered = self._entries

    def take(self, events: Iterable[TokensEvent]) -> list[TokensEvent]:
        """Returns the events of requests in flight, without those of earlier epochs or of ended choices; removes ended
        requests."""
        known = []
        for event in events:
            held = self._held.get(event.request_id)
            if held is None or event.epoch != held.epoch or event.choice not in held.open_choices:
                continue
            known.append(event)
            if event.finish is None:
                continue
            held.open_choices.discard(event.choice)
            if not held.open_choices:
                del self._held[event.request_id]
        if not self._held:
            self._idle.set()
        return known

    async def drained(self, timeout_s: float) -> bool:
        """Waits until all requests have ended; False after the timeout."""
        if self._held:
            self._idle.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._idle.wait()
        return not self._held

    def lose(self) -> tuple[dict[str, int], int]:
        """Removes all requests. Returns their ids and epochs, the last to enter a step first, and how many were in the
        step."""
        lost, self._held = sorted(self._held.items(), key=lambda one: -one[1].entered), {}
        self._idle.set()
        return {name: held.epoch for name, held in lost}, sum(held.entered > 0 for _, held in lost)
