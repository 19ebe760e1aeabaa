"""Chooses the form of messages in which a chat template loses nothing, by rendering probe conversations: content as
text or as parts, null or empty content beside tool calls, arguments as an object or as text, ids of calls as sent or
as the template requires, several calls in one turn or one by one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, Literal, Protocol, get_args

Messages = list[dict[str, Any]]
Kind = Literal[
    "user text", "system messages", "assistant text", "system messages alone", "several system messages at the start",
    "system messages after another turn", "tool calls", "tool calls after a system message", "text beside tool calls",
    "several tool calls in one turn",
]  # fmt: skip
SIMPLE_KINDS: tuple[Kind, ...] = ("user text", "system messages", "assistant text")
Content = Literal["text", "parts", "either"]
Ids = Literal["given", "nine", "function"]


class Render(Protocol):
    def __call__(self, messages: Messages, tools: list[dict[str, Any]] | None, **variables: Any) -> str | None:
        """Renders messages and tools, with the opening of an answer; None if the template refuses them."""


_REASONING = ("reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True, slots=True)
class ChatShape:
    """The form of messages for one template. `content` by role; `null_content`: a turn of calls without text has null
    instead of ""; `wrapped`: arguments that are no object become one with the member
    `arguments`; `ids`: as sent, nine characters (Mistral), or `functions.NAME:N` (Kimi); `joined`: system messages at
    the start become one; `filled`: tools have a description and parameters, though empty ones; `apart`: kinds of turns
    that are split into one turn for the text and each call; `lost`: the kinds that the template renders incompletely in
    every form; `refused`: those that it refuses itself."""

    content: dict[str, Content] = field(default_factory=dict)
    null_content: bool = False
    text_arguments: bool = False
    wrapped: bool = False
    ids: Ids = "given"
    reasoning: str = _REASONING[0]
    joined: bool = False
    filled: bool = False
    apart: tuple[Kind, ...] = ()
    lost: tuple[Kind, ...] = ()
    refused: tuple[Kind, ...] = ()

    def __str__(self) -> str:
        parts = sorted(role for role, form in self.content.items() if form == "parts")
        words = [
            f"content of {', '.join(parts)} as parts, else as text" if parts else "content as text",
            f"{'null' if self.null_content else 'empty'} content beside tool calls",
            f"arguments as {'text' if self.text_arguments else 'an object'}",
        ]
        if self.ids != "given":
            words.append("ids of nine characters" if self.ids == "nine" else "ids with the function's name")
        if self.joined:
            words.append("system messages at the start joined")
        if self.filled:
            words.append("tools with a description and parameters")
        if self.apart:
            words.append(f"in turns of their own: {', '.join(self.apart)}")
        return "; ".join(words)

    def refusal(self, messages: Messages) -> str:
        """The first kind of the conversation that the template would lose; "" if there is none."""
        return next((kind for kind in _kinds(messages) if kind in self.lost), "") if self.lost else ""

    def shaped(self, messages: Iterable[dict[str, Any]]) -> Messages:
        """The messages in this form. Arguments are expected as JSON text, which stays text if it is no object."""
        out: Messages = []
        names: dict[str, str] = {}
        for message in self._split(_joined([*messages]) if self.joined else messages):
            shaped = {**message, "content": self._content(message)}
            if (reasoning := shaped.pop("reasoning_content", None)) is not None:
                shaped[self.reasoning] = reasoning
            if calls := message.get("tool_calls"):
                shaped["tool_calls"] = [self._call(call, names) for call in calls]
            if "tool_call_id" in message:
                shaped["tool_call_id"] = names.get(message["tool_call_id"]) or self._id(message["tool_call_id"])
            out.append(shaped)
        return out

    def shaped_tools(self, tools: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """The tools in this form."""
        return [_filled(tool) for tool in tools] if self.filled else [*tools]

    def _content(self, message: dict[str, Any]) -> Any:
        content, form = message.get("content"), self.content.get(message["role"], "text")
        if message.get("tool_calls") and not content:
            return None if self.null_content else [] if form == "parts" else ""
        if form == "parts" and not isinstance(content, list):
            return [_part(content or "")]
        if isinstance(content, list) and form == "text":
            return "\n".join(part["text"] for part in content)
        return content or ""

    def _call(self, call: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
        function, given = call["function"], call["function"]["arguments"]
        if isinstance(given, str) and not self.text_arguments:
            given = _object(given, self.wrapped)
        elif not isinstance(given, str) and self.text_arguments:
            given = json.dumps(given, ensure_ascii=False)
        named = f"functions.{function['name']}:{len(names)}" if self.ids == "function" else self._id(call["id"])
        names[call["id"]] = named
        return {**call, "id": named, "function": {**function, "arguments": given}}

    def _id(self, sent: str) -> str:
        if self.ids != "nine" or (len(sent) == 9 and sent.isalnum() and sent.isascii()):
            return sent
        return hashlib.sha256(sent.encode(errors="surrogatepass")).hexdigest()[:9]

    def _split(self, messages: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Gives each call, followed by its answers, and the text before them a turn of its own where needed."""
        waiting: Messages = []
        for message in messages:
            if message["role"] == "tool" and waiting:
                at = next((i for i, turn in enumerate(waiting) if _answers(message, turn)), 0)
                yield waiting.pop(at)
                yield message
                continue
            yield from waiting
            waiting, calls = [], message.get("tool_calls") or ()
            if not calls or not {*_kinds([message])} & {*self.apart}:
                yield message
                continue
            turns = [[call] for call in calls] if "several tool calls in one turn" in self.apart else [list(calls)]
            head = {name: value for name, value in message.items() if name not in ("content", "tool_calls")}
            waiting = [{"role": message["role"], "content": None, "tool_calls": turn} for turn in turns]
            if message.get("content") and "text beside tool calls" in self.apart:
                yield {**head, "content": message["content"]}
            else:
                waiting[0] = {**head, "content": message.get("content"), "tool_calls": turns[0]}
        yield from waiting


