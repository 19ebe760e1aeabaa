"""Converts bodies to token ids: small ones in this process, large ones in a text worker, which runs this module."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterable
from typing import Any, Protocol

from ..request import SamplingParams, params_to_json
from ..text import worker
from ..text.call_values import parameter_types
from ..text.pool import LARGE_BYTES, Blob, Encoder, PromptError
from ..text.tokenizer import TextModel
from .batch_input import BatchLine, LineRules, check_line
from .body import TOKENIZE, Body, check_body, check_tokenize, parse_body
from .errors import ApiError
from .schema import CHAT, Route
from .stored_responses import References, StoredInput
from .to_engine import TRUNCATED, check_model, encode_prompts, with_worker_params
from .validators import parsed

MODULE = __name__
MAX_IDS = 1 << 22
"""The prompts' ids of one large body, if the model's context is not longer: the daemon's event loop reads them all."""
MAX_PARAMETERS = 4096
"""Parameters of tools whose types the event loop reads."""
Prepared = tuple[Body, list[tuple[int, ...]]]


class Load(Protocol):
    """Reads stored responses (stored_responses.Stored) as JSON. Raises ApiError for those that are not stored."""

    async def __call__(self, previous: str | None, of_items: tuple[str, ...]) -> bytes: ...


async def prepare(
    raw: Blob, endpoint: Route, served: str, max_ids: int, encoder: Encoder, load: Load | None = None
) -> Prepared:
    """Checks a body and encodes its prompts, which may have at most `max_ids` ids each if the body is large. `load`:
    None without a retention of responses. Raises ApiError or TextUnavailable."""
    stored: bytes | None = None
    place = {"endpoint": endpoint, "served": served, "max_ids": max_ids, "retains": load is not None}
    while True:
        if len(raw) + len(stored or b"") <= LARGE_BYTES:
            body = parse_body(bytes(raw), endpoint, load is not None, None if stored is None else json.loads(stored))
            check_model(body, served)
            missing: Any = body.missing
        else:
            reply = await _asked(*_with_stored(raw, stored, place), encoder)
            missing = reply.get("missing")
        if missing is None:
            break
        assert load is not None
        stored = await load(missing[0], tuple(missing[1]))
    if len(raw) + len(stored or b"") <= LARGE_BYTES:
        return await with_worker_params(body, encoder), await encode_prompts(body, encoder)
    return await with_worker_params(unpacked(reply["rest"]), encoder), [tuple(ids) for ids in reply["ids"]]


def _with_stored(raw: Blob, stored: bytes | None, payload: dict[str, Any]) -> tuple[Blob, dict[str, Any]]:
    """The blob and payload for a worker."""
    return (raw, payload) if stored is None else (b"".join((raw, stored)), {**payload, "stored": len(stored)})


async def _asked(raw: Blob, payload: dict[str, Any], encoder: Encoder) -> dict[str, Any]:
    try:
        reply = await encoder.ask(payload, len(raw), raw)
    except PromptError as error:
        raise ApiError(str(error), code=error.code) from None
    if "refused" in reply:
        raise ApiError(**reply["refused"])
    return reply


async def tokenize(raw: Blob, served: str, max_model_len: int | None, encoder: Encoder) -> bytes:
    """Answers /tokenize in a worker, as JSON. The text may be longer than the model's context. Raises ApiError or
    TextUnavailable."""
    most = max(max_model_len or 1 << 20, LARGE_BYTES)
    payload = {"endpoint": TOKENIZE, "served": served, "max_ids": most, "max_model_len": max_model_len}
    answer: bytes = (await _asked(raw, payload, encoder))["answer"]
    return answer


