"""Jobs of fake ranks (no torch; once under the real mpirun), and everything that may kill them."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fake_worker import fake_tokens
from folders import FOLDERS
from job_tools import MPIRUN, Story, bounded, command, fake_mpirun, gone, left, process_id, real_mpirun, request, story
from laddertron.engine.identity import ModelIdentity
from laddertron.engine.job import NOBODY
from laddertron.launchers.compose.mpi import LaunchCommand
from laddertron.launchers.control import processes
from laddertron.launchers.job.detect import JobFailure
from laddertron.launchers.job.options import JobTimeouts
from laddertron.launchers.job.replica import JobHooks
from waiting import FOR_EVER_S, HANG_S, until

IMPATIENT = JobTimeouts(suspect_s=1.5, dead_s=5.0, first_step_s=5.0, least_step_s=5.0)
"""reliability.md's 3 s and 10 s, shortened; test_detect.py holds the real ones against a clock of its own. Elsewhere
the patience has no end (job_tools.PATIENT): what is seen there was not seen by it."""

KEEPER = (sys.executable, "-P", "-m", "laddertron.launchers.job.keeper")


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


def test_the_fourth_failure_without_progress_is_the_last() -> None:
    """Rank 1 raises at every start: three relaunches, then the job has failed for good and says why."""

    async def run() -> None:
        async with story(config={"raise_loading": 1}, longest_backoff_s=0.05) as s:
            await s.phase("failed")
            assert s.job.state.restarts == 3
            assert s.job.state.reason.startswith("4 failures in a row without progress, the last: rank 1")
            assert "asked to raise while loading" in s.job.state.reason
            assert len(s.job.failures) == 4

    bounded(run)


def test_what_a_rank_refuses_is_not_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    """Weights that cannot be read, a model that does not fit: one launch, and the rank's own words are the reason,
    which is the owner's to log."""
    caplog.set_level(logging.INFO)

    async def run() -> None:
        async with story(config={"refuse": 1}) as s:
            await s.phase("failed")
            state = s.job.state
            assert state.restarts == 0
            assert state.reason.startswith("rank 1 (node ")
            assert state.reason.endswith(": model.safetensors: 3 bytes are missing")
            assert s.job.failures[0].kind == "refused"

    bounded(run)
    assert "3 bytes are missing" not in caplog.text


def test_what_was_fine_before_is_tried_again(tmp_path: Path) -> None:
    """A job that was ready once and is refused after a crash (a neighbour holds the memory, a file is being replaced)
    goes on trying, up to the bound."""
    held = tmp_path / "held"
    kinds: list[str] = []

    def failed(failure: JobFailure) -> None:
        kinds.append(failure.kind)
        if len(kinds) == 2:
            held.unlink()

    async def run() -> None:
        config = {"refuse": 1, "refuse_after": str(held)}
        async with story(config=config, hooks=JobHooks(failed=failed), longest_backoff_s=0.05) as s:
            await s.phase("ready")
            held.touch()
            os.kill(await s.pid(0), signal.SIGKILL)
            await s.listener.until(lambda: s.job.state.phase == "ready" and s.job.state.restarts == 2)
            assert kinds == ["rank_lost", "refused"]
            held.touch()
            os.kill(await s.pid(0), signal.SIGKILL)
            await s.phase("failed")
            assert "failures in a row without progress" in s.job.state.reason

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


def test_an_operating_system_error_while_a_launch_is_composed_is_one_failure() -> None:
    """The next launch may get what this one did not, such as a descriptor."""
    calls = 0

    def compose(excluded: frozenset[str]) -> LaunchCommand:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return fake_mpirun()

    async def run() -> None:
        async with story(compose, max_failures=3, longest_backoff_s=0.0) as s:
            await s.phase("ready")
            os.kill(await s.pid(1), signal.SIGKILL)
            await s.listener.until(partial(is_ready, s, 2))
            assert [failure.kind for failure in s.job.failures] == ["rank_lost", "shortage"]
            assert "Too many open files" in s.job.failures[1].reason

    bounded(run)


def is_ready(s: Story, restarts: int) -> bool:
    return s.job.state.phase == "ready" and s.job.state.restarts == restarts


