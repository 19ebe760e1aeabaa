"""A daemon as a process with its ranks, to be killed in every way; and what stands in its store and its log.

`Night` starts, strikes and starts again; it knows nothing of what a test wants to see.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
import random
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cluster.nodes import Cluster
from laddertron.engine.openai import body_worker
from laddertron.launchers.cli.batch_client import BatchClient
from laddertron.launchers.control import processes
from laddertron.launchers.control.processes import ProcessId

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "configs" / "demo.yaml"
FAKE = Path(__file__).with_name("fake_daemon.py")
WORKERS = ("fake_worker.py", "laddertron.launchers.rank.worker")


def until(what: str, condition: Callable[[], Any], seconds: float, pause: float = 0.02) -> float:
    """Asks until it is so; the seconds that took. Raises TimeoutError. Processes that die tell nobody but their parent,
    and HTTP has to be asked."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > seconds:
            raise TimeoutError(f"{what}: not within {seconds:g} s")
        time.sleep(pause)
    return time.monotonic() - began


def words(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    except OSError:
        return []


def line(name: str, tokens: int, seed: int, prompt: Any = "def f(") -> dict[str, Any]:
    body = {"model": "demo", "prompt": prompt, "max_tokens": tokens, "seed": seed, "temperature": 0, "ignore_eos": True}
    return {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body}


class Night:
    """`real`: mpirun and ranks of the demo model; else the stand-ins. `sets`: overrides of the configuration.
    `cluster`: the daemon runs on its first node; all calls come from that node's network."""

    def __init__(
        self,
        folder: Path,
        *,
        real: bool,
        step_s: float = 0.01,
        sets: tuple[str, ...] = (),
        config: Path = DEMO,
        cluster: Cluster | None = None,
    ) -> None:
        self._cluster = cluster
        # bound as long as this lives: one port for all daemons of the night, and nobody else's in between
        self._seat = socket.socket()
        self._seat.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._seat.bind(("127.0.0.1", 0))
        self.port = int(self._seat.getsockname()[1])
        self.folder, self.log_path, self.starts = folder, folder / "log", folder / "starts"
        self.starts.touch()
        keys = (
            f"daemon.data_dir={folder / 'data'}",
            f"daemon.port={self.port}",
            "daemon.limits.min_free_disk=0",
            "batch.deduplicate=false",  # faults meet equal lines one by one
            *sets,
        )
        if real:
            self.argv = [sys.executable, "-m", "laddertron.launchers.cli", "serve", str(config)]
            self.argv += [word for key in keys for word in ("--set", key)]
        else:
            self.argv = [sys.executable, str(FAKE), str(self.starts), str(step_s), str(config), *keys]
        self.client = BatchClient(f"http://127.0.0.1:{self.port}/v1")
        self.process: subprocess.Popen[bytes]

    def start(self, **environment: str) -> None:
        with self.log_path.open("ab") as log:
            if self._cluster is not None:
                self.process = self._cluster.start(0, self.argv, environment, stderr=log)
            else:
                self.process = subprocess.Popen(self.argv, stderr=log, env={**os.environ, **environment})

    def status(self, path: str = "/ready") -> int:
        """Of HTTP; 0 while nobody answers."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    def ready(self, seconds: float = 300) -> float:
        def is_ready() -> bool:
            assert self.process.poll() is None, self.tail()
            return self.status() == 200

        return until("ready", is_ready, seconds)

    def readiness(self) -> dict[str, Any]:
        """The body of /ready."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/ready", timeout=5) as answer:
                found: dict[str, Any] = json.load(answer)
        except urllib.error.HTTPError as error:
            found = json.load(error)
        return found

    def replica(self) -> dict[str, Any]:
        """The only one, as /ready tells of it."""
        found: dict[str, Any] = self.readiness()["replicas"][0]
        return found

    def stands(self, seconds: float = 120) -> None:
        """Waits for a launch that serves and one that stands by."""
        self.ready()
        until("a standby", lambda: self.replica()["standby"] == "ready", seconds)

    def tail(self) -> str:
        return self.log_path.read_text()[-4000:]

    def events(self, name: str) -> list[dict[str, Any]]:
        rows = self.log_path.read_text().splitlines()
        found = [json.loads(row) for row in rows if row.startswith("{") and row.endswith("}")]
        return [event for event in found if event.get("event") == name]

    # whom to strike

    @property
    def daemon(self) -> int:
        """Its pid: on a node it is the child of what entered the node."""
        child = [] if self._cluster is None else [p.pid for p in self.everyone() if _parent(p.pid) == self.process.pid]
        return child[0] if child else self.process.pid

    def launches(self) -> list[list[ProcessId]]:
        """Processes of each launch, its keeper first; the oldest launch, which serves, first."""
        known, daemon = self.everyone(), self.daemon
        keepers = [p for p in known if _parent(p.pid) == daemon and "laddertron.launchers.job.keeper" in words(p.pid)]
        return [[k, *processes.descendants(k.pid)] for k in sorted(keepers, key=lambda k: (k.started, k.pid))]

    def victims(self, what: str, launches: list[list[ProcessId]] | None = None) -> list[ProcessId]:
        """Processes of that kind as of now (daemon, text worker, or keeper, mpirun, rank of all launches or these)."""
        if what == "daemon":
            return [here] if (here := _identity(self.daemon)) else []
        if what == "text worker":
            return [p for p in self.everyone() if body_worker.MODULE in words(p.pid)]
        launches = self.launches() if launches is None else launches
        if what == "keeper":
            return [keeper for keeper, *_ in launches]
        if what == "mpirun":
            return [p for keeper, *below in launches for p in below if _parent(p.pid) == keeper.pid]
        below = [p for keeper, *below in launches for p in below if _parent(p.pid) != keeper.pid]
        return [p for p in below if any(word.endswith(WORKERS) for word in words(p.pid)[1:4])]

    def strike(self, what: str, rng: random.Random, launches: list[list[ProcessId]] | None = None) -> ProcessId | None:
        """Kills one of them; None if there was none."""
        found = sorted(self.victims(what, launches), key=lambda p: p.pid)
        if not found:
            return None
        victim = rng.choice(found)
        return victim if processes.kill(victim) else None

    def everyone(self) -> list[ProcessId]:
        return processes.descendants(self.process.pid)

    # batches

    def submit(self, lines: list[dict[str, Any]]) -> str:
        path = self.folder / "in.jsonl"
        path.write_text("".join(json.dumps(one) + "\n" for one in lines))
        file = self.client.upload(path)["id"]
        return str(self.client.create(file, "/v1/completions", "24h", None, os.urandom(8).hex())["id"])

    def batch(self, batch_id: str) -> dict[str, Any]:
        return self.client.batch(batch_id)

    def rows(self, batch: dict[str, Any], kind: str) -> list[dict[str, Any]]:
        """A file's lines (`output` or `error`), each whole: raises ValueError on a torn one."""
        file = batch[f"{kind}_file_id"]
        if file is None:
            return []
        path = self.folder / f"{kind}.jsonl"
        self.client.download(file, path)
        data = path.read_bytes()
        if data and not data.endswith(b"\n"):
            raise ValueError(f"the {kind} file of {batch['id']} ends in a torn line")
        return [json.loads(row) for row in data.splitlines()]

    def committed(self) -> set[str]:
        """The engine's names of all lines whose result is in the store."""
        with contextlib.closing(sqlite3.connect(f"file:{self.folder / 'data' / 'store.db'}?mode=ro", uri=True)) as db:
            found = db.execute("SELECT batch_id, custom_id, number FROM results").fetchall()
        return {engine_name(*row) for row in found}

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        if self.process.poll() is None:
            os.kill(self.daemon, signal.SIGTERM)
        return self.process.wait(180)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._seat.close()


