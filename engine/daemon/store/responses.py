"""Queries and changes of stored responses: functions of a connection or of Rows, run by the store's threads."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterable
from dataclasses import asdict

from .records import stored_bytes, values_of
from .rows import ResponseRow
from .schema import Rows

_TOUCH_SECONDS = 60


def add_response(rows: Rows, row: ResponseRow) -> None:
    """Stores a response, and keeps those that it needs as long as it; a second one with its id is ignored."""
    if not rows.insert("responses", asdict(row)):
        return
    with contextlib.suppress(KeyError):  # deleted while the answer was computed
        for name, expires_at in needed(rows.db, row.owner, row.previous, row.of_items.split()).items():
            if expires_at < row.expires_at - _TOUCH_SECONDS:
                rows.update("responses", {"id": name, "expires_at": row.expires_at})


def get_response(
    db: sqlite3.Connection, response_id: str, owner: str | None = None, unchecked: bool = False
) -> ResponseRow | None:
    """A response, or None; see records.get_file. Raises Damaged, unless `unchecked`."""
    row = db.execute("SELECT * FROM responses WHERE id = ?", (response_id,)).fetchone()
    if row is None or owner not in (None, row["owner"]):
        return None
    return ResponseRow(**values_of("responses", row, unchecked))


def needed(db: sqlite3.Connection, owner: str, last: str | None, of_items: Iterable[str]) -> dict[str, int]:
    """The ids and expiry of a response, of those that it continues, and of those to whose items these or a body refer,
    as far as they are stored. Raises KeyError if one that is continued is not."""
    query = "SELECT previous, of_items, expires_at FROM responses WHERE id = ? AND owner = ?"
    names, referenced = dict[str, int](), dict.fromkeys(of_items)
    while last is not None and last not in names:
        if (row := db.execute(query, (last, owner)).fetchone()) is None:
            raise KeyError(last)
        names[last] = row["expires_at"]
        referenced |= dict.fromkeys(row["of_items"].split())
        last = row["previous"]
    for name in referenced.keys() - names.keys():
        if (row := db.execute(query, (name, owner)).fetchone()) is not None:
            names[name] = row["expires_at"]
    return names


def response_bytes(db: sqlite3.Connection) -> dict[str, int]:
    """The bytes of the stored responses of each owner."""
    return dict(db.execute("SELECT owner, sum(bytes) FROM responses GROUP BY owner").fetchall())


def expired_responses(db: sqlite3.Connection, now: int) -> list[str]:
    """Up to 100 ids."""
    query = "SELECT id FROM responses WHERE expires_at <= ? LIMIT 100"
    return [row["id"] for row in db.execute(query, (now,))]


def drop_responses(rows: Rows, names: Iterable[str]) -> int:
    return sum(rows.delete("responses", {"id": name}) for name in names)


def make_room(rows: Rows, most: int, owner: str, owner_most: int | None) -> int:
    """Deletes responses until all have at most `most` bytes, and those of `owner` what its files leave of `owner_most`:
    of the owner with the most, those that were not used for the longest time, but not its last one. Returns their
    number."""
    sizes, count = response_bytes(rows.db), 0
    if owner_most is not None:
        allowed = max(0, owner_most - stored_bytes(rows.db, owner))
        count += _drop_oldest(rows, owner, sizes, sizes.get(owner, 0) - allowed)
    while (over := sum(sizes.values()) - most) > 0:
        largest = max(sizes, key=sizes.__getitem__)
        dropped = _drop_oldest(rows, largest, sizes, min(over, max(1, sizes[largest] // 8)))
        if not dropped:
            break
        count += dropped
    return count


def _drop_oldest(rows: Rows, owner: str, sizes: dict[str, int], over: int) -> int:
    query = "SELECT id, bytes FROM responses WHERE owner = ? ORDER BY expires_at, no"
    oldest, names = rows.db.execute(query, (owner,)), list[str]()
    for row in oldest:
        if over <= 0 or row["bytes"] >= sizes[owner]:
            break
        names.append(row["id"])
        over, sizes[owner] = over - row["bytes"], sizes[owner] - row["bytes"]
    return drop_responses(rows, names)
