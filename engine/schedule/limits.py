"""Limits of one replica; a request that could never run is refused before it waits."""

from __future__ import annotations

from dataclasses import dataclass

from ..request import Request
from .sequence import end_position
from .speculation import SpeculationRule
from .split import SplitRule


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """`ageing_s` seconds of waiting equal one priority; admission keeps the share `watermark` of blocks free."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    num_blocks: int
    enable_prefix_caching: bool = True
    ageing_s: float = 30.0
    watermark: float = 0.01
    microbatches: int = 1
    """Plans that are on their way at once in a pipeline; a sequence is in one of them."""
    max_scored_positions: int = 1 << 30
    """Prompt positions whose logits are wanted in one step (`prompt_logprobs`): each costs a vocabulary of memory."""
    split: SplitRule | None = None
    """Which steps may be computed in two streams; None: none."""
    speculation: SpeculationRule | None = None
    """How decodes get drafts; None: they get none."""
    most_rows: tuple[int, int] = (1 << 30, 1 << 30)
    """Decodes and drafts of a step, at most, without and with prompts: more would not be recorded."""
    runs_ahead: bool = False
    """Whether a step starts before the ids of the step before it are known, unless there are drafts."""
    tokens_ahead: int = 0
    """Keys and values of a position depend on so many tokens after it: one with a predicting layer."""


class RequestTooLarge(ValueError):
    """The request could never run, however empty the engine."""


def check_request(request: Request, limits: SchedulerLimits) -> None:
    """Raises ValueError if it asks for nothing, RequestTooLarge if it can never fit."""
    params, prompt_len = request.params, len(request.prompt)
    if not prompt_len or params.n < 1 or params.max_tokens < 0:
        raise ValueError(
            f"request {request.request_id}: {prompt_len} prompt tokens, n={params.n}, "
            f"max_tokens={params.max_tokens}: at least one, one and none are needed"
        )
    if len(request.emitted) not in (0, params.n) or not request.open_choices:
        raise ValueError(
            f"request {request.request_id}: emitted holds {len(request.emitted)} choices, n={params.n}: it needs one "
            "entry a choice, and one that is open"
        )
    room = limits.max_model_len - (params.max_tokens > 0)
    if prompt_len > room:
        raise RequestTooLarge(
            f"a prompt of {prompt_len} tokens: max_model_len={limits.max_model_len} leaves room for {room}; "
            "shorten the prompt"
        )
    end = end_position(prompt_len, params.max_tokens, limits.max_model_len)
    length = prompt_len + max((len(ids) for ids in request.emitted if ids is not None), default=0)
    if length > end:
        raise ValueError(
            f"request {request.request_id}: a choice has {length - prompt_len} tokens already, and ends at "
            f"{end - prompt_len + 1}"
        )
    needed = -(-end // limits.block_size)
    if needed > limits.num_blocks:
        has = limits.num_blocks * limits.block_size
        raise RequestTooLarge(
            f"a prompt of {prompt_len} tokens with max_tokens={params.max_tokens}: it may need {end} KV positions, "
            f"{needed} blocks of {limits.block_size}, and there are {limits.num_blocks} ({has} tokens); "
            f"keep the prompt and max_tokens together below {has + 2}, or give the cache more memory",
        )
