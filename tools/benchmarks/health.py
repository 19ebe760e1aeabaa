"""Seconds until /health is answered, on the API's port and on metrics.port, while clients load the daemon.

    python tools/benchmarks/health.py [--seconds 15]

A real daemon with fake ranks (tests/faults); probes come from a process of their own, each on a new connection.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "tests" / name) for name in ("", "helpers", "launchers/job")]

from common import table  # noqa: E402
from faults.night import Night, line  # noqa: E402
from laddertron.engine.daemon.store import records  # noqa: E402
from laddertron.engine.daemon.store.open import open_store  # noqa: E402
from laddertron.engine.daemon.store.rows import FileRow  # noqa: E402
from laddertron.engine.daemon.store.schema import Rows  # noqa: E402
from laddertron.engine.daemon.store.store import StoreOptions  # noqa: E402
from laddertron.tools.demos.serving import free_port  # noqa: E402

PAUSE_S = 0.01
FILES = b"GET /v1/files HTTP/1.1\r\nhost: localhost\r\n\r\n"
UNSENT = b"POST /nowhere HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9000\r\n\r\n"
HUGE = {"model": "demo", "prompt": ["x"] * 128, "n": 8, "logprobs": 20, "max_tokens": 16, "ignore_eos": True}
LARGE = b"".join(json.dumps(line(str(n), 8, n, "x" * 300)).encode() + b"\n" for n in range(20_000))
BLANK = (b" " * 999_999 + b"\n") * 190 + json.dumps(line("a", 1, 1)).encode() + b"\n"
Load = Callable[[Night, int, threading.Event], None]
"""Called again and again, with the daemon, the port of its probes, and what is set when it is over."""


def holding(count: int, data: bytes = b"", probes: bool = False, seconds: float = 600.0) -> Load:
    """A load of `count` connections that send `data`, read nothing and stay open for `seconds`."""

    def load(night: Night, port: int, over: threading.Event) -> None:
        with contextlib.ExitStack() as stack:
            for _ in range(count):
                one = stack.enter_context(socket.socket())
                one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                with contextlib.suppress(OSError):
                    one.connect(("127.0.0.1", port if probes else night.port))
                    one.sendall(data)
            over.wait(seconds)

    return load


def submitting(lines: bytes, batches: int) -> Load:
    def load(night: Night, _: int, over: threading.Event) -> None:
        path = night.folder / "load.jsonl"
        path.write_bytes(lines)
        file = night.client.upload(path)["id"]
        keys = [os.urandom(8).hex() for _ in range(batches)]
        names = [night.client.create(file, "/v1/completions", "24h", None, key)["id"] for key in keys]
        over.wait(10.0)
        for name in names:
            with contextlib.suppress(RuntimeError):
                night.client.cancel(name)

    return load


def asking(method: str, path: str, body: dict[str, Any] | None = None) -> Load:
    def load(night: Night, *_: object) -> None:
        data = None if body is None else json.dumps(body)
        connection = http.client.HTTPConnection("127.0.0.1", night.port, timeout=120.0)
        with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
            connection.request(method, path, data, {"content-type": "application/json"})
            connection.getresponse().read()

    return load


LOADS: tuple[tuple[str, int, Load], ...] = (
    ("no load", 0, holding(0)),
    ("1,400 idle connections to the API", 1, holding(1400)),
    ("1,400 idle connections to metrics.port", 1, holding(1400, probes=True)),
    ("70 refused requests with unsent bodies, each second", 1, holding(70, UNSENT, seconds=1.0)),
    ("the same on metrics.port", 1, holding(70, UNSENT, probes=True, seconds=1.0)),
    ("four batches of 20,000 lines", 1, submitting(LARGE, 4)),
    ("a batch of 190 MB of blank lines", 1, submitting(BLANK, 1)),
    ("30 clients that list 10,000 files", 30, asking("GET", "/v1/files")),
    ("60 clients that list 10,000 files and do not read", 1, holding(60, FILES, seconds=3.0)),
    ("answers of 1,024 choices with 20 log probabilities", 1, asking("POST", "/v1/completions", HUGE)),
)
"""In how many threads at once."""


def probe(seconds: float, *ports: int) -> None:
    """Prints the seconds that each answer took, by port; a refusal counts as the rest of the time."""
    found: list[list[float]] = [[] for _ in ports]
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for port, times in zip(ports, found, strict=True):
            began, connection = time.monotonic(), http.client.HTTPConnection("127.0.0.1", port, timeout=60.0)
            try:
                connection.request("GET", "/health", headers={"connection": "close"})
                fine = connection.getresponse().status == 200
            except (OSError, http.client.HTTPException):
                fine = False
            connection.close()
            times.append(time.monotonic() - began if fine else seconds)
        time.sleep(PAUSE_S)
    print(json.dumps(found))


def figures(times: list[float]) -> str:
    ranked = sorted(times)
    middle, high = (ranked[len(ranked) * part // 100] for part in (50, 99))
    return " | ".join(f"{1000 * value:.0f}" for value in (middle, high, ranked[-1]))


def measured(night: Night, port: int, threads: int, load: Load, seconds: float) -> list[list[float]]:
    over = threading.Event()

    def again() -> None:
        while not over.is_set():
            load(night, port, over)
            over.wait(0.1)

    loading = [threading.Thread(target=again) for _ in range(threads)]
    for thread in loading:
        thread.start()
    words = [sys.executable, __file__, "--probe", str(seconds), str(night.port), str(port)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=True)
    finally:
        over.set()
        for thread in loading:
            thread.join()
    found: list[list[float]] = json.loads(done.stdout)
    return found


async def fill(data: Path) -> None:
    """10,000 files in the store of a daemon that is not started yet."""

    def add(rows: Rows) -> None:
        for number in range(10_000):
            records.add_file(rows, FileRow(f"file-{number}", "", "batch", "x" * 200, 0, 0))

    store = await open_store(data, StoreOptions())
    await store.write(add)
    await store.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=15.0, help="of each load")
    parser.add_argument("--probe", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.probe:
        probe(float(args.probe[0]), *map(int, args.probe[1:]))
        return
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    rows, port = [], free_port()
    with tempfile.TemporaryDirectory(prefix="laddertron-health-") as folder:
        asyncio.run(fill(Path(folder) / "data"))
        sets = (f"metrics.port={port}", "engine.max_num_seqs=64")
        night = Night(Path(folder), real=False, step_s=0.005, sets=sets)
        try:
            night.start()
            night.ready()
            for what, threads, load in LOADS:
                rows.append((what, *map(figures, measured(night, port, threads, load, args.seconds))))
                print(rows[-1], flush=True)
        finally:
            night.stop()
            night.close()
    heads = (f"{where}: median | 99 % | worst" for where in ("API, ms", "metrics.port, ms"))
    print("\n".join(table(f"load | {' | '.join(heads)}", rows)))


if __name__ == "__main__":
    main()
