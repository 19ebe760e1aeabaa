"""Ranks for tests: processes that are forked from one warm server, wait for cases as data and answer with JSON.

The server imports torch and laddertron once; a set of ranks is then a fork away. A case is named
"module:function" (a module of tests/ or of laddertron) and gets a `Rank` and JSON arguments. Whatever goes wrong with a
set of ranks, it is ended, and the next case gets a fresh one.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
import traceback
from importlib import import_module
from typing import TYPE_CHECKING, Any

from folders import FOLDERS
from waiting import HANG_S

if TYPE_CHECKING:
    from laddertron.topology.comm.bootstrap import StoreBootstrap
    from laddertron.topology.comm.groups import CommOptions, Communicator

_LENGTH = struct.Struct("<I")
_DROP, _STACKS = 1 << 31, 1 << 30
_STACKS_S = 0.5
"""For the stacks of a failed set of ranks to be written to standard error before these are killed."""
_WARM = (
    "torch",
    "pytest",
    "einops",
    "laddertron.topology.comm.torch_groups",
    "laddertron.topology.transport.transport",
    "laddertron.models.llama",
    "laddertron.engine.step.build",
)
"""Imported once by the server: what is missing here, every rank of every set imports for itself."""
_AFTER_FAILURE_S = 10.0


class RankError(AssertionError):
    """A case failed on a rank; the message holds every failing rank's traceback."""


