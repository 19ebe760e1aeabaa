"""A folder of safetensors as data: which tensor lies where, checked before a byte of it is used.

Reads headers only; `Mapped` then maps the files. Nothing here knows models or ranks. Called by models/weights.py. Every
fault is a CheckpointError naming file and tensor: a shard is refused before the engine is ready, never noticed later.
"""

from __future__ import annotations

import json
import mmap
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
}
MAX_HEADER_BYTES = 100_000_000
"""The format's own bound on a header."""
_BARE_NAME = re.compile(r"[^/\\\0]+\.safetensors")


class CheckpointError(Exception):
    """A checkpoint that cannot be loaded exactly; the message names file, tensor, the rule and the mend."""


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor in one file: bytes [begin, end) of the whole file."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = dict(pairs)
    if len(keys) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice!r} stands twice")
    return keys


def read_header(file: Path) -> list[Stored]:
    """The tensors of one safetensors file, in file order. Raises CheckpointError."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        if start.startswith(b"version "):
            raise CheckpointError(
                f"{file}: this is a Git LFS pointer of {size} bytes, not weights: fetch them with `git lfs pull`"
            )
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
            raise CheckpointError(
                f"{file}: {size} bytes with a header of {length} announced: truncated, or not a safetensors file"
            )
        text = stream.read(length)
    try:
        header = json.loads(text, object_pairs_hook=_no_duplicates)
        if not isinstance(header, dict):
            raise ValueError("it is not an object")
        header.pop("__metadata__", None)
        tensors = [_stored(file, name, entry, 8 + length) for name, entry in header.items()]
    except (ValueError, TypeError, KeyError, RecursionError) as fault:
        raise CheckpointError(f"{file}: bad safetensors header: {fault}") from fault
    at = 8 + length
    for tensor in sorted(tensors, key=lambda t: (t.begin, t.end)):
        if tensor.begin != at:
            raise CheckpointError(f"{file}: tensor {tensor.name} begins at byte {tensor.begin}, expected {at}")
        at = tensor.end
    if at != size:
        last = max(tensors, key=lambda t: t.end).name if tensors else "none"
        raise CheckpointError(
            f"{file}: {size} bytes, but its header describes {at} (last tensor: {last}): truncated or damaged; "
            "fetch the file again"
        )
    return tensors


def _stored(file: Path, name: str, entry: dict[str, Any], base: int) -> Stored:
    dtype, shape, (begin, end) = str(entry["dtype"]), tuple(entry["shape"]), entry["data_offsets"]
    if not all(isinstance(v, int) and v >= 0 for v in (*shape, begin, end)):
        raise ValueError(f"tensor {name}: shape {shape} and offsets {begin}, {end} must be natural numbers")
    if dtype not in DTYPES:
        raise ValueError(f"tensor {name}: dtype {dtype} is not one of {', '.join(DTYPES)}")
    want = prod(shape) * DTYPES[dtype].itemsize
    if end - begin != want:
        raise ValueError(f"tensor {name}: {dtype} {shape} takes {want} bytes, {end - begin} are announced")
    return Stored(name, file, dtype, shape, base + begin, base + end)


def _index_files(folder: Path, index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_bytes(), object_pairs_hook=_no_duplicates)["weight_map"]
        if not isinstance(weight_map, dict):
            raise ValueError("weight_map is not an object")
    except (ValueError, TypeError, KeyError, RecursionError) as fault:
        raise CheckpointError(f"{index}: bad index: {fault}") from fault
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not _BARE_NAME.fullmatch(name):
            raise CheckpointError(
                f"{index}: tensor {tensor} points to {name!r}: only bare *.safetensors names inside {folder} are read"
            )
    return weight_map


def _inside(folder: Path, name: str) -> Path:
    file = folder / name
    if not file.is_file():
        raise CheckpointError(f"{file}: missing; the index names it")
    real, home = file.resolve(), folder.resolve()
    # A hub cache keeps blobs beside the snapshot: links may point into the same cache, nowhere else.
    cache = home.parent.parent if home.parent.name == "snapshots" else home
    if not real.is_relative_to(cache):
        raise CheckpointError(f"{file}: links to {real}, outside the model folder: copy the file into {folder}")
    return file


def _refuse_other_formats(folder: Path) -> None:
    names = {entry.name for entry in folder.iterdir()} if folder.is_dir() else set()
    if not names:
        raise CheckpointError(f"{folder}: no such model folder, or an empty one")
    if names & {"metadata.json", ".metadata", "common.pt"} or any(n.startswith("iter_") for n in names):
        raise CheckpointError(
            f"{folder}: a Megatron-core distributed checkpoint: convert it with `torchrun tools/checkpoint/convert.py "
            f"--model-type GPT --loader core --saver llama_mistral --load-dir {folder} --save-dir OUT` of Megatron-LM "
            "and give the resulting Hugging Face folder"
        )
    if any(n.endswith((".bin", ".pt", ".pth")) for n in names):
        raise CheckpointError(
            f"{folder}: pickled weights are never read: convert them once with transformers' "
            "`model.save_pretrained(OUT, safe_serialization=True)`"
        )
    raise CheckpointError(f"{folder}: no *.safetensors file: is this a model folder?")


def read_folder(folder: Path) -> dict[str, Stored]:
    """Every tensor of a checkpoint folder by name, with or without an index. Raises CheckpointError."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = _index_files(folder, index)
        files = sorted(set(weight_map.values()))
    else:
        weight_map = None
        files = sorted(p.name for p in folder.glob("*.safetensors"))
    if not files:
        _refuse_other_formats(folder)
    tensors: dict[str, Stored] = {}
    for name in files:
        for tensor in read_header(_inside(folder, name)):
            if tensor.name in tensors:
                raise CheckpointError(
                    f"{folder / name}: tensor {tensor.name} also stands in {tensors[tensor.name].file.name}"
                )
            tensors[tensor.name] = tensor
    for tensor_name, name in (weight_map or {}).items():
        found = tensors.get(tensor_name)
        if found is None or found.file.name != name:
            raise CheckpointError(f"{folder / name}: tensor {tensor_name} is missing; the index says it is there")
    return tensors


class Mapped:
    """Read-only views of tensors in mapped files; nothing is read until a view is copied from."""

    def __init__(self) -> None:
        self._maps: dict[Path, mmap.mmap] = {}

    def view(self, stored: Stored) -> Tensor:
        """The stored tensor, in its own dtype and shape, over the mapped file. Never write to it."""
        mapped = self._maps.get(stored.file)
        if mapped is None:
            with stored.file.open("rb") as stream:
                mapped = mmap.mmap(stream.fileno(), 0, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED)
            self._maps[stored.file] = mapped
        dtype = DTYPES[stored.dtype]
        if stored.begin == stored.end:
            return torch.empty(stored.shape, dtype=dtype)
        count = (stored.end - stored.begin) // dtype.itemsize
        return _frombuffer(mapped, dtype, count, stored.begin).view(stored.shape)

    def forget(self, file: Path) -> None:
        """Lets the kernel drop the file's pages from this process (they stay in the page cache for other ranks)."""
        mapped = self._maps.pop(file, None)
        if mapped is not None:
            mapped.madvise(mmap.MADV_DONTNEED)


def _frombuffer(mapped: mmap.mmap, dtype: torch.dtype, count: int, offset: int) -> Tensor:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the map is read-only and nobody writes to the view
        if offset % dtype.itemsize:
            # The format does not promise alignment: such a tensor is viewed as bytes and copied once.
            raw = torch.frombuffer(mapped, dtype=torch.uint8, count=count * dtype.itemsize, offset=offset)
            return raw.clone().view(dtype)
        return torch.frombuffer(mapped, dtype=dtype, count=count, offset=offset)


def total_bytes(tensors: Iterator[Stored]) -> int:
    """Bytes of all given tensors."""
    return sum(t.end - t.begin for t in tensors)
