"""The matrix's rows on processes, with the bars of reliability and at seeded points: real supervisor, real mpirun (or
the stand-in), fake ranks. Part of `make fault-test`; FAULT_SEED replays a run, FAULT_POINTS sets how many kills."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time
from typing import Any

import pytest
from fake_worker import fake_tokens
from job_tools import MPIRUN, Listener, Story, fake_mpirun, gone, process_id, real_mpirun, request, story
from laddertron.engine.request import Request
from laddertron.launchers.compose.mpi import LaunchCommand
from laddertron.launchers.control import processes
from laddertron.launchers.job.detect import JobFailure
from laddertron.launchers.job.options import JobTimeouts
from laddertron.launchers.job.replica import JobHooks

pytestmark = pytest.mark.slow
SEED = int(os.environ.get("FAULT_SEED", random.SystemRandom().randrange(2**32)))
POINTS = int(os.environ.get("FAULT_POINTS", "60"))


class Owner(Listener):
    """Submits what is not answered whenever the job is ready, as the daemon does."""

    def __init__(self, requests: list[Request]) -> None:
        super().__init__()
        self.open = {one.request_id: one for one in requests}
        self.answers: dict[str, list[int]] = {}
        self.twice: list[str] = []

    def collect(self) -> None:
        for (name, _), _ in list(self.finished.items()):
            if name in self.answers:
                self.twice.append(name)
            self.answers[name] = self.tokens[name, 0]
            self.open.pop(name, None)
        self.finished.clear()


@pytest.mark.skipif(not MPIRUN.exists(), reason=f"no Open MPI at {MPIRUN}")
@pytest.mark.parametrize("rank", [0, 1])
def test_sigstop_under_mpirun_within_the_bars(rank: int) -> None:
    """SIGSTOP of a rank of a real MPI job, with the times that ship: not ready within 5 s, found, named and killed
    within 15 s, serving again."""
    failures: list[JobFailure] = []

    async def run() -> None:
        async with story(real_mpirun(), hooks=JobHooks(failed=failures.append), timeouts=JobTimeouts()) as s:
            await s.phase("ready")
            s.job.submit(request("long", 4000))
            await s.listener.until(lambda: s.listener.tokens)
            pid = await s.pid(rank)
            stopped = process_id(pid)
            began = time.monotonic()
            os.kill(pid, signal.SIGSTOP)
            await s.phase("suspect")
            assert time.monotonic() - began < 5.0
            await s.phase("starting")
            took = time.monotonic() - began
            print(f"SIGSTOP of rank {rank}: found, named and gone after {took:.1f} s")
            assert took < 15.0
            assert (failures[0].kind, failures[0].culprit.rank) == ("silent", rank)
            assert not processes.is_alive(stopped)
            await s.phase("ready")

    asyncio.run(run())


@pytest.mark.parametrize("whom", ["rank", "mpirun", "keeper"])
def test_a_kill_within_the_bars(whom: str) -> None:
    """SIGKILL, with the times that ship: not ready within 2 s, nothing of the launch left within 3 s, serving again
    within 5 s."""

    async def run() -> None:
        async with story(timeouts=JobTimeouts()) as s:
            await s.phase("ready")
            ranks = await s.pids()
            mpirun = parent(ranks[0])
            victim = {"rank": ranks[1], "mpirun": mpirun, "keeper": parent(mpirun)}[whom]
            began = time.monotonic()
            os.kill(victim, signal.SIGKILL)
            await s.listener.until(lambda: s.job.state.phase != "ready")
            assert time.monotonic() - began < 2.0
            await gone([mpirun, *ranks], 3.0)
            await s.phase("ready")
            took = time.monotonic() - began
            print(f"SIGKILL of {whom}: serving again after {took:.1f} s")
            assert took < 5.0

    asyncio.run(run())


def test_a_rank_that_raises_fails_a_run_within_the_bars() -> None:
    """`laddertron run`: failed within 5 s, nothing left."""

    async def run() -> None:
        async with story(restart=False, timeouts=JobTimeouts()) as s:
            await s.phase("ready")
            ranks = await s.pids()
            began = time.monotonic()
            os.kill(ranks[1], signal.SIGUSR1)
            await s.phase("failed")
            assert time.monotonic() - began < 5.0
            await gone(ranks, 0.5)

    asyncio.run(run())


def parent(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])


async def strike(s: Story, rng: random.Random) -> str:
    """Kills something of the present launch; "" if there was nothing to kill."""
    launch = await s.job.bundle()
    pids = [rank["pid"] for rank in launch.get("ranks", {}).values() if rank["pid"] is not None]
    if not pids:
        return ""
    what = rng.choice(["rank", "rank", "rank", "mpirun", "keeper"])
    try:
        pid = {"rank": rng.choice(pids), "mpirun": parent(pids[0]), "keeper": parent(parent(pids[0]))}[what]
        if pid in (1, os.getpid()):
            return ""
        os.kill(pid, signal.SIGKILL)
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return what


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(fake_mpirun(), id="stand-in"),
        pytest.param(
            real_mpirun(),
            id="mpirun",
            marks=pytest.mark.skipif(not MPIRUN.exists(), reason=f"no Open MPI at {MPIRUN}"),
        ),
    ],
)
def test_seeded_kills_lose_and_repeat_nothing(command: LaunchCommand) -> None:
    """Ranks, mpirun and keepers are killed at seeded points of a long batch, at any moment of a launch's life. Every
    request is answered once and rightly, and at the end no process is left."""
    print(f"FAULT_SEED={SEED} FAULT_POINTS={POINTS}")
    rng = random.Random(SEED)
    points = POINTS if command.argv[0] == sys.executable else max(1, POINTS // 4)
    requests = [request(f"line-{i}", rng.randrange(1, 60)) for i in range(400)]
    struck: list[str] = []

    async def run() -> None:
        owner = Owner(requests)
        config = {"max_num_seqs": 8, "step_s": 0.02}
        options: dict[str, Any] = {"max_failures": 10**6, "longest_backoff_s": 0.0}
        async with story(command, config, listener=owner, timeouts=JobTimeouts(), **options) as s:
            busy = asyncio.create_task(feed(s, owner))
            while len(struck) < points and owner.open:
                await asyncio.sleep(rng.expovariate(2.0))
                if what := await strike(s, rng):
                    struck.append(what)
            await asyncio.wait_for(busy, 240)
        assert owner.twice == []
        assert owner.answers == {one.request_id: fake_tokens(one) for one in requests}

    async def feed(s: Story, owner: Owner) -> None:
        flying: set[str] = set()
        launch = -1
        while owner.open:
            owner.collect()
            if s.job.state.phase == "ready":
                if s.job.state.restarts != launch:
                    launch, flying = s.job.state.restarts, set()
                flying &= owner.open.keys()
                for name in list(owner.open)[:16]:
                    if name not in flying and len(flying) < 16:
                        s.job.submit(owner.open[name])
                        flying.add(name)
            if owner.open:
                await owner.something()

    before = {process.pid for process in processes.descendants(os.getpid())}
    asyncio.run(run())
    left = [p for p in processes.descendants(os.getpid()) if p.pid not in before]
    print(f"struck: { {what: struck.count(what) for what in sorted(set(struck))} }")
    assert left == []
