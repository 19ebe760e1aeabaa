"""Identifies the weights of a folder without reading all of them. Fixed samples of every tensor, at places that depend
on its name, make a digest that can be stored. Salted samples, at places that differ in each launch, are only compared
between ranks, so that no place is never read. No torch.
"""

from __future__ import annotations

import hashlib
import os
import struct
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, groupby
from pathlib import Path
from typing import Annotated, NamedTuple

from annotated_types import Ge, MaxLen

from .checkpoint import CheckpointError, StoredTensor, read_header, shown, weight_files

PAGE, PLACES = 4096, 3
"""Bytes of a fixed sample, and the number of them in a tensor; a tensor of at most so many pages is read whole."""
BLOCK, SALTED = 1 << 16, 512
"""The most bytes of a salted sample, and the number of blocks of a tensor of which one is read; at least one in a
tensor, whose blocks are the smallest, of a page or more, of which it has at most so many. A tensor of at most twice so
many bytes is read whole."""
THREADS = 16
"""Concurrent reads of a rank: a file server answers each after a network round trip."""
_PIECE = 64
_DRAWS = struct.Struct("<8Q")
_DIGITS = 8

Place = tuple[int, int]
"""Bytes [begin, end) of a file."""
_Hex = Annotated[str, MaxLen(1 << 24)]
_Name = Annotated[str, MaxLen(256)]


@dataclass(frozen=True, slots=True)
class Sample:
    """What a rank read of a folder of weights, for comparison. `files`: by name, a digest of size and header. `fixed`,
    `salted`: a CRC-32 (8 hex digits) for each tensor i, in the order of files and offsets, with i % parts == part;
    parts=0: no samples yet. `salt`: which the salted places depend on. `origin`: for a per-rank file, the digest of the
    weights that `shard` read; the rank has checked samples of the file against the sums in it."""

    files: Annotated[dict[_Name, _Name], MaxLen(1 << 14)] = field(default_factory=dict)
    fixed: _Hex = ""
    salted: _Hex = ""
    part: Annotated[int, Ge(0)] = 0
    parts: Annotated[int, Ge(0)] = 0
    salt: _Name = ""
    origin: _Name = ""


class FileTable(NamedTuple):
    """A file of weights: `header` is a digest of its size and header; tensors in the order of their offsets."""

    name: str
    header: str
    tensors: tuple[StoredTensor, ...]


@dataclass(frozen=True)
class Weights:
    """The weights of a folder. Without `tables` only `origins` are known: of per-rank files, Sample.origin."""

    tables: tuple[FileTable, ...] = ()
    fixed: str = ""
    origins: tuple[str, ...] = ()

    @cached_property
    def files(self) -> dict[str, str]:
        return {table.name: table.header for table in self.tables}

    @cached_property
    def digest(self) -> str:
        return folder_digest(self.files, self.fixed) if self.tables else " ".join(self.origins)

    def tensor(self, index: int) -> str:
        stored = next((stored for i, stored in enumerate(in_order(self.tables)) if i == index), None)
        return f"tensor number {index}" if stored is None else f"{stored.file.name}: tensor {shown(stored.name)}"

    def difference(self, sample: Sample) -> str:
        """The first file or tensor in which a rank's sample differs from these weights; "" if none does."""
        if sample.origin:
            own = (self.digest,) if self.tables else self.origins
            return "" if sample.origin in own or not own else "the origin of its per-rank file"
        if not self.tables or not sample.files:
            return "" if not self.tables or not sample.parts else self.tables[0].name
        for name in sorted({*self.files, *sample.files}):
            if sample.files.get(name) != self.files.get(name):
                return f"{name}: its size or header" if name in sample.files else f"{name}: its presence"
        if not sample.parts:
            return ""
        index = first_difference(every(self.fixed, sample.part, sample.parts), sample.fixed)
        return "" if index is None else self.tensor(index * sample.parts + sample.part)


def folder_digest(files: Mapping[str, str], fixed: str) -> str:
    text = "".join(f"{name}\0{files[name]}\0" for name in sorted(files))
    return hashlib.blake2b(f"{text}{fixed}".encode(), digest_size=16).hexdigest()


def in_order(tables: Iterable[FileTable]) -> Iterable[StoredTensor]:
    return chain.from_iterable(table.tensors for table in tables)


def every(sums: str, part: int, parts: int) -> str:
    """The sums of tensors i with i % parts == part."""
    step = _DIGITS * parts
    return sums if parts == 1 else "".join(sums[i : i + _DIGITS] for i in range(_DIGITS * part, len(sums), step))


