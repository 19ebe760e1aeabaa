"""`start(x) -> Pending`, `Pending.wait()`: an all-reduce in flight while the next sub-block computes. The interface of
models/residual.py and of every strategy and backend.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch import Tensor

T = TypeVar("T")


class Pending(Protocol):
    """An all-reduce under way."""

    def wait(self) -> Tensor:
        """The sum over the group, in x's shape and dtype: x itself, overwritten. On a GPU this makes the current
        stream wait, never the host. A second call returns the same again. Raises CollectiveTimeout or PeerLost, which
        name the peer and the collective."""


class Collective(Protocol):
    """All-reduces over one group, in program order, the same on every rank, started and awaited by one thread."""

    def start(self, x: Tensor, layer: str = "", at_once: bool = False, /) -> Pending:
        """Starts the sum of x (contiguous, not empty; float32, bfloat16 or float16) over the group. x belongs to the
        collective until `wait` returns it with the sum. At most eight are in flight: a ninth `start` first waits for
        the oldest. `layer`: the ledger's account. `at_once`: the sum is waited for before anything else is computed,
        so on a GPU it may stay on the computing stream."""


class Later(Generic[T]):
    """An operation in flight: `finish` waits for it, until it did so without an error; a Pending where it gives a
    sum."""

    __slots__ = ("_finish", "_found")

    def __init__(self, finish: Callable[[], T]) -> None:
        self._finish: Callable[[], T] | None = finish
        self._found: T

    def wait(self) -> T:
        if self._finish is not None:
            self._found = self._finish()
            self._finish = None
        return self._found


Gathering = Later["NDArray[np.uint8]"]
"""A gather under way: uint8 [size, n], every rank's bytes in rank order. Raises as `Pending.wait`."""


class Gather(Protocol):
    """Gathers of equally many bytes from every rank, in program order with the all-reduces."""

    def start(self, payload: NDArray[np.uint8]) -> Gathering:
        """Sets off the gathering of payload, uint8 [n], n the same on every rank."""


@runtime_checkable
class DeviceGather(Protocol):
    """A Gather that can also gather data on devices without the host."""

    def gather_tensor(self, x: Tensor) -> Tensor:
        """x [n] of every rank, n and dtype the same everywhere: [size, n] in rank order, on x's device. The current
        stream waits for it, the host does not."""

    def wait_for(self, event: Any | None, what: str) -> None:
        """The host waits for a device's event (None: for all that the current stream was given), for `what` in words,
        as long as a collective may take. Raises CollectiveTimeout or PeerLost."""


def device_gather(gathers: Gather, size: int) -> Callable[[Tensor], Tensor] | None:
    """How a group of `size` gathers data on its devices; None where gathers pass through the host."""
    if size == 1:
        return lambda x: x[None]
    return gathers.gather_tensor if isinstance(gathers, DeviceGather) else None


class Boundary(Protocol):
    """From the pipeline stage before this one, and to the one after it. Messages come in the order of their sending;
    each crosses between nodes once, in shares of the group's ranks. own: a message is this rank's alone, and goes whole
    to its peer; both sides say so."""

    def send(self, x: Tensor, own: bool = False) -> None:
        """Sets off x [T, D], the same on every rank of the group unless it is its own, to the next stage. Not to be
        written to afterwards."""

    def receive(self, shape: tuple[int, int], dtype: torch.dtype, count: int, own: bool = False) -> list[Pending]:
        """The next `count` messages of the stage before, [T, D] each."""


class CommunicationError(RuntimeError):
    """A group cannot go on: the job has to be ended and launched again."""


class _PeerError(CommunicationError):
    """`peer`: the rank in the group (-1: unknown), `seq`: which collective of the group it was."""

    def __init__(self, message: str, peer: int, seq: int) -> None:
        super().__init__(message)
        self.peer, self.seq = peer, seq


class CollectiveTimeout(_PeerError):
    """A peer did not deliver in time."""


class PeerLost(_PeerError):
    """A peer's process or connection has ended."""


class RanksDisagree(_PeerError):
    """A peer is in another collective than this rank."""


class Done:
    __slots__ = ("_x",)

    def __init__(self, x: Tensor) -> None:
        self._x = x

    def wait(self) -> Tensor:
        return self._x


class Alone:
    """The all-reduce of a group of one, on any device: its own part is the sum."""

    def start(self, x: Tensor, layer: str = "", at_once: bool = False, /) -> Pending:
        return Done(x)


class AloneGather:
    def start(self, payload: NDArray[np.uint8]) -> Gathering:
        return Gathering(payload[None].copy)


class Blocking:
    """The same collective without overlap: `start` returns when the sum is there. Bitwise the same numbers."""

    def __init__(self, inner: Collective) -> None:
        self._inner = inner

    def start(self, x: Tensor, layer: str = "", at_once: bool = False, /) -> Pending:
        return Done(self._inner.start(x, layer).wait())
