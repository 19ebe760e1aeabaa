"""Reads everything in a data folder and its export and compares it with its checksums. Changes nothing; a daemon may
be running."""

from __future__ import annotations

import contextlib
import sqlite3
from dataclasses import dataclass, field
from pathlib import Path

from . import records
from .connection import open_read_only
from .export import generations_in
from .frames import read_groups
from .open import integrity_faults
from .schema import KEYS, check_version
from .sums import CheckedFile, Damaged, is_intact


@dataclass(slots=True)
class Checked:
    """What was read, and what is wrong with it."""

    rows: int = 0
    files: int = 0
    file_bytes: int = 0
    groups: int = 0
    wrong: list[str] = field(default_factory=list)


def check_store(folder: Path, export_dir: Path | None = None) -> Checked:
    """Checks store.db, every row, every file, the export's segments and its copies of uploads. Raises OSError,
    sqlite3.Error or SchemaVersionError."""
    checked = Checked()
    with contextlib.closing(open_read_only(folder)) as db:
        check_version(db)
        checked.wrong += [f"{folder}/store.db: {fault}" for fault in integrity_faults(db)]
        for table in KEYS:
            _check_rows(db, table, checked)
        _check_files(db, folder / "files", checked)
        if export_dir is not None:
            _check_export(db, export_dir, checked)
    return checked


def _check_rows(db: sqlite3.Connection, table: str, checked: Checked) -> None:
    for row in db.execute(f"SELECT * FROM {table}"):
        values = dict(row)
        checked.rows += 1
        if not is_intact(values):
            checked.wrong.append(f"{records.name_of(table, values)} does not match its checksum")


def _check_files(db: sqlite3.Connection, files: Path, checked: Checked, copies: bool = False) -> None:
    """Checks the files of intact rows; a missing output is generated when it is read. `copies`: an export's, of
    uploads."""
    for file in records.all_files(db, damaged=[]):
        if copies and file.batch_id is not None:
            continue
        path = files / file.id
        try:
            sums = records.block_sums(db, file.id)
            with CheckedFile(path, f"{path} ({file.filename})", file.bytes, sums) as opened:
                opened.check()
        except FileNotFoundError:
            if file.batch_id is None:
                checked.wrong.append(f"{path} ({file.filename}) is missing")
            continue
        except Damaged as damaged:
            checked.wrong.append(str(damaged))
        checked.files, checked.file_bytes = checked.files + 1, checked.file_bytes + file.bytes


def _check_export(db: sqlite3.Connection, folder: Path, checked: Checked) -> None:
    for generation in generations_in(folder)[-1:]:
        for _ in read_groups(generation.segments, damaged=lambda damage: checked.wrong.append(str(damage))):
            checked.groups += 1
    _check_files(db, folder / "files", checked, copies=True)
