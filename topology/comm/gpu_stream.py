"""All-reduces on a GPU concurrent with the computation: a high-priority stream of their own, tied to the computing
stream by events. The host never waits; the whole may be captured in a CUDA graph. What runs on the stream is the
caller's.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from .collectives import Done, Pending
from .ledger import Entry, Ledger

_OPEN_TIMINGS = 1024
# torch leaves these two without types.
_STREAM: Any = torch.cuda.Stream
_EVENT: Any = torch.cuda.Event


class StreamCollective:
    """A Collective that `issue` puts on the side stream: called with x, that stream current, it gives back the name of
    the strategy that it took, None for `strategy`. One after another, as NCCL's collectives of one communicator are. x
    is not recorded as in use there: its Pending keeps it, and after `wait` the computing stream, which alone may reuse
    its memory, comes after. In a capture, a recorded tensor's memory would be lost until the end. Events time every
    collective outside of graphs: in flight from when x was ready, waited for from when the computing stream asked; both
    are read when they are long past."""

    def __init__(self, issue: Callable[[Tensor], str | None], ledger: Ledger, strategy: str, link: str) -> None:
        self._issue, self._ledger, self._strategy, self._link = issue, ledger, strategy, link
        self.stream = _STREAM(priority=-1)
        self.timings: deque[tuple[tuple[str, str], int, Any, Any, Any]] = deque(maxlen=_OPEN_TIMINGS)
        self._sums: dict[tuple[str, str], list[float]] = {(strategy, ""): [0, 0, 0.0, 0.0]}
        self._settling = threading.Lock()  # the heartbeat's thread reads the accounts too
        ledger.add_source(self.entries, lambda: ())

    def start(self, x: Tensor, layer: str = "", at_once: bool = False, /) -> Pending:
        timed = not torch.cuda.is_current_stream_capturing()
        ready, done = (_EVENT(enable_timing=timed) for _ in range(2))
        if at_once:
            return self._start_inline(x, layer, timed, ready, done)
        ready.record()
        self.stream.wait_event(ready)
        with torch.cuda.stream(self.stream):
            strategy = self._issue(x) or self._strategy
        self._ledger.started += 1
        done.record(self.stream)
        return _StreamPending(self, x, ready, done, timed, (strategy, layer))

    def _start_inline(self, x: Tensor, layer: str, timed: bool, ready: Any, done: Any) -> Pending:
        """On the computing stream, which has then waited for all of it."""
        if timed:
            ready.record()
        strategy = self._issue(x) or self._strategy
        self._ledger.started += 1
        if timed:
            done.record()
            self._asked((strategy, layer), x.nbytes, ready, ready, done)
        return Done(x)

    def _asked(self, account: tuple[str, str], size: int, ready: Any, asked: Any, done: Any) -> None:
        if len(self.timings) == _OPEN_TIMINGS:
            self.settle()
        self.timings.append((account, size, ready, asked, done))

    def settle(self) -> None:
        with self._settling:
            while self.timings and self.timings[0][3].query() and self.timings[0][4].query():
                account, size, ready, asked, done = self.timings.popleft()
                sums = self._sums.setdefault(account, [0, 0, 0.0, 0.0])
                sums[0] += 1
                sums[1] += size
                sums[2] += ready.elapsed_time(done) * 1e-3
                sums[3] += max(0.0, asked.elapsed_time(done) * 1e-3)

    def entries(self) -> Iterable[Entry]:
        self.settle()
        return [
            Entry("all_reduce", strategy, self._link, int(count), int(size), flight, waited, layer)
            for (strategy, layer), (count, size, flight, waited) in dict(self._sums).items()
        ]


class _StreamPending:
    __slots__ = ("_account", "_done", "_owner", "_ready", "_timed", "_x")

    def __init__(
        self, owner: StreamCollective, x: Tensor, ready: Any, done: Any, timed: bool, account: tuple[str, str]
    ) -> None:
        self._owner, self._x, self._ready, self._done, self._timed = owner, x, ready, done, timed
        self._account = account

    def wait(self) -> Tensor:
        if self._timed:
            asked = _EVENT(enable_timing=True)
            asked.record()
            self._owner._asked(self._account, self._x.nbytes, self._ready, asked, self._done)
            self._timed = False
        torch.cuda.current_stream().wait_event(self._done)
        return self._x
