"""Encodes the control tokens that messages spell as text (model.allow_special_tokens_in_content: false), while those of
the chat template stay control tokens.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise
from typing import Any
from unicodedata import normalize

from tokenizers import Tokenizer

from .chat_template import TemplateError

_BASIC_PLANE = 0x10000
_FIRST_MARK = 0xF0000  # private use


class ContentMarks:
    """Marks the first characters of control tokens in messages, so that the rendered text shows who wrote a control
    token. Control tokens are the special ones, and other added ones in angle or square brackets."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        added = tokenizer.get_added_tokens_decoder().items()
        self._controls = {
            i: one.content for i, one in added if one.special or one.content[:1] + one.content[-1:] in "<>[]"
        }
        firsts = {content[0] for content in self._controls.values() if content}
        if tokenizer.normalizer is not None:  # which may match a token in fullwidth characters
            firsts |= {c for c in map(chr, range(_BASIC_PLANE)) if normalize("NFKC", c)[:1] in firsts}
        self._tokenizer, self._marks = tokenizer, {ord(c): _FIRST_MARK + i for i, c in enumerate(sorted(firsts))}
        self._firsts = {mark: first for first, mark in self._marks.items()}

    def marked(self, value: Any) -> Any:
        """The value with marks in each string and key. Raises TemplateError for text that contains one."""
        if isinstance(value, dict):
            return {self.marked(key): self.marked(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.marked(item) for item in value]
        if not isinstance(value, str):
            return value
        if clash := next((c for c in value if ord(c) in self._firsts), ""):
            raise TemplateError(
                f"the messages contain U+{ord(clash):X}, which this deployment uses itself: leave it out"
            )
        return value.translate(self._marks)

    def pieces(self, rendered: str) -> list[str]:
        """The rendered text without marks, cut within each control token that the messages spelt: encoded one by one,
        the pieces contain only the template's. Raises TemplateError if a token of one character cannot be cut."""
        text = rendered.translate(self._firsts)
        marks = [at for at, c in enumerate(rendered) if ord(c) in self._firsts]
        pieces: list[str] = []
        ranges = [(0, len(text))]
        while ranges:
            begin, end = ranges.pop()
            cuts = self._cuts(text[begin:end], begin, marks) if marks else []
            if not cuts:
                pieces.append(text[begin:end])
            else:
                ranges += reversed([*pairwise((begin, *cuts, end))])
        return pieces

    def _cuts(self, text: str, begin: int, marks: list[int]) -> list[int]:
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        cuts = []
        for number, (first, last) in zip(encoding.ids, encoding.offsets, strict=True):
            if number not in self._controls:
                continue
            index = bisect_left(marks, begin + first)
            if index == len(marks) or marks[index] >= begin + last:
                continue
            if last - first < 2:
                raise TemplateError(f"the messages contain the control token {self._controls[number]!r}: leave it out")
            cuts.append(max(marks[index], begin + first + 1))
        return cuts