class StreamReader(threading.Thread):
    """Reads one stream's events as they come, without what is another's in each run. `whole`: it came to its end."""

    def __init__(self, port: int, path: str, body: dict[str, Any]) -> None:
        super().__init__()
        self._port, self._path = port, path
        self._body = {"model": "demo", "ignore_eos": True, "stream": True, **body}
        self.events: list[dict[str, Any]] = []
        self.status = 0
        self.whole = False
        self.start()

    def run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=300)
        with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
            connection.request("POST", f"/v1/{self._path}", json.dumps(self._body))
            answer = connection.getresponse()
            self.status = answer.status
            for line in answer:
                data = line.decode().strip().removeprefix("data: ")
                self.whole |= data == "[DONE]"
                if line.startswith(b"data: ") and data != "[DONE]":  # else empty, or a comment that keeps it alive
                    event = json.loads(data)
                    self.events.append({k: v for k, v in event.items() if k not in ("id", "created")})

    @property
    def said(self) -> dict[int, dict[str, Any]]:
        """What the events tell of each choice together, however many tokens each brought: text, log-probabilities, end,
        and the digest of its logits."""
        found: dict[int, dict[str, Any]] = {}
        for event in self.events:
            for choice in event.get("choices", []):
                one = found.setdefault(choice["index"], {"text": "", "end": None})
                delta = choice.get("delta", {})
                one["text"] += choice.get("text") or delta.get("reasoning_content") or delta.get("content") or ""
                for name, values in (choice["logprobs"] or {}).items():
                    one.setdefault(name, []).extend(values or ())
                if choice["finish_reason"] is not None:
                    one["end"] = (choice["finish_reason"], choice.get("digest"))
        return found


def engine_name(batch_id: str, custom_id: str, number: int) -> str:
    """What a line's request is called in the engine, without the choice."""
    digest = hashlib.blake2b(f"{batch_id}\0{custom_id}\0{number}".encode(), digest_size=12).hexdigest()
    return f"{batch_id[-12:]}-{digest}"


def _identity(pid: int) -> ProcessId | None:
    started = processes.start_time(pid)
    return None if started is None else ProcessId(pid, started)


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0
