"""Communicator: the collectives and connections of one tensor-parallel group, made once by topology/connect.py; its
torch groups are made by torch_groups.py.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..hardware.ports import ANY_PORT
from ..link_cost import WHOLE_BYTES, Emulation
from .collectives import AloneGather, Collective, DeviceGather, Gather
from .ledger import Ledger
from .lines import PlanChannel

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..placement.layout import GroupLayout
    from .pipeline import Pipeline

BackendName = Literal["auto", "native", "gloo", "nccl"]
Deterministic = Literal["everywhere"] | bool
CollectiveName = Literal["auto", "flat", "two_level", "one_shot", "exchange", "doubling", "pipeline", "emulated"]


class OneShotImpossible(ValueError):
    """`collective: one_shot`, and a rank of the group cannot; the message names it, its host and the reason."""


@dataclass(frozen=True, slots=True)
class CommOptions:
    """Options of a group. backend auto: native if it was built, else gloo. collective auto: `choose` of `connect` if
    given, else by size on native, and flat on the others. `deterministic`: one order of summation for every message;
    "everywhere": a binary tree over 1, 2, 4, 8 or 16 ranks, rounded at each node. `address`: the address that this rank
    binds, reachable from the group's other nodes, on one of `ports`. `timeout_s`: the longest wait for a collective
    (Communicator.set_timeout changes it). `spin_us`: how long a waiter polls before it sleeps; None: 20, or 0 with
    fewer than two cores per rank of a node. `chunk_bytes`: bytes of a large message that a node sends to another at
    once. `secret`: of the launch, part of the connections' key. `node_group`: whether the ranks of a node also have an
    all-reduce and a gather of their own."""

    backend: BackendName = "auto"
    collective: CollectiveName = "auto"
    emulation: Emulation | None = None
    overlap: bool = True
    deterministic: Deterministic = False
    process_groups: bool = True
    address: str = "127.0.0.1"
    ports: range = ANY_PORT
    connect_timeout_s: float = 60.0
    timeout_s: float = 30.0
    spin_us: float | None = None
    small_bytes: int = WHOLE_BYTES
    chunk_bytes: int = 256 << 10
    secret: bytes = b""
    node_group: bool = False

    def __post_init__(self) -> None:
        if (self.collective == "emulated") != (self.emulation is not None):
            raise ValueError("collective: emulated and an emulation (latency_s, bytes_per_s) go together")
        if self.deterministic is True and self.collective not in (
            "pipeline",
            "emulated",
        ):  # small and large messages then use the same tree
            object.__setattr__(self, "collective", "two_level")
        for name in ("small_bytes", "chunk_bytes"):
            if getattr(self, name) < 4096 or getattr(self, name) % 4096:
                raise ValueError(f"{name}={getattr(self, name)}: a multiple of 4096 is needed")


@dataclass(frozen=True, slots=True)
class TorchGroups:
    """`tp`: the whole group. `subgroups`: this rank's node (intra) and rail, if they have more than one rank, and for
    two-level gloo a second group of the node (gather). `end` destroys the groups. `store`: the rendezvous store; None
    if torch.distributed was already initialised."""

    tp: Any = None
    subgroups: dict[str, Any] = field(default_factory=dict)
    end: Callable[[], None] = lambda: None
    store: Any = None


def gather_number(
    gather: Callable[[NDArray[np.uint8]], NDArray[np.uint8]], number: float
) -> NDArray[np.int64] | NDArray[np.float64]:
    """The number of every rank of the group, in rank order: int64, or float64 if it is a float on all of them. gather:
    `Communicator.gather`, which all ranks call."""
    own = np.array([number], np.float64 if isinstance(number, float) else np.int64)
    return np.ascontiguousarray(gather(own.view(np.uint8))).view(own.dtype)[:, 0]


class Communicator:
    """The group of a replica or of a pipeline stage, on one rank. `rank`: within the group. One thread starts and waits
    for all of its collectives, in the same order on every rank. `tp`, `subgroups`: as in TorchGroups; None and empty
    without CommOptions.process_groups."""

    def __init__(
        self,
        rank: int,
        layout: GroupLayout,
        backend: str,
        all_reduce: Collective,
        gathers: Gather,
        plans: PlanChannel,
        ledger: Ledger,
        groups: TorchGroups,
        closers: list[Callable[[], None]],
        set_timeout: Callable[[float], None],
        pipeline: Pipeline | None = None,
        node_reduce: Collective | None = None,
        node_gathers: Gather | None = None,
    ) -> None:
        """pipeline: connects this stage with the others. node_reduce, node_gathers: over this rank's node; None and of
        this rank alone without CommOptions.node_group."""
        self.rank, self.size, self.layout, self.backend = rank, layout.size, layout, backend
        self.all_reduce, self.plans, self.ledger = all_reduce, plans, ledger
        self.tp, self.subgroups = groups.tp, groups.subgroups
        self.pipeline, self._set_timeout, self.node_reduce = pipeline, set_timeout, node_reduce
        self.gathers, self._closers, self._end_groups = gathers, closers, groups.end
        self.node_gathers = node_gathers or AloneGather()
        self._first: list[weakref.WeakMethod[Callable[[], None]]] = []

    @property
    def leads(self) -> bool:
        """Whether this rank makes the plans and reports to the owner: the first rank of the group, in a pipeline of the
        first stage."""
        return self.rank == 0 and (self.pipeline is None or self.pipeline.first)

    def set_timeout(self, seconds: float) -> None:
        """Sets the longest wait [s] for a collective."""
        self._set_timeout(seconds)
        if self.pipeline is not None:
            self.pipeline.set_timeout(seconds)

    def gather(self, payload: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Gathers payload, uint8 [n], of every rank in rank order into uint8 [size, n]. Waits without polling."""
        return self.gathers.start(payload).wait()

    def collect(self, payload: bytes) -> list[bytes]:
        """Gathers bytes of any length on the rank with `leads`, in rank order. All ranks must call it, between
        steps."""
        sizes = gather_number(self.gather, len(payload)).tolist()
        mine = np.zeros(max(1, *sizes), np.uint8)
        mine[: len(payload)] = np.frombuffer(payload, np.uint8)
        rows = [row[:length].tobytes() for row, length in zip(self.gather(mine), sizes, strict=True)]
        if self.pipeline is None or self.rank:
            return rows
        rails = [self.pipeline.collect(row) for row in rows]
        return [row for stage in zip(*rails, strict=True) for row in stage]

    def wait_event(self, event: Any, what: str) -> None:
        """Waits on the host for a device's event; with NCCL at most for the timeout of a collective. what: named in the
        error. Raises CollectiveTimeout or PeerLost."""
        if isinstance(self.gathers, DeviceGather):
            self.gathers.wait_for(event, what)
        else:
            event.synchronize()

    def drain(self) -> None:
        """Waits on the host for all work of the device, if collectives run on it. Raises as wait_event."""
        if isinstance(self.gathers, DeviceGather):
            self.gathers.wait_for(None, "all-reduces")

    def before_close(self, release: Callable[[], None]) -> None:
        """Calls `release`, a method, before the group closes, if its object still exists: NCCL would wait for recorded
        graphs that contain collectives."""
        self._first.append(weakref.WeakMethod(release))

    def close(self, broken: bool = False) -> None:
        """Closes every connection and thread of the group; always returns. Idempotent. broken: the process exits after
        an error; NCCL's groups are then not destroyed, because that waits for peers that may be gone."""
        first, self._first = self._first, []
        closers, self._closers = self._closers, []
        end_groups, self._end_groups = self._end_groups, lambda: None
        for method in first:
            release = method()
            if release is not None and not broken:
                release()
        for close in closers:
            close()
        if not (broken and self.backend == "nccl"):
            end_groups()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(broken=kind is not None)
