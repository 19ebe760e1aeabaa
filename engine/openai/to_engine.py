"""Converts a checked body to the engine's Requests (`encode_prompts`, `to_requests`), within the model's limits."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..request import BATCH, ModelLimits, Request, SamplingParams
from ..text.chat_formats import REASONING_FORMATS, call_marks
from ..text.pool import Encoder, PromptError
from ..text.tokenizer import ChatOptions, TextModel
from .body import COMPLETIONS_MAX_TOKENS, Body
from .errors import ApiError
from .schema import CHAT
from .validators import show

MAX_VALUES = 1 << 20
"""Token ids in the parameters of all of a body's requests."""
_OPENING = 8  # ids at a prompt's end in which a template's opening mark of reasoning is searched
TRUNCATED = 8
"""A prompt that is truncated to its end may have this many times the model's number of tokens."""


def default_seed(run_id: str, custom_id: str) -> int:
    """The first 8 bytes of BLAKE2b over run or batch id and custom_id (a zero byte between), little-endian."""
    return int.from_bytes(hashlib.blake2b(f"{run_id}\0{custom_id}".encode()).digest()[:8], "little")


def wrong_model(model: str, served: str) -> ApiError | None:
    """The error (404) of a request for another model; else None."""
    if model == served:
        return None
    message = f"the model {show(model)} is not served: use {served!r}"
    return ApiError(message, "model_not_found", "model", status=404)


def check_model(body: Body, served: str) -> None:
    """Raises ApiError (404) if the body requests another model."""
    if (error := wrong_model(body.model, served)) is not None:
        raise error


async def encode_prompts(body: Body, text: Encoder, longer: int = 1) -> list[tuple[int, ...]]:
    """Encodes each prompt, up to `longer` times the usual length. Raises ApiError or TextUnavailable."""
    out: list[tuple[int, ...]] = []
    longer = longer if body.truncate_prompt_tokens is None else TRUNCATED
    try:
        if body.endpoint == CHAT:
            options = ChatOptions(
                body.add_generation_prompt,
                body.continue_final_message,
                bool(body.add_special_tokens),
                body.template_variables,
            )
            out.append(tuple(await text.encode_chat(list(body.messages), options, longer)))
        for prompt in body.prompts:
            if isinstance(prompt, str):
                out.append(tuple(await text.encode(prompt, body.add_special_tokens is not False, longer)))
            else:
                out.append(prompt)
    except PromptError as error:
        raise ApiError(str(error), error.code, body.prompt_param) from None
    return out


async def with_worker_params(body: Body, text: Encoder) -> Body:
    """Adds the parameters that text workers make: the ids of the bad words, of which there may be 128, and the grammar
    as ranks compile it, which may kill its worker but must not reach the ranks if it is bad. Raises ApiError or
    TextUnavailable."""
    param = "bad_words"
    try:
        if body.bad_words:
            ids = await text.bad_word_ids(body.bad_words)
            body = body._replace(params=replace(body.params, bad_word_ids=ids))
        if body.params.grammar is not None:
            param = body.grammar_param
            grammar, unenforced = await text.check_grammar(body.params.grammar)
            body = body._replace(params=replace(body.params, grammar=grammar))
            body = body._replace(unenforced=(*body.unenforced, *unenforced))
    except PromptError as error:
        raise ApiError(str(error), error.code, param) from None
    return body


@dataclass(frozen=True, slots=True)
class RequestOrigin:
    """The origin of a body's requests: what the scheduler needs in addition to prompts and parameters. `key` and
    `run_id` determine the default seed (custom_id and batch id; for interactive requests a random id). `shared`: of the
    first prompt."""

    request_id: str
    run_id: str
    key: str
    priority: int = BATCH
    queue: str = ""
    salt: str = ""
    deadline: float | None = None
    shared: int | None = None


