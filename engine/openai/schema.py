"""Request bodies as pydantic models: OpenAI's fields and vLLM's. Sampling fields follow from SamplingParams."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PlainValidator, TypeAdapter, WrapValidator, create_model

from ...topology.json_codec import MAX_ITEMS
from ..request import MAX_ID, MAX_LOGPROBS, MAX_ORDER, MAX_TOKENS, PARAMS, Param
from .chat_messages import MAX_MESSAGES, Message
from .structured_output import GrammarFields
from .tools import Chosen, Tools
from .validators import Refused, StrictModel, array, described, ignored, invalid, kind_of, show, text
from .validators import json_schema as schema_of

Endpoint = Literal["/v1/chat/completions", "/v1/completions"]
CHAT: Endpoint = "/v1/chat/completions"
COMPLETIONS: Endpoint = "/v1/completions"
Route = Literal["/v1/chat/completions", "/v1/completions", "/v1/responses"]
RESPONSES: Route = "/v1/responses"
"""A chat in another form."""
GENERATING: tuple[Route, ...] = (CHAT, COMPLETIONS, RESPONSES)

MAX_PROMPTS = 1024

Prompt = str | tuple[int, ...]


Tokens = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
Logprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
Order = Annotated[int, Field(ge=-MAX_ORDER, le=MAX_ORDER)]
Word = Annotated[str, text(32, 1)]
Ids = tuple[Annotated[int, Field(strict=True, ge=0, le=MAX_ID)], ...]
PromptIds = Annotated[Ids, array(MAX_ITEMS)]


def _biases(value: Any, handler: Any) -> tuple[tuple[int, float], ...]:
    most = PARAMS["logit_bias"].most
    if type(value) is dict and len(value) > most:  # refuse before checking each of many members
        raise invalid(f" has {len(value)} entries: at most {most} are allowed")
    biases = {}
    for key, bias in handler(value).items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise invalid(f" key {show(key)}: token ids are written as digits")
        if int(key) in biases:
            raise invalid(f": duplicate token {int(key)}")
        biases[int(key)] = bias
    return tuple(sorted(biases.items()))


def _kept(tokens: int) -> int:
    if tokens == 0:
        raise invalid("=0: must be -1 or more than 0")
    return tokens


Kept = Annotated[int, Field(ge=-1, le=MAX_TOKENS), AfterValidator(_kept)]


_MOST_LIKELY = 1e-7
"""The top_p that is sent as 0: less than the most likely token's probability in any vocabulary that is read."""


def _field_of(name: str, param: Param) -> Any:
    """The (type, default) of a body's field for a sampling parameter."""
    low, above = (None, param.low) if param.above_low else (param.low, None)
    number: Any = float if param.kind in {"number", "biases"} else int
    if name == "top_p":
        low, above = 0, None
    kind: Any = Annotated[number, Field(ge=low, gt=above, le=param.high)]
    if param.kind == "ids":
        kind = Annotated[Ids, array(param.most, param.least)]
    elif param.kind == "biases":
        kind = Annotated[dict[str, kind], WrapValidator(_biases)]
    elif param.kind == "flag":
        kind = bool
    elif name == "seed":
        kind = Annotated[kind, AfterValidator(lambda seed: seed % 2**64)]
    elif name == "top_p":
        kind = Annotated[kind, AfterValidator(lambda top_p: top_p or _MOST_LIKELY)]
    elif name == "top_k":
        kind = Annotated[kind, AfterValidator(lambda top_k: max(0, top_k))]
    return (kind | None, Field(None, description=param.doc or None))


def _stop(value: Any) -> Any:
    return _STOPS.validate_python([value] if type(value) is str else value)


