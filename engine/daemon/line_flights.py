"""Sends lines of a file through the dispatcher, for the daemon's batches and `laddertron run`."""

from __future__ import annotations

import logging
import time
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b

from ..openai.answers import LARGE_VALUES, Answer
from ..openai.batch_input import BatchLine, error_line, large_answer_line, output_line
from ..openai.body import Body
from ..openai.errors import ApiError, unmade
from ..openai.line_order import PreparedLine
from ..openai.prefetch import answer_id
from ..openai.responses import whole_answer
from ..openai.to_engine import RequestOrigin, to_requests
from ..request import Request
from ..text.tokenizer import TextModel
from .dispatch import Dispatcher
from .flight import Flight, FlightOwner, Suspicion

log = logging.getLogger(__name__)


_MOST_EQUAL = 256
"""Lines that share one flight: all their results are made at once."""
_PAST, _PAST_VALUES = 1024, 1 << 17
"""Ended flights that are kept for later equal lines, and what they hold: tokens of their prompts, values of their
answers, and for four bytes of their lines as much as for a token."""


class LineFlights(FlightOwner):
    """Call `take` for a line once the dispatcher has room; `answered` is called with its result. `run_id`: the batch's
    or the run's id; answer ids and default seeds are derived from it. `deduplicate`: a line whose answer is by
    definition that of one in flight, or of one that ended lately, is answered with it."""

    def __init__(
        self, dispatcher: Dispatcher, text: TextModel, run_id: str, owner: str = "", deduplicate: bool = False
    ) -> None:
        self._dispatcher, self._text, self._run_id, self._owner = dispatcher, text, run_id, owner
        self._deduplicate = deduplicate
        self._flights: dict[Flight, BatchLine] = {}
        self._equal: dict[Flight, tuple[bytes, list[BatchLine]]] = {}  # further lines of a flight
        self._by_content: dict[bytes, Flight] = {}
        self._past: OrderedDict[bytes, tuple[Flight, int]] = OrderedDict()  # with their sizes; the last used comes last
        self._past_values = 0
        self._noted = False

    def answered(self, line: BatchLine, out: bytes, flight: Flight | None, error: ApiError | None) -> None:
        """Receives a line's output line, for the error file if `error` is set. `flight=None`: the line never ran."""
        raise NotImplementedError

    def name(self, line: BatchLine) -> str:
        return answer_id(self._run_id, line)

    def take(self, ready: PreparedLine, deaths: int = 0) -> bool:
        """Submits a line with its prompts' ids, or answers it at once: with the error that it has instead, or with a
        kept answer. Returns whether it is answered."""
        line, prompts, shared, group = ready
        if isinstance(prompts, ApiError):
            self._refuse(line, prompts)
            return True
        limits, name = self._dispatcher.limits, self.name(line)
        body, custom_id = line.body, line.custom_id
        assert limits is not None
        assert body is not None
        assert custom_id is not None
        request_id = f"{self._run_id[-12:]}-{name}"
        origin = RequestOrigin(request_id, self._run_id, custom_id, queue=self._run_id, salt=self._owner, shared=shared)
        try:
            requests = to_requests(body, prompts, limits, origin, self._text)
        except ApiError as error:
            self._refuse(line, error)
            return True
        if body.unenforced and not self._noted:
            self._noted = True  # the other lines' schemas are alike
            what = "; ".join(body.unenforced)[:1000]
            log.warning("%s, line %s: not enforced: %s", self._run_id, line.number, what)
        content = _content(body, requests) if self._deduplicate else None
        if content is not None and (first := self._by_content.get(content)) is not None:
            _, equal = self._equal[first]
            equal.append(line._replace(body=None))
            if len(equal) == _MOST_EQUAL:
                del self._by_content[content]
            self._dispatcher.pump()  # gives the room to another
            return False
        if content is not None and content in self._past:
            past, _ = self._past[content]
            if past.model == self._dispatcher.model:
                self._past.move_to_end(content)
                self.finished(self._copy(past, line._replace(body=None), time.monotonic()))
                self._dispatcher.pump()
                return True
        answer = Answer(body, requests, self._text, name, int(time.time()))
        flight = Flight(tuple(requests), answer, self, Suspicion(deaths), group=group)
        self._flights[flight] = line._replace(body=None)  # only the envelope is needed from here on
        if content is not None:
            self._by_content[content] = flight
            self._equal[flight] = content, []
        self._dispatcher.submit(flight)
        return False

    def _refuse(self, line: BatchLine, error: ApiError) -> None:
        out = error_line(line.custom_id, self.name(line), error, line.number)
        self.answered(line, out, None, error)

    # FlightOwner

    def finished(self, flight: Flight) -> None:
        self._answer(flight, self._line_of(self._flights[flight], flight))

    def _line_of(self, line: BatchLine, flight: Flight) -> bytes:
        """Makes the output line of an ended flight; may be called from any thread."""
        answer = flight.answer
        assert line.custom_id is not None
        name = self.name(line)
        if answer.error is None:
            try:
                if answer.values > LARGE_VALUES and answer.body.responses is None:
                    return large_answer_line(line.custom_id, name, answer.pieces())
                return output_line(line.custom_id, name, 200, whole_answer(answer))
            except Exception as error:
                log.exception("a response could not be built")
                answer.error = unmade(error)
        return error_line(line.custom_id, name, answer.error)

    def _answer(self, flight: Flight, out: bytes) -> None:
        content, equal = self._equal.pop(flight, (b"", []))
        if self._by_content.get(content) is flight:
            del self._by_content[content]
        copies = [self._copy(flight, line, flight.submitted) for line in equal]
        first = self._flights.pop(flight)
        self.answered(first, out, flight, flight.answer.error)
        for copy in copies:
            if copy.answer.error is None:
                self.finished(copy)
            else:  # nothing was computed for it
                line = self._flights.pop(copy)
                self.answered(line, self._line_of(line, copy), None, copy.answer.error)
        if content and flight.answer.error is None:
            self._keep(content, flight, first.length)

    def _copy(self, flight: Flight, line: BatchLine, submitted: float) -> Flight:
        """An ended flight for another line, in `_flights`."""
        copy = replace(flight, answer=flight.answer.copied(self.name(line)), submitted=submitted)
        self._flights[copy] = line
        return copy

    def _keep(self, content: bytes, flight: Flight, line_bytes: int) -> None:
        """Keeps an ended flight for equal lines that are read later, unless its answer takes long to write."""
        prompts = sum(len(request.prompt) for request in flight.requests)
        size = flight.answer.values + prompts + line_bytes // 4
        if flight.answer.values > LARGE_VALUES or size > _PAST_VALUES:
            return
        if (old := self._past.pop(content, None)) is not None:
            self._past_values -= old[1]
        while self._past and (len(self._past) >= _PAST or self._past_values + size > _PAST_VALUES):
            self._past_values -= self._past.popitem(last=False)[1][1]
        self._past[content] = flight, size
        self._past_values += size

    def lines_of(self, flight: Flight) -> list[BatchLine]:
        """The lines that the flight answers."""
        return [self._flights[flight], *self._equal.get(flight, (b"", []))[1]]


def _content(body: Body, requests: Sequence[Request]) -> bytes | None:
    """A digest that is equal for bodies with the same answer; None if it depends on the line."""
    params = requests[0].params
    if body.echo or body.tools or not body.add_generation_prompt or not (params.greedy or body.seed is not None):
        return None  # the ids of calls are unique, and an echo has the messages' own text
    rest = body._replace(messages=(), prompts=(), params=params, seed=None)
    if params.greedy:
        rest = rest._replace(params=replace(params, seed=0))
    digest = blake2b(repr(rest).encode(), digest_size=16)
    for request in requests:
        digest.update(len(request.prompt).to_bytes(8, "little") + array("q", request.prompt).tobytes())
    return digest.digest()
