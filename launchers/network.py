"""Which interface and HCAs a job's ranks use, and how NCCL, gloo, UCX and MPI are told: pure, from fabric and config.

Never a hard-coded name: what neither the config nor the fabric says is left to the libraries, and the choice says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..engine.config import Deployment
from ..topology.fabric import Fabric, Node
from .hosts import Host


@dataclass(frozen=True, slots=True)
class Wires:
    """`interface` and `hcas` (port keys, `mlx5_0` or `mlx5_0:2`) with the reason for each; None and () where nobody
    knows better than the libraries."""

    interface: str | None = None
    interface_reason: str = ""
    hcas: tuple[str, ...] = ()
    hcas_reason: str = ""


@dataclass(frozen=True, slots=True)
class Variable:
    """An environment variable of the ranks and why it is set."""

    value: str
    reason: str = field(compare=False)


def _interfaces(node: Node) -> dict[str, float]:
    return {n.name: n.gbit_per_s or 0.0 for n in node.nics if n.up and n.physical and n.addresses}


def choose_wires(deployment: Deployment, fabric: Fabric | None, hosts: Sequence[Host]) -> Wires:
    """What the config names; else what the fabric has under one name on every host: the fastest interface, the active
    HCAs. One host needs neither."""
    launch = deployment.launch
    interface, interface_reason = launch.interface, "launch.interface"
    hcas, hcas_reason = launch.hcas, "launch.hcas"
    by_name = {n.hostname: n for n in fabric.nodes} if fabric is not None else {}
    nodes = [by_name[h.name] for h in hosts if h.name in by_name]
    if len(hosts) > 1 and len(nodes) == len(hosts):
        if interface is None:
            common = set.intersection(*(set(_interfaces(n)) for n in nodes))
            ranked = sorted(common, key=lambda name: (-min(_interfaces(n)[name] for n in nodes), name))
            interface = ranked[0] if ranked else None
            interface_reason = "the fastest interface that is up, with an address, on every host of the fabric"
        if not hcas:
            active = [{h.key for h in n.hcas if h.active} for n in nodes]
            hcas = tuple(sorted(set.intersection(*active)))
            hcas_reason = "the fabric's active RDMA ports, by the same name on every host"
    return Wires(interface, interface_reason if interface else "", hcas, hcas_reason if hcas else "")


def variables(deployment: Deployment, wires: Wires, hosts: Sequence[Host]) -> dict[str, Variable]:
    """The ranks' derived environment; what `launch.env` names is left to it."""
    found: dict[str, Variable] = {}
    if wires.interface is not None:
        found["NCCL_SOCKET_IFNAME"] = Variable(f"={wires.interface}", wires.interface_reason)
        found["GLOO_SOCKET_IFNAME"] = Variable(wires.interface, wires.interface_reason)
    transport = deployment.parallel.require_transport
    if transport == "socket":
        found["NCCL_IB_DISABLE"] = Variable("1", "parallel.require_transport: socket")
    elif wires.hcas:
        ports = ",".join(hca if ":" in hca else f"{hca}:1" for hca in wires.hcas)
        found["NCCL_IB_HCA"] = Variable(f"={ports}", wires.hcas_reason)
        found["UCX_NET_DEVICES"] = Variable(ports, wires.hcas_reason)
    if "UCX_NET_DEVICES" not in found and wires.interface is not None:
        found["UCX_NET_DEVICES"] = Variable(wires.interface, "no RDMA port: UCX would look for another way round")
    if deployment.engine.threads is not None:
        found["OMP_NUM_THREADS"] = Variable(str(deployment.engine.threads), "engine.threads")
    if deployment.engine.device != "cpu" and hosts and not all(h.whole for h in hosts):
        first, count = hosts[0].first, hosts[0].slots
        devices = ",".join(str(first + i) for i in range(count))
        found["CUDA_VISIBLE_DEVICES"] = Variable(devices, "this replica's share of the host's devices")
    return {name: found[name] for name in sorted(found) if name not in deployment.launch.env}


def told(deployment: Deployment, derived: Mapping[str, Variable]) -> dict[str, Variable]:
    """Derived variables and those of `launch.env`, by name."""
    said = {name: Variable(value, "launch.env") for name, value in deployment.launch.env.items()}
    return dict(sorted({**derived, **said}.items()))
