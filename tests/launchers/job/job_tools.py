"""What tests of jobs share: commands that start fake ranks, a listener that can be waited on, ends that can be seen."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fake_worker import fake_tokens
from laddertron.engine.identity import ModelIdentity
from laddertron.engine.job import JobState, RankHeartbeat
from laddertron.engine.request import Request, SamplingParams, TokensEvent
from laddertron.launchers.compose.mpi import LaunchCommand, Part
from laddertron.launchers.compose.network import Variable
from laddertron.launchers.control.processes import ProcessId, start_time
from laddertron.launchers.job.options import JobOptions, JobTimeouts
from laddertron.launchers.job.replica import JobHooks, Replica, ReplicaSpec
from laddertron.topology.placement.world import World
from waiting import FOR_EVER_S, HANG_S

HERE = Path(__file__).parent
WORKER = (sys.executable, str(HERE / "fake_worker.py"))
MPIRUN = Path(sys.executable).with_name("mpirun")
PATIENT = JobTimeouts(suspect_s=FOR_EVER_S, dead_s=FOR_EVER_S, first_step_s=FOR_EVER_S, least_step_s=FOR_EVER_S)
"""What a job has unless its test says otherwise: only ends that are seen count, a slow machine is no silent rank."""


def command(argv: tuple[str, ...], env: Mapping[str, str] | None = None) -> LaunchCommand:
    return LaunchCommand((Part(argv, ""),), {name: Variable(value, "") for name, value in (env or {}).items()})


def fake_mpirun(world_size: int = 2, **env: str) -> LaunchCommand:
    return command((sys.executable, str(HERE / "fake_mpirun.py"), str(world_size), "--", *WORKER), env)


def real_mpirun(world_size: int = 2) -> LaunchCommand:
    options = ("--allow-run-as-root", "--oversubscribe", "--bind-to", "none")
    forward = ("-x", "LADDERTRON_SECRET", "-x", "LADDERTRON_CONTROL")
    return command((str(MPIRUN), *options, *forward, "-np", str(world_size), *WORKER))


def request(name: str, tokens: int = 20, **params: Any) -> Request:
    seed = sum(name.encode())
    return Request(name, params.pop("prompt", (1, 2, 3)), SamplingParams(tokens, seed, **params))


def bounded(run: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Runs a test's coroutine to its end; raises TimeoutError when it hangs."""

    async def within() -> None:
        async with asyncio.timeout(2 * HANG_S):
            await run()

    asyncio.run(within())


@dataclass
class Asked:
    """A request in flight: its launch, its open choices, when it entered a step (0: not yet)."""

    launch: int
    open_choices: set[int]
    entered: int = 0


class Listener:
    """Keeps what the job tells, with waiting; and what is in flight, as the dispatcher does."""

    def __init__(self) -> None:
        self.states: list[JobState] = []
        self.lost: list[tuple[list[str], str, int]] = []
        self.reports: dict[int, RankHeartbeat] = {}
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.finished: dict[tuple[str, int], str] = {}
        self.events: list[TokensEvent] = []
        self.in_flight: dict[str, Asked] = {}
        self._entries = 0
        self._news = asyncio.Event()

    def on_tokens(self, events: list[TokensEvent]) -> None:
        for event in events:
            self.events.append(event)
            out = self.tokens.setdefault((event.request_id, event.choice), [])
            del out[event.start :]
            out += event.tokens
            if event.finish is not None:
                self.finished[event.request_id, event.choice] = event.finish
                if (asked := self.in_flight.get(event.request_id)) is not None:
                    asked.open_choices.remove(event.choice)
                    if not asked.open_choices:
                        del self.in_flight[event.request_id]
        self._news.set()

    def on_running(self, started: Sequence[str], parked: Sequence[str]) -> None:
        for name in {*parked} & {*self.in_flight}:
            self.in_flight[name].entered = 0
        for name in started:
            if name in self.in_flight:
                self._entries += 1
                self.in_flight[name].entered = self._entries

    def on_lost(self, launch: int, reason: str, by_request: bool) -> None:
        lost = [name for name, asked in self.in_flight.items() if asked.launch == launch]
        lost.sort(key=lambda name: -self.in_flight[name].entered)
        running = sum(self.in_flight[name].entered > 0 for name in lost)
        if lost:
            self.lost.append((lost, reason, running if by_request else 0))
        for request_id in lost:
            del self.in_flight[request_id]
            for key in [key for key in self.tokens if key[0] == request_id]:
                del self.tokens[key]
        self._news.set()

    async def idle(self, launch: int) -> bool:
        lost = len(self.lost)
        while any(asked.launch == launch for asked in self.in_flight.values()):
            await self.something()
        return len(self.lost) == lost

    def on_state(self, state: JobState) -> None:
        self.states.append(state)
        self._news.set()

    def on_report(self, report: RankHeartbeat) -> None:
        self.reports[report.rank] = report
        self._news.set()

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(HANG_S):
            while not condition():
                await self.something()

    async def something(self) -> None:
        """Waits for the next call."""
        self._news.clear()
        await self._news.wait()

    def lost_times(self, times: int) -> bool:
        return len(self.lost) == times

    @property
    def phases(self) -> list[str]:
        """Phases in order, repetitions left out."""
        found: list[str] = []
        for state in self.states:
            if not found or found[-1] != state.phase:
                found.append(state.phase)
        return found

    def answered(self, asked: Request) -> bool:
        """True if every choice ended; raises AssertionError if one ended wrongly."""
        choices = range(asked.params.n)
        if not all((asked.request_id, choice) in self.finished for choice in choices):
            return False
        for choice in choices:
            assert self.tokens[asked.request_id, choice] == fake_tokens(asked, choice)
        return True


