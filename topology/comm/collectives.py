"""The interface of collectives, for models/residual.py and every strategy and backend: `start(x)` returns a `Pending`,
whose `wait` is called after the next sub-block has computed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeAlias, TypeVar, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch import Tensor

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class PendingOf(Protocol[T_co]):
    """An all-reduce in flight, of tensors or of what stands for them in models/residual.py."""

    def wait(self) -> T_co:
        """Waits for the sum over the group and returns it: x itself, overwritten. On a GPU the current stream waits,
        never the host. Later calls return the same tensor. Raises CollectiveTimeout or PeerLost, which name the peer
        and the collective."""


class CollectiveOf(Protocol[T]):
    """All-reduces over one group. One thread starts and awaits them, in the same order on every rank."""

    def start(self, x: T, layer: str = "", at_once: bool = False, /) -> PendingOf[T]:
        """Starts the sum of x (contiguous, not empty; float32, bfloat16 or float16) over the group. x must not be used
        until `wait` returns it with the sum. At most eight are in flight: a ninth `start` first waits for the oldest.
        layer: the account in the ledger. at_once: `wait` follows before any other computation, so on a GPU the sum may
        run on the compute stream."""


Pending: TypeAlias = "PendingOf[Tensor]"
Collective: TypeAlias = "CollectiveOf[Tensor]"


class Later(Generic[T]):
    """An operation in flight. `wait` calls `finish` and keeps its result; after an error it may be called again. It is
    a Pending if the result is a sum."""

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
"""A gather in flight; its `wait` returns uint8 [size, n], every rank's bytes in rank order, and raises as
`Pending.wait`."""


class Gather(Protocol):
    """Gathers of equally many bytes from every rank, in one order with the all-reduces."""

    def start(self, payload: NDArray[np.uint8]) -> Gathering:
        """Starts gathering payload, uint8 [n] with the same n on every rank."""


@runtime_checkable
class DeviceGather(Protocol):
    """A Gather that can also gather device tensors without the host."""

    def gather_tensor(self, x: Tensor) -> Tensor:
        """Gathers x [n], with the same n and dtype on every rank, into [size, n] in rank order on x's device. The
        current stream waits, the host does not."""

    def wait_for(self, event: Any | None, what: str) -> None:
        """Waits on the host for a device's event (None: for all work of the current stream), at most for the timeout of
        a collective. what: named in the error. Raises CollectiveTimeout or PeerLost."""


def device_gather(gathers: Gather, size: int) -> Callable[[Tensor], Tensor] | None:
    """The function by which a group of `size` ranks gathers device tensors; None if gathers go through the host."""
    if size == 1:
        return lambda x: x[None]
    return gathers.gather_tensor if isinstance(gathers, DeviceGather) else None


class Boundary(Protocol):
    """The connection to the previous and the next pipeline stage. Messages arrive in order. Each rank sends its share
    of a message, which crosses between nodes once. own: the message is only this rank's and is sent whole to its peer;
    both sides must pass it."""

    def send(self, x: Tensor, own: bool = False) -> None:
        """Starts sending x [T, D] to the next stage; it must be the same on every rank of the group unless `own`. x
        must not be written to afterwards."""

    def receive(self, shape: tuple[int, int], dtype: torch.dtype, count: int, own: bool = False) -> list[Pending]:
        """The next `count` messages of the previous stage, [T, D] each, in flight."""


class CommunicationError(RuntimeError):
    """The group cannot continue: the job must be ended and launched again."""


class _PeerError(CommunicationError):
    """`peer`: its rank in the group, `rank`: in the job (-1: unknown). `seq`: the number of the group's collective."""

    def __init__(self, message: str, peer: int, seq: int, rank: int = -1) -> None:
        super().__init__(message)
        self.peer, self.seq, self.rank = peer, seq, rank


class CollectiveTimeout(_PeerError):
    """A peer did not send its data before the timeout."""


class PeerLost(_PeerError):
    """A peer's process exited or its connection was closed."""


class RanksDisagree(_PeerError):
    """A peer is in a different collective than this rank."""


class Done:
    __slots__ = ("_x",)

    def __init__(self, x: Tensor) -> None:
        self._x = x

    def wait(self) -> Tensor:
        return self._x


class Alone:
    """The all-reduce of a group of one rank, on any device: returns x."""

    def start(self, x: Tensor, layer: str = "", at_once: bool = False, /) -> Pending:
        return Done(x)


class AloneGather:
    def start(self, payload: NDArray[np.uint8]) -> Gathering:
        return Gathering(payload[None].copy)


class Blocking:
    """A collective without overlap: `start` returns after the sum is complete. The results are bitwise the same."""

    def __init__(self, inner: Collective) -> None:
        self._inner = inner

    def start(self, x: Tensor, layer: str = "", at_once: bool = False, /) -> Pending:
        return Done(self._inner.start(x, layer).wait())
