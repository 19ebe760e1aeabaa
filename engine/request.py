"""A request and its events as frozen data: token ids in, token ids out. engine/openai/ checks clients' input; the
checks here are for data from another laddertron process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal, NamedTuple

from annotated_types import Ge, Lt, MaxLen

FinishReason = Literal["stop", "length", "cancelled", "timeout", "numerical_error", "constraint_error", "error"]

INTERACTIVE, BATCH = 0, 1
"""Priorities: a smaller number runs first; ageing moves a waiting batch line forward."""
MAX_ORDER = 2**31 - 1

MAX_CHOICES = 128
"""The largest `n`, as of the OpenAI API."""
MAX_LOGPROBS = 20
MAX_CANDIDATES = 1024
"""The most candidates a rank contributes for one sequence before the sampler widens (engine/sampling/sampler.py)."""


# what a process of ours takes of another; a client's bounds are in Param
Count = Annotated[int, Ge(0), Lt(2**63)]
Size = Annotated[int, Ge(1), Lt(2**63)]
MAX_NAME = 512
Name = Annotated[str, MaxLen(MAX_NAME)]
TokenId = Annotated[int, Ge(0), Lt(2**32)]
TokenIds = Annotated[tuple[TokenId, ...], MaxLen(1 << 24)]
Integer = Annotated[int, Ge(-1), Lt(2**64)]

ParamKind = Literal["integer", "number", "flag", "ids", "biases", "words", "text"]
MAX_TOKENS, MAX_ID = 2**31 - 1, 2**31 - 1


@dataclass(frozen=True, slots=True)
class Param:
    """Properties of a sampling parameter besides its name and default: the field of request bodies, its bounds and
    its JSON form follow from this. `low` and `high` bound a client's value, or each item of a list of `least` to
    `most`; `api=False`: no field of a body."""

    kind: ParamKind
    low: float = 0
    high: float = MAX_TOKENS
    doc: str = ""
    above_low: bool = False
    least: int = 0
    most: int = 1024
    optional: bool = False
    api: bool = True


def _param(default: Any, kind: ParamKind, low: float = 0, high: float = MAX_TOKENS, doc: str = "", **more: Any) -> Any:
    """`default`: ... where there is none."""
    param = Param(kind, low, high, doc, optional=default is None, **more)
    return field(metadata={"": param}) if default is ... else field(default=default, metadata={"": param})


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens of one request are drawn, with the names and defaults of the OpenAI API and of vLLM. A new
    parameter needs its line here and its rule under engine/sampling/. `seed` is always set (derived from run or
    batch id and custom_id by default), so that a retry gives the same answer. `top_k=0`: all; `temperature=0`:
    greedy; `logprobs`: None for none, 0 for the chosen token's alone. `stop` strings become `stop(request_id,
    n_tokens)` outside the engine."""

    max_tokens: Integer = _param(..., "integer")
    seed: Integer = _param(..., "integer", -(2**63), 2**64 - 1)
    min_tokens: Integer = _param(0, "integer")
    temperature: float = _param(1.0, "number", 0, 2)
    top_p: float = _param(1.0, "number", 0, 1, above_low=True)
    top_k: Integer = _param(0, "integer", -1, doc="-1 or 0: all")
    min_p: float = _param(0.0, "number", 0, 1)
    presence_penalty: float = _param(0.0, "number", -2, 2)
    frequency_penalty: float = _param(0.0, "number", -2, 2)
    repetition_penalty: float = _param(1.0, "number", 0.01, 100)
    logit_bias: tuple[tuple[TokenId, float], ...] = _param((), "biases", -100, 100)
    allowed_token_ids: TokenIds = _param((), "ids", least=1, most=1 << 14, doc="Only these ids are drawn.")
    stop_token_ids: TokenIds = _param((), "ids")
    """Every id that ends the sequence: the model's EOS ids (unless ignore_eos) and the user's; set by engine/openai."""
    n: Integer = _param(1, "integer", 1, MAX_CHOICES)
    logprobs: Integer | None = _param(None, "integer", 0, MAX_LOGPROBS)
    prompt_logprobs: Integer | None = _param(None, "integer", 0, MAX_LOGPROBS)
    return_digest: bool = _param(False, "flag", doc="With each choice a digest of the logits it was drawn from.")
    grammar: str | None = _param(None, "text", api=False)
    """A structured-output grammar in the grammar library's own JSON form, or None."""
    bad_word_ids: tuple[TokenIds, ...] = _param((), "words", api=False)
    """Sequences of ids whose last id is not sampled after the others; engine/openai makes them from the client's words.
    """

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    @property
    def edits(self) -> bool:
        """Whether logits are edited before sampling (engine/sampling/penalties.py)."""
        return bool(
            self.penalised or self.logit_bias or self.allowed_token_ids or self.bad_word_ids or self.min_tokens > 0
        )

    def token_ids(self) -> Iterator[tuple[str, Sequence[int]]]:
        """Yields the parameters that contain token ids."""
        for name, param in PARAMS.items():
            if param.kind == "ids":
                yield name, getattr(self, name)
            elif param.kind == "biases":
                yield name, [token for token, _ in getattr(self, name)]
            elif param.kind == "words":
                yield name, [token for word in getattr(self, name) for token in word]


