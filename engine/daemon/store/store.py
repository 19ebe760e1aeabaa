"""The store: one SQLite file in the data folder, written by one thread in group commits. When `write(work)` returns,
its changes are on the disk (and in the export). After a disk error writes are refused until a trial write succeeds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import sqlite3
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ..threads import started_threads
from .clock import TrustedClock
from .connection import connect_store, newest_time, note_position, snapshot
from .counter import COUNT, Counter, Watched, clear_mark, copy_log
from .disk import Files as DiskFiles
from .disk import FolderLock, NewFile, is_full, room_of
from .disk_watch import DiskWatch
from .export import Export, Fenced
from .schema import Rows
from .sums import Damaged, Kind

log = logging.getLogger(__name__)

T = TypeVar("T")
_LOG_PAGES = 1000
_GROUP = 512
_TRIAL_SECONDS = 1.0
_EXPORT_SECONDS = 0.5  # between looks at the export's folder
_READERS = 4
_NOTE_SECONDS = 60.0


class StoreUnavailable(RuntimeError):
    """The write failed: none of its changes is stored."""


class StoreFenced(StoreUnavailable):
    """Another daemon has taken over the store: this one must exit."""


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """`files`, `connect`: tests replace them by failing ones. `observe_commit` gets each commit's seconds, on the
    store's thread like `observe_error`. `adopt`: take a folder whose store is missing, empty or another's;
    `skip_damaged`: rebuild from an export without its unreadable frames."""

    export_dir: Path | None = None
    files: DiskFiles = os
    connect: Callable[..., sqlite3.Connection] = sqlite3.connect
    observe_commit: Callable[[float], None] = field(default=lambda seconds: None)
    observe_error: Callable[[], None] = field(default=lambda: None)
    observe_damage: Callable[[Kind], None] = field(default=lambda kind: None)
    adopt: bool = False
    skip_damaged: bool = False
    wall: Callable[[], float] = time.time
    watch: DiskWatch = field(default_factory=DiskWatch)


@dataclass(slots=True)
class _Work:
    run: Callable[[Rows], Any]
    future: asyncio.Future[Any]
    outcome: Any = None
    error: BaseException | None = None


class Store:
    """open.py opens it on the event loop that uses it; call `close` on the same loop."""

    def __init__(self, folder: Path, lock: FolderLock, export: Export | None, options: StoreOptions) -> None:
        self.folder, self._lock, self.export, self._options = folder, lock, export, options
        self.files_folder, self.disk_files, self.watch = folder / "files", options.files, options.watch
        self._loop = asyncio.get_running_loop()
        self.writes: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._readers = started_threads(_READERS, "store-read")
        self._long = asyncio.Semaphore(_READERS // 2)
        self.turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._local = threading.local()
        self._opened: list[sqlite3.Connection] = []
        self._owed: list[tuple[_Work, Any, BaseException | None]] = []
        self.generation = 0
        self.failure: str | None = None
        """The failed write because of which writes are refused, or None."""
        self.stalled: str | None = None
        """The disk that does not answer, because of which writes are refused, or None."""
        self.full = False
        """Whether `failure` is only that the disk is full."""
        self.fenced = False
        self.room: tuple[int, int] | str = room_of(folder)
        """Free bytes and size of the disk at the last `look`, or the reason why they are unknown."""
        self._writable = asyncio.Event()
        self._writable.set()
        self.on_change: Callable[[], None] = lambda: None
        """Called on the event loop when `refusal` has changed."""
        self._thread = threading.Thread(target=self._serve, name="store", daemon=True)

    def path_of(self, file_id: str) -> Path:
        """The path of a file's bytes. `file_id` must come from the store, never from a client."""
        return self.files_folder / file_id

    @property
    def refusal(self) -> str | None:
        """The reason why writes are refused, or None."""
        return self.failure or self.stalled

    async def remove_bytes(self, file_id: str) -> None:
        """Deletes a file's bytes, also in the export, after its row was deleted. Raises OSError."""
        await self.in_thread(lambda: self.path_of(file_id).unlink(missing_ok=True))
        if (export := self.export) is not None:
            await self.in_thread(lambda: export.forget(file_id), export.folder)

    @contextlib.asynccontextmanager
    async def new_file(self, file_id: str) -> AsyncIterator[NewFile]:
        """A file's bytes, to be written and committed in threads. Raises OSError."""
        making = asyncio.ensure_future(self.in_thread(lambda: NewFile(self.path_of(file_id), self.disk_files)))
        try:
            yield await asyncio.shield(making)
        finally:  # also if the caller was cancelled while the thread made it
            await self.in_thread((await making).discard)

    async def write(self, work: Callable[[Rows], T]) -> T:
        """Runs `work` within a group's transaction; returns once the group is committed. If `work` raises, only its own
        changes are rolled back. Raises StoreUnavailable if the disk failed."""
        if self.refusal is not None:
            raise (StoreFenced if self.fenced else StoreUnavailable)(self.refusal)
        item = _Work(work, self._loop.create_future())
        self.writes.put(item)
        value: T = await item.future
        return value

    async def read(self, query: Callable[[sqlite3.Connection], T], owner: str | None = None) -> T:
        """Runs `query` on committed data; with an owner by `in_turn`. Raises StoreUnavailable, or what it raises;
        reports Damaged."""

        def work() -> T:
            return query(self._reader())

        try:
            return await (self.in_thread(work) if owner is None else self.in_turn(owner, work))
        except sqlite3.OperationalError as error:
            raise StoreUnavailable(str(error)) from error
        except Damaged as damaged:
            self.report(damaged)
            raise

    def report(self, damaged: Damaged) -> None:
        """Logs and counts something stored that does not match its checksum, once. For the event loop."""
        if damaged.reported:
            return
        damaged.reported = True
        log.error("%s", damaged, extra={"event": "damaged"})
        self._options.observe_damage(damaged.kind)

    async def in_thread(self, work: Callable[[], T], where: Path | None = None) -> T:
        """Runs work on files of `where` (the data folder), concurrently with the readers."""

        def watched() -> T:
            with self.watch.call(where or self.folder, job=True):
                return work()

        return await self._loop.run_in_executor(self._readers, watched)

    async def in_turn(self, owner: str, work: Callable[[], T]) -> T:
        """Like `in_thread`, for long work: one thread for each owner at a time, and others reserved for the readers."""
        async with self.turns[owner], self._long:
            return await self.in_thread(work)

    async def usable(self) -> None:
        """Waits until writes are accepted again."""
        await self._writable.wait()

    async def close(self) -> None:
        """Commits queued writes and unlocks the folder."""
        self.writes.put(None)
        await self._loop.run_in_executor(None, self._thread.join)
        await asyncio.to_thread(self._readers.shutdown)  # a reader may wait for this loop
        for connection in self._opened:
            connection.close()
        if not self.fenced:
            with contextlib.suppress(OSError):
                clear_mark(self.folder)
        self._watched.close()
        self._counter.close()
        if self.export is not None:
            self.export.close()
        self._lock.release()

    def start(self) -> None:
        """Fences off earlier daemons, removes their unfinished files, begins the export."""
        db = self.connect()
        with db:
            db.execute("INSERT INTO meta VALUES ('generation', 1) ON CONFLICT (key) DO UPDATE SET value = value + 1")
            self.generation = int(db.execute("SELECT value FROM meta WHERE key = 'generation'").fetchone()[0])
            db.execute("INSERT INTO meta VALUES ('commits', 0) ON CONFLICT DO NOTHING")
            self._commits = int(db.execute(COUNT).fetchone()[0])
        self._counter = Counter(self.folder, self.disk_files)
        self.clock = TrustedClock(newest_time(db), self._options.wall)
        self._note_time(db)
        file_ids = {row[0] for row in db.execute("SELECT id FROM files")}
        self._clear({path for path in self.files_folder.iterdir() if path.name not in file_ids})
        if self.export is not None:
            store = int(db.execute("SELECT value FROM meta WHERE key = 'store'").fetchone()[0])
            self.export.begin(snapshot(db), store)
            note_position(db, self.export)
        self._opened.append(db)  # while it is open, SQLite keeps the log's file when other connections close
        self._watched = Watched(self.folder)
        self._thread.start()

    def _clear(self, unknown: set[Path]) -> None:
        """Deletes unfinished files; moves complete unknown ones aside, since the store may be incomplete."""
        for path in sorted(unknown):
            if path.name.startswith(".") and path.name.endswith(".part"):
                path.unlink()
                continue
            aside = self.folder / "unknown" / path.name
            aside.parent.mkdir(exist_ok=True, mode=0o700)
            while aside.exists():
                aside = aside.with_name(f"{aside.name}.again")
            path.rename(aside)
            log.warning("the store knows no file %s: moved to %s", path.name, aside, extra={"event": "store"})

    def look(self) -> None:
        """Checks that the folder is there and measures its disk. Not on the event loop, as the disk may not answer."""
        with self.watch.call(self.folder):
            self.check_there()
            self.room = room_of(self.folder)

    def stall(self, disk: str | None) -> None:
        """Refuses writes while a disk does not answer. Queued ones are committed when it does. On the event loop."""
        if disk != self.stalled:
            self.stalled = disk
            self._changed()

    def check_there(self) -> bool:
        """Whether the folder is still the one that was opened; else no write is acknowledged any more. Thread-safe."""
        wrong = self._watched.wrong()
        if wrong is not None and not self.fenced:
            self.fenced = True
            self._say(f"{wrong} while the store was open: nothing more is acknowledged, restore the folder")
        return wrong is None

    # on the store's thread

    def _serve(self) -> None:
        db = self.connect()
        while True:
            if time.monotonic() - self._noted > _NOTE_SECONDS:
                with self.watch.call(self.folder):
                    self._note_time(db)
            try:
                idle = _NOTE_SECONDS if self.export is None else _EXPORT_SECONDS
                item = self.writes.get(timeout=idle if self.failure is None else _TRIAL_SECONDS)
            except queue.Empty:
                with self.watch.call(self.folder):
                    if self.failure is None:
                        self._check_export(db)
                    else:
                        db = self._trial(db)
                continue
            if item is None:
                break
            works, last = [item], False
            while len(works) < _GROUP and not self.writes.empty():
                if (more := self.writes.get()) is None:
                    last = True
                    break
                works.append(more)
            with self.watch.call(self.folder):
                db = self._commit(db, works)
            if last:
                break
        unsure = StoreUnavailable(f"{self.failure}: what was written may be stored")
        self._answer([(work, None, unsure) for work, _, _ in self._owed])
        with self.watch.call(self.folder):
            self._note_time(db)
            if not self.fenced:
                self._copy_log(db)
            db.close()

    def _note_time(self, db: sqlite3.Connection) -> None:
        """Stores the time for the next daemon's TrustedClock; ignores errors, which the next commit detects."""
        self._noted = time.monotonic()
        if self.failure is None:
            with contextlib.suppress(sqlite3.Error):
                query = "INSERT INTO meta VALUES ('seen', ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value"
                db.execute(query, (int(self.clock.now()),))

    def _commit(self, db: sqlite3.Connection, works: list[_Work]) -> sqlite3.Connection:
        began = time.perf_counter()
        exported = False
        try:
            db = self._current(db)
            db.execute("BEGIN IMMEDIATE")
            if db.execute("SELECT value FROM meta WHERE key = 'generation'").fetchone()[0] != self.generation:
                raise Fenced(f"{self.folder} was taken over by another daemon: this one must stop")
            rows = Rows(db)
            for work in works:
                self._run_one(work, rows)
            if self.export is not None and rows.changes:
                with self.watch.call(self.export.folder):
                    self.export.append(rows.changes)
                exported = True
                note_position(db, self.export)
            db.execute("UPDATE meta SET value = ? WHERE key = 'commits'", (self._commits + 1,))
            db.execute("COMMIT")
            self._commits += 1
        except (sqlite3.Error, OSError, Fenced) as error:
            if exported and self.export is not None:
                self.export.undo()
            self._failed(error, db)
            kind = StoreFenced if self.fenced else StoreUnavailable
            self._answer([(work, None, kind(str(error))) for work in works])
            return db
        if not self.check_there():  # it went into a file that was removed
            self._answer([(work, None, StoreFenced(self.failure or "")) for work in works])
            return db
        self._owed += [(work, work.outcome, work.error) for work in works]
        if self._acknowledge():
            self._options.observe_commit(time.perf_counter() - began)
        if self._watched.frames() >= _LOG_PAGES:
            self._copy_log(db)
        return db

    def _copy_log(self, db: sqlite3.Connection) -> None:
        """Copies the log; after a failure retries after the next commit."""
        try:
            copy_log(db, self.folder)
        except (sqlite3.Error, OSError) as error:
            self._options.observe_error()
            log.warning("the log cannot be copied into store.db: %s", error, extra={"event": "store"})

    def _acknowledge(self) -> bool:
        """Acknowledges committed writes once their count is on the disk; until then they wait, since a commit cannot be
        undone."""
        try:
            self._counter.write(self._commits)
        except OSError as error:
            self._options.observe_error()
            self._say(f"{self.folder}/store.count cannot be written: {error}", is_full(error))
            return False
        owed, self._owed = self._owed, []
        self._say(None)
        self._answer(owed)
        return True

    def _run_one(self, work: _Work, rows: Rows) -> None:
        mark = len(rows.changes)
        rows.db.execute("SAVEPOINT work")
        try:
            work.outcome = work.run(rows)
        except (sqlite3.OperationalError, OSError):
            raise
        except Exception as error:
            work.error = error
            rows.db.execute("ROLLBACK TO work")
            del rows.changes[mark:]
        rows.db.execute("RELEASE work")

    def _check_export(self, db: sqlite3.Connection) -> None:
        """Checks the export between commits; each commit also does."""
        try:
            if self.export is not None:
                with self.watch.call(self.export.folder):
                    self.export.check()
        except (OSError, Fenced) as error:
            self._failed(error, db)

    def _failed(self, error: Exception, db: sqlite3.Connection) -> None:
        with contextlib.suppress(sqlite3.Error):
            db.rollback()
        self.fenced |= isinstance(error, Fenced)
        self._options.observe_error()
        self._say(f"the store cannot be written: {error}", is_full(error))

    def _trial(self, db: sqlite3.Connection) -> sqlite3.Connection:
        """Tries whether writes succeed again."""
        if self.fenced or (self._owed and not self._acknowledge()):
            return db
        try:
            db = self._current(db)
            db.execute("BEGIN IMMEDIATE")
            db.execute("INSERT INTO meta VALUES ('trial', 1) ON CONFLICT (key) DO UPDATE SET value = value + 1")
            if self.export is not None:
                with self.watch.call(self.export.folder):
                    self.export.append([])
                note_position(db, self.export)
            db.execute("COMMIT")
        except (sqlite3.Error, OSError, Fenced) as error:
            self._failed(error, db)
            return db
        self._say(None)
        return db

    def _current(self, db: sqlite3.Connection) -> sqlite3.Connection:
        """Returns `db`, or after a failure a new connection, since the old one's cached pages may be wrong."""
        if self.failure is None or self.fenced:
            return db
        new = self.connect()
        db.close()
        return new

    def _say(self, failure: str | None, full: bool = False) -> None:
        self.full = full
        if failure != self.failure:
            (log.info if failure is None else log.error)(
                "the store is writable again" if failure is None else failure, extra={"event": "store"}
            )
            self.failure = failure
            self._call(self._changed)

    def _changed(self) -> None:
        (self._writable.set if self.refusal is None else self._writable.clear)()
        self.on_change()

    def _answer(self, answers: list[tuple[_Work, Any, BaseException | None]]) -> None:
        def give() -> None:
            for work, value, error in answers:
                if work.future.done():  # cancelled by the caller
                    continue
                if error is not None:
                    work.future.set_exception(error)
                else:
                    work.future.set_result(value)

        self._call(give)

    def _call(self, what: Callable[[], None]) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(what)

    # connections

    def connect(self) -> sqlite3.Connection:
        return connect_store(self.folder, self._options.connect)

    def _reader(self) -> sqlite3.Connection:
        connection: sqlite3.Connection | None = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._local.connection = connect_store(self.folder, self._options.connect)
            connection.execute("PRAGMA query_only = ON")
            connection.execute("PRAGMA cache_size = -512")  # KiB: whole rows pass through it, once
            self._opened.append(connection)
        return connection
