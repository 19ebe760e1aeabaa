"""One running batch: sends its unfinished lines to the dispatcher and writes their results to the store."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import logging
import math
import time
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from ..metrics.observer import AnswerTimes
from ..openai.answers import LARGE_VALUES
from ..openai.batch_input import BatchLine, LineRules, digests_of, error_line, off_loop, read_lines, same_lines
from ..openai.body_worker import prepare_line
from ..openai.errors import ApiError
from ..openai.prefetch import Ready, answer_id, prepared
from ..openai.responses import whole_response
from ..openai.schema import CHAT
from .core import Core
from .flight import Flight
from .line_flights import LineFlights
from .result_sink import ResultSink
from .store import records
from .store.files import open_checked
from .store.rows import NO_TOKENS, BatchRow, Result
from .store.schema import Rows
from .store.store import StoreUnavailable
from .store.sums import BLOCK_BYTES, Damaged
from .usage import tokens_of

log = logging.getLogger(__name__)

_ERRORS, _REUSED, _MAKING = 512, 32, 4
_QUOTA_SECONDS = 2.0
_ANY = 1 << 30  # ids, if the model's limit is not needed or not known yet: the workers have their own limit


@dataclass(slots=True)
class Gate:
    """Open while batches may submit lines; `why`: the reason if closed."""

    event: asyncio.Event = field(default_factory=asyncio.Event)
    why: str = ""

    def set(self, why: str) -> None:
        """Closes the gate for this reason; "" opens it."""
        self.why = why
        (self.event.clear if why else self.event.set)()


def rules_of(batch: BatchRow, core: Core) -> LineRules:
    limits, retains = core.limits, core.retained is not None
    return LineRules(batch.endpoint, limits.max_line_bytes, limits.max_lines, retains=retains)


def damaged_results(batch: BatchRow, numbers: Sequence[int]) -> Damaged:
    some = ", ".join(map(str, numbers[:10])) + (f" and {len(numbers) - 10} more" if len(numbers) > 10 else "")
    return Damaged("result", f"batch {batch.id}: the stored results of lines {some} do not match their checksums")


class BatchFeed(LineFlights):
    """Feeds one batch. Call `run`, which returns when every line has its result; call `stop` after cancelling it."""

    def __init__(self, batch: BatchRow, core: Core, gate: Gate) -> None:
        super().__init__(core.dispatcher, core.text, batch.id, batch.owner, core.deduplicate)
        self.batch, self._core, self._gate = batch, core, gate
        self._store, self._usage = core.store, core.usage
        self._encoder = core.encoder.of(batch.owner, batch.id, math.inf)
        self._in_turn = partial(core.store.in_turn, batch.owner)
        self._rules = rules_of(batch, core)
        self._sink = ResultSink(self._store_group)
        self._making: set[asyncio.Task[None]] = set()
        self._deaths: dict[int, int] = {}
        self.only: Container[int] | None = None
        """Numbers of the lines that are computed, of those without a result; None: all."""

    @property
    def lost_some(self) -> bool:
        """True if lines of this batch were in flight when ranks were lost, and are still unanswered."""
        return any(flight.attempt > 0 for flight in self._flights)

    @property
    def _model(self) -> str:
        return self._core.model_digest()

    async def run(self) -> None:
        """Submits every unfinished line and waits for the results to be stored. Raises OSError if the input cannot be
        read, StoreUnavailable if another daemon has taken over the store."""
        finished = await self._finished()
        self._deaths = await self._store.read(lambda db: records.read_deaths(db, self.batch.id))
        with await self.input() as file:
            unfinished = read_lines(file, self._rules, finished, large=True)
            if (only := self.only) is not None:
                unfinished = (line for line in unfinished if line.number in only)
            lines = off_loop(unfinished, self._in_turn)
            served = self._core.served_model_name
            hungry = self._dispatcher.hungry
            async with contextlib.aclosing(prepared(lines, self._encoder, served, self._large, hungry)) as ready:
                async for prepared_line in ready:
                    await self._pace()
                    if self.take(prepared_line, self._deaths.get(prepared_line.line.number, 0)):
                        await asyncio.sleep(0)  # many in a row would delay tokens
        while self._flights:
            await self._sink.moved()
        await self._sink.settled()

    async def _finished(self) -> set[int]:
        """Numbers of the lines that have a result which is intact."""
        damaged: list[int] = []
        query = partial(records.finished_numbers, batch_id=self.batch.id, damaged=damaged)
        finished = await self._store.read(query, self.batch.owner)
        if damaged:
            self._store.report(damaged_results(self.batch, damaged))
        return finished

    async def input(self) -> io.BufferedReader:
        """Opens the input file, whose blocks are checked as they are read. Raises OSError or Damaged."""
        return await self._open(self.batch.input_file_id)

    async def _open(self, file_id: str) -> io.BufferedReader:
        file = await self._store.read(lambda db: records.get_file(db, file_id))
        if file is None:
            raise FileNotFoundError(errno.ENOENT, "the file was deleted", file_id)
        return io.BufferedReader(await open_checked(self._store, file), BLOCK_BYTES)

    async def _large(self, line: BatchLine, ids: bool = True) -> Ready:
        """Prepares a large line in a text worker."""
        served, limits = self._core.served_model_name, self._dispatcher.limits
        most = limits.max_model_len if ids and limits is not None else _ANY
        retained = self._core.retained
        load = None if retained is None else partial(retained.load, self.batch.owner)
        return await prepare_line(line, self.batch.endpoint, served, most, self._encoder, ids, load)

    async def checked(self, line: BatchLine) -> BatchLine:
        """Checks a large line without encoding its prompts."""
        return (await self._large(line, ids=False))[0]

    async def reuse(self, batch_id: str) -> None:
        """Copies an earlier batch's answers to lines that are in both files, if the model is the same. They are not
        counted as usage. Raises StoreUnavailable or OSError."""
        earlier = await self._store.read(lambda db: records.get_batch(db, batch_id, self.batch.owner))
        if earlier is None:
            return
        if not self._model or not earlier.model_digest == self.batch.model_digest == self._model:
            log.warning("batch %s: no answers of batch %s are reused: another model", self.batch.id, batch_id)
            return
        most = self._rules.max_line_bytes
        with await self.input() as now:
            try:
                with await self._open(earlier.input_file_id) as before:
                    digests = await self._in_turn(lambda: digests_of(before, most))
            except (FileNotFoundError, Damaged) as error:
                log.warning("batch %s: no answers of batch %s are reused: %s", self.batch.id, batch_id, error)
                return
            numbers = await self._in_turn(lambda: same_lines(digests, now, most))
        last: int | None = 0
        while last is not None:
            part, last = await self._store.read(
                partial(records.answers_after, batch_id=batch_id, number=last, limit=_REUSED)
            )
            taken = [replace(result, number=numbers[result.number]) for result in part if result.number in numbers]
            add = partial(records.add_results, batch_id=self.batch.id, results=taken, epoch=self._store.generation)
            await self._store.write(partial(add, day=None))

    async def stop(self) -> None:
        """Drops the lines in flight and stores the results that are known."""
        for flight in list(self._flights):
            self._dispatcher.drop(flight)
            self._charge(flight)
        self._flights.clear()
        await self._sink.settled()

    async def finish_rest(self, code: str, message: str) -> BatchRow:
        """Writes an error line for every line that has no result."""
        finished = await self._finished()
        error = ApiError(message, code, status=None)
        with await self.input() as file:
            part: list[Result] = []
            async for line_read in off_loop(read_lines(file, self._rules, finished, large=True), self._in_turn):
                line = line_read if line_read.raw is None else await self.checked(line_read)
                if line.custom_id is not None:
                    out = error_line(line.custom_id, answer_id(self.batch.id, line), error)
                    part.append(Result(line.custom_id, line.number, False, out.decode()))
                if len(part) == _ERRORS:
                    await self._write(part)
                    part = []
            await self._write(part)
        return self.batch

    # lines into the dispatcher

    async def _pace(self) -> None:
        while self._sink.full or len(self._making) > _MAKING:
            await self._sink.moved()
        while True:
            await self._gate.event.wait()
            while wait := self._usage.exhausted(self.batch.owner):
                await asyncio.sleep(min(wait, _QUOTA_SECONDS))  # the key file may change meanwhile
            await self._dispatcher.room(self.batch.owner)
            if not self._gate.why and not self._usage.exhausted(self.batch.owner):  # both may have changed
                return
            self._dispatcher.pump()  # gives the room to another

    # results of lines

    def finished(self, flight: Flight) -> None:
        if flight.answer.error is not None or flight.answer.values <= LARGE_VALUES:
            super().finished(flight)
            return
        making = asyncio.create_task(self._make(self._flights[flight], flight))
        self._making.add(making)
        making.add_done_callback(self._making.discard)

    async def _make(self, line: BatchLine, flight: Flight) -> None:
        out = await self._in_turn(partial(self._line_of, line, flight))
        if flight in self._flights:  # else the batch was stopped meanwhile
            self._answer(flight, out)

    def answered(self, line: BatchLine, out: bytes, flight: Flight | None, error: ApiError | None) -> None:
        tokens, response = NO_TOKENS, None
        if flight is not None and error is None:
            tokens = tokens_of(flight.answer)
            if self._core.retained is not None and flight.answer.body.stored_input is not None:
                response = self._core.retained.row(self.batch.owner, flight.answer, whole_response(flight.answer))
        result = Result(line.custom_id or "", line.number, error is None, out.decode(), tokens, response)
        self._sink.add(result, len(out))
        if flight is None:
            return
        if error is not None:
            self._charge(flight)
        answer, now = flight.answer, time.time()
        began, used = now - (time.monotonic() - flight.submitted), (answer.prompt_tokens, answer.completion_tokens)
        finish, chat = answer.finish or "stop", answer.body.endpoint == CHAT
        counts = (answer.body.ignored_fields, answer.unparsed_calls)
        times = AnswerTimes(began, began, None, now, *used, finish, False, None, chat, *counts)
        self._core.observer.request(times)

    def _charge(self, flight: Flight) -> None:
        """Adds the tokens of a line without an answer to the owner's usage; the batch's usage has only answers."""
        self._usage.add(self.batch.owner, tokens_of(flight.answer), 0)

    def died(self, flight: Flight) -> None:
        self._deaths |= dict.fromkeys((line.number for line in self.lines_of(flight)), flight.suspicion.deaths)
        self._sink.wake()

    # results into the store

    async def _store_group(self, results: list[Result]) -> None:
        await self._write(results, dict(self._deaths))

    async def _write(self, results: Iterable[Result], deaths: dict[int, int] | None = None) -> None:
        """Stores results; while the store is unavailable, waits and retries."""
        part, day, model = list(results), self._usage.today(), self._model
        responses = [result.response for result in part if result.response is not None]
        retain = self._core.retained.change(self.batch.owner, responses) if self._core.retained and responses else None

        def work(rows: Rows) -> BatchRow:
            records.add_deaths(rows, self.batch.id, deaths or {})
            if retain is not None:
                retain(rows)
            batch = records.add_results(rows, self.batch.id, part, self._store.generation, day)
            if batch.model_digest not in (None, model) and any(result.ok for result in part):
                return records.change_batch(rows, batch.id, model_digest=None)  # answers of several models
            return batch

        while True:
            try:
                before, self.batch = self.batch, await self._store.write(work)
                lines = self.batch.completed + self.batch.failed - before.completed - before.failed
                self._usage.add(self.batch.owner, self.batch.tokens.less(before.tokens), lines, stored=True)
                return
            except StoreUnavailable:
                if self._store.fenced:
                    raise
                await self._store.usable()
