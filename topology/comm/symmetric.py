"""Connects one_shot: memory that all GPUs of a node read and write (torch's symmetric memory), and the check of its
sums before it carries a message. All ranks of a group use it or none does.

torch exchanges numbers through the group's store, and memory as file descriptors or NVLink's fabric handles. A rank
that fails meanwhile would leave the others waiting, so the ranks first agree on all that can be asked. Never ran on
several GPUs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..hardware.cuda_stack import triton_missing
from ..link_cost import ONE_SHOT_BYTES
from ..placement.layout import GroupLayout
from .bootstrap import Bootstrap
from .collectives import CommunicationError
from .groups import TorchGroups
from .one_shot import MOST_RANKS, PROGRAM_BYTES, PROGRAMS, REGION_BYTES, OneShot
from .torch_groups import environment
from .two_level import TwoLevel

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_ROUNDS = 3  # with two buffers, the third call is the first that overwrites
_POLL_S = 1e-4
_EVENT: Any = torch.cuda.Event  # torch leaves it without types


class DirectLevels(TwoLevel):
    """A two-level all-reduce whose node's parts are one_shot's; on one node (rail: None) one_shot alone."""

    name = "one_shot"

    def __init__(self, one_shot: OneShot, rail: Any, takes: Callable[[int], bool]) -> None:
        self.one_shot, self._rail, self._takes = one_shot, rail, takes
        self.ranks, self._index = one_shot.ranks, one_shot.rank

    def carries(self, x: Tensor) -> bool:
        return self.one_shot.carries(x) and self._takes(x.nbytes)

    def __call__(self, x: Tensor) -> None:
        if self._rail is None:
            self.one_shot(x)
        else:
            super().__call__(x)

    def scatter(self, flat: Tensor, part: Tensor, async_op: bool) -> None:
        self.one_shot.scatter(flat, part)

    def collect(self, flat: Tensor, part: Tensor) -> None:
        self.one_shot.collect(flat, part)


@dataclass(frozen=True, slots=True)
class Site:
    """A group as one of its ranks sees it: its ranks' `hosts`, in order; the DeviceWait of its NCCL groups; the
    seconds that a check inside a node may take."""

    bootstrap: Bootstrap
    layout: GroupLayout
    groups: TorchGroups
    hosts: Sequence[str]
    wait: Callable[[Any, str], None]
    limit_s: float


def connect_one_shot(site: Site, takes: Callable[[int], bool]) -> tuple[DirectLevels | None, tuple[str, ...]]:
    """The all-reduce by one_shot of messages whose bytes `takes` accepts; or None, and which rank of the group on which
    host could not, and why. All ranks of the job call it at once. Raises what `site.wait` raises."""
    ranks, me = site.layout.ranks, site.bootstrap.rank
    node = next(ranks for ranks in site.layout.nodes if me in ranks)
    device = torch.device("cuda", torch.cuda.current_device())
    uuids = [uuid.decode() for uuid in site.bootstrap.all_gather(_uuid(device.index).encode())]
    one_shots: list[OneShot] = []
    intra, rail = site.groups.subgroups.get("intra"), site.groups.subgroups.get("rail")

    def share() -> str:
        one_shots.append(share_memory(intra, device))
        return ""

    def levels() -> DirectLevels:
        return DirectLevels(one_shots[0], rail, takes)

    steps: Sequence[Callable[[], str]] = (
        lambda: unable(len(node), device) or unreachable(device.index, [uuids[rank] for rank in node]),
        share,
        lambda: wrong_in_node(one_shots[0], site.limit_s, rail is not None),
        lambda: wrong_in_group(levels(), site.groups.tp, ranks.index(me), site.wait),
    )
    faults: tuple[str, ...] = ()
    for step in steps:  # each is a collective of all ranks of the job: a group that failed takes part
        reports = site.bootstrap.all_gather(("" if faults else _fault(step)).encode())
        named = zip(range(len(ranks)), ranks, site.hosts, strict=True)
        faults = faults or tuple(f"rank {i} on {host}: {reports[r].decode()}" for i, r, host in named if reports[r])
    return (None if faults else levels()), faults


def _fault(step: Callable[[], str]) -> str:
    """What the step says, or how it failed: with NCCL the group does without it."""
    try:
        return step()
    except CommunicationError:
        raise
    except Exception as error:
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def unable(per_node: int, device: torch.device) -> str:
    """Why one_shot cannot run on this device of a node with `per_node` ranks, other devices apart; or ""."""
    if not 2 <= per_node <= MOST_RANKS:
        return f"its node has {per_node} of the group's ranks, and one_shot is for 2 to {MOST_RANKS}"
    if fault := triton_missing():
        return fault
    import torch.distributed._symmetric_memory as symmetric

    backend = symmetric.get_backend(device)
    return "" if backend == "CUDA" else f"torch's symmetric memory is {backend}'s, not CUDA's: unset TORCH_SYMMMEM"


def unreachable(index: int, uuids: Sequence[str]) -> str:
    """Which GPUs of the node, by UUID, the GPU `index` of this process cannot access; or ""."""
    visible = {_uuid(i): i for i in range(torch.cuda.device_count())}
    for uuid in uuids:
        if uuid not in visible:
            return f"GPU {uuid} of its node is hidden from it: let every rank see all (CUDA_VISIBLE_DEVICES)"
        if visible[uuid] != index and not torch.cuda.can_device_access_peer(index, visible[uuid]):
            return f"GPU {index} has no peer access to GPU {visible[uuid]}"
    return ""


def share_memory(group: Any, device: torch.device) -> OneShot:
    """A OneShot over regions of a torch group's ranks; no rank may call it before all have made theirs."""
    import torch.distributed._symmetric_memory as symmetric

    own: Tensor = symmetric.empty(REGION_BYTES, dtype=torch.uint8, device=device)
    with environment(TORCH_SYMM_MEM_DISABLE_MULTICAST="1"):  # not used, and one more thing that can fail on a rank
        memory = symmetric.rendezvous(own, group)
    own.zero_()
    torch.cuda.synchronize()
    others = range(memory.world_size)
    regions = [own if r == memory.rank else memory.get_buffer(r, (REGION_BYTES,), torch.uint8) for r in others]
    return OneShot(memory.rank, regions, memory)


