"""Bodies while they are read and made into requests: how many bytes of them this process holds at once."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from fastapi import Request

from .errors import HttpFault

SMALL_BYTES = 64 << 10
"""A body up to this size is always taken: the number of connections bounds how many there are."""


class HeldBodies:
    """`most` bytes of bodies larger than SMALL_BYTES, of all clients together."""

    def __init__(self, most: int) -> None:
        self._most, self.held = most, 0

    @contextlib.asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes]:
        """The whole body; it counts until the block ends. Raises HttpFault."""
        parts: list[bytes] = []
        size = counted = 0
        try:
            async for chunk in request.stream():
                parts.append(chunk)
                size += len(chunk)
                if size <= SMALL_BYTES:
                    continue
                if self.held + size - counted > self._most:
                    message = f"bodies of {self.held} bytes are held; at most {self._most} are: try again"
                    raise HttpFault(429, message, "too_many_bytes", retry_after=1, close=True)
                self.held, counted = self.held + size - counted, size
            body = b"".join(parts)
            parts.clear()
            yield body
        finally:
            parts.clear()  # a refusal holds this frame while its client sends on
            self.held -= counted
