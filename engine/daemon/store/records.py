"""Queries and changes of files and batches: functions of a connection or of Rows, run by the store's threads."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from ...metrics.observer import BatchView
from ...openai.batch_input import error_line
from ...openai.errors import ApiError
from ...openai.schema import COMPLETIONS, GENERATING
from .rows import ENDED, BatchRow, FileRow, Result, Status, Tokens, new_id
from .schema import KEYS, Rows
from .sums import Damaged, is_intact

T = TypeVar("T")
_JSON = ("errors", "metadata")
_HAS_ENDED = f"status IN ({', '.join(repr(status) for status in sorted(ENDED))})"


def values_of(table: str, row: sqlite3.Row, unchecked: bool = False) -> dict[str, Any]:
    """A complete row's values, without its running number and checksum. Raises Damaged, unless `unchecked`."""
    values = dict(row)
    if not unchecked and not is_intact(values):
        raise Damaged("row", f"{name_of(table, values)} does not match its checksum")
    return {name: value for name, value in values.items() if name not in ("no", "sum")}


def name_of(table: str, values: Mapping[str, Any]) -> str:
    """A row by its key, for messages."""
    return f"row {' '.join(str(values[name])[:80] for name in KEYS[table])!r} of table {table}"


def _file(row: sqlite3.Row, unchecked: bool = False) -> FileRow:
    return FileRow(**values_of("files", row, unchecked))


def _batch(row: sqlite3.Row, unchecked: bool = False) -> BatchRow:
    values = values_of("batches", row, unchecked)
    for name in _JSON:
        values[name] = None if values[name] is None or unchecked else json.loads(values[name])
    return BatchRow(**values)


def _columns(values: dict[str, Any]) -> dict[str, Any]:
    return {
        name: json.dumps(value, ensure_ascii=False) if name in _JSON and value is not None else value
        for name, value in values.items()
    }


# files


def add_file(rows: Rows, file: FileRow, sums: str | None = None) -> None:
    """Stores a file, or the new size of one that was generated again. `sums`: of its blocks (sums.py)."""
    if not rows.insert("files", asdict(file)):
        rows.update("files", {"id": file.id, "bytes": file.bytes})
    rows.delete("blocks", {"file_id": file.id})
    if sums is not None:
        rows.insert("blocks", {"file_id": file.id, "sums": sums})


def get_file(db: sqlite3.Connection, file_id: str, owner: str | None = None, unchecked: bool = False) -> FileRow | None:
    """A file, or None if it does not exist or belongs to another owner; `owner=None`: any owner's. Raises Damaged,
    unless `unchecked`."""
    row = db.execute("SELECT * FROM files WHERE id = ?", (file_id,)).fetchone()
    return _file(row, unchecked) if row is not None and owner in (None, row["owner"]) else None


def block_sums(db: sqlite3.Connection, file_id: str) -> str:
    """The checksums of a file's blocks. Raises Damaged."""
    row = db.execute("SELECT * FROM blocks WHERE file_id = ?", (file_id,)).fetchone()
    if row is None:
        raise Damaged("row", f"the checksums of {file_id} are missing")
    return str(values_of("blocks", row)["sums"])


def all_files(db: sqlite3.Connection, owner: str | None = None, damaged: list[Damaged] | None = None) -> list[FileRow]:
    """All files, or an owner's. Damaged rows: see `_intact`."""
    query = "SELECT * FROM files WHERE owner = ? OR ? IS NULL ORDER BY no"
    return _intact(db.execute(query, (owner, owner)), _file, damaged)


def list_files(
    db: sqlite3.Connection,
    owner: str | None,
    limit: int,
    after: str | None,
    purpose: str | None,
    newest_first: bool = True,
    damaged: list[Damaged] | None = None,
) -> list[FileRow] | None:
    """An owner's files (None: all owners'): one more than `limit` if there are more; None if `after` is not one of
    them. Damaged rows: see `_intact`."""
    where, values = ("", []) if purpose is None else (" AND purpose = ?", [purpose])
    rows = _page(db, "files", owner, where, values, after, newest_first)
    return None if rows is None else _intact(rows, _file, damaged, limit + 1)


