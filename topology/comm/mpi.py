"""All-reduces and gathers over MPI. One communication thread makes every MPI call, in program order, through one queue:
upper-case buffer calls only. It asks MPI for progress while something is in flight and sleeps otherwise.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..placement.layout import GroupLayout
from .bootstrap import MpiBootstrap
from .collectives import CollectiveTimeout, CommunicationError, Gathering
from .groups import CommOptions
from .ledger import Ledger
from .ordered import add_up

_POLL_S = 20e-6
_EXCHANGE_RANKS = 4  # above these, or above EXCHANGE_BYTES, MPI's own all-reduce moves fewer bytes
_EXCHANGE_BYTES = 64 << 10
_TAG = 77


class MpiBackend:
    """A Collective over a communicator of its own, made from the group's ranks. Small messages of small groups are
    exchanged whole (Isend, Irecv) and summed in rank order in fp32, as MPI_SUM knows no bfloat16; others of float32 go
    through Iallreduce, of 16 bits through Iallgather of pieces and the same sum."""

    def __init__(
        self, bootstrap: MpiBootstrap, layout: GroupLayout, options: CommOptions, ledger: Ledger, link: str
    ) -> None:
        from mpi4py import MPI

        self._mpi: Any = MPI
        # Each group makes its communicator from its own ranks alone.
        group = bootstrap.comm.Get_group().Incl(list(layout.ranks))
        self._comm: Any = bootstrap.comm.Create_group(group, _TAG)
        group.Free()
        self.size, self.rank = layout.size, layout.ranks.index(bootstrap.rank)
        self.deterministic = options.deterministic
        self.timeout_s = options.timeout_s
        self.ledger, self.link = ledger, link
        self._queue: deque[_Job] = deque()
        self._wake = threading.Semaphore(0)
        self._closing = False
        self._error: BaseException | None = None
        self._seq = 0
        self.gathers = MpiGather(self)
        self._thread = threading.Thread(target=self._run, name="laddertron-mpi", daemon=True)
        self._thread.start()

    def set_timeout(self, seconds: float) -> None:
        self.timeout_s = seconds

    def start(self, x: Tensor, layer: str = "", at_once: bool = False, /) -> _Job:
        if not x.is_contiguous() or x.dtype not in (torch.float32, torch.bfloat16, torch.float16) or not x.numel():
            raise ValueError(
                f"cannot all-reduce {tuple(x.shape)} of {x.dtype}: contiguous float32, bfloat16 or float16"
            )
        whole = self.size <= _EXCHANGE_RANKS and x.nbytes <= _EXCHANGE_BYTES
        exchange = whole or self.deterministic or x.dtype != torch.float32
        return self.submit(_Job(self, "all_reduce", "exchange" if exchange else "mpi", x, None, layer))

    def submit(self, job: _Job) -> _Job:
        if self._closing or self._error is not None:
            raise CommunicationError(f"the MPI group is closed{f': {self._error}' if self._error else ''}")
        job.seq, self._seq = self._seq, self._seq + 1
        self.ledger.started += 1
        self._queue.append(job)
        self._wake.release()
        return job

    def close(self) -> None:
        """Ends the thread; always returns. What was in flight is left to MPI_Finalize. Idempotent."""
        if not self._closing:
            self._closing = True
            self._wake.release()
            self._thread.join(5.0)

    # ---- the communication thread ----

    def _run(self) -> None:
        ctypes.CDLL(None).prctl(29, 1, 0, 0, 0)  # PR_SET_TIMERSLACK: sleeps of _POLL_S, not of 50 us more
        flying: deque[_Job] = deque()
        try:
            while True:
                if flying:
                    got = self._wake.acquire(blocking=False)
                else:
                    got = self._wake.acquire()
                if got and self._queue:
                    job = self._queue.popleft()
                    job.set_off(self._mpi, self._comm)
                    flying.append(job)
                    continue
                if self._closing:
                    break
                # MPI completes the requests of several collectives in any order; they are taken in program order.
                while flying and self._mpi.Request.Testall(flying[0].requests):
                    flying.popleft().complete()
                if flying:
                    time.sleep(_POLL_S)
            if not flying:
                self._comm.Free()
        except BaseException as error:
            self._error = error
            for job in [*flying, *self._queue]:
                job.fail(error)


class _Job:
    """One collective: a Pending, or the inside of a gather."""

    def __init__(
        self,
        owner: MpiBackend,
        op: str,
        strategy: str,
        x: Tensor | None,
        payload: NDArray[np.uint8] | None,
        layer: str = "",
    ) -> None:
        self._owner, self.op, self.strategy, self._x, self.layer = owner, op, strategy, x, layer
        self.began, self.arrived, self.seq = time.monotonic(), 0.0, -1
        self.requests: list[Any] = []
        self._done = threading.Event()
        self._entered = False
        self._error: BaseException | None = None
        if x is not None:
            payload = x.view(-1).view(torch.uint8).numpy()
        assert payload is not None
        self._payload: NDArray[np.uint8] = payload
        self.nbytes = payload.nbytes
        rows = owner.size if strategy == "exchange" else 1
        self.received = np.empty((rows, self.nbytes), dtype=np.uint8)

    def set_off(self, mpi: Any, comm: Any) -> None:
        if self.op == "gather" or (self.strategy == "exchange" and self.nbytes > _EXCHANGE_BYTES):
            self.requests = [comm.Iallgather([self._payload, mpi.BYTE], [self.received, mpi.BYTE])]
        elif self.strategy == "exchange":
            me, size = self._owner.rank, self._owner.size
            peers = [(me + k) % size for k in range(1, size)]
            self.requests = [comm.Irecv([self.received[peer], mpi.BYTE], peer, _TAG) for peer in peers]
            self.requests += [comm.Isend([self._payload, mpi.BYTE], peer, _TAG) for peer in peers]
            self.received[me] = self._payload
        else:
            self.requests = [
                comm.Iallreduce([self._payload, mpi.FLOAT], [self.received, mpi.FLOAT], mpi.SUM),
            ]

    def complete(self) -> None:
        if self._x is not None:
            self._sum(self._x)
        self.arrived = time.monotonic()
        self._done.set()

    def _sum(self, x: Tensor) -> None:
        with torch.inference_mode():
            parts = torch.from_numpy(self.received).view(x.dtype).view(len(self.received), *x.shape)
            x.copy_(add_up(parts, self._owner.deterministic))

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._done.set()

    def finish(self) -> NDArray[np.uint8]:
        """Waits; returns the received bytes [ranks, n], for a sum its summands. Raises CollectiveTimeout or
        CommunicationError."""
        asked, ledger = time.monotonic(), self._owner.ledger
        if not self._done.is_set():
            ledger.waiting = f"collective {self.seq} ({self.op} of {self.nbytes} bytes)"
            if not self._done.wait(self._owner.timeout_s):
                raise CollectiveTimeout(f"collective {self.seq}: MPI did not complete it in time", -1, self.seq)
        if self._error is not None:
            raise CommunicationError(f"collective {self.seq}: {self._error}") from self._error
        ledger.waiting = ""
        if not self._entered:
            self._entered = True
            ledger.add(
                self.op, self.strategy, self._owner.link, self.nbytes, self.began, self.arrived, asked, self.layer
            )
        return self.received

    def wait(self) -> Tensor:
        self.finish()
        assert self._x is not None
        return self._x


class MpiGather:
    """Gathers of bytes, in one queue with the all-reduces."""

    def __init__(self, owner: MpiBackend) -> None:
        self._owner = owner

    def start(self, payload: NDArray[np.uint8]) -> Gathering:
        mine = np.ascontiguousarray(payload, dtype=np.uint8).copy()
        return Gathering(self._owner.submit(_Job(self._owner, "gather", "exchange", None, mine)).finish)
