"""The collectives of gloo and NCCL (torch.distributed). `flat` leaves the algorithm to the library;
two_level.py adds a strategy over torch.distributed.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import distributed_c10d

from ..link_cost import SIZES
from ..placement.layout import GroupLayout
from .bootstrap import Bootstrap
from .collectives import Collective, CollectiveTimeout, CommunicationError, Gather, Gathering, PeerLost
from .groups import CommOptions, Deterministic, OneShotImpossible, TorchGroups
from .ledger import Ledger
from .ordered import Ordered
from .two_level import Relay, TwoLevel, two_level

if TYPE_CHECKING:
    from .symmetric import Site

log = logging.getLogger(__name__)

_limit: Any = distributed_c10d._set_pg_timeout  # torch has no other name for it

Parts = tuple[Collective, Gather, Callable[[float], None], Callable[[], None]]
"""All-reduces, gathers, and functions that set the timeout and close."""


def other_backend(
    name: str,
    bootstrap: Bootstrap,
    layout: GroupLayout,
    groups: TorchGroups,
    options: CommOptions,
    ledger: Ledger,
    choose: Callable[[int], str] | None = None,
) -> Parts:
    """The parts of the backend `name` (gloo or nccl). `choose`: message bytes -> strategy; those that it lacks and None
    are flat. Raises ValueError if the backend is not available, or lacks the strategy."""
    strategies = ("auto", "flat", "two_level", "one_shot", "emulated")
    if options.collective not in strategies and options.deterministic is not True:
        raise ValueError(
            f"collective: {options.collective} is the native transport's, backend {name} has algorithms of its own: "
            "use collective auto, flat or two_level, or backend native"
        )
    link = "net" if len(layout.nodes) > 1 else "node"
    tp, levels = groups.tp, two_level(groups.subgroups, _takes(choose, "two_level"))
    timeout = [options.timeout_s]

    def set_timeout(seconds: float) -> None:
        timeout[0] = seconds
        # torch ends by itself what takes longer than its group allows
        for group in {tp, *groups.subgroups.values()}:
            _limit(timedelta(seconds=max(seconds, options.connect_timeout_s)), group)

    if name == "nccl":
        if not torch.cuda.is_available():
            raise ValueError("backend: nccl needs a CUDA device: use native or gloo on CPUs")
        from .nccl import DeviceWait, NcclGather, Roll, describe_paths, join, nccl_collective
        from .symmetric import Site

        hosts = [host.decode() for host in bootstrap.all_gather(socket.gethostname().encode())]
        ranks = layout.ranks
        roll = Roll(groups.store, ranks.index(bootstrap.rank), [hosts[rank] for rank in ranks], str(ranks[0]))
        wait = DeviceWait(list({tp, *groups.subgroups.values()}), ledger, timeout, roll)
        set_timeout(options.connect_timeout_s)
        paths = bootstrap.all_gather(join(tp, levels, wait).encode())
        if bootstrap.rank == ranks[0]:
            log.info("NCCL: %s", describe_paths([paths[rank].decode() for rank in ranks]))
        set_timeout(options.timeout_s)
        site = Site(bootstrap, layout, groups, roll.hosts, wait, options.connect_timeout_s)
        ways = [*_direct(site, options, choose, wait.aborts), *([] if levels is None else [levels])]
        reduce = nccl_collective(tp, ledger, link, options.deterministic, ways)
        return reduce, NcclGather(tp, ledger, wait), set_timeout, lambda: None
    set_timeout(options.timeout_s)
    gloo = GlooCollective(tp, ledger, link, timeout, options.deterministic, levels)
    return gloo, GlooGather(tp, ledger, timeout), set_timeout, gloo.close


def _takes(choose: Callable[[int], str] | None, strategy: str) -> Callable[[int], bool] | None:
    """Message bytes -> whether to go by `strategy`; None where no message does."""
    if choose is None or all(choose(size) != strategy for size in SIZES):
        return None
    return lambda nbytes: choose(nbytes) == strategy


def _direct(
    site: Site, options: CommOptions, choose: Callable[[int], str] | None, aborts: list[Callable[[], None]]
) -> list[TwoLevel]:
    """The all-reduce by one_shot if `choose` has it for any size, else nothing; adds to `aborts`. All ranks of the job
    call it at once. Raises ValueError where `collective` demands it and a rank cannot."""
    from .symmetric import connect_one_shot

    takes = _takes(choose, "one_shot")
    if takes is None:
        return []
    levels, faults = connect_one_shot(site, takes)
    leads = site.bootstrap.rank == site.layout.ranks[0]
    if levels is not None:
        if leads:
            log.info("one_shot sums between %d ranks of a node are right", levels.ranks)
        aborts.append(levels.one_shot.abort)
        return [levels]
    if options.collective == "one_shot":
        why = "; ".join(faults)
        raise OneShotImpossible(f"collective: one_shot is not possible: {why}. Or use collective auto or flat")
    if leads:
        log.warning("small all-reduces go by NCCL, not by one_shot: %s", "; ".join(faults))
    return []


class GlooCollective:
    """gloo's all-reduce on a torch group; gloo's threads make progress if they get CPU time. `deterministic`: gathers
    and sums by ordered.py, because the order of gloo's ring depends on the size. `levels`: the two-level all-reduce for
    some messages."""

    def __init__(
        self,
        group: Any,
        ledger: Ledger,
        link: str,
        timeout: list[float],
        deterministic: Deterministic = False,
        levels: TwoLevel | None = None,
    ) -> None:
        self._group, self._ledger, self._link, self._timeout = group, ledger, link, timeout
        self._deterministic = deterministic
        self._levels, self._relay = levels, None if levels is None else Relay(levels)
        self._seq = 0

    def close(self) -> None:
        if self._relay is not None:
            self._relay.close()

    def start(self, x: Tensor, layer: str = "", at_once: bool = False, /) -> _GlooPending:
        if not x.is_contiguous():
            raise ValueError(f"cannot all-reduce {tuple(x.shape)} with strides {x.stride()}: contiguous is needed")
        began = time.monotonic()
        ordered: Any = None
        work: Any
        strategy, levels, relay = "gloo", self._levels, self._relay
        if self._deterministic:
            ordered = _guard(lambda: Ordered(x, self._group, True, self._deterministic), self._seq)
            work = ordered.work
        elif levels is not None and relay is not None and levels.carries(x):
            work, strategy = _guard(lambda: relay.start(x), self._seq), "gloo two_level"
        else:
            work = _guard(lambda: dist.all_reduce(x, group=self._group, async_op=True), self._seq)
        self._seq += 1
        self._ledger.started += 1
        return _GlooPending(self, work, x, began, self._seq - 1, ordered, strategy, layer)

    def _finish(self, pending: _GlooPending) -> None:
        asked, x, seq = time.monotonic(), pending.x, pending.seq
        self._ledger.waiting = f"all_reduce {seq} of {x.nbytes} bytes"
        _guard(lambda: pending.work.wait(timedelta(seconds=self._timeout[0])), seq)
        if pending.ordered is not None:
            pending.ordered.add_up()
        self._ledger.waiting = ""
        ended = pending.ended or time.monotonic()
        self._ledger.add(
            "all_reduce", pending.strategy, self._link, x.nbytes, pending.began, ended, asked, pending.layer
        )


@dataclass(slots=True)
class _GlooPending:
    """`ended`: when the work completed, recorded by the thread that completed it; 0.0 before."""

    owner: GlooCollective
    work: Any
    x: Tensor
    began: float
    seq: int
    ordered: Ordered | None
    strategy: str
    layer: str
    ended: float = 0.0

    def __post_init__(self) -> None:
        self.work.get_future().add_done_callback(self._note)

    def _note(self, _: Any) -> None:
        self.ended = time.monotonic()

    def wait(self) -> Tensor:
        if self.work is not None:
            self.owner._finish(self)
            self.work = None  # not before: a wait that failed fails again, it never gives x without its sum
        return self.x


class GlooGather:
    def __init__(self, group: Any, ledger: Ledger, timeout: list[float]) -> None:
        self._group, self._ledger, self._timeout = group, ledger, timeout
        self._size = dist.get_world_size(group)

    def start(self, payload: NDArray[np.uint8]) -> Gathering:
        mine = torch.from_numpy(np.ascontiguousarray(payload, dtype=np.uint8).copy())
        out = [torch.empty_like(mine) for _ in range(self._size)]
        work = _guard(lambda: dist.all_gather(out, mine, group=self._group, async_op=True), -1) if len(mine) else None
        self._ledger.started += work is not None

        def finish() -> NDArray[np.uint8]:
            if work is not None:
                self._ledger.waiting = "gather"
                _guard(lambda: work.wait(timedelta(seconds=self._timeout[0])), -1)
                self._ledger.waiting = ""
            return torch.stack(out).numpy()

        return Gathering(finish)


def _guard(call: Callable[[], Any], seq: int) -> Any:
    """Converts torch's errors, which name neither peer nor collective: its message distinguishes a timeout from a lost
    peer."""
    try:
        return call()
    except RuntimeError as error:
        words = str(error)
        if "imed out" in words or "imeout" in words:
            raise CollectiveTimeout(f"collective {seq}: {words.splitlines()[0]}", -1, seq) from error
        if "closed" in words or "reset" in words or "refused" in words:
            raise PeerLost(f"collective {seq}: {words.splitlines()[0]}", -1, seq) from error
        raise CommunicationError(f"collective {seq}: {words}") from error
