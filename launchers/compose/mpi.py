"""Composes launcher command lines: (Deployment, Site, JobHosts, program, forward) -> LaunchCommand, with a reason for
every word. Command lines contain names of variables, never their values. Pure.
"""

from __future__ import annotations

import shlex
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ...engine import child
from ...engine.config.load import Deployment
from ...engine.config.schema import PLACEMENT
from ...topology.hardware import cpu_tier
from ...topology.hardware.fabric import Fabric, counted
from ...topology.hardware.ports import port_range
from ...topology.placement.identity import PTY
from .host_allocation import JobHosts
from .hosts import LaunchError
from .network import NetworkChoice, Variable, choose_network, variables
from .ports import ENV_PORTS
from .rank_mapping import ENV_CORES, ENV_INTERFACES, ENV_ROUTE, ENV_SEATS, cores_text, interfaces_text, seats_text

Kind = Literal["openmpi", "mpich", "slurm", "torchrun"]
WORKER = "laddertron.launchers.rank.worker"
ENV_LISTEN = "LADDERTRON_LISTEN"
TORCHRUN_PORT = 29500
SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5")
SLURM_STEP = ("srun", "--overlap", "--mpi=none", "--mem=0", "--ntasks=1", "--nodes=1", "--quiet", "--nodelist")
UNTERMINATED = ("openmpi", "torchrun")
"""Launchers that respect a blocked SIGTERM and end in order by SIGINT; srun waits for SIGTERM even if it is blocked."""
CONTROL = ("LADDERTRON_CONTROL", "LADDERTRON_SECRET")
"""Variables by which a rank finds its supervisor and authenticates; set by the starter of the command
(launchers/control/control.py)."""
INHERITED = ("LD_LIBRARY_PATH", child.SEARCH_PATH, cpu_tier.VARIABLE)
"""Variables of the launching shell that are forwarded if set: without them other hosts may not find the same libraries,
or compute differently."""


@dataclass(frozen=True, slots=True)
class Site:
    """The launching machine, as far as composing needs it. `version` of the launcher's program; `cores` of this host,
    `fabric` the other hosts'; `shell` the names in its environment."""

    kind: Kind
    program: str
    version: tuple[int, ...]
    python: str
    as_root: bool = False
    cores: int | None = None
    fabric: Fabric | None = None
    shell: frozenset[str] = frozenset()
    host: str = "localhost"
    listen: str | None = None
    """The library that keeps a job's sockets on loopback or the chosen interface (listen.c), where it was built."""


@dataclass(frozen=True, slots=True)
class Part:
    """Words of the command line that belong together, and the reason for them."""

    words: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class LaunchCommand:
    """`env` is what the launcher's own environment must hold beyond the shell's; ranks get it by name. Names alone
    are here of what is `inherited` from the shell and of what the starter of the command adds (`forward`): secrets."""

    parts: tuple[Part, ...]
    variables: Mapping[str, Variable] = field(default_factory=dict)
    inherited: tuple[str, ...] = ()
    forward: tuple[str, ...] = ()
    seats: tuple[str, ...] = ()
    """The listed name of each rank's host, if the launcher starts ranks in order."""
    agent: tuple[str, ...] = ()
    """What starts a program on another host, whose name follows: the launcher's remote shell, or a step of Slurm's
    beside the ranks'; () if there is none."""
    python: str = ""
    stop: int = signal.SIGTERM
    """The signal that ends the launcher. If it is another than SIGTERM, the launcher runs with that blocked."""

    @property
    def argv(self) -> tuple[str, ...]:
        return tuple(word for part in self.parts for word in part.words)

    @property
    def env(self) -> dict[str, str]:
        return {name: variable.value for name, variable in self.variables.items()}


def worker_program(site: Site) -> tuple[str, ...]:
    """A rank's command; CONTROL must be in its environment."""
    return child.command(WORKER, python=site.python)


