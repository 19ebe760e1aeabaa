"""The store's tables and `Rows`, through which all rows change, so that changes can be exported."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from typing import Any

from .sums import is_intact, row_sum

VERSION = 8
"""The first schema of a release: stores of those before it are refused."""

_SCHEMA = """
    CREATE TABLE meta (key TEXT PRIMARY KEY, value INTEGER NOT NULL);
    CREATE TABLE files (
        no INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, purpose TEXT NOT NULL,
        filename TEXT NOT NULL, bytes INTEGER NOT NULL, created_at INTEGER NOT NULL, batch_id TEXT, expires_at INTEGER,
        digest TEXT, sum TEXT
    );
    CREATE INDEX files_by_owner ON files (owner, no);
    CREATE TABLE batches (
        no INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, endpoint TEXT NOT NULL,
        input_file_id TEXT NOT NULL, completion_window TEXT NOT NULL, status TEXT NOT NULL, errors TEXT,
        output_file_id TEXT, error_file_id TEXT, metadata TEXT,
        total INTEGER NOT NULL DEFAULT 0, completed INTEGER NOT NULL DEFAULT 0, failed INTEGER NOT NULL DEFAULT 0,
        created_at INTEGER NOT NULL, expires_at INTEGER NOT NULL, in_progress_at INTEGER, finalizing_at INTEGER,
        completed_at INTEGER, failed_at INTEGER, expired_at INTEGER, cancelling_at INTEGER, cancelled_at INTEGER,
        input_tokens INTEGER NOT NULL DEFAULT 0, cached_tokens INTEGER NOT NULL DEFAULT 0,
        output_tokens INTEGER NOT NULL DEFAULT 0, output_seconds INTEGER, reuse_batch_id TEXT, model_digest TEXT,
        sum TEXT
    );
    CREATE INDEX batches_by_owner ON batches (owner, no);
    CREATE TABLE results (
        batch_id TEXT NOT NULL, custom_id TEXT NOT NULL, number INTEGER NOT NULL, epoch INTEGER NOT NULL,
        ok INTEGER NOT NULL, line TEXT NOT NULL, sum TEXT, PRIMARY KEY (batch_id, custom_id)
    );
    CREATE UNIQUE INDEX results_in_order ON results (batch_id, number);
    CREATE TABLE suspects (
        batch_id TEXT NOT NULL, number INTEGER NOT NULL, deaths INTEGER NOT NULL, sum TEXT,
        PRIMARY KEY (batch_id, number)
    );
    CREATE TABLE repeats (
        owner TEXT NOT NULL, key TEXT NOT NULL, digest TEXT NOT NULL, batch_id TEXT NOT NULL,
        created_at INTEGER NOT NULL, sum TEXT, PRIMARY KEY (owner, key)
    );
    CREATE TABLE usage (
        owner TEXT NOT NULL, day INTEGER NOT NULL, requests INTEGER NOT NULL, prompt_tokens INTEGER NOT NULL,
        cached_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL, sum TEXT, PRIMARY KEY (owner, day)
    );
    CREATE TABLE blocks (file_id TEXT PRIMARY KEY, sums TEXT NOT NULL, sum TEXT);
    CREATE TABLE responses (
        no INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, expires_at INTEGER NOT NULL,
        bytes INTEGER NOT NULL, previous TEXT, of_items TEXT NOT NULL, status TEXT NOT NULL, head TEXT NOT NULL,
        input TEXT NOT NULL, output TEXT NOT NULL, sum TEXT
    );
    CREATE INDEX responses_by_use ON responses (owner, expires_at, no, bytes);
