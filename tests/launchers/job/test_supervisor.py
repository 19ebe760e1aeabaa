"""Jobs of fake ranks (no torch; once under the real mpirun), and everything that may kill them."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fake_worker import fake_tokens
from folders import FOLDERS
from job_tools import MPIRUN, Story, bounded, fake_mpirun, gone, left, process_id, real_mpirun, request, story
from laddertron.engine.job import NOBODY
from laddertron.launchers.compose.mpi import LaunchCommand
from laddertron.launchers.control import processes
from laddertron.launchers.control.control import ControlServer
from laddertron.launchers.job.detect import JobFailure
from laddertron.launchers.job.options import JobTimeouts
from laddertron.launchers.job.replica import JobHooks
from waiting import FOR_EVER_S, HANG_S

IMPATIENT = JobTimeouts(suspect_s=1.5, dead_s=5.0, first_step_s=5.0, least_step_s=5.0)
"""reliability.md's 3 s and 10 s, shortened; test_detect.py holds the real ones against a clock of its own. Elsewhere
the patience has no end (job_tools.PATIENT): what is seen there was not seen by it."""


def test_requests_go_in_and_their_tokens_come_out() -> None:
    """Ten requests on two ranks, one of them with three choices: all tokens are right and in order; one is cancelled,
    one stopped early; the job drains, refuses more, and closes in order."""

    async def run() -> None:
        async with story(config={"max_num_seqs": 4}) as s:
            with pytest.raises(RuntimeError, match="takes requests only when ready"):
                s.job.submit(request("early"))
            await s.phase("ready")
            asked = [request(f"r{i}", 5 + i) for i in range(9)] + [request("three", 8, n=3)]
            for one in asked:
                s.job.submit(one)
            s.job.submit(request("long", 4000))
            s.job.submit(request("stopped", 4000))
            await s.listener.until(lambda: len(s.listener.tokens.get(("stopped", 0), ())) > 3)
            s.job.cancel("long")
            s.job.cancel("nobody")
            s.job.stop_choice("stopped", 0, 2)
            assert await s.job.drain(HANG_S)
            assert all(s.listener.answered(one) for one in asked)
            assert s.listener.finished["long", 0] == "cancelled"
            assert s.listener.finished["stopped", 0] == "stop"
            assert len(s.listener.tokens["stopped", 0]) == 2
            with pytest.raises(RuntimeError, match="draining"):
                s.job.submit(request("late"))
            assert s.listener.in_flight == {}
        assert s.listener.phases == ["starting", "loading", "ready", "draining", "stopped"]
        assert s.listener.lost == []
        assert s.job.state.restarts == 0

    bounded(run)


def stopped(pid: int) -> bool:
    """Whether all its threads are."""
    stats = [file.read_text() for file in Path(f"/proc/{pid}/task").glob("*/stat")]
    return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)


async def kill(s: Story, rank: int) -> list[int]:
    """SIGKILL of a rank, once all that the ranks said has been read: an end is read after what was said before it, so
    that of a rank which mpirun ends in consequence might come first. The pids of the launch."""
    pids = await s.pids()
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    while not all(map(stopped, pids)):
        await asyncio.sleep(0.01)
    for _ in range(3):
        await asyncio.sleep(0.01)
    os.kill(pids[rank], signal.SIGKILL)
    return pids


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_costs_a_relaunch_and_no_answer(rank: int, busy: bool) -> None:
    """SIGKILL of a rank: not ready, without waiting for its heartbeats, the rank named, what was in flight reported
    lost with the running ones first, relaunched; submitted again, the answers are right. Nothing of the first launch is
    left."""
    failures: list[JobFailure] = []

    async def run() -> None:
        async with story(config={"max_num_seqs": 2}, hooks=JobHooks(failed=failures.append)) as s:
            await s.phase("ready")
            if busy:
                for i in range(3):
                    s.job.submit(request(f"r{i}", 4000))
                await s.listener.until(lambda: len(s.listener.tokens) == 2)
            old = await kill(s, rank)
            await s.listener.until(lambda: s.job.state.phase != "ready")
            await s.phase("ready")
            assert left(old) == []
            assert (failures[0].kind, failures[0].culprit.rank) == ("rank_lost", rank)
            assert f"rank {rank} (node {os.uname().nodename}, pid {old[rank]})" in failures[0].reason
            assert s.job.state.restarts == 1
            if busy:
                ((lost, _, running),) = s.listener.lost
                assert lost == ["r1", "r0", "r2"], "the latest to enter the step first, then those that waited"
                assert running == 2
            asked = [request(f"r{i}", 60) for i in range(3)]
            for one in asked:
                s.job.submit(one)
            await s.listener.until(lambda: all(s.listener.answered(one) for one in asked))

    bounded(run)


def test_a_killed_rank_is_named_although_its_end_is_read_after_the_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The channel's thread reads the ends of connections late, as on a busy machine."""
    went = ControlServer.peer_went

    def late(server: ControlServer, *end: Any) -> None:
        time.sleep(0.3)
        went(server, *end)

    async def run() -> None:
        async with story() as s:
            await s.phase("ready")
            monkeypatch.setattr(ControlServer, "peer_went", late)
            os.kill(await s.pid(1), signal.SIGKILL)
            await s.listener.until(lambda: s.job.failures)
            assert s.job.failures[0].kind == "rank_lost"

    bounded(run)