class Job(Replica):
    """A replica whose listener counts what is submitted."""

    def __init__(self, spec: ReplicaSpec, listener: Listener) -> None:
        super().__init__(spec)
        self._heard_by = listener

    def submit(self, request: Request) -> None:
        super().submit(request)
        self._heard_by.in_flight[request.request_id] = Asked(self.launch, set(request.open_choices))


class Story:
    """A started job with its listener."""

    def __init__(self, job: Job, listener: Listener) -> None:
        self.job, self.listener = job, listener

    async def phase(self, phase: str) -> None:
        await self.listener.until(lambda: self.job.state.phase == phase)

    async def compute_long(self) -> None:
        """Once it is ready, a request that no test waits for the end of; returns when tokens have come."""
        await self.phase("ready")
        self.job.submit(request("long", 4000))
        await self.listener.until(lambda: self.listener.tokens)

    async def pid(self, rank: int) -> int:
        """Of the present launch."""
        ranks = (await self.job.bundle())["ranks"]
        pid = ranks[str(rank)]["pid"]
        assert isinstance(pid, int)
        return pid

    async def pids(self) -> list[int]:
        ranks = (await self.job.bundle())["ranks"]
        return [rank["pid"] for rank in ranks.values()]


@contextlib.asynccontextmanager
async def story(
    command: LaunchCommand | Callable[[frozenset[str]], LaunchCommand] | None = None,
    config: dict[str, Any] | None = None,
    world_size: int = 2,
    hooks: JobHooks | None = None,
    timeouts: JobTimeouts | None = None,
    listener: Listener | None = None,
    identity: ModelIdentity | None = None,
    **options: Any,
) -> AsyncIterator[Story]:
    """A job of fake ranks, started; closed at the end whatever happens."""
    chosen = fake_mpirun(world_size) if command is None else command
    factory = chosen if callable(chosen) else (lambda excluded: chosen)
    settings = JobOptions(World(world_size), timeouts=timeouts or PATIENT, **options)
    listener = listener or Listener()
    spec = ReplicaSpec(factory, json.dumps(config or {}), settings, hooks or JobHooks(), identity)
    job = Job(spec, listener)
    await job.start(listener)
    try:
        yield Story(job, listener)
    finally:
        await job.close()


def process_id(pid: int) -> ProcessId:
    started = start_time(pid)
    assert started is not None, f"pid {pid} is gone already"
    return ProcessId(pid, started)


def left(pids: list[int]) -> list[int]:
    """Those of these processes that are there."""
    return [pid for pid in pids if start_time(pid) is not None]


async def gone(pids: list[int], timeout_s: float = HANG_S) -> None:
    """Waits until all these processes are gone; raises TimeoutError."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(timeout_s):
        for pid in pids:
            try:
                handle = os.pidfd_open(pid)
            except ProcessLookupError:
                continue
            ended = asyncio.Event()
            loop.add_reader(handle, ended.set)
            try:
                await ended.wait()
            finally:
                loop.remove_reader(handle)
                os.close(handle)
