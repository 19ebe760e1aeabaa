"""JSON text <-> frozen dataclasses by pydantic, strictly: one error names everything that is wrong, with its places."""

from __future__ import annotations

import dataclasses
import difflib
import errno
import json
import os
import tempfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import GenericAlias
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_args, get_type_hints

from . import strict_json

if TYPE_CHECKING:
    from pydantic import TypeAdapter
    from pydantic_core import ErrorDetails

T = TypeVar("T")

MAX_ERRORS = 20
MAX_FILE_BYTES = 64 << 20
MAX_CONTAINERS = 1 << 22


class ReadError(ValueError):
    """`path: what is wrong, what is expected`."""


def write_file(path: Path, text: str) -> None:
    """Writes `text` whole or not at all: a reader sees the old file or the new one. Raises OSError naming `path`."""
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, f"the folder {path.parent} does not exist, make it first", str(path))
    try:
        _replace(path, text)
    except OSError as error:
        # the temporary file's name means nothing to whoever named this one
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


def parse(data: bytes) -> Any:
    try:
        return strict_json.parse(data, MAX_CONTAINERS)
    except strict_json.JsonError as error:
        raise ReadError(str(error)) from None


def header(data: Any, kind: str, version: int) -> dict[str, Any]:
    """`data` without its `kind` and `version`, which must be those given. Raises ReadError."""
    if not isinstance(data, dict):
        raise ReadError(f"expected a JSON object of kind {kind!r}, got {_name(data)}")
    if data.get("kind") != kind:
        raise ReadError(f"kind: expected {kind!r}, got {data.get('kind')!r}")
    if data.get("version") != version or isinstance(data["version"], bool):
        raise ReadError(
            f"version: this laddertron reads {version}, the file says {data.get('version')!r}: write it anew"
        )
    return {key: value for key, value in data.items() if key not in ("kind", "version")}


def load(cls: type[T], path: Path, kind: str, version: int) -> T:
    """The `cls` in the file at `path`. Raises ReadError naming the file and the place in it, OSError."""
    with path.open("rb") as file:
        data = file.read(MAX_FILE_BYTES + 1)
    try:
        if len(data) > MAX_FILE_BYTES:
            raise ReadError(f"larger than {MAX_FILE_BYTES >> 20} MiB: not a file that laddertron wrote")
        return build(cls, header(parse(data), kind, version))
    except ReadError as error:
        raise ReadError(f"{path}: {error}") from None


def build(cls: type[T], data: Any) -> T:
    """A `cls` (a dataclass) from what `unbuild` made. A missing key takes the field's default; unknown keys, wrong
    types and values that a class itself refuses raise one ReadError that names each with its path."""
    return from_json(cls, json.dumps(data).encode())


def from_json(cls: type[T], payload: bytes) -> T:
    """The same from JSON text that a process of ours wrote: faster, and of a key that stands twice the last counts."""
    from pydantic import ValidationError  # 0.1 s that most commands can do without

    try:
        (built,) = reader(cast(Any, cls)).validate_json(b"[%b]" % payload)
    except ValidationError as error:
        found = error.errors(include_url=False)
        lines = [f"{_path(e['loc'][1:]) or 'file'}: {_reason(cls, e)}" for e in found[:MAX_ERRORS]]
        more = f"; and {len(found) - MAX_ERRORS} more" if len(found) > MAX_ERRORS else ""
        raise ReadError("; ".join(lines) + more) from None
    return cast(T, built)


def unbuild(value: Any) -> Any:
    """Plain JSON values of a dataclass; fields that equal their default are left out, `build` is the inverse."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        kept = {}
        for field in dataclasses.fields(value):
            item = getattr(value, field.name)
            if field.init and (field.default is dataclasses.MISSING or item != field.default):
                kept[field.name] = unbuild(item)
        return kept
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
        known = [field.name for field in dataclasses.fields(_class_at(cls, place))]
        near = difflib.get_close_matches(str(key), known, 1)
        return f"unknown key: did you mean {near[0]!r}?" if near else f"unknown key: known are {', '.join(known)}"
    if error["type"] in ("json_invalid", "union_tag_not_found"):
        return error["msg"]
    if error["type"] == "union_tag_invalid":
        return f"type: expected one of {error['ctx']['expected_tags']}, got {_name(error['ctx']['tag'])}"
    expected = _EXPECTED.get(error["type"]) or error["msg"].removeprefix("Input should be ")
    return f"expected {expected}, got {_name(error['input'])}"


def _class_at(cls: Any, place: Iterable[str | int]) -> Any:
    """The dataclass whose key stands at `place` in a `cls`."""
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
