"""Replicas in one outer mpirun, without MPI: rank 0's event loop here, each rank as a client of the real control
channel."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from job_tools import Asked, Listener, request
from laddertron.engine.config import load as deploy
from laddertron.engine.request import ModelLimits, TokensEvent
from laddertron.launchers.control.control_client import ControlClient
from laddertron.launchers.control.messages import Announce, Beat, Command, Ready, Shutdown, StopChoice, Submit
from laddertron.launchers.job.detect import JobFailure
from laddertron.launchers.job.replica import Replica
from laddertron.launchers.rank import outer_job
from laddertron.launchers.rank.outer_job import outer_replicas, run_inside
from laddertron.topology.placement.identity import Identity
from waiting import HANG_S

CONFIGS = Path(__file__).parents[3] / "configs"
LIMITS = ModelLimits(max_model_len=64, vocab_size=32, max_num_seqs=4, kv_tokens=256)
DEPLOYMENT = deploy.load(CONFIGS / "demo.yaml", ["parallel.tensor_parallel_size=2", "parallel.replicas=2"])
HOSTS = ("here",) * 4


def is_ready(job: Replica) -> bool:
    return job.state.phase == "ready"


class Pair:
    """Two replicas of two ranks each, all clients: `clients[replica][rank]`."""

    def __init__(self) -> None:
        self.channels: dict[int, tuple[str, bytes]] = {}
        self.met = asyncio.Event()
        self.failures: list[tuple[int, JobFailure]] = []
        self.jobs = outer_replicas(DEPLOYMENT, HOSTS, lambda at, one: self.failures.append((at, one)), self.meet)
        self.listeners = (Listener(), Listener())
        self.lost_channel: list[str] = []
        self.clients: list[list[ControlClient]] = []

    def meet(self, replica: int, address: str, secret: bytes) -> None:
        self.channels[replica] = address, secret
        if len(self.channels) == len(self.jobs):
            self.met.set()

    async def start(self) -> None:
        for job, listener in zip(self.jobs, self.listeners, strict=True):
            await job.start(listener)
        await self.met.wait()
        for replica in range(2):
            ranks = [await asyncio.to_thread(self.connect, replica, rank) for rank in range(2)]
            self.clients.append(ranks)

    def connect(self, replica: int, rank: int) -> ControlClient:
        ends = self.lost_channel.append
        return ControlClient(*self.channels[replica], rank, rank, Beat, watchdog=False, end=ends)

    async def load(self, differs: tuple[int, int] | None = None) -> None:
        for replica, ranks in enumerate(self.clients):
            for rank, client in enumerate(ranks):
                client.send_state(Announce({"weights": "other" if (replica, rank) == differs else "feed"}))
                client.send_state(Ready(LIMITS))

    async def ready(self) -> None:
        await self.load()
        for job, listener in zip(self.jobs, self.listeners, strict=True):
            await listener.until(partial(is_ready, job))

    async def asked(self, replica: int, rank: int = 0) -> list[Command]:
        return await asyncio.to_thread(self.clients[replica][rank].poll, 120.0)

    async def leave(self, replica: int) -> None:
        """Each rank leaves as one whose step loop has ended."""
        for rank, client in enumerate(self.clients[replica]):
            while not client.shutdown_announced:
                await self.asked(replica, rank)
            await asyncio.to_thread(client.close)

    async def close(self) -> None:
        ending = asyncio.gather(*(job.close() for job in self.jobs))
        for replica, job in enumerate(self.jobs):
            if job.state.phase != "failed":
                await self.leave(replica)
        await ending


def test_requests_reach_both_replicas_and_tokens_come_back() -> None:
    """Tokens, stop and reports pass; the end tells all ranks to shut down and waits for them to leave."""

    async def story() -> None:
        pair = Pair()
        await pair.start()
        await pair.ready()
        assert json.loads(pair.clients[1][1].config) == deploy.to_json(DEPLOYMENT)
        for replica, listener in enumerate(pair.listeners):
            client = pair.clients[replica][0]
            pair.jobs[replica].submit(request("one"))
            (there,) = await pair.asked(replica)
            assert isinstance(there, Submit)
            name = there.request.request_id
            client.send_tokens([TokensEvent(name, 0, 0, (5, 6))])
            pair.jobs[replica].stop_choice(name, 0, 1)
            assert await pair.asked(replica) == [StopChoice(name, 0, 1)]
            client.send_tokens([TokensEvent(name, 0, 2, (7,), "stop")])
            await listener.until(lambda: listener.finished)  # noqa: B023
            assert listener.tokens[name, 0] == [5, 6, 7]
            await listener.until(lambda: listener.reports.keys() >= {0, 1})  # noqa: B023
        await pair.close()
        assert [job.state.phase for job in pair.jobs] == ["stopped", "stopped"], "leaving in order is no failure"
        assert (pair.lost_channel, pair.failures) == ([], [])

    asyncio.run(story())


@pytest.mark.parametrize("words", ["", "ValueError: no such layer"])
def test_a_rank_that_leaves_is_named(words: str) -> None:
    """What its replica was asked is lost, with its own words as the reason if it had any; the other replica serves, and
    the ranks that are left get Shutdown before the run ends."""

    async def story() -> None:
        pair = Pair()
        await pair.start()
        await pair.ready()
        for job, listener in zip(pair.jobs, pair.listeners, strict=True):
            job.submit(request("one"))
            listener.in_flight["one"] = Asked(job.launch, {0})
        await pair.asked(1)
        first, second = pair.clients[1]
        if words:
            await asyncio.to_thread(second.fail, words)
        await asyncio.to_thread(second.close)
        assert await asyncio.to_thread(first.poll, 120.0) == [Shutdown()]
        await asyncio.to_thread(first.close)
        await pair.listeners[1].until(lambda: pair.jobs[1].state.phase == "failed")
        reason = pair.jobs[1].state.reason
        assert reason.startswith("rank 1 (node ")
        assert (words or "exited without reporting an error") in reason
        assert [(at, one.culprit.rank) for at, one in pair.failures] == [(1, 1)]
        assert [lost[0] for lost in pair.listeners[1].lost] == [["one"]]
        assert (is_ready(pair.jobs[0]), pair.listeners[0].lost) == (True, [])
        await pair.close()

    asyncio.run(story())


def test_ranks_that_have_read_different_weights_never_answer() -> None:
    async def story() -> None:
        pair = Pair()
        await pair.start()
        await pair.load(differs=(1, 1))
        await pair.leave(1)
        await pair.listeners[1].until(lambda: pair.jobs[1].state.phase == "failed")
        assert "weights is other there and feed elsewhere" in pair.jobs[1].state.reason
        await pair.listeners[0].until(lambda: is_ready(pair.jobs[0]))
        await pair.close()

    asyncio.run(story())


class One:
    """The bootstrap of a world of one; `rounds`: set after the third gather."""

    def __init__(self) -> None:
        self.payloads: list[bytes] = []
        self.rounds = threading.Event()

    def all_gather(self, payload: bytes) -> list[bytes]:
        self.payloads.append(payload)
        if len(self.payloads) == 3:
            self.rounds.set()
        return [payload]


ALONE = deploy.load(CONFIGS / "demo.yaml", ["parallel.tensor_parallel_size=1"])
FIRST = Identity(size=1, rank=0, local_rank=0, local_size=1, node="here", launcher="openmpi")


def test_no_rank_works_for_a_run_that_needs_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run whose lines are all answered starts no replica, and no rank loads the model."""

    def unexpected(*_: Any) -> None:
        raise AssertionError("the rank works")

    async def drive(jobs: Any) -> int:
        return 0 if [job.state.phase for job in jobs] == ["stopped"] else 1

    monkeypatch.setattr(outer_job, "start_bootstrap", lambda deployment, identity: One())
    monkeypatch.setattr(outer_job, "run_rank", unexpected)
    assert run_inside(ALONE, FIRST, lambda replica, failure: None, drive) == 0


