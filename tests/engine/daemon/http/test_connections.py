"""Connections that only cost: no handshake, bodies that never come, no descriptor left. Honest clients and probes are
answered through all of it."""

from __future__ import annotations

import contextlib
import errno
import logging
import resource
import socket
import ssl
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from daemon_tools import Served, deployment, served
from laddertron.engine.config.schema import LimitsConfig
from laddertron.engine.daemon.http import connections
from laddertron.engine.daemon.http.server import listen
from laddertron.engine.daemon.keys import add_key
from test_server import make_pair
from tiny_text import write_folder
from waiting import FOR_EVER_S, HANG_S, until

SILENT, LINGERING = 1400, 70
PROBE_S = 1.0
"""Under load too; docs/reliability.md has an idle machine's figures."""
PATIENT = replace(LimitsConfig(), header_timeout=FOR_EVER_S, body_timeout=FOR_EVER_S)
UNSENT = "POST {} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9000\r\n\r\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("tiny"))


@contextlib.contextmanager
def held(port: int, count: int, data: bytes = b"") -> Iterator[list[socket.socket]]:
    """Connections that send `data` and stay open."""
    made: list[socket.socket] = []
    try:
        for _ in range(count):
            one = socket.create_connection(("127.0.0.1", port), timeout=HANG_S)
            made.append(one)
            with contextlib.suppress(ConnectionError):
                one.sendall(data)
        yield made
    finally:
        for one in made:
            one.close()


