"""Hosts whose ranks have not started are asked whether they reach their owner: by a remote shell that runs here."""

from __future__ import annotations

import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from laddertron.launchers.job import missing
from laddertron.topology.hardware.ports import ANY_PORT


def agent(folder: Path, script: str) -> tuple[str]:
    program = folder / "agent"
    program.write_text(f"#!/bin/sh\nshift\n{script}\n")
    program.chmod(0o755)
    return (str(program),)


def test_a_host_that_reaches_its_owner_has_no_fault(tmp_path: Path) -> None:
    """With a control channel that speaks first, as the real one does; nobody is asked without hosts."""
    here = agent(tmp_path, 'exec sh -c "$*"')
    with socket.create_server(("127.0.0.1", 0)) as control:
        port = control.getsockname()[1]
        control.settimeout(missing.ANSWER_S)
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(missing.ask, here, sys.executable, ["n1"], "127.0.0.1", ANY_PORT, f"127.0.0.1:{port}")
            caller, _ = control.accept()
            with caller:
                caller.sendall(b"x")
            assert asked.result() == {"n1": missing.Answer()}
    assert missing.ask(here, sys.executable, [], "127.0.0.1", ANY_PORT) == {}


def test_a_control_channel_that_is_not_reached_is_the_fault(tmp_path: Path) -> None:
    """Its port and both hosts are named."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    here = agent(tmp_path, 'exec sh -c "$*"')
    answer = missing.ask(here, sys.executable, ["n1"], "127.0.0.1", ANY_PORT, f"127.0.0.1:{port}")["n1"]
    host = socket.gethostname()
    assert f"port {port}, from {host} to {host}" in answer.fault
    assert answer.note == ""


@pytest.mark.parametrize(
    ("script", "says"),
    [("echo 'ssh: connect: refused' >&2; exit 255", "ssh: connect: refused"), ("sleep 600", "did not answer")],
)
def test_a_shell_that_fails_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, says: str) -> None:
    """It may be late for the same reason as the ranks: that is no fault yet."""
    monkeypatch.setattr(missing, "ANSWER_S", 0.5)
    answer = missing.ask(agent(tmp_path, script), sys.executable, ["n1"], "127.0.0.1", ANY_PORT)["n1"]
    assert answer.fault == ""
    assert says in answer.note
