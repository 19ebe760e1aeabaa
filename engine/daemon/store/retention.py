"""Deletion in time: files and ended batches that are older than the retention, and the room they took."""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from . import records
from .store import Store, StoreUnavailable

log = logging.getLogger(__name__)

_CLEANING_SECONDS = 600.0


class Cleaner:
    """`retention` in seconds; None keeps everything but files that expire. Nothing is deleted while the store's clock
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
        """Deletes what was made before a time, or has expired; how many files and batches. Raises StoreUnavailable or
        OSError."""
        count = 0
        while batches := await self._store.read(lambda db: records.old_batches(db, before)):
            for batch in batches:
                for name in await self._store.write(partial(records.drop_batch, batch=batch)):
                    self._store.remove_bytes(name)
            count += len(batches)
        while files := await self._store.read(lambda db: records.old_files(db, before, now)):
            for file in files:
                await self._store.write(partial(records.drop_file, file=file))
                self._store.remove_bytes(file.id)
            count += len(files)
        if count:
            log.info("deleted %d old files and batches", count, extra={"event": "retention"})
            await self._store.write(lambda rows: rows.db.execute("PRAGMA incremental_vacuum(1024)").fetchall())
        return count
