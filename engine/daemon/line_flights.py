"""Sends lines of a file through the dispatcher, for the daemon's batches and `laddertron run`."""

from __future__ import annotations

import logging
import time

from ..openai.answers import LARGE_VALUES, Answer
from ..openai.batch_input import BatchLine, error_line, large_answer_line, output_line
from ..openai.errors import ApiError, unmade
from ..openai.line_order import PreparedLine
from ..openai.prefetch import answer_id
from ..openai.to_engine import RequestOrigin, to_requests
from ..text.tokenizer import TextModel
from .dispatch import Dispatcher
from .flight import Flight, FlightOwner, Suspicion

log = logging.getLogger(__name__)


class LineFlights(FlightOwner):
    """Call `take` for a line once the dispatcher has room; `answered` is called with its result. `run_id`: the batch's
    or the run's id; answer ids and default seeds are derived from it."""

    def __init__(self, dispatcher: Dispatcher, text: TextModel, run_id: str, owner: str = "") -> None:
        self._dispatcher, self._text, self._run_id, self._owner = dispatcher, text, run_id, owner
        self._flights: dict[Flight, BatchLine] = {}

    def answered(self, line: BatchLine, out: bytes, flight: Flight | None, error: ApiError | None) -> None:
        """Receives a line's output line, for the error file if `error` is set. `flight=None`: the line never ran."""
        raise NotImplementedError

    def name(self, line: BatchLine) -> str:
        return answer_id(self._run_id, line)

    def take(self, ready: PreparedLine, deaths: int = 0) -> None:
        """Submits a line with its prompts' ids, or answers it with the error that it has instead."""
        line, prompts, shared, group = ready
        if isinstance(prompts, ApiError):
            self._refuse(line, prompts)
            return
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
            return
        answer = Answer(body, requests, self._text, name, int(time.time()))
        flight = Flight(tuple(requests), answer, self, Suspicion(deaths), group=group)
        self._flights[flight] = line._replace(body=None)  # only the envelope is needed from here on
        self._dispatcher.submit(flight)

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
                if answer.values > LARGE_VALUES:
                    return large_answer_line(line.custom_id, name, answer.pieces())
                return output_line(line.custom_id, name, 200, answer.response())
            except Exception as error:
                log.exception("a response could not be built")
                answer.error = unmade(error)
        return error_line(line.custom_id, name, answer.error)

    def _answer(self, flight: Flight, out: bytes) -> None:
        self.answered(self._flights.pop(flight), out, flight, flight.answer.error)
