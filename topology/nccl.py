"""All-reduces on GPUs: NCCL on a high-priority stream of its own, tied to the computing stream by events. The host
never waits; the whole may be captured in a CUDA graph.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from .ledger import Entry

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray
    from torch import Tensor

    from .ledger import Ledger

_OPEN_TIMINGS = 1024
# torch leaves these two without types.
_STREAM: Any = torch.cuda.Stream
_EVENT: Any = torch.cuda.Event


class NcclCollective:
    """All-reduces over a torch group of NCCL. Events time every collective outside of graphs: in flight from when x was
    ready, waited for from when the computing stream asked; both are read when they are long past."""

    def __init__(self, group: Any, ledger: Ledger, link: str) -> None:
        self._group, self._ledger, self._link = group, ledger, link
        self._stream = _STREAM(priority=-1)
        self._timings: deque[tuple[int, Any, Any, Any]] = deque(maxlen=_OPEN_TIMINGS)
        self._sums = [0, 0, 0.0, 0.0]
        self._settling = threading.Lock()  # the heartbeat's thread reads the accounts too
        ledger.add_source(self._entries, lambda: ())

    def start(self, x: Tensor) -> _NcclPending:
        timed = not torch.cuda.is_current_stream_capturing()
        ready = _EVENT(enable_timing=timed)
        ready.record()
        self._stream.wait_event(ready)
        with torch.cuda.stream(self._stream):
            dist.all_reduce(x, group=self._group)
        self._ledger.started += 1
        x.record_stream(self._stream)
        done = _EVENT(enable_timing=timed)
        done.record(self._stream)
        return _NcclPending(self, x, ready, done, timed)

    def _asked(self, size: int, ready: Any, asked: Any, done: Any) -> None:
        if len(self._timings) == _OPEN_TIMINGS:
            self._settle()
        self._timings.append((size, ready, asked, done))

    def _settle(self) -> None:
        with self._settling:
            while self._timings and self._timings[0][2].query() and self._timings[0][3].query():
                size, ready, asked, done = self._timings.popleft()
                self._sums[0] += 1
                self._sums[1] += size
                self._sums[2] += ready.elapsed_time(done) * 1e-3
                self._sums[3] += max(0.0, asked.elapsed_time(done) * 1e-3)

    def _entries(self) -> Iterable[Entry]:
        self._settle()
        count, size, flight, waited = self._sums
        return [Entry("all_reduce", "nccl", self._link, int(count), int(size), flight, waited)]


class _NcclPending:
    __slots__ = ("_done", "_owner", "_ready", "_timed", "_x")

    def __init__(self, owner: NcclCollective, x: Tensor, ready: Any, done: Any, timed: bool) -> None:
        self._owner, self._x, self._ready, self._done, self._timed = owner, x, ready, done, timed

    def wait(self) -> Tensor:
        if self._timed:
            asked = _EVENT(enable_timing=True)
            asked.record()
            self._owner._asked(self._x.nbytes, self._ready, asked, self._done)
            self._timed = False
        torch.cuda.current_stream().wait_event(self._done)
        return self._x


class NcclGather:
    """Gathers of bytes that lie on the host: there and back through the device."""

    def __init__(self, group: Any, ledger: Ledger) -> None:
        self._group, self._ledger = group, ledger

    def start(self, payload: NDArray[np.uint8]) -> _NcclGathering:
        mine = torch.from_numpy(np.ascontiguousarray(payload, dtype=np.uint8)).cuda(non_blocking=True)
        out = torch.empty((dist.get_world_size(self._group), len(mine)), dtype=torch.uint8, device=mine.device)
        self._ledger.started += 1
        work = dist.all_gather_into_tensor(out, mine, group=self._group, async_op=True)
        return _NcclGathering(work, out, self._ledger)


class _NcclGathering:
    def __init__(self, work: Any, out: Tensor, ledger: Ledger) -> None:
        self._work, self._out, self._ledger = work, out, ledger

    def wait(self) -> NDArray[np.uint8]:
        self._work.wait()
        # The one place where the host waits for the device, and with it for every all-reduce before.
        self._ledger.waiting = "gather"
        gathered = self._out.cpu().numpy()
        self._ledger.waiting = ""
        return gathered
