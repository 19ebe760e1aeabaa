"""Communicator: everything that one tensor-parallel group needs to talk, made once at start by `connect`.

Chooses the backend, lays Megatron-core's groups over the layout (axes intra, rail, replica), never touches Megatron's
parallel_state. Knows no model and no schedule.
"""

from __future__ import annotations

import os
import struct
import warnings
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from . import transport
from .bootstrap import Bootstrap, MpiBootstrap, open_store
from .collectives import Blocking, Collective, Gather, Gathering
from .cost import WHOLE_BYTES
from .emulated import Emulation, emulate
from .interfaces import interface_of
from .ledger import Ledger
from .mesh import connect_mesh
from .plans import PlanChannel

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from .layout import GroupLayout

BackendName = Literal["auto", "native", "mpi", "gloo", "nccl"]
CollectiveName = Literal["auto", "flat", "two_level", "exchange", "doubling", "pipeline", "emulated"]


@dataclass(frozen=True, slots=True)
class CommOptions:
    """backend auto: native where it was built, else gloo. collective auto: `choose` of `connect` where given, else by
    size on native and flat on the others. `deterministic`: one reduction tree for every size. `address`: what this rank
    binds to, reachable from the group's other nodes. `timeout_s`: how long a collective may make its caller wait
    (Communicator.set_timeout changes it). `spin_us`: how long a waiter looks before it sleeps, None: not at all where
    ranks outnumber cores. `cpu`: the communication thread's core. `chunk_bytes`: of a large message, what one node
    sends another at once. `secret`: the launch's, mixed into the connections' key."""

    backend: BackendName = "auto"
    collective: CollectiveName = "auto"
    emulation: Emulation | None = None
    overlap: bool = True
    deterministic: bool = False
    process_groups: bool = True
    address: str = "127.0.0.1"
    connect_timeout_s: float = 60.0
    timeout_s: float = 30.0
    spin_us: float | None = None
    cpu: int | None = None
    small_bytes: int = WHOLE_BYTES
    chunk_bytes: int = 256 << 10
    secret: bytes = b""

    def __post_init__(self) -> None:
        if (self.collective == "emulated") != (self.emulation is not None):
            raise ValueError("collective: emulated and an emulation (latency_s, bytes_per_s) go together")
        if self.deterministic and self.collective not in ("pipeline", "emulated"):  # the one tree small and large share
            object.__setattr__(self, "collective", "two_level")
        for name in ("small_bytes", "chunk_bytes"):
            if getattr(self, name) < 4096 or getattr(self, name) % 4096:
                raise ValueError(f"{name}={getattr(self, name)}: a multiple of 4096 is needed")


