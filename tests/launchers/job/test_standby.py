"""A launch that stands by: it takes over from one that fails, and where it cannot, the log says why and a cold start
follows. Fake ranks; what real ones do while they stand by is in tests/launchers/rank/test_rank_start.py."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from job_tools import Story, bounded, fake_mpirun, left, request, story
from laddertron import __version__
from laddertron.launchers.compose.mpi import LaunchCommand
from laddertron.launchers.control import processes
from laddertron.launchers.control.messages import Hello, Loading, Standing
from laddertron.launchers.job import replica
from laddertron.launchers.job.options import JobTimeouts
from laddertron.launchers.job.rank_board import RankBoard
from laddertron.launchers.rank.standing_by import StandbyRefused, require_memory
from laddertron.topology.placement.world import World
from waiting import FOR_EVER_S


class Launches:
    """Composes fake launches, and counts them; `env` is what the n-th one's ranks get."""

    def __init__(self, **env: dict[int, str]) -> None:
        self.count, self._env = 0, env

    def __call__(self, excluded: frozenset[str]) -> LaunchCommand:
        self.count += 1
        return fake_mpirun(2, **{name: of[self.count] for name, of in self._env.items() if self.count in of})


async def stands(s: Story) -> list[int]:
    """Waits for a serving job with a launch that stands by; the pids of that one's ranks."""
    await s.listener.until(lambda: s.job.state.phase == "ready" and s.job.state.standby == "ready")
    serving = set(await s.pids())
    ranks = [p.pid for p in processes.descendants(os.getpid()) if is_rank(p.pid)]
    return sorted(set(ranks) - serving)


def is_rank(pid: int) -> bool:
    try:
        return b"fake_worker.py" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[1]
    except (OSError, IndexError):
        return False


