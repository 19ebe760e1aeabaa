"""The interface and HCAs of a job's ranks, and the variables that pass them to NCCL, gloo, UCX and MPI. Pure; the
libraries choose what neither configuration nor placement sets.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ...engine.config.load import Deployment
from ...topology.hardware.cpu_tier import LOOKS, LOOKS_VARIABLE
from .host_allocation import JobHosts
from .hosts import LaunchError


@dataclass(frozen=True, slots=True)
class NetworkChoice:
    """`interfaces` (one, unless hosts have different names for it) and `hcas` (port keys), with the reason for each; ()
    if the libraries choose."""

    interfaces: tuple[str, ...] = ()
    interface_reason: str = ""
    hcas: tuple[str, ...] = ()
    hcas_reason: str = ""


@dataclass(frozen=True, slots=True)
class Variable:
    """An environment variable of the ranks and the reason for it."""

    value: str
    reason: str = field(compare=False)


def choose_network(deployment: Deployment, share: JobHosts) -> NetworkChoice:
    """Chooses interfaces and HCAs: the configured ones, else those of the placement."""
    launch = deployment.launch
    interfaces, why = (
        ((launch.interface,), "launch.interface") if launch.interface else (share.interfaces, "the fabric")
    )
    hcas, why_hcas = (launch.hcas, "launch.hcas") if launch.hcas else (share.hcas, "the fabric: nearest to the devices")
    return NetworkChoice(interfaces, why if interfaces else "", hcas, why_hcas if hcas else "")


def variables(deployment: Deployment, network: NetworkChoice, share: JobHosts) -> dict[str, Variable]:
    """The ranks' environment: derived, then `launch.env`. Raises LaunchError if ranks of a job need different
    values."""
    by_name: dict[str, Variable] = {}
    if network.interfaces:
        # `=`: exactly this name; without it NCCL takes every interface that begins so
        by_name["NCCL_SOCKET_IFNAME"] = Variable(f"={','.join(network.interfaces)}", network.interface_reason)
        if len(network.interfaces) == 1:
            by_name["GLOO_SOCKET_IFNAME"] = Variable(network.interfaces[0], network.interface_reason)
    if deployment.parallel.require_transport == "socket":
        by_name["NCCL_IB_DISABLE"] = Variable("1", "parallel.require_transport: socket")
    elif network.hcas:
        ports = ",".join(hca if ":" in hca else f"{hca}:1" for hca in network.hcas)
        by_name["NCCL_IB_HCA"] = Variable(f"={ports}", network.hcas_reason)
        by_name["UCX_NET_DEVICES"] = Variable(ports, network.hcas_reason)
    if "UCX_NET_DEVICES" not in by_name and network.interfaces:
        by_name["UCX_NET_DEVICES"] = Variable(
            ",".join(network.interfaces), "restricts UCX, if MPI uses it at the start, to this interface"
        )
    if deployment.engine.threads is not None:
        by_name["OMP_NUM_THREADS"] = Variable(str(deployment.engine.threads), "engine.threads")
    if deployment.engine.device != "cuda":
        by_name[LOOKS_VARIABLE] = Variable(LOOKS, "torch's waiting threads leave their cores to the kernels")
    if deployment.engine.device != "cpu":
        used = {h.devices for h in share.hosts}
        if len(used) > 1:
            shown = "; ".join(f"{h.name}: {h.devices or 'the first'}" for h in share.hosts)
            raise LaunchError(f"ranks of one job need the same devices on each host, got {shown}: use whole hosts")
        devices = share.hosts[0].devices
        if devices is not None:
            text = ",".join(map(str, devices))
            by_name["CUDA_VISIBLE_DEVICES"] = Variable(text, "this job's part of the host's devices")
    configured = {name: Variable(value, "launch.env") for name, value in deployment.launch.env.items()}
    return dict(sorted({**by_name, **configured}.items()))
