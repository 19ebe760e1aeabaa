"""The bodies of /v1/chat/completions and /v1/completions: every field as a pydantic model, and the checked `Body`.

OpenAI's fields and the ones vLLM's users know. Unknown fields, and known ones that are not supported, are refused by
name. The sampling parameters' fields follow from engine/request.py's SamplingParams. Pure: bytes or parsed JSON in,
`Body` or BadRequest out; what depends on the model is checked in to_engine.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, Field, PlainValidator, TypeAdapter, WrapValidator, create_model

from ...topology.strict_json import MAX_ITEMS, JsonError, parse
from ..request import MAX_ID, MAX_LOGPROBS, MAX_ORDER, MAX_TOKENS, PARAMS, Param, SamplingParams
from .chat_messages import MAX_MESSAGES, Message, as_template_takes_it
from .structured_output import GrammarFields, grammar_of
from .tools import Choice, Chosen, Tools, tools_of
from .validators import BadRequest, Refused, StrictModel, array, checked, ignored, invalid, kind_of, show, text
from .validators import json_schema as schema_of

Endpoint = Literal["/v1/chat/completions", "/v1/completions"]
CHAT: Endpoint = "/v1/chat/completions"
COMPLETIONS: Endpoint = "/v1/completions"
TOKENIZE = "/tokenize"

MAX_CHOICES = 1024  # n of one request, before what the deployment allows
MAX_PROMPTS = 1024
COMPLETIONS_MAX_TOKENS = 16  # the default of OpenAI's and vLLM's /v1/completions

Prompt = str | tuple[int, ...]


class Body(NamedTuple):
    """One checked body. Chats have `messages`, completions `prompts`; None means that the client left it open.
    `params` holds 0 for such a max_tokens and seed. A named tuple, because a frozen dataclass of so many fields costs
    a fifth of the check of a line."""

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
    user: str | None = None


# -- the fields

Tokens = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
Logprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
Order = Annotated[int, Field(ge=-MAX_ORDER, le=MAX_ORDER)]
Word = Annotated[str, text(32, 1)]
Ids = tuple[Annotated[int, Field(strict=True, ge=0, le=MAX_ID)], ...]
PromptIds = Annotated[Ids, array(MAX_ITEMS)]


def _biases(value: Any, handler: Any) -> tuple[tuple[int, float], ...]:
    most = PARAMS["logit_bias"].most
    if type(value) is dict and len(value) > most:  # before any of them is looked at
        raise invalid(f" has {len(value)} entries: at most {most} are allowed")
    found = {}
    for key, bias in handler(value).items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise invalid(f" key {show(key)}: token ids are written as digits")
        if int(key) in found:
            raise invalid(f" names token {int(key)} twice")
        found[int(key)] = bias
    return tuple(sorted(found.items()))


def _kept(tokens: int) -> int:
    if tokens == 0:
        raise invalid("=0: must be -1 or more than 0")
    return tokens


Kept = Annotated[int, Field(ge=-1, le=MAX_TOKENS), AfterValidator(_kept)]


def _field_of(name: str, param: Param) -> Any:
    """A sampling parameter as (type, default) of a body's field."""
    low, above = (None, param.low) if param.above_low else (param.low, None)
    number: Any = float if param.kind in {"number", "biases"} else int
    kind: Any = Annotated[number, Field(ge=low, gt=above, le=param.high)]
    if param.kind == "ids":
        kind = Annotated[Ids, array(param.most, param.least)]
    elif param.kind == "biases":
        kind = Annotated[dict[str, kind], WrapValidator(_biases)]
    elif param.kind == "flag":
        kind = bool
    elif name == "seed":
        kind = Annotated[kind, AfterValidator(lambda seed: seed % 2**64)]
    elif name == "top_k":
        kind = Annotated[kind, AfterValidator(lambda top_k: max(0, top_k))]
    return (kind | None, Field(None, description=param.doc or None))


def _stop(value: Any) -> Any:
    return _STOPS.validate_python([value] if type(value) is str else value)


def _prompt(value: Any) -> tuple[Prompt, ...]:
    """A text, token ids, or a list of either (not mixed)."""
    if type(value) is str:
        return (value,)
    if type(value) is not list:
        wanted = "a string, an array of token ids, or an array of either"
        raise invalid(f" is {kind_of(value)}; {wanted} is expected", "invalid_type")
    if not value:
        raise invalid(" is empty")
    if type(value[0]) is int:
        return (_IDS.validate_python(value),)
    return (_ID_LISTS if type(value[0]) is list else _TEXTS).validate_python(value)