def compose(
    deployment: Deployment, site: Site, share: JobHosts, program: Sequence[str], forward: Sequence[str] = ()
) -> LaunchCommand:
    """The command that starts `program` once for each slot of the share (one replica's, or a whole job's), with what
    config and fabric say in its environment and, by name, `forward`, which the caller sets. Raises LaunchError on
    hosts that this launcher cannot be given."""
    if not share.hosts or len({h.slots for h in share.hosts}) != 1:
        raise LaunchError(
            f"a job needs the same number of ranks on each host, got {[(h.name, h.slots) for h in share.hosts]}"
        )
    network = choose_network(deployment, share)
    env = _environment(deployment, site, share, network)
    asked = dict.fromkeys((*INHERITED, *deployment.launch.forward_env))
    inherited = tuple(name for name in asked if name in site.shell and name not in env)
    parts = _COMPOSERS[site.kind](deployment, site, share, network, (*env, *inherited, *forward))
    if deployment.launch.extra_args:
        parts.append(Part(deployment.launch.extra_args, "launch.extra_args"))
    parts.append(Part(tuple(program), "what each rank runs"))
    seats = tuple(host.name for host in share.hosts for _ in range(host.slots))
    stop = signal.SIGINT if site.kind in UNTERMINATED else signal.SIGTERM
    agent: tuple[str, ...] = ()
    if site.kind in ("openmpi", "mpich") and len(share.hosts) > 1:
        agent = tuple(shlex.split(deployment.launch.rsh_agent or "")) or SSH
    elif site.kind == "slurm" and len(share.hosts) > 1:
        agent = SLURM_STEP
    return LaunchCommand(tuple(parts), env, inherited, tuple(forward), seats, agent, site.python, stop)


def _environment(deployment: Deployment, site: Site, share: JobHosts, network: NetworkChoice) -> dict[str, Variable]:
    safe = Variable("1", "no Python program imports from the working directory")
    env = {child.SAFE_PATH: safe} | variables(deployment, network, share) | _listening(deployment, site, share, network)
    if site.kind == "slurm" and PTY in site.shell:
        env[PTY] = Variable("", "this shell was started by srun --pty, ranks are not")
    if share.route is not None and not network.interfaces:
        env[ENV_ROUTE] = Variable(share.route.peer, f"ranks use the interface that routes there: {share.route.reason}")
    if site.fabric is None:
        return env
    env[ENV_SEATS] = Variable(
        seats_text(share.hosts), "each rank compares its host and local rank with the fabric's placement"
    )
    interfaces = interfaces_text(share.hosts)
    if interfaces and deployment.launch.interface is None:
        env[ENV_INTERFACES] = Variable(interfaces, "the fabric: the interface on which ranks of each host listen")
    cores = cores_text(share.hosts)
    if cores and deployment.launch.bind_to == PLACEMENT:
        env[ENV_CORES] = Variable(cores, "launch.bind_to: each rank binds itself to the cores of its placement")
    return env


def _listening(deployment: Deployment, site: Site, share: JobHosts, network: NetworkChoice) -> dict[str, Variable]:
    """Variables that restrict the listening address of an MPI, which would bind to every address: to loopback if all
    ranks are on this host, else to the chosen interface. Also for torchrun's store, but not over several hosts: they
    connect to it by the first host's name. Over several hosts also the ports of all libraries. Raises LaunchError."""
    ports, here = deployment.launch.port_range, [host.name for host in share.hosts] in (["localhost"], [site.host])
    preloads = "LD_PRELOAD" in site.shell or "LD_PRELOAD" in deployment.launch.env
    if site.listen is None or preloads:
        if ports is None or here:
            return {}
        why = "LD_PRELOAD is set: unset it" if preloads else "laddertron was built without a compiler: build it again"
        raise LaunchError(f"launch.port_range={ports}: gloo, NCCL and MPI keep to it by a preloaded library, and {why}")
    by_name: dict[str, Variable] = {}
    if site.kind != "slurm" and here:
        by_name[ENV_LISTEN] = Variable("lo", "all ranks are on this host: restricts the listening address")
    elif site.kind not in ("slurm", "torchrun") and network.interfaces:
        why = f"{network.interface_reason}: restricts the listening address"
        by_name[ENV_LISTEN] = Variable(",".join(network.interfaces), why)
    if ports is not None and not here:
        by_name[ENV_PORTS] = Variable(ports, "launch.port_range: the ports on which libraries listen for other hosts")
    if by_name:
        by_name["LD_PRELOAD"] = Variable(site.listen, "; ".join(variable.reason for variable in by_name.values()))
    return by_name


