"""Request, TokensEvent and ModelLimits as checked JSON values, compact: what has its default is left out.

The hot part of the control channel (one event a sequence a step), so written out by hand. Raises SchemaError on
whatever the other side would not have written.
"""

from __future__ import annotations

from typing import Any, cast, get_args

from ..engine.request import FinishReason, ModelLimits, Request, SamplingParams, TokenLogprob, TokensEvent
from .checked import Fields, SchemaError

MAX_ID = 512
MAX_PROMPT = 1 << 24
MAX_TOP = 1024
LOWEST_LOGPROB = -9999.0
"""JSON has no infinity: a logprob of a masked token is written as this, as OpenAI's API does."""
_MAX_INT = 2**63 - 1
_FINISH: tuple[str, ...] = get_args(FinishReason)
_PARAM_DEFAULTS = {name: getattr(SamplingParams(max_tokens=1, seed=0), name) for name in SamplingParams.__slots__}


def request_to_wire(request: Request) -> dict[str, Any]:
    p = request.params
    params = {
        name: getattr(p, name)
        for name, default in _PARAM_DEFAULTS.items()
        if name in ("max_tokens", "seed") or getattr(p, name) != default
    }
    return {
        "request_id": request.request_id,
        "prompt": request.prompt,
        "params": params,
        "priority": request.priority,
        "queue": request.queue,
        "salt": request.salt,
        "deadline": request.deadline,
        "epoch": request.epoch,
    }


def request_from_wire(data: object) -> Request:
    f = Fields(data, "request")
    request = Request(
        request_id=f.text("request_id", MAX_ID),
        prompt=f.ids("prompt", MAX_PROMPT),
        params=_params_from_wire(f.raw("params")),
        priority=f.integer("priority", -_MAX_INT, _MAX_INT),
        queue=f.text("queue", MAX_ID),
        salt=f.text("salt", MAX_ID),
        deadline=_optional_number(f, "deadline"),
        epoch=f.integer("epoch", 0, _MAX_INT),
    )
    f.done()
    return request


def _optional_number(f: Fields, name: str) -> float | None:
    value = f.raw(name, None)
    return None if value is None else Fields({name: value}, "request").number(name)


def _optional_integer(f: Fields, name: str, high: int) -> int | None:
    value = f.raw(name, None)
    return None if value is None else Fields({name: value}, "request").integer(name, 0, high)


def _pairs(values: list[Any], what: str) -> tuple[tuple[int, float], ...]:
    """[[id, number], ...]"""
    pairs = []
    for item in values:
        if type(item) is not list or len(item) != 2 or type(item[0]) is not int or type(item[1]) not in (int, float):
            raise SchemaError(f"{what}: {str(item)[:60]!r} is not [token id, number]")
        if not (0 <= item[0] < 2**32 and abs(item[1]) < 1e300):
            raise SchemaError(f"{what}: {str(item)[:60]!r} is out of bounds")
        pairs.append((item[0], float(item[1])))
    return tuple(pairs)


def _params_from_wire(data: object) -> SamplingParams:
    f, d = Fields(data, "params"), _PARAM_DEFAULTS
    grammar = f.raw("grammar", None)
    if grammar is not None and not isinstance(grammar, str):
        raise SchemaError("params: grammar is not text")
    params = SamplingParams(
        max_tokens=f.integer("max_tokens", 0, _MAX_INT),
        seed=f.integer("seed", 0, 2**64 - 1),
        min_tokens=f.integer("min_tokens", 0, _MAX_INT, d["min_tokens"]),
        temperature=f.number("temperature", d["temperature"]),
        top_p=f.number("top_p", d["top_p"]),
        top_k=f.integer("top_k", -1, _MAX_INT, d["top_k"]),
        min_p=f.number("min_p", d["min_p"]),
        presence_penalty=f.number("presence_penalty", d["presence_penalty"]),
        frequency_penalty=f.number("frequency_penalty", d["frequency_penalty"]),
        repetition_penalty=f.number("repetition_penalty", d["repetition_penalty"]),
        logit_bias=_pairs(f.items("logit_bias", MAX_PROMPT, ()), "logit_bias"),
        stop_token_ids=f.ids("stop_token_ids", MAX_PROMPT, ()),
        n=f.integer("n", 1, _MAX_INT, 1),
        logprobs=_optional_integer(f, "logprobs", MAX_TOP),
        prompt_logprobs=_optional_integer(f, "prompt_logprobs", MAX_TOP),
        grammar=grammar,
    )
    f.done()
    return params


