"""Hidden rows between pipeline stages on GPUs: NCCL's send and receive on a communicator and a stream of their own, the
shares put together by the group's all-gather. Never ran on several GPUs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .collectives import Later, Pending
from .ledger import Ledger

_STREAM: Any = torch.cuda.Stream
_EVENT: Any = torch.cuda.Event


class NcclBoundary:
    """`rail`: the torch group of this rank's peers, stage after stage; `tp`: its own stage's. Seconds are not counted:
    sends and receives have no common clock."""

    def __init__(self, rail: Any, tp: Any, ledger: Ledger, previous: int = -1) -> None:
        """previous: the job's rank that is this one's peer in the stage before."""
        self._rail, self._tp, self._ledger, self._previous = rail, tp, ledger, previous
        self._latest: Any = None  # the event of the last rows that were asked for
        self._stage, self._index, self._size = rail.rank(), tp.rank(), tp.size()
        self._sending, self._receiving = _STREAM(priority=-1), _STREAM(priority=-1)

    def connect(self) -> None:
        """Exchanges a message with the neighbours. NCCL makes the communicator of two ranks at their first message; all
        ranks call this before free memory is counted."""
        message = torch.zeros(1, device="cuda")
        if self._stage:
            self._rail.recv([message], self._stage - 1, 0).wait()
        if self._stage < self._rail.size() - 1:
            self._rail.send([message], self._stage + 1, 0).wait()

    def send(self, x: Tensor, own: bool = False) -> None:
        """Sends a copy of this rank's share, whose memory the allocator keeps until the send has ended."""
        share = x.reshape(-1).clone() if own else self._padded(x)[self._index].clone()
        self._sending.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._sending):
            share.record_stream(self._sending)
            # NOTE: NCCL's group sends on a stream of its own, which only Work.wait() joins to this one; without it the
            # allocator would reuse the share while it is sent.
            self._rail.send([share], self._stage + 1, 0).wait()

    def receive(self, shape: tuple[int, int], dtype: torch.dtype, count: int, own: bool = False) -> list[Pending]:
        """Posted at once, so that the link works while the current stream computes."""
        return [self._post(shape, dtype, own) for _ in range(count)]

    def _post(self, shape: tuple[int, int], dtype: torch.dtype, own: bool) -> Pending:
        size = shape[0] * shape[1] if own else -(-shape[0] * shape[1] // self._size)
        share = torch.empty(size, dtype=dtype, device="cuda")
        self._receiving.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._receiving):
            share.record_stream(self._receiving)
            self._rail.recv([share], self._stage - 1, 0).wait()  # else the event would be recorded before the data came
            there = _EVENT()
            there.record(self._receiving)
        self._latest = there
        self._ledger.started += 1
        self._ledger.add("boundary", "nccl", "net", shape[0] * shape[1] * dtype.itemsize, 0.0, 0.0, 0.0, now=0.0)

        def finish() -> Tensor:
            torch.cuda.current_stream().wait_event(there)
            if own:
                return share.view(shape)
            gathered = share.new_empty(self._size * len(share))
            dist.all_gather_into_tensor(gathered, share, group=self._tp)
            return gathered[: shape[0] * shape[1]].view(shape)

        return Later(finish)

    def late(self) -> tuple[str, int] | None:
        """What the stage before has not sent, and the rank of the job that should have."""
        if self._latest is None or self._latest.query():
            return None
        return f"hidden rows from stage {self._stage - 1} (rank {self._previous}) did not come", self._previous

    def _padded(self, x: Tensor) -> Tensor:
        flat, size = x.reshape(-1), -(-x.numel() // self._size)
        if size * self._size > len(flat):
            flat = torch.cat((flat, flat.new_zeros(size * self._size - len(flat))))
        return flat.view(self._size, size)
