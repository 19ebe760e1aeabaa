"""Answers in every format that a model has garbled: read alike in any pieces, and no word of them is lost."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
from laddertron.engine.text.chat_formats import REASONING_FORMATS, TOOL_FORMATS
from laddertron.engine.text.chat_parts import Part
from test_chat_formats import parsed, write

_TAGS = re.compile(r"<[^<>]*>|\[[A-Z_]+\]|◁[^▷]*▷|[{}\[\]\"]|</")
_ODD = ("{", "}", "[", "]", '"', "\\", ",", ":", "null", "7", '""', "\r\n", "\n", "é", "\U0001f600", "```", "<think>")
_MORE = ("</think>", '{"name": "now", "arguments": ', '"parameters": {', "weather", "now", "True", "<", "|>", "\u2028")
_CHANNELS = ("<|start|>assistant", "<|channel|>analysis<|message|>", "<|channel|>final<|message|>", "<|end|>")
ANSWERS = 120


class Writer:
    """Writes answers of a format; each word in them is unique."""

    def __init__(self, tool_format: str, reasoning: str | None, draw: random.Random) -> None:
        self._format, self._reasoning, self._draw = tool_format, reasoning, draw
        self._numbers = itertools.count()
        syntax = TOOL_FORMATS[tool_format]
        sample = write(tool_format, [("weather", {"city": "Rome"})])
        marks = [*syntax.opens, *syntax.closes, *syntax.marks, *filter(None, (syntax.end,)), *_TAGS.findall(sample)]
        self._pieces = [*marks, *_ODD, *_MORE, *(_CHANNELS if tool_format == "gpt_oss" else ())]

    def word(self) -> str:
        return f"w{next(self._numbers)}z"

    def _value(self, depth: int = 0) -> Any:
        draw = self._draw
        kinds: list[Callable[[], Any]] = [lambda: None, lambda: draw.randrange(100), lambda: True]
        kinds += [self.word, lambda: f"{self.word()}{draw.choice(self._pieces)}{draw.choice(['', self.word()])}"] * 3
        if depth < 2:
            kinds += [lambda: [self._value(depth + 1) for _ in range(draw.randrange(3))]]
            kinds += [lambda: {self.word(): self._value(depth + 1)}]
        return draw.choice(kinds)()

    def _given(self) -> Any:
        draw = self._draw
        if TOOL_FORMATS[self._format].pair is None and draw.random() < 0.2:
            return draw.choice([None, [self.word(), 1], self.word(), 3, "", json.dumps({self.word(): 1})])
        names = ["city", "days", "wet", "by", self.word()]
        return {draw.choice(names): self._value() for _ in range(draw.randrange(4))}

    def answer(self) -> str:
        draw = self._draw
        names = ("weather", "now", "other", "")
        calls = [(draw.choices(names, (4, 4, 1, 1))[0], self._given()) for _ in range(draw.randrange(1, 4))]
        before, after = draw.choice(["", self.word() + " ", "\n"]), draw.choice(["", self.word(), "\n"])
        text = f"{before}{write(self._format, calls)}{after}"
        if self._reasoning is not None:
            opens, closes = REASONING_FORMATS[self._reasoning]
            text = f"{opens}{self.word()}{closes}{text}"
        for _ in range(draw.choice([0, 0, 1, 1, 2, 3])):
            text = self._garbled(text)
        return text

    def _garbled(self, text: str) -> str:
        """The text cut off, with a piece or a word put in, or with a mark left out or repeated."""
        draw = self._draw
        at = draw.randrange(len(text) + 1)
        begin, end = draw.choice([match.span() for match in _TAGS.finditer(text)] or [(at, at)])
        garbled: str = draw.choice(
            [
                text[:at],
                text[:at] + draw.choice(self._pieces) + text[at:],
                text[:begin] + text[end:],
                text[:end] + text[begin:end] + text[end:],
                f"{text[:begin]}{self.word()} {text[begin:]}",
            ]
        )
        return garbled


def words_of(text: str) -> set[str]:
    return set(re.findall(r"w\d+z", text))


def text_of(message: Part) -> str:
    functions = [call["function"] for call in message.get("tool_calls", ())]
    said = [message["content"] or "", message.get("reasoning_content", "")]
    return " ".join([*said, *(f"{function['name']} {function['arguments']}" for function in functions)])


@pytest.mark.parametrize("tool_format", TOOL_FORMATS)
def test_a_garbled_answer_is_read_alike_and_keeps_every_word(tool_format: str, run_seed: int) -> None:
    """Whole, character by character and cut at random."""
    for number in range(ANSWERS):
        draw = random.Random(f"{run_seed} {tool_format} {number}")
        reasoning = "gpt_oss" if tool_format == "gpt_oss" else draw.choice([None, "think", "seed"])
        text = Writer(tool_format, reasoning, draw).answer()
        options = {"tool_format": tool_format, "reasoning": reasoning}
        message, parser, _ = parsed(text, [0, len(text)], **options)
        lost = words_of(text) - words_of(text_of(message))
        assert not lost, (number, text, message)
        for places in (range(len(text) + 1), sorted({0, len(text), *draw.choices(range(len(text) + 1), k=4)})):
            again, other, _ = parsed(text, list(places), **options)
            assert (again, other.unparsed) == (message, parser.unparsed), (number, text, places)
