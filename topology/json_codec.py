"""Reads JSON strictly: one UTF-8 value, no duplicate keys, NaN or infinities, bounded depth and size (`parse`); and as
frozen dataclasses by pydantic, one error naming everything that is wrong (`build`, `load`). Every error is a ReadError.
"""

from __future__ import annotations

import dataclasses
import difflib
import errno
import json
import math
import os
import re
import tempfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import GenericAlias
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_args, get_type_hints

if TYPE_CHECKING:
    from pydantic import TypeAdapter
    from pydantic_core import ErrorDetails

T = TypeVar("T")

MAX_ERRORS = 20
MAX_FILE_BYTES, FILE_CONTAINERS = 64 << 20, 1 << 22
MAX_DEPTH = 64
MAX_CONTAINERS = 1 << 16
MAX_ITEMS = 1 << 20
"""Commas outside strings: members and items of all objects and arrays together. What has more is not even parsed."""

_BOM = b"\xef\xbb\xbf"
# a string (or what is left of an unfinished one), or a bracket; possessive, so that no input makes it go back
_MARKS = re.compile(r'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)|[\[{\]}]', re.DOTALL)
_STRING = re.compile(r'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)', re.DOTALL)
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class ReadError(ValueError):
    """Not what was expected; the message gives the place, what is wrong and the rule."""


def write_file(path: Path, text: str) -> None:
    """Writes `text` whole or not at all: a reader sees the old file or the new one, behind a link too. A device or pipe
    such as /dev/stdout is written to, not replaced. Raises OSError naming `path`."""
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, f"the folder {path.parent} does not exist, make it first", str(path))
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            path.write_text(text, encoding="utf-8")
        else:
            _replace(Path(os.path.realpath(path)), text)
    except OSError as error:
        # the caller does not know the temporary file's name
        raise OSError(error.errno, error.strerror, str(path)) from error


