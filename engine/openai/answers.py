"""Response bodies, streamed chunks and server-sent events from tokens."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from json.encoder import encode_basestring as quoted
from typing import Any

from ...topology.json_codec import one_line
from ..request import Request, TokenLogprob, TokensEvent
from ..text.call_values import parameter_types
from ..text.chat_formats import marks_of
from ..text.chat_parts import ChatParts, OutputParts, Part, message_of
from ..text.detokenizer import OutputText
from ..text.tokenizer import TextModel
from .body import Body
from .chat_messages import text_of
from .choice import Choice, Delta
from .errors import ApiError
from .logprobs import Names, Offsets, TokenIds, chat_logprobs, completion_logprobs, prompt_logprobs
from .schema import CHAT
from .to_engine import opens_reasoning

LARGE_VALUES = 4096  # a larger answer is made in a thread, in pieces
_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)


class Answer:
    """One body's answer while it is generated. Choice i of prompt p has index p * n + i."""

    def __init__(
        self,
        body: Body,
        requests: Sequence[Request],
        text: TextModel,
        answer_id: str,
        created: int,
    ) -> None:
        self.body, self.requests, self.created = body, tuple(requests), created
        self.base_id = answer_id
        """The answer's id without the prefix of its kind."""
        self.error: ApiError | None = None
        self._text = text
        self._names: Names = TokenIds(text.pieces) if body.return_tokens_as_token_ids else text.pieces
        last = body.messages[-1] if body.messages else {"role": "", "content": ""}
        self._reasoning = text.chat.reasoning
        self._parameter_types = parameter_types(body.tools)
        self.divided = body.endpoint == CHAT and (bool(body.tools) or self._reasoning is not None)
        """Whether a chat's text is split into reasoning, content and calls."""
        self._role = "assistant" if body.add_generation_prompt else last["role"]
        self._continued = text_of(last["content"]) if body.echo and last["role"] == self._role else ""
        self._begin()

    def _begin(self) -> None:
        self._cached = [0] * len(self.requests)
        self._echoes: dict[int, str] = {}
        self._prompt_logprobs: dict[int, tuple[TokenLogprob | None, ...]] = {}
        requests = [request for request in self.requests for _ in range(self.body.params.n)]
        self._choices = [self._new_choice(index, request) for index, request in enumerate(requests)]
        self._open = len(self._choices)

    def restarted(self) -> Answer:
        """An answer to the same body, without tokens."""
        fresh = copy.copy(self)
        fresh._begin()
        return fresh

    def copied(self, answer_id: str) -> Answer:
        """This answer for another line, whose prompt was not computed."""
        other = copy.copy(self)
        other.base_id = answer_id
        other._cached = [len(request.prompt) for request in self.requests]
        return other

    def _new_choice(self, index: int, request: Request) -> Choice:
        body, tool_format = self.body, None
        if body.tools and body.tool_choice != "named":  # whose arguments are all of the content
            tool_format = "array" if body.tool_choice == "required" else self._text.chat.tool_format
        marks = marks_of(tool_format, self._reasoning) if self.divided else frozenset[str]()
        stream = self._text.pieces.stream(body.skip_special_tokens, continues=True, marks=marks)
        stops = (body.stop, body.include_stop_str_in_output, request.params.min_tokens)
        out = OutputText(stream, *stops)
        if self.divided:
            out = OutputParts(stream, self._parser(index, request, tool_format), *stops)
        return Choice(body, self._text, out, self._offsets())

    def _offsets(self) -> Offsets:
        return Offsets(self._text.pieces.stream(self.body.skip_special_tokens, continues=not self.body.echo))

    @property
    def answer_id(self) -> str:
        return f"{'chatcmpl' if self.body.endpoint == CHAT else 'cmpl'}-{self.base_id}"

    @property
    def done(self) -> bool:
        """True if every choice has ended, or the request has failed."""
        return self._open == 0 or self.error is not None

    @property
    def finish(self) -> str | None:
        """The finish reason of the first choice, or the code of the error that ended all."""
        return self.error.code if self.error is not None else self._choices[0].finish

    @property
    def completion_tokens(self) -> int:
        return sum(choice.tokens for choice in self._choices)

    @property
    def place(self) -> int:
        """The number of tokens that the engine has reported, over all choices."""
        return sum(choice.seen for choice in self._choices)

    def emitted(self, prompt: int) -> tuple[tuple[int, ...] | None, ...]:
        """The value of `Request.emitted` with which another engine can resume a prompt's request."""
        n = self.body.params.n
        choices = self._choices[prompt * n : (prompt + 1) * n]
        ids = tuple(None if choice.finish is not None else tuple(choice.ids) for choice in choices)
        return ids if any(part != () for part in ids) else ()

    @property
    def cached_tokens(self) -> int:
        return sum(self._cached)

    @property
    def prompt_tokens(self) -> int:
        return sum(len(request.prompt) for request in self.requests)

    def take(self, event: TokensEvent, prompt: int = 0) -> Delta | None:
        """Applies one event of the answer's `prompt`-th request; returns what it adds to its choice. Ignores events of
        finished choices (None): the engine may compute on until it is told of a stop string."""
        index = prompt * self.body.params.n + event.choice
        choice = self._choices[index]
        if event.prompt_logprobs is not None:
            self._prompt_logprobs[prompt] = event.prompt_logprobs
        self._cached[prompt] = max(self._cached[prompt], event.cached_tokens)
        if choice.finish is not None or self.error is not None:
            return None
        delta = choice.take(event, index)
        if isinstance(delta, ApiError):
            self.error = delta
            return None
        if delta.finish is not None:
            self._open -= 1
        return delta

    def usage(self) -> dict[str, Any]:
        prompt, completion = self.prompt_tokens, self.completion_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached)},
            **self._reasoning_usage(),
        }

    def _reasoning_usage(self) -> dict[str, Any]:
        if self._reasoning is None or not self.divided:
            return {}
        return {"completion_tokens_details": {"reasoning_tokens": sum(c.reasoning_tokens for c in self._choices)}}

    @property
    def unparsed_calls(self) -> int:
        """Texts that look like a tool call and were returned as content."""
        return sum(choice.unparsed_calls for choice in self._choices)

    @property
    def values(self) -> int:
        """The approximate number of values of the body, which determines the time to make it."""
        params = self.body.params
        top = 0 if params.logprobs is None else params.logprobs + 1
        scored = 0 if params.prompt_logprobs is None else params.prompt_logprobs + 1
        of_prompts = scored + (top + 1) * self.body.echo + self.body.return_token_ids
        return self.place * (1 + top) + self.prompt_tokens * params.n * of_prompts

    def response(self) -> dict[str, Any]:
        """The response body. Requires `done` and no error."""
        choices = [self._whole(i, choice) for i, choice in enumerate(self._choices)]
        return {**self._head(), "choices": choices, **self._rest()}

    def pieces(self) -> Iterator[bytes]:
        """The response body's JSON in pieces, so that no single call encodes all of a large body."""
        yield _JSON.encode(self._head()).encode()[:-1] + b',"choices":['
        for index, choice in enumerate(self._choices):
            yield b"," if index else b""
            if self.values > len(self._choices) * LARGE_VALUES:
                yield from (one_line(part).encode() for part in _JSON.iterencode(self._whole(index, choice)))
            else:
                yield one_line(_JSON.encode(self._whole(index, choice))).encode()
        yield b"]," + _JSON.encode(self._rest()).encode()[1:]

    def _rest(self) -> dict[str, Any]:
        rest: dict[str, Any] = {"usage": self.usage()}
        if self.body.endpoint != CHAT:
            return rest
        if self.body.params.prompt_logprobs is not None:
            rest["prompt_logprobs"] = self._scored(0)
        return {**rest, **self._prompt_ids(0)}

    @property
    def parts(self) -> list[Part]:
        """The first choice's parts, in the order of its text."""
        choice = self._choices[0]
        text = "".join(choice.parts)
        return choice.chat_parts if self.divided else [{"content": text}] if text else []

    def begun(self, choice: int) -> bool:
        """True if `chunks` has returned the role, or the echo, of a choice."""
        return self._choices[choice].begun

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        """The chunks of a delta: none while text is held back. A choice's first text follows its role or echo."""
        choice, chat = self._choices[delta.choice], self.body.endpoint == CHAT
        out = []
        if not choice.begun:
            choice.begun = True
            if chat:
                first = self._chunk(delta.choice, {"delta": {"role": self._role, "content": self._continued}}, None)
                out.append({**first, **self._prompt_ids(0)})
            elif self.body.echo or self.body.return_token_ids:
                prompt = delta.choice // self.body.params.n
                part = {"text": self._echo(prompt) if self.body.echo else "", **self._prompt_ids(prompt)}
                scored = self._echo_logprobs(delta.choice) if self.body.echo else None
                out.append(self._chunk(delta.choice, part, scored))
        finish = delta.finish
        if self.divided:
            out += [self._chunk(delta.choice, {"delta": part}, None) for part in self._shown(delta.chat_parts)]
            finish = self._finish(choice, finish)
        if delta.text or delta.logprobs or delta.finish is not None or (delta.tokens and self.body.return_token_ids):
            logprobs = None
            if self.body.params.logprobs is not None and delta.logprobs:
                logprobs = self._logprobs(choice, delta.logprobs)
            shown: dict[str, Any] = (
                {"delta": {"content": delta.text} if delta.text else {}} if chat else {"text": delta.text}
            )
            if self.body.return_token_ids:
                shown["token_ids"] = delta.tokens
            if delta.finish is not None:
                shown.update(choice.digest())
            out.append(self._chunk(delta.choice, shown, logprobs, finish, delta.stop_reason))
        return out

    def _parser(self, index: int, request: Request, tool_format: str | None) -> ChatParts:
        body = self.body
        return ChatParts(
            lambda number: f"call_{self.base_id}_{index}_{number}",
            tool_format,
            self._parameter_types,
            body.tool_name,
            self._reasoning,
            opens_reasoning(self._text, request.prompt),
            body.parallel_tool_calls,
        )

    def _shown(self, parts: Sequence[Part]) -> list[Part]:
        return [part for part in parts if self.body.include_reasoning or "reasoning_content" not in part]

    def _finish(self, choice: Choice, finish: str | None) -> str | None:
        """Replaces "stop" by "tool_calls" after calls; as in OpenAI's API, not if `tool_choice` named the tool."""
        return "tool_calls" if finish == "stop" and choice.calls and not self.body.tool_name else finish

    def _prompt_ids(self, prompt: int) -> dict[str, Any]:
        return {"prompt_token_ids": self.requests[prompt].prompt} if self.body.return_token_ids else {}

    def usage_chunk(self) -> dict[str, Any]:
        """The last chunk if `stream_options.include_usage` is set."""
        return {**self._head(".chunk"), "choices": [], "usage": self.usage()}

    def _head(self, chunk: str = "") -> dict[str, Any]:
        kind = f"chat.completion{chunk}" if self.body.endpoint == CHAT else "text_completion"
        return {"id": self.answer_id, "object": kind, "created": self.created, "model": self.body.model}

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
        usage: dict[str, Any] = {"usage": None} if self.body.include_usage else {}
        if self.body.continuous_usage_stats:
            usage["usage"] = self.usage()
        return {**self._head(".chunk"), "choices": [choice], **usage}

    def _whole(self, index: int, choice: Choice) -> dict[str, Any]:
        text = "".join(choice.parts)
        logprobs, finish = None, choice.finish
        out: dict[str, Any] = {"index": index}
        if self.body.endpoint == CHAT:
            if self.body.params.logprobs is not None:
                logprobs = self._logprobs(choice, choice.logprobs)
            message: Part = {"content": text}
            if self.divided:
                message = message_of(self._shown(choice.chat_parts))
                finish = self._finish(choice, finish)
            if self._continued:
                message["content"] = self._continued + (message["content"] or "")
            out["message"] = {"role": self._role, **message, "refusal": None}
        else:
            prompt = index // self.body.params.n
            if self.body.params.logprobs is not None:
                before = list(self._echo_items(prompt)) if self.body.echo else []
                items = before + [(i.token, i) for i in choice.logprobs]
                logprobs = completion_logprobs(items, self._names, self.body.params.logprobs, self._offsets())
            out["text"] = self._echo(prompt) + text if self.body.echo else text
            if self.body.params.prompt_logprobs is not None:
                out["prompt_logprobs"] = self._scored(prompt)
            out.update(self._prompt_ids(prompt))
        if self.body.return_token_ids:
            out["token_ids"] = choice.ids
        out.update(choice.digest())
        return {**out, "logprobs": logprobs, "finish_reason": finish, "stop_reason": choice.stop_reason}

    def _logprobs(self, choice: Choice, items: Sequence[TokenLogprob]) -> dict[str, Any]:
        top = self.body.params.logprobs or 0
        if self.body.endpoint == CHAT:
            return chat_logprobs(items, self._names, top)
        return completion_logprobs([(i.token, i) for i in items], self._names, top, choice.offsets)

    def _echo(self, prompt: int) -> str:
        """The prompt as sent, or the text of its ids."""
        sent = self.body.prompts[prompt]
        if isinstance(sent, str) and self.body.truncate_prompt_tokens is None:
            return sent
        if prompt not in self._echoes:  # the same for n choices
            self._echoes[prompt] = self._text.decode(self.requests[prompt].prompt, self.body.skip_special_tokens)
        return self._echoes[prompt]

    def _echo_items(self, prompt: int) -> list[tuple[int, TokenLogprob | None]]:
        ids = self.requests[prompt].prompt
        scored = self._prompt_logprobs.get(prompt, (None,) * len(ids))
        return list(zip(ids, scored, strict=False))

    def _echo_logprobs(self, index: int) -> dict[str, Any] | None:
        if self.body.params.logprobs is None:
            return None
        items = self._echo_items(index // self.body.params.n)
        return completion_logprobs(items, self._names, self.body.params.logprobs, self._choices[index].offsets)

    def _scored(self, prompt: int) -> list[dict[str, Any] | None]:
        items = self._prompt_logprobs.get(prompt, ())
        return prompt_logprobs(items, self._text.pieces, self.body.params.prompt_logprobs or 0)


_MARK = "\N{OBJECT REPLACEMENT CHARACTER}text\N{OBJECT REPLACEMENT CHARACTER}"
_render = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode

DONE = b"data: [DONE]\n\n"


def event(value: dict[str, Any]) -> bytes:
    return b"data: " + one_line(_render(value)).encode() + b"\n\n"


class EventWriter:
    """Makes the server-sent events of one answer. This runs for every token of every client, so plain text is inserted
    into a frame that was rendered once."""

    def __init__(self) -> None:
        self._frames: dict[int, tuple[bytes, bytes]] = {}

    def of(self, answer: Answer, delta: Delta) -> bytes:
        """The server-sent events for a delta; b"" while text is held back."""
        alike = not (answer.divided or answer.body.return_token_ids or answer.body.continuous_usage_stats)
        if delta.finish is not None or delta.logprobs or not (alike and answer.begun(delta.choice)):
            return b"".join([event(chunk) for chunk in answer.chunks(delta)])
        if not delta.text:
            return b""
        before, after = self._frames.get(delta.choice) or self._cut(answer, delta.choice)
        return before + one_line(quoted(delta.text)).encode() + after

    def end(self, answer: Answer) -> bytes:
        """The last events: the error, or the usage if the body asks for it; then [DONE]."""
        if answer.error is not None:
            return self.failed(answer.error)
        return (event(answer.usage_chunk()) if answer.body.include_usage else b"") + DONE

    def failed(self, error: ApiError) -> bytes:
        """The last events of a stream that ends before its answer."""
        return event(error.to_json()) + DONE

    def _cut(self, answer: Answer, choice: int) -> tuple[bytes, bytes]:
        (chunk,) = answer.chunks(Delta(choice, _MARK))
        before, _, after = event(chunk).rpartition(quoted(_MARK).encode())
        self._frames[choice] = before, after
        return before, after
