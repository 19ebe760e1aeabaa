"""The clock for deletion and expiry: the wall clock while it agrees with the newest time in the store and with the
monotonic clock. A jump pauses deletion and expiry, because the time before or after it may be right.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

JUMP_SECONDS = 3600.0
TRUST_SECONDS = 86400.0
"""A clock that has run evenly for this long after a jump is trusted: the daemon was off, or the clock was set."""


class TrustedClock:
    """`seen`: the newest trusted time of an earlier daemon, None in a new store. Thread-safe."""

    def __init__(
        self,
        seen: float | None,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._wall, self._monotonic = wall, monotonic
        self._lock = threading.Lock()
        self._at, self._since = wall() if seen is None else seen, monotonic()
        self._jumped, self._even = 0.0, TRUST_SECONDS
        self._starting = True
        self.jump = 0.0
        """Seconds by which the wall clock is ahead, negative if it is late; 0 while it is trusted."""

    def now(self) -> float:
        """Unix seconds: the wall clock, or after a jump the time without the jump."""
        with self._lock:
            wall, monotonic = self._wall(), self._monotonic()
            expected = self._at + monotonic - self._since
            off = wall - expected
            if abs(off) > JUMP_SECONDS:
                if abs(off - self.jump) > JUMP_SECONDS:
                    self.jump, self._jumped = off, monotonic
                    # at a start the daemon was probably off for so long: a nightly stop must not pause it for ever
                    self._even = min(TRUST_SECONDS, abs(off)) if self._starting else TRUST_SECONDS
                    self._starting = False
                    log.warning(
                        "the clock jumped by %.0f s: nothing is deleted and no batch expires until it is set back, or "
                        "has run for %g hours: check the host's time",
                        off,
                        self._even / 3600,
                        extra={"event": "clock"},
                    )
                if monotonic - self._jumped < self._even:
                    return expected
            if self.jump:
                log.info("the clock is trusted again: deletion and expiry resume", extra={"event": "clock"})
            self._at, self._since, self.jump, self._starting = wall, monotonic, 0.0, False
            return wall

    @property
    def paused(self) -> bool:
        """Whether deletion and expiry are paused."""
        self.now()
        return self.jump != 0.0

    def stamp(self) -> int:
        """The time for a new row: the later of both times, so that rows made during a jump are not old after it."""
        return int(max(self.now(), self._wall()))
