"""Communicator: everything that one tensor-parallel group needs to communicate, made once by topology/connect.py, with
torch groups of torch_groups.py.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..link_cost import WHOLE_BYTES, Emulation
from .collectives import Collective, DeviceGather, Gather, Gathering
from .ledger import Ledger
from .lines import PlanChannel

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..placement.layout import GroupLayout
    from .pipeline import Pipeline

BackendName = Literal["auto", "native", "mpi", "gloo", "nccl"]
Deterministic = Literal["everywhere"] | bool
CollectiveName = Literal["auto", "flat", "two_level", "exchange", "doubling", "pipeline", "emulated"]


@dataclass(frozen=True, slots=True)
class CommOptions:
    """backend auto: native where it was built, else gloo. collective auto: `choose` of `connect` where given, else by
    size on native and flat on the others. `deterministic`: one order of summation for every message; "everywhere": a
    binary tree over the ranks, rounded at each node, for 1, 2, 4, 8 or 16 of them. `address`: what this rank binds to,
    reachable from the group's other nodes. `timeout_s`: how long a collective may make its caller wait
    (Communicator.set_timeout changes it). `spin_us`: how long a waiter looks before it sleeps, None: not at all where
    ranks outnumber cores. `chunk_bytes`: of a large message, what one node
    sends another at once. `secret`: the launch's, mixed into the connections' key. `node_group`:
    whether the ranks of a node have an all-reduce of their own as well."""

    backend: BackendName = "auto"
    collective: CollectiveName = "auto"
    emulation: Emulation | None = None
    overlap: bool = True
    deterministic: Deterministic = False
    process_groups: bool = True
    address: str = "127.0.0.1"
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
        ):  # the one tree small and large share
            object.__setattr__(self, "collective", "two_level")
        for name in ("small_bytes", "chunk_bytes"):
            if getattr(self, name) < 4096 or getattr(self, name) % 4096:
                raise ValueError(f"{name}={getattr(self, name)}: a multiple of 4096 is needed")


@dataclass(frozen=True, slots=True)
class TorchGroups:
    """`tp`: the whole group; `subgroups`: this rank's node (intra) and rail, those with more than one rank, and for
    gloo in two levels a second one of the node (gather). `end` destroys what was made. `store`: what the ranks met in;
    None where torch.distributed was initialised before."""

    tp: Any = None
    subgroups: dict[str, Any] = field(default_factory=dict)
    end: Callable[[], None] = lambda: None
    store: Any = None


class Communicator:
    """One group on one rank: a replica's, or that of a pipeline's stage. `rank` counts inside the group; one thread
    starts and waits for all of its collectives, in the same order on every rank. `tp` and `subgroups`: torch groups, as
    TorchGroups says; None and empty where CommOptions.process_groups is off. Those groups end last."""

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
    ) -> None:
        """pipeline: what connects this group, a stage, with the others. node_reduce: over this rank's node alone; None
        without CommOptions.node_group."""
        self.rank, self.size, self.layout, self.backend = rank, layout.size, layout, backend
        self.all_reduce, self.plans, self.ledger = all_reduce, plans, ledger
        self.tp, self.subgroups = groups.tp, groups.subgroups
        self.pipeline, self._set_timeout, self.node_reduce = pipeline, set_timeout, node_reduce
        self.gathers, self._closers, self._end_groups = gathers, closers, groups.end
        self._first: list[weakref.WeakMethod[Callable[[], None]]] = []

    @property
    def leads(self) -> bool:
        """Whether this rank plans and speaks for all: the group's first, of a pipeline the first stage's."""
        return self.rank == 0 and (self.pipeline is None or self.pipeline.first)

    def set_timeout(self, seconds: float) -> None:
        """How long a collective may make its caller wait from now on."""
        self._set_timeout(seconds)
        if self.pipeline is not None:
            self.pipeline.set_timeout(seconds)

    def start_gather(self, payload: NDArray[np.uint8]) -> Gathering:
        """Sets off the gathering of payload, uint8 [n] with the same n everywhere; `.wait()` gives uint8 [size, n]."""
        return self.gathers.start(payload)

    def gather(self, payload: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """uint8 [n] of every rank, in rank order: uint8 [size, n]. Blocks, asleep."""
        return self.gathers.start(payload).wait()

    def collect(self, payload: bytes) -> list[bytes]:
        """Every rank's bytes, of any lengths, in rank order, on the rank that leads; all call it, between steps."""
        lengths = self.gather(np.array([len(payload)], np.int64).view(np.uint8))
        each = np.ascontiguousarray(lengths).view(np.int64)[:, 0].tolist()
        mine = np.zeros(max(1, *each), np.uint8)
        mine[: len(payload)] = np.frombuffer(payload, np.uint8)
        rows = [row[:length].tobytes() for row, length in zip(self.gather(mine), each, strict=True)]
        if self.pipeline is None or self.rank:
            return rows
        rails = [self.pipeline.collect(row) for row in rows]
        return [row for stage in zip(*rails, strict=True) for row in stage]

    def wait_event(self, event: Any, what: str) -> None:
        """The host waits for a device's event, for `what` in words; over NCCL no longer than a collective may take.
        Raises CollectiveTimeout or PeerLost."""
        if isinstance(self.gathers, DeviceGather):
            self.gathers.wait_for(event, what)
        else:
            event.synchronize()

    def drain(self) -> None:
        """Where collectives run on the device, the host waits for all that it was given. Raises as wait_event."""
        if isinstance(self.gathers, DeviceGather):
            self.gathers.wait_for(None, "all-reduces")

    def before_close(self, release: Callable[[], None]) -> None:
        """Calls this method first when the group closes, if its object still lives: recorded graphs that hold
        collectives must be gone, or NCCL waits for them."""
        self._first.append(weakref.WeakMethod(release))

    def close(self, broken: bool = False) -> None:
        """Ends every connection and thread of the group; always returns. Idempotent. broken: after an error, when the
        process ends next; NCCL's groups are left as they are, since ending them waits for peers that may be gone."""
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