PARAMS: dict[str, Param] = {f.name: f.metadata[""] for f in fields(SamplingParams)}
_DEFAULTS = [(f.name, f.default) for f in fields(SamplingParams)]


def params_to_json(params: SamplingParams) -> dict[str, Any]:
    """Converts parameters to JSON values, without those that have their default."""
    return {name: value for name, default in _DEFAULTS if (value := getattr(params, name)) != default}


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and where to resume. `request_id` is unique in the engine's life. Owners take turns, and so do an
    owner's `queue`s (a batch id; "" for interactive requests); `order`: the client's priority within its queue,
    smaller first. `salt` starts with the owner and separates tenants in the prefix cache; `deadline`: unix seconds
    or None. `emitted`: what earlier attempts put out of each choice, None for one that has ended."""

    request_id: Name
    prompt: TokenIds
    params: SamplingParams
    priority: Annotated[int, Lt(2**63)] = BATCH
    queue: Name = ""
    salt: Name = ""
    deadline: float | None = None
    order: Annotated[int, Lt(2**63)] = 0
    emitted: Annotated[tuple[TokenIds | None, ...], MaxLen(MAX_CHOICES)] = ()
    shared: Count | None = None
    """How many of the prompt's first tokens later requests begin with, if known: their blocks are evicted last."""

    @property
    def open_choices(self) -> list[int]:
        """The choices that have not ended."""
        return [c for c in range(self.params.n) if not self.emitted or self.emitted[c] is not None]

    @property
    def owner(self) -> str:
        return self.salt.partition("\0")[0]


class TokenLogprob(NamedTuple):
    """Natural-log probability of one token, and of the `top` likeliest (id, logprob), best first. `digest`: of the
    row of logits that it was drawn from, if asked for."""

    token: TokenId
    logprob: float
    top: tuple[tuple[TokenId, float], ...] = ()
    digest: Annotated[int, Ge(0), Lt(2**64)] = 0


@dataclass(frozen=True, slots=True)
class TokensEvent:
    """Released tokens of one choice. `start` counts the choice's output tokens before these, so that a lost or repeated
    event is detected. The event with `finish` set is the choice's last; it may carry no token. `finish="error"`,
    `"numerical_error"` and `"constraint_error"` carry `message`."""

    request_id: Name
    choice: Count
    start: Count
    tokens: TokenIds
    finish: FinishReason | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    """If requested: one for each token, then the stop token's."""
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    """Only on the first event of choice 0, if requested: one for each prompt token, None for the first."""
    stop_token: TokenId | None = None
    """The id from `stop_token_ids` that ended it (not part of `tokens`)."""
    message: str | None = None
    cached_tokens: Count = 0


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """Limits of the running engine, which the API enforces."""

    max_model_len: Size
    vocab_size: Size
    max_num_seqs: Size
    kv_tokens: Size
    """Capacity of one replica's KV cache in tokens: a longer request can never run."""
    eos_token_ids: TokenIds = ()
