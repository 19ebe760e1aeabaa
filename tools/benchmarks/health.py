"""Seconds until /health is answered, on the API's port and on metrics.port, while clients load the daemon.

    python tools/benchmarks/health.py [--seconds 15] [--only idle,lists]

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

PAUSE_S = 0.01
FILES = b"GET /v1/files HTTP/1.1\r\nhost: x\r\n\r\n"
UNSENT = b"POST /nowhere HTTP/1.1\r\nhost: x\r\ncontent-length: 9000\r\n\r\n"
HUGE = {"model": "demo", "prompt": ["x"] * 128, "n": 8, "logprobs": 20, "max_tokens": 16, "ignore_eos": True}
Load = Callable[[Night, int, threading.Event], None]
"""Called with the daemon, the port of its probes, and what is set when it is over."""


def hold(port: int, count: int, data: bytes, over: threading.Event, seconds: float) -> None:
    """So many connections that send `data`, read nothing and stay open so long."""
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            one = stack.enter_context(socket.socket())
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            with contextlib.suppress(OSError):
                one.connect(("127.0.0.1", port))
                one.sendall(data)
        over.wait(seconds)


def holding(count: int, data: bytes = b"", probes: bool = False, seconds: float = 600.0) -> Load:
    return lambda night, port, over: hold(port if probes else night.port, count, data, over, seconds)


def submitting(lines: bytes, batches: int) -> Load:
    def load(night: Night, _: int, over: threading.Event) -> None:
        path = night.folder / "load.jsonl"
        path.write_bytes(lines)
        file = night.client.upload(path)["id"]
        names = [
            night.client.create(file, "/v1/completions", "24h", None, os.urandom(8).hex())["id"] for _ in range(batches)
        ]
        over.wait(10.0)
        for name in names:
            with contextlib.suppress(RuntimeError):
                night.client.cancel(name)

    return load


def asking(method: str, path: str, body: dict[str, Any] | None = None, clients: int = 1) -> Load:
    def one(night: Night, over: threading.Event) -> None:
        data = None if body is None else json.dumps(body)
        while not over.is_set():
            connection = http.client.HTTPConnection("127.0.0.1", night.port, timeout=120.0)
            with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
                connection.request(method, path, data, {"content-type": "application/json"})
                connection.getresponse().read()

    def load(night: Night, _: int, over: threading.Event) -> None:
        threads = [threading.Thread(target=one, args=(night, over)) for _ in range(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return load


LARGE = b"".join(json.dumps(line(str(n), 8, n, "x" * 300)).encode() + b"\n" for n in range(20_000))
BLANK = (b" " * 999_999 + b"\n") * 190 + json.dumps(line("a", 1, 1)).encode() + b"\n"
LOADS: dict[str, tuple[str, Load]] = {
    "none": ("no load", lambda night, port, over: None),
    "idle": ("1,400 idle connections to the API", holding(1400)),
    "idle-probes": ("1,400 idle connections to metrics.port", holding(1400, probes=True)),
    "unsent": ("70 refused requests with unsent bodies, each second", holding(70, UNSENT, seconds=1.0)),
    "unsent-probes": ("the same on metrics.port", holding(70, UNSENT, probes=True, seconds=1.0)),
    "large": ("four batches of 20,000 lines", submitting(LARGE, 4)),
    "blank": ("a batch of 190 MB of blank lines", submitting(BLANK, 1)),
    "lists": ("30 clients that list 10,000 files", asking("GET", "/v1/files", clients=30)),
    "unread": ("60 clients that list 10,000 files and do not read", holding(60, FILES, seconds=3.0)),
    "huge": ("answers of 1,024 choices with 20 log probabilities", asking("POST", "/v1/completions", HUGE)),
}


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


def measured(night: Night, port: int, load: Load, seconds: float) -> list[list[float]]:
    over = threading.Event()

    def again() -> None:
        while not over.is_set():
            load(night, port, over)
            over.wait(0.1)

    loading = threading.Thread(target=again)
    loading.start()
    words = [sys.executable, __file__, "--probe", str(seconds), str(night.port), str(port)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=True)
    finally:
        over.set()
        loading.join()
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


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=15.0, help="of each load")
    parser.add_argument("--only", default=",".join(LOADS))
    parser.add_argument("--probe", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.probe:
        probe(float(args.probe[0]), *map(int, args.probe[1:]))
        return 0
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    rows = []
    with tempfile.TemporaryDirectory(prefix="laddertron-health-") as folder, socket.socket() as seat:
        seat.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        seat.bind(("127.0.0.1", 0))
        port = seat.getsockname()[1]
        asyncio.run(fill(Path(folder) / "data"))
        sets = (f"metrics.port={port}", "daemon.limits.max_choices=1024", "engine.max_num_seqs=64")
        night = Night(Path(folder), real=False, step_s=0.005, sets=sets)
        try:
            night.start()
            night.ready()
            for name in args.only.split(","):
                what, load = LOADS[name]
                found = measured(night, port, load, args.seconds)
                rows.append((what, *map(figures, found)))
                print(rows[-1], flush=True)
        finally:
            night.stop()
            night.close()
    heads = (f"{where}: median | 99 % | worst" for where in ("API, ms", "metrics.port, ms"))
    print("\n".join(table(f"load | {' | '.join(heads)}", rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
