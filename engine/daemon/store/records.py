"""Queries and changes of files and batches: functions of a connection or of Rows, run by the store's threads."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from ...metrics.observer import BatchView
from ...openai.batch_input import error_line
from ...openai.errors import ApiError
from .rows import ENDED, BatchRow, FileRow, Result, Status, Tokens, new_id
from .schema import Rows

_FILE = "id, owner, purpose, filename, bytes, created_at, batch_id, expires_at, digest"
_JSON = ("errors", "metadata")
_READABLE = "typeof(line) = 'text' AND json_valid(line)"
_HAS_ENDED = f"status IN ({', '.join(repr(status) for status in sorted(ENDED))})"


def _file(row: sqlite3.Row) -> FileRow:
    return FileRow(**{name: row[name] for name in row.keys() if name != "no"})  # noqa: SIM118 (a Row iterates values)


def _batch(row: sqlite3.Row) -> BatchRow:
    values = {name: row[name] for name in row.keys() if name != "no"}  # noqa: SIM118
    for name in _JSON:
        values[name] = None if values[name] is None else json.loads(values[name])
    return BatchRow(**values)


def _columns(values: dict[str, Any]) -> dict[str, Any]:
    return {
        name: json.dumps(value, ensure_ascii=False) if name in _JSON and value is not None else value
        for name, value in values.items()
    }


# files


def add_file(rows: Rows, file: FileRow) -> None:
    rows.insert("files", asdict(file))


def get_file(db: sqlite3.Connection, file_id: str, owner: str | None = None) -> FileRow | None:
    """A file, or None if it does not exist or belongs to another owner; `owner=None`: any owner's."""
    row = db.execute(f"SELECT {_FILE} FROM files WHERE id = ?", (file_id,)).fetchone()
    return _file(row) if row is not None and owner in (None, row["owner"]) else None


def list_files(
    db: sqlite3.Connection, owner: str, limit: int, after: str | None, purpose: str | None, newest_first: bool = True
) -> list[FileRow] | None:
    """An owner's files: one more than `limit` if there are more; None if `after` is not one of the owner's."""
    where, values = "", [owner]
    if purpose is not None:
        where, values = " AND purpose = ?", [owner, purpose]
    rows = _page(db, "files", where, values, limit, after, newest_first)
    return None if rows is None else [_file(row) for row in rows]


def drop_file(rows: Rows, file: FileRow) -> str | None:
    """Deletes a file, and the results of which it was made. If a batch still needs it, deletes nothing and returns the
    id of the batch; else None."""
    query = f"SELECT id FROM batches WHERE input_file_id = ? AND NOT {_HAS_ENDED}"
    if (user := rows.db.execute(query, (file.id,)).fetchone()) is not None:
        return str(user["id"])
    rows.delete("files", {"id": file.id})
    if file.batch_id is not None:
        batch = get_batch(rows.db, file.batch_id)
        if batch is not None:
            ok = int(file.id == batch.output_file_id)
            rows.delete("results", {"batch_id": file.batch_id, "ok": ok})
            rows.update("batches", {"id": batch.id, "output_file_id" if ok else "error_file_id": None})
    return None


# batches


def add_batch(rows: Rows, batch: BatchRow, repeat_key: str | None = None, digest: str = "") -> BatchRow | None:
    """Adds a batch. Returns it, or the earlier one with the same idempotency key; None if that key was used with
    another body."""
    if repeat_key is not None:
        name = {"owner": batch.owner, "key": repeat_key}
        row = {**name, "digest": digest, "batch_id": batch.id, "created_at": batch.created_at}
        if not rows.insert("repeats", row):
            found = rows.db.execute("SELECT * FROM repeats WHERE owner = :owner AND key = :key", name).fetchone()
            return get_batch(rows.db, found["batch_id"]) if found["digest"] == digest else None
    rows.insert("batches", _columns(asdict(batch)))
    return batch


