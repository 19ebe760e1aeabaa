"""The interface and address by which a rank reaches the others of its group."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import MutableMapping, Sequence
from ipaddress import ip_address

from ...engine.config.schema import Deployment
from ...topology.hardware.interfaces import address_of, address_towards, interface_of
from ...topology.hardware.sysfs import Sysfs
from ..compose.host_names import resolve
from ..compose.rank_mapping import ENV_INTERFACES, ENV_ROUTE, of_host

log = logging.getLogger(__name__)


def use_route(deployment: Deployment, environ: MutableMapping[str, str], fs: Sysfs | None = None) -> None:
    """Where neither configuration nor placement chose the interface: restricts NCCL, gloo, libfabric, UCX and Open MPI
    to the one that routes to the other hosts, unless variables say otherwise. Must precede MPI and torch. UCX may
    choose by itself where the host has RDMA ports."""
    peer = environ.get(ENV_ROUTE)
    if peer is None or deployment.launch.interface is not None or ENV_INTERFACES in environ:
        return
    try:
        address = address_towards(peer)
        interface = interface_of(address)
    except (OSError, ValueError) as error:
        log.warning("no interface routes to %s (%s): libraries choose one; set launch.interface", peer, error)
        return
    if interface == interface_of("127.0.0.1"):  # of a host that announces its own address over several links
        log.info("network: %s, which is on no link, routes to %s: libraries choose the interface", address, peer)
        return
    names = {"NCCL_SOCKET_IFNAME": f"={interface}", "GLOO_SOCKET_IFNAME": interface, "FI_TCP_IFACE": interface}
    if not (fs or Sysfs()).names("sys/class/infiniband"):
        names["UCX_NET_DEVICES"] = interface
    if not any(name.startswith("OMPI_MCA_btl_tcp_if_") for name in environ):
        names["OMPI_MCA_btl_tcp_if_include"] = interface
    for name, value in names.items():
        environ.setdefault(name, value)
    log.info("network: %s (%s) routes to %s", interface, address, peer)


def sockets_refused(backend: str) -> str:
    """Why `parallel.require_transport: ib` refuses a backend that has only sockets."""
    return (
        f"parallel.require_transport is ib, backend {backend} sends over sockets between nodes: use backend nccl, "
        "or require_transport: any"
    )


def local_address(deployment: Deployment, nodes: Sequence[str]) -> str:
    """The address that this rank binds for its group: loopback on one node, else that of the configured interface, of
    the interface that the launcher passed for this host, that on the route to the other hosts, or of this host's name.
    Raises ValueError if the interface has none, or the name resolves to loopback."""
    if len(set(nodes)) == 1:
        return "127.0.0.1"
    if deployment.launch.interface is not None:
        return address_of(deployment.launch.interface)
    hostname = socket.gethostname()
    placed = of_host(ENV_INTERFACES, os.environ.get(ENV_INTERFACES), hostname)
    if placed is not None:
        try:
            return address_of(placed)
        except ValueError as error:
            raise ValueError(
                f"{hostname}: {error}: the fabric file differs: save it again (`laddertron launch CONFIG topo "
                "--save FILE`) or set launch.interface"
            ) from None
    if (peer := os.environ.get(ENV_ROUTE)) is not None:
        return address_towards(peer)
    own = resolve(hostname)
    usable = [address for address in own if not ip_address(address).is_loopback]
    if not usable:
        raise ValueError(
            f"{hostname} resolves to {', '.join(own) or 'no address'}: set launch.interface to the interface that "
            f"reaches the other nodes ({', '.join(sorted(set(nodes)))})"
        )
    return usable[0]
