"""The store: what was acknowledged is there, once, whatever died; what could not be written was not acknowledged."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import random
import signal
import sqlite3
import subprocess
import sys
import textwrap
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from laddertron.engine.daemon.store import records
from laddertron.engine.daemon.store.check import check_store
from laddertron.engine.daemon.store.disk import DiskError, Files, NewFile, check_type, mount_of
from laddertron.engine.daemon.store.frames import ExportError, generations, read_groups
from laddertron.engine.daemon.store.open import open_store
from laddertron.engine.daemon.store.rows import BatchRow, FileRow, Result
from laddertron.engine.daemon.store.schema import Rows, SchemaVersionError
from laddertron.engine.daemon.store.store import Store, StoreFenced, StoreOptions, StoreUnavailable
from waiting import HANG_S, until


def batch(name: str = "batch_1", owner: str = "me") -> BatchRow:
    return BatchRow(name, owner, "/v1/completions", "file-1", "24h", "in_progress", 1, 2, metadata={"a": "b"})


def result(number: int, ok: bool = True) -> Result:
    return Result(f"c-{number}", number, ok, f'{{"n": {number}}}\n')


def with_store(
    folder: Path, work: Callable[[Store], Coroutine[Any, Any, Any]], options: StoreOptions | None = None
) -> Any:
    async def go() -> Any:
        store = await open_store(folder, options or StoreOptions())
        try:
            return await work(store)
        finally:
            await store.close()

    return asyncio.run(go())


async def put(store: Store, *results: Result, name: str = "batch_1") -> BatchRow:
    return await store.write(lambda rows: records.add_results(rows, name, results, store.generation))


async def numbers(store: Store, name: str = "batch_1") -> set[int]:
    return await store.read(lambda db: records.finished_numbers(db, name))


def test_a_line_has_one_result_however_often_it_is_stored(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        await store.write(lambda rows: records.add_batch(rows, batch()))
        await asyncio.gather(*(put(store, result(n), result(n + 1, False)) for n in range(0, 400, 2)))
        again = await put(store, Result("c-0", 0, False, "another\n"))
        assert (again.completed, again.failed) == (200, 200)
        lines = await store.read(lambda db: list(records.result_lines(db, "batch_1", True)))
        assert lines == [b'{"n": %d}\n' % n for n in range(0, 400, 2)]

    with_store(tmp_path / "data", work)


def test_what_raises_undoes_itself_alone(tmp_path: Path) -> None:
    """Three works in one group: the one that fails leaves nothing, its neighbours stay."""

    def bad(rows: Rows) -> None:
        records.add_results(rows, "batch_1", [result(2)], 1)
        raise LookupError("mine alone")

    async def work(store: Store) -> None:
        await store.write(lambda rows: records.add_batch(rows, batch()))
        done = await asyncio.gather(
            put(store, result(1)), store.write(bad), put(store, result(3)), return_exceptions=True
        )
        assert isinstance(done[1], LookupError)
        assert await numbers(store) == {1, 3}

    with_store(tmp_path / "data", work)


def test_memory_does_not_grow_with_what_is_stored(tmp_path: Path) -> None:
    """SQLite keeps pages of what was written, on each connection, for as long as its cache has room."""
    rows = Path("/proc/self/maps").read_text().splitlines()
    found = next((row.split()[-1] for row in rows if "libsqlite3" in row), None)
    if found is None:
        pytest.skip("SQLite is part of Python's own library here: nothing to ask")
    sqlite = ctypes.CDLL(found)
    sqlite.sqlite3_memory_used.restype = ctypes.c_int64

    async def work(store: Store) -> None:
        await store.write(lambda rows: records.add_batch(rows, batch()))
        for first in range(0, 12_000, 500):
            await put(store, *(Result(f"c-{n}", n, True, "x" * 1000) for n in range(first, first + 500)))
            await asyncio.gather(*(numbers(store) for _ in range(8)))
        assert (store.folder / "store.db").stat().st_size > 12 << 20
        # the writer's cache, and of what readers have the newest transaction's alone
        assert sqlite.sqlite3_memory_used() < 6 << 20

    with_store(tmp_path / "data", work)


def test_one_daemon_at_a_time_and_the_refusal_names_the_holder(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        with pytest.raises(DiskError, match=f"used by process {os.getpid()} on"):
            await open_store(tmp_path / "data", StoreOptions())

    with_store(tmp_path / "data", work)
    with_store(tmp_path / "data", numbers)  # let go of when closed


MOUNTS = """\
22 1 8:1 / / rw - ext4 /dev/sda1 rw
30 22 0:40 / /home rw - nfs4 server:/home rw
31 22 0:41 / /scratch rw - lustre mds@tcp:/fs rw
32 31 8:2 / /scratch/local rw - xfs /dev/sdb rw
33 22 0:42 / /mnt/with\\040space rw - fuse.sshfs host:/ rw
"""


@pytest.mark.parametrize(
    ("folder", "kind"), [("/home/a", "nfs4"), ("/scratch/x", "lustre"), ("/mnt/with space/d", "fuse.sshfs")]
)
def test_network_file_systems_are_refused_with_the_mend(folder: str, kind: str) -> None:
    with pytest.raises(DiskError, match=rf"{kind} .*export_dir"):
        check_type(Path(folder), MOUNTS)


def test_local_disks_are_taken() -> None:
    for folder in ("/var/lib", "/scratch/local/data"):
        check_type(Path(folder), MOUNTS)
    assert mount_of(Path("/homework"), MOUNTS) == ("/", "ext4", "/dev/sda1")


@pytest.mark.parametrize(
    "change", ["PRAGMA user_version = 6", "PRAGMA user_version = 9", "UPDATE batches SET sum = NULL"]
)
def test_a_store_of_another_version_is_refused_and_left_as_it_was(tmp_path: Path, change: str) -> None:
    """A daemon of the version that made it goes on."""
    folder = tmp_path / "data"
    with_store(folder, lambda store: store.write(lambda rows: records.add_batch(rows, batch())))
    with_store(folder, lambda store: put(store, result(1)))
    db = sqlite3.connect(folder / "store.db")
    with db:
        db.execute(change)
    before = list(db.iterdump())
    with pytest.raises(DiskError, match=r"this version reads schema 8.*empty daemon\.data_dir"):
        with_store(folder, numbers)
    with pytest.raises(SchemaVersionError, match="start the version that made it"):
        check_store(folder)
    assert list(db.iterdump()) == before
    db.close()


def test_a_damaged_database_is_refused(tmp_path: Path) -> None:
    async def fill(store: Store) -> None:
        await store.write(lambda rows: records.add_batch(rows, batch()))
        await put(store, *(result(n) for n in range(2000)))

    with_store(tmp_path / "data", fill)
    path = tmp_path / "data" / "store.db"
    data = bytearray(path.read_bytes())
    for at in range(8192, len(data), 4096):
        data[at : at + 64] = os.urandom(64)
    path.write_bytes(data)
    with pytest.raises(DiskError):
        with_store(tmp_path / "data", fill)


WRITER = """
    import asyncio, sys
    from pathlib import Path
    from laddertron.engine.daemon.store import records
    from laddertron.engine.daemon.store.rows import BatchRow, Result
    from laddertron.engine.daemon.store.store import StoreOptions
    from laddertron.engine.daemon.store.open import open_store

    async def main():
        export = Path(sys.argv[2]) if len(sys.argv) > 2 else None
        store = await open_store(Path(sys.argv[1]), StoreOptions(export_dir=export))
        row = BatchRow("batch_1", "me", "/v1/completions", "f", "24h", "in_progress", 1, 2)
        await store.write(lambda rows: records.add_batch(rows, row))
        done = await store.read(lambda db: records.finished_numbers(db, "batch_1"))
        async def one(n):
            await store.write(lambda rows: records.add_results(rows, "batch_1", [Result(f"c-{n}", n, True, "x\\n")], 1))
            print(n, flush=True)
        n = max(done, default=-1) + 1
        while True:
            await asyncio.gather(*(one(n + i) for i in range(8)))
            n += 8

    asyncio.run(main())