def _joined(messages: Messages) -> Messages:
    """The messages with those of the system at the start in one."""
    count = next((at for at, message in enumerate(messages) if message["role"] != "system"), len(messages))
    if count < 2:
        return messages
    contents = [message["content"] for message in messages[:count]]
    parts = [part for content in contents for part in (content if isinstance(content, list) else [_part(content)])]
    return [{**messages[0], "content": parts}, *messages[count:]]


def _part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _filled(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool["function"]
    parameters = {"type": "object", "properties": {}, **(function.get("parameters") or {})}
    return {**tool, "function": {"description": "", **function, "parameters": parameters}}


def _answers(answer: dict[str, Any], turn: dict[str, Any]) -> bool:
    return any(call["id"] == answer.get("tool_call_id") for call in turn["tool_calls"])


def _object(arguments: str, wrapped: bool) -> Any:
    """The object that arguments are in text; their text if they are none, as in an answer that was cut off."""
    value: Any = None
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(arguments or "{}", strict=False)
    return value if isinstance(value, dict) else {"arguments": arguments} if wrapped else arguments


def _kinds(messages: Messages) -> Iterator[Kind]:
    """The kinds of conversation that these messages contain."""
    system = other = False
    if all(message["role"] == "system" for message in messages):
        yield "system messages alone"
    for message in messages:
        role, calls = message["role"], message.get("tool_calls") or ()
        if role == "system" and (system or other):
            yield "system messages after another turn" if other else "several system messages at the start"
        system, other = system or role == "system", other or role != "system"
        if calls:
            yield "tool calls"
            if system:
                yield "tool calls after a system message"
            if message.get("content"):
                yield "text beside tool calls"
            if len(calls) > 1:
                yield "several tool calls in one turn"
        elif kind := _KIND_OF.get(role):
            yield kind


_KIND_OF: dict[str, Kind] = {"user": "user text", "system": "system messages", "assistant": "assistant text"}

# probes: words that no template contains
_KEY, _FUNCTION = "zqkey", "zqlookup"
PROBE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": _FUNCTION,
        "description": "zqabout",
        "parameters": {
            "type": "object",
            "properties": {_KEY: {"type": "string", "description": "zqmeans"}},
            "required": [_KEY],
        },
    },
}


