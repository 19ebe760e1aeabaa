"""Frames of an export: bounded, whole or left out, and damage that is named; and an export folder that goes away."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from daemon_tools import deployment, served
from laddertron.engine.daemon.store import frames
from laddertron.engine.daemon.store.connection import snapshot
from laddertron.engine.daemon.store.disk import DiskError
from laddertron.engine.daemon.store.rows import Result
from laddertron.engine.daemon.store.schema import Rows, make_tables
from laddertron.engine.daemon.store.store import Store, StoreOptions, StoreUnavailable
from laddertron.engine.daemon.store.sums import is_intact
from test_export import HEAD, adding, begin, move_away, put_back, segments
from test_store import BadFiles, numbers, put, result, with_store
from tiny_text import write_folder
from waiting import until


def small_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "_FRAME_BYTES", 2000)
    monkeypatch.setattr(frames, "_MAX_FRAME", 6000)


def lengths(path: Path) -> list[int]:
    found, data = [], path.read_bytes()
    while data:
        found.append(HEAD.unpack_from(data)[1])
        data = data[HEAD.size + found[-1] :]
    return found


def test_frames_are_bounded_by_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the snapshot and of a commit; a row that no frame takes is refused, and the others go on."""
    small_frames(monkeypatch)
    options = StoreOptions(export_dir=tmp_path / "export")
    many = [Result(f"c-{n}", n, True, "x" * 300 + "\n") for n in range(60)]
    huge = Result("c-huge", 99, True, "x" * 7000 + "\n")

    async def fill(store: Store) -> None:
        await begin(store)
        await put(store, *many)
        with pytest.raises(StoreUnavailable, match="exceeds the export's 6000 bytes"):
            await put(store, huge)
        await asyncio.wait_for(store.usable(), 10)
        await put(store, result(60))

    with_store(tmp_path / "a", fill, options)
    for place in ("b", "c"):  # from commits, then from a snapshot
        assert with_store(tmp_path / place, numbers, options) == set(range(61))
    sizes = [size for path in (tmp_path / "export").glob("seg-*") for size in lengths(path)]
    assert len(sizes) > 8
    assert max(sizes) <= 2000 + 200


def test_a_group_of_several_frames_is_whole_or_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut within its frames, at each of their borders; written again after a failed fsync; undone."""
    small_frames(monkeypatch)
    files = BadFiles()
    options = StoreOptions(export_dir=tmp_path / "export", files=files)
    many = [Result(f"c-{n}", n, True, "x" * 300 + "\n") for n in range(30)]

    async def fill(store: Store) -> None:
        await begin(store)
        files.fsync_error = 5
        with pytest.raises(StoreUnavailable):
            await put(store, *many[:25])
        files.fsync_error = 0
        await asyncio.wait_for(store.usable(), 10)
        await put(store, result(40))
        await put(store, *many)

    with_store(tmp_path / "a", fill, options)
    every = set(range(30)) | {40}
    shutil.copytree(tmp_path / "export", tmp_path / "whole")
    assert with_store(tmp_path / "b", numbers, StoreOptions(tmp_path / "whole")) == every
    last = max((tmp_path / "export").glob("seg-*"))
    ends = [sum(size + HEAD.size for size in lengths(last)[:n]) for n in range(1, len(lengths(last)) + 1)]
    data, found = last.read_bytes(), []
    for end in ends:
        last.write_bytes(data[: end - 1])
        shutil.copytree(tmp_path / "export", tmp_path / f"e{end}")
        found.append(with_store(tmp_path / f"d{end}", numbers, StoreOptions(tmp_path / f"e{end}")))
    assert found[-1] == {40}
    assert all(numbers in (set(), set(range(25)), {40}) for numbers in found)  # 25: a group whose fsync failed


def test_a_row_that_lost_its_checksum_stays_damaged_in_a_copy() -> None:
    """A snapshot copies the row unchanged: a rebuilt store does not sum it again."""
    stores = [sqlite3.connect(":memory:") for _ in range(2)]
    for db in stores:
        db.row_factory = sqlite3.Row
        make_tables(db)
    first, second = stores
    Rows(first).insert("suspects", {"batch_id": "b", "number": 1, "deaths": 2})
    first.execute("UPDATE suspects SET sum = NULL")
    for change in snapshot(first):
        Rows(second).apply(change)
    (copied,) = second.execute("SELECT * FROM suspects").fetchall()
    assert not is_intact(dict(copied))
    for db in stores:
        db.close()


def test_a_flipped_byte_anywhere_stops_the_rebuild_and_is_named(tmp_path: Path, run_seed: int) -> None:
    rng = random.Random(run_seed)
    with_store(tmp_path / "a", begin, StoreOptions(tmp_path / "export"))
    with_store(tmp_path / "a", adding(*range(4)), StoreOptions(tmp_path / "export"))
    (segments,) = frames.generations(tmp_path / "export").values()
    for path in segments:
        data, offset = path.read_bytes(), 0
        starts = []
        for size in lengths(path):
            starts.append(offset)
            offset += HEAD.size + size
        places = {start + n for start in starts for n in range(HEAD.size)} | set(rng.sample(range(len(data)), 60))
        for at in sorted(places):
            broken = bytearray(data)
            broken[at] ^= 1 << rng.randrange(8)
            path.write_bytes(broken)
            start = max(start for start in starts if start <= at)
            with pytest.raises(frames.ExportError, match=f"{path.name}: offset {start}: "):
                list(frames.read_groups(segments))
        path.write_bytes(data)


def test_a_rebuild_goes_on_without_damaged_frames_where_it_is_told_to(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It says what it left out and keeps the segments; the store of the export's own node is not held up by them."""
    options = StoreOptions(export_dir=tmp_path / "export")
    with_store(tmp_path / "a", begin, options)
    with_store(tmp_path / "a", adding(*range(4)), options)
    last = max((tmp_path / "export").glob("seg-*"))
    broken, second = bytearray(last.read_bytes()), lengths(last)[0] + HEAD.size
    broken[second + HEAD.size + 20] ^= 1
    last.write_bytes(broken)
    shutil.copytree(tmp_path / "export", tmp_path / "own")
    before = segments(tmp_path / "export")
    for _ in range(2):
        with pytest.raises(DiskError, match=f"{last.name}: offset {second}: .*--skip-damaged"):
            with_store(tmp_path / "b", numbers, options)
    assert segments(tmp_path / "export") == before
    skipping = StoreOptions(export_dir=tmp_path / "export", skip_damaged=True)
    assert with_store(tmp_path / "b", numbers, skipping) == {0, 2, 3}
    assert f"omitted from the rebuild: {last}: offset {second}: the checksum of group" in caplog.text
    assert before.items() <= segments(tmp_path / "export").items()
    assert with_store(tmp_path / "b", numbers, options) == {0, 2, 3}
    assert with_store(tmp_path / "a", numbers, StoreOptions(tmp_path / "own")) == {0, 1, 2, 3}


