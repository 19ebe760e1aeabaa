"""Runs one rank: connects the group, loads, steps until shutdown; for the daemon, `run` and an outer mpirun alike.
Imports torch, which takes longest, only after it has tested the host.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import TYPE_CHECKING, Any

from ...engine.config import load as deploy
from ...engine.config.rules import emulated_link
from ...engine.config.schema import PLACEMENT, Deployment, EngineConfig
from ...engine.identity import config_digest, headers_of, small_files
from ...engine.schedule.scheduler import Scheduler
from ...engine.step.engine import Engine, follow
from ...models.config.json_fields import Refusal
from ...models.cuda.workspace import kernels_missing
from ...topology.comm.bootstrap import Bootstrap, bootstrap_of
from ...topology.comm.groups import CommOptions, Communicator
from ...topology.hardware.cpu_quota import cpu_quota, usable_cpus
from ...topology.hardware.cpu_tier import TierError, limit_libraries
from ...topology.hardware.cpu_tier import current as current_tier
from ...topology.hardware.cuda_stack import CudaUnusable, choose, look, triton_missing
from ...topology.hardware.fabric import counted
from ...topology.hardware.sysfs import Sysfs, available_bytes
from ...topology.placement.identity import Identity
from ...topology.placement.mapping import MappingError, verify
from ..compose.ports import ENV_PORTS, ports_at
from ..compose.rank_mapping import ENV_CORES, ENV_SEATS, bind, cores_here, expected
from ..control import messages
from ..control.reach import listening, peers_of, reach
from .load_tuning import backend_here, tuned_choice
from .network import local_address, sockets_refused, use_route
from .rank_status import HealthWatch, Status, loading_words, make_look
from .shared_gpu import gpu_index, node_names, separate
from .shared_memory import require_shared_memory
from .standing_by import Channel, require_memory, stand_by

if TYPE_CHECKING:
    from ...engine.step.build import Built

log = logging.getLogger(__name__)

SALT_BYTES = 16
IDLE_S = 0.5
"""The longest wait of an idle rank 0 for a command, which wakes it at once."""
SNAPSHOT_S = 0.25


class DeviceError(Refusal, ValueError):
    """The configured device is not available on this host."""


def comm_options(deployment: Deployment, address: str, secret: bytes, spans_nodes: bool = False) -> CommOptions:
    """spans_nodes: whether the job does."""
    keys = deployment.parallel
    options: dict[str, Any] = {}
    if deployment.launch.bind_to == PLACEMENT and cpu_quota() is None:
        # the cores are this rank's own: with a second one its transport may spin while the rank computes
        options["spin_us"] = 20.0 if len(os.sched_getaffinity(0)) > 1 else 0.0
    backend, drafts = backend_here(deployment), deployment.engine.speculation == "mtp"
    return CommOptions(
        backend=backend,
        collective=keys.collective,
        emulation=emulated_link(keys),
        overlap=keys.overlap,
        deterministic=keys.deterministic,
        address=address,
        ports=ports_at(deployment, address),
        secret=secret,
        node_group=keys.dense_path == "node" or (spans_nodes and drafts and backend == "native"),
        **options,
    )


def require_transport(deployment: Deployment, backend: str, spans: bool) -> None:
    """Enforces `parallel.require_transport` for a group that `spans` nodes. For NCCL it sets NCCL_NET, which must be
    done before the first communicator: NCCL then fails if the network is missing, instead of falling back. Raises
    ValueError for a backend that has only sockets. Preflight does not call this, and reports what is missing."""
    transport = deployment.parallel.require_transport
    if not spans or transport == "any":
        return
    if backend == "nccl":
        os.environ.setdefault("NCCL_NET", "IB" if transport == "ib" else "Socket")
    elif transport == "ib" and backend in ("native", "gloo"):
        raise ValueError(sockets_refused(backend))


def start_bootstrap(deployment: Deployment, identity: Identity) -> Bootstrap:
    """Starts MPI or the store, after what must precede it. Raises ValueError or RuntimeError."""
    use_route(deployment, os.environ)
    if deployment.launch.share_gpu:
        separate(identity, os.environ)
    return bootstrap_of(identity, os.environ)


def join_group(
    deployment: Deployment, identity: Identity, secret: bytes = b"", bootstrap: Bootstrap | None = None
) -> Communicator:
    """Connects this rank's group. Raises ValueError, MeshError or RuntimeError."""
    from ...topology.connect import connect  # imports torch

    bootstrap = bootstrap or start_bootstrap(deployment, identity)
    places_sent = bootstrap.all_gather(f"{identity.local_rank} {identity.node}".encode())
    places = [place.decode().partition(" ") for place in places_sent]
    hosts = [host for _, _, host in places]
    observed = [(rank, host, int(local)) for rank, (local, _, host) in enumerate(places)]
    if (seats := os.environ.get(ENV_SEATS)) is not None:
        verify(expected(seats), observed, identity.launcher)
    nodes = node_names(deployment.launch, hosts)
    world = deployment.parallel.world.on(nodes)
    stages = [world.layout(group) for group in world.groups_of(world.replica_of(bootstrap.rank)[0])]
    layout = stages[world.stage_of(bootstrap.rank)]
    address = local_address(deployment, hosts)
    if deployment.launch.port_range is not None and len(set(nodes)) > 1 and ENV_PORTS not in os.environ:
        log.warning("MPI, gloo and NCCL listen outside of launch.port_range: only `laddertron launch` restricts them")
    require_transport(deployment, backend_here(deployment), len(layout.nodes) > 1)
    choose = tuned_choice(deployment, bootstrap, nodes, layout)
    options = comm_options(deployment, address, secret, spans_nodes=len(set(nodes)) > 1)
    return connect(bootstrap, layout, options, choose, stages)


