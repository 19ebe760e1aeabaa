"""An all-gather of bytes with which ranks find each other at start, over MPI or a TCPStore (torchrun's MASTER_ADDR and
MASTER_PORT). Carries addresses, secrets and digests, no tensors.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from itertools import accumulate
from typing import Any, Protocol

from ..hardware.ports import ANY_PORT, listen
from ..json_codec import from_json, unbuild
from ..placement.identity import Identity
from ..placement.machines import Machine, shared_hostname, this_machine
from ..placement.mapping import MappingError

LIMIT = 1 << 20
"""The most bytes that a rank may contribute to a round, for addresses and digests."""
START_S = 120.0
"""Seconds for which ranks wait for one another at start."""


class Bootstrap(Protocol):
    """The all-gather of a job's ranks before they have connections of their own."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

    def all_gather(self, payload: bytes) -> list[bytes]:
        """Every rank's payload (at most LIMIT bytes each, lengths may differ) in rank order. All ranks call it."""


class MpiBootstrap:
    """The ranks of an mpirun or srun. MPI is initialised here (thread level SERIALIZED) and finalised at exit.
    `waits_for`: the rank being waited for in `star_gather`, else None."""

    waits_for: int | None = None

    def __init__(self) -> None:
        import mpi4py

        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = False
        from mpi4py import MPI

        self._mpi: Any = MPI
        if not MPI.Is_initialized():
            level = _initialize(MPI)
            atexit.register(_finalize, MPI)
            if level < MPI.THREAD_SERIALIZED:
                raise RuntimeError(
                    f"this MPI gives thread level {level}, THREAD_SERIALIZED ({MPI.THREAD_SERIALIZED}) is needed: "
                    "use one built with thread support (Open MPI and MPICH wheels are)"
                )
        self.comm: Any = MPI.COMM_WORLD
        self.rank: int = self.comm.Get_rank()
        self.size: int = self.comm.Get_size()

    def all_gather(self, payload: bytes) -> list[bytes]:
        _check(payload)
        lengths = bytearray(8 * self.size)
        self.comm.Allgather(struct.pack("<q", len(payload)), lengths)
        counts = struct.unpack(f"<{self.size}q", lengths)
        received = bytearray(sum(counts))
        self.comm.Allgatherv([payload, self._mpi.BYTE], [received, (counts, None), self._mpi.BYTE])
        return _split(received, counts)

    def star_gather(self, payload: bytes) -> list[bytes]:
        """An all-gather that only uses links to rank 0, so that a broken link between two other ranks does not stop it.
        An MPI collective may use any link, cannot tell for which it waits, and looks for a rank whose hostname is its
        own in its own machine's memory."""
        _check(payload)
        try:
            if self.rank != 0:
                self._send(payload, 0)
                every = self._receive(0)
            else:
                payloads = [payload]
                for peer in range(1, self.size):
                    payloads.append(self._receive(peer))
                every = struct.pack(f"<{self.size}q", *map(len, payloads)) + b"".join(payloads)
                for peer in range(1, self.size):
                    self._send(every, peer)
        finally:
            self.waits_for = None
        return _split(every[8 * self.size :], struct.unpack_from(f"<{self.size}q", every))

    def _send(self, data: bytes, peer: int) -> None:
        self.waits_for = peer
        self.comm.Send([data, self._mpi.BYTE], peer)

    def _receive(self, peer: int) -> bytes:
        self.waits_for = peer
        status = self._mpi.Status()
        self.comm.Probe(peer, status=status)
        data = bytearray(status.Get_count(self._mpi.BYTE))
        self.comm.Recv([data, self._mpi.BYTE], peer)
        return bytes(data)


def _split(data: bytes | bytearray, counts: Sequence[int]) -> list[bytes]:
    ends = list(accumulate(counts))
    return [bytes(data[end - count : end]) for count, end in zip(counts, ends, strict=True)]


def _initialize(mpi: Any) -> int:
    """Initialises MPI without holding the interpreter's lock, which mpi4py's own call holds until every rank has made
    it. Returns the thread level."""
    level = ctypes.c_int(mpi.THREAD_SINGLE)
    status = ctypes.CDLL(mpi.__file__).MPI_Init_thread(None, None, mpi.THREAD_SERIALIZED, ctypes.byref(level))
    if status != mpi.SUCCESS:
        raise RuntimeError(f"MPI_Init_thread failed with status {status}: the launcher's output names the cause")
    for communicator in (mpi.COMM_SELF, mpi.COMM_WORLD):
        communicator.Set_errhandler(mpi.ERRORS_RETURN)  # as after mpi4py's own call: an error is an exception
    return level.value


