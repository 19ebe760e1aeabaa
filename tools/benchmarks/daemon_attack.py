"""One client against the service: 40 connections that send bodies of 4.9 million integers for a minute, beside a batch.

    python tools/benchmarks/daemon_attack.py [seconds]

The demo model on two ranks under mpirun, everything on this machine's cores: what the attackers and the refusals cost
the ranks lack. So the batch runs alone, attacked, and alone again; allowed is what the processor time taken explains
and a fifth of that, over the quicker of the two. One JSON line a figure, with its bar.
"""

from __future__ import annotations

import contextlib
import http.client
import multiprocessing
import os
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from common import say
from laddertron.tools.demos.serving import ServedDaemon, batch_seconds, free_port, serving, write_lines

ROOT = Path(__file__).parents[2]
CONNECTIONS, LINES, TOKENS = 40, 300, 96
BODY = b'{"model": "demo", "prompt": [' + b"1," * 4_899_999 + b"1]}"


def ask(port: int, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, bytes]:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=120)) as connection:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()


def seconds_of(pid: int) -> float:
    """Processor time of a process and of its children that still run, mpirun and what it started apart."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        name = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return 0.0
    if b"keeper" in name or b"mpirun" in name:
        return 0.0
    own = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return own + sum(seconds_of(int(child)) for child in children)


def attack(port: int, until: float, answers: Any) -> None:
    """A process: CONNECTIONS threads, each with one connection after another."""
    seen: Counter[str] = Counter()

    def one() -> None:
        while time.monotonic() < until:
            try:
                seen[str(ask(port, "POST", "/v1/completions", BODY)[0])] += 1
            except (OSError, http.client.HTTPException):
                seen["cut off"] += 1

    threads = [threading.Thread(target=one) for _ in range(CONNECTIONS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    answers.put((dict(seen), time.process_time()))


def probe(ports: dict[str, int], until: float, answers: Any) -> None:
    """A process: every listener's probes ten times a second; seconds each, and whether ranks were ready."""
    taken: dict[str, list[float]] = {}
    unready = 0
    while time.monotonic() < until:
        for name, port in ports.items():
            for path in ("/health", "/metrics") if name == "probes" else ("/health",):
                began = time.perf_counter()
                with contextlib.suppress(OSError, http.client.HTTPException):
                    ask(port, "GET", path)
                taken.setdefault(f"{name} {path}", []).append(time.perf_counter() - began)
        unready += ask(ports["probes"], "GET", "/ready")[0] != 200
        time.sleep(0.1)
    answers.put((taken, unready))


def peak(pid: int) -> int:
    """The most MiB that a process has held."""
    return int(Path(f"/proc/{pid}/status").read_text().partition("VmHWM:")[2].split()[0]) >> 10


def measure(daemon: ServedDaemon, probes: int, lines: Path, length: float) -> None:
    port, pid = daemon.port, daemon.pid

    def batch() -> float:
        return batch_seconds(daemon, lines, LINES)

    batch()  # warm
    before, began = seconds_of(pid), time.monotonic()
    alone = batch()
    usual = (seconds_of(pid) - before) / (time.monotonic() - began) * alone
    usually = peak(pid)
    answers: Any = multiprocessing.Queue()
    watched: Any = multiprocessing.Queue()
    until = time.monotonic() + length
    attacker = multiprocessing.Process(target=attack, args=(port, until, answers))
    prober = multiprocessing.Process(target=probe, args=({"probes": probes, "daemon": port}, until, watched))
    before = seconds_of(pid)
    attacker.start()
    prober.start()
    attacked = batch()
    taken_by_daemon = seconds_of(pid) - before - usual
    taken_by_attackers = seconds_of(attacker.pid or 0) + seconds_of(prober.pid or 0)
    (seen, spent), (times, unready) = answers.get(), watched.get()
    taken = max(0.0, taken_by_daemon) + (taken_by_attackers or spent)
    alone = min(alone, batch())
    explained = alone + taken / (os.cpu_count() or 1)
    for name, each in times.items():
        p99 = sorted(each)[int(0.99 * (len(each) - 1))]
        bar = "p99 < 0.25 s" if name.startswith("probes") else "(shares its loop with the attack)"
        say(what=name, bar=bar, p99=round(p99, 4), median=round(statistics.median(each), 4), count=len(each))
    restarts = sum(
        float(line.rpartition(b" ")[2])
        for line in ask(probes, "GET", "/metrics")[1].splitlines()
        if line.startswith(b"laddertron_engine_restarts_total{")
    )
    say(what="ranks", bar="none lost", restarts=restarts, unready=unready)
    say(what="answers", bar="4xx", **seen)
    limit = alone + 1.2 * (explained - alone)
    times = {"alone": alone, "attacked": attacked, "explained": explained}
    say(what="batch", bar=f"<= {limit:.1f} s", **{name: round(seconds, 2) for name, seconds in times.items()})
    say(what="memory", bar="max_held_bytes, 256 MiB, above what it had before", before_mb=usually, peak_mb=peak(pid))


def main() -> None:
    length = float(sys.argv[1]) if len(sys.argv) > 1 else 60.0
    probes = free_port()
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "metrics.port": probes,
            "daemon.data_dir": folder,
            "daemon.limits.min_free_disk": 0,
            "daemon.log_level": "error",
            "parallel.collective": "auto",
            "parallel.emulated_delay": "0s",
            "engine.max_num_seqs": 16,
        }
        with serving(ROOT / "configs/demo.yaml", Path(folder) / "serve.log", settings) as daemon:
            lines = Path(folder) / "in.jsonl"
            write_lines(lines, LINES, prompt="say", max_tokens=TOKENS, ignore_eos=True)
            measure(daemon, probes, lines, length)


if __name__ == "__main__":
    main()
