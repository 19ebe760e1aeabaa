"""A rank's part of preflight: measures its links, the collectives and itself; rank 0 judges and makes the tuning.

What to measure and what is wrong is topology/preflight.py's, the fit topology/fit.py's. Prints nothing. Called by
launchers/commands/preflight.py on every rank.
"""

from __future__ import annotations

import ctypes.util
import json
import os
import resource
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..engine import config as deploy
from ..engine.config_schema import Deployment
from ..models.config import from_folder
from ..topology.bootstrap import Bootstrap, StarBootstrap
from ..topology.cost import Backend, Shape, Strategy, shape_of
from ..topology.fabric import Fabric
from ..topology.fit import Fit, Point, fit
from ..topology.groups import CommOptions, Communicator, connect
from ..topology.identity import Identity, require_world
from ..topology.layout import GroupLayout, observed_layout
from ..topology.links import Line, line_of, measure, needs_torch_groups
from ..topology.preflight import (
    Finding,
    LinkTime,
    Pair,
    Plan,
    RankReport,
    Setup,
    Transport,
    judge,
    plan,
    slowest,
    unlike,
)
from ..topology.tuning import Tuning, make
from . import tuned
from .preflight_job import MEET_S, START_S, Watch, sign
from .rank import bootstrap_for, choose_device, comm_options, local_address, set_threads

BATCHES = (1, 4, 16, 64, 256)
"""Decode batches whose all-reduces are measured beside the usual sizes."""
_SECONDS = 0.25  # for each strategy and size
_SLACK_S = 10.0  # beside the limit, for what others may be busy with
_WIDTH = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What rank 0 knows at the end. `fitted` is None where ranks have nothing to reduce with one another; `tuning`
    there too, and where something is wrong with the fabric. `carrier`: whose messages the links were measured with."""

    fabric: Fabric
    shape: Shape
    backend: Backend
    reports: tuple[RankReport, ...]
    links: tuple[LinkTime, ...]
    fitted: Fit | None
    findings: tuple[Finding, ...]
    tuning: Tuning | None
    carrier: str = ""
    group: int = 0
    """Whose all-reduces `fitted` and `shape` are: the slowest of the groups."""

    @property
    def broken(self) -> bool:
        return any(f.severity == "error" for f in self.findings)


class UnlikeRanks(RuntimeError):
    """Ranks that cannot measure together, found before any of them connects; `findings` are the same on every rank."""

    def __init__(self, findings: tuple[Finding, ...]) -> None:
        super().__init__("\n".join(map(str, findings)))
        self.findings = findings


def message_bytes(deployment: Deployment) -> tuple[int, ...]:
    """The model's own all-reduces in decode, () where its folder is not here."""
    folder = Path(deployment.model.path)
    if not (folder / "config.json").is_file():
        return ()
    model = from_folder(folder)
    width = _WIDTH[model.dtype if deployment.model.dtype == "auto" else deployment.model.dtype]
    return tuple(model.hidden_size * width * batch for batch in BATCHES if model.hidden_size * width * batch <= 8 << 20)


class _Star(StarBootstrap):
    """Its rounds are watched: who does not answer is named."""

    watch: Watch
    hosts: tuple[str, ...] = ()

    def all_gather(self, payload: bytes) -> list[bytes]:
        def words() -> str:
            on = f" on {self.hosts[self.waits_for]}" if self.waits_for is not None and self.hosts else ""
            return f"rank {self.waits_for}{on} did not answer"

        # others may be busy with what they are allowed to take; rank 0, who alone knows whom it lacks, speaks first
        with self.watch.over(words, self.watch.limit_s + _SLACK_S * (1 if self.rank == 0 else 2)):
            return super().all_gather(payload)


def _bootstrap(identity: Identity, watch: Watch) -> Bootstrap:
    if identity.launcher == "torchrun":
        return bootstrap_for(identity)  # its store's waits end by themselves
    # MPI's start can only be ended from outside Python. Whoever holds the job does, earlier, and names who is missing.
    signal.alarm(int(START_S + MEET_S + _SLACK_S))
    star = _Star()
    signal.alarm(0)
    star.watch = watch
    return star


