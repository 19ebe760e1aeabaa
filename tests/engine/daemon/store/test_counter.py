"""The store's log removed, cut or damaged: noticed while it is open, refused at the start; a good store never is."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from laddertron.engine.daemon.store import counter, records
from laddertron.engine.daemon.store import store as store_module
from laddertron.engine.daemon.store.counter import interrupted, read_count
from laddertron.engine.daemon.store.disk import DiskError
from laddertron.engine.daemon.store.store import Store, StoreFenced, StoreOptions, StoreUnavailable
from test_store import WRITER, BadFiles, batch, numbers, put, result, with_store
from waiting import HANG_S


def crash_after(folder: Path, count: int, *export: Path) -> set[int]:
    """A writer is killed with -9 once it printed `count` numbers; what it printed."""
    command = [sys.executable, "-c", textwrap.dedent(WRITER), str(folder), *map(str, export)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    found = {int(process.stdout.readline()) for _ in range(count)}
    process.send_signal(signal.SIGKILL)
    return found | {int(word) for word in process.communicate()[0].splitlines() if word}


def remove(log: Path) -> None:
    log.unlink()


def cut(log: Path) -> None:
    os.truncate(log, log.stat().st_size // 2)


def flip(log: Path) -> None:
    data = bytearray(log.read_bytes())
    data[len(data) // 2] ^= 1
    log.write_bytes(data)


def flip_first(log: Path) -> None:
    """In its first page: nothing of it is read."""
    with log.open("r+b") as file:
        file.seek(100)
        byte = file.read(1)[0]
        file.seek(100)
        file.write(bytes([byte ^ 1]))


def empty(log: Path) -> None:
    os.truncate(log, 0)


@pytest.mark.parametrize("damage", [remove, cut, flip])
def test_a_damaged_log_is_refused_untouched_and_the_export_has_the_rest(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    data, export = tmp_path / "data", tmp_path / "export"
    printed = crash_after(data, 120, export)
    log = data / "store.db-wal"
    good = log.read_bytes()
    assert len(good) < 1000 * 4120, "a checkpoint may have copied what the test damages"
    damage(log)
    damaged = log.read_bytes() if log.exists() else b""
    options = StoreOptions(export_dir=export)
    for _ in range(2):
        with pytest.raises(DiskError, match=r"acknowledged commits.*rebuild the store from the export.*--adopt"):
            with_store(data, numbers, options)
        assert log.read_bytes() == damaged
    # each way out that the message names
    adopted = shutil.copytree(data, tmp_path / "adopted")
    assert with_store(adopted, numbers, StoreOptions(adopt=True)) < printed
    restored = shutil.copytree(data, tmp_path / "restored")
    (restored / "store.db-wal").write_bytes(good)
    assert with_store(restored, numbers) >= printed
    (data / "store.db").rename(tmp_path / "store.db.lost")
    assert with_store(data, numbers, options) >= printed
    assert with_store(data, numbers, options) >= printed


COPIER = """
    import resource, signal, sqlite3, sys
    from pathlib import Path
    from laddertron.engine.daemon.store.counter import copy_log
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    folder, limit = Path(sys.argv[1]), int(sys.argv[2])
    db = sqlite3.connect(folder / "store.db")
    db.execute("SELECT count(*) FROM results").fetchone()
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    copy_log(db, folder)
"""


def test_a_store_that_was_killed_while_its_log_was_copied_needs_the_log(tmp_path: Path) -> None:
    """The kernel kills the copier at the first page beyond the limit: the pages before are written, the one with the
    count among them, and no new page of results."""
    options = StoreOptions(export_dir=tmp_path / "export")
    data = tmp_path / "data"
    printed = crash_after(data, 390, tmp_path / "export")
    with_store(data, numbers, options)
    printed |= crash_after(data, 1, tmp_path / "export")
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(COPIER), data, str(12 * 4096)], check=False)
    assert done.returncode == -signal.SIGXFSZ
    for damage in (remove, empty, flip_first):
        broken = shutil.copytree(data, tmp_path / damage.__name__)
        damage(broken / "store.db-wal")
        with pytest.raises(DiskError, match=r"killed while store.db-wal was copied.*rebuild the store from the export"):
            with_store(broken, numbers, options)
    with_store(tmp_path / "other", numbers, StoreOptions(export_dir=tmp_path / "others"))
    with pytest.raises(DiskError, match="the export belongs to store"):  # refused, yet SQLite copied the log at the end
        with_store(data, numbers, StoreOptions(export_dir=tmp_path / "others"))
    assert with_store(data, numbers) >= printed
    (broken / "store.db").rename(tmp_path / "store.db.lost")
    assert with_store(broken, numbers, options) >= printed


def test_a_store_whose_log_could_not_be_copied_at_once_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy fails behind its mark; closing the last connection makes up for it."""
    data, real = tmp_path / "data", counter.copy_log

    def fails(db: sqlite3.Connection, folder: Path) -> None:
        db.close()
        real(db, folder)

    async def work(store: Store) -> None:
        await store.write(lambda rows: records.add_batch(rows, batch()))
        await put(store, result(1))
        monkeypatch.setattr(store_module, "copy_log", fails)

    with_store(data, work)
    assert not interrupted(data)
    monkeypatch.undo()
    assert with_store(data, numbers) == {1}


def replace(log: Path) -> None:
    log.rename(log.with_suffix(".old"))
    log.touch()


