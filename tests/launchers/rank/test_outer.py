"""Replicas in one outer mpirun, without MPI: rank 0's event loop here, each replica's first rank as a client of the
real control channel."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

from job_tools import Asked, Listener, request
from laddertron.engine.config import load as deploy
from laddertron.engine.request import ModelLimits, TokensEvent
from laddertron.launchers.control.control_client import ControlClient
from laddertron.launchers.control.messages import Beat, Command, Ready, Running, Shutdown, StopChoice, Submit
from laddertron.launchers.rank.outer_job import LOOPBACK, ReplicaJob, Replicas

CONFIGS = Path(__file__).parents[3] / "configs"
LIMITS = ModelLimits(max_model_len=64, vocab_size=32, max_num_seqs=4, kv_tokens=256)


DEPLOYMENT = ["parallel.tensor_parallel_size=1", "parallel.replicas=2"]


def is_ready(job: ReplicaJob) -> bool:
    return job.state.phase == "ready"


class Pair:
    """Two replicas of one rank each, both clients."""

    def __init__(self) -> None:
        deployment = deploy.load(CONFIGS / "demo.yaml", DEPLOYMENT)
        self.replicas = Replicas(deployment, LOOPBACK, lambda: {"step": 7})
        self.jobs, self.listeners = self.replicas.jobs, (Listener(), Listener())
        self.lost_channel: list[str] = []

    async def start(self) -> None:
        """The first replica reports before anybody listens, the second afterwards."""
        address = await self.replicas.start()

        def connect(rank: int) -> ControlClient:
            secret, ends = self.replicas.secret, self.lost_channel.append
            return ControlClient(address, secret, rank, 0, Beat, watchdog=False, end=ends)

        self.clients = [await asyncio.to_thread(connect, rank) for rank in range(2)]
        self.clients[0].send_state(Ready(LIMITS))
        for job, listener in zip(self.jobs, self.listeners, strict=True):
            await job.start(listener)
        self.clients[1].send_state(Ready(LIMITS))
        for job, listener in zip(self.jobs, self.listeners, strict=True):
            await listener.until(partial(is_ready, job))

    def has_ended(self, replica: int) -> bool:
        return bool(self.listeners[replica].finished)

    async def asked(self, replica: int) -> list[Command]:
        return await asyncio.to_thread(self.clients[replica].poll, 120.0)


def test_requests_reach_both_replicas_and_tokens_come_back() -> None:
    """Tokens, stop and reports pass; the end tells both to shut down and waits for them to leave."""

    async def story() -> None:
        pair = Pair()
        await pair.start()
        assert pair.clients[1].config == deploy.digest(deploy.load(CONFIGS / "demo.yaml", DEPLOYMENT))
        for replica, client in enumerate(pair.clients):
            pair.jobs[replica].submit(request("one"))
            (there,) = await pair.asked(replica)
            assert isinstance(there, Submit)
            name = there.request.request_id
            client.send_tokens([TokensEvent(name, 0, 0, (5, 6))])
            pair.jobs[replica].stop_choice(name, 0, 1)
            assert await pair.asked(replica) == [StopChoice(name, 0, 1)]
            client.send_tokens([TokensEvent(name, 0, 2, (7,), "stop")])
            await pair.listeners[replica].until(partial(pair.has_ended, replica))
            assert pair.listeners[replica].tokens[name, 0] == [5, 6, 7]
            await pair.listeners[replica].until(lambda: pair.listeners[replica].reports)  # noqa: B023
            assert await pair.jobs[replica].bundle() == {"dumps": {"0": {} if replica else {"step": 7}}}
        ending = asyncio.create_task(pair.replicas.end())
        for replica, client in enumerate(pair.clients):
            assert await pair.asked(replica) == [Shutdown()]
            await asyncio.to_thread(client.close)
        await ending
        assert all(is_ready(job) for job in pair.jobs), "leaving in order is no failure"
        assert pair.lost_channel == []

    asyncio.run(story())


def test_a_replica_that_leaves_has_failed() -> None:
    """What it was asked is lost, with its own words as the reason if it had any."""

    async def story(words: str) -> None:
        pair = Pair()
        await pair.start()
        for job, listener in zip(pair.jobs, pair.listeners, strict=True):
            job.submit(request("one"))
            listener.in_flight["one"] = Asked(job.launch, {0})
        await pair.asked(1)
        pair.clients[1].send_state(Running(("one",)))
        if words:
            await asyncio.to_thread(pair.clients[1].fail, words)
        await asyncio.to_thread(pair.clients[1].close)
        listener, reason = pair.listeners[1], words or "its first rank left"
        await listener.until(lambda: bool(listener.lost))
        assert (pair.jobs[1].state.phase, pair.jobs[1].state.reason) == ("failed", reason)
        assert listener.lost == [(["one"], reason, 1)]
        assert (is_ready(pair.jobs[0]), pair.listeners[0].lost) == (True, [])
        await asyncio.to_thread(pair.clients[0].close)
        await pair.replicas.end()

    asyncio.run(story(""))
    asyncio.run(story("rank 1 on b: ValueError: the deployment on b is another than rank 0's"))
