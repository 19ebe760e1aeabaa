"""The ctypes interface of transport.c: all-reduces and gathers of one group on CPUs. One thread starts and waits; any
thread may call `close`.
"""

from __future__ import annotations

import ctypes
import errno
import os
import weakref
from collections.abc import Callable, Iterable
from ctypes import POINTER, Structure, c_int, c_int32, c_int64, c_uint64, c_void_p

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..comm.collectives import CollectiveTimeout, CommunicationError, Gathering, PeerLost, RanksDisagree
from ..comm.ledger import HISTORY, Entry, Record
from ..placement.layout import GroupLayout
from .mesh import Mesh
from .native import bind, load, locate

EXTENSION = "laddertron.topology.transport._transport"
STRATEGIES = {"exchange": 0, "two_level": 1, "pipeline": 2, "doubling": 3}
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_NAMES = tuple(STRATEGIES)
_OPS = ("all_reduce", "gather")
_TIMEOUT, _LOST, _MISMATCH, _PROTOCOL, _CLOSED, _TOO_LARGE, _SYSTEM, _BUSY = range(1, 9)
_DEPTH = 8  # collectives in flight
_LAYERS = 16  # names of ledger accounts


class _Total(Structure):
    _fields_ = [("count", c_uint64), ("bytes", c_uint64), ("flight_ns", c_int64), ("waited_ns", c_int64)]


class _Record(Structure):
    _fields_ = [
        ("seq", c_uint64),
        ("bytes", c_uint64),
        ("start_ns", c_int64),
        ("flight_ns", c_int64),
        ("waited_ns", c_int64),
        ("kind", c_int32),
        ("strategy", c_int32),
        ("layer", c_int32),
        ("spare", c_int32),
    ]


def available() -> bool:
    """Whether the extension was built; without a C compiler it is not."""
    return locate(EXTENSION) is not None


def segment_bytes(size: int, per_node: int, small: int, chunk: int) -> int:
    """Bytes of shared memory that each node of the group needs."""
    needed = bind(_library(ctypes.CDLL).lt_segment_bytes, c_uint64, c_int, c_int, c_uint64, c_uint64)
    return int(needed(size, per_node, small, chunk))


def _library(kind: type[ctypes.CDLL]) -> ctypes.CDLL:
    path = locate(EXTENSION)
    if path is None or load(EXTENSION) is None:
        raise RuntimeError(
            f"{EXTENSION} is not built: install with a C compiler at hand (pip install -e .), or use backend: gloo"
        )
    return kind(str(path))


