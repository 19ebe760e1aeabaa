"""A host that cannot be reached: the line that says why comes first, behind its host, for each launcher."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from laddertron.launchers.job.detect import Evidence, unreachable
from laddertron.launchers.job.options import JobTimeouts
from laddertron.launchers.job.rank_board import RankBoard
from laddertron.topology.placement.world import World

MPIRUN = Path(sys.executable).with_name("mpirun")
ADVICE = (
    "A daemon failed to report back after being spawned.",
    "  Local host:    head",
    "  Remote host:   node9",
    "This may also be caused by a firewall on the remote host. Please",
)


@pytest.mark.parametrize(
    ("lines", "host", "says"),
    [
        (("ssh: connect to host node2 port 22: Connection refused", *ADVICE), "node2", "Connection refused"),
        (("ssh: Could not resolve hostname node2: Name or service not known",), "node2", "Could not resolve"),
        (("me@node2: Permission denied (publickey).",), "node2", "Permission denied (publickey)."),
        (
            ("No ED25519 host key is known for node2 and you have requested strict checking.",
             "Host key verification failed."),
            "node2",
            "No ED25519 host key is known",
        ),
        (("Host key verification failed.", *ADVICE), "node9", "Host key verification failed."),
        (("bash: line 1: /opt/bin/orted: No such file or directory", *ADVICE), "node9", "/opt/bin/orted: No such file"),
        (("sh: 1: exec: prted: not found", *ADVICE), "node9", "prted: not found"),
        (("   Executable: /opt/none/python", "   Node: node3"), "node3", "/opt/none/python: no such program"),
        (
            ("slurmstepd: error: execve(): /opt/none/python: No such file or directory",
             "srun: error: Task launch for StepId=7.0 failed on node node4: Invalid job credential"),
            "node4",
            "failed on node node4",
        ),
        ((*ADVICE[:3], "  Daemon exit status: 213", ADVICE[3]), "node9", "can it write to its TMPDIR"),
        (('srun: error: Unable to resolve "node5": Unknown host',), "node5", "Unable to resolve"),
        (
            ("[proxy:0:1@node6] HYDU_create_process (utils/launch/launch.c:73): execvp error on file /opt/python "
             "(No such file or directory)",),
            None,
            "execvp error on file /opt/python",
        ),
    ],
)  # fmt: skip
def test_the_line_that_says_why(lines: tuple[str, ...], host: str | None, says: str) -> None:
    found = unreachable(lines)
    assert found is not None
    assert (found[1], says in found[0]) == (host, True)
    assert found[0].startswith(f"{host}: ") or host is None
    assert "firewall" not in found[0]


def test_other_words_are_left_alone() -> None:
    assert unreachable(("ValueError: what ranks print", "killed", *ADVICE)) is None
    assert unreachable(()) is None


def test_the_failure_begins_with_it() -> None:
    """Message, node and so the bundle's first line; without a known line the launcher's own last words stay."""
    board = RankBoard(World(2), JobTimeouts(), 0.0)
    board.sign(Evidence("launcher_exit", None, "mpirun ended with status 1"))
    failure = board.judge(1, ("ssh: connect to host node2 port 22: Connection refused", *ADVICE), {})
    assert failure.reason == (
        "node2: ssh: connect to host node2 port 22: Connection refused (mpirun ended with status 1)"
    )
    assert failure.culprit.node == "node2"
    assert "firewall" in board.judge(1, ADVICE, {}).reason


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("ssh: connect to host node9 port 22: Connection refused", 255),
        ("bash: line 1: /opt/openmpi/bin/orted: No such file or directory", 127),
    ],
)
def test_what_mpirun_prints_around_it(tmp_path: Path, line: str, status: int) -> None:
    """The installed mpirun, with an ssh that fails: its own block names the host where the line does not."""
    agent = tmp_path / "ssh"
    agent.write_text(f"#!/bin/sh\necho '{line}' >&2\nexit {status}\n")
    agent.chmod(0o755)
    words = [str(MPIRUN), "--allow-run-as-root", "--mca", "plm_rsh_agent", str(agent), "-np", "2", "-host", "node9:2"]
    done = subprocess.run(
        [*words, "true"], capture_output=True, text=True, check=False, timeout=60, env={**os.environ, "TMPDIR": "/tmp"}
    )
    assert unreachable((done.stdout + done.stderr).splitlines()) == (f"node9: {line}", "node9")
