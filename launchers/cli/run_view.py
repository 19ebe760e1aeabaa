"""The progress (bar or lines) and the final table of a run; the bar of a load or a copy of weights."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self, cast

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from ...engine.run.journal import file_of
from ...engine.run.progress import Snapshot, Summary
from ...topology.comm.ledger import overlap_ratio

_BAR_SECONDS, _LINE_SECONDS = 0.1, 10.0


def default_errors(output: Path) -> Path:
    """The default file for failed lines: OUT.errors.jsonl, or OUT.errors if the output has not that suffix."""
    return file_of(output, "errors")


def clock(seconds: float) -> str:
    """Formats seconds as 0:07, 12:34 or 1:02:03."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def speed(snapshot: Snapshot) -> str:
    """Formats tokens a second and time left, as far as known."""
    if snapshot.phase != "ready" or snapshot.seconds <= 0 or not snapshot.tokens:
        return ""
    text = f"{snapshot.tokens / snapshot.seconds:,.0f} tokens/s"
    here = snapshot.ok + snapshot.failed
    if here:
        text += f", {clock(snapshot.seconds * (snapshot.total - snapshot.done) / here)} left"
    return text


class _Lossy:
    """Standard error that ignores failures, such as a full disk or a reader that exited: the text is lost."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._file.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._file.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def progress_console() -> Console:
    """Standard error for progress and logs of work that must not end with them."""
    return Console(file=cast(IO[str], _Lossy(sys.stderr))) if sys.stderr is not None else Console(stderr=True)


def say(console: Console, text: str | Text) -> None:
    """Prints text unchanged: without markup and colours; only the terminal breaks lines."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def say_error(console: Console, text: str) -> None:
    """Prints an error like launchers/cli/errors.py, above a progress bar."""
    say(console, Text.assemble(("error:", "red"), f" {text}"))


class ConsoleLog(logging.Handler):
    """Prints log lines above the progress bar; only the terminal breaks lines, so a pipe gets one line each."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        say(self._console, self.format(record))


def plain_line(snapshot: Snapshot) -> str:
    parts = [f"{snapshot.done} of {snapshot.total} lines"]
    if snapshot.skipped:
        parts.append(f"{snapshot.skipped} done earlier")
    if snapshot.failed:
        parts.append(f"{snapshot.failed} failed")
    if text := speed(snapshot):
        parts.append(text)
    return f"laddertron: {snapshot.phase}: " + ", ".join(parts)


class RunView:
    """Shows snapshots (engine/run/progress.py's Progress) on `console`; a context manager."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Bar | None = None
        self._due = 0.0
        self._phase = ""
        self._last: Snapshot | None = None
        self._printed = ""
        if console.is_terminal:
            self._bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[speed]}"),
                console=console,
                transient=True,
            )
            self._task = self._bar.add_task("starting", total=None, speed="")

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif self._last is not None:
            self._print(plain_line(self._last))

    def update(self, snapshot: Snapshot) -> None:
        now = time.monotonic()
        self._last = snapshot
        phase = snapshot.phase.partition(":")[0]  # the progress of the phase follows
        finished = self._bar is not None and snapshot.done == snapshot.total
        if now < self._due and phase == self._phase and not finished:
            return
        self._phase = phase
        if self._bar is not None:
            self._due = now + _BAR_SECONDS
            failed = f" [red]({snapshot.failed} failed)" if snapshot.failed else ""
            self._bar.update(
                self._task,
                description=("running" if snapshot.phase == "ready" else snapshot.phase) + failed,
                completed=snapshot.done,
                total=snapshot.total,
                speed=speed(snapshot),
            )
        else:
            self._due = now + _LINE_SECONDS
            self._print(plain_line(snapshot))

    def _print(self, line: str) -> None:
        if line != self._printed:
            say(self._console, line)
        self._printed = line


def summary_table(summary: Summary) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    answered = f"{summary.ok:,} answered"
    if summary.failed:
        answered += f", {summary.failed:,} failed"
    if summary.skipped:
        answered += f", {summary.skipped:,} done earlier"
    if summary.changed:
        answered += f", {summary.changed:,} computed again because they changed"
    table.add_row("requests", f"{summary.requests:,}: {answered}")
    table.add_row("tokens", f"{summary.prompt_tokens:,} prompt, {summary.tokens:,} generated")
    table.add_row("speed", f"{summary.tokens_per_second:,.1f} tokens/s over {summary.seconds:,.1f} s")
    if summary.drafted:
        right = f"{summary.accepted:,} accepted ({summary.accepted / summary.drafted:.0%})"
        table.add_row("drafts", f"{summary.drafted:,} verified, {right}")
    for number, kind in enumerate(summary.computed):
        tier = f", tier {kind.cpu_tier}" if kind.device == "cpu" else ""
        threads = "1 thread" if kind.threads == "1" else f"{kind.threads} threads"
        table.add_row("" if number else "ranks", f"{kind.ranks} x {kind.device}{tier}, {threads}")
    table.add_row("communication", _communication(summary.hidden_seconds, summary.exposed_seconds))
    for layer_time in summary.layers:
        table.add_row(
            f"  {layer_time.layer}, {layer_time.link}",
            _communication(layer_time.hidden_seconds, layer_time.exposed_seconds),
        )
    return table


def _communication(hidden: float | None, exposed: float | None) -> str:
    if hidden is None or exposed is None:
        return "n/a"
    ratio = overlap_ratio(hidden, exposed)
    share = "" if ratio is None else f" ({ratio:.0%})"
    return f"{hidden:.2f} s hidden{share}, {exposed:.2f} s exposed"


@contextmanager
def byte_bar(console: Console, what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar of bytes, GB/s and time left; call it with (done, total) in bytes. Shows nothing without a terminal."""
    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