class Communicator:
    """One group on one rank. `rank` counts inside the group; one thread starts and waits for all of its collectives,
    in the same order on every rank. `process_groups`: Megatron-core's ProcessGroupCollection (tp; None where
    CommOptions.process_groups is off); `subgroups`: torch groups of this rank's node (intra) and rail, those with more
    than one rank; for gloo in two levels a second one of the node (gather)."""

    def __init__(
        self,
        rank: int,
        layout: GroupLayout,
        backend: str,
        all_reduce: Collective,
        gathers: Gather,
        plans: PlanChannel,
        ledger: Ledger,
        process_groups: Any,
        subgroups: dict[str, Any],
        closers: list[Callable[[], None]],
        set_timeout: Callable[[float], None],
    ) -> None:
        self.rank, self.size, self.layout, self.backend = rank, layout.size, layout, backend
        self.all_reduce, self.plans, self.ledger = all_reduce, plans, ledger
        self.process_groups, self.subgroups = process_groups, subgroups
        self.set_timeout = set_timeout
        self.gathers, self._closers = gathers, closers

    def start_gather(self, payload: NDArray[np.uint8]) -> Gathering:
        """Sets off the gathering of payload, uint8 [n] with the same n everywhere; `.wait()` gives uint8 [size, n]."""
        return self.gathers.start(payload)

    def gather(self, payload: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """uint8 [n] of every rank, in rank order: uint8 [size, n]. Blocks, asleep."""
        return self.gathers.start(payload).wait()

    def close(self) -> None:
        """Ends every connection and thread of the group; always returns. Idempotent."""
        closers, self._closers = self._closers, []
        for close in closers:
            close()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def connect(
    bootstrap: Bootstrap,
    layout: GroupLayout,
    options: CommOptions | None = None,
    choose: Callable[[int], str] | None = None,
) -> Communicator:
    """This rank's Communicator. All ranks of the job call it at once with their own group's layout, whose ranks must be
    contiguous (Megatron's grid knows no other). `choose`: message bytes -> flat, exchange, two_level, doubling or
    pipeline, for collective auto (to gloo and nccl, all but two_level is flat). Raises MeshError, RuntimeError or
    ValueError naming what does not fit."""
    options = options or CommOptions()
    ranks = layout.ranks
    if ranks != tuple(range(ranks[0], ranks[0] + layout.size)):
        raise ValueError(f"the group's ranks {ranks} are not contiguous: map ranks to nodes in order")
    rank = ranks.index(bootstrap.rank)
    backend = options.backend
    if backend == "auto":
        backend = "native" if transport.available() else "gloo"
    native = backend == "native"
    # What nodes exchange of a chunk is a share of it: pieces as large as between two cost as few packets and wake-ups.
    share = min(len(layout.nodes), 8) if len(layout.nodes) > 2 else 1
    small, chunk = (options.small_bytes, options.chunk_bytes * share) if native else (4096, 4096)
    segment = transport.segment_bytes(layout.size, layout.per_node, small, chunk) if native else 4096
    mesh = connect_mesh(bootstrap, layout, options.address, segment, options.secret, options.connect_timeout_s)
    ledger = Ledger()
    plans = PlanChannel(rank, mesh.plan)
    closers: list[Callable[[], None]] = [plans.close]
    groups, subgroups = None, dict[str, Any]()
    takes = _takes(options, choose)
    try:
        if options.process_groups or backend in ("gloo", "nccl"):
            groups, subgroups, end = _process_groups(bootstrap, layout, options, backend, takes is not None)
            closers.append(end)
        all_reduce: Collective
        gathers: Gather
        set_timeout: Callable[[float], None]
        if native:
            core = transport.Transport(
                mesh,
                layout,
                bootstrap.rank,
                small,
                chunk,
                _spin(options, layout),
                options.timeout_s,
                options.cpu,
            )
            closers.insert(0, core.close)
            link = "net" if len(layout.nodes) > 1 else "node"
            ledger.add_source(lambda: core.entries(lambda _: link), core.records, core.place)
            all_reduce = transport.NativeCollective(core, _strategy(options, layout, choose))
            gathers = transport.NativeGather(core, layout.size)
            set_timeout = core.set_timeout
        else:
            mesh.close_data()
            from .backends import other_backend

            all_reduce, gathers, set_timeout, end = other_backend(
                backend, bootstrap, layout, groups, options, ledger, subgroups, takes
            )
            closers.insert(0, end)
        if options.emulation is not None:
            all_reduce = emulate(all_reduce, options.emulation, ledger, on_gpu=backend == "nccl")
        if not options.overlap:
            all_reduce = Blocking(all_reduce)
    except BaseException:
        for close in closers:
            close()
        raise
    return Communicator(
        rank, layout, backend, all_reduce, gathers, plans, ledger, groups, subgroups, closers, set_timeout
    )


def _spin(options: CommOptions, layout: GroupLayout) -> float:
    if options.spin_us is not None:
        return options.spin_us
    return 20.0 if layout.per_node * 2 <= len(os.sched_getaffinity(0)) else 0.0


def _strategy(options: CommOptions, layout: GroupLayout, choose: Callable[[int], str] | None) -> Callable[[int], str]:
    """Message bytes -> the transport's strategy. Above small_bytes everything is the pipeline."""
    spans = len(layout.nodes) > 1 and layout.per_node > 1
    names = {name: name for name in ("exchange", "two_level", "doubling", "pipeline")} | {"flat": "exchange"}
    if options.collective == "doubling" and (layout.per_node > 1 or layout.size & (layout.size - 1)):
        raise ValueError(
            f"collective: doubling needs one rank on each of 2, 4, 8, … nodes, not {len(layout.nodes)} x "
            f"{layout.per_node}: use auto or two_level"
        )

    def strategy(size: int) -> str:
        if size > options.small_bytes:
            return "pipeline"
        if options.collective == "emulated":
            return "two_level" if options.deterministic else "exchange"
        if options.collective != "auto":
            return names[options.collective]
        if choose is not None:
            return names[choose(size)]
        # Whole vectors to everyone save a hop through a communication thread; node sums save per_node times the bytes.
        return "two_level" if spans and size * layout.per_node > (8 << 10) else "exchange"

    return strategy


def _takes(options: CommOptions, choose: Callable[[int], str] | None) -> Callable[[int], bool] | None:
    """Message bytes -> whether gloo or NCCL is to go in two levels; None where it never is."""
    if options.deterministic:
        return None
    if options.collective == "two_level":
        return lambda nbytes: True
    if options.collective == "auto" and choose is not None:
        return lambda nbytes: choose(nbytes) == "two_level"
    return None


def _process_groups(
    bootstrap: Bootstrap, layout: GroupLayout, options: CommOptions, backend: str, two_levels: bool
) -> tuple[Any, dict[str, Any], Callable[[], None]]:
    """Megatron-core's view of the job: a HyperCommGrid over (intra, rail, replica) and the collection that its layers
    take. torch.distributed is initialised if nobody did, and then ended with the Communicator. `two_levels`: some
    messages go so, for which gloo needs a second group of the node."""
    import torch.distributed as dist

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.hyper_comm_grid import HyperCommGrid
        from megatron.core.process_groups_config import ProcessGroupCollection

    world = bootstrap.size
    if world % layout.size:
        raise ValueError(f"{world} ranks do not divide into groups of {layout.size}")
    torch_backend = "nccl" if backend == "nccl" else "gloo"
    if backend == "nccl" and len(layout.nodes) > 1:
        torch_backend = "cpu:gloo,cuda:nccl"  # weights travel between nodes from host memory (point_to_point.py)
    wait = timedelta(seconds=options.connect_timeout_s)
    mine = not dist.is_initialized()
    with _gloo_interface(options.address):
        if mine:
            store: Any
            if bootstrap.rank == 0:
                store = open_store(options.address, 0, True, options.connect_timeout_s)
                place = struct.pack("<H", store.port) + options.address.encode()
                bootstrap.all_gather(place)
            else:
                place = bootstrap.all_gather(b"")[0]
                store = open_store(
                    place[2:].decode(), struct.unpack("<H", place[:2])[0], False, options.connect_timeout_s
                )
            dist.init_process_group(torch_backend, store=store, rank=bootstrap.rank, world_size=world, timeout=wait)
        try:
            shape = [layout.per_node, len(layout.nodes), world // layout.size]
            grid = HyperCommGrid(shape, ["intra", "rail", "replica"], backend=torch_backend)
            # One group for the same ranks: each has connections and, of gloo, a thread that wakes 100 times a second.
            tp = dist.group.WORLD if mine and layout.size == world else grid.create_pg(["intra", "rail"], timeout=wait)

            def of(ranks: Sequence[int]) -> Any:
                # Made and named by its members alone: the job's other groups may lie otherwise, and have no such one.
                known: Any = dist.new_group(ranks, wait, torch_backend, use_local_synchronization=True)
                return known

            own = {
                name: ranks
                for name, every in (("intra", layout.nodes), ("rail", layout.rails))
                for ranks in every
                if bootstrap.rank in ranks and len(ranks) > 1
            }
            subgroups = {name: tp if len(ranks) == layout.size else of(ranks) for name, ranks in own.items()}
            if backend == "gloo" and two_levels and len(own) == 2:
                subgroups["gather"] = of(own["intra"])
        except BaseException:
            if mine:
                dist.destroy_process_group()
            raise
    return ProcessGroupCollection(tp=tp), subgroups, dist.destroy_process_group if mine else lambda: None


@contextmanager
def _gloo_interface(address: str) -> Iterator[None]:
    """gloo takes its interface from the environment alone, while its groups are made."""
    name = "GLOO_SOCKET_IFNAME"
    before = os.environ.get(name)
    os.environ[name] = interface_of(address)
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


__all__ = ["CommOptions", "Communicator", "Emulation", "MpiBootstrap", "connect"]
