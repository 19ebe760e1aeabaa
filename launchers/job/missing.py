"""Asks hosts whose ranks have not started whether they reach their owner: a program, started there by the same remote
shell as the ranks, or by Slurm, tests the way to this host and back (control/reach.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shlex
import signal
import socket
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ...engine import child
from ..compose.mpi import SLURM_STEP
from ..control.reach import listening

AFTER_S = 3.0
"""Seconds after the launch at which hosts are asked."""
TEST_S, ANSWER_S = 5.0, 12.0
"""Limits for each step of the test there, in which the kernel tries a connection three times, and for its answer."""
ASKED = 16
"""Hosts that are asked at most."""
_MODULE = "laddertron.launchers.control.reach"
_PASSED_ON = (child.SEARCH_PATH, "LD_LIBRARY_PATH")


@dataclass(frozen=True, slots=True)
class Answer:
    """`fault`: why the host and this one do not reach each other; `note`: why it could not be asked. "" if not."""

    fault: str = ""
    note: str = ""


def ask(
    agent: Sequence[str], python: str, hosts: Sequence[str], address: str, ports: range, control: str = ""
) -> dict[str, Answer]:
    """The answers by host, of the first ASKED. `agent`: as in LaunchCommand; address, ports: where this host listens
    for them; `control`: the control channel, host:port. Raises OSError."""
    secret = secrets.token_bytes(32)
    if not hosts:
        return {}
    with listening(address, secret, ports) as place, ThreadPoolExecutor(ASKED) as pool:
        order = {"place": place, "secret": secret.hex(), "host": socket.gethostname(), "timeout_s": TEST_S}
        text = json.dumps({**order, "control": control}) + "\n"
        asked = hosts[:ASKED]
        return dict(zip(asked, pool.map(lambda host: _ask(agent, python, host, text), asked), strict=True))


def _ask(agent: Sequence[str], python: str, host: str, order: str) -> Answer:
    settings = [f"{name}={os.environ[name]}" for name in _PASSED_ON if name in os.environ]
    program = ["env", *settings, *child.command(_MODULE, python=python)]
    process = subprocess.Popen(
        # a remote shell parses what it runs, srun does not
        [*agent, host, *(program if agent[0] == SLURM_STEP[0] else [shlex.join(program)])],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        **child.options(stdin=subprocess.PIPE),
    )
    try:
        out, err = process.communicate(order, ANSWER_S)
        return Answer(fault=str(json.loads(out.splitlines()[-1])["fault"]))
    except subprocess.TimeoutExpired:
        return Answer(note=f"{agent[0]} {host} did not answer within {ANSWER_S:g} s")
    except (IndexError, KeyError, TypeError, ValueError):
        return Answer(note=f"{agent[0]} {host}: {' '.join((err or out).split())[-300:] or 'no output'}")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