@pytest.mark.parametrize("spare", [True, False])
def test_a_node_that_three_failures_name_makes_room_for_a_spare(spare: bool) -> None:
    """Without one it stays: a launch on it may succeed, none on no node can."""
    asked: list[frozenset[str]] = []

    def compose(excluded: frozenset[str]) -> LaunchCommand:
        asked.append(excluded)
        if excluded and not spare:
            raise ValueError("no spare is left of launch.spare_hosts=[]")
        return fake_mpirun()

    async def run() -> None:
        async with story(compose, max_failures=9, longest_backoff_s=0.0) as s:
            for restarts in range(4):
                await s.listener.until(partial(is_ready, s, restarts))
                if restarts < 3:
                    os.kill(await s.pid(1), signal.SIGKILL)
            here = frozenset({os.uname().nodename})
            assert asked == [frozenset()] * 3 + [here, here if spare else frozenset()]

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


def test_ranks_that_differ_are_refused_once_and_by_name() -> None:
    """Node 1 holds other weights: the job fails naming the rank, and is not tried again."""

    async def run() -> None:
        async with story(config={"digests": {"1": "beef"}}) as s:
            await s.phase("failed")
            assert s.job.state.restarts == 0
            assert s.job.state.culprit.rank == 1
            assert "weights is beef there and feed elsewhere" in s.job.state.reason

    bounded(run)


OF_A = ModelIdentity("d" * 10, {"config.json": "a"}, {})


@pytest.mark.parametrize("restart", [True, False])
def test_a_model_that_changed_under_a_job_waits_for_its_files(tmp_path: Path, restart: bool) -> None:
    """1. The model is the owner's: ready. 2. A file changes and a rank dies: each launch is refused, naming rank, host
    and file, and none of them is counted; `run`, which does not launch again, fails. 3. The file is restored: ready."""
    file = tmp_path / "config.json"
    file.write_text("a")
    failures: list[JobFailure] = []

    async def run() -> None:
        hooks, config = JobHooks(failed=failures.append), {"reads": str(file)}
        async with story(config=config, hooks=hooks, restart=restart, longest_backoff_s=0.05, identity=OF_A) as s:
            await s.phase("ready")
            assert s.job.state.model == "d" * 10
            file.write_text("b")
            os.kill(await s.pid(1), signal.SIGKILL)
            if not restart:
                await s.phase("failed")
                return
            await s.listener.until(lambda: s.job.state.restarts > 5)
            reasons = {state.reason for state in s.listener.states if "config.json differs" in state.reason}
            assert all("restore the files, or run `laddertron reload`" in reason for reason in reasons)
            assert all(f"(node {os.uname().nodename}" in reason for reason in reasons)
            file.write_text("a")
            await s.phase("ready")
            assert [failure.kind for failure in failures] == ["rank_lost", "model_changed"]

    bounded(run)


def test_a_model_that_differs_at_the_first_start_fails_the_job(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("b")

    async def run() -> None:
        async with story(config={"reads": str(tmp_path / "config.json")}, identity=OF_A) as s:
            await s.phase("failed")
            assert s.job.state.restarts == 0
            assert "config.json differs from the model that this job serves: the nodes must have" in s.job.state.reason

    bounded(run)


def test_a_rank_of_another_version_is_refused() -> None:
    async def run() -> None:
        async with story(fake_mpirun(2, FAKE_VERSIONS='{"1": "9.9"}')) as s:
            await s.phase("failed")
            assert s.job.state.culprit.rank == 1
            assert "runs laddertron 9.9" in s.job.state.reason

    bounded(run)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("/no/such/mpirun",), "cannot start /no/such/mpirun: No such file"),
        ((sys.executable, "-c", "raise SystemExit('no route to node-7')"), "no route to node-7"),
    ],
)
def test_a_launcher_that_cannot_start_says_why(argv: tuple[str, ...], words: str) -> None:
    async def run() -> None:
        async with story(command(argv), restart=False) as s:
            await s.phase("failed")
            assert words in s.job.state.reason
            assert s.job.state.exit_code not in (0, None)

    bounded(run)


def test_ranks_that_do_not_come_up_are_numbered() -> None:
    sleeper = command((sys.executable, "-c", "import signal; signal.pause()"))

    async def run() -> None:
        async with story(sleeper, restart=False, timeouts=JobTimeouts(launch_s=0.3)) as s:
            await s.phase("failed")
            assert "rank 0, 1 did not start within 0.3 s" in s.job.state.reason

    bounded(run)


