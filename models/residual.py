"""The residual wirings: which sub-block reads what, and when an all-reduce is waited for. The heart of laddertron.

A layer is two sub-blocks (attention, MLP), each "norm, column-parallel, row-parallel": its output is a partial sum that
an all-reduce completes. Every wiring is the same loop, *compute, start the all-reduce, take what must have arrived*;
they differ only in how many all-reduces may still travel when the next sub-block reads the residual (its *lag*):

    standard, parallel   0   the residual is complete
    ladder               1   the predecessor's output is still on its way (arXiv 2501.06589)

A hybrid changes the lag from layer to layer. desync-n reduces the residual itself, after every n-th sub-block, and adds
partial sums locally in between. Knows no tensors: the same code runs on real ones, on a recorder (tests of order) and
on the simulator's virtual clock. Called by models/llama.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import Protocol, Self, TypeVar

from .config import Wiring

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
    """topology's Collective, as seen from here."""

    def start(self, x: R) -> Arriving[R]: ...


def named(all_reduce: AllReduce[R], layer: str) -> AllReduce[R]:
    """What accounts for `layer` (wiring and sub-block, as in "ladder attention"), where `all_reduce` keeps accounts."""
    apart: Callable[[str], AllReduce[R]] | None = getattr(all_reduce, "named", None)  # isinstance of a Protocol is slow
    return all_reduce if apart is None else apart(layer)


def flow(
    embedded: R, wiring: Wiring, blocks: SubBlocks[R], all_reduce: AllReduce[R], size: int
) -> Generator[None, None, R]:
    """The residual's way through all layers of a group of `size` ranks; returns the complete stream, ready for the
    final norm.

    Yields after each sub-block's all-reduce has set off, so that a caller may interleave two streams (two halves of a
    batch, two chunks of a prompt) through the same layers; `run` does not.
    """
    if wiring.desync_every:
        return (yield from _desync_flow(embedded, wiring.desync_every, len(wiring.kinds), blocks, all_reduce, size))
    residual = embedded
    travelling: deque[Arriving[R]] = deque()
    reduces = {kind: [named(all_reduce, name) for name in _names(kind)] for kind in set(wiring.kinds)}
    for layer, kind in enumerate(wiring.kinds):
        for sub_block, reduce in zip(_sub_blocks(kind, blocks), reduces[kind], strict=True):
            if kind == "none":
                residual = residual + sub_block(layer, residual)
                continue
            while len(travelling) > LAG[kind]:
                residual = residual + travelling.popleft().wait()
            travelling.append(reduce.start(sub_block(layer, residual)))
            yield
    while travelling:
        residual = residual + travelling.popleft().wait()
    return residual


def _desync_flow(
    embedded: R, every: int, num_layers: int, blocks: SubBlocks[R], all_reduce: AllReduce[R], size: int
) -> Generator[None, None, R]:
    """Between reduces each rank's residual drifts; a reduce sums the drifted residuals' shares and the partial sums."""
    residual, in_step = embedded, True
    reduces = [named(all_reduce, name) for name in _names(f"desync-{every}")]
    for index in range(2 * num_layers):
        sub_block = (blocks.attention, blocks.mlp)[index % 2]
        partial = sub_block(index // 2, residual)
        in_step = (index + 1) % every == 0
        if in_step:
            travelling = reduces[index % 2].start(partial + residual / size)
            yield
            residual = travelling.wait()
        else:
            residual = partial + residual
    if not in_step:
        residual = reduces[1].start(residual / size).wait()
    return residual


class _SubBlock(Protocol[R]):
    def __call__(self, layer: int, residual: R, /) -> R: ...


def _sub_blocks(kind: str, blocks: SubBlocks[R]) -> Iterator[_SubBlock[R]]:
    if kind == "parallel":
        yield blocks.attention_and_mlp
    else:
        yield blocks.attention
        yield blocks.mlp


def _names(kind: str) -> tuple[str, ...]:
    return (kind,) if kind == "parallel" else (f"{kind} attention", f"{kind} mlp")


def run(embedded: R, wiring: Wiring, blocks: SubBlocks[R], all_reduce: AllReduce[R], size: int) -> R:
    """`flow` to its end."""
    stream = flow(embedded, wiring, blocks, all_reduce, size)
    while True:
        try:
            next(stream)
        except StopIteration as end:
            result: R = end.value
            return result


def collectives_per_step(wiring: Wiring) -> int:
    """All-reduces of the layers in one step (the embedding's and the gather of candidates not counted)."""
    if wiring.desync_every:
        return -(-2 * len(wiring.kinds) // wiring.desync_every)
    return sum({"parallel": 1, "none": 0}.get(kind, 2) for kind in wiring.kinds)
