"""Slices of stored tensors, read straight into place: whole rows by large positioned reads, columns gathered from the
mapped file, so that the ranks of a node share one page cache and storage sees long runs.

Knows bytes and types, not models or ranks. Called by models/weights.py.
"""

from __future__ import annotations

import mmap
import os
import warnings
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .checkpoint import DTYPES, CheckpointError, Stored, shown

CHUNK_BYTES = 16 << 20
"""What is converted at once, and how much of a file stays mapped behind a gather."""
PREFETCH_BYTES = 256 << 20
FP8 = torch.float8_e4m3fn


class Reader:
    """Open files and one buffer. A context manager: leaving it closes them."""

    def __init__(self) -> None:
        self._files: dict[Path, int] = {}
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._fp8 = _fp8_table()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number in self._files.values():
            os.close(number)
        self._files.clear()

    def prefetch(self, stored: Stored) -> None:
        """Asks the kernel to read ahead; returns before the bytes are there."""
        length = min(stored.end - stored.begin, PREFETCH_BYTES)
        os.posix_fadvise(self._file(stored.file), stored.begin, length, os.POSIX_FADV_WILLNEED)

    def whole(self, stored: Stored) -> Tensor:
        """A small tensor, copied."""
        out = torch.empty(stored.shape, dtype=DTYPES[stored.dtype])
        self._fill(stored, stored.begin, out.view(-1).view(torch.uint8) if out.numel() else out)
        return out

    def read(self, stored: Stored, row: int, column: int, target: Tensor, scale: Tensor | None = None) -> None:
        """target [n] or [n, c] = rows [row, row + n) and columns [column, column + c), converted to its type.

        scale [n] or a single number multiplies rows of an fp8 tensor. Raises CheckpointError if the file shrank.
        """
        if target.numel() == 0:
            return
        width = prod(stored.shape[1:])
        columns = target.shape[1] if target.ndim == 2 else 1
        dtype = DTYPES[stored.dtype]
        in_place = target.device.type == "cpu" and target.dtype == dtype and scale is None
        if columns == width and in_place and target.is_contiguous():
            self._fill(stored, stored.begin + row * width * dtype.itemsize, target.view(-1).view(torch.uint8))
            return
        step = target.shape[0] if in_place else max(1, CHUNK_BYTES // (columns * dtype.itemsize))
        for first in range(0, target.shape[0], step):
            part = target[first : first + step]
            at, count = row + first, part.shape[0]
            rows = self._rows(stored, at, count, width) if columns == width else self._mapped(stored, at, count, width)
            source = rows[:, column : column + columns]
            if in_place:
                _copy(part, source)
                continue
            source = source.reshape(part.shape)
            if scale is not None:
                source = self._dequantised(source, scale if scale.numel() == 1 else scale[first : first + step])
            part.copy_(source)

    def _rows(self, stored: Stored, row: int, count: int, width: int) -> Tensor:
        """Whole rows [count, width] in the buffer; valid until the next call."""
        dtype = DTYPES[stored.dtype]
        size = count * width * dtype.itemsize
        if self._buffer.numel() < size:
            self._buffer = torch.empty(max(size, CHUNK_BYTES), dtype=torch.uint8)
        self._fill(stored, stored.begin + row * width * dtype.itemsize, self._buffer[:size])
        return self._buffer[:size].view(dtype).view(count, width)

    def _mapped(self, stored: Stored, row: int, count: int, width: int) -> Tensor:
        """Whole rows over the mapped file: only pages that are copied from are touched."""
        dtype = DTYPES[stored.dtype]
        begin = stored.begin + row * width * dtype.itemsize
        base = begin // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        if begin % dtype.itemsize:  # the format does not promise alignment
            return self._rows(stored, row, count, width)
        length = begin - base + count * width * dtype.itemsize
        if base + length > os.fstat(self._file(stored.file)).st_size:
            raise self._shrunk(stored)
        mapped = mmap.mmap(
            self._file(stored.file), length, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED, offset=base
        )  # unmapped with the last tensor over it
        mapped.madvise(mmap.MADV_SEQUENTIAL)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the map is read-only and nobody writes to the view
            flat = torch.frombuffer(mapped, dtype=dtype, count=count * width, offset=begin - base)
        return flat.view(count, width)

    def _dequantised(self, source: Tensor, scale: Tensor) -> Tensor:
        """fp8 [n, c] -> fp32. By table: torch converts element by element on a CPU, ten times slower."""
        values = np.take(self._fp8, source.contiguous().view(torch.uint8).numpy())
        return torch.from_numpy(values).mul_(scale.float().view(-1, *[1] * (source.ndim - 1)))

    def _fill(self, stored: Stored, at: int, target: Tensor) -> None:
        view, done = byte_view(target), 0
        while done < len(view):
            count = os.preadv(self._file(stored.file), [view[done:]], at + done)
            if count == 0:
                raise self._shrunk(stored)
            done += count

    def _shrunk(self, stored: Stored) -> CheckpointError:
        return CheckpointError(f"{stored.file}: tensor {shown(stored.name)} is cut: the file shrank while it was read")

    def _file(self, path: Path) -> int:
        number = self._files.get(path)
        if number is None:
            number = self._files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return number


def _copy(target: Tensor, source: Tensor) -> None:
    """Of one type, without torch: several threads do this at once, and each would wake a pool of its own."""
    codes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[target.element_size()]
    into: Any = target.view(codes).numpy()
    np.copyto(into, source.view(codes).numpy().reshape(into.shape))


def byte_view(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous uint8 tensor, writable."""
    array: Any = tensor.numpy()
    return memoryview(array)


def _fp8_table() -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """The value of each of the 256 codes."""
    return torch.arange(256, dtype=torch.uint8).view(FP8).float().numpy()
