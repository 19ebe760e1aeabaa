"""From a checkpoint folder to a rank's parameters: what the folder holds is checked against the model, then this rank's
slices alone are read, straight into place, a layer at a time.

models/weights_plan.py says which slices, models/readers.py reads them, models/manifest.py verifies what is read.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from .checkpoint import DTYPES, HARMLESS, CheckpointError, Stored, read_folder, shown
from .config import ModelConfig
from .manifest import Verifier, weights_digest
from .quantisation import Quantisation, read_quantisation
from .readers import FP8, Reader
from .reading import Readers, cut, reading_threads
from .shard import Shard
from .weights_plan import PRODUCTS, Fill, expected_shapes, head_of, plan_fills, scale_of, sources_of
from .weights_shards import open_shards

Progress = Callable[[int, int], None]
_PLAIN = ("F32", "BF16", "F16")
_CALIBRATION = re.compile(r".*(\.input_scale|\.input_scale_ub|\.output_scale|\.[qkv]_scale|_proj\.weight_scale_ub)")
"""What fp8 checkpoints carry beside: activations are scaled per token here, and keys and values by the cache."""


@dataclass(frozen=True, slots=True)
class Source:
    """A checked folder: every tensor that this rank may read, by name."""

    folder: Path
    tensors: Mapping[str, Stored]
    digest: str
    """Of names, types, shapes and places (and of the bytes, where there is a manifest): ranks must agree on it."""
    quantisation: Quantisation | None = None
    sharded_over: int = 0
    """Ranks that per-rank files were written for; 0: the checkpoint itself."""
    replicate_embedding: bool = False
    """What per-rank files hold."""

    def kept_fp8(self, config: ModelConfig) -> frozenset[str]:
        """Products whose weights are fp8 in full, and may stay so: "layers.3.gate_up", …"""
        if self.quantisation is None:
            return frozenset()
        return frozenset(
            f"layers.{layer}.{product}"
            for layer in range(config.num_layers)
            for product in PRODUCTS
            if all(self._is_fp8(name) for name in self._names(config, layer, product))
        )

    def _names(self, config: ModelConfig, layer: int, product: str) -> tuple[str, ...]:
        return (f"layers.{layer}.{product}.weight",) if self.sharded_over else sources_of(config, layer, product)

    def _is_fp8(self, name: str) -> bool:
        return name in self.tensors and self.tensors[name].dtype == "F8_E4M3"

    def rank_bytes(self, itemsize: int, size: int, keeps_fp8: bool, products: int | None = None) -> int:
        """About what one of `size` ranks holds with `itemsize` bytes an element, `products` in the layers' matrices."""
        total = 0
        for stored in self.tensors.values():
            width = DTYPES[stored.dtype].itemsize
            if keeps_fp8 and stored.dtype == "F8_E4M3":
                held = width
            else:
                held = products if products and len(stored.shape) == 2 and "layers." in stored.name else itemsize
            total += (stored.end - stored.begin) // width * held
        return total if self.sharded_over else total // size


def check_folder(folder: Path, config: ModelConfig) -> dict[str, Stored]:
    """The checkpoint's tensors, once all that the model needs are there in the right shape and nothing unknown is.

    Raises CheckpointError naming file and tensor.
    """
    return _check(folder, config, _quantisation(folder))


def open_source(folder: Path, shard: Shard) -> Source:
    """What this rank loads from: files of its own where `laddertron shard` has written them for as many ranks, else the
    checkpoint. Raises CheckpointError."""
    own = open_shards(folder, shard)
    if own is None:
        return open_checkpoint(folder, shard.config)
    return Source(folder, own.tensors, own.digest, _quantisation(folder), shard.size, own.replicate_embedding)


def open_checkpoint(folder: Path, config: ModelConfig) -> Source:
    """The checkpoint itself, checked as check_folder does. Raises CheckpointError."""
    quantisation = _quantisation(folder)
    tensors = _check(folder, config, quantisation)
    return Source(folder, tensors, weights_digest(folder, tensors), quantisation)


def _quantisation(folder: Path) -> Quantisation | None:
    try:
        return read_quantisation(folder)
    except (OSError, ValueError) as fault:
        raise CheckpointError(str(fault)) from fault


def _check(folder: Path, config: ModelConfig, quantisation: Quantisation | None) -> dict[str, Stored]:
    tensors = read_folder(folder)
    expected = expected_shapes(config)
    scales = set()
    for name, shape in expected.items():
        stored = tensors.get(name)
        if stored is None:
            raise CheckpointError(f"{folder}: tensor {name} {shape} is missing; config.json promises it")
        if stored.shape != shape:
            raise CheckpointError(f"{stored.file}: tensor {name} has shape {stored.shape}, config.json says {shape}")
        if stored.dtype == "F8_E4M3" and quantisation is not None and len(shape) == 2:
            scales.add(_check_scale(stored, tensors.get(scale_of(name))))
        elif stored.dtype not in _PLAIN:
            raise CheckpointError(
                f"{stored.file}: tensor {name} is stored as {stored.dtype}; readable are {', '.join(_PLAIN)}, and "
                "F8_E4M3 matrices where config.json has a quantization_config"
            )
    known = scales | ({head_of(config)} if config.tied_embeddings else set())
    for name, stored in tensors.items():
        if name in expected or name in known or HARMLESS.fullmatch(name):
            continue
        if quantisation is None or not _CALIBRATION.fullmatch(name):
            raise CheckpointError(
                f"{stored.file}: tensor {shown(name)} {stored.shape} belongs to nothing in config.json "
                f"({config.family}, {config.num_layers} layers): wrong config.json, or an architecture not supported"
            )
    return tensors


