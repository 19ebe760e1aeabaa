"""All-reduces on GPUs: NCCL on a separate stream (gpu_stream.py), its gathers, and the diagnosis of a collective that
does not end. Never ran on several GPUs.
"""

from __future__ import annotations

import ctypes
import os
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from .collectives import CollectiveTimeout, Gathering, PeerLost
from .gpu_stream import StreamCollective
from .groups import Deterministic
from .ledger import Ledger
from .ordered import Ordered
from .two_level import TwoLevel

_DEVICE = "cuda"
_EVENT: Any = torch.cuda.Event  # torch leaves it without types
_POLL_S = 20e-6
_ASK_S = 0.25
"""Interval in which the host queries NCCL for errors while it waits."""
GRACE_S = 2.0
"""Seconds for which ranks that timed out wait for each other's report; they began to wait at about the same time."""
_SUCCESS, _IN_PROGRESS = 0, 7
_ERRORS = {1: "CUDA_ERROR", 2: "SYSTEM_ERROR", 3: "INTERNAL_ERROR", 6: "REMOTE_ERROR"}
"""NCCL's ncclResult_t."""
_PATH = re.compile(r" (\d+)\[\w*\] -> (\d+)\[\w*\] (?:\[\w+\] )?via (\S+)")


def nccl_collective(
    group: Any, ledger: Ledger, link: str, deterministic: Deterministic = False, ways: Sequence[TwoLevel] = ()
) -> StreamCollective:
    """Makes all-reduces over a torch group of NCCL. NCCL's order of summation depends on the size, that of
    `deterministic` does not. `ways`: other all-reduces, each for some messages."""

    def issue(x: Tensor) -> str | None:
        for way in ways:
            if way.carries(x):
                way(x)
                return f"nccl {way.name}"
        dist.all_reduce(x, group=group)
        return None

    def issue_ordered(x: Tensor) -> None:
        Ordered(x, group, False, deterministic).add_up()

    return StreamCollective(issue_ordered if deterministic else issue, ledger, "nccl", link)


def join(group: Any, levels: TwoLevel | None, wait: DeviceWait) -> str:
    """Makes NCCL's communicators by a small all-reduce on every rank; returns NCCL's log lines about this rank's
    transports, for describe_paths.
    Before weights are read: ranks arrive at one time now; what communicators hold is gone before free memory is
    counted; nothing can connect within a capture. Raises CommunicationError where a rank does not come."""
    with nccl_log("INIT,GRAPH") as log:
        dist.all_reduce(torch.zeros(1, device=_DEVICE), group=group)
        if levels is not None:
            levels(torch.zeros(levels.ranks, device=_DEVICE))
        wait(None, "the first all-reduce")
        text = "" if log is None or not log.is_file() else log.read_text(errors="replace")
    return "\n".join(sorted({f" {a}[] -> {b}[] via {path}" for a, b, path in _PATH.findall(text)}))


def nccl_log_path() -> Path:
    return Path(os.environ.get("TMPDIR", "/tmp")) / f"laddertron-nccl-{os.getpid()}.log"


@contextmanager
def nccl_log(subsystems: str) -> Iterator[Path | None]:
    """A file for NCCL's log, the only place where it names its transports; must be set before the first communicator.
    The file is removed with the context or when this rank exits, but stays if the launcher kills the rank. None if the
    user has configured that log already."""
    if "NCCL_DEBUG" in os.environ:
        yield None
        return
    path = nccl_log_path()
    os.environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS=subsystems, NCCL_DEBUG_FILE=str(path))
    try:
        yield path
    finally:
        for name in ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE"):
            os.environ.pop(name, None)
        path.unlink(missing_ok=True)


def describe_paths(logs: Sequence[str]) -> str:
    """The transports between ranks, from NCCL's logs of all ranks: "P2P/CUMEM 0-1 1-2; NET/IB/0 2-3"."""
    carried: dict[str, set[tuple[int, int]]] = defaultdict(set)
    for log in logs:
        for a, b, path in _PATH.findall(log):
            carried[path].add((min(int(a), int(b)), max(int(a), int(b))))
    words = [f"{path} {' '.join(f'{a}-{b}' for a, b in sorted(pairs))}" for path, pairs in sorted(carried.items())]
    return "; ".join(words) or "NCCL did not say (NCCL_DEBUG is set, or the log is of another form)"


@dataclass(frozen=True, slots=True)
class Roll:
    """Exchanges the progress of a group's ranks after a timeout: each writes its count under its key. `store`: torch's,
    or None. `hosts`: of each rank of the group. `name`: of the group, since a pipeline's groups share a store."""

    store: Any
    rank: int
    hosts: Sequence[str]
    name: str = "0"

    def call(self, started: int, grace_s: float = GRACE_S) -> Mapping[int, int]:
        """Reports `started`; returns the numbers of collectives started, by rank, of the ranks that report within
        `grace_s`. If the store's host is lost, returns those read before."""
        starts = {self.rank: started}
        with suppress(RuntimeError):  # the store's rank is gone
            if self.store is None:
                return starts
            self.store.set(self._key(self.rank), str(started))
            until = time.monotonic() + grace_s
            while len(starts) < len(self.hosts) and time.monotonic() < until:
                for rank in set(range(len(self.hosts))) - starts.keys():
                    if self.store.check([self._key(rank)]):
                        starts[rank] = int(self.store.get(self._key(rank)))
                time.sleep(0.01)
        return starts

    def _key(self, rank: int) -> str:
        return f"laddertron/place/{self.name}/{rank}"


