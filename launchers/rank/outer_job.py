"""`laddertron run` inside an outer mpirun, srun or torchrun. Rank 0 runs the driver's event loop in a second thread,
which controls every rank over its replica's control channel. A lost rank ends the whole mpirun; a later run resumes.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import NoReturn, TypeVar

from ...engine.config import load as deploy
from ...engine.config.schema import Deployment
from ...engine.job import EngineJob
from ...models.config.json_fields import Refusal
from ...topology.comm.bootstrap import Bootstrap
from ...topology.placement.identity import Identity
from ..control.control_client import ControlClient
from ..job.detect import JobFailure
from ..job.fleet import job_options
from ..job.job_launch import LEAVING_S, OuterRanks
from ..job.replica import JobHooks, Replica, ReplicaSpec
from .network import local_address
from .rank import run_rank, start_bootstrap
from .rank_status import Status
from .shared_memory import require_shared_memory
from .worker import report

MEET_S, SILENCE_S = 30.0, 60.0
"""For which the ranks wait in one gather for the channels, and then for a message of their owner."""
REPORT_S = 3 * LEAVING_S
"""For which a failed rank waits for rank 0's report of the run."""
T = TypeVar("T")
Drive = Callable[[Sequence[EngineJob]], Awaitable[int]]


class DeploymentDiffers(Refusal):
    """Ranks were started with different deployments."""


def outer_replicas(
    deployment: Deployment,
    hosts: Sequence[str],
    failed: Callable[[int, JobFailure], object],
    meet: Callable[[int, str, bytes], None],
) -> list[Replica]:
    """The replicas of an outer mpirun. hosts: by rank; `failed` is called with a replica's failure, `meet` with the
    address and secret of its channel. Raises ValueError."""
    config, size = _config(deployment), deployment.parallel.world.replica_size
    address = deployment.daemon.control_host or local_address(deployment, hosts)

    def spec(replica: int) -> ReplicaSpec:
        seats = tuple(hosts[replica * size : (replica + 1) * size])

        def ranks(excluded: frozenset[str]) -> OuterRanks:
            if excluded:
                raise ValueError(
                    f"no host replaces {', '.join(sorted(excluded))}: an outer launcher has started the ranks"
                )
            return OuterRanks(seats, partial(meet, replica))

        options = job_options(deployment, replica, address, restart=False)
        # the owner's thread shares rank 0's interpreter, which imports and the start of a device hold up
        patient = replace(options.timeouts, silence_s=max(options.timeouts.silence_s, SILENCE_S))
        options = replace(options, timeouts=patient)
        return ReplicaSpec(ranks, config, options, JobHooks(partial(failed, replica)))

    return [Replica(spec(replica)) for replica in range(deployment.parallel.replicas)]


def _config(deployment: Deployment) -> str:
    return json.dumps(deploy.to_json(deployment))


class _Driver:
    """Runs `drive` on an event loop in its own thread."""

    def __init__(
        self,
        deployment: Deployment,
        hosts: Sequence[str],
        failed: Callable[[int, JobFailure], object],
        drive: Drive,
    ) -> None:
        self._drive = drive
        self._channels: dict[int, str] = {}
        self.channels: Future[list[str]] = Future()
        """By replica, `address secret`; [] if `drive` ended without starting each."""
        self._jobs = outer_replicas(deployment, hosts, failed, self._meet)
        self._thread = threading.Thread(target=self._run, name="driver")
        self._thread.start()

    def _meet(self, replica: int, address: str, secret: bytes) -> None:
        self._channels[replica] = f"{address} {secret.hex()}"
        if len(self._channels) == len(self._jobs):
            self.channels.set_result([self._channels[at] for at in range(len(self._jobs))])

    def published(self, timeout_s: float) -> list[str] | None:
        """`channels`, None if they are not known after so long."""
        try:
            return self.channels.result(timeout_s)
        except TimeoutError:
            return None

    def join(self) -> None:
        """Returns once the run has ended well."""
        self._thread.join()

    def _run(self) -> None:
        code = 1
        try:
            code = asyncio.run(self._work())
        except BaseException:
            traceback.print_exc()
        if code != 0:
            _exit(code)  # the main thread may wait for another rank, for ever
        if not self.channels.done():
            self.channels.set_result([])

    async def _work(self) -> int:
        try:
            return await self._drive(self._jobs)
        finally:
            for job in self._jobs:
                await job.close()


def run_inside(
    deployment: Deployment, identity: Identity, failed: Callable[[int, JobFailure], object], drive: Drive
) -> int:
    """Runs this rank in an outer mpirun; rank 0 also runs `drive`. Returns 0, or exits with another status. `failed`:
    called with a replica's failure."""
    return among_ranks(identity, lambda: _run_rank(deployment, identity, failed, drive))


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


def _run_rank(
    deployment: Deployment, identity: Identity, failed: Callable[[int, JobFailure], object], drive: Drive
) -> int:
    require_shared_memory(identity, os.environ)
    bootstrap = start_bootstrap(deployment, identity)
    hosts = [name.decode() for name in bootstrap.all_gather(identity.node.encode())]
    driver = _Driver(deployment, hosts, failed, drive) if identity.rank == 0 else None
    channels: list[str] | None = None
    while channels is None:  # rank 0 may read finished lines for longer than a bootstrap waits
        own = None if driver is None else driver.published(MEET_S)
        channels = json.loads(bootstrap.all_gather(json.dumps(own).encode())[0])
    works = not channels or _work_for(deployment, identity, channels, bootstrap)
    if driver is not None:
        driver.join()
    elif not works:
        threading.Event().wait(REPORT_S)  # rank 0 reports the reason, and then its exit ends this process
        _exit(1)
    return 0


def _exit(code: int) -> NoReturn:
    """Ends this process, and with it the outer mpirun: other ranks may never reach MPI_Finalize."""
    for thread in threading.enumerate():
        if not thread.daemon and thread not in (threading.current_thread(), threading.main_thread()):
            thread.join(LEAVING_S)  # it writes the failure's bundle
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _work_for(deployment: Deployment, identity: Identity, channels: Sequence[str], bootstrap: Bootstrap) -> bool:
    """Runs the rank for the owner of its replica until its Shutdown; False if it failed, which it has reported."""
    replica, place = deployment.parallel.world.replica_of(identity.rank)
    address, text = channels[replica].split()
    secret, status = bytes.fromhex(text), Status()
    client = ControlClient(address, secret, place, identity.local_rank, status.beat, status.dump)
    works = True
    try:
        if client.config != _config(deployment):
            raise DeploymentDiffers(
                f"the deployment on {identity.node} is another than rank 0's: use the same file and --set on each rank"
            )
        run_rank(deployment, identity, client, status, secret, bootstrap)
    except BaseException as error:
        report(error, client)
        while not client.shutdown_announced:
            client.poll(None)
        works = False
    client.close()
    return works
