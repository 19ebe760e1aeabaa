"""The residual wirings: which outputs each sub-block reads, and when the loop waits for an all-reduce.

A layer consists of sub-blocks (attention, MLP), each "norm, column-parallel, row-parallel". The output of a sub-block
is a partial sum that an all-reduce completes. A wiring is a list of `SubBlock`s, each with the collective that
completes it and a *lag*: the number of following sub-blocks that start without its output. One loop runs all wirings:
*add the outputs that are due, compute, start the all-reduce*.

    standard, parallel   0   the residual is complete
    ladder               1   the predecessor's output is still in flight (arXiv 2501.06589)
    delay-d              d   ladder generalised: an output is read d sub-blocks later, d + 1 all-reduces in flight

Lanes (delayed tensor parallelism): each rank has one or several residuals of its own. A lane adds its own output at
once and the outputs of the other lanes 2d sub-blocks later.

In a hybrid the lag differs between layers. desync-n reduces the residual itself, after every n-th sub-block and the
last one, and adds partial sums locally in between. This file imports no torch: the same code runs on tensors, on a
recorder (tests of order) and on the simulator's virtual clock.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count, product
from math import sqrt
from typing import Generic, Literal, Protocol, Self, TypeVar

from ..topology.comm.collectives import CollectiveOf, PendingOf
from .config.lanes import Lanes
from .config.model_config import Wiring

LAG: Mapping[str, int] = {"standard": 0, "parallel": 0, "ladder": 1}
SHORTCUT = 3
"""Lag of experts parallel to an MLP: their output is read after that MLP and the next layer's two sub-blocks."""
Scope = Literal["group", "node"]
"""The ranks of a sum: the whole tensor-parallel group, or its ranks on this node."""


@dataclass(frozen=True, slots=True)
class SubBlock:
    """One iteration of the loop. name: the method of SubBlocks. account: the ledger's name for its collective. scope:
    None if its output is added without a collective. lag: the number of following sub-blocks that start without its
    output. drifts: the sum includes the residual and replaces it (desync).

    lanes: the sum of this rank's lanes is sent. own: the factor by which a lane adds its output at once; 0 if it waits
    for the sum. others: the lag of the other lanes' outputs; 0 if they are not added."""

    name: str
    layer: int
    account: str
    scope: Scope | None
    lag: int
    drifts: bool = False
    lanes: bool = False
    own: float = 0.0
    others: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """The sub-blocks of a model or a pipeline stage. `pending`: for each output that the previous stage left in flight,
    the index of the sub-block before which it is added. Outputs due after the last sub-block are left to the next
    stage."""

    sub_blocks: tuple[SubBlock, ...]
    pending: tuple[int, ...] = ()


class Summand(Protocol):
    """A term of the residual: a tensor [T, D] in the engine."""

    def __add__(self, other: Self, /) -> Self: ...

    def __mul__(self, other: float, /) -> Self: ...

    def __truediv__(self, other: int, /) -> Self: ...


R = TypeVar("R", bound=Summand)
End = TypeVar("End")


class SubBlocks(Protocol[R]):
    """The sub-blocks of a model. Each computes a partial sum from the residual, including the pre-norm, without the
    all-reduce."""

    def attention(self, layer: int, residual: R) -> R: ...

    def mlp(self, layer: int, residual: R) -> R: ...

    def shortcut(self, layer: int, residual: R) -> R:
        """The experts parallel to the layer's MLP, which read the same residual."""

    def attention_and_mlp(self, layer: int, residual: R) -> R:
        """The sum of attention and MLP with one shared norm: the only sub-block of the parallel wiring."""

    def sum_of_lanes(self, output: R) -> R:
        """The sum of the outputs of this rank's lanes, in new memory, to be sent."""

    def of_others(self, total: R, output: R) -> R:
        """For each of this rank's lanes, the sum over all lanes without its own output."""


class _Others(Generic[R]):
    """A sum in flight, without the outputs that this rank's lanes have already added."""

    __slots__ = ("_blocks", "_own", "_total")

    def __init__(self, blocks: SubBlocks[R], total: PendingOf[R], own: R) -> None:
        self._blocks, self._total, self._own = blocks, total, own

    def wait(self) -> R:
        return self._blocks.of_others(self._total.wait(), self._own)


class _Compute(Protocol[R]):
    def __call__(self, layer: int, residual: R, /) -> R: ...


def flow(
    residual: R,
    plan: Plan,
    blocks: SubBlocks[R],
    collectives: Mapping[Scope, CollectiveOf[R]],
    size: int = 1,
    pending: Iterable[PendingOf[R]] = (),
    alone: bool = False,
) -> Generator[None, None, tuple[R, tuple[PendingOf[R], ...]]]:
    """Runs all sub-blocks of `plan` on a group of `size` ranks. pending: the outputs that the previous stage left in
    flight. Returns the residual and the outputs left to the next stage (none at the end of the model). Yields after
    starting each sub-block's all-reduce: see `interleave`. alone: no other flow computes, so a sum that the next
    sub-block reads may stay on the compute stream."""
    due: dict[int, list[PendingOf[R]]] = {}
    for index, output in zip(plan.pending, pending, strict=True):
        due.setdefault(index, []).append(output)
    drifted = False
    for index, block in enumerate(plan.sub_blocks):
        for output in due.pop(index, ()):
            residual = output.wait() if drifted else residual + output.wait()
        compute: _Compute[R] = getattr(blocks, block.name)
        partial = compute(block.layer, residual)
        own = partial if block.own in (0.0, 1.0) else partial * block.own
        if block.scope is None:
            residual = residual + own
            continue
        drifted, sent = block.drifts, partial
        if drifted:
            sent = partial + residual / size
        elif block.lanes:
            sent = blocks.sum_of_lanes(partial)
        # A sum on the compute stream must not overtake those in flight.
        at_once = alone and block.lag == 0 and not due
        started = collectives[block.scope].start(sent, block.account, at_once)
        if block.others:
            due.setdefault(index + 1 + block.others, []).append(_Others(blocks, started, partial))
        if block.own:
            residual = residual + own
        else:
            due.setdefault(index + 1 + block.lag, []).append(started)
        yield
    end = len(plan.sub_blocks)
    for output in due.pop(end, ()):
        residual = output.wait() if drifted else residual + output.wait()
    return residual, tuple(output for index in sorted(due) for output in due[index])


