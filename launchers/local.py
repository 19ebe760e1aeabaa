"""The engine job inside this very process: rank 0 of an outer mpirun serves itself, the other ranks follow.

The main thread steps the engine, an event loop in a second thread holds the input, the output and the text; `LocalJob`
is the EngineJob between them and speaks the same messages as the control channel. Nothing is relaunched: a rank that
dies ends the whole mpirun, and the files on disk are what goes on. Called by launchers/commands/run.py; several
replicas in one mpirun are launchers/outer.py's.
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
from typing import Any

from ..engine.config_schema import Deployment
from ..engine.daemon.job import JobListener, JobState, RankReport
from ..engine.request import Request, TokensEvent
from ..models.refusal import Refusal
from ..topology.bootstrap import Bootstrap
from ..topology.identity import Identity
from .messages import Announce, Beat, Cancel, Command, Loading, Ready, Running, Shutdown, StopChoice, Submit
from .rank import run_rank
from .rank_status import Status

log = logging.getLogger(__name__)
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


class ChannelJob:
    """EngineJob over a channel to one engine's first rank; see engine/daemon/job.py for the methods. `put` takes
    commands to it, `deliver` what it says: Tokens' events as a list, states as they are."""

    def __init__(self, put: Callable[[Command], None], node: str) -> None:
        self._put, self._node = put, node
        self._state = JobState("stopped")
        self._listener: JobListener | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._open: dict[str, set[int]] = {}
        self._idle = asyncio.Event()
        self._early: list[object] = []
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

    def submit(self, request: Request) -> None:
        if self._state.phase != "ready":
            raise RuntimeError(f"the job is {self._state.phase}, it takes requests only when ready")
        self._open[request.request_id] = set(range(request.params.n))
        self._idle.clear()
        self._put(Submit(request))

    def cancel(self, request_id: str) -> None:
        self._put(Cancel(request_id))

    def stop_choice(self, request_id: str, choice: int, n_tokens: int) -> None:
        self._put(StopChoice(request_id, choice, n_tokens))

    async def drain(self, timeout_s: float) -> bool:
        if self._open:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._idle.wait()
        return not self._open

    async def close(self) -> None:
        """Asks the engine to end."""
        self._put(Shutdown())

    async def bundle(self) -> dict[str, Any]:
        return {}

    def engine_ended(self, reason: str) -> None:
        """From any thread: it is over; with a reason, it failed."""
        self.deliver(_Ended(reason))

    def deliver(self, message: object) -> None:
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
                self._set(JobState("failed", reason=reason, rank=0, node=self._node, exit_code=1))
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

    def report(self, pid: int, beat: Beat) -> None:
        """A heartbeat of the engine's first rank, on the event loop."""
        if self._listener is not None:
            found = RankReport(0, self._node, pid, beat.step, time.time(), beat.counters, beat.gauges)
            self._listener.on_report(found)


class LocalJob(ChannelJob):
    """The engine is in this process, in another thread."""

    def __init__(self, status: Status, identity: Identity) -> None:
        self.channel = _LocalChannel(self.deliver)
        super().__init__(self.channel.put, identity.node)
        self._status = status
        self._reporting: asyncio.TimerHandle | None = None

    async def start(self, listener: JobListener) -> None:
        await super().start(listener)
        self._report()

    async def close(self) -> None:
        if self._reporting is not None:
            self._reporting.cancel()
        await super().close()

    async def bundle(self) -> dict[str, Any]:
        return {"dumps": {"0": self._status.dump()}}

    def _report(self) -> None:
        self.report(os.getpid(), self._status.beat())
        self._reporting = asyncio.get_running_loop().call_later(REPORT_S, self._report)


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
        return lead(deployment, identity, status, drive)
    except Refusal as refusal:
        sys.stderr.write(f"laddertron: rank {identity.rank} on {identity.node}: {refusal}\n")
        sys.stderr.flush()
        os._exit(1)
    except BaseException:
        sys.stderr.write(f"laddertron: rank {identity.rank} on {identity.node} failed:\n{traceback.format_exc()}")
        sys.stderr.flush()
        os._exit(1)


def lead(
    deployment: Deployment,
    identity: Identity,
    status: Status,
    drive: Callable[[LocalJob], Awaitable[int]],
    meet: Callable[[], Bootstrap | None] = lambda: None,
) -> int:
    """Rank 0's part. `meet` is called in the main thread once `drive` runs in its own: for ranks that must exchange
    more than their group does."""
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
        run_rank(deployment, identity, job.channel, status, bootstrap=meet())
        job.engine_ended("")
    except BaseException as error:
        job.engine_ended(f"rank 0 on {identity.node}: {type(error).__name__}: {error}")
        thread.join(10.0)
        raise
    thread.join()
    return outcome[0]
