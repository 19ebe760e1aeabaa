"""Checksums of everything stored: of each row, in its column `sum`, and of each block of a file, in the table `blocks`.
They are compared whenever a row or block is read; a row or file without them is damaged."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

BLOCK_BYTES = 1 << 18
_SUM_BYTES = 8
_HEX = 2 * _SUM_BYTES
_APART = {"no", "sum"}  # columns that the sum does not cover: the running number is no part of a change

Kind = Literal["row", "result", "file"]


class Damaged(Exception):
    """A stored row, result or file whose bytes changed on the disk; the message names it."""

    def __init__(self, kind: Kind, message: str) -> None:
        super().__init__(message)
        self.kind: Kind = kind
        self.reported = False


def row_sum(row: Mapping[str, Any]) -> str:
    """The checksum (hexadecimal) of a row's values by column. Values of None do not count, so that columns may be
    added."""
    digest = hashlib.blake2b(digest_size=_SUM_BYTES)
    for name in sorted(row.keys() - _APART):
        if (value := row[name]) is not None:
            kind = "int" if isinstance(value, int) else type(value).__name__
            data = value if isinstance(value, bytes) else str(value).encode(errors="surrogatepass")
            digest.update(f"{name} {kind} {len(data)} ".encode())
            digest.update(data)
    return digest.hexdigest()


def is_intact(row: Mapping[str, Any]) -> bool:
    """Whether a complete row has its checksum."""
    return bool(row["sum"] == row_sum(row))


class BlockSums:
    """Sums the blocks of a file while it is written in pieces of any size."""

    def __init__(self) -> None:
        self._sums: list[str] = []
        self._block, self._room = hashlib.blake2b(digest_size=_SUM_BYTES), BLOCK_BYTES

    def update(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            part, left = left[: self._room], left[self._room :]
            self._block.update(part)
            self._room -= len(part)
            if not self._room:
                self._end_block()

    def _end_block(self) -> None:
        self._sums.append(self._block.hexdigest())
        self._block, self._room = hashlib.blake2b(digest_size=_SUM_BYTES), BLOCK_BYTES

    def text(self) -> str:
        """The sums of all blocks, the last one partly filled, as one text. Ends the sum."""
        if self._room < BLOCK_BYTES:
            self._end_block()
        return "".join(self._sums)


class CheckedFile(io.RawIOBase):
    """A file, opened for reading, that returns only bytes whose block has its checksum, else raises Damaged. Raises
    OSError."""

    def __init__(self, path: Path, name: str, size: int, sums: str) -> None:
        self._file = path.open("rb")
        self._name, self.size, self._sums = name, size, sums
        self._at, self._index, self._block = 0, -1, b""
        try:
            actual = self._file.seek(0, io.SEEK_END)
            if actual != size:
                raise Damaged("file", f"{name} has {actual} bytes on the disk, {size} were stored")
            if len(sums) != _HEX * -(-size // BLOCK_BYTES):
                raise Damaged("file", f"the checksums of {name} do not fit its {size} bytes")
        except BaseException:
            self._file.close()
            raise

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        index, begin = divmod(self._at, BLOCK_BYTES)
        block = self._read_block(index) if self._at < self.size else b""
        part = block[begin : begin + len(buffer)]
        buffer[: len(part)] = part
        self._at += len(part)
        return len(part)

    def _read_block(self, index: int) -> bytes:
        if index != self._index:
            self._file.seek(index * BLOCK_BYTES)
            block = self._file.read(BLOCK_BYTES)
            if len(block) < min(BLOCK_BYTES, self.size - index * BLOCK_BYTES):
                raise Damaged("file", f"{self._name} shrank on the disk, {self.size} bytes were stored")
            sum_of_block = hashlib.blake2b(block, digest_size=_SUM_BYTES).hexdigest()
            if sum_of_block != self._sums[index * _HEX : (index + 1) * _HEX]:
                place = f"the block at offset {index * BLOCK_BYTES}"
                raise Damaged("file", f"{self._name} has changed on the disk: {place} does not match its checksum")
            self._index, self._block = index, block
        return self._block

    def check(self, begin: int = 0, end: int | None = None) -> None:
        """Checks the blocks of bytes `begin` to `end`. Raises Damaged."""
        end = self.size if end is None else min(end, self.size)
        for index in range(begin // BLOCK_BYTES, -(-end // BLOCK_BYTES)):
            self._read_block(index)

    def close(self) -> None:
        self._file.close()
        super().close()
