"""A rank's part of preflight: measures links, collectives and itself; rank 0 judges and makes the tuning."""

from __future__ import annotations

import json
import os
import secrets
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from ...engine.config import load as deploy
from ...engine.config.schema import Deployment
from ...models.config.model_config import from_folder
from ...models.config.quantisation import BYTES
from ...topology.comm.bootstrap import Bootstrap, MpiBootstrap, bootstrap_of, require_own_hostnames
from ...topology.comm.groups import CommOptions
from ...topology.comm.nccl import nccl_log, nccl_log_path
from ...topology.connect import connect
from ...topology.cost.cost import Backend, Shape, shape_of
from ...topology.cost.fit import Fit, Point, fit
from ...topology.cost.links import line_of, needs_torch_groups
from ...topology.cost.tuning import Tuning, make
from ...topology.hardware.fabric import Fabric
from ...topology.json_codec import build, unbuild
from ...topology.placement.identity import Identity, require_world
from ...topology.placement.world import World
from ..compose.ports import ports_at
from ..control.frames import SECRET_BYTES
from ..control.reach import Unreached, listening, peers_of, reach
from ..rank import load_tuning as tuned
from ..rank.network import local_address, use_route
from ..rank.rank import choose_device, comm_options, set_threads
from ..rank.shared_memory import require_shared_memory
from .preflight_job import MEET_S, START_S, Watch, sign
from .preflight_links import SLACK_S, measure_links, report, sweep, unconnected
from .preflight_plan import (
    Finding,
    LinkTime,
    Pair,
    PreflightPlan,
    RankReport,
    Setup,
    judge,
    make_preflight_plan,
    slowest,
    unlike,
)

BATCHES = (1, 4, 16, 64, 256)
"""Decode batches whose all-reduces are measured in addition to the usual sizes."""


@dataclass(frozen=True, slots=True)
class PreflightOutcome:
    """The results of preflight, on rank 0. `fitted`: None if groups have a single rank; `tuning`: None then, and if the
    fabric has a fault. `carrier`: the library whose messages measured the links."""

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
    """The group of `fitted` and `shape`, which is the slowest."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """The libraries' versions, equal on all ranks."""

    @property
    def broken(self) -> bool:
        return any(f.severity == "error" for f in self.findings)


class UnlikeRanks(RuntimeError):
    """Ranks that cannot measure together; detected before any of them connects, with the same message on every rank."""


def message_bytes(deployment: Deployment) -> tuple[int, ...]:
    """Bytes of the model's all-reduces in decode; () if its folder is not on this host."""
    folder = Path(deployment.model.path)
    if not (folder / "config.json").is_file():
        return ()
    model = from_folder(folder)
    width = int(BYTES[model.dtype if deployment.model.dtype == "auto" else deployment.model.dtype])
    return tuple(model.hidden_size * width * batch for batch in BATCHES if model.hidden_size * width * batch <= 8 << 20)


class _Star(MpiBootstrap):
    """MPI whose rounds are a star and watched: they name ranks that do not answer."""

    watch: Watch
    hosts: tuple[str, ...] = ()

    def all_gather(self, payload: bytes) -> list[bytes]:
        def words() -> str:
            on = f" on {self.hosts[self.waits_for]}" if self.waits_for is not None and self.hosts else ""
            return f"rank {self.waits_for}{on} did not answer"

        # others may be busy with what they are allowed to take; rank 0, who alone knows whom it lacks, speaks first
        with self.watch.over(words, self.watch.limit_s + SLACK_S * (1 if self.rank == 0 else 2)):
            return self.star_gather(payload)


def watched_bootstrap(identity: Identity, watch: Watch) -> Bootstrap:
    if identity.launcher == "torchrun":
        return bootstrap_of(identity, os.environ)  # its store's waits end by themselves
    # MPI's start can only be ended from outside Python. The launching process does so earlier.
    signal.alarm(int(START_S + MEET_S + SLACK_S))
    star = _Star()
    signal.alarm(0)
    star.watch = watch
    return star


def run_preflight(
    deployment: Deployment, identity: Identity, give_up: Callable[[str], object] = print
) -> tuple[int, PreflightOutcome | None]:
    """Runs preflight; returns the exit status, equal on all ranks, and the results on rank 0. Raises UnlikeRanks,
    IdentityError if the number of ranks differs from the deployment's, and other errors, which name the rank. `give_up`
    is called on a thread with a message about a wait that timed out, and must end the process: MPI's calls have no
    timeout."""
    limit_s = CommOptions().timeout_s

    def end(words: str) -> None:
        nccl_log_path().unlink(missing_ok=True)
        give_up(words)

    watch = Watch(limit_s, end)
    require_shared_memory(identity, os.environ)
    use_route(deployment, os.environ)
    return _measure(deployment, identity, watched_bootstrap(identity, watch), watch)


