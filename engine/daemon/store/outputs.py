"""Output and error files, derived from the store: whole or not there, the same bytes whenever they are made again.

Knows the store's records and its disk; no requests, no HTTP.
"""

from __future__ import annotations

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


async def make_outputs(store: Store, batch: BatchRow) -> dict[str, int]:
    """Makes the files that the batch names; bytes by file id. Raises OSError."""
    sizes = {}
    for file_id, ok in ((batch.output_file_id, True), (batch.error_file_id, False)):
        if file_id is not None:
            path = store.path_of(file_id)

            def write(db: sqlite3.Connection, ok: bool = ok, path: Path = path) -> int:
                return write_lines(db, batch.id, ok, path, store.disk_files)

            sizes[file_id] = await store.read(write)
    return sizes
