"""`launch.share_gpu`: all ranks of a job run on one host and share its GPUs, and each group of launch.ranks_per_node
(default: 1) is a node to the job. It tests the path between nodes on one machine; it is slow.

NCCL refuses two ranks on one GPU of a host, and tells hosts apart by NCCL_HOSTID: with an id of its own each rank
reaches the others through sockets, as between nodes.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence

from ...engine.config.schema import LaunchConfig
from ...topology.placement.identity import Identity
from ...topology.placement.mapping import MappingError

_VARIABLES = {
    "NCCL_NET": "Socket",
    "NCCL_IB_DISABLE": "1",
    "NCCL_SOCKET_IFNAME": "=lo",
    "NCCL_SOCKET_FAMILY": "AF_INET",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_CUMEM_HOST_ENABLE": "0",
    "NCCL_MAX_NCHANNELS": "2",
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
}


def separate(identity: Identity, environ: MutableMapping[str, str]) -> None:
    """Gives the rank a host id of its own. Must precede the first communicator."""
    environ["NCCL_HOSTID"] = f"{identity.node}-{identity.rank}"
    for name, value in _VARIABLES.items():
        environ.setdefault(name, value)


def node_names(launch: LaunchConfig, hosts: Sequence[str]) -> tuple[str, ...]:
    """The node of each rank, by the ranks' hosts: the host itself, or with share_gpu the emulated node. Raises
    MappingError if ranks that share GPUs are on several hosts."""
    if not launch.share_gpu:
        return tuple(hosts)
    if len(set(hosts)) > 1:
        raise MappingError(
            f"launch.share_gpu: ranks are on {', '.join(sorted(set(hosts)))}: start all of them on one host, or set "
            "share_gpu: false"
        )
    per_node = launch.ranks_per_node or 1
    return tuple(f"{host}-node{rank // per_node}" for rank, host in enumerate(hosts))


def gpu_index(local_rank: int, gpus: int, shares: bool) -> int | None:
    """The GPU of a host's local rank; None if there is none."""
    if shares and gpus:
        return local_rank % gpus
    return local_rank if local_rank < gpus else None
