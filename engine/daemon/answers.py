"""Tokens -> what the client gets: response bodies and streamed chunks.

One `Answer` gathers the events of one body's requests, turns them into text, finds stop strings, and builds the JSON.
Pure but for its own state; knows neither HTTP nor files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..detokenise import OutputText
from ..request import FinishReason, Request, TokenLogprob, TokensEvent
from ..text import TextModel
from .lines import AnswerFault
from .logprobs import Offsets, chat_logprobs, completion_logprobs, prompt_logprobs
from .schema import CHAT, Body

_FAULTS: dict[FinishReason, tuple[str, str, int | None]] = {
    "cancelled": ("batch_cancelled", "the request was cancelled", None),
    "timeout": ("request_timeout", "the request's time was over", None),
    "numerical_error": ("numerical_error", "the model computed values that are not finite", 500),
    "error": ("engine_error", "the engine failed on this request", 500),
}


@dataclass(frozen=True, slots=True)
class Delta:
    """What one event added to one choice. `finish` is set on the choice's last."""

    choice: int
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: str | None = None
    stop_reason: int | str | None = None


@dataclass(frozen=True, slots=True)
class Stop:
    """A stop string matched: for `EngineJob.stop_choice`."""

    request_id: str
    choice: int
    n_tokens: int


@dataclass(slots=True)
class _Choice:
    out: OutputText
    offsets: Offsets  # of what was streamed
    seen: int = 0  # tokens that the engine has reported
    tokens: int = 0  # tokens that count
    parts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: str | None = None
    stop_reason: int | str | None = None
    begun: bool = False  # streaming: its first chunk is out