"""


@pytest.mark.parametrize("exported", [False, True])
def test_kill_9_loses_nothing_that_was_acknowledged(tmp_path: Path, exported: bool, run_seed: int) -> None:
    """A writer is killed at random moments and started again: every number it printed is in the store, and the count
    of the batch agrees with its rows. With an export: the same holds for a store rebuilt from it elsewhere."""
    rng = random.Random(run_seed)
    folders = [str(tmp_path / "data"), *([str(tmp_path / "export")] if exported else [])]
    acknowledged: set[int] = set()
    for _ in range(3):
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(WRITER), *folders], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        for _ in range(rng.randrange(8, 200)):
            acknowledged.add(int(process.stdout.readline()))
        process.send_signal(signal.SIGKILL)
        rest = process.communicate()[0].splitlines()
        acknowledged |= {int(word) for word in rest if word}

    async def work(store: Store) -> tuple[set[int], BatchRow | None]:
        return await numbers(store), await store.read(lambda db: records.get_batch(db, "batch_1"))

    options = StoreOptions(export_dir=tmp_path / "export" if exported else None)
    places = [tmp_path / "data"] if not exported else [tmp_path / "elsewhere"]
    for place in places:
        stored, row = with_store(place, work, options)
        assert acknowledged <= stored
        assert row is not None
        assert row.completed == len(stored)


class Failing(sqlite3.Connection):
    """Whose commits fail while `broken` is set."""

    broken = ""

    def execute(self, sql: str, *arguments: Any) -> sqlite3.Cursor:
        if sql == "COMMIT" and Failing.broken:
            super().execute("ROLLBACK")
            error = sqlite3.OperationalError(Failing.broken)
            if "full" in Failing.broken:
                error.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise error
        return super().execute(sql, *arguments)


def failing(*arguments: Any, **options: Any) -> sqlite3.Connection:
    return sqlite3.connect(*arguments, factory=Failing, **options)


def test_while_no_connection_can_be_made_the_failure_says_so(tmp_path: Path) -> None:
    """A failed commit, then trials that cannot open the file: the reason is the disk's, and writes come back."""
    refused = 0

    def connect(*arguments: Any, **options: Any) -> sqlite3.Connection:
        nonlocal refused
        if Failing.broken:
            refused += 1
            raise sqlite3.OperationalError("unable to open database file")
        return failing(*arguments, **options)

    async def work(store: Store) -> None:
        await store.write(lambda rows: records.add_batch(rows, batch()))
        seen: list[str | None] = []
        store.on_change = lambda: seen.append(store.failure)
        Failing.broken = "database or disk is full"
        try:
            with pytest.raises(StoreUnavailable, match="full"):
                await put(store, result(1))
            await asyncio.to_thread(until, lambda: refused > 1)
        finally:
            Failing.broken = ""
        await asyncio.wait_for(store.usable(), HANG_S)
        await put(store, result(2))
        assert await numbers(store) == {2}
        full, unable, well = seen
        assert "full" in str(full)
        assert "unable to open database file" in str(unable)
        assert well is None

    with_store(tmp_path / "data", work, StoreOptions(connect=connect))


