"""The hosts of a running deployment: makes each replica's launch command, and replaces quarantined hosts by spares."""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ...engine.config.load import Deployment, to_json
from ...topology.hardware.interfaces import address_of, address_towards
from ..compose.detect_launcher import survey
from ..compose.host_allocation import JobHosts, divide
from ..compose.host_names import NEEDS_IPV4, HostNames
from ..compose.hosts import Host, LaunchError, read_hosts
from ..compose.mpi import CONTROL, LaunchCommand, Site, compose, worker_program
from ..compose.network import choose_network
from ..compose.ports import ports_at, require_ports
from ..compose.routes import find_route
from .detect import JobFailure
from .device_memory import device_memory
from .options import JobOptions, JobTimeouts
from .rank_logs import RankWords
from .replica import JobHooks, ReplicaSpec

log = logging.getLogger(__name__)


def substitute(share: JobHosts, places: Mapping[str, str]) -> JobHosts:
    """Replaces hosts of a share by others of the same kind; devices, interfaces and HCAs stay the same."""
    return replace(share, hosts=tuple(replace(h, name=places.get(h.name, h.name)) for h in share.hosts))


def spare_places(
    hosts: Sequence[Host], excluded: Sequence[str], spares: Sequence[str], taken: Mapping[str, str], names: HostNames
) -> dict[str, str]:
    """Assigns a spare to each excluded host, in addition to those `taken`, and to no machine twice. Raises LaunchError
    if there are too few."""
    places = dict(taken)

    def out(name: str) -> bool:
        return any(names.same(name, bad) for bad in excluded)

    def in_use(name: str) -> bool:
        return any(names.same(name, places.get(host.name, host.name)) for host in hosts)

    for host in hosts:
        if not out(places.get(host.name, host.name)):
            continue
        free = [s for s in spares if s not in places.values() and not out(s) and not in_use(s)]
        if not free:
            raise LaunchError(
                f"{host.name} is excluded and no spare is left in "
                f"launch.spare_hosts={list(spares)}: repair the host or add a spare"
            )
        places[host.name] = free[0]
    return places


class Fleet:
    """`site`: the survey of this machine, if made already. Raises LaunchError, PlacementError or OSError."""

    def __init__(
        self, deployment: Deployment, environ: Mapping[str, str], hostname: str | None = None, site: Site | None = None
    ) -> None:
        self._hostname = hostname or socket.gethostname()
        self.site = site or survey(deployment, environ)
        self.available = read_hosts(deployment, environ, self.site.fabric)
        self.shares = divide(self.available, deployment.parallel.world, self.site.fabric)
        require_ports(deployment, self.shares)
        self._spares = tuple(host.partition(":")[0] for host in deployment.launch.spare_hosts)
        listed = (*(host.name for share in self.shares for host in share.hosts), *self._spares)
        self.names = HostNames(listed, self._hostname)
        if (twice := self.names.listed_twice(host.name for host in self.available.hosts)) is not None:
            raise LaunchError(
                f"{self.available.source}: {twice[0]} and {twice[1]} are one machine: name each host once, with all "
                "its slots"
            )
        if self.site.kind == "mpich" and (host := self.names.only_ipv6(listed)):
            raise LaunchError(f"{host}{NEEDS_IPV4}")
        self.shares = tuple(self._routed(deployment, share) for share in self.shares)
        self._places: dict[str, str] = {}
        self._words = RankWords()
        self.deployment = self._resolved(deployment)

    def _resolved(self, deployment: Deployment) -> Deployment:
        """Adds the chosen interface to the deployment, so that ranks need not choose again."""
        interface_sets = {choose_network(deployment, share).interfaces for share in self.shares}
        if len(interface_sets) != 1 or len(interfaces := interface_sets.pop()) != 1:
            return deployment
        return replace(deployment, launch=replace(deployment.launch, interface=interfaces[0]))

    def _routed(self, deployment: Deployment, share: JobHosts) -> JobHosts:
        if choose_network(deployment, share).interfaces:
            return share
        return replace(share, route=find_route(self.names, share.hosts))

    @property
    def local(self) -> bool:
        """True if every rank and spare is on this machine."""
        names = [h.name for share in self.shares for h in share.hosts]
        return all(map(self.names.is_here, (*names, *self._spares)))

    def command(self, replica: int, excluded: frozenset[str] = frozenset()) -> LaunchCommand:
        """The launch command of one replica without the excluded hosts. Raises LaunchError if too few are
        left."""
        share = self.shares[replica]
        self._places = spare_places(share.hosts, sorted(excluded), self._spares, self._places, self.names)
        placed = self._routed(self.deployment, substitute(share, self._places))
        return compose(self.deployment, self.site, placed, worker_program(self.site), CONTROL)

    def local_devices(self, replica: int) -> tuple[int, ...]:
        """CUDA indices of this machine's GPUs that a replica's ranks use, if they use GPUs."""
        here = [h for h in self.shares[replica].hosts if self.names.is_here(h.name)]
        return tuple(i for h in here for i in (range(h.slots) if h.devices is None else h.devices))

    def control_host(self) -> str:
        """The address to which ranks connect: the configured one; loopback if all are local; this machine's on the
        chosen interface; else the one that routes to the first remote host. Raises LaunchError."""
        if self.deployment.daemon.control_host is not None:
            return self.deployment.daemon.control_host
        if self.local:
            return "127.0.0.1"
        if (interface := self.deployment.launch.interface) is not None:
            try:
                return address_of(interface)
            except ValueError as fault:
                raise LaunchError(f"{fault}: set daemon.control_host") from fault
        if (route := next((share.route for share in self.shares if share.route is not None), None)) is not None:
            return route.address
        hosts = [h.name for share in self.shares for h in share.hosts if not self.names.is_here(h.name)]
        return _address_towards((*hosts, *self._spares)[0])

    def options(self, replica: int, *, restart: bool) -> JobOptions:
        """A replica's options: times, sizes and addresses."""
        options = job_options(self.deployment, replica, self.control_host(), restart=restart)
        return replace(options, hosts=self.names, words=self._words)


