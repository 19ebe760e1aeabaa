"""`start(x) -> Pending`, `Pending.wait()`: an all-reduce that travels while the next sub-block computes.

The interface that models/residual.py is written against; the strategies and backends stand beside it. A Collective
knows its group, never the model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Pending(Protocol):
    """An all-reduce under way."""

    def wait(self) -> Tensor:
        """The sum over the group, in x's shape and dtype; valid until the group's second next `start`. On a GPU this
        makes the current stream wait, never the host. Raises CollectiveTimeout naming rank, collective and peer."""


class Collective(Protocol):
    """All-reduces over one group, in program order, the same on every rank."""

    @property
    def size(self) -> int:
        """Ranks in the group."""

    def start(self, x: Tensor) -> Pending:
        """Sets off the sum of x (contiguous; any shape) over the group. x must stay untouched until `wait`."""