class Transport:
    """One group's connections on this rank; it owns the mesh's data sockets and its shared memory from now on. small:
    bytes up to which a message is sent whole, without the communication thread; larger ones are sent in pieces of
    `chunk` bytes. spin_us: how long `wait` polls before it sleeps. tree: adds in a binary tree over the ranks
    (2, 4, 8 …), rounded at each node."""

    def __init__(
        self,
        mesh: Mesh,
        layout: GroupLayout,
        rank: int,
        small: int,
        chunk: int,
        spin_us: float,
        timeout_s: float,
        tree: bool = False,
    ) -> None:
        self._layout = layout
        # PyDLL keeps the GIL: right for calls of microseconds that never sleep. Releasing it takes longer than they do,
        # and acquiring it again can take a whole switch interval if another thread runs Python code.
        quick, slow = _library(ctypes.PyDLL), _library(ctypes.CDLL)
        fds = [-1 if s is None else s.detach() for s in mesh.data]
        sizes = c_int, c_uint64, c_uint64, c_int64, c_int64, c_int, c_int
        handle = bind(slow.lt_open, c_void_p, c_int, c_int, c_int, POINTER(c_int), *sizes)(
            layout.ranks.index(rank),
            layout.size,
            layout.per_node,
            (c_int * len(fds))(*fds),
            mesh.segment,
            small,
            chunk,
            int(spin_us * 1e3),
            int(timeout_s * 1e9),
            -1,  # the communication thread is not bound to a core
            tree,
        )
        code = ctypes.get_errno()
        os.close(mesh.segment)
        if not handle:
            raise CommunicationError(f"the transport could not start: {os.strerror(code) if code else 'no resources'}")
        # `close` ends the connections; memory is freed with the object, because a waiter may still use it.
        self._handle = c_void_p(handle)
        self._close = bind(slow.lt_close, None, c_void_p)
        weakref.finalize(self, _end, self._close, bind(slow.lt_free, None, c_void_p), self._handle)
        self._set_timeout = bind(quick.lt_set_timeout, None, c_void_p, c_int64)
        self._error_of = bind(quick.lt_error_of, None, c_void_p, POINTER(c_int64))
        self._start = bind(quick.lt_all_reduce, c_int64, c_void_p, c_void_p, c_uint64, c_int, c_int, c_int)
        self._gather = bind(quick.lt_gather, c_int64, c_void_p, c_void_p, c_void_p, c_uint64)
        self._try = bind(quick.lt_try, c_int, c_void_p, c_uint64)
        self._wait = bind(slow.lt_wait, c_int, c_void_p, c_uint64)
        self._totals = bind(quick.lt_totals, POINTER(_Total), c_void_p)
        self._history = bind(quick.lt_history, POINTER(_Record), c_void_p, POINTER(c_uint64))
        self.small = small
        # Keeps tensors alive that C may still read or write: at most eight collectives are in flight.
        self._held: list[object] = [None] * 8
        self._last = -1
        self._layers = {"": 0}
        self.waiting_for = -1
        """The collective whose `wait` sleeps, for other threads to read; kept if the wait fails."""

    def place(self) -> tuple[int, str]:
        seq = self.waiting_for
        if seq < 0:
            return self._last + 1, ""
        payload = self._held[seq & 7]
        what = f"all_reduce of {payload.nbytes} bytes" if isinstance(payload, torch.Tensor) else "gather"
        return self._last + 1, f"collective {seq} ({what})"

    def set_timeout(self, seconds: float) -> None:
        """Sets the time [s] after which `wait` raises CollectiveTimeout."""
        self._set_timeout(self._handle, int(seconds * 1e9))

    def layer(self, name: str) -> int:
        """The number of the account `name`, for `start`; after fifteen names, the number of the account without a
        name."""
        if name not in self._layers and len(self._layers) < _LAYERS:
            self._layers[name] = len(self._layers)
        return self._layers.get(name, 0)

    def start(self, x: Tensor, strategy: int, layer: int = 0) -> int:
        """Starts the sum of x, in place; returns the collective's number for `wait`."""
        seq: int = self._start(self._handle, x.data_ptr(), x.numel(), DTYPES[x.dtype], strategy, layer)
        if seq == -_BUSY:
            self.wait(self._last + 1 - _DEPTH)
            return self.start(x, strategy, layer)
        if seq < 0:
            self._raise(-seq)
        self._held[seq & 7] = x
        self._last = seq
        return seq

    def start_gather(self, payload: NDArray[np.uint8], out: NDArray[np.uint8]) -> int:
        """Starts gathering payload [n] (at most `small` bytes) into out [size, n]; both are used until `wait`. Returns
        the collective's number."""
        seq: int = self._gather(self._handle, payload.ctypes.data, out.ctypes.data, payload.nbytes)
        if seq == -_BUSY:
            self.wait(self._last + 1 - _DEPTH)
            return self.start_gather(payload, out)
        if seq < 0:
            self._raise(-seq)
        self._held[seq & 7] = payload, out
        self._last = seq
        return seq

    def wait(self, seq: int) -> None:
        """Waits for collective `seq`. Raises CollectiveTimeout, PeerLost or RanksDisagree; the group is then
        unusable."""
        code = self._try(self._handle, seq)
        if code == 0:
            self.waiting_for = seq
            code = self._wait(self._handle, seq)
            if code >= 0:
                self.waiting_for = -1
        if code < 0:
            self._raise(-code)

    def _raise(self, code: int) -> None:
        if code == _TOO_LARGE:
            raise ValueError(f"a message of this strategy may have {self.small} bytes at most: use pipeline, or cut it")
        out = (c_int64 * 4)()
        self._error_of(self._handle, out)
        peer, seq = int(out[1]), int(out[2])
        rank = self._layout.ranks[peer] if 0 <= peer < self._layout.size else -1
        who = f"rank {rank}" if rank >= 0 else "a rank"
        if code == _TIMEOUT:
            raise CollectiveTimeout(f"collective {seq}: {who} did not deliver its part in time", peer, seq, rank)
        if code == _LOST:
            raise PeerLost(f"collective {seq}: {who} is gone (its connection ended)", peer, seq)
        if code == _MISMATCH:
            raise RanksDisagree(
                f"collective {seq}: {who} is in another collective (size, dtype or kind differ): "
                "ranks run different programs",
                peer,
                seq,
            )
        if code == _PROTOCOL:
            raise RanksDisagree(f"collective {seq}: {who} sent what is no frame of this version", peer, seq)
        if code == _CLOSED:
            raise CommunicationError(f"collective {seq}: the group is closed")
        raise CommunicationError(f"collective {seq}: {errno.errorcode.get(int(out[3]), 'system error')} towards {who}")

    def entries(self, link: str) -> Iterable[Entry]:
        """The accounts that C counts; `link`: the link class that the messages crossed."""
        totals = self._totals(self._handle)
        return [
            Entry(op, name, link, int(t.count), int(t.bytes), t.flight_ns * 1e-9, t.waited_ns * 1e-9, layer)
            for o, op in enumerate(_OPS)
            for s, name in enumerate(_NAMES)
            for i, layer in enumerate(tuple(self._layers))
            if (t := totals[(o * len(_NAMES) + s) * _LAYERS + i]).count
        ]

    def records(self) -> Iterable[Record]:
        recorded = c_uint64()
        ring = self._history(self._handle, ctypes.byref(recorded))
        count = int(recorded.value)
        return [
            Record(
                int((r := ring[i % HISTORY]).seq),
                _OPS[r.kind],
                _NAMES[r.strategy],
                int(r.bytes),
                r.start_ns * 1e-9,
                r.flight_ns * 1e-9,
                r.waited_ns * 1e-9,
                tuple(self._layers)[r.layer],
            )
            for i in range(max(0, count - HISTORY), count)
        ]

    def close(self) -> None:
        """Closes the connections; always returns, within about two seconds. Idempotent."""
        self._close(self._handle)


