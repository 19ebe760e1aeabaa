"""The answers of /v1/responses: a chat's parts become output items, and the events by which they grow."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from ...topology.json_codec import one_line
from ..text.chat_parts import Part
from .answers import Answer
from .choice import Delta
from .errors import ApiError
from .stored_responses import item_id


class Items:
    """Output items of one answer, and the events by which they grow."""

    def __init__(self, answer_id: str) -> None:
        self._id = answer_id
        self.output: list[dict[str, Any]] = []
        self._open = False

    def add(self, part: Part) -> Iterable[dict[str, Any]]:
        """Adds a chat's part; yields the events."""
        if "tool_calls" in part:
            (call,) = part["tool_calls"]
            if "id" in call:
                head = {"call_id": call["id"], "name": call["function"]["name"], "arguments": ""}
                yield from self._begin("function_call", head)
            if arguments := call["function"]["arguments"]:
                self.output[-1]["arguments"] += arguments
                yield self._event("function_call_arguments.delta", delta=arguments)
            return
        reasons = "reasoning_content" in part
        kind = "reasoning" if reasons else "message"
        fields: dict[str, Any] = {"summary": []} if reasons else {"role": "assistant"}
        if not (self._open and self.output[-1]["type"] == kind):
            yield from self._begin(kind, {**fields, "content": []})
            empty = {"type": "reasoning_text", "text": ""} if reasons else _output_text("")
            self.output[-1]["content"] = [empty]
            yield self._event("content_part.added", content_index=0, part=dict(empty))
        text = part["reasoning_content"] if reasons else part["content"]
        self.output[-1]["content"][0]["text"] += text
        more: dict[str, Any] = {} if reasons else {"logprobs": []}
        yield self._event(
            "reasoning_text.delta" if reasons else "output_text.delta", content_index=0, delta=text, **more
        )

    def end(self, status: str = "completed") -> Iterable[dict[str, Any]]:
        """Ends the last item."""
        if not self._open:
            return
        self._open, item = False, self.output[-1]
        if item["type"] == "function_call":
            yield self._event("function_call_arguments.done", name=item["name"], arguments=item["arguments"])
        else:
            part, reasons = item["content"][0], item["type"] == "reasoning"
            more: dict[str, Any] = {} if reasons else {"logprobs": []}
            name = "reasoning_text.done" if reasons else "output_text.done"
            yield self._event(name, content_index=0, text=part["text"], **more)
            yield self._event("content_part.done", content_index=0, part=part)
        item["status"] = status
        yield {"type": "response.output_item.done", "output_index": len(self.output) - 1, "item": item}

    def _begin(self, kind: str, fields: dict[str, Any]) -> Iterable[dict[str, Any]]:
        yield from self.end()
        index, self._open = len(self.output), True
        item = {"id": item_id(kind, self._id, index), "type": kind, "status": "in_progress", **fields}
        self.output.append(item)
        yield {"type": "response.output_item.added", "output_index": index, "item": dict(item)}

    def _event(self, name: str, /, **fields: Any) -> dict[str, Any]:
        index = len(self.output) - 1
        return {"type": f"response.{name}", "item_id": self.output[-1]["id"], "output_index": index, **fields}


def _output_text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def response_of(answer: Answer, output: list[dict[str, Any]], status: str) -> dict[str, Any]:
    """The response object with these items."""
    usage, error = answer.usage(), answer.error
    details = usage.get("completion_tokens_details", {"reasoning_tokens": 0})
    return {
        "id": f"resp_{answer.base_id}",
        "object": "response",
        "created_at": answer.created,
        "status": status,
        "error": None if error is None else {"code": _error_code(error), "message": error.message},
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "model": answer.body.model,
        "output": output,
        "usage": None
        if status == "in_progress"
        else {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": details,
            "total_tokens": usage["total_tokens"],
        },
        **(answer.body.responses or {}),
    }


def whole_answer(answer: Answer) -> dict[str, Any]:
    """The body of a finished answer, of its endpoint."""
    return answer.response() if answer.body.responses is None else whole_response(answer)


def _error_code(error: ApiError) -> str:
    """The code of a response's error, one of OpenAI's."""
    return {429: "rate_limit_exceeded", 400: "invalid_prompt"}.get(error.status or 0, "server_error")


def whole_response(answer: Answer) -> dict[str, Any]:
    """The response of a finished answer, or of one that failed."""
    items = Items(answer.base_id)
    for part in answer.parts:
        list(items.add(part))
    status, item_status = _statuses(answer)
    list(items.end(item_status))
    return response_of(answer, items.output, status)


def _statuses(answer: Answer) -> tuple[str, str]:
    """The status of an ended answer's response, and of its last item."""
    if answer.error is not None:
        return "failed", "incomplete"
    return ("incomplete", "incomplete") if answer.finish == "length" else ("completed", "completed")


class ResponseWriter:
    """Makes the server-sent events of one answer."""

    def __init__(self) -> None:
        self._items: Items | None = None
        self._number = 0

    def of(self, answer: Answer, delta: Delta) -> bytes:
        """The events for a delta; b"" while text is held back."""
        out = self._begun(answer)
        parts = [*delta.chat_parts, *([{"content": delta.text}] if delta.text else [])]
        assert self._items is not None
        for part in parts:
            out += b"".join(map(self._event, self._items.add(part)))
        return out

    def end(self, answer: Answer) -> bytes:
        """The last events."""
        out = self._begun(answer)
        assert self._items is not None
        status, item_status = _statuses(answer)
        out += b"".join(map(self._event, self._items.end(item_status)))
        response = response_of(answer, self._items.output, status)
        return out + self._event({"type": f"response.{status}", "response": response})

    def failed(self, error: ApiError) -> bytes:
        """The last event of a stream that ends before its answer."""
        return self._event({"type": "error", "code": error.code, "message": error.message, "param": error.param})

    def _begun(self, answer: Answer) -> bytes:
        if self._items is not None:
            return b""
        self._items = Items(answer.base_id)
        response = response_of(answer, [], "in_progress")
        names = ("response.created", "response.in_progress")
        return b"".join(self._event({"type": name, "response": response}) for name in names)

    def _event(self, value: dict[str, Any]) -> bytes:
        numbered = {**value, "sequence_number": self._number}
        self._number += 1
        data = one_line(json.dumps(numbered, ensure_ascii=False, separators=(",", ":")))
        return f"event: {value['type']}\ndata: {data}\n\n".encode()
