"""The bytes of unfinished uploads count: against their key's limit, and against the disk, until they end in any way."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from daemon_tools import Served, deployment, line, served, submit, wait_batch
from laddertron.engine.config.schema import LimitsConfig
from laddertron.engine.daemon.http import reservations
from laddertron.engine.daemon.http.reservations import Reservations
from laddertron.engine.daemon.keys import KeyLimits, add_key, limit_key
from laddertron.engine.daemon.store.disk import NewFile
from laddertron.engine.daemon.store.open import open_store
from laddertron.engine.daemon.store.store import StoreOptions
from laddertron.engine.daemon.usage import Usage
from laddertron.engine.metrics.observer import Observer
from laddertron.engine.openai.errors import ApiError
from openai import InternalServerError, RateLimitError
from tiny_text import write_folder
from waiting import FOR_EVER_S, HANG_S, until

PATIENT = replace(LimitsConfig(), header_timeout=FOR_EVER_S, body_timeout=FOR_EVER_S)
PART = 600_000
MOST = 2_000_000
BYTES = (b"x" * 99 + b"\n") * 40_000
FORM = (
    b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'
)
END = b"\r\n--b--\r\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("tiny"))


def head(key: str, length: int | None) -> bytes:
    how = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
    kind = "content-type: multipart/form-data; boundary=b"
    return (
        f"POST /v1/files HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\n{kind}\r\n{how}\r\n\r\n".encode()
    )


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def begun(key: str, declared: bool, size: int = PART) -> bytes:
    """The beginning of an upload: as many bytes of its file, which goes on after them."""
    data = FORM + BYTES[:size]
    return head(key, len(data) + 1000) + data if declared else head(key, None) + chunk(data)


@contextlib.contextmanager
def held_open(port: int, data: bytes, count: int) -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as stack:
        made = []
        for _ in range(count):
            made.append(stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=HANG_S)))
            with contextlib.suppress(ConnectionError):
                made[-1].sendall(data)
        yield made


def statuses(made: list[socket.socket]) -> list[int]:
    """Of the answers that have come; 0 where the connection was closed while its client sent."""
    found = []
    for one in made:
        one.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            try:
                answer = one.recv(1 << 16, socket.MSG_PEEK)
            except ConnectionError:
                answer = b""
            found.append(int(answer.split(b" ", 2)[1]) if answer else 0)
    return found


def on_disk(files: Path) -> int:
    return sum(path.stat().st_size for path in files.iterdir())


def upload(daemon: Served, key: str, size: int) -> Any:
    return daemon.client(key).files.create(file=("a.jsonl", BYTES[:size]), purpose="batch")


def released(daemon: Served) -> Callable[[], bool]:
    uploads = daemon.daemon.services.uploads
    return lambda: not uploads.in_flight and not uploads.unwritten


@pytest.mark.parametrize("declared", [True, False])
def test_a_keys_unfinished_uploads_count_against_its_limit(folder: Path, tmp_path: Path, declared: bool) -> None:
    """Ten, of which the limit fits three; another key uploads and computes; once they are gone their key may again."""
    keys, files = tmp_path / "keys.json", tmp_path / "data" / "files"
    alice, bob = (add_key(keys, name)[1] for name in ("alice", "bob"))
    limit_key(keys, "alice", {"stored_bytes": MOST})
    with served(deployment(tmp_path, PATIENT, api_key_file=str(keys)), folder, keys=keys) as daemon:
        with held_open(daemon.port, begun(alice, declared), 10) as made:
            until(lambda: len(statuses(made)) == 7)
            assert set(statuses(made)) <= {429, 0}
            uploads = daemon.daemon.services.uploads
            until(lambda: uploads.in_flight.total() >= 3 * PART)
            assert uploads.in_flight.total() <= MOST
            assert on_disk(files) <= MOST
            with pytest.raises(RateLimitError, match="more are being uploaded"):
                upload(daemon, alice, PART)
            assert wait_batch(daemon.client(bob), submit(daemon.client(bob), line("a")).id).status == "completed"
        until(released(daemon))
        assert upload(daemon, alice, MOST - 10_000).bytes == MOST - 10_000


@pytest.mark.parametrize("declared", [True, False])
def test_unfinished_uploads_leave_the_disk_its_free_bytes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, declared: bool
) -> None:
    """Of a disk with 4 MB above min_free_disk one key's many uploads take half: another key uploads and computes."""
    keys, files = tmp_path / "keys.json", tmp_path / "data" / "files"
    alice, bob = (add_key(keys, name)[1] for name in ("alice", "bob"))
    config = deployment(tmp_path, PATIENT, api_key_file=str(keys))
    least = 1_000_000
    limits = replace(config.daemon.limits, min_free_disk=least)
    config = replace(config, daemon=replace(config.daemon, limits=limits))
    monkeypatch.setattr(reservations, "free_bytes", lambda folder: least + 4_000_000 - on_disk(files))
    with served(config, folder, keys=keys) as daemon:
        with held_open(daemon.port, begun(alice, declared), 20) as made:
            until(lambda: len(statuses(made)) + len(daemon.daemon.services.uploads.in_flight) > 10)
            until(lambda: len(statuses(made)) >= 13)
            assert set(statuses(made)) <= {507, 0}
            assert on_disk(files) <= 4_000_000
            assert wait_batch(daemon.client(bob), submit(daemon.client(bob), line("a")).id).status == "completed"
        until(released(daemon))
        upload(daemon, alice, 3_000_000)
        with pytest.raises(InternalServerError) as full:
            upload(daemon, bob, 3_000_000)
        assert full.value.status_code == 507


