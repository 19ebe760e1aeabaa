"""Which machine each listed host name means: by name, by the addresses to which it resolves, and by the ranks that were
started there. A host may be listed by the name or address of any of its interfaces; its ranks report its hostname.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from ...engine.config.load import is_loopback
from ...topology.placement.machines import Machine, this_machine
from ...topology.placement.mapping import same_host

RESOLVERS = 16
NEEDS_IPV4 = ", and MPICH's mpiexec connects by IPv4: give it an IPv4 address, or set launch.launcher: openmpi"


def resolve(name: str) -> tuple[str, ...]:
    """The addresses of a host name or address, IPv4 first; () if it does not resolve: ssh may know it nevertheless."""
    try:
        addresses = dict.fromkeys(str(at[4][0]) for at in socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM))
        return tuple(sorted(addresses, key=lambda address: ":" in address))
    except (OSError, UnicodeError):
        return ()


class HostNames:
    """`names`: all listed ones; `hostname`: this machine's. Resolves them once."""

    def __init__(
        self, names: Iterable[str], hostname: str, resolve: Callable[[str], tuple[str, ...]] = resolve
    ) -> None:
        self._here = replace(this_machine(), hostname=hostname)
        self._machines: dict[str, Machine] = {}
        remote = [name for name in dict.fromkeys(names) if not is_loopback(name) and not same_host(name, hostname)]
        with ThreadPoolExecutor(RESOLVERS) as pool:
            self._resolved = dict(zip(remote, pool.map(resolve, remote), strict=True))

    def addresses(self, name: str) -> tuple[str, ...]:
        """Those of the machine itself if a rank was there, else those to which its name resolves."""
        return self._machine(name).addresses

    def only_ipv6(self, names: Iterable[str]) -> str:
        """The first of several names that resolves to IPv6 addresses alone, with them; "" if there is none."""
        for name in dict.fromkeys(names):
            if (resolved := self._resolved.get(name)) and all(":" in address for address in resolved):
                return f"{name} has only IPv6 addresses ({', '.join(resolved)})"
        return ""

    def listed_twice(self, names: Iterable[str]) -> tuple[str, str] | None:
        """The first two different names of one machine, by the addresses to which they resolve; None if there are
        none."""
        owners: dict[str, str] = {}
        for name in dict.fromkeys(names):
            here = self.is_here(name)
            for address in [self._here.hostname] if here else self._resolved.get(name, ()):
                if (other := owners.setdefault(address, name)) != name:
                    return other, name
        return None

    def is_here(self, name: str) -> bool:
        """True if a name means this machine."""
        return self.same(name, self._here.hostname)

    def same(self, name: str, other: str) -> bool:
        """Whether two names, listed or hostnames, mean one machine, as far as is known."""
        return same_host(name, other) or _alike(self._machine(name), self._machine(other))

    def contact(self, seats: Sequence[str], rank: int, machine: Machine) -> str | None:
        """Binds the listed name of a rank to the machine on which it runs, and returns the name. `seats`: the listed
        name of each rank if the launcher starts them in order, () if unknown: decides if neither the machine's
        hostname nor its addresses belong to exactly one name."""
        names = [name for name in dict.fromkeys(seats) if _alike(self._listed(name), machine)]
        name = names[0] if len(names) == 1 else seats[rank] if rank < len(seats) else None
        if name is not None:
            self._machines[name] = machine
        return name

    def _listed(self, name: str) -> Machine:
        if is_loopback(name) or same_host(name, self._here.hostname):
            return self._here
        resolved = self._resolved.get(name, ())
        return self._here if not {*resolved}.isdisjoint(self._here.addresses) else Machine(name, "", resolved)

    def _machine(self, name: str) -> Machine:
        bound = self._machines.get(name)
        return self._listed(name) if bound is None else bound


def _alike(a: Machine, b: Machine) -> bool:
    """By identity where both have reported it: machines of one image have equal addresses on their bridges."""
    if a.boot_id and b.boot_id:
        return a.is_one_with(b)
    return same_host(a.hostname, b.hostname) or not {*a.addresses}.isdisjoint(b.addresses)
