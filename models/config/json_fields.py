"""Reads a checkpoint folder's small JSON files: every wrong type, missing field or duplicate key is one ValueError with
file, key, value and rule. Defines `Refusal`, the base of errors that users see.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...topology.json_codec import ReadError, parse

MAX_JSON_BYTES = 16 * 2**20


class Refusal(Exception):
    """A fault of the engine's input, not of its code. Its message gives value, rule and fix in one line, and is shown
    without a traceback."""


@dataclass(frozen=True, slots=True)
class ConfigFields:
    """One JSON object and the words to blame when a field of it is wrong."""

    where: str
    data: Mapping[str, Any]

    def fail(self, message: str) -> ValueError:
        return ValueError(f"{self.where}: {message}")

    def __contains__(self, key: str) -> bool:
        """Present and not null: transformers writes null for "not set"."""
        return self.data.get(key) is not None

    def _checked(self, key: str, default: Any, fits: Callable[[Any], bool], rule: str) -> Any:
        """The value of `key`, which must fit; where it is not given, `default` if there is one."""
        if key not in self and default is not None:
            return default
        value = self.data.get(key)
        if fits(value):
            return value
        if key not in self:
            raise self.fail(f"{key} is missing; it must be {rule}")
        shown = repr(value)
        raise self.fail(f"{key}={shown if len(shown) <= 80 else shown[:77] + '...'} must be {rule}")

    def integer(self, key: str, default: int | None = None, minimum: int = 1, maximum: int = 2**31 - 1) -> int:
        rule = f"an integer from {minimum} to {maximum}"
        value: int = self._checked(key, default, lambda v: type(v) is int and minimum <= v <= maximum, rule)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number greater than 0."""

        def fits(value: Any) -> bool:
            return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf

        return float(self._checked(key, default, fits, "a finite number above 0"))

    def boolean(self, key: str, default: bool) -> bool:
        value: bool = self._checked(key, default, lambda v: isinstance(v, bool), "true or false")
        return value

    def string(self, key: str, default: str | None = None) -> str:
        value: str = self._checked(key, default, lambda v: isinstance(v, str), "a string")
        return value

    def integers(self, key: str, maximum: int) -> tuple[int, ...]:
        """A list of integers in [0, maximum], or one such integer."""

        def fits(value: Any) -> bool:
            values = value if isinstance(value, list) else [value]
            return all(type(v) is int and 0 <= v <= maximum for v in values)

        checked = self._checked(key, None, fits, f"an integer or a list of integers from 0 to {maximum}")
        return tuple(checked) if isinstance(checked, list) else (checked,)

    def strings(self, key: str) -> tuple[str, ...]:
        return tuple(self._checked(key, None, lambda v: _list_of(v, str), "a list of strings"))

    def object(self, key: str) -> ConfigFields:
        value = self._checked(key, None, lambda v: isinstance(v, dict), "an object")
        return ConfigFields(f"{self.where}: {key}", value)

    def objects(self, key: str, count: int) -> tuple[ConfigFields, ...]:
        rule = f"a list of {count} objects, one a layer"
        values = self._checked(key, None, lambda v: _list_of(v, dict) and len(v) == count, rule)
        return tuple(ConfigFields(f"{self.where}: {key}[{i}]", v) for i, v in enumerate(values))


def _list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(isinstance(item, kind) for item in value)


def read_json(path: Path) -> ConfigFields:
    """The object in a JSON file. Raises FileNotFoundError, or ValueError naming the file and what is wrong with it."""
    if not path.is_file():
        raise FileNotFoundError(
            f"{path}: no such file; a model folder holds config.json, *.safetensors and a tokenizer"
        )
    size = path.stat().st_size
    if size > MAX_JSON_BYTES:
        raise ValueError(f"{path}: {size} bytes is more than the {MAX_JSON_BYTES} that a configuration may have")
    try:
        data = parse(path.read_bytes().removeprefix(codecs.BOM_UTF8))
    except ReadError as error:
        raise ValueError(f"{path}: not usable JSON: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path}: must hold one JSON object, not {type(data).__name__}")
    return ConfigFields(str(path), data)
