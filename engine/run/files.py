"""Answer and error files of `laddertron run`: appended in whole lines; `--resume` reads complete lines."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import stat
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Container, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import BinaryIO

from ..openai.batch_input import MAX_LINE_BYTES
from .journal import ANSWERS, ERRORS, Journal, LineCheck, Mark, Marks, file_of, journal_of, mark_of, read_journal
from .past import LINE_BYTES, OpenOutput, Past, RunFileError, read_past, whole_lines

_GROUP_BYTES = 1 << 18
_COMPRESSED = {b"\x1f\x8b": "gzip", b"\x28\xb5": "zstd", b"BZ": "bzip2", b"\xfd7": "xz", b"PK": "zip"}
"""Compression formats by a file's first two bytes, with which no line of JSON begins."""


class LineFile:
    """A file to which whole lines are appended, locked against a second run. Lines are buffered until `flush`."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path, self._descriptor = path, descriptor
        self._size = os.fstat(descriptor).st_size
        self.waiting: list[bytes] = []
        """Lines that are not in the file yet."""

    @property
    def empty(self) -> bool:
        return self._size == 0 and not self.waiting

    def append(self, line: bytes) -> None:
        """Appends a line with its line break."""
        self.waiting.append(line)

    def flush(self) -> None:
        """Writes buffered lines. If that fails (disk full), the file stays unchanged; raises OSError with its name."""
        if not self.waiting:
            return
        data = memoryview(b"".join(self.waiting))
        end = self._size + len(data)
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, self._size)
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        self._size, self.waiting = end, []

    def close(self) -> None:
        """Flushes, syncs and unlocks the file. Raises OSError."""
        try:
            self.flush()
            os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)


@dataclass(slots=True)
class RunFiles:
    """Input opened for reading, both outputs and their journal for appending, and the digests of finished lines.
    `model`: `model_digest`. `changed`: lines that changed since they were answered; `damaged`: answers that changed
    since they were written; `outdated`: the file of both kinds of answers."""

    input: BinaryIO
    answers: LineFile
    errors: LineFile
    journal: Journal
    finished: Container[bytes]
    total_lines: int
    model: str = ""
    changed: int = 0
    outdated: Path | None = None
    damaged: int = 0

    def write(self, lines: Sequence[tuple[bytes, bool]]) -> None:
        """Writes lines, each with whether it is an answer or an error line, in groups of 256 KiB. Raises OSError like
        `flush`."""
        waiting = 0
        for count, (line, ok) in enumerate(lines, 1):
            (self.answers if ok else self.errors).append(line)
            waiting += len(line)
            if waiting >= _GROUP_BYTES and count < len(lines):
                waiting = 0
                with contextlib.suppress(OSError):  # then the lines are written with the next ones
                    self.flush()
        self.flush()

    def flush(self) -> None:
        """Writes the journal, then the lines. Raises OSError; lines that are not written stay buffered."""
        if lines := {name: file.waiting for name, file in self._outputs.items() if file.waiting}:
            self.journal.append(lines)
            for file in self._outputs.values():
                file.flush()

    @property
    def _outputs(self) -> dict[str, LineFile]:
        return {ANSWERS: self.answers, ERRORS: self.errors}

    def close(self) -> None:
        """Closes all three files, even if one fails; removes an error file without lines. Raises the last OSError."""
        with contextlib.ExitStack() as stack:
            if self.input.closed:
                return
            if self.errors.empty:
                stack.callback(self.errors.path.unlink, missing_ok=True)
            for file in (self.input, self.journal, self.errors, self.answers):
                stack.callback(file.close)
            stack.callback(self.flush)


class _ShortDigests(frozenset[bytes]):
    """A set of digests of lines, shortened as in their answers' ids."""

    def __contains__(self, digest: object) -> bool:
        return isinstance(digest, bytes) and super().__contains__(digest[:LINE_BYTES])


