"""Reads and checks the headers of a folder of safetensors files before any tensor is used. Every error is a
CheckpointError, which names file and tensor.
"""

from __future__ import annotations

import os
import re
import struct
from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from ...topology.json_codec import FILE_CONTAINERS, parse
from ..config.json_fields import Refusal
from ..config.quantisation import Code

ITEMSIZES = {
    "F32": 4,
    "BF16": 2,
    "F16": 2,
    "F8_E4M3": 1,
    "F8_E8M0": 1,
    "I8": 1,
    "BOOL": 1,
    "U8": 1,
    "I16": 2,
    "U16": 2,
    "I32": 4,
    "U32": 4,
    "I64": 8,
    "U64": 8,
}
"""Bytes per element of each type: those of weights, and those of buffers, which are not read."""
_ALL_ONES = {
    "F32": ("I", 0x7FFFFFFF, 0x7F800000),
    "BF16": ("H", 0x7FFF, 0x7F80),
    "F16": ("H", 0x7FFF, 0x7C00),
    "F8_E4M3": ("B", 0x7F, 0x7F),
    "F8_E8M0": ("B", 0xFF, 0xFF),
}
"""For each type: the integer type (array's code) of an element, the mask of all bits but a sign, and the least masked
value that is NaN or infinite."""
SAMPLE = 256
COMPARED = 1 << 20
"""Bytes compared at once."""
MAX_HEADER_BYTES = 16 << 20
"""Enough for 100,000 tensors in one file. The format allows 100 MB, which takes a gigabyte of memory to parse."""
MAX_INDEX_BYTES = 64 << 20
MAX_DIMENSIONS = 8
HARMLESS = re.compile(r".*(rotary_emb\.inv_freq|\.attn\.bias|\.masked_bias)")
"""Unused buffers of older checkpoints."""
INDEX = "model.safetensors.index.json"
_BARE_NAME = re.compile(r"[^/\\\0]+\.safetensors")


class CheckpointError(Refusal):
    """A checkpoint that cannot be loaded exactly; the message names file, tensor, the rule and the fix."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in bytes [begin, end) of a file. block: for scales by block, the rows and columns that share one.
    code: of 4-bit codes, two an element of U8. divisor: the global scale by which scales are divided. declared: for
    scales of packed codes, the tensor with the shape of the matrix before it was packed, if there is one."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int
    block: tuple[int, int] | None = None
    code: Code | None = None
    divisor: StoredTensor | None = None
    declared: StoredTensor | None = None

    @property
    def per_byte(self) -> int:
        """Columns in an element."""
        return 1 if self.code is None else 2


def shown(name: object) -> str:
    """A name from a file, shortened and escaped for one line of an error."""
    text = str(name)
    return text if text.isprintable() and len(text) <= 200 else repr(text[:200])


def read_header(file: Path) -> list[StoredTensor]:
    """Reads the tensors of one safetensors file from its header. Raises CheckpointError."""
    return read_annotated(file)[1]


def read_annotated(file: Path) -> tuple[dict[str, Any], list[StoredTensor]]:
    """Reads the `__metadata__` of one safetensors file, unchecked, and its tensors. Raises CheckpointError."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        if start.startswith(b"version "):
            raise CheckpointError(
                f"{file}: this is a Git LFS pointer of {size} bytes, not weights: fetch them with `git lfs pull`"
            )
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= size - 8:
            raise CheckpointError(
                f"{file}: {size} bytes with a header of {length} announced: truncated, or not a safetensors file"
            )
        if length > MAX_HEADER_BYTES:
            raise CheckpointError(f"{file}: a header of {length} bytes; at most {MAX_HEADER_BYTES} are read")
        text = stream.read(length)
    try:
        header = parse(text, FILE_CONTAINERS)
        if not isinstance(header, dict):
            raise ValueError("it is not an object")
        metadata = header.pop("__metadata__", None)
        tensors = [_stored(file, name, entry, 8 + length) for name, entry in header.items()]
    except (ValueError, TypeError, KeyError, RecursionError) as fault:
        raise CheckpointError(f"{file}: bad safetensors header: {_said(fault)}") from fault
    _check_offsets(file, size, 8 + length, tensors)
    return metadata if isinstance(metadata, dict) else {}, tensors


def _said(fault: Exception) -> str:
    return f"{shown(fault.args[0])} is missing" if isinstance(fault, KeyError) else str(fault)


