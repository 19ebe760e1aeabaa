"""Finds the formats of a chat template's tool calls and reasoning, by rendering probes and parsing them back."""

from __future__ import annotations

import json
import re
from typing import Any

from .call_values import parameter_types
from .chat_formats import REASONING_FORMATS, TOOL_FORMATS
from .chat_parts import ChatParts, message_of
from .chat_shape import PROBE_TOOL, ChatShape, Messages, Render, probe_chat

_USER: Messages = [{"role": "user", "content": "zquser"}]
_SWITCHES: tuple[dict[str, Any], ...] = (
    {}, {"enable_thinking": True, "thinking": True}, {"enable_thinking": False, "thinking": False},
)  # fmt: skip


def find_tool_format(render: Render, shape: ChatShape) -> str | None:
    """The format in which the template renders a call, if the call that is read back is the same."""
    opening = (render(_USER, [PROBE_TOOL]) or "").rpartition("zquser")[2]
    chat = probe_chat()[:2]
    text = (render(shape.shaped(chat), [PROBE_TOOL]) or "").rpartition("zquser")[2]
    common = next((i for i, (a, b) in enumerate(zip(text, opening, strict=False)) if a != b), len(opening))
    function = chat[1]["tool_calls"][0]["function"]
    for name, syntax in TOOL_FORMATS.items():
        answer = text if syntax.opens else text[common:]
        parts = ChatParts(str, name, parameter_types([PROBE_TOOL])).push(answer, last=True)
        calls = message_of(parts).get("tool_calls", [])
        if len(calls) == 1 and calls[0]["function"]["name"] == function["name"]:
            try:
                if json.loads(calls[0]["function"]["arguments"]) == json.loads(function["arguments"]):
                    return name
            except ValueError:
                continue
    return None


def find_reasoning(render: Render, shape: ChatShape) -> str | None:
    """The marks that the template puts around reasoning, opens or closes an answer's reasoning with, or removes."""
    ends = [(render(_USER, None, **switch) or "").rstrip() for switch in _SWITCHES]
    thought = probe_chat()
    thought[1]["reasoning_content"] = "zqthought"
    answer = {"role": "assistant", "content": "zqsaid", "reasoning_content": "zqthought"}
    chats = [thought, [*_USER, answer]]
    shown = [render(shape.shaped(chat), None, **switch) or "" for chat in chats for switch in _SWITCHES[:2]]
    for name, (opens, closes) in REASONING_FORMATS.items():
        if any(end.endswith((opens, closes)) for end in ends):
            return name
        around = re.compile(rf"{re.escape(opens)}\s*zqthought\s*{re.escape(closes)}")
        if any(around.search(text) for text in shown):
            return name
        stripped = [*_USER, {"role": "assistant", "content": f"{opens}zqthought{closes}zqsaid"}, *_USER]
        text = render(shape.shaped(stripped), None) or ""
        if "zqsaid" in text and "zqthought" not in text:
            return name
    return None