def probe_call(number: int) -> dict[str, Any]:
    function = {"name": _FUNCTION, "arguments": json.dumps({_KEY: f"zqvalue{number}"})}
    return {"id": f"call_zqid{number}", "type": "function", "function": function}


def probe_chat(calls: int = 1, content: str | None = None, system: bool = False, later: bool = False) -> Messages:
    """A user's question, an assistant's calls with their answers and, `later`, an answer and another question."""
    chat: Messages = [{"role": "system", "content": "zqsystem"}] * system
    chat += [{"role": "user", "content": "zquser"}]
    chat += [{"role": "assistant", "content": content, "tool_calls": [probe_call(n) for n in range(calls)]}]
    chat += [{"role": "tool", "tool_call_id": f"call_zqid{n}", "content": f"zqanswer{n}"} for n in range(calls)]
    return chat + [{"role": "assistant", "content": "zqsaid"}, {"role": "user", "content": "zqnext"}] * later


class _Probe:
    """Renders probes with one template. `tools`: whether its conversations have tools."""

    def __init__(self, render: Render, tools: bool) -> None:
        self._render, self._tools = render, [PROBE_TOOL] if tools else None
        self._bare = [{"type": "function", "function": {"name": _FUNCTION}}] if tools else []
        self._without = render([{"role": "user", "content": "zquser"}], self._tools) or ""

    def text(self, shape: ChatShape, chat: Messages) -> str | None:
        return self._render(shape.shaped(chat), self._tools)

    def keeps(self, shape: ChatShape, chat: Messages) -> bool:
        """Whether the template renders all text of the conversation, and no value as Python or escaped JSON."""
        text = self.text(shape, chat)
        if text is None:
            return False
        calls = [call for message in chat for call in message.get("tool_calls", ())]
        words = [message["content"] for message in chat if message["content"]]
        words += [value for call in calls for value in json.loads(call["function"]["arguments"]).values()]
        if not all(word in text for word in words) or "'type': 'text'" in text or '"type": "text"' in text:
            return False
        if not calls:
            return True
        named = [text.count(word) - self._without.count(word) for word in (_FUNCTION, _KEY)]
        odd = [text.count(word) > self._without.count(word) for word in (f"'{_KEY}'", f'\\"{_KEY}', "None")]
        return min(named) >= len(calls) and not any(odd)

    def fills(self) -> bool:
        """Whether the template renders a tool without description and parameters only if they are added."""
        user: Messages = [{"role": "user", "content": "zquser"}]
        filled = [_filled(tool) for tool in self._bare]
        return bool(filled) and self._render(user, self._bare) is None and self._render(user, filled) is not None

    def judged(self, shape: ChatShape, bad: list[tuple[Kind, list[Messages]]], forms: list[ChatShape]) -> ChatShape:
        """The shape with its `lost` and `refused` kinds."""
        lost = [
            kind
            for kind, chats in bad
            if any(self.text(form, chat) is not None and not self.keeps(form, chat) for form in forms for chat in chats)
        ]
        return replace(shape, lost=tuple(lost), refused=tuple(kind for kind, _ in bad if kind not in lost))

    def all(self, shape: ChatShape, **options: Any) -> bool:
        return all(self.keeps(shape, probe_chat(**options, later=later)) for later in (False, True))

    def content(self) -> dict[str, Content]:
        """The form of content that each role's turns need."""
        forms: dict[str, Content] = {}
        parts = [{"type": "text", "text": "zqpart1"}, {"type": "text", "text": "zqpart2"}]
        user: dict[str, Any] = {"role": "user", "content": "zquser"}
        for role in ("user", "system", "assistant", "tool"):
            takes = []
            for form, content in (("text", "zqtext"), ("parts", parts)):
                turn: dict[str, Any] = {"role": role, "content": content}
                chat = [turn] if role == "user" else [turn, user] if role == "system" else [user, turn, user]
                if role == "tool":
                    chat = [*probe_chat()[:2], {**turn, "tool_call_id": "call_zqid0"}]
                tried = ChatShape({**forms, role: form})  # type: ignore[dict-item]
                shapes = [tried] if role != "tool" else [replace(tried, **other) for other in _call_forms()]
                if any(self._has(shape, chat, content) for shape in shapes):
                    takes.append(form)
            forms[role] = "either" if len(takes) == 2 else "parts" if takes == ["parts"] else "text"
            user = {"role": "user", "content": "zquser"}
        return forms

    def _has(self, shape: ChatShape, chat: Messages, content: str | list[dict[str, str]]) -> bool:
        text = self.text(shape, chat) or ""
        words = [content] if isinstance(content, str) else [part["text"] for part in content]
        return all(word in text for word in words) and "'type': 'text'" not in text and '"type": "text"' not in text


