"""Bodies while they are read and made into requests: how many bytes of them this process holds at once."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import AsyncIterator

from fastapi import Request

from ...openai.errors import ApiError

SMALL_BYTES = 64 << 10
"""A body up to this size is always taken: the number of connections bounds how many there are."""


class HeldBodies:
    """`most` bytes of bodies larger than SMALL_BYTES, of all clients together; `largest`: one of them at most.

    A large body has a mapping of its own. Blocks of its size among the small ones on the heap would leave holes: twice
    the bytes that are counted were held."""

    def __init__(self, most: int, largest: int) -> None:
        self._most, self._largest, self.held = most, largest, 0

    @contextlib.asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes | memoryview]:
        """The whole body; it counts until the block ends. Raises ApiError."""
        small, large = bytearray(), None
        size = counted = 0
        try:
            async for chunk in request.stream():
                size += len(chunk)
                if size <= SMALL_BYTES:
                    small += chunk
                    continue
                if self.held + size - counted > self._most:
                    message = f"bodies of {self.held} bytes are held; at most {self._most} are: try again"
                    raise ApiError(message, "too_many_bytes", status=429, retry_after=1, close=True)
                self.held, counted = self.held + size - counted, size
                if large is None:
                    large = mmap.mmap(-1, self._largest, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                    large.write(small)
                large.write(chunk)
            yield bytes(small) if large is None else memoryview(large)[:size]
        finally:
            small, large = bytearray(), None  # a refusal holds this frame while its client sends on
            self.held -= counted