def job_options(deployment: Deployment, replica: int, control_host: str, *, restart: bool) -> JobOptions:
    """What the deployment says of a replica's job. restart, control_host: see JobOptions."""
    daemon = deployment.daemon
    usual = JobTimeouts()
    timeouts = replace(
        usual,
        load_stall_s=daemon.load_timeout,
        suspect_s=min(usual.suspect_s, daemon.heartbeat_timeout / 2),
        dead_s=daemon.heartbeat_timeout,
        silence_s=max(usual.silence_s, daemon.heartbeat_timeout),
    )
    return JobOptions(
        deployment.parallel.world.one_replica(),
        replica=replica,
        control_host=control_host,
        ports=ports_at(deployment, control_host),
        restart=restart,
        standby=restart and daemon.standby > 0,
        max_failures=daemon.max_restarts,
        timeouts=timeouts,
    )


def replica_specs(
    deployment: Deployment,
    failed: Callable[[int, JobFailure], object],
    restart: bool = True,
    in_use: dict[str, int] | None = None,
) -> list[ReplicaSpec]:
    """One spec per replica. `restart`: see JobOptions; in_use: DeviceMemory's. Raises ValueError, OSError."""
    fleet = Fleet(deployment, os.environ)
    config = json.dumps(to_json(fleet.deployment))
    for reason in dict.fromkeys(share.route.reason for share in fleet.shares if share.route is not None):
        log.info("network: %s", reason, extra={"event": "network"})

    def spec(index: int) -> ReplicaSpec:
        memory = device_memory(deployment, fleet.local_devices(index), in_use) if restart else None
        hooks = JobHooks(lambda failure: failed(index, failure), None if memory is None else memory.free)
        options = fleet.options(index, restart=restart)
        return ReplicaSpec(lambda excluded: fleet.command(index, excluded), config, options, hooks)

    return [spec(index) for index in range(deployment.parallel.replicas)]


def _address_towards(host: str) -> str:
    try:
        return address_towards(host)
    except socket.gaierror as error:
        raise LaunchError(f"host {host}: {error.strerror}: correct launch.hosts, or name its address") from None
    except OSError as error:
        raise LaunchError(f"no route to {host} ({error}): set daemon.control_host or launch.interface") from None
