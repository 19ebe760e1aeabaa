"""Bounds the bytes in memory of bodies until they are requests, and of answers until clients have read them."""

from __future__ import annotations

import contextlib
import mmap
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable

from fastapi import Request

from ...openai.errors import ApiError

SMALL_BYTES = 64 << 10
"""A body up to this size is always accepted: the limit on connections bounds their number."""
GROWING = "events"  # what an engine adds to while its client does not read
_UNREAD_SECONDS = 1.0  # without progress before an answer may be given up


class HeldBodies:
    """`most`: bytes of all bodies larger than SMALL_BYTES; `largest`: bytes of one. A large body has its own memory
    mapping: on the heap, fragmentation doubled the memory in use."""

    def __init__(self, most: int, largest: int) -> None:
        self._most, self._largest, self.bytes_open = most, largest, 0

    @contextlib.asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes | memoryview]:
        """Reads the whole body, which counts until the block ends. Raises ApiError."""
        small, large = bytearray(), None
        size = counted = 0
        try:
            async for chunk in request.stream():
                size += len(chunk)
                if size <= SMALL_BYTES:
                    small += chunk
                    continue
                if self.bytes_open + size - counted > self._most:
                    message = (
                        f"request bodies in memory have {self.bytes_open} bytes, at most {self._most} are allowed: "
                        "try again"
                    )
                    raise ApiError(message, "too_many_bytes", status=429, retry_after=1, close=True)
                self.bytes_open, counted = self.bytes_open + size - counted, size
                if large is None:
                    large = mmap.mmap(-1, self._largest, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                    large.write(small)
                large.write(chunk)
            yield bytes(small) if large is None else memoryview(large)[:size]
        finally:
            small, large = bytearray(), None  # a refusal holds this frame while its client sends on
            self.bytes_open -= counted


class Unread:
    """One request's bytes that its client has not read yet, by kind; see UnreadAnswers."""

    def __init__(self, answers: UnreadAnswers, owner: str) -> None:
        self._answers, self.owner = answers, owner
        self.parts: Counter[str] = Counter()
        self.moved = time.monotonic()
        self.ended = False
        self.end: Callable[[], object] = lambda: None

    def hold(self, part: str, size: int) -> None:
        """Sets the bytes of this kind to `size`. Raises ApiError if that exceeds the limit."""
        size = size if size > SMALL_BYTES else 0
        if self.parts[part] != size and not self.ended:
            self._answers.change(self, part, size)


class UnreadAnswers:
    """`most`: bytes of all answers larger than SMALL_BYTES; one key may have half. Over the limit, the answer that was
    read from longest ago is dropped: of the same key, or of the key with the most bytes."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: defaultdict[str, dict[Unread, None]] = defaultdict(dict)  # the longest unread one first
        self.unread_bytes: Counter[str] = Counter()

    def change(self, one: Unread, part: str, size: int) -> None:
        had, more = one.parts.total(), size - one.parts[part]
        if part == GROWING and size > self._most // 4:
            raise _unread(size)
        while more > 0 and had < self.unread_bytes[one.owner] > self._most // 2 - more:  # one alone may be larger
            self.give_up(one.owner, one)
        while more > 0 and had < self.unread_bytes.total() > self._most - more:
            self.give_up(max(self.unread_bytes, key=self.unread_bytes.__getitem__), one)
        one.parts[part] = size
        self.unread_bytes[one.owner] += more
        of_key = self._open[one.owner]
        if more <= 0:
            one.moved = time.monotonic()
            of_key.pop(one, None)
        if one.parts.total():
            of_key[one] = None
        elif not of_key:
            del self._open[one.owner], self.unread_bytes[one.owner]

    def close(self, one: Unread) -> None:
        for part in list(one.parts):
            one.hold(part, 0)
        one.ended = True

    def give_up(self, owner: str, asking: Unread) -> None:
        old = time.monotonic() - _UNREAD_SECONDS
        others = [one for one in self._open[owner] if one is not asking]
        oldest = next((one for one in others if one.moved < old or owner != asking.owner), None)
        if oldest is None:
            raise _unread(self.unread_bytes[owner])
        self.close(oldest)
        oldest.end()


def _unread(size: int) -> ApiError:
    message = f"responses of {size} bytes are unread: read them, then try again"
    return ApiError(message, "too_many_bytes", status=429, retry_after=1)
