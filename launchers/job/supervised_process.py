"""A command under a keeper, for `bench` and `preflight`: none of its processes outlives this one, not even after
SIGKILL.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO, cast

from .keeper import SCRATCH, under_keeper

GRACE_S = 5.0
"""Between asking the command to end and killing what is left of it."""


def start(
    argv: Sequence[str],
    env: Mapping[str, str],
    *,
    stdout: IO[str] | int | None,
    stderr: IO[str] | int,
    orders: int | None = None,
) -> subprocess.Popen[str]:
    """The keeper of the command, which ends as the command does. Its standard input is the life line: the command is
    ended when that closes. orders: a file descriptor for the command's own standard input, which is otherwise empty."""
    scratch = tempfile.mkdtemp(prefix="laddertron-")
    try:
        return subprocess.Popen(
            under_keeper(argv, GRACE_S, scratch, orders),
            env={**os.environ, **env},
            stdin=subprocess.PIPE,
            stdout=stdout,
            stderr=stderr,
            text=True,
            errors="replace",
            pass_fds=() if orders is None else (orders,),
            start_new_session=True,
        )
    except BaseException:
        os.rmdir(scratch)
        raise


def end(keeper: subprocess.Popen[str], timeout_s: float = 0.0) -> None:
    """Waits for the command to end by itself, then ends it; returns once nothing of it is left."""
    assert keeper.stdin is not None
    try:
        with suppress(subprocess.TimeoutExpired):
            keeper.wait(timeout_s)
        keeper.stdin.close()
        keeper.wait(GRACE_S + 10.0)
    except BaseException:
        keeper.kill()  # its child goes with it, its folder does not
        keeper.wait()
        shutil.rmtree(cast(Sequence[str], keeper.args)[SCRATCH], ignore_errors=True)
        raise