def run_preflight(
    deployment: Deployment, identity: Identity, give_up: Callable[[str], object] = print
) -> tuple[int, Outcome | None]:
    """(exit status, the same on every rank; on rank 0 what it found). Raises UnlikeRanks, IdentityError where the ranks
    are alike and not as many as the deployment's, and what else stops it, naming the rank. `give_up` is called, in a
    thread, with words on what this rank waited for in vain, and must end the process: MPI's calls have no limit."""
    limit_s = deployment.parallel.collective_timeout or CommOptions().timeout_s

    def end(words: str) -> None:
        _nccl_log_of(identity).unlink(missing_ok=True)
        give_up(words)

    with Watch(limit_s, end) as watch:
        return _measure(deployment, identity, _bootstrap(identity, watch), watch)


def _measure(
    deployment: Deployment, identity: Identity, bootstrap: Bootstrap, watch: Watch
) -> tuple[int, Outcome | None]:
    setups = meet(deployment, identity, bootstrap)
    sign(bootstrap.rank, "met")
    require_world(identity, deployment.parallel.tensor_parallel_size, deployment.parallel.replicas)
    nodes = tuple(s.hostname for s in setups)
    if isinstance(bootstrap, _Star):
        bootstrap.hosts = nodes
    set_threads(deployment, identity)
    device = choose_device(deployment, identity)
    size = deployment.parallel.tensor_parallel_size
    group, groups = bootstrap.rank // size, bootstrap.size // size
    layout = observed_layout(nodes, group * size, size)
    fabric = tuned.fabric_of_job(deployment, bootstrap, nodes)
    placement = tuned.placed(fabric, deployment, nodes)
    shapes = [shape_of(fabric, placement, index) for index in range(groups)]
    backend: Backend = "nccl" if device.type == "cuda" else tuned.backend_here(deployment)
    # every rank must measure the same: rank 0's model folder says which sizes
    sizes = json.loads(bootstrap.all_gather(json.dumps(message_bytes(deployment)).encode())[0])
    if size > 1:
        plans = [plan(fabric, placement, shape, backend, sizes, index) for index, shape in enumerate(shapes)]
    else:
        plans = [Plan((), ())] * groups
    wanted = plans[group]
    # groups connect all at once: one whose shape lacks a strategy of another's still takes its turn
    together = tuple(dict.fromkeys(row for p in plans for row in p.sweep)) if groups > 1 else ()
    address = local_address(deployment, [nodes[rank] for rank in layout.ranks])
    options = replace(
        comm_options(deployment, address, b""),
        backend=backend,
        collective="auto",
        emulation=None,
        deterministic=False,
        connect_timeout_s=watch.limit_s,
    )
    grouped = size > 1 and needs_torch_groups(bootstrap, backend)
    with ExitStack() as stack:
        log = stack.enter_context(_nccl_log(backend, identity))
        with watch.over(_unconnected, watch.limit_s + _SLACK_S):
            communicator = stack.enter_context(connect(bootstrap, layout, replace(options, process_groups=grouped)))
        points = _sweep(wanted, communicator, bootstrap, layout, options, shapes[group], device, together, watch)
        line = line_of(bootstrap, backend, device) if wanted.rounds else None
        links = measure_links(wanted, bootstrap, line, nodes, watch)
        report = _report(deployment, identity, bootstrap, backend, device, len(layout.nodes) > 1, log)
        status, outcome = 0, None
        said = {"report": asdict(report), "links": links}
        if bootstrap.rank % size == 0:
            said["sweep"] = [(p.strategy, p.nbytes, p.seconds) for p in points]  # the same on all of its group
        everyone = bootstrap.all_gather(json.dumps(said).encode())
        if bootstrap.rank == 0:
            outcome = _judge(deployment, fabric, shapes, backend, everyone)
            outcome = replace(outcome, carrier=line.carrier if line is not None else "")
            status = int(outcome.broken)
        status = bootstrap.all_gather(bytes([status]))[0][0]
    return status, outcome


