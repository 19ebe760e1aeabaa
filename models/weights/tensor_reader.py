"""Reads slices of stored tensors into parameters: whole rows by large positioned reads, columns from the mapped file,
so that the ranks of a node share the page cache.
"""

from __future__ import annotations

import mmap
import os
import warnings
from functools import cache
from math import prod
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from ..config.quantisation import E2M1, Code
from .checkpoint import ITEMSIZES, CheckpointError, StoredTensor, shown

DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
    "U8": torch.uint8,
}
CHUNK_BYTES = 16 << 20
"""Bytes converted, or gathered from a mapped file, at once."""
LENGTH = 1 << 20
"""Random numbers at which a row of dummy weights may begin; the table has as many again after them."""
STRIDE = 48271
"""Distance in the table between the beginnings of two neighbouring rows."""
PREFETCH_BYTES = 256 << 20
FP8 = torch.float8_e4m3fn


class PinnedBuffers:
    """Two alternating pinned buffers for copies to a GPU: one is filled while the other is copied. For one thread."""

    def __init__(self) -> None:
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * 2
        self._sent: list[Any] = [None, None]
        self._turn = 0

    def take(self, size: int) -> Tensor:
        """Returns a buffer, uint8 [size], after waiting for its last copy."""
        self._turn ^= 1
        if self._sent[self._turn] is not None:
            self._sent[self._turn].synchronize()
        if len(self._buffers[self._turn]) < size:
            self._buffers[self._turn] = self.allocate(max(size, CHUNK_BYTES))
        return self._buffers[self._turn][:size]

    def send(self, source: Tensor, target: Tensor) -> None:
        """Starts the copy of the buffer taken last to a GPU, which converts it."""
        with torch.cuda.device(target.device):  # a new thread's current device is the first one
            target.copy_(source.to(target.device, non_blocking=True) if source.dtype != target.dtype else source, True)
            self._sent[self._turn] = self.mark()

    @staticmethod
    def allocate(size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    @staticmethod
    def mark() -> Any:
        event: Any = torch.cuda.Event
        sent = event()
        sent.record()
        return sent


class Reader:
    """Reads tensors with its own open files and buffers. A context manager, which closes the files."""

    def __init__(self) -> None:
        self.taken = 0
        """Bytes of tensors copied from files."""
        self._files: dict[Path, int] = {}
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._pinned = PinnedBuffers()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        for number in self._files.values():
            os.close(number)
        self._files.clear()

    def prefetch(self, stored: StoredTensor, row: int, count: int) -> None:
        """Asks the kernel to read these rows ahead, without waiting."""
        width = prod(stored.shape[1:]) * ITEMSIZES[stored.dtype]
        length = min(count * width, PREFETCH_BYTES)
        if length:
            os.posix_fadvise(self._file(stored.file), stored.begin + row * width, length, os.POSIX_FADV_WILLNEED)

    def whole(self, stored: StoredTensor) -> Tensor:
        out = torch.empty(stored.shape, dtype=DTYPES[stored.dtype])
        self._fill(stored, stored.begin, out.view(-1).view(torch.uint8) if out.numel() else out)
        return out

    def read(self, stored: StoredTensor, row: int, column: int, target: Tensor, scale: Tensor | None = None) -> None:
        """Reads rows [row, row + n) and columns [column, column + c) into target [n] or [n, c], in its type.

        scale: a factor for rows of a quantised tensor, one number, [n] or [n, c]. Raises CheckpointError if the file
        shrank.
        """
        if target.numel() == 0:
            return
        width = prod(stored.shape[1:])
        columns = target.shape[1] if target.ndim == 2 else 1
        dtype = DTYPES[stored.dtype]
        in_place = not target.is_cuda and target.dtype == dtype and scale is None
        if columns == width and in_place and target.is_contiguous():
            self._fill(stored, stored.begin + row * width * dtype.itemsize, target.view(-1).view(torch.uint8))
            return
        step = target.shape[0] if in_place else max(1, CHUNK_BYTES // (columns * dtype.itemsize))
        for first in range(0, target.shape[0], step):
            part = target[first : first + step]
            at, count = row + first, part.shape[0]
            if scale is None and target.is_cuda:
                self._stage(stored, at, column, columns, part)
                continue
            rows = self._rows(stored, at, count) if columns == width else self._mapped(stored, at, count, columns)
            one = scale if scale is None or scale.numel() == 1 else scale[first : first + step]
            self._put(rows[:, column : column + columns], part, one)

    def _stage(self, stored: StoredTensor, row: int, column: int, columns: int, target: Tensor) -> None:
        """Reads into target [n] or [n, c] on a GPU, by the pinned buffers."""
        dtype, width, count = DTYPES[stored.dtype], prod(stored.shape[1:]), target.shape[0]
        raw = self._pinned.take(count * columns * dtype.itemsize)
        source = raw.view(dtype).view(count, columns)
        if columns == width:
            self._fill(stored, stored.begin + row * width * dtype.itemsize, raw)
        else:
            _copy_bits(source, self._mapped(stored, row, count, columns)[:, column : column + columns])
        self._pinned.send(source.view(target.shape), target)

    def _put(self, source: Tensor, target: Tensor, scale: Tensor | None) -> None:
        """Copies stored values source [n, c] to target [n] or [n, c], in its type; scale as in `read`."""
        if target.device.type == "cpu" and target.dtype == source.dtype and scale is None:
            _copy_bits(target, source)
            return
        source = source.reshape(target.shape)
        target.copy_(source if scale is None else widened(source, scale).view(target.shape))

    def _rows(self, stored: StoredTensor, row: int, count: int) -> Tensor:
        """Reads whole rows [count, width] into the buffer; valid until the next call."""
        dtype, width = DTYPES[stored.dtype], prod(stored.shape[1:])
        size = count * width * dtype.itemsize
        if self._buffer.numel() < size:
            self._buffer = torch.empty(max(size, CHUNK_BYTES), dtype=torch.uint8)
        self._fill(stored, stored.begin + row * width * dtype.itemsize, self._buffer[:size])
        return self._buffer[:size].view(dtype).view(count, width)

    def _mapped(self, stored: StoredTensor, row: int, count: int, columns: int) -> Tensor:
        """Maps whole rows of the file, of which `columns` columns are read; pages of other columns are not loaded."""
        dtype, width = DTYPES[stored.dtype], prod(stored.shape[1:])
        begin = stored.begin + row * width * dtype.itemsize
        base = begin // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        if begin % dtype.itemsize:  # the format does not promise alignment
            return self._rows(stored, row, count)
        length = begin - base + count * width * dtype.itemsize
        if base + length > os.fstat(self._file(stored.file)).st_size:
            raise self._shrunk(stored)
        mapped = mmap.mmap(
            self._file(stored.file), length, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED, offset=base
        )  # unmapped with the last tensor over it
        mapped.madvise(mmap.MADV_SEQUENTIAL)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the map is read-only and the view is never written
            flat = torch.frombuffer(mapped, dtype=dtype, count=count * width, offset=begin - base)
        self.taken += count * columns * dtype.itemsize
        return flat.view(count, width)

    def _fill(self, stored: StoredTensor, at: int, target: Tensor) -> None:
        view, done = byte_view(target), 0
        while done < len(view):
            count = os.preadv(self._file(stored.file), [view[done:]], at + done)
            if count == 0:
                raise self._shrunk(stored)
            done += count
        self.taken += done

    def _shrunk(self, stored: StoredTensor) -> CheckpointError:
        return CheckpointError(f"{stored.file}: tensor {shown(stored.name)} is cut: the file shrank while it was read")

    def _file(self, path: Path) -> int:
        number = self._files.get(path)
        if number is None:
            number = self._files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return number


def _copy_bits(target: Tensor, source: Tensor) -> None:
    """Copies source [n, c] to target [n] or [n, c] of the same type. By numpy: torch would wake its thread pool."""
    codes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[target.element_size()]
    into: Any = target.view(codes).numpy()
    np.copyto(into, source.view(codes).numpy().reshape(into.shape))


def byte_view(tensor: Tensor) -> memoryview:
    """A writable view of the bytes of a contiguous uint8 tensor."""
    array: Any = tensor.numpy()
    return memoryview(array)


def widened(source: Tensor, scale: Tensor, code: Code = "e4m3") -> Tensor:
    """Widens codes [n, bytes] to fp32 [n, c], times scale (one, [n] or [n, c]). By a table, which is ten times faster
    than torch on CPUs."""
    rows = source.contiguous().view(torch.uint8).numpy()
    values = torch.from_numpy(np.take(_values(code), rows, 0).reshape(len(rows), -1))
    return values.mul_(scale if scale.ndim == 2 else scale.view(-1, 1))


@cache
def _values(code: Code) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    """The values in each of the 256 bytes, [256, 1 or 2]."""
    every = torch.arange(256, dtype=torch.uint8)
    if code == "e4m3":
        return every.view(FP8).float().view(256, 1).numpy()
    table = torch.arange(16.0) - 8 if code == "int4" else torch.tensor([*E2M1, *(-value for value in E2M1)])
    return table[torch.stack((every & 15, every >> 4), 1).long()].numpy()


class DummyReader(Reader):
    """Random weights for `model.load_format: dummy`: norms are one, matrices preserve the scale of activations. A
    weight depends only on the seed, its tensor's name and its place in the tensor, so every layout of ranks has the
    same model."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed

    def prefetch(self, stored: StoredTensor, row: int, count: int) -> None:
        """Does nothing: there is no file."""

    def read(self, stored: StoredTensor, row: int, column: int, target: Tensor, scale: Tensor | None = None) -> None:
        self.taken += target.nbytes
        if len(stored.shape) == 1 or "norm" in stored.name:
            target.fill_(0.0 if stored.name.endswith("bias") else 1.0)
            return
        table = _normal(self._seed, target.device, target.dtype)
        places = torch.arange(row, row + len(target), device=target.device) * STRIDE + crc32(stored.name.encode())
        windows = table.as_strided((LENGTH, target.shape[1]), (1, 1), column)
        torch.index_select(windows, 0, places % LENGTH, out=target).mul_(stored.shape[1] ** -0.5)


@cache
def _normal(seed: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """A table of standard normal numbers, the same on every device."""
    return torch.randn(2 * LENGTH, generator=torch.Generator().manual_seed(seed)).to(device, dtype)