def drop_file(rows: Rows, file: FileRow) -> str | None:
    """Deletes a file, and the results of which it was made. If a batch still needs it, deletes nothing and returns the
    id of the batch; else None."""
    query = f"SELECT id FROM batches WHERE input_file_id = ? AND NOT {_HAS_ENDED}"
    if (user := rows.db.execute(query, (file.id,)).fetchone()) is not None:
        return str(user["id"])
    _forget(rows, file.id)
    if file.batch_id is not None:
        batch = get_batch(rows.db, file.batch_id, unchecked=True)
        if batch is not None and file.id in (batch.output_file_id, batch.error_file_id):  # else its row is damaged
            ok = int(file.id == batch.output_file_id)
            rows.delete("results", {"batch_id": file.batch_id, "ok": ok})
            rows.update("batches", {"id": batch.id, "output_file_id" if ok else "error_file_id": None})
    return None


def _forget(rows: Rows, file_id: str) -> None:
    rows.delete("files", {"id": file_id})
    rows.delete("blocks", {"file_id": file_id})


# batches


def add_batch(rows: Rows, batch: BatchRow, repeat_key: str | None = None, digest: str = "") -> BatchRow | None:
    """Adds a batch. Returns it, or the earlier one with the same idempotency key; None if that key was used with
    another body."""
    if repeat_key is not None:
        name = {"owner": batch.owner, "key": repeat_key}
        row = {**name, "digest": digest, "batch_id": batch.id, "created_at": batch.created_at}
        if not rows.insert("repeats", row):
            repeat = rows.db.execute("SELECT * FROM repeats WHERE owner = :owner AND key = :key", name).fetchone()
            earlier = values_of("repeats", repeat)
            return get_batch(rows.db, earlier["batch_id"]) if earlier["digest"] == digest else None
    rows.insert("batches", _columns(asdict(batch)))
    return batch


def get_batch(
    db: sqlite3.Connection, batch_id: str, owner: str | None = None, unchecked: bool = False
) -> BatchRow | None:
    """A batch, or None; see get_file."""
    row = db.execute("SELECT * FROM batches WHERE id = ?", (batch_id,)).fetchone()
    return _batch(row, unchecked) if row is not None and owner in (None, row["owner"]) else None


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


def list_batches(
    db: sqlite3.Connection,
    owner: str | None,
    limit: int,
    after: str | None,
    damaged: list[Damaged] | None = None,
) -> list[BatchRow] | None:
    """An owner's batches; see `list_files`."""
    rows = _page(db, "batches", owner, "", [], after, True)
    return None if rows is None else _intact(rows, _batch, damaged, limit + 1)


def open_batches(db: sqlite3.Connection) -> list[BatchRow]:
    """The batches that have not ended, oldest first; not all values of those whose rows are damaged are right."""
    rows = db.execute(f"SELECT * FROM batches WHERE NOT {_HAS_ENDED} ORDER BY no")
    return [_batch(row, unchecked=not is_intact(dict(row))) for row in rows]


def _intact(
    rows: Iterable[sqlite3.Row],
    make: Callable[[sqlite3.Row], T],
    damaged: list[Damaged] | None,
    limit: int | None = None,
) -> list[T]:
    """What `make` makes of the rows, at most `limit`. Adds what it raises of damaged rows to `damaged`; without that,
    raises it."""
    good = list[T]()
    for row in rows:
        if len(good) == limit:
            break
        try:
            good.append(make(row))
        except Damaged as error:
            if damaged is None:
                raise
            damaged.append(error)
    return good


def count_batches(db: sqlite3.Connection) -> dict[str, int]:
    return {row[0]: row[1] for row in db.execute("SELECT status, count(*) FROM batches GROUP BY status")}


def batch_view(db: sqlite3.Connection) -> BatchView:
    """The progress of the open batches whose rows are intact."""
    batches = _intact(db.execute(f"SELECT * FROM batches WHERE NOT {_HAS_ENDED}"), _batch, [])
    rows = [(batch.total, batch.completed, batch.failed, batch.created_at, batch.expires_at) for batch in batches]
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