def meet(deployment: Deployment, identity: Identity, bootstrap: Bootstrap) -> tuple[Setup, ...]:
    """Every rank's, in rank order. Raises UnlikeRanks, on all of them, where they differ."""
    versions = tuned.versions()
    if (driver := Path("/sys/module/nvidia/version")).is_file():
        versions["driver"] = driver.read_text().strip()
    mine = Setup(bootstrap.rank, identity.node, deploy.digest(deployment), versions)
    setups = tuple(Setup(**json.loads(data)) for data in bootstrap.all_gather(json.dumps(asdict(mine)).encode()))
    if findings := unlike(setups):
        raise UnlikeRanks(findings)
    return setups


def _judge(
    deployment: Deployment,
    fabric: Fabric,
    shapes: Sequence[Shape],
    backend: Backend,
    everyone: Sequence[bytes],
) -> Outcome:
    size = deployment.parallel.tensor_parallel_size
    told = [json.loads(data) for data in everyone]
    reports = tuple(_read_report(t["report"]) for t in told)
    links = tuple(LinkTime(Pair(*pair), latency, rate) for t in told for *pair, latency, rate in t["links"])
    sweeps = [
        [Point(s, n, took, shape) for s, n, took in t["sweep"]] for t, shape in zip(told[::size], shapes, strict=True)
    ]
    group = slowest(sweeps)
    shape, points = shapes[group], sweeps[group]
    fitted = fit(points, backend) if points else None
    findings = judge(reports, links, fitted, deployment.parallel.require_transport, shape.inter_bytes_per_s)
    broken = any(f.severity == "error" for f in findings)
    tuning = None
    if fitted is not None and not broken:
        nodes = tuple(r.hostname for r in reports)
        own = tuned.group_hosts(fabric, nodes, observed_layout(nodes, group * size, size))
        tuning = make(own, shape, fitted, tuned.versions())
    return Outcome(fabric, shape, backend, reports, links, fitted, findings, tuning, group=group)


def _read_report(data: dict[str, Any]) -> RankReport:
    transport = dict(data.pop("transport"))
    return RankReport(transport=Transport(**{**transport, "devices": tuple(transport["devices"])}), **data)


# measuring


def measure_links(
    wanted: Plan, bootstrap: Bootstrap, line: Line | None, nodes: Sequence[str] = (), watch: Watch | None = None
) -> list[tuple[int, int, int | None, str, float, float]]:
    """Of this rank's pairs those that it is the first of: both ranks, the rail, the path, seconds one way, bytes/s.
    Every rank calls it; all end a round before any begins the next. `nodes`: each rank's host, for the words of the
    watch."""
    watch = watch or Watch(inf, print)
    found: list[tuple[int, int, int | None, str, float, float]] = []
    for pairs in wanted.rounds:
        for pair in pairs:
            if line is not None and bootstrap.rank in (pair.a, pair.b):
                first = bootstrap.rank == pair.a
                ends = " to ".join(f"rank {end}" + (f" on {nodes[end]}" if nodes else "") for end in (pair.a, pair.b))
                with watch.over(f"nothing came over the link from {ends}".__str__):
                    latency, rate = measure(line, pair.b if first else pair.a, first)
                if first:
                    found.append((pair.a, pair.b, pair.rail, pair.path, latency, rate))
        bootstrap.all_gather(b"")
    return found


def _sweep(
    wanted: Plan,
    control: Communicator,
    bootstrap: Bootstrap,
    layout: GroupLayout,
    options: CommOptions,
    shape: Shape,
    device: torch.device,
    together: Sequence[tuple[Strategy, int]] = (),
    watch: Watch | None = None,
) -> list[Point]:
    """Every strategy and size of the plan; a strategy has connections of its own. `together`: where there are several
    groups, those of all of them, in whose order every rank connects and measures; nobody runs ahead."""
    watch = watch or Watch(inf, print)
    points = []
    mine = set(wanted.sweep)
    for strategy in dict.fromkeys(s for s, _ in together or wanted.sweep):
        own = control
        if strategy in ("exchange", "two_level", "doubling", "pipeline"):
            collective = strategy if strategy in {s for s, _ in mine} else "auto"
            with watch.over(_unconnected, watch.limit_s + _SLACK_S):
                own = connect(bootstrap, layout, replace(options, collective=collective, process_groups=False))
        try:
            for nbytes in (n for s, n in together or wanted.sweep if s == strategy):
                if (strategy, nbytes) in mine:
                    took = _all_reduce_s(own, control, nbytes, device, watch)
                    points.append(Point(strategy, nbytes, took, shape))
                if together:
                    bootstrap.all_gather(b"")
        finally:
            if own is not control:
                own.close()
    return points


