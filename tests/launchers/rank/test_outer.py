"""Replicas in one outer mpirun, without MPI: rank 0's event loop here, each replica's first rank as a client of the
real control channel."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

from job_tools import Listener, request
from laddertron.engine.config import load as deploy
from laddertron.engine.request import ModelLimits, TokensEvent
from laddertron.launchers.control.control_client import ControlClient
from laddertron.launchers.control.messages import Beat, Command, Ready, Shutdown, StopChoice, Submit
from laddertron.launchers.rank.outer_job import LOOPBACK, Replicas

CONFIGS = Path(__file__).parents[3] / "configs"
LIMITS = ModelLimits(max_model_len=64, vocab_size=32, max_num_seqs=4, kv_tokens=256)


DEPLOYMENT = ["parallel.tensor_parallel_size=1", "parallel.replicas=2"]


class Pair:
    """Two replicas of one rank each, both clients."""

    def __init__(self) -> None:
        deployment = deploy.load(CONFIGS / "demo.yaml", DEPLOYMENT)
        self.replicas = Replicas(deployment, LOOPBACK, lambda: {"step": 7})
        self.job, self.listener = self.replicas.job, Listener()
        self.lost_channel: list[str] = []

    async def start(self) -> None:
        """The first replica reports before anybody listens, the second afterwards."""
        address = await self.replicas.start()

        def connect(rank: int) -> ControlClient:
            secret, ends = self.replicas.secret, self.lost_channel.append
            return ControlClient(address, secret, rank, 0, Beat, watchdog=False, end=ends)

        self.clients = [await asyncio.to_thread(connect, rank) for rank in range(2)]
        self.clients[0].send_state(Ready(LIMITS))
        await self.job.start(self.listener)
        self.clients[1].send_state(Ready(LIMITS))
        await self.listener.until(lambda: self.job.state.phase == "ready")

    def has_ended(self, name: str) -> bool:
        return (name, 0) in self.listener.finished

    async def asked(self, replica: int) -> list[Command]:
        return await asyncio.to_thread(self.clients[replica].poll, 120.0)


def test_requests_reach_both_replicas_and_tokens_come_back() -> None:
    """Ready once both are; two requests go one to each; tokens, stop and reports pass; the end tells both to shut down
    and waits for them to leave."""

    async def story() -> None:
        pair = Pair()
        await pair.start()
        assert pair.clients[1].config == deploy.digest(deploy.load(CONFIGS / "demo.yaml", DEPLOYMENT))
        pair.job.submit(request("one"))
        pair.job.submit(request("two"))
        for replica, client in enumerate(pair.clients):
            (there,) = await pair.asked(replica)
            assert isinstance(there, Submit)
            name = there.request.request_id
            client.send_tokens([TokensEvent(name, 0, 0, (5, 6))])
            pair.job.stop_choice(name, 0, 1)
            assert await pair.asked(replica) == [StopChoice(name, 0, 1)]
            client.send_tokens([TokensEvent(name, 0, 2, (7,), "stop")])
            await pair.listener.until(partial(pair.has_ended, name))
            assert pair.listener.tokens[name, 0] == [5, 6, 7]
        await pair.listener.until(lambda: {0, 1} <= set(pair.listener.reports))
        assert await pair.job.bundle() == {"replicas": [{"dumps": {"0": {"step": 7}}}, {"dumps": {"0": {}}}]}
        ending = asyncio.create_task(pair.replicas.end())
        for replica, client in enumerate(pair.clients):
            assert await pair.asked(replica) == [Shutdown()]
            await asyncio.to_thread(client.close)
        await ending
        assert pair.job.state.phase == "ready", "leaving in order is no failure"
        assert pair.lost_channel == []

    asyncio.run(story())


def test_a_replica_that_leaves_or_fails_fails_the_group() -> None:
    """What it was asked is lost, with its own words as the reason if it had any."""

    async def story(words: str) -> None:
        pair = Pair()
        await pair.start()
        pair.job.submit(request("one"))
        pair.job.submit(request("two"))
        await pair.asked(1)
        if words:
            await asyncio.to_thread(pair.clients[1].fail, words)
        await asyncio.to_thread(pair.clients[1].close)
        await pair.listener.until(lambda: bool(pair.listener.lost))
        reason = f"replica 1: {words or 'its first rank left'}"
        assert (pair.job.state.phase, pair.job.state.reason) == ("failed", reason)
        assert pair.listener.lost == [(["two"], reason, 1)]
        await asyncio.to_thread(pair.clients[0].close)
        await pair.replicas.end()

    asyncio.run(story(""))
    asyncio.run(story("rank 1 on b: ValueError: the deployment on b is another than rank 0's"))
