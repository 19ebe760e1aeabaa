"""Checksums of a model folder: a CRC-32 for every 8 MiB of every file, which detects damage, not forgery. Each rank of
a node verifies an equal share of all bytes while it loads.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import threading
import zlib
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...topology.json_codec import write_file
from ...topology.transport import native
from .checkpoint import CheckpointError, StoredTensor, inside, read_folder, read_header, shown

NAME = "laddertron.manifest.json"
BLOCK = 8 << 20
PART = 1 << 20
"""Bytes read and summed at once; small enough for the processor's cache."""
MAX_BYTES = 64 << 20
BESIDE = (
    "config.json",
    "generation_config.json",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tiktoken.model",
    "tokenizer_config.json",
    "chat_template.jinja",
)
"""Files that are read in addition to the weights."""


@dataclass(frozen=True, slots=True)
class FileSums:
    """The size of a file and the CRC-32 of each of its blocks."""

    size: int
    sums: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """Checksums of files by name."""

    block: int
    files: Mapping[str, FileSums]

    @property
    def total_bytes(self) -> int:
        return sum(file.size for file in self.files.values())

    def to_json(self) -> dict[str, Any]:
        files = {name: {"size": f.size, "crc32": "".join(f"{s:08x}" for s in f.sums)} for name, f in self.files.items()}
        return {"version": 1, "block": self.block, "files": files}


def stored_in(folder: Path) -> list[StoredTensor]:
    """Reads every tensor of a checkpoint, or of a folder of per-rank files. Raises CheckpointError."""
    own = sorted(folder.glob("rank-*.safetensors"))
    return [t for file in own for t in read_header(file)] if own else list(read_folder(folder).values())


def make_manifest(folder: Path, progress: Callable[[int, int], None] | None = None, block: int = BLOCK) -> Manifest:
    """Makes a manifest by reading every byte of the weights and of the files in BESIDE. Raises CheckpointError."""
    names = sorted({stored.file.name for stored in stored_in(folder)})
    names += [name for name in BESIDE if (folder / name).is_file()]
    total, done = sum((folder / name).stat().st_size for name in names), 0
    files = {}
    for name in names:
        sums, size, buffer = [], 0, bytearray(min(block, PART))
        with inside(folder, name).open("rb", buffering=0) as stream:
            while (block_sum := _block(stream.fileno(), buffer, size, block))[0]:
                sums.append(block_sum[1])
                size, done = size + block_sum[0], done + block_sum[0]
                if progress is not None:
                    progress(done, total)
        files[name] = FileSums(size, tuple(sums))
    return Manifest(block, files)


def write_manifest(folder: Path, manifest: Manifest) -> Path:
    """Writes the manifest next to the weights, atomically."""
    path = folder / NAME
    write_file(path, json.dumps(manifest.to_json(), indent=1))
    return path


