"""laddertron as process 1, as in a container: it goes on in a child, and process 1 passes signals on and reaps."""

from __future__ import annotations

import os
import signal

TOGETHER_S = 0.1
_TWICE_S = 1.0


def go_on_below() -> None:
    """Returns in a child of this process, which passes on signals, reaps every orphan, and exits as the child does. The
    kernel drops signals to process 1 that have no handler yet, and sends it the orphans of all others."""
    # NOTE: blocked signals stay pending, even those of process 1
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    child = os.fork()
    if child:
        os._exit(_wait_for(child))
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _wait_for(child: int) -> int:
    """Returns the exit code of the child: 128 + n if signal n ended it."""
    while True:
        received = signal.sigwaitinfo(signal.valid_signals())
        if received.si_signo != signal.SIGCHLD:
            if received.si_code <= 0:  # sent by a process: the child gets what a terminal sends itself
                os.kill(child, received.si_signo)
            continue
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == child:
                code = os.waitstatus_to_exitcode(status)
                return code if code >= 0 else 128 - code
            if pid == 0:
                break


def twice_within_s() -> float:
    """Seconds within which a second signal may be the first one: a container's runtime may send it to all processes,
    and process 1 passes it on; `timeout` sends it to its command and to its process group."""
    return _TWICE_S if os.getppid() == 1 else TOGETHER_S
