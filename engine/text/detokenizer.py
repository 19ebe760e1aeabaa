"""Converts ids to text, token by token, without incomplete characters. The joined text equals the library's decode."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from typing import Literal, Protocol

from tokenizers import Tokenizer

Kind = Literal["bytes", "fallback", "unstripped", "window"]

_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
_REPLACEMENT = "�"
_MAX_HELD = 8  # tokens: a character has at most four bytes; a model that never completes one must not hold for ever
_FALLBACK = ["Replace", "ByteFallback", "Fuse", "Strip"]
_BYTES_AS_TOKENS = ("fallback", "unstripped")


def _byte_of_char() -> dict[str, int]:
    """The alphabet of byte-level BPE: printable Latin-1 bytes stand for themselves, the others from U+0100 on."""
    table, spare = {}, 256
    for byte in range(256):
        if 33 <= byte <= 126 or 161 <= byte <= 172 or 174 <= byte <= 255:
            table[chr(byte)] = byte
        else:
            table[chr(spare)] = byte
            spare += 1
    return table


class Detokeniser(Protocol):
    def push(self, ids: Sequence[int]) -> str:
        """The characters that these ids complete; may be empty."""

    def finish(self) -> str:
        """Returns the held text as the library decodes it; must be the last call."""


class Pieces:
    """The bytes of each id of a tokenizer, looked up at first use."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.special = frozenset(i for i, t in tokenizer.get_added_tokens_decoder().items() if t.special)
        self.kind: Kind = _kind(json.loads(tokenizer.to_str()).get("decoder"))
        self._byte_of_char = _byte_of_char()
        self._raw: dict[int, bytes] = {}

    def raw(self, token: int) -> bytes:
        """The bytes that a token adds to the text; empty for ids that the tokenizer does not know."""
        data = self._raw.get(token)
        if data is None:
            data = self._raw[token] = self._find(token)
        return data

    def is_byte(self, token: int) -> bool:
        """Whether a token is one raw byte of the byte fallback (`<0xAB>`)."""
        return self.kind in _BYTES_AS_TOKENS and _fallback_byte(self.tokenizer.id_to_token(token) or "") is not None

    def show(self, token: int) -> str:
        """A token's name in logprobs: its text, or `bytes:\\xNN…` if that is no complete character."""
        raw = self.raw(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def stream(
        self, skip_special: bool = True, continues: bool = False, marks: frozenset[str] = frozenset()
    ) -> Detokeniser:
        """A fresh detokeniser. `continues`: the ids follow a prompt, so a leading space is text (SentencePiece);
        `marks`: special tokens that are not skipped."""
        skip = self.special if skip_special else frozenset[int]()
        if marks:
            skip -= {token for mark in marks if (token := self.tokenizer.token_to_id(mark)) is not None}
        if self.kind == "bytes":
            return _Bytes(self, skip)
        if self.kind in _BYTES_AS_TOKENS:
            return _Fallback(self, skip, strip=self.kind == "fallback" and not continues)
        return _Window(self.tokenizer, skip)

    def _find(self, token: int) -> bytes:
        word = self.tokenizer.id_to_token(token)
        if word is None:
            return b""
        if self.kind == "bytes":
            try:
                return bytes([self._byte_of_char[char] for char in word])
            except KeyError:
                return word.encode()
        if self.kind in _BYTES_AS_TOKENS:
            byte = _fallback_byte(word)
            return word.replace("▁", " ").encode() if byte is None else bytes([byte])
        return str(self.tokenizer.decode([token], skip_special_tokens=False)).encode()


def _kind(decoder: dict[str, object] | None) -> Kind:
    if decoder is None:
        return "window"
    if decoder.get("type") == "ByteLevel":
        return "bytes"
    steps = decoder.get("decoders")
    if decoder.get("type") != "Sequence" or not isinstance(steps, list):
        return "window"
    if [step.get("type") for step in steps] in (_FALLBACK, _FALLBACK[:-1]):
        replace, _, _, *strip = steps
        if (replace.get("pattern"), replace.get("content")) == ({"String": "▁"}, " ") and all(
            (step.get("content"), step.get("start"), step.get("stop")) == (" ", 1, 0) for step in strip
        ):
            return "fallback" if strip else "unstripped"
    return "window"


def _fallback_byte(word: str) -> int | None:
    match = _BYTE_TOKEN.fullmatch(word)
    return None if match is None else int(match[1], 16)


class _Bytes:
    """Byte-level BPE: the pieces are bytes, the text is their UTF-8."""

    def __init__(self, pieces: Pieces, skip: frozenset[int]) -> None:
        self._raw, self._skip = pieces.raw, skip
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        skip, raw = self._skip, self._raw
        return self._decoder.decode(b"".join([raw(i) for i in ids if i not in skip]))

    def finish(self) -> str:
        return self._decoder.decode(b"", True)


class _Fallback:
    """SentencePiece with byte fallback. A run of byte tokens is text only as a whole: a later byte can make all of it
    invalid, so it is held until it ends."""

    def __init__(self, pieces: Pieces, skip: frozenset[int], strip: bool) -> None:
        self._pieces, self._skip, self._strip = pieces, skip, strip
        self._run = bytearray()

    def push(self, ids: Sequence[int]) -> str:
        out = []
        for token in ids:
            raw = self._pieces.raw(token)
            if token in self._skip or not raw:
                continue
            if self._pieces.is_byte(token):
                self._run += raw
            else:
                out += [self._end_run(), raw.decode()]
        return self._stripped("".join(out))

    def finish(self) -> str:
        return self._stripped(self._end_run())

    def _end_run(self) -> str:
        run, self._run = bytes(self._run), bytearray()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return _REPLACEMENT * len(run)

    def _stripped(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text


class _Window:
    """Any other decoder, by the library: decodes a window of recent ids, of which the new text is the part after the
    text of the window's beginning. After _MAX_HELD tokens invalid bytes are returned as the library
    decodes them."""

    def __init__(self, tokenizer: Tokenizer, skip: frozenset[int]) -> None:
        self._tokenizer, self._skip = tokenizer, skip
        self._ids: list[int] = []  # from the window's start on
        self._given = 0  # how many of them are already text

    def push(self, ids: Sequence[int]) -> str:
        out = []
        for token in ids:
            if token in self._skip or self._tokenizer.id_to_token(token) is None:
                continue  # a window must not begin with an id that decodes to nothing
            self._ids.append(token)
            text = self._decode(self._ids)
            if text.endswith(_REPLACEMENT) and len(self._ids) - self._given < _MAX_HELD:
                continue
            out.append(text[len(self._decode(self._ids[: self._given])) :])
            self._ids = self._ids[self._given :]
            self._given = len(self._ids)
        return "".join(out)

    def finish(self) -> str:
        return self._decode(self._ids)[len(self._decode(self._ids[: self._given])) :]

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))