"""

KEYS: Mapping[str, tuple[str, ...]] = {
    "files": ("id",),
    "batches": ("id",),
    "results": ("batch_id", "custom_id"),
    "suspects": ("batch_id", "number"),
    "repeats": ("owner", "key"),
    "usage": ("owner", "day"),
    "blocks": ("file_id",),
    "responses": ("id",),
}
"""The key of each exported table (`meta` belongs to one data folder and is not exported)."""


class SchemaVersionError(RuntimeError):
    """Another version made the database."""


def make_tables(db: sqlite3.Connection) -> None:
    """Makes the tables of an empty database in one transaction. Raises SchemaVersionError if another version made
    it."""
    if check_version(db) == 0:
        db.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} PRAGMA user_version = {VERSION}; COMMIT;")


def check_version(db: sqlite3.Connection) -> int:
    """The schema's version, 0 of an empty database. Raises SchemaVersionError, by name and with what to do, for another
    version than this one's, and for a store that was begun by one without checksums."""
    version = int(db.execute("PRAGMA user_version").fetchone()[0])
    unsummed = "SELECT 1 FROM files WHERE sum IS NULL UNION ALL SELECT 1 FROM batches WHERE sum IS NULL"
    if version not in (0, VERSION) or (version and db.execute(unsummed).fetchone()):
        what = f"has schema {version}" if version != VERSION else "has rows without checksums"
        raise SchemaVersionError(
            f"the store {what}, this version reads schema {VERSION}, with checksums, and changed nothing: start the "
            f"version that made it until its batches have ended and their files are fetched, then this one with an "
            f"empty daemon.data_dir"
        )
    return version


def columns(db: sqlite3.Connection, table: str) -> dict[str, Any]:
    """A table's columns, without its running number, and their defaults."""
    info = db.execute(f"PRAGMA table_info({table})")
    return {row[1]: None if row[4] is None else int(row[4]) for row in info if row[1] != "no"}


class Rows:
    """Changes of rows within a transaction, each with its checksum. `changes` lists them for the export: [verb, table,
    row]."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self.db = db
        self.changes: list[list[Any]] = []
        self._columns = {table: columns(db, table) for table in KEYS}

    def insert(self, table: str, row: Mapping[str, Any]) -> bool:
        """Inserts a row; False, without a change, if a row with that key exists. A `sum` in the row is stored as it is:
        a damaged row that is copied stays damaged."""
        complete = {**self._columns.get(table, {}), **row}
        complete["sum"] = row["sum"] if "sum" in row else row_sum(complete)
        names, marks = ", ".join(complete), ", ".join(f":{name}" for name in complete)
        query = f"INSERT INTO {table} ({names}) VALUES ({marks}) ON CONFLICT DO NOTHING"
        return bool(self._change("insert", table, row, query, complete))

    def update(self, table: str, row: Mapping[str, Any]) -> bool:
        """Updates the row with `row`'s key; False if there is none. A damaged row keeps its checksum, and so remains
        damaged."""
        keys = KEYS.get(table, ())
        self._check(table, row)
        before = self.db.execute(f"SELECT * FROM {table} WHERE {_where(keys)}", dict(row)).fetchone()
        if before is None:
            return False
        stored = {name: before[name] for name in before.keys()}  # noqa: SIM118 (a Row iterates values)
        checksum = row_sum({**stored, **row}) if is_intact(stored) else stored["sum"]
        sets = ", ".join(f"{name} = :{name}" for name in (*(name for name in row if name not in keys), "sum"))
        query = f"UPDATE {table} SET {sets} WHERE {_where(keys)}"
        return bool(self._change("update", table, row, query, {**row, "sum": checksum}))

    def delete(self, table: str, row: Mapping[str, Any]) -> int:
        """Deletes the rows that equal `row` in its columns; returns their number."""
        return self._change("delete", table, row, f"DELETE FROM {table} WHERE {_where(tuple(row))}", row)

    def apply(self, change: object) -> None:
        """Applies one change of the form of `changes`. Raises ValueError for other values."""
        match change:
            case ["insert" | "update" | "delete" as verb, str(table), dict(row)]:
                getattr(self, verb)(table, row)
            case _:
                raise ValueError(f"not a change of a row: {str(change)[:80]}")

    def _check(self, table: str, row: Mapping[str, Any]) -> None:
        names = self._columns.get(table)
        if names is None or not row.keys() <= names.keys() or not row:
            raise ValueError(f"{table!r} has no such columns: {sorted(row)[:20]}")

    def _change(self, verb: str, table: str, row: Mapping[str, Any], statement: str, values: Mapping[str, Any]) -> int:
        """Executes a statement, which may contain only names of the schema; returns the number of changed rows."""
        self._check(table, row)
        done = self.db.execute(statement, dict(values))
        if done.rowcount:
            self.changes.append([verb, table, dict(row)])
        return done.rowcount


def _where(names: tuple[str, ...]) -> str:
    return " AND ".join(f"{name} = :{name}" for name in names)
