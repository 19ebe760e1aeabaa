"""How long tests wait, and how they measure, on a machine that may be slow, loaded, or both.

What must happen is waited for with HANG_S: it elapses only where something hangs. That something happens *soon* is
shown against the time-out that would else have to elapse, which the test sets far beyond HANG_S; a bound in seconds on
the wall clock would measure the machine. What must be cheap is measured in processor time, the best of a few tries.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

HANG_S = 600.0
FOR_EVER_S = 3600.0
"""For the time-outs of what is tested that must not be what ends it."""


def until(condition: Callable[[], Any], what: Callable[[], Any] | str = "", pause_s: float = 0.01) -> None:
    """Asks until it is so: for what tells nobody. `what` is said if that takes HANG_S."""
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline, what() if callable(what) else what
        time.sleep(pause_s)


def cheapest(call: Callable[[], Any], tries: int = 5) -> float:
    """The least processor seconds of this process that a call took: the other tries met the collector or a cold
    cache."""

    def once() -> float:
        began = time.process_time()
        call()
        return time.process_time() - began

    return min(once() for _ in range(tries))