async def prepare_line(
    line: BatchLine,
    endpoint: Route,
    served: str,
    max_ids: int,
    encoder: Encoder,
    ids: bool = True,
    load: Load | None = None,
) -> tuple[BatchLine, list[tuple[int, ...]] | ApiError]:
    """Checks a large line of a batch in a worker. Returns the line, its body without prompts, and their ids or the
    error. `ids=False`: only checks it, without the stored responses that it refers to. Raises TextUnavailable."""
    assert line.raw is not None
    place = {"line": [line.number, endpoint], "served": served, "max_ids": max_ids, "ids": ids}
    place["retains"] = load is not None
    stored: bytes | None = None
    try:
        while True:
            blob, payload = _with_stored(line.raw, stored, place)
            reply = await encoder.ask(payload, len(blob), blob)
            if load is None or (missing := reply.get("missing")) is None:
                break
            stored = await load(missing[0], tuple(missing[1]))
    except ApiError as unknown:
        named, _ = await prepare_line(line, endpoint, served, max_ids, encoder, ids=False, load=load)
        return named._replace(body=None, error=unknown), unknown
    except PromptError as error:
        bad = ApiError(f"line {line.number}: {error}", code=error.code)
        named = line._replace(raw=None)
        if ids:  # get its custom_id: checking the form alone costs less, and has succeeded before
            named, _ = await prepare_line(line, endpoint, served, max_ids, encoder, ids=False, load=load)
        return named._replace(body=None, error=bad), bad
    parsed_line = line._replace(raw=None, custom_id=reply.get("custom_id"), url=reply.get("url"))
    if "refused" in reply:
        bad = ApiError(**reply["refused"])
        return parsed_line._replace(error=bad), bad
    try:
        body = unpacked(reply["rest"])
        body = await with_worker_params(body, encoder) if ids else body
    except ApiError as bad:
        return parsed_line._replace(error=bad), bad
    return parsed_line._replace(body=body), [tuple(ids) for ids in reply["ids"]]


def unpacked(rest: dict[str, Any]) -> Body:
    """The Body that a worker has checked, from `packed`."""
    values = {name: _tuples(value) for name, value in rest.items()}
    params = {name: _tuples(value) for name, value in rest["params"].items()}
    if "stored_input" in values:
        values["stored_input"] = StoredInput(values["stored_input"][0], References(*values["stored_input"][1]))
    return Body(**{**values, "params": SamplingParams(**params)})


def _tuples(value: Any) -> Any:
    return tuple([_tuples(item) for item in value]) if type(value) is list else value


# in the worker


class DirectEncoder(Encoder):
    def __init__(self, model: TextModel, max_ids: int) -> None:
        self._model, self._max_ids = model, max_ids

    async def ask(self, payload: dict[str, Any], size: int, blob: Blob = b"") -> dict[str, Any]:
        return worker.answer(self._model, payload, self._max_ids)


def answer(model: TextModel, item: dict[str, Any], max_ids: int) -> dict[str, Any]:
    """Answers an item with a body by {"rest", "ids"}, {"missing"}, {"answer"} or {"refused"}; other items like any text
    worker."""
    if "blob" not in item:
        return worker.answer(model, item, max_ids)
    if (length := item.pop("stored", 0)) != 0:
        item |= {"blob": item["blob"][:-length], "stored": json.loads(item["blob"][-length:])}
    try:
        return (_line if "line" in item else _body)(model, item, min(max_ids, item["max_ids"]))
    except ApiError as bad:
        return _refused(bad)
    except MemoryError:
        message = "the body needs more memory than a text worker may use"
        return _refused(ApiError(message, code="prompt_too_costly"))


def _refused(bad: ApiError) -> dict[str, Any]:
    return {"refused": {"message": bad.message, "code": bad.code, "param": bad.param, "status": bad.status}}


def _line(model: TextModel, item: dict[str, Any], max_ids: int) -> dict[str, Any]:
    """Like `_body`, and adds the line's custom_id and url."""
    (number, endpoint), bodies = item["line"], []

    def bound(body: Any) -> None:
        bodies.append(body)
        try:
            _bound(body, max_ids)
        except ApiError:
            if item["ids"]:
                raise
            body["prompt"] = [0]  # too long: becomes this line's error when its ids are requested

    rules = LineRules(endpoint, retains=item["retains"])
    line = check_line(item["blob"], number, rules, bound, item.get("stored"))
    out = {"custom_id": line.custom_id, "url": line.url}
    if line.error is not None or line.body is None:
        return {**out, **_refused(line.error or ApiError("the line has no body"))}
    if not item["ids"]:
        return {**out, "rest": packed(line.body._replace(echo=False, stored_input=None, missing=None)), "ids": []}
    if line.body.missing is not None:
        return {"missing": line.body.missing}
    try:
        check_model(line.body, item["served"])
        return {**out, **prepared(line.body, DirectEncoder(model, max_ids), max_ids)}
    except ApiError as bad:
        return {**out, **_refused(bad)}


