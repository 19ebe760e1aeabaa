"""Strict JSON from clients, files and other ranks: one UTF-8 value, no duplicate keys, NaN or infinities, bounded depth
and size. Every error is a JsonError that says what and where.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

MAX_DEPTH = 64
MAX_CONTAINERS = 1 << 16
MAX_ITEMS = 1 << 20
"""Commas outside strings: members and items of all objects and arrays together. What has more is not even parsed."""

_BOM = b"\xef\xbb\xbf"
# a string (or what is left of an unfinished one), or a bracket; possessive, so that no input makes it go back
_MARKS = re.compile(r'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)|[\[{\]}]', re.DOTALL)
_STRING = re.compile(r'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)', re.DOTALL)
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class JsonError(ValueError):
    """Not strict JSON; the message says where."""


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen = set()
        for key, _ in pairs:
            if key in seen:
                raise JsonError(f"the key {key[:64]!r} stands twice in one object")
            seen.add(key)
    return found


def _constant(word: str) -> float:
    raise JsonError(f"{word} is not JSON: numbers must be finite")


def _number(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise JsonError(f"the number {text[:32]} is too large for a double")
    return value


_decoder = json.JSONDecoder(object_pairs_hook=_pairs, parse_constant=_constant, parse_float=_number)


def parse(data: bytes, max_containers: int = MAX_CONTAINERS, max_items: int = MAX_ITEMS) -> Any:
    """The one value that `data` (UTF-8) holds; at most `max_containers` arrays and objects where brackets could nest
    too deeply. Raises JsonError."""
    if data.startswith(_BOM):
        raise JsonError("it begins with a byte order mark: save it as UTF-8 without BOM")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise JsonError(f"byte {error.start} (0x{data[error.start]:02x}) is not UTF-8: {error.reason}") from None
    opened = text.count("[") + text.count("{")
    if opened > MAX_DEPTH:
        _check_nesting(text, max_containers)
    if text.count(",") > max_items and _STRING.sub("", text).count(",") > max_items:
        raise JsonError(f"more than {max_items} items and members")
    try:
        value = _decoder.decode(text)
    except json.JSONDecodeError as error:
        where = f"character {error.pos + 1}" if error.lineno == 1 else f"line {error.lineno} column {error.colno}"
        raise JsonError(f"not JSON: {error.msg} at {where}") from None
    except JsonError:
        raise
    except ValueError:  # an integer of thousands of digits
        raise JsonError("an integer has too many digits") from None
    if _SURROGATE.search(text):
        _check_surrogates(value)
    return value


def _check_nesting(text: str, max_containers: int) -> None:
    depth = containers = 0
    for mark in _MARKS.finditer(text):
        first = text[mark.start()]
        if first in "[{":
            depth, containers = depth + 1, containers + 1
            if depth > MAX_DEPTH:
                raise JsonError(f"nested deeper than {MAX_DEPTH} levels at character {mark.start() + 1}")
            if containers > max_containers:
                raise JsonError(f"more than {max_containers} arrays and objects")
        elif first in "]}":
            depth -= 1


def _check_surrogates(value: Any) -> None:
    """Half a surrogate pair, escaped, is a str that no one can write as UTF-8 again."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = ord(error.object[error.start])
        raise JsonError(f"a string holds \\u{half:04x}, half of a surrogate pair") from None
