"""From a Source to a rank's parameters: this rank's slices alone are read, straight into place, a layer at a time, on
its own or dividing with other nodes what several of them want.

models/weights_plan.py says which slices, models/readers.py reads them, models/weights_exchange.py deals with other
nodes, models/manifest.py verifies what is read. Called by models/llama.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import nullcontext
from dataclasses import dataclass

from torch import Tensor

from .checkpoint import CheckpointError, Stored
from .manifest import Verifier
from .readers import Reader
from .reading import Readers, cut, reading_threads
from .shard import Shard
from .weights import Source
from .weights_exchange import Exchange, Leg, Swap
from .weights_fill import fill_target
from .weights_plan import Fill, plan_fills
from .weights_shared import blocks_of, divide

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Loaded:
    """What one rank's load took, in bytes of stored tensors: read from files, sent to other nodes, received from
    them."""

    read: int
    sent: int = 0
    received: int = 0


def load(
    source: Source,
    shard: Shard,
    parameters: Mapping[str, Tensor],
    *,
    replicate_embedding: bool = False,
    kept: Set[str] = frozenset(),
    progress: Progress | None = None,
    on_module: Callable[[str], None] | None = None,
    verify: tuple[int, int] | None = None,
    exchange: Exchange | None = None,
) -> Loaded:
    """Fills every parameter (in its own dtype, on its own device), on a few threads (models/reading.py).

    progress(done, total): in bytes of this rank's parameters. on_module("layers.3"): all parameters below that name are
    filled, and may be repacked and given up before more than a few pieces of the next ones are read. verify (part,
    parts): if the folder has a manifest, the part-th of `parts` equal shares of all files is verified; the ranks of a
    node verify one each. exchange: all ranks of the group load at once, and each node reads, and verifies, its share of
    what several nodes want. Raises CheckpointError; with an exchange CommunicationError, too.
    """
    fills = plan_fills(shard, replicate_embedding, kept)
    if source.sharded_over:
        fills = _own_fills(source, shard, replicate_embedding, parameters)
        verify, exchange = (0, 1), None
    check_cover(fills, parameters)
    everyone, swap, pick = [fills], None, None
    if exchange is not None:
        division = divide(shard, exchange.spread, source.tensors, exchange.pays, replicate_embedding, kept)
        everyone = [list(plan) for plan in division.plans]
        swap = Swap(exchange, source.tensors, division, shard.rank, parameters)
        pick = blocks_of(division, shard.rank, source.tensors)
    row_bytes = {name: p[:1].numel() * p.element_size() for name, p in parameters.items()}
    pieces: list[Fill | Leg] = []
    for fill in _in_order(fills, everyone, source.tensors):
        legs = None if swap is None else swap.legs(fill)
        pieces.extend(cut(fill, row_bytes[fill.parameter]) if legs is None else legs)
    left = Counter(module_of(_whole(piece).parameter) for piece in pieces)
    total, done = sum(_rows(piece) * row_bytes[_whole(piece).parameter] for piece in pieces), 0

    def read(reader: Reader, piece: Fill | Leg) -> None:
        if isinstance(piece, Leg):
            assert swap is not None
            swap.read(reader, piece)
        else:
            target = parameters[piece.parameter].detach()[piece.row : piece.row + piece.count]
            fill_target(reader, source.tensors, piece, target)

    with (
        Reader() as ahead,
        swap or nullcontext(),
        Readers(reading_threads()) as readers,
        Verifier.start(source.folder, source.tensors.values(), verify or (shard.rank, shard.size), pick) as check,
    ):
        coming: Iterable[Fill | Leg] = readers.each(_announced(ahead, source.tensors, pieces), read)
        for piece in coming if swap is None else swap.exchanged(iter(coming)):
            parameter = _whole(piece).parameter
            done += _rows(piece) * row_bytes[parameter]
            check.look()
            module = module_of(parameter)
            left[module] -= 1
            if left[module] == 0 and on_module is not None:
                on_module(module)
            if progress is not None:
                progress(done, total)
        check.finish()
        if swap is None:
            return Loaded(readers.taken)
        return Loaded(readers.taken + swap.taken, swap.sent, swap.received)


def _whole(piece: Fill | Leg) -> Fill:
    return piece.round.fill if isinstance(piece, Leg) else piece


def _rows(piece: Fill | Leg) -> int:
    """Rows of its parameter that a piece fills."""
    return piece.round.count if isinstance(piece, Leg) else piece.count


def _announced(ahead: Reader, tensors: Mapping[str, Stored], pieces: list[Fill | Leg]) -> Iterator[Fill | Leg]:
    """The pieces; as each is taken, the kernel hears which rows will be read."""
    for piece in pieces:
        fill = piece.round.piece(piece.round.mine) if isinstance(piece, Leg) else piece
        if fill.tensor is not None and not fill.parameter.endswith("_scale"):
            ahead.prefetch(tensors[fill.tensor], fill.source_row, fill.count)
        yield piece


def check_cover(fills: list[Fill], parameters: Mapping[str, Tensor]) -> None:
    """Raises CheckpointError unless the fills tile every row of every parameter exactly once."""
    rows: dict[str, list[tuple[int, int]]] = {}
    for fill in fills:
        rows.setdefault(fill.parameter, []).append((fill.row, fill.count))
    for name in rows.keys() ^ parameters.keys():
        raise CheckpointError(f"parameter {name} is {'unknown' if name in rows else 'filled by nothing'}")
    for name, spans in rows.items():
        at = 0
        for row, count in sorted(spans):
            if row != at:
                raise CheckpointError(
                    f"parameter {name}: row {min(row, at)} is filled {'twice' if row < at else 'never'}"
                )
            at = row + count
        if at != parameters[name].shape[0]:
            raise CheckpointError(f"parameter {name}: {at} of its {parameters[name].shape[0]} rows are filled")


def module_of(parameter: str) -> str:
    """ "layers.3.qkv.weight" -> "layers.3", "norm.weight" -> "norm": what is ready at once."""
    return ".".join(parameter.split(".")[: 2 if parameter.startswith("layers.") else 1])


def _own_fills(source: Source, shard: Shard, replicate_embedding: bool, parameters: Mapping[str, Tensor]) -> list[Fill]:
    """Each parameter whole from this rank's own file."""
    again = f"write them again with `laddertron shard {source.folder} --tensor-parallel-size {shard.size}"
    if source.replicate_embedding != replicate_embedding:
        wanted = "replicate" if replicate_embedding else "shard"
        raise CheckpointError(
            f"{source.folder}: its per-rank files were not written with parallel.embedding={wanted}: {again} "
            f"--embedding {wanted}`"
        )
    for name, parameter in parameters.items():
        stored = source.tensors.get(name)
        if stored is None or stored.shape != tuple(parameter.shape):
            found = "missing" if stored is None else f"of shape {stored.shape}"
            where = source.folder if stored is None else stored.file
            raise CheckpointError(f"{where}: tensor {name} {tuple(parameter.shape)} is {found}: {again}`")
    return [Fill(name, 0, parameter.shape[0], name) for name, parameter in parameters.items()]


def _in_order(fills: list[Fill], everyone: list[list[Fill]], tensors: Mapping[str, Stored]) -> list[Fill]:
    """Module by module in the order of the files, and in file order within each: long sequential reads, and one layer
    at a time. By the fills of `everyone` who loads together: whoever exchanges rows must come to them in one order."""

    def place(fill: Fill) -> tuple[str, int]:
        return ("", 0) if fill.tensor is None else (tensors[fill.tensor].file.name, tensors[fill.tensor].begin)

    first: dict[str, tuple[str, int]] = {}
    for fill in (fill for plan in everyone for fill in plan):
        if fill.tensor is not None:
            module = module_of(fill.parameter)
            first[module] = min(first.get(module, place(fill)), place(fill))
    nowhere = ("", 0)
    return sorted(
        fills, key=lambda f: (first.get(module_of(f.parameter), nowhere), module_of(f.parameter), place(f), f.row)
    )
