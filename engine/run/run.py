"""`laddertron run`: lines of a file in, answers out, through one EngineJob that is kept fed and never relaunched.

Streams: at most a window of requests is in memory, whatever the file's size. Knows the door
(engine/openai/batch_input.py and its neighbours) and the protocol EngineJob; no HTTP, no MPI, no torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, replace
from typing import Any

from ..job import EngineJob, JobState, RankHeartbeat
from ..openai.batch_input import MAX_LINE_BYTES, BatchLine, LineRules, key_of, read_lines
from ..openai.batch_lines import AnswerFault, answer_line, fault_line, refusal_line, to_bytes, unmade
from ..openai.prefetch import answer_id, prepared
from ..openai.responses import Answer
from ..openai.to_engine import RequestOrigin, to_requests
from ..openai.validators import BadRequest
from ..request import ModelLimits, TokensEvent
from ..text.pool import Encoder
from ..text.tokenizer import TextModel
from .files import RunFiles
from .progress import Communication, FailureCause, RunProgress, Snapshot, Summary

log = logging.getLogger(__name__)
_FLUSH_SECONDS = 0.5
_LAST_REPORT_SECONDS = 2.5


@dataclass(frozen=True, slots=True)
class RunOptions:
    """`run_id` goes into the seeds of requests that bring none: the same run, interrupted or not, gives the same
    answers. `window=None`: four times the engine's max_num_seqs are in flight. `drain_s`: how long what is under way
    may go on, in seconds, once the run is asked to stop."""

    served_model_name: str
    run_id: str = "run-0"
    window: int | None = None
    max_line_bytes: int = MAX_LINE_BYTES
    max_choices: int | None = None
    drain_s: float = 30.0


class _Ended(Exception):
    """The job can answer nothing more, or the files can hold nothing more."""


async def run_batch(
    job: EngineJob,
    text: TextModel,
    encoder: Encoder,
    files: RunFiles,
    options: RunOptions,
    progress: RunProgress | None = None,
    stop: asyncio.Event | None = None,
) -> Summary:
    """Starts the job, answers every line of `files.input` that is not finished, closes job and files. A bad line is an
    error line; a job that dies, or a full disk, ends the run with `Summary.reason`, everything counted as answered
    being in the files. Once `stop` is set nothing more is submitted and what is under way goes on to its end. When
    cancelled it closes both at once."""
    run = _Run(job, text, encoder, files, options, progress, stop or asyncio.Event())
    try:
        try:
            await job.start(run)
            await run.go()
        finally:
            await job.close()
    finally:
        run.close_files()
    return run.summary()


@dataclass(slots=True)
class _Flight:
    """One line under way."""

    line: BatchLine
    answer_id: str
    answer: Answer
    choices: int


class _Run:
    """The listener of the job and the tasks that feed it."""

    def __init__(
        self,
        job: EngineJob,
        text: TextModel,
        encoder: Encoder,
        files: RunFiles,
        options: RunOptions,
        progress: RunProgress | None,
        stop: asyncio.Event,
    ) -> None:
        self._job, self._text, self._encoder = job, text, encoder
        self._files, self._options, self._progress = files, options, progress
        self._flights: dict[
            str, _Flight
        ] = {}  # by engine request id: a line of several prompts stands here several times
        self._in_flight = self._lost = 0  # choices; requests
        self._requests = self._ok = self._failed = self._skipped = 0
        self._causes: dict[str, FailureCause] = {}  # by error code
        self._prompt_tokens = self._tokens = self._streamed = 0
        self._phase = "starting"
        self._over = self._fed = self._draining = self._stopped = False
        self._stop = stop
        self._limits: ModelLimits | None = None
        self._moved = asyncio.Event()
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._flush_timer: asyncio.TimerHandle | None = None
        self._began: float | None = None
        self._last = self._landed = 0.0  # the last answer: unix seconds, and monotonic
        self._communication = Communication()
        self._reported = asyncio.Event()
        self._created = int(time.time())

    # -- what the job tells

    def on_tokens(self, events: list[TokensEvent]) -> None:
        for event in events:
            flight = self._flights.get(event.request_id)
            if flight is None:
                continue
            try:
                _, stop = flight.answer.take(event)
            except Exception as fault:  # whoever calls us goes on regardless: the line would wait for ever
                stop, flight.answer.fault = None, _unmade(fault)
            if stop is not None:
                self._job.stop_choice(stop.request_id, stop.choice, stop.n_tokens)
            self._streamed += len(event.tokens)
            if flight.answer.done:
                self._land(flight)
        self._show()

    def on_lost(self, request_ids: list[str], reason: str, suspects: int) -> None:
        self._end(reason)

    def on_state(self, state: JobState) -> None:
        if self._over:
            return
        self._phase = f"{state.phase}: {state.reason}" if state.phase == "loading" and state.reason else state.phase
        if state.phase in ("failed", "stopped"):
            self._end(state.reason or f"the job is {state.phase}")
        self._moved.set()
        self._show()

    def on_report(self, report: RankHeartbeat) -> None:
        self._communication.add(report, before=self._began is None)
        if self._last and self._communication.newer_than(self._last):
            self._reported.set()

    # -- what the run does

    async def go(self) -> None:
        """Until every line is answered, or nothing more can be."""
        try:
            with contextlib.suppress(_Ended):
                await self._until_ended(self._answer_or_stop())
                await self._last_reports()
        finally:
            self._lost = len({id(flight) for flight in self._flights.values()})
            self._over = True  # that a closed job is "stopped" is no failure
            if self._flush_timer is not None:
                self._flush_timer.cancel()
            self._show()

    def close_files(self) -> None:
        """Never raises: what could not be written does not count, and is the run's reason."""
        try:
            self._files.close()
        except OSError as fault:
            self._over = False
            self._end_unwritten(fault)

    def summary(self) -> Summary:
        hidden, exposed = self._communication.seconds()
        drafted, accepted = self._communication.drafts()
        return Summary(
            requests=self._requests if self._fed else self._files.total_lines,
            ok=self._ok - self._files.answers.unwritten,
            failed=self._failed - self._files.errors.unwritten,
            skipped=self._skipped,
            prompt_tokens=self._prompt_tokens,
            tokens=self._tokens,
            seconds=0.0 if self._began is None else max(0.0, self._landed - self._began),
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

    async def _answer_or_stop(self) -> None:
        """Everything, or once asked to stop what is under way, for at most `drain_s`."""
        answering, stopping = asyncio.create_task(self._answer_all()), asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait((answering, stopping), return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                await answering
                return
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)
            self._draining = True
            self._show()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._options.drain_s):
                    while self._flights:
                        await self._move()
            self._stopped = bool(self._flights) or not self._fed
        finally:
            for task in (answering, stopping):
                task.cancel()
            await asyncio.gather(answering, stopping, return_exceptions=True)

    async def _answer_all(self) -> None:
        await self._wait_ready()
        ready = prepared(self._lines(), self._encoder, self._options.served_model_name)
        async with contextlib.aclosing(ready):
            async for line, prompts in ready:
                if isinstance(prompts, BadRequest):
                    self._refuse(line, prompts)
                else:
                    await self._submit(line, prompts)
        self._fed = True
        while self._flights:
            await self._move()

    def _lines(self) -> Iterator[BatchLine | None]:
        """The file's lines, None for those that are finished."""
        for line in read_lines(self._files.input, LineRules(max_line_bytes=self._options.max_line_bytes)):
            self._requests += 1
            twice = line.error is not None and line.error.code == "duplicate_custom_id"
            if line.custom_id is not None and not twice and self._finished(line.custom_id):
                self._skipped += 1
                yield None
            else:
                yield line

    async def _submit(self, line: BatchLine, prompts: list[tuple[int, ...]]) -> None:
        assert self._limits is not None
        assert line.body is not None
        assert line.custom_id is not None
        name = answer_id(self._options.run_id, line)
        origin = RequestOrigin(name, self._options.run_id, line.custom_id, queue=self._options.run_id)
        try:
            requests = to_requests(line.body, prompts, self._limits, origin, self._text, self._options.max_choices)
        except BadRequest as bad:
            self._refuse(line, bad)
            return
        choices = line.body.params.n * len(requests)
        window = self._options.window or 4 * self._limits.max_num_seqs
        while self._in_flight and self._in_flight + choices > window:
            await self._move()
        await self._wait_ready()
        flight = _Flight(line, name, Answer(line.body, requests, self._text, name, self._created), choices)
        self._in_flight += choices
        if self._began is None:
            self._began = time.monotonic()
        for request in requests:
            self._flights[request.request_id] = flight
            self._job.submit(request)

    def _land(self, flight: _Flight) -> None:
        """A line's answer is complete, or has failed."""
        assert flight.line.custom_id is not None
        answer, self._last, self._landed = flight.answer, time.time(), time.monotonic()
        for request in answer.requests:
            self._flights.pop(request.request_id, None)
            if answer.fault is not None:
                self._job.cancel(request.request_id)
        self._in_flight -= flight.choices
        self._prompt_tokens += answer.prompt_tokens
        self._tokens += answer.completion_tokens
        out = b""
        if answer.fault is None:
            try:
                out = to_bytes(answer_line(flight.line.custom_id, flight.answer_id, answer.response()))
            except Exception as fault:
                answer.fault = _unmade(fault)
        if answer.fault is None:
            self._ok += 1
            self._write(out)
        else:
            self._fail(answer.fault.code, answer.fault.message)
            self._write(to_bytes(fault_line(flight.line.custom_id, flight.answer_id, answer.fault)), error=True)
        self._moved.set()

    def _refuse(self, line: BatchLine, bad: BadRequest) -> None:
        self._fail(bad.code, bad.message)
        self._write(
            to_bytes(refusal_line(line.custom_id, answer_id(self._options.run_id, line), bad, line.number)), error=True
        )
        self._show()

    def _fail(self, code: str, message: str) -> None:
        self._failed += 1
        cause = self._causes.get(code) or FailureCause(0, code, message)
        self._causes[code] = replace(cause, count=cause.count + 1)

    def _write(self, out: bytes, error: bool = False) -> None:
        try:
            (self._files.errors if error else self._files.answers).append(out)
        except OSError as fault:
            self._end_unwritten(fault)
        if self._flush_timer is None:
            self._flush_timer = asyncio.get_running_loop().call_later(_FLUSH_SECONDS, self._flush)

    def _flush(self) -> None:
        self._flush_timer = None
        try:
            self._files.flush()
        except OSError as fault:
            self._end_unwritten(fault)

    def _finished(self, custom_id: str) -> bool:
        return bool(self._files.finished) and key_of(custom_id) in self._files.finished

    # -- waiting

    async def _wait_ready(self) -> None:
        while (state := self._job.state).phase != "ready" or (state.limits or self._limits) is None:
            await self._move()
        self._limits = state.limits or self._limits

    async def _move(self) -> None:
        self._moved.clear()
        await self._moved.wait()

    async def _until_ended(self, work: Coroutine[Any, Any, None]) -> None:
        """`work` to its end, unless the job ends first: then _Ended."""
        task = asyncio.create_task(work)
        try:
            both: set[asyncio.Future[Any]] = {task, self._ended}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if self._ended.done():
                raise _Ended(self._ended.result())
            await task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _last_reports(self) -> None:
        """Counters of the last steps arrive with the next heartbeat."""
        if self._communication.reported and self._last:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._reported.wait(), _LAST_REPORT_SECONDS)

    def _end(self, reason: str) -> None:
        if not self._ended.done() and not self._over:
            self._ended.set_result(reason)

    def _end_unwritten(self, fault: OSError) -> None:
        self._end(f"the output cannot be written: {fault.strerror} ({self._files.answers.path})")

    # -- showing

    def _show(self) -> None:
        if self._progress is not None:
            self._progress.update(
                Snapshot(
                    phase="draining" if self._draining else self._phase,
                    total=self._files.total_lines,
                    skipped=self._skipped,
                    ok=self._ok,
                    failed=self._failed,
                    in_flight=self._in_flight,
                    tokens=self._streamed,
                    seconds=0.0 if self._began is None else time.monotonic() - self._began,
                )
            )


def _unmade(fault: Exception) -> AnswerFault:
    log.error("an answer could not be made", exc_info=fault)
    return unmade(fault)
