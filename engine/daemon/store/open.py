"""Opens the store: checks and locks the folder, makes its tables, or rebuilds the store from an export."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import secrets
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from .connection import connect_store
from .counter import COUNT, check_count, clear_mark, copy_log, count_file, reset_count
from .disk import DiskError, NewFile, make_folder, prepare_folder
from .export import Export
from .frames import ExportError, generations
from .schema import SchemaVersionError, make_tables
from .store import Store, StoreOptions
from .takeover import SCRATCH, continue_export, detach, put_in_place, rebuild

log = logging.getLogger(__name__)

_EVENT = {"event": "store"}
_OF_INDEX = re.compile(r"row \d+ missing from index |wrong # of entries in index ")
T = TypeVar("T")


async def open_store(folder: Path, options: StoreOptions) -> Store:
    """Makes or opens the store in `folder`; an empty one is rebuilt from the export, if there is one. Raises DiskError
    (held, a network file system, damaged, of a later version, emptied, of another folder) or OSError."""
    lock = await _watched(options, folder, lambda: prepare_folder(folder))
    try:
        export = None
        if options.export_dir is not None:
            export = Export(options.export_dir, options.files)
        await _watched(options, folder, lambda: _make(folder, export, options))
        store = Store(folder, lock, export, options)
        await _watched(options, folder, store.start)
        return store
    except (sqlite3.Error, SchemaVersionError, ExportError) as error:
        lock.release()
        raise DiskError(f"{folder}: {error}") from error
    except BaseException:
        lock.release()
        raise


async def _watched(options: StoreOptions, folder: Path, work: Callable[[], T]) -> T:
    def call() -> T:
        with options.watch.call(folder, job=True):
            return work()

    return await asyncio.to_thread(call)


def _make(folder: Path, export: Export | None, options: StoreOptions) -> None:
    make_folder(folder / "files", options.files)
    shutil.rmtree(folder / SCRATCH, ignore_errors=True)  # of a start that was killed
    # By its size, before SQLite opens it: opening an empty store deletes its write-ahead log, which a restore may need.
    path = folder / "store.db"
    fresh = not path.exists() or not path.stat().st_size
    if fresh and export is not None and generations(export.folder):
        _set_log_aside(folder)
        rebuild(folder, export, options, _belongs_to(folder))
    elif fresh:
        _refuse_empty(folder, options)
        _set_log_aside(folder)
        _make_empty(folder, options)
    elif not options.adopt:
        check_count(folder, options.export_dir)
    db = connect_store(folder, options.connect)
    try:
        if not fresh:
            _check_pages(folder, db)
            if not db.execute("PRAGMA user_version").fetchone()[0]:
                _refuse_empty(folder, options)
        make_tables(db)
        _check_identity(folder, db, options, rebuilt=fresh)
        if options.adopt or fresh or not count_file(folder).exists():
            row = db.execute(COUNT).fetchone()
            reset_count(folder, 0 if row is None else int(row[0]), options.files)
        if export is None:
            detach(db)
        else:
            continue_export(db, folder, export, options)
        copy_log(db, folder)  # else closing it does, unmarked
    finally:
        db.close()
        clear_mark(folder)


def _make_empty(folder: Path, options: StoreOptions) -> None:
    """Makes store.db under its name only once it is complete and on the disk: a power cut leaves all of it or none."""
    make_folder(folder / SCRATCH, options.files)
    db = connect_store(folder / SCRATCH, options.connect)
    make_tables(db)
    db.execute("INSERT INTO meta VALUES ('store', ?)", (secrets.randbits(62),))
    put_in_place(db, folder, options.files)


def _check_pages(folder: Path, db: sqlite3.Connection) -> None:
    """Checks the structure of store.db. Makes indexes again that alone are damaged: the rows have checksums. Raises
    DiskError."""
    faults = integrity_faults(db)
    if faults and all(map(_OF_INDEX.match, faults)):
        with contextlib.suppress(sqlite3.Error):
            db.execute("REINDEX")
            log.warning("indexes of %s/store.db were damaged (%s) and are made again", folder, faults[0], extra=_EVENT)
            faults = integrity_faults(db)
    if faults:
        raise DiskError(f"{folder}/store.db is damaged ({faults[0]}): restore it, or rebuild from an export")


def integrity_faults(db: sqlite3.Connection) -> list[str]:
    """What SQLite finds wrong with the pages of the database, at most 100 faults."""
    return [str(row[0]) for row in db.execute("PRAGMA integrity_check(100)") if row[0] != "ok"]


def _set_log_aside(folder: Path) -> None:
    """Renames the logs of a removed store, which SQLite would replay into the new one."""
    for log_file in (folder / "store.db-wal", folder / "store.db-journal"):
        if log_file.exists() and log_file.stat().st_size:
            aside = folder / "unknown" / f"{log_file.name}.{secrets.token_hex(4)}"
            make_folder(aside.parent)
            log_file.rename(aside)
            log.warning("the log of a missing store was moved to %s", aside, extra={"event": "store"})


def _identity_file(folder: Path) -> Path:
    return folder / "store.id"


def _belongs_to(folder: Path) -> str | None:
    """The number of the store to which the folder belongs."""
    path = _identity_file(folder)
    return path.read_text(encoding="utf-8", errors="replace").strip() if path.exists() else None


def _refuse_empty(folder: Path, options: StoreOptions) -> None:
    """Raises DiskError if the store is empty but the folder is not."""
    files = sorted(path.name for path in (folder / "files").iterdir() if not path.name.startswith("."))
    if (files or _identity_file(folder).exists()) and not options.adopt:
        raise DiskError(
            f"{folder}: store.db is missing or empty, but the folder contained a store and has {len(files)} files in "
            f"files/: restore store.db, set daemon.export_dir to its export, or begin an empty store with `laddertron "
            f"serve --adopt` (the files are moved to {folder}/unknown)"
        )


def _check_identity(folder: Path, db: sqlite3.Connection, options: StoreOptions, rebuilt: bool) -> None:
    """Checks that the store and its folder have the same number; makes one if neither has. Raises DiskError."""
    row = db.execute("SELECT value FROM meta WHERE key = 'store'").fetchone()
    number = secrets.randbits(62) if row is None else int(row[0])
    owner = _belongs_to(folder)
    if owner == str(number):
        return
    if owner is not None and not (rebuilt or options.adopt):
        raise DiskError(
            f"{folder}: store.db is store {number if row else '(no id)'}, the folder belongs to store {owner[:40]}: "
            f"restore its own store.db, or use this one with `laddertron serve --adopt` (files that it does not know "
            f"are moved to {folder}/unknown)"
        )
    if row is None:
        db.execute("INSERT INTO meta VALUES ('store', ?)", (number,))
    with NewFile(_identity_file(folder), options.files) as file:
        file.write(b"%d\n" % number)
        file.commit()
