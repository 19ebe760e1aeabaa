"""A daemon of one's own: `laddertron serve` on a free port, always ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from laddertron.engine import child


@dataclass(frozen=True, slots=True)
class ServedDaemon:
    port: int
    pid: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def ask(url: str, body: Any = None, timeout_s: float = 30.0) -> Any:
    """JSON in, JSON out. Raises URLError (HTTPError for what the server refuses)."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout_s) as answer:
        return json.load(answer)


def wait_until(
    what: str,
    condition: Any,
    timeout_s: float,
    process: subprocess.Popen[bytes] | None = None,
    log: Path | None = None,
) -> None:
    """Polls five times a second. Raises RuntimeError with the end of `log`."""
    deadline = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError, KeyError):
            if condition():
                return
        last = "" if log is None else f":\n{log.read_text()[-3000:]}"
        if process is not None and process.poll() is not None:
            raise RuntimeError(f"{what}: the process ended with status {process.returncode}{last}")
        if time.monotonic() > deadline:
            raise RuntimeError(f"{what}: not within {timeout_s:g} s{last}")
        time.sleep(0.2)


@contextlib.contextmanager
def started(argv: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process of its own group that is ended, kindly and then not, when the block is left."""
    with log.open("wb") as out:
        process = subprocess.Popen(argv, stdout=out, stderr=out, **child.options())
    try:
        yield process
    finally:
        end(process)


def end(process: subprocess.Popen[bytes], timeout_s: float = 20.0) -> int:
    """SIGTERM, the exit status; SIGKILL to its whole group where that does not help."""
    if process.poll() is None:
        process.terminate()
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.wait()


def serve_command(config: Path, settings: Mapping[str, object]) -> list[str]:
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    return list(child.laddertron("serve", str(config), *words))


@contextlib.contextmanager
def serving(config: Path, log: Path, settings: Mapping[str, object]) -> Iterator[ServedDaemon]:
    """A ready daemon; `settings` override the file's keys. Raises RuntimeError with its last output."""
    port = free_port()
    with started(serve_command(config, {"daemon.port": port, **settings}), log) as process:
        daemon = ServedDaemon(port, process.pid)
        wait_until("the daemon", lambda: ask(f"{daemon.url}/ready"), 120, process, log)
        yield daemon
