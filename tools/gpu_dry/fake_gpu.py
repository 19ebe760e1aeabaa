"""A CUDA device without a GPU: fake tensors on it among real CPU ones, and a record of what a GPU would be given.

While a FakeGpu is entered, operators on `cuda` compute shapes alone. It counts operators, copies and waits of the host,
tracks bytes as the caching allocator rounds them, notes what a capture forbids, and holds every access to the order of
streams (tests/helpers/stream_order.py). Values that the host reads from the device are zeros.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import stream_order
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("cuda", 0)
CONTEXT_BYTES = 600 << 20
"""Device memory of a CUDA context, which belongs to no tensor."""
_DISPATCH: Any = TorchDispatchMode  # torch leaves it without types
_ASKS = ("item", "_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "unique")
"""Operators whose result the host must see."""
_MOVES = ("to", "_to_copy")
_COPIES = ("copy_", *_MOVES)


def allocated(size: int) -> int:
    """Bytes that the caching allocator takes for a tensor of `size` bytes, about: it cuts blocks of up to 10 MiB from
    pools, and takes larger ones by 2 MiB."""
    step = 512 if size < 10 << 20 else 2 << 20
    return -(-size // step) * step


@dataclass
class Graph:
    """A captured step: its memory, and the bytes that it allocated at its peak."""

    reads: dict[int, Any] = field(default_factory=dict)
    writes: dict[int, Any] = field(default_factory=dict)
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    peak: int = 0


class FakeGpu(_DISPATCH):  # type: ignore[misc]
    """`counts`: (kind, name) of what was given to the device: launch, to_device, to_host, wait, collective, replay.
    `forbidden`: what a capture would refuse. `graphs`: every captured step."""

    def __init__(self, total: int, capability: tuple[int, int]) -> None:
        super().__init__()
        self.total, self.capability, self.checks_order = total, capability, True
        self.order = stream_order.StreamOrder()
        self.counts: Counter[tuple[str, str]] = Counter()
        self.collectives: list[tuple[Any, ...]] = []
        self.forbidden: list[str] = []
        self.graphs: list[Graph] = []
        self.replayed: list[Graph] = []
        self.live = self.peak = 0
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._sizes: dict[int, int] = {}
        self._pinned: dict[int, Any] = {}
        self._host = stream_order.Stream(self.order)
        self._graph: Graph | None = None
        self._held: list[Any] = []

    # ---- what happens on the device ----

    @property
    def capturing(self) -> bool:
        return self._graph is not None

    def note(self, kind: str, name: str, refused: bool = False) -> None:
        """refused: whether a capture forbids it."""
        self.counts[kind, name] += 1
        if self.capturing and refused:
            self.forbidden.append(f"{name} in a capture")

    def access(self, name: str, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        """A kernel on the current stream, which comes after all that the host did before."""
        if not self.checks_order:
            return
        stream_order._merge(self.order.current.clock, self._host.clock)
        self.order.kernel(name, reads, writes)
        for x in (*reads, *writes):
            if self.is_pinned(x):
                self.order.record_stream(x, self.order.current)  # the host's allocator records an event there
        if self._graph is not None:
            for accesses, tensors in ((self._graph.reads, reads), (self._graph.writes, writes)):
                accesses.update((x.untyped_storage()._cdata, weakref.ref(x)) for x in tensors)

    def host_waits(self, name: str, clock: dict[int, int]) -> None:
        self.note("wait", name, refused=True)
        stream_order._merge(self._host.clock, clock)

    def host_saw(self, clock: dict[int, int]) -> None:
        """An event that has happened: the host asked, and did not wait."""
        stream_order._merge(self._host.clock, clock)

    def replay(self, graph: Graph) -> None:
        self.note("replay", "replay")
        self.replayed.append(graph)
        reads, writes = (
            [x for ref in accesses.values() if (x := ref()) is not None] for accesses in (graph.reads, graph.writes)
        )
        self.access("replay", reads, writes)

    @contextlib.contextmanager
    def capture(self, stream: stream_order.Stream) -> Iterator[Graph]:
        stream.wait_stream(self.order.current)  # torch.cuda.graph synchronises the device first
        graph, before, live, peak = Graph(), self.counts.copy(), self.live, self.peak
        self.peak, self._graph = live, graph
        try:
            with self.order.on(stream):
                yield graph
        finally:
            self._graph = None
        self.order.current.wait_stream(stream)
        graph.counts, graph.peak = self.counts - before, self.peak - live
        self.peak = max(peak, self.peak)
        self.counts = before
        self.graphs.append(graph)

    # ---- memory ----

    def pin(self, x: Tensor) -> Tensor:
        if self.capturing:
            self.forbidden.append("an allocation of pinned memory in a capture")
        self._pinned[x.untyped_storage()._cdata] = stream_order._WeakRef(x.untyped_storage())
        return x

    def is_pinned(self, x: Tensor) -> bool:
        ref = self._pinned.get(x.untyped_storage()._cdata)
        return ref is not None and not ref.expired()

    def free(self) -> int:
        return self.total - CONTEXT_BYTES - self.live

    def _track(self, x: Any) -> None:
        if not isinstance(x, FakeTensor) or x.device.type != "cuda":
            return
        storage = x.untyped_storage()
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = allocated(storage.nbytes())
            self.live += self._sizes[key]
            self.peak = max(self.peak, self.live)
            self.order._block(x)  # memory belongs to the stream that allocates it
            weakref.finalize(storage, self._freed, key)

    def _freed(self, key: int) -> None:
        self.live -= self._sizes.pop(key, 0)

    # ---- operators ----

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        pinned = bool(kwargs.pop("pin_memory", False))
        name = str(func).removeprefix("aten.").removeprefix("c10d.").split(".")[0]
        goes = _device(name, args, kwargs)
        if goes != "cuda" and not any(isinstance(x, FakeTensor) for x in given):
            return self._on_host(func, name, args, kwargs, given, pinned)
        if (name == "copy_" and not isinstance(args[0], FakeTensor)) or (name in _MOVES and goes == "cpu"):
            return self._to_host(name, args)
        if name in _ASKS:
            self.host_waits(name, self.order.current.clock)
            if name == "nonzero":
                return args[0].new_empty((0, args[0].dim()), dtype=torch.int64)
            if name in ("item", "_local_scalar_dense", "equal", "is_nonzero"):
                return 0
        for x in given:
            if not isinstance(x, FakeTensor) and x.dim():
                self.note("to_device", name, refused=True)
                if not self.is_pinned(x) or name not in _COPIES:
                    self.host_waits(f"{name} of pageable memory", self.order.current.clock)
        out = self._run(func, args, kwargs)
        self._account(func, name, given, args, kwargs, out)
        return out

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        def fake(x: Any) -> Any:
            is_real = isinstance(x, Tensor) and not isinstance(x, FakeTensor)
            return self._fake.from_tensor(x, static_shapes=True) if is_real else x

        with self._fake:
            out = func(*tree_map(fake, args), **tree_map(fake, kwargs))
        for x in tree_leaves(out):
            self._track(x)
        return out

    def _account(self, func: Any, name: str, given: list[Tensor], args: Any, kwargs: Any, out: Any) -> None:
        given_storages = {x.untyped_storage()._cdata for x in given}
        made = [
            x
            for x in tree_leaves(out)
            if isinstance(x, FakeTensor) and x.untyped_storage()._cdata not in given_storages
        ]
        changed = [
            x
            for place, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
            for x in tree_leaves(args[place] if place < len(args) else kwargs.get(argument.name))
            if isinstance(x, Tensor)
        ]
        if str(func).startswith("c10d"):
            shapes = tuple((tuple(x.shape), str(x.dtype)) for x in given)
            self.note("collective", name)
            self.collectives.append((str(func), shapes))
            self.access(name, given, tree_leaves(args[0]))
        elif "empty" not in name and not name.startswith("prim") and (made or changed):
            if name not in _COPIES or all(isinstance(x, FakeTensor) for x in given):
                self.note("launch", name)
            self.access(name, [x for x in given if x.dim() or isinstance(x, FakeTensor)], made + changed)

    def _on_host(self, func: Any, name: str, args: Any, kwargs: Any, given: list[Tensor], pinned: bool) -> Any:
        out = func(*args, **kwargs)
        if pinned:
            self.pin(out)
        touched = [x for x in given if self.is_pinned(x)]
        if touched and "empty" not in name:
            with self.order.on(self._host):
                self.order.kernel(f"{name} on the host", touched, touched[:1] if name.endswith("_") else [])
            for x in touched:
                self.order.record_stream(x, self._host)
        return out

    def _to_host(self, name: str, args: Any) -> Tensor:
        moves = name in _MOVES
        source = args[0] if moves else args[1]
        target: Tensor = torch.zeros(source.shape, dtype=source.dtype) if moves else args[0]
        self.note("to_host", name, refused=True)
        self.access(f"{name} to the host", [source], [target] if self.is_pinned(target) else [])
        if not self.is_pinned(target):
            self.host_waits(f"{name} to pageable memory", self.order.current.clock)
        return target if moves else target.zero_()


def _device(name: str, args: Any, kwargs: Any) -> str:
    """The type of the device that an operator is called with, "" if it is called with none."""
    named = [kwargs.get("device"), *(args[1:2] if name in _MOVES else ())]
    return next((torch.device(d).type for d in named if isinstance(d, str | torch.device)), "")
