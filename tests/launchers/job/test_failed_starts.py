"""Launches that cannot start, or must not start again: what is retried, how often, and what the reason says."""

from __future__ import annotations

import errno
import logging
import os
import signal
import sys
from functools import partial
from pathlib import Path

import pytest
from job_tools import Story, bounded, command, fake_mpirun, story
from laddertron.engine.identity import ModelIdentity
from laddertron.launchers.compose.mpi import LaunchCommand
from laddertron.launchers.job.detect import JobFailure
from laddertron.launchers.job.options import JobTimeouts
from laddertron.launchers.job.replica import JobHooks


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
