"""A two-level all-reduce over gloo or NCCL: reduce-scatter inside the node, all-reduce across the rail, all-gather
inside. Each rank sends 1 / per_node of the message across; all ranks end with the same bits.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_JOIN_S = 1.0

# Of torch 2.13 on; the names before it warn since then.
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class TwoLevel:
    """Sums x (contiguous, any float type) over all ranks, in place. On GPUs all three calls are issued to the current
    stream and the host waits for none. The part of a scatter or gather is at its place in x, which NCCL supports, so
    nothing is allocated and the sum can be captured."""

    name = "two_level"

    def __init__(self, intra: Any, rail: Any, takes: Callable[[int], bool], gather: Any = None) -> None:
        """Torch groups of this rank's node and rail; `takes`: message bytes -> whether to go in two levels; `gather`:
        another group of the node, which Relay needs."""
        self._intra, self._rail, self._takes, self._gather = intra, rail, takes, gather or intra
        self.ranks, self._index = dist.get_world_size(intra), dist.get_rank(intra)

    def carries(self, x: Tensor) -> bool:
        """Whether x uses two levels: its size is accepted and divisible by the ranks of a node; else it uses the flat
        all-reduce. The size alone decides, so all ranks agree. A model's `hidden_size` is divisible, so messages need
        no padding (and no copy for it)."""
        return x.numel() % self.ranks == 0 and self._takes(x.nbytes)

    def __call__(self, x: Tensor) -> None:
        flat, part = self.parts(x)
        self.scatter(flat, part, False)
        self.cross(part, False)
        self.collect(flat, part)

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """A flat view of x, and this rank's part of it."""
        flat = x.view(-1)
        size = flat.numel() // self.ranks
        return flat, flat[self._index * size : (self._index + 1) * size]

    def scatter(self, flat: Tensor, part: Tensor, async_op: bool) -> Any:
        return _reduce_scatter(part, flat, group=self._intra, async_op=async_op)

    def cross(self, part: Tensor, async_op: bool) -> Any:
        return dist.all_reduce(part, group=self._rail, async_op=async_op)

    def collect(self, flat: Tensor, part: Tensor) -> None:
        _all_gather(flat, part, group=self._gather)


def two_level(subgroups: Mapping[str, Any], takes: Callable[[int], bool] | None) -> TwoLevel | None:
    """Makes the two-level all-reduce for messages whose bytes `takes` accepts. Returns None if all messages use the
    flat one: `takes` is None, or the group lacks the `subgroups` intra or rail (one node, or one rank a node)."""
    if takes is None or not {"intra", "rail"} <= subgroups.keys():
        return None
    return TwoLevel(subgroups["intra"], subgroups["rail"], takes, subgroups.get("gather"))


class Relay:
    """TwoLevel over a library on the host, where a thread must wait for one level before it can start the next; uses
    two threads. Several messages may be in flight, as the wirings need. torch matches the calls of a group by their
    order, so each group is called from only one thread, in program order: the node's from the caller's thread, the
    rail's from the thread that waits for the scatter, and a second one of the node (`gather`) from the other thread."""

    def __init__(self, levels: TwoLevel) -> None:
        self._levels, self.across, self.back = levels, SerialExecutor(), SerialExecutor()

    def start(self, x: Tensor) -> Call:
        levels, crossing = self._levels, list[Any]()
        flat, part = levels.parts(x)
        scattering = levels.scatter(flat, part, True)

        def cross() -> None:
            scattering.wait()
            crossing.append(levels.cross(part, True))

        def come_back() -> None:
            crossed.wait()
            crossing[0].wait()
            levels.collect(flat, part)

        crossed = self.across.submit(cross)
        return self.back.submit(come_back)

    def close(self) -> None:
        """Ends both threads, unless a call hangs; always returns soon. Idempotent."""
        end_all(self.across, self.back)


class SerialExecutor:
    """A thread that makes calls one after another, in the order of submission. After a failed call all later ones
    fail."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self.thread: threading.Thread | None = None

    def submit(self, call: Callable[[], None]) -> Call:
        if self.thread is None:
            self.thread = threading.Thread(target=self._run, name="laddertron-two-level", daemon=True)
            self.thread.start()
        made = Call(call)
        self._calls.put(made)
        return made

    def end(self) -> threading.Thread | None:
        """Ends the thread after its submitted calls; returns it, or None if it was ended before."""
        thread, self.thread = self.thread, None
        if thread is not None:
            self._calls.put(None)
        return thread

    def _run(self) -> None:
        failed: BaseException | None = None
        with torch.inference_mode():
            while (made := self._calls.get()) is not None:
                failed = made.make(failed)


def end_all(*executors: SerialExecutor) -> None:
    """Ends the threads; waits at most _JOIN_S for them, because a call may hang."""
    threads, until = [executor.end() for executor in executors], time.monotonic() + _JOIN_S
    for thread in threads:
        if thread is not None:
            thread.join(max(0.0, until - time.monotonic()))


class Call(Future[None]):
    """A submitted call, with the `wait` of torch's Work."""

    def __init__(self, call: Callable[[], None]) -> None:
        super().__init__()
        self._call = call

    def make(self, failed: BaseException | None) -> BaseException | None:
        """Makes the call, unless an earlier one has `failed`; returns the error, or None."""
        if failed is None:
            try:
                self._call()
            except BaseException as error:
                failed = error
        if failed is None:
            self.set_result(None)
        else:
            self.set_exception(failed)
        return failed

    def get_future(self) -> Future[None]:
        return self

    def wait(self, timeout: timedelta | None = None) -> None:
        """Waits for the call (timeout None: without limit). Raises RuntimeError on a timeout, or the call's error."""
        seconds = None if timeout is None else timeout.total_seconds()
        try:
            error = self.exception(seconds)
        except TimeoutError:
            raise RuntimeError(f"timed out after {seconds:g} s") from None
        if error is not None:
            raise RuntimeError(str(error)) from error