def verdict(
    waited: str,
    seconds: float,
    started: int,
    places: Mapping[int, int],
    hosts: Sequence[str],
    error: str = "",
    late: tuple[str, int] | None = None,
) -> CollectiveTimeout | PeerLost:
    """The cause of a collective that did not end. places: numbers of collectives started by the ranks that also timed
    out. A rank that does not report computes, hangs or has exited; a rank with fewer collectives is in another one.
    error: of NCCL, or "". late: what a pipeline's stage before has not sent, and which rank of the job: if all ranks of
    the group are in the collective, they wait for that. Pure."""
    silent = [rank for rank in range(len(hosts)) if rank not in places]
    least = min(places.values(), default=started)
    behind = [rank for rank, place in places.items() if place == least and place < max(places.values())]
    blamed, rank = silent or behind, -1
    names = ", ".join(f"rank {rank} on {hosts[rank]}" for rank in blamed)
    if silent:
        why = f"{names} {'does' if len(blamed) == 1 else 'do'} not answer"
    elif behind:
        why = f"{names} set off {least} collectives, this rank {started}"
    elif late is not None:
        why, rank = late
    else:
        why = "all ranks are in it: look at the links between them"
    peer = blamed[0] if len(blamed) == 1 else -1
    if error:
        return PeerLost(f"NCCL reports {error} in {waited} (collective {started}): {why}", peer, started, rank)
    what = f"{waited} (collective {started}) did not end in {seconds:g} s"
    return CollectiveTimeout(f"{what}: {why}", peer, started, rank)


class DeviceWait:
    """Waits on the host for the device, with the timeout of a collective: without one, a missing rank would block the
    device, and thereby the host, for ever. torch's watchdog would end the process instead, without naming a rank."""

    def __init__(self, groups: Sequence[Any], ledger: Ledger, timeout: list[float], roll: Roll) -> None:
        """groups: torch's, whose errors end a wait; timeout: a list of one number [s], which its owner changes.
        `aborts`: called after a wait in vain; they end kernels that would wait for ever. `late`: verdict's."""
        self._groups, self._ledger, self._timeout, self._roll = groups, ledger, timeout, roll
        self.aborts: list[Callable[[], None]] = []
        self.late: Callable[[], tuple[str, int] | None] = lambda: None

    def __call__(self, event: Any | None, what: str) -> None:
        """Waits for the event; None: for all queued work of the current stream. Raises CollectiveTimeout or PeerLost,
        which name the missing rank."""
        if event is None:
            event = _EVENT()
            event.record()
        self._ledger.waiting = what
        began, asked = time.monotonic(), 0.0
        while not event.query():
            waited, error = time.monotonic() - began, ""
            if waited - asked > _ASK_S:
                asked, error = waited, self._error()
            if error or waited > self._timeout[0]:
                started = self._ledger.started
                places, late = self._roll.call(started), self.late()
                for abort in self.aborts:
                    abort()
                raise verdict(what, self._timeout[0], started, places, self._roll.hosts, error, late)
            time.sleep(_POLL_S)
        self._ledger.waiting = ""

    def _error(self) -> str:
        for group in self._groups:
            backend = group._get_backend(torch.device(_DEVICE))
            reported = backend.get_error()
            name = str(getattr(reported, "name", reported))
            if name in ("SUCCESS", "TIMEOUT"):
                # NOTE: torch learns of errors from its Work objects, which replays of graphs do not make.
                name = communicator_error(backend._comm_ptr())
            if name:
                return name
        return ""


def communicator_error(communicator: int, library: Any = None) -> str:
    """The asynchronous error of a communicator (its address; 0: not connected yet), or "". library: NCCL's; None: the
    one that torch has loaded."""
    if communicator == 0:
        return ""
    error = ctypes.c_int(0)
    library = ctypes.CDLL("libnccl.so.2") if library is None else library
    failed = library.ncclCommGetAsyncError(ctypes.c_void_p(communicator), ctypes.byref(error))
    code = failed or error.value
    return "" if code in (_SUCCESS, _IN_PROGRESS) else _ERRORS.get(code, f"error {code}")


class NcclGather:
    """Gathers bytes on the host (through the device), and tensors on devices."""

    def __init__(self, group: Any, ledger: Ledger, wait: DeviceWait) -> None:
        self._group, self._ledger, self.wait = group, ledger, wait

    def start(self, payload: NDArray[np.uint8]) -> Gathering:
        mine = torch.from_numpy(np.ascontiguousarray(payload, dtype=np.uint8)).pin_memory()
        out = self.gather_tensor(mine.to(_DEVICE, non_blocking=True))
        host = torch.empty(out.shape, dtype=out.dtype, pin_memory=True)
        host.copy_(out, non_blocking=True)
        there = _EVENT()
        there.record()

        def finish() -> NDArray[np.uint8]:
            self.wait(there, "gather")
            gathered: NDArray[np.uint8] = host.numpy()
            return gathered

        return Gathering(finish)

    def gather_tensor(self, x: Tensor) -> Tensor:
        out = torch.empty((dist.get_world_size(self._group), len(x)), dtype=x.dtype, device=x.device)
        self._ledger.started += 1
        dist.all_gather_into_tensor(out, x, group=self._group)
        return out

    def wait_for(self, event: Any | None, what: str) -> None:
        self.wait(event, what)
