"""The interface by which hosts reach each other, found by asking the kernel for routes: sends nothing."""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import ip_address, ip_interface, ip_network

from ...topology.hardware.interfaces import address_towards, addresses, interface_of
from .host_allocation import Route
from .host_names import HostNames
from .hosts import Host


def find_route(names: HostNames, hosts: Sequence[Host]) -> Route | None:
    """The route from this machine to the first other host that resolves; None for a job on one host, or without a
    route."""
    remote = [host.name for host in hosts if not names.is_here(host.name)]
    for name in remote if len(hosts) > 1 else ():
        for peer in names.addresses(name):
            try:
                own = address_towards(peer)
                if not ip_address(own).is_loopback:
                    interface = interface_of(own)
                    return Route(peer, name, interface, own, _subnet(names, remote, interface, own))
            except (OSError, ValueError):
                continue
    return None


def _subnet(names: HostNames, remote: Sequence[str], interface: str, own: str) -> str:
    (within,) = [at.network for text in addresses()[interface] if str((at := ip_interface(text)).ip) == own]
    if within.version != 4:  # Open MPI reads subnets of IPv4 alone
        return ""
    shared = all(any(ip_address(at) in within for at in names.addresses(name)) for name in remote)
    return str(ip_network(within)) if shared else ""