def _check_scale(stored: Stored, scale: Stored | None) -> str:
    """The scale's name, once it fits its tensor: one number, or one a row."""
    if scale is None:
        raise CheckpointError(
            f"{stored.file}: tensor {stored.name} is fp8 without {scale_of(stored.name)}: its scale is missing"
        )
    rows = stored.shape[0]
    if scale.shape not in ((), (1,), (rows,), (rows, 1)) or scale.dtype not in _PLAIN:
        raise CheckpointError(
            f"{scale.file}: tensor {scale.name} is {scale.dtype} {scale.shape}; one number or ({rows}, 1) is read"
        )
    return scale.name


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
) -> None:
    """Fills every parameter (in its own dtype, on its own device), on a few threads (models/reading.py).

    progress(done, total): in bytes of this rank's parameters. on_module("layers.3"): all parameters below that name are
    filled, and may be repacked and given up before more than a few pieces of the next ones are read. verify (part,
    parts): if the folder has a manifest, the part-th of `parts` equal shares of all files is verified; the ranks of a
    node verify one each. Raises CheckpointError.
    """
    fills = plan_fills(shard, replicate_embedding, kept)
    if source.sharded_over:
        fills = _own_fills(source, shard, replicate_embedding, parameters)
        verify = (0, 1)
    check_cover(fills, parameters)
    ordered = _in_order(fills, source.tensors)
    row_bytes = {name: p[:1].numel() * p.element_size() for name, p in parameters.items()}
    pieces = [piece for fill in ordered for piece in cut(fill, row_bytes[fill.parameter])]
    left = Counter(module_of(piece.parameter) for piece in pieces)
    total, done = sum(piece.count * row_bytes[piece.parameter] for piece in pieces), 0

    def read(reader: Reader, piece: Fill) -> None:
        fill_target(reader, source, piece, parameters[piece.parameter].detach()[piece.row : piece.row + piece.count])

    def announced() -> Iterator[Fill]:
        before = None
        for piece in pieces:
            if piece.tensor is not None and piece.tensor != before:
                ahead.prefetch(source.tensors[piece.tensor])
            before = piece.tensor
            yield piece

    with (
        Reader() as ahead,
        Readers(reading_threads()) as readers,
        Verifier.start(source.folder, source.tensors.values(), verify or (shard.rank, shard.size)) as check,
    ):
        for piece in readers.each(announced(), read):
            done += piece.count * row_bytes[piece.parameter]
            check.look()
            module = module_of(piece.parameter)
            left[module] -= 1
            if left[module] == 0 and on_module is not None:
                on_module(module)
            if progress is not None:
                progress(done, total)
        check.finish()


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


def _in_order(fills: list[Fill], tensors: Mapping[str, Stored]) -> list[Fill]:
    """Module by module in the order of the files, and in file order within each: long sequential reads, and one layer
    at a time."""

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


def fill_target(reader: Reader, source: Source, fill: Fill, target: Tensor) -> None:
    """One slice into its rows of a parameter. Raises CheckpointError."""
    if fill.tensor is None:
        target.zero_()
        return
    stored = source.tensors[fill.tensor]
    scale = None
    if fill.parameter.endswith("_scale"):
        _fill_scale(reader, stored, fill, target)
        return
    if stored.dtype == "F8_E4M3" and target.dtype != FP8:
        scale = reader.whole(source.tensors[scale_of(fill.tensor)]).view(-1)
        if scale.numel() > 1:
            scale = scale[fill.source_row : fill.source_row + fill.count]
    rows, columns = stored.shape[0], fill.columns or (stored.shape[1] if len(stored.shape) == 2 else 1)
    if fill.source_row + fill.count > rows or (target.ndim == 2 and target.shape[1] != columns):
        raise CheckpointError(
            f"{stored.file}: tensor {shown(stored.name)} {stored.shape} does not hold rows {fill.source_row} to "
            f"{fill.source_row + fill.count} of {fill.parameter} {tuple(target.shape)}"
        )
    reader.read(stored, fill.source_row, fill.source_col, target, scale)


def _fill_scale(reader: Reader, stored: Stored, fill: Fill, target: Tensor) -> None:
    values = reader.whole(stored).view(-1).float()
    target.copy_(values if values.numel() == 1 else values[fill.source_row : fill.source_row + fill.count])