class Rank:
    """What a case knows of where it runs. `communicator` is one for all ranks of the set on one node, made at the first
    use and kept; `connect` makes another, the case's own to close. A process has one torch world: a case that connects
    groups other than of the whole set calls `close_kept` first, on every rank."""

    def __init__(self, rank: int, size: int, bootstrap: StoreBootstrap) -> None:
        self.rank, self.size, self.bootstrap = rank, size, bootstrap
        self._communicator: Communicator | None = None

    @property
    def communicator(self) -> Communicator:
        if self._communicator is None:
            self._communicator = self.connect()
        return self._communicator

    def close_kept(self) -> None:
        if self._communicator is not None:
            self._communicator.close()
            self._communicator = None

    def connect(self, per_node: int | None = None, options: CommOptions | None = None, stages: int = 1) -> Communicator:
        """All ranks call it at once. per_node < size: as if on several nodes, with TCP over loopback between them.
        stages: the ranks are a pipeline's, each stage on nodes of its own."""
        from laddertron.topology.connect import connect
        from laddertron.topology.placement.layout import GroupLayout

        size = self.size // stages
        each = per_node or size
        groups = [
            GroupLayout(tuple(tuple(range(at, at + each)) for at in range(first, first + size, each)))
            for first in range(0, self.size, size)
        ]
        return connect(self.bootstrap, groups[self.rank // size], options, stages=groups)


class RankPool:
    """The tests' end. `run` is all there is; `close` ends every process."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[bytes] | None = None
        self._line: socket.socket | None = None
        self._sets: dict[int, list[socket.socket]] = {}

    def run(self, size: int, case: str, args: dict[str, Any] | None = None, timeout_s: float = 900.0) -> list[Any]:
        """Runs `case` on `size` ranks at once and returns what each gave back, in rank order. Raises RankError."""
        if size not in self._sets:
            self._sets[size] = self._fork(size)
        lines = self._sets[size]
        answers: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + timeout_s
        for rank, line in enumerate(lines):
            if not _send(line, {"case": case, "args": args or {}}):
                answers[rank] = {"error": "the rank's process is gone"}
        waiting = {line.fileno(): rank for rank, line in enumerate(lines) if rank not in answers}
        poll = select.poll()
        for fd in waiting:
            poll.register(fd, select.POLLIN)
        while waiting:
            if any("error" in a for a in answers.values()):
                # the others may be waiting for the failed one
                deadline = min(deadline, time.monotonic() + _AFTER_FAILURE_S)
            ready = poll.poll(max(0.0, deadline - time.monotonic()) * 1e3)
            if not ready:
                break
            for fd, _ in ready:
                rank = waiting.pop(fd)
                poll.unregister(fd)
                answers[rank] = _receive(lines[rank]) or {"error": "the rank's process ended during the case"}
        for rank in waiting.values():
            late = f"{timeout_s:g} s; {_AFTER_FAILURE_S:g} s once another rank has failed"
            answers[rank] = {"error": f"no answer (the case may take {late})"}
        failed = [r for r in range(size) if "error" in answers[r]]
        if failed:
            self._drop(size, stacks=bool(waiting))
            raise RankError("\n".join(f"--- rank {r} of {size}, {case} ---\n{answers[r]['error']}" for r in failed))
        return [answers[r]["result"] for r in range(size)]

    def close(self) -> None:
        for size in list(self._sets):
            self._drop(size)
        if self._line is not None:
            self._line.close()
        if self._server is not None:
            self._server.wait(HANG_S)

    def _fork(self, size: int) -> list[socket.socket]:
        if self._server is None:
            ours, theirs = socket.socketpair()
            with theirs:
                self._server = subprocess.Popen(
                    [sys.executable, "-W", "ignore", __file__, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
                    start_new_session=True,
                )
            self._line = ours
        assert self._line is not None
        self._line.sendall(_LENGTH.pack(size))
        lines: list[socket.socket] = []
        while len(lines) < size:
            message, fds, _, _ = socket.recv_fds(self._line, 1, 1)
            if not message:
                raise RankError("the server of ranks has ended: see its output above")
            lines.append(socket.socket(fileno=fds[0]))
        port = _receive(lines[0])
        if port is None or any(not _send(line, port) for line in lines[1:]):
            raise RankError("the ranks ended before they began: see their output above")
        return lines

    def _drop(self, size: int, stacks: bool = False) -> None:
        """Closing a rank's line ends its process, whatever it is doing (the server sees to it)."""
        for line in self._sets.pop(size, []):
            line.close()
        assert self._line is not None
        with contextlib.suppress(OSError):
            self._line.sendall(_LENGTH.pack(size | _DROP | stacks * _STACKS))
            self._line.recv(1)


def _send(line: socket.socket, message: Any) -> bool:
    body = json.dumps(message).encode()
    try:
        line.sendall(_LENGTH.pack(len(body)) + body)
    except OSError:
        return False
    return True


def _receive(line: socket.socket) -> Any:
    def take(count: int) -> bytes:
        got = b""
        while len(got) < count:
            try:
                part = line.recv(count - len(got))
            except OSError:
                part = b""
            if not part:
                return b""
            got += part
        return got

    head = take(_LENGTH.size)
    body = take(_LENGTH.unpack(head)[0]) if head else b""
    return json.loads(body) if body else None


# ---- the server, and the ranks that it forks ----


def _serve(line: socket.socket) -> None:
    """Forks sets of ranks on demand; ends with the line, and every rank with it."""
    for module in _WARM:
        import_module(module)
    import torch

    torch.set_num_threads(1)
    sets: dict[int, list[int]] = {}
    while head := line.recv(_LENGTH.size):
        size = _LENGTH.unpack(head)[0]
        if size & _DROP:
            pids = sets.pop(size & ~(_DROP | _STACKS), [])
            if size & _STACKS:
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGUSR1)
                time.sleep(_STACKS_S)
            _end(pids)
            line.sendall(b"d")
            continue
        sets[size] = []
        for rank in range(size):
            ours, theirs = socket.socketpair()
            pid = os.fork()
            if pid == 0:
                line.close()
                ours.close()
                _be_rank(rank, size, theirs)
            theirs.close()
            socket.send_fds(line, [b"r"], [ours.fileno()])
            ours.close()
            sets[size].append(pid)
    for pids in sets.values():
        _end(pids)


def _end(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


def _be_rank(rank: int, size: int, line: socket.socket) -> None:
    from laddertron.topology.comm.bootstrap import StoreBootstrap, open_store

    faulthandler.register(signal.SIGUSR1)
    if rank == 0:
        store = open_store("127.0.0.1", 0, master=True)
        _send(line, store.port)
    else:
        store = open_store("127.0.0.1", _receive(line), master=False)
    me = Rank(rank, size, StoreBootstrap(store, rank, size))
    while (message := _receive(line)) is not None:
        try:
            module, _, function = message["case"].partition(":")
            answer = {"result": getattr(import_module(module), function)(me, **message["args"])}
            json.dumps(answer)
        except BaseException:
            answer = {"error": traceback.format_exc()}
        _send(line, answer)
    os._exit(0)


if __name__ == "__main__":
    sys.modules["rank_pool"] = sys.modules["__main__"]  # cases that import Rank from here mean this very module
    sys.path[:0] = FOLDERS
    _serve(socket.socket(fileno=int(sys.argv[1])))
