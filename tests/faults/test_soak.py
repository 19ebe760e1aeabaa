"""Everything at once for half an hour: batches, streams, slow and hostile clients, kills, a full disk, clock steps.

A real daemon with fake ranks. SOAK_SECONDS shortens it, SOAK_SEED replays its choices (`make soak`). Asserted each
second: the daemon lives where nobody killed it, its descriptors stay within its connections, every answer is whole or
of the statuses that say why not. Asserted of each batch: every line one answer, the counts those of the files. At the
end: memory within a tenth of what the same process had when it was warm, descriptors as at rest; and that every kind of
fault struck."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import shutil
import socket
import struct
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from laddertron.launchers.cli.batch_client import ApiError

from faults.night import Night, line, until
from faults.test_kill_points import answers

pytestmark = pytest.mark.slow
SECONDS = float(os.environ.get("SOAK_SECONDS", "1800"))
SEED = int(os.environ.get("SOAK_SEED", random.SystemRandom().randrange(2**32)))
LINES = 60
USUAL = frozenset({200, 400, 404, 408, 413, 415, 429, 431, 503, 504, 507})
SETS = (
    "daemon.max_restarts=1000",
    "engine.max_num_seqs=8",
    "daemon.limits.max_connections=200",
    "daemon.limits.header_timeout=2s",
    "daemon.limits.body_timeout=2s",
)


class World:
    """The daemon's wall clock and disk (world.c)."""

    def __init__(self, folder: Path) -> None:
        library = folder / "world.so"
        source = Path(__file__).with_name("world.c")
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", library, source, "-ldl"], check=True)
        self._file = folder / "world"
        self._offset, self._full = 0, False
        self._write()
        self.environment = {"LD_PRELOAD": str(library), "SOAK_WORLD": str(self._file)}

    def _write(self) -> None:
        with self._file.open("r+b" if self._file.exists() else "w+b") as file:
            file.write(struct.pack("<qq", self._offset, self._full))

    def step_clock(self, seconds: int) -> None:
        self._offset += seconds
        self._write()

    def disk(self, full: bool) -> None:
        self._full = full
        self._write()