def ask(port: int, path: str = "/health", tls: ssl.SSLContext | None = None, key: str = "") -> tuple[int, float]:
    """The status (0: none came) and the seconds that it took."""
    began = time.monotonic()
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
        made: Any = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=HANG_S))
        if tls is not None:
            made = stack.enter_context(tls.wrap_socket(made, server_hostname="127.0.0.1"))
        bearer = f"authorization: Bearer {key}\r\n" if key else ""
        made.sendall(f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{bearer}\r\n".encode())
        head = made.recv(1 << 16)
        return int(head.split(b" ", 2)[1]) if head else 0, time.monotonic() - began
    return 0, time.monotonic() - began


def ninetieth(asked: list[tuple[int, float]]) -> float:
    return sorted(seconds for _, seconds in asked)[len(asked) * 9 // 10]


def test_connections_that_never_shake_hands(folder: Path, tmp_path: Path) -> None:
    """They are counted from accept, at most so many are open, and each gives way to a client that does."""
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 2 * SILENT + 1000:
        pytest.skip("this test holds both ends of 1,400 connections: raise the hard limit of `ulimit -n`")
    connections.connections_within(2 * SILENT)
    cert, key = make_pair(tmp_path, "tls")
    tls = ssl.create_default_context(cafile=cert)
    config = deployment(tmp_path, PATIENT, tls_cert=cert, tls_key=key)
    with served(config, folder, probes=True) as daemon:
        for port in (daemon.port, daemon.probe_port):
            with held(port, SILENT) as made:
                probed = [ask(daemon.probe_port, tls=tls) for _ in range(30)]
                if port == daemon.port:
                    assert [status for status, _ in probed] == [200] * 30
                until(lambda: ask(daemon.probe_port, tls=tls)[0] == 200)
                assert ninetieth(probed) < PROBE_S
                until(lambda: ask(daemon.port, tls=tls)[0] == 200)
                for one in made:
                    one.setblocking(False)
                until(partial(_few_are_open, made))
    assert daemon.code == 0


def _few_are_open(made: list[socket.socket]) -> bool:
    """Those that wait to be accepted look open."""
    return sum(not _ended(one) for one in made) <= PATIENT.max_connections_per_address


def _wait_for_answers(made: list[socket.socket]) -> None:
    until(lambda: all(_answered(one) for one in made))


def _answered(one: socket.socket) -> bool:
    """Something has come, or its end."""
    try:
        one.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    return True


def _ended(one: socket.socket) -> bool:
    try:
        return one.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def test_refused_requests_do_not_hold_the_probe_port(folder: Path, tmp_path: Path) -> None:
    """70 that keep an unsent body after a 404, over and over."""
    with served(deployment(tmp_path, PATIENT), folder, probes=True) as daemon:
        for _ in range(3):
            with held(daemon.probe_port, LINGERING, UNSENT.format("/nowhere").encode()) as made:
                _wait_for_answers(made)
                probed = [ask(daemon.probe_port) for _ in range(30)]
                assert [status for status, _ in probed] == [200] * 30
                assert ninetieth(probed) < PROBE_S


def test_the_probe_port_answers_during_its_own_flood(folder: Path, tmp_path: Path) -> None:
    """Idle connections to it, more than it takes: each probe gets the place of the longest idle one."""
    with served(deployment(tmp_path, PATIENT), folder, probes=True) as daemon:
        for _ in range(3):
            with held(daemon.probe_port, 3 * LINGERING):
                until(lambda: ask(daemon.probe_port)[0] == 200)
                probed = [ask(daemon.probe_port) for _ in range(30)]
                assert [status for status, _ in probed] == [200] * 30
                assert ninetieth(probed) < PROBE_S


def test_requests_without_a_key_do_not_shut_out_their_address(folder: Path, tmp_path: Path) -> None:
    """The same after a 401 on the API, with fewer connections an address than there are of them."""
    keys = tmp_path / "keys.json"
    key = add_key(keys, "alice")[1]
    limits = replace(PATIENT, max_connections_per_address=40)
    with (
        served(deployment(tmp_path, limits, api_key_file=str(keys)), folder, keys=keys, probes=True) as daemon,
        held(daemon.port, LINGERING, UNSENT.format("/v1/completions").encode()),
    ):
        assert [ask(daemon.port, "/v1/models", key=key)[0] for _ in range(40)] == [200] * 40


def test_a_refused_request_reads_why_while_it_sends(folder: Path, tmp_path: Path) -> None:
    """The connection is half closed after the answer, and closed a moment later, whether or not the client ends."""
    with served(deployment(tmp_path, PATIENT), folder) as daemon:
        body = b"x" * 8_000_000
        head = f"POST /nowhere HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        assert daemon.raw(head + body).startswith(b"HTTP/1.1 413")
        with held(daemon.port, 1, UNSENT.format("/nowhere").encode()) as made:
            came = b""
            while part := made[0].recv(1 << 16):
                came += part
            assert came.startswith(b"HTTP/1.1 404")
            assert b"connection: close" in came


def test_a_short_body_keeps_its_connection(folder: Path, tmp_path: Path) -> None:
    """A refused request's body that has come is dropped, and the next request is served."""
    with (
        served(deployment(tmp_path, PATIENT), folder) as daemon,
        held(daemon.port, 1, b"POST /nowhere HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\n{}") as made,
    ):
        came = b""
        while not came.endswith(b"}}"):
            came += made[0].recv(1 << 16)
        assert came.startswith(b"HTTP/1.1 404")
        made[0].sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert made[0].recv(1 << 16).startswith(b"HTTP/1.1 200")


class Exhausted(socket.socket):
    """A listener whose process has no descriptor left for the first 30 tries."""

    left = 30

    def accept(self) -> Any:
        if Exhausted.left:
            Exhausted.left -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


def test_without_a_descriptor_the_daemon_goes_on(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It tries again, logs one line, and serves once there is one."""
    monkeypatch.setattr(connections, "_RETRY_SECONDS", 0.02)
    made = listen("127.0.0.1", 0)
    exhausted = Exhausted(fileno=made.detach())
    monkeypatch.setattr("daemon_tools.listen", lambda host, port: exhausted)
    caplog.set_level(logging.WARNING)
    daemon: Served
    with served(deployment(tmp_path, PATIENT), folder) as daemon:
        assert ask(daemon.port)[0] == 200
        assert Exhausted.left == 0
    assert daemon.code == 0
    said = [record.getMessage() for record in caplog.records if "accept" in record.getMessage()]
    assert len(said) == 1
    assert "Too many open files" in said[0]
