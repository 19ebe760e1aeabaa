"""Reading a dict that came over a wire, field by field: every value is checked, what is left over is an error.

Used by `messages.py`; raises `SchemaError` naming message, field, value and rule.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection
from typing import Any


class SchemaError(ValueError):
    """A message that breaks its schema."""


_MISSING: Any = object()
MAX_NUMBER = 1e300  # compared, not converted: an integer of any length must not overflow on the way to the check


class Fields:
    """The fields of one message. Each is taken once; `done` refuses what nobody took."""

    def __init__(self, data: object, what: str) -> None:
        if not isinstance(data, dict):
            raise SchemaError(f"{what}: an object is wanted, not {type(data).__name__}")
        self._data = dict(data)
        self._what = what

    def _fail(self, name: str, value: object, rule: str) -> SchemaError:
        return SchemaError(f"{self._what}: {name}={str(value)[:60]!r} is not {rule}")

    def raw(self, name: str, default: Any = _MISSING) -> Any:
        value = self._data.pop(name, default)
        if value is _MISSING:
            raise SchemaError(f"{self._what}: {name} is missing")
        return value

    def integer(self, name: str, low: int, high: int, default: Any = _MISSING) -> int:
        value = self.raw(name, default)
        if type(value) is not int or not low <= value <= high:
            raise self._fail(name, value, f"an integer from {low} to {high}")
        return value

    def number(self, name: str, default: Any = _MISSING) -> float:
        value = self.raw(name, default)
        if type(value) not in (int, float) or not abs(value) <= MAX_NUMBER:
            raise self._fail(name, value, "a finite number")
        return float(value)

    def text(self, name: str, limit: int, default: Any = _MISSING) -> str:
        value = self.raw(name, default)
        if not isinstance(value, str) or len(value) > limit:
            raise self._fail(name, value, f"text of at most {limit} characters")
        return value

    def word(self, name: str, words: Collection[str]) -> str:
        value = self.raw(name)
        if not isinstance(value, str) or value not in words:
            raise self._fail(name, value, "one of " + ", ".join(words))
        return value

    def flag(self, name: str, default: Any = _MISSING) -> bool:
        value = self.raw(name, default)
        if not isinstance(value, bool):
            raise self._fail(name, value, "true or false")
        return value

    def ids(self, name: str, limit: int, default: Any = _MISSING) -> tuple[int, ...]:
        """Token ids: integers from 0 to 2**32 - 1."""
        value = self.raw(name, default)
        if not isinstance(value, (list, tuple)) or len(value) > limit:
            raise self._fail(name, value, f"a list of at most {limit} token ids")
        try:
            return tuple(array("I", value))  # checks at C speed: prompts have many ids
        except (TypeError, OverflowError):
            raise self._fail(name, value, "a list of token ids") from None

    def items(self, name: str, limit: int, default: Any = _MISSING) -> list[Any]:
        value = self.raw(name, default)
        if not isinstance(value, (list, tuple)) or len(value) > limit:
            raise self._fail(name, value, f"a list of at most {limit} items")
        return list(value)

    def texts(self, name: str, limit: int, length: int) -> tuple[str, ...]:
        value = self.items(name, limit)
        if not all(isinstance(item, str) and len(item) <= length for item in value):
            raise self._fail(name, value, f"a list of texts of at most {length} characters")
        return tuple(value)

    def numbers(self, name: str, limit: int, length: int = 128) -> dict[str, float]:
        """A mapping of names to finite numbers."""
        value = self.raw(name, {})
        if not isinstance(value, dict) or len(value) > limit:
            raise self._fail(name, value, f"a mapping of at most {limit} numbers")
        for key, item in value.items():
            if len(key) > length or type(item) not in (int, float) or not abs(item) <= MAX_NUMBER:
                raise self._fail(f"{name}.{key[:40]}", item, "a finite number")
        return {key: float(item) for key, item in value.items()}

    def done(self) -> None:
        if self._data:
            raise SchemaError(f"{self._what}: unknown field {next(iter(self._data))[:40]!r}")
