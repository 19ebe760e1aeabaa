"""A small process between the daemon and one mpirun, so that no process of the launch outlives either.

`python -P -m laddertron.launchers.job.keeper GRACE SCRATCH [INPUT] [stop=NUMBER] -- mpirun ...` runs the command in a
session of its own, with the descriptor INPUT as its standard input, and adopts its orphans. When the keeper's own
standard input is readable or closes, it sends SIGTERM, or the signal NUMBER, to the command, and after GRACE seconds
SIGKILL to every descendant. The keeper exits with the command's status when no descendant is left. A service manager
may send SIGTERM to every process of a service: the keeper ignores it while its parent lives, and a command with another
signal NUMBER gets it blocked.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

from ...engine import child
from ..control import processes

_LOOK_AGAIN_S = 0.05
_LOCAL_SCRATCH = ("PRTE_MCA_prte_local_tmpdir_base", "OMPI_MCA_orte_tmpdir_base")
"""Variables for the session folder in Open MPI 5 and 4. Open MPI 4 also has one for only this host, but its ranks
inherit that one and refuse it. TMPDIR is not changed, because ranks keep caches there."""
SCRATCH, _STOP = 5, "stop="
_ASKS_TO_STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def under_keeper(
    command: Sequence[str],
    grace_s: float,
    scratch: str,
    standard_input: int | None = None,
    stop: int = signal.SIGTERM,
) -> list[str]:
    """The command line of a keeper for the command; `scratch` is its SCRATCH folder."""
    given = [] if standard_input is None else [str(standard_input)]
    given += [] if stop == signal.SIGTERM else [f"{_STOP}{int(stop)}"]
    return list(child.command(__name__, str(grace_s), scratch, *given, "--", *command))


def _exec(command: list[str], keeper: int, standard_input: int | None, mask: set[int]) -> NoReturn:
    """Executes the command in the forked child. Stop signals are blocked until `mask` is restored."""
    try:
        os.setsid()
        processes.die_with_parent()
        if os.getppid() != keeper:
            os._exit(1)
        for signum in (*_ASKS_TO_STOP, signal.SIGCHLD):
            signal.signal(signum, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.dup2(os.open(os.devnull, os.O_RDONLY) if standard_input is None else standard_input, 0)
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"laddertron: cannot start {command[0]}: {error.strerror}\n".encode())
    os._exit(127)


class _Keeper:
    def __init__(self, command: list[str], grace_s: float, stop: int, standard_input: int | None) -> None:
        self._grace_s, self._stop = grace_s, stop
        self._stopping = False
        self._deadline: float | None = None
        self._status: int | None = None
        self._wake, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for signum in _ASKS_TO_STOP:
            signal.signal(signum, self._ask)
        me, self._parent = os.getpid(), os.getppid()
        # blocked around the fork: else the keeper's handlers in the child would lose a SIGTERM before exec
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _ASKS_TO_STOP)
        self._child = os.fork()
        if self._child == 0:
            _exec(command, me, standard_input, mask if stop == signal.SIGTERM else {*mask, signal.SIGTERM})
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if standard_input is not None:
            os.close(standard_input)  # else the command would not see its end

    def _ask(self, *_: object) -> None:
        self._stopping |= os.getppid() != self._parent

    def _reap(self) -> bool:
        """Reaps exited descendants; False if none is left."""
        try:
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return True
                if pid == self._child:
                    self._status = status
        except ChildProcessError:
            return False

    def run(self) -> int:
        """Waits until all descendants have exited; returns the command's wait status."""
        while self._reap():
            sweeping = self._status is not None
            if self._stopping and self._deadline is None:
                self._deadline = time.monotonic() + self._grace_s
                if not sweeping:
                    os.kill(self._child, self._stop)
            if sweeping or (self._deadline is not None and time.monotonic() >= self._deadline):
                sweeping = True
                for process in processes.descendants(os.getpid()):
                    processes.kill(process)
            self._wait(sweeping)
        return self._status or 0

    def _wait(self, sweeping: bool) -> None:
        timeout = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
        if sweeping:
            timeout = _LOOK_AGAIN_S  # finds processes that were forked meanwhile
        watched = [self._wake] if self._stopping else [self._wake, 0]
        readable, _, _ = select.select(watched, [], [], timeout)
        if self._wake in readable:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake, 4096)
        if 0 in readable:
            self._stopping = True


def main(argv: list[str]) -> int:
    """argv: [GRACE, SCRATCH, maybe INPUT, maybe stop=NUMBER, "--", command, ...]. Removes the folder SCRATCH, which has
    mpirun's session: a killed mpirun does not."""
    own, command = argv[: argv.index("--")], argv[argv.index("--") + 1 :]
    stop = int(own.pop().removeprefix(_STOP)) if own[-1].startswith(_STOP) else signal.SIGTERM
    grace_s, scratch, standard_input = float(own[0]), own[1], int(own[2]) if own[2:] else None
    processes.adopt_orphans()
    processes.die_with_parent(signal.SIGTERM)
    for name in _LOCAL_SCRATCH:
        os.environ[name] = scratch
    try:
        status = _Keeper(command, grace_s, stop, standard_input).run()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if os.WIFSIGNALED(status):
        # die by the same signal instead of exiting with 128 + n: mpirun exits with 137 if a rank was killed
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):  # SIGKILL has no handler to reset
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
