"""`make chaos-demo`: the daemon on the demo model and a batch; a rank, the daemon and mpirun are killed meanwhile.

Starts what users start (`laddertron serve`), strikes with SIGKILL, and shows what comes of it: every line has exactly
one answer. Everything listens on loopback and lives in one temporary folder.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from ...launchers.cli.batch_client import ENDED, BatchClient
from ...launchers.control.processes import ProcessId, descendants, is_alive, kill, start_time
from .serving import (
    ROOT,
    ask,
    end,
    free_port,
    serve_command,
    tally,
    wait_until,
    words_of,
    write_lines,
)

CONFIG = ROOT / "configs/demo.yaml"
STRIKES = ((0.15, "rank"), (0.4, "daemon"), (0.65, "mpirun"))
"""Who is killed once that share of the lines is answered."""
_START_S, _BATCH_S = 120.0, 600.0


class ChaosDaemon:
    """`laddertron serve` on one data folder, started again on the same port."""

    def __init__(self, folder: Path) -> None:
        port, self.log = free_port(), folder / "daemon.log"
        self.url = f"http://127.0.0.1:{port}"
        settings = {"daemon.data_dir": folder / "data", "daemon.port": port, "daemon.drain_timeout": "5s"}
        self._argv = serve_command(CONFIG, settings)
        self.start()

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self._argv, stdout=log, stderr=log, start_new_session=True)

    def ready(self) -> bool:
        with contextlib.suppress(OSError):
            ask(f"{self.url}/ready", timeout_s=5)
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
            if "laddertron.launchers.job.keeper" in words_of(keeper.pid):
                below = descendants(keeper.pid)
                found = below[:1] if what == "mpirun" else below[1:]
                found = [p for p in found if "laddertron.launchers.rank.worker" in words_of(p.pid)]
                return found[-1] if found else None
        return None


class Show:
    """One batch under fire. Raises RuntimeError (ApiError is one) where it cannot go on."""

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
            client, source = BatchClient(f"{daemon.url}/v1"), self._folder / "prompts.jsonl"
            write_lines(source, self._lines, max_tokens=64, ignore_eos=True)
            file = client.upload(source)["id"]
            batch_id = client.create(file, "/v1/completions", "24h", None, "chaos-demo")["id"]
            self.say(f"$ laddertron batch submit {source.name}   ({self._lines} lines: {batch_id})", "bold")
            self._under_fire(client, batch_id)
            status = self._count(client, batch_id)
            last = daemon.below()
            code = end(daemon.process, 30.0)  # it drains
            left = [p.pid for p in last if is_alive(p)]
            self.say(f"SIGTERM: exit status {code}, {len(left)} processes left")
            return status or code or bool(left)
        finally:
            end(daemon.process)

    def say(self, words: str, style: str = "") -> None:
        self._console.print(Text(f"{time.monotonic() - self._began:6.1f} s  {words}", style))

    def _wait_ready(self) -> None:
        wait_until("the daemon", self._daemon.ready, _START_S, self._daemon.process, self._daemon.log)

    def _under_fire(self, client: BatchClient, batch_id: str) -> None:
        def ended() -> bool:
            if (status := self._daemon.process.poll()) is not None:
                raise RuntimeError(f"the daemon ended with status {status}:\n{self._daemon.log.read_text()[-3000:]}")
            if not self._daemon.ready():
                return False
            if self._down_since is not None:
                self.say(f"serving again, {time.monotonic() - self._down_since:.1f} s after the kill", "green")
                self._down_since = None
            batch = client.batch(batch_id)
            self._done = batch["request_counts"]["completed"] + batch["request_counts"]["failed"]
            if batch["status"] not in ENDED and self._strikes and self._done >= self._strikes[0][0] * self._lines:
                self._strike(self._strikes[0][1])
            return batch["status"] in ENDED

        wait_until("the batch", ended, _BATCH_S, log=self._daemon.log)

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
                    raise RuntimeError("ranks outlive their daemon")
                time.sleep(0.01)
            self.say(f"its {len(before)} processes ended by themselves within {time.monotonic() - now:.1f} s")
            self.say("$ laddertron serve configs/demo.yaml   (the same data folder)", "bold")
            self._daemon.start()
            self._wait_ready()
            return
        while self._daemon.ready():  # until the daemon has noticed
            if time.monotonic() - now > 15:
                raise RuntimeError(f"the daemon did not notice that its {what} was killed")
            time.sleep(0.005)
        self.say(f"noticed after {time.monotonic() - now:.2f} s: /ready is 503, the job is ended and launched again")

    def _count(self, client: BatchClient, batch_id: str) -> int:
        batch, files = client.batch(batch_id), []
        for kind in ("output", "error"):
            if (file := batch[f"{kind}_file_id"]) is not None:
                files.append(self._folder / f"{kind}.jsonl")
                client.download(file, files[-1])
        words, whole = tally(self._lines, files)
        self.say(words, "bold")
        return 0 if whole and batch["status"] == "completed" else 1


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make chaos-demo")
    parser.add_argument("--lines", type=int, default=600, help="of the batch")
    wanted = parser.parse_args(argv)
    console = Console(highlight=False)
    console.rule("[bold]chaos: a rank, the daemon and mpirun are killed while a batch runs")
    with tempfile.TemporaryDirectory(prefix="laddertron-chaos-") as name:
        try:
            return Show(console, Path(name), wanted.lines).run()
        except RuntimeError as error:
            print(f"chaos-demo: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return 130


if __name__ == "__main__":
    sys.exit(main())