def _binding(deployment: Deployment) -> tuple[str, str]:
    """The option of the launcher's own binding, and the reason."""
    if deployment.launch.bind_to == PLACEMENT:
        return "none", "launch.bind_to: placement: each rank binds itself"
    return deployment.launch.bind_to, "launch.bind_to: by default threads run on any core"


def crowded(deployment: Deployment, site: Site, share: JobHosts) -> bool:
    """Whether ranks share cores: configured, or more ranks than known cores on a host without devices."""
    if deployment.launch.oversubscribe is not None:
        return deployment.launch.oversubscribe
    nodes = {n.hostname: n for n in site.fabric.nodes} if site.fabric is not None else {}
    for host in share.hosts:
        node = nodes.get(host.name)
        here = site.cores if host.name in ("localhost", site.host) else None
        cores = here if node is None else len(node.cores)
        if (node is None or not node.devices) and cores is not None and host.slots > cores:
            return True
    return False


def _version(site: Site) -> str:
    return ".".join(map(str, site.version)) or "(not found on this machine)"


def _included(deployment: Deployment, site: Site, share: JobHosts, network: NetworkChoice) -> tuple[str, str]:
    """The interfaces for Open MPI, with the reason; "" if it chooses. A route gives its subnet, since other hosts may
    have another name for the interface, and only where nothing else restricts Open MPI: it refuses to do both."""
    if network.interfaces:
        return ",".join(network.interfaces), network.interface_reason
    settings = (*deployment.launch.extra_args, *deployment.launch.env, *site.shell)
    if share.route is None or any("tcp_if_" in word for word in settings):
        return "", ""
    return share.route.subnet, share.route.reason


