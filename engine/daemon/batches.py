"""Runs every batch from creation to its end. All state is in the store: a restarted daemon resumes each batch at its
status."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

from ..openai.batch_input import MAX_ERRORS, check_file
from ..openai.errors import ApiError
from .batch_feed import BatchFeed, Gate, damaged_results, rules_of
from .core import Core
from .store import records
from .store.files import Cleaner, InputFault, Outputs, changed_input, check_input, damaged_row, open_checked
from .store.rows import BatchRow, FileRow, Status
from .store.schema import Rows
from .store.store import StoreUnavailable
from .store.sums import CheckedFile, Damaged

log = logging.getLogger(__name__)
audit_log = logging.getLogger("laddertron.audit")

_AT_ONCE = 16  # batches of a key that feed the engine at the same time; the others wait in order of creation
_EXPIRY_SECONDS = 60.0
_REPAIR_SECONDS = 20.0  # a client waits that long for lines that are computed again
_OUTCOMES: dict[str, tuple[str, str]] = {
    "cancelled": ("batch_cancelled", "the batch was cancelled before this request was answered"),
    "expired": ("batch_expired", "the batch's completion window was over before this request was answered"),
    "failed": ("batch_failed", "the engine failed before this request was answered"),
}
UNANSWERED_CODES = tuple(code for code, _ in _OUTCOMES.values())
"""Codes of lines that the end of their batch left unanswered."""


def _error(code: str, message: str | None) -> dict[str, Any]:
    return {"errors": [{"code": code, "message": message, "param": None, "line": None}]}


class Batches:
    """`create`, `cancel`, `remove` and `remove_file` are for HTTP routes, `start` and `close` for the daemon."""

    def __init__(self, core: Core, retention: float | None = None) -> None:
        self._core, self._store, self._clock = core, core.store, core.store.clock
        self.cleaner = Cleaner(core.store, retention)
        self._outputs = Outputs(core.store)
        self.gate = Gate()
        self.gate.set("")
        self._stops: dict[str, asyncio.Future[str]] = {}
        self._owners: dict[str, str] = {}
        self.feeds: dict[str, BatchFeed] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.checking: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._feeding: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(_AT_ONCE))
        self._over: str | None = None

    async def start(self) -> None:
        for batch in await self._store.read(records.open_batches):
            self._start_batch(batch)
        self._spawn(self.cleaner.run())

    async def close(self) -> None:
        """Stores the computed results and stops, without changing the status of any batch."""
        tasks = [*self._tasks, *self._outputs.tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def engine_over(self, reason: str) -> None:
        """Fails the batches whose lines were in flight when the engine died; the others wait for another daemon."""
        self._over = reason
        for batch_id, feed in self.feeds.items():
            if feed.lost_some:
                self._stop(batch_id, "failed")

    async def settled(self) -> None:
        """Waits, after `engine_over`, until the failed batches have their files."""
        while any(stop.done() for stop in self._stops.values()):
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED, timeout=0.5)

    # for HTTP routes

    async def create(
        self, batch: BatchRow, repeat_key: str | None, digest: str, check: Callable[[sqlite3.Connection], None]
    ) -> BatchRow | None:
        """Stores and starts a batch. Returns it, or the earlier one with the same idempotency key, or None if that key
        was used with another body. `check` is called for a new batch and may raise. Raises StoreUnavailable."""

        def work(rows: Rows) -> BatchRow | None:
            stored = records.add_batch(rows, batch, repeat_key, digest)
            if stored is not None and stored.id == batch.id:
                check(rows.db)
            return stored

        created = await self._store.write(work)
        if created is not None and created.id == batch.id:
            self._start_batch(created)
        return created

    async def cancel(self, batch_id: str) -> BatchRow:
        """Cancels a batch; an ended one stays unchanged. Raises StoreUnavailable, or KeyError if it does not exist."""
        now = self._clock.stamp()
        open_ones: tuple[Status, ...] = ("validating", "in_progress")
        batch = await self._store.write(
            lambda rows: records.change_batch(rows, batch_id, open_ones, status="cancelling", cancelling_at=now)
        )
        if batch.status == "cancelling":
            self._stop(batch_id, "cancelled")
        return batch

    async def cancel_revoked(self, revoked: Callable[[str], bool]) -> None:
        """Cancels the open batches of revoked keys. Raises StoreUnavailable."""
        for batch_id, owner in list(self._owners.items()):
            if revoked(owner) and not self._stops[batch_id].done():
                with contextlib.suppress(KeyError):
                    batch = await self.cancel(batch_id)
                    log_fields = {"event": "batch.cancelled", "id": batch_id, "key": owner}
                    log.warning("batch %s is %s: its key was revoked", batch_id, batch.status, extra=log_fields)
                    audit_log.info("batch.cancelled %s: its key was revoked", batch_id, extra=log_fields)

    async def add_file(self, file: FileRow, sums: str, check: Callable[[int], None]) -> None:
        """Adds a file whose bytes are already on disk; `sums`: of its blocks. `check` gets the number of bytes that its
        owner has stored before, and may raise. Raises StoreUnavailable or OSError."""

        def work(rows: Rows) -> None:
            check(records.stored_bytes(rows.db, file.owner))
            records.add_file(rows, file, sums)

        export, path = self._store.export, self._store.path_of(file.id)
        if export is not None:
            await self._store.in_thread(lambda: export.keep(path, file.id), export.folder)
        try:
            await self._store.write(work)
        except ApiError:
            if export is not None:
                await self._store.in_thread(lambda: export.forget(file.id), export.folder)
            raise

    async def remove_file(self, file: FileRow) -> None:
        """Deletes a file. Raises ApiError if a batch still needs it, StoreUnavailable."""
        user = await self._store.write(lambda rows: records.drop_file(rows, file))
        if user is not None:
            raise ApiError(f"{user} uses this file: cancel it first", "file_in_use", status=409)
        await self._store.remove_bytes(file.id)

    async def remove(self, batch: BatchRow) -> None:
        """Deletes an ended batch and all its files but the input file. Raises StoreUnavailable."""
        for name in await self._store.write(lambda rows: records.drop_batch(rows, batch)):
            await self._store.remove_bytes(name)

    async def content(self, file: FileRow, begin: int = 0, end: int | None = None) -> CheckedFile:
        """Opens a file whose bytes from `begin` to `end` match their checksums. Makes an output file again if it is
        missing or damaged, computing the lines whose results are damaged. Raises StoreUnavailable, OSError, Damaged, or
        ApiError (503) while such lines are computed."""
        try:
            return await self._checked(file, begin, end)
        except (Damaged, FileNotFoundError) as error:
            batch_id = file.batch_id
            if batch_id is None:
                raise
            batch = await self._store.read(lambda db: records.get_batch(db, batch_id))
            if batch is None or file.id not in (batch.output_file_id, batch.error_file_id):
                raise
            log.warning("file %s is generated again: %s", file.id, error, extra={"event": "store"})
        made = self._outputs.make(batch.id, partial(self._repair, batch))
        try:
            await asyncio.wait_for(made, _REPAIR_SECONDS)
        except TimeoutError:
            message = f"lines of {batch.id} whose stored results are damaged are computed again: try again"
            raise ApiError(message, "file_damaged", status=503, retry_after=5) from None
        made_again = await self._store.read(lambda db: records.get_file(db, file.id))
        return await self._checked(made_again or file, begin, end)

    async def _checked(self, file: FileRow, begin: int, end: int | None) -> CheckedFile:
        opened = await open_checked(self._store, file)
        try:
            await self._store.in_turn(file.owner, lambda: opened.check(begin, end))
        except BaseException as error:
            opened.close()
            if isinstance(error, Damaged):
                self._store.report(error)
            raise
        return opened

    async def _repair(self, batch: BatchRow) -> None:
        """Makes the files of an ended batch again, both: a line that is computed again may move from one to the other.
        Raises StoreUnavailable or OSError."""
        with contextlib.suppress(KeyError):  # deleted meanwhile
            if damaged := await self._damaged_lines(batch):
                await self._compute_damaged(batch, damaged)
            batch = await self._store.read(lambda db: records.batch_of(db, batch.id))
            await self._make_files(batch)

    async def _compute_damaged(self, batch: BatchRow, damaged: list[int]) -> None:
        """Computes the lines of a completed batch whose results are damaged, if its input and the model are what they
        were. Raises StoreUnavailable or OSError."""
        try:
            if batch.status != "completed":
                raise InputFault("batch_ended", f"it is {batch.status}")
            await self._check_input(batch)
            results = await self._store.read(lambda db: records.count_results(db, batch.id))
            feed = self._feed(batch)
            if sum(results) < batch.completed + batch.failed:  # a file was deleted, and its lines' results with it
                feed.only = frozenset(damaged)
            try:
                await self._run(batch.id, feed)
            finally:
                await feed.stop()
        except (InputFault, Damaged) as fault:
            log.error("batch %s: they cannot be computed again: %s", batch.id, fault)

    # a batch's life

    def _start_batch(self, batch: BatchRow) -> None:
        self._owners[batch.id] = batch.owner
        self._stops[batch.id] = asyncio.get_running_loop().create_future()
        self._spawn(self._run_batch(batch))

    def _spawn(self, work: Any) -> None:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _stop(self, batch_id: str, why: str) -> None:
        stop = self._stops.get(batch_id)
        if stop is not None and not stop.done():
            stop.set_result(why)

    async def _run_batch(self, batch: BatchRow) -> None:
        """Runs a batch from any status to its end. After a failure of the disk, retries once the store is usable."""
        log_fields = {"event": "batch", "batch": batch.id}
        fault: InputFault | None = None
        repaired = False
        checked = False
        current, torn = False, False
        try:
            while not batch.ended:
                try:
                    if torn:
                        batch = await self._store.write(partial(records.restore_batch, batch=batch))
                    elif not current:
                        batch = await self._store.read(partial(records.batch_of, batch_id=batch.id))
                    current, torn = True, False
                    if batch.status != "finalizing" and not checked:
                        await self._check_input(batch)
                        checked = True
                    if batch.status != "finalizing" and fault is not None:  # fails, and keeps its results
                        batch = await self._name_files(batch, "failed", _error(fault.code, str(fault)))
                    elif batch.status == "finalizing" and not repaired and await self._some_damaged(batch):
                        repaired = True  # once: if results are damaged again, their lines fail
                        batch = await self._change(batch, "finalizing", status="in_progress")
                    else:
                        batch = await self._step(batch)
                    log.info("batch %s is %s", batch.id, batch.status, extra=log_fields)
                except (InputFault, Damaged) as failure:
                    if isinstance(failure, Damaged):
                        if fault is not None:
                            raise
                        self._store.report(failure)
                        torn, failure = True, changed_input(failure) if failure.kind == "file" else damaged_row(failure)
                    fault, checked = failure, True
                    log.error("batch %s: %s", batch.id, failure, extra=log_fields)
                except (StoreUnavailable, OSError) as error:
                    if isinstance(error, FileNotFoundError) and batch.status != "finalizing":
                        checked = False
                    if self._store.fenced:
                        return
                    log.error("batch %s waits: %s", batch.id, error, extra=log_fields)
                    await asyncio.sleep(1.0)
                    await self._store.usable()
                    current = False
        except KeyError:
            log.warning("batch %s was deleted", batch.id, extra=log_fields)
        except Damaged as damaged:
            self._store.report(damaged)
            log.error("batch %s stopped: delete it and submit its lines again", batch.id, extra=log_fields)
        except Exception:
            log.exception("batch %s stopped: restart the daemon to resume it", batch.id, extra=log_fields)
            if batch.status == "validating":  # else it would stop there again, and its file could never be deleted
                errors = [{"code": "internal_error", "message": "its file could not be checked", "param": None}]
                await self._change(batch, "validating", status="failed", failed_at=self._clock.stamp(), errors=errors)
        finally:
            self._stops.pop(batch.id, None)
            self._owners.pop(batch.id, None)

    async def _check_input(self, batch: BatchRow) -> None:
        """Raises InputFault if the input file has changed since its upload, or another model answered some lines."""
        model = self._core.model_digest()
        if batch.completed and batch.model_digest is not None and model not in ("", batch.model_digest):
            raise InputFault(
                "model_changed",
                f"{batch.completed} lines were answered by model {batch.model_digest}, this daemon serves "
                f"{model}: send the others as a new batch",
            )
        file = await self._store.read(lambda db: records.get_file(db, batch.input_file_id))
        if file is None:
            raise InputFault("input_file_missing", f"input file {batch.input_file_id} was deleted")
        await check_input(self._store, file)

    async def _step(self, batch: BatchRow) -> BatchRow:
        match batch.status:
            case "validating":
                return await self._check(batch)
            case "in_progress":
                return await self._compute(batch)
            case "cancelling":
                return await self._wind_up(batch, self._feed(batch), "cancelled")
            case _:
                return await self._finalise(batch)

    async def _check(self, batch: BatchRow) -> BatchRow:
        """Validates the input file. Each key has one file checked at a time; in_turn divides the time between keys."""
        feed, core = self._feed(batch), self._core
        async with self.checking[batch.owner]:
            with await feed.input() as file:
                in_turn = partial(self._store.in_turn, batch.owner)
                rules = rules_of(batch, core)
                check = await check_file(file, rules, core.served_model_name, in_turn, feed.checked)
        now = self._clock.stamp()
        # a line for another model gets an error line, like a prompt that is too long; a file of only such lines was
        # sent to the wrong server
        if check.errors or check.unserved == check.lines:
            worst = sorted([*check.errors, *check.unserved_errors], key=lambda pair: pair[0])[:MAX_ERRORS]
            errors = [{"code": bad.code, "message": bad.message, "param": bad.param, "line": n} for n, bad in worst]
            return await self._change(batch, "validating", status="failed", failed_at=now, errors=errors)
        if batch.reuse_batch_id is not None:
            await feed.reuse(batch.reuse_batch_id)
        return await self._change(batch, "validating", status="in_progress", in_progress_at=now, total=check.lines)

    async def _change(self, batch: BatchRow, only_if: Status, **values: Any) -> BatchRow:
        """Changes the batch unless its status has changed meanwhile (cancelled); returns its state after that."""
        return await self._store.write(lambda rows: records.change_batch(rows, batch.id, (only_if,), **values))

    def _feed(self, batch: BatchRow) -> BatchFeed:
        return BatchFeed(batch, self._core, self.gate)

    async def _compute(self, batch: BatchRow) -> BatchRow:
        stop = self._stops[batch.id]
        feed = self._feed(batch)
        timer = asyncio.create_task(self._expire(batch))
        work = asyncio.create_task(self._run(batch.id, feed))
        try:
            both: set[asyncio.Future[Any]] = {work, stop}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not stop.done():
                await work
                return await self._wind_up(batch, feed, "completed")
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            await feed.stop()
            return await self._wind_up(batch, feed, stop.result())
        finally:
            timer.cancel()
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            with contextlib.suppress(StoreUnavailable):
                await feed.stop()

    async def _expire(self, batch: BatchRow) -> None:
        """Stops the batch when its completion window is over. Checks each minute, because the clock may be set."""
        while (left := batch.expires_at - self._clock.now()) > 0 or self._clock.paused:
            await asyncio.sleep(min(left, _EXPIRY_SECONDS) if left > 0 else _EXPIRY_SECONDS)
        self._stop(batch.id, "expired")

    async def _run(self, batch_id: str, feed: BatchFeed) -> None:
        async with self._feeding[feed.batch.owner]:
            self.feeds[batch_id] = feed
            try:
                await feed.run()
            finally:
                self.feeds.pop(batch_id, None)

    async def _wind_up(self, batch: BatchRow, feed: BatchFeed, outcome: str) -> BatchRow:
        """Writes error lines for lines without a result, and names the files."""
        now = self._clock.stamp()
        values: dict[str, Any] = {}
        if outcome in _OUTCOMES:
            await feed.finish_rest(*_OUTCOMES[outcome])
        if outcome == "expired":
            values["expired_at"] = now
        if outcome == "failed":
            values |= _error("engine_failed", self._over)
        return await self._name_files(batch, outcome, values)

    async def _name_files(self, batch: BatchRow, outcome: str, values: dict[str, Any]) -> BatchRow:
        """Names the output and error files, if there are results for them. A batch has failed, not completed, if lines
        have no result."""
        now = self._clock.stamp()

        def work(rows: Rows) -> BatchRow:
            row = records.batch_of(rows.db, batch.id)
            names: dict[str, Any] = dict(records.file_names(row, row.completed, row.failed))
            lines, counted = sum(records.count_results(rows.db, batch.id)), row.completed + row.failed
            if not row.total:  # cancelled before its lines were counted
                names["total"] = counted
            if outcome == "completed" and not lines == counted == row.total:
                message = f"of {row.total} lines {lines} have a result ({counted} were counted): send the others again"
                names |= _error("results_missing", message)
            return records.change_batch(rows, batch.id, status="finalizing", finalizing_at=now, **names, **values)

        return await self._store.write(work)

    async def _some_damaged(self, batch: BatchRow) -> bool:
        """Whether results of a batch that is about to end are damaged and can be computed again."""
        if batch.errors or batch.cancelling_at is not None or batch.expired_at is not None:
            return False
        return bool(await self._damaged_lines(batch))

    async def _damaged_lines(self, batch: BatchRow) -> list[int]:
        damaged: list[int] = []
        await self._store.read(lambda db: records.finished_numbers(db, batch.id, damaged), batch.owner)
        return damaged

    async def _finalise(self, batch: BatchRow) -> BatchRow:
        now = self._clock.stamp()
        status: Status = "completed"
        if batch.errors:
            status = "failed"
        elif batch.cancelling_at is not None:
            status = "cancelled"
        elif batch.expired_at is not None:
            status = "expired"
        return await self._make_files(batch, status=status, **{f"{status}_at": now})

    async def _make_files(self, batch: BatchRow, **values: Any) -> BatchRow:
        """Replaces results that are damaged by errors, writes the output and error files and stores their rows and the
        batch's `values`. Raises StoreUnavailable, OSError or KeyError."""
        if errors := await self._store.read(lambda db: records.unreadable_results(db, batch.id)):
            self._store.report(damaged_results(batch, [error.number for error in errors]))
            epoch = self._store.generation
            batch = await self._store.write(lambda rows: records.fail_results(rows, batch.id, errors, epoch))
        results = await self._store.read(lambda db: records.count_results(db, batch.id))
        names = {column: name for column, name in records.file_names(batch, *results).items() if name is not None}
        made = {
            name: await self._outputs.write(batch.id, name, column == "output_file_id")
            for column, name in names.items()
        }
        now = self._clock.stamp()
        until = None if batch.output_seconds is None else now + batch.output_seconds

        def work(rows: Rows) -> BatchRow | None:
            if (stored := records.get_batch(rows.db, batch.id)) is None:
                return None
            for column, name in names.items():
                if getattr(stored, column) != getattr(batch, column):  # the file was deleted meanwhile
                    continue
                size, sums = made.pop(name)
                filename = f"{batch.id}_{column.partition('_')[0]}.jsonl"
                file = FileRow(name, batch.owner, "batch_output", filename, size, now, batch.id, until)
                records.add_file(rows, file, sums)
                values[column] = name
            return records.change_batch(rows, batch.id, **values)

        ended = await self._store.write(work)
        for name in made:
            await self._store.remove_bytes(name)
        if ended is None:
            raise KeyError(batch.id)
        return ended
