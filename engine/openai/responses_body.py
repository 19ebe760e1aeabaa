"""The body of /v1/responses, converted to that of a chat. Nothing is stored: a body has the whole conversation."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from .errors import ApiError
from .schema import Tokens
from .validators import Refused, StrictModel, checked, ignored, show
from .validators import text as text_within

_KEEPS = "no retention of responses is configured: send the whole conversation as input"
_UNUSED = Annotated[Any, ignored("it changes no answer")]


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
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: Tokens | None = None
    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    top_p: Annotated[float | None, Field(ge=0, le=1)] = None
    top_logprobs: Annotated[None, Refused("use /v1/chat/completions", (0,))] = None
    stream: bool | None = None
    stream_options: Annotated[Any, ignored("no padding is sent")] = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Annotated[Any, ignored("there are no tools of the server")] = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    store: Annotated[None, Refused(_KEEPS, (False,))] = None
    previous_response_id: Annotated[None, Refused(_KEEPS)] = None
    conversation: Annotated[None, Refused(_KEEPS)] = None
    background: Annotated[None, Refused("send a batch instead", (False,))] = None
    prompt: Annotated[None, Refused("prompts are not stored here")] = None
    include: Annotated[Any, ignored("reasoning is not encrypted")] = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    service_tier: _UNUSED = None
    safety_identifier: _UNUSED = None
    prompt_cache_key: _UNUSED = None
    prompt_cache_retention: _UNUSED = None


def as_chat(value: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The body of the chat, and the fields that the response repeats. Raises ApiError."""
    fields = checked(ResponsesFields, value)
    names = ("model", "temperature", "top_p", "stream", "parallel_tool_calls", "user")
    body = {name: given for name in names if (given := getattr(fields, name)) is not None}
    body["messages"] = _messages(fields)
    if fields.max_output_tokens is not None:
        body["max_tokens"] = fields.max_output_tokens
    if fields.truncation == "auto":
        body["truncate_prompt_tokens"] = -1
    if fields.tools:
        body["tools"] = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(fields.tools)]
    choice = fields.tool_choice
    if choice is not None and (fields.tools or choice not in ("auto", "none")):
        named = isinstance(choice, dict) and choice.get("type") == "function"
        body["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}} if named else choice  # type: ignore[union-attr]
    options = fields.text or TextOptions()
    if options.format is not None and options.format.get("type") == "json_schema":
        schema = {name: given for name, given in options.format.items() if name != "type" and given is not None}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif options.format is not None:
        body["response_format"] = options.format
    effort = fields.reasoning.effort if fields.reasoning else None
    body |= {n: g for n, g in (("verbosity", options.verbosity), ("reasoning_effort", effort)) if g is not None}
    return body, {
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "metadata": fields.metadata or {},
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "reasoning": {"effort": effort, "summary": None},
        "temperature": 1.0 if fields.temperature is None else fields.temperature,
        "text": {"format": options.format or {"type": "text"}},
        "tool_choice": choice or "auto",
        "tools": fields.tools or [],
        "top_p": 1.0 if fields.top_p is None else fields.top_p,
        "truncation": fields.truncation or "disabled",
        "user": fields.user,
    }


def _tool(tool: dict[str, Any], place: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        message = f"{place}.type={show(tool.get('type'))}: only functions are supported, no tools of the server"
        raise ApiError(message, "unsupported_value", f"{place}.type")
    return {"type": "function", "function": {n: g for n, g in tool.items() if n != "type" and g is not None}}


def _messages(fields: ResponsesFields) -> list[dict[str, Any]]:
    """The items as a chat's messages; reasoning and calls of one turn become one message."""
    messages: list[dict[str, Any]] = []
    if fields.instructions:
        messages.append({"role": "system", "content": fields.instructions})
    if isinstance(fields.input, str):
        return [*messages, {"role": "user", "content": fields.input}]
    for index, item in enumerate(fields.input):
        kind, place = item.get("type", "message"), f"input[{index}]"
        if kind == "message":
            message = {"role": item.get("role"), "content": _content(item.get("content"))}
            _append(messages, message)
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            _append(messages, {"role": "assistant", "tool_calls": [call]})
        elif kind == "function_call_output":
            output = _content(item.get("output"))
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
        elif kind == "reasoning":
            _append(messages, {"role": "assistant", "reasoning_content": _reasoning(item, place)})
        elif kind == "item_reference":
            raise ApiError(f"{place}: {_KEEPS} (clients do with store: false)", "unsupported_value", f"{place}.type")
        else:
            kinds = "message, function_call, function_call_output, reasoning"
            raise ApiError(f"{place}.type={show(kind)}: supported: {kinds}", "unsupported_value", f"{place}.type")
    return messages


def _reasoning(item: dict[str, Any], place: str) -> str:
    name = "content" if item.get("content") else "summary"
    parts = item.get(name) or []
    if not isinstance(parts, list):
        raise ApiError(f"{place}.{name}={show(parts)}: must be an array of parts with text", param=f"{place}.{name}")
    for part in parts:
        if not (isinstance(part, dict) and isinstance(part.get("text", ""), str)):
            raise ApiError(f"{place}.{name}: the part {show(part)} has no text", param=f"{place}.{name}")
    return "\n".join(part.get("text", "") for part in parts)


def _append(messages: list[dict[str, Any]], message: dict[str, Any]) -> None:
    """Adds a message, or its fields to an assistant's turn that it continues."""
    last = messages[-1] if messages else {}
    if message["role"] == "assistant" == last.get("role"):
        if "tool_calls" in message:
            last["tool_calls"] = [*last.get("tool_calls", ()), *message["tool_calls"]]
            return
        if "content" in message and not last.keys() & {"content", "tool_calls"}:
            last["content"] = message["content"]
            return
    messages.append(message)


def _content(content: Any) -> Any:
    """A content's parts with the types of a chat's; others stay, and are refused as such."""
    if not isinstance(content, list):
        return content
    kinds = ("input_text", "output_text", "text")
    return [
        {"type": "text", "text": part.get("text")} if isinstance(part, dict) and part.get("type") in kinds else part
        for part in content
    ]
