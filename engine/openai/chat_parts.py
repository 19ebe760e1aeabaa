"""Splits a chat's text incrementally into reasoning, content and tool calls; the result does not depend on how the text
is divided. A call is emitted complete, except that the arguments of a tool that `tool_choice` names are streamed.
Formats: Hermes and Qwen (<tool_call>{"name", "arguments"}</tool_call> anywhere), Llama 3.1 to 3.3 ({"name",
"parameters"} first, several separated by semicolons), and an array of such objects if a call is required (tools.py).
All other text is content.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

from ..text.detokenizer import held_back
from ..text.tokenizer import ToolFormat

Part = dict[str, Any]
_THINK, _THOUGHT = "<think>", "</think>"
_CALL, _CALLED = "<tool_call>", "</tool_call>"
_PYTHON = "<|python_tag|>"
_BLANK = " \n\t\r"  # JSON's white space


class _Braces:
    """Finds the end of the JSON object at the beginning of a growing text."""

    def __init__(self) -> None:
        self._at = self._depth = 0
        self._string = self._escaped = False

    def end(self, text: str) -> int | None:
        """The index after its last brace; None if it is not complete."""
        for at in range(self._at, len(text)):
            char = text[at]
            if self._string:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._string = False
            elif char == '"':
                self._string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return at + 1
        self._at = len(text)
        return None


class ChatParts:
    """The parts of one choice. `thinking`: None if the model does not reason, else whether the prompt ends with the
    opening mark. `tools`: the names that may be called; `forced`: the named tool, whose arguments are the whole text;
    `call_id`: makes the id of the n-th call; `parallel=False`: calls after the first are left out."""

    def __init__(
        self,
        call_id: Callable[[int], str],
        form: ToolFormat | None = None,
        tools: Iterable[str] = (),
        forced: str = "",
        thinking: bool | None = None,
        parallel: bool = True,
    ) -> None:
        self._call_id, self._form, self._tools, self._forced = call_id, form, frozenset(tools), forced
        self._parallel = parallel
        self.calls = 0
        self._held = ""
        self._strip = False  # remove line breaks after reasoning or a call
        self._braces = _Braces()
        self._state = self._content if thinking is None else self._reasoning if thinking else self._begin

    def push(self, text: str, last: bool = False) -> list[Part]:
        """Adds text; returns a message's deltas: `content`, `reasoning_content` or `tool_calls`."""
        self._held += text
        parts = []
        while (part := self._state(last)) is not None:
            if part:
                parts.append(part)
        return parts

    # states: each returns the next part, {} if the state changed without one, None if more text is needed

    def _begin(self, last: bool) -> Part | None:
        text = self._held.lstrip()
        if text.startswith(_THINK):
            self._held, self._state = text[len(_THINK) :], self._reasoning
        elif last or not _THINK.startswith(text):
            self._state = self._content
        else:
            return None
        return {}

    def _reasoning(self, last: bool) -> Part | None:
        text, ended = self._until(_THOUGHT, last)
        if ended:
            self._strip, self._state = True, self._content
        return {"reasoning_content": text} if text else {} if ended else None

    def _content(self, last: bool) -> Part | None:
        if self._strip:
            self._held = self._held.lstrip("\n")
            self._strip = not self._held
        if not self._held:
            return None
        if self._forced:
            return self._arguments()
        if self._form == "hermes":
            text, ended = self._until(_CALL, last)
            if ended:
                self._state = self._marked
            return {"content": text} if text else {} if ended else None
        if self._form is not None:
            self._state = self._objects
            return {}
        return self._plain(last)

    def _plain(self, last: bool) -> Part | None:
        text, self._held, self._state = self._held, "", self._plain
        return {"content": text} if text else None

    def _marked(self, last: bool) -> Part | None:
        at = self._held.find(_CALLED)
        if at < 0 and not last:
            return None
        raw, self._held = (self._held, "") if at < 0 else (self._held[:at], self._held[at + len(_CALLED) :])
        self._state, call = self._content, self._call(raw) if at >= 0 else None
        if call is None:
            return {"content": _CALL + raw + (_CALLED if at >= 0 else "")}
        self._strip = True
        return call

    def _objects(self, last: bool) -> Part | None:
        text = self._held.lstrip(_BLANK + ";,[]" if self.calls or self._form == "array" else _BLANK)
        if self._form == "llama" and not self.calls:
            text = text.removeprefix(_PYTHON)
            if _PYTHON.startswith(text) and not last:
                return None
        if self.calls or text.startswith("{"):
            self._held = text
        if not text.startswith("{"):
            return self._plain(last) if text or last else None
        end = self._braces.end(text)
        if end is None:
            return self._plain(last) if last else None
        self._braces, call = _Braces(), self._call(text[:end])
        if call is None:
            return self._plain(last)
        self._held = text[end:]
        return call

    def _arguments(self) -> Part:
        arguments, self._held = self._held, ""
        if self.calls:
            return {"tool_calls": [{"index": 0, "function": {"arguments": arguments}}]}
        return self._made(self._forced, arguments)

    def _until(self, mark: str, last: bool) -> tuple[str, bool]:
        """Takes the held text before `mark`; returns it and whether the mark was found. Keeps a suffix that may be the
        beginning of the mark, unless `last`."""
        at = self._held.find(mark)
        if at >= 0:
            text, self._held = self._held[:at], self._held[at + len(mark) :]
            return text, True
        suffix = 0 if last else held_back(self._held, (mark,))
        cut = len(self._held) - suffix
        text, self._held = self._held[:cut], self._held[cut:]
        return text, False

    def _call(self, raw: str) -> Part | None:
        try:
            value = json.loads(raw)
            # raises for values that JSON text cannot have: a lone surrogate, NaN or an infinity (1e999)
            json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
        except (ValueError, RecursionError):
            return None
        name = value.get("name") if isinstance(value, dict) else None
        if not isinstance(name, str) or name not in self._tools:
            return None
        given = value.get("arguments", value.get("parameters", {}))
        if self.calls and not self._parallel:
            return {}
        if isinstance(given, str):
            return self._made(name, given)
        return self._made(name, json.dumps(given, ensure_ascii=False)) if isinstance(given, dict) else None

    def _made(self, name: str, arguments: str) -> Part:
        index = self.calls
        self.calls += 1
        function = {"name": name, "arguments": arguments}
        return {"tool_calls": [{"index": index, "id": self._call_id(index), "type": "function", "function": function}]}


def message_of(parts: Iterable[Part]) -> Part:
    """Joins parts into a message: `content` (None if there are only calls), `reasoning_content` and `tool_calls`."""
    content = reasoning = ""
    calls: list[Part] = []
    for part in parts:
        content += part.get("content", "")
        reasoning += part.get("reasoning_content", "")
        for call in part.get("tool_calls", ()):
            if call["index"] == len(calls):
                calls.append({"id": call["id"], "type": "function", "function": {**call["function"]}})
            else:
                calls[-1]["function"]["arguments"] += call["function"]["arguments"]
    made: Part = {"content": content or (None if calls else "")}
    if reasoning:
        made["reasoning_content"] = reasoning
    return {**made, "tool_calls": calls} if calls else made