def _openmpi(
    deployment: Deployment, site: Site, share: JobHosts, network: NetworkChoice, names: Sequence[str]
) -> list[Part]:
    launch, ranks, per_node = deployment.launch, share.ranks, share.hosts[0].slots
    word, why = _binding(deployment)
    parts = [
        Part((site.program,), f"Open MPI {_version(site)}"),
        Part(("-np", str(ranks)), f"{counted(len(share.hosts), 'host')} x {counted(per_node, 'rank')}"),
        Part(("--host", seats_text(share.hosts)), "hosts and the ranks on each"),
        Part(
            ("--map-by", launch.map_by or f"ppr:{per_node}:node"),
            "launch.map_by"
            if launch.map_by
            else "consecutive ranks share a node, so that groups span as few nodes as possible",
        ),
        Part(("--bind-to", word), why),
    ]
    if site.as_root:
        parts.append(Part(("--allow-run-as-root",), "without it Open MPI refuses to run as root"))
    if crowded(deployment, site, share):
        parts.append(Part(("--oversubscribe",), "more ranks than cores on a host"))
        parts.append(Part(("--mca", "mpi_yield_when_idle", "1"), "waiting ranks yield their core"))
    if launch.rsh_agent is not None:
        parts.append(Part(("--mca", "plm_rsh_agent", launch.rsh_agent), "launch.rsh_agent"))
    include, reason = _included(deployment, site, share, network)
    if len(share.hosts) > 1 and include:
        parts.append(Part(("--mca", "oob_tcp_if_include", include), reason))
        parts.append(Part(("--mca", "btl_tcp_if_include", include), reason))
    if len(share.hosts) > 1 and launch.port_range is not None:
        ports = port_range(launch.port_range)
        for version in ("v4", "v6"):
            low, size = f"btl_tcp_port_min_{version}", f"btl_tcp_port_range_{version}"
            words = ("--mca", low, str(ports[0]), "--mca", size, str(len(ports)))
            parts.append(Part(words, "launch.port_range: Open MPI tries its ports in order"))
    where = {ENV_LISTEN: ",".join(network.interfaces), ENV_PORTS: launch.port_range}
    if len(share.hosts) > 1 and (settings := [f"{name}={where[name]}" for name in where if name in names]):
        prefix, daemon = ("orte", "orted") if site.version[:1] in ((3,), (4,)) else ("prte", "prted")
        agent = " ".join(("env", f"LD_PRELOAD={site.listen}", *settings, daemon))
        reason = "the daemons of the other hosts listen there too"
        parts.append(Part((f"--{'prtemca' if prefix == 'prte' else 'mca'}", f"{prefix}_launch_agent", agent), reason))
    if len(share.hosts) > 1 and not network.hcas:
        shared = "vader" if site.version[:1] in ((3,), (4,)) else "sm"
        parts.append(
            Part(
                ("--mca", "pml", "ob1"),
                "MPI starts ranks and exchanges addresses, for which TCP suffices; the collectives do not use it",
            )
        )
        parts.append(
            Part(("--mca", "btl", f"self,{shared},tcp"), "itself, shared memory inside a node, TCP between nodes")
        )
    parts.extend(Part(("-x", name), "by name: its value is not on the command line") for name in names)
    return parts


def _mpich(
    deployment: Deployment, site: Site, share: JobHosts, network: NetworkChoice, names: Sequence[str]
) -> list[Part]:
    launch, ranks, per_node = deployment.launch, share.ranks, share.hosts[0].slots
    word, why = _binding(deployment)
    parts = [
        Part((site.program,), f"MPICH {_version(site)} (Hydra)"),
        Part(("-n", str(ranks)), f"{counted(len(share.hosts), 'host')} x {counted(per_node, 'rank')}"),
        Part(("-hosts", seats_text(share.hosts)), "hosts and the ranks on each"),
        Part(("-ppn", str(per_node)), "consecutive ranks share a node, so that groups span as few nodes as possible"),
        Part(("-bind-to", word), why),
    ]
    if launch.map_by:
        parts.append(Part(("-map-by", launch.map_by), "launch.map_by"))
    if launch.rsh_agent is not None:
        parts.append(Part(("-launcher", "ssh", "-launcher-exec", launch.rsh_agent), "launch.rsh_agent"))
    if len(share.hosts) > 1 and len(network.interfaces) == 1:
        parts.append(Part(("-iface", network.interfaces[0]), network.interface_reason))
    if names:
        parts.append(Part(("-genvlist", ",".join(names)), "by name: their values are not on the command line"))
    return parts


