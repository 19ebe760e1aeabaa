"""The daemon's bars, measured: lines checked a second, memory, resume after kill -9, first token of 200 streams.

    PYTHONPATH=tests/helpers python benchmarks/daemon.py [check|memory|resume|streams …]

The engine is a fake one (tests/helpers/fake_job.py), so these are the daemon's own costs. One JSON line a figure, with
its bar.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAME = "tiny"
LETTER_A = 66  # in tests/helpers/tiny_text.py's tokenizer; the other letters follow


def lines(path: Path, count: int, max_tokens: int = 8) -> None:
    """A batch file of chats of about 200 bytes."""
    with path.open("wb") as file:
        for n in range(count):
            messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"say {n} " * 6}]
            body = {"model": NAME, "messages": messages, "max_tokens": max_tokens, "temperature": 0.7}
            value = {"custom_id": f"r-{n}", "method": "POST", "url": "/v1/chat/completions", "body": body}
            file.write(json.dumps(value).encode() + b"\n")


def memory(pid: int | str, name: str = "VmRSS") -> float:
    """MB of a process, now (VmRSS) or at its most (VmHWM)."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.partition(f"{name}:")[2].split()[0]) / 1024


def say(what: str, bar: str, **figures: float) -> None:
    rounded = {name: round(value, 4) for name, value in figures.items()}
    print(json.dumps({"what": what, "bar": bar, **rounded}), flush=True)


