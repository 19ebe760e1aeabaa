"""CPU memory for data that every step reads: weights and KV."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor


class HugePages:
    """Allocates in pages of 2 MiB, if the kernel has them: with pages of 4 KiB, each of which misses the TLB, a core
    reads weights at half the speed and a long context a tenth slower. Memory lives as long as its tensor."""

    CHUNK = 64 << 20
    filled = False
    """Whether allocated memory already has its contents."""
    complete = True
    """Set to False if a weight is stored elsewhere."""
    order: Sequence[int] = ()
    """The layers, in the order in which the filled pages were allocated."""

    def __init__(self) -> None:
        self._room = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> Tensor:
        """uint8 [size], zeros, aligned to a cache line."""
        room = -(-size // 64) * 64
        if room > len(self._room):
            pages = self._map(max(room, self.CHUNK))
            with suppress(OSError):  # a kernel built without them
                pages.madvise(mmap.MADV_HUGEPAGE)
            self._room = torch.frombuffer(pages, dtype=torch.uint8)
        taken, self._room = self._room[:size], self._room[room:]
        return taken

    def _map(self, length: int) -> mmap.mmap:
        return mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


class HeldPages(HugePages):
    """HugePages in a memfd, which outlives this process while another process has it open, without using more memory.
    It begins with the header of `seal`. Allocations in the same order get the same places."""

    CHUNK = 1 << 30
    """Reserved address space; memory is used only once it is written."""
    _HEAD = 2 << 20

    def __init__(self, file: int | None = None) -> None:
        """file: descriptor of a sealed file, whose contents are used unchanged; closed with this object. Raises
        OSError, ValueError."""
        super().__init__()
        self.filled, self.label = file is not None, ""  # label: what the contents are
        file = os.memfd_create("laddertron-weights") if file is None else file
        head = os.pread(file, self._HEAD, 0).rstrip(b"\0")
        self.file = file  # owned from here on: a number that is not open may become another file's
        if head:
            self.label, *self.order = json.loads(head)
        self._end = self._HEAD
        self._chunks: list[tuple[int, int]] = []

    def _map(self, length: int) -> mmap.mmap:
        at, length = self._end, -(-length // self._HEAD) * self._HEAD
        self._end += length
        if self.filled:  # private: writes are not shared
            return mmap.mmap(self.file, length, flags=mmap.MAP_PRIVATE, offset=at)
        os.ftruncate(self.file, self._end)
        pages = mmap.mmap(self.file, length, offset=at)
        self._chunks.append((ctypes.addressof(ctypes.c_char.from_buffer(pages)), length))
        return pages

    def seal(self, order: Sequence[int]) -> None:
        """Marks the contents as complete and read-only: a stray write then ends this process instead of corrupting the
        weights of the next one."""
        os.pwrite(self.file, json.dumps([self.label, *order]).encode(), 0)
        for address, length in self._chunks:
            ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), ctypes.c_size_t(length), mmap.PROT_READ)

    @property
    def nbytes(self) -> int:
        return os.fstat(self.file).st_blocks * 512

    def __del__(self) -> None:
        with suppress(OSError, AttributeError):
            os.close(self.file)