@contextlib.contextmanager
def meet_ranks(deployment: Deployment, identity: Identity, channel: Channel, secret: bytes) -> Iterator[None]:
    """Waits until every rank is there, and tests that this one reaches the other hosts; answers their tests inside the
    block. Raises Unreached."""
    channel.send_state(messages.Loading(0.1, "waiting for every rank to start"))
    hosts = channel.wait_for_ranks()
    if len(set(hosts)) < 2 or len(hosts) != identity.size:
        yield
        return
    address = local_address(deployment, hosts)
    with listening(address, secret, ports_at(deployment, address)) as place:
        if places := channel.exchange_doors(place):
            for peer in peers_of(identity.rank, hosts):
                reach(peer, hosts[peer], identity.node, places[peer], secret)
        yield


def seat_cores(identity: Identity) -> tuple[int, ...]:
    """The cores that the launcher assigned to this rank. Raises MappingError if there are none."""
    cores = cores_here(os.environ.get(ENV_CORES), identity.node, identity.local_rank)
    if cores is None:
        raise MappingError(
            f"launch.bind_to is placement, and no cores were given to rank {identity.rank} on {identity.node} "
            f"({ENV_CORES}): start it with `laddertron launch`, `run` or `serve`, or set launch.bind_to: none"
        )
    return cores


