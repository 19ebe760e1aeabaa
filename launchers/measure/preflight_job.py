"""Runs preflight's ranks and ends every process if they hang: ranks report progress on stderr, and those that are late
are named before the launcher is killed.
"""

from __future__ import annotations

import os
import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import IO

from ..job import supervised_process as kept
from ..job.missing import AFTER_S, Answer

SIGNS = "LADDERTRON_PREFLIGHT_SIGNS"
"""Set for ranks whose launcher reads their progress."""
START_S, MEET_S = 120.0, 45.0
"""Time limits for every rank to start, with torch loaded, and then to connect to all others."""
END_S = 10.0
"""Time limit for the launcher to exit after a rank has reported an error."""
DONE_S = 30.0
"""Time limit for ranks and launcher to exit after all measurements."""

# Launchers may put a tag before each line, and who writes no whole line too.
_SIGN = re.compile(r"laddertron preflight: rank ([0-9]+) (started|met|done)\s*$")
_RULE = re.compile(r"[-=]{40,}")
_ERROR = re.compile(r"error: rank [0-9]+ on ")


def sign(rank: int, what: str) -> None:
    """Reports a rank's progress: it `started`, `met` all others, or is `done`."""
    if os.environ.get(SIGNS):
        sys.stderr.write(f"laddertron preflight: rank {rank} {what}\n")
        sys.stderr.flush()


class Signs:
    """Progress of the ranks on these hosts (one a rank), and the deadline for more. Pure."""

    def __init__(self, hosts: Sequence[str], now: float) -> None:
        self._hosts = hosts
        self._missing = {what: set(range(len(hosts))) for what in ("started", "met")}
        self.deadline: float | None = now + START_S
        self._failed = self._over = self._ruled = False

    def take(self, line: str, now: float) -> bool:
        """Handles a line; returns whether to hide it: a sign or, after a rank has reported its error, the launcher's
        message about that between two rules. Lines of ranks there are shown."""
        if _ERROR.search(line):
            if not self._failed:
                self._failed, self._over, self.deadline = True, True, now + END_S
            return False
        match = _SIGN.search(line)
        if match is None:
            rule = self._over and _RULE.fullmatch(line.strip()) is not None
            self._ruled ^= rule
            return rule or self._ruled
        if match[2] == "done":
            self._over, self.deadline = True, now + DONE_S
            return True
        self._missing[match[2]].discard(int(match[1]))
        if not self._failed and not self._missing["started"]:
            if match[2] == "started":
                self.deadline = now + MEET_S
            elif not self._missing["met"]:
                self.deadline = None
        return True

    def not_started(self) -> list[str]:
        """The hosts of ranks that have not started."""
        return list(dict.fromkeys(self._hosts[rank] for rank in sorted(self._missing["started"])))

    def missing(self) -> str:
        """A message about ranks without a sign; "" if all gave one, or a rank has reported an error."""
        for what, seconds in (("started", START_S), ("met", MEET_S)):
            if (ranks := sorted(self._missing[what])) and not self._failed:
                named = ", ".join(f"rank {rank} on {self._hosts[rank]}" for rank in ranks[:4])
                more = f" and {len(ranks) - 4} more" if len(ranks) > 4 else ""
                did = "start" if what == "started" else "meet the others"
                return f"error: {named}{more} did not {did} in {seconds:.0f} s: is the network between the hosts cut?"
        return ""


def hold(
    argv: Sequence[str],
    env: dict[str, str],
    hosts: Sequence[str],
    show: Callable[[str], None],
    ask: Callable[[Sequence[str]], Mapping[str, Answer]] = lambda hosts: {},
) -> int:
    """Runs the command, whose rank i is on hosts[i], with `env` added to this process's; returns its exit status, or 1
    if it was killed. `show` gets its stderr line by line, `ask` asks hosts whose ranks have not started (missing.py).
    When this returns or raises (KeyboardInterrupt), no process of the command is left on this host. Raises OSError."""
    process = kept.start(argv, env, stdout=None, stderr=subprocess.PIPE)
    assert process.stderr is not None
    try:
        killed = _listen(process.stderr, Signs(hosts, time.monotonic()), show, ask)
    finally:
        kept.end(process)
        process.stderr.close()
    return 1 if killed else process.returncode


def _listen(
    stderr: IO[str],
    signs: Signs,
    show: Callable[[str], None],
    ask: Callable[[Sequence[str]], Mapping[str, Answer]],
) -> bool:
    """Reads `stderr` to its end (returns False), or until the deadline of the signs or a fault of a host whose ranks
    have not started (True)."""
    lines: queue.SimpleQueue[str | Mapping[str, Answer] | None] = queue.SimpleQueue()

    def read() -> None:
        for line in stderr:
            lines.put(line)
        lines.put(None)

    def inquire() -> None:
        with suppress(OSError):
            lines.put(ask(signs.not_started()))

    threading.Thread(target=read, daemon=True, name="preflight-stderr").start()
    inquiry = threading.Timer(AFTER_S, inquire)
    inquiry.daemon = True
    inquiry.start()
    while True:
        wait = None if signs.deadline is None else max(0.0, signs.deadline - time.monotonic())
        try:
            line = lines.get(timeout=wait)
        except queue.Empty:
            if words := signs.missing():
                show(words + "\n")
            return True
        if line is None:
            inquiry.cancel()
            return False
        if not isinstance(line, str):
            if faults := [
                f"{host}: {line[host].fault}" for host in signs.not_started() if host in line and line[host].fault
            ]:
                show(f"error: {faults[0]}\n")
                return True
            continue
        if not signs.take(line, time.monotonic()):
            show(line)


class Watch:
    """Calls `end` from its own thread when a rank waits too long: MPI and NCCL calls cannot be cancelled."""

    def __init__(self, limit_s: float, end: Callable[[str], object]) -> None:
        self.limit_s = limit_s
        self._end = end
        self._timer: threading.Timer | None = None

    @contextmanager
    def over(self, words: Callable[[], str], limit_s: float | None = None) -> Iterator[None]:
        """Limits a block to limit_s; `words` describes what it waits for. The outer limit restarts after it."""
        around, limit = self._timer, self.limit_s if limit_s is None else limit_s
        if around is not None:
            around.cancel()
        self._begin(limit, lambda: self._end(f"{words()} (allowed: {limit:.0f} s)"))
        try:
            yield
        finally:
            if self._timer is not None:  # by now another one, where there was a wait inside
                self._timer.cancel()
            self._timer = None
            if around is not None:
                self._begin(around.interval, around.function)

    def _begin(self, limit_s: float, end: Callable[..., object]) -> None:
        self._timer = threading.Timer(min(limit_s, threading.TIMEOUT_MAX), end)
        self._timer.daemon = True
        self._timer.start()
