"""The expected place of each rank: set in its environment by the composer, verified when ranks meet, and the binding of
its threads to cores. Only with a fabric, whose host names are those that hosts report.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from ...topology.hardware.fabric import format_cpus, parse_cpus
from ...topology.placement.layout import GroupLayout
from ...topology.placement.mapping import MappingError, same_host
from ...topology.placement.placement import Placement, Seat
from ...topology.placement.world import World
from .hosts import Host

ENV_SEATS = "LADDERTRON_SEATS"
"""`node1:8,node2:8`: the hosts in the order of ranks."""
ENV_INTERFACES = "LADDERTRON_INTERFACES"
"""`node1=ib0,node2=bond0`: the interface that the placement chose on each host to connect to others."""

ENV_ROUTE = "LADDERTRON_ROUTE"
"""An address of one of the job's hosts: each host uses the interface that routes to it, or has it."""

ENV_CORES = "LADDERTRON_CORES"
"""`node1=0-13/14-27,node2=0-3+8/4-7`: the cores of each host's seats by local rank, if launch.bind_to is placement."""

_FORMS = {ENV_INTERFACES: "node1=ib0,node2=ib0", ENV_CORES: "node1=0-13/14-27,node2=0-3+8/4-7"}


def seats_text(hosts: Sequence[Host]) -> str:
    return ",".join(f"{host.name}:{host.slots}" for host in hosts)


def expected(text: str) -> Placement:
    """ENV_SEATS as a placement of one group. Raises MappingError on a malformed value."""
    seats: list[Seat] = []
    nodes: list[tuple[int, ...]] = []
    for part in text.split(","):
        name, _, count = part.partition(":")
        if not name or not count.isdecimal() or not 1 <= int(count) <= 65536:
            raise MappingError(f"{ENV_SEATS}={text[:200]!r}: expected node1:8,node2:8; laddertron sets it: unset it")
        first = len(seats)
        seats += [Seat(first + local, name, local, None, None, "", None, (), "") for local in range(int(count))]
        nodes.append(tuple(range(first, len(seats))))
    if len({len(ranks) for ranks in nodes}) > 1:
        raise MappingError(f"{ENV_SEATS}={text[:200]!r}: hosts with unequal numbers of ranks; unset it")
    return Placement(World(len(seats)), tuple(seats), (GroupLayout(tuple(nodes)),))


def interfaces_text(hosts: Sequence[Host]) -> str:
    """The value of ENV_INTERFACES; "" if the placement has none for some host, or there is only one host."""
    if len(hosts) < 2 or not all(host.interface for host in hosts):
        return ""
    return ",".join(f"{host.name}={host.interface}" for host in hosts)


def cores_text(hosts: Sequence[Host]) -> str:
    """The value of ENV_CORES; "" if the placement has no cores for some seat."""
    if not all(len(host.cores) == host.slots for host in hosts):
        return ""
    return ",".join(f"{host.name}={'/'.join(_listed(cores) for cores in host.cores)}" for host in hosts)


def _listed(cores: Sequence[int]) -> str:
    return format_cpus(cores).replace(",", "+")


def cores_here(text: str | None, hostname: str, local_rank: int) -> tuple[int, ...] | None:
    """This rank's entry in ENV_CORES; None if unset. Raises MappingError on an invalid value."""
    entry = of_host(ENV_CORES, text, hostname)
    if entry is None:
        return None
    try:
        cores = parse_cpus(entry.split("/")[local_rank].replace("+", ","))
    except (ValueError, IndexError):
        cores = ()
    if not cores:
        raise MappingError(
            f"{ENV_CORES}={entry[:200]!r} for {hostname}: no cores for local rank {local_rank}; laddertron sets "
            "it: unset it"
        )
    return cores


def of_host(name: str, text: str | None, hostname: str) -> str | None:
    """This host's entry in the value of that variable; None if unset. Raises MappingError on an invalid value."""
    if text is None:
        return None
    entry = None
    for part in text.split(","):
        host, sign, value = part.partition("=")
        if not host or not sign or not value:
            raise MappingError(f"{name}={text[:200]!r}: expected {_FORMS[name]}; laddertron sets it: unset it")
        if same_host(host, hostname):
            entry = value
    return entry


TASKS = "/proc/self/task"


def bind(cores: Iterable[int]) -> None:
    """Binds this process's present and future threads to `cores`. Raises MappingError if the machine lacks one."""
    requested = set(cores)
    for thread in map(int, os.listdir(TASKS)):
        try:
            os.sched_setaffinity(thread, requested)
        except ProcessLookupError:
            continue  # it ended meanwhile
        except OSError:
            break  # none of the cores is there, which what follows says
    # of cores that a container or a batch step lacks, the kernel says nothing
    given = os.sched_getaffinity(0)
    if given != requested:
        raise MappingError(
            f"launch.bind_to is placement, with cores {format_cpus(requested)} for this rank, but this process may use "
            f"{format_cpus(given)}: save the fabric from inside the same allocation or container (`laddertron launch "
            "CONFIG topo --save FILE`), or set launch.bind_to: none"
        )