def test_every_end_of_an_upload_releases_its_bytes(folder: Path, tmp_path: Path) -> None:
    """Its client leaves, is too slow, sends another form; and a crash's leftover is deleted at the next start."""
    keys, files = tmp_path / "keys.json", tmp_path / "data" / "files"
    alice = add_key(keys, "alice")[1]
    config = deployment(tmp_path, replace(PATIENT, body_timeout=0.2), api_key_file=str(keys))
    files.mkdir(parents=True)
    (files / ".file-0.0123.part").write_bytes(b"left by a daemon that was killed")
    with served(config, folder, keys=keys) as daemon:
        assert not on_disk(files)
        wrong = FORM + BYTES[:PART] + b"\r\n--b\r\nno header\r\n\r\n"
        assert daemon.raw(head(alice, None) + chunk(wrong)).startswith(b"HTTP/1.1 400")
        assert daemon.raw(begun(alice, declared=False)).startswith(b"HTTP/1.1 408")
        with held_open(daemon.port, begun(alice, declared=False), 3):
            pass
        until(released(daemon))
        until(lambda: not list(files.iterdir()))
        assert upload(daemon, alice, PART).bytes == PART
        assert released(daemon)()


def test_a_stop_ends_unfinished_uploads(folder: Path, tmp_path: Path) -> None:
    keys, files = tmp_path / "keys.json", tmp_path / "data" / "files"
    alice = add_key(keys, "alice")[1]
    with served(deployment(tmp_path, PATIENT, api_key_file=str(keys)), folder, keys=keys) as daemon:
        with held_open(daemon.port, begun(alice, declared=False), 3):
            until(lambda: on_disk(files) > 0)
            daemon.stop()
        assert released(daemon)()
    assert not list(files.iterdir())


class SlowStore:
    """A store whose reads answer when they are told to, with what was stored when they began."""

    def __init__(self) -> None:
        self.folder, self.bytes = Path("/"), 0
        self.reads: list[asyncio.Future[int]] = []

    async def in_thread(self, work: Callable[[], int]) -> int:
        return work()

    async def read(self, query: object) -> int:
        stored = self.bytes
        self.reads.append(asyncio.get_running_loop().create_future())
        await self.reads[-1]
        return stored


def test_uploads_that_begin_while_one_is_stored() -> None:
    """What one read of the store says is older than an upload that was stored meanwhile: both count."""

    async def play() -> None:
        store: Any = SlowStore()
        usage = Usage(store, Observer(), lambda owner: KeyLimits(stored_bytes=1000))
        uploads = Reservations(store, usage, 0)
        with uploads.begin("a") as second:
            with uploads.begin("a") as first:
                growing = asyncio.create_task(first.grow(600))
                await asyncio.sleep(0)
                store.reads[0].set_result(0)
                await growing
                late = asyncio.create_task(second.grow(350))
                await asyncio.sleep(0)
                store.bytes += 600
                first.stored(600)
            store.reads[1].set_result(0)
            await late
            with uploads.begin("a") as third:
                refused = asyncio.create_task(third.grow(100))
                await asyncio.sleep(0)
                store.reads[-1].set_result(0)
                with pytest.raises(ApiError, match="350 more are being uploaded"):
                    await refused
            grown = asyncio.create_task(second.grow(400))  # to the limit
            await grown
            again = asyncio.create_task(second.grow(401))
            await asyncio.sleep(0)
            store.reads[-1].set_result(0)
            with pytest.raises(ApiError, match="stored 600 bytes"):
                await again
        assert not uploads.in_flight

    asyncio.run(play())


def test_many_that_begin_at_once_are_counted_before_the_first_read() -> None:
    async def play() -> None:
        store: Any = SlowStore()
        usage = Usage(store, Observer(), lambda owner: KeyLimits(stored_bytes=1000))
        uploads = Reservations(store, usage, 0)

        async def one() -> None:
            with uploads.begin("a") as upload:
                await upload.grow(300)
                await asyncio.Event().wait()

        tasks = [asyncio.create_task(one()) for _ in range(10)]
        await asyncio.sleep(0)
        assert len(store.reads) == 10
        for read in store.reads:
            read.set_result(None)
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for _ in range(10):
            await asyncio.sleep(0)
        open_ones = [task for task in tasks if not task.done()]
        assert uploads.in_flight["a"] == 300 * len(open_ones) <= 1000
        assert len(open_ones) == 3
        for task in open_ones:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert not uploads.in_flight

    asyncio.run(play())


def test_an_upload_that_is_cancelled_while_its_file_is_made_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun_, go, made = threading.Event(), threading.Event(), NewFile

    def slow(*arguments: Any) -> Any:
        begun_.set()
        assert go.wait(HANG_S)
        return made(*arguments)

    async def play() -> None:
        store = await open_store(tmp_path / "data", StoreOptions())
        monkeypatch.setattr("laddertron.engine.daemon.store.store.NewFile", slow)

        async def one() -> None:
            async with store.new_file("file-a"):
                raise AssertionError("it was cancelled before")

        task = asyncio.create_task(one())
        await asyncio.to_thread(begun_.wait, HANG_S)
        task.cancel()
        await asyncio.sleep(0)
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not list((tmp_path / "data" / "files").iterdir())
        await store.close()

    asyncio.run(play())
