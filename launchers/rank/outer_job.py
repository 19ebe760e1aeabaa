"""`laddertron run` inside an outer mpirun, srun or torchrun. Rank 0 runs the driver's event loop in a second thread,
which controls the first rank of every replica over the control channel. A lost rank ends the whole mpirun; a later run
resumes.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from ... import __version__
from ...engine.config import load as deploy
from ...engine.config.schema import Deployment
from ...engine.identity import ModelIdentity, from_owner
from ...engine.job import Culprit, EngineJob, JobListener, JobState, RankHeartbeat
from ...engine.request import Request
from ...models.config.json_fields import Refusal
from ...topology.comm.bootstrap import Bootstrap
from ...topology.placement.identity import Identity
from ..compose.ports import ports_at
from ..control import messages
from ..control.control import ControlServer, new_secret
from ..control.control_client import ControlClient
from ..job.detect import SAME_FILES
from .network import local_address
from .rank import run_rank, start_bootstrap
from .rank_status import Status
from .shared_memory import require_shared_memory

LEAVING_S = 10.0
LOOPBACK = "127.0.0.1"
T = TypeVar("T")
Drive = Callable[[Sequence[EngineJob]], Awaitable[int]]


class ReplicaJob:
    """EngineJob of one replica over its first rank's connection; see engine/job.py. `send` sends messages to that rank,
    `dump` returns its part of `bundle`."""

    launch = 1

    def __init__(
        self, send: Callable[[messages.ServerMessage], None], dump: Callable[[], dict[str, Any]] = dict
    ) -> None:
        self._send, self._dump = send, dump
        self.state = JobState("stopped")
        self._listener: JobListener | None = None
        self._node, self._pid, self._closed = "", 0, False
        self.identity: ModelIdentity | None = None

    async def start(self, listener: JobListener) -> None:
        self._listener = listener  # the rank may have reported a state already
        self._set(JobState("starting") if self.state.phase == "stopped" else self.state)

    def submit(self, request: Request) -> None:
        if self.state.phase != "ready":
            raise RuntimeError(f"the job is {self.state.phase}, it takes requests only when ready")
        self._send(messages.Submit(request))

    def cancel(self, request_id: str) -> None:
        self._send(messages.Cancel(request_id))

    def stop_choice(self, request_id: str, choice: int, n_tokens: int) -> None:
        self._send(messages.StopChoice(request_id, choice, n_tokens))

    async def drain(self, timeout_s: float) -> bool:
        if self._listener is None:
            return True
        try:
            async with asyncio.timeout(timeout_s):
                await self._listener.idle(self.launch)
        except TimeoutError:
            return False
        return self.state.phase != "failed"

    async def close(self) -> None:
        self._closed = True
        self._send(messages.Shutdown())

    async def bundle(self) -> dict[str, Any]:
        return {"dumps": {"0": self._dump()}}

    def take(self, message: messages.RankMessage) -> None:
        match message:
            case messages.Hello():
                self._node, self._pid = message.hostname, message.pid
            case messages.Tokens(events):
                if self._listener is not None:
                    self._listener.on_tokens(list(events))
            case messages.Running(started, parked):
                if self._listener is not None:
                    self._listener.on_running(started, parked)
            case messages.Beat():
                if self._listener is not None:
                    report = RankHeartbeat(0, self._node, self._pid, message.step, time.time(), message.rows)
                    self._listener.on_report(report)
            case messages.Loading(_, detail):
                self._set(JobState("loading", reason=detail))
            case messages.Announce(digests, samples, name):
                differs = self.identity and from_owner(self.identity, 0, digests, samples)
                if differs:
                    self.fail(
                        f"{name or f'rank 0 on {self._node}'}: {differs.text} from the model of the run: {SAME_FILES}"
                    )
            case messages.Ready(limits) if self.state.phase != "failed":
                self._set(JobState("ready", limits=limits))
            case messages.Failure(text):
                self.fail(text)
            case _:
                pass

    def gone(self, reason: str) -> None:
        if not self._closed and self.state.phase != "failed":  # a failed rank has reported the reason
            self.fail(f"its first rank left{f': {reason}' if reason else ''}")

    def fail(self, reason: str) -> None:
        self._set(JobState("failed", reason=reason, culprit=Culprit(0, self._node), exit_code=1))
        if self._listener is not None:
            self._listener.on_lost(self.launch, reason, by_request=True)

    def _set(self, state: JobState) -> None:
        self.state = state
        if self._listener is not None:
            self._listener.on_state(state)


class Replicas:
    """All replicas (`jobs`), on rank 0's event loop."""

    def __init__(self, deployment: Deployment, host: str, dump: Callable[[], dict[str, Any]] = dict) -> None:
        count = deployment.parallel.replicas
        self.secret = new_secret()
        self._server = ControlServer(
            self,
            self.secret,
            messages.Welcome(deploy.digest(deployment), 0, count, __version__),
            host,
            ports=ports_at(deployment, host),
        )
        send = self._server.send
        self.jobs = [ReplicaJob(partial(send, rank=rank), dump if rank == 0 else dict) for rank in range(count)]

    async def start(self) -> str:
        """Starts the channel and returns its address. Raises OSError."""
        return await self._server.start()

    async def end(self) -> None:
        """Shuts down every engine and waits for the ranks to disconnect."""
        for job in self.jobs:
            await job.close()
        await self._server.all_gone(LEAVING_S)
        await self._server.close()

    def on_message(self, rank: int, message: messages.RankMessage) -> None:
        self.jobs[rank].take(message)

    def on_gone(self, rank: int, reason: str) -> None:
        self.jobs[rank].gone(reason)


