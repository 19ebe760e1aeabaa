"""The messages of a chat: roles and text contents. Errors name images and audio, which are not supported."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import PlainValidator, TypeAdapter

from ...topology.json_codec import ReadError, parse
from .errors import ApiError
from .validators import Refused, StrictModel, array, ignored, invalid, kind_of, show, text

MAX_MESSAGES = 8192
MAX_PARTS = 4096
MAX_CALLS = 128

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


def _role(value: Any) -> str:
    role = _ROLES.get(value) if type(value) is str else None
    if role is not None:
        return role
    if type(value) is not str:
        raise invalid(f" is {kind_of(value)}; a string is expected", "invalid_type")
    raise invalid(f"={show(value)}: {', '.join(_ROLES)} are supported")


def _text_kind(value: Any) -> str:
    if value != "text":
        rule = f"={show(value)}: only text parts are supported (no images, audio or files)"
        raise invalid(rule, "unsupported_value")
    return "text"


class TextPart(StrictModel):
    type: Annotated[str, PlainValidator(_text_kind, json_schema_input_type=Literal["text"])]
    text: str


_Parts = Annotated[tuple[TextPart, ...], array(MAX_PARTS, 1)]
_PARTS: TypeAdapter[tuple[TextPart, ...]] = TypeAdapter(_Parts)


def _content(value: Any) -> str | None:
    """The text of a content: a string, or text parts joined by line breaks."""
    if value is None or type(value) is str:
        return value
    if type(value) is not list:
        raise invalid(f" is {kind_of(value)}; a string or an array of text parts is expected", "invalid_type")
    return "\n".join([part.text for part in _PARTS.validate_python(value)])


def _arguments(value: Any) -> dict[str, Any]:
    """Parses a call's arguments from JSON text into the object that templates expect."""
    if type(value) is not str:
        raise invalid(f" is {kind_of(value)}; a string is expected", "invalid_type")
    try:
        arguments = parse(value.encode())
    except ReadError as error:
        raise invalid(f" is invalid: {error}") from None
    if type(arguments) is not dict:
        raise invalid(f" holds {kind_of(arguments)}; an object is expected")
    return arguments


class CalledFunction(StrictModel):
    name: Annotated[str, text(64, 1)]
    arguments: Annotated[dict[str, Any], PlainValidator(_arguments, json_schema_input_type=str)]


class ToolCall(StrictModel):
    id: Annotated[str, text(256)]
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(StrictModel):
    role: Annotated[
        str, PlainValidator(_role, json_schema_input_type=Literal["system", "developer", "user", "assistant", "tool"])
    ]
    content: Annotated[str | None, PlainValidator(_content, json_schema_input_type=str | _Parts | None)] = None
    name: Annotated[str, text(256)] | None = None
    refusal: Annotated[None, Refused("only messages with content are read")] = None
    audio: Annotated[None, Refused("text only")] = None
    tool_calls: Annotated[tuple[ToolCall, ...], array(MAX_CALLS)] | None = None
    tool_call_id: Annotated[str, text(256)] | None = None
    reasoning_content: Annotated[str, text(1 << 28)] | None = None
    function_call: Annotated[None, Refused("use tool_calls")] = None
    annotations: Annotated[Any, ignored("they are no part of the text")] = None


def as_template_takes_it(message: Message) -> dict[str, Any]:
    """A message for the chat template: role, content as one string, and the other fields; `developer` becomes `system`.
    Raises ApiError for an empty message."""
    mapping: dict[str, Any] = {"role": message.role, "content": message.content or ""}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (given := getattr(message, name)) is not None:
            mapping[name] = given
    if message.tool_calls:
        mapping["tool_calls"] = [call.model_dump() for call in message.tool_calls]
    elif "content" not in message.model_fields_set:
        raise ApiError("content is missing", code="missing_required_parameter")
    elif message.content is None:
        raise ApiError("content is null; a string or an array of text parts is expected", code="invalid_type")
    return mapping