class OutputText:
    """The text of one choice, up to the first complete stop string, matched on characters. `matched`: that stop string;
    `n_tokens`: the number of tokens, up to the match if there is one. A match within the first `min_tokens` tokens does
    not count."""

    def __init__(
        self, detokeniser: Detokeniser, stops: tuple[str, ...] = (), include_stop: bool = False, min_tokens: int = 0
    ) -> None:
        self._detokeniser, self._stops = detokeniser, stops
        self._include_stop, self._min_tokens = include_stop, min_tokens
        self._tail = ""  # held back: could be the beginning of a stop string
        self.matched: str | None = None
        self.n_tokens = 0

    @property
    def ended(self) -> bool:
        return self.matched is not None

    def push(self, ids: Sequence[int]) -> str:
        """Returns the text that these ids complete. Ignores ids after a match."""
        if self.ended:
            return ""
        if not self._stops:
            self.n_tokens += len(ids)
            return self._detokeniser.push(ids)
        out = []
        for token in ids:
            self.n_tokens += 1
            out.append(self._settle(self._detokeniser.push((token,))))
            if self.matched:
                break
        return "".join(out)

    def finish(self) -> str:
        """Returns all held text; a stop string may still match in it."""
        if self.ended:
            return ""
        settled = self._settle(self._detokeniser.finish())
        tail, self._tail = self._tail, ""  # empty after a match
        return settled + tail

    def _settle(self, new: str) -> str:
        if not new:
            return ""
        text, seen = self._tail + new, len(self._tail)
        if self.n_tokens > self._min_tokens:
            stop = _first_stop(text, seen, self._stops)
            if stop is not None:
                start, self.matched = stop
                self._tail = ""
                return text[: start + len(self.matched)] if self._include_stop else text[:start]
        suffix = held_back(text, self._stops)
        self._tail = text[len(text) - suffix :]
        return text[: len(text) - suffix]


def _first_stop(text: str, seen: int, stops: tuple[str, ...]) -> tuple[int, str] | None:
    """The stop string complete first (of those, the longest) with its start; a match ends after `seen` characters."""
    starts = ((stop, text.find(stop, max(0, seen - len(stop) + 1))) for stop in stops)
    best = min(((at + len(stop), at, stop) for stop, at in starts if at >= 0), default=None)
    return None if best is None else best[1:]


def held_back(text: str, stops: tuple[str, ...]) -> int:
    """The length of the longest end of `text` that is a proper beginning of a stop string."""
    longest = 0
    for stop in stops:
        for length in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:length]):
                longest = length
                break
    return longest