def first_difference(one: str, other: str) -> int | None:
    """The number of the first sum that differs, or None."""
    if one == other:
        return None
    places = range(0, max(len(one), len(other)), _DIGITS)
    return next(i // _DIGITS for i in places if one[i : i + _DIGITS] != other[i : i + _DIGITS])


class Odd(NamedTuple):
    """`rank` read other bytes than `usual` in tensor number `tensor`."""

    rank: int
    usual: int
    tensor: int


def odd_one(samples: Mapping[int, Sample]) -> Odd | None:
    """The first rank whose sums differ from those of most ranks that read the same places (in a tie: from the lowest
    rank's), or None."""
    groups: defaultdict[_Places, dict[int, str]] = defaultdict(dict)
    for rank, sample in sorted(samples.items()):
        if not sample.origin:
            groups["", sample.part, sample.parts][rank] = sample.fixed
            groups[sample.salt, sample.part, sample.parts][rank] = sample.salted
    for (_, part, parts), sums in groups.items():
        usual = Counter(sums.values()).most_common(1)[0][0]
        for rank, own in sums.items():
            if (index := first_difference(usual, own)) is not None:
                return Odd(rank, next(r for r, other in sums.items() if other == usual), index * parts + part)
    return _odd_share(groups)


_Places = tuple[str, int, int]
"""The salt, part and parts of a sample."""


def _odd_share(groups: Mapping[_Places, Mapping[int, str]]) -> Odd | None:
    """Compares nodes with different numbers of ranks, tensor by tensor."""
    if len({parts for _, _, parts in groups}) < 2:
        return None
    seen: dict[tuple[str, int], tuple[int, str]] = {}
    for (salt, part, parts), sums in sorted(groups.items(), key=lambda group: min(group[1])):
        rank, own = min(sums.items())
        for i in range(0, len(own), _DIGITS):
            index, value = i // _DIGITS * parts + part, own[i : i + _DIGITS]
            before = seen.setdefault((salt, index), (rank, value))
            if before[1] != value:
                return Odd(rank, before[0], index)
    return None


# places


def fixed_places(stored: StoredTensor) -> list[Place]:
    """Places that depend on the tensor's name, one in each third of it."""
    return _places(stored, PAGE, PLACES, b"")


def salted_places(stored: StoredTensor, salt: bytes) -> list[Place]:
    """Places that depend on the salt and the name. None for a tensor that fixed_places read whole."""
    if _pages(stored, PAGE) <= PLACES:
        return []
    if stored.end - stored.begin <= 2 * BLOCK:
        return [(stored.begin, stored.end)]
    size = PAGE
    while size < BLOCK and _pages(stored, size) > SALTED:
        size *= 2
    return _places(stored, size, max(1, _pages(stored, size) // SALTED), salt)


def _pages(stored: StoredTensor, size: int) -> int:
    return 0 if stored.end == stored.begin else (stored.end - 1) // size - stored.begin // size + 1


def _places(stored: StoredTensor, size: int, count: int, salt: bytes) -> list[Place]:
    """`count` aligned blocks, each drawn from an equal part of the tensor."""
    first, blocks = stored.begin // size, _pages(stored, size)
    if blocks <= count:
        return [(stored.begin, stored.end)] if blocks else []
    draws = zip(equal_parts(blocks, count), drawn(stored.name, salt, count), strict=True)
    begins = ((first + low + number % (high - low)) * size for (low, high), number in draws)
    return [(max(stored.begin, begin), min(stored.end, begin + size)) for begin in begins]


def equal_parts(count: int, parts: int) -> list[tuple[int, int]]:
    return [(count * i // parts, count * (i + 1) // parts) for i in range(parts)]


def drawn(name: str, salt: bytes, count: int) -> list[int]:
    """`count` numbers of 64 bits that depend on name and salt."""
    text, numbers = name.encode("utf-8", "surrogatepass"), list[int]()
    while len(numbers) < count:
        digest = hashlib.blake2b(text + b"\0%d" % len(numbers), key=salt[:64]).digest()
        numbers += _DRAWS.unpack(digest)
    return numbers[:count]


# reading


def tables_of(tensors: Iterable[StoredTensor]) -> tuple[FileTable, ...]:
    """Groups all tensors of a folder by file, and reads the headers' bytes. Raises OSError."""
    ordered = sorted(tensors, key=lambda t: (t.file.name, t.begin, t.end, t.name))
    files = ((file, tuple(group)) for file, group in groupby(ordered, key=lambda t: t.file))
    return tuple(FileTable(file.name, _header(file), group) for file, group in files)


def headers_in(folder: Path) -> dict[str, str]:
    """A digest of size and header of each file of a folder's weights, also of a damaged one. Raises OSError."""
    return {name: _header(folder / name) for name in _names(folder) if (folder / name).is_file()}


def _names(folder: Path) -> list[str]:
    try:
        return weight_files(folder)
    except CheckpointError:  # a bad index
        return sorted(file.name for file in folder.glob("*.safetensors"))


def _header(file: Path) -> str:
    with file.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        start = stream.read(8)
        text = stream.read(min(int.from_bytes(start, "little"), 16 << 20))
    return hashlib.blake2b(b"%d " % size + start + text, digest_size=8).hexdigest()


def tables_in(folder: Path) -> tuple[FileTable, ...]:
    """The files of a folder's weights. One with an unreadable header, which no rank will load, is one tensor. Raises
    OSError."""
    tensors = list[StoredTensor]()
    for file in (folder / name for name in _names(folder) if (folder / name).is_file()):
        try:
            tensors += read_header(file)
        except CheckpointError:
            tensors.append(StoredTensor(file.name, file, "I8", (file.stat().st_size,), 0, file.stat().st_size))
    return tables_of(tensors)


def read_weights(folder: Path) -> Weights:
    """Reads the identity of a folder's weights. Raises OSError, or CheckpointError if a file shrank."""
    tables = tables_in(folder)
    return Weights(tables, read_sample(tables).fixed)


def read_sample(
    tables: Sequence[FileTable], salt: bytes = b"", part: int = 0, parts: int = 1, threads: int = THREADS
) -> Sample:
    """Reads fixed samples, and salted ones if there is a salt, of tensors i with i % parts == part. Raises OSError, or
    CheckpointError if a file shrank."""
    own = list(in_order(tables))[part::parts]
    pieces = [own[i : i + _PIECE] for i in range(0, len(own), _PIECE)]
    with ExitStack() as stack, ThreadPoolExecutor(max(1, min(threads, len(pieces))), "samples") as pool:
        numbers = {path: stack.enter_context(path.open("rb", buffering=0)).fileno() for path in {t.file for t in own}}
        for number in numbers.values():
            os.posix_fadvise(number, 0, 0, os.POSIX_FADV_RANDOM)
        sums = [pair for piece in pool.map(lambda piece: _sums(numbers, piece, salt), pieces) for pair in piece]
    headers = {table.name: table.header for table in tables}
    fixed, salted = ("".join(column) for column in (zip(*sums, strict=True) if sums else ("", "")))
    return Sample(headers, fixed, salted if salt else "", part, parts, salt.hex())


def _sums(files: Mapping[Path, int], tensors: Sequence[StoredTensor], salt: bytes) -> list[tuple[str, str]]:
    sums = []
    for stored in tensors:
        file, seed = (
            files[stored.file],
            zlib.crc32(f"{stored.name} {stored.dtype} {stored.shape}".encode("utf-8", "surrogatepass")),
        )
        fixed = _sum(file, stored, fixed_places(stored), seed)
        sums.append((fixed, _sum(file, stored, salted_places(stored, salt), seed) if salt else ""))
    return sums


def _sum(file: int, stored: StoredTensor, places: Sequence[Place], total: int) -> str:
    for begin, end in places:
        while begin < end:
            if not (data := os.pread(file, end - begin, begin)):
                raise CheckpointError(
                    f"{stored.file}: tensor {shown(stored.name)} is cut: the file shrank while it was read"
                )
            total, begin = zlib.crc32(data, total), begin + len(data)
    return f"{total:08x}"


# changes while a rank loads

Stamps = dict[Path, tuple[int, int, int]]


def stamps_of(files: Iterable[Path]) -> Stamps:
    """Inode, size and modification time of each file. Raises OSError."""
    return {file: ((s := file.stat()).st_ino, s.st_size, s.st_mtime_ns) for file in sorted({*files})}


def check_unchanged(stamps: Stamps) -> None:
    """Raises CheckpointError if a file changed since `stamps_of`."""
    for file, stamp in stamps.items():
        if not file.is_file() or stamps_of([file])[file] != stamp:
            raise CheckpointError(f"{file}: changed while it was loaded: start again once its copy is complete")
