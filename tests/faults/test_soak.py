"""Everything at once for half an hour: batches, streams, clients that are slow or hostile, flood the daemon with
connections or do not read; kills, a full disk, clock steps, a removed export, a removed log, an edited input file.

A real daemon with fake ranks. SOAK_SECONDS shortens it, SOAK_SEED replays its choices (`make soak`). Asserted each
second: the daemon lives where nobody killed it, its descriptors stay within its connections, every answer is whole or
of the statuses that say why not. Asserted of each batch: every line one answer, or the batch failed since its input was
edited; the counts those of the files. At the end: the same again of all batches, memory within a tenth of what the same
process had when it was warm, descriptors as at rest; and that every kind of fault struck."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import shutil
import socket
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import TypeVar

import pytest
from laddertron.launchers.cli.batch_client import ApiError
from world import World

from faults.night import Night, line, until
from faults.test_kill_points import answers

pytestmark = pytest.mark.slow
T = TypeVar("T")
SECONDS = float(os.environ.get("SOAK_SECONDS", "1800"))
EARLY_S = SECONDS / 3
SEED = int(os.environ.get("SOAK_SEED", random.SystemRandom().randrange(2**32)))
LINES = 60
USUAL = frozenset({200, 400, 404, 408, 413, 415, 429, 431, 503, 504, 507})
CONNECTIONS = 200
LISTS = (b"/v1/batches?limit=100", b"/metrics", b"/openapi.json")  # of a size that does not grow as the soak does
SETS = (
    "daemon.max_restarts=1000",
    "engine.max_num_seqs=8",
    f"daemon.limits.max_connections={CONNECTIONS}",
    "daemon.limits.max_held_bytes=4MiB",
    "daemon.limits.header_timeout=2s",
    "daemon.limits.body_timeout=2s",
)


class Clients:
    """Threads that ask until `over`. `seen`: statuses by kind; `wrong`: what must not be."""

    def __init__(self, port: int, rng: random.Random) -> None:
        self.port, self.over = port, threading.Event()
        self.seen: Counter[tuple[str, int]] = Counter()
        self.wrong: list[str] = []
        kinds = (self.whole, self.whole, self.stream, self.hostile, self.slow, self.flood, self.unread)
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
        heads = (
            b"",
            b"POST /v1/comp",
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 90\r\n\r\n{",
        )
        self._hold([rng.choice(heads) for _ in range(rng.randint(1, 40))], rng.uniform(0.0, 3.0))

    def flood(self, rng: random.Random) -> None:
        """More connections than there may be, which send nothing; then a pause."""
        self._hold([b""] * (CONNECTIONS + 100), rng.uniform(0.0, 3.0))
        self.seen["flood", 0] += 1
        self.over.wait(rng.uniform(0.0, 10.0))

    def unread(self, rng: random.Random) -> None:
        """Asks for many lists and reads none."""
        asked = b"".join(b"GET %s HTTP/1.1\r\nhost: localhost\r\n\r\n" % rng.choice(LISTS) for _ in range(100))
        self._hold([asked] * rng.randint(1, 20), rng.uniform(0.0, 3.0))
        self.seen["unread", 0] += 1

    def _hold(self, sent: list[bytes], seconds: float) -> None:
        """A connection for each, open for so long."""
        with contextlib.ExitStack() as stack:
            for data in sent:
                one = stack.enter_context(socket.socket())
                one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                one.settimeout(5.0)
                one.connect(("127.0.0.1", self.port))
                one.sendall(data)
            self.over.wait(seconds)


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
    data, export = tmp_path / "data", tmp_path / "export"
    night = Night(tmp_path, real=False, step_s=0.002, sets=(*SETS, f"daemon.export_dir={export}"))
    batches: dict[str, bool] = {}
    edited: set[str] = set()
    did: Counter[str] = Counter()
    names = {f"line-{n}" for n in range(LINES)}
    held: list[int] = []
    turns = 0

    def start() -> None:
        night.start(**world.environment)
        night.ready()

    def kill() -> None:
        night.process.kill()
        night.process.wait()

    def strike() -> None:
        early = time.monotonic() - began < EARLY_S
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
        did["full_disk"] += 1

    def clock_step() -> None:
        world.step_clock(rng.choice((-7200, -60, 60, 7200)))
        did["clock_step"] += 1

    def export_away() -> None:
        """Not ready without it, and ready once it is back."""
        away = export.rename(tmp_path / "away")
        until("not ready without the export", lambda: "daemon.export_dir" in str(quietly(night.readiness)), 30.0)
        away.rename(export)
        night.ready()
        did["export_away"] += 1

    def remove_log() -> None:
        """The daemon ends; the next one is refused, or has all; one with an empty folder rebuilds all."""
        (data / "store.db-wal").unlink()
        if rng.random() < 0.5:
            assert night.process.wait(30.0) == 1, night.tail()
        else:
            kill()
            night.start(**world.environment)
            until("ready or refused", lambda: night.process.poll() is not None or night.status() == 200, 60.0)
            if night.process.poll() is not None:
                assert night.process.returncode == 2, night.tail()
                assert f"from the export {export}" in night.tail()
                did["refused"] += 1
            kill()
        data.rename(tmp_path / f"data-{turns}")
        start()
        did["remove_log"] += 1

    def edit_input() -> None:
        """While the daemon is killed."""
        if (batch_id := quietly(submit)) is None:
            return
        kill()
        with contextlib.closing(sqlite3.connect(f"file:{data / 'store.db'}?mode=ro", uri=True)) as db:
            (file,) = db.execute("SELECT input_file_id FROM batches WHERE id = ?", (batch_id,)).fetchone()
        with (data / "files" / file).open("ab") as input_file:
            input_file.write(b"\n")
        edited.add(batch_id)
        did["edit_input"] += 1
        start()

    def submit() -> str | None:
        if sum(not done for done in batches.values()) == 3 or night.status() != 200:
            return None
        batch_id = night.submit([line(f"line-{n}", 1 + n % 24, n) for n in range(LINES)])
        batches[batch_id] = False
        return batch_id

    def check() -> None:
        for batch_id in [name for name, done in batches.items() if not done]:
            found = night.batch(batch_id)
            if found["status"] in ("validating", "in_progress", "finalizing"):
                continue
            counts = found["request_counts"]
            if batch_id in edited and found["status"] == "failed":
                assert [error["code"] for error in found["errors"]["data"]] == ["input_file_changed"]
                rows = len(night.rows(found, "output"))
            else:
                assert (found["status"], counts["total"]) == ("completed", LINES), found
                rows = len(answers(night, batch_id, names))
            assert (counts["completed"], counts["failed"]) == (rows, 0)
            batches[batch_id] = True
            did[found["status"]] += 1

    def ended() -> bool:
        quietly(check)
        return all(batches.values())

    asked = ((submit, 0.5), (check, 0.5))
    acts = ((strike, 0.08), (full_disk, 0.03), (clock_step, 0.05), (export_away, 0.03))
    restarts = ((remove_log, 0.03), (edit_input, 0.03))
    began = time.monotonic()
    try:
        start()
        clients = Clients(night.port, rng)
        try:
            while (spent := time.monotonic() - began) < SECONDS:
                turns += 1
                for ask, chance in asked:
                    if rng.random() < chance:
                        quietly(ask)
                for act, chance in (*acts, *(restarts if spent < EARLY_S else ())):
                    if rng.random() < chance or (spent > EARLY_S / 2 and not did[act.__name__] and act is not strike):
                        act()
                assert night.process.poll() is None, night.tail()
                assert descriptors(night.process.pid) <= CONNECTIONS + 256
                assert not clients.wrong, clients.wrong[:3]
                if spent > SECONDS * 0.4:
                    held.append(resident(night.process.pid))
                time.sleep(1.0)
        finally:
            clients.close()
        until("every batch's end", ended, 240.0, 0.5)
        batches, counted = dict.fromkeys(batches, False), did.copy()
        until("all of them once more", ended, 240.0, 0.5)
        did = counted
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
    struck = sum(did[what] for what in ("rank", "mpirun", "keeper", "daemon"))
    assert struck or turns * 0.08 < 10, dict(did)
    assert all(did[act.__name__] for act, _ in (*acts[1:], *restarts)), dict(did)
    assert did["completed"] > 0
    assert did["failed"] > 0 or did["edit_input"] < 10, "no edited input was noticed"
    assert clients.seen["flood", 0], "no flood ended"
    assert clients.seen["unread", 0]


def descriptors_of_ranks(night: Night) -> int:
    """Pipes and sockets that a rank or a text worker costs the daemon."""
    return 8 * len(night.everyone())


def quietly(act: Callable[[], T]) -> T | None:
    """What cannot be asked while the daemon or its disk is away is asked again later."""
    with contextlib.suppress(ApiError, OSError, http.client.HTTPException):
        return act()
    return None