class Answer:
    """One body's answer in the making. Choice i of prompt p has index p * n + i."""

    def __init__(
        self,
        body: Body,
        requests: Sequence[Request],
        text: TextModel,
        answer_id: str,
        created: int,
    ) -> None:
        self.body, self.requests, self.created = body, tuple(requests), created
        self.answer_id = f"{'chatcmpl' if body.endpoint == CHAT else 'cmpl'}-{answer_id}"
        self.fault: AnswerFault | None = None
        self._text = text
        self._prompt_of = {request.request_id: i for i, request in enumerate(requests)}
        self._cached = [0] * len(requests)
        self._prompt_logprobs: dict[int, tuple[TokenLogprob | None, ...]] = {}
        self._choices = [self._new_choice(request) for request in requests for _ in range(body.n)]
        self._open = len(self._choices)

    def _new_choice(self, request: Request) -> _Choice:
        body = self.body
        out = self._text.output(
            body.stop, body.include_stop_str_in_output, request.params.min_tokens, body.skip_special_tokens
        )
        return _Choice(out, self._offsets())

    def _offsets(self) -> Offsets:
        return Offsets(self._text.stream(self.body.skip_special_tokens, continues=not self.body.echo))

    @property
    def done(self) -> bool:
        """Every choice has ended, or the request has failed."""
        return self._open == 0 or self.fault is not None

    @property
    def finish(self) -> str | None:
        """How the first choice ended, or which fault ended all."""
        return self.fault.code if self.fault is not None else self._choices[0].finish

    @property
    def completion_tokens(self) -> int:
        return sum(choice.tokens for choice in self._choices)

    @property
    def place(self) -> int:
        """How far it has come: the tokens that the engine has reported of its longest choice."""
        return max(choice.seen for choice in self._choices)

    @property
    def prompt_tokens(self) -> int:
        return sum(len(request.prompt) for request in self.requests)

    def take(self, event: TokensEvent) -> tuple[Delta | None, Stop | None]:
        """One event of one of this answer's requests: what to stream, and whether to tell the engine to stop. Events
        of choices that have ended, and tokens reported before, count for nothing."""
        prompt = self._prompt_of[event.request_id]
        choice = self._choices[prompt * self.body.n + event.choice]
        index = prompt * self.body.n + event.choice
        if event.prompt_logprobs is not None:
            self._prompt_logprobs[prompt] = event.prompt_logprobs
        self._cached[prompt] = max(self._cached[prompt], event.cached_tokens)
        if choice.finish is not None or self.fault is not None:
            return None, None
        if event.start > choice.seen:
            self.fault = AnswerFault("engine_error", f"tokens {choice.seen} to {event.start} were never reported")
            return None, None
        new = event.tokens[choice.seen - event.start :]
        logprobs = () if event.logprobs is None else event.logprobs[choice.seen - event.start :]
        choice.seen += len(new)
        text = choice.out.push(new)
        taken = choice.out.n_tokens - choice.tokens
        choice.tokens = choice.out.n_tokens
        stop = None
        if choice.out.matched is None and event.finish is not None:
            held = self._end(choice, event)
            if held is None:
                return None, None
            text += held
        if choice.out.matched is not None:
            choice.finish, choice.stop_reason = "stop", choice.out.matched
            if event.finish is None:
                stop = Stop(event.request_id, event.choice, choice.tokens)
        if choice.finish is not None:
            self._open -= 1
        choice.parts.append(text)
        if choice.finish == "stop" and choice.out.matched is None and self.body.endpoint != CHAT:
            taken += 1  # the stop token's: evaluation harnesses take the last entry for the one that was generated
        kept = logprobs[:taken]
        choice.logprobs += kept
        return Delta(index, text, kept, choice.finish, choice.stop_reason), stop

    def _end(self, choice: _Choice, event: TokensEvent) -> str | None:
        """The engine's own end of a choice: the text that was still held back, None if it failed."""
        assert event.finish is not None
        if event.finish in _FAULTS:
            code, message, status = _FAULTS[event.finish]
            self.fault = AnswerFault(code, event.message or message, status)
            return None
        text = choice.out.finish()
        choice.finish = event.finish
        if event.stop_token is not None:
            choice.tokens += 1
            if event.stop_token in self.body.stop_token_ids:
                choice.stop_reason = event.stop_token
                if self.body.include_stop_str_in_output:
                    text += self._text.decode([event.stop_token], skip_special=False)
        return text

    def usage(self) -> dict[str, Any]:
        prompt, completion = self.prompt_tokens, self.completion_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached)},
        }

    def response(self) -> dict[str, Any]:
        """The whole body, once `done` and without a fault."""
        chat = self.body.endpoint == CHAT
        body = self._head("chat.completion" if chat else "text_completion")
        body["choices"] = [self._whole(i, choice) for i, choice in enumerate(self._choices)]
        body["usage"] = self.usage()
        if chat and self.body.prompt_logprobs is not None:
            body["prompt_logprobs"] = self._scored(0)
        return body

    def begun(self, choice: int) -> bool:
        """Whether `chunks` has given out what comes before a choice's first text."""
        return self._choices[choice].begun

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        """The chunks to stream for a delta: none while text is held back, the role or the echo before a choice's
        first text."""
        choice, chat = self._choices[delta.choice], self.body.endpoint == CHAT
        out = []
        if not choice.begun:
            choice.begun = True
            if chat:
                out.append(self._chunk(delta.choice, {"delta": {"role": "assistant", "content": ""}}, None))
            elif self.body.echo:
                part = {"text": self._echo(delta.choice // self.body.n)}
                out.append(self._chunk(delta.choice, part, self._echo_logprobs(delta.choice)))
        if delta.text or delta.logprobs or delta.finish is not None:
            logprobs = None
            if self.body.logprobs is not None and delta.logprobs:
                logprobs = self._logprobs(choice, delta.logprobs)
            shown: dict[str, Any] = (
                {"delta": {"content": delta.text} if delta.text else {}} if chat else {"text": delta.text}
            )
            out.append(self._chunk(delta.choice, shown, logprobs, delta.finish, delta.stop_reason))
        return out

    def usage_chunk(self) -> dict[str, Any]:
        """The last chunk, where `stream_options.include_usage` asked for it."""
        return {**self._stream_head(), "choices": [], "usage": self.usage()}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.answer_id, "object": kind, "created": self.created, "model": self.body.model}

    def _stream_head(self) -> dict[str, Any]:
        return self._head("chat.completion.chunk" if self.body.endpoint == CHAT else "text_completion")

    def _chunk(
        self,
        index: int,
        shown: dict[str, Any],
        logprobs: dict[str, Any] | None,
        finish: str | None = None,
        stop_reason: int | str | None = None,
    ) -> dict[str, Any]:
        choice = {"index": index, **shown, "logprobs": logprobs, "finish_reason": finish}
        if finish is not None:
            choice["stop_reason"] = stop_reason
        usage = {"usage": None} if self.body.include_usage else {}
        return {**self._stream_head(), "choices": [choice], **usage}

    def _whole(self, index: int, choice: _Choice) -> dict[str, Any]:
        text = "".join(choice.parts)
        logprobs = None
        out: dict[str, Any] = {"index": index}
        if self.body.endpoint == CHAT:
            if self.body.logprobs is not None:
                logprobs = self._logprobs(choice, choice.logprobs)
            out["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            prompt = index // self.body.n
            if self.body.logprobs is not None:
                before = list(self._echo_items(prompt)) if self.body.echo else []
                items = before + [(i.token, i) for i in choice.logprobs]
                logprobs = completion_logprobs(items, self._text.pieces, self.body.logprobs, self._offsets())
            out["text"] = self._echo(prompt) + text if self.body.echo else text
            if self.body.prompt_logprobs is not None:
                out["prompt_logprobs"] = self._scored(prompt)
        return {**out, "logprobs": logprobs, "finish_reason": choice.finish, "stop_reason": choice.stop_reason}

    def _logprobs(self, choice: _Choice, items: Sequence[TokenLogprob]) -> dict[str, Any]:
        top = self.body.logprobs or 0
        if self.body.endpoint == CHAT:
            return chat_logprobs(items, self._text.pieces, top)
        return completion_logprobs([(i.token, i) for i in items], self._text.pieces, top, choice.offsets)

    def _echo(self, prompt: int) -> str:
        """The prompt as it was sent, or as its ids read."""
        sent = self.body.prompts[prompt]
        if isinstance(sent, str) and self.body.truncate_prompt_tokens is None:
            return sent
        return self._text.decode(self.requests[prompt].prompt, self.body.skip_special_tokens)

    def _echo_items(self, prompt: int) -> list[tuple[int, TokenLogprob | None]]:
        ids = self.requests[prompt].prompt
        scored = self._prompt_logprobs.get(prompt, (None,) * len(ids))
        return list(zip(ids, scored, strict=False))

    def _echo_logprobs(self, index: int) -> dict[str, Any] | None:
        if self.body.logprobs is None:
            return None
        items = self._echo_items(index // self.body.n)
        return completion_logprobs(items, self._text.pieces, self.body.logprobs, self._choices[index].offsets)

    def _scored(self, prompt: int) -> list[dict[str, Any] | None]:
        items = self._prompt_logprobs.get(prompt, ())
        return prompt_logprobs(items, self._text.pieces, self.body.prompt_logprobs or 0)
