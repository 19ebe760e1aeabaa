"""A replica whose ranks are exchanged while it serves: jobs that do what the test says, and fake ranks at the end."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from job_tools import PATIENT, Listener, bounded, fake_mpirun, left, request
from laddertron.engine.job import JobListener, JobState
from laddertron.engine.request import ModelLimits, Request, TokensEvent
from laddertron.launchers.job.rolling_job import RollingJob
from laddertron.launchers.job.supervisor import JobOptions, MpiJob

LIMITS = ModelLimits(4096, 1000, 8, 65536, (2,))


class Job:
    """Keeps what it is given; `to` moves it. Its drain ends once `aboard` is empty."""

    def __init__(self, name: str, room: bool = True) -> None:
        self.name, self.room, self.state = name, room, JobState("stopped")
        self.aboard: list[str] = []
        self.done: list[str] = []
        self.before: Any = None
        self.identity: Any = None
        self.listener: JobListener
        self._empty = asyncio.Event()

    async def start(self, listener: JobListener) -> None:
        self.listener = listener
        self.to("starting")

    def to(self, phase: Any, reason: str = "") -> None:
        self.state = JobState(phase, reason, limits=LIMITS if phase == "ready" else None)
        self.listener.on_state(self.state)

    def load(self) -> None:
        self.done.append("load")

    def submit(self, request: Request) -> None:
        self.aboard.append(request.request_id)

    def answer(self, name: str) -> None:
        self.aboard.remove(name)
        self.listener.on_tokens([TokensEvent(name, 0, 0, (1,), "length")])
        if not self.aboard:
            self._empty.set()

    def cancel(self, request_id: str) -> None:
        self.done.append(f"cancel {request_id}")

    def stop_choice(self, request_id: str, choice: int, n_tokens: int) -> None:
        self.done.append(f"stop {request_id}")

    async def drain(self, timeout_s: float) -> bool:
        self.done.append("drain")
        if self.aboard:
            await self._empty.wait()
        return True

    async def close(self) -> None:
        self.done.append("close")
        if self.state.phase != "failed":
            self.to("stopped")

    async def freed(self) -> None:
        self.done.append("freed")
        raise RuntimeError("cuda:0 still holds 40 GiB")

    async def bundle(self) -> dict[str, Any]:
        return {"name": self.name}


class Scene:
    """A rolling job over `old`, ready and with request a aboard; `new` is on its way in."""

    def __init__(self, room: bool) -> None:
        self.old, self.new, self.restored = Job("old"), Job("new", room), Job("restored")
        self.rolling, self.listener = RollingJob(self.old), Listener()
        self.reason: str | None = "not over yet"

    async def begin(self) -> asyncio.Task[str | None]:
        await self.rolling.start(self.listener)
        self.old.to("ready")
        self.rolling.submit(request("a"))
        task = asyncio.create_task(self.rolling.replace(self.new, lambda: self.restored))
        while self.new.state.phase != "starting":
            await asyncio.sleep(0)
        self.new.to("standby")
        await turns()
        return task


async def turns() -> None:
    """Lets everything that can run do so."""
    for _ in range(20):
        await asyncio.sleep(0)


def test_with_room_it_loads_beside_and_the_old_one_finishes_its_own() -> None:
    """1. It loads while the old one serves. 2. Ready, it takes what comes; a stays where it is, and can be cancelled.
    3. a ends: the old one is closed. Never anything but ready is told."""

    async def run() -> None:
        scene = Scene(room=True)
        task = await scene.begin()
        old, new, rolling = scene.old, scene.new, scene.rolling
        assert (new.done, old.done, new.before) == (["load"], [], old)
        rolling.submit(request("b"))
        assert old.aboard == ["a", "b"]
        new.to("ready")
        await turns()
        rolling.submit(request("c"))
        rolling.cancel("a")
        assert (old.aboard, new.aboard, old.done) == (["a", "b"], ["c"], ["drain", "cancel a"])
        old.answer("a")
        await turns()
        assert not task.done()
        old.answer("b")
        assert await task is None
        assert old.done[-1] == "close"
        assert await rolling.bundle() == {"name": "new"}
        assert scene.listener.phases == ["starting", "ready"]
        assert set(scene.listener.finished) == {("a", 0), ("b", 0)}

    bounded(run)


def test_without_room_requests_wait_while_it_loads(caplog: pytest.LogCaptureFixture) -> None:
    """1. The old one takes no more, and finishes a. 2. Only then, its memory waited for (in vain, which the log says),
    the new one loads. 3. Ready, it takes requests."""

    async def run() -> None:
        scene = Scene(room=False)
        task = await scene.begin()
        old, new, rolling = scene.old, scene.new, scene.rolling
        assert rolling.state.phase == "reloading"
        assert "running requests finish" in rolling.state.reason
        assert rolling.state.limits == LIMITS, "the door goes on checking requests"
        with pytest.raises(RuntimeError, match="the job is reloading"):
            rolling.submit(request("b"))
        assert new.done == []
        old.answer("a")
        await turns()
        assert (new.done, old.done) == (["load"], ["drain", "close", "freed"])
        assert "cuda:0 still holds 40 GiB; loading all the same" in caplog.text
        new.to("loading", "weights 1 of 2 GB")
        assert rolling.state.reason == "weights 1 of 2 GB"
        new.to("ready")
        assert await task is None
        rolling.submit(request("b"))
        assert new.aboard == ["b"]
        assert scene.listener.phases == ["starting", "ready", "reloading", "ready"]

    bounded(run)


@pytest.mark.parametrize("loads", [False, True], ids=["as it comes up", "as it loads"])
def test_one_that_fails_beside_it_changes_nothing(loads: bool) -> None:
    async def run() -> None:
        scene = Scene(room=True)
        if loads:
            task = await scene.begin()
        else:
            await scene.rolling.start(scene.listener)
            scene.old.to("ready")
            task = asyncio.create_task(scene.rolling.replace(scene.new, lambda: scene.restored))
            await turns()
        scene.new.to("failed", "a shard is missing")
        assert await task == "a shard is missing"
        assert (scene.new.done[-1], scene.old.done) == ("close", [])
        scene.rolling.submit(request("b"))
        assert "b" in scene.old.aboard
        assert scene.listener.phases == ["starting", "ready"]

    bounded(run)


def test_one_that_fails_in_its_place_brings_the_old_one_back() -> None:
    """The old one had to go first, and the new one's weights cannot be read: another of the old kind is started."""

    async def run() -> None:
        scene = Scene(room=False)
        task = await scene.begin()
        scene.old.answer("a")
        await turns()
        scene.new.to("failed", "a shard is missing")
        assert await task == "a shard is missing"
        assert scene.rolling.state.phase == "starting"
        scene.restored.to("ready")
        scene.rolling.submit(request("b"))
        assert scene.restored.aboard == ["b"]
        assert scene.listener.phases == ["starting", "ready", "reloading", "starting", "ready"]

    bounded(run)