Stops = Annotated[tuple[Annotated[str, text(256, 1)], ...], array(16)]
_STOPS: TypeAdapter[tuple[str, ...]] = TypeAdapter(Stops)
_IDS: TypeAdapter[tuple[int, ...]] = TypeAdapter(PromptIds)
_ID_LISTS: TypeAdapter[tuple[Prompt, ...]] = TypeAdapter(Annotated[tuple[PromptIds, ...], array(MAX_PROMPTS)])
_TEXTS: TypeAdapter[tuple[Prompt, ...]] = TypeAdapter(
    Annotated[tuple[Annotated[str, text(1 << 28)], ...], array(MAX_PROMPTS)]
)
_Bookkeeping = Annotated[Any, ignored("it changes no answer")]
_Beams = Annotated[Any, ignored("it has a meaning with beam search alone")]
_Media = Annotated[Any, ignored("prompts are text alone")]


def _said(words: str) -> Any:
    return Field(description=words)


_Echo = Annotated[bool | None, _said("First what is continued: the prompt, or a last message of the answer's role.")]


class StreamOptions(StrictModel):
    include_usage: bool | None = None
    continuous_usage_stats: Annotated[bool | None, _said("Usage so far in every chunk, with include_usage.")] = None
    include_obfuscation: Annotated[Any, ignored("no padding is sent")] = None


class SharedFields(GrammarFields):
    model: Annotated[str, text(256, 1)]
    stop: Annotated[tuple[str, ...] | None, PlainValidator(_stop, json_schema_input_type=str | Stops | None)] = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[Kept | None, _said("The prompt's last so many; -1: what fits.")] = None
    bad_words: Annotated[tuple[Annotated[str, text(64, 1)], ...], array(128)] | None = None
    priority: Annotated[Order | None, _said("Smaller runs first, among interactive requests or a batch's lines.")] = (
        None
    )
    cache_salt: Annotated[
        Annotated[str, text(256, 1)] | None, _said("Only requests of the same salt share cached prefixes.")
    ] = None
    return_token_ids: Annotated[bool | None, _said("token_ids and prompt_token_ids beside the text.")] = None
    return_tokens_as_token_ids: Annotated[bool | None, _said("Logprobs name tokens as token_id:ID.")] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Annotated[str, text(512)] | None = None
    prompt_cache_key: _Bookkeeping = None
    prompt_cache_retention: _Bookkeeping = None
    safety_identifier: _Bookkeeping = None
    request_id: _Bookkeeping = None
    metadata: _Bookkeeping = None
    service_tier: _Bookkeeping = None
    store: Annotated[Any, ignored("nothing is kept for later")] = None
    mm_processor_kwargs: _Media = None
    media_io_kwargs: _Media = None
    length_penalty: _Beams = None
    early_stopping: _Beams = None
    spaces_between_special_tokens: Annotated[Any, ignored("no tokenizer here puts any there")] = None
    use_beam_search: Annotated[None, Refused("beam search is not supported", (False,))] = None
    best_of: Annotated[int | None, _said("Only as many as n: every choice is returned.")] = None
    detokenize: Annotated[None, Refused("answers are text", (True,))] = None
    logits_processors: Annotated[None, Refused("no remote code", ([],))] = None
    kv_transfer_params: Annotated[None, Refused("prompts are computed where they are continued", ({},))] = None
    vllm_xargs: Annotated[None, Refused("there are no plugins that would read it", ({},))] = None
    repetition_detection: Annotated[None, Refused("use a repetition or frequency penalty")] = None


class ChatFields(SharedFields):
    messages: Annotated[tuple[Message, ...], array(MAX_MESSAGES, 1)]
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=64)] | None = None
    chat_template: Annotated[None, Refused("the checkpoint's own template is used")] = None
    documents: Annotated[
        tuple[dict[str, Any], ...] | None, array(1024), _said("For the chat template, as it stands.")
    ] = None
    reasoning_effort: Annotated[Word | None, _said("For the chat template.")] = None
    verbosity: Annotated[Word | None, _said("For the chat template.")] = None
    echo: _Echo = None
    include_reasoning: Annotated[bool | None, _said("Whether reasoning_content is sent where there is any.")] = None
    tools: Tools | None = None
    tool_choice: Chosen | None = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[None, Refused("use tools", ([],))] = None
    function_call: Annotated[None, Refused("use tool_choice", ("none",))] = None
    modalities: Annotated[None, Refused("text only", (["text"],))] = None
    audio: Annotated[None, Refused("text only")] = None
    prediction: Annotated[Any, ignored("it would save time alone")] = None
    web_search_options: Annotated[None, Refused("nothing is fetched")] = None


class CompletionFields(SharedFields):
    prompt: Annotated[
        tuple[Prompt, ...],
        PlainValidator(_prompt, json_schema_input_type=str | PromptIds | tuple[str | PromptIds, ...]),
    ]
    echo: _Echo = None
    suffix: Annotated[None, Refused("text is only continued", ("",))] = None
    prompt_embeds: Annotated[None, Refused("send text or token ids")] = None


def _with_sampling(name: str, base: type[SharedFields]) -> type[SharedFields]:
    fields = {k: _field_of(k, p) for k, p in PARAMS.items() if p.api and k not in base.model_fields}
    return create_model(name, __base__=base, **fields)


