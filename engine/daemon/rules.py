"""The rules that fields of a request obey: each a function (name, value) -> value that raises BadRequest, and its JSON
schema for the API's description. Knows no field by name.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

Rule = Callable[[str, Any], Any]


class BadRequest(ValueError):
    """A request that cannot be taken. `param` names the field, `code` is for programs, `status` is HTTP's."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str = "invalid_value",
        kind: str = "invalid_request_error",
        status: int = 400,
    ) -> None:
        super().__init__(message)
        self.message, self.param, self.code, self.kind, self.status = message, param, code, kind, status

    def to_json(self, line: int | None = None) -> dict[str, Any]:
        """{"error": {message, type, param, code}}, with the line's number for files."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error if line is None else {**error, "line": line}}


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a body: its rule, its JSON schema, and what it means."""

    rule: Rule
    schema: dict[str, Any]
    doc: str = ""


def show(value: Any) -> str:
    """A value as error messages repeat it: short, whatever was sent."""
    if isinstance(value, str):
        return repr(value if len(value) <= 48 else value[:45] + "…")
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**30:
        return "a very large integer"
    if isinstance(value, (list, dict)):
        return f"{_kind(value)} of {len(value)}"
    return {None: "null", True: "true", False: "false"}.get(value, repr(value))


def _kind(value: Any) -> str:
    names = {str: "a string", bool: "a boolean", int: "an integer", float: "a number", list: "an array"}
    return names.get(type(value), "null" if value is None else "an object")


def wrong_type(name: str, value: Any, wanted: str) -> BadRequest:
    return BadRequest(f"{name} is {_kind(value)}; {wanted} is expected", param=name, code="invalid_type")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """` (did you mean …?)`, or nothing."""
    near = difflib.get_close_matches(name[:64], list(known), 1, 0.6)
    return f" (did you mean {near[0]}?)" if near else ""


def number(low: float, high: float, open_low: bool = False) -> Field:
    """A finite number; integers count."""

    def rule(name: str, value: Any) -> float:
        kind = type(value)
        if kind is not float and kind is not int:
            raise wrong_type(name, value, "a number")
        if not (low < value <= high if open_low else low <= value <= high):
            bounds = f"more than {low:g} and at most {high:g}" if open_low else f"from {low:g} to {high:g}"
            raise BadRequest(f"{name}={show(value)}: must be {bounds}", param=name)
        return float(value)

    bound = "exclusiveMinimum" if open_low else "minimum"
    return Field(rule, {"type": "number", bound: low, "maximum": high})


def integer(low: int, high: int) -> Field:
    def rule(name: str, value: Any) -> int:
        if type(value) is not int:
            raise wrong_type(name, value, "an integer")
        if not low <= value <= high:
            raise BadRequest(f"{name}={show(value)}: must be from {low} to {high}", param=name)
        return value

    return Field(rule, {"type": "integer", "minimum": low, "maximum": high})


def boolean() -> Field:
    def rule(name: str, value: Any) -> bool:
        if value is not True and value is not False:
            raise wrong_type(name, value, "a boolean")
        return value

    return Field(rule, {"type": "boolean"})


def string(max_chars: int, min_chars: int = 0) -> Field:
    def rule(name: str, value: Any) -> str:
        if type(value) is not str:
            raise wrong_type(name, value, "a string")
        if not min_chars <= len(value) <= max_chars:
            raise BadRequest(f"{name} has {len(value)} characters: {min_chars} to {max_chars} are allowed", param=name)
        return value

    return Field(rule, {"type": "string", "minLength": min_chars, "maxLength": max_chars})


def array(item: Field, max_items: int, min_items: int = 0) -> Field:
    """A tuple of what `item` allows."""

    def rule(name: str, value: Any) -> tuple[Any, ...]:
        if type(value) is not list:
            raise wrong_type(name, value, "an array")
        if not min_items <= len(value) <= max_items:
            raise BadRequest(f"{name} has {len(value)} entries: {min_items} to {max_items} are allowed", param=name)
        one = item.rule
        return tuple([one(f"{name}[{i}]", v) for i, v in enumerate(value)])

    return Field(rule, {"type": "array", "items": item.schema, "minItems": min_items, "maxItems": max_items})


def json_object(max_entries: int = 1024) -> Field:
    def rule(name: str, value: Any) -> dict[str, Any]:
        if type(value) is not dict:
            raise wrong_type(name, value, "an object")
        if len(value) > max_entries:
            raise BadRequest(f"{name} has {len(value)} entries: at most {max_entries} are allowed", param=name)
        return value

    return Field(rule, {"type": "object", "maxProperties": max_entries})


def one_of(*values: Any) -> Field:
    """One of a few plain values."""

    def rule(name: str, value: Any) -> Any:
        for allowed in values:
            if type(value) is type(allowed) and value == allowed:
                return value
        listed = ", ".join(show(v) for v in values)
        raise BadRequest(f"{name}={show(value)}: {listed} is what is supported", param=name, code="unsupported_value")

    return Field(rule, {"enum": list(values)})


def refused(why: str, *harmless: Any) -> Field:
    """A field known from elsewhere that is not supported: only values that ask for nothing pass (and are dropped)."""

    def rule(name: str, value: Any) -> None:
        if not any(type(value) is type(h) and value == h for h in harmless):
            raise BadRequest(f"{name} is not supported: {why}", param=name, code="unsupported_parameter")

    return Field(rule, {"enum": [None, *harmless]}, why)


def members(name: str, value: dict[str, Any], fields: dict[str, Field], where: str = "") -> dict[str, Any]:
    """The checked members of an object; null counts as absent. Unknown ones are refused with their neighbour."""
    out = {}
    for key, given in value.items():
        field = fields.get(key)
        if field is None:
            full = f"{where}{key[:64]}"
            hint = did_you_mean(key, fields)
            raise BadRequest(f"unknown field {full!r} in {name}{hint}", param=full, code="unknown_parameter")
        if given is not None and (kept := field.rule(where + key, given)) is not None:
            out[key] = kept
    return out
