"""The body of /v1/responses, converted to that of a chat. Stored responses that it refers to are given with it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import ConfigDict, Field, PlainValidator, TypeAdapter
from pydantic import ValidationError as PydanticError

from .chat_messages import MAX_MESSAGES, MAX_PARTS, TextContent
from .errors import ApiError
from .schema import Tokens
from .stored_responses import (
    References,
    Stored,
    StoredInput,
    as_stored,
    conversation,
    referenced_item,
    response_of,
    unknown_item,
)
from .validators import Refused, StrictModel, array, checked, described, ignored, invalid, kind_of, show
from .validators import text as text_within

_KEEPS = "no retention of responses is configured (daemon.responses_retention): send the whole conversation as input"
_NEEDS_RETENTION = described("Needs daemon.responses_retention.")
_UNUSED = Annotated[Any, ignored("it changes no answer")]
_LONG = Annotated[str, text_within(1 << 28)]


class _Item(StrictModel):
    id: Annotated[Any, ignored("a stored item gets its own")] = None
    status: Annotated[Any, ignored("it changes no answer")] = None


class _Sent(_Item):
    """An item that a server has sent: unknown fields are ignored."""

    model_config = ConfigDict(extra="allow")


class InputMessage(_Item):
    type: Literal["message"] | None = None
    role: Literal["user", "system", "developer"]
    content: TextContent


class OutputMessage(_Sent):
    type: Literal["message"] | None = None
    role: Literal["assistant"]
    content: TextContent


class FunctionCall(_Sent):
    type: Literal["function_call"]
    call_id: Annotated[str, text_within(256)]
    name: Annotated[str, text_within(64, 1)]
    arguments: _LONG


class FunctionCallOutput(_Item):
    type: Literal["function_call_output"]
    call_id: Annotated[str, text_within(256)] | None = None
    output: TextContent
    name: Annotated[str, text_within(256)] | None = None
    namespace: _UNUSED = None
    caller: _UNUSED = None


class _ReasoningText(_Sent):
    text: _LONG


_ReasoningTexts = Annotated[tuple[_ReasoningText, ...], array(MAX_PARTS)]


class ReasoningItem(_Sent):
    type: Literal["reasoning"]
    content: _ReasoningTexts | None = None
    summary: _ReasoningTexts | None = None
    encrypted_content: Annotated[str, text_within(1 << 28)] | None = None


class ItemReference(StrictModel):
    type: Literal["item_reference"]
    id: Annotated[str, text_within(256, 1)]


def _other_kind(kind: Any) -> None:
    raise invalid(f"={show(kind)}: supported: message, {', '.join(_ITEMS)}", "unsupported_value")


class _OtherItem(StrictModel):
    model_config = ConfigDict(extra="ignore")
    type: Annotated[Any, PlainValidator(_other_kind)]


_ITEMS: dict[Any, type[StrictModel]] = {
    "function_call": FunctionCall,
    "function_call_output": FunctionCallOutput,
    "reasoning": ReasoningItem,
    "item_reference": ItemReference,
}
Item = InputMessage | OutputMessage | FunctionCall | FunctionCallOutput | ReasoningItem | ItemReference


def _item(value: Any) -> Any:
    if type(value) is not dict:
        raise invalid(f" is {kind_of(value)}; an object is expected", "invalid_type")
    kind = value.get("type")
    if kind is None:
        kind = "item_reference" if value.keys() <= {"id", "type"} else "message"
    if kind == "message":
        return (OutputMessage if value.get("role") == "assistant" else InputMessage).model_validate(value)
    model = _ITEMS.get(kind, _OtherItem) if type(kind) is str else _OtherItem
    return model.model_validate({**value, "type": kind})


def _input(value: Any) -> Any:
    if type(value) is str:
        return value
    if type(value) is not list:
        raise invalid(f" is {kind_of(value)}; a string or an array of items is expected", "invalid_type")
    return _INPUT.validate_python(value)


_Items = Annotated[
    tuple[Annotated[Any, PlainValidator(_item, json_schema_input_type=Item)], ...], array(MAX_MESSAGES, 1)
]
_INPUT: TypeAdapter[tuple[Item, ...]] = TypeAdapter(_Items)
_ITEM: TypeAdapter[Item] = TypeAdapter(Annotated[Any, PlainValidator(_item)])


def _choice(value: Any) -> Any:
    if type(value) not in (str, dict):
        raise invalid(f" is {kind_of(value)}; a string or an object is expected", "invalid_type")
    return value


def _include(value: Any) -> None:
    if "message.output_text.logprobs" in (value if type(value) is list else ()):
        raise invalid(": log-probabilities are not supported: use /v1/chat/completions", "unsupported_value")


class TextOptions(StrictModel):
    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ReasoningOptions(StrictModel):
    effort: str | None = None
    summary: Annotated[Any, ignored("reasoning is sent as it is")] = None
    generate_summary: Annotated[Any, ignored("reasoning is sent as it is")] = None


class ResponsesFields(StrictModel):
    """OpenAI's fields; values are checked again as those of a chat."""

    model: Annotated[str, text_within(256, 1)]
    input: Annotated[str | tuple[Item, ...], PlainValidator(_input, json_schema_input_type=str | _Items)]
    instructions: str | None = None
    max_output_tokens: Tokens | None = None
    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    top_p: Annotated[float | None, Field(ge=0, le=1)] = None
    top_logprobs: Annotated[None, Refused("use /v1/chat/completions", (0,))] = None
    stream: bool | None = None
    stream_options: Annotated[Any, ignored("no padding is sent")] = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Annotated[
        str | dict[str, Any] | None, PlainValidator(_choice, json_schema_input_type=str | dict[str, Any])
    ] = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Annotated[Any, ignored("there are no tools of the server")] = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    store: Annotated[bool | None, _NEEDS_RETENTION] = None
    previous_response_id: Annotated[Annotated[str, text_within(256, 1)] | None, _NEEDS_RETENTION] = None
    conversation: Annotated[None, Refused("use previous_response_id, or send the whole conversation as input")] = None
    background: Annotated[None, Refused("send a batch instead", (False,))] = None
    prompt: Annotated[None, Refused("prompts are not stored here")] = None
    include: Annotated[
        Any,
        PlainValidator(_include, json_schema_input_type=list[str] | None),
        ignored("reasoning is not encrypted, and there are no tools of the server"),
    ] = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    moderation: Annotated[None, Refused("answers are not moderated")] = None
    context_management: Annotated[None, Refused("prompts are not compacted: use truncation", ([],))] = None
    image: Annotated[None, Refused("text only")] = None
    access_programs: Annotated[None, Refused("there are none")] = None
    background_options: Annotated[None, Refused("send a batch instead")] = None
    service_tier: _UNUSED = None
    safety_identifier: _UNUSED = None
    prompt_cache_key: _UNUSED = None
    prompt_cache_retention: _UNUSED = None
    prompt_cache_options: _UNUSED = None