class Daemon:
    """A daemon of its own process; `kill` is kill -9."""

    def __init__(self, folder: Path, step_s: float = 0.0, seqs: int = 256) -> None:
        words = [sys.executable, __file__, "--serve", str(folder), str(step_s), str(seqs)]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def ask(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        with contextlib.closing(connection):
            connection.request(method, path, body, headers or {})
            return json.loads(connection.getresponse().read())

    def wait_ready(self) -> None:
        while self.ask("GET", "/ready")["status"] != "ready":
            time.sleep(0.01)

    def batch(self, path: Path) -> str:
        from laddertron.launchers.cli.batch_client import BatchClient

        client = BatchClient(f"http://127.0.0.1:{self.port}/v1")
        file = client.upload(path)
        return str(client.create(file["id"], "/v1/chat/completions", "24h", None, str(time.time()))["id"])

    def done(self, batch_id: str) -> tuple[str, int]:
        batch = self.ask("GET", f"/v1/batches/{batch_id}")
        return batch["status"], batch["request_counts"]["completed"]

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def daemon(folder: Path, **options: Any) -> Iterator[Daemon]:
    running = Daemon(folder, **options)
    try:
        yield running
    finally:
        running.kill()


def serve(folder: Path, step_s: float, seqs: int) -> None:
    """The daemon's process."""
    from daemon_tools import deployment
    from fake_job import FakeJob
    from laddertron.engine.daemon.http.server import ServerOptions, listen
    from laddertron.engine.daemon.service import Daemon as Service
    from laddertron.engine.daemon.service import Parts, calm_collector
    from laddertron.engine.request import ModelLimits, Request
    from laddertron.engine.text.tokenizer import TextModel
    from tiny_text import write_folder

    class Paced(FakeJob):
        def submit(self, request: Request) -> None:
            super().submit(request)
            self.submitted.clear()  # the fake's memory is not the daemon's

        def _step(self) -> None:
            super()._step()
            if step_s:
                self.hold()
                asyncio.get_running_loop().call_later(step_s, self.release)

        def _token(self, sequence: Any) -> int:
            # a letter: text that no later token must complete, so that the first token is the first thing to see
            return LETTER_A + super()._token(sequence) % 26

    async def run() -> None:
        model = write_folder(folder / "model")
        job = Paced(ModelLimits(max_model_len=2048, vocab_size=300, max_num_seqs=seqs, kv_tokens=1 << 20))
        parts = Parts([job], TextModel.from_folder(model), model, "0")
        listener = listen(ServerOptions("127.0.0.1", 0))
        print(listener.getsockname()[1], flush=True)
        daemon = Service(deployment(folder), parts)
        await asyncio.gather(daemon.run(listener), calm_collector(daemon))

    asyncio.run(run())


def check(folder: Path) -> None:
    """50,000 lines parsed and held against the schema, on one core, five times."""
    from laddertron.engine.openai.batch_input import LineRules, check_file

    path = folder / "in.jsonl"
    lines(path, 50_000)
    before = memory("self", "VmHWM")
    rates = []
    for _ in range(5):
        began = time.process_time()
        with path.open("rb") as file:
            assert check_file(file, LineRules("/v1/chat/completions")).bad == 0
        rates.append(50_000 / (time.process_time() - began))
    median, best = statistics.median(rates), max(rates)
    grown = memory("self", "VmHWM") - before
    say("check", ">= 20000 lines/s of one core, < 64 MB", lines_s_median=median, lines_s_best=best, grown_mb=grown)


def grow(folder: Path) -> None:
    """The daemon's memory over an upload of 50,000 lines, their check, and their answers."""
    path = folder / "in.jsonl"
    lines(path, 50_000, max_tokens=2)
    with daemon(folder) as running:
        running.wait_ready()
        # whatever is loaded at the first use is no growth
        small = folder / "small.jsonl"
        lines(small, 100)
        first = running.batch(small)
        while running.done(first)[0] != "completed":
            time.sleep(0.05)
        before = memory(running.process.pid, "VmHWM")
        began = time.monotonic()
        batch = running.batch(path)
        while running.done(batch)[0] == "validating":
            time.sleep(0.05)
        checked, mid = time.monotonic() - began, memory(running.process.pid, "VmHWM") - before
        while running.done(batch)[0] not in ("completed", "failed"):
            time.sleep(0.2)
        whole = time.monotonic() - began
        after = memory(running.process.pid, "VmHWM") - before
        assert running.done(batch) == ("completed", 50_000)
        say("memory", "< 64 MB", upload_and_check_s=checked, to_check_mb=mid, whole_s=whole, to_end_mb=after)


def resume(folder: Path) -> None:
    """A batch of 10,000 lines, the daemon killed in the middle, started again: from ready until lines go on."""
    path = folder / "in.jsonl"
    lines(path, 10_000)
    found = []
    for n in range(3):
        place = folder / str(n)
        place.mkdir()
        with daemon(place, step_s=0.01) as running:
            running.wait_ready()
            batch = running.batch(path)
            while running.done(batch)[1] < 5_000:
                time.sleep(0.02)
        with daemon(place, step_s=0.01) as running:
            running.wait_ready()
            began, before = time.monotonic(), running.done(batch)[1]
            while running.done(batch)[1] == before:
                time.sleep(0.005)
            found.append(time.monotonic() - began)
            while running.done(batch)[0] != "completed":
                time.sleep(0.05)
            assert running.done(batch)[1] == 10_000
    say(
        "resume", "<= 5 s from ready to the next line", seconds_median=statistics.median(found), seconds_most=max(found)
    )


async def _stream(port: int, times: list[float], end: float, seed: int) -> None:
    """One client in a closed loop: asks, reads to the end, asks again."""
    rng = random.Random(seed)
    await asyncio.sleep(rng.uniform(0, 2))
    body = json.dumps({"model": NAME, "prompt": "hello " * 4, "max_tokens": 32, "stream": True, "ignore_eos": True})
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
    while time.monotonic() < end:
        began = time.monotonic()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write((head + body).encode())
        seen = b""
        first = None
        while data := await reader.read(65536):
            seen += data
            if first is None and b"data: " in seen:
                first = time.monotonic() - began
        writer.close()
        assert b"[DONE]" in seen, seen[:200]
        assert first is not None
        times.append(first)


def streams(folder: Path, clients: int = 200, seconds: float = 20.0, step_s: float = 0.05) -> None:
    """200 streams at once, closed loop, staggered; the first round is left out."""

    async def run(port: int) -> list[list[float]]:
        times: list[list[float]] = [[] for _ in range(clients)]
        end = time.monotonic() + seconds
        await asyncio.gather(*(_stream(port, times[n], end, n) for n in range(clients)))
        return [each[1:] for each in times]

    with daemon(folder, step_s=step_s) as running:
        running.wait_ready()
        found = sorted(t for each in asyncio.run(run(running.port)) for t in each)
    median, last = statistics.median(found), found[int(0.99 * len(found))]
    say("streams", "p99 <= 2 x median", ratio=last / median, median_s=median, p99_s=last, answers=len(found))


def main(words: list[str]) -> None:
    if words[:1] == ["--serve"]:
        serve(Path(words[1]), float(words[2]), int(words[3]))
        return
    every = {"check": check, "memory": grow, "resume": resume, "streams": streams}
    for name in words or list(every):
        with tempfile.TemporaryDirectory() as folder:
            every[name](Path(folder))


if __name__ == "__main__":
    main(sys.argv[1:])
