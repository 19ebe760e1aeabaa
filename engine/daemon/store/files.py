"""The files of batches: checks uploads, makes output and error files from the store; deletes what is old."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

from . import records
from .disk import Files, NewFile
from .responses import drop_responses, expired_responses
from .rows import FileRow
from .store import Store, StoreUnavailable
from .sums import BlockSums, CheckedFile, Damaged

log = logging.getLogger(__name__)

_CLEANING_SECONDS = 600.0


class Cleaner:
    """Deletes old files, batches and responses. `retention` in seconds; None: only what expires. Waits while the clock
    is paused."""

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
        """Deletes batches and files from before `before`, and expired files and responses; returns their number. Raises
        StoreUnavailable or OSError."""
        count = 0
        while names := await self._store.read(lambda db: expired_responses(db, now)):
            count += await self._store.write(partial(drop_responses, names=names))
        while batches := await self._store.read(lambda db: records.old_batches(db, before)):
            for batch in batches:
                for name in await self._store.write(partial(records.drop_batch, batch=batch)):
                    await self._store.remove_bytes(name)
            count += len(batches)
        while files := await self._store.read(lambda db: records.old_files(db, before, now)):
            for file in files:
                if await self._store.write(partial(records.drop_file, file=file)) is None:
                    await self._store.remove_bytes(file.id)
            count += len(files)
        if count:
            log.info("deleted %d old files, batches and responses", count, extra={"event": "retention"})
            await self._store.write(lambda rows: rows.db.execute("PRAGMA incremental_vacuum(1024)").fetchall())
        return count


class InputFault(Exception):
    """An input file is missing or has changed: no line of it can be computed."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


async def open_checked(store: Store, file: FileRow) -> CheckedFile:
    """Opens a file. Raises Damaged, StoreUnavailable or OSError."""
    sums = await store.read(lambda db: records.block_sums(db, file.id))
    name = f"file {file.id} ({file.filename})"
    return await store.in_thread(lambda: CheckedFile(store.path_of(file.id), name, file.bytes, sums))


async def check_input(store: Store, file: FileRow) -> None:
    """Checks a whole input file. Raises InputFault, StoreUnavailable or OSError."""
    try:
        with await open_checked(store, file) as opened:
            await store.in_turn(file.owner, opened.check)
    except FileNotFoundError as error:
        raise InputFault("input_file_missing", f"the input file is missing: {error.strerror}") from error
    except Damaged as damaged:
        store.report(damaged)
        raise changed_input(damaged) from damaged


def changed_input(damaged: Damaged) -> InputFault:
    return InputFault("input_file_changed", f"{damaged}: upload it again and start a batch with reuse_batch_id")


def damaged_row(damaged: Damaged) -> InputFault:
    return InputFault(
        "row_damaged", f"{damaged}: the answers in this batch's files are intact, its other values may be wrong"
    )


_CHUNK = 1 << 18


def write_lines(db: sqlite3.Connection, batch_id: str, ok: bool, path: Path, files: Files) -> tuple[int, str]:
    """Writes the output or error file of a batch; returns its bytes and the checksums of its blocks. Raises OSError."""
    with NewFile(path, files) as file:
        part: list[bytes] = []
        size, sums = 0, BlockSums()

        def write() -> None:
            data = b"".join(part)
            file.write(data)
            sums.update(data)

        for line in records.result_lines(db, batch_id, ok):
            part.append(line)
            size += len(line)
            if size >= _CHUNK:
                write()
                part, size = [], 0
        write()
        file.commit()
        return file.size, sums.text()


class Outputs:
    """Writes output and error files. Concurrent requests for those of a batch share one task. For the store's event
    loop."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._making: dict[str, asyncio.Task[None]] = {}

    async def make(self, batch_id: str, make: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Makes the files of a batch by `make`, unless they are being made. Raises what it raises."""
        task = self._making.get(batch_id)
        if task is None:
            task = self._making[batch_id] = asyncio.create_task(make())
            task.add_done_callback(lambda done: self._made(batch_id, done))
        await asyncio.shield(task)  # a client that leaves must not take the file from the others

    async def write(self, batch_id: str, file_id: str, ok: bool) -> tuple[int, str]:
        """Writes a file of a batch; returns its bytes and the checksums of its blocks. Raises OSError or
        StoreUnavailable."""
        path, files = self._store.path_of(file_id), self._store.disk_files
        return await self._store.read(lambda db: write_lines(db, batch_id, ok, path, files))

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        return list(self._making.values())

    def _made(self, batch_id: str, task: asyncio.Task[None]) -> None:
        del self._making[batch_id]
        if not task.cancelled():
            task.exception()  # every client may have left: asyncio would log that it was never retrieved