def set_threads(deployment: Deployment, identity: Identity) -> None:
    """Sets the compute threads of this rank: if `launch.bind_to` is placement, binds it to its assigned cores and uses
    all of them, else uses its share of the node's cores; with a CPU quota at most its share of that. Limits libraries
    to the forced CPU tier. Numbers CUDA devices by PCI bus like NVML, the fabric and the placement; CUDA's default is
    the fastest first. Raises MappingError if the rank cannot be bound, DeviceError if its processor does not support
    the tier."""
    try:
        limit_libraries(os.environ)
    except TierError as error:
        raise DeviceError(str(error)) from None
    sharers = identity.local_size
    if deployment.launch.bind_to == PLACEMENT:
        bind(seat_cores(identity))
        sharers = 1
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    cores, cpus = len(os.sched_getaffinity(0)), usable_cpus(identity.local_size)
    threads = deployment.engine.threads or max(1, min(cores // sharers, cpus))
    if (quota := cpu_quota()) is not None and quota < cores:
        text = "%s: the CPU quota of the cgroup is %g of %d processors, for %s on this host"
        words = counted(threads, "compute thread"), quota, cores, counted(identity.local_size, "rank")
        log.log(logging.WARNING if threads > cpus else logging.INFO, text, *words)
    import torch

    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)


def choose_device(deployment: Deployment, identity: Identity) -> Any:
    import torch

    requested, error = deployment.engine.device, ""
    usable = requested != "cpu" and torch.cuda.is_available()
    if requested != "cpu" and not usable:
        try:
            torch.cuda.current_device()
        except (AssertionError, RuntimeError) as fault:
            error = str(fault).splitlines()[0] if str(fault) else type(fault).__name__
    try:
        choice = choose(requested, look(), usable, error)
    except CudaUnusable as fault:
        raise DeviceError(f"{identity.node}: {fault}") from None
    if choice.warning:
        log.warning("%s: %s", identity.node, choice.warning)
    if choice.device == "cpu":
        return torch.device("cpu")
    index = gpu_index(identity.local_rank, torch.cuda.device_count(), deployment.launch.share_gpu)
    if index is None:
        raise DeviceError(
            f"local rank {identity.local_rank} has no GPU: {identity.node} shows {torch.cuda.device_count()}; "
            "start one rank a GPU, or for a test set launch.share_gpu: true"
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def gpu_uuid(device: Any) -> str | None:
    """The driver's UUID of a CUDA device; None for a CPU."""
    if device.type != "cuda":
        return None
    import torch

    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def lead(engine: Engine, channel: Channel, status: Status) -> None:
    """Runs rank 0's engine loop until Shutdown."""
    ending, snapshot_due = False, 0.0
    while not ending:
        engine.progress.turn(False)
        commands = channel.poll(0.0 if engine.has_work else IDLE_S)
        engine.progress.turn(True)
        for command in commands:
            match command:
                case messages.Submit(request):
                    engine.add(request)
                case messages.Cancel(request_id):
                    engine.scheduler.cancel(request_id)
                case messages.StopChoice(request_id, choice, n_tokens):
                    engine.scheduler.stop_choice(request_id, choice, n_tokens)
                case messages.Drain() | messages.Load() | messages.HeldWeights():
                    pass  # draining: running requests finish, the owner sends no new ones; weights are loaded already
                case messages.Shutdown():
                    ending = True
        if engine.has_work and (events := engine.step()):
            channel.send_tokens(events)
        if time.monotonic() >= snapshot_due:
            status.latencies.add(engine.scheduler.take_ended())
            status.scheduler = engine.scheduler.snapshot(time.time())
            status.accepted = engine.scheduler.accepted_drafts
            snapshot_due = time.monotonic() + SNAPSHOT_S


def _loading(say: Callable[[messages.StateMessage], None]) -> Callable[[int, int], None]:
    """Makes the callback that reports loaded and total bytes, at most twice a second."""
    begun, last_said = time.monotonic(), 0.0

    def loaded(done: int, total: int) -> None:
        nonlocal last_said
        if done == total or time.monotonic() - last_said > 0.5:
            last_said = time.monotonic()
            say(messages.Loading(0.1 + 0.9 * done / max(total, 1), loading_words(done, total, last_said - begun)))

    return loaded


def files_of(deployment: Deployment) -> messages.Announce:
    """What a rank reports of the deployment and of the model's files on its host. Raises OSError."""
    return messages.Announce(_digests(deployment), headers_of(deployment))


def _digests(deployment: Deployment) -> dict[str, str]:
    """What must be equal on all ranks before one has loaded the model."""
    config = {"config": deploy.digest(deployment), "torch": _version("torch")}
    return {**config, **_gpu_kernels(deployment.engine), **small_files(deployment)}


def _gpu_kernels(keys: EngineConfig) -> dict[str, str]:
    """What decides which kernels a rank with a GPU computes with, and so whether it records its steps: a host that does
    neither would exchange messages of another size. "" where it is not used, as on a host that has no GPU to use."""
    unused = {"flashinfer": "", "triton": ""}
    if keys.device == "cpu":
        return unused
    facts = look()
    if not facts.gpus or facts.hidden or not facts.torch_cuda:
        return unused
    triton = _version("triton") or "missing"
    if triton != "missing" and triton_missing():
        triton = "without a compiler"
    if keys.attention == "torch":
        return unused | {"triton": triton}
    flashinfer = "without kernels" if kernels_missing() else _version("flashinfer-python") or "missing"
    return {"flashinfer": flashinfer, "triton": triton}


def _version(package: str) -> str:
    """ "" if it is not installed, or was built in place."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def run_rank(
    deployment: Deployment,
    identity: Identity,
    channel: Channel,
    status: Status,
    secret: bytes = b"",
    bootstrap: Bootstrap | None = None,
    standby: bool = False,
) -> None:
    """Runs until Shutdown (rank 0 of the group) or the last plan (the others). `standby`: waits on the channel for Load
    (or Shutdown) before loading weights. `bootstrap`: one that was started already. Raises the error that stops it."""
    say = channel.send_state
    if standby:
        require_memory(available_bytes(Sysfs()), identity.local_size)
    else:
        say(files_of(deployment))
    if bootstrap is None:
        require_shared_memory(identity, os.environ)
    say(messages.Loading(0.0, "importing"))
    set_threads(deployment, identity)
    import torch

    from ...engine.step.build import build
    from ...engine.step.share import has_room

    device = choose_device(deployment, identity)
    status.computes_with = device.type, current_tier(), str(torch.get_num_threads())
    status.health = HealthWatch(make_look(Sysfs(), identity.local_rank == 0, gpu_uuid(device)))
    status.health.start()
    with meet_ranks(deployment, identity, channel, secret):
        say(messages.Loading(0.1, "connecting"))
        bootstrap = bootstrap or start_bootstrap(deployment, identity)
        # NOTE: rank 0 draws the places of this launch's samples, and all ranks read the same ones
        salt = bootstrap.all_gather(secrets.token_bytes(SALT_BYTES))[0]
        joined = join_group(deployment, identity, secret, bootstrap)
    with joined as communicator:
        status.communicator, weights_file = communicator, -1
        if standby:
            communicator.set_timeout(deployment.daemon.load_timeout)
            sharers = identity.local_size
            retained_fd = stand_by(
                channel, communicator, lambda file: has_room(deployment, communicator, device, sharers, file)
            )
            if retained_fd is None:
                return
            weights_file = retained_fd
            say(files_of(deployment))
        built = build(
            deployment,
            communicator,
            device,
            _loading(say),
            lambda doing: say(messages.Loading(1.0, doing)),
            weights_file,
            salt,
        )
        digests = _digests(deployment) | {"model config": config_digest(built.config)}
        for warning in built.warnings if communicator.leads else ():
            log.warning("%s", warning)
        status.count_experts(built.runner.model, built.config)
        # Exempt all existing objects from garbage collection, which would delay a step.
        gc.collect()
        gc.freeze()
        say(messages.Announce(digests, built.samples))
        ready = messages.Ready(built.limits, built.weights_file)
        if communicator.leads:
            _serve(built, communicator, channel, status, ready)
        else:
            say(ready)
            follow(built.runner, communicator.plans, status.progress)


def _serve(built: Built, communicator: Communicator, channel: Channel, status: Status, ready: messages.Ready) -> None:
    engine = Engine(
        Scheduler(built.scheduler_limits),
        built.runner,
        communicator.plans,
        status.progress,
        lambda started, parked: channel.send_state(messages.Running(tuple(started), tuple(parked))),
    )
    channel.send_state(ready)
    lead(engine, channel, status)
    engine.close()
