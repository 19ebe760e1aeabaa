"""The ports on which a job's processes listen for other hosts, and how many a host needs. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ...engine.config.load import Deployment, is_loopback
from ...topology.hardware.fabric import counted
from ...topology.hardware.ports import ANY_PORT, port_range
from .host_allocation import JobHosts
from .hosts import LaunchError

ENV_PORTS = "LADDERTRON_PORTS"
"""The range for the libraries of launcher and ranks (listen.c)."""
_LAUNCHES = 2
"""At once: a standby or a reload starts beside the one that serves, a relaunch finds ports of closed connections."""
_RANK = 3
"""Listening sockets of a rank: the test of its ways, its transport, MPI."""
_GLOO, _NCCL = 4, 64
"""Those of its torch groups: one of each for gloo; NCCL has one for each channel while it connects."""
_HOST = 4
"""Of a host: the launcher or its daemon (2), the control channel, the groups' store."""


def ports_at(deployment: Deployment, address: str) -> range:
    """The ports on one of which to listen at an address."""
    text = deployment.launch.port_range
    return ANY_PORT if text is None or is_loopback(address) else port_range(text)


def require_ports(deployment: Deployment, shares: Sequence[JobHosts]) -> None:
    """Raises LaunchError if `launch.port_range` has too few ports for the ranks of a host."""
    text = deployment.launch.port_range
    ranks = Counter(host.name for share in shares for host in share.hosts for _ in range(host.slots))
    if text is None or [*ranks] == ["localhost"]:
        return
    host, most = ranks.most_common(1)[0]
    have, per_rank = len(port_range(text)), _RANK + (_GLOO if deployment.engine.device == "cpu" else _NCCL)
    need = _LAUNCHES * (most * per_rank + _HOST)
    if have < need:
        raise LaunchError(
            f"launch.port_range={text} has {counted(have, 'port')}, {host} needs {need}: {_LAUNCHES} launches at once  "
            f"x ({counted(most, 'rank')} x {per_rank} + {_HOST} of launcher, control channel and store): enlarge it"
        )
