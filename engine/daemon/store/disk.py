"""The data folder: its lock, the check of its file system, atomic files."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import shutil
import socket
import sqlite3
import stat
import time
from functools import partial
from pathlib import Path
from typing import BinaryIO, Protocol

NETWORK_TYPES = frozenset(
    {"nfs", "nfs3", "nfs4", "lustre", "gpfs", "mmfs", "beegfs", "ceph", "cifs", "smb2", "smb3", "smbfs", "9p", "afs"}
    | {"panfs", "pvfs2", "orangefs", "gfs2", "ocfs2", "glusterfs", "davfs", "sshfs", "wekafs", "vboxsf"}
)
_PROBE_ROUNDS = 3
_FIX = "free space if the disk is full, or set daemon.data_dir to another local disk"


class DiskError(RuntimeError):
    """The data folder cannot be used; the message has the folder, the reason and the fix."""


class Files(Protocol):
    """The calls that fail if a disk fails: `os`, or a failing substitute in tests."""

    def write(self, descriptor: int, data: memoryview, /) -> int: ...
    def fsync(self, descriptor: int, /) -> None: ...


def sync_folder(folder: Path, files: Files) -> None:
    """Syncs the folder, so that new and renamed files in it are durable. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        files.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(folder: Path, files: Files = os, mode: int = 0o700) -> None:
    """Makes the folder and its parents durably, if they are missing. Raises OSError."""
    if folder.is_dir():
        return
    make_folder(folder.parent, files, 0o777)
    folder.mkdir(exist_ok=True, mode=mode)
    sync_folder(folder.parent, files)


class NewFile:
    """An atomic file: `write`, then `commit` under its name (fsync, rename, fsync of the folder). Without `commit` it
    is deleted. Raises OSError."""

    def __init__(self, path: Path, files: Files) -> None:
        self.path, self._files = path, files
        self._temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
        self._descriptor: int | None = os.open(
            self._temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600
        )
        self.size = 0

    def write(self, data: bytes) -> None:
        assert self._descriptor is not None
        left = memoryview(data)
        while left:
            left = left[self._files.write(self._descriptor, left) :]
        self.size += len(data)

    def keep_access(self) -> None:
        """Copies owner and mode of the file that will be replaced, as far as this user may set them."""
        assert self._descriptor is not None
        with contextlib.suppress(FileNotFoundError, PermissionError):
            before = self.path.stat()
            os.fchmod(self._descriptor, stat.S_IMODE(before.st_mode))
            os.fchown(self._descriptor, before.st_uid, before.st_gid)

    def commit(self) -> None:
        assert self._descriptor is not None
        self._files.fsync(self._descriptor)
        os.close(self._descriptor)
        self._descriptor = None
        os.rename(self._temporary, self.path)
        sync_folder(self.path.parent, self._files)

    def __enter__(self) -> NewFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.discard()

    def discard(self) -> None:
        """Deletes the file unless it was committed."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._temporary.unlink(missing_ok=True)


def mount_of(path: Path, mountinfo: str) -> tuple[str, str, str]:
    """The (mount point, file system type, device) of a path, from the text of /proc/self/mountinfo."""
    best = ("/", "unknown", "unknown")
    target = str(path)
    for line in mountinfo.splitlines():
        before, separator, after = line.partition(" - ")
        if not separator:
            continue
        point = before.split(" ")[4].replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")
        inside = target == point or target.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best[0]):
            kind, device = after.split(" ")[:2]
            best = (point, kind, device)
    return best


def check_type(folder: Path, mountinfo: str) -> None:
    """Raises DiskError if the folder is on a network file system."""
    point, kind, _ = mount_of(folder.resolve(), mountinfo)
    base = kind.removeprefix("fuse.")
    if base in NETWORK_TYPES or (kind.startswith("fuse.") and base not in ("fuseblk", "fuse-overlayfs")):
        raise DiskError(
            f"{folder} is on {kind} ({point}): a write-ahead log needs a local disk. Set daemon.data_dir to one, "
            f"and daemon.export_dir to the shared folder, from which another node can rebuild the store"
        )


def probe(folder: Path) -> None:
    """Raises DiskError unless locks, fsync and two connections' shared memory work in the folder."""
    path = folder / f".probe-{os.getpid()}.db"
    connect = partial(sqlite3.connect, path, isolation_level=None, timeout=1.0)
    try:
        with contextlib.closing(connect()) as one, contextlib.closing(connect()) as two:
            if (mode := one.execute("PRAGMA journal_mode=WAL").fetchone()[0]) != "wal":
                raise DiskError(f"{folder}: its file system does not support a write-ahead log (journal mode {mode})")
            one.execute("CREATE TABLE t (n INTEGER)")
            for n in range(_PROBE_ROUNDS):
                one.execute("INSERT INTO t VALUES (?)", (n,))
                if two.execute("SELECT max(n) FROM t").fetchone()[0] != n:
                    raise DiskError(f"{folder}: a write of one connection is not visible to another: {_FIX}")
        sync_folder(folder, os)
    except (sqlite3.Error, OSError) as error:
        raise DiskError(f"{folder}: a test of the store failed ({error}): {_FIX}") from error
    finally:
        for suffix in ("", "-wal", "-shm"):
            path.with_name(path.name + suffix).unlink(missing_ok=True)


class FolderLock:
    """The lock that allows one daemon at a time. The file names the holder; the kernel releases it when that exits."""

    def __init__(self, folder: Path) -> None:
        path = folder / "lock"
        self._file: BinaryIO = path.open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.seek(0)
            holder = self._file.read(4096).decode(errors="replace").strip() or "another process"
            self._file.close()
            raise DiskError(
                f"{folder} is used by {_named(holder)}: stop it, or set another daemon.data_dir ({error.strerror})"
            ) from None
        self._file.truncate(0)
        record = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "since": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        try:
            os.write(self._file.fileno(), json.dumps(record).encode() + b"\n")
        except OSError as error:
            self._file.close()
            raise DiskError(f"{folder} cannot be written ({error.strerror}): {_FIX}") from error

    def release(self) -> None:
        self._file.close()


def holder_pid(folder: Path) -> int | None:
    """The process of this host that holds the folder's lock, or None."""
    try:
        with (folder / "lock").open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = json.loads(file.read(4096))
                return int(holder["pid"]) if holder["host"] == socket.gethostname() else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return None


def _named(holder: str) -> str:
    try:
        holder_row = json.loads(holder)
        return f"process {holder_row['pid']} on {holder_row['host']} since {holder_row['since']}"
    except (ValueError, KeyError, TypeError):
        return "another process"


def free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def room_of(folder: Path) -> tuple[int, int] | str:
    """Free bytes and size of the folder's disk, or the reason why they are unknown."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError as error:  # possibly temporary, such as no free descriptor
        return f"{folder} cannot be accessed: {error.strerror}"
    return usage.free, usage.total


def is_full(error: Exception) -> bool:
    """Whether a write failed only because the disk, or the user's share of it, is full."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL


def prepare_folder(folder: Path) -> FolderLock:
    """Makes the folder (0700), checks its file system, locks it. Raises DiskError or OSError."""
    make_folder(folder)
    check_type(folder, Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace"))
    lock = FolderLock(folder)
    try:
        probe(folder)
    except BaseException:
        lock.release()
        raise
    return lock
