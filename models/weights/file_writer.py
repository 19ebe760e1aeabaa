"""Writes a safetensors file: the header first, then one tensor at a time, which `fill` fills, so that only one tensor
is in memory. Knows names, types and shapes, not models.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from .tensor_reader import DTYPES, byte_view

WORDS = {dtype: word for word, dtype in DTYPES.items()}
Entries = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and type of each tensor, in the order of the file."""


def write_tensors(
    path: Path,
    entries: Entries,
    fill: Callable[[str, Tensor], object],
    metadata: Mapping[str, str],
    progress: Callable[[int], None] = lambda count: None,
    written: Callable[[memoryview], object] = lambda data: None,
) -> None:
    """Writes and syncs the file. `fill` gets each name and zeroed tensor, `progress` the bytes of each written one,
    `written` its contents."""
    with path.open("wb") as stream:
        stream.write(_header(entries, metadata))
        for name, (shape, dtype) in entries.items():
            tensor = torch.zeros(shape, dtype=dtype)
            fill(name, tensor)
            if tensor.numel():
                stream.write(view := byte_view(tensor.view(-1).view(torch.uint8)))
                written(view)
            progress(tensor.numel() * dtype.itemsize)
        stream.flush()
        os.fsync(stream.fileno())


def replace_metadata(path: Path, entries: Entries, before: Mapping[str, str], metadata: Mapping[str, str]) -> None:
    """Replaces the metadata of a file that `write_tensors` wrote by one of the same length, and syncs it."""
    old, new = _header(entries, before), _header(entries, metadata)
    if len(old) != len(new):
        raise ValueError(f"{path}: metadata of {len(new)} bytes in place of {len(old)}")
    with path.open("r+b") as stream:
        stream.write(new)
        stream.flush()
        os.fsync(stream.fileno())


def _header(entries: Entries, metadata: Mapping[str, str]) -> bytes:
    described: dict[str, object] = {"__metadata__": metadata}
    at = 0
    for name, (shape, dtype) in entries.items():
        size = prod(shape) * dtype.itemsize
        described[name] = {"dtype": WORDS[dtype], "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(described).encode()
    text += b" " * (-(len(text) + 8) % 4096)  # tensors begin on a page, so that they can be mapped in any type
    return len(text).to_bytes(8, "little") + text
