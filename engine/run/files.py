"""The files of one `laddertron run`: answers and errors, appended in whole lines, and what of them is still good.

A line is in a file entirely or not at all, whatever interrupts the run; `--resume` reads back what is finished. Knows
lines and custom_ids, no requests or tokens.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ..openai.batch_input import key_of

_LASTING = {"numerical_error", "constraint_error", "quarantined"}  # a second run would only repeat them
_GROUP_BYTES = 1 << 18
_COMPRESSED = {b"\x1f\x8b": "gzip", b"\x28\xb5": "zstd", b"BZ": "bzip2", b"\xfd7": "xz", b"PK": "zip"}
"""By a file's first two bytes; no line of JSON begins so."""
_BEGINNING = b'{"id":"batch_req_'


class RunFileError(ValueError):
    """The run cannot use these files; the message names the file and the fix."""


class LineFile:
    """A file that grows by whole lines, locked against a second run. Lines wait until `flush` (or 256 KiB of them)."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path, self._descriptor = path, descriptor
        self._size = os.fstat(descriptor).st_size
        self._waiting: list[bytes] = []
        self._waiting_bytes = 0

    @property
    def empty(self) -> bool:
        return self._size == 0 and not self._waiting

    @property
    def unwritten(self) -> int:
        """Lines that are not in the file (yet)."""
        return len(self._waiting)

    def append(self, line: bytes) -> None:
        """`line` ends in its line break. Raises OSError as `flush` does."""
        self._waiting.append(line)
        self._waiting_bytes += len(line)
        if self._waiting_bytes >= _GROUP_BYTES:
            self.flush()

    def flush(self) -> None:
        """Writes what waits. A write that fails (disk full) leaves the file as it was and raises OSError."""
        if not self._waiting:
            return
        data = memoryview(b"".join(self._waiting))
        end = self._size + len(data)
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, self._size)
            raise
        self._size, self._waiting, self._waiting_bytes = end, [], 0

    def close(self) -> None:
        """Flushes to the disk and unlocks. Raises OSError."""
        try:
            self.flush()
            os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)


@dataclass(slots=True)
class RunFiles:
    """Input opened for reading, both outputs for appending, and the keys (intake.key_of) of finished custom_ids."""

    input: BinaryIO
    answers: LineFile
    errors: LineFile
    finished: set[bytes]
    total_lines: int

    def flush(self) -> None:
        self.answers.flush()
        self.errors.flush()

    def release(self) -> None:
        """As `close`, for those who only opened them; does nothing the second time."""
        if not self.input.closed:
            self.close()

    def close(self) -> None:
        """Closes all three, whichever fails; an errors file without lines goes. Raises the last of their OSErrors."""
        with contextlib.ExitStack() as stack:
            if self.errors.empty:
                stack.callback(self.errors.path.unlink, missing_ok=True)
            for file in (self.input, self.errors, self.answers):
                stack.callback(file.close)


def open_run(source: Path, answers: Path, errors: Path, resume: bool = False, overwrite: bool = False) -> RunFiles:
    """Checks and opens the files of a run; with `resume` reads back what is finished, cuts off a torn last line and
    forgets error lines that are found again or may go better this time. Raises RunFileError."""
    if str(source) == "-" or str(answers) == "-":
        raise RunFileError("'-' cannot be used: a run must be able to read its files again to resume; name files")
    paths = [path.resolve() for path in (source, answers, errors)]
    if len(set(paths)) < 3:
        raise RunFileError(f"input, output and errors must be three files: {source}, {answers}, {errors}")
    if resume and overwrite:
        raise RunFileError("--resume and --overwrite exclude each other")
    if not source.is_file():
        raise RunFileError(f"{source} is {'not a file' if source.exists() else 'missing'}: name a JSONL file")
    if not (resume or overwrite):
        for path in (answers, errors):
            if path.exists() and path.stat().st_size > 0:
                raise RunFileError(f"{path} exists: go on with --resume, replace it with --overwrite, or name another")
    with contextlib.ExitStack() as stack:
        opened = []
        for path in (answers, errors):
            opened.append(_open_locked(path))
            stack.callback(os.close, opened[-1])
        if overwrite:
            for descriptor in opened:
                os.ftruncate(descriptor, 0)
        finished = _finished(answers, opened[0], errors, opened[1]) if resume else set()
        try:
            file = source.open("rb")
        except OSError as error:
            raise RunFileError(f"{source} cannot be read: {error.strerror}") from error
        stack.callback(file.close)
        if packed := _COMPRESSED.get(file.read(4)[:2]):
            raise RunFileError(f"{source} is compressed ({packed}): lines are read as they stand; unpack it first")
        file.seek(0)
        total = _count_lines(file)
        stack.pop_all()
    return RunFiles(file, LineFile(answers, opened[0]), LineFile(errors, opened[1]), finished, total)


def _open_locked(path: Path) -> int:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise RunFileError(f"{path} cannot be written: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise RunFileError(f"{path} is being written by another run: wait for it, or name another file") from None
    except OSError:
        pass  # a file system without locks: the run is as good as without
    return descriptor


def _finished(answers: Path, answers_fd: int, errors: Path, errors_fd: int) -> set[bytes]:
    done = {key_of(str(line["custom_id"])) for line, _ in _whole_lines(answers, answers_fd)}
    kept = []
    for line, raw in _whole_lines(errors, errors_fd):
        body = (line["response"] or {}).get("body") or {}
        if isinstance(line["custom_id"], str) and (body.get("error") or {}).get("code") in _LASTING:
            done.add(key_of(line["custom_id"]))
            kept.append(raw)
    # within the locked file: replacing it would lose the lock; what is lost by dying here is found again
    os.ftruncate(errors_fd, 0)
    for raw in kept:
        os.write(errors_fd, raw)
    return done


def _whole_lines(path: Path, descriptor: int) -> Iterator[tuple[dict[str, Any], bytes]]:
    """The good lines of an output file, in order; a torn last one is cut off, any other bad one is an error."""
    with path.open("rb") as file:
        good = 0
        for number, raw in enumerate(file, 1):
            line = _read_line(raw)
            if line is None:
                if not _torn(raw):
                    fix = "remove it, or start anew with --overwrite"
                    raise RunFileError(f"{path}:{number}: not a line of a batch's output: {fix}")
                os.ftruncate(descriptor, good)
                return
            good += len(raw)
            yield line, raw


def _torn(raw: bytes) -> bool:
    """Whether a file's bad line is the beginning of one of ours (or what a disk left of it: zeros)."""
    ours = raw.startswith(_BEGINNING) or _BEGINNING.startswith(raw) or not raw.strip(b"\0")
    return ours and not raw.endswith(b"\n")


def _read_line(raw: bytes) -> dict[str, Any] | None:
    """An output line, if it is whole."""
    if not raw.endswith(b"\n"):
        return None
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict) or not {"custom_id", "response", "error"} <= line.keys():
        return None
    return line if isinstance(line["response"], dict | None) else None


def _count_lines(file: BinaryIO) -> int:
    """Lines of a file that are not blank, the last one with or without its line break; rewinds."""
    count, filled = 0, False
    while piece := file.readline(1 << 20):
        filled |= not piece.isspace()
        if piece.endswith(b"\n"):
            count, filled = count + filled, False
    file.seek(0)
    return count + filled
