"""Segments of an export: checksummed frames, groups of changes. A frame cut by the end of its file, with none behind
it, is an unacknowledged write; every other unreadable frame is reported.
"""

from __future__ import annotations

import errno
import json
import re
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

_HEAD = struct.Struct("<4sIII")  # magic, bytes of the payload, its CRC-32, number of the group
_MAGIC = b"LTX1"
_SEGMENT = re.compile(r"seg-(\d{6,})-(\d{6,})\.ltx")
_FRAME_BYTES = 8 << 20
_MAX_FRAME = 1 << 30
_SCAN_BYTES = 1 << 20

Change = list[Any]


class ExportError(RuntimeError):
    """The export cannot be read or is not this store's; the message names the file and the fix."""


@dataclass(frozen=True, slots=True)
class Damage:
    """An unreadable frame, or missing groups before it."""

    path: Path
    offset: int
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: offset {self.offset}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Group:
    """Changes that were committed together; `number`: of the last frame."""

    number: int
    changes: list[Change]


@dataclass(frozen=True, slots=True)
class _Frame:
    offset: int
    group: int
    value: dict[str, Any] | None  # None where it was skipped


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def _frame(group: int, parts: Sequence[bytes], extra: Mapping[str, Any]) -> bytes:
    payload = b'{"changes":[%s],%s' % (b",".join(parts), _json({"group": group, **extra})[1:])
    if len(payload) > _MAX_FRAME:
        raise OSError(
            errno.EFBIG, f"one change of {len(payload)} bytes exceeds the export's {_MAX_FRAME} bytes a frame"
        )
    return _HEAD.pack(_MAGIC, len(payload), zlib.crc32(payload), group) + payload


def frames(first: int, changes: Iterable[Change], extra: Mapping[str, Any], joined: bool) -> Iterator[bytes]:
    """Yields frames from number `first` on; the first has `extra`. `joined`: they are one atomic group. Raises OSError
    if one change exceeds a frame."""
    parts: list[bytes] = []
    size = 0
    for change in changes:
        part = _json(change)
        if parts and size + len(part) > _FRAME_BYTES:
            yield _frame(first, parts, {**extra, "more": True} if joined else extra)
            first, extra, parts, size = first + 1, {}, [], 0
        parts.append(part)
        size += len(part) + 1
    yield _frame(first, parts, extra)


def generations(folder: Path) -> dict[int, list[Path]]:
    """Finds the segments of each generation, in order, without unfinished ones."""
    numbered: dict[int, list[tuple[int, Path]]] = {}
    for path in folder.glob("seg-*.ltx"):
        if match := _SEGMENT.fullmatch(path.name):
            numbered.setdefault(int(match[1]), []).append((int(match[2]), path))
    return {generation: [path for _, path in sorted(numbered[generation])] for generation in sorted(numbered)}


def first_value(path: Path) -> dict[str, Any]:
    """Reads the first frame of a segment. Raises ExportError or OSError."""
    for frame in _scan(path, -1):
        if isinstance(frame, _Frame) and frame.value is not None:
            return frame.value
        raise ExportError(str(frame))
    raise ExportError(f"{path}: offset 0: no frame")


def read_groups(
    segments: Sequence[Path], after: int = -1, damaged: Callable[[Damage], None] | None = None
) -> Iterator[Group]:
    """Yields groups numbered above `after`, in order, without those that were revoked or written again. `damaged` is
    called for damage, and reading continues after it; without `damaged`, damage raises ExportError."""
    group: Group | None = None
    first = last = -1
    pending = False
    for path in segments:
        for frame in _scan(path, after):
            if isinstance(frame, _Frame) and frame.group > last + 1:
                _report(Damage(path, frame.offset, f"group {frame.group} follows {last}: frames are missing"), damaged)
            if isinstance(frame, Damage):
                _report(frame, damaged)
                continue
            value, last = frame.value, frame.group
            if group is not None and frame.group <= first:
                group = None  # written again: the first writing was never acknowledged
            if value is None:
                continue
            if group is not None and pending:
                group = Group(last, group.changes + value["changes"])
            else:
                if group is not None and value.get("undone") != first:
                    yield group
                group, first = Group(last, value["changes"]), last
            pending = bool(value.get("more"))
    if group is not None and not pending:
        yield group


def _report(damage: Damage, damaged: Callable[[Damage], None] | None) -> None:
    if damaged is None:
        raise ExportError(f"{damage} (the export is damaged)")
    damaged(damage)


def _scan(path: Path, after: int) -> Iterator[_Frame | Damage]:
    """Yields the complete frames of a segment and the damage between them; skips payloads of groups up to `after`."""
    size = path.stat().st_size
    offset = 0
    with path.open("rb") as file:
        while offset < size:
            frame_or_reason = _read_frame(file, offset, size, after)
            if isinstance(frame_or_reason, tuple):
                frame, offset = frame_or_reason
                yield frame
                continue
            behind = _next_frame(file, offset + 1, size)
            if behind is None and frame_or_reason == _CUT:
                return
            skipped = (size if behind is None else behind) - offset
            yield Damage(path, offset, f"{frame_or_reason}; {skipped} bytes omitted")
            offset = offset + skipped


_CUT = "the file ends within a frame"


def _read_frame(file: BinaryIO, offset: int, size: int, after: int) -> tuple[_Frame, int] | str:
    """Reads the frame at `offset`; returns it and its end, or the reason why it is unreadable."""
    file.seek(offset)
    head = file.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return _CUT
    magic, length, checksum, group = _HEAD.unpack(head)
    if magic != _MAGIC:
        return "no frame begins here"
    end = offset + _HEAD.size + length
    if end > size:
        intact = zlib.crc32(file.read(size - offset - _HEAD.size)) == checksum
        return f"group {group} does not have the {length} bytes of its header" if intact else _CUT
    if group <= after:
        return _Frame(offset, group, None), end
    payload = file.read(length)  # bounded by the size of the file
    if len(payload) < length or zlib.crc32(payload) != checksum:
        return f"the checksum of group {group} does not match"
    value = json.loads(payload)
    if value.get("group", group) != group:
        return f"group {value['group']} is labelled {group}"
    return _Frame(offset, group, value), end


def _next_frame(file: BinaryIO, start: int, size: int) -> int | None:
    while start < size:
        file.seek(start)
        block = file.read(_SCAN_BYTES)
        at = block.find(_MAGIC)
        while at >= 0:
            if isinstance(_read_frame(file, start + at, size, -1), tuple):
                return start + at
            at = block.find(_MAGIC, at + 1)
        start += max(1, len(block) - len(_MAGIC) + 1)
    return None