def to_requests(
    body: Body,
    prompts: Sequence[tuple[int, ...]],
    limits: ModelLimits,
    origin: RequestOrigin,
    text: TextModel | None = None,
) -> list[Request]:
    """Makes one engine request for each prompt; after the first, `request_id` has the suffix `.1`, `.2` … `text`: its
    end tokens are added to the model's. Raises ApiError for parameters that this model does not support."""
    given = body.params
    support = text.chat if text is not None and body.tools else None
    if support and not (support.tool_format if body.tool_choice == "auto" else support.takes_tools):
        message = "the model's chat template does not support tools, or its format of calls is unknown"
        raise ApiError(message, param="tools", code="unsupported_parameter")
    if given.n > limits.max_num_seqs:
        message = f"n={given.n}: at most {limits.max_num_seqs} choices per prompt (engine.max_num_seqs)"
        raise ApiError(message, param="n")
    chat = body.endpoint == CHAT
    for name, ids in given.token_ids():
        if ids and max(ids) >= limits.vocab_size:
            raise ApiError(f"{name}: token {max(ids)} is beyond the vocabulary of {limits.vocab_size}", param=name)
    ends = () if body.ignore_eos else (*limits.eos_token_ids, *(text.eos_ids if text is not None else ()))
    forbidden = {word[0] for word in given.bad_word_ids if len(word) == 1}
    if given.min_tokens > 0:
        forbidden.update(ends, given.stop_token_ids)
    if given.allowed_token_ids and forbidden.issuperset(given.allowed_token_ids):
        message = "min_tokens and bad_words forbid all of allowed_token_ids: allow another"
        raise ApiError(message, param="allowed_token_ids")
    scored = given.prompt_logprobs
    if body.echo and not chat and given.logprobs is not None:
        scored = max(given.logprobs, scored or 0)
    seed = body.seed if body.seed is not None else default_seed(origin.run_id, origin.key)
    _check_parameters(given, len(prompts))
    stops = tuple(dict.fromkeys((*ends, *given.stop_token_ids)))
    requests = []
    for index, uncut in enumerate(prompts):
        prompt = _cut(body, uncut, limits)
        max_tokens = _max_tokens(body, prompt, limits)
        grammar = given.grammar
        if grammar is not None and chat and text is not None:
            grammar = _with_preamble(grammar, body, text, prompt)
        params = replace(
            given,
            grammar=grammar,
            max_tokens=max_tokens,
            # else the prompts of one body would share their noise
            seed=seed if body.seed is not None else (seed + index) % 2**64,
            min_tokens=min(given.min_tokens, max_tokens),
            stop_token_ids=stops,
            logprobs=0 if given.return_digest and given.logprobs is None else given.logprobs,  # which carry the digest
            prompt_logprobs=scored,
        )
        requests.append(
            Request(
                request_id=origin.request_id if index == 0 else f"{origin.request_id}.{index}",
                prompt=prompt,
                params=params,
                priority=origin.priority,
                queue=origin.queue,
                order=body.priority,
                salt=f"{origin.salt}\0{body.cache_salt}" if body.cache_salt else origin.salt,
                deadline=origin.deadline,
                shared=origin.shared if index == 0 and len(prompt) == len(uncut) else None,
            )
        )
    return requests


def opens_reasoning(text: TextModel, prompt: Sequence[int]) -> bool:
    """Whether a chat's prompt ends with the opening mark of reasoning."""
    if text.chat.reasoning is None:
        return False
    end = text.decode(prompt[-_OPENING:], skip_special=False)
    return end.rstrip().endswith(REASONING_FORMATS[text.chat.reasoning][0])


def _with_preamble(grammar: str, body: Body, text: TextModel, prompt: Sequence[int]) -> str:
    """The grammar of a chat's content, with what may precede it or come instead: reasoning, and calls that are not
    required."""
    reasoning, calls = text.chat.reasoning, list[str]()
    if body.tool_choice == "auto" and text.chat.tool_format is not None:
        calls += call_marks(text.chat.tool_format, [tool["function"]["name"] for tool in body.tools])
    if reasoning is None and not calls:
        return grammar
    marks = None if reasoning is None else REASONING_FORMATS[reasoning]
    preamble = {"reasoning": marks, "thinking": opens_reasoning(text, prompt), "calls": calls}
    return f'{{"preamble":{json.dumps(preamble)},{grammar.removeprefix("{")}'


def _check_parameters(params: SamplingParams, prompts: int) -> None:
    """Raises ApiError if the parameters, which every prompt's request repeats, are too many values in all."""
    values = sum(len(ids) for _, ids in params.token_ids()) + len(params.grammar or "") // 4
    if values * prompts > MAX_VALUES:
        message = (
            f"{prompts} prompts with {values} token ids (or four characters of a grammar each) in their parameters"
        )
        raise ApiError(f"{message}: at most {MAX_VALUES} in one body, send several", param="prompt")


def _cut(body: Body, prompt: tuple[int, ...], limits: ModelLimits) -> tuple[int, ...]:
    """Truncates a prompt to its last truncate_prompt_tokens tokens; -1: to as many as fit with the answer."""
    keep = body.truncate_prompt_tokens
    if keep == -1:
        keep = max(1, min(limits.max_model_len, limits.kv_tokens) - (body.max_tokens or 1))
    return prompt if keep is None else prompt[-keep:]


def _max_tokens(body: Body, prompt: tuple[int, ...], limits: ModelLimits) -> int:
    """The requested number of tokens, or the rest of the model's length. Raises ApiError if it does not fit."""
    if not prompt:
        raise ApiError("the prompt is empty: the model needs at least one token", param=body.prompt_param)
    if (largest := max(prompt) if body.largest_id is None else body.largest_id) >= limits.vocab_size:
        message = f"prompt: token {largest} is beyond the vocabulary of {limits.vocab_size}"
        raise ApiError(message, param=body.prompt_param)
    room = min(limits.max_model_len, limits.kv_tokens) - len(prompt)
    requested = body.max_tokens
    if requested is None:
        requested = max(1, room) if body.endpoint == CHAT else max(1, min(COMPLETIONS_MAX_TOKENS, room))
    if requested > room:
        bound = (
            f"this model's maximum context length is {limits.max_model_len} tokens"
            if limits.max_model_len <= limits.kv_tokens
            else f"the KV cache holds {limits.kv_tokens} tokens"
        )
        message = f"{bound}, the prompt has {len(prompt)} and {requested} more are requested"
        fix = "shorten the prompt or request fewer" if room > 0 else "shorten the prompt"
        raise ApiError(f"{message}: {fix}", param=body.prompt_param, code="context_length_exceeded")
    return requested
