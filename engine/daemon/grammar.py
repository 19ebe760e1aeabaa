"""Structured output as clients ask for it -> one grammar in llguidance's JSON form, or None.

`response_format`, vLLM's `guided_*` and its newer `structured_outputs`. Whether the grammar compiles is for the
library; here only shape and size are checked.
"""

from __future__ import annotations

import json
from typing import Any

from .rules import BadRequest, Field, array, json_object, members, one_of, refused, show, string
from .strictjson import JsonFault, parse

MAX_GRAMMAR_CHARS = 1 << 18

_OBJECT, _TEXT, _CHOICES = json_object(), string(MAX_GRAMMAR_CHARS, 1), array(string(4096, 1), 1024, 1)


def _schema(name: str, value: Any) -> Any:
    """A JSON schema as an object, or as its text."""
    if type(value) is str:
        try:
            value = parse(_TEXT.rule(name, value).encode())
        except JsonFault as fault:
            raise BadRequest(f"{name} is unusable: {fault}", param=name) from None
    return _OBJECT.rule(name, value)


_SCHEMA = Field(_schema, {"anyOf": [{"type": "object"}, {"type": "string"}]})
_FORMAT = {"type": one_of("text", "json_object", "json_schema"), "json_schema": json_object()}
_FORMAT_SCHEMA = {
    "name": string(256),
    "description": string(4096),
    "schema": json_object(),
    "strict": Field(lambda name, value: value if type(value) is bool else one_of(True, False).rule(name, value), {}),
}
_STRUCTURED = {
    "json": _SCHEMA,
    "json_object": one_of(True),
    "regex": _TEXT,
    "choice": _CHOICES,
    "grammar": _TEXT,
    "structural_tag": refused("use json, regex, choice or grammar"),
}


def _response_format(name: str, value: Any) -> tuple[str, Any] | None:
    found = members(name, _OBJECT.rule(name, value), _FORMAT, f"{name}.")
    kind = found.get("type")
    if kind is None:
        raise BadRequest(f"{name}.type is missing", param=f"{name}.type", code="missing_required_parameter")
    if kind != "json_schema":
        return ("json", {"type": "object"}) if kind == "json_object" else None
    where = f"{name}.json_schema"
    if "json_schema" not in found:
        raise BadRequest(f"{where} is missing", param=where, code="missing_required_parameter")
    inner = members(where, found["json_schema"], _FORMAT_SCHEMA, f"{where}.")
    if "schema" not in inner:
        raise BadRequest(f"{where}.schema is missing", param=f"{where}.schema", code="missing_required_parameter")
    return "json", inner["schema"]


def _structured(name: str, value: Any) -> tuple[str, Any]:
    found = members(name, _OBJECT.rule(name, value), _STRUCTURED, f"{name}.")
    if len(found) != 1:
        raise BadRequest(f"{name} has {len(found)} members: exactly one is expected", param=name)
    (kind, given), *_ = found.items()
    return ("json", {"type": "object"}) if kind == "json_object" else (kind, given)


GRAMMAR_FIELDS: dict[str, Field] = {
    "response_format": Field(_response_format, {"type": "object"}),
    "structured_outputs": Field(_structured, {"type": "object"}),
    "guided_json": _SCHEMA,
    "guided_regex": _TEXT,
    "guided_choice": _CHOICES,
    "guided_grammar": _TEXT,
    "guided_decoding_backend": refused("the engine's own library is used", "auto", "guidance"),
    "guided_whitespace_pattern": refused("the engine's own library decides on white space"),
}


def grammar_of(found: dict[str, Any]) -> str | None:
    """Takes the grammar fields out of a checked body and gives back their one grammar."""
    asked: list[tuple[str, str, Any]] = []
    for name in ("response_format", "structured_outputs"):
        if name in found:
            asked.append((name, *found.pop(name)))
    for kind in ("json", "regex", "choice", "grammar"):
        if (name := f"guided_{kind}") in found:
            asked.append((name, kind, found.pop(name)))
    if not asked:
        return None
    if len(asked) > 1:
        names = " and ".join(name for name, _, _ in asked)
        raise BadRequest(f"{names} exclude each other: send one", param=asked[1][0])
    name, kind, given = asked[0]
    text = json.dumps({"grammars": [_one(kind, given)]}, ensure_ascii=False, separators=(",", ":"))
    if len(text) > MAX_GRAMMAR_CHARS:
        raise BadRequest(f"{name} has {len(text)} characters: at most {MAX_GRAMMAR_CHARS}", param=name)
    return text


def _one(kind: str, given: Any) -> dict[str, Any]:
    if kind == "json":
        return {"json_schema": given}
    if kind == "choice":
        return {"lark_grammar": "start: " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in given)}
    if kind == "regex":
        return {"lark_grammar": f"start: /{_slashes(given)}/"}
    return {"lark_grammar": given}


def _slashes(pattern: str) -> str:
    """A regular expression between slashes: unescaped ones are escaped, line breaks spelt out."""
    out, escaped = [], False
    for char in pattern:
        if char == "\n":
            out.append("n" if escaped else "\\n")
        else:
            out.append("\\/" if char == "/" and not escaped else char)
        escaped = char == "\\" and not escaped
    if escaped:
        raise BadRequest(f"the pattern {show(pattern)} ends in the middle of an escape")
    return "".join(out)