def open_run(
    source: Path,
    answers: Path,
    errors: Path,
    resume: bool = False,
    overwrite: bool = False,
    model: str = "0" * 10,
    max_line_bytes: int = MAX_LINE_BYTES,
) -> RunFiles:
    """Checks and opens the files of a run; with `resume` reads back what is finished: cuts off a torn last line, moves
    answers to lines that changed to a file of their own, and forgets error lines that are found again or may go better
    this time. `model`: digest of what answers; answers of another one are refused. Raises RunFileError."""
    if "-" in (str(source), str(answers), str(errors)):
        raise RunFileError("'-' cannot be used: a run must be able to read its files again to resume; name files")
    outdated, log = file_of(answers, "outdated"), journal_of(answers)
    if any(_same(*pair) for pair in combinations((source, answers, errors), 2)):
        raise RunFileError(f"input, output and errors must be three files: {source}, {answers}, {errors}")
    if resume and overwrite:
        raise RunFileError("--resume and --overwrite cannot be combined")
    if resume and (taken := next((path for path in (source, errors) if _same(path, outdated)), None)):
        raise RunFileError(f"{taken} is where a resumed run puts answers to lines that changed: name another file")
    if taken := next((path for path in (source, answers, errors) if _same(path, log)), None):
        raise RunFileError(f"{taken} is where the run keeps its journal: name another file")
    if not source.is_file():
        raise RunFileError(f"{source} is {'not a file' if source.exists() else 'missing'}: name a JSONL file")
    for path in (answers, errors):
        if path.exists() and not path.is_file():
            raise RunFileError(f"{path} is not a regular file: answers are appended to one, name it")
    try:
        marks = read_journal(log)
    except (ValueError, OSError) as error:
        raise RunFileError(str(error)) from error
    fresh = not (resume or overwrite)
    for path in (answers, errors) if fresh else ():
        # the errors of a run that answered nothing are made again, and must not be in the way of the corrected one
        if size_of(path) and not (path is errors and not size_of(answers) and marks and _is_own(errors, marks.errors)):
            raise RunFileError(f"{path} exists: go on with --resume, replace it with --overwrite, or name another")
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(_input(source))
        opened = [_open_locked(answers)]
        stack.callback(lambda: os.close(opened[0]))  # which may be replaced below
        opened.append(_open_locked(errors))
        stack.callback(os.close, opened[1])
        if not resume:
            for descriptor in opened:
                os.ftruncate(descriptor, 0)
        past, current_marks = Past(), list[Mark]()
        if resume:
            before, lost = marks or Marks([], []), marks is None
            old = OpenOutput(
                answers, opened[0], LineCheck(answers, None if lost else before.answers, before.incomplete)
            )
            bad = OpenOutput(errors, opened[1], LineCheck(errors, None if lost else before.errors, before.incomplete))
            past = read_past(file, old, bad, model, max_line_bytes)
            current_marks += past.marks
        if past.outdated or past.damaged:
            opened[0], current_marks = _set_aside(old, outdated, past.outdated)
        if resume:
            # within the locked file: replacing it would lose the lock; what is lost by dying here is found again
            os.ftruncate(opened[1], 0)
            for raw in past.errors:
                os.write(opened[1], raw)
        total = _count_lines(file)
        try:
            there = os.path.relpath(errors.resolve(), log.resolve().parent)
            journal = Journal(log, Marks(current_marks, [mark_of(raw) for raw in past.errors], errors_file=there))
        except OSError as error:
            raise RunFileError(f"{log} cannot be written: {error.strerror}") from error
        stack.pop_all()
    files = LineFile(answers, opened[0]), LineFile(errors, opened[1])
    aside = outdated if past.outdated or past.damaged else None
    return RunFiles(
        file, *files, journal, _ShortDigests(past.finished), total, model, past.changed, aside, past.damaged
    )


def size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _is_own(path: Path, marks: Sequence[Mark]) -> bool:
    """Whether every line of the file is one that a run wrote."""
    with path.open("rb") as file:
        return {mark_of(raw) for raw in file} <= set(marks)


def _same(first: Path, second: Path) -> bool:
    """Whether both are the same file, also by symbolic or hard links."""
    if os.path.realpath(first) == os.path.realpath(second):
        return True
    return first.exists() and second.exists() and first.samefile(second)


def _input(source: Path) -> BinaryIO:
    try:
        file = source.open("rb")
    except OSError as error:
        raise RunFileError(f"{source} cannot be read: {error.strerror}") from error
    if wrong := input_fault(source, file):
        file.close()
        raise RunFileError(wrong)
    return file


def input_fault(source: Path, file: BinaryIO) -> str:
    """The reason why no line of the file can be read, or ""; rewinds the file."""
    start = file.read(4)
    wrong = ""
    if packed := _COMPRESSED.get(start[:2]):
        wrong = f"is compressed ({packed}): compressed input is not read; unpack it first"
    elif start[:2] in (BOM_UTF16_LE, BOM_UTF16_BE) or b"\0" in start:
        wrong = f"is UTF-16: convert it, iconv -f UTF-16 -t UTF-8 {shlex.quote(str(source))} > utf8.jsonl"
    elif not _count_lines(file):
        wrong = "has no lines: each is one request"
    file.seek(0)
    return wrong and f"{source} {wrong}"


def _open_locked(path: Path) -> int:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise RunFileError(f"{path} cannot be written: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        taken = not os.path.samestat(os.fstat(descriptor), os.stat(path))  # a resume replaced it before the lock
    except (BlockingIOError, FileNotFoundError):
        taken = True
    except OSError:
        taken = False  # a file system without locks: the run is as good as without
    if taken:
        os.close(descriptor)
        raise RunFileError(f"{path} is being written by another run: wait for it, or name another file")
    return descriptor


def _set_aside(output: OpenOutput, aside: Path, outdated: Container[str]) -> tuple[int, list[Mark]]:
    """Moves the answers with these ids, and damaged ones, from `output` to the end of `aside`, atomically. Returns the
    new file's locked descriptor and the marks of its lines, and closes the old one. Raises RunFileError."""
    path, descriptor, marks = output.path, output.descriptor, list[Mark]()
    home = path.resolve()
    part = home.with_name(f".{home.name}.part")
    replacing = _open_locked(part)
    try:
        os.ftruncate(replacing, 0)
        with open(replacing, "wb", closefd=False) as rewritten, aside.open("ab") as old:
            mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
            os.fchmod(replacing, mode)
            os.fchmod(old.fileno(), mode & os.fstat(old.fileno()).st_mode)  # never opened to more readers
            for line, raw in whole_lines(output):
                if line is None or line.get("id") in outdated:
                    old.write(raw if raw.endswith(b"\n") else raw + b"\n")
                else:
                    rewritten.write(raw)
                    marks.append(mark_of(raw))
            for file in (rewritten, old):
                file.flush()
                os.fsync(file.fileno())
        part.replace(home)
    except OSError as error:
        os.close(replacing)
        part.unlink(missing_ok=True)
        raise RunFileError(f"{path} cannot be written without its outdated answers: {error}") from error
    os.close(descriptor)
    return replacing, marks


def _count_lines(file: BinaryIO) -> int:
    """Counts lines that are not blank, the last one with or without line break; rewinds the file."""
    file.seek(len(BOM_UTF8) if file.seek(0) == 0 and file.read(len(BOM_UTF8)) == BOM_UTF8 else 0)
    count, filled = 0, False
    while piece := file.readline(1 << 20):
        filled |= not piece.isspace()
        if piece.endswith(b"\n"):
            count, filled = count + filled, False
    file.seek(0)
    return count + filled
