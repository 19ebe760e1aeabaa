"""`laddertron run`: answers the lines of a file with jobs that are never relaunched. Memory is bounded."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from ..config.schema import Deployment
from ..daemon.dispatch import Dispatcher
from ..daemon.flight import Flight
from ..daemon.line_flights import LineFlights
from ..daemon.result_sink import ResultSink
from ..job import EngineJob, JobState, RankHeartbeat
from ..openai.batch_input import BatchLine, LineRules, read_lines
from ..openai.errors import ApiError
from ..openai.line_order import PreparedLine
from ..openai.prefetch import prepared
from ..openai.to_engine import wrong_model
from ..request import TokensEvent
from ..text.pool import Encoder, TextUnavailable
from ..text.tokenizer import TextModel
from .files import RunFiles
from .past import answer_name
from .progress import Communication, FailureCause, Snapshot, Summary

_LAST_REPORT_SECONDS = 2.5
_PHASES = ("failed", "stopped", "starting", "loading", "restarting", "suspect", "draining", "ready")
"""Phases in the order of display: the replica whose phase is first here is shown."""


class BatchRun(LineFlights):
    """Feeds the dispatcher, observes it (DispatchObserver) and writes its answers to the files. `jobs`: one a replica,
    not started. Requests without a seed have one that depends on engine.seed and their line alone, so that a run gives
    the same answers whether interrupted or not. `progress` is called often, and must return at once."""

    def __init__(
        self,
        jobs: Sequence[EngineJob],
        text: TextModel,
        encoder: Encoder,
        files: RunFiles,
        deployment: Deployment,
        progress: Callable[[Snapshot], None] = lambda snapshot: None,
    ) -> None:
        self.dispatcher = Dispatcher(jobs, self, relaunches=False)
        run_id = f"run-{deployment.engine.seed}"
        super().__init__(self.dispatcher, text, run_id, deduplicate=deployment.batch.deduplicate)
        self._encoder, self._files, self._progress = encoder, files, progress
        self._model, self._daemon = deployment.served_model_name, deployment.daemon
        self._lost = self._requests = self._ok = self._failed = self._skipped = 0
        self._causes: dict[str | None, FailureCause] = {}  # by error code
        self._prompt_tokens = self._tokens = self._streamed = 0
        self._states = [JobState("starting")] * len(jobs)
        self._over = self._fed = self._draining = self._stopped = False
        self._sink = ResultSink(self._store)
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._began: float | None = None
        self._last = self._answered = 0.0  # the last answer: unix seconds, and monotonic
        self._communication = Communication()
        self._reported = asyncio.Event()
        self._unread: Iterator[BatchLine | None] = self._lines()

    async def run(self, stop: asyncio.Event | None = None) -> Summary:
        """Starts the jobs unless no line needs the model; answers every line of `files.input` that is not finished,
        closes jobs and files. A bad line is an error line; a job that dies, or a full disk, ends the run with
        `Summary.reason`, everything counted as answered being in the files. Once `stop` is set nothing more is
        submitted and what is under way goes on to its end. When cancelled it closes both at once."""
        try:
            try:
                if await self._needs_model():
                    await self.dispatcher.start()
                    await self._go(stop or asyncio.Event())
            finally:
                await self.dispatcher.close()
        finally:
            await self._sink.settled()
            self._close_files()
        return self._summary()

    # what the replicas do

    def tokens(self, replica: int, events: list[TokensEvent], counted: int) -> None:
        self._streamed += counted
        self._show()

    def report(self, replica: int, report: RankHeartbeat) -> None:
        self._communication.add(replica, report, before=self._began is None)
        if self._last and self._communication.newer_than(self._last):
            self._reported.set()

    def state(self, replica: int, state: JobState) -> None:
        if self._over:
            return
        if state.reason and len(self._states) > 1:
            state = replace(state, reason=f"replica {replica}: {state.reason}")
        self._states[replica] = state
        answered = self._fed and not self._flights
        if state.phase in ("failed", "stopped") and not answered:
            self._end(state.reason or f"the job is {state.phase}")
        self._show()

    def quarantined(self) -> None:
        """Never called: lost requests do not run again."""

    # what the run does

    async def _needs_model(self) -> bool:
        """Whether a line is left that the model can answer. Handles the lines before it: refused or finished ones."""
        for count, line in enumerate(self._unread, 1):
            if count % 32 == 0:
                await asyncio.sleep(0)  # ^C must not wait for the whole file
            while self._sink.full:
                await self._sink.moved()
            if line is None:
                continue
            wrong = line.error if line.body is None else wrong_model(line.body.model, self._model)
            if wrong is None:
                self._unread = itertools.chain([line], self._unread)
                return True
            self.take(PreparedLine(line, wrong))
        self._fed = True
        return False

    async def _go(self, stop: asyncio.Event) -> None:
        """Runs until every line is answered or none can be; once `stop` is set, only lines in flight, for at most
        `daemon.drain_timeout`."""
        answering, stopping = asyncio.create_task(self._answer_all()), asyncio.create_task(stop.wait())
        try:
            await _first({answering, stopping, self._ended})
            if not (answering.done() or self._ended.done()):
                answering.cancel()
                await asyncio.gather(answering, return_exceptions=True)
                self._draining = True
                self._show()
                answering = asyncio.create_task(self._settled())
                await _first({answering, self._ended}, self._daemon.drain_timeout)
                self._stopped = bool(self._flights) or not self._fed
            if not self._ended.done():
                if answering.done():
                    await answering
                await self._last_reports()
        finally:
            for task in (answering, stopping):
                task.cancel()
            await asyncio.gather(answering, stopping, return_exceptions=True)
            self._lost = sum(len(self.lines_of(flight)) for flight in self._flights)
            self._over = True  # that a closed job is "stopped" is no failure
            self._show()

    def _close_files(self) -> None:
        """Closes the files. Never raises: lines that could not be written do not count, and become the run's reason."""
        try:
            self._files.close()
        except OSError as error:
            self._over = False
            self._end_unwritten(error)

    def _summary(self) -> Summary:
        hidden, exposed = self._communication.seconds()
        drafted, accepted = self._communication.drafts()
        return Summary(
            requests=self._requests if self._fed else self._files.total_lines,
            ok=self._ok - len(self._files.answers.waiting),
            failed=self._failed - len(self._files.errors.waiting),
            skipped=self._skipped,
            changed=self._files.changed,
            prompt_tokens=self._prompt_tokens,
            tokens=self._tokens,
            seconds=0.0 if self._began is None else max(0.0, self._answered - self._began),
            hidden_seconds=hidden,
            exposed_seconds=exposed,
            layers=self._communication.layers(),
            causes=tuple(sorted(self._causes.values(), key=lambda cause: -cause.count)),
            computed=self._communication.computed(),
            drafted=drafted,
            accepted=accepted,
            reason=self._ended.result() if self._ended.done() else None,
            lost=self._lost,
            stopped=self._stopped,
        )

    async def _answer_all(self) -> None:
        ready = prepared(self._unread, self._encoder, self._model, hungry=self.dispatcher.hungry)
        try:
            async with contextlib.aclosing(ready):
                async for prepared_line in ready:
                    while self._sink.full:
                        await self._sink.moved()
                    await self.dispatcher.room()
                    if self.take(prepared_line):
                        await asyncio.sleep(0)  # many in a row would delay tokens
                    if self._began is None and self._flights:
                        self._began = time.monotonic()
        except TextUnavailable as error:  # for longer than the encoder waits: what is in flight is answered
            await self._settled()
            self._end(str(error))
            return
        self._fed = True
        await self._settled()

    async def _settled(self) -> None:
        while self._flights:
            await self._sink.moved()
        await self._sink.settled()

    def _lines(self) -> Iterator[BatchLine | None]:
        """Yields the file's lines, None for finished ones."""
        rules = LineRules(max_line_bytes=self._daemon.limits.max_line_bytes, digests=True)
        for line in read_lines(self._files.input, rules):
            self._requests += 1
            if line.digest in self._files.finished:
                self._skipped += 1
                yield None
            else:
                yield line

    def name(self, line: BatchLine) -> str:
        if line.error is None and line.digest:
            return answer_name(line.digest, self._files.model)
        return super().name(line)  # bad lines may be equal, their ids must differ

    def answered(self, line: BatchLine, out: bytes, flight: Flight | None, error: ApiError | None) -> None:
        if flight is not None:
            self._last, self._answered = time.time(), time.monotonic()
            self._prompt_tokens += flight.answer.prompt_tokens
            self._tokens += flight.answer.completion_tokens
        if error is None:
            self._ok += 1
        else:
            self._failed += 1
            cause = self._causes.get(error.code) or FailureCause(0, error.code or "", error.message)
            self._causes[error.code] = replace(cause, count=cause.count + 1)
        self._sink.add((out, error is None), len(out))
        self._show()

    async def _store(self, lines: list[tuple[bytes, bool]]) -> None:
        """Writes lines, each with whether it is an answer, in a thread: a network file system may take long."""
        try:
            await asyncio.to_thread(self._files.write, lines)
        except OSError as error:
            self._end_unwritten(error)

    async def _last_reports(self) -> None:
        """Waits for the next heartbeats, which have the counters of the last steps."""
        if self._communication.reported and self._last:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LAST_REPORT_SECONDS):
                    await self._reported.wait()

    def _end(self, reason: str) -> None:
        if not self._ended.done() and not self._over:
            self._ended.set_result(reason)

    def _end_unwritten(self, error: OSError) -> None:
        self._end(f"the output cannot be written: {error.strerror} ({error.filename or self._files.answers.path})")

    def _show(self) -> None:
        last = min(self._states, key=lambda state: _PHASES.index(state.phase))
        phase = f"loading: {last.reason}" if last.phase == "loading" and last.reason else last.phase
        self._progress(
            Snapshot(
                phase="draining" if self._draining else phase,
                total=self._files.total_lines,
                skipped=self._skipped,
                ok=self._ok,
                failed=self._failed,
                in_flight=self.dispatcher.load,
                tokens=self._streamed,
                seconds=0.0 if self._began is None else time.monotonic() - self._began,
            )
        )


async def _first(work: set[asyncio.Future[Any]], seconds: float | None = None) -> None:
    await asyncio.wait(work, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