class _Driver:
    """Runs `drive` on an event loop in its own thread; `meeting`: the channel's address and secret."""

    def __init__(self, deployment: Deployment, host: str, status: Status, drive: Drive) -> None:
        self._deployment, self._host, self._status, self._drive = deployment, host, status, drive
        self.meeting: Future[str] = Future()
        self.exit_status = 1
        self._thread = threading.Thread(target=self._run, name="driver")
        self._thread.start()

    def join(self, timeout_s: float | None = None) -> int:
        self._thread.join(timeout_s)
        return self.exit_status

    def _run(self) -> None:
        try:
            self.exit_status = asyncio.run(self._work())
        except BaseException as error:
            if not self.meeting.done():
                self.meeting.set_exception(error)
            else:
                traceback.print_exc()

    async def _work(self) -> int:
        replicas = Replicas(self._deployment, self._host, self._status.dump)
        self.meeting.set_result(f"{await replicas.start()} {replicas.secret.hex()}")
        try:
            return await self._drive(replicas.jobs)
        finally:
            await replicas.end()


def run_inside(deployment: Deployment, identity: Identity, drive: Drive) -> int:
    """Runs this rank in an outer mpirun; rank 0 also runs `drive`. Returns the exit status; an error exits at once
    with 1."""
    return among_ranks(identity, lambda: _run_rank(deployment, identity, drive))


def among_ranks(identity: Identity, work: Callable[[], T]) -> T:
    """Returns the result of `work`. If it raises, exits at once with status 1, which ends the outer mpirun."""
    try:
        return work()
    except Refusal as refusal:
        sys.stderr.write(f"laddertron: rank {identity.rank} on {identity.node}: {refusal}\n")
    except BaseException:
        sys.stderr.write(f"laddertron: rank {identity.rank} on {identity.node} failed:\n{traceback.format_exc()}")
    sys.stderr.flush()
    os._exit(1)


def _run_rank(deployment: Deployment, identity: Identity, drive: Drive) -> int:
    status, several = Status(), deployment.parallel.replicas > 1
    bootstrap: Bootstrap | None = None
    host = LOOPBACK
    if several:
        require_shared_memory(identity, os.environ)
        bootstrap = start_bootstrap(deployment, identity)
        nodes = [name.decode() for name in bootstrap.all_gather(identity.node.encode())]
        host = local_address(deployment, nodes) if identity.rank == 0 else ""
    driver = _Driver(deployment, host, status, drive) if identity.rank == 0 else None
    meeting = driver.meeting.result() if driver is not None else ""
    if bootstrap is not None:
        meeting = bootstrap.all_gather(meeting.encode())[0].decode()
    replica, place = deployment.parallel.world.replica_of(identity.rank)
    if place != 0:
        run_rank(deployment, identity, None, status, bootstrap=bootstrap, reports_for_all=True)
        return 0
    try:
        _lead(deployment, identity, status, bootstrap, replica, meeting)
    except BaseException:
        if driver is not None:
            driver.join(LEAVING_S)  # it reports the lost lines
        raise
    code = driver.join() if driver is not None else 0
    if several and code != 0:  # the other ranks may never reach MPI_Finalize
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _lead(
    deployment: Deployment, identity: Identity, status: Status, bootstrap: Bootstrap | None, replica: int, meeting: str
) -> None:
    address, secret = meeting.split()
    client = ControlClient(address, bytes.fromhex(secret), replica, identity.local_rank, status.beat, status.dump)
    try:
        if client.config != deploy.digest(deployment):
            raise ValueError(f"the deployment on {identity.node} is another than rank 0's: use the same file and --set")
        run_rank(deployment, identity, client, status, bootstrap=bootstrap, reports_for_all=True)
    except BaseException as error:
        client.fail(f"rank {identity.rank} on {identity.node}: {type(error).__name__}: {error}")
        raise
    finally:
        client.close()