def _body(model: TextModel, item: dict[str, Any], max_ids: int) -> dict[str, Any]:
    value = parsed(item["blob"])
    _bound(value, max_ids)
    here = DirectEncoder(model, max_ids)
    if item["endpoint"] == TOKENIZE:
        body, named = check_tokenize(value, item["served"])
        check_model(body, item["served"])
        (ids,) = asyncio.run(encode_prompts(body, here, TRUNCATED))
        strings = [model.tokenizer.id_to_token(token) for token in ids] if named else None
        fields = {"count": len(ids), "max_model_len": item["max_model_len"], "tokens": ids, "token_strs": strings}
        return {"answer": json.dumps(fields, ensure_ascii=False).encode()}
    body = check_body(value, item["endpoint"], item["retains"], item.get("stored"))
    check_model(body, item["served"])
    return {"missing": body.missing} if body.missing is not None else prepared(body, here, max_ids)


def prepared(body: Body, here: DirectEncoder, max_ids: int) -> dict[str, Any]:
    prompts = asyncio.run(encode_prompts(body, here))
    if (keep := body.truncate_prompt_tokens) is not None:
        prompts = [ids[-(max_ids if keep == -1 else keep) :] for ids in prompts]
    if (count := sum(map(len, prompts))) > (most := max(MAX_IDS, max_ids)):
        message = f"{len(prompts)} prompts have {count} tokens in total: at most {most} in one body, send several"
        raise ApiError(message, param="prompt", code="context_length_exceeded")
    body = body._replace(largest_id=max((max(ids) for ids in prompts if ids), default=0))
    return {"rest": packed(body), "ids": prompts}


def packed(body: Body) -> dict[str, Any]:
    """A checked body as JSON values, without what was needed for its prompts only: the daemon's event loop reads it, so
    its size must not be a client's choice."""
    default = Body(body.endpoint, body.model, body.params)
    rest = {name: value for name, value in body._asdict().items() if value != getattr(default, name)}
    rest |= {"endpoint": body.endpoint, "model": body.model, "params": params_to_json(body.params)}
    rest.pop("template_variables", None)
    if body.responses is not None:
        rest["responses"] = {**body.responses, "tools": [], "instructions": None}
    rest.pop("prompts", None)
    if body.endpoint == CHAT:
        last = body.messages[-1]
        rest["messages"] = [{"role": last["role"], "content": last["content"] if body.echo else ""}]
    elif body.echo:  # the texts are a part of the answer
        texts = body.truncate_prompt_tokens is None and isinstance(body.prompts[0], str)
        rest["prompts"] = body.prompts if texts else [()] * len(body.prompts)
    if body.tools:
        rest["tools"] = _packed_tools(body.tools)
    return rest


def _packed_tools(tools: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tools' names and parameters, with the types of those that may be strings: the others are read as JSON anyway.
    Raises ApiError for more than MAX_PARAMETERS."""
    named = {
        name: {key: {"type": types} if "string" in types else {} for key, types in parameters.items()}
        for name, parameters in parameter_types(tools).items()
    }
    if (count := sum(map(len, named.values()))) > MAX_PARAMETERS:
        raise ApiError(f"tools have {count} parameters, at most {MAX_PARAMETERS} are allowed", param="tools")
    return [
        {"function": {"name": name} | ({"parameters": {"properties": properties}} if properties else {})}
        for name, properties in named.items()
    ]


def _bound(value: Any, max_ids: int) -> None:
    """Refuses prompts with too many ids before their ids are checked. Raises ApiError."""
    prompt = value.get("prompt") if type(value) is dict else None
    if type(prompt) is not list:
        return
    if value.get("truncate_prompt_tokens") is not None:
        max_ids *= TRUNCATED
    for ids in [prompt, *(one for one in prompt[:1024] if type(one) is list)]:
        if len(ids) > max_ids and type(ids[0]) is int:
            message = f"prompt has {len(ids)} tokens, at most {max_ids} are allowed"
            raise ApiError(message, param="prompt", code="context_length_exceeded")


if __name__ == "__main__":
    sys.exit(worker.main(sys.argv[1:], answer))
