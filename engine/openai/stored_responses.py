"""Stored responses: what is stored of one, and how later bodies refer to it and to its items. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from .errors import ApiError

_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
_ITEM_ID = re.compile(r"[a-z]+_([0-9a-f]{24})_(i?)(\d{1,5})")

Stored = Mapping[str, Mapping[str, Any]]
"""Stored responses by id: `status`, `previous` (an id or None), `input` and `output` (items as JSON values)."""


class References(NamedTuple):
    """The stored responses that a body needs: the one that it continues, and those whose items it refers to."""

    previous: str | None
    of_items: tuple[str, ...]


class StoredInput(NamedTuple):
    """What is stored of a body: the input's items as JSON text, and its references."""

    input: str
    references: References


def item_id(kind: str, base_id: str, index: int, sent: bool = False) -> str:
    """The id of an item of response `resp_{base_id}`: the `index`-th of its output, or of the input that was sent."""
    return f"{_PREFIXES[kind]}_{base_id}_{'i' if sent else ''}{index}"


def response_of(name: str) -> str | None:
    """The id of the response that an item belongs to; None if no item of this server has such an id."""
    match = _ITEM_ID.fullmatch(name)
    return f"resp_{match[1]}" if match else None


def referenced_item(name: str, stored: Stored) -> dict[str, Any]:
    """The item with this id. Raises ApiError (404)."""
    response = stored.get(response_of(name) or "")
    if response is not None:
        items: list[dict[str, Any]] = [*input_items(response["input"], name), *response["output"]]
        if (item := next((item for item in items if item.get("id") == name), None)) is not None:
            return item
    raise unknown_item(name)


def input_items(items: Sequence[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """The items that were sent to a response, with their ids. `name`: the id of the response, or of one of its
    items."""
    base_id = name.split("_")[1]
    return [
        item if item["type"] == "item_reference" else {"id": item_id(item["type"], base_id, index, sent=True), **item}
        for index, item in enumerate(items)
    ]


def conversation(last: str | None, stored: Stored) -> Iterator[dict[str, Any]]:
    """The items of a response and of those that it continues, oldest first. Raises ApiError."""
    if last is not None:
        if stored[last]["status"] == "failed":
            message = f"the response {last!r} failed: continue the one before it"
            raise ApiError(message, "previous_response_failed", "previous_response_id")
        yield from items_before(last, stored)
        yield from stored[last]["output"]


def items_before(name: str, stored: Stored) -> Iterator[dict[str, Any]]:
    """The items that a response follows, oldest first, references resolved. Raises ApiError (404)."""
    names, last = list[str](), stored[name]["previous"]
    while last is not None:
        names.append(last)
        last = stored[last]["previous"]
    for earlier in (*reversed(names), name):
        for item in input_items(stored[earlier]["input"], earlier):
            yield referenced_item(item["id"], stored) if item["type"] == "item_reference" else item
        if earlier != name:
            yield from stored[earlier]["output"]


def unknown_item(name: str) -> ApiError:
    message = f"Item with id {name[:80]!r} not found: it was not stored (store: false), was deleted, or has expired"
    return ApiError(message, "item_not_found", "input", status=404)


def unknown_previous(name: str) -> ApiError:
    message = f"Previous response with id {name[:80]!r} not found: it was not stored, was deleted, or has expired"
    return ApiError(message, "previous_response_not_found", "previous_response_id")


def as_stored(value: Any) -> list[dict[str, Any]]:
    """A checked body's input as a list of items in the form of OpenAI's: kinds and parts named, without ids."""
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    return [_named(item) for item in value]


def _named(item: dict[str, Any]) -> dict[str, Any]:
    kind = item.get("type") or ("item_reference" if item.keys() <= {"id", "type"} else "message")
    if kind == "item_reference":
        return {"type": kind, "id": item["id"]}
    out = {"type": kind, **{name: given for name, given in item.items() if name not in ("id", "type")}}
    if kind == "message" and isinstance(content := item.get("content"), str):
        sent = item["role"] != "assistant"
        part: dict[str, Any] = {"type": "input_text" if sent else "output_text", "text": content}
        out["content"] = [part if sent else {**part, "annotations": []}]
    return out