def read_manifest(folder: Path) -> Manifest | None:
    """Reads a folder's manifest; None if there is none. Raises CheckpointError."""
    path = folder / NAME
    if not path.exists():
        return None
    if path.stat().st_size > MAX_BYTES:
        raise CheckpointError(f"{path}: more than the {MAX_BYTES} bytes that a manifest may have")
    try:
        data = json.loads(path.read_bytes())
        if data["version"] != 1:
            raise ValueError(f"version {data['version']!r} is not known; 1 is")
        block = _natural(data["block"], 4096)
        files = {name: _file_sums(entry, block) for name, entry in data["files"].items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as fault:
        raise CheckpointError(f"{path}: bad manifest: {fault}: make it again with `laddertron manifest`") from fault
    return Manifest(block, files)


def _natural(value: object, least: int = 0) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{value!r} must be an integer from {least}")
    return value


def _file_sums(entry: Mapping[str, Any], block: int) -> FileSums:
    size, digits = _natural(entry["size"]), str(entry["crc32"])
    if len(digits) != 8 * -(-size // block):
        raise ValueError(f"{size} bytes take {-(-size // block)} checksums, {len(digits) / 8:g} are there")
    return FileSums(size, tuple(int(digits[i : i + 8], 16) for i in range(0, len(digits), 8)))


def _block(file: int, buffer: bytearray, at: int, size: int) -> tuple[int, int]:
    """Reads up to `size` bytes from `at`; returns their number (less only at the end of the file) and CRC-32."""
    view, done, total = memoryview(buffer), 0, 0
    sums = crc32()
    while done < size:
        count = os.preadv(file, [view[: size - done]], at + done)
        if count == 0:
            break
        total, done = sums(buffer, count, total), done + count
    return done, total


class Verifier:
    """Verifies one share of a folder's blocks against its manifest, on a thread. A context manager."""

    def __init__(self, folder: Path, tensors: Collection[StoredTensor], share: tuple[int, int]) -> None:
        """share (part, parts): verifies block i of the tensors' files and of the files in BESIDE if i % parts == part.
        Raises CheckpointError at once if a file is not listed or has another size."""
        self._folder = next(iter(tensors)).file.parent if tensors else folder
        self._tensors, self._stop, self._pool = tensors, threading.Event(), ThreadPoolExecutor(1, "verify")
        self._verified: Future[None] | None = None
        if (manifest := read_manifest(self._folder)) is not None:
            names = sorted({stored.file.name for stored in tensors})
            names += [name for name in BESIDE if name in manifest.files]
            self._check_sizes(manifest, names)
            self._verified = self._pool.submit(self._verify, manifest, names, *share)

    def __enter__(self) -> Verifier:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._pool.shutdown()

    def look(self) -> None:
        if self._verified is not None and self._verified.done():
            self._verified.result()

    def finish(self) -> None:
        """Waits for the rest of the share. Raises CheckpointError, which names file and tensor."""
        if self._verified is not None:
            self._verified.result()

    def _check_sizes(self, manifest: Manifest, names: list[str]) -> None:
        for name in names:
            sums = manifest.files.get(name)
            size = inside(self._folder, name).stat().st_size
            if sums is None or sums.size != size:
                stated = "does not list it" if sums is None else f"says {sums.size}"
                raise CheckpointError(
                    f"{self._folder / name}: {size} bytes, {NAME} {stated}: fetch the file again, or run "
                    f"`laddertron manifest {self._folder}` if the change was meant"
                )

    def _verify(self, manifest: Manifest, names: list[str], part: int, parts: int) -> None:
        block, buffer = manifest.block, bytearray(min(manifest.block, PART))
        for name in names:
            sums = manifest.files[name].sums
            with inside(self._folder, name).open("rb", buffering=0) as stream:
                for i in range(part, len(sums), parts):
                    if self._stop.is_set():
                        return
                    count, checksum = _block(stream.fileno(), buffer, i * block, block)
                    if checksum != sums[i]:
                        raise CheckpointError(self._damage(name, i * block, i * block + count))

    def _damage(self, name: str, begin: int, end: int) -> str:
        within = [t for t in self._tensors if t.file.name == name and t.begin < end and t.end > begin]
        where = ", ".join(shown(t.name) for t in sorted(within, key=lambda t: t.begin)[:3]) or "the header"
        more = f" and {len(within) - 3} more" if len(within) > 3 else ""
        return (
            f"{self._folder / name}: bytes {begin} to {end} are not those of {NAME} (tensor {where}{more}): damaged; "
            f"fetch the file again, or run `laddertron manifest {self._folder}` if the change was meant"
        )


Crc32 = Callable[[bytearray, int, int], int]
"""(buffer, number of its bytes, CRC-32 of the preceding bytes) -> CRC-32."""


@functools.cache
def crc32() -> Crc32:
    library = native.load("laddertron.models.cpu._kernels")
    if library is None or not library.kernels_has_crc32():
        return _plain
    call = native.bind(library.kernels_crc32, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_int64)

    def folded(buffer: bytearray, count: int, before: int) -> int:
        array = (ctypes.c_char * len(buffer)).from_buffer(buffer)
        result: int = call(before, ctypes.addressof(array), count)
        return result

    return folded


def _plain(buffer: bytearray, count: int, before: int) -> int:
    return zlib.crc32(memoryview(buffer)[:count], before)
