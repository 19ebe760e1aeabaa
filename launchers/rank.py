"""One rank's life: find the group, load, step until told to end. The same under a daemon, `run` and an outer mpirun.

Takes the resolved deployment and, on the ranks that have one, a channel to whoever owns the job. Decides nothing about
tokens. Called by launchers/worker.py and launchers/local.py.
"""

from __future__ import annotations

import gc
import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..engine import config as deploy
from ..engine.config_schema import Deployment
from ..engine.engine import Engine, Progress, follow
from ..engine.request import ModelLimits, TokensEvent
from ..engine.scheduler import Scheduler
from ..topology.bootstrap import Bootstrap, MpiBootstrap, StoreBootstrap, open_store
from ..topology.emulated import Emulation
from ..topology.groups import CommOptions, Communicator, connect
from ..topology.identity import Identity
from ..topology.interfaces import address_of
from ..topology.layout import observed_layout
from .messages import Announce, Beat, Cancel, Command, Drain, Loading, Ready, Running, Shutdown, StopChoice, Submit

log = logging.getLogger(__name__)

IDLE_S = 0.5
"""How long an idle rank 0 sleeps at most between two looks at its channel; a command wakes it at once."""
SNAPSHOT_S = 0.25


class Channel(Protocol):
    """The owner of the job, as a rank sees it: launchers/control_client.py, or launchers/local.py in one process."""

    def poll(self, timeout: float | None = 0.0) -> list[Command]: ...

    def send_tokens(self, events: Sequence[TokensEvent]) -> None: ...

    def send_state(self, message: Announce | Loading | Ready | Running) -> None: ...


@dataclass(slots=True)
class Status:
    """What the heartbeat reports, in plain attributes that another thread reads at any moment."""

    progress: Progress = field(default_factory=Progress)
    communicator: Communicator | None = None
    scheduler: dict[str, float] = field(default_factory=dict)
    gauges: dict[str, float] = field(default_factory=dict)

    def beat(self) -> Beat:
        p, communicator = self.progress, self.communicator
        since = p.busy_since
        counters = {"steps_total": float(p.step), "step_seconds_total": p.total_seconds}
        collectives = 0
        if communicator is not None:
            collectives = self._add_collectives(communicator, counters)
        gauges = dict(self.gauges)
        for name, value in self.scheduler.items():
            (counters if name.endswith("_total") else gauges)[name] = value
        return Beat(
            step=p.step,
            busy_s=0.0 if since is None else max(0.0, time.monotonic() - since),
            step_tokens=p.step_tokens,
            last_tokens=p.last_tokens,
            last_s=p.last_seconds,
            collective=collectives,
            counters=counters,
            gauges=gauges | {"last_step_timestamp_seconds": p.finished_at},
        )

    @staticmethod
    def _add_collectives(communicator: Communicator, counters: dict[str, float]) -> int:
        count, hidden, exposed = 0, 0.0, 0.0
        for entry in communicator.ledger.entries():
            if entry.op == "all_reduce":
                hidden, exposed = hidden + entry.hidden_s, exposed + entry.waited_s
            count += entry.count
            where = f"{entry.op}/{entry.link}"
            counters[f"collective_hidden_seconds/{where}"] = (
                counters.get(f"collective_hidden_seconds/{where}", 0.0) + entry.hidden_s
            )
            counters[f"collective_exposed_seconds/{where}"] = (
                counters.get(f"collective_exposed_seconds/{where}", 0.0) + entry.waited_s
            )
            counters[f"collective_bytes/{where}"] = counters.get(f"collective_bytes/{where}", 0.0) + entry.bytes
        counters["collective_hidden_seconds"], counters["collective_exposed_seconds"] = hidden, exposed
        return count

    def dump(self) -> dict[str, Any]:
        """For the bundle: the last collectives, oldest first."""
        communicator = self.communicator
        records = [] if communicator is None else communicator.ledger.history()
        names = ("seq", "op", "strategy", "bytes", "start_s", "in_flight_s", "waited_s")
        return {"collectives": [{name: getattr(r, name) for name in names} for r in records]}


def bootstrap_for(identity: Identity) -> Bootstrap:
    """MPI, or torchrun's store."""
    if identity.launcher != "torchrun":
        return MpiBootstrap()
    try:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    except (KeyError, ValueError) as fault:
        raise ValueError(f"torchrun's MASTER_ADDR and MASTER_PORT are missing or broken: {fault}") from fault
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = open_store(address, port, master=identity.rank == 0 and not agent)
    return StoreBootstrap(store, identity.rank, identity.world_size)


def local_address(deployment: Deployment, nodes: Sequence[str]) -> str:
    """What this rank binds to for its group: loopback on one node, else the deployment's interface or the address that
    this host's own name has. Raises ValueError where neither leads anywhere but to loopback."""
    if len(set(nodes)) == 1:
        return "127.0.0.1"
    if deployment.launch.interface is not None:
        return address_of(deployment.launch.interface)
    address = socket.gethostbyname(socket.gethostname())
    if address.startswith("127."):
        raise ValueError(
            f"{socket.gethostname()} resolves to {address}: set launch.interface to the interface that reaches the "
            f"other nodes ({', '.join(sorted(set(nodes)))})"
        )
    return address