def test_a_rank_killed_while_loading(tmp_path: Path) -> None:
    async def run() -> None:
        async with story(config={"load_until": str(tmp_path / "loaded")}) as s:
            await s.phase("loading")
            await s.listener.until(lambda: len(s.listener.reports) == 2)
            os.kill(await s.pid(1), signal.SIGKILL)
            await s.phase("restarting")
            (tmp_path / "loaded").touch()
            await s.phase("ready")
            assert s.job.state.restarts == 1

    bounded(run)


def test_a_stopped_rank_is_suspected_named_and_killed() -> None:
    """SIGSTOP of rank 1: suspect, so not ready; then dead: named with its node; killed, although it is stopped, and
    the job recovers."""
    failures: list[JobFailure] = []

    async def run() -> None:
        hooks = JobHooks(failed=failures.append)
        async with story(timeouts=IMPATIENT, hooks=hooks, settle_s=2.0) as s:
            await s.phase("ready")
            pid = await s.pid(1)
            stopped = process_id(pid)
            os.kill(pid, signal.SIGSTOP)
            await s.phase("suspect")
            assert (s.job.state.culprit.rank, s.job.state.culprit.node) == (1, os.uname().nodename)
            assert failures == []
            await s.phase("ready")
            assert (failures[0].kind, failures[0].culprit.rank) == ("silent", 1)
            assert failures[0].dumps[0]["collectives"], "the others' stacks and collectives are in the report"
            assert not processes.is_alive(stopped)

    bounded(run)


def test_a_short_stop_is_forgiven() -> None:
    """A rank that is suspect and beats again is ready again, and nothing is relaunched."""

    async def run() -> None:
        async with story(timeouts=JobTimeouts(suspect_s=1.3, dead_s=FOR_EVER_S)) as s:
            await s.phase("ready")
            pid = await s.pid(1)
            os.kill(pid, signal.SIGSTOP)
            await s.phase("suspect")
            os.kill(pid, signal.SIGCONT)
            await s.phase("ready")
            assert s.job.state.restarts == 0

    bounded(run)


def test_a_hanging_step_is_found_by_its_progress() -> None:
    """Rank 1's main thread hangs while its heartbeats go on: the step's progress tells, its stack shows where."""
    failures: list[JobFailure] = []

    async def run() -> None:
        timeouts, hooks = replace(IMPATIENT, dead_s=FOR_EVER_S), JobHooks(failed=failures.append)
        async with story(timeouts=timeouts, hooks=hooks, settle_s=HANG_S) as s:
            await s.compute_long()
            os.kill(await s.pid(1), signal.SIGUSR2)
            await s.phase("restarting")
            await s.phase("ready")
            assert (failures[0].kind, failures[0].culprit.rank) == ("stalled", 1)
            assert "never.wait" in failures[0].dumps[1]["stacks"]["MainThread"]

    bounded(run)


def test_a_rank_that_raises_is_reported_with_its_traceback() -> None:
    """`laddertron run`: no relaunch. The job has failed, its reason holds the traceback, rank and node, its exit code
    is not 0, and nothing is left."""

    async def run() -> None:
        async with story(restart=False) as s:
            await s.compute_long()
            old = await s.pids()
            os.kill(old[1], signal.SIGUSR1)
            await s.phase("failed")
            state = s.job.state
            assert (state.culprit.rank, state.culprit.node) == (1, os.uname().nodename)
            assert "Traceback" in state.reason
            assert state.reason.endswith("AskedToRaise: asked to raise")
            assert state.exit_code == 1
            assert s.listener.lost[0][0] == ["long"]
            assert left(old) == []

    bounded(run)


