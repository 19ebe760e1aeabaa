"""One choice of an answer: converts the engine's events to text, ids and finish reason. Applies stop strings."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from ..request import FinishReason, TokenLogprob, TokensEvent
from ..text.chat_parts import OutputParts, Part
from ..text.detokenizer import OutputText
from ..text.tokenizer import TextModel
from .body import Body
from .errors import ApiError
from .logprobs import Offsets
from .schema import CHAT

_FAILURES: dict[FinishReason, tuple[str, str, int | None]] = {
    "cancelled": ("batch_cancelled", "the request was cancelled", None),
    "timeout": ("request_timeout", "the request timed out (limits.request_timeout)", None),
    "numerical_error": ("numerical_error", "the model computed non-finite logits", 500),
    "constraint_error": ("constraint_error", "no token satisfies the request's constraints", 400),
    "error": ("engine_error", "the engine failed on this request", 500),
}


@dataclass(frozen=True, slots=True)
class Delta:
    """The addition of one event to one choice. `finish` is set on the choice's last."""

    choice: int
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: str | None = None
    stop_reason: int | str | None = None
    tokens: tuple[int, ...] = ()
    stop_after: int | None = None
    """If a stop string matched and the engine still generates: the number of tokens for `EngineJob.stop_choice`."""
    chat_parts: tuple[Part, ...] = ()
    """Of a divided chat, whose `text` is empty."""


@dataclass(slots=True)
class Choice:
    """One choice, assembled from the engine's events."""

    body: Body
    text: TextModel
    out: OutputText
    offsets: Offsets  # of the streamed text
    seen: int = 0  # tokens that the engine has reported
    tokens: int = 0  # tokens of the answer's usage
    parts: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    digests: list[int] = field(default_factory=list)  # of the rows of logits of `ids`
    finish: str | None = None
    stop_reason: int | str | None = None
    begun: bool = False  # streaming: the first chunk was sent
    chat_parts: list[Part] = field(default_factory=list)  # of a divided chat

    def take(self, event: TokensEvent, index: int) -> ApiError | Delta:
        """Applies one event to this open choice, the answer's `index`-th; returns what it adds, or the error that ends
        it."""
        if event.start != self.seen:
            message = f"the engine reported {self.seen} tokens, the next ones begin at {event.start}"
            return ApiError(message, "engine_error", status=500)
        new, logprobs = event.tokens, event.logprobs or ()
        self.seen += len(new)
        divided = self.out if isinstance(self.out, OutputParts) else None
        chat_parts = divided.push_parts(new) if divided else []
        text = "" if divided else self.out.push(new)
        taken = self.out.n_tokens - self.tokens
        self.tokens = self.out.n_tokens
        stop_after = None
        if self.out.matched is None and event.finish is not None:
            if event.finish in _FAILURES:
                code, message, status = _FAILURES[event.finish]
                return ApiError(event.message or message, code, status=status)
            text += self._end(event.finish, event.stop_token)
            if divided:
                chat_parts += divided.finish_parts()
                chat_parts, text = [*chat_parts, *([{"content": text}] if text else [])], ""
        if self.out.matched is not None:
            self.finish, self.stop_reason = "stop", self.out.matched
            if event.finish is None:
                stop_after = self.tokens
        self.parts.append(text)
        self.chat_parts += chat_parts
        ids = new[:taken]
        if self.finish == "stop" and self.out.matched is None and event.stop_token is not None:
            ids = (*ids, event.stop_token)
            if self.body.endpoint != CHAT:
                taken += 1  # the stop token's entry: evaluation harnesses expect the last entry to be generated
        self.digests += [item.digest for item in logprobs[: len(ids)]]
        scored = logprobs[:taken] if self.body.params.logprobs is not None else ()
        self.logprobs += scored
        self.ids += ids
        return Delta(index, text, scored, self.finish, self.stop_reason, ids, stop_after, tuple(chat_parts))

    def _end(self, finish: FinishReason, stop_token: int | None) -> str:
        """Ends the choice with the engine's finish reason; returns the text that was still held back."""
        text = "" if isinstance(self.out, OutputParts) else self.out.finish()
        self.finish = finish
        if stop_token is not None:
            self.tokens += 1
            if stop_token in self.body.params.stop_token_ids:
                self.stop_reason = stop_token
                if self.body.include_stop_str_in_output:
                    text += self.text.decode([stop_token], skip_special=False)
        return text

    @property
    def calls(self) -> int:
        return self.out.parser.calls if isinstance(self.out, OutputParts) else 0

    @property
    def unparsed_calls(self) -> int:
        return self.out.parser.unparsed if isinstance(self.out, OutputParts) else 0

    @property
    def reasoning_tokens(self) -> int:
        return self.out.reasoning_tokens if isinstance(self.out, OutputParts) else 0

    def digest(self) -> dict[str, Any]:
        """The digest of the logits of its ids and its stop token as 32 hexadecimal digits; {} if not requested."""
        if not self.body.params.return_digest:
            return {}
        rows = b"".join(digest.to_bytes(8, "little") for digest in self.digests)
        return {"digest": sha256(rows).hexdigest()[:32]}