def _unconnected() -> str:
    return "the ranks of its group did not connect"


def _all_reduce_s(own: Communicator, control: Communicator, nbytes: int, device: torch.device, watch: Watch) -> float:
    """Seconds an all-reduce, calls back to back: the median of a few batches of them, the slowest rank's."""
    x = torch.zeros(nbytes // 4, device=device)

    def calls(count: int) -> float:
        # the backends' own waits end earlier and name the peer; NCCL's do not
        with watch.over(f"all-reduces of {nbytes} bytes did not end".__str__, watch.limit_s + _SLACK_S):
            began = time.perf_counter()
            for _ in range(count):
                own.all_reduce.start(x).wait()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            return (time.perf_counter() - began) / count

    calls(2)
    count = int(min(200, max(2, _SECONDS / 5 / _slowest(control, calls(3)))))
    return _slowest(control, statistics.median(calls(count) for _ in range(5)))


def _slowest(control: Communicator, seconds: float) -> float:
    mine: NDArray[np.uint8] = np.array([seconds]).view(np.uint8)
    return float(np.ascontiguousarray(control.gather(mine)).view(np.float64).max())


# this rank


def _report(
    deployment: Deployment,
    identity: Identity,
    bootstrap: Bootstrap,
    backend: Backend,
    device: torch.device,
    spans: bool,
    log: Path | None,
) -> RankReport:
    used: str = backend if spans else ""
    if spans and backend == "nccl":
        used = transport_in(log.read_text(errors="replace") if log is not None and log.is_file() else "")
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    infiniband = Path("/dev/infiniband")
    shm = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    seconds = matmul_s(device)
    bootstrap.all_gather(b"")
    return RankReport(
        rank=bootstrap.rank,
        hostname=identity.node,
        transport=Transport(
            used=used,
            devices=tuple(sorted(map(str, infiniband.glob("uverbs*")))) if infiniband.is_dir() else (),
            memlock_bytes=None if limit == resource.RLIM_INFINITY else limit,
            library=ctypes.util.find_library("ibverbs") or "",
            # NCCL's rings inside a node lie there; the native backend brings memory of its own
            shm_bytes=shm.f_blocks * shm.f_frsize if shm is not None and backend == "nccl" else None,
        ),
        clock_s=time.time(),
        matmul_s=seconds,
    )


def matmul_s(device: torch.device, rounds: int = 100) -> float:
    """Seconds of a short matrix product, the best of some: what the device can do when nobody is in its way."""
    side, dtype = (4096, torch.bfloat16) if device.type == "cuda" else (384, torch.float32)
    a = torch.ones(side, side, dtype=dtype, device=device)
    best = float("inf")
    for _ in range(rounds):
        began = time.perf_counter()
        a @ a
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - began)
    return best


def _nccl_log_of(identity: Identity) -> Path:
    return Path(os.environ.get("TMPDIR", "/tmp")) / f"laddertron-preflight-nccl-{identity.rank}-{os.getpid()}.log"


@contextmanager
def _nccl_log(backend: Backend, identity: Identity) -> Iterator[Path | None]:
    """NCCL says how it goes between nodes in its log alone, and reads where to before its first communicator. The file
    goes with the context, or when this rank ends itself; where the launcher kills it, it stays."""
    if backend != "nccl":
        yield None
        return
    path = _nccl_log_of(identity)
    os.environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT,NET", NCCL_DEBUG_FILE=str(path))
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def transport_in(log: str) -> str:
    """NET/IB, NET/Socket or the name of a plugin, from NCCL's log; NET/Socket where it says none: the slow one is
    refused until it is known to be another."""
    for line in log.splitlines():
        if "Using network" in line:
            name = line.partition("Using network")[2].split()[0]
            return name if name.startswith("NET/") else f"NET/{name}"
    return "NET/Socket"