def comm_options(deployment: Deployment, address: str, secret: bytes) -> CommOptions:
    keys = deployment.parallel
    emulation = None
    if keys.collective == "emulated":
        emulation = Emulation(
            f"link {keys.emulated_delay * 1e3:g} ms", keys.emulated_delay, float(keys.emulated_bandwidth or "inf")
        )
    options: dict[str, Any] = {} if keys.collective_timeout is None else {"timeout_s": keys.collective_timeout}
    return CommOptions(
        backend=keys.backend,
        collective=keys.collective,
        emulation=emulation,
        overlap=keys.overlap,
        deterministic=keys.deterministic,
        address=address,
        secret=secret,
        **options,
    )


def join_group(deployment: Deployment, identity: Identity, secret: bytes = b"") -> Communicator:
    """This rank's group, connected. Raises ValueError, MeshError or RuntimeError naming what does not fit."""
    bootstrap = bootstrap_for(identity)
    nodes = tuple(name.decode() for name in bootstrap.all_gather(identity.node.encode()))
    size = deployment.parallel.tensor_parallel_size
    layout = observed_layout(nodes, bootstrap.rank // size * size, size)
    address = local_address(deployment, [nodes[rank] for rank in layout.ranks])
    return connect(bootstrap, layout, comm_options(deployment, address, secret))


def set_threads(deployment: Deployment, identity: Identity) -> None:
    """Compute threads of this rank: its share of the node's cores."""
    import torch

    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(deployment.engine.threads or max(1, cores // identity.local_size))
    torch.set_grad_enabled(False)


def choose_device(deployment: Deployment, identity: Identity) -> Any:
    import torch

    wanted = deployment.engine.device
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError(
            "engine.device=cuda, but torch sees no CUDA device: install the CUDA build, or use device: cpu"
        )
    if identity.local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"local rank {identity.local_rank} has no GPU: {identity.node} shows {torch.cuda.device_count()}; "
            "start one rank a GPU"
        )
    device = torch.device("cuda", identity.local_rank)
    torch.cuda.set_device(device)
    return device


class _Steps:
    """Rank 0's loop around the engine."""

    def __init__(self, engine: Engine, channel: Channel, status: Status) -> None:
        self.engine, self.channel, self.status = engine, channel, status
        self.ending = False
        self._snapshot_due = 0.0

    def run(self) -> None:
        while not self.ending:
            for command in self.channel.poll(0.0 if self.engine.has_work else IDLE_S):
                self._obey(command)
            if self.engine.has_work:
                events = self.engine.step()
                if events:
                    self.channel.send_tokens(events)
            self._take_snapshot()

    def _obey(self, command: Command) -> None:
        match command:
            case Submit(request):
                self.engine.add(request)
            case Cancel(request_id):
                self.engine.cancel(request_id)
            case StopChoice(request_id, choice, n_tokens):
                self.engine.stop_choice(request_id, choice, n_tokens)
            case Drain():
                pass  # the owner sends no more; what is here goes on to its end
            case Shutdown():
                self.ending = True

    def _take_snapshot(self) -> None:
        now = time.monotonic()
        if now >= self._snapshot_due:
            self.status.scheduler = self.engine.scheduler.snapshot(time.time())
            self._snapshot_due = now + SNAPSHOT_S


def run_rank(
    deployment: Deployment, identity: Identity, channel: Channel | None, status: Status, secret: bytes = b""
) -> None:
    """Until Shutdown (rank 0 of the group) or the end of plans (the others). Raises whatever stops it."""
    say: Callable[[Announce | Loading | Ready | Running], None]
    say = channel.send_state if channel is not None else lambda message: None
    say(Loading(0.0, "importing"))
    set_threads(deployment, identity)
    from ..engine.build import build

    device = choose_device(deployment, identity)
    say(Loading(0.1, "connecting"))
    with join_group(deployment, identity, secret) as communicator:
        status.communicator = communicator
        last_told = 0.0

        def told(done: int, total: int) -> None:
            nonlocal last_told
            if done == total or time.monotonic() - last_told > 0.5:
                last_told = time.monotonic()
                say(Loading(0.1 + 0.9 * done / max(total, 1), f"weights {done >> 20} of {total >> 20} MiB"))

        built = build(deployment, communicator, device, told)
        for warning in built.warnings:
            if communicator.rank == 0:
                log.warning("%s", warning)
        # What is here now stays: the collector need not walk through it in the middle of a step.
        gc.collect()
        gc.freeze()
        say(Announce({"config": deploy.digest(deployment), "weights": built.digest}))
        if communicator.rank != 0:
            say(Ready(built.limits))
            follow(built.runner, communicator.plans, status.progress)
            return
        if channel is None:
            raise RuntimeError("rank 0 has no channel to take requests from")
        _lead(built.limits, Scheduler(built.scheduler_limits), built.runner, communicator, channel, status)


def _lead(
    limits: ModelLimits,
    scheduler: Scheduler,
    runner: Any,
    communicator: Communicator,
    channel: Channel,
    status: Status,
) -> None:
    engine = Engine(
        scheduler,
        runner,
        communicator.plans,
        status.progress,
        lambda request_ids: channel.send_state(Running(started=tuple(request_ids))),
    )
    channel.send_state(Ready(limits))
    _Steps(engine, channel, status).run()
    engine.close()
