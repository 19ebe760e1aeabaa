"""The export has one owner: another daemon is refused, at every moment; nothing that was acknowledged is lost."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import shutil
import signal
import sqlite3
import struct
import subprocess
import sys
import textwrap
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from laddertron.engine.daemon.store import records
from laddertron.engine.daemon.store.disk import DiskError
from laddertron.engine.daemon.store.open import open_store
from laddertron.engine.daemon.store.rows import FileRow
from laddertron.engine.daemon.store.store import Store, StoreFenced, StoreOptions, StoreUnavailable
from test_store import WRITER, BadFiles, batch, numbers, put, result, with_store
from waiting import HANG_S

HEAD = struct.Struct("<4sIII")


def segments(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("seg-*"))}


async def begin(store: Store) -> None:
    await store.write(lambda rows: records.add_batch(rows, batch()))


def adding(*found: int) -> Callable[[Store], Any]:
    async def work(store: Store) -> set[int]:
        for number in found:
            await put(store, result(number))
        return await numbers(store)

    return work


def test_ten_rounds_of_two_nodes_with_old_data_folders_lose_nothing(tmp_path: Path) -> None:
    """Each node begins with the folder that it has, is refused, rebuilds, and ends amid work: its folder is what a
    process that was killed left."""
    options = StoreOptions(export_dir=tmp_path / "export")
    with_store(tmp_path / "a", begin, options)
    for turn in range(10):
        folder, left = tmp_path / "ab"[turn % 2], tmp_path / "left"

        async def work(store: Store, turn: int = turn, folder: Path = folder, left: Path = left) -> set[int]:
            await put(store, result(turn))
            shutil.copytree(folder, left)
            return await numbers(store)

        if turn > 1:
            with pytest.raises(DiskError, match=r"another daemon continued it.*rebuild"):
                with_store(folder, numbers, options)
            shutil.rmtree(folder)
        assert with_store(folder, work, options) == set(range(turn + 1))
        shutil.rmtree(folder)
        left.rename(folder)


@pytest.mark.slow
def test_ten_rounds_of_two_nodes_that_are_killed_lose_nothing(tmp_path: Path, run_seed: int) -> None:
    """At random moments, at the start too."""
    rng = random.Random(run_seed)
    export, acknowledged, refused = tmp_path / "export", set[int](), 0
    for turn in range(10):
        folder = tmp_path / "ab"[turn % 2]
        for attempt in (0, 1):
            process = subprocess.Popen(
                [sys.executable, "-c", textwrap.dedent(WRITER), str(folder), str(export)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            assert process.stdout is not None
            lines = [process.stdout.readline() for _ in range(rng.randrange(1, 60))]
            process.send_signal(signal.SIGKILL)
            rest, errors = process.communicate()
            found = {int(word) for word in [*lines, *rest.splitlines()] if word.strip()}
            if found:
                break
            assert attempt == 0, errors
            assert "another daemon continued it" in errors
            refused += 1
            shutil.rmtree(folder)
        acknowledged |= found
    assert refused == 8
    assert acknowledged <= with_store(tmp_path / "c", numbers, StoreOptions(export_dir=export))


def test_another_store_is_refused_and_the_owner_goes_on(tmp_path: Path) -> None:
    options = StoreOptions(export_dir=tmp_path / "export")

    async def refuse(store: Store) -> None:
        await begin(store)
        await put(store, result(1))
        before = segments(tmp_path / "export")
        with pytest.raises(
            DiskError, match=r"belongs to store \d+, generation 1 .*the data folder to store \d+: set an"
        ):
            await open_store(tmp_path / "other", options)
        assert segments(tmp_path / "export") == before
        await put(store, result(2))

    with_store(tmp_path / "other", begin)
    with_store(tmp_path / "one", refuse, options)
    with_store(tmp_path / "one", adding(3), options)  # its own: a restart is no takeover
    shutil.rmtree(tmp_path / "one")
    (tmp_path / "other" / "store.db").unlink()  # a folder that lost another store takes none in its place
    with pytest.raises(DiskError, match="belongs to store"):
        with_store(tmp_path / "other", numbers, options)
    assert with_store(tmp_path / "one", numbers, options) == {1, 2, 3}


def test_a_node_comes_back_after_another_took_over_and_deletes_nothing(tmp_path: Path) -> None:
    options = StoreOptions(export_dir=tmp_path / "export")
    with_store(tmp_path / "a", begin, options)
    with_store(tmp_path / "a", adding(1), options)

    async def b(store: Store) -> None:
        await put(store, result(2))
        before = segments(tmp_path / "export")
        with pytest.raises(DiskError, match="another daemon continued it"):
            await open_store(tmp_path / "a", options)
        assert segments(tmp_path / "export") == before
        await put(store, result(3))  # not fenced by one that was refused

    with_store(tmp_path / "b", b, options)
    assert with_store(tmp_path / "c", numbers, options) == {1, 2, 3}


def test_a_daemon_that_slept_through_two_takeovers_is_fenced(tmp_path: Path) -> None:
    options = StoreOptions(export_dir=tmp_path / "export")

    async def sleep(store: Store) -> None:
        await begin(store)
        for name in "bc":
            other = await open_store(tmp_path / name, options)
            await put(other, result(ord(name)))
            await other.close()
        with pytest.raises(StoreFenced, match="taken over"):
            await put(store, result(1))

    with_store(tmp_path / "a", sleep, options)
    assert with_store(tmp_path / "d", numbers, options) == {ord("b"), ord("c")}


@pytest.mark.parametrize("idle", [False, True])
def test_a_takeover_in_the_middle_of_a_check_fences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, idle: bool
) -> None:
    """The claim is read before the takeover, the segments are looked at behind it: they are gone, since another daemon
    superseded them. By the next write, and by the check between writes."""
    options = StoreOptions(export_dir=tmp_path / "export")

    async def work(store: Store) -> None:
        await begin(store)
        export, other = store.export, list[Store]()
        assert export is not None
        loop, check_claim, failed = asyncio.get_running_loop(), export.check_claim, asyncio.Event()
        store.on_change = failed.set

        async def take_over() -> None:
            other.append(await open_store(tmp_path / "b", options))
            await put(other[0], result(7))

        def late(names: Any) -> None:
            check_claim(names)
            monkeypatch.setattr(export, "check_claim", check_claim)
            asyncio.run_coroutine_threadsafe(take_over(), loop).result(HANG_S)

        monkeypatch.setattr(export, "check_claim", late)
        if idle:
            await asyncio.wait_for(failed.wait(), HANG_S)
        with pytest.raises(StoreFenced, match="taken over"):
            await put(store, result(1))
        await other[0].close()

    with_store(tmp_path / "a", work, options)
    assert with_store(tmp_path / "d", numbers, options) == {7}


def test_a_daemon_that_is_overtaken_while_its_export_is_away_is_fenced(tmp_path: Path) -> None:
    """It waits as unavailable; what fences it is found by a trial, and it must not wait any longer then."""
    options = StoreOptions(export_dir=tmp_path / "export")

    async def work(store: Store) -> None:
        await begin(store)
        failed = asyncio.Event()
        store.on_change = failed.set
        move_away(tmp_path / "export")
        await asyncio.wait_for(failed.wait(), HANG_S)
        with pytest.raises(StoreUnavailable, match="was removed"):
            await put(store, result(1))
        fenced = store.fenced
        assert not fenced
        failed.clear()
        other = await open_store(tmp_path / "b", StoreOptions(export_dir=tmp_path / "away"))
        await other.close()
        put_back(tmp_path / "export")
        await asyncio.wait_for(failed.wait(), HANG_S)
        assert store.fenced
        with pytest.raises(StoreFenced, match="taken over"):
            await put(store, result(1))

    with_store(tmp_path / "a", work, options)


def test_an_earlier_copy_of_the_data_folder_catches_up(tmp_path: Path) -> None:
    """Rows and uploads; a copy that was written without the export has gone another way, and is refused."""
    options = StoreOptions(export_dir=tmp_path / "export")

    async def go_on(store: Store) -> None:
        await begin(store)
        for name in ("copy", "alone"):
            shutil.copytree(tmp_path / "a", tmp_path / name)
        store.path_of("file-2").write_bytes(b"content")
        assert store.export is not None
        store.export.keep(store.path_of("file-2"), "file-2")
        await store.write(lambda rows: records.add_file(rows, FileRow("file-2", "me", "batch", "a", 7, 1)))
        await put(store, result(1))
        await put(store, result(2))

    with_store(tmp_path / "a", go_on, options)
    with_store(tmp_path / "alone", adding(7))
    with pytest.raises(DiskError, match="has 3 commits that the data folder lacks"):
        with_store(tmp_path / "alone", numbers, options)
    assert with_store(tmp_path / "copy", numbers, options) == {1, 2}
    assert (tmp_path / "copy" / "files" / "file-2").read_bytes() == b"content"
    with pytest.raises(DiskError, match="another daemon continued it"):
        with_store(tmp_path / "a", numbers, options)


def test_a_store_that_lost_its_log_gets_it_from_the_export(tmp_path: Path) -> None:
    options = StoreOptions(export_dir=tmp_path / "export")

    async def fill(store: Store) -> None:
        await begin(store)
        shutil.copytree(tmp_path / "a", tmp_path / "b")
        await put(store, result(1))

    with_store(tmp_path / "a", fill, options)
    assert with_store(tmp_path / "b", numbers, options) == {1}


def test_after_an_end_between_export_and_commit_the_group_is_in_both(tmp_path: Path) -> None:
    """The export is a group ahead then; the next start applies it."""
    options = StoreOptions(export_dir=tmp_path / "export")

    async def fill(store: Store) -> None:
        await begin(store)
        assert store.export is not None
        row = {"batch_id": "batch_1", "custom_id": "c-9", "number": 9, "epoch": 1, "ok": 1, "line": "x\n"}
        store.export.append([["insert", "results", row]])

    with_store(tmp_path / "a", fill, options)
    assert with_store(tmp_path / "a", numbers, options) == {9}


def test_what_a_killed_start_left_half_written_goes(tmp_path: Path) -> None:
    options = StoreOptions(export_dir=tmp_path / "export")
    with_store(tmp_path / "a", begin, options)
    left, later = (tmp_path / "export" / f".seg-{n:06}-000000.ltx.1f.part" for n in (1, 9))
    for path in (left, later):
        path.write_bytes(b"x")
    with_store(tmp_path / "a", adding(1), options)
    assert not left.exists()
    assert later.exists()  # of a daemon that begins after this one


# exports of the version before


def test_an_export_without_an_owner_is_refused(tmp_path: Path) -> None:
    """By the store that may have written it and by an empty folder; and is left as it was."""
    options = StoreOptions(export_dir=tmp_path / "export")
    with_store(tmp_path / "a", begin, options)
    for path in (tmp_path / "export").glob("seg-*"):
        old, data_bytes = b"", path.read_bytes()
        while data_bytes:
            magic, length, _, group = HEAD.unpack_from(data_bytes)
            value = json.loads(data_bytes[HEAD.size : HEAD.size + length])
            payload = json.dumps({key: value[key] for key in ("changes", "undone") if key in value}).encode()
            old += HEAD.pack(magic, len(payload), zlib.crc32(payload), group) + payload
            data_bytes = data_bytes[HEAD.size + length :]
        path.write_bytes(old)
    before = {path.name: path.read_bytes() for path in (tmp_path / "export").glob("seg-*")}
    for name in ("a", "new"):
        with pytest.raises(DiskError, match=r"an earlier version wrote the export.*another daemon\.export_dir"):
            with_store(tmp_path / name, numbers, options)
    assert before == {path.name: path.read_bytes() for path in (tmp_path / "export").glob("seg-*")}


# the takeover itself, interrupted at each step


class Crash(BaseException):
    """The process ends here."""


class Steps:
    """Counts what a start writes, fsyncs, removes and says to SQLite; calls `do` before step `at`."""

    def __init__(self, at: int, do: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self._at, self._do = 0, at, do
        good, step, unlink = BadFiles(), self.step, Path.unlink

        class Connection(sqlite3.Connection):
            def execute(self, sql: str, *arguments: Any) -> sqlite3.Cursor:
                if sql.split()[0] in ("BEGIN", "COMMIT", "INSERT", "UPDATE"):
                    step()
                return super().execute(sql, *arguments)

        def removing(path: Path, missing_ok: bool = False) -> None:
            if path.suffix == ".ltx":
                step()
            unlink(path, missing_ok)

        self._good = good
        monkeypatch.setattr(Path, "unlink", removing)
        self.connect = lambda *given, **options: sqlite3.connect(*given, factory=Connection, **options)

    def step(self) -> None:
        self.count += 1
        if self.count == self._at:
            self._do()

    def write(self, descriptor: int, data: memoryview) -> int:
        self.step()
        return self._good.write(descriptor, data)

    def fsync(self, descriptor: int) -> None:
        self.step()
        self._good.fsync(descriptor)


def start(folder: Path, export: Path, steps: Steps) -> Exception | Crash | None:
    try:
        with_store(folder, numbers, StoreOptions(export, files=steps, connect=steps.connect))
    except (Crash, DiskError, OSError, StoreUnavailable) as error:
        return error.with_traceback(None)
    finally:
        gc.collect()  # connections that the crash left open
    return None


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Node a with results 1 and 2, and its export."""
    folder = tmp_path_factory.mktemp("template")
    with_store(folder / "a", begin, StoreOptions(folder / "export"))
    with_store(folder / "a", adding(1, 2), StoreOptions(folder / "export"))
    return folder


