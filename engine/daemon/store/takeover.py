"""Decides which export a store may continue (its own, containing nothing that the store lacks), rebuilds a store from
an export, and applies what only the export has. `meta` keeps the last frame committed under each claim (`export:CLAIM`)
and the current claim (`export_claim`; 0: opened without an export since).
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import sqlite3
from collections.abc import Mapping
from pathlib import Path

from .connection import connect_store, set_meta
from .disk import Files, sync_folder
from .export import Export, Owner, StoredGeneration, copy_file, generations_in
from .frames import Damage, ExportError, read_groups
from .schema import Rows, make_tables
from .store import StoreOptions

log = logging.getLogger(__name__)

_KNOWN_CLAIMS = 64
SCRATCH = "rebuild"
"""The subfolder of the data folder where a store is made."""
_WITHOUT_OWNER = "{}: an earlier version wrote the export, without an owner: set another daemon.export_dir"
_REBUILD = "to rebuild from the export, move the data folder aside and start with an empty one"


def refusal(owner: Owner, store: int, positions: Mapping[int, int]) -> str | None:
    """The reason why a store must not continue an export, or None."""
    if owner.store != store:
        return (
            f"the export belongs to {owner}, the data folder to store {store}: set another daemon.export_dir; "
            f"{_REBUILD}"
        )
    if owner.claim not in positions:
        return (
            f"the export's latest is {owner}; the data folder, store {store} with {len(positions)} generations, does "
            f"not contain it: another daemon continued it; {_REBUILD}"
        )
    return None


def detach(db: sqlite3.Connection) -> None:
    """Records that the store is written without an export from now on."""
    db.execute("UPDATE meta SET value = 0 WHERE key = 'export_claim'")


def continue_export(db: sqlite3.Connection, folder: Path, export: Export, options: StoreOptions) -> None:
    """Claims the export for the store and applies changes that only the export has. Raises ExportError (another's,
    newer, damaged) or OSError; a refusal before the claim does not affect other daemons."""
    if not export.claim:
        _check(db, export)
        export.take()
    # Once more: another daemon may have begun in between, or committed.
    if (generation := _check(db, export)) is not None:
        _catch_up(db, folder, export, generation, options)
    for earlier in generations_in(export.folder)[:-1]:
        if earlier.owner is not None and _behind(db, earlier):
            export.superseded += earlier.segments
        else:
            log.warning("%s: left as it was, unknown to this store", earlier.segments[0], extra={"event": "store"})
    with db:
        set_meta(db, f"export:{export.claim}", -1)
        set_meta(db, "export_claim", export.claim)
        newest = "SELECT rowid FROM meta WHERE key LIKE 'export:%' ORDER BY rowid DESC LIMIT ?"
        db.execute(f"DELETE FROM meta WHERE key LIKE 'export:%' AND rowid NOT IN ({newest})", (_KNOWN_CLAIMS,))


def rebuild(folder: Path, export: Export, options: StoreOptions, own: str | None) -> None:
    """Makes the store of an empty folder from the export; `own`: the store to which the folder belonged. Raises
    ExportError or OSError. If interrupted, the next start repeats it."""
    latest = generations_in(export.folder)[-1]
    if (owner := latest.owner) is None and not latest.unreadable:
        raise ExportError(_WITHOUT_OWNER.format(export.folder))
    if owner is not None and own not in (None, str(owner.store)) and not options.adopt:
        raise ExportError(refusal(owner, int(own) if own and own.isdigit() else 0, {}))
    export.take()
    generation = generations_in(export.folder)[-1]
    left_out: list[Damage] = []
    db, position = _replayed(folder / SCRATCH, generation, options, left_out if options.skip_damaged else None)
    with db:
        number = generation.owner.store if generation.owner is not None else own or secrets.randbits(62)
        set_meta(db, "store", int(number))
        if generation.owner is not None:
            set_meta(db, f"export:{generation.owner.claim}", position)
            set_meta(db, "export_claim", generation.owner.claim)
    count = db.execute("SELECT count(*) FROM results").fetchone()[0]
    _copy_uploads(export.files_folder, folder / "files", options.files)
    put_in_place(db, folder, options.files)
    log.warning("the store was rebuilt from %s: %d results", export.folder, count, extra={"event": "store"})
    for damage in left_out:
        log.error("omitted from the rebuild: %s", damage, extra={"event": "store"})


def put_in_place(db: sqlite3.Connection, folder: Path, files: Files) -> None:
    """Closes the complete store in SCRATCH and gives it its name, durably. Raises OSError or sqlite3.Error."""
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    db.close()
    (folder / SCRATCH / "store.db").rename(folder / "store.db")
    sync_folder(folder, files)
    shutil.rmtree(folder / SCRATCH)


def _replayed(
    scratch: Path, generation: StoredGeneration, options: StoreOptions, left_out: list[Damage] | None
) -> tuple[sqlite3.Connection, int]:
    """Makes a store from the export's changes; returns it and the last frame before the first skipped one."""
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(mode=0o700)
    db = connect_store(scratch, options.connect)
    position = -1
    try:
        make_tables(db)
        db.execute("BEGIN")
        rows = Rows(db)
        for group in read_groups(generation.segments, damaged=None if left_out is None else left_out.append):
            _apply(rows, group.changes)
            if not left_out:
                position = group.number
        db.execute("COMMIT")
    except ExportError as error:
        db.close()
        raise ExportError(
            f"{error}: restore the segment, or start with `laddertron serve --skip-damaged`, which goes on without it "
            f"and logs what it left out"
        ) from error
    except BaseException:
        db.close()
        raise
    return db, position


