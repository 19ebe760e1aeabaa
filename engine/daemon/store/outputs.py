"""Makes output and error files from the store: atomically, the same bytes each time."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

from .disk import Files, NewFile
from .records import result_lines
from .rows import BatchRow
from .store import Store

_CHUNK = 1 << 18


def write_lines(db: sqlite3.Connection, batch_id: str, ok: bool, path: Path, files: Files) -> int:
    """Writes one of a batch's files; its bytes. Raises OSError."""
    with NewFile(path, files) as file:
        part: list[bytes] = []
        size = 0
        for line in result_lines(db, batch_id, ok):
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
    """Makes each file once at a time: who asks for it meanwhile waits for the same maker. Used on the store's loop."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._making: dict[str, asyncio.Task[int]] = {}

    async def make(self, batch: BatchRow, file_id: str, size: int | None = None) -> int:
        """One of the two files that the batch names, unless it is there and has `size` bytes; its bytes. Raises OSError
        or StoreUnavailable."""
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

    async def make_all(self, batch: BatchRow) -> dict[str, int]:
        """Bytes by file id. Raises OSError or StoreUnavailable."""
        named = [file_id for file_id in (batch.output_file_id, batch.error_file_id) if file_id is not None]
        return {file_id: await self.make(batch, file_id) for file_id in named}
