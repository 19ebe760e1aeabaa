"""How long a collective may make its caller wait, from how long steps have taken: a peer that is late is slow up to
there and lost beyond.

Pure; engine/step/runner.py feeds it and hands the answer to the communicator. A library's default of half an hour is no
detector, and a fixed one of seconds takes a long prompt for a hang.
"""

from __future__ import annotations

from collections.abc import Callable

PATIENCE = 30.0
"""Times the longest step: a rank ten times slower than it was is for an alert, not for a timeout."""
LEAST_S = 10.0
FORGET = 0.98
"""What is left of a longest step after another one of its size: one hiccup does not count for ever."""


class CollectiveTimeouts:
    """Sets the group's collective timeout by the times of its steps. `longest` [s] by the binary logarithm of a step's
    tokens."""

    def __init__(self, first: float, set_timeout: Callable[[float], None], least: float = LEAST_S) -> None:
        """first: the limit before anything was measured."""
        self.least, self.set_to, self._set_timeout = least, first, set_timeout
        self.longest: dict[int, float] = {}
        set_timeout(first)

    def before(self, tokens: int) -> None:
        limit = self.limit(tokens)
        if not 0.8 < limit / self.set_to < 1.25:
            self._set_timeout(limit)
            self.set_to = limit

    def after(self, tokens: int, seconds: float) -> None:
        size = max(1, tokens).bit_length()
        self.longest[size] = max(seconds, FORGET * self.longest.get(size, 0.0))

    def limit(self, tokens: int) -> float:
        """Seconds for each collective of a step of so many tokens. A size never seen is taken to cost in proportion to
        the next smaller one, or as much as the next larger one."""
        if not self.longest:
            return self.set_to
        size = max(1, tokens).bit_length()
        known = max((s for s in self.longest if s <= size), default=min(self.longest))
        return max(self.least, PATIENCE * self.longest[known] * 2.0 ** max(0, size - known))
