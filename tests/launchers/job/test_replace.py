"""A replica whose ranks are replaced while it serves: launches that the test moves, and fake ranks at the end."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from fake_launch import LIMITS, FakeLaunch
from job_tools import PATIENT, Job, Listener, bounded, fake_mpirun, left, request
from laddertron.launchers.control.messages import Loading
from laddertron.launchers.job import replica
from laddertron.launchers.job.options import JobOptions
from laddertron.launchers.job.replica import JobHooks, ReplicaSpec
from laddertron.topology.placement.world import World


@pytest.fixture(autouse=True)
def launches(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[FakeLaunch]:
    if "fake_ranks" not in request.node.name:
        monkeypatch.setattr(replica, "Launch", FakeLaunch)
    monkeypatch.setattr(FakeLaunch, "made", [])
    return FakeLaunch.made


def spec(name: str, free: Any = None, **options: Any) -> ReplicaSpec:
    command: Any = lambda excluded: name  # noqa: E731
    return ReplicaSpec(command, "{}", JobOptions(World(2), **options), JobHooks(devices_free=free))


async def turns() -> None:
    """Lets everything that can run do so."""
    for _ in range(30):
        await asyncio.sleep(0)


class Scene:
    """A replica by `old`, ready and with request a aboard; a launch of `new` is on its way in."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room: bool, **options: Any) -> None:
        monkeypatch.setattr(FakeLaunch, "room", room)
        self.options = options
        self.listener = Listener()
        self._full = not room
        self.job = Job(spec("old", self._free, **options), self.listener)

    async def _free(self) -> None:
        """Raises once, for the memory of the first launch."""
        full, self._full = self._full, False
        if full:
            raise RuntimeError("cuda:0 still holds 40 GiB")

    async def begin(self) -> asyncio.Task[str | None]:
        await self.serve()
        self.job.submit(request("a"))
        return await self.replace()

    async def serve(self) -> None:
        await self.job.start(self.listener)
        await turns()
        FakeLaunch.made[0].ready()

    async def replace(self) -> asyncio.Task[str | None]:
        task = asyncio.create_task(self.job.replace(spec("new", **self.options)))
        await turns()
        self.new.stand()
        await turns()
        return task

    @property
    def old(self) -> FakeLaunch:
        return FakeLaunch.made[0]

    @property
    def new(self) -> FakeLaunch:
        (launch,) = (launch for launch in FakeLaunch.made if launch.name == "new" and launch.standby)
        return launch

    @property
    def last(self) -> FakeLaunch:
        return FakeLaunch.made[-1]


def test_with_room_it_loads_beside_and_the_old_one_finishes_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """1. It loads while the old one serves. 2. Ready, it takes what comes; a stays where it is, and can be cancelled.
    3. a ends: the old one is ended. Never anything but ready is reported."""

    async def run() -> None:
        scene = Scene(monkeypatch, room=True)
        task = await scene.begin()
        old, new, job = scene.old, scene.new, scene.job
        assert (new.done, old.done, new.serving) == (["load"], ["submit a"], old)
        job.submit(request("b"))
        new.ready()
        await turns()
        job.submit(request("c"))
        job.cancel("a")
        assert old.done == ["submit a", "submit b", "drain", "cancel a"]
        assert new.done == ["load", "submit c", "cancel a"]
        old.answer("a")
        await turns()
        assert not task.done()
        old.answer("b")
        assert await task is None
        assert old.done[-1] == "end"
        assert (await job.bundle())["name"] == "new"
        assert scene.listener.phases == ["starting", "ready"]
        assert set(scene.listener.finished) == {("a", 0), ("b", 0)}
        assert list(scene.listener.in_flight) == ["c"]
        await job.close()

    bounded(run)