def restore_batch(rows: Rows, batch: BatchRow) -> BatchRow:
    """Writes an open batch's row again if it is damaged: its results and files are read again, the rest is taken from
    `batch`. Returns the stored row. Raises KeyError if it does not exist."""
    row = rows.db.execute("SELECT * FROM batches WHERE id = ?", (batch.id,)).fetchone()
    if row is None:
        raise KeyError(batch.id)
    if is_intact(dict(row)):
        return _batch(row)
    answers, errors = count_results(rows.db, batch.id)
    source = get_file(rows.db, batch.input_file_id, unchecked=True)
    file_ids = dict(rows.db.execute("SELECT filename, id FROM files WHERE batch_id = ?", (batch.id,)).fetchall())
    values: dict[str, Any] = asdict(batch)
    text = {name: str(value, errors="replace") for name, value in values.items() if isinstance(value, bytes)}
    readable = BatchRow(**{**values, **text})
    restored = replace(
        readable,
        owner=readable.owner if source is None else source.owner,
        endpoint=batch.endpoint if batch.endpoint in GENERATING else COMPLETIONS,
        status="in_progress",
        output_file_id=file_ids.get(f"{batch.id}_output.jsonl"),
        error_file_id=file_ids.get(f"{batch.id}_error.jsonl"),
        total=answers + errors,
        completed=answers,
        failed=errors,
        reuse_batch_id=None,
        model_digest=None,
    )
    rows.delete("batches", {"id": batch.id})
    rows.insert("batches", _columns(asdict(restored)))
    return restored


def add_results(rows: Rows, batch_id: str, results: Sequence[Result], epoch: int, day: int | None = 0) -> BatchRow:
    """Stores results of lines that have none yet, and counts them in the batch and in its owner's usage of `day` (None:
    nothing was computed). Ignores a second result of a line. A damaged result is replaced; the tokens of an answer are
    counted already."""
    batch, done, tokens, replaced = batch_of(rows.db, batch_id), [0, 0], Tokens(), False
    for result in results:
        line = {"custom_id": result.custom_id, "number": result.number, "ok": int(result.ok), "line": result.line}
        row = {"batch_id": batch_id, "epoch": epoch, **line}
        if rows.insert("results", row):
            done[int(result.ok)] += 1
            tokens = tokens.plus(result.tokens)
        elif (dropped := _drop_damaged(rows, batch_id, result)) and rows.insert("results", row):
            replaced = True
            if not any(answer["ok"] for answer in dropped):
                tokens = tokens.plus(result.tokens)
    if not replaced and not any(done):
        return batch
    counts: dict[str, Any] = {"completed": batch.completed + done[1], "failed": batch.failed + done[0]}
    if replaced:
        counts = _counts(rows.db, batch)
    if day is not None and any(done):
        add_usage(rows, batch.owner, day, sum(done), tokens)
    used: Any = zip(("input_tokens", "cached_tokens", "output_tokens"), tokens.plus(batch.tokens), strict=True)
    return change_batch(rows, batch_id, **counts, **dict(used))


def _counts(db: sqlite3.Connection, batch: BatchRow) -> dict[str, Any]:
    """Counts the results of a batch; lines without one were in the file that was deleted."""
    completed, failed = count_results(db, batch.id)
    gone = max(0, batch.completed + batch.failed - completed - failed)
    if batch.output_file_id is None:
        return {"completed": completed + gone, "failed": failed}
    return {"completed": completed, "failed": failed + gone}


def _drop_damaged(rows: Rows, batch_id: str, result: Result) -> list[sqlite3.Row]:
    """Deletes damaged rows that have the key of a result; returns them."""
    query = "SELECT * FROM results WHERE batch_id = ? AND (custom_id = ? OR number = ?)"
    bad = [row for row in rows.db.execute(query, (batch_id, result.custom_id, result.number)) if not _readable(row)]
    for row in bad:
        rows.delete("results", {"batch_id": batch_id, "number": row["number"]})
    return bad


def add_usage(rows: Rows, owner: str, day: int, requests: int, tokens: Tokens) -> None:
    """Adds to an owner's usage of a day; `day`: days since 1970 (UTC)."""
    names = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens")
    stored = rows.db.execute("SELECT * FROM usage WHERE owner = ? AND day = ?", (owner, day)).fetchone()
    before = [0 if stored is None or type(stored[name]) is not int else stored[name] for name in names]
    now = map(sum, zip(before, (requests, *tokens), strict=True))
    row = {"owner": owner, "day": day, **dict(zip(names, now, strict=True))}
    (rows.insert if stored is None else rows.update)("usage", row)


def read_usage(
    db: sqlite3.Connection, owner: str | None, since: int, damaged: list[Damaged] | None = None
) -> list[dict[str, Any]]:
    """Usage by day, newest first; `owner=None`: of all owners. Damaged rows: see `_intact`."""
    query = "SELECT * FROM usage WHERE day >= ? AND (owner = ? OR ? IS NULL) ORDER BY day DESC, owner"
    return _intact(db.execute(query, (since, owner, owner)), partial(values_of, "usage"), damaged)


