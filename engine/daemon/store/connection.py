"""Connections to the store's file with its settings, and queries of the whole store when it is opened."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

from .counter import LOG_KEPT_BYTES, count_file
from .export import Export
from .frames import Change
from .schema import KEYS, columns


def connect_store(folder: Path, connect: Callable[..., sqlite3.Connection]) -> sqlite3.Connection:
    """Opens a connection with the store's settings; makes the file if there is none."""
    db = connect(folder / "store.db", isolation_level=None, timeout=10.0, check_same_thread=False)
    db.execute("PRAGMA auto_vacuum = INCREMENTAL")  # has its say only before the first page
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = FULL")
    db.execute("PRAGMA secure_delete = ON")
    db.execute("PRAGMA cache_size = -2048")  # KiB: it fills up with results, on every connection
    db.execute(f"PRAGMA journal_size_limit = {LOG_KEPT_BYTES}")
    if count_file(folder).exists():
        db.execute("PRAGMA wal_autocheckpoint = 0")  # copy_log does it, and marks it beside the count
    db.row_factory = sqlite3.Row
    db.text_factory = _text  # one damaged text must not fail the query that meets it
    return db


def open_read_only(folder: Path) -> sqlite3.Connection:
    """A connection that changes neither the store nor its log, beside a running daemon or without one."""
    (path := (folder / "store.db").resolve()).stat()  # SQLite's error does not name it
    db = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)
    db.row_factory, db.text_factory = sqlite3.Row, _text
    return db


def _text(raw: bytes) -> str | bytes:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw


def set_meta(db: sqlite3.Connection, key: str, value: int) -> None:
    query = "INSERT INTO meta VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value"
    db.execute(query, (key, value))


def note_position(db: sqlite3.Connection, export: Export) -> None:
    """Records how much of the export the store has; within the transaction that commits it."""
    set_meta(db, f"export:{export.claim}", export.position)


def newest_time(db: sqlite3.Connection) -> float | None:
    """The newest time in the store; None if there is none."""
    row = db.execute(
        "SELECT coalesce((SELECT value FROM meta WHERE key = 'seen'), (SELECT max(created_at) FROM "
        "(SELECT created_at FROM files UNION ALL SELECT created_at FROM batches)))"
    ).fetchone()
    return None if row[0] is None else float(row[0])


def snapshot(db: sqlite3.Connection) -> Iterator[Change]:
    """Yields every row as the change that inserts it."""
    for table in KEYS:
        names = columns(db, table)
        for row in db.execute(f"SELECT {', '.join(names)} FROM {table} ORDER BY rowid"):
            # an empty text where one cannot be read: no answer is empty, so that a rebuilt store fails that line too
            values = {name: "" if isinstance(row[name], bytes) else row[name] for name in names}
            yield ["insert", table, {k: value for k, value in values.items() if value is not None or k == "sum"}]
