"""Bytes from one rank's memory to another's, beside the collectives: what weights travel by while they are loaded.

Over a torch group that knows host memory (gloo, which sends from and receives into the very buffers). Every posted
transfer is waited for by the thread that posted it; whoever does not come is named.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from .collectives import CollectiveTimeout, CommunicationError, PeerLost

if TYPE_CHECKING:
    from torch import Tensor

    from .groups import Communicator


class Transfer:
    """One posted transfer. The tensor belongs to it until `wait` returns."""

    def __init__(self, post: Callable[[], Any], words: str, peer: int, timeout_s: float) -> None:
        self._words, self._peer, self._timeout_s = words, peer, timeout_s
        self._work = self._guarded(post)

    def wait(self, timeout_s: float | None = None) -> None:
        """Returns once the bytes are there, or gone. Raises PeerLost or CollectiveTimeout naming the rank."""
        seconds = self._timeout_s if timeout_s is None else timeout_s
        self._guarded(lambda: self._work.wait(timedelta(seconds=max(seconds, 1e-3))))

    def _guarded(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except RuntimeError as error:
            said = str(error).splitlines()[0] if str(error) else ""
            if "imed out" in said or "imeout" in said:
                raise CollectiveTimeout(f"{self._words} did not come in time", self._peer, -1) from error
            if any(word in said for word in ("closed", "reset", "refused", "roken pipe")):
                raise PeerLost(f"{self._words}: it is gone (its connection ended)", self._peer, -1) from error
            raise CommunicationError(f"{self._words}: {said}") from error


class PointToPoint:
    """Between this rank and the others of a torch group. `ranks[i]`: how messages call the group's i-th rank.

    timeout_s: how long a transfer may take, its peer's delay included; a peer that ends is noticed at once.
    """

    def __init__(self, group: Any, ranks: tuple[int, ...], timeout_s: float) -> None:
        self._group, self._ranks, self._timeout_s = group, ranks, timeout_s
        self.rank = dist.get_rank(group)

    @property
    def size(self) -> int:
        return len(self._ranks)

    def name(self, peer: int) -> str:
        return f"rank {self._ranks[peer]}"

    def send(self, peer: int, data: Tensor, channel: int) -> Transfer:
        """Posts contiguous host memory, not empty, to the group's `peer`; messages of a channel keep their order."""
        words = f"weights for {self.name(peer)}"
        return Transfer(
            lambda: dist.isend(data, group=self._group, group_dst=peer, tag=channel), words, peer, self._timeout_s
        )

    def receive(self, peer: int, into: Tensor, channel: int) -> Transfer:
        """Posts memory for what `peer` sends on the channel, byte for byte as much."""
        words = f"weights from {self.name(peer)}"
        return Transfer(
            lambda: dist.irecv(into, group=self._group, group_src=peer, tag=channel), words, peer, self._timeout_s
        )

    def shift(self, data: Tensor, into: Tensor) -> float:
        """Sends to the next rank of the group while receiving as much from the one before; returns the seconds it took.
        All ranks call it at once."""
        began = time.perf_counter()
        coming = self.receive((self.rank - 1) % self.size, into, 0)
        going = self.send((self.rank + 1) % self.size, data, 0)
        coming.wait()
        going.wait()
        return time.perf_counter() - began


def across_nodes(communicator: Communicator, timeout_s: float) -> PointToPoint | None:
    """To the ranks of the same place on the group's other nodes; None where the group has one node, or no torch groups
    (CommOptions.process_groups)."""
    layout = communicator.layout
    rail = communicator.subgroups.get("rail")
    if rail is None or len(layout.nodes) < 2:
        return None
    return PointToPoint(rail, layout.rails[communicator.rank % layout.per_node], timeout_s)