class Converted(NamedTuple):
    """The body of a chat, the fields that the response repeats, the place of the item in which each message begins, and
    the number of fields that were ignored. `stored_input`: stored with the response; `missing`: stored responses
    without which the chat is incomplete."""

    chat: dict[str, Any]
    repeated: dict[str, Any]
    places: list[str]
    ignored_fields: int
    stored_input: StoredInput | None
    missing: References | None

    def named(self, error: ApiError) -> ApiError:
        """A chat's error with the user's name of the field in `param` and message."""
        name = error.param or ""
        for pattern, template in _NAMES.items():
            if (match := re.match(pattern, name)) is not None:
                old, new = match[0], self.places[int(match[1])] if template is None else match.expand(template)
                return ApiError(
                    error.message.replace(old, new), error.code, new + name[len(old) :], status=error.status
                )
        return error


def as_chat(value: Any, retains: bool = False, stored: Stored | None = None) -> Converted:
    """Converts a body. `retains`: responses are stored unless `store` is false; `stored`: those that it refers to, None
    if they have not been read. Raises ApiError."""
    fields = checked(ResponsesFields, value)
    references = _references(fields, retains)
    stores = retains and fields.store is not False
    names = ("model", "temperature", "top_p", "stream", "parallel_tool_calls", "user")
    body = {name: given for name in names if (given := getattr(fields, name)) is not None}
    complete = stored is not None or references == _NO_REFERENCES
    body["messages"], places = _messages(fields, _items(fields, stored or {} if complete else None))
    sent = [item for item in fields.input if isinstance(item, _Sent)]
    if fields.max_output_tokens is not None:
        body["max_tokens"] = fields.max_output_tokens
    if fields.truncation == "auto":
        body["truncate_prompt_tokens"] = -1
    if fields.tools:
        body["tools"] = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(fields.tools)]
    choice = fields.tool_choice
    if choice is not None and (fields.tools or choice not in ("auto", "none")):
        body["tool_choice"] = _chat_choice(choice)
    options = fields.text or TextOptions()
    if options.format is not None and options.format.get("type") == "json_schema":
        body["response_format"] = {"type": "json_schema", "json_schema": _without_type(options.format)}
    elif options.format is not None:
        body["response_format"] = options.format
    effort = fields.reasoning.effort if fields.reasoning else None
    body |= {n: g for n, g in (("verbosity", options.verbosity), ("reasoning_effort", effort)) if g is not None}
    repeated = {
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "metadata": fields.metadata or {},
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "previous_response_id": fields.previous_response_id,
        "reasoning": {"effort": effort, "summary": None},
        "store": stores,
        "temperature": 1.0 if fields.temperature is None else fields.temperature,
        "text": {"format": options.format or {"type": "text"}, "verbosity": options.verbosity},
        "tool_choice": choice or "auto",
        "tools": fields.tools or [],
        "top_p": 1.0 if fields.top_p is None else fields.top_p,
        "truncation": fields.truncation or "disabled",
        "user": fields.user,
    }
    items_json = json.dumps(as_stored(value["input"]), ensure_ascii=False) if stores else ""
    stored_input = StoredInput(items_json, references) if stores else None
    ignored_fields = sum(len(item.model_extra or ()) for item in sent)
    return Converted(body, repeated, places, ignored_fields, stored_input, None if complete else references)