MODELS: dict[str, type[SharedFields]] = {
    CHAT: _with_sampling("ChatBody", ChatFields),
    COMPLETIONS: _with_sampling("CompletionBody", CompletionFields),
}
_BODY_NAMES, _GRAMMAR_NAMES = frozenset(Body._fields), frozenset(GrammarFields.model_fields)
_TEMPLATE_OWN = ("messages", "tools", "documents", "chat_template", "add_generation_prompt")
_FOR_TEMPLATE = ("tools", "documents", "reasoning_effort", "verbosity")
_UNSUPPORTED = "unsupported_parameter"


def parsed(data: bytes) -> Any:
    """The JSON of an HTTP request's body. Raises BadRequest."""
    try:
        return parse(data)
    except JsonError as fault:
        raise BadRequest(f"the body is unusable: {fault}", code="invalid_json") from None


def parse_body(data: bytes, endpoint: Endpoint) -> Body:
    """The body of an HTTP request. Raises BadRequest."""
    return check_body(parsed(data), endpoint)


def check_tokenize(value: Any, served: str) -> tuple[Body, bool]:
    """A body of /tokenize, which is a chat's or a completion's of one prompt, and whether tokens are wanted by name.
    Raises BadRequest."""
    if type(value) is not dict:
        raise BadRequest("the body must be a JSON object", code="invalid_type")
    named = value.get("return_token_strs")
    if type(named) not in (bool, type(None)):
        raise BadRequest("return_token_strs must be a boolean", param="return_token_strs", code="invalid_type")
    rest = {"model": served, **{key: given for key, given in value.items() if key != "return_token_strs"}}
    body = check_body(rest, CHAT if "messages" in value else COMPLETIONS)
    if len(body.prompts) > 1:
        raise BadRequest(f"prompt has {len(body.prompts)} texts: one at a time", param="prompt")
    return body, bool(named)


def check_body(value: Any, endpoint: Endpoint) -> Body:
    """A body already parsed (by strict_json). Raises BadRequest naming the field."""
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
            raise BadRequest("stream_options has a meaning only with stream: true", param="stream_options")
        wanted = found["stream_options"]
        found["include_usage"] = bool(wanted.include_usage)
        found["continuous_usage_stats"] = bool(wanted.include_usage and wanted.continuous_usage_stats)
    if not found.keys().isdisjoint(_GRAMMAR_NAMES) and (grammar := grammar_of(fields)) is not None:
        if "grammar" in found:
            raise BadRequest("a tool that must be called leaves no room for another grammar", param="tool_choice")
        found["grammar"] = grammar
    if found.get("stream") and "prompt_logprobs" in found:
        raise BadRequest("prompt_logprobs cannot be streamed", param="prompt_logprobs")
    if found.get("best_of", found.get("n", 1)) != found.get("n", 1):
        raise BadRequest(
            "best_of is not supported: every choice is returned, set n", param="best_of", code=_UNSUPPORTED
        )
    most = found.get("max_tokens")
    if most is not None and found.get("min_tokens", 0) > most:
        raise BadRequest(f"min_tokens={found['min_tokens']} is more than max_tokens={most}", param="min_tokens")
    params = {"max_tokens": 0, "seed": 0, **{name: found[name] for name in found.keys() & PARAMS.keys()}}
    rest = {name: found[name] for name in found.keys() & _BODY_NAMES}
    return Body(endpoint, params=SamplingParams(**params), **rest)


def _as_templates(messages: Sequence[Message]) -> tuple[dict[str, Any], ...]:
    found: list[dict[str, Any]] = []
    try:
        for message in messages:
            found.append(as_template_takes_it(message))
    except BadRequest as bad:
        where = f"messages[{len(found)}]"
        raise BadRequest(f"{where}.{bad.message}", param=f"{where}.content", code=bad.code) from None
    return tuple(found)


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
    tools = tools_of(found)
    for name in ("tools", "tool_choice"):
        found.pop(name, None)
    found.update(tools)
    given = found.get("chat_template_kwargs", {})
    for name in given:
        if name in _TEMPLATE_OWN:
            raise BadRequest(f"chat_template_kwargs may not set {name}", param=f"chat_template_kwargs.{name}")
    found["template_variables"] = {**{name: found[name] for name in _FOR_TEMPLATE if name in found}, **given} or None


def _completions_only(found: dict[str, Any]) -> None:
    if found.get("max_tokens") == 0 and not found.get("echo") and "prompt_logprobs" not in found:
        raise BadRequest("max_tokens=0 asks for nothing: set echo or prompt_logprobs with it", param="max_tokens")
    choices = found.get("n", 1) * len(found["prompts"])
    if choices > MAX_CHOICES:
        raise BadRequest(f"{choices} choices (n x prompts): at most {MAX_CHOICES} a request", param="n")


def json_schema(endpoint: Endpoint) -> dict[str, Any]:
    """The body's JSON schema, for the API's description; the rules above may be stricter."""
    return schema_of(MODELS[endpoint])