def stored_bytes(db: sqlite3.Connection, owner: str) -> int:
    return int(db.execute("SELECT coalesce(sum(bytes), 0) FROM files WHERE owner = ?", (owner,)).fetchone()[0])


def finished_numbers(db: sqlite3.Connection, batch_id: str, damaged: list[int] | None = None) -> set[int]:
    """Numbers of the lines that have a result. Lines whose result is damaged are not among them, but added to
    `damaged`."""
    numbers, bad = set[int](), [] if damaged is None else damaged
    for row in _results(db, batch_id):
        numbers.add(row["number"]) if _readable(row) else bad.append(row["number"])
    return numbers


def _results(db: sqlite3.Connection, batch_id: str, where: str = "", *values: int) -> Iterator[sqlite3.Row]:
    cursor = db.cursor()
    cursor.row_factory = sqlite3.Row
    return cursor.execute(f"SELECT * FROM results WHERE batch_id = ?{where} ORDER BY number", (batch_id, *values))


def answers_after(db: sqlite3.Connection, batch_id: str, number: int, limit: int) -> tuple[list[Result], int | None]:
    """The readable answers of up to `limit` lines after line `number`, in order and without their tokens; and the
    number of the last of these lines, None if there are no more."""
    rows = list(islice(_results(db, batch_id, " AND ok = 1 AND number > ?", number), limit))
    good = [row for row in rows if _readable(row)]
    results = [Result(row["custom_id"], row["number"], True, row["line"]) for row in good]
    return results, rows[-1]["number"] if rows else None


def _readable(row: sqlite3.Row) -> bool:
    """Whether a result is intact."""
    return isinstance(row["line"], str) and isinstance(row["custom_id"], str) and is_intact(dict(row))


def _unreadable(batch_id: str, row: sqlite3.Row) -> Result:
    custom_id, number = row["custom_id"], int(row["number"])
    name = custom_id.decode(errors="replace") if isinstance(custom_id, bytes) else str(custom_id)
    error = ApiError(f"line {number}: its stored result is damaged: send it again", "result_unreadable", status=None)
    return Result(name, number, False, error_line(name, f"{batch_id[-12:]}-{number}", error).decode())


def count_results(db: sqlite3.Connection, batch_id: str) -> tuple[int, int]:
    """The number of a batch's answers, and of its errors."""
    query = "SELECT count(CASE WHEN ok = 1 THEN 1 END), count(*) FROM results WHERE batch_id = ?"
    answers, results = db.execute(query, (batch_id,)).fetchone()
    return answers, results - answers


def unreadable_results(db: sqlite3.Connection, batch_id: str) -> list[Result]:
    """Error results that replace the unreadable results of a batch."""
    return [_unreadable(batch_id, row) for row in _results(db, batch_id) if not _readable(row)]


def fail_results(rows: Rows, batch_id: str, errors: Sequence[Result], epoch: int) -> BatchRow:
    """Replaces results of lines by errors, and counts replaced answers as failed."""
    batch = batch_of(rows.db, batch_id)
    for error in errors:
        key = {"batch_id": batch_id, "number": error.number}
        rows.delete("results", key)
        rows.insert("results", {**key, "custom_id": error.custom_id, "epoch": epoch, "ok": 0, "line": error.line})
    return change_batch(rows, batch_id, **_counts(rows.db, batch))


def file_names(batch: BatchRow, answers: int, errors: int) -> dict[str, str | None]:
    """The batch's columns that name its files: a file that has lines and no name yet gets one."""
    return {
        "output_file_id": batch.output_file_id or (new_id("file-") if answers else None),
        "error_file_id": batch.error_file_id or (new_id("file-") if errors else None),
    }


def result_lines(db: sqlite3.Connection, batch_id: str, ok: bool) -> Iterator[bytes]:
    """Yields lines of the output file (or the error file) in the order of the input: always the same bytes."""
    for row in _results(db, batch_id, " AND ok = ?", int(ok)):
        yield (row["line"] if _readable(row) else _unreadable(batch_id, row).line).encode()


def add_deaths(rows: Rows, batch_id: str, deaths: dict[int, int]) -> None:
    """Stores how often each line was in a step in which a rank died."""
    for number, count in deaths.items():
        row = {"batch_id": batch_id, "number": number, "deaths": count}
        if not rows.insert("suspects", row):
            rows.update("suspects", row)


