"""JSON text <-> frozen dataclasses, strictly: every fault is an error that says where in the file it stands.

Knows ints, floats, strings, booleans, Literal, `X | None`, `tuple[X, ...]`, `dict[str, X]` (or Mapping) and dataclasses
of these; nothing of what they mean. Used by fabric dumps and tuning files.
"""

from __future__ import annotations

import dataclasses
import difflib
import errno
import json
import math
import os
import tempfile
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

MAX_FILE_BYTES = 64 << 20


class ReadError(ValueError):
    """`path: what is wrong, what is expected`."""


def read_file(path: Path) -> Any:
    """The JSON value in the file at `path`. Raises ReadError if it is too large or not strict JSON, OSError if it
    cannot be read."""
    with path.open("rb") as file:
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise ReadError(f"{path}: larger than {MAX_FILE_BYTES >> 20} MiB: not a file that laddertron wrote")
    try:
        return parse(data)
    except ReadError as error:
        raise ReadError(f"{path}: {error}") from None


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
    """Strict JSON: UTF-8, no duplicate keys, no NaN or infinity. Raises ReadError."""
    try:
        return json.loads(data.decode(), object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise ReadError(f"not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise ReadError(f"not JSON: {error.msg} at line {error.lineno} column {error.colno}") from None
    except RecursionError:
        raise ReadError("nested too deeply") from None


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


def build(cls: type[T], data: Any, path: str = "") -> T:
    """A `cls` (a dataclass) from what `unbuild` made. A missing key takes the field's default; an unknown key, a
    wrong type or a value that the class itself refuses raises ReadError with its path."""
    if not isinstance(data, dict):
        raise ReadError(f"{path or 'file'}: expected an object, got {_name(data)}")
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(typing.cast(Any, cls)) if f.init}
    for key in data:
        if key not in fields:
            near = difflib.get_close_matches(key, fields, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(fields)}"
            raise ReadError(f"{_join(path, key)}: unknown key: {hint}")
    values: dict[str, Any] = {}
    for name, field in fields.items():
        if name in data:
            values[name] = _convert(hints[name], data[name], _join(path, name))
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ReadError(f"{_join(path, name)}: missing")
    try:
        return cls(**values)
    except ReadError:
        raise
    except ValueError as error:
        raise ReadError(f"{path or 'file'}: {error}") from None


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


def _convert(hint: Any, value: Any, path: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None:
            if type(None) in arguments:
                return None
            raise ReadError(f"{path}: must not be null")
        return _convert(next(a for a in arguments if a is not type(None)), value, path)
    if origin is tuple:
        if not isinstance(value, list):
            raise ReadError(f"{path}: expected a list, got {_name(value)}")
        return tuple(_convert(arguments[0], item, f"{path}[{i}]") for i, item in enumerate(value))
    if origin in (dict, Mapping):
        if not isinstance(value, dict):
            raise ReadError(f"{path}: expected an object, got {_name(value)}")
        return {key: _convert(arguments[1], item, _join(path, key)) for key, item in value.items()}
    if origin is typing.Literal:
        if value not in arguments or isinstance(value, bool):
            raise ReadError(f"{path}: expected one of {', '.join(map(str, arguments))}, got {value!r}")
        return value
    if dataclasses.is_dataclass(hint):
        return build(typing.cast(type[Any], hint), value, path)
    if hint is float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ReadError(f"{path}: expected a number, got {_name(value)}")
        return float(value)
    if hint is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    if (hint is str or hint is bool) and isinstance(value, hint):
        return value
    raise ReadError(f"{path}: expected {_WORDS.get(hint, hint)}, got {_name(value)}")


_WORDS: dict[Any, str] = {int: "a whole number", str: "a string", bool: "true or false"}


def _name(value: Any) -> str:
    text = json.dumps(value) if isinstance(value, (str, int, float, bool, type(None))) else type(value).__name__
    return {"dict": "an object", "list": "a list"}.get(text, text[:60])


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ReadError(f"the key {next(k for k in keys if keys.count(k) > 1)!r} stands twice in one object")
    return found


def _no_constant(text: str) -> float:
    raise ReadError(f"{text} is not a JSON number")
