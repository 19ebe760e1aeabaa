"""Checks the order of GPU work without a GPU: stand-ins for streams, events, c10d Work and the caching allocator that
keep vector clocks, over real CPU tensors.

Two accesses to one tensor's memory, one of them a write, must be ordered by events. Memory that is freed must not be in
use on a stream that neither its own stream has waited for nor `record_stream` names: the allocator would hand it out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing import reductions
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Clock = dict[int, int]

# torch leaves these two without types.
_WeakRef: Any = reductions.StorageWeakRef
_DISPATCH: Any = TorchDispatchMode


def _merge(into: Clock, other: Clock) -> None:
    for stream, count in other.items():
        into[stream] = max(into.get(stream, 0), count)


class Stream:
    def __init__(self, order: StreamOrder, **_: Any) -> None:
        self.order, self.number = order, len(order.streams)
        self.clock: Clock = {}
        order.streams.append(self)

    def wait_event(self, event: Event) -> None:
        self.order.sweep()
        _merge(self.clock, event.clock)

    def wait_stream(self, other: Stream) -> None:
        self.order.sweep()
        _merge(self.clock, other.clock)


class Event:
    def __init__(self, order: StreamOrder, **_: Any) -> None:
        self.order = order
        self.clock: Clock = {}

    def record(self, stream: Stream | None = None) -> None:
        self.order.sweep()
        self.clock = dict((stream or self.order.current).clock)

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Event) -> float:
        return 1.0


@dataclass
class Work:
    """c10d's Work of NCCL: the current stream joins the call in `wait` alone, and its tensors are kept until then."""

    stream: Stream
    tensors: list[Tensor]
    clock: Clock

    def wait(self) -> None:
        self.stream.order.sweep()
        _merge(self.stream.order.current.clock, self.clock)
        self.tensors = []


@dataclass
class _Block:
    storage: Any
    owner: Stream
    recorded: list[Stream] = field(default_factory=list)
    reads: list[tuple[Stream, int, str]] = field(default_factory=list)
    write: tuple[Stream, int, str] | None = None


class StreamOrder(_DISPATCH):  # type: ignore[misc]
    """While entered, every operator on tensors is a kernel on the current stream. `faults`: what was found."""

    def __init__(self) -> None:
        super().__init__()
        self.faults: list[str] = []
        self.streams: list[Stream] = []
        self._stack = [Stream(self)]
        self._blocks: dict[int, _Block] = {}

    @property
    def current(self) -> Stream:
        return self._stack[-1]

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        self._stack.append(stream)
        try:
            yield
        finally:
            self._stack.pop()

    def sweep(self) -> None:
        """Reports blocks that were freed since the last call while a stream could still use them."""
        for key in [key for key, block in self._blocks.items() if block.storage.expired()]:
            block = self._blocks.pop(key)
            for stream, count, name in [*block.reads, *([block.write] if block.write else [])]:
                if all(safe.clock.get(stream.number, 0) < count for safe in [block.owner, *block.recorded]):
                    self.faults.append(f"{name}: memory freed while the stream may still use it")

    def kernel(self, name: str, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        self.sweep()
        here = self.current
        count = here.clock[here.number] = here.clock.get(here.number, 0) + 1
        for x, writing in [(x, False) for x in reads] + [(x, True) for x in writes]:
            block = self._block(x)
            before = [block.write] if block.write else []
            for stream, at, other in before + (block.reads if writing else []):
                if here.clock.get(stream.number, 0) < at:
                    self.faults.append(f"{name}: {'write' if writing else 'read'} unordered with {other}")
            if writing:
                block.write, block.reads = (here, count, name), []
            else:
                block.reads.append((here, count, name))

    def record_stream(self, x: Tensor, stream: Stream) -> None:
        self._block(x).recorded.append(stream)

    def _block(self, x: Tensor) -> _Block:
        storage = x.untyped_storage()
        key = storage._cdata
        if key not in self._blocks or self._blocks[key].storage.expired():
            self._blocks[key] = _Block(_WeakRef(storage), self.current)
        return self._blocks[key]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        out = func(*args, **(kwargs or {}))
        made = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        known = {x.untyped_storage()._cdata for x in given}
        fresh = [x for x in made if x.untyped_storage()._cdata not in known]
        changed = [
            value
            for place, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
            for value in [args[place] if place < len(args) else (kwargs or {}).get(argument.name)]
            if isinstance(value, Tensor)
        ]
        name = str(func)
        if "empty" in name:  # allocates and launches nothing
            for x in fresh:
                self._block(x)
        elif fresh or changed:  # else a view
            self.kernel(name, given, fresh + changed)
        return out


class _OnCpu(TorchFunctionMode):
    """Puts tensors of device cuda on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


class NcclGroup:
    """ProcessGroupNCCL of one rank of `size`: point-to-point calls run on a stream of the group's own, which first
    waits for the current one. No bytes move: order alone is checked."""

    def __init__(self, order: StreamOrder, rank: int, size: int) -> None:
        self._order, self._rank, self._size = order, rank, size
        self._own = Stream(order)

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        return self._call("ncclSend", tensors, reads=tensors)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        return self._call("ncclRecv", tensors, writes=tensors)

    def _call(
        self, name: str, tensors: list[Tensor], reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = ()
    ) -> Work:
        self._own.wait_stream(self._order.current)
        with self._order.on(self._own):
            self._order.kernel(name, reads, writes)
        return Work(self._own, list(tensors), dict(self._own.clock))

    def collective(self, name: str, reads: list[Tensor], writes: list[Tensor], async_op: bool) -> Work | None:
        """On the current stream where the caller waits, else on the group's own."""
        if async_op:
            return self._call(name, reads + writes, reads, writes)
        self._order.kernel(name, reads, writes)
        return None


@contextlib.contextmanager
def checked(monkeypatch: pytest.MonkeyPatch, *modules: Any) -> Iterator[StreamOrder]:
    """A StreamOrder in force for the `_STREAM` and `_EVENT` of `modules` and for torch.cuda and torch.distributed."""
    order = StreamOrder()
    for module in modules:
        for name, make in (("_STREAM", Stream), ("_EVENT", Event)):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, lambda make=make, **given: make(order, **given))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: order.current)
    monkeypatch.setattr(torch.cuda, "stream", order.on)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda x, stream: order.record_stream(x, stream))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    _gathers: Callable[..., Any] = lambda out, x, group, async_op=False: group.collective(  # noqa: E731
        "ncclAllGather", [x], [out], async_op
    )
    for name in ("all_gather_into_tensor", "all_gather_single"):
        monkeypatch.setattr(dist, name, _gathers, raising=False)
    monkeypatch.setattr(
        dist, "all_reduce", lambda x, group, async_op=False: group.collective("ncclAllReduce", [x], [x], async_op)
    )
    monkeypatch.setattr(dist, "get_world_size", lambda group: group.size())
    monkeypatch.setattr(dist, "get_rank", lambda group: group.rank())
    with _OnCpu(), order:
        yield order
        order.sweep()
