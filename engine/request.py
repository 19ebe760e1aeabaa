"""What is asked of the engine and what it answers, as frozen data: ids in, ids out.

Knows nothing of text, tensors or HTTP. Made at the door (`engine/daemon/intake.py`), carried over the control channel
as JSON, consumed by the scheduler (rank 0) and the sampler (every rank). Validation of what users sent happens at the
door; the checks here are the invariants that the rest of the engine relies on.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

FinishReason = Literal["stop", "length", "cancelled", "timeout", "numerical_error", "error"]

INTERACTIVE, BATCH = 0, 1
"""Priorities: a smaller number runs first; ageing moves a waiting batch line forward."""

MAX_LOGPROBS = 20
MAX_CANDIDATES = 1024
"""The most candidates a rank contributes for one sequence before the sampler widens (engine/sampler.py)."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens of one request are drawn; the words and defaults of the OpenAI API and of vLLM.

    `seed` is always set (the door derives a default from run or batch id and custom_id), so that a retry gives the
    same answer. `top_k=0` means all, `temperature=0` means greedy. `logprobs=None` means none wanted, `0` the chosen
    token's alone. `stop` strings never reach the engine: the door turns a match into `stop(request_id, n_tokens)`.
    """

    max_tokens: int
    seed: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    """Every id that ends the sequence: the model's EOS ids (unless ignore_eos) and the user's; resolved at the door."""
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: str | None = None
    """A structured-output grammar in the grammar library's own JSON form, or None."""

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and how to go on from it. `request_id` is unique in the engine's life; `queue` is the fairness key
    (a batch id, or "" for interactive requests); `salt` keeps tenants apart in the prefix cache; `deadline` is unix
    seconds or None; `epoch` is the attempt that a result must carry to be stored."""

    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    priority: int = BATCH
    queue: str = ""
    salt: str = ""
    deadline: float | None = None
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probability of one token, and of the `top` likeliest (id, logprob), best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class TokensEvent:
    """Released tokens of one choice. `start` counts the choice's output tokens before these, so that a repeated event
    can be recognised. The event with `finish` set is the choice's last; it may carry no token. `finish="error"` and
    `"numerical_error"` carry `message`."""

    request_id: str
    choice: int
    start: int
    tokens: tuple[int, ...]
    finish: FinishReason | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    """If asked for: one per token, and the stop token's behind them."""
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    """On the first event of choice 0 alone, if asked for: one per prompt token, None for the first."""
    stop_token: int | None = None
    """The id from `stop_token_ids` that ended it (not part of `tokens`)."""
    message: str | None = None
    cached_tokens: int = 0
    epoch: int = 0


def request_to_json(request: Request) -> dict[str, Any]:
    """As plain JSON values; `request_from_json` is its inverse."""
    return asdict(request)


def request_from_json(data: dict[str, Any]) -> Request:
    """Raises KeyError, TypeError or ValueError on anything that `request_to_json` would not have written."""
    params = dict(data["params"])
    params["logit_bias"] = tuple((int(i), float(b)) for i, b in params.get("logit_bias", ()))
    params["stop_token_ids"] = tuple(int(i) for i in params.get("stop_token_ids", ()))
    rest = {k: v for k, v in data.items() if k not in ("params", "prompt")}
    return Request(prompt=tuple(int(t) for t in data["prompt"]), params=SamplingParams(**params), **rest)


def event_to_json(event: TokensEvent) -> dict[str, Any]:
    """As plain JSON values; `event_from_json` is its inverse."""
    return asdict(event)


def _logprob(item: dict[str, Any] | None) -> TokenLogprob | None:
    if item is None:
        return None
    return TokenLogprob(
        int(item["token"]), float(item["logprob"]), tuple((int(i), float(p)) for i, p in item.get("top", ()))
    )


def event_from_json(data: dict[str, Any]) -> TokensEvent:
    """Raises KeyError, TypeError or ValueError on anything that `event_to_json` would not have written."""
    rest = {k: v for k, v in data.items() if k not in ("tokens", "logprobs", "prompt_logprobs")}
    logprobs, prompt_logprobs = data.get("logprobs"), data.get("prompt_logprobs")
    chosen: tuple[TokenLogprob, ...] | None = None
    if logprobs is not None:
        chosen = tuple(p for p in map(_logprob, logprobs) if p is not None)
    return TokensEvent(
        tokens=tuple(int(t) for t in data["tokens"]),
        logprobs=chosen,
        prompt_logprobs=None if prompt_logprobs is None else tuple(map(_logprob, prompt_logprobs)),
        **rest,
    )


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What the door must know of the running engine to refuse a request with the right words."""

    max_model_len: int
    vocab_size: int
    max_num_seqs: int
    kv_tokens: int
    """KV slots of one replica, in tokens: a request of more can never run."""
    eos_token_ids: tuple[int, ...] = field(default=())
