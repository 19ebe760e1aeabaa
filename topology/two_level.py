"""An all-reduce in two levels over libraries that have it in one piece (gloo, NCCL): reduce-scatter inside the node,
all-reduce across the rail, all-gather inside. Knows two torch groups; backends.py and nccl.py say when.

Each rank sends 1 / per_node of the message across. All ranks end with the same bits: a rail's all-reduce gives both its
ends the same part, and inside a node parts are copied.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch import Tensor

_JOIN_S = 5.0

# Of torch 2.13 on; the names before it warn since then.
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class TwoLevel:
    """Called with x (contiguous, any float type): the sum over all ranks, in place. On GPUs all three calls are issued
    to the current stream, one after another, and the host waits for none: NCCL takes a part that lies in the whole at
    rank x part for both ends of a scatter or gather, so nothing is allocated and the whole may be captured."""

    def __init__(self, intra: Any, rail: Any, takes: Callable[[int], bool]) -> None:
        """Torch groups of this rank's node and rail; `takes`: message bytes -> whether to go in two levels."""
        self._intra, self._rail, self._takes = intra, rail, takes
        self.ranks, self._index = dist.get_world_size(intra), dist.get_rank(intra)

    def carries(self, x: Tensor) -> bool:
        """Whether x goes in two levels: chosen for its size, and divisible by the ranks of a node. What is not goes
        flat. All ranks say the same, as they agree on the size; the rows of a model's messages are `hidden_size` long,
        which divides, so that padding (and a copy for it) would serve nobody."""
        return x.numel() % self.ranks == 0 and self._takes(x.nbytes)

    def __call__(self, x: Tensor) -> None:
        whole = x.view(-1)
        each = whole.numel() // self.ranks
        part = whole[self._index * each : (self._index + 1) * each]
        _reduce_scatter(part, whole, group=self._intra)
        dist.all_reduce(part, group=self._rail)
        _all_gather(whole, part, group=self._intra)


def two_level(
    collective: str, subgroups: Mapping[str, Any], choose: Callable[[int], str] | None = None
) -> TwoLevel | None:
    """What carries messages in two levels where `collective` (of CommOptions) says so, or says auto and `choose`
    (message bytes -> strategy) does for some sizes; None where all go flat, as they do in a group on one node or with
    one rank a node: such a one has not both `subgroups`, intra and rail."""
    intra, rail = subgroups.get("intra"), subgroups.get("rail")
    if intra is None or rail is None:
        return None
    if collective == "two_level":
        return TwoLevel(intra, rail, lambda nbytes: True)
    if collective == "auto" and choose is not None:
        return TwoLevel(intra, rail, lambda nbytes: choose(nbytes) == "two_level")
    return None


class Aside:
    """A thread that makes calls one after another, in the order in which they were given, and sleeps between: for a
    library that works on the host, where the second level can only be set off when somebody has waited for the first.
    In order, since all ranks must call the groups of both levels alike. A call that fails fails all after it."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, call: Callable[[], None]) -> _Call:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="laddertron-two-level", daemon=True)
            self._thread.start()
        made = _Call(call)
        self._calls.put(made)
        return made

    def close(self) -> None:
        """Ends the thread, unless a call hangs in it; always returns. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._calls.put(None)
            thread.join(_JOIN_S)

    def _run(self) -> None:
        failed: BaseException | None = None
        with torch.inference_mode():
            while (made := self._calls.get()) is not None:
                failed = made.make(failed)


class _Call:
    """A call under way; waited for as torch's Work is."""

    __slots__ = ("_call", "_error", "_over")

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._error: BaseException | None = None
        self._over = threading.Event()

    def make(self, failed: BaseException | None) -> BaseException | None:
        """Makes it, unless one before has `failed`; why it failed itself."""
        self._error = failed
        if failed is None:
            try:
                self._call()
            except BaseException as error:
                self._error = error
        self._over.set()
        return self._error

    def wait(self, timeout: timedelta) -> None:
        """Raises RuntimeError if it is not over in time, or what the call raised."""
        if not self._over.wait(timeout.total_seconds()):
            raise RuntimeError(f"timed out after {timeout.total_seconds():g} s")
        if self._error is not None:
            raise RuntimeError(str(self._error)) from self._error
