"""Converts `response_format`, `guided_*` and `structured_outputs` to one grammar in llguidance's JSON form."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from ...topology.json_codec import ReadError, parse
from .errors import ApiError
from .validators import Refused, StrictModel, array, ignored, invalid, show, text

MAX_GRAMMAR_CHARS = 1 << 18


def _parsed(value: Any) -> Any:
    """Parses a JSON schema that is given as text; returns other values unchanged."""
    if type(value) is not str:
        return value
    if not 1 <= len(value) <= MAX_GRAMMAR_CHARS:
        raise invalid(f" has {len(value)} characters: 1 to {MAX_GRAMMAR_CHARS} are allowed")
    try:
        return parse(value.encode())
    except ReadError as error:
        raise invalid(f" is invalid: {error}") from None


_Object = Annotated[dict[str, Any], Field(max_length=1024)]
_Schema = Annotated[_Object, BeforeValidator(_parsed, json_schema_input_type=dict[str, Any] | str)]
_Text = Annotated[str, text(MAX_GRAMMAR_CHARS, 1)]
_Choices = Annotated[tuple[Annotated[str, text(4096, 1)], ...], array(1024, 1)]


class JsonSchemaFormat(StrictModel):
    schema_: _Object = Field(alias="schema")
    name: Annotated[str, text(256)] | None = None
    description: Annotated[str, text(4096)] | None = None
    strict: bool | None = None


class ResponseFormat(StrictModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(StrictModel):
    json_: _Schema | None = Field(None, alias="json")
    json_object: Literal[True] | None = None
    regex: _Text | None = None
    choice: _Choices | None = None
    grammar: _Text | None = None
    structural_tag: Annotated[None, Refused("use json, regex, choice or grammar")] = None
    whitespace_pattern: _Text | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    disable_fallback: Annotated[Any, ignored("there is one library")] = None


class GrammarFields(StrictModel):
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: _Schema | None = None
    guided_regex: _Text | None = None
    guided_choice: _Choices | None = None
    guided_grammar: _Text | None = None
    guided_decoding_backend: Annotated[Any, ignored("there is one library")] = None
    guided_whitespace_pattern: Annotated[_Text | None, Field(description="White space in JSON; needs guided_json.")] = (
        None
    )
    structural_tag: Annotated[None, Refused("use structured_outputs: json, regex, choice or grammar")] = None


_KINDS = ("json_", "json_object", "regex", "choice", "grammar")
_LISTED = ", ".join(_KINDS).replace("_,", ",")


def _asked(fields: GrammarFields) -> Iterator[tuple[str, str, Any]]:
    """Yields (field, kind, value) of each requested grammar."""
    response_format = fields.response_format
    if response_format is not None and response_format.type == "json_object":
        yield "response_format", "json", {"type": "object"}
    if response_format is not None and response_format.type == "json_schema":
        where = "response_format.json_schema"
        if response_format.json_schema is None:
            raise ApiError(f"{where} is missing", param=where, code="missing_required_parameter")
        yield "response_format", "json", response_format.json_schema.schema_
    if fields.structured_outputs is not None:
        name = "structured_outputs"
        members_asked = fields.structured_outputs
        members = [(kind, given) for kind, given in members_asked if kind in _KINDS and given is not None]
        if len(members) != 1:
            raise ApiError(f"{name} has {len(members)} members of {_LISTED}: exactly one is expected", param=name)
        ((kind, given),) = members
        if kind == "json_":
            given = _closed(given) if members_asked.disable_additional_properties else given
            given = _spaced(given, members_asked.whitespace_pattern, bool(members_asked.disable_any_whitespace))
        yield name, *(("json", {"type": "object"}) if kind == "json_object" else (kind.rstrip("_"), given))
    for kind in ("json", "regex", "choice", "grammar"):
        if (given := getattr(fields, f"guided_{kind}")) is not None:
            given = _spaced(given, fields.guided_whitespace_pattern) if kind == "json" else given
            yield f"guided_{kind}", kind, given


def _spaced(schema: dict[str, Any], pattern: str | None, never: bool = False) -> dict[str, Any]:
    """Adds llguidance's keyword for white space to a schema."""
    if never:
        return {**schema, "x-guidance": {"whitespace_flexible": False}}
    return schema if pattern is None else {**schema, "x-guidance": {"whitespace_pattern": pattern}}


def _closed(node: Any) -> Any:
    """Forbids additional properties in a schema's objects."""
    if isinstance(node, list):
        return [_closed(item) for item in node]
    if not isinstance(node, dict):
        return node
    closed = {"additionalProperties": False} if isinstance(node.get("properties"), dict) else {}
    return {**closed, **{key: _closed(item) for key, item in node.items()}}


def grammar_of(fields: GrammarFields) -> str | None:
    asked = list(_asked(fields))
    if not asked:
        return None
    if len(asked) > 1:
        names = " and ".join(name for name, _, _ in asked)
        raise ApiError(f"{names} cannot be combined: send one", param=asked[1][0])
    name, kind, given = asked[0]
    text = json.dumps({"grammars": [_one(kind, given)]}, ensure_ascii=False, separators=(",", ":"))
    if len(text) > MAX_GRAMMAR_CHARS:
        raise ApiError(f"{name} has {len(text)} characters: at most {MAX_GRAMMAR_CHARS}", param=name)
    return text


def grammar_param(fields: GrammarFields) -> str:
    """The field that asks for the grammar."""
    return next(name for name, _, _ in _asked(fields))


def _one(kind: str, given: Any) -> dict[str, Any]:
    if kind == "json":
        return {"json_schema": given}
    if kind == "choice":
        return {"lark_grammar": "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in given)}
    if kind == "regex":
        return {"lark_grammar": f"start: /{_slashes(given)}/"}
    return {"lark_grammar": given}


def _slashes(pattern: str) -> str:
    """Prepares a regular expression for lark's slashes: escapes slashes and line breaks."""
    out, escaped = [], False
    for char in pattern:
        if char == "\n":
            out.append("n" if escaped else "\\n")
        else:
            out.append("\\/" if char == "/" and not escaped else char)
        escaped = char == "\\" and not escaped
    if escaped:
        raise ApiError(f"the pattern {show(pattern)} ends in the middle of an escape")
    return "".join(out)