def replace_empty(export: Path) -> None:
    move_away(export)
    export.mkdir()


def replace_by_copy(export: Path) -> None:
    move_away(export)
    shutil.copytree(export.with_name("away"), export)


@pytest.mark.parametrize(
    ("lose", "idle"),
    [(move_away, True), (replace_empty, False), (replace_by_copy, True)]
    + [
        pytest.param(*how, marks=pytest.mark.slow)
        for how in [(move_away, False), (replace_empty, True), (replace_by_copy, False)]
    ],
)
def test_without_its_export_folder_nothing_is_acknowledged(
    tmp_path: Path, lose: Callable[[Path], None], idle: bool
) -> None:
    """Noticed within two seconds also where nothing is written, and by the first write; goes on once it is back."""
    options = StoreOptions(export_dir=tmp_path / "export")

    async def work(store: Store) -> None:
        await begin(store)
        await put(store, result(1))
        for round in (2, 4):
            failed = asyncio.Event()
            store.on_change = failed.set
            lose(tmp_path / "export")
            if idle:
                await asyncio.wait_for(failed.wait(), 2)
            with pytest.raises(StoreUnavailable, match=r"export_dir .* was (removed|replaced)"):
                await put(store, result(round))
            assert not store.fenced
            put_back(tmp_path / "export")
            await asyncio.wait_for(store.usable(), 10)
            await put(store, result(round + 1))

    with_store(tmp_path / "a", work, options)
    assert with_store(tmp_path / "b", numbers, options) == {1, 3, 5}


def test_ready_says_that_the_export_folder_is_gone(tmp_path: Path) -> None:
    config = deployment(tmp_path, export_dir=str(tmp_path / "export"))
    with served(config, write_folder(tmp_path / "tiny")) as daemon:

        def answer() -> tuple[int, str]:
            request = b"GET /ready HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
            head, _, body = daemon.raw(request).partition(b"\r\n\r\n")
            return int(head.split()[1]), json.loads(body).get("reason", "")

        until(lambda: answer()[0] == 200)
        move_away(tmp_path / "export")
        until(lambda: answer()[0] == 503)
        assert "export_dir" in answer()[1]
        assert "was removed" in answer()[1]
        put_back(tmp_path / "export")
        until(lambda: answer() == (200, ""))


def test_a_removed_segment_is_noticed_and_a_restart_writes_a_new_copy(tmp_path: Path) -> None:
    options = StoreOptions(export_dir=tmp_path / "export")

    async def work(store: Store) -> None:
        await begin(store)
        min((tmp_path / "export").glob("seg-*")).unlink()
        with pytest.raises(StoreUnavailable, match="files in it were removed"):
            await put(store, result(1))

    with_store(tmp_path / "a", work, options)
    shutil.rmtree(tmp_path / "export")
    with_store(tmp_path / "a", adding(2), options)
    assert with_store(tmp_path / "b", numbers, options) == {2}
