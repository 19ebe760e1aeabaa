"""The ranks of a training run: FSDP2 over a mesh of (replicate, shard) and the collectives that a trainer needs. A
single process does not use torch.distributed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...topology.comm.bootstrap import Bootstrap, store_at
from ...topology.comm.torch_groups import environment
from ...topology.hardware.interfaces import interface_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_TIMEOUT_S = 600.0
_TIMEOUT = timedelta(days=1)
"""How long the others wait while rank 0 reads text: an end of it ends the job, by way of the launcher."""


class DataParallel:
    """All ranks; `shards` of them hold a model together, the other groups of as many hold copies. A context manager."""

    def __init__(
        self,
        bootstrap: Bootstrap | None = None,
        address: str = "127.0.0.1",
        device: torch.device = torch.device("cpu"),  # noqa: B008 (immutable)
        shards: int | None = None,
    ) -> None:
        """All ranks at once; `address` is this rank's own. Raises ValueError where shards do not divide the ranks."""
        self.rank, self.size = (0, 1) if bootstrap is None else (bootstrap.rank, bootstrap.size)
        self.device, self.shards = device, shards or self.size
        if self.size % self.shards:
            raise ValueError(f"{self.size} ranks are not a multiple of {self.shards} shards")
        self.replica, self.place = divmod(self.rank, self.shards)
        self._mesh: DeviceMesh | None = None
        self._firsts = 0
        if bootstrap is not None and self.size > 1:
            self._open(bootstrap, address)

    def _open(self, bootstrap: Bootstrap, address: str) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        self._store = store_at(bootstrap, 0, address, _TIMEOUT_S)
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        with environment(GLOO_SOCKET_IFNAME=interface_of(address)):
            dist.init_process_group(
                backend, store=self._store, rank=self.rank, world_size=self.size, timeout=timedelta(seconds=_TIMEOUT_S)
            )
            replicas = self.size // self.shards
            names = ("replicate", "shard")
            mesh = init_device_mesh(self.device.type, (replicas, self.shards), mesh_dim_names=names)
            self._mesh = mesh if replicas > 1 else mesh["shard"]

    def __enter__(self) -> DataParallel:
        return self

    def __exit__(self, *error: object) -> None:
        if self._mesh is not None and error[0] is None:  # else others may wait in a collective: the launcher ends them
            dist.destroy_process_group()

    def shard(self, model: nn.Module, units: Iterable[nn.Module], compute: torch.dtype) -> None:
        """Splits every parameter's rows over the shards; a unit's are gathered while it computes, as `compute`.
        Gradients are means over the ranks, in fp32."""
        if self._mesh is None:
            return
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False)
        for unit in (*units, model):
            # The root's too: else, after a forward pass, `parameters()` are whole ones that an optimizer must not hold.
            fully_shard(unit, mesh=self._mesh, mp_policy=policy, reshard_after_forward=True)

    def rows(self, count: int) -> range:
        """Which of a parameter's rows this rank holds: FSDP2 splits as torch.chunk does."""
        size = -(-count // self.shards)
        return range(min(count, self.place * size), min(count, (self.place + 1) * size))

    def sum(self, x: Tensor) -> Tensor:
        if self._mesh is not None:
            dist.all_reduce(x)
        return x

    def barrier(self) -> None:
        self.sum(torch.zeros(1, device=self.device))

    def first_does(self, work: Callable[[], None]) -> None:
        """Rank 0 does it, however long it takes; the others return when it is done."""
        self._firsts += 1
        key = f"laddertron/first/{self._firsts}"
        if self.rank == 0:
            work()
        if self._mesh is not None:
            if self.rank == 0:
                self._store.set(key, b"1")
            else:
                self._store.wait([key], _TIMEOUT)


ALONE = DataParallel()


def local(x: Any) -> Tensor:
    tensor: Tensor = x.to_local() if hasattr(x, "to_local") else x
    return tensor


def whole(x: Any) -> Tensor:
    """All rows; of a sharded tensor every rank calls it at once."""
    tensor: Tensor = x.full_tensor() if hasattr(x, "full_tensor") else x
    return tensor
