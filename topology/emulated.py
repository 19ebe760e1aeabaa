"""A fabric that is not there: an all-reduce whose result may not be taken before the predicted time has passed. Wraps
another collective, which does the arithmetic; its name, wherever it is printed, begins with "emulated". Here for CPUs,
where the host's clock holds results back; on a GPU a kernel does (emulated_gpu.py).
"""

from __future__ import annotations

import ctypes
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from .collectives import Collective, Named, Pending
from .cost import LinkCost

if TYPE_CHECKING:
    from torch import Tensor

    from .ledger import Ledger

_PR_SET_TIMERSLACK = 29


@dataclass(frozen=True, slots=True)
class Emulation:
    """What one all-reduce of n bytes costs: latency_s + n / bytes_per_s, or by one of `others` where that is cheaper
    (a library has protocols for small and for large messages). The wire carries one message at a time; the latencies of
    several overlap. `name` says which fabric is meant. On a GPU alone: `multiprocessors` that a message holds while it
    travels (0: none, a pure delay), and `ranks` of the group that is meant, which say how many of the bytes pass
    through a rank's memory."""

    name: str
    latency_s: float
    bytes_per_s: float = float("inf")
    others: tuple[LinkCost, ...] = ()
    ranks: int = 2
    multiprocessors: int = 0

    def __post_init__(self) -> None:
        if not (0 <= self.latency_s < 60 and self.bytes_per_s > 0):
            raise ValueError(f"emulation {self.name}: latency_s in [0, 60) and bytes_per_s > 0, got {self}")
        if self.ranks < 1 or self.multiprocessors < 0:
            raise ValueError(f"emulation {self.name}: ranks of 1 or more and multiprocessors of 0 or more, got {self}")

    @property
    def label(self) -> str:
        held = f", {self.multiprocessors} multiprocessors held" if self.multiprocessors else ""
        return f"emulated {self.name}{held}"

    def parts(self, nbytes: int) -> tuple[float, float]:
        """(latency, time on the wire) of a message of nbytes, in seconds."""
        prices = (LinkCost(self.latency_s, self.bytes_per_s), *self.others)
        best = min(prices, key=lambda price: price.latency_s + nbytes / price.bytes_per_s)
        return best.latency_s, nbytes / best.bytes_per_s

    def seconds(self, nbytes: int) -> float:
        """One all-reduce of nbytes, alone on the wire."""
        return sum(self.parts(nbytes))

    def moved_bytes(self, nbytes: int) -> int:
        """What a rank reads and what it writes for an all-reduce of nbytes: each part of the message goes to all other
        ranks once on its way to the sum and once on its way back."""
        return round(2 * (self.ranks - 1) / self.ranks * nbytes)


class Clock(Protocol):
    """Holds a result back."""

    def start(self, wire_s: float, latency_s: float) -> float:
        """The message sets off now; returns a token for `finish`."""

    def finish(self, token: float) -> None:
        """Returns when the message may have arrived."""


class HostClock:
    """Sleeps on the monotonic clock; exact to some ten microseconds, without ever spinning."""

    def __init__(self) -> None:
        self._wire_free = 0.0
        self._precise = threading.local()

    def start(self, wire_s: float, latency_s: float) -> float:
        self._wire_free = max(self._wire_free, time.monotonic()) + wire_s
        return self._wire_free + latency_s

    def finish(self, token: float) -> None:
        if not getattr(self._precise, "done", False):
            # The kernel rounds a thread's sleeps up by 50 us unless told otherwise.
            ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
            self._precise.done = True
        while (left := token - time.monotonic()) > 0:
            time.sleep(left)


class Emulated:
    """`inner` with the time of `emulation` laid over it; also for a group of one that stands for a larger one."""

    def __init__(self, inner: Collective, emulation: Emulation, ledger: Ledger, clock: Clock | None = None) -> None:
        self._inner, self._emulation, self._ledger = inner, emulation, ledger
        self._clock: Clock = clock or HostClock()

    def start(self, x: Tensor, layer: str = "") -> Pending:
        began = time.monotonic()
        latency_s, wire_s = self._emulation.parts(x.nbytes)
        token = self._clock.start(wire_s, latency_s)
        return _EmulatedPending(self, self._inner.start(x), token, began, layer)

    def named(self, layer: str) -> Named:
        return Named(self, layer)

    def _finish(self, inner: Pending, token: float, began: float, layer: str) -> Tensor:
        asked = time.monotonic()
        x = inner.wait()
        self._clock.finish(token)
        self._ledger.add("all_reduce", "emulated", self._emulation.label, x.nbytes, began, token, asked, layer)
        return x


class _EmulatedPending:
    __slots__ = ("_began", "_inner", "_layer", "_owner", "_token", "_x")

    def __init__(self, owner: Emulated, inner: Pending, token: float, began: float, layer: str) -> None:
        self._owner, self._inner, self._token, self._began, self._layer = owner, inner, token, began, layer
        self._x: Tensor | None = None

    def wait(self) -> Tensor:
        if self._x is None:
            self._x = self._owner._finish(self._inner, self._token, self._began, self._layer)
        return self._x


def emulate(inner: Collective, emulation: Emulation, ledger: Ledger, on_gpu: bool) -> Collective:
    """`inner` with the time of `emulation` laid over it, by the device's clock or the host's. Raises ValueError where
    multiprocessors are to be held and there are none, RuntimeError where the GPU's part cannot be had."""
    if on_gpu:
        from .emulated_gpu import EmulatedOnGpu

        return EmulatedOnGpu(inner, emulation, ledger)
    if emulation.multiprocessors:
        raise ValueError(
            f"{emulation.label}: only a GPU has multiprocessors to hold; leave emulated_multiprocessors at 0 on a CPU"
        )
    return Emulated(inner, emulation, ledger)
