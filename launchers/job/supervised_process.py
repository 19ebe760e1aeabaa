"""Runs a command under a keeper, for `bench` and `preflight`: none of its processes outlives this one, even if this one
is killed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO, cast

from ...engine import child
from .keeper import SCRATCH, under_keeper

GRACE_S = 5.0
"""Seconds between SIGTERM to the command and SIGKILL to all its processes."""


def start(
    argv: Sequence[str],
    env: Mapping[str, str],
    *,
    stdout: IO[str] | int | None,
    stderr: IO[str] | int,
    orders: int | None = None,
) -> subprocess.Popen[str]:
    """Starts the command under a keeper and returns the keeper, which exits like the command. When the keeper's
    standard input closes, it ends the command. orders: a file descriptor for the command's own standard input, which is
    otherwise empty."""
    scratch = tempfile.mkdtemp(prefix="laddertron-")
    try:
        return subprocess.Popen(
            under_keeper(argv, GRACE_S, scratch, orders),
            stdout=stdout,
            stderr=stderr,
            text=True,
            errors="replace",
            **child.options(env, () if orders is None else (orders,), subprocess.PIPE),
        )
    except BaseException:
        os.rmdir(scratch)
        raise


def end(keeper: subprocess.Popen[str], timeout_s: float = 0.0) -> None:
    """Waits up to `timeout_s` for the command to exit, then ends it; returns once all its processes have exited."""
    assert keeper.stdin is not None
    try:
        with suppress(subprocess.TimeoutExpired):
            keeper.wait(timeout_s)
        keeper.stdin.close()
        keeper.wait(GRACE_S + 10.0)
    except BaseException:
        keeper.kill()  # its child dies with it; its folder is removed here
        keeper.wait()
        shutil.rmtree(cast(Sequence[str], keeper.args)[SCRATCH], ignore_errors=True)
        raise
