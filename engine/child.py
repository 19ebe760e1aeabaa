"""The Python processes that laddertron starts, itself or through a launcher: command line, environment, descriptors and
session of each. The working directory is not on their import path, where a file `random.py` or a folder `torch` would
replace a library. Pure.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

SAFE_PATH, SEARCH_PATH = "PYTHONSAFEPATH", "PYTHONPATH"
_NO_QUESTIONS = {"SSH_ASKPASS_REQUIRE": "never"}
"""A remote shell that asks for a password in a window would wait; without a terminal it fails, and says why."""


def command(module: str, *words: str, python: str | None = None) -> tuple[str, ...]:
    """The command line that runs `module` with these arguments; `python`: another interpreter than this one."""
    return (python or sys.executable, "-P", "-m", module, *words)


def laddertron(*words: str, python: str | None = None) -> tuple[str, ...]:
    """The command line of a laddertron command."""
    return command("laddertron.launchers.cli", *words, python=python)


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment and `more`, without the working directory on the import path of any Python program,
    not even of one between a launcher and its ranks."""
    return {**os.environ, **_NO_QUESTIONS, **(more or {}), **safe_path({**os.environ, **(more or {})})}


def safe_path(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that keep the working directory off the import path: PYTHONSAFEPATH, and PYTHONPATH without its
    empty entries, which mean the working directory."""
    variables = {SAFE_PATH: "1"}
    if SEARCH_PATH in environ:
        variables[SEARCH_PATH] = os.pathsep.join(filter(None, environ[SEARCH_PATH].split(os.pathsep)))
    return variables


def options(
    env: Mapping[str, str] | None = None, pass_fds: Sequence[int] = (), stdin: int = subprocess.DEVNULL
) -> dict[str, Any]:
    """Arguments of subprocess.Popen and asyncio.create_subprocess_exec for such a command: no descriptors but the
    standard ones and `pass_fds`, and a session of its own, because a terminal's ^C is for this process, which ends its
    children in order."""
    return {
        "env": environment(env),
        "stdin": stdin,
        "pass_fds": tuple(pass_fds),
        "start_new_session": True,
    }
