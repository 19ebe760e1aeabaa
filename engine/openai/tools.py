"""Tools of a chat body, and the grammar of an answer that must call one, as in vLLM: with `tool_choice: required` an
array of {"name", "parameters"}, with a named tool only its arguments. text/chat_parts.py finds calls in the text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, PlainValidator

from .errors import ApiError
from .validators import StrictModel, array, invalid, kind_of, show, text

MAX_TOOLS = 128
Choice = Literal["none", "auto", "required", "named"]
Name = Annotated[str, Field(strict=True, pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class Function(StrictModel):
    name: Name
    description: Annotated[str, text(1 << 16)] | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(StrictModel):
    type: Literal["function"]
    function: Function


class _Named(StrictModel):
    name: Name


class ToolChoice(StrictModel):
    type: Literal["function"]
    function: _Named


class _Allowed(StrictModel):
    mode: Literal["auto", "required"]
    tools: Annotated[tuple[ToolChoice, ...], array(MAX_TOOLS, 1)]


class AllowedTools(StrictModel):
    type: Literal["allowed_tools"]
    allowed_tools: _Allowed


class _ChoiceKind(StrictModel):
    model_config = ConfigDict(extra="ignore")
    type: Literal["function", "allowed_tools"]


_WORDS = ("none", "auto", "required")


def _choice(value: Any) -> tuple[Choice, tuple[str, ...]]:
    """Parses tool_choice into the choice and the only tools that may be called (() for all)."""
    if type(value) is dict:
        if _ChoiceKind.model_validate(value).type == "allowed_tools":
            allowed = AllowedTools.model_validate(value).allowed_tools
            return allowed.mode, tuple(tool.function.name for tool in allowed.tools)
        return "named", (ToolChoice.model_validate(value).function.name,)
    if type(value) is not str:
        raise invalid(f" is {kind_of(value)}; a string or an object is expected", "invalid_type")
    if value not in _WORDS:
        raise invalid(f"={show(value)}: {', '.join(_WORDS)} or an object that names functions are supported")
    return value, ()  # type: ignore[return-value]


Tools = Annotated[tuple[Tool, ...], array(MAX_TOOLS)]
Chosen = Annotated[
    tuple[Choice, tuple[str, ...]],
    PlainValidator(_choice, json_schema_input_type=Literal["none", "auto", "required"] | ToolChoice | AllowedTools),
]


def tools_of(fields: dict[str, Any]) -> dict[str, Any]:
    """The Body's fields about tools: those that may be called, the choice, its grammar; and those for the template
    (`offered`), which sees all of them. Raises ApiError."""
    offered: tuple[Tool, ...] = fields.get("tools", ())
    choice, only = fields.get("tool_choice", ("auto" if offered else "none", ()))
    if choice != "none" and not offered:
        raise ApiError(f"tool_choice={choice!r} needs tools: send them too", param="tool_choice")
    names = [tool.function.name for tool in offered]
    if len(set(names)) != len(names):
        raise ApiError("tools: two have the same name", param="tools")
    for name in only:
        if name not in names:
            raise ApiError(f"tool_choice names {name!r}, which is not among the tools", param="tool_choice")
    if choice == "none":
        return {}
    tools = [tool for tool in offered if not only or tool.function.name in only]
    dumped = {tool.function.name: tool.model_dump(exclude_none=True) for tool in offered}
    given: dict[str, Any] = {"tools": tuple(dumped[tool.function.name] for tool in tools), "tool_choice": choice}
    given["offered"] = tuple(dumped.values())
    if choice == "auto":
        strict = any(tool.function.strict for tool in tools)
        return given | ({"unenforced": ("strict of tools: with tool_choice auto",)} if strict else {})
    if choice == "named":
        schema = tools[0].function.parameters or {"type": "object"}
        given["tool_name"] = only[0]
    else:
        schema = _array(tools, fields.get("parallel_tool_calls", True))
    grammar = json.dumps({"grammars": [{"json_schema": schema}]}, ensure_ascii=False, separators=(",", ":"))
    return {**given, "grammar": grammar, "grammar_param": "tools"}


def _array(tools: Sequence[Tool], parallel: bool) -> dict[str, Any]:
    """The schema of one or more calls. Each tool's parameters keep their own definitions: they are a schema with its
    own `$id`, to which their references are relative."""
    calls, definitions = [], {}
    for number, tool in enumerate(tools):
        base = f"http://tool-{number}/"
        parameters = tool.function.parameters or {"type": "object"}
        own_id = parameters.get("$id")
        moved = _moved(parameters, own_id.rstrip("#"), base) if isinstance(own_id, str) and own_id else parameters
        definitions[tool.function.name] = {**moved, "$id": base}
        members = {"name": {"const": tool.function.name}, "parameters": {"$ref": base}}
        calls.append({"type": "object", "properties": members, "required": [*members], "additionalProperties": False})
    most = {} if parallel else {"maxItems": 1}
    return {"type": "array", "minItems": 1, **most, "items": {"anyOf": calls}, "$defs": definitions}


def _moved(node: Any, old: str, new: str) -> Any:
    """Changes a schema's references that begin with its `$id`."""
    if isinstance(node, list):
        return [_moved(item, old, new) for item in node]
    if not isinstance(node, dict):
        return node
    moved = {key: _moved(item, old, new) for key, item in node.items()}
    to = node.get("$ref")
    if isinstance(to, str) and to.partition("#")[0] == old:
        moved["$ref"] = new + to[len(old) :]
    return moved