def test_closing_in_the_middle_closes_both() -> None:
    async def run() -> None:
        scene = Scene(room=True)
        task = await scene.begin()
        task.cancel()
        await scene.rolling.close()
        assert (scene.old.done[-1], scene.new.done[-1]) == ("close", "close")

    bounded(run)


@pytest.mark.parametrize("room", [True, False])
def test_fake_ranks_are_exchanged(room: bool, tmp_path: Path) -> None:
    """Six long requests run on the old ranks and are answered whole; those after go to the new ones, which were told
    where the old ones keep their weights, as the old standby was; nothing of the old launch is left, and nothing of
    either at the end."""

    async def run() -> None:
        def job(hold: bool, **config: Any) -> MpiJob:
            options = JobOptions(2, timeouts=PATIENT, hold=hold, standby=True)
            said = {"room": room, "weights_file": 7, "keeps": str(tmp_path / "keeps"), **config}
            return MpiJob(lambda excluded: fake_mpirun(), json.dumps(said), options)

        listener = Listener()
        rolling = RollingJob(job(False))
        await rolling.start(listener)
        try:
            await listener.until(lambda: rolling.state.standby == "ready")
            before = [rank["pid"] for rank in (await rolling.bundle())["ranks"].values()]
            asked = [request(f"r{i}", 200) for i in range(6)]
            for one in asked:
                rolling.submit(one)
            await listener.until(lambda: len(listener.tokens) == 6)
            assert await rolling.replace(job(True, vocab=40000), lambda: job(False)) is None
            assert all(listener.answered(one) for one in asked)
            assert left(before) == []
            kept = [line.split()[:2] for line in (tmp_path / "keeps").read_text().splitlines()]
            assert all(kept.count([str(rank), str(pid)]) >= 2 for rank, pid in enumerate(before))
            assert rolling.state.limits is not None
            assert rolling.state.limits.vocab_size == 40000
            more = request("more", 20)
            rolling.submit(more)
            await listener.until(lambda: ("more", 0) in listener.finished)
            assert listener.lost == []
            after = [rank["pid"] for rank in (await rolling.bundle())["ranks"].values()]
        finally:
            await rolling.close()
        assert left(after) == []

    bounded(run)