_NO_REFERENCES = References(None, ())


def _references(fields: ResponsesFields, retains: bool) -> References:
    """The stored responses that a body refers to. Raises ApiError without a retention, or for an id of another form."""
    if not retains and fields.store:
        raise ApiError(f"store is not supported: {_KEEPS}", "unsupported_parameter", "store")
    if not retains and fields.previous_response_id is not None:
        message = f"previous_response_id is not supported: {_KEEPS}"
        raise ApiError(message, "unsupported_parameter", "previous_response_id")
    of_items: dict[str, None] = {}
    for index, item in enumerate(fields.input if isinstance(fields.input, tuple) else ()):
        if isinstance(item, ItemReference):
            if not retains:
                message = f"input[{index}].type='item_reference': {_KEEPS} (clients do with store: false)"
                raise ApiError(message, "unsupported_value", f"input[{index}].type")
            if (response := response_of(item.id)) is None:
                raise unknown_item(item.id)
            of_items[response] = None
    return References(fields.previous_response_id, tuple(of_items))


def _items(fields: ResponsesFields, stored: Stored | None) -> list[tuple[str, Item]]:
    """The conversation's items, references resolved, and the place that has each; without `stored` only those that were
    sent. Raises ApiError."""
    sent = (InputMessage(role="user", content=fields.input),) if isinstance(fields.input, str) else fields.input
    places = ["input"] if isinstance(fields.input, str) else [f"input[{index}]" for index in range(len(sent))]
    items: list[tuple[str, Item | dict[str, Any]]] = []
    if stored is not None:
        items += [("previous_response_id", item) for item in conversation(fields.previous_response_id, stored)]
    for place, item in zip(places, sent, strict=True):
        if not isinstance(item, ItemReference):
            items.append((place, item))
        elif stored is not None:
            items.append((place, referenced_item(item.id, stored)))
    return _validated(items) or [("input", InputMessage(role="user", content=""))]