def test_while_it_starts_again_it_says_why() -> None:
    """From the kill of rank 0 until ready: every state has the reason, the rank, its node and its last collective;
    once ready, none."""

    async def run() -> None:
        async with story(config={"load_s": 0.2}) as s:
            await s.phase("ready")
            assert all(state.culprit.rank is None for state in s.listener.states)
            s.job.submit(request("long", 4000))
            await s.listener.until(lambda: s.listener.reports[0].step > 0)
            before = len(s.listener.states)
            pid = (await kill(s, 0))[0]
            await s.listener.until(lambda: s.job.state.phase == "ready" and s.job.state.restarts == 1)
            *meanwhile, ready = s.listener.states[before:]
            assert {state.phase for state in meanwhile} >= {"restarting", "starting", "loading"}
            for state in meanwhile:
                if state.phase in ("restarting", "starting", "loading"):
                    assert f"rank 0 (node {os.uname().nodename}, pid {pid}): its process exited" in state.reason
                    assert (state.culprit.rank, state.culprit.node) == (0, os.uname().nodename)
                    assert state.culprit.collective.startswith("collective ")
            assert (ready.reason, ready.culprit) == ("", NOBODY)

    bounded(run)


def test_a_poison_request_is_named_first_both_times() -> None:
    """One request kills the rank that runs it. It is lost twice, each time among the running and before those that
    had entered earlier; left out, the others complete."""

    async def run() -> None:
        async with story(config={"max_num_seqs": 4, "poison": [666]}) as s:
            poison = request("poison", 10, prompt=(5, 666))
            for attempt in (1, 2):
                await s.phase("ready")
                for i in range(3):
                    s.job.submit(request(f"r{i}", 4000))
                await s.listener.until(lambda: len(s.listener.tokens) == 3)
                s.job.submit(poison)
                s.job.submit(request("waits", 10))
                await s.listener.until(partial(s.listener.lost_times, attempt))
                lost, _, running = s.listener.lost[-1]
                assert "poison" in lost[: 2 if running == 5 else 1]
                assert set(lost[:running]) >= {"poison", "r0", "r1", "r2"}
            await s.phase("ready")
            asked = [request(f"r{i}", 100) for i in range(3)]
            for one in asked:
                s.job.submit(one)
            await s.listener.until(lambda: all(s.listener.answered(one) for one in asked))

    bounded(run)


@pytest.mark.parametrize("settle_s", [0.0, HANG_S], ids=["known late", "known at once"])
@pytest.mark.parametrize("keeper", [False, True], ids=["mpirun", "keeper"])
def test_mpirun_killed_means_ranks_gone_and_a_relaunch(keeper: bool, settle_s: float) -> None:
    """Nor is a request suspected, even if the ranks' ends are known before the launcher's. With the keeper, which
    cleans up, mpirun dies, and the ranks with mpirun."""
    failures: list[JobFailure] = []

    async def run() -> None:
        async with story(hooks=JobHooks(failed=failures.append), settle_s=settle_s) as s:
            await s.compute_long()
            ranks = await s.pids()
            mpirun = parent(ranks[0])
            os.kill(parent(mpirun) if keeper else mpirun, signal.SIGKILL)
            await gone([mpirun, *ranks])
            await s.listener.until(lambda: s.job.state.phase != "ready")
            await s.phase("ready")
            assert failures[0].kind == "launcher_killed"
            assert failures[0].culprit.rank is None
            assert [(ids, suspects) for ids, _, suspects in s.listener.lost] == [(["long"], 0)]

    bounded(run)


def test_a_lost_node_is_no_requests_doing() -> None:
    """mpirun's words on it come later than the ends of the ranks that it ended for that."""

    async def run() -> None:
        async with story(settle_s=0.0) as s:
            await s.compute_long()
            assert s.job.serving is not None
            launch = s.job.serving.launch
            os.kill(await s.pid(1), signal.SIGKILL)
            await s.phase("restarting")
            assert s.job.state.culprit.rank == 1
            launch.take_line(b"PRTE has lost communication with a remote daemon.")
            await s.phase("ready")
            assert (s.job.failures[0].kind, s.job.failures[0].culprit.rank) == ("launcher_exit", None)
            assert s.listener.lost[0][2] == 0

    bounded(run)