def test_no_relaunch_before_the_devices_are_free_nor_without_nodes() -> None:
    """`devices_free` is awaited before a relaunch, not before the first launch; a refusal by it or by the composer
    counts as a failure with its words."""
    asked: list[int] = []

    async def devices_free() -> None:
        asked.append(1)
        if len(asked) == 2:
            raise RuntimeError("cuda:3 still holds 40 GiB")

    async def run() -> None:
        async with story(hooks=JobHooks(devices_free=devices_free), max_failures=2) as s:
            await s.phase("ready")
            assert asked == []
            os.kill(await s.pid(0), signal.SIGKILL)
            await s.listener.until(lambda: s.job.state.phase == "ready" and s.job.state.restarts == 1)
            assert asked == [1]
            os.kill(await s.pid(0), signal.SIGKILL)
            await s.phase("failed")
            assert "cuda:3 still holds 40 GiB" in s.job.state.reason

    bounded(run)


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


# the keeper and its means


def keep(script: str, grace: str = "0.3", *told: str) -> subprocess.Popen[str]:
    """A keeper over `script`, whose arguments are `told`, with its lifeline and what it writes in the test's hands."""
    scratch = tempfile.mkdtemp(prefix="laddertron-test-")
    command = [*KEEPER, grace, scratch, "--", sys.executable, "-c", textwrap.dedent(script), *told]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def test_the_keeper_ends_as_its_command_did() -> None:
    for script, status in (("", 0), ("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 9)", -9)):
        keeper = keep(script)
        assert keeper.wait(HANG_S) == status
        for pipe in (keeper.stdin, keeper.stdout):
            assert pipe is not None
            pipe.close()


def test_the_keeper_kills_the_stubborn_and_the_hidden(tmp_path: Path) -> None:
    """The command ignores SIGTERM and has a grandchild in a session of its own whose parent is gone: when the lifeline
    ends, both are killed after the grace, and the scratch folder goes too."""
    script = """
        import json, os, signal, sys
        def tell(name):
            with open(os.path.join(sys.argv[1], "new-" + name), "w") as file:
                json.dump([os.getpid(), os.environ["PRTE_MCA_prte_local_tmpdir_base"]], file)
            os.rename(file.name, os.path.join(sys.argv[1], name))
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                tell("hidden")
                while True: signal.pause()
            os._exit(0)
        os.wait()
        tell("stubborn")
        while True: signal.pause()
    """
    with keep(script, "0.3", str(tmp_path)) as keeper:
        assert keeper.stdin is not None
        assert keeper.stdout is not None
        told, said = [tmp_path / "hidden", tmp_path / "stubborn"], keeper.stdout

        def both() -> bool:
            assert keeper.poll() is None, f"ended with {keeper.returncode}: {said.read()}"
            return all(file.exists() for file in told)

        until(both, lambda: str([file.name for file in told if file.exists()]))
        (hidden, scratch), (stubborn, same) = (json.loads(file.read_text()) for file in told)
        assert scratch == same
        assert os.path.isdir(scratch)
        began = time.monotonic()
        keeper.stdin.close()
        assert keeper.wait(HANG_S) == -signal.SIGKILL
        assert time.monotonic() - began >= 0.3
        assert left([hidden, stubborn]) == []
        assert not os.path.exists(scratch)


def test_a_keeper_asked_at_once_ends_its_command_at_once() -> None:
    """However early the request comes, SIGTERM reaches the command: it does not run on until the grace is over."""
    with keep("import signal; signal.pause()", grace=str(FOR_EVER_S)) as keeper:
        assert keeper.stdin is not None
        keeper.stdin.close()
        assert keeper.wait(HANG_S) == -signal.SIGTERM


def test_each_open_mpi_gets_one_word_for_its_session_folder() -> None:
    """5's for this host, 4's for all: ranks of 4 refuse to start where one for this host stands beside it."""
    with keep("import os; print(*sorted(k for k in os.environ if k.endswith('_tmpdir_base')))") as keeper:
        assert keeper.stdout is not None
        said = keeper.stdout.read()  # before the lifeline ends: with it the command would
        assert keeper.wait(HANG_S) == 0, said
    assert said.split() == ["OMPI_MCA_orte_tmpdir_base", "PRTE_MCA_prte_local_tmpdir_base"]


def test_a_recycled_pid_is_never_killed() -> None:
    """The pid is right, the start time is another process's: nothing happens to it."""
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    here = process_id(child.pid)
    assert not processes.kill(processes.ProcessId(here.pid, here.started - 1))
    assert child.poll() is None
    assert here in processes.descendants(os.getpid())
    assert processes.kill(here)
    child.wait()
    assert not processes.kill(here)
    assert not processes.is_alive(here)


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
