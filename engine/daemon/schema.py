"""The bodies of /v1/chat/completions and /v1/completions: every field, its rule, and the checked `Body`.

OpenAI's fields and the ones vLLM's users know. Unknown fields, and known ones that are not supported, are refused by
name. Pure: bytes or parsed JSON in, `Body` or BadRequest out; what depends on the model is checked in intake.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from ..request import MAX_LOGPROBS
from .grammar import GRAMMAR_FIELDS, grammar_of
from .messages import MAX_MESSAGES, MESSAGE_SCHEMA, check_messages
from .rules import (
    BadRequest,
    Field,
    array,
    boolean,
    integer,
    json_object,
    members,
    number,
    one_of,
    refused,
    show,
    string,
    wrong_type,
)
from .strictjson import JsonFault, parse

Endpoint = Literal["/v1/chat/completions", "/v1/completions"]
CHAT: Endpoint = "/v1/chat/completions"
COMPLETIONS: Endpoint = "/v1/completions"

MAX_CHOICES = 1024  # n of one request, before what the deployment allows
MAX_PROMPTS = 1024
MAX_TOKENS = 2**31 - 1
MAX_BIASES, MAX_STOPS, MAX_STOP_IDS = 1024, 16, 1024
COMPLETIONS_MAX_TOKENS = 16  # the default of OpenAI's and vLLM's /v1/completions

Prompt = str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Body:
    """One checked body. Chats have `messages`, completions `prompts`; None means that the client left it open."""

    endpoint: Endpoint
    model: str
    messages: tuple[dict[str, str], ...] = ()
    prompts: tuple[Prompt, ...] = ()
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    logprobs: int | None = None
    """How many alternatives a token's log probability comes with; None: none wanted."""
    prompt_logprobs: int | None = None
    echo: bool = False
    grammar: str | None = None
    stream: bool = False
    include_usage: bool = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = field(default=None, hash=False)
    user: str | None = None


def _stop(name: str, value: Any) -> tuple[str, ...]:
    found: tuple[str, ...] = _STOPS.rule(name, [value] if type(value) is str else value)
    return found


def _top_k(name: str, value: Any) -> int:
    return max(0, int(_TOP_K.rule(name, value)))


def _seed(name: str, value: Any) -> int:
    return int(_SEED.rule(name, value)) % 2**64