STRIDES = [13, pytest.param(1, marks=pytest.mark.slow)]
"""One step of so many is tried."""


@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize("fresh", [False, True])
def test_a_start_that_ends_at_any_step_leaves_everything(
    tmp_path: Path,
    template: Path,
    monkeypatch: pytest.MonkeyPatch,
    fresh: bool,
    stride: int,
    run_seed: int,
) -> None:
    """Its next start has all results, and so has a node that rebuilds after the crash, or after that start."""

    def crash() -> None:
        raise Crash

    first = random.Random(run_seed).randrange(stride)
    print(f"first step {first + 1}")
    at = first + 1 - stride
    while True:
        at += stride
        place = tmp_path / str(at)
        shutil.copytree(template, place)
        folder = place / ("b" if fresh else "a")
        with monkeypatch.context() as patched:
            error = start(folder, place / "export", Steps(at, crash, patched))
        if error is None:
            break
        assert isinstance(error, Crash), error
        shutil.copytree(place / "export", place / "copied")
        assert with_store(place / "c", numbers, StoreOptions(place / "copied")) == {1, 2}
        assert with_store(folder, adding(3), StoreOptions(place / "export")) == {1, 2, 3}, at
        assert with_store(folder, numbers, StoreOptions(place / "export")) == {1, 2, 3}
        assert with_store(place / "d", numbers, StoreOptions(place / "export")) == {1, 2, 3}
        shutil.rmtree(place)
    assert at > 10