def lag_of(wiring: Wiring, kind: str) -> int:
    """How many of the latest outputs the sub-blocks of a layer of this kind do not read."""
    return {**LAG, "delay": wiring.delay}.get(kind, 0)


_NAMES = {"parallel": ("attention_and_mlp",), "shortcut": ("attention", "shortcut", "mlp")}


@cache
def plan_sub_blocks(
    wiring: Wiring, pending: int = 0, left: int = 0, mixed: tuple[bool, ...] = (), dense: Scope = "group"
) -> Plan:
    """The sub-blocks of all layers. pending, left: how many outputs a stage gets from the previous one, and leaves to
    the next one. mixed: for each layer, whether its MLP is a mixture of experts. dense: the scope of all other sums."""
    if wiring.lanes is not None and "none" not in wiring.kinds:
        return _lane_plan(wiring.lanes, len(wiring.kinds))
    sub_blocks: list[tuple[str, int, str]] = []
    lags: list[int] = []  # of each reader: how many of the latest outputs it does not read
    for layer, kind in enumerate(wiring.kinds):
        names = _NAMES.get(kind, ("attention", "mlp"))
        word = f"desync-{wiring.desync_every}" if wiring.desync_every else kind
        mixture = "shortcut" if kind == "shortcut" else "mlp" if mixed and mixed[layer] else ""
        words = [f"{word} {'experts' if name == mixture else name}" for name in names]
        sub_blocks += [
            (name, layer, word if kind == "parallel" else account) for name, account in zip(names, words, strict=True)
        ]
        lags += [lag_of(wiring, kind)] * len(names)
    end, every = len(sub_blocks), wiring.desync_every

    def due(index: int) -> int:
        if index >= 0 and sub_blocks[index][0] == "shortcut":
            return index + 1 + SHORTCUT
        readers = (i for i in range(max(0, index + 1), end) if i - index > lags[i])
        return next(readers, end + (index >= end - left))

    def scope(index: int, layer: int) -> Scope | None:
        reduces = (index + 1) % every == 0 or index + 1 == end if every else wiring.kinds[layer] != "none"
        if not reduces:
            return None
        return "group" if sub_blocks[index][2].endswith("experts") else dense

    return Plan(
        tuple(
            SubBlock(name, layer, account, scope(index, layer), due(index) - index - 1, every > 0)
            for index, (name, layer, account) in enumerate(sub_blocks)
        ),
        tuple(due(index) for index in range(-pending, 0)),
    )


def _lane_plan(lanes: Lanes, num_layers: int) -> Plan:
    """As `plan`, for lanes. The outputs that a stage gets are those of the `delay` layers before it; they are added
    after the same sub-blocks of the layers `delay` later."""
    lag, blocks, pending = 2 * lanes.delay, [], []
    for layer, name in product(range(-lanes.delay, num_layers), ("attention", "mlp")):
        mlp = name == "mlp"
        late = lag if lanes.first + layer >= 0 and lanes.read_later(layer, mlp) else 0
        if layer < 0:
            pending += [2 * layer + mlp + 1 + lag] if late else []
            continue
        early = lanes.sums_at_once(layer)
        own = 1.0 if lanes.reads(layer, mlp) else sqrt(lanes.count)
        sent: Scope | None = "group" if early or late else None
        blocks.append(
            SubBlock(name, layer, f"lane {name}", sent, 0, lanes=True, own=0.0 if early else own, others=late)
        )
    return Plan(tuple(blocks), tuple(pending))


def pending_at(wiring: Wiring, layer: int) -> int:
    """The number of outputs in flight at the start of `layer`: 0 for the first layer and after the last."""
    blocks = plan_sub_blocks(wiring).sub_blocks
    first = next((index for index, block in enumerate(blocks) if block.layer == layer), 0)
    return sum(index + 1 + max(block.lag, block.others) > first for index, block in enumerate(blocks[:first]))


def interleave(
    streams: Sequence[Generator[None, None, End]], turn: Callable[[int, int], None] = lambda stream, number: None
) -> list[End]:
    """Runs flows of one wiring in turns to their ends: while one's all-reduce is in flight, the others compute. Streams
    may be two halves of a batch or two parts of a prompt, the earlier one first: it has written a layer's keys before
    the next one reads them. `turn` is called before each turn with the index of the stream and the number of the
    turn."""
    ends: list[End] = []
    for number in count():
        for index, stream in enumerate(streams):
            turn(index, number)
            try:
                next(stream)
            except StopIteration as end:
                ends.append(end.value)
        if ends:  # all flows have the same number of turns
            return ends
    raise AssertionError("a flow has an end")


def collectives_per_step(wiring: Wiring) -> int:
    """The number of all-reduces of the layers in one step, without the embedding's and the gather for sampling."""
    return sum(block.scope is not None for block in plan_sub_blocks(wiring).sub_blocks)