def _validated(items: Sequence[tuple[str, Item | dict[str, Any]]]) -> list[tuple[str, Item]]:
    """Items in order; those that were stored become models again. Raises ApiError."""
    try:
        return [(place, _ITEM.validate_python(item) if isinstance(item, dict) else item) for place, item in items]
    except PydanticError as error:
        message = f"a stored response has an item that this version cannot read ({error.errors()[0]['msg'][:100]})"
        raise ApiError(message, "unsupported_value", "previous_response_id") from None


_NAMES: Mapping[str, str | None] = {
    r"messages\[(\d+)\]": None,
    r"messages\b": "input",
    r"(tools\[\d+\])\.function": r"\1",
    r"tool_choice(?:\.allowed_tools)?(\.tools\[\d+\])?(?:\.function)?": r"tool_choice\1",
    r"response_format(\.json_schema)?": "text.format",
    r"max_tokens\b": "max_output_tokens",
    r"truncate_prompt_tokens\b": "truncation",
    r"reasoning_effort\b": "reasoning.effort",
    r"verbosity\b": "text.verbosity",
}
"""Patterns of a chat's names, and the user's; None: the place of the message."""


def _without_type(value: Any) -> dict[str, Any]:
    return {name: given for name, given in value.items() if name != "type" and given is not None}


def _chat_choice(choice: Any) -> Any:
    """A choice in the form of a chat's; others stay, and are refused as such."""
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "function":
        return {"type": "function", "function": _without_type(choice)}
    if kind == "allowed_tools":
        allowed = _without_type(choice)
        if isinstance(allowed.get("tools"), list):
            allowed["tools"] = [_chat_choice(tool) for tool in allowed["tools"]]
        return {"type": "allowed_tools", "allowed_tools": allowed}
    return choice


def _tool(tool: dict[str, Any], place: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        message = f"{place}.type={show(tool.get('type'))}: only functions are supported, no tools of the server"
        raise ApiError(message, "unsupported_value", f"{place}.type")
    return {"type": "function", "function": _without_type(tool)}


def _messages(fields: ResponsesFields, items: Sequence[tuple[str, Item]]) -> tuple[list[dict[str, Any]], list[str]]:
    """The items as a chat's messages, and the place that each begins in; reasoning and calls of one turn become one
    message."""
    messages: list[dict[str, Any]] = []
    places: list[str] = []

    def add(place: str, message: dict[str, Any]) -> None:
        if not (messages and _continues(messages[-1], message)):
            messages.append(message)
            places.append(place)

    if fields.instructions:
        add("instructions", {"role": "system", "content": fields.instructions})
    for place, item in items:
        if isinstance(item, (InputMessage, OutputMessage)):
            add(place, {"role": item.role, "content": item.content})
        elif isinstance(item, FunctionCall):
            call = {"id": item.call_id, "function": {"name": item.name, "arguments": item.arguments}}
            add(place, {"role": "assistant", "tool_calls": [call]})
        elif isinstance(item, FunctionCallOutput):
            answer = {"role": "tool", "tool_call_id": item.call_id, "content": item.output, "name": item.name}
            add(place, {name: given for name, given in answer.items() if given is not None or name == "content"})
        elif isinstance(item, ReasoningItem):
            add(place, {"role": "assistant", "reasoning_content": _reasoning(item, place)})
    return messages, places


def _reasoning(item: ReasoningItem, place: str) -> str:
    text = "\n".join(part.text for part in item.content or item.summary or ())
    if item.encrypted_content and not text:
        name = f"{place}.encrypted_content"
        raise ApiError(f"{name} cannot be read here: leave the item out", "unsupported_value", name)
    return text


def _continues(last: dict[str, Any], message: dict[str, Any]) -> bool:
    """Adds a message's fields to an assistant's turn that it continues; False if it begins another."""
    if not message["role"] == "assistant" == last["role"]:
        return False
    if "tool_calls" in message:
        last["tool_calls"] = [*last.get("tool_calls", ()), *message["tool_calls"]]
    elif "content" in message and not last.keys() & {"content", "tool_calls"}:
        last["content"] = message["content"]
    elif "reasoning_content" in message and last.keys() == {"role", "reasoning_content"}:
        last["reasoning_content"] = "\n".join(filter(None, (last["reasoning_content"], message["reasoning_content"])))
    else:
        return False
    return True