def test_ranks_wait_in_rounds_while_rank_0_reads_its_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """For longer than one gather of a store may take."""
    one = One()

    async def drive(jobs: Any) -> int:
        await asyncio.to_thread(one.rounds.wait)
        return 0

    monkeypatch.setattr(outer_job, "start_bootstrap", lambda deployment, identity: one)
    monkeypatch.setattr(outer_job, "MEET_S", 0.01)
    assert run_inside(ALONE, FIRST, lambda replica, failure: None, drive) == 0
    assert one.payloads[1:3] == [b"null", b"null"]
    assert one.payloads[-1] == b"[]"


STUCK = """
import sys, threading
from laddertron.launchers.rank import outer_job
from test_outer import ALONE, FIRST, One
async def drive(jobs):
    bundle = threading.Timer(0.5, print, ("bundle written",), {"flush": True})
    bundle.start()
    return 3
class Stuck(One):
    def all_gather(self, payload):
        if self.payloads:
            threading.Event().wait()  # for a rank that never comes
        return super().all_gather(payload)
outer_job.start_bootstrap = lambda deployment, identity: Stuck()
outer_job.run_inside(ALONE, FIRST, lambda replica, failure: None, drive)
"""


def test_a_run_that_failed_ends_although_rank_0_waits_for_another() -> None:
    """With its own status, after what the failure writes."""
    folders = [
        str(Path(__file__).parent),
        str(Path(__file__).parents[1] / "job"),
        str(Path(__file__).parents[2] / "helpers"),
    ]
    script = f"import sys; sys.path[:0] = {folders}\n{STUCK}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=HANG_S)
    assert (done.returncode, done.stdout) == (3, "bundle written\n"), done.stderr