@pytest.mark.parametrize("first", ["a", "new"])
@pytest.mark.parametrize("second", ["copy", "other"])
@pytest.mark.parametrize("stride", STRIDES)
def test_two_daemons_that_begin_at_once_lose_nothing(
    tmp_path: Path, template: Path, monkeypatch: pytest.MonkeyPatch, first: str, second: str, stride: int, run_seed: int
) -> None:
    """A second daemon begins, acknowledges a result and ends, before each step of the first one's start. `copy`: of the
    first one's data folder; `other`: with an empty one."""
    ends, at = set[str](), random.Random(run_seed).randrange(stride) + 1 - stride
    print(f"first step {at + stride}")
    while True:
        at += stride
        place = tmp_path / str(at)
        shutil.copytree(template, place)
        shutil.copytree(place / "a", place / "copy")
        acknowledged = {1, 2}

        def begin_too(place: Path = place, acknowledged: set[int] = acknowledged) -> None:
            def other() -> None:
                try:
                    with_store(place / second, adding(3), StoreOptions(place / "export"))
                    acknowledged.add(3)
                except (DiskError, OSError, StoreUnavailable):
                    pass  # refused, or overtaken by the first

            thread = threading.Thread(target=other)
            thread.start()
            thread.join()

        with monkeypatch.context() as patched:
            steps = Steps(at, begin_too, patched)
            options = StoreOptions(place / "export", files=steps, connect=steps.connect)
            try:
                with_store(place / first, adding(4), options)
                acknowledged.add(4)
                ends.add("begun")
            except (DiskError, OSError, StoreUnavailable) as error:
                ends.add(type(error).__name__)
        found = with_store(place / "last", numbers, StoreOptions(place / "export"))
        assert acknowledged <= found, (at, acknowledged, found)
        shutil.rmtree(place)
        if steps.count < at:
            break
    assert "begun" in ends
    assert stride > 1 or "DiskError" in ends


# the folder removed or replaced while it is open


def move_away(export: Path) -> None:
    export.rename(export.with_name("away"))


def put_back(export: Path) -> None:
    if export.exists():
        shutil.rmtree(export)
    export.with_name("away").rename(export)
