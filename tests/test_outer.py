"""Several replicas in one outer mpirun, without MPI: rank 0's jobs here, another replica's first rank as a client of
the real control channel."""

from __future__ import annotations

import asyncio
from pathlib import Path

from job_tools import Listener, request
from laddertron.engine import config as deploy
from laddertron.engine.request import ModelLimits, TokensEvent
from laddertron.launchers.control_client import ControlClient
from laddertron.launchers.local import LocalJob
from laddertron.launchers.messages import Beat, Command, Ready, Shutdown, StopChoice, Submit
from laddertron.launchers.outer import Replicas
from laddertron.launchers.rank_status import Status
from laddertron.topology.identity import Identity

CONFIGS = Path(__file__).parent.parent / "configs"
LIMITS = ModelLimits(max_model_len=64, vocab_size=32, max_num_seqs=4, kv_tokens=256)


class Pair:
    """Two replicas of one rank: the first in this process, the second a client."""

    def __init__(self) -> None:
        deployment = deploy.load(CONFIGS / "demo.yaml", ["parallel.tensor_parallel_size=1", "parallel.replicas=2"])
        self.local = LocalJob(Status(), Identity(2, 0, 0, 2, "a", "openmpi"))
        self.replicas = Replicas(deployment, self.local, "127.0.0.1")
        self.group, self.listener = self.replicas.group, Listener()
        self.lost_channel: list[str] = []

    async def start(self) -> None:
        address = await self.replicas.start()

        def connect() -> ControlClient:
            secret, ends = self.replicas.secret, self.lost_channel.append
            return ControlClient(address, secret, 1, 0, Beat, watchdog=False, end=ends)

        self.client = await asyncio.to_thread(connect)
        await self.group.start(self.listener)
        self.local.deliver(Ready(LIMITS))
        self.client.send_state(Ready(LIMITS))
        await self.listener.until(lambda: self.group.state.phase == "ready")

    async def asked(self) -> list[Command]:
        return await asyncio.to_thread(self.client.poll, 120.0)


def test_requests_reach_both_replicas_and_tokens_come_back() -> None:
    """Ready once both are; two requests go one each way; the other replica's tokens, stop and reports pass; a closed
    group tells it to shut down and waits for it to leave."""

    async def story() -> None:
        pair = Pair()
        await pair.start()
        assert pair.client.config == deploy.digest(
            deploy.load(CONFIGS / "demo.yaml", ["parallel.tensor_parallel_size=1", "parallel.replicas=2"])
        )
        pair.group.submit(request("one"))
        pair.group.submit(request("two"))
        assert [type(c) for c in pair.local.channel.poll()] == [Submit]
        (there,) = await pair.asked()
        assert isinstance(there, Submit)
        name = there.request.request_id
        pair.client.send_tokens([TokensEvent(name, 0, 0, (5, 6))])
        pair.group.stop_choice(name, 0, 1)
        assert await pair.asked() == [StopChoice(name, 0, 1)]
        pair.client.send_tokens([TokensEvent(name, 0, 2, (7,), "stop")])
        await pair.listener.until(lambda: (name, 0) in pair.listener.finished and 1 in pair.listener.reports)
        assert pair.listener.tokens[name, 0] == [5, 6, 7]
        closing = asyncio.create_task(pair.group.close())
        assert await pair.asked() == [Shutdown()]
        await asyncio.to_thread(pair.client.close)
        await closing
        assert isinstance(pair.local.channel.poll()[-1], Shutdown)
        assert pair.lost_channel == []

    asyncio.run(story())


def test_a_replica_that_leaves_or_fails_fails_the_group() -> None:
    """What it was asked is lost, with its own words as the reason if it had any."""

    async def story(words: str) -> None:
        pair = Pair()
        await pair.start()
        pair.group.submit(request("one"))
        pair.group.submit(request("two"))
        await pair.asked()
        if words:
            await asyncio.to_thread(pair.client.fail, words)
        await asyncio.to_thread(pair.client.close)
        await pair.listener.until(lambda: bool(pair.listener.lost))
        await pair.group.close()
        reason = f"replica 1: {words or 'its first rank left'}"
        assert (pair.group.state.phase, pair.group.state.reason) == ("failed", reason)
        assert pair.listener.lost == [(["two"], reason, 1)]

    asyncio.run(story(""))
    asyncio.run(story("rank 1 on b: ValueError: the deployment on b is another than rank 0's"))