def _replace(path: Path, text: str) -> None:
    with tempfile.NamedTemporaryFile(
        "w", dir=path.parent, prefix=f".{path.name}.", encoding="utf-8", delete=False
    ) as f:
        temporary = Path(f.name)
        try:
            f.write(text)
            f.flush()
            os.fchmod(f.fileno(), 0o644)
            os.fsync(f.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        seen = set()
        for key, _ in pairs:
            if key in seen:
                raise ReadError(f"duplicate key {key[:64]!r} in one object")
            seen.add(key)
    return members


def _constant(word: str) -> float:
    raise ReadError(f"{word} is not JSON: numbers must be finite")


def _number(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ReadError(f"the number {text[:32]} is too large for a double")
    return value


_decoder = json.JSONDecoder(object_pairs_hook=_pairs, parse_constant=_constant, parse_float=_number)


def parse(data: bytes, max_containers: int = MAX_CONTAINERS, max_items: int = MAX_ITEMS) -> Any:
    """The one value that `data` (UTF-8) holds; at most `max_containers` arrays and objects where brackets could nest
    too deeply. Raises ReadError."""
    if data.startswith(_BOM):
        raise ReadError("it begins with a byte order mark: save it as UTF-8 without BOM")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise ReadError(f"byte {error.start} (0x{data[error.start]:02x}) is not UTF-8: {error.reason}") from None
    opened = text.count("[") + text.count("{")
    if opened > MAX_DEPTH:
        _check_nesting(text, max_containers)
    if text.count(",") > max_items and _STRING.sub("", text).count(",") > max_items:
        raise ReadError(f"more than {max_items} items and members")
    try:
        value = _decoder.decode(text)
    except json.JSONDecodeError as error:
        where = f"character {error.pos + 1}" if error.lineno == 1 else f"line {error.lineno} column {error.colno}"
        raise ReadError(f"not JSON: {error.msg.removesuffix(' at')} at {where}") from None
    except ReadError:
        raise
    except ValueError:  # an integer of thousands of digits
        raise ReadError("an integer has too many digits") from None
    if _SURROGATE.search(text):
        _check_surrogates(value)
    return value


_BREAKS = re.compile("[\u0085\u2028\u2029]")


def one_line(text: str) -> str:
    """JSON text whose strings contain no characters that some readers take for line breaks."""
    return text if text.isascii() else _BREAKS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _check_nesting(text: str, max_containers: int) -> None:
    depth = containers = 0
    for mark in _MARKS.finditer(text):
        first = text[mark.start()]
        if first in "[{":
            depth, containers = depth + 1, containers + 1
            if depth > MAX_DEPTH:
                raise ReadError(f"nested deeper than {MAX_DEPTH} levels at character {mark.start() + 1}")
            if containers > max_containers:
                raise ReadError(f"more than {max_containers} arrays and objects")
        elif first in "]}":
            depth -= 1


def _check_surrogates(value: Any) -> None:
    """Half a surrogate pair, escaped, is a str that cannot be encoded as UTF-8."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = ord(error.object[error.start])
        raise ReadError(f"a string contains \\u{half:04x}, half of a surrogate pair") from None


def header(data: Any, kind: str, version: int) -> dict[str, Any]:
    """`data` without its `kind` and `version`, which must be those given. Raises ReadError."""
    if not isinstance(data, dict):
        raise ReadError(f"expected a JSON object of kind {kind!r}, got {_name(data)}")
    if data.get("kind") != kind:
        raise ReadError(f"kind: expected {kind!r}, got {data.get('kind')!r}")
    if data.get("version") != version or isinstance(data["version"], bool):
        raise ReadError(
            f"version: this laddertron reads {version}, the file says {data.get('version')!r}: write it again"
        )
    return {key: value for key, value in data.items() if key not in ("kind", "version")}


def load(cls: type[T], path: Path, kind: str, version: int) -> T:
    """The `cls` in the file at `path`. Raises ReadError naming the file and the place in it, OSError."""
    with path.open("rb") as file:
        data = file.read(MAX_FILE_BYTES + 1)
    try:
        if len(data) > MAX_FILE_BYTES:
            raise ReadError(f"larger than {MAX_FILE_BYTES >> 20} MiB: not a file that laddertron wrote")
        return build(cls, header(parse(data, FILE_CONTAINERS), kind, version))
    except ReadError as error:
        raise ReadError(f"{path}: {error}") from None


def build(cls: type[T], data: Any) -> T:
    """A `cls` (a dataclass) from what `unbuild` made. A missing key takes the field's default; unknown keys, wrong
    types and values that a class itself refuses raise one ReadError that names each with its path."""
    return from_json(cls, json.dumps(data).encode())


def from_json(cls: type[T], payload: bytes) -> T:
    """The same from JSON text that another laddertron process wrote: faster; of duplicate keys the last counts."""
    from pydantic import ValidationError  # 0.1 s that most commands can do without

    try:
        (built,) = reader(cast(Any, cls)).validate_json(b"[%b]" % payload)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        lines = [f"{_path(e['loc'][1:]) or 'file'}: {_reason(cls, e)}" for e in errors[:MAX_ERRORS]]
        more = f"; and {len(errors) - MAX_ERRORS} more" if len(errors) > MAX_ERRORS else ""
        raise ReadError("; ".join(lines) + more) from None
    return cast(T, built)


def unbuild(value: Any) -> Any:
    """Plain JSON values of a dataclass; fields that equal their default are left out, `build` is the inverse."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {}
        for field in dataclasses.fields(value):
            item = getattr(value, field.name)
            if field.init and (field.default is dataclasses.MISSING or item != field.default):
                fields[field.name] = unbuild(item)
        return fields
    if isinstance(value, tuple):
        return [unbuild(item) for item in value]
    if isinstance(value, dict):
        return {key: unbuild(item) for key, item in value.items()}
    return value


def layered(value: object, depth: int = 0) -> str:
    """JSON for people: objects and lists are opened over lines until what is in them fits one."""
    flat = json.dumps(value, ensure_ascii=False)
    if len(flat) + 2 * depth <= 118 or not isinstance(value, (dict, list)) or not value:
        return flat
    inner, outer = "  " * (depth + 1), "  " * depth
    if isinstance(value, dict):
        lines = [f"{inner}{json.dumps(key)}: {layered(item, depth + 1)}" for key, item in value.items()]
        return "{\n" + ",\n".join(lines) + f"\n{outer}}}"
    return "[\n" + ",\n".join(inner + layered(item, depth + 1) for item in value) + f"\n{outer}]"


@cache
def reader(cls: Any) -> TypeAdapter[tuple[Any]]:
    """Reads a list of one `cls`, strictly."""
    from pydantic import ConfigDict, TypeAdapter

    # plain dataclasses take the configuration of the type around them
    around: Any = GenericAlias(tuple, (cls,))
    return TypeAdapter(around, config=ConfigDict(strict=True, extra="forbid", allow_inf_nan=False))


_EXPECTED = {
    "int_type": "a whole number", "float_type": "a number", "string_type": "a string", "bool_type": "true or false",
    "tuple_type": "a list", "dict_type": "an object", "dataclass_type": "an object",
}  # fmt: skip


def _reason(cls: type[Any], error: ErrorDetails) -> str:
    if error["type"] == "missing":
        return "missing"
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    if error["type"] == "unexpected_keyword_argument":
        *place, key = error["loc"][1:]
        if not dataclasses.is_dataclass(cls):  # one of several: which, only pydantic knows
            return "unknown key"
        keys = [field.name for field in dataclasses.fields(_class_at(cls, place))]
        near = difflib.get_close_matches(str(key), keys, 1)
        return f"unknown key: did you mean {near[0]!r}?" if near else f"unknown key: known are {', '.join(keys)}"
    if error["type"] in ("json_invalid", "union_tag_not_found"):
        return error["msg"]
    if error["type"] == "union_tag_invalid":
        return f"type: expected one of {error['ctx']['expected_tags']}, got {_name(error['ctx']['tag'])}"
    expected = _EXPECTED.get(error["type"]) or error["msg"].removeprefix("Input should be ")
    return f"expected {expected}, got {_name(error['input'])}"


def _class_at(cls: Any, place: Iterable[str | int]) -> Any:
    """The dataclass whose key is at `place` in a `cls`."""
    for key in place:
        cls = _class_in(get_type_hints(cls).get(str(key))) or cls
    return cls


def _class_in(hint: Any) -> Any:
    return hint if dataclasses.is_dataclass(hint) else next(filter(None, map(_class_in, get_args(hint))), None)


def _name(value: Any) -> str:
    text = json.dumps(value) if isinstance(value, (str, int, float, bool, type(None))) else type(value).__name__
    return {"dict": "an object", "list": "a list"}.get(text, text[:60])


def _path(place: Iterable[str | int]) -> str:
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in place).lstrip(".")