def test_a_pause_of_the_daemon_is_no_requests_doing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stood still for as long as ranks wait for a word: whoever of them ended, ended for that."""
    monkeypatch.setattr("laddertron.launchers.job.rank_board.SILENCE_S", 0.5)
    failures: list[JobFailure] = []

    async def run() -> None:
        async with story(hooks=JobHooks(failed=failures.append)) as s:
            await s.compute_long()
            os.kill(await s.pid(1), signal.SIGKILL)
            time.sleep(1.5)
            await s.listener.until(lambda: s.job.state.phase != "ready")
            await s.phase("ready")
            assert (failures[0].kind, failures[0].culprit.rank) == ("consequence", None)
            assert s.listener.lost[0][2] == 0

    bounded(run)


def test_what_was_lost_goes_on_where_it_stood() -> None:
    """Submitted again with what it has emitted, of three choices one ended: the other two go on behind it. One that
    was cancelled may come again at once, under another id."""

    async def run() -> None:
        async with story() as s:
            await s.phase("ready")
            asked = request("three", 400, n=3)
            s.job.submit(asked)
            await s.listener.until(lambda: len(s.listener.tokens.get(("three", 2), ())) > 3)
            had = [tuple(s.listener.tokens["three", choice]) for choice in range(3)]
            os.kill(await s.pid(1), signal.SIGKILL)
            await s.listener.until(lambda: s.job.state.phase != "ready")
            await s.phase("ready")
            seen = len(s.listener.events)
            again = replace(asked, request_id="three#1", emitted=(had[0], None, had[2]))
            s.job.submit(again)
            await s.listener.until(lambda: len(s.listener.events) > seen + 4)
            s.job.cancel("three#1")
            s.job.submit(replace(again, request_id="three#2"))
            await s.listener.until(lambda: not s.listener.in_flight)
            new = s.listener.events[seen:]
            assert {event.choice for event in new} == {0, 2}
            for choice in (0, 2):
                of = [event for event in new if event.choice == choice]
                for name in ("three#1", "three#2"):
                    assert next(e.start for e in of if e.request_id == name) == len(had[choice])
                assert of[-1].finish == "length"
                second = [token for event in of if event.request_id == "three#2" for token in event.tokens]
                whole = (*had[choice], *second)
                assert list(whole) == fake_tokens(asked, choice)

    bounded(run)


def test_a_stopped_keeper_is_killed_too() -> None:
    """The keeper hangs when the job is to end: the supervisor kills it, mpirun and the ranks go with it."""

    async def run() -> None:
        async with story(kill_grace_s=0.5, gone_s=0.5) as s:
            await s.phase("ready")
            ranks = await s.pids()
            mpirun = parent(ranks[0])
            os.kill(parent(mpirun), signal.SIGSTOP)
            os.kill(ranks[1], signal.SIGKILL)
            await s.listener.until(lambda: s.job.state.phase != "ready")
            await s.phase("ready")
            await gone([mpirun, *ranks])

    bounded(run)


def test_a_rank_that_cannot_be_killed_quarantines_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process in the kernel's hands for good: the next launch is composed without its node; here none is left."""
    asked: list[frozenset[str]] = []

    def compose(excluded: frozenset[str]) -> LaunchCommand:
        asked.append(excluded)
        if excluded:
            raise ValueError("2 ranks need 1 node, 0 are left: add a spare to launch.hosts")
        return fake_mpirun()

    async def run() -> None:
        async with story(compose, max_failures=1) as s:
            await s.phase("ready")
            pid = await s.pid(1)
            immortal, really = process_id(pid), processes.is_alive
            monkeypatch.setattr(processes, "is_alive", lambda process: process == immortal or really(process))
            os.kill(pid, signal.SIGKILL)
            await s.phase("failed")
            assert asked == [frozenset(), frozenset({os.uname().nodename})]
            assert "add a spare to launch.hosts" in s.job.state.reason
            assert f"rank 1 (node {os.uname().nodename}, pid {pid}) cannot be killed" in s.job.failures[0].reason

    bounded(run)


def parent(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])


@pytest.mark.parametrize("frozen", [False, True], ids=["running", "one rank stopped"])
def test_no_orphans_when_the_daemon_is_killed(frozen: bool) -> None:
    """kill -9 of the supervising process: keeper, mpirun and ranks go, also a rank that is stopped and so cannot end
    itself."""
    script = textwrap.dedent("""
        import asyncio, json
        from job_tools import story
        async def main():
            async with story() as s:
                await s.phase("ready")
                print(json.dumps(await s.pids()), flush=True)
                await asyncio.Event().wait()
        asyncio.run(main())
    """)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(FOLDERS)}
    daemon = subprocess.Popen([sys.executable, "-c", script], env=env, stdout=subprocess.PIPE, text=True)
    assert daemon.stdout is not None
    ranks = json.loads(daemon.stdout.readline())
    mpirun = parent(ranks[0])
    everyone = [*ranks, mpirun, parent(mpirun)]
    try:
        if frozen:
            os.kill(ranks[1], signal.SIGSTOP)
        daemon.kill()
        daemon.wait()
        asyncio.run(gone(everyone))
    finally:
        daemon.stdout.close()
        for pid in everyone:
            if frozen and processes.start_time(pid) is not None:
                os.kill(pid, signal.SIGKILL)