def _measure(
    deployment: Deployment, identity: Identity, bootstrap: Bootstrap, watch: Watch
) -> tuple[int, PreflightOutcome | None]:
    setups = meet(deployment, identity, bootstrap)
    sign(bootstrap.rank, "met")
    require_world(identity, deployment.parallel.world)
    nodes = tuple(s.hostname for s in setups)
    world = deployment.parallel.world.on(nodes)
    if isinstance(bootstrap, _Star):
        bootstrap.hosts = nodes
    test_ways(deployment, bootstrap, nodes)
    set_threads(deployment, identity)
    device = choose_device(deployment, identity)
    group, groups = world.group_of(bootstrap.rank), world.groups
    layout = world.layout(group)
    fabric = tuned.fabric_of_job(deployment, bootstrap, nodes)
    placement = tuned.placed(fabric, deployment, nodes)
    shapes = [shape_of(fabric, placement, index) for index in range(groups)]
    backend: Backend = "nccl" if device.type == "cuda" else tuned.backend_here(deployment)
    # every rank must measure the same: rank 0's model folder says which sizes
    sizes = json.loads(bootstrap.all_gather(json.dumps(message_bytes(deployment)).encode())[0])
    if world.tp > 1:
        plans = [make_preflight_plan(fabric, placement, shape, backend, sizes) for shape in shapes]
    else:
        plans = [PreflightPlan((), ())] * groups
    own_plan = plans[group]
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
    grouped = world.tp > 1 and needs_torch_groups(bootstrap, backend)
    with ExitStack() as stack:
        log = stack.enter_context(nccl_log("INIT,NET")) if backend == "nccl" else None
        with watch.over(unconnected, watch.limit_s + SLACK_S):
            communicator = stack.enter_context(connect(bootstrap, layout, replace(options, process_groups=grouped)))
        points = sweep(own_plan, communicator, bootstrap, layout, options, shapes[group], device, together, watch)
        line = line_of(bootstrap, backend, device, communicator) if own_plan.rounds else None
        links = measure_links(own_plan, bootstrap, line, nodes, watch)
        mine = report(identity, bootstrap, backend, device, len(layout.nodes) > 1, log)
        status, outcome = 0, None
        answer = {"report": unbuild(mine), "links": links}
        if world.in_group(bootstrap.rank) == 0:
            answer["sweep"] = [(p.strategy, p.nbytes, p.seconds) for p in points]  # the same on all of its group
        everyone = bootstrap.all_gather(json.dumps(answer).encode())
        if bootstrap.rank == 0:
            outcome = judged_outcome(deployment, world, fabric, shapes, backend, everyone)
            carrier = line.carrier if line is not None else ""
            outcome = replace(outcome, carrier=carrier, versions=setups[0].versions)
            status = int(outcome.broken)
        status = bootstrap.all_gather(bytes([status]))[0][0]
    return status, outcome


def meet(deployment: Deployment, identity: Identity, bootstrap: Bootstrap) -> tuple[Setup, ...]:
    """Gathers the Setup of every rank, in rank order. Raises UnlikeRanks, on all ranks, if they differ."""
    versions = tuned.versions()
    if (driver := Path("/sys/module/nvidia/version")).is_file():
        versions["driver"] = driver.read_text().strip()
    mine = Setup(bootstrap.rank, identity.node, deploy.digest(deployment), versions)
    setups = tuple(Setup(**json.loads(data)) for data in bootstrap.all_gather(json.dumps(asdict(mine)).encode()))
    if findings := unlike(setups):
        raise UnlikeRanks("\n".join(map(str, findings)))
    require_own_hostnames(bootstrap.all_gather)
    return setups


def test_ways(deployment: Deployment, bootstrap: Bootstrap, nodes: Sequence[str]) -> None:
    """Tests that the ranks reach one another, as at each start. Raises UnlikeRanks, on all ranks."""
    if len(set(nodes)) == 1:
        return
    rank, fault, address = bootstrap.rank, "", local_address(deployment, nodes)
    secret = bootstrap.all_gather(secrets.token_bytes(SECRET_BYTES))[0]
    with listening(address, secret, ports_at(deployment, address)) as place:
        places = [text.decode() for text in bootstrap.all_gather(place.encode())]
        try:
            for peer in peers_of(rank, nodes):
                reach(peer, nodes[peer], nodes[rank], places[peer], secret)
        except Unreached as error:
            fault = f"rank {error.rank} on {nodes[error.rank]} {error}"
        if faults := [text.decode() for text in bootstrap.all_gather(fault.encode()) if text]:
            raise UnlikeRanks("\n".join(faults))


def judged_outcome(
    deployment: Deployment,
    world: World,
    fabric: Fabric,
    shapes: Sequence[Shape],
    backend: Backend,
    everyone: Sequence[bytes],
) -> PreflightOutcome:
    answers = [json.loads(data) for data in everyone]
    reports = tuple(build(RankReport, t["report"]) for t in answers)
    links = tuple(LinkTime(Pair(*pair), latency, rate) for t in answers for *pair, latency, rate in t["links"])
    sweeps = [
        [Point(s, n, took, shape) for s, n, took in answers[world.ranks_of(index)[0]]["sweep"]]
        for index, shape in enumerate(shapes)
    ]
    group = slowest(sweeps)
    shape, points = shapes[group], sweeps[group]
    fitted = fit(points, backend) if points else None
    spread = deployment.acceptance.max_spread
    findings = judge(reports, links, fitted, deployment.parallel.require_transport, shape.inter_bytes_per_s, spread)
    broken = any(f.severity == "error" for f in findings)
    tuning = None
    if fitted is not None and not broken:
        own = tuned.group_hosts(fabric, world.nodes, world.layout(group))
        tuning = make(own, shape, fitted, tuned.versions())
    return PreflightOutcome(fabric, shape, backend, reports, links, fitted, findings, tuning, group=group)
