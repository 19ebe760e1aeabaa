"""A checked body -> the engine's Requests: `encode_prompts` (text to ids, in the pool), then `to_requests`.

Here a body meets the model: its name, its length, its vocabulary, its slots. Used by the daemon and by batchrun.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from ..request import BATCH, ModelLimits, Request, SamplingParams
from ..text import ChatOptions
from ..text_pool import Encoder, PromptError
from .intake import Line
from .rules import BadRequest, show
from .schema import CHAT, COMPLETIONS_MAX_TOKENS, Body


def default_seed(run_id: str, custom_id: str) -> int:
    """The first 8 bytes of BLAKE2b over run or batch id and custom_id (a zero byte between), little-endian."""
    return int.from_bytes(hashlib.blake2b(f"{run_id}\0{custom_id}".encode()).digest()[:8], "little")


def check_model(body: Body, served: str) -> None:
    """Raises BadRequest (404) if the body asks for another model."""
    if body.model != served:
        raise BadRequest(
            f"the model {show(body.model)} is not served here: {served!r} is",
            param="model",
            code="model_not_found",
            status=404,
        )


class Strangers:
    """Lines that are good but for their model: how many, and the first `most` of them with what is wrong."""

    def __init__(self, served: str, most: int) -> None:
        self._served, self._most, self.count = served, most, 0
        self.first: list[tuple[int, BadRequest]] = []

    def see(self, line: Line) -> None:
        if line.body is None or line.body.model == self._served:
            return
        self.count += 1
        if len(self.first) < self._most:
            try:
                check_model(line.body, self._served)
            except BadRequest as bad:
                said = f"line {line.number}: {bad.message}"
                self.first.append((line.number, BadRequest(said, param=bad.param, code=bad.code)))


async def encode_prompts(body: Body, text: Encoder) -> list[tuple[int, ...]]:
    """The ids of each of the body's prompts, in order; its grammar is checked as well. Raises BadRequest."""
    out: list[tuple[int, ...]] = []
    param = "messages" if body.endpoint == CHAT else "prompt"
    try:
        if body.grammar is not None:
            # here, where it may cost its process: a grammar that cannot be used must not reach the ranks
            await text.check_grammar(body.grammar)
        if body.endpoint == CHAT:
            options = ChatOptions(
                body.add_generation_prompt,
                body.continue_final_message,
                bool(body.add_special_tokens),
                body.chat_template_kwargs,
            )
            out.append(tuple(await text.encode_chat(list(body.messages), options)))
        for prompt in body.prompts:
            if isinstance(prompt, str):
                out.append(tuple(await text.encode(prompt, body.add_special_tokens is not False)))
            else:
                out.append(prompt)
    except PromptError as error:
        server = error.code == "server_error"
        raise BadRequest(
            str(error),
            param="response_format" if error.code == "invalid_grammar" else param,
            code=error.code,
            kind="server_error" if server else "invalid_request_error",
            status=500 if server else 400,
        ) from None
    keep = body.truncate_prompt_tokens
    return out if keep is None else [ids[-keep:] for ids in out]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a body's requests come from: what the scheduler needs beside prompts and parameters. `key` and `run_id`
    make the default seed (custom_id and batch id; a fresh random id for interactive requests)."""

    request_id: str
    run_id: str
    key: str
    priority: int = BATCH
    queue: str = ""
    salt: str = ""
    deadline: float | None = None
    epoch: int = 0


def to_requests(
    body: Body,
    prompts: Sequence[tuple[int, ...]],
    limits: ModelLimits,
    origin: Origin,
    eos_ids: tuple[int, ...] = (),
    max_choices: int | None = None,
) -> list[Request]:
    """One engine request a prompt, `request_id` suffixed `.1`, `.2` … after the first. `eos_ids`: the tokenizer's, in
    addition to the model's. Raises BadRequest for what this model cannot do (prompt too long, n beyond its slots,
    ids beyond its vocabulary)."""
    most = min(limits.max_num_seqs, max_choices or limits.max_num_seqs)
    if body.n > most:
        raise BadRequest(f"n={body.n}: at most {most} choices a prompt run here", param="n")
    chat = body.endpoint == CHAT
    for name, ids in (("stop_token_ids", body.stop_token_ids), ("logit_bias", [i for i, _ in body.logit_bias])):
        if ids and max(ids) >= limits.vocab_size:
            raise BadRequest(f"{name}: token {max(ids)} is beyond the vocabulary of {limits.vocab_size}", param=name)
    ends = () if body.ignore_eos else (*limits.eos_token_ids, *eos_ids)
    scored = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        scored = max(body.logprobs, scored or 0)
    seed = body.seed if body.seed is not None else default_seed(origin.run_id, origin.key)
    requests = []
    for index, prompt in enumerate(prompts):
        max_tokens = _max_tokens(body, prompt, limits, "messages" if chat else "prompt")
        params = SamplingParams(
            max_tokens=max_tokens,
            # prompts of one body would otherwise share their noise
            seed=seed if body.seed is not None else (seed + index) % 2**64,
            min_tokens=min(body.min_tokens, max_tokens),
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=body.top_k,
            min_p=body.min_p,
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
            repetition_penalty=body.repetition_penalty,
            logit_bias=body.logit_bias,
            stop_token_ids=tuple(dict.fromkeys((*ends, *body.stop_token_ids))),
            n=body.n,
            logprobs=body.logprobs,
            prompt_logprobs=scored,
            grammar=body.grammar,
        )
        requests.append(
            Request(
                request_id=origin.request_id if index == 0 else f"{origin.request_id}.{index}",
                prompt=prompt,
                params=params,
                priority=origin.priority,
                queue=origin.queue,
                salt=origin.salt,
                deadline=origin.deadline,
                epoch=origin.epoch,
            )
        )
    return requests


def _max_tokens(body: Body, prompt: tuple[int, ...], limits: ModelLimits, param: str) -> int:
    """What is asked for, or what is left of the model's length. Raises BadRequest if it does not fit."""
    if not prompt:
        raise BadRequest("the prompt is empty: the model needs at least one token", param=param)
    if max(prompt) >= limits.vocab_size:
        message = f"prompt: token {max(prompt)} is beyond the vocabulary of {limits.vocab_size}"
        raise BadRequest(message, param=param)
    room = min(limits.max_model_len, limits.kv_tokens) - len(prompt)
    wanted = body.max_tokens
    if wanted is None:
        wanted = max(1, room) if body.endpoint == CHAT else max(1, min(COMPLETIONS_MAX_TOKENS, room))
    if wanted > room:
        bound = (
            f"the model takes {limits.max_model_len} tokens"
            if limits.max_model_len <= limits.kv_tokens
            else f"the KV cache holds {limits.kv_tokens} tokens"
        )
        message = f"{bound}, the prompt has {len(prompt)} and {wanted} more are asked for"
        mend = "shorten the prompt or lower max_tokens" if room > 0 else "shorten the prompt"
        raise BadRequest(f"{message}: {mend}", param=param, code="context_length_exceeded")
    return wanted