def get_batch(db: sqlite3.Connection, batch_id: str, owner: str | None = None) -> BatchRow | None:
    row = db.execute("SELECT * FROM batches WHERE id = ?", (batch_id,)).fetchone()
    return _batch(row) if row is not None and owner in (None, row["owner"]) else None


def batch_of(db: sqlite3.Connection, batch_id: str) -> BatchRow:
    """Reads a batch. Raises KeyError if it does not exist."""
    if (batch := get_batch(db, batch_id)) is None:
        raise KeyError(batch_id)
    return batch


def why_not_reuse(db: sqlite3.Connection, batch_id: str, owner: str, model: str) -> str | None:
    """The reason why a model with this digest cannot reuse a batch's answers; None if it can."""
    batch = get_batch(db, batch_id, owner)
    if batch is None or get_file(db, batch.input_file_id, owner) is None:
        return "no batch of this key with an existing input file"
    if not model or batch.model_digest != model:
        before, now = (digest or "of several models, or unknown" for digest in (batch.model_digest, model))
        return f"another model answered it (digest {before}; now {now}): submit without it"
    return None


def list_batches(db: sqlite3.Connection, owner: str, limit: int, after: str | None) -> list[BatchRow] | None:
    rows = _page(db, "batches", "", [owner], limit, after, True)
    return None if rows is None else [_batch(row) for row in rows]


def open_batches(db: sqlite3.Connection) -> list[BatchRow]:
    """The batches that have not ended, oldest first."""
    return [_batch(row) for row in db.execute(f"SELECT * FROM batches WHERE NOT {_HAS_ENDED} ORDER BY no")]


def count_batches(db: sqlite3.Connection) -> dict[str, int]:
    return {row[0]: row[1] for row in db.execute("SELECT status, count(*) FROM batches GROUP BY status")}


def batch_view(db: sqlite3.Connection) -> BatchView:
    query = f"SELECT total, completed, failed, created_at, expires_at FROM batches WHERE NOT {_HAS_ENDED}"
    rows = [tuple(row) for row in db.execute(query)]
    windows = tuple((max(0, total - completed - failed), expiry) for total, completed, failed, _, expiry in rows)
    left = sum(lines for lines, _ in windows)
    return BatchView(
        left,
        sum(row[1] for row in rows),
        sum(row[2] for row in rows),
        min((row[3] for row in rows), default=None) if left else None,
        min((row[4] for row in rows), default=None),
        windows,
    )


def change_batch(rows: Rows, batch_id: str, only_if: Sequence[Status] = (), **values: Any) -> BatchRow:
    """Changes a batch if its status is one of `only_if` (empty: any); returns the batch. Raises KeyError if it does not
    exist."""
    batch = batch_of(rows.db, batch_id)
    if only_if and batch.status not in only_if:
        return batch
    rows.update("batches", {"id": batch_id, **_columns(values)})
    return batch_of(rows.db, batch_id)


def add_results(rows: Rows, batch_id: str, results: Sequence[Result], epoch: int, day: int | None = 0) -> BatchRow:
    """Stores results of lines that have none yet, and counts them in the batch and in its owner's usage of `day` (None:
    nothing was computed). Ignores a second result of a line."""
    batch, done, tokens = batch_of(rows.db, batch_id), [0, 0], Tokens()
    for result in results:
        row = {"custom_id": result.custom_id, "number": result.number, "ok": int(result.ok), "line": result.line}
        if rows.insert("results", {"batch_id": batch_id, "epoch": epoch, **row}):
            done[int(result.ok)] += 1
            tokens = tokens.plus(result.tokens)
    if not any(done):
        return batch
    counts: dict[str, Any] = {"completed": batch.completed + done[1], "failed": batch.failed + done[0]}
    if day is not None:
        add_usage(rows, batch.owner, day, sum(done), tokens)
    used: Any = zip(("input_tokens", "cached_tokens", "output_tokens"), tokens.plus(batch.tokens), strict=True)
    return change_batch(rows, batch_id, **counts, **dict(used))


