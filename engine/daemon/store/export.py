"""The store's second copy on a shared disk: segments of checksummed frames, synced before a commit counts.
A generation is a snapshot, whose first frame names its owner, and a group of frames per commit. Claiming the next
generation fences off the earlier daemon; takeover.py decides who may.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from .disk import Files, NewFile, make_folder, sync_folder
from .frames import Change, ExportError, first_value, frames, generations

_SEGMENT_BYTES = 64 << 20
_OLD_CLAIMS = 100
_CLAIM = re.compile(r"claim-(\d{6,})")
_NUMBERED = re.compile(r"(?:claim|seg)-(\d{6,})")


class Fenced(ExportError):
    """Another daemon has claimed the export: this one must stop."""


class ExportGone(OSError):
    """The folder is missing or is not the one that was opened."""


@dataclass(frozen=True, slots=True)
class Owner:
    """The writer of a generation. `claim` is drawn at random for each."""

    store: int
    generation: int
    claim: int
    host: str
    since: str

    def __str__(self) -> str:
        return f"store {self.store}, generation {self.generation} (begun on {self.host}, {self.since})"


@dataclass(frozen=True, slots=True)
class StoredGeneration:
    """A generation on the disk; `owner` None: unreadable, or of a version without owners."""

    generation: int
    segments: tuple[Path, ...]
    owner: Owner | None
    unreadable: str = ""
    """The reason why the owner is unreadable, or ""."""


def generations_in(folder: Path) -> list[StoredGeneration]:
    """Every generation that has a segment, oldest first. Raises OSError."""
    return [_read_generation(number, tuple(paths)) for number, paths in generations(folder).items()]


def _read_generation(generation: int, segments: tuple[Path, ...]) -> StoredGeneration:
    try:
        value = first_value(segments[0]).get("owner")
        return StoredGeneration(generation, segments, None if value is None else Owner(**value))
    except (ExportError, TypeError) as error:
        return StoredGeneration(generation, segments, None, str(error))


def copy_file(source: Path, target: Path, files: Files) -> None:
    """Copies a file atomically and syncs it. Raises OSError."""
    with source.open("rb") as file, NewFile(target, files) as copy:
        while chunk := file.read(1 << 20):
            copy.write(chunk)
        copy.commit()


class Export:
    """Only the store's thread writes it. `files` fails in tests."""

    def __init__(self, folder: Path, files: Files) -> None:
        self.folder, self._files = folder, files
        self.files_folder = folder / "files"  # copies of what was uploaded
        self._descriptor: int | None = None
        self._index = self._size = self._group = 0
        self._undone: int | None = None
        self._last = 0
        self._names: set[str] = set()
        self.generation = self.claim = 0
        self.superseded: list[Path] = []
        """Segments whose changes the snapshot contains."""

    @property
    def position(self) -> int:
        """The number of the last frame."""
        return self._group - 1

    def take(self) -> None:
        """Claims the next generation, which fences off writers of earlier ones. Raises OSError."""
        make_folder(self.files_folder, self._files)
        claims = [int(match[1]) for name in os.listdir(self.folder) if (match := _CLAIM.fullmatch(name))]
        self.generation = max([0, *generations(self.folder), *claims]) + 1
        self.claim = 1 + secrets.randbits(62)
        while True:
            try:
                descriptor = os.open(self._claim_file(self.generation), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
                break
            except FileExistsError:
                self.generation += 1
        self._put(descriptor, b"%d\n" % self.claim)
        # Emptied, not only outnumbered: a network file system caches that a name is missing, but opens files afresh.
        for number in claims:
            if number < self.generation - _OLD_CLAIMS:
                self._claim_file(number).unlink(missing_ok=True)
            else:
                self._put(os.open(self._claim_file(number), os.O_WRONLY | os.O_TRUNC), b"")
        sync_folder(self.folder, self._files)
        where = self.folder.stat()
        self._inode, self._device = where.st_ino, where.st_dev

    def _put(self, descriptor: int, data: bytes) -> None:
        try:
            if data:
                self._files.write(descriptor, memoryview(data))
            self._files.fsync(descriptor)
        finally:
            os.close(descriptor)

    def begin(self, rows: Iterable[Change], store: int) -> None:
        """Writes the snapshot and deletes the segments that it supersedes. Raises OSError or Fenced."""
        since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        owner = Owner(store, self.generation, self.claim, socket.gethostname(), since)
        with NewFile(self._path(0), self._files) as snapshot:
            for frame in frames(0, rows, {"owner": asdict(owner)}, joined=False):
                snapshot.write(frame)
                self._group += 1
            self.check()
            snapshot.commit()
        self._names.add(self._path(0).name)
        self.check()
        for path in self.superseded:
            path.unlink(missing_ok=True)
        for path in self.folder.glob(".seg-*.part"):  # a snapshot of a start that was killed: it never counted
            if (match := _NUMBERED.match(path.name[1:])) and int(match[1]) < self.generation:
                path.unlink(missing_ok=True)

    def check(self) -> None:
        """Raises Fenced if another daemon has claimed the export, ExportGone if the folder was replaced."""
        try:
            self._check_files()
        except ExportGone:
            # Who takes over claims first and removes segments then: the files may have gone after their claim was read.
            with contextlib.suppress(OSError):
                if self.folder.stat().st_ino == self._inode:
                    self.check_claim(os.listdir(self.folder))
            raise

    def check_claim(self, names: Iterable[str]) -> None:
        numbers = (int(match[1]) for name in names if (match := _NUMBERED.match(name)))
        if (
            max(numbers, default=0) > self.generation
            or self._claim_file(self.generation).read_bytes() != b"%d\n" % self.claim
        ):
            raise Fenced(f"{self.folder} was taken over by another daemon: this one must stop")

    def _check_files(self) -> None:
        try:
            where, names = self.folder.stat(), set(os.listdir(self.folder))
            same = where.st_ino == self._inode
            if same:
                self.check_claim(names)
            if self._descriptor is not None and same:
                status, opened = self._path(self._index).stat(), os.fstat(self._descriptor)
                same = (status.st_ino, status.st_size) == (opened.st_ino, self._size)
        except OSError as error:
            raise ExportGone(
                f"daemon.export_dir {self.folder} was removed or cannot be read ({error}): restore it"
            ) from error
        if not same or not names >= self._names:
            raise ExportGone(
                f"daemon.export_dir {self.folder} was replaced, or files in it were removed, while it was open: put it "
                f"back, or restart the daemon, which writes a new copy of the whole store there"
            )
        if where.st_dev != self._device:  # mounted again: the descriptor belongs to the earlier mount
            self._device = where.st_dev
            self.close()

    def append(self, changes: list[Change]) -> None:
        """Writes and syncs one group. Raises OSError (then no part of it counts) or Fenced."""
        self.check()
        first = number = self._group
        extra = {} if self._undone is None else {"undone": self._undone}
        try:
            for frame in frames(first, changes, extra, joined=True):
                if self._descriptor is None or self._size > _SEGMENT_BYTES:
                    self._next_segment()
                assert self._descriptor is not None
                left = memoryview(frame)
                while left:
                    left = left[self._files.write(self._descriptor, left) :]
                self._size += len(frame)
                number += 1
            assert self._descriptor is not None
            self._files.fsync(self._descriptor)
            self.check()  # who takes over claims first and reads then: without a claim now it reads this group
        except (OSError, Fenced):
            self.close()  # it may have a torn end: the next group begins a segment of its own
            raise
        self._last, self._group, self._undone = first, number, None

    def undo(self) -> None:
        """Makes the next frame revoke the last group, which was not committed."""
        self._undone = self._last

    def keep(self, source: Path, name: str) -> None:
        """Copies an uploaded file. Raises OSError."""
        copy_file(source, self.files_folder / name, self._files)

    def forget(self, name: str) -> None:
        (self.files_folder / name).unlink(missing_ok=True)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _next_segment(self) -> None:
        if self._descriptor is not None:
            self._files.fsync(self._descriptor)
        self.close()
        self._index += 1
        path = self._path(self._index)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._size = 0
        self._names.add(path.name)
        sync_folder(self.folder, self._files)

    def _path(self, index: int) -> Path:
        return self.folder / f"seg-{self.generation:06}-{index:06}.ltx"

    def _claim_file(self, generation: int) -> Path:
        return self.folder / f"claim-{generation:06}"
