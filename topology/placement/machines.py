"""The identity of a machine, as its ranks report it: hostname and boot id. Cloned images share a hostname and a
machine-id, and containers have no machine-id of their own.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from ..hardware.interfaces import addresses

MAX_ADDRESSES = 64


@dataclass(frozen=True, slots=True)
class Machine:
    """`addresses`: of its interfaces, without loopback and link-local ones; the one that its owner sees comes first."""

    hostname: str
    boot_id: str
    addresses: tuple[str, ...] = ()

    def is_one_with(self, other: Machine) -> bool:
        """Whether both are one machine: equal identity and, where both have addresses, a common one. Two containers of
        one machine share its boot id, but no address."""
        if (self.hostname, self.boot_id) != (other.hostname, other.boot_id):
            return False
        return not (self.addresses and other.addresses) or not {*self.addresses}.isdisjoint(other.addresses)


def boot_id() -> str:
    """The boot id, equal for all processes of one running kernel."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def own_addresses(seen: str = "") -> tuple[str, ...]:
    """This host's addresses, at most MAX_ADDRESSES, `seen` first."""
    every = (text.partition("/")[0] for texts in addresses().values() for text in texts)
    usable = [text for text in every if not (ip := ipaddress.ip_address(text)).is_loopback and not ip.is_link_local]
    return tuple(islice(dict.fromkeys([seen] * (seen in usable) + usable), MAX_ADDRESSES))


def this_machine() -> Machine:
    return Machine(socket.gethostname(), boot_id(), own_addresses())


def shared_hostname(machines: Mapping[int, Machine]) -> tuple[int, str] | None:
    """The first rank whose hostname another rank has on another machine, and a sentence about it; None if each machine
    has a hostname of its own."""
    first: dict[str, int] = {}
    for rank, machine in machines.items():
        other = first.setdefault(machine.hostname, rank)
        if not machine.is_one_with(machines[other]):
            where = " and ".join(
                f"{(machines[r].addresses or ('an unknown address',))[0]} (rank {r})" for r in (other, rank)
            )
            return rank, (
                f"two machines have the hostname {machine.hostname}: {where}; ranks find those of their own machine by "
                "its hostname: give each machine, or container, a hostname of its own"
            )
    return None