def _call_forms() -> list[dict[str, Any]]:
    forms = product((False, True), get_args(Ids), (False, True))
    return [{"text_arguments": text, "ids": ids, "null_content": null} for text, ids, null in forms]


def choose_shape(render: Render) -> ChatShape:
    """The form in which the template of `render` loses nothing, and what it loses in every form."""
    probe = _Probe(render, tools_are_rendered(render))
    shape = ChatShape(probe.content(), filled=probe.fills())
    user: Messages = [{"role": "user", "content": "zquser"}]
    simple: list[tuple[Kind, Messages]] = [
        ("user text", user),
        ("system messages", [{"role": "system", "content": "zqsystem"}, *user]),
        ("assistant text", [*user, {"role": "assistant", "content": "zqsaid"}, {"role": "user", "content": "zqnext"}]),
    ]
    bad = [(kind, [chat]) for kind, chat in simple if not probe.keeps(shape, chat)]
    if "system messages" not in dict(bad):
        system: Messages = [{"role": "system", "content": "zqsystem"}]
        other: Messages = [{"role": "system", "content": "zqother"}]
        joined = replace(shape, joined=True)
        if not probe.keeps(shape, [*system, *other, *user]) and probe.keeps(joined, [*system, *other, *user]):
            shape = joined
        several: list[tuple[Kind, list[Messages]]] = [
            ("system messages alone", [system]),
            ("several system messages at the start", [[*system, *other, *user]]),
            ("system messages after another turn", [[*user, *other], [*system, *user, *other, *user]]),
        ]
        bad += [(kind, chats) for kind, chats in several if not all(probe.keeps(shape, chat) for chat in chats)]
    forms = [replace(shape, **form) for form in _call_forms()]
    usable = [form for form in forms if probe.all(form)] or [form for form in forms if probe.keeps(form, probe_chat())]
    if not usable:
        bad += [(kind, [probe_chat()[:2], probe_chat()]) for kind in get_args(Kind) if "calls" in kind]
        return probe.judged(shape, bad, forms)
    usable = [form for form in usable if (form.text_arguments, form.ids) == (usable[0].text_arguments, usable[0].ids)]
    # the form that adds an empty turn is longer
    shape = min(usable, key=lambda form: len(probe.text(form, probe_chat()) or ""))
    chat = probe_chat()
    chat[1]["tool_calls"][0]["function"]["arguments"] = "zqraw"
    shape = replace(shape, wrapped="zqraw" not in (probe.text(shape, chat) or ""))
    for name in _REASONING:
        chat = probe_chat()
        chat[1]["reasoning_content"] = "zqthought"
        if "zqthought" in (probe.text(replace(shape, reasoning=name), chat) or ""):
            shape = replace(shape, reasoning=name)
            break
    more: list[tuple[Kind, dict[str, Any]]] = [
        ("tool calls after a system message", {"system": True}),
        ("text beside tool calls", {"content": "zqbeside"}),
        ("several tool calls in one turn", {"calls": 2}),
    ]
    for kind, options in more:
        apart = replace(shape, apart=(*shape.apart, kind))
        if probe.all(shape, **options):
            continue
        if "system" not in options and probe.all(apart, **options):
            shape = apart
        else:
            bad.append((kind, [probe_chat(**options, later=later) for later in (False, True)]))
    return probe.judged(shape, bad, [shape])


def tools_are_rendered(render: Render) -> bool:
    return _FUNCTION in (render([{"role": "user", "content": "zquser"}], [PROBE_TOOL]) or "")
