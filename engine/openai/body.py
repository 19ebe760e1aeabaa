"""Validates a request body: fields (schema.py) and the rules between them; names unknown fields. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..request import PARAMS, SamplingParams
from .chat_messages import Message, as_template_takes_it, unknown_fields
from .errors import ApiError
from .responses_body import as_chat
from .schema import CHAT, COMPLETIONS, MODELS, Endpoint, Prompt, Route
from .stored_responses import References, Stored, StoredInput
from .structured_output import GrammarFields, grammar_of, grammar_param
from .tools import Choice, tools_of
from .validators import checked, parsed

TOKENIZE = "/tokenize"

MAX_ANSWERS = 1024  # of one body: n times its prompts
COMPLETIONS_MAX_TOKENS = 16  # the default of OpenAI's and vLLM's /v1/completions


class Body(NamedTuple):
    """One checked body. Chats have `messages`, completions `prompts`; None: not set by the client (in `params` 0). A
    named tuple, because making a frozen dataclass of this size takes a fifth of the time to check a line."""

    endpoint: Endpoint
    model: str
    params: SamplingParams
    messages: tuple[dict[str, Any], ...] = ()
    prompts: tuple[Prompt, ...] = ()
    max_tokens: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    echo: bool = False
    stream: bool = False
    include_usage: bool = False
    continuous_usage_stats: bool = False
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_variables: dict[str, Any] | None = None
    bad_words: tuple[str, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    """Those that may be called."""
    tool_choice: Choice = "none"
    tool_name: str = ""
    parallel_tool_calls: bool = True
    include_reasoning: bool = True
    priority: int = 0
    cache_salt: str = ""
    ignored_fields: int = 0
    largest_id: int | None = None
    """Of the prompts' ids, if a text worker has read them: they may be too many for the event loop."""
    grammar_param: str = ""
    """The field that asks for the grammar."""
    unenforced: tuple[str, ...] = ()
    """What of the grammar and the tools is not enforced."""
    responses: dict[str, Any] | None = None
    """The fields that a response of /v1/responses repeats; None for the other endpoints."""
    stored_input: StoredInput | None = None
    """Stored with the response; None if it is not stored."""
    missing: References | None = None
    """Stored responses that must be read before the body is complete."""

    @property
    def prompt_param(self) -> str:
        """The field that has the prompt."""
        return "input" if self.responses is not None else "messages" if self.endpoint == CHAT else "prompt"


_BODY_NAMES, _GRAMMAR_NAMES = frozenset(Body._fields), frozenset(GrammarFields.model_fields)
_TEMPLATE_OWN = ("messages", "tools", "documents", "chat_template", "add_generation_prompt")
_FOR_TEMPLATE = ("documents", "reasoning_effort", "verbosity")
_UNSUPPORTED = "unsupported_parameter"


def parse_body(data: bytes, endpoint: Route, retains: bool = False, stored: Stored | None = None) -> Body:
    return check_body(parsed(data), endpoint, retains, stored)


def check_tokenize(value: Any, served: str) -> tuple[Body, bool]:
    """Checks a body of /tokenize, which is a chat or a completion of one prompt; returns it and whether token strings
    are requested."""
    if type(value) is not dict:
        raise ApiError("the body must be a JSON object", code="invalid_type")
    named = value.get("return_token_strs")
    if type(named) not in (bool, type(None)):
        raise ApiError("return_token_strs must be a boolean", param="return_token_strs", code="invalid_type")
    rest = {"model": served, **{key: given for key, given in value.items() if key != "return_token_strs"}}
    body = check_body(rest, CHAT if "messages" in value else COMPLETIONS)
    if len(body.prompts) > 1:
        raise ApiError(f"prompt has {len(body.prompts)} texts: one at a time", param="prompt")
    return body, bool(named)