def _slurm(
    deployment: Deployment, site: Site, share: JobHosts, network: NetworkChoice, names: Sequence[str]
) -> list[Part]:
    slurm, ranks, per_node = deployment.launch.slurm, share.ranks, share.hosts[0].slots
    parts = [
        Part((site.program,), f"Slurm {_version(site)}"),
        Part((f"--mpi={slurm.mpi}",), "launch.slurm.mpi: the PMI by which ranks connect"),
        Part(
            (f"--nodes={len(share.hosts)}", f"--ntasks={ranks}"),
            f"{counted(len(share.hosts), 'node')} x {counted(per_node, 'rank')}",
        ),
        Part((f"--ntasks-per-node={per_node}", "--distribution=block"), "consecutive ranks share a node"),
    ]
    if [h.name for h in share.hosts] != ["localhost"]:
        parts.append(Part((f"--nodelist={','.join(h.name for h in share.hosts)}",), "this replica's nodes"))
    if deployment.engine.device != "cpu":
        if not all(h.devices is None for h in share.hosts):
            raise LaunchError(
                f"{share.hosts[0].name} would run several replicas, but srun assigns GPUs to steps itself and cannot "
                f"divide a node's: use launch.launcher: openmpi inside the allocation, or whole nodes per replica"
            )
        # a step that sees only its own GPU cannot use peer-to-peer copies
        parts.append(Part((f"--gpus-per-node={per_node}",), "one task per GPU; each task sees all GPUs of its node"))
    bound = deployment.launch.bind_to == PLACEMENT
    why = _binding(deployment)[1] if bound else "threads run on any core of the step"
    parts.append(Part(("--cpu-bind=none",), why))
    parts.append(Part(("--kill-on-bad-exit=1",), "a group that lost a rank cannot continue"))
    parts.append(Part(("--overlap",), "replicas share the allocation, and a relaunch does not wait for exiting steps"))
    parts.append(Part(("--export=ALL",), "passes the environment; no value is on the command line"))
    if slurm.container_image is not None:
        parts.append(Part((f"--container-image={slurm.container_image}",), "launch.slurm.container_image (Pyxis)"))
        if slurm.container_mounts:
            mounts = ",".join(slurm.container_mounts)
            parts.append(Part((f"--container-mounts={mounts}",), "launch.slurm.container_mounts"))
        if names:
            parts.append(Part((f"--container-env={','.join(names)}",), "these override the image's variables"))
    return parts


def _torchrun(
    deployment: Deployment, site: Site, share: JobHosts, network: NetworkChoice, names: Sequence[str]
) -> list[Part]:
    if len(share.hosts) > 1:
        raise LaunchError(
            f"torchrun starts ranks only on its own host, but the job has {len(share.hosts)}: `laddertron launch "
            f"--dry-run` prints the command of each host; or use launch.launcher: openmpi, mpich or slurm"
        )
    return [
        Part(child.command("torch.distributed.run", python=site.python), "torchrun, of the same Python as the ranks"),
        Part(("--standalone", "--local-addr=localhost"), "one host: ranks rendezvous on loopback"),
        Part((f"--nproc-per-node={share.hosts[0].slots}",), f"{counted(share.hosts[0].slots, 'rank')} on this host"),
        Part(("--no-python",), "the program is a command, not a Python file"),
    ]


def torchrun_hosts(
    deployment: Deployment, site: Site, share: JobHosts, program: Sequence[str]
) -> tuple[LaunchCommand, ...]:
    """Makes one command for each host, to be started there; host 0 is the rendezvous. For `launch --dry-run`."""
    commands = []
    env = _environment(deployment, site, share, choose_network(deployment, share))
    ports = deployment.launch.port_range
    port = TORCHRUN_PORT if ports is None else port_range(ports)[-1]  # ranks take the first ones
    for index, host in enumerate(share.hosts):
        parts = (
            Part(child.command("torch.distributed.run", python=site.python), f"on {host.name}"),
            Part((f"--nnodes={len(share.hosts)}", f"--node-rank={index}"), "ranks are numbered in the order of hosts"),
            Part((f"--nproc-per-node={host.slots}",), f"{counted(host.slots, 'rank')} on this host"),
            Part(
                (f"--master-addr={share.hosts[0].name}", f"--master-port={port}"),
                "the rendezvous of the hosts",
            ),
            Part(("--no-python",), "the program is a command, not a Python file"),
            Part(tuple(program), "what each rank runs"),
        )
        commands.append(LaunchCommand(parts, env))
    return tuple(commands)


_COMPOSERS = {"openmpi": _openmpi, "mpich": _mpich, "slurm": _slurm, "torchrun": _torchrun}