def _end(close: Callable[..., None], free: Callable[..., None], handle: c_void_p) -> None:
    close(handle)
    free(handle)


class NativePending:
    __slots__ = ("_seq", "_transport", "_x")

    def __init__(self, transport: Transport, x: Tensor, seq: int) -> None:
        self._transport, self._x, self._seq = transport, x, seq

    def wait(self) -> Tensor:
        self._transport.wait(self._seq)
        return self._x


class NativeCollective:
    """All-reduces over a Transport. `choose`: message bytes -> one of STRATEGIES; called once for each size."""

    def __init__(self, transport: Transport, choose: Callable[[int], str]) -> None:
        self._transport, self._choose = transport, choose
        self._strategy: dict[int, int] = {}

    def start(self, x: Tensor, layer: str = "", at_once: bool = False, /) -> NativePending:
        strategy = self._strategy.get(x.nbytes)
        if strategy is None:
            if x.device.type != "cpu":
                raise ValueError(f"the native transport reads host memory, x is on {x.device}: use backend: nccl")
            strategy = self._strategy[x.nbytes] = STRATEGIES[self._choose(x.nbytes)]
        if not x.is_contiguous() or x.dtype not in DTYPES or not x.numel():
            raise ValueError(
                f"cannot all-reduce {tuple(x.shape)} of {x.dtype}, contiguous: {x.is_contiguous()}: contiguous, "
                "non-empty float32, bfloat16 or float16 is needed"
            )
        return NativePending(self._transport, x, self._transport.start(x, strategy, self._transport.layer(layer)))


class NativeGather:
    """Gathers of bytes over a Transport; long payloads are sent in pieces."""

    def __init__(self, transport: Transport, size: int) -> None:
        self._transport, self._size = transport, size

    def start(self, payload: NDArray[np.uint8]) -> Gathering:
        """Starts gathering the first piece; `wait` gathers the others."""
        mine = np.ascontiguousarray(payload, dtype=np.uint8)
        transport, size, step = self._transport, self._size, self._transport.small
        out = np.empty((size, mine.nbytes), dtype=np.uint8)
        if not mine.nbytes:
            return Gathering(lambda: out)
        single = mine.nbytes <= step
        piece = out if single else np.empty((size, step), dtype=np.uint8)
        seq = transport.start_gather(mine[:step], piece)

        def finish() -> NDArray[np.uint8]:
            transport.wait(seq)
            if not single:
                out[:, :step] = piece
                for at in range(step, mine.nbytes, step):
                    rest = mine[at : at + step]
                    part = np.empty((size, rest.nbytes), dtype=np.uint8)
                    transport.wait(transport.start_gather(rest, part))
                    out[:, at : at + step] = part
            return out

        return Gathering(finish)
