"""`make chaos-demo`: the daemon on the demo model and a batch; a rank, the daemon and mpirun are killed meanwhile.

Starts what users start (`laddertron serve`), strikes with SIGKILL, and shows what comes of it: every line has exactly
one answer. Everything listens on loopback and lives in one temporary folder.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.text import Text

from ..cli.batch_client import ENDED, ApiError, BatchClient, ServerAddress
from ..control.processes import ProcessId, descendants, is_alive, kill, start_time
from .serving import free_port, serve_command

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "configs/demo.yaml"
PROMPTS = ROOT / "configs/demo-prompts.jsonl"
STRIKES = ((0.15, "rank"), (0.4, "daemon"), (0.65, "mpirun"))
"""Who is killed once that share of the lines is answered."""
BAR = 40
_START_S, _BATCH_S = 120.0, 600.0


class ChaosError(RuntimeError):
    """The show cannot go on; the message says why."""


class ChaosDaemon:
    """`laddertron serve` on one data folder, started again on the same port."""

    def __init__(self, folder: Path) -> None:
        self.port, self.log = free_port(), folder / "daemon.log"
        settings = {"daemon.data_dir": folder / "data", "daemon.port": self.port, "daemon.drain_timeout": "5s"}
        self._argv = serve_command(CONFIG, settings)
        self.start()

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self._argv, stdout=log, stderr=log, start_new_session=True)

    def ready(self) -> bool:
        url = f"http://127.0.0.1:{self.port}/ready"
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5):
            return True
        return False

    def below(self) -> list[ProcessId]:
        return descendants(self.process.pid)

    def find(self, what: str) -> ProcessId | None:
        """A process of that kind: daemon, mpirun (a keeper's child) or rank (below that)."""
        if what == "daemon":
            started = start_time(self.process.pid)
            return None if started is None else ProcessId(self.process.pid, started)
        for keeper in self.below():
            if "laddertron.launchers.job.keeper" in _words(keeper.pid):
                below = descendants(keeper.pid)
                found = below[:1] if what == "mpirun" else below[1:]
                found = [p for p in found if "laddertron.launchers.rank.worker" in _words(p.pid)]
                return found[-1] if found else None
        return None

    def end(self) -> int:
        """SIGTERM, the drain, the exit status; SIGKILL where that does not help."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            return self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


def _words(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


class Show:
    """One batch under fire. Raises ChaosError or ApiError."""

    def __init__(self, console: Console, folder: Path, lines: int) -> None:
        self._console, self._folder, self._lines = console, folder, lines
        self._began = time.monotonic()
        self._down_since: float | None = None
        self._strikes = list(STRIKES)
        self._done = 0

    def run(self) -> int:
        """0 if every line has exactly one answer and nothing is left running."""
        self.say("$ laddertron serve configs/demo.yaml", "bold")
        self._daemon = daemon = ChaosDaemon(self._folder)
        try:
            self._wait_ready()
            self.say("ready: the demo model on two MPI ranks", "green")
            client = BatchClient(ServerAddress(f"http://127.0.0.1:{daemon.port}/v1"))
            source = self._write_lines()
            file = client.upload(source)["id"]
            batch_id = client.create(file, "/v1/completions", "24h", None, "chaos-demo")["id"]
            self.say(f"$ laddertron batch submit {source.name}   ({self._lines} lines: {batch_id})", "bold")
            with Live(self._bar(), console=self._console, refresh_per_second=10, transient=True) as live:
                self._under_fire(client, batch_id, live)
            status = self._count(client, batch_id)
            last = daemon.below()
            code = daemon.end()
            left = [p.pid for p in last if is_alive(p)]
            self.say(f"SIGTERM: exit status {code}, {len(left)} processes left")
            return status or code or bool(left)
        finally:
            daemon.end()

    def say(self, words: str, style: str = "") -> None:
        self._console.print(Text(f"{time.monotonic() - self._began:6.1f} s  {words}", style))

    def _write_lines(self) -> Path:
        bodies = [json.loads(line)["body"] for line in PROMPTS.read_text().splitlines()]
        bodies = [body for body in bodies if "prompt" in body]
        source = self._folder / "prompts.jsonl"
        with source.open("w") as file:
            for number in range(self._lines):
                body = {**bodies[number % len(bodies)], "seed": number, "max_tokens": 64, "ignore_eos": True}
                asked = {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/completions", "body": body}
                file.write(json.dumps(asked) + "\n")
        return source

    def _wait_ready(self) -> None:
        end = time.monotonic() + _START_S
        while not self._daemon.ready():
            self._check(end, "the daemon is not ready")
            time.sleep(0.1)

    def _check(self, end: float, what: str) -> None:
        if self._daemon.process.poll() is not None or time.monotonic() > end:
            last = "".join(self._daemon.log.read_text().splitlines(True)[-20:])
            raise ChaosError(f"{what} (exit status {self._daemon.process.poll()}):\n{last}")

    def _under_fire(self, client: BatchClient, batch_id: str, live: Live) -> None:
        end = time.monotonic() + _BATCH_S
        while True:
            self._check(end, "the batch does not end")
            ready = self._daemon.ready()
            if ready:
                if self._down_since is not None:
                    self.say(f"serving again, {time.monotonic() - self._down_since:.1f} s after the kill", "green")
                    self._down_since = None
                batch = client.batch(batch_id)
                self._done = batch["request_counts"]["completed"] + batch["request_counts"]["failed"]
                if batch["status"] in ENDED:
                    return
                if self._strikes and self._done >= self._strikes[0][0] * self._lines:
                    self._strike(self._strikes[0][1])
            live.update(self._bar())
            time.sleep(0.05)

    def _strike(self, what: str) -> None:
        victim = self._daemon.find(what)
        if victim is None:
            return
        before, now = self._daemon.below(), time.monotonic()
        if not kill(victim):
            return
        self._strikes.pop(0)
        self.say(f"kill -9 {victim.pid}: the {what}, {self._done} of {self._lines} lines answered", "bold red")
        self._down_since = now
        if what == "daemon":
            self._daemon.process.wait()
            while any(is_alive(p) for p in before):
                if time.monotonic() - now > 10:
                    raise ChaosError("ranks outlive their daemon")
                time.sleep(0.01)
            self.say(f"its {len(before)} processes ended by themselves within {time.monotonic() - now:.1f} s")
            self.say("$ laddertron serve configs/demo.yaml   (the same data folder)", "bold")
            self._daemon.start()
            self._wait_ready()
            return
        while self._daemon.ready():  # until the daemon has noticed
            if time.monotonic() - now > 15:
                raise ChaosError(f"the daemon did not notice that its {what} was killed")
            time.sleep(0.005)
        self.say(f"noticed after {time.monotonic() - now:.2f} s: /ready is 503, the job is ended and launched again")

    def _bar(self) -> Text:
        full = round(BAR * self._done / self._lines)
        text = Text(no_wrap=True)
        text.append(f"{time.monotonic() - self._began:6.1f} s  ")
        text.append("█" * full, "green").append("░" * (BAR - full), "dim")
        text.append(f" {self._done}/{self._lines} answered  ")
        text.append("down" if self._down_since is not None else "serving", "red" if self._down_since else "green")
        return text

    def _count(self, client: BatchClient, batch_id: str) -> int:
        batch = client.batch(batch_id)
        ids: list[str] = []
        for kind in ("output", "error"):
            if (file := batch[f"{kind}_file_id"]) is not None:
                path = self._folder / f"{kind}.jsonl"
                client.download(file, path)
                ids += [json.loads(row)["custom_id"] for row in path.read_text().splitlines()]
        lost, twice = self._lines - len(set(ids)), len(ids) - len(set(ids))
        self.say(f"{self._lines} lines, {len(ids)} answers, {lost} lost, {twice} duplicate", "bold")
        return 0 if (lost, twice, batch["status"]) == (0, 0, "completed") else 1


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make chaos-demo")
    parser.add_argument("--lines", type=int, default=600, help="of the batch")
    wanted = parser.parse_args(argv)
    console = Console(highlight=False)
    console.rule("[bold]chaos: a rank, the daemon and mpirun are killed while a batch runs")
    with tempfile.TemporaryDirectory(prefix="laddertron-chaos-") as name:
        try:
            return Show(console, Path(name), wanted.lines).run()
        except (ChaosError, ApiError) as error:
            print(f"chaos-demo: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return 130


if __name__ == "__main__":
    sys.exit(main())