@pytest.mark.parametrize("name", ["store.db-wal", "store.count"])
@pytest.mark.parametrize("damage", [remove, replace, empty])
def test_a_log_that_is_taken_away_under_the_store_stops_it(
    tmp_path: Path, damage: Callable[[Path], None], name: str
) -> None:
    if (damage, name) == (empty, "store.count"):
        pytest.skip("its next commit writes it again")
    data = tmp_path / "data"

    async def work(store: Store) -> None:
        await store.write(lambda rows: records.add_batch(rows, batch()))
        await put(store, result(1))
        assert store.check_there()
        damage(data / name)
        assert not store.check_there()
        assert name in str(store.failure)
        with pytest.raises((StoreFenced, StoreUnavailable), match=name):
            await put(store, result(2))

    with_store(data, work)
    if name == "store.db-wal" and damage is remove:  # the open connections had the log still, and stored it at the end
        assert with_store(data, numbers) >= {1}


def test_a_log_that_was_emptied_and_written_again_is_noticed(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        await store.write(lambda rows: records.add_batch(rows, batch()))
        await put(store, result(1))
        os.truncate(store.folder / "store.db-wal", 0)
        with pytest.raises(StoreFenced, match="was cut"):
            await put(store, result(2))

    with_store(tmp_path / "data", work)


def test_the_log_stays_the_same_file_through_checkpoints_and_new_connections(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        await store.write(lambda rows: records.add_batch(rows, batch()))
        for n in range(1200):  # several checkpoints
            await put(store, result(n))
        store.connect().close()
        for mode in ("PASSIVE", "FULL", "RESTART"):
            await store.write(lambda rows: rows.db.execute("SELECT 1").fetchall())
            other = sqlite3.connect(store.folder / "store.db")
            other.execute(f"PRAGMA wal_checkpoint({mode})").fetchall()
            await put(store, result(5000))
        assert store.check_there()

    with_store(tmp_path / "data", work)


def test_a_good_store_is_never_refused(tmp_path: Path, run_seed: int) -> None:
    """Kills at random moments, clean stops, checkpoints and copies between them."""
    rng = random.Random(run_seed)
    data, printed = tmp_path / "data", set[int]()
    for turn in range(12):
        printed |= crash_after(data, rng.choice((1, 8, 60, 400)))
        match rng.randrange(4):
            case 0:
                with_store(data, numbers)
            case 1 if not interrupted(data):
                other = sqlite3.connect(data / "store.db")
                other.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
                other.close()
            case 2:
                copy = shutil.copytree(data, tmp_path / f"copy-{turn}")
                shutil.rmtree(data)
                data = copy
    assert with_store(data, numbers) >= printed


def test_a_folder_without_the_counter(tmp_path: Path) -> None:
    """Is refused until it is adopted."""
    data = tmp_path / "data"

    async def fill(store: Store) -> None:
        await store.write(lambda rows: records.add_batch(rows, batch()))
        await put(store, result(1))

    with_store(data, fill)
    assert read_count(data) == 2
    (data / "store.count").unlink()
    with pytest.raises(DiskError, match=r"store.count is missing, .*counted 2 commits.*--adopt"):
        with_store(data, numbers)
    assert with_store(data, numbers, StoreOptions(adopt=True)) == {1}


def test_an_older_copy_of_the_store_is_refused_until_it_is_adopted(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with_store(data, lambda store: store.write(lambda rows: records.add_batch(rows, batch())))
    shutil.copy(data / "store.db", tmp_path / "older.db")
    with_store(data, lambda store: put(store, result(1)))
    shutil.copy(tmp_path / "older.db", data / "store.db")
    with pytest.raises(DiskError, match="1 of 2 acknowledged commits"):
        with_store(data, numbers)
    assert with_store(data, numbers, StoreOptions(adopt=True)) == set()
    assert with_store(data, numbers) == set()


@pytest.mark.parametrize("slot", [0, 1])
def test_a_torn_slot_of_the_counter_leaves_the_other(tmp_path: Path, slot: int) -> None:
    data = tmp_path / "data"
    with_store(data, lambda store: store.write(lambda rows: records.add_batch(rows, batch())))
    path = data / "store.count"
    whole = path.read_bytes()
    path.write_bytes(whole[: slot * 512] + b"\xff" * 8 + whole[slot * 512 + 8 :])
    assert with_store(data, numbers) == set()
    path.write_bytes(b"\xff" * len(whole))
    with pytest.raises(DiskError, match=r"store\.count is damaged"):
        with_store(data, numbers)


def test_what_cannot_be_counted_is_acknowledged_when_it_can(tmp_path: Path) -> None:
    files = BadFiles()

    async def work(store: Store) -> Any:
        await store.write(lambda rows: records.add_batch(rows, batch()))
        unwritable = asyncio.Event()
        store.on_change = lambda: unwritable.set() if store.failure else None
        files.write_error = errno.EIO
        waiting = asyncio.ensure_future(put(store, result(1)))
        await asyncio.wait_for(unwritable.wait(), HANG_S)
        assert "store.count" in str(store.failure)
        assert not waiting.done()
        files.write_error = 0
        row = await asyncio.wait_for(waiting, HANG_S)
        return row.completed

    assert with_store(tmp_path / "data", work, StoreOptions(files=files)) == 1
    assert with_store(tmp_path / "data", numbers) == {1}