def test_closing_while_loading_and_while_failing(run_seed: int) -> None:
    """SIGTERM of the daemon at any moment: close returns with everything gone."""

    async def run() -> None:
        rng = random.Random(run_seed)
        others = processes.descendants(os.getpid())  # the session's rank pool, if a test has started it
        for config in ({"load_s": FOR_EVER_S}, {"raise_loading": 0}, {}):
            async with story(config=config, shutdown_s=FOR_EVER_S) as s:
                await asyncio.sleep(rng.uniform(0, 0.6))
                async with asyncio.timeout(HANG_S):
                    await s.job.close()
                assert s.job.state.phase in ("stopped", "failed")
            assert [p for p in processes.descendants(os.getpid()) if p not in others] == []

    bounded(run)


def test_drain_gives_up_in_time_and_reports_what_was_lost() -> None:
    async def run() -> None:
        async with story(shutdown_s=1.0) as s:
            await s.compute_long()
            assert not await s.job.drain(0.2)
            await s.job.close()
            assert [lost for lost, _, _ in s.listener.lost] == [["long"]]

    bounded(run)


def test_a_job_that_closes_does_not_look_ready_for_what_it_loses() -> None:
    """Closed without a drain: an owner that submits again what was lost looks for a job that is ready."""

    async def run() -> None:
        async with story(shutdown_s=1.0) as s:
            await s.compute_long()
            phases = []
            s.listener.on_lost = lambda *_: phases.append(s.job.state.phase)  # type: ignore[method-assign]
            await s.job.close()
            assert phases == ["draining"]

    bounded(run)


def test_a_listener_that_raises_harms_nobody() -> None:
    async def run() -> None:
        async with story() as s:
            await s.phase("ready")
            kept = s.listener.on_tokens

            def broken(events: Any) -> None:
                kept(events)
                raise ValueError("the owner's fault")

            s.listener.on_tokens = broken  # type: ignore[method-assign]
            one = request("one", 5)
            s.job.submit(one)
            await s.listener.until(lambda: s.listener.answered(one))
            assert s.job.state.phase == "ready"

    bounded(run)


def test_the_bundle_holds_stacks_and_collectives() -> None:
    async def run() -> None:
        async with story() as s:
            await s.phase("ready")
            bundle = await s.job.bundle()
            while set(bundle["dumps"]) != {"0", "1"}:  # it waits two seconds for them
                bundle = await s.job.bundle()
            json.dumps(bundle)
            assert bundle["dumps"]["1"]["collectives"] == ["step 0"]
            assert "MainThread" in bundle["dumps"]["0"]["stacks"]

    bounded(run)


@pytest.mark.skipif(not MPIRUN.exists(), reason=f"no Open MPI at {MPIRUN}")
def test_under_the_real_mpirun() -> None:
    """Open MPI starts the ranks: an answer, a killed rank, an answer, a killed mpirun, an answer, an orderly end."""
    failures: list[JobFailure] = []

    async def run() -> None:
        hooks = JobHooks(failed=failures.append)
        async with story(real_mpirun(), hooks=hooks, settle_s=HANG_S, shutdown_s=FOR_EVER_S) as s:
            for attempt in range(3):
                await s.phase("ready")
                assert s.job.state.restarts == attempt
                one = request(f"r{attempt}", 10)
                s.job.submit(one)
                await s.listener.until(partial(s.listener.answered, one))
                ranks = await s.pids()
                if attempt < 2:
                    os.kill([ranks[1], parent(ranks[0])][attempt], signal.SIGKILL)
                    await gone(ranks)
                    await s.listener.until(lambda: s.job.state.phase != "ready")
            async with asyncio.timeout(HANG_S):  # in order, as they end by themselves: nothing else would end them
                await s.job.close()
            assert left(ranks) == []
        assert [failure.kind for failure in failures] == ["rank_lost", "launcher_killed"]
        assert "exited on" in " ".join(failures[0].output), "mpirun's own words are kept"

    bounded(run)
