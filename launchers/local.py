"""The engine job inside this very process: rank 0 of an outer mpirun serves itself, the other ranks follow.

The main thread steps the engine, an event loop in a second thread holds the input, the output and the text; `LocalJob`
is the EngineJob between them and speaks the same messages as the control channel. Nothing is relaunched: a rank that
dies ends the whole mpirun, and the files on disk are what goes on. Called by launchers/commands/run.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from ..engine.config_schema import Deployment
from ..engine.daemon.job import JobListener, JobState, RankReport
from ..engine.request import Request, TokensEvent
from ..topology.identity import Identity
from .messages import Announce, Cancel, Command, Loading, Ready, Running, Shutdown, StopChoice, Submit
from .rank import run_rank
from .rank_status import Status

log = logging.getLogger(__name__)
T = TypeVar("T")
REPORT_S = 0.5


class _LocalChannel:
    """The rank's side: commands in, messages out to the loop's thread."""

    def __init__(self, deliver: Callable[[object], None]) -> None:
        self._deliver = deliver
        self._commands: deque[Command] = deque()
        self._arrived = threading.Condition()

    def put(self, command: Command) -> None:
        with self._arrived:
            self._commands.append(command)
            self._arrived.notify()

    def poll(self, timeout: float | None = 0.0) -> list[Command]:
        with self._arrived:
            if not self._commands and (timeout is None or timeout > 0):
                self._arrived.wait(timeout)
            commands = list(self._commands)
            self._commands.clear()
        return commands

    def send_tokens(self, events: Sequence[TokensEvent]) -> None:
        self._deliver(list(events))

    def send_state(self, message: Announce | Loading | Ready | Running) -> None:
        self._deliver(message)


class LocalJob:
    """EngineJob over a channel in this process; see engine/daemon/job.py for the methods."""

    def __init__(self, status: Status, identity: Identity) -> None:
        self._status, self._identity = status, identity
        self._state = JobState("stopped")
        self._listener: JobListener | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._open: dict[str, set[int]] = {}
        self._idle = asyncio.Event()
        self._ended = asyncio.Event()
        self._reporting: asyncio.TimerHandle | None = None
        self._early: list[object] = []
        self.channel = _LocalChannel(self._deliver)
        self._lock = threading.Lock()

    @property
    def state(self) -> JobState:
        return self._state

    async def start(self, listener: JobListener) -> None:
        with self._lock:
            self._listener, self._loop = listener, asyncio.get_running_loop()
            early, self._early = self._early, []
        self._set(JobState("starting"))
        for message in early:
            self._take(message)
        self._report()

    def submit(self, request: Request) -> None:
        if self._state.phase != "ready":
            raise RuntimeError(f"the job is {self._state.phase}, it takes requests only when ready")
        self._open[request.request_id] = set(range(request.params.n))
        self._idle.clear()
        self.channel.put(Submit(request))

    def cancel(self, request_id: str) -> None:
        self.channel.put(Cancel(request_id))

    def stop_choice(self, request_id: str, choice: int, n_tokens: int) -> None:
        self.channel.put(StopChoice(request_id, choice, n_tokens))

    async def drain(self, timeout_s: float) -> bool:
        if self._open:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._idle.wait()
        return not self._open

    async def close(self) -> None:
        """Asks the engine to end; the main thread does, and returns from its loop."""
        if self._reporting is not None:
            self._reporting.cancel()
        self.channel.put(Shutdown())

    async def bundle(self) -> dict[str, Any]:
        return {"dumps": {"0": self._status.dump()}}

    def engine_ended(self, reason: str) -> None:
        """From the engine's thread: it is over; with a reason, it failed."""
        self._deliver(_Ended(reason))

    def _deliver(self, message: object) -> None:
        with self._lock:
            if self._loop is None:
                self._early.append(message)
                return
            loop = self._loop
        with contextlib.suppress(RuntimeError):  # the loop is closed: its owner has everything it waited for
            loop.call_soon_threadsafe(self._take, message)

    def _take(self, message: object) -> None:
        if self._listener is None:
            return
        match message:
            case list():
                for event in message:
                    self._note_end(event)
                self._listener.on_tokens(message)
            case Ready(limits):
                self._set(JobState("ready", limits=limits))
            case Loading(_, detail):
                self._set(JobState("loading", reason=detail))
            case _Ended(reason) if reason:
                self._set(JobState("failed", reason=reason, rank=0, node=self._identity.node, exit_code=1))
                lost = list(self._open)
                self._open.clear()
                self._listener.on_lost(lost, reason, len(lost))
            case _:
                pass

    def _note_end(self, event: TokensEvent) -> None:
        choices = self._open.get(event.request_id)
        if choices is not None and event.finish is not None:
            choices.discard(event.choice)
            if not choices:
                del self._open[event.request_id]
                if not self._open:
                    self._idle.set()

    def _set(self, state: JobState) -> None:
        self._state = state
        if self._listener is not None:
            self._listener.on_state(state)

    def _report(self) -> None:
        if self._listener is None or self._loop is None:
            return
        beat = self._status.beat()
        report = RankReport(0, self._identity.node, os.getpid(), beat.step, time.time(), beat.counters, beat.gauges)
        self._listener.on_report(report)
        self._reporting = self._loop.call_later(REPORT_S, self._report)


class _Ended:
    __match_args__ = ("reason",)

    def __init__(self, reason: str) -> None:
        self.reason = reason


def run_inside(deployment: Deployment, identity: Identity, drive: Callable[[LocalJob], Awaitable[int]]) -> int:
    """This rank's part of an outer mpirun. On rank 0 `drive` runs on an event loop beside the engine and returns the
    exit status; the other ranks follow and return 0. An error on any rank ends the process at once with status 1, and
    with it the mpirun."""
    status = Status()
    try:
        if identity.rank != 0:
            run_rank(deployment, identity, None, status)
            return 0
        return _lead(deployment, identity, status, drive)
    except BaseException:
        sys.stderr.write(f"laddertron: rank {identity.rank} on {identity.node} failed:\n{traceback.format_exc()}")
        sys.stderr.flush()
        os._exit(1)


def _lead(
    deployment: Deployment, identity: Identity, status: Status, drive: Callable[[LocalJob], Awaitable[int]]
) -> int:
    job = LocalJob(status, identity)
    outcome: list[int] = []

    async def work() -> None:
        outcome.append(await drive(job))

    def beside() -> None:
        try:
            asyncio.run(work())
        except BaseException:
            traceback.print_exc()
            outcome.append(1)
        finally:
            job.channel.put(Shutdown())

    thread = threading.Thread(target=beside, name="driver")
    thread.start()
    try:
        run_rank(deployment, identity, job.channel, status)
        job.engine_ended("")
    except BaseException as error:
        job.engine_ended(f"rank 0 on {identity.node}: {type(error).__name__}: {error}")
        thread.join(10.0)
        raise
    thread.join()
    return outcome[0]