def said(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(record.getMessage() for record in caplog.records if getattr(record, "event", "") == "standby")


def test_it_takes_over_and_another_one_stands_behind_it(caplog: pytest.LogCaptureFixture) -> None:
    """Rank 1 is killed: the ranks that stood by serve, nothing else was launched for it; what was lost is answered; the
    next one comes up behind them. All of it is gone at the end."""
    launches = Launches()
    caplog.set_level(logging.INFO)
    everyone: list[int] = []

    async def run() -> None:
        async with story(launches, standby=True) as s:
            waiting = await stands(s)
            assert (len(waiting), launches.count) == (2, 2)
            s.job.submit(request("long", 4000))
            await s.listener.until(lambda: s.listener.tokens)
            old = await s.pids()
            seen: list[int] = []
            os.kill(old[1], signal.SIGKILL)
            await s.listener.until(lambda: s.job.state.phase == "ready" and s.job.state.restarts == 1)
            seen = await s.pids()
            assert sorted(seen) == waiting
            assert s.listener.lost[0][0] == ["long"]
            asked = request("again", 40)
            s.job.submit(asked)
            await s.listener.until(lambda: s.listener.answered(asked))
            third = await stands(s)
            assert launches.count == 3
            assert left(old) == []
            everyone.extend([*seen, *third])
        assert left(everyone) == []

    bounded(run)
    assert "standby: ready, 1 MB a rank" in said(caplog)
    assert "standby: takes over" in said(caplog)
    (recovered,) = [record for record in caplog.records if getattr(record, "event", "") == "recovered"]
    assert recovered.standby is True  # type: ignore[attr-defined]


def test_one_that_still_comes_up_takes_over_too(tmp_path: Path) -> None:
    """The rank is killed while the second launch is on its way: that one goes on to load, and no third is launched."""
    launches, gate = Launches(), tmp_path / "stand"

    async def run() -> None:
        async with story(launches, {"stand_until": str(gate)}, standby=True) as s:
            await s.listener.until(lambda: s.job.state.phase == "ready" and s.job.state.standby == "starting")
            os.kill(await s.pid(0), signal.SIGKILL)
            await s.listener.until(lambda: s.job.state.phase == "starting")
            gate.touch()
            await s.listener.until(lambda: s.job.state.phase == "ready" and s.job.state.restarts == 1)
            await stands(s)
            assert launches.count == 3

    bounded(run)


def test_it_is_told_where_the_serving_ranks_keep_their_weights(tmp_path: Path) -> None:
    """Each rank of its own rank's process; after a takeover the next one of those that took over."""
    keeps = tmp_path / "keeps"

    def told(pids: list[int]) -> bool:
        lines = {f"{rank} {pid} {processes.start_time(pid)} 7" for rank, pid in enumerate(pids)}
        return keeps.exists() and lines <= set(keeps.read_text().splitlines())

    async def run() -> None:
        async with story(Launches(), {"weights_file": 7, "keeps": str(keeps)}, standby=True) as s:
            await stands(s)
            pids = await s.pids()
            await until(lambda: told(pids))
            os.kill(pids[1], signal.SIGKILL)
            await s.listener.until(lambda: s.job.state.phase == "ready" and s.job.state.restarts == 1)
            await stands(s)
            later = await s.pids()
            await until(lambda: told(later))
            assert not set(pids) & set(later)

    async def until(met: Callable[[], bool]) -> None:
        while not met():  # a file is written, by processes that tell nobody
            await asyncio.sleep(0.01)

    bounded(run)


def test_a_killed_one_is_named_and_replaced(caplog: pytest.LogCaptureFixture) -> None:
    """Its rank 0 is killed: the job serves on, the log says who it was and what it costs, another one is tried."""
    launches = Launches()

    async def run() -> None:
        async with story(launches, standby=True) as s:
            waiting = await stands(s)
            os.kill(waiting[0], signal.SIGKILL)
            await s.listener.until(lambda: s.job.state.standby == "")
            await stands(s)
            assert (s.job.state.restarts, launches.count) == (0, 3)
            assert left(waiting) == []

    bounded(run)
    assert "standby: lost (rank_lost): rank " in said(caplog)
    assert "until it is ready a failure costs a cold start" in said(caplog)


def test_without_one_a_failure_costs_a_cold_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed, and no other one tried yet, as a rank of the job is killed too."""
    monkeypatch.setattr(replica, "FIRST_WAIT_S", FOR_EVER_S)
    launches = Launches()

    async def run() -> None:
        async with story(launches, standby=True) as s:
            waiting = await stands(s)
            os.kill(waiting[0], signal.SIGKILL)
            await s.listener.until(lambda: s.job.state.standby == "")
            os.kill(await s.pid(0), signal.SIGKILL)
            await s.listener.until(lambda: s.job.state.phase == "ready" and s.job.state.restarts == 1)
            assert launches.count >= 3
            assert not set(await s.pids()) & set(waiting)

    bounded(run)


def test_one_that_fails_as_it_takes_over(caplog: pytest.LogCaptureFixture) -> None:
    """Its rank 0 raises on Load: a cold start, which is no second failure of the job."""

    async def run() -> None:
        async with story(Launches(), {"raise_taking_over": 0}, standby=True) as s:
            await stands(s)
            os.kill(await s.pid(1), signal.SIGKILL)
            await s.listener.until(lambda: s.job.state.phase == "ready" and s.job.state.restarts == 1)
            assert [failure.kind for failure in s.job.failures] == ["rank_lost"]

    bounded(run)
    assert "standby: failed as it took over: rank 0" in said(caplog)
    assert "asked to raise as it takes over" in said(caplog)


def test_a_starved_one_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    """A rank of it is stopped: it no longer counts as ready, and the failure that follows is answered by a cold
    start."""
    timeouts = JobTimeouts(suspect_s=1.3, dead_s=FOR_EVER_S, first_step_s=FOR_EVER_S, least_step_s=FOR_EVER_S)

    async def run() -> None:
        async with story(Launches(), timeouts=timeouts, standby=True) as s:
            waiting = await stands(s)
            os.kill(waiting[1], signal.SIGSTOP)
            await s.listener.until(lambda: s.job.state.standby != "ready")
            os.kill(await s.pid(1), signal.SIGKILL)
            await s.listener.until(lambda: s.job.state.phase == "ready" and s.job.state.restarts == 1)
            assert not set(await s.pids()) & set(waiting)
            with contextlib.suppress(ProcessLookupError):
                os.kill(waiting[1], signal.SIGCONT)  # a stopped process is waited for before it is killed
        assert left(waiting) == []

    bounded(run)
    assert "standby: not used, one of its ranks is silent or exited: a cold start" in said(caplog)


def test_one_of_another_version_is_refused_while_the_job_serves_on(caplog: pytest.LogCaptureFixture) -> None:
    """The package was replaced under the daemon: the log names the versions, nothing else happens."""
    launches = Launches(FAKE_VERSIONS={2: '{"1": "9.9"}'})

    async def run() -> None:
        async with story(launches, standby=True) as s:
            await stands(s)
            assert (s.job.state.restarts, launches.count) == (0, 3)

    bounded(run)
    assert "standby: lost (mismatch): rank 1" in said(caplog)
    assert "runs laddertron 9.9" in said(caplog)


def test_without_memory_for_one_a_failure_costs_a_cold_start(caplog: pytest.LogCaptureFixture) -> None:
    """A rank of it refuses, as `require_memory` has it: the job serves on; killed, it comes back by another launch."""

    async def run() -> None:
        async with story(Launches(), {"no_room_to_stand": 1}, standby=True) as s:
            await s.listener.until(lambda: "no memory for a standby" in said(caplog))
            assert (s.job.state.phase, s.job.state.restarts) == ("ready", 0)
            os.kill(await s.pid(0), signal.SIGKILL)
            await s.listener.until(lambda: s.job.state.phase == "ready" and s.job.state.restarts == 1)

    caplog.set_level(logging.INFO)
    bounded(run)
    assert "standby: lost (refused): rank 1" in said(caplog)
    assert "takes over" not in said(caplog)
    assert "a cold start ready" in caplog.text


def test_it_waits_longer_from_try_to_try(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """It fails each time as it comes up."""
    monkeypatch.setattr(replica, "FIRST_WAIT_S", 0.01)
    launches = Launches()

    async def run() -> None:
        async with story(launches, {"raise_standing": 1}, standby=True) as s:
            await s.listener.until(lambda: launches.count == 4)
            assert s.job.state.phase == "ready"

    bounded(run)
    waits = [record.args[2] for record in caplog.records if "another one is tried" in record.msg]  # type: ignore[index]
    assert waits[:2] == [0.02, 0.04]


def test_the_launch_after_a_reload_s_is_a_plain_one() -> None:
    """Its ranks waited, and had no room; killed once they serve, a cold start follows."""

    async def run() -> None:
        async with story(Launches()) as s:
            await s.phase("ready")
            spec = replace(s.job.spec, config_json=json.dumps({"room": False}))
            assert await s.job.replace(spec) is None
            os.kill(await s.pid(0), signal.SIGKILL)
            await s.listener.until(lambda: s.job.state.phase == "ready" and s.job.state.restarts == 1)

    bounded(run)


def test_a_reload_s_launch_that_fails_as_it_comes_up_is_not_launched_again() -> None:
    launches = Launches()

    async def run() -> None:
        async with story(launches) as s:
            await s.phase("ready")
            spec = replace(s.job.spec, config_json=json.dumps({"raise_standing": 0}))
            assert "asked to raise while it comes up" in str(await s.job.replace(spec))
            assert (launches.count, s.job.state.phase, s.job.state.restarts) == (2, "ready", 0)

    bounded(run)


def test_the_board_waits_for_ranks_that_stand_by_as_long_as_it_takes() -> None:
    """While all wait for Load no clock runs; from Load on loading has to get on."""
    board = RankBoard(World(2), JobTimeouts(load_stall_s=10.0, suspect_s=FOR_EVER_S, dead_s=FOR_EVER_S), 0.0)
    for rank in (0, 1):
        board.heard(rank, Hello(rank, rank, "n0", 100 + rank, 1, "boot", __version__), 1.0)
        board.heard(rank, Loading(0.1, "connecting"), 2.0)
    assert board.heard(0, Standing(5, True), 3.0) == []
    assert [item.kind for item in board.look(20.0)] == ["load_stalled"]  # type: ignore[union-attr]
    board = RankBoard(World(2), JobTimeouts(load_stall_s=10.0, suspect_s=FOR_EVER_S, dead_s=FOR_EVER_S), 0.0)
    for rank in (0, 1):
        board.heard(rank, Hello(rank, rank, "n0", 100 + rank, 1, "boot", __version__), 1.0)
    board.heard(0, Standing(5, True), 3.0)
    assert board.heard(1, Standing(7, False), 4.0) == [Standing(7, False)]
    assert board.look(1000.0) == []
    board.load(1000.0)
    assert board.look(1000.0 + 9.0) == []
    assert [item.kind for item in board.look(1000.0 + 11.0)] == ["load_stalled"]  # type: ignore[union-attr]


def test_a_host_without_memory_refuses_to_stand_by() -> None:
    require_memory(0, 8)  # the kernel does not say
    require_memory(8 << 30, 8)
    with pytest.raises(StandbyRefused, match=r"8 ranks here need 300 MiB each, 2000 MiB are free"):
        require_memory(2000 << 20, 8)
