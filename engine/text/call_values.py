"""Values of a call's arguments as models write them: JSON, found by its own end in a growing text, and plain texts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

ParameterTypes = Mapping[str, Sequence[str]]
"""A tool's parameters with the types that their schema allows; () if it does not say."""
BLANK = " \n\t\r"
"""JSON's white space."""
PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
USELESS = {"id", "index", "tool_call_id", "type"}
"""Members after a call's arguments that say nothing."""


class JsonValue:
    """Finds the end of a JSON object, array or string at the beginning of a growing text, and escapes the control
    characters in its strings."""

    def __init__(self, depth: int = 0) -> None:
        """depth: of the brackets around the text."""
        self._depth = depth
        self._string = self._escaped = False
        self.ended = False

    def feed(self, text: str, marks: tuple[str, ...] = (), last: bool = True) -> tuple[str, int]:
        """Returns what the text adds to the value, and the index after that. A mark outside its strings ends it; if the
        text is not the last, what may become one is left."""
        out: list[str] = []
        for at, char in enumerate(text):
            if char == "<" and not self._string and marks:
                self.ended = text.startswith(marks, at)
                if self.ended or (not last and any(mark.startswith(text[at:]) for mark in marks)):
                    return "".join(out), at
            if self._string:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._string = False
            elif char == '"':
                self._string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
            out.append(json.dumps(char)[1:-1] if char < " " and (self._string or self._escaped) else char)
            if self._depth <= 0 and not self._string and char in '"}]':
                self.ended = True
                return "".join(out), at + 1
        return "".join(out), len(text)


def parsed_json(text: str) -> Any:
    """The value of a JSON text. Raises ValueError, also for values that JSON text cannot have (a lone surrogate, NaN,
    an infinity such as 1e999), and RecursionError."""
    value = json.loads(text, strict=False)
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    return value


def says_nothing(members: str) -> bool:
    """Whether the members at an object's end (", … }") are such as every call may have."""
    try:
        return not parsed_json("{" + members.strip(BLANK + ",")).keys() - USELESS
    except (ValueError, RecursionError):
        return False


def text_of_string(string: str) -> str:
    """The text of a JSON string; the argument itself if it is none."""
    try:
        return str(parsed_json(string))
    except ValueError:
        return string


def unquoted(name: str) -> str:
    try:
        return str(json.loads(f'"{name}"'))
    except ValueError:
        return name


_JSON_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


def typed_json(text: str, types: Sequence[str]) -> str:
    """The JSON of a value that a model wrote without quotes, by the types that its parameter allows."""
    text = text.removeprefix("\n").removesuffix("\n")
    if tuple(types) == ("string",):
        return json.dumps(text, ensure_ascii=False)
    written = PYTHON_WORDS.get(text.strip(), text)
    try:
        value = parsed_json(written)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    kind = "null" if value is None else _JSON_TYPES[type(value)]
    fits = kind in types or (kind == "integer" and "number" in types) or "string" not in types
    return json.dumps(value if fits else text, ensure_ascii=False)


def types_of(schema: Any) -> list[str]:
    """The types that a parameter's schema allows; [] if it does not say."""
    if not isinstance(schema, dict):
        return []
    types = schema.get("type")
    if isinstance(types, str):
        return [types]
    if isinstance(types, list):
        return [name for name in types if isinstance(name, str)]
    options: list[Any] = next((schema[name] for name in ("anyOf", "oneOf") if isinstance(schema.get(name), list)), [])
    if options:
        return sorted({name for option in options for name in types_of(option)})
    values = schema.get("enum") if isinstance(schema.get("enum"), list) else []
    return sorted({"null" if value is None else _JSON_TYPES.get(type(value), "") for value in values or ()})


def parameter_types(tools: Iterable[dict[str, Any]]) -> dict[str, dict[str, list[str]]]:
    """The types of each tool's parameters."""
    types = {}
    for tool in tools:
        properties = (tool["function"].get("parameters") or {}).get("properties")
        named = properties if isinstance(properties, dict) else {}
        types[tool["function"]["name"]] = {key: types_of(schema) for key, schema in named.items()}
    return types