def _finalize(mpi: Any) -> None:
    if mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()


class StoreBootstrap:
    """A bootstrap over a TCPStore: torchrun's, or one made by `open_store`. The store is not authenticated: on a shared
    network also set CommOptions.secret. `attempt`: distinguishes these ranks from earlier users of the same store.
    `keeps`: this process hosts the store and may exit after any round, so each round waits until all ranks have read.
    """

    def __init__(
        self, store: Any, rank: int, size: int, timeout_s: float = START_S, attempt: str = "0", keeps: bool = False
    ) -> None:
        self.store, self.rank, self.size = store, rank, size
        self._attempt, self._keeps = attempt, keeps
        self._timeout = timedelta(seconds=timeout_s)
        self._round = 0

    def all_gather(self, payload: bytes) -> list[bytes]:
        _check(payload)
        base = f"bootstrap/{self._attempt}/{self._round}"
        keys, read = ([f"{base}/{what}{rank}" for rank in range(self.size)] for what in ("", "read/"))
        self._round += 1
        self.store.set(keys[self.rank], payload.hex())
        self.store.wait(keys, self._timeout)
        payloads = [bytes.fromhex(self.store.get(key).decode("ascii")) for key in keys]
        self.store.set(read[self.rank], "")
        if self._keeps:
            self.store.wait(read, self._timeout)
        return payloads


def bootstrap_of(identity: Identity, environ: Mapping[str, str]) -> Bootstrap:
    """The bootstrap of this job: MPI, or the store at torchrun's MASTER_ADDR and MASTER_PORT, which its agent hosts,
    else rank 0. Raises ValueError if these variables are missing or invalid, MappingError if two machines have one
    hostname."""
    if identity.launcher != "torchrun":
        mpi = MpiBootstrap()
        require_own_hostnames(mpi.star_gather)
        return mpi
    address, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    if not address or not port.isdecimal():
        raise ValueError(
            f"MASTER_ADDR={address!r} and MASTER_PORT={port!r}: torchrun sets both, start it with torchrun"
        )
    agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    keeps = identity.rank == 0 and not agent
    store = open_store(address, int(port), master=keeps)
    attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    over_store = StoreBootstrap(store, identity.rank, identity.size, attempt=attempt, keeps=keeps)
    require_own_hostnames(over_store.all_gather)
    return over_store


def require_own_hostnames(gather: Callable[[bytes], list[bytes]]) -> None:
    """Raises MappingError on every rank if two machines of the job have one hostname. The first round of a job, by a
    `gather` that is no collective of MPI."""
    machines = gather(json.dumps(unbuild(this_machine())).encode())
    if (shared := shared_hostname({rank: from_json(Machine, text) for rank, text in enumerate(machines)})) is not None:
        raise MappingError(shared[1])


def open_store(address: str, port: int, master: bool, timeout_s: float = START_S, ports: range = ANY_PORT) -> Any:
    """Opens the TCPStore at address:port. The master makes it, listening only on that address (port 0: a free one of
    `ports`, see its `.port`). Raises OSError if it cannot listen there."""
    import torch.distributed as dist

    make: Any = vars(dist)["TCPStore"]  # torch leaves its stores without public types
    own: dict[str, Any] = {}
    if master:
        # torch itself would listen on every interface, and who reaches a store may write into it
        door = listen(address, range(port, port + 1) if port else ports)
        port, own["master_listen_fd"] = door.getsockname()[1], door.detach()
    wait = timedelta(seconds=timeout_s)
    return make(address, port, is_master=master, wait_for_workers=False, timeout=wait, use_libuv=True, **own)


def store_at(bootstrap: Bootstrap, first: int, address: str, timeout_s: float, ports: range = ANY_PORT) -> Any:
    """Opens a store that rank `first` makes at its `address` on one of its `ports`; the others find it by the
    bootstrap. All ranks call it at once; there may be several groups with different first ranks."""
    if bootstrap.rank == first:
        store = open_store(address, 0, True, timeout_s, ports)
        bootstrap.all_gather(struct.pack("<H", store.port) + address.encode())
        return store
    place = bootstrap.all_gather(b"")[first]
    return open_store(place[2:].decode(), struct.unpack("<H", place[:2])[0], False, timeout_s)


def _check(payload: bytes) -> None:
    if len(payload) > LIMIT:
        raise ValueError(f"{len(payload)} bytes to exchange at start, at most {LIMIT} are allowed: send them later")
