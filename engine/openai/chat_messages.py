"""The messages of a chat: roles and text contents. Errors name images and audio, which are not supported."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, PlainValidator, TypeAdapter, model_validator

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
    type: Annotated[str, PlainValidator(_text_kind, json_schema_input_type=Literal["text", "refusal"])]
    text: str


_TEXT_KINDS = ("text", "input_text", "output_text")
_NOT_TEXT = ("annotations", "cache_control", "logprobs")  # what clients and other servers add to a text part
_Parts = Annotated[tuple[TextPart, ...], array(MAX_PARTS)]
_PARTS: TypeAdapter[tuple[TextPart, ...]] = TypeAdapter(_Parts)
Content = str | list[dict[str, str]] | None


def _content(value: Any) -> Content:
    """A content as sent: a string, or text parts; an assistant's refusal is a text."""
    if value is None or type(value) is str:
        return value
    if type(value) is not list:
        raise invalid(f" is {kind_of(value)}; a string or an array of text parts is expected", "invalid_type")
    return [part.model_dump() for part in _PARTS.validate_python([_as_text(part) for part in value])] if value else ""


def _as_text(part: Any) -> Any:
    """A part of the Responses API, and a refusal, as the text part that they are to a template."""
    if type(part) is dict and part.get("type") in _TEXT_KINDS:
        return {name: given for name, given in part.items() if name not in _NOT_TEXT} | {"type": "text"}
    if type(part) is dict and part.keys() - {*_NOT_TEXT} == {"type", "refusal"} and part["type"] == "refusal":
        return {"type": "text", "text": part["refusal"]}
    return part


TextContent = Annotated[Content, PlainValidator(_content, json_schema_input_type=str | _Parts | None)]


def text_of(content: Content) -> str:
    """The text of a content, parts joined by line breaks."""
    return "\n".join(part["text"] for part in content) if isinstance(content, list) else content or ""


def _text_of_none(value: Any) -> Any:
    return "" if value is None else value


class _Lenient(StrictModel):
    """A part of an assistant's turn, which servers send with fields of their own: unknown ones are ignored."""

    model_config = ConfigDict(extra="ignore")


class CalledFunction(_Lenient):
    name: Annotated[str, text(64, 1)]
    arguments: Annotated[Annotated[str, text(1 << 28)], BeforeValidator(_text_of_none)] = ""


class ToolCall(_Lenient):
    id: Annotated[str, text(256)]
    type: Annotated[Literal["function"], BeforeValidator(lambda kind: kind or "function")] = "function"
    function: CalledFunction


class Message(StrictModel):
    role: Annotated[
        str, PlainValidator(_role, json_schema_input_type=Literal["system", "developer", "user", "assistant", "tool"])
    ]
    content: TextContent = None
    name: Annotated[str, text(256)] | None = None
    refusal: Annotated[str, text(1 << 28)] | None = None
    audio: Annotated[None, Refused("text only")] = None
    tool_calls: Annotated[tuple[ToolCall, ...], array(MAX_CALLS)] | None = None
    tool_call_id: Annotated[str, text(256)] | None = None
    reasoning_content: Annotated[str, text(1 << 28)] | None = None
    reasoning: Annotated[str, text(1 << 28)] | None = None
    function_call: Annotated[None, Refused("use tool_calls")] = None
    annotations: Annotated[Any, ignored("they are no part of the text")] = None
    cache_control: Annotated[Any, ignored("every prefix is cached")] = None

    @model_validator(mode="before")
    @classmethod
    def _without_unknown(cls, value: Any) -> Any:
        if not (unknown := unknown_fields(value)):
            return value
        taken = {name: given for name, given in value.items() if name not in unknown}
        if type(content := value.get("content")) is list:
            taken["content"] = [
                {name: part[name] for name in part if name not in unknown} if (unknown := _unknown_in(part)) else part
                for part in content
            ]
        return taken


def unknown_fields(message: Any) -> set[str]:
    """The fields of an assistant's turn and its text parts that other servers send; they are ignored."""
    if type(message) is not dict or message.get("role") != "assistant":
        return set()
    content = message.get("content")
    of_parts = {f"content.{name}" for part in content for name in _unknown_in(part)} if type(content) is list else set()
    return message.keys() - Message.model_fields.keys() | of_parts


def _unknown_in(part: Any) -> set[str]:
    """The unknown fields of a text part."""
    texts = type(part) is dict and part.get("type") in (*_TEXT_KINDS, "refusal")
    return part.keys() - {"type", "text", "refusal", *_NOT_TEXT} if texts else set()


def as_template_takes_it(message: Message) -> dict[str, Any]:
    """A message for engine/text/chat_shape.py: role, content as sent, and the other fields; `developer` becomes
    `system`. Raises ApiError for an empty message."""
    content = message.refusal if message.content is None else message.content
    shaped: dict[str, Any] = {"role": message.role, "content": content}
    reasoning = message.reasoning if message.reasoning_content is None else message.reasoning_content
    given = {"name": message.name, "tool_call_id": message.tool_call_id, "reasoning_content": reasoning}
    shaped |= {name: value for name, value in given.items() if value is not None}
    if message.tool_calls:
        shaped["tool_calls"] = [call.model_dump() for call in message.tool_calls]
    elif content is None and message.role == "assistant" and message.model_fields_set - {"role"}:
        shaped["content"] = ""
    elif content is None and "content" not in message.model_fields_set:
        raise ApiError("content is missing", code="missing_required_parameter")
    elif content is None:
        raise ApiError("content is null; a string or an array of text parts is expected", code="invalid_type")
    return shaped
