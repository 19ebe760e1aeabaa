"""The residual wirings: which sub-block reads what, and when an all-reduce is waited for. The heart of laddertron.

A layer is two sub-blocks (attention, MLP), each "norm, column-parallel, row-parallel": its output is a partial sum that
an all-reduce completes. Every wiring is the same loop, *compute, start the all-reduce, take what must have arrived*;
they differ only in how many all-reduces may still travel when the next sub-block reads the residual (its *lag*):

    standard, parallel   0   the residual is complete
    ladder               1   the predecessor's output is still on its way (arXiv 2501.06589)
    delay-d              d   ladder generalised: an output is read d sub-blocks later, d + 1 all-reduces in flight

A hybrid changes the lag from layer to layer. desync-n reduces the residual itself, after every n-th sub-block and the
last, and adds partial sums locally in between. Knows no tensors: the same code runs on real ones, on a recorder (tests
of order) and on the simulator's virtual clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import cache
from itertools import count
from typing import Protocol, Self, TypeVar

from .config.model_config import Wiring

LAG = {"standard": 0, "parallel": 0, "ladder": 1}


class Summand(Protocol):
    """What a residual is made of: tensors [T, D] in the engine."""

    def __add__(self, other: Self, /) -> Self: ...

    def __truediv__(self, other: int, /) -> Self: ...


R = TypeVar("R", bound=Summand)
R_co = TypeVar("R_co", covariant=True)


class SubBlocks(Protocol[R]):
    """The sub-blocks of a model, each from residual to partial sum: pre-norm included, all-reduce not."""

    def attention(self, layer: int, residual: R) -> R: ...

    def mlp(self, layer: int, residual: R) -> R: ...

    def attention_and_mlp(self, layer: int, residual: R) -> R:
        """Both behind one shared norm, summed: the parallel wiring's only sub-block."""


class Arriving(Protocol[R_co]):
    def wait(self) -> R_co: ...


class AllReduce(Protocol[R]):
    """topology's Collective, as seen from here. `layer`: wiring and sub-block, as in "ladder attention"."""

    def start(self, x: R, layer: str = "", at_once: bool = False, /) -> Arriving[R]: ...


def flow(
    embedded: R, wiring: Wiring, blocks: SubBlocks[R], all_reduce: AllReduce[R], size: int
) -> Generator[None, None, R]:
    """The residual's way through all layers of a group of `size` ranks; returns the complete stream, ready for the
    final norm.

    Yields after each sub-block's all-reduce has set off: see `interleave`.
    """
    if wiring.desync_every:
        return (yield from _desync_flow(embedded, wiring.desync_every, len(wiring.kinds), blocks, all_reduce, size))
    residual, _ = yield from stage_flow(embedded, (), wiring, 0, blocks, all_reduce)
    return residual


def stage_flow(
    residual: R,
    pending: Iterable[Arriving[R]],
    wiring: Wiring,
    left: int,
    blocks: SubBlocks[R],
    all_reduce: AllReduce[R],
    alone: bool = False,
) -> Generator[None, None, tuple[R, tuple[Arriving[R], ...]]]:
    """`flow` through the layers of one pipeline stage, from the residual and the outputs pending where the stage before
    ended, to the same where the next one begins, with `left` of them pending. Not for desync, whose stages begin and
    end with a reduced residual: `flow` does them. alone: nothing but this flow computes, so that the sums of layers of
    lag 0 are waited for at once."""
    lag = _lags(wiring)
    in_flight: deque[Arriving[R]] = deque(pending)
    for layer, kind in enumerate(wiring.kinds):
        for sub_block, name in zip(_sub_blocks(kind, blocks), _names(kind), strict=True):
            if kind == "none":
                residual = residual + sub_block(layer, residual)
                continue
            while len(in_flight) > lag[kind]:
                residual = residual + in_flight.popleft().wait()
            in_flight.append(all_reduce.start(sub_block(layer, residual), name, alone and lag[kind] == 0))
            yield
    while len(in_flight) > left:
        residual = residual + in_flight.popleft().wait()
    return residual, tuple(in_flight)


def pending_at(wiring: Wiring, layer: int) -> int:
    """How many outputs are not yet in the residual where `layer` begins: 0 before the first and behind the last."""
    if not 0 < layer < len(wiring.kinds):
        return 0
    lag = _lags(wiring)
    before, after = (lag.get(wiring.kinds[at], 0) for at in (layer - 1, layer))
    return min(after, before + 1, 2 * layer)


def _lags(wiring: Wiring) -> dict[str, int]:
    return {**LAG, "delay": wiring.delay}


def _desync_flow(
    embedded: R, every: int, num_layers: int, blocks: SubBlocks[R], all_reduce: AllReduce[R], size: int
) -> Generator[None, None, R]:
    """Between reduces each rank's residual drifts; a reduce sums the drifted residuals' shares and the partial sums.
    The last sub-block always reduces."""
    residual, last = embedded, 2 * num_layers
    names = _names(f"desync-{every}")
    for index in range(last):
        sub_block = (blocks.attention, blocks.mlp)[index % 2]
        partial = sub_block(index // 2, residual)
        if (index + 1) % every == 0 or index + 1 == last:
            in_flight = all_reduce.start(partial + residual / size, names[index % 2])
            yield
            residual = in_flight.wait()
        else:
            residual = partial + residual
    return residual


class _SubBlock(Protocol[R]):
    def __call__(self, layer: int, residual: R, /) -> R: ...


def _sub_blocks(kind: str, blocks: SubBlocks[R]) -> Iterator[_SubBlock[R]]:
    if kind == "parallel":
        yield blocks.attention_and_mlp
    else:
        yield blocks.attention
        yield blocks.mlp


@cache
def _names(kind: str) -> tuple[str, ...]:
    return (kind,) if kind == "parallel" else (f"{kind} attention", f"{kind} mlp")


def interleave(
    streams: Sequence[Generator[None, None, R]], turn: Callable[[int, int], None] = lambda stream, number: None
) -> list[R]:
    """Flows of one wiring to their ends, taking turns: while one's all-reduce travels, the others compute. Streams may
    be two halves of a batch or two pieces of a prompt, the earlier one first: it has written a layer's keys by the time
    the next one reads them. `turn` is called with the stream and the number of each turn before it."""
    ends: list[R] = []
    for number in count():
        for index, stream in enumerate(streams):
            turn(index, number)
            try:
                next(stream)
            except StopIteration as end:
                ends.append(end.value)
        if ends:  # all have as many turns
            return ends
    raise AssertionError("a flow has an end")


def run(embedded: R, wiring: Wiring, blocks: SubBlocks[R], all_reduce: AllReduce[R], size: int) -> R:
    """`flow` to its end."""
    return interleave([flow(embedded, wiring, blocks, all_reduce, size)])[0]


def collectives_per_step(wiring: Wiring) -> int:
    """All-reduces of the layers in one step (the embedding's and the gather of candidates not counted)."""
    if wiring.desync_every:
        return -(-2 * len(wiring.kinds) // wiring.desync_every)
    return sum({"parallel": 1, "none": 0}.get(kind, 2) for kind in wiring.kinds)