class BadFiles(Files):
    """Whose fsync and write fail while an error number is set."""

    fsync_error = write_error = 0

    def fsync(self, descriptor: int, /) -> None:
        if self.fsync_error:
            raise OSError(self.fsync_error, os.strerror(self.fsync_error))
        os.fsync(descriptor)

    def write(self, descriptor: int, data: memoryview, /) -> int:
        if self.write_error:
            os.write(descriptor, data[: len(data) // 2])
            raise OSError(self.write_error, os.strerror(self.write_error))
        return os.write(descriptor, data)


@pytest.mark.parametrize("why", ["database or disk is full", "disk I/O error"])
def test_a_failing_disk_acknowledges_nothing_and_writes_come_back(tmp_path: Path, why: str) -> None:
    async def work(store: Store) -> None:
        await store.write(lambda rows: records.add_batch(rows, batch()))
        seen: list[str | None] = []
        store.on_change = lambda: seen.append(store.failure)
        Failing.broken = why
        try:
            with pytest.raises(StoreUnavailable, match=why):
                await put(store, result(1))
            with pytest.raises(StoreUnavailable):
                await put(store, result(2))  # refused at once
            assert await numbers(store) == set()  # reading goes on
        finally:
            Failing.broken = ""
        await asyncio.wait_for(store.usable(), HANG_S)
        await put(store, result(3))
        assert await numbers(store) == {3}
        assert len(seen) == 2
        assert why in str(seen[0])
        assert seen[1] is None

    with_store(tmp_path / "data", work, StoreOptions(connect=failing))


def test_a_full_disk_for_real(tmp_path: Path) -> None:
    """SQLite itself runs out of pages: the group is undone, and goes in once there is room."""
    pages: dict[str, int] = {"most": 1 << 30}

    class Small(sqlite3.Connection):
        def execute(self, sql: str, *arguments: Any) -> sqlite3.Cursor:
            if sql.startswith("BEGIN"):
                super().execute(f"PRAGMA max_page_count = {pages['most']}")
            return super().execute(sql, *arguments)

    async def work(store: Store) -> None:
        await store.write(lambda rows: records.add_batch(rows, batch()))
        pages["most"] = 1  # no more than there are
        with pytest.raises(StoreUnavailable, match="full"):
            await put(store, *(Result(f"c-{n}", n, True, "x" * 5000) for n in range(100)))
        pages["most"] = 1 << 30
        await asyncio.wait_for(store.usable(), HANG_S)
        assert await numbers(store) == set()
        await put(store, *(Result(f"c-{n}", n, True, "x" * 5000) for n in range(100)))
        assert len(await numbers(store)) == 100

    with_store(tmp_path / "data", work, StoreOptions(connect=lambda *a, **k: sqlite3.connect(*a, factory=Small, **k)))


def test_a_daemon_that_was_overtaken_writes_nothing_more(tmp_path: Path) -> None:
    """The lock is lost sight of (a container's copy of the folder): the next generation fences the first one off."""

    async def work(store: Store) -> None:
        await store.write(lambda rows: records.add_batch(rows, batch()))
        db = sqlite3.connect(tmp_path / "data" / "store.db")
        with db:
            db.execute("UPDATE meta SET value = value + 1 WHERE key = 'generation'")
        db.close()
        with pytest.raises(StoreFenced, match="another daemon"):
            await put(store, result(1))
        assert store.fenced

    with_store(tmp_path / "data", work)


def _lines(db: sqlite3.Connection, ok: bool) -> list[bytes]:
    return list(records.result_lines(db, "batch_1", ok))


def test_a_fresh_node_rebuilds_the_store_from_the_export(tmp_path: Path) -> None:
    """Rows of every table, an upload's bytes, an update and a deletion: all of it is there again."""
    options = StoreOptions(export_dir=tmp_path / "export")

    async def fill(store: Store) -> None:
        path = store.path_of("file-1")
        path.write_bytes(b"content\n")
        assert store.export is not None
        store.export.keep(path, "file-1")
        await store.write(lambda rows: records.add_file(rows, FileRow("file-1", "me", "batch", "a.jsonl", 8, 1)))
        await store.write(lambda rows: records.add_batch(rows, batch(), "key", "digest"))
        await store.write(lambda rows: records.add_batch(rows, batch("batch_2")))
        await put(store, *(result(n, n % 3 > 0) for n in range(50)))
        await store.write(lambda rows: records.add_deaths(rows, "batch_1", {7: 1}))
        await store.write(lambda rows: records.drop_batch(rows, batch("batch_2")))

    async def look(store: Store) -> Any:
        row = await store.read(lambda db: records.get_batch(db, "batch_1"))
        lines = [await store.read(partial(_lines, ok=ok)) for ok in (True, False)]
        deaths = await store.read(lambda db: records.read_deaths(db, "batch_1"))
        two = await store.read(lambda db: records.get_batch(db, "batch_2"))
        return row, lines, deaths, two, store.path_of("file-1").read_bytes()

    with_store(tmp_path / "one", fill, options)
    first = with_store(tmp_path / "two", look, options)
    assert first == with_store(tmp_path / "one", look)
    assert first[0] is not None
    assert (first[0].completed, first[0].failed, first[2], first[3]) == (33, 17, {7: 1}, None)


def test_the_node_that_was_left_behind_is_fenced_off(tmp_path: Path) -> None:
    options = StoreOptions(export_dir=tmp_path / "export")

    async def work(store: Store) -> None:
        await store.write(lambda rows: records.add_batch(rows, batch()))
        other = await open_store(tmp_path / "two", options)
        await put(other, result(1))
        await other.close()
        with pytest.raises(StoreFenced):
            await put(store, result(2))

    with_store(tmp_path / "one", work, options)


def test_an_export_that_fails_acknowledges_nothing(tmp_path: Path) -> None:
    """Half a frame and an I/O error, then a working disk again: the rebuilt store has what was acknowledged, no
    more."""
    files = BadFiles()
    options = StoreOptions(export_dir=tmp_path / "export", files=files)

    async def work(store: Store) -> None:
        await store.write(lambda rows: records.add_batch(rows, batch()))
        await put(store, result(1))
        for kind, number in (("write_error", errno.ENOSPC), ("fsync_error", errno.EIO)):
            setattr(files, kind, number)
            with pytest.raises(StoreUnavailable):
                await put(store, result(100))
            setattr(files, kind, 0)
            await asyncio.wait_for(store.usable(), HANG_S)
        await put(store, result(2))

    with_store(tmp_path / "one", work, options)
    assert with_store(tmp_path / "two", numbers, StoreOptions(export_dir=tmp_path / "export")) == {1, 2}


def test_a_group_that_was_exported_and_not_committed_is_undone(tmp_path: Path) -> None:
    options = StoreOptions(export_dir=tmp_path / "export", connect=failing)

    async def work(store: Store) -> None:
        await store.write(lambda rows: records.add_batch(rows, batch()))
        Failing.broken = "disk I/O error"
        try:
            with pytest.raises(StoreUnavailable):
                await put(store, result(1))
        finally:
            Failing.broken = ""
        await asyncio.wait_for(store.usable(), HANG_S)
        await put(store, result(2))

    with_store(tmp_path / "one", work, options)
    assert with_store(tmp_path / "two", numbers, StoreOptions(export_dir=tmp_path / "export")) == {2}


def test_a_torn_end_is_left_out_and_damage_in_the_middle_is_an_error(tmp_path: Path) -> None:
    options = StoreOptions(export_dir=tmp_path / "export")

    async def work(store: Store) -> None:
        await store.write(lambda rows: records.add_batch(rows, batch()))
        for n in range(5):
            await put(store, result(n))
        assert store.export is not None
        store.export.close()  # the next group begins another segment
        await put(store, result(5))

    with_store(tmp_path / "one", work, options)
    segments = next(iter(generations(tmp_path / "export").values()))
    last, middle = segments[-1], segments[-2]
    data = last.read_bytes()
    last.write_bytes(data[:-3])
    changes = [change for group in read_groups(segments) for change in group.changes]
    found = [change[2]["number"] for change in changes if change[1] == "results"]
    assert found == [0, 1, 2, 3, 4]
    last.write_bytes(data)
    broken = bytearray(middle.read_bytes())
    broken[-10] ^= 1
    middle.write_bytes(broken)
    with pytest.raises(ExportError, match="damaged"):
        list(read_groups(segments))


def _make(path: Path, files: Files) -> None:
    with NewFile(path, files) as file:
        file.write(b"half of it")
        file.commit()


@pytest.mark.parametrize("kind", ["write_error", "fsync_error"])
def test_a_file_is_whole_or_not_there(tmp_path: Path, kind: str) -> None:
    files = BadFiles()
    path = tmp_path / "out"
    setattr(files, kind, errno.ENOSPC)
    with pytest.raises(OSError, match="No space"):
        _make(path, files)
    assert list(tmp_path.iterdir()) == []
    setattr(files, kind, 0)
    with NewFile(path, files) as file:
        file.write(b"all of it")
        assert not path.exists()
        file.commit()
    assert path.read_bytes() == b"all of it"


def test_what_an_earlier_daemon_left_half_made_is_cleared(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        await store.write(lambda rows: records.add_file(rows, FileRow("file-1", "me", "batch", "a", 1, 1)))

    with_store(tmp_path / "data", work)
    files = tmp_path / "data" / "files"
    for name in ("file-1", ".file-2.part"):
        (files / name).write_bytes(b"x")

    async def look(store: Store) -> list[str]:
        return sorted(path.name for path in store.files_folder.iterdir())

    assert with_store(tmp_path / "data", look) == ["file-1"]
    assert not (tmp_path / "data" / "unknown").exists()
