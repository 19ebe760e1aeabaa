"""An emulated fabric on CPUs: wraps another collective and holds back its result until the predicted time has passed.
Its printed name begins with "emulated".
"""

from __future__ import annotations

import ctypes
import threading
import time

from torch import Tensor

from ..link_cost import Emulation
from .collectives import Collective, Later, Pending
from .ledger import Ledger

_PR_SET_TIMERSLACK = 29


class HostClock:
    """Holds a result back: sleeps on the monotonic clock, exact to some ten microseconds, without ever spinning."""

    def __init__(self) -> None:
        self._wire_free = 0.0
        self._precise = threading.local()

    def start(self, wire_s: float, latency_s: float) -> float:
        """The message sets off now; returns a token for `finish`."""
        self._wire_free = max(self._wire_free, time.monotonic()) + wire_s
        return self._wire_free + latency_s

    def finish(self, token: float) -> None:
        """Returns when the message may have arrived."""
        if not getattr(self._precise, "done", False):
            # By default the kernel rounds a thread's sleeps up by 50 us.
            ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
            self._precise.done = True
        while (left := token - time.monotonic()) > 0:
            time.sleep(left)


class Emulated:
    """`inner`, delayed by `emulation`; also for a group of one that represents a larger one."""

    def __init__(self, inner: Collective, emulation: Emulation, ledger: Ledger) -> None:
        self._inner, self._emulation, self._ledger, self._clock = inner, emulation, ledger, HostClock()

    def start(self, x: Tensor, layer: str = "", at_once: bool = False, /) -> Pending:
        began = time.monotonic()
        latency_s, wire_s = self._emulation.parts(x.nbytes)
        token = self._clock.start(wire_s, latency_s)
        inner = self._inner.start(x)

        def finish() -> Tensor:
            asked = time.monotonic()
            reduced = inner.wait()
            self._clock.finish(token)
            self._ledger.add("all_reduce", "emulated", self._emulation.label, x.nbytes, began, token, asked, layer)
            return reduced

        return Later(finish)
