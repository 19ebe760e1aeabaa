"""Helpers of this folder's pydantic models; converts pydantic's errors to an ApiError with field, value and rule."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic import ValidationError as PydanticError
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError, core_schema

from ...topology.json_codec import ReadError, parse
from .errors import ApiError

Model = TypeVar("Model", bound=BaseModel)


class StrictModel(BaseModel):
    """An object without unknown members; values are not converted."""

    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())


@dataclass(frozen=True)
class Refused:
    """A field of other APIs that is not supported: only null and `harmless` values pass, and become None."""

    why: str
    harmless: tuple[Any, ...] = ()

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"enum": [None, *self.harmless], "description": f"Not supported: {self.why}."}

    def _check(self, value: Any) -> None:
        if value is not None and not any(type(value) is type(h) and value == h for h in self.harmless):
            raise invalid(f" is not supported: {self.why}", "unsupported_parameter")


def ignored(why: str) -> Any:
    """For Annotated[Any, …]: a field that is accepted with any value and has no effect."""
    return Field(description=f"Ignored: {why}.")


def described(about: str) -> Any:
    """For Annotated[…, …]: a field with this description."""
    return Field(description=about)


def text(most: int, least: int = 0) -> Any:
    """For Annotated[str, …]: a text of `least` to `most` characters, strict even in a model that is not."""
    return Field(strict=True, min_length=least, max_length=most)


def array(most: int, least: int = 0) -> Any:
    """For Annotated[tuple[…, ...], …]: an array of `least` to `most` items; the first bad one ends the check."""
    return Field(strict=False, fail_fast=True, min_length=least, max_length=most)


def invalid(rule: str, code: str = "invalid_value") -> PydanticCustomError:
    """The error of a custom rule; its message is the field's name followed by `rule`."""
    return PydanticCustomError(code, "{rule}", {"rule": rule})


def show(value: Any) -> str:
    """A value, shortened for error messages."""
    if isinstance(value, str):
        return repr(value if len(value) <= 48 else value[:45] + "…")
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**30:
        return "a very large integer"
    if isinstance(value, (list, dict)):
        return f"{kind_of(value)} of {len(value)}"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)


def kind_of(value: Any) -> str:
    names = {str: "a string", bool: "a boolean", int: "an integer", float: "a number", list: "an array"}
    return names.get(type(value), "null" if value is None else "an object")


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """` (did you mean …?)`, or "" if no name is similar."""
    near = difflib.get_close_matches(name[:64], list(names), 1, 0.6)
    return f" (did you mean {near[0]}?)" if near else ""


def parsed(data: bytes) -> Any:
    """Parses the JSON of an HTTP request's body. Raises ApiError."""
    try:
        return parse(data)
    except ReadError as error:
        raise ApiError(f"the body is invalid: {error}", "invalid_json") from None


def checked(model: type[Model], value: Any) -> Model:
    """Validates a body as its model; null counts as absent. Raises ApiError for the first error."""
    if type(value) is not dict:
        raise ApiError("the body must be a JSON object", code="invalid_type")
    names = model.__pydantic_fields__
    if len(value) > len(names):  # refuse before checking each of many members
        _refuse_unknown(next(key for key in value if key not in names), (), model)
    if None in value.values():
        value = {key: given for key, given in value.items() if given is not None}
    try:
        return model.model_validate(value)
    except PydanticError as error:
        raise _bad_request(error.errors(include_url=False)[0], model) from None


def takes(schema: dict[str, Any], media: str = "application/json") -> dict[str, Any]:
    """A route's `openapi_extra` for a body of this schema."""
    return {"requestBody": {"required": True, "content": {media: {"schema": schema}}}}


def json_schema(model: type[BaseModel]) -> dict[str, Any]:
    """A model's JSON schema in one piece, without references and generated titles."""
    schema = model.model_json_schema()

    def inlined(node: Any) -> Any:
        if isinstance(node, list):
            return [inlined(item) for item in node]
        if not isinstance(node, dict):
            return node
        if "$ref" in node:
            return inlined(schema["$defs"][node["$ref"].rpartition("/")[2]])
        dropped = {"$defs", *(k for k in ("title", "default") if not isinstance(node.get(k), dict))}
        return {key: inlined(item) for key, item in node.items() if key not in dropped}

    inlined_schema: dict[str, Any] = inlined(schema)
    return inlined_schema


_schema_of = functools.cache(json_schema)
_WANTED = {
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "a boolean",
    "string_type": "a string",
    "tuple_type": "an array",
    "dict_type": "an object",
    "model_type": "an object",
    "int_from_float": "an integer",
}


