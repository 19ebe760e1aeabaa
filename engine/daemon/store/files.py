"""The files of batches: checks uploads, makes output and error files from the store, deletes old files."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import sqlite3
from functools import partial
from pathlib import Path

from . import records
from .disk import Files, NewFile
from .rows import BatchRow, FileRow
from .store import Store, StoreUnavailable

log = logging.getLogger(__name__)

_CLEANING_SECONDS = 600.0


class Cleaner:
    """Deletes old files. `retention` in seconds; None: only files that expire. Waits while the clock is paused."""

    def __init__(self, store: Store, retention: float | None) -> None:
        self._store, self._retention = store, retention

    async def run(self) -> None:
        while True:
            try:
                if not self._store.clock.paused:
                    now = self._store.clock.now()
                    await self.clean(0 if self._retention is None else int(now - self._retention), int(now))
            except (StoreUnavailable, OSError) as error:
                log.warning("nothing was cleaned: %s", error, extra={"event": "retention"})
            await asyncio.sleep(_CLEANING_SECONDS)

    async def clean(self, before: int, now: int) -> int:
        """Deletes batches and files from before `before`, and expired files; returns their number. Raises
        StoreUnavailable or OSError."""
        count = 0
        while batches := await self._store.read(lambda db: records.old_batches(db, before)):
            for batch in batches:
                for name in await self._store.write(partial(records.drop_batch, batch=batch)):
                    self._store.remove_bytes(name)
            count += len(batches)
        while files := await self._store.read(lambda db: records.old_files(db, before, now)):
            for file in files:
                if await self._store.write(partial(records.drop_file, file=file)) is None:
                    self._store.remove_bytes(file.id)
            count += len(files)
        if count:
            log.info("deleted %d old files and batches", count, extra={"event": "retention"})
            await self._store.write(lambda rows: rows.db.execute("PRAGMA incremental_vacuum(1024)").fetchall())
        return count


new_digest = partial(hashlib.blake2b, digest_size=16)


class InputFault(Exception):
    """An input file is missing or has changed: no line of it can be computed."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def check_input(file: FileRow, path: Path) -> None:
    """Checks an input file by size, and by digest if one is stored. Raises InputFault or OSError."""
    try:
        with path.open("rb") as opened:
            size = opened.seek(0, 2)
            opened.seek(0)
            same = size == file.bytes
            if same and file.digest is not None:
                same = hashlib.file_digest(opened, new_digest).hexdigest() == file.digest
    except FileNotFoundError as error:
        raise InputFault("input_file_missing", f"the input file is missing: {error.strerror}") from error
    if not same:
        raise InputFault(
            "input_file_changed",
            f"input file {file.id} ({file.filename}) has changed on the disk since it was uploaded ({file.bytes} bytes "
            f"then, {size} now): upload it again and start a batch with reuse_batch_id",
        )


_CHUNK = 1 << 18


def write_lines(db: sqlite3.Connection, batch_id: str, ok: bool, path: Path, files: Files) -> int:
    """Writes the output or error file of a batch; returns its bytes. Raises OSError."""
    with NewFile(path, files) as file:
        part: list[bytes] = []
        size = 0
        for line in records.result_lines(db, batch_id, ok):
            part.append(line)
            size += len(line)
            if size >= _CHUNK:
                file.write(b"".join(part))
                part, size = [], 0
        file.write(b"".join(part))
        file.commit()
        return file.size


def size_of(path: Path) -> int | None:
    return path.stat().st_size if path.exists() else None


class Outputs:
    """Makes output and error files. Concurrent requests for a file share one task. For the store's event loop."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._making: dict[str, asyncio.Task[int]] = {}

    async def make(self, batch: BatchRow, file_id: str, size: int | None = None) -> int:
        """Makes a file of the batch unless it has `size` bytes already; returns its bytes. Raises OSError or
        StoreUnavailable."""
        task = self._making.get(file_id)
        if task is None:
            path, ok = self._store.path_of(file_id), file_id == batch.output_file_id

            def write(db: sqlite3.Connection) -> int:
                if size is not None and size_of(path) == size:  # an earlier maker was faster
                    return size
                return write_lines(db, batch.id, ok, path, self._store.disk_files)

            task = self._making[file_id] = asyncio.create_task(self._store.read(write))
            task.add_done_callback(lambda done: self._made(file_id, done))
        return await asyncio.shield(task)  # a client that leaves must not take the file from the others

    def _made(self, file_id: str, task: asyncio.Task[int]) -> None:
        del self._making[file_id]
        if not task.cancelled():
            task.exception()  # every client may have left: asyncio would log that it was never retrieved