def test_without_room_requests_wait_while_it_loads(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """1. The old one takes no more, and finishes a. 2. Only then, its memory waited for (in vain, which the log says),
    the new one loads. 3. Ready, it takes requests."""

    async def run() -> None:
        scene = Scene(monkeypatch, room=False)
        task = await scene.begin()
        old, new, job = scene.old, scene.new, scene.job
        assert job.state.phase == "reloading"
        assert "running requests finish" in job.state.reason
        assert job.state.limits == LIMITS, "requests are checked against them meanwhile"
        with pytest.raises(RuntimeError, match="the job is reloading"):
            job.submit(request("b"))
        assert new.done == []
        old.answer("a")
        await turns()
        assert (new.done, old.done) == (["load"], ["submit a", "drain", "end"])
        assert "cuda:0 still holds 40 GiB; loading all the same" in caplog.text
        new.owner.on_launch_output(Loading(0.5, "weights 1 of 2 GB"), None)
        assert (job.state.phase, job.state.reason) == ("reloading", "50% weights 1 of 2 GB")
        new.ready()
        assert await task is None
        job.submit(request("b"))
        assert new.done == ["load", "submit b"]
        assert scene.listener.phases == ["starting", "ready", "reloading", "ready"]
        await job.close()

    bounded(run)


@pytest.mark.parametrize("loads", [False, True], ids=["as it comes up", "as it loads"])
def test_one_that_fails_beside_it_changes_nothing(loads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        scene = Scene(monkeypatch, room=True)
        if loads:
            task = await scene.begin()
        else:
            await scene.serve()
            task = asyncio.create_task(scene.job.replace(spec("new")))
            await turns()
        scene.new.fail("a shard is missing")
        assert await task == "a shard is missing"
        assert scene.new.done[-1] == "end"
        assert not {"drain", "end"} & set(scene.old.done)
        scene.job.submit(request("b"))
        assert scene.old.done[-1] == "submit b"
        assert scene.listener.phases == ["starting", "ready"]
        assert [failure.reason for failure in scene.job.failures] == ["a shard is missing"]
        await scene.job.close()

    bounded(run)


def test_one_that_cannot_be_started_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        scene = Scene(monkeypatch, room=True)
        await scene.serve()

        def command(excluded: frozenset[str]) -> Any:
            raise ValueError("need 16 slots, have 8")

        assert await scene.job.replace(ReplicaSpec(command, "{}", JobOptions(World(2)))) == "need 16 slots, have 8"
        assert scene.job.state.phase == "ready"
        await scene.job.close()

    bounded(run)


@pytest.mark.parametrize("loads", [False, True], ids=["while the old one finishes", "as it loads"])
def test_one_that_fails_in_its_place_brings_the_old_one_back(loads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old one had to go first, and the new one fails until it is given up: one by the old spec is started."""

    async def run() -> None:
        scene = Scene(monkeypatch, room=False, max_failures=1)
        task = await scene.begin()
        if loads:
            scene.old.answer("a")
            await turns()
            scene.new.fail("a rank died")
            await turns()
            assert scene.job.state.phase == "reloading", "it is launched again before it is given up"
            scene.last.fail("a shard is missing")
        else:
            scene.new.fail("a shard is missing")
            await turns()
            scene.old.answer("a")
        assert "a shard is missing" in str(await task)
        assert scene.job.state.phase == "starting"
        await turns()
        assert (scene.last.name, scene.last.standby) == ("old", False)
        scene.last.ready()
        scene.job.submit(request("b"))
        assert scene.last.done == ["submit b"]
        assert scene.listener.phases == ["starting", "ready", "reloading", "starting", "ready"]
        await scene.job.close()

    bounded(run)


def test_a_serving_launch_that_fails_meanwhile_is_launched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails while the new one loads next to it: its requests are lost and it is launched again; the new one takes
    over all the same, and that launch is ended."""

    async def run() -> None:
        scene = Scene(monkeypatch, room=True)
        task = await scene.begin()
        scene.old.fail("a rank died")
        await turns()
        assert scene.listener.lost == [(["a"], "a rank died", 0)]
        again = scene.last
        assert (again.name, again.standby, scene.job.state.phase) == ("old", False, "starting")
        scene.new.ready()
        assert await task is None
        assert again.done[-1] == "end"
        assert (scene.job.state.phase, len(FakeLaunch.made)) == ("ready", 3)
        await scene.job.close()

    bounded(run)


def test_a_draining_launch_that_fails_loses_its_requests_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        scene = Scene(monkeypatch, room=True)
        task = await scene.begin()
        scene.new.ready()
        await turns()
        scene.job.submit(request("b"))
        scene.old.fail("a rank died")
        assert await task is None
        assert [lost for lost, _, _ in scene.listener.lost] == [["a"]]
        assert list(scene.listener.in_flight) == ["b"]
        assert (scene.job.state.phase, len(FakeLaunch.made)) == ("ready", 2)
        await scene.job.close()

    bounded(run)


@pytest.mark.parametrize("room", [True, False])
def test_a_standby_belongs_to_the_spec_that_serves(room: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old one's standby ends with it; the new one gets its own."""

    async def run() -> None:
        scene = Scene(monkeypatch, room, standby=True)
        await scene.serve()
        await turns()
        standby = scene.last
        standby.stand()
        assert (standby.standby, scene.job.state.standby) == (True, "ready")
        task = asyncio.create_task(scene.job.replace(spec("new", standby=True)))
        await turns()
        new = scene.last
        new.stand()
        await turns()
        new.ready()
        assert await task is None
        await turns()
        assert standby.done[-1] == "end"
        assert (scene.last.name, scene.last.standby, scene.last.serving) == ("new", True, new)
        assert scene.job.state.standby == "starting"
        await scene.job.close()
        assert all(launch.done[-1] == "end" for launch in FakeLaunch.made)

    bounded(run)


def test_a_launch_that_is_ready_as_it_fails_serves_no_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last rank reports Ready after the evidence of its end: neither the first launch nor a reload's is ready."""

    async def run() -> None:
        scene = Scene(monkeypatch, room=True)
        await scene.job.start(scene.listener)
        await turns()
        scene.old.fail("a rank died")
        scene.old.ready()
        await turns()
        assert scene.job.state.phase == "starting"
        again = scene.last
        assert again is not scene.old
        again.ready()
        task = await scene.replace()
        scene.new.fail("a rank died")
        scene.new.ready()
        assert await task == "a rank died"
        assert scene.listener.phases == ["starting", "restarting", "starting", "ready"]
        scene.job.submit(request("b"))
        assert again.done == ["submit b"]
        await scene.job.close()
        assert await scene.job.replace(spec("late")) == "the job was closed"

    bounded(run)


def test_an_error_of_the_supervisor_itself_costs_a_relaunch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that are lost by it are not submitted to the launch that ends."""

    async def run() -> None:
        scene = Scene(monkeypatch, room=True)
        await scene.serve()
        scene.job.submit(request("a"))
        phases: list[str] = []
        heard = scene.listener.on_lost

        def lost(launch: int, reason: str, by_request: bool) -> None:
            phases.append(scene.job.state.phase)
            assert scene.job.serving is None
            heard(launch, reason, by_request)

        monkeypatch.setattr(scene.listener, "on_lost", lost)
        monkeypatch.setattr(FakeLaunch, "explained", property(lambda launch: 1 // 0))
        scene.old.fail("a rank died")
        await turns()
        assert phases == ["restarting"]
        monkeypatch.setattr(FakeLaunch, "explained", False)
        scene.last.ready()
        assert (scene.job.state.phase, len(FakeLaunch.made)) == ("ready", 2)
        assert "ZeroDivisionError" in scene.job.failures[0].reason
        await scene.job.close()

    bounded(run)


@pytest.mark.parametrize("room", [True, False])
def test_closing_in_the_middle_closes_both(room: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        scene = Scene(monkeypatch, room)
        task = await scene.begin()
        await scene.job.close()
        assert (scene.old.done[-1], scene.new.done[-1]) == ("end", "end")
        assert (await task, scene.job.state.phase) == ("the job was closed", "stopped")
        assert len(FakeLaunch.made) == 2

    bounded(run)


@pytest.mark.parametrize("room", [True, False])
def test_fake_ranks_are_exchanged(room: bool, tmp_path: Path) -> None:
    """Six long requests run on the old ranks and are answered whole; those after go to the new ones, which were told
    where the old ones keep their weights, as the old standby was; nothing of the old launch is left, and nothing of
    either at the end."""

    async def run() -> None:
        def real(**config: Any) -> ReplicaSpec:
            options = JobOptions(World(2), timeouts=PATIENT, standby=True)
            fakes = {"room": room, "weights_file": 7, "keeps": str(tmp_path / "keeps"), **config}
            return ReplicaSpec(lambda excluded: fake_mpirun(), json.dumps(fakes), options)

        listener = Listener()
        job = Job(real(), listener)
        await job.start(listener)
        try:
            await listener.until(lambda: job.state.standby == "ready")
            before = [rank["pid"] for rank in (await job.bundle())["ranks"].values()]
            asked = [request(f"r{i}", 200) for i in range(6)]
            for one in asked:
                job.submit(one)
            await listener.until(lambda: len(listener.tokens) == 6)
            assert await job.replace(real(vocab=40000)) is None
            assert all(listener.answered(one) for one in asked)
            assert left(before) == []
            kept = [line.split()[:2] for line in (tmp_path / "keeps").read_text().splitlines()]
            assert all(kept.count([str(rank), str(pid)]) >= 2 for rank, pid in enumerate(before))
            assert job.state.limits is not None
            assert job.state.limits.vocab_size == 40000
            more = request("more", 20)
            job.submit(more)
            await listener.until(lambda: ("more", 0) in listener.finished)
            assert listener.lost == []
            after = [rank["pid"] for rank in (await job.bundle())["ranks"].values()]
        finally:
            await job.close()
        assert left(after) == []

    bounded(run)


def test_draining_after_many_failures_says_what_was_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that is lost while the replica drains was not finished, however many failures came before."""

    async def run() -> None:
        monkeypatch.setattr(FakeLaunch, "room", True)
        listener = Listener()
        job = Job(spec("old", max_failures=10**6, longest_backoff_s=0.0), listener)
        await job.start(listener)
        for _ in range(20):
            await turns()
            FakeLaunch.made[-1].ready()
            FakeLaunch.made[-1].fail("again")
        await turns()
        FakeLaunch.made[-1].ready()
        job.submit(request("a"))
        draining = asyncio.create_task(job.drain(60.0))
        await turns()
        FakeLaunch.made[-1].fail("at last")
        assert await draining is False
        await job.close()

    bounded(run)
