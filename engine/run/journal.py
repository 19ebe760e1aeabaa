"""The journal of a run: size and checksum of every output line, in the export's checksummed frames (frames.py). Lines
are in the journal before they are in the output, so that a crash leaves none without. It contains no answer, needs
neither locks nor shared memory, and so works on NFS and Lustre."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ..daemon.store.disk import NewFile
from ..daemon.store.frames import Damage, ExportError, first_value, frames, read_groups

_SUM_BYTES = 8
ANSWERS, ERRORS, _ERRORS_FILE = "answers", "errors", "errors_file"


class Mark(NamedTuple):
    """One line of an output file: its bytes, line break included, and its checksum."""

    size: int
    sum: str


class Marks(NamedTuple):
    """What a journal contains. `incomplete`: some of its frames cannot be read."""

    answers: list[Mark]
    errors: list[Mark]
    incomplete: bool = False
    errors_file: str = ""
    """The path of the file of errors, relative to the journal's folder; "" if it cannot be read."""


def mark_of(raw: bytes) -> Mark:
    return Mark(len(raw), hashlib.blake2b(raw, digest_size=_SUM_BYTES).hexdigest())


def _named(answers: Path) -> Path:
    """The output itself, whose other files are where it is, by whatever symbolic link it was named."""
    return answers.resolve() if answers.is_symlink() or not answers.name else answers


def journal_of(answers: Path) -> Path:
    path = _named(answers)
    return path.with_name(f"{path.name}.journal")


def file_of(answers: Path, kind: str) -> Path:
    """OUT.errors.jsonl of OUT.jsonl, for the kind `errors`; of an output without that suffix OUT.errors: no two outputs
    have the same file."""
    path = _named(answers)
    name, suffix = path.name.removesuffix(".jsonl"), path.suffix if path.suffix == ".jsonl" else ""
    return path.with_name(f"{name}.{kind}{suffix}")


def read_journal(path: Path) -> Marks | None:
    """Reads a journal; None if there is no file. Raises OSError, or ValueError if it is no journal."""
    if not path.exists():
        return None
    if not path.is_file():
        raise ValueError(f"{path} is not a regular file: the run keeps its journal there, name another output")
    marks: dict[str, list[Mark]] = {ANSWERS: [], ERRORS: []}
    damaged = list[Damage]()
    groups = list(read_groups([path], damaged=damaged.append))
    for group in groups:
        for name, lines in group.changes:
            marks[name] += [Mark(*line) for line in lines]
    if not groups and path.stat().st_size:
        raise ValueError(f"{path} is not the journal of a run: move it away, or name another output")
    errors_file = ""
    with contextlib.suppress(ExportError):
        errors_file = str(first_value(path).get(_ERRORS_FILE, ""))
    return Marks(marks[ANSWERS], marks[ERRORS], bool(damaged), errors_file)


class LineCheck:
    """Tells which lines of an output file are what was written. `marks=None`: a run of an earlier version, or a lost
    journal. Raises OSError."""

    def __init__(self, path: Path, marks: Sequence[Mark] | None, incomplete: bool = False) -> None:
        self._known = None if marks is None else set(marks)
        self.suspicious = incomplete
        """Whether written lines have changed or are gone: then an unknown line is a damaged one, else a user's."""
        if marks:
            with path.open("rb") as file:
                present = self._known & {mark_of(raw) for raw in file} if self._known else set()
            intact = path.stat().st_size == sum(mark.size for mark in self._known or ())
            # a set: lines that could not be written at once are in the journal twice
            self.suspicious |= len(present) < len(self._known or ()) and (intact or bool(present))

    def is_damaged(self, raw: bytes) -> bool:
        return self.suspicious and not (self._known and mark_of(raw) in self._known)


def damaged_lines(answers: Path) -> tuple[int, list[str]]:
    """Compares the output files of a run with its journal. Returns the number of intact lines, and what is wrong.
    Raises OSError or ValueError."""
    log = journal_of(answers)
    _refuse_written(answers)
    marks, intact = read_journal(log) or Marks([], []), 0
    errors = log.parent / marks.errors_file if marks.errors_file else file_of(answers, ERRORS)
    wrong = [f"{log}: some of its frames cannot be read"] if marks.incomplete else []
    for path, lines in ((answers, marks.answers), (errors, marks.errors)):
        left = set(lines)
        with path.open("rb") if path.exists() else io.BytesIO() as file:
            for number, raw in enumerate(file, 1):
                if (mark := mark_of(raw)) in left:
                    left.remove(mark)
                    intact += 1
                else:
                    wrong.append(f"{path}:{number}: is not what the run wrote")
        if left:
            wrong.append(f"{path}: {len(left)} lines of the journal are missing: --resume computes them again")
    _refuse_written(answers)  # by a run that began meanwhile
    return intact, wrong


def _refuse_written(answers: Path) -> None:
    """Raises ValueError while a run writes the output, of which its journal is ahead."""
    with contextlib.suppress(FileNotFoundError), answers.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{answers} is being written by a run: check it when that has ended") from None
        except OSError:
            return  # a file system without locks


class Journal:
    """Makes the journal anew with the lines that its output files have, and appends others. Raises OSError."""

    def __init__(self, path: Path, marks: Marks) -> None:
        self._path, self._group = path, 0
        with NewFile(path.resolve(), os) as file:
            lines = {ANSWERS: marks.answers, ERRORS: marks.errors}
            file.write(self._frames(lines, {_ERRORS_FILE: marks.errors_file}))
            file.keep_access()
            file.commit()
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    def _frames(self, marks: Mapping[str, Sequence[Mark]], extra: Mapping[str, str] = {}) -> bytes:
        made = list(frames(self._group, ([name, lines] for name, lines in marks.items()), extra, joined=True))
        self._group += len(made)
        return b"".join(made)

    def append(self, lines: Mapping[str, Sequence[bytes]]) -> None:
        """Adds lines that are written next. Raises OSError."""
        end, group = os.fstat(self._descriptor).st_size, self._group
        left = memoryview(self._frames({name: [mark_of(raw) for raw in raws] for name, raws in lines.items()}))
        try:
            while left:
                left = left[os.write(self._descriptor, left) :]
        except OSError as error:
            self._group = group
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, end)
            raise OSError(error.errno, error.strerror, str(self._path)) from error

    def close(self) -> None:
        """Syncs and closes the file. Raises OSError."""
        try:
            os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)
