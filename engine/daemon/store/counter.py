"""Counts acknowledged commits in a file, synced before each is acknowledged: a store with fewer has lost some."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import struct
import zlib
from pathlib import Path

from .disk import DiskError, Files, NewFile

_SLOT = struct.Struct("<4sQI")  # magic, count, CRC-32 of both
_MAGIC = b"LTC1"
_SLOT_BYTES = 512  # a sector each: a torn write damages the newer one alone
_COPYING = 2 * _SLOT_BYTES, b"LTCP"  # where, and what is there while the log is copied into the store
LOG_KEPT_BYTES = 64 << 20  # SQLite itself cuts a longer log to this
COUNT = "SELECT value FROM meta WHERE key = 'commits'"


def count_file(folder: Path) -> Path:
    return folder / "store.count"


def _packed(count: int) -> bytes:
    head = struct.pack("<4sQ", _MAGIC, count)
    return head + struct.pack("<I", zlib.crc32(head))


def read_count(folder: Path) -> int | None:
    """Reads the count; None if there is no file. Raises DiskError if neither slot is readable."""
    path = count_file(folder)
    if not path.exists():
        return None
    data, counts = path.read_bytes()[: 2 * _SLOT_BYTES], []
    for at in range(0, len(data) - _SLOT.size + 1, _SLOT_BYTES):
        magic, count, _ = _SLOT.unpack_from(data, at)
        if magic == _MAGIC and data[at : at + _SLOT.size] == _packed(count):
            counts.append(count)
    if not counts:
        raise DiskError(f"{path} is damaged: {_ways(folder, None)}")
    return int(max(counts))


def reset_count(folder: Path, count: int, files: Files) -> None:
    with NewFile(count_file(folder), files) as file:
        slot = _packed(count).ljust(_SLOT_BYTES, b"\0")
        file.write(slot + slot)
        file.commit()


def copy_log(db: sqlite3.Connection, folder: Path) -> None:
    """Copies the log into store.db, page by page. If the process is killed meanwhile, store.db may have the newest
    count without its commits, which are only in the log; a mark next to the count records that. Raises OSError or
    sqlite3.Error."""
    at, mark = _COPYING
    descriptor = os.open(count_file(folder), os.O_WRONLY | os.O_DSYNC | os.O_CLOEXEC)
    try:
        os.pwrite(descriptor, mark, at)
        db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
        os.pwrite(descriptor, bytes(len(mark)), at)
    finally:
        os.close(descriptor)


def clear_mark(folder: Path) -> None:
    """Clears the mark that a failed `copy_log` left, unless the log exists: SQLite deletes it once it has copied all
    of it. Call it after the last connection was closed. Raises OSError."""
    if interrupted(folder) and not (folder / "store.db-wal").exists():
        at, mark = _COPYING
        with count_file(folder).open("r+b") as file:
            file.seek(at)
            file.write(bytes(len(mark)))
            file.flush()
            os.fsync(file.fileno())


def interrupted(folder: Path) -> bool:
    """True if the process was killed while it copied the log: store.db is incomplete without the log."""
    at, mark = _COPYING
    path = count_file(folder)
    return path.exists() and path.read_bytes()[at : at + len(mark)] == mark


def _frames(head: bytes) -> int:
    """Pages in the log that store.db may lack, from the first bytes of SQLite's index of its log."""
    return int(struct.unpack_from("=I", head, 16)[0] - struct.unpack_from("=I", head, 96)[0])


def check_count(folder: Path, export_dir: Path | None) -> None:
    """Raises DiskError unless the store has all acknowledged commits. Does not change the store or its log."""
    counted, marked, log = read_count(folder), interrupted(folder), folder / "store.db-wal"
    incomplete = (
        f"{folder}: the daemon was killed while store.db-wal was copied into store.db, which is incomplete without it, "
        f"and the log was removed or damaged: {_ways(folder, export_dir)}"
    )
    if marked and not (log.exists() and log.stat().st_size):
        raise DiskError(incomplete)
    # a connection that only reads recovers what the log has, and neither checkpoints nor deletes it when it is closed
    with contextlib.closing(sqlite3.connect(f"{(folder / 'store.db').resolve().as_uri()}?mode=ro", uri=True)) as db:
        try:
            row = db.execute(COUNT).fetchone()
        except sqlite3.OperationalError as error:
            if "no such table" not in str(error):
                raise
            row = None
    have = 0 if row is None else int(row[0])
    if counted is None and have and (folder / "store.id").exists():
        raise DiskError(
            f"{count_file(folder)} is missing, the store has counted {have} commits: {_ways(folder, export_dir)}"
        )
    if marked and not _frames((folder / "store.db-shm").read_bytes()):  # the index of what was just recovered
        raise DiskError(incomplete)
    if counted is not None and have < counted:
        raise DiskError(
            f"{folder}: store.db and store.db-wal have {have} of {counted} acknowledged commits (the log was removed, "
            f"cut or damaged, or store.db is an older copy): {_ways(folder, export_dir)}"
        )


def _ways(folder: Path, export_dir: Path | None) -> str:
    rebuild = (
        f"rebuild the store from the export {export_dir} (move {folder}/store.db away and start again)"
        if export_dir is not None
        else "set daemon.export_dir to its export, move store.db away and start again"
    )
    return (
        f"restore the lost file, {rebuild}, or continue with the store's content: `laddertron serve --adopt`. Nothing "
        f"was changed"
    )


class Counter:
    """Writes and syncs the count. Only for the store's thread."""

    def __init__(self, folder: Path, files: Files) -> None:
        self._files = files
        self._descriptor = os.open(count_file(folder), os.O_WRONLY | os.O_DSYNC | os.O_CLOEXEC)

    def write(self, count: int) -> None:
        os.lseek(self._descriptor, count % 2 * _SLOT_BYTES, os.SEEK_SET)
        left = memoryview(_packed(count))
        while left:
            left = left[self._files.write(self._descriptor, left) :]

    def close(self) -> None:
        os.close(self._descriptor)


class Watched:
    """Detects changes of the files of an open store. Make it after the first connection. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        self._log = folder / "store.db-wal"
        self._descriptor = os.open(self._log, os.O_RDONLY | os.O_CLOEXEC)  # SQLite has no locks on this file
        # it has on this one, and closing a descriptor gives them up: `close` comes after the last connection's
        self._index = os.open(folder / "store.db-shm", os.O_RDONLY | os.O_CLOEXEC)
        places = (folder, folder / "files", folder / "store.db", self._log, count_file(folder))
        self._inodes = {path: _inode(path) for path in places}
        self._least = 0

    def wrong(self) -> str | None:
        """A description of a file that was removed, replaced or truncated; None if all are intact."""
        least = self._least  # read before the size, which other threads' commits enlarge
        for path, inode in self._inodes.items():
            with contextlib.suppress(OSError):
                status = path.stat()
                if (status.st_dev, status.st_ino) == inode and (path.suffix != ".db" or status.st_size):
                    continue
            return f"{path} was removed or replaced"
        size = os.fstat(self._descriptor).st_size
        if size < min(least, LOG_KEPT_BYTES) or (size and os.pread(self._descriptor, 1, 0) == b"\0"):
            return f"{self._log} was cut"
        self._least = size
        return None

    def frames(self) -> int:
        return _frames(os.pread(self._index, 100, 0))

    def close(self) -> None:
        os.close(self._descriptor)
        os.close(self._index)


def _inode(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino
