"""One batch being computed: its unfinished lines through the dispatcher, their results into the store.

A line counts when the store has it. Knows the dispatcher and the store's records; no HTTP, and not what becomes of the
batch afterwards (batches.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..request import Request
from ..text import TextModel
from ..text_pool import Encoder
from . import records
from .answers import Answer, Delta
from .dispatch import Dispatcher
from .flight import Flight
from .intake import Line, LineRules, read_lines
from .lines import AnswerFault, answer_line, fault_line, refusal_line, to_bytes, unmade
from .observe import RequestTimes
from .prepare import Prompts, answer_id, prepared
from .records import BatchRow, Result
from .requests import Origin, to_requests
from .rules import BadRequest
from .schema import CHAT, COMPLETIONS, Endpoint
from .store import Store, StoreUnavailable
from .store_schema import Rows

log = logging.getLogger(__name__)

_UNSTORED = 4096  # results that may wait for the disk before nothing more is submitted
_REST = 512
_GRACE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """What the daemon's configuration says about batches."""

    served_model_name: str
    max_line_bytes: int
    max_lines: int
    max_choices: int


@dataclass(slots=True)
class Gate:
    """Open while batches may go on; `why` says what holds them."""

    event: asyncio.Event = field(default_factory=asyncio.Event)
    why: str = ""

    def set(self, why: str) -> None:
        """ "" opens it."""
        self.why = why
        (self.event.clear if why else self.event.set)()


def endpoint_of(batch: BatchRow) -> Endpoint:
    return CHAT if batch.endpoint == CHAT else COMPLETIONS


def rules_of(batch: BatchRow, settings: BatchSettings) -> LineRules:
    return LineRules(endpoint_of(batch), settings.max_line_bytes, settings.max_lines)


class BatchFeed:
    """`run` until every line has its result, or it is cancelled; then `stop`."""

    def __init__(
        self,
        batch: BatchRow,
        store: Store,
        dispatcher: Dispatcher,
        text: TextModel,
        encoder: Encoder,
        settings: BatchSettings,
        gate: Gate,
    ) -> None:
        self.batch, self._store, self._dispatcher = batch, store, dispatcher
        self._text, self._encoder, self._settings, self._gate = text, encoder, settings, gate
        self._flights: dict[Flight, Line] = {}
        self._ids: dict[Flight, str] = {}
        self._began: dict[Flight, float] = {}
        self._results: list[Result] = []
        self._deaths: dict[int, int] = {}
        self._news = asyncio.Event()
        self._writer: asyncio.Task[None] | None = None
        self._fault: BaseException | None = None

    @property
    def lost_some(self) -> bool:
        """Whether lines of this batch were aboard when ranks were lost, and have not been answered since."""
        return any(flight.epoch > 0 for flight in self._flights)

    @property
    def _path(self) -> Path:
        return self._store.path_of(self.batch.input_file_id)

    async def run(self) -> None:
        """Raises OSError if the input cannot be read, StoreUnavailable where another daemon has taken over."""
        finished = await self._store.read(lambda db: records.finished_numbers(db, self.batch.id))
        self._deaths = await self._store.read(lambda db: records.read_deaths(db, self.batch.id))
        with self._path.open("rb") as file:
            lines = read_lines(file, rules_of(self.batch, self._settings), finished)
            async with contextlib.aclosing(prepared(lines, self._encoder, self._settings.served_model_name)) as ready:
                async for line, prompts in ready:
                    await self._pace()
                    self._take(line, prompts)
        while self._flights or self._results or self._writing:
            await self._move()

    async def stop(self) -> None:
        """Drops what is under way; what was answered is stored."""
        for flight in list(self._flights):
            self._dispatcher.drop(flight)
        self._flights.clear()
        while self._results or self._writing:
            await self._move()

    async def finish_rest(self, code: str, message: str) -> BatchRow:
        """An error line for every line that has no result."""
        finished = await self._store.read(lambda db: records.finished_numbers(db, self.batch.id))
        fault = AnswerFault(code, message, None)
        with self._path.open("rb") as file:
            part: list[Result] = []
            for line in read_lines(file, rules_of(self.batch, self._settings), finished):
                if line.custom_id is not None:
                    out = fault_line(line.custom_id, answer_id(self.batch.id, line), fault)
                    part.append(Result(line.custom_id, line.number, False, to_bytes(out).decode()))
                if len(part) == _REST:
                    await self._write(part)
                    part = []
            await self._write(part)
        return self.batch

    # lines into the dispatcher

    async def _pace(self) -> None:
        while len(self._results) > _UNSTORED:
            await self._move()
        await self._gate.event.wait()
        await self._dispatcher.room()

    def _take(self, line: Line, prompts: Prompts | BadRequest) -> None:
        if isinstance(prompts, BadRequest):
            self._refuse(line, prompts)
            return
        limits, name = self._dispatcher.limits, answer_id(self.batch.id, line)
        body, custom_id = line.body, line.custom_id
        assert limits is not None
        assert body is not None
        assert custom_id is not None
        origin = Origin(
            f"{self.batch.id[-12:]}-{name}",
            self.batch.id,
            custom_id,
            queue=self.batch.id,
            salt=self.batch.owner,
            deadline=self.batch.expires_at + _GRACE_SECONDS,  # expiry is the daemon's to say
        )
        try:
            requests = to_requests(body, prompts, limits, origin, self._text.eos_ids, self._settings.max_choices)
        except BadRequest as bad:
            self._refuse(line, bad)
            return
        created = int(time.time())

        def make(of: Sequence[Request]) -> Answer:
            return Answer(body, of, self._text, name, created)

        flight = Flight(tuple(requests), make, self, deaths=self._deaths.get(line.number, 0))
        # from here on the envelope alone is needed
        self._flights[flight] = dataclasses.replace(line, body=None)
        self._ids[flight], self._began[flight] = name, time.time()
        self._dispatcher.submit(flight)

    def _refuse(self, line: Line, bad: BadRequest) -> None:
        out = refusal_line(line.custom_id, answer_id(self.batch.id, line), bad, line.number)
        self._answered(line, False, out)

    # what the dispatcher tells

    def progressed(self, flight: Flight, delta: Delta) -> None:
        """A batch's answers are shown whole."""

    def landed(self, flight: Flight) -> None:
        line, name, began = self._flights.pop(flight), self._ids.pop(flight), self._began.pop(flight)
        assert line.custom_id is not None
        answer = flight.answer
        if answer.fault is None:
            try:
                self._answered(line, True, answer_line(line.custom_id, name, answer.response()))
            except Exception as error:
                log.exception("an answer could not be made")
                answer.fault = unmade(error)
        if answer.fault is not None:
            self._answered(line, False, fault_line(line.custom_id, name, answer.fault))
        self._dispatcher.observer.request(
            RequestTimes(
                began,
                began,
                None,
                time.time(),
                answer.prompt_tokens,
                answer.completion_tokens,
                answer.finish or "stop",
                interactive=False,
            )
        )

    def died(self, flight: Flight) -> None:
        self._deaths[self._flights[flight].number] = flight.deaths
        self._kick()

    # results into the store

    def _answered(self, line: Line, ok: bool, out: dict[str, object]) -> None:
        self._results.append(Result(line.custom_id or "", line.number, ok, to_bytes(out).decode()))
        self._kick()

    @property
    def _writing(self) -> bool:
        return self._writer is not None and not self._writer.done()

    def _kick(self) -> None:
        if not self._writing:
            self._writer = asyncio.create_task(self._write_all())

    async def _write_all(self) -> None:
        try:
            deaths: dict[int, int] = {}
            while self._results or deaths != self._deaths:
                results, self._results = self._results, []
                deaths = dict(self._deaths)
                await self._write(results, deaths)
                self._news.set()
        except BaseException as error:
            self._fault = error
            raise
        finally:
            self._news.set()

    async def _write(self, results: Iterable[Result], deaths: dict[int, int] | None = None) -> None:
        """Until the disk has them."""
        part = list(results)

        def work(rows: Rows) -> BatchRow:
            records.add_deaths(rows, self.batch.id, deaths or {})
            return records.add_results(rows, self.batch.id, part, self._store.generation)

        while True:
            try:
                self.batch = await self._store.write(work)
                return
            except StoreUnavailable:
                if self._store.fenced:
                    raise
                await self._store.usable()

    async def _move(self) -> None:
        if self._fault is not None:
            raise self._fault
        self._news.clear()
        await self._news.wait()