def _logit_bias(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    if type(value) is not dict:
        raise wrong_type(name, value, "an object of token ids and biases")
    if len(value) > MAX_BIASES:
        raise BadRequest(f"{name} has {len(value)} entries: at most {MAX_BIASES} are allowed", param=name)
    found = {}
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise BadRequest(f"{name} key {show(key)}: token ids are written as digits", param=name)
        if int(key) in found:
            raise BadRequest(f"{name} names token {int(key)} twice", param=name)
        found[int(key)] = _BIAS.rule(f"{name}[{key}]", bias)
    return tuple(sorted(found.items()))


def _prompt(name: str, value: Any) -> tuple[Prompt, ...]:
    """A text, token ids, or a list of either (not mixed)."""
    if type(value) is str:
        return (value,)
    if type(value) is not list:
        raise wrong_type(name, value, "a string, an array of token ids, or an array of either")
    if not value:
        raise BadRequest(f"{name} is empty", param=name)
    if type(value[0]) is int:
        return (_IDS.rule(name, value),)
    item = _IDS if type(value[0]) is list else _TEXT
    found: tuple[Prompt, ...] = array(item, MAX_PROMPTS, 1).rule(name, value)
    return found


_STOPS = array(string(256, 1), MAX_STOPS)
_TOP_K = integer(-1, 2**31 - 1)
_SEED = integer(-(2**63), 2**64 - 1)
_BIAS = number(-100, 100)
_TEXT = string(1 << 28)
_TOKEN = integer(0, 2**31 - 1)
_IDS = array(_TOKEN, 1 << 24)
_STREAM_OPTIONS = {"include_usage": boolean(), "include_obfuscation": refused("nothing is padded", False)}
_NO_TOOLS = refused("tools are not supported: leave tools and functions out", [], "none")
_NO_BEAMS = refused("beam search is not supported", False)


def _stream_options(name: str, value: Any) -> dict[str, Any]:
    return members(name, _OBJECT.rule(name, value), _STREAM_OPTIONS, f"{name}.")


_OBJECT = json_object()

_SHARED: dict[str, Field] = {
    "model": string(256, 1),
    "max_tokens": integer(0, MAX_TOKENS),
    "min_tokens": integer(0, MAX_TOKENS),
    "temperature": number(0, 2),
    "top_p": number(0, 1, open_low=True),
    "top_k": Field(_top_k, _TOP_K.schema, "-1 or 0: all"),
    "min_p": number(0, 1),
    "presence_penalty": number(-2, 2),
    "frequency_penalty": number(-2, 2),
    "repetition_penalty": number(0, 100, open_low=True),
    "logit_bias": Field(_logit_bias, {"type": "object", "additionalProperties": _BIAS.schema}),
    "seed": Field(_seed, _SEED.schema),
    "n": integer(1, MAX_CHOICES),
    "stop": Field(_stop, {"anyOf": [{"type": "string", "minLength": 1, "maxLength": 256}, _STOPS.schema]}),
    "stop_token_ids": array(_TOKEN, MAX_STOP_IDS),
    "include_stop_str_in_output": boolean(),
    "ignore_eos": boolean(),
    "skip_special_tokens": boolean(),
    "add_special_tokens": boolean(),
    "truncate_prompt_tokens": integer(1, MAX_TOKENS),
    "prompt_logprobs": integer(0, MAX_LOGPROBS),
    "stream": boolean(),
    "stream_options": Field(_stream_options, {"type": "object", "properties": {"include_usage": boolean().schema}}),
    "user": string(512),
    **GRAMMAR_FIELDS,
    "best_of": refused("every choice is returned: set n", 1),
    "use_beam_search": _NO_BEAMS,
    "length_penalty": refused("beam search is not supported", 1, 1.0),
    "early_stopping": _NO_BEAMS,
    "spaces_between_special_tokens": refused("special tokens are decoded as the tokenizer does", True),
    "logits_processors": refused("no remote code", []),
    "allowed_token_ids": refused("use logit_bias or structured output", []),
    "bad_words": refused("use logit_bias", []),
    "return_tokens_as_token_ids": refused("tokens are shown as text", False),
    "return_token_ids": refused("tokens are shown as text", False),
    "priority": refused("interactive requests go before batches", 0),
}

CHAT_FIELDS: dict[str, Field] = {
    **_SHARED,
    "messages": Field(check_messages, {"type": "array", "items": MESSAGE_SCHEMA, "maxItems": MAX_MESSAGES}),
    "max_tokens": integer(1, MAX_TOKENS),
    "max_completion_tokens": integer(1, MAX_TOKENS),
    "logprobs": boolean(),
    "top_logprobs": integer(0, MAX_LOGPROBS),
    "add_generation_prompt": boolean(),
    "continue_final_message": boolean(),
    "chat_template_kwargs": json_object(64),
    "chat_template": refused("the checkpoint's own template is used"),
    "documents": refused("put them into the messages", []),
    "tools": _NO_TOOLS,
    "tool_choice": _NO_TOOLS,
    "parallel_tool_calls": refused("tools are not supported", True, False),
    "functions": _NO_TOOLS,
    "function_call": _NO_TOOLS,
    "modalities": one_of(["text"]),
    "audio": refused("text only"),
    "prediction": refused("predicted output is not supported"),
    "reasoning_effort": refused("say it in chat_template_kwargs if the template knows it", "none"),
    "web_search_options": refused("nothing is fetched"),
    "store": refused("nothing is kept for later", False),
    "metadata": json_object(16),
    "service_tier": one_of("auto", "default"),
}

COMPLETION_FIELDS: dict[str, Field] = {
    **_SHARED,
    "prompt": Field(
        _prompt,
        {
            "anyOf": [
                {"type": "string"},
                _IDS.schema,
                {"type": "array", "items": {"anyOf": [_TEXT.schema, _IDS.schema]}},
            ]
        },
    ),
    "echo": boolean(),
    "logprobs": integer(0, MAX_LOGPROBS),
    "suffix": refused("text is only continued", ""),
}

FIELDS: dict[str, dict[str, Field]] = {CHAT: CHAT_FIELDS, COMPLETIONS: COMPLETION_FIELDS}
_DROPPED = ("stream_options", "top_logprobs", "max_completion_tokens", "modalities", "metadata", "service_tier")
_TEMPLATE_OWN = ("messages", "tools", "documents", "chat_template", "add_generation_prompt")


def parse_body(data: bytes, endpoint: Endpoint) -> Body:
    """The body of an HTTP request. Raises BadRequest."""
    try:
        value = parse(data)
    except JsonFault as fault:
        raise BadRequest(f"the body is unusable: {fault}", code="invalid_json") from None
    return check_body(value, endpoint)


def check_body(value: Any, endpoint: Endpoint) -> Body:
    """A body already parsed (by strictjson). Raises BadRequest naming the field."""
    if type(value) is not dict:
        raise BadRequest("the body must be a JSON object", code="invalid_type")
    chat = endpoint == CHAT
    found = members("the body", value, FIELDS[endpoint])
    for name in ("model", "messages" if chat else "prompt"):
        if name not in found:
            raise BadRequest(f"{name} is missing", param=name, code="missing_required_parameter")
    if chat:
        _chat_only(found)
    else:
        found["prompts"] = found.pop("prompt")
        _completions_only(found)
    if "stream_options" in found:
        if not found.get("stream"):
            raise BadRequest("stream_options has a meaning only with stream: true", param="stream_options")
        found["include_usage"] = found["stream_options"].get("include_usage", False)
    grammar = grammar_of(found)
    if grammar is not None:
        found["grammar"] = grammar
    if found.get("stream") and "prompt_logprobs" in found:
        raise BadRequest("prompt_logprobs cannot be streamed", param="prompt_logprobs")
    most = found.get("max_tokens")
    if most is not None and found.get("min_tokens", 0) > most:
        raise BadRequest(f"min_tokens={found['min_tokens']} is more than max_tokens={most}", param="min_tokens")
    for name in _DROPPED:
        found.pop(name, None)
    return Body(endpoint, **found)


def _chat_only(found: dict[str, Any]) -> None:
    if "max_completion_tokens" in found:
        if found.get("max_tokens", found["max_completion_tokens"]) != found["max_completion_tokens"]:
            raise BadRequest("max_tokens and max_completion_tokens differ: send one", param="max_tokens")
        found["max_tokens"] = found["max_completion_tokens"]
    wanted = found.pop("logprobs", False)
    if wanted:
        found["logprobs"] = found.get("top_logprobs", 0)
    elif found.get("top_logprobs", 0) > 0:
        raise BadRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    if found.get("continue_final_message"):
        if found.get("add_generation_prompt", False):
            raise BadRequest(
                "continue_final_message and add_generation_prompt exclude each other", param="continue_final_message"
            )
        found["add_generation_prompt"] = False
    for name in found.get("chat_template_kwargs", ()):
        if name in _TEMPLATE_OWN:
            raise BadRequest(f"chat_template_kwargs may not set {name}", param=f"chat_template_kwargs.{name}")


def _completions_only(found: dict[str, Any]) -> None:
    if found.get("max_tokens") == 0 and not found.get("echo") and "prompt_logprobs" not in found:
        raise BadRequest("max_tokens=0 asks for nothing: set echo or prompt_logprobs with it", param="max_tokens")
    choices = found.get("n", 1) * len(found["prompts"])
    if choices > MAX_CHOICES:
        raise BadRequest(f"{choices} choices (n x prompts): at most {MAX_CHOICES} a request", param="n")


def json_schema(endpoint: Endpoint) -> dict[str, Any]:
    """The body's JSON schema, for the API's description; the rules above may be stricter."""
    required = ["model", "messages"] if endpoint == CHAT else ["model", "prompt"]
    properties = {
        name: {"anyOf": [f.schema, {"type": "null"}], **({"description": f.doc} if f.doc else {})}
        if name not in required
        else f.schema
        for name, f in FIELDS[endpoint].items()
    }
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
