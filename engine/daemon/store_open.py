"""Opening the store: the folder checked and held, the schema brought up to date, or all rebuilt from an export."""

from __future__ import annotations

import asyncio
import logging
import shutil
import sqlite3
from pathlib import Path

from .disk import DiskError, prepare_folder
from .store import Store, StoreOptions, connect_store
from .store_export import Export, Fenced, fetch_files, generations, read_changes
from .store_schema import Rows, SchemaVersionError, migrate

log = logging.getLogger(__name__)


async def open_store(folder: Path, options: StoreOptions) -> Store:
    """Makes or opens the store in `folder`; an empty one is rebuilt from the export, if there is one. Raises DiskError
    (held, a network file system, damaged, of a later version) or OSError."""
    lock = await asyncio.to_thread(prepare_folder, folder)
    try:
        export = None
        if options.export_dir is not None:
            await asyncio.to_thread(options.export_dir.mkdir, parents=True, exist_ok=True, mode=0o700)
            export = Export(options.export_dir, options.files)
        await asyncio.to_thread(_make, folder, options)
        store = Store(folder, lock, export, options)
        await asyncio.to_thread(store.start)
        return store
    except (sqlite3.Error, SchemaVersionError, Fenced) as error:
        lock.release()
        raise DiskError(f"{folder}: {error}") from error
    except BaseException:
        lock.release()
        raise


def _make(folder: Path, options: StoreOptions) -> None:
    (folder / "files").mkdir(exist_ok=True, mode=0o700)
    fresh = not (folder / "store.db").exists()
    if fresh and options.export_dir is not None and generations(options.export_dir):
        _rebuild(folder, options)
        return
    db = connect_store(folder, options)
    try:
        if not fresh:
            verdict = db.execute("PRAGMA quick_check(1)").fetchone()[0]
            if verdict != "ok":
                raise DiskError(f"{folder}/store.db is damaged ({verdict}): restore it, or rebuild from an export")
        migrate(db)
    finally:
        db.close()


def _rebuild(folder: Path, options: StoreOptions) -> None:
    """Beside the place first: a rebuild that is interrupted begins anew."""
    assert options.export_dir is not None
    scratch = folder / "rebuild"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(mode=0o700)
    db = connect_store(scratch, options)
    migrate(db)
    db.execute("BEGIN")
    rows = Rows(db)
    for change in read_changes(options.export_dir):
        rows.apply(change)
        rows.changes.clear()
    db.execute("COMMIT")
    count = db.execute("SELECT count(*) FROM results").fetchone()[0]
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    db.close()
    fetch_files(options.export_dir, folder / "files")
    (scratch / "store.db").rename(folder / "store.db")
    shutil.rmtree(scratch)
    log.warning("the store was rebuilt from %s: %d results", options.export_dir, count, extra={"event": "store"})
