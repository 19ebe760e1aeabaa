"""Validates a request body: fields (schema.py) and the rules between them; names unknown fields. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..request import MAX_CHOICES, PARAMS, SamplingParams
from .chat_messages import Message, as_template_takes_it
from .errors import ApiError
from .schema import CHAT, COMPLETIONS, MODELS, Endpoint, Prompt
from .structured_output import GrammarFields, grammar_of
from .tools import Choice, tools_of
from .validators import checked, parsed

TOKENIZE = "/tokenize"

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
    tool_choice: Choice = "none"
    tool_name: str = ""
    parallel_tool_calls: bool = True
    include_reasoning: bool = True
    priority: int = 0
    cache_salt: str = ""


_BODY_NAMES, _GRAMMAR_NAMES = frozenset(Body._fields), frozenset(GrammarFields.model_fields)
_TEMPLATE_OWN = ("messages", "tools", "documents", "chat_template", "add_generation_prompt")
_FOR_TEMPLATE = ("tools", "documents", "reasoning_effort", "verbosity")
_UNSUPPORTED = "unsupported_parameter"


def parse_body(data: bytes, endpoint: Endpoint) -> Body:
    return check_body(parsed(data), endpoint)


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


def check_body(value: Any, endpoint: Endpoint) -> Body:
    """Checks a body that json_codec has parsed. Raises ApiError, which names the field."""
    fields = checked(MODELS[endpoint], value)
    values = fields.__dict__
    found = {name: values[name] for name in fields.__pydantic_fields_set__ if values[name] is not None}
    if endpoint == CHAT:
        found["messages"] = _as_templates(found["messages"])
        _chat_only(found)
    else:
        found["prompts"] = found.pop("prompt")
        _completions_only(found)
    if "stream_options" in found:
        if not found.get("stream"):
            raise ApiError("stream_options needs stream: true", param="stream_options")
        wanted = found["stream_options"]
        found["include_usage"] = bool(wanted.include_usage)
        found["continuous_usage_stats"] = bool(wanted.include_usage and wanted.continuous_usage_stats)
    if not found.keys().isdisjoint(_GRAMMAR_NAMES) and (grammar := grammar_of(fields)) is not None:
        if "grammar" in found:
            raise ApiError(
                "a tool_choice that requires a call cannot be combined with another grammar", param="tool_choice"
            )
        found["grammar"] = grammar
    if found.get("stream") and "prompt_logprobs" in found:
        raise ApiError("prompt_logprobs cannot be streamed", param="prompt_logprobs")
    if found.get("best_of", found.get("n", 1)) != found.get("n", 1):
        raise ApiError("best_of is not supported: every choice is returned, set n", param="best_of", code=_UNSUPPORTED)
    most = found.get("max_tokens")
    if most is not None and found.get("min_tokens", 0) > most:
        raise ApiError(f"min_tokens={found['min_tokens']} is more than max_tokens={most}", param="min_tokens")
    params = {"max_tokens": 0, "seed": 0, **{name: found[name] for name in found.keys() & PARAMS.keys()}}
    rest = {name: found[name] for name in found.keys() & _BODY_NAMES}
    return Body(endpoint, params=SamplingParams(**params), **rest)


def _as_templates(messages: Sequence[Message]) -> tuple[dict[str, Any], ...]:
    found: list[dict[str, Any]] = []
    try:
        for message in messages:
            found.append(as_template_takes_it(message))
    except ApiError as bad:
        where = f"messages[{len(found)}]."
        raise bad.within(where, f"{where}content") from None
    return tuple(found)


def _chat_only(found: dict[str, Any]) -> None:
    if "max_completion_tokens" in found:
        if found.get("max_tokens", found["max_completion_tokens"]) != found["max_completion_tokens"]:
            raise ApiError("max_tokens and max_completion_tokens differ: send one", param="max_tokens")
        found["max_tokens"] = found["max_completion_tokens"]
    wanted = found.pop("logprobs", False)
    if wanted:
        found["logprobs"] = found.get("top_logprobs", 0)
    elif found.get("top_logprobs", 0) > 0:
        raise ApiError("top_logprobs needs logprobs: true", param="top_logprobs")
    if found.get("continue_final_message"):
        if found.get("add_generation_prompt", False):
            raise ApiError(
                "continue_final_message and add_generation_prompt cannot both be true", param="continue_final_message"
            )
        found["add_generation_prompt"] = False
    tools = tools_of(found)
    for name in ("tools", "tool_choice"):
        found.pop(name, None)
    found.update(tools)
    given = found.get("chat_template_kwargs", {})
    for name in given:
        if name in _TEMPLATE_OWN:
            raise ApiError(f"chat_template_kwargs may not set {name}", param=f"chat_template_kwargs.{name}")
    found["template_variables"] = {**{name: found[name] for name in _FOR_TEMPLATE if name in found}, **given} or None


def _completions_only(found: dict[str, Any]) -> None:
    if found.get("max_tokens") == 0 and not found.get("echo") and "prompt_logprobs" not in found:
        raise ApiError("max_tokens=0 needs echo or prompt_logprobs: the answer would be empty", param="max_tokens")
    choices = found.get("n", 1) * len(found["prompts"])
    if choices > MAX_CHOICES:
        raise ApiError(f"{choices} choices (n x prompts): at most {MAX_CHOICES} a request", param="n")