def _check_offsets(file: Path, size: int, at: int, tensors: list[StoredTensor]) -> None:
    """Checks that tensors are contiguous from byte `at` to the end of the file, without gaps or overlaps."""
    for tensor in sorted(tensors, key=lambda t: (t.begin, t.end)):
        if tensor.begin != at:
            fault = "an overlap" if tensor.begin < at else "a gap"
            raise CheckpointError(
                f"{file}: tensor {shown(tensor.name)} begins at byte {tensor.begin}, what is before it ends at {at}: "
                f"{fault}; fetch the file again"
            )
        at = tensor.end
    if at != size:
        cut = min((t for t in tensors if t.end > size), key=lambda t: t.begin, default=None)
        where = "more than its tensors" if cut is None else f"cut within tensor {shown(cut.name)}"
        raise CheckpointError(
            f"{file}: {size} bytes, but its header describes {at} ({where}): truncated or damaged; fetch the file again"
        )


def _stored(file: Path, name: str, entry: dict[str, Any], base: int) -> StoredTensor:
    label = shown(name)
    try:
        dtype, shape, (begin, end) = str(entry["dtype"]), tuple(entry["shape"]), entry["data_offsets"]
    except (ValueError, TypeError, KeyError) as fault:
        raise ValueError(f"tensor {label}: dtype, shape and two data_offsets are needed: {_said(fault)}") from fault
    if len(shape) > MAX_DIMENSIONS or not all(type(v) is int and 0 <= v < 2**63 for v in (*shape, begin, end)):
        raise ValueError(f"tensor {label}: shape and offsets must be natural numbers, {MAX_DIMENSIONS} at most a shape")
    if dtype not in ITEMSIZES:
        raise ValueError(f"tensor {label}: dtype {shown(dtype)} is not one of {', '.join(ITEMSIZES)}")
    want = prod(shape) * ITEMSIZES[dtype]
    if end - begin != want:
        raise ValueError(f"tensor {label}: {dtype} {shape} takes {want} bytes, {end - begin} are announced")
    return StoredTensor(name, file, dtype, shape, base + begin, base + end)


