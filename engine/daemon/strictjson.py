"""JSON as strangers send it, read strictly: one value, UTF-8, no duplicate keys, no NaN, no infinities, bounded depth.

Knows nothing of requests. Every refusal is a JsonFault whose message says what and where; nothing here can recurse
deeper than `MAX_DEPTH` or hold more than a few times the input's size.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

MAX_DEPTH = 64
MAX_CONTAINERS = 1 << 16

_BOM = b"\xef\xbb\xbf"
# a string (or what is left of an unfinished one), or a bracket; possessive, so that no input makes it go back
_MARKS = re.compile(r'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)|[\[{\]}]', re.DOTALL)
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class JsonFault(ValueError):
    """What was sent is not JSON as it must be; the message says where."""


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen = set()
        for key, _ in pairs:
            if key in seen:
                raise JsonFault(f"the key {key[:64]!r} stands twice in one object")
            seen.add(key)
    return found


def _constant(word: str) -> float:
    raise JsonFault(f"{word} is not JSON: numbers must be finite")


def _number(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise JsonFault(f"the number {text[:32]} is too large for a double")
    return value


_decoder = json.JSONDecoder(object_pairs_hook=_pairs, parse_constant=_constant, parse_float=_number)


def parse(data: bytes) -> Any:
    """The one value that `data` (UTF-8) holds. Raises JsonFault."""
    if data.startswith(_BOM):
        raise JsonFault("it begins with a byte order mark: save it as UTF-8 without BOM")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise JsonFault(f"byte {error.start} (0x{data[error.start]:02x}) is not UTF-8: {error.reason}") from None
    opened = text.count("[") + text.count("{")
    if opened > MAX_DEPTH:
        _check_nesting(text)
    try:
        value = _decoder.decode(text)
    except json.JSONDecodeError as error:
        raise JsonFault(f"not JSON: {error.msg} at character {error.pos + 1}") from None
    except JsonFault:
        raise
    except ValueError:  # an integer of thousands of digits
        raise JsonFault("an integer has too many digits") from None
    if _SURROGATE.search(text):
        _check_surrogates(value)
    return value


def _check_nesting(text: str) -> None:
    depth = containers = 0
    for mark in _MARKS.finditer(text):
        first = text[mark.start()]
        if first in "[{":
            depth, containers = depth + 1, containers + 1
            if depth > MAX_DEPTH:
                raise JsonFault(f"nested deeper than {MAX_DEPTH} levels at character {mark.start() + 1}")
            if containers > MAX_CONTAINERS:
                raise JsonFault(f"more than {MAX_CONTAINERS} arrays and objects")
        elif first in "]}":
            depth -= 1


def _check_surrogates(value: Any) -> None:
    """Half a surrogate pair, escaped, is a str that no one can write as UTF-8 again."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = ord(error.object[error.start])
        raise JsonFault(f"a string holds \\u{half:04x}, half of a surrogate pair") from None