def add_usage(rows: Rows, owner: str, day: int, requests: int, tokens: Tokens) -> None:
    """Adds to an owner's usage of a day; `day`: days since 1970 (UTC)."""
    names = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens")
    query = f"SELECT {', '.join(names)} FROM usage WHERE owner = ? AND day = ?"
    found = rows.db.execute(query, (owner, day)).fetchone()
    now = map(sum, zip(found or (0, 0, 0, 0), (requests, *tokens), strict=True))
    row = {"owner": owner, "day": day, **dict(zip(names, now, strict=True))}
    (rows.insert if found is None else rows.update)("usage", row)


def read_usage(db: sqlite3.Connection, owner: str | None, since: int) -> list[dict[str, Any]]:
    """Usage by day, newest first; `owner=None`: of all owners."""
    query = "SELECT * FROM usage WHERE day >= ? AND (owner = ? OR ? IS NULL) ORDER BY day DESC, owner"
    return [dict(row) for row in db.execute(query, (since, owner, owner))]


def stored_bytes(db: sqlite3.Connection, owner: str) -> int:
    return int(db.execute("SELECT coalesce(sum(bytes), 0) FROM files WHERE owner = ?", (owner,)).fetchone()[0])


def finished_numbers(db: sqlite3.Connection, batch_id: str) -> set[int]:
    return {row[0] for row in db.execute("SELECT number FROM results WHERE batch_id = ?", (batch_id,))}


def answers_after(db: sqlite3.Connection, batch_id: str, number: int, limit: int) -> tuple[list[Result], int | None]:
    """The readable answers of up to `limit` lines after line `number`, in order and without their tokens; and the
    number of the last of these lines, None if there are no more."""
    query = f"SELECT *, {_READABLE} FROM results WHERE batch_id = ? AND ok = 1 AND number > ? ORDER BY number LIMIT ?"
    rows = db.execute(query, (batch_id, number, limit)).fetchall()
    good = [row for row in rows if _readable(row)]
    results = [Result(row["custom_id"], row["number"], True, row["line"]) for row in good]
    return results, rows[-1]["number"] if rows else None


def _readable(row: sqlite3.Row) -> bool:
    """The value of the _READABLE column, the row's last."""
    return bool(row[-1]) and isinstance(row["line"], str) and isinstance(row["custom_id"], str)


def _unreadable(batch_id: str, row: sqlite3.Row) -> Result:
    custom_id, number = row["custom_id"], int(row["number"])
    name = custom_id.decode(errors="replace") if isinstance(custom_id, bytes) else str(custom_id)
    error = ApiError(
        f"line {number}: its stored result cannot be read: send it again", "result_unreadable", status=None
    )
    return Result(name, number, False, error_line(name, f"{batch_id[-12:]}-{number}", error).decode())


def count_results(db: sqlite3.Connection, batch_id: str) -> int:
    return int(db.execute("SELECT count(*) FROM results WHERE batch_id = ?", (batch_id,)).fetchone()[0])


def unreadable_results(db: sqlite3.Connection, batch_id: str) -> list[Result]:
    """Error results that replace the unreadable results of a batch."""
    rows = db.execute(f"SELECT *, {_READABLE} FROM results WHERE batch_id = ? ORDER BY number", (batch_id,))
    return [_unreadable(batch_id, row) for row in rows if not _readable(row)]


def fail_results(rows: Rows, batch_id: str, errors: Sequence[Result], epoch: int) -> BatchRow:
    """Replaces results of lines by errors, and counts replaced answers as failed."""
    batch, answers = batch_of(rows.db, batch_id), 0
    for error in errors:
        key = {"batch_id": batch_id, "number": error.number}
        answers += rows.delete("results", {**key, "ok": 1})
        rows.delete("results", key)
        rows.insert("results", {**key, "custom_id": error.custom_id, "epoch": epoch, "ok": 0, "line": error.line})
    name = batch.error_file_id or new_id("file-")
    counts: dict[str, Any] = {"completed": batch.completed - answers, "failed": batch.failed + answers}
    return change_batch(rows, batch_id, error_file_id=name, **counts)