def _bounded(logprob: float) -> float:
    return logprob if LOWEST_LOGPROB < logprob < -LOWEST_LOGPROB else LOWEST_LOGPROB


def _logprob_to_wire(item: TokenLogprob | None) -> list[Any] | None:
    if item is None:
        return None
    return [item.token, _bounded(item.logprob), [[token, _bounded(value)] for token, value in item.top]]


def _logprob_from_wire(item: object) -> TokenLogprob:
    if type(item) is not list or len(item) != 3 or type(item[2]) is not list or len(item[2]) > MAX_TOP:
        raise SchemaError(f"logprob: {str(item)[:60]!r} is not [token id, number, [[token id, number], ...]]")
    ((token, value),) = _pairs([item[:2]], "logprob")
    return TokenLogprob(token, value, _pairs(item[2], "logprob"))


def event_to_wire(event: TokensEvent) -> dict[str, Any]:
    data: dict[str, Any] = {
        "request_id": event.request_id,
        "choice": event.choice,
        "start": event.start,
        "tokens": event.tokens,
    }
    if event.epoch:
        data["epoch"] = event.epoch
    if event.finish is not None:
        data["finish"] = event.finish
    if event.stop_token is not None:
        data["stop_token"] = event.stop_token
    if event.message is not None:
        data["message"] = event.message[:4096]
    if event.cached_tokens:
        data["cached_tokens"] = event.cached_tokens
    if event.logprobs is not None:
        data["logprobs"] = [_logprob_to_wire(item) for item in event.logprobs]
    if event.prompt_logprobs is not None:
        data["prompt_logprobs"] = [_logprob_to_wire(item) for item in event.prompt_logprobs]
    return data


def event_from_wire(data: object) -> TokensEvent:
    f = Fields(data, "event")
    finish = f.raw("finish", None)
    if finish is not None and finish not in _FINISH:
        raise SchemaError(f"event: finish={str(finish)[:40]!r} is not one of {', '.join(_FINISH)}")
    message = f.raw("message", None)
    if message is not None and not isinstance(message, str):
        raise SchemaError("event: message is not text")
    event = TokensEvent(
        request_id=f.text("request_id", MAX_ID),
        choice=f.integer("choice", 0, _MAX_INT),
        start=f.integer("start", 0, _MAX_INT),
        tokens=f.ids("tokens", MAX_PROMPT),
        finish=cast("FinishReason | None", finish),
        logprobs=_logprobs(f),
        prompt_logprobs=_prompt_logprobs(f),
        stop_token=_optional_integer(f, "stop_token", 2**32 - 1),
        message=message,
        cached_tokens=f.integer("cached_tokens", 0, _MAX_INT, 0),
        epoch=f.integer("epoch", 0, _MAX_INT, 0),
    )
    f.done()
    return event


def _logprobs(f: Fields) -> tuple[TokenLogprob, ...] | None:
    items = f.raw("logprobs", None)
    if items is None:
        return None
    return tuple(
        _logprob_from_wire(item) for item in Fields({"logprobs": items}, "event").items("logprobs", MAX_PROMPT)
    )


def _prompt_logprobs(f: Fields) -> tuple[TokenLogprob | None, ...] | None:
    items = f.raw("prompt_logprobs", None)
    if items is None:
        return None
    checked = Fields({"prompt_logprobs": items}, "event").items("prompt_logprobs", MAX_PROMPT)
    return tuple(None if item is None else _logprob_from_wire(item) for item in checked)


def limits_to_wire(limits: ModelLimits) -> dict[str, Any]:
    return {name: getattr(limits, name) for name in ModelLimits.__slots__}


def limits_from_wire(data: object) -> ModelLimits:
    f = Fields(data, "limits")
    limits = ModelLimits(
        max_model_len=f.integer("max_model_len", 1, _MAX_INT),
        vocab_size=f.integer("vocab_size", 1, 2**32),
        max_num_seqs=f.integer("max_num_seqs", 1, _MAX_INT),
        kv_tokens=f.integer("kv_tokens", 1, _MAX_INT),
        eos_token_ids=f.ids("eos_token_ids", 4096),
    )
    f.done()
    return limits