def _prompt(value: Any) -> tuple[Prompt, ...]:
    """Parses a prompt: a text, token ids, or a list of either (not mixed)."""
    if type(value) is str:
        return (value,)
    if type(value) is not list:
        expected = "a string, an array of token ids, or an array of either"
        raise invalid(f" is {kind_of(value)}; {expected} is expected", "invalid_type")
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
_Beams = Annotated[Any, ignored("it applies to beam search only")]
_Media = Annotated[Any, ignored("prompts are text only")]


_Echo = Annotated[bool | None, described("The answer begins with the continued prompt or message.")]


class StreamOptions(StrictModel):
    include_usage: bool | None = None
    continuous_usage_stats: Annotated[bool | None, described("Usage so far in every chunk, with include_usage.")] = None
    include_obfuscation: Annotated[Any, ignored("no padding is sent")] = None


class SharedFields(GrammarFields):
    model: Annotated[str, text(256, 1)]
    stop: Annotated[tuple[str, ...] | None, PlainValidator(_stop, json_schema_input_type=str | Stops | None)] = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[
        Kept | None, described("Keeps so many tokens of the prompt's end; -1: as many as fit.")
    ] = None
    bad_words: Annotated[tuple[Annotated[str, text(64, 1)], ...], array(128)] | None = None
    priority: Annotated[Order | None, described("Lower runs first, among interactive requests or a batch's lines.")] = (
        None
    )
    cache_salt: Annotated[
        Annotated[str, text(256, 1)] | None, described("Only requests with the same salt share cached prefixes.")
    ] = None
    return_token_ids: Annotated[bool | None, described("Adds token_ids and prompt_token_ids to the text.")] = None
    return_tokens_as_token_ids: Annotated[bool | None, described("Logprobs name tokens as token_id:ID.")] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Annotated[str, text(512)] | None = None
    prompt_cache_key: _Bookkeeping = None
    prompt_cache_retention: _Bookkeeping = None
    prompt_cache_options: _Bookkeeping = None
    safety_identifier: _Bookkeeping = None
    request_id: _Bookkeeping = None
    metadata: _Bookkeeping = None
    service_tier: _Bookkeeping = None
    store: Annotated[Any, ignored("answers are not stored")] = None
    mm_processor_kwargs: _Media = None
    media_io_kwargs: _Media = None
    length_penalty: _Beams = None
    early_stopping: _Beams = None
    spaces_between_special_tokens: Annotated[Any, ignored("no supported tokenizer adds them")] = None
    use_beam_search: Annotated[None, Refused("beam search is not implemented", (False,))] = None
    best_of: Annotated[int | None, described("At most n: every choice is returned.")] = None
    detokenize: Annotated[None, Refused("answers are text", (True,))] = None
    logits_processors: Annotated[None, Refused("code from requests is not run", ([],))] = None
    kv_transfer_params: Annotated[None, Refused("prompts and answers are computed by the same ranks", ({},))] = None
    vllm_xargs: Annotated[None, Refused("no plugin reads it", ({},))] = None
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
        tuple[dict[str, Any], ...] | None, array(1024), described("Passed to the chat template unchanged.")
    ] = None
    reasoning_effort: Annotated[Word | None, described("Passed to the chat template.")] = None
    verbosity: Annotated[Word | None, described("Passed to the chat template.")] = None
    echo: _Echo = None
    include_reasoning: Annotated[bool | None, described("Whether reasoning_content is sent.")] = None
    tools: Tools | None = None
    tool_choice: Chosen | None = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[None, Refused("use tools", ([],))] = None
    function_call: Annotated[None, Refused("use tool_choice", ("none",))] = None
    modalities: Annotated[None, Refused("text only", (["text"],))] = None
    audio: Annotated[None, Refused("text only")] = None
    prediction: Annotated[Any, ignored("it would only save time")] = None
    moderation: Annotated[None, Refused("answers are not moderated")] = None
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


def json_schema(endpoint: Endpoint) -> dict[str, Any]:
    """The body's JSON schema, for the API's description; body.py's rules between fields may be stricter."""
    return schema_of(MODELS[endpoint])