class Clients:
    """Threads that ask until `over`. `seen`: statuses by kind; `wrong`: what must not be."""

    def __init__(self, port: int, rng: random.Random) -> None:
        self.port, self.over = port, threading.Event()
        self.seen: Counter[tuple[str, int]] = Counter()
        self.wrong: list[str] = []
        kinds: list[Callable[[random.Random], None]] = [self.whole, self.whole, self.stream, self.hostile, self.slow]
        self._threads = [
            threading.Thread(target=self._run, args=(kind, random.Random(rng.random())), daemon=True) for kind in kinds
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, kind: Callable[[random.Random], None], rng: random.Random) -> None:
        while not self.over.is_set():
            try:
                kind(rng)
            except (OSError, http.client.HTTPException):
                self.seen[kind.__name__, 0] += 1  # the daemon was killed, or has closed
            except Exception as error:
                self.wrong.append(f"{kind.__name__}: {error!r}")
            self.over.wait(rng.uniform(0.0, 0.1))

    def close(self) -> None:
        self.over.set()
        for thread in self._threads:
            thread.join(60.0)

    def _ask(self, kind: str, body: bytes, path: str = "/v1/completions") -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60.0)
        try:
            connection.request("POST", path, body, {"content-type": "application/json"})
            response = connection.getresponse()
            status, data = response.status, response.read()
        finally:
            connection.close()
        self.seen[kind, status] += 1
        if status not in USUAL:
            self.wrong.append(f"{kind}: {status} for {body[:200]!r}: {data[:300]!r}")
        return status, data

    def whole(self, rng: random.Random) -> None:
        most = rng.randint(1, 40)
        body = {"model": "demo", "prompt": [rng.randrange(2000)] * rng.randint(1, 50), "max_tokens": most}
        status, data = self._ask("whole", json.dumps({**body, "ignore_eos": True, "n": rng.randint(1, 3)}).encode())
        if status == 200:
            answer = json.loads(data)
            assert answer["usage"]["completion_tokens"] == most * len(answer["choices"]), answer["usage"]

    def stream(self, rng: random.Random) -> None:
        options = {"include_usage": True, "continuous_usage_stats": rng.random() < 0.5}
        said = [{"role": "user", "content": "x" * rng.randint(1, 60)}]
        body = {"model": "demo", "messages": said, "max_tokens": 20, "stream": True, "stream_options": options}
        status, data = self._ask("stream", json.dumps(body).encode(), "/v1/chat/completions")
        if status == 200:
            assert data.endswith(b"data: [DONE]\n\n"), data[-200:]

    def hostile(self, rng: random.Random) -> None:
        body = rng.choice(
            (
                b"[" * 50_000,
                b'{"model":"demo","prompt":[' + b"1," * 400_000 + b"1]}",
                b'{"model":"demo","prompt":"' + b"x" * 3_000_000 + b'"}',
                b'{"model":"demo","prompt":"a","logit_bias":{'
                + b",".join(b'"%d":1' % n for n in range(90_000))
                + b"}}",
                b'{"model":"demo","prompt":"a","guided_regex":"(a{1,1000}){1,1000}"}',
                rng.randbytes(2000),
            )
        )
        self._ask("hostile", body)

    def slow(self, rng: random.Random) -> None:
        """Heads and bodies that never end, on connections that say nothing more."""
        heads = (b"", b"POST /v1/comp", b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 90\r\n\r\n{")
        opened = []
        try:
            for _ in range(rng.randint(1, 40)):
                opened.append(socket.create_connection(("127.0.0.1", self.port), timeout=5.0))
                opened[-1].sendall(rng.choice(heads))
            self.over.wait(rng.uniform(0.0, 3.0))
        finally:
            for one in opened:
                one.close()


def resident(pid: int) -> int:
    """Bytes of a process's own memory."""
    rows = dict(row.split(":", 1) for row in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(rows["RssAnon"].split()[0]) << 10


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_soak(tmp_path: Path) -> None:
    """The daemon itself is killed in the first third alone, so that one process is seen to stay as it is."""
    print(f"\nSOAK_SEED={SEED} SOAK_SECONDS={SECONDS:g}")
    rng, world = random.Random(SEED), World(tmp_path)
    night = Night(tmp_path, real=False, step_s=0.002, sets=SETS)
    batches: dict[str, int] = {}
    did: Counter[str] = Counter()
    names = {f"line-{n}" for n in range(LINES)}
    held: list[int] = []
    turns = 0

    def start() -> None:
        night.start(**world.environment)
        night.ready()

    def strike() -> None:
        early = time.monotonic() - began < SECONDS / 3
        what = rng.choice(("rank", "rank", "mpirun", "keeper", *(("daemon",) if early else ())))
        if night.strike(what, rng) is None:
            return
        did[what] += 1
        if what == "daemon":
            night.process.wait()
            start()

    def full_disk() -> None:
        world.disk(True)
        time.sleep(rng.uniform(0.5, 2.0))
        world.disk(False)
        did["full disk"] += 1

    def clock() -> None:
        world.step_clock(rng.choice((-7200, -60, 60, 7200)))
        did["clock step"] += 1

    def submit() -> None:
        if len(batches) - did["batch"] < 3 and night.status() == 200:
            batches[night.submit([line(f"line-{n}", 1 + n % 24, n) for n in range(LINES)])] = 0
            did["submitted"] += 1

    def check() -> None:
        for batch_id in [name for name, done in batches.items() if not done]:
            found = night.batch(batch_id)
            if found["status"] not in ("validating", "in_progress", "finalizing"):
                assert found["status"] == "completed", found
                texts = answers(night, batch_id, names)
                counts = found["request_counts"]
                assert (counts["total"], counts["completed"], counts["failed"]) == (LINES, len(texts), 0)
                batches[batch_id] = 1
                did["batch"] += 1

    def ended() -> bool:
        quietly(check)
        return all(batches.values())

    began = time.monotonic()
    try:
        start()
        clients = Clients(night.port, rng)
        try:
            while (spent := time.monotonic() - began) < SECONDS:
                turns += 1
                for act, chance in ((submit, 0.5), (strike, 0.08), (full_disk, 0.03), (clock, 0.05), (check, 0.5)):
                    if rng.random() < chance:
                        quietly(act)
                assert night.process.poll() is None, night.tail()
                assert descriptors(night.process.pid) <= 200 + 256
                assert not clients.wrong, clients.wrong[:3]
                if spent > SECONDS * 0.4:
                    held.append(resident(night.process.pid))
                time.sleep(1.0)
        finally:
            clients.close()
        until("every batch's end", ended, 240.0, 0.5)
        night.ready()
        at_rest = 64 + descriptors_of_ranks(night)
        until("descriptors as at rest", lambda: descriptors(night.process.pid) <= at_rest, 60.0, 0.5)
        assert not clients.wrong, clients.wrong[:3]
        assert night.stop() == 0
    finally:
        night.close()
    print(f"{dict(did)}; {sum(clients.seen.values())} requests {dict(sorted(clients.seen.items()))}")
    tenths = [median(held[len(held) * n // 6 : len(held) * (n + 1) // 6]) / (1 << 20) for n in range(6)]
    print(f"memory in MiB, medians of the last six tenths: {' '.join(f'{each:.1f}' for each in tenths)}")
    assert tenths[-1] <= 1.1 * tenths[1]
    assert did["batch"] > 0
    struck = sum(did[what] for what in ("rank", "mpirun", "keeper", "daemon"))
    for times, chance in ((struck, 0.08), (did["full disk"], 0.03), (did["clock step"], 0.05)):
        assert times or turns * chance < 10, dict(did)


def descriptors_of_ranks(night: Night) -> int:
    """Pipes and sockets that a rank or a text worker costs the daemon."""
    return 8 * len(night.everyone())


def quietly(act: Callable[[], Any]) -> None:
    """What cannot be asked while the daemon or its disk is away is asked again later."""
    with contextlib.suppress(ApiError, OSError):
        act()