def result_lines(db: sqlite3.Connection, batch_id: str, ok: bool) -> Iterator[bytes]:
    """Yields lines of the output file (or the error file) in the order of the input: always the same bytes."""
    query = f"SELECT *, {_READABLE} FROM results WHERE batch_id = ? AND ok = ? ORDER BY number"
    for row in db.execute(query, (batch_id, int(ok))):
        yield (row["line"] if _readable(row) else _unreadable(batch_id, row).line).encode()


def add_deaths(rows: Rows, batch_id: str, deaths: dict[int, int]) -> None:
    """Stores how often each line was in a step in which a rank died."""
    for number, count in deaths.items():
        row = {"batch_id": batch_id, "number": number, "deaths": count}
        if not rows.insert("suspects", row):
            rows.update("suspects", row)


def read_deaths(db: sqlite3.Connection, batch_id: str) -> dict[int, int]:
    found = db.execute("SELECT number, deaths FROM suspects WHERE batch_id = ?", (batch_id,))
    return {row["number"]: row["deaths"] for row in found}


def error_codes(db: sqlite3.Connection, batch_id: str, limit: int) -> dict[str, int]:
    """Counts the error codes of a batch's first error lines, the most frequent first."""
    code = "coalesce(json_extract(line, '$.error.code'), json_extract(line, '$.response.body.error.code'))"
    where = f"batch_id = ? AND ok = 0 AND {_READABLE}"
    query = f"SELECT {code} AS code FROM results WHERE {where} ORDER BY number LIMIT ?"
    return dict(db.execute(f"SELECT code, count(*) FROM ({query}) GROUP BY code ORDER BY 2 DESC, 1", (batch_id, limit)))


def old_batches(db: sqlite3.Connection, before: int) -> list[BatchRow]:
    query = f"SELECT * FROM batches WHERE created_at < ? AND {_HAS_ENDED} ORDER BY no LIMIT 100"
    return [_batch(row) for row in db.execute(query, (before,))]


def old_files(db: sqlite3.Connection, before: int, now: int) -> list[FileRow]:
    """Uploads from before `before` and expired files, without those that an open batch needs."""
    query = (
        f"SELECT {_FILE} FROM files WHERE (created_at < ? AND batch_id IS NULL OR expires_at <= ?) AND id NOT IN "
        f"(SELECT input_file_id FROM batches WHERE NOT {_HAS_ENDED}) ORDER BY no LIMIT 100"
    )
    return [_file(row) for row in db.execute(query, (before, now))]


def drop_batch(rows: Rows, batch: BatchRow) -> list[str]:
    """Deletes a batch, its results and its files' rows; returns the names of the files to remove."""
    gone = [name for name in (batch.output_file_id, batch.error_file_id) if name is not None]
    for name in gone:
        rows.delete("files", {"id": name})
    for table in ("results", "suspects", "repeats"):
        rows.delete(table, {"batch_id": batch.id})
    rows.delete("batches", {"id": batch.id})
    return gone


def _page(
    db: sqlite3.Connection, table: str, where: str, values: list[Any], limit: int, after: str | None, newest: bool
) -> list[sqlite3.Row] | None:
    if after is not None:
        last = db.execute(f"SELECT no, owner FROM {table} WHERE id = ?", (after,)).fetchone()
        if last is None or last["owner"] != values[0]:
            return None
        where, values = f"{where} AND no {'<' if newest else '>'} ?", [*values, last["no"]]
    order = "DESC" if newest else "ASC"
    query = f"SELECT * FROM {table} WHERE owner = ?{where} ORDER BY no {order} LIMIT ?"
    return db.execute(query, (*values, limit + 1)).fetchall()