def _bad_request(error: ErrorDetails, model: type[BaseModel]) -> ApiError:
    kind, loc, value = error["type"], error["loc"], error["input"]
    name = _name(loc)
    if kind == "float_type" and type(value) is int:  # an integer too large for a double
        kind = "less_than"
    if kind == "extra_forbidden":
        _refuse_unknown(str(loc[-1]), loc[:-1], model)
    if kind == "missing":
        return ApiError(f"{name} is missing", param=name, code="missing_required_parameter")
    if kind in _WANTED:
        message = f"{name} is {kind_of(value)}; {_WANTED[kind]} is expected"
        return ApiError(message, param=name, code="invalid_type")
    if kind == "literal_error":
        listed = error["ctx"]["expected"].replace(" or ", ", ")
        return ApiError(f"{name}={show(value)}: supported: {listed}", param=name, code="unsupported_value")
    if rule := error.get("ctx", {}).get("rule"):
        return ApiError(f"{name}{rule}", param=name, code=kind)
    part = _schema_at(_schema_of(model), loc) or _schema_of(model)["properties"].get(loc[0], {})
    if kind.startswith("string_too_"):
        bounds = _bounds(part, "minLength", "maxLength")
        return ApiError(f"{name} has {len(value)} characters: {bounds} are allowed", param=name)
    if kind.startswith("too_"):
        entries = _bounds(part, "minItems", "maxItems", "minProperties", "maxProperties")
        return ApiError(f"{name} has {len(value)} entries: {entries} are allowed", param=name)
    if kind.startswith(("greater_than", "less_than", "finite_number")):
        bounds = _bounds(part, "minimum", "exclusiveMinimum", "maximum", between="from {0} to {1}")
        return ApiError(f"{name}={show(value)}: must be {bounds}", param=name)
    return ApiError(f"{name}: {error['msg'][:200]}", param=name)


def _schema_at(node: dict[str, Any], loc: tuple[int | str, ...]) -> dict[str, Any]:
    """The schema of the value at `loc`; {} if there is none."""
    if not loc:
        return node
    for option in (node, *node.get("anyOf", ())):
        inner = option.get("items") if isinstance(loc[0], int) else option.get("properties", {}).get(loc[0])
        if isinstance(inner, dict) and (schema := _schema_at(inner, loc[1:])):
            return schema
    return {}


def _bounds(node: Any, *keywords: str, between: str = "{0} to {1}") -> str:
    """The bounds in a field's schema, in words; a schema has at most one pair of each kind."""
    bounds = [(key, f"{node[key]:g}" if isinstance(node[key], float) else node[key]) for key in keywords if key in node]
    if len(bounds) == 2:
        (low, least), (_, most) = bounds
        return f"more than {least} and at most {most}" if low == "exclusiveMinimum" else between.format(least, most)
    if bounds:
        return f"at most {bounds[0][1]}"
    inner = (node.get(key) for key in ("items", "additionalProperties"))
    children = (
        *node.get("anyOf", ()),
        *node.get("properties", {}).values(),
        *(i for i in inner if isinstance(i, dict)),
    )
    return next((bounds_text for child in children if (bounds_text := _bounds(child, *keywords, between=between))), "")


def _name(loc: tuple[int | str, ...]) -> str:
    """A field's path, such as messages[0].content or logit_bias[17]; keys of clients are shortened."""
    out = ""
    for part in loc:
        if isinstance(part, int) or part.isdigit():
            out += f"[{part}]"
        else:
            out += f".{part[:64]}" if out else part[:64]
    return out


def _refuse_unknown(key: str, parents: tuple[int | str, ...], model: type[BaseModel]) -> NoReturn:
    full = _name((*parents, key))
    hint = did_you_mean(key, _members(_schema_of(model), parents))
    message = f"unknown field {full!r} in {_name(parents) or 'the body'}{hint}"
    raise ApiError(message, param=full, code="unknown_parameter")


def _members(node: dict[str, Any], loc: tuple[int | str, ...]) -> Collection[str]:
    """The members that the object at `loc` may have."""
    for option in (node, *node.get("anyOf", ())):
        if not loc and "properties" in option:
            return list(option["properties"])
        if not loc:
            continue
        inner = option.get("items") if isinstance(loc[0], int) else option.get("properties", {}).get(loc[0])
        if inner and (members := _members(inner, loc[1:])):
            return members
    return ()