def check_finite(tensors: Iterable[StoredTensor]) -> None:
    """Checks SAMPLE elements at the begin, the middle and the end of each tensor. Raises CheckpointError for a
    non-finite one: the file is damaged, or the weights are unusable."""
    by_file: defaultdict[Path, list[StoredTensor]] = defaultdict(list)
    for tensor in tensors:
        if tensor.dtype in _ALL_ONES:
            by_file[tensor.file].append(tensor)
    for file, in_file in by_file.items():
        with file.open("rb", buffering=0) as stream:
            for tensor in in_file:
                code, mask, first = _ALL_ONES[tensor.dtype]
                item = ITEMSIZES[tensor.dtype]
                count, size = (tensor.end - tensor.begin) // item, SAMPLE * item
                for start in {0, max(0, count // 2), max(0, count - SAMPLE)}:
                    stream.seek(tensor.begin + start * item)
                    data = array(code, stream.read(min(size, tensor.end - stream.tell())))
                    if any(value & mask >= first for value in data):
                        raise CheckpointError(
                            f"{file}: tensor {shown(tensor.name)} has a value that is NaN or infinite: fetch the file "
                            "again"
                        )


def same_values(one: StoredTensor, other: StoredTensor) -> bool:
    """Whether two tensors are equal, byte by byte."""
    left = one.end - one.begin
    if (one.dtype, left) != (other.dtype, other.end - other.begin):
        return False
    with one.file.open("rb") as first, other.file.open("rb") as second:
        first.seek(one.begin)
        second.seek(other.begin)
        while left > 0:
            part = first.read(min(left, COMPARED))
            if not part or part != second.read(len(part)):
                return False
            left -= len(part)
    return True


def _index_files(folder: Path, index: Path) -> dict[str, str]:
    if index.stat().st_size > MAX_INDEX_BYTES:
        raise CheckpointError(f"{index}: more than the {MAX_INDEX_BYTES} bytes that an index may have")
    text = index.read_bytes()
    if text.startswith(b"version https://git-lfs"):
        raise CheckpointError(f"{index}: this is a Git LFS pointer, not an index: fetch it with `git lfs pull`")
    try:
        weight_map = parse(text, FILE_CONTAINERS)["weight_map"]
        if not isinstance(weight_map, dict):
            raise ValueError("weight_map is not an object")
    except (ValueError, TypeError, KeyError, RecursionError) as fault:
        raise CheckpointError(f"{index}: bad index: {_said(fault)}") from fault
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not _BARE_NAME.fullmatch(name):
            raise CheckpointError(
                f"{index}: tensor {shown(tensor)} points to {str(name)[:200]!r}: only bare *.safetensors names inside "
                f"{folder} are read"
            )
    return weight_map


def inside(folder: Path, name: str) -> Path:
    """A file of the folder; links may lead into the folder or its hub cache. Raises CheckpointError."""
    file = folder / name
    if len(os.fsencode(name)) > 255:
        raise CheckpointError(f"{folder}: the name {shown(name)} is longer than a file's may be: fetch the index again")
    if not file.is_file():
        raise CheckpointError(f"{file}: missing, or a link that leads nowhere, though the folder names it")
    real, home = file.resolve(), folder.resolve()
    # In a hub cache, links of a snapshot lead to blobs of the same cache.
    cache = home.parent.parent if home.parent.name == "snapshots" else home
    if not real.is_relative_to(cache):
        raise CheckpointError(f"{file}: links to {real}, outside the model folder: copy the file into {folder}")
    return file


def refuse_other_formats(folder: Path) -> None:
    names = {entry.name for entry in folder.iterdir()} if folder.is_dir() else set()
    if not names:
        raise CheckpointError(f"{folder}: no such model folder, or an empty one")
    if names & {"metadata.json", ".metadata", "common.pt"} or any(n.startswith("iter_") for n in names):
        raise CheckpointError(
            f"{folder}: a Megatron-core distributed checkpoint, whose metadata are pickled: if you trust it, write a "
            f"folder with `torchrun --nproc-per-node N -m laddertron.tools.train.megatron to-folder {folder} OUT "
            "--like FOLDER --wiring WIRING`, FOLDER having the model's config.json"
        )
    if any(n.endswith((".bin", ".pt", ".pth")) for n in names):
        raise CheckpointError(
            f"{folder}: pickled weights are never read: convert them once with transformers' "
            "`model.save_pretrained(OUT, safe_serialization=True)`"
        )
    raise CheckpointError(f"{folder}: no *.safetensors file: is this a model folder?")


def _index(folder: Path) -> dict[str, str] | None:
    index = folder / INDEX
    if not (index.exists() or index.is_symlink()):
        return None
    return _index_files(folder, inside(folder, index.name))


def weight_files(folder: Path, weight_map: Mapping[str, str] | None = None) -> list[str]:
    """The names of the files that contain a folder's weights; `weight_map`: its index, if read already. Raises
    CheckpointError for a bad index."""
    weight_map = _index(folder) if weight_map is None else weight_map
    if weight_map is not None:
        return sorted(set(weight_map.values()))
    if (folder / "model.safetensors").exists():
        return ["model.safetensors"]  # the folder may also have a consolidated copy
    return sorted(p.name for p in folder.glob("*.safetensors"))


def read_folder(folder: Path) -> dict[str, StoredTensor]:
    """Reads every tensor of a checkpoint folder, by name, with or without an index. Raises CheckpointError."""
    weight_map = _index(folder)
    if not (files := weight_files(folder, weight_map)):
        refuse_other_formats(folder)
    tensors: dict[str, StoredTensor] = {}
    for name in files:
        for tensor in read_header(inside(folder, name)):
            if tensor.name in tensors:
                raise CheckpointError(
                    f"{folder / name}: tensor {shown(tensor.name)} is also in {tensors[tensor.name].file.name}"
                )
            if weight_map is not None and tensor.name not in weight_map and not HARMLESS.fullmatch(tensor.name):
                raise CheckpointError(
                    f"{folder / name}: tensor {shown(tensor.name)} is not in {INDEX}: index and files belong to "
                    "different checkpoints; fetch them again"
                )
            tensors[tensor.name] = tensor
    for tensor_name, name in (weight_map or {}).items():
        stored = tensors.get(tensor_name)
        if stored is None or stored.file.name != name:
            raise CheckpointError(
                f"{folder / name}: tensor {shown(tensor_name)} is missing; the index says it is there"
            )
    return tensors