def check_body(value: Any, endpoint: Route, retains: bool = False, stored: Stored | None = None) -> Body:
    """Checks a body that json_codec has parsed. `retains`, `stored`: see as_chat. Raises ApiError, which names the
    field."""
    if endpoint == "/v1/responses":
        converted = as_chat(value, retains, stored)
        try:
            body = check_body(converted.chat, CHAT)
        except ApiError as bad:
            raise converted.named(bad) from None
        param = "text.format" if body.grammar_param == "response_format" else body.grammar_param
        return body._replace(
            grammar_param=param,
            responses=converted.repeated,
            ignored_fields=converted.ignored_fields,
            stored_input=converted.stored_input,
            missing=converted.missing,
        )
    fields = checked(MODELS[endpoint], value)
    values = fields.__dict__
    body_fields = {name: values[name] for name in fields.__pydantic_fields_set__ if values[name] is not None}
    if endpoint == CHAT:
        body_fields["ignored_fields"] = sum(len(unknown_fields(message)) for message in value["messages"])
        body_fields["messages"] = _as_templates(body_fields["messages"])
        _chat_only(body_fields)
    else:
        body_fields["prompts"] = body_fields.pop("prompt")
        _completions_only(body_fields)
    if "stream_options" in body_fields:
        if not body_fields.get("stream"):
            raise ApiError("stream_options needs stream: true", param="stream_options")
        stream_options = body_fields["stream_options"]
        body_fields["include_usage"] = bool(stream_options.include_usage)
        body_fields["continuous_usage_stats"] = bool(
            stream_options.include_usage and stream_options.continuous_usage_stats
        )
    if not body_fields.keys().isdisjoint(_GRAMMAR_NAMES) and (grammar := grammar_of(fields)) is not None:
        asked = grammar_param(fields)
        if "grammar" not in body_fields:
            body_fields["grammar"], body_fields["grammar_param"] = grammar, asked
        elif asked != "response_format":  # which is about content, and a required call has none
            raise ApiError(
                "a tool_choice that requires a call cannot be combined with another grammar", param="tool_choice"
            )
    if body_fields.get("stream") and "prompt_logprobs" in body_fields:
        raise ApiError("prompt_logprobs cannot be streamed", param="prompt_logprobs")
    if body_fields.get("best_of", body_fields.get("n", 1)) != body_fields.get("n", 1):
        raise ApiError("best_of is not supported: every choice is returned, set n", param="best_of", code=_UNSUPPORTED)
    most = body_fields.get("max_tokens")
    if most is not None and body_fields.get("min_tokens", 0) > most:
        raise ApiError(f"min_tokens={body_fields['min_tokens']} is more than max_tokens={most}", param="min_tokens")
    params = {"max_tokens": 0, "seed": 0, **{name: body_fields[name] for name in body_fields.keys() & PARAMS.keys()}}
    rest = {name: body_fields[name] for name in body_fields.keys() & _BODY_NAMES}
    return Body(endpoint, params=SamplingParams(**params), **rest)


def _as_templates(messages: Sequence[Message]) -> tuple[dict[str, Any], ...]:
    mappings: list[dict[str, Any]] = []
    try:
        for message in messages:
            mappings.append(as_template_takes_it(message))
    except ApiError as bad:
        where = f"messages[{len(mappings)}]."
        raise bad.within(where, f"{where}content") from None
    return tuple(mappings)


def _chat_only(fields: dict[str, Any]) -> None:
    if "max_completion_tokens" in fields:
        if fields.get("max_tokens", fields["max_completion_tokens"]) != fields["max_completion_tokens"]:
            raise ApiError("max_tokens and max_completion_tokens differ: send one", param="max_tokens")
        fields["max_tokens"] = fields["max_completion_tokens"]
    logprobs = fields.pop("logprobs", False)
    if logprobs:
        fields["logprobs"] = fields.get("top_logprobs", 0)
    elif fields.get("top_logprobs", 0) > 0:
        raise ApiError("top_logprobs needs logprobs: true", param="top_logprobs")
    if fields.get("continue_final_message"):
        if fields.get("add_generation_prompt", False):
            raise ApiError(
                "continue_final_message and add_generation_prompt cannot both be true", param="continue_final_message"
            )
        fields["add_generation_prompt"] = False
    tools = tools_of(fields)
    for name in ("tools", "tool_choice"):
        fields.pop(name, None)
    for_template = {"tools": tools.pop("offered")} if tools else {}
    fields.update(tools)
    given = fields.get("chat_template_kwargs", {})
    for name in given:
        if name in _TEMPLATE_OWN:
            raise ApiError(f"chat_template_kwargs may not set {name}", param=f"chat_template_kwargs.{name}")
    for_template |= {name: fields[name] for name in _FOR_TEMPLATE if name in fields}
    fields["template_variables"] = {**for_template, **given} or None


def _completions_only(fields: dict[str, Any]) -> None:
    if fields.get("max_tokens") == 0 and not fields.get("echo") and "prompt_logprobs" not in fields:
        raise ApiError("max_tokens=0 needs echo or prompt_logprobs: the answer would be empty", param="max_tokens")
    choices = fields.get("n", 1) * len(fields["prompts"])
    if choices > MAX_ANSWERS:
        raise ApiError(f"{choices} choices (n x prompts): at most {MAX_ANSWERS} a request", param="n")
