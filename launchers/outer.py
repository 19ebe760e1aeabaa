"""Several replicas in one outer mpirun: rank 0 leads its own and gives the other replicas' first ranks their requests
over a control channel between them. Any rank lost ends the whole mpirun, and so every replica; the files are what goes
on. Called by launchers/commands/run.py.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Awaitable, Callable
from concurrent.futures import Future

from .. import __version__
from ..engine import config as deploy
from ..engine.config_schema import Deployment
from ..engine.daemon.job import EngineJob
from ..engine.jobgroup import JobGroup
from ..topology.bootstrap import Bootstrap
from ..topology.identity import Identity
from .control import ControlServer, new_secret
from .control_client import ControlClient
from .local import ChannelJob, LocalJob, lead
from .messages import Beat, DumpReply, Failure, Hello, RankMessage, Tokens, Welcome
from .rank import bootstrap_for, local_address, run_rank
from .rank_status import Status

LEAVING_S = 10.0


class RemoteJob(ChannelJob):
    """EngineJob of a replica whose first rank is another process."""

    _pid = 0

    def take(self, message: RankMessage) -> None:
        """What that rank says, on the event loop."""
        match message:
            case Hello():
                self._node, self._pid = message.hostname, message.pid
            case Tokens(events):
                self.deliver(list(events))
            case Beat():
                self.report(self._pid, message)
            case Failure(text):
                self.engine_ended(text)
            case DumpReply():
                pass
            case _:
                self.deliver(message)


class Replicas:
    """All replicas as one EngineJob (`group`), on rank 0's event loop."""

    def __init__(self, deployment: Deployment, local: LocalJob, host: str) -> None:
        count = deployment.parallel.replicas
        self.secret = new_secret()
        self._server = ControlServer(self, self.secret, Welcome(_agreed(deployment), 0, count, __version__), host)
        self._remote = {index: self._remote_job(index) for index in range(1, count)}
        self._closing = False
        self.group = _Group([local, *self._remote.values()], deployment.parallel.tensor_parallel_size, self)

    def _remote_job(self, index: int) -> RemoteJob:
        return RemoteJob(lambda command: self._server.send(command, index), "")

    async def start(self) -> str:
        """The address of the channel. Raises OSError."""
        return await self._server.start()

    async def end(self) -> None:
        """After the jobs were told to shut down: waits for them to leave."""
        self._closing = True
        await self._server.all_gone(LEAVING_S)
        await self._server.close()

    def on_message(self, rank: int, message: RankMessage) -> None:
        if rank in self._remote:
            self._remote[rank].take(message)

    def on_gone(self, rank: int, reason: str) -> None:
        # what failed has said why itself
        if rank in self._remote and not self._closing and self._remote[rank].state.phase != "failed":
            self._remote[rank].engine_ended(f"its first rank left{f': {reason}' if reason else ''}")


class _Group(JobGroup):
    def __init__(self, jobs: list[EngineJob], ranks_each: int, replicas: Replicas) -> None:
        super().__init__(jobs, ranks_each)
        self._replicas = replicas

    async def close(self) -> None:
        await super().close()
        await self._replicas.end()


def run_replicas(deployment: Deployment, identity: Identity, drive: Callable[[EngineJob], Awaitable[int]]) -> int:
    """This rank's part of an outer mpirun with several replicas, as `local.run_inside` is for one."""
    status = Status()
    size = deployment.parallel.tensor_parallel_size
    try:
        bootstrap = bootstrap_for(identity)
        nodes = [name.decode() for name in bootstrap.all_gather(identity.node.encode())]
        if identity.rank == 0:
            address = local_address(deployment, nodes)
            code = _lead_all(deployment, identity, status, bootstrap, address, drive)
            if code != 0:  # what is left of the others may never come to MPI's end
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
            return code
        meeting = bootstrap.all_gather(b"")[0].decode().split()
        replica, place = divmod(identity.rank, size)
        if place != 0:
            run_rank(deployment, identity, None, status, bootstrap=bootstrap)
        else:
            _follow(deployment, identity, status, bootstrap, replica, meeting)
        return 0
    except BaseException:
        sys.stderr.write(f"laddertron: rank {identity.rank} on {identity.node} failed:\n{traceback.format_exc()}")
        sys.stderr.flush()
        os._exit(1)


def _lead_all(
    deployment: Deployment,
    identity: Identity,
    status: Status,
    bootstrap: Bootstrap,
    host: str,
    drive: Callable[[EngineJob], Awaitable[int]],
) -> int:
    meeting: Future[bytes] = Future()

    async def work(local: LocalJob) -> int:
        try:
            replicas = Replicas(deployment, local, host)
            address = await replicas.start()
            meeting.set_result(f"{address} {replicas.secret.hex()}".encode())
        except BaseException as error:
            meeting.set_exception(error)
            raise
        return await drive(replicas.group)

    def meet() -> Bootstrap:
        bootstrap.all_gather(meeting.result())
        return bootstrap

    return lead(deployment, identity, status, work, meet)


def _follow(
    deployment: Deployment,
    identity: Identity,
    status: Status,
    bootstrap: Bootstrap,
    replica: int,
    meeting: list[str],
) -> None:
    """The first rank of another replica."""
    address, secret = meeting
    client = ControlClient(address, bytes.fromhex(secret), replica, identity.local_rank, status.beat, status.dump)
    try:
        if client.config != _agreed(deployment):
            raise ValueError(f"the deployment on {identity.node} is another than rank 0's: use the same file and --set")
        run_rank(deployment, identity, client, status, bootstrap=bootstrap)
    except BaseException as error:
        client.fail(f"rank {identity.rank} on {identity.node}: {type(error).__name__}: {error}")
        raise
    client.close()


def _agreed(deployment: Deployment) -> str:
    return deploy.digest(deployment)
