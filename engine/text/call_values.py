"""Values of a call's arguments as models write them: JSON, found by its own end in a growing text, and plain texts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

ParameterTypes = Mapping[str, Sequence[str]]
"""A tool's parameters with the types that their schema allows; () if it does not say."""
BLANK = "".join(filter(str.isspace, map(chr, range(0x3001))))
"""White space, as in patterns and in str.strip: models write some that is none to JSON between a call's parts."""
PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
_MAX_DEPTH = 32  # of schemas within a parameter's
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
    kind = _kind_of(value)
    fits = kind in types or (kind == "integer" and "number" in types) or "string" not in types
    return json.dumps(value if fits else text, ensure_ascii=False)


class SchemaTypes:
    """The types that the parameters of one tool allow. `root`: its parameters, which references point into."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._referred: dict[str, list[str]] = {}

    def of(self, schema: Any, depth: int = 0) -> list[str]:
        """The types that a parameter's schema allows; [] if it does not say."""
        if not isinstance(schema, dict) or depth > _MAX_DEPTH:
            return []
        types = schema.get("type")
        if isinstance(types, str):
            return [types]
        if isinstance(types, list):
            return [name for name in types if isinstance(name, str)]
        if isinstance(reference := schema.get("$ref"), str):
            if reference not in self._referred:
                self._referred[reference] = []  # while it is read: it may refer to itself
                self._referred[reference] = self.of(self._at(reference), depth + 1)
            return self._referred[reference]
        for name in ("anyOf", "oneOf", "allOf"):
            if isinstance(options := schema.get(name), list) and options:
                allowed = [self.of(option, depth + 1) for option in options]
                if name == "allOf":
                    return next(filter(None, allowed), [])
                return sorted({kind for kinds in allowed for kind in kinds}) if all(allowed) else []
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        return sorted({_kind_of(value) for value in values}) if isinstance(values, list) else []

    def _at(self, reference: str) -> Any:
        """The schema at a reference such as #/$defs/Unit; None if there is none."""
        node: Any = self._root if reference.startswith("#/") else None
        for step in reference.split("/")[1:]:
            node = node.get(unquote(step).replace("~1", "/").replace("~0", "~")) if isinstance(node, dict) else None
        return node


def _kind_of(value: Any) -> str:
    return "null" if value is None else _JSON_TYPES[type(value)]


def parameter_types(tools: Iterable[dict[str, Any]]) -> dict[str, dict[str, list[str]]]:
    """The types of each tool's parameters."""
    types = {}
    for tool in tools:
        root = tool["function"].get("parameters") or {}
        properties = root.get("properties")
        named = properties if isinstance(properties, dict) else {}
        schema_types = SchemaTypes(root)
        types[tool["function"]["name"]] = {key: schema_types.of(schema) for key, schema in named.items()}
    return types
