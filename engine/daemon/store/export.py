"""The store's second copy on a shared disk: segments of checksummed frames, fsynced before a commit counts.

A generation begins with a snapshot of the whole store and goes on with one frame a commit; a later generation fences
the earlier one off. Knows changes of rows as JSON values (store_schema.Rows), nothing of what they mean.
"""

from __future__ import annotations

import json
import os
import re
import struct
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from .disk import Files, NewFile, sync_folder

_HEAD = struct.Struct("<4sIII")  # magic, bytes of the payload, its CRC-32, number of the group
_MAGIC = b"LTX1"
_SEGMENT = re.compile(r"seg-(\d{6})-(\d{6})\.ltx")
_SEGMENT_BYTES = 64 << 20
_MAX_FRAME = 1 << 30
_SNAPSHOT_ROWS = 512

Change = list[Any]


class ExportError(RuntimeError):
    """The export cannot be read or written; the message names the file and the fix."""


class Fenced(ExportError):
    """Another daemon has taken the export over: this one must not go on."""


def _frame(group: int, changes: list[Change], undone: int | None = None) -> bytes:
    value = {"changes": changes} if undone is None else {"changes": changes, "undone": undone}
    payload = json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()
    return _HEAD.pack(_MAGIC, len(payload), zlib.crc32(payload), group) + payload


def _frames(file: BinaryIO) -> Iterator[tuple[int, dict[str, Any]]]:
    """(group, value) of each whole frame; ends at the first that is not."""
    while len(head := file.read(_HEAD.size)) == _HEAD.size:
        magic, length, checksum, group = _HEAD.unpack(head)
        if magic != _MAGIC or length > _MAX_FRAME:
            return
        payload = file.read(length)
        if len(payload) < length or zlib.crc32(payload) != checksum:
            return
        yield group, json.loads(payload)


def generations(folder: Path) -> dict[int, list[Path]]:
    """Segments of each generation, in order; those still being written under another name do not count."""
    found: dict[int, list[Path]] = {}
    for path in sorted(folder.glob("seg-*.ltx")):
        if match := _SEGMENT.fullmatch(path.name):
            found.setdefault(int(match[1]), []).append(path)
    return found


def read_changes(folder: Path) -> Iterator[Change]:
    """Every change of the latest generation, in order, undone groups left out. A frame that is torn ends the export
    if nothing follows it; one with more behind it is an ExportError (the file was damaged)."""
    all_generations = generations(folder)
    if not all_generations:
        return
    held: tuple[int, list[Change]] | None = None
    last = -1
    for path in all_generations[max(all_generations)]:
        with path.open("rb") as file:
            for group, value in _frames(file):
                undone = value.get("undone")
                # a group of the same number was written again: the first writing was never acknowledged
                if held is not None and held[0] not in (undone, group):
                    yield from held[1]
                if group > last + 1:
                    raise ExportError(f"{path}: group {group} follows {last}: frames between are damaged or missing")
                last, held = group, (group, value["changes"])
    if held is not None:
        yield from held[1]


class Export:
    """Written by the store's thread alone. `files` fails in tests."""

    def __init__(self, folder: Path, files: Files) -> None:
        self.folder, self._files = folder, files
        self._descriptor: int | None = None
        self._index = self._size = self._group = 0
        self._undone: int | None = None
        self.generation = 0

    @property
    def files_folder(self) -> Path:
        """Copies of what was uploaded."""
        return self.folder / "files"

    def begin(self, rows: Iterable[Change]) -> None:
        """Claims the next generation and writes the snapshot; the earlier ones go. Raises OSError."""
        self.files_folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        before = generations(self.folder)
        claims = [int(path.name[6:]) for path in self.folder.glob("claim-*")]
        self.generation = max([0, *before, *claims]) + 1
        while True:
            try:
                os.close(os.open(self._claim(self.generation), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
                break
            except FileExistsError:
                self.generation += 1
        with NewFile(self._path(0), self._files) as snapshot:
            part: list[Change] = []
            for row in rows:
                part.append(row)
                if len(part) == _SNAPSHOT_ROWS:
                    snapshot.write(_frame(self._group, part))
                    self._group, part = self._group + 1, []
            snapshot.write(_frame(self._group, part))
            self._group += 1
            snapshot.commit()
        for generation, paths in before.items():
            for path in paths:
                path.unlink(missing_ok=True)
            self._claim(generation).unlink(missing_ok=True)
        self._index = 0

    def append(self, changes: list[Change]) -> None:
        """One group, on the disk when this returns. Raises OSError (nothing of it counts) or Fenced."""
        if self._claim(self.generation + 1).exists():
            raise Fenced(f"{self.folder} was taken over by another daemon: this one must stop")
        frame = _frame(self._group, changes, self._undone)
        try:
            if self._descriptor is None or self._size > _SEGMENT_BYTES:
                self._next_segment()
            assert self._descriptor is not None
            left = memoryview(frame)
            while left:
                left = left[self._files.write(self._descriptor, left) :]
            self._files.fsync(self._descriptor)
        except OSError:
            self.close()  # whatever is torn there, the next group begins a segment of its own
            raise
        self._size += len(frame)
        self._group, self._undone = self._group + 1, None

    def undo(self) -> None:
        """The last group was not committed after all: the next frame says so."""
        self._undone = self._group - 1

    def keep(self, source: Path, name: str) -> None:
        """A copy of an uploaded file. Raises OSError."""
        with source.open("rb") as file, NewFile(self.files_folder / name, self._files) as copy:
            while chunk := file.read(1 << 20):
                copy.write(chunk)
            copy.commit()

    def forget(self, name: str) -> None:
        (self.files_folder / name).unlink(missing_ok=True)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _next_segment(self) -> None:
        self.close()
        self._index += 1
        self._descriptor = os.open(self._path(self._index), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._size = 0
        sync_folder(self.folder, self._files)

    def _path(self, index: int) -> Path:
        return self.folder / f"seg-{self.generation:06}-{index:06}.ltx"

    def _claim(self, generation: int) -> Path:
        return self.folder / f"claim-{generation:06}"
