"""Strict reading of a checkpoint folder's small JSON files: every wrong type, missing field or duplicate key is one
ValueError that names file, key, value and rule. Knows JSON and numbers, nothing of models. No torch.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...topology import strict_json

MAX_JSON_BYTES = 16 * 2**20


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

    def _wrong(self, key: str, rule: str) -> ValueError:
        if key not in self:
            return self.fail(f"{key} is missing; it must be {rule}")
        shown = repr(self.data[key])
        return self.fail(f"{key}={shown if len(shown) <= 80 else shown[:77] + '...'} must be {rule}")

    def integer(self, key: str, default: int | None = None, minimum: int = 1, maximum: int = 2**31 - 1) -> int:
        if key not in self and default is not None:
            return default
        value = self.data.get(key)
        if type(value) is not int or not minimum <= value <= maximum:
            raise self._wrong(key, f"an integer from {minimum} to {maximum}")
        return value

    def number(self, key: str, default: float | None = None, above: float = 0.0) -> float:
        """A finite number greater than `above`."""
        if key not in self and default is not None:
            return default
        value = self.data.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not above < value < math.inf:
            raise self._wrong(key, f"a finite number above {above:g}")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        if key not in self:
            return default
        value = self.data[key]
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false")
        return value

    def string(self, key: str, default: str | None = None) -> str:
        if key not in self and default is not None:
            return default
        value = self.data.get(key)
        if not isinstance(value, str):
            raise self._wrong(key, "a string")
        return value

    def integers(self, key: str, maximum: int) -> tuple[int, ...]:
        """A list of integers in [0, maximum], or one such integer."""
        value = self.data.get(key)
        values = value if isinstance(value, list) else [value]
        if not all(type(v) is int and 0 <= v <= maximum for v in values):
            raise self._wrong(key, f"an integer or a list of integers from 0 to {maximum}")
        return tuple(values)

    def strings(self, key: str) -> tuple[str, ...]:
        value = self.data.get(key)
        if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
            raise self._wrong(key, "a list of strings")
        return tuple(value)

    def object(self, key: str) -> ConfigFields:
        value = self.data.get(key)
        if not isinstance(value, dict):
            raise self._wrong(key, "an object")
        return ConfigFields(f"{self.where}: {key}", value)

    def objects(self, key: str, count: int) -> tuple[ConfigFields, ...]:
        value = self.data.get(key)
        if not isinstance(value, list) or len(value) != count or not all(isinstance(v, dict) for v in value):
            raise self._wrong(key, f"a list of {count} objects, one a layer")
        return tuple(ConfigFields(f"{self.where}: {key}[{i}]", v) for i, v in enumerate(value))


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
        data = strict_json.parse(path.read_bytes().removeprefix(codecs.BOM_UTF8))
    except strict_json.JsonError as error:
        raise ValueError(f"{path}: not usable JSON: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path}: must hold one JSON object, not {type(data).__name__}")
    return ConfigFields(str(path), data)
