"""The sums in a per-rank file, with which a rank checks it: no other rank has the same bytes to compare. `laddertron
shard` writes a sum of the fixed samples of each tensor and one of each block of the file. No torch.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from .checkpoint import CheckpointError, StoredTensor, shown
from .identity import SALTED, drawn, equal_parts, first_difference, in_order, read_sample, tables_of

SAMPLES, BLOCKS = "samples", "blocks"
"""Keys of the file's metadata. Values: 8 hex digits for each tensor or block."""
BLOCK, LEAST = 1 << 20, 8
"""Bytes of a block, and the least number that a start reads of them."""


class BlockSums:
    """Sums the tensors' bytes while they are written."""

    def __init__(self) -> None:
        self._at = self._sum = 0
        self._sums: list[str] = []

    def add(self, data: memoryview) -> None:
        while len(data):
            count = min(len(data), BLOCK - self._at % BLOCK)
            self._sum, self._at, data = zlib.crc32(data[:count], self._sum), self._at + count, data[count:]
            if self._at % BLOCK == 0:
                self._end()

    def finish(self) -> str:
        if self._at % BLOCK:
            self._end()
        return "".join(self._sums)

    def _end(self) -> None:
        self._sums.append(f"{self._sum:08x}")
        self._sum = 0


def unknown_sums(tensors: int, size: int) -> dict[str, str]:
    """Metadata as long as the sums of so many tensors of `size` bytes will be."""
    return {SAMPLES: "0" * 8 * tensors, BLOCKS: "0" * 8 * -(-size // BLOCK)}


def check_own(
    file: Path, tensors: Sequence[StoredTensor], metadata: Mapping[str, str], salt: bytes, again: str
) -> None:
    """Compares the fixed samples, and blocks drawn by `salt`, with the sums in the metadata. Raises CheckpointError,
    which names the tensor; `again`: how to write the file again."""
    samples, blocks = metadata.get(SAMPLES), metadata.get(BLOCKS)
    if not isinstance(samples, str) or not isinstance(blocks, str):
        raise CheckpointError(f"{file}: has no sums, another version of `laddertron shard` wrote it: {again}")
    tables = tables_of(tensors)
    ordered = list(in_order(tables))
    if (index := first_difference(samples, read_sample(tables).fixed)) is not None:
        where = f"tensor {shown(ordered[index].name)}" if index < len(ordered) else "the header"
        raise CheckpointError(f"{file}: {where} is not what `laddertron shard` wrote: {again}")
    first, last = (ordered[0].begin, ordered[-1].end) if ordered else (0, 0)
    for block in _drawn(file.name, len(blocks) // 8, salt):
        begin = first + block * BLOCK
        end = min(last, begin + BLOCK)
        if _sum(file, begin, end) != blocks[8 * block : 8 * block + 8]:
            within = next(shown(stored.name) for stored in ordered if stored.end > begin)
            raise CheckpointError(
                f"{file}: bytes {begin} to {end} (tensor {within}) are not what `laddertron shard` wrote: {again}"
            )


def _drawn(name: str, blocks: int, salt: bytes) -> list[int]:
    count = min(blocks, max(LEAST, blocks // SALTED)) if salt else 0
    draws = zip(equal_parts(blocks, count), drawn(name, salt, count), strict=True)
    return [low + number % (high - low) for (low, high), number in draws]


def _sum(file: Path, begin: int, end: int) -> str:
    with file.open("rb", buffering=0) as stream:
        return f"{zlib.crc32(os.pread(stream.fileno(), end - begin, begin)):08x}"
