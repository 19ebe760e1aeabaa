"""Log probabilities as JSON values of the chat API, the completions API and vLLM's prompt_logprobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from ..request import TokenLogprob
from ..text.detokenizer import Detokeniser, Pieces

_LOWEST = -9999.0  # JSON has no -Infinity


def _finite(logprob: float) -> float:
    return logprob if logprob > _LOWEST else _LOWEST


class Names(Protocol):
    """Names of tokens: a tokenizer's Pieces, or `TokenIds`."""

    def show(self, token: int) -> str: ...

    def raw(self, token: int) -> bytes: ...


class TokenIds:
    """Unique names for vLLM's return_tokens_as_token_ids."""

    def __init__(self, pieces: Pieces) -> None:
        self.raw = pieces.raw

    def show(self, token: int) -> str:
        return f"token_id:{token}"


def chat_logprobs(items: Sequence[TokenLogprob], pieces: Names, top: int) -> dict[str, Any]:
    """`choices[].logprobs` of /v1/chat/completions."""

    def one(token: int, logprob: float) -> dict[str, Any]:
        return {"token": pieces.show(token), "logprob": _finite(logprob), "bytes": list(pieces.raw(token))}

    content = [{**one(i.token, i.logprob), "top_logprobs": [one(t, p) for t, p in i.top[:top]]} for i in items]
    return {"content": content, "refusal": None}


class Offsets:
    """Computes where each token begins in a growing text, in characters."""

    def __init__(self, detokeniser: Detokeniser) -> None:
        self._detokeniser, self._length = detokeniser, 0

    def place(self, token: int) -> int:
        start = self._length
        self._length += len(self._detokeniser.push((token,)))
        return start


def completion_logprobs(
    items: Sequence[tuple[int, TokenLogprob | None]], pieces: Names, top: int, offsets: Offsets
) -> dict[str, Any]:
    """`choices[].logprobs` of /v1/completions. `items`: (token, its log probability; None for a prompt's first token).
    The chosen token is always in `top_logprobs`; of two tokens with the same name the likelier one is listed."""
    tops: list[dict[str, float] | None] = []
    for _, item in items:
        if item is None:
            tops.append(None)
            continue
        table: dict[str, float] = {}
        for token, logprob in (*item.top[:top], (item.token, item.logprob)):
            table.setdefault(pieces.show(token), _finite(logprob))
        tops.append(table)
    return {
        "tokens": [pieces.show(token) for token, _ in items],
        "token_logprobs": [None if item is None else _finite(item.logprob) for _, item in items],
        "top_logprobs": tops,
        "text_offset": [offsets.place(token) for token, _ in items],
    }


def prompt_logprobs(items: Sequence[TokenLogprob | None], pieces: Pieces, top: int) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: each token and its alternatives by id; `rank` is null if it is not among them."""
    out: list[dict[str, Any] | None] = []
    for item in items:
        if item is None:
            out.append(None)
            continue
        table: dict[str, Any] = {}
        for rank, (token, logprob) in enumerate(item.top, 1):
            if rank <= top or token == item.token:
                table[str(token)] = _entry(logprob, rank, pieces.show(token))
        table.setdefault(str(item.token), _entry(item.logprob, None, pieces.show(item.token)))
        out.append(table)
    return out


def _entry(logprob: float, rank: int | None, shown: str) -> dict[str, Any]:
    return {"logprob": _finite(logprob), "rank": rank, "decoded_token": shown}