def _pattern(rank: int, size: int, count: int, device: torch.device) -> Tensor:
    """float32 [count]: integers whose sums over `size` ranks are exact in bfloat16."""
    most = max(1, 256 // size)
    return ((torch.arange(count, device=device) * 7919 + rank * 104729) % (2 * most + 1) - most).float()


def exact_total(size: int, count: int, device: torch.device) -> Tensor:
    return torch.stack([_pattern(rank, size, count, device) for rank in range(size)]).sum(0)


def checked_sizes(ranks: int) -> tuple[int, ...]:
    """Bytes, whole vectors of each rank: of one program, of four, of three with an uneven rest, of all; and the most,
    which may take two shots."""
    step = 16 * ranks
    sizes = (32 << 10, (25 << 10) + step, PROGRAMS * PROGRAM_BYTES, ONE_SHOT_BYTES)
    return (step, *(nbytes // step * step for nbytes in sizes))


def wrong_in_node(one_shot: OneShot, limit_s: float, in_two: bool) -> str:
    """What was wrong with sums over the node's ranks (in_two: by scatter and collect too), or "". Compiles the
    kernels, ends them after `limit_s`."""
    device, size = one_shot.device, one_shot.ranks
    for dtype in _DTYPES:
        for nbytes in checked_sizes(size):
            count = nbytes // dtype.itemsize
            right, given = (
                exact_total(size, count, device).to(dtype),
                _pattern(one_shot.rank, size, count, device).to(dtype),
            )
            x, y = given.repeat(_ROUNDS, 1), given.clone()
            for row in x:
                one_shot(row)
            if in_two:
                part = y.view(size, -1)[one_shot.rank]
                one_shot.scatter(y, part)
                one_shot.collect(y, part)
            done, until = _EVENT(), time.monotonic() + limit_s
            done.record()
            while not done.query():
                if time.monotonic() > until:
                    one_shot.abort()
                    late = ", ".join(map(str, one_shot.missing()))
                    return f"waited {limit_s:g} s for rank {late or '?'} of its node in a sum of {nbytes} bytes"
                time.sleep(_POLL_S)
            if not (bool((x == right).all()) and torch.equal(y, right if in_two else given)):
                return f"a sum of {nbytes} bytes of {dtype} was wrong"
    return ""


def wrong_in_group(levels: DirectLevels, tp: Any, rank: int, wait: Callable[[Any, str], None]) -> str:
    """What was wrong with a sum over the group, compared with NCCL's, or ""."""
    device, size = levels.one_shot.device, dist.get_world_size(tp)
    for nbytes in checked_sizes(levels.ranks)[:2]:
        x = _pattern(rank, size, nbytes // 2, device).to(torch.bfloat16)
        by_nccl = x.clone()
        levels(x)
        dist.all_reduce(by_nccl, group=tp)
        wait(None, "the first sum of one_shot")
        if not torch.equal(x, by_nccl):
            return f"a sum of {nbytes} bytes over the group differs from NCCL's"
    return ""
