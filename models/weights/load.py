"""Reads this rank's slices of a Source directly into its parameters, a layer at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Set
from functools import partial

from torch import Tensor

from ..stages import RankShard
from .checkpoint import CheckpointError, StoredTensor
from .fill import fill_target
from .manifest import Verifier
from .mapping import Source
from .parallel_reader import Readers, cut, reading_threads
from .quantised import is_scale, scale_fills
from .slices import Fill, plan_fills
from .tensor_reader import DummyReader, Reader

Progress = Callable[[int, int], None]
NOTHING = (0, 0)
"""No share of the files to verify: others have done it."""


def load(
    source: Source,
    shard: RankShard,
    parameters: Mapping[str, Tensor],
    *,
    replicate_embedding: bool = False,
    quantised: Set[str] = frozenset(),
    progress: Progress | None = None,
    on_module: Callable[[str], None] | None = None,
    verify: tuple[int, int] | None = None,
    retained: Set[str] = frozenset(),
) -> int:
    """Fills every parameter (in its own dtype, on its own device) on a few threads; returns the bytes read.
    progress(done, total): bytes of this rank's parameters. on_module("layers.3"): called when all parameters of that
    module are filled; it may repack and free them. verify (part, parts): if there is a manifest, verifies the part-th
    of `parts` shares of all files; each rank of a node verifies one; NOTHING: none. retained: parameters not to fill,
    because this node has them repacked. Raises CheckpointError."""
    if source.sharded_over:
        fills, verify = _own_fills(source, shard, replicate_embedding, parameters), (0, 1)
    else:
        fills = plan_fills(shard, replicate_embedding)
        fills += scale_fills(fills, quantised, source.quantisation is not None and source.quantisation.zeros)
    check_cover(fills, parameters)
    fills = [fill for fill in fills if fill.parameter not in retained]
    row_bytes = {name: p[:1].numel() * p.element_size() for name, p in parameters.items()}
    ordered = _in_order(fills, source.tensors)
    pieces = [piece for fill in ordered for piece in cut(fill, row_bytes[fill.parameter])]
    left = Counter(module_of(piece.parameter) for piece in pieces)
    total, done = sum(piece.count * row_bytes[piece.parameter] for piece in pieces), 0

    def read(reader: Reader, piece: Fill) -> None:
        target = parameters[piece.parameter].detach()[piece.row : piece.row + piece.count]
        fill_target(reader, source.tensors, piece, target)

    make = Reader if source.seed is None else partial(DummyReader, source.seed)
    verified = source.tensors.values() if source.seed is None and verify != NOTHING else ()
    with (
        make() as ahead,
        Readers(reading_threads(), make) as readers,
        Verifier(source.folder, verified, verify or (shard.rank, shard.size)) as check,
    ):
        for piece in readers.each(_announced(ahead, source.tensors, pieces), read):
            done += piece.count * row_bytes[piece.parameter]
            check.look()
            module = module_of(piece.parameter)
            left[module] -= 1
            if left[module] == 0 and on_module is not None:
                on_module(module)
            if progress is not None:
                progress(done, total)
        if not retained:
            check.finish()
        return readers.taken


def _announced(ahead: Reader, tensors: Mapping[str, StoredTensor], pieces: list[Fill]) -> Iterator[Fill]:
    """Yields the pieces, and asks the kernel to read the rows of each ahead."""
    for piece in pieces:
        if piece.tensor is not None and not is_scale(piece.parameter):
            ahead.prefetch(tensors[piece.tensor], piece.source_row, piece.count)
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
    """The module of a parameter, the unit of loading: "layers.3.qkv.weight" -> "layers.3", "norm.weight" -> "norm"."""
    return ".".join(parameter.split(".")[: 2 if parameter.startswith("layers.") else 1])


def _own_fills(
    source: Source, shard: RankShard, replicate_embedding: bool, parameters: Mapping[str, Tensor]
) -> list[Fill]:
    """Fills that read each parameter whole from this rank's own file."""
    assert source.own is not None
    again = f"write them again with `laddertron shard {source.folder} {source.own.sizes}"
    if shard.embeds and source.replicate_embedding != replicate_embedding:
        expected = "replicate" if replicate_embedding else "shard"
        raise CheckpointError(
            f"{source.folder}: its per-rank files were not written with parallel.embedding={expected}: {again} "
            f"--set parallel.embedding={expected}`"
        )
    for name, parameter in parameters.items():
        stored = source.tensors.get(name)
        if stored is None or stored.shape != tuple(parameter.shape):
            fault = "missing" if stored is None else f"of shape {stored.shape}"
            where = source.folder if stored is None else stored.file
            raise CheckpointError(f"{where}: tensor {name} {tuple(parameter.shape)} is {fault}: {again}`")
    return [Fill(name, 0, parameter.shape[0], name) for name, parameter in parameters.items()]


def _in_order(fills: list[Fill], tensors: Mapping[str, StoredTensor]) -> list[Fill]:
    """Sorts fills by module, in the order of the files: long sequential reads, one layer at a time."""

    def place(fill: Fill) -> tuple[str, int]:
        return ("", 0) if fill.tensor is None else (tensors[fill.tensor].file.name, tensors[fill.tensor].begin)

    first: dict[str, tuple[str, int]] = {}
    for fill in fills:
        if fill.tensor is not None:
            module = module_of(fill.parameter)
            first[module] = min(first.get(module, place(fill)), place(fill))
    nowhere = ("", 0)
    return sorted(
        fills, key=lambda f: (first.get(module_of(f.parameter), nowhere), module_of(f.parameter), place(f), f.row)
    )