def _check(db: sqlite3.Connection, export: Export) -> StoredGeneration | None:
    """Finds the latest generation and checks that the store may continue it; None if there is none. Raises
    ExportError."""
    position = _known_claims(db)
    if not (every := generations_in(export.folder)):
        if position:
            log.warning("%s has no export of this store: a new one is started", export.folder, extra={"event": "store"})
        return None
    generation = every[-1]
    if generation.unreadable:
        raise ExportError(f"{generation.unreadable}: restore the segment, or set another daemon.export_dir")
    if generation.owner is None:
        raise ExportError(_WITHOUT_OWNER.format(export.folder))
    if (reason := refusal(generation.owner, _meta(db, "store"), position)) is not None:
        raise ExportError(f"{export.folder}: {reason}")
    return generation


def _catch_up(
    db: sqlite3.Connection, folder: Path, export: Export, latest: StoredGeneration, options: StoreOptions
) -> None:
    """Applies the groups that only the export has: the last commit, or more if the data folder is an earlier copy.
    Raises ExportError."""
    assert latest.owner is not None
    claim, left_out, count = latest.owner.claim, list[Damage](), 0
    current, position = _meta(db, "export_claim"), _known_claims(db)[claim]
    db.execute("BEGIN IMMEDIATE")
    try:
        rows = Rows(db)
        for group in read_groups(latest.segments, position, left_out.append):
            if current == claim or not group.changes:
                _apply(rows, group.changes)
                position = group.number
            count += bool(group.changes)
        if count and current == 0:
            raise ExportError(
                f"{export.folder}: the export, at {latest.owner}, has {count} commits that the data folder lacks, and "
                f"the data folder was written without it: set another daemon.export_dir; {_REBUILD}"
            )
        if count and left_out and not options.skip_damaged:
            raise ExportError(f"{left_out[0]}: the data folder lacks commits of the export: restore the segment")
        set_meta(db, f"export:{claim}", position)
        db.execute("COMMIT")
    except BaseException:
        db.execute("ROLLBACK")
        raise
    if count and current == claim:
        _copy_uploads(export.files_folder, folder / "files", options.files)
        log.warning("%d commits were applied from %s", count, export.folder, extra={"event": "store"})
    for damage in left_out:
        log.error("%s: the segments are kept", damage, extra={"event": "store"})
    if not left_out:
        export.superseded += latest.segments


def _behind(db: sqlite3.Connection, earlier: StoredGeneration) -> bool:
    """Whether an earlier generation belongs to this store, which has all its changes."""
    assert earlier.owner is not None
    position = _known_claims(db).get(earlier.owner.claim)
    if position is None:
        return False
    left_out: list[Damage] = []
    return not any(group.changes for group in read_groups(earlier.segments, position, left_out.append)) and not left_out


def _apply(rows: Rows, changes: list[list[object]]) -> None:
    for change in changes:
        try:
            rows.apply(change)
        except ValueError as error:
            raise ExportError(f"a later version wrote the export ({error}): start that version") from error
        rows.changes.clear()


def _copy_uploads(source: Path, target: Path, files: Files) -> None:
    if not source.is_dir():
        return
    for entry in os.scandir(source):
        copy = target / entry.name
        half_made = entry.name.startswith(".") or not entry.is_file()
        if not half_made and not (copy.exists() and copy.stat().st_size == entry.stat().st_size):
            copy_file(Path(entry.path), copy, files)


def _meta(db: sqlite3.Connection, key: str) -> int:
    row = db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
    return 0 if row is None else int(row[0])


def _known_claims(db: sqlite3.Connection) -> dict[int, int]:
    """The last frame that the store has committed, by claim."""
    rows = db.execute("SELECT key, value FROM meta WHERE key LIKE 'export:%'")
    return {int(row[0].removeprefix("export:")): int(row[1]) for row in rows}
