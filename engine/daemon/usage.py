"""Counts requests and tokens of each key by day (UTC) and enforces its limits."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable

from ..metrics.observer import Observer
from ..openai.answers import Answer
from ..openai.errors import ApiError
from .keys import KeyLimits
from .store import records
from .store.rows import Tokens
from .store.schema import Rows
from .store.store import Store
from .store.sums import Damaged

DAY = 86400
_DAYS = 8


def tokens_of(answer: Answer) -> Tokens:
    """The computed tokens of an answer, complete or not; none if it failed before its first token."""
    if not answer.place and (answer.error is not None or not answer.done):
        return Tokens()
    return Tokens(answer.prompt_tokens, answer.cached_tokens, answer.completion_tokens)


class Usage:
    """Call `enter` and `leave` around a request and `add` after it, on the daemon's event loop."""

    def __init__(self, store: Store, observer: Observer, limits_of: Callable[[str], KeyLimits]) -> None:
        self.store, self._observer, self.limits_of, self.monotonic = store, observer, limits_of, time.monotonic
        self._budgets: dict[str, tuple[float, float]] = {}  # allowed requests, and at what time (token bucket)
        self.in_progress: Counter[str] = Counter()
        self._day = 0
        self._today: Counter[str] = Counter()
        self._days: dict[int, Counter[str]] = {}
        self.unwritten: dict[tuple[str, int], tuple[int, Tokens]] = {}

    async def load(self) -> None:
        day = self.today()
        damaged: list[Damaged] = []
        for row in await self.store.read(lambda db: records.read_usage(db, None, day, damaged)):
            self._today[row["owner"]] += row["prompt_tokens"] + row["completion_tokens"]
        for wrong in damaged:
            self.store.report(wrong)

    def enter(self, owner: str, computes: bool) -> None:
        """Counts one more open request of the owner; `computes`: it generates tokens. Raises ApiError, without counting
        it, if a limit is exceeded."""
        limits = self.limits_of(owner)
        if (most := limits.concurrent_requests) is not None and self.in_progress[owner] >= most:
            self._refuse(owner, "concurrent_requests", f"{most} requests of this key are in flight", 1)
        if computes and (late := self.exhausted(owner)):
            used = f"{self._today[owner]} of {limits.tokens_per_day}"
            self._refuse(owner, "tokens_per_day", f"this key has used {used} tokens today (UTC)", late)
        if (a_minute := limits.requests_per_minute) is not None:
            now = self.monotonic()
            left, at = self._budgets.get(owner, (float(a_minute), now))
            left = min(float(a_minute), left + (now - at) * a_minute / 60)
            if left < 1:
                wait = (1 - left) * 60 / a_minute
                self._refuse(owner, "requests_per_minute", f"this key may send {a_minute} requests per minute", wait)
            self._budgets[owner] = left - 1, now
        self.in_progress[owner] += 1

    def leave(self, owner: str) -> None:
        self.in_progress[owner] -= 1
        if not self.in_progress[owner]:
            del self.in_progress[owner]

    def exhausted(self, owner: str) -> float:
        """Seconds until the owner's daily tokens are reset; 0 if some are left."""
        day, most = self.today(), self.limits_of(owner).tokens_per_day
        return (day + 1) * DAY - self.store.clock.now() if most is not None and self._today[owner] >= most else 0.0

    def check_stored(self, owner: str, stored: int, more: int, in_flight: int = 0) -> None:
        """Raises ApiError if `more` bytes, with those of the owner's other uploads `in_flight`, would exceed its limit
        on stored bytes."""
        most = self.limits_of(owner).stored_bytes
        if most is not None and stored + in_flight + more > most:
            others = f", {in_flight} more are being uploaded," if in_flight else ""
            message = f"this key has stored {stored} bytes{others} and may store {most}"
            message += f": delete files, or send less than {more}"
            self._refuse(owner, "stored_bytes", message, 60)

    def add(self, owner: str, tokens: Tokens, requests: int = 1, stored: bool = False) -> None:
        """Adds computed tokens. `stored`: they are in the store already."""
        day = self.today()
        self._today[owner] += tokens.prompt + tokens.completion
        self._observer.used(owner, requests, tokens.prompt, tokens.completion)
        if not stored:
            self._owe(owner, day, requests, tokens)

    def _owe(self, owner: str, day: int, requests: int, tokens: Tokens) -> None:
        had, before = self.unwritten.get((owner, day), (0, Tokens()))
        self.unwritten[owner, day] = had + requests, before.plus(tokens)

    async def flush(self) -> None:
        """Writes usage to the store. Raises StoreUnavailable; then the next call writes it."""
        usage, self.unwritten = self.unwritten, {}
        if not usage:
            return

        def work(rows: Rows) -> None:
            for (owner, day), (requests, tokens) in usage.items():
                records.add_usage(rows, owner, day, requests, tokens)

        try:
            await asyncio.shield(self.store.write(work))  # once queued it is written, even if the caller is cancelled
        except Exception:
            for (owner, day), (requests, tokens) in usage.items():
                self._owe(owner, day, requests, tokens)
            raise

    def today(self) -> int:
        """Days since 1970, UTC, by the trusted clock."""
        day = int(self.store.clock.now()) // DAY
        if day != self._day:  # if the clock was set back, continues that day's counts
            self._day, self._today = day, self._days.setdefault(day, Counter())
            while len(self._days) > _DAYS:
                del self._days[min(self._days)]
        return day

    def _refuse(self, owner: str, limit: str, message: str, retry_after: float) -> None:
        self._observer.limited(owner, limit)
        seconds = max(1, math.ceil(retry_after))
        message += f": try again in {seconds} s"
        raise ApiError(message, "rate_limit_exceeded", limit, status=429, retry_after=seconds, close=True)
