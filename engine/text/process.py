"""One text worker's process, as its owner (pool.py) uses it. Requests and answers travel over a socket of their own:
what a library, or a user's sitecustomize, prints in a worker goes to this process's error output.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
from array import array
from collections.abc import AsyncIterator
from itertools import accumulate, pairwise
from typing import Any

from .. import child
from .worker import MAX_FRAME, frame

LOOK_S = 1.0
"""Seconds between two looks at whether a busy worker makes progress."""
STILL_LOOKS, STARTING_LOOKS = 40, 120
"""Consecutive looks at a worker without progress after which it is killed; while it starts, it may wait for a disk."""

_GONE_S = 5.0  # for a killed worker to exit; one that waits for a disk may take longer


class WorkerDied(Exception):
    """The worker exited, or was killed because it made no progress. `overran`: it used up its item's processor time;
    `itself`: by an error of its own, not killed from outside."""

    def __init__(self, why: str, overran: bool = False, itself: bool = False) -> None:
        super().__init__(why)
        self.overran, self.itself = overran, itself


def cpu_and_state(pid: int) -> tuple[int, str]:
    """A process's processor time in clock ticks and its state letter (proc(5)); (0, "R") if they cannot be read."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return 0, "R"
    return int(fields[11]) + int(fields[12]), fields[0]


class Progress:
    """Judges from looks at a busy worker whether it is stuck. Pure."""

    def __init__(self, most_still: int) -> None:
        self._most_still, self._still, self._last = most_still, 0, (-1, -1)

    def look(self, cpu: int, answers: int, state: str) -> str:
        """Returns why the worker will not go on; "" while it may. It goes on if it used processor time, has answered
        or is runnable: then the machine is loaded, and the worker not to blame."""
        if state in "Tt":
            return "it was stopped (SIGSTOP, or by a debugger)"
        moved, self._last = (cpu, answers) != self._last, (cpu, answers)
        self._still = 0 if moved or state == "R" else self._still + 1
        return "" if self._still < self._most_still else f"it made no progress for {self._still * LOOK_S:g} s"


class WorkerProcess:
    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process, self._reader, self._writer = process, reader, writer
        self._stuck = ""
        self.answers = 0
        """Number of messages received."""
        self.exit = asyncio.ensure_future(process.wait())

    @classmethod
    async def start(cls, module: str, settings: dict[str, Any]) -> WorkerProcess:
        """Raises OSError if there is no process or descriptor to be had."""
        ours, theirs = socket.socketpair()
        with theirs:
            reader, writer = await asyncio.open_connection(sock=ours, limit=1 << 22)
            argv = child.command(module, str(theirs.fileno()), json.dumps(settings))
            try:
                options = child.options(pass_fds=[theirs.fileno()])
                process = await asyncio.create_subprocess_exec(*argv, **options, stdout=2)
            except BaseException:
                writer.close()
                raise
        return cls(process, reader, writer)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ended(self) -> bool:
        return self._process.returncode is not None

    async def send(self, value: Any) -> None:
        await self.send_raw(frame(value))

    async def send_raw(self, data: bytes | memoryview) -> None:
        with contextlib.suppress(ConnectionError):  # its death shows when the answer is read
            self._writer.write(data)
            await self._writer.drain()

    async def receive(self) -> dict[str, Any]:
        try:
            value: dict[str, Any] = json.loads(await self._frame())
            if "ids" in value:
                packed, ends = array("I", await self._frame()), list(accumulate(value["ids"], initial=0))
                value["ids"] = [await _ids(packed[start:end]) for start, end in pairwise(ends)]
            elif "answer" in value:
                value["answer"] = await self._frame()
        except (asyncio.IncompleteReadError, ConnectionError):
            raise WorkerDied(self._stuck) if self._stuck else _death(await self._process.wait()) from None
        self.answers += 1
        return value

    async def _frame(self) -> bytes:
        length = int.from_bytes(await self._reader.readexactly(4), "little")
        if length > MAX_FRAME:
            raise WorkerDied(f"its text worker announced {length} bytes", itself=True)
        return await self._reader.readexactly(length)

    @contextlib.asynccontextmanager
    async def watched(self, most_still: int = STILL_LOOKS) -> AsyncIterator[None]:
        """While inside, kills the worker if it makes no progress: then `receive` raises WorkerDied."""
        watching = asyncio.create_task(self._watch(Progress(most_still)))
        try:
            yield
        finally:
            watching.cancel()

    async def _watch(self, progress: Progress) -> None:
        while not self._stuck:
            await asyncio.sleep(LOOK_S)  # progress has no event
            cpu, state = cpu_and_state(self.pid)
            self._stuck = progress.look(cpu, self.answers, state)
        self._end()

    def _end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._writer.transport.abort()

    async def kill(self) -> None:
        self._end()
        await asyncio.wait({self.exit}, timeout=_GONE_S)


async def _ids(packed: array[int]) -> tuple[int, ...]:
    """Converts one text's ids; lets the event loop turn, since there may be many texts."""
    await asyncio.sleep(0)
    return tuple(packed)


def _death(code: int) -> WorkerDied:
    if code == -signal.SIGPROF:
        return WorkerDied("it took too much processor time", overran=True)
    if code < 0:
        crash = -code in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
        return WorkerDied(f"its text worker was ended by signal {-code}", itself=crash)
    return WorkerDied(f"its text worker ended with exit code {code} (too much memory?)", itself=True)