def read_deaths(db: sqlite3.Connection, batch_id: str) -> dict[int, int]:
    """Failures by line. A damaged row counts none."""
    suspects = db.execute("SELECT * FROM suspects WHERE batch_id = ?", (batch_id,))
    return {row["number"]: row["deaths"] for row in suspects if is_intact(dict(row))}


def error_codes(db: sqlite3.Connection, batch_id: str, limit: int) -> dict[str, int]:
    """Counts the error codes of a batch's first error lines, the most frequent first."""
    rows = islice(_results(db, batch_id, " AND ok = 0"), limit)
    codes = Counter(_code_of(json.loads(row["line"])) for row in rows if _readable(row))
    return dict(sorted(codes.items(), key=lambda pair: (-pair[1], str(pair[0]))))


def count_codes(db: sqlite3.Connection, batch_id: str, codes: Sequence[str]) -> int:
    """The number of a batch's error lines with one of these codes."""
    query = (
        f"SELECT count(*) FROM results WHERE batch_id = ? AND ok = 0 AND CASE WHEN json_valid(line) THEN "
        f"json_extract(line, '$.error.code') END IN ({', '.join('?' * len(codes))})"
    )
    return int(db.execute(query, (batch_id, *codes)).fetchone()[0])


def _code_of(line: dict[str, Any]) -> Any:
    error = line.get("error") or ((line.get("response") or {}).get("body") or {}).get("error") or {}
    return error.get("code")


def old_batches(db: sqlite3.Connection, before: int) -> list[BatchRow]:
    """Up to 100 batches from before `before`; damaged rows may be of another time, and are not among them."""
    query = f"SELECT * FROM batches WHERE created_at < ? AND {_HAS_ENDED} ORDER BY no"
    return _intact(db.execute(query, (before,)), _batch, [], 100)


def old_files(db: sqlite3.Connection, before: int, now: int) -> list[FileRow]:
    """Up to 100 uploads from before `before` and expired files, without those that an open batch needs."""
    query = (
        "SELECT * FROM files WHERE (created_at < ? AND batch_id IS NULL OR expires_at <= ?) AND id NOT IN "
        f"(SELECT input_file_id FROM batches WHERE NOT {_HAS_ENDED}) ORDER BY no"
    )
    return _intact(db.execute(query, (before, now)), _file, [], 100)


def drop_batch(rows: Rows, batch: BatchRow) -> list[str]:
    """Deletes a batch, its results and its files' rows; returns the names of the files to remove."""
    gone = [name for name in (batch.output_file_id, batch.error_file_id) if name is not None]
    for name in gone:
        _forget(rows, name)
    for table in ("results", "suspects", "repeats"):
        rows.delete(table, {"batch_id": batch.id})
    rows.delete("batches", {"id": batch.id})
    return gone


def orphans(db: sqlite3.Connection, valid: Collection[str]) -> dict[str, list[str]]:
    """The ids of files, batches and stored responses whose owner is none of `valid`, by table."""
    return {
        table: [row["id"] for row in db.execute(f"SELECT id, owner FROM {table}") if row["owner"] not in valid]
        for table in ("files", "batches", "responses")
    }


def adopt(rows: Rows, valid: Collection[str], owner: str) -> dict[str, int]:
    """Gives what `orphans` finds to an owner; returns their number by table."""
    ids = orphans(rows.db, valid)
    for table, names in ids.items():
        for name in names:
            rows.update(table, {"id": name, "owner": owner})
    return {table: len(names) for table, names in ids.items()}


def _page(
    db: sqlite3.Connection,
    table: str,
    owner: str | None,
    where: str,
    values: list[Any],
    after: str | None,
    newest: bool,
) -> sqlite3.Cursor | None:
    if after is not None:
        last = db.execute(f"SELECT no, owner FROM {table} WHERE id = ?", (after,)).fetchone()
        if last is None or owner not in (None, last["owner"]):
            return None
        where, values = f"{where} AND no {'<' if newest else '>'} ?", [*values, last["no"]]
    order = "DESC" if newest else "ASC"
    of, whose = ("TRUE", ()) if owner is None else ("owner = ?", (owner,))
    return db.execute(f"SELECT * FROM {table} WHERE {of}{where} ORDER BY no {order}", (*whose, *values))
