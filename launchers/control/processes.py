"""Processes of this host by pid and start time, so that a reused pid is not mistaken for the old one. Linux only."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_USUAL_FILES = 1024


@dataclass(frozen=True, slots=True)
class ProcessId:
    """`started` is in clock ticks since boot (field 22 of /proc/<pid>/stat)."""

    pid: int
    started: int


def few_descriptors() -> str:
    """What to do if this process may open fewer files than is usual; "" otherwise. mpirun fails silently without about
    90 descriptors."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files >= _USUAL_FILES or files == resource.RLIM_INFINITY:
        return ""
    return f"it may open only {files} files (`ulimit -n`): raise that to {_USUAL_FILES}"


def _stat(pid: int) -> list[str] | None:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()  # the command's name may hold spaces and brackets
    except (FileNotFoundError, ProcessLookupError):
        return None


def start_time(pid: int) -> int | None:
    """The start time of a process; None if it does not exist or is a zombie."""
    fields = _stat(pid)
    return None if fields is None or fields[0] in "ZX" else int(fields[19])


@contextlib.contextmanager
def ended_by_term() -> Iterator[None]:
    """Raises SystemExit(143) on SIGTERM, so that context managers end what they started. Only for the main thread."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def is_alive(process: ProcessId) -> bool:
    """Whether the process exists; False for a zombie, which has neither memory nor devices."""
    return start_time(process.pid) == process.started


def kill(process: ProcessId, signum: int = signal.SIGKILL) -> bool:
    """Sends the signal to exactly this process; False if it has exited. The pidfd keeps the pid valid while the start
    time is compared."""
    try:
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return False
    try:
        if not is_alive(process):
            return False
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, signum)
        return True
    finally:
        os.close(handle)


def wait_for(process: ProcessId, timeout_s: float) -> bool:
    """Waits until exactly this process has exited; False after the timeout."""
    with contextlib.suppress(ProcessLookupError):
        handle = os.pidfd_open(process.pid)
        try:
            if is_alive(process):
                ended = select.poll()
                ended.register(handle, select.POLLIN)
                ended.poll(max(0.0, timeout_s) * 1e3)
        finally:
            os.close(handle)
    return not is_alive(process)


def descendants(ancestor: int) -> list[ProcessId]:
    """All current descendants without zombies. Processes that are forked meanwhile may be missing."""
    children: dict[int, list[int]] = {}
    started: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdecimal() and (fields := _stat(int(name))) is not None:
            children.setdefault(int(fields[1]), []).append(int(name))
            if fields[0] not in "ZX":
                started[int(name)] = int(fields[19])
    processes_below: list[ProcessId] = []
    todo = [ancestor]
    while todo:
        for pid in children.get(todo.pop(), []):
            todo.append(pid)
            if pid in started:
                processes_below.append(ProcessId(pid, started[pid]))
    return processes_below


def words_of(pid: int) -> list[str]:
    """A process's command line; [] if it has exited."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().decode(errors="replace").split("\0")
    except OSError:
        return []


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def die_with_parent(signum: int = signal.SIGKILL) -> None:
    """Makes the kernel kill this process when its parent (mpirun or its daemon) exits. A rank calls it first."""
    _prctl(_PR_SET_PDEATHSIG, signum)


def ended_by_parent_alone() -> None:
    """From now on SIGTERM and SIGINT end this process only if its parent sends them: a service manager may send them to
    every process of a service, whose daemon drains. Call it before other threads are started."""
    numbers = {signal.SIGTERM, signal.SIGINT}
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)

    def wait() -> None:
        while (info := signal.sigwaitinfo(numbers)).si_pid != os.getppid():
            pass
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
        os.kill(os.getpid(), info.si_signo)

    threading.Thread(target=wait, name="signals", daemon=True).start()


def adopt_orphans() -> None:
    """Makes orphaned descendants children of this process, so that it can find all of them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
