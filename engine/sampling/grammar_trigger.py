"""Where an answer's grammar begins: at its content, after reasoning, and not in an answer that is a tool call. A
position is a function of the tokens, so that preempted and resumed sequences, drafts and ranks agree. No torch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

Mask = npt.NDArray[np.bool_]
MOST_BLANKS = 8
"""White space before reasoning, and line breaks after it, in characters."""


class Position(NamedTuple):
    """One sequence before its content. `seen`: of reasoning its end, else the text so far, which may become a mark;
    `pending`: tokens of this text, for the grammar if it is content; `after`: whether reasoning precedes, and `breaks`:
    the line breaks since then; `called`: whether the reasoning contains a call's mark."""

    phase: Literal["begin", "reasoning", "start", "content", "call"]
    seen: bytes = b""
    pending: tuple[int, ...] = ()
    after: bool = False
    breaks: int = 0
    called: bool = False


class Vocabulary:
    """The bytes of a tokenizer's tokens, of special tokens their names."""

    def __init__(self, tokenizer: Any) -> None:
        """tokenizer: the grammar library's."""
        self.tokenizer = tokenizer

    @cached_property
    def raw(self) -> list[bytes]:
        return [self.tokenizer.decode_bytes([token]) for token in range(self.tokenizer.vocab_size)]

    @cached_property
    def blank(self) -> Mask:
        """Mask of tokens that consist of white space, [vocabulary]."""
        return np.array([raw.isspace() for raw in self.raw])

    @cached_property
    def breaks(self) -> Mask:
        """Mask of tokens that begin with a line break, [vocabulary]."""
        return np.array([raw.startswith(b"\n") for raw in self.raw])

    @cached_property
    def _sorted(self) -> tuple[list[bytes], list[int]]:
        order = sorted(range(len(self.raw)), key=self.raw.__getitem__)
        return [self.raw[token] for token in order], order

    def beginning_with(self, prefix: bytes, longest: int = 1 << 30) -> Iterator[int]:
        """Tokens that begin with a prefix and are at most so long."""
        words, order = self._sorted
        for at in range(bisect_left(words, prefix), len(words)):
            if not words[at].startswith(prefix) or len(words[at]) > longest:
                return
            yield order[at]

    def within(self, text: bytes) -> Iterator[int]:
        """Tokens that a text begins with, or that begin with the text."""
        for end in range(1, len(text)):
            yield from self.beginning_with(text[:end], end)
        yield from self.beginning_with(text)


class Trigger:
    """The marks before content. `reasoning`: those around it, None without; `thinking`: whether the prompt ends with
    the opening one; `calls`: those with which an answer begins that is a call and no content."""

    def __init__(self, vocabulary: Vocabulary, reasoning: list[str] | None, thinking: bool, calls: list[str]) -> None:
        self._vocabulary, self._calls = vocabulary, tuple(call.encode() for call in calls)
        self._open, self._close = (mark.encode() for mark in reasoning or ("", ""))
        self._marks = (*self._calls, *((self._open, self._close) if reasoning else ()))
        self.first = Position("start" if reasoning is None else "reasoning" if thinking else "begin")

    def step(self, at: Position, token: int) -> Position:
        """The position after one more token."""
        if (text := self._text(token)) is not None:
            return self._take(at, text, (token,))
        if at.phase in ("begin", "start"):  # the end of the answer, or the grammar's own
            return at._replace(phase="content", pending=(*at.pending, token))
        return at

    def allowed(self, at: Position, content: Callable[[tuple[int, ...], Vocabulary], Mask]) -> Mask:
        """The tokens that may come next, [vocabulary]; `content`: those that the grammar allows after some."""
        vocabulary = self._vocabulary
        if at.phase in ("call", "reasoning"):
            out = np.ones(len(vocabulary.raw), np.bool_)
            if at.phase == "reasoning":
                out[vocabulary.tokenizer.eos_tokens] = at.called
                out[list(self._beyond(at.seen))] = False
            return out
        out = content(at.pending, vocabulary)
        if at.after and not at.seen:
            out[vocabulary.breaks] = False
            if at.breaks < MOST_BLANKS:
                out |= vocabulary.breaks & vocabulary.blank & ~self._mixed
        out[[token for token in self._toward_marks(at) if self._text(token) is not None]] = True
        return out

    @cached_property
    def _mixed(self) -> Mask:
        """Mask of tokens with white space other than line breaks, [vocabulary]."""
        return np.array([bool(raw.strip(b"\n")) for raw in self._vocabulary.raw])

    @cached_property
    def _crossing(self) -> list[int]:
        """Tokens with all of the closing mark and more than line breaks after it."""
        raws = enumerate(self._vocabulary.raw)
        return [token for token, raw in raws if raw.partition(self._close)[2].strip(b"\n")]

    def _text(self, token: int) -> bytes | None:
        """What a token adds to the text that is parsed; None for special tokens that are no marks."""
        raw = self._vocabulary.raw[token]
        special = self._vocabulary.tokenizer.is_special_token(token)
        return None if special and not (raw and any(raw in mark for mark in self._marks)) else raw

    def _take(self, at: Position, text: bytes, tokens: tuple[int, ...] | None) -> Position:
        """tokens: of the text, None if it is a part of one."""
        if at.phase in ("content", "call"):
            return at
        if at.phase == "reasoning":
            before, mark, rest = (at.seen + text).partition(self._close)
            if mark:
                return self._take(Position("start", after=True), rest, None)
            called = at.called or any(call in before for call in self._calls)
            return at._replace(seen=before[1 - max(map(len, self._marks)) :], called=called)
        if at.after and not at.seen:
            rest = text.lstrip(b"\n")
            at = at._replace(breaks=at.breaks + len(text) - len(rest))
            text, tokens = rest, tokens if rest == text else None
        if not text:
            return at
        ids = tuple(self._vocabulary.tokenizer.tokenize_bytes(text)) if tokens is None else tokens
        return self._decided(at._replace(seen=at.seen + text, pending=(*at.pending, *ids)))

    def _decided(self, at: Position) -> Position:
        begun = self._begun(at)
        if at.phase == "begin" and begun.startswith(self._open):
            return self._take(Position("reasoning"), begun[len(self._open) :], None)
        if begun.startswith(self._calls):
            return Position("call")
        return at if any(mark.startswith(begun) for mark in self._first_marks(at)) else at._replace(phase="content")

    def _begun(self, at: Position) -> bytes:
        return at.seen.lstrip() if at.phase == "begin" else at.seen

    def _first_marks(self, at: Position) -> tuple[bytes, ...]:
        return (self._open, *self._calls) if at.phase == "begin" else self._calls

    def _toward_marks(self, at: Position) -> Iterator[int]:
        """Tokens that go on with a mark."""
        begun = self._begun(at)
        for mark in self._first_marks(at):
            if mark.startswith(begun):
                yield from self._vocabulary.within(mark[len(begun) :])
        if at.phase == "begin" and not begun and len(at.seen) < MOST_BLANKS:
            yield from np.flatnonzero(self._vocabulary.blank).tolist()

    def _beyond(self, seen: bytes) -> Iterator[int]:
        """Tokens that complete reasoning and go on with more than line breaks: content begins with a token."""
        yield from self._crossing
        for size in range(1, len(self._close)):
            if seen.endswith(self._close[:size]):
                rest = self._close[size:]
                for token in self._vocabulary.beginning_with(rest):
                    if self._vocabulary.raw[token][len(rest) :].strip(b"\n"):
                        yield token
