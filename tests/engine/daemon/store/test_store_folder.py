"""A store and its folder belong together: an emptied, foreign or removed one is noticed, and no file is ever lost."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from pathlib import Path

import pytest
from daemon_tools import Served, deployment
from laddertron.engine.daemon.store import records
from laddertron.engine.daemon.store.disk import DiskError, prepare_folder
from laddertron.engine.daemon.store.rows import FileRow
from laddertron.engine.daemon.store.store import Store, StoreFenced, StoreOptions, StoreUnavailable
from test_store import with_store
from tiny_text import write_folder


async def upload(store: Store, name: str = "file-1") -> None:
    store.path_of(name).write_bytes(b"content")
    await store.write(lambda rows: records.add_file(rows, FileRow(name, "me", "batch", "a", 7, 1)))


async def known(store: Store) -> list[str]:
    found = await store.read(lambda db: records.list_files(db, "me", 100, None, None))
    return [file.id for file in found or []]


def remove_store(folder: Path) -> None:
    for name in ("store.db", "store.db-wal", "store.db-shm"):
        (folder / name).unlink(missing_ok=True)


def truncate_store(folder: Path) -> None:
    remove_store(folder)
    (folder / "store.db").touch()


@pytest.mark.parametrize("place", ["os.write", "laddertron.engine.daemon.store.disk.sync_folder"])
def test_a_start_on_a_full_disk_says_to_free_space(tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And lets go of the lock."""
    with monkeypatch.context() as during:

        def fail(*_: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        during.setattr(place, fail)
        with pytest.raises(DiskError, match=rf"{tmp_path}.*No space left on device.*: free space"):
            prepare_folder(tmp_path)
    prepare_folder(tmp_path).release()


@pytest.mark.parametrize("empty", [remove_store, truncate_store])
@pytest.mark.parametrize("files", [True, False])
def test_an_emptied_store_is_refused_and_its_files_stay(tmp_path: Path, empty: object, files: bool) -> None:
    """Also where every file was deleted: the folder knows that it had a store."""
    data = tmp_path / "data"

    async def nothing(store: Store) -> None:
        pass

    with_store(data, upload if files else nothing)
    assert callable(empty)
    empty(data)
    for _ in range(2):
        with pytest.raises(DiskError, match=r"missing or empty.*restore store.db.*export_dir.*--adopt"):
            with_store(data, known)
    assert (data / "files" / "file-1").exists() == files


def test_adopting_moves_unknown_files_aside_and_names_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = tmp_path / "data"
    with_store(data, upload)
    for _ in range(2):
        truncate_store(data)
        with caplog.at_level(logging.WARNING):
            assert with_store(data, known, StoreOptions(adopt=True)) == []
        (data / "files" / "file-1").write_bytes(b"another")
        assert "the store knows no file file-1" in caplog.text
    assert (data / "unknown" / "file-1").read_bytes() == b"content"
    assert (data / "unknown" / "file-1.again").read_bytes() == b"another"
    assert with_store(data, known) == []


def test_a_store_of_another_folder_is_refused_until_adopted(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    with_store(one, upload)
    with_store(two, lambda store: upload(store, "file-2"))
    shutil.copy(two / "store.db", one / "store.db")
    with pytest.raises(DiskError, match="the folder belongs to store"):
        with_store(one, known)
    assert (one / "files" / "file-1").exists()
    assert with_store(one, known, StoreOptions(adopt=True)) == ["file-2"]
    assert (one / "unknown" / "file-1").exists()
    assert with_store(one, known) == ["file-2"]


def test_a_folder_of_an_earlier_version_is_taken_as_it_is(tmp_path: Path) -> None:
    """It has neither the number in its store nor the file beside it."""
    data = tmp_path / "data"

    async def forget(store: Store) -> None:
        await upload(store)
        await store.write(lambda rows: rows.db.execute("DELETE FROM meta WHERE key = 'store'"))

    with_store(data, forget)
    (data / "store.id").unlink()
    assert with_store(data, known) == ["file-1"]
    assert (data / "store.id").exists()


def test_an_emptied_store_is_rebuilt_where_there_is_an_export(tmp_path: Path) -> None:
    data, options = tmp_path / "data", StoreOptions(export_dir=tmp_path / "export")
    with_store(data, upload, options)
    truncate_store(data)
    assert with_store(data, known, options) == ["file-1"]
    assert with_store(data, known) == ["file-1"]


@pytest.mark.parametrize("gone", ["", "store.db", "files"])
def test_nothing_is_acknowledged_once_the_folder_is_gone(tmp_path: Path, gone: str) -> None:
    """The connection is still open, and SQLite would go on writing into a file without a name."""
    data = tmp_path / "data"

    async def work(store: Store) -> None:
        await upload(store)
        place = data / gone
        (shutil.rmtree if place.is_dir() else Path.unlink)(place)
        with pytest.raises(StoreFenced, match="removed or replaced"):
            await store.write(lambda rows: records.add_file(rows, FileRow("file-2", "me", "batch", "a", 7, 1)))
        assert store.fenced
        place.mkdir(parents=True, exist_ok=True) if gone != "store.db" else place.touch()
        with pytest.raises(StoreUnavailable):
            await store.write(lambda rows: records.add_file(rows, FileRow("file-3", "me", "batch", "a", 7, 1)))

    with_store(data, work)


def test_a_daemon_whose_folder_was_removed_ends_with_1(tmp_path: Path) -> None:
    """Idle, with nothing to write: it finds out by itself."""
    daemon = Served(deployment(tmp_path), write_folder(tmp_path / "tiny"))
    (tmp_path / "data").rename(tmp_path / "gone")  # at once: it lets go of its files as soon as it sees that
    shutil.rmtree(tmp_path / "gone", ignore_errors=True)
    assert daemon.join() == 1
