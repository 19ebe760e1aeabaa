"""Splits a chat's answer incrementally into reasoning, content and tool calls; the result does not depend on how the
text is divided. Arguments are emitted as they come. What does not parse as a call of an existing tool is content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from .call_values import (
    BLANK,
    PYTHON_WORDS,
    USELESS,
    JsonValue,
    ParameterTypes,
    parsed_json,
    says_nothing,
    text_of_string,
    typed_json,
    unquoted,
)
from .chat_formats import CHANNEL, CHANNEL_HEADS, HEAD, REASONING_FORMATS, RECIPIENT, TOOL_FORMATS
from .detokenizer import Detokeniser, OutputText, held_back

Part = dict[str, Any]
_SURPLUS = re.compile(r"[\s}\],;`]*")
_MORE = re.compile(r'\s*,\s*"')
_LITERAL = re.compile(r"(?:null|true|false|-?\d[\d.eE+-]*)(?=[\s,\[}\]<])")
_LITERAL_BEGUN = re.compile(r"n(?:u(?:ll?)?)?|t(?:r(?:ue?)?)?|f(?:a(?:l(?:se?)?)?)?|-?(?:\d[\d.eE+-]*)?")
_NEAR = 64  # white space and marks that may follow a pair
_BLANKS = 256  # so many before a call are content


class ChatParts:
    """The parts of one choice. `tool_format`, `reasoning`: names in chat_formats.py, None without; `thinking`: whether
    the prompt ends with the opening mark of reasoning. `tools`: those that may be called, with the types of their
    parameters; `forced`: the named tool, whose arguments are all of the text; `call_id`: makes the id of the n-th call;
    `parallel=False`: calls after the first are left out."""

    def __init__(
        self,
        call_id: Callable[[int], str],
        tool_format: str | None = None,
        tools: Mapping[str, ParameterTypes] | None = None,
        forced: str = "",
        reasoning: str | None = None,
        thinking: bool = False,
        parallel: bool = True,
    ) -> None:
        self._call_id, self._tools, self._forced, self._parallel = call_id, tools or {}, forced, parallel
        self._syntax = None if tool_format is None else TOOL_FORMATS[tool_format]
        self._open, self._close = ("", "") if reasoning is None else REASONING_FORMATS[reasoning]
        self.calls = 0
        self.unparsed = 0
        """Texts that look like a call and are none."""
        self._held = ""
        self._at_head = True  # of a message of a channel
        self._said = False  # there is content
        self._blank = ""  # before what may be a call: of a call it is no content
        self._strip = False  # remove line breaks after reasoning
        self._scan, self._scanned = JsonValue(), 0
        self._value_text = ""  # of arguments that are no object, or an object read to its end
        self._silent = False  # the call is left out
        self._keys: list[str] = []
        self._spare = ""  # within a call, and none of it
        self._closed = False  # a mark closed the last call: what follows is content
        self._types: ParameterTypes = {}
        self._thinking, self._channels = thinking, "gpt_oss" in (tool_format, reasoning)
        self._state = self._content if reasoning is None else self._begin

    @property
    def reasoning(self) -> bool:
        """Whether the next token belongs to the reasoning."""
        return self._state == self._reasoning or (self._thinking and self._state == self._begin)

    def push(self, text: str, last: bool = False) -> list[Part]:
        """Adds text; returns a message's deltas: `content`, `reasoning_content` or `tool_calls`."""
        self._held += text
        parts = []
        while (part := self._state(last)) is not None:
            if part:
                parts.append(part)
        if last and (part := self._spared()):  # of a call that has not ended
            parts.append(part)
        return parts

    # states: each returns the next part, {} if the state changed without one, None if more text is needed

    def _begin(self, last: bool) -> Part | None:
        text = self._held.lstrip()
        if text.startswith(self._open):
            self._held, self._state = text[len(self._open) :], self._reasoning
        elif last or not self._open.startswith(text):
            self._state = self._reasoning if self._thinking else self._content
        else:
            return None
        return {}

    def _reasoning(self, last: bool) -> Part | None:
        """Calls that no closing mark precedes end the reasoning at the answer's end: they may be quoted until then."""
        at = self._held.find(self._close)
        opens = self._syntax.opens if self._syntax else ()
        call = min((i for i in map(self._held.find, opens) if i >= 0), default=-1) if at < 0 else -1
        if at >= 0 or (call >= 0 and last):
            text, self._held = self._held[: max(at, call)], self._held[call if at < 0 else at + len(self._close) :]
            self._strip, self._state, self._at_head = True, self._content, True
            return {"reasoning_content": text} if text else {}
        cut = call if call >= 0 else len(self._held) - (0 if last else held_back(self._held, (self._close, *opens)))
        text, self._held = self._held[:cut], self._held[cut:]
        return {"reasoning_content": text} if text else None

    def _content(self, last: bool) -> Part | None:
        if self._strip:
            self._held = self._held.lstrip("\n")
            self._strip = not self._held
        if not self._held:
            return None
        if self._channels and self._at_head:
            return self._head(last)
        if self._forced:
            return self._forced_arguments()
        if self._channels and self._syntax in (None, TOOL_FORMATS["gpt_oss"]):
            return self._message(last)
        if self._syntax is None:
            return self._plain(last)
        if not self._syntax.opens:
            return self._beginning(last)
        starts = [i for i in map(self._held.find, self._syntax.opens) if i >= 0]
        cut = min(starts) if starts else len(self._held) - (0 if last else held_back(self._held, self._syntax.opens))
        blank = not self._said and cut < _BLANKS and not self._held[:cut].strip(BLANK)
        if blank and not (starts or last):
            return None
        text, self._held = self._held[:cut], self._held[cut:]
        if blank and starts:
            text, self._blank = "", text
        self._said = self._said or bool(text)
        if starts:
            self._start_call()
        return {"content": text} if text else {} if starts else None

    def _head(self, last: bool) -> Part | None:
        """What stands before a message of a channel; a grammar may have left it out."""
        head, mark, rest = self._held.partition("<|message|>")
        if not self._held.startswith(CHANNEL_HEADS):
            if not last and any(begin.startswith(self._held) for begin in CHANNEL_HEADS):
                return None
            self._at_head = False
            return {}
        if not mark:
            return self._plain(last) if last else None
        recipient, channel, other = RECIPIENT.search(head), CHANNEL.search(head), HEAD.sub("", head)
        self._at_head = False
        if other.strip() and (recipient is None or recipient[1] in self._tools):
            self._spare = other
        if recipient is not None:
            if recipient[1] not in self._tools:
                self.unparsed += 1
                return self._plain(last)
            self._held, self._scan, self._scanned, self._value_text = rest, JsonValue(), 0, ""
            self._state = self._arguments
            return self._made(recipient[1], "")
        self._held = rest
        if channel is not None and channel[1] == "analysis":
            self._state = self._reasoning
        return self._spared()

    def _message(self, last: bool) -> Part | None:
        """The text of a message, to the mark that ends it."""
        ends = ("<|end|>", "<|start|>assistant")
        cut = min((i for i in map(self._held.find, ends) if i >= 0), default=-1)
        if cut < 0:
            cut = len(self._held) - (0 if last else held_back(self._held, ends))
            text, self._held = self._held[:cut], self._held[cut:]
            return {"content": text} if text else None
        text, self._held, self._at_head = self._held[:cut], self._held[cut:].removeprefix("<|end|>"), True
        return {"content": text} if text else {}

    def _plain(self, last: bool) -> Part | None:
        text, self._held, self._state = self._held, "", self._plain
        return {"content": text} if text else None

    def _beginning(self, last: bool) -> Part | None:
        """Waits for the beginning of a call at that of the answer."""
        assert self._syntax is not None
        text = self._held.lstrip(BLANK)
        for mark in self._syntax.marks:
            text = text.removeprefix(mark).lstrip(BLANK)
            if mark.startswith(text) and not last:
                return None
        if text[:1] not in ("{", "["):
            return self._plain(last) if text or last else None
        self._start_call()
        return {}

    def _start_call(self) -> None:
        self._state, self._scan, self._scanned = self._call, JsonValue(), 0

    def _call(self, last: bool) -> Part | None:
        syntax = self._syntax
        assert syntax is not None
        for header in syntax.headers:
            if (match := header.match(self._held)) is not None:
                name = unquoted(match["name"])
                if name not in self._tools:
                    return self._fail(last)
                self._held = self._held[match.end() :]
                self._scan, self._scanned, self._value_text, self._keys = JsonValue(), 0, "", []
                self._state = self._arguments if syntax.pair is None else self._next_pair
                return self._made(name, "")
        start = self._lead()
        if syntax.objects and self._held.startswith("{", start):
            return self._object(start, last)
        blank = len(self._held) == start
        if last or any(mark in self._held for mark in syntax.closes):
            return self._fail(last)
        return self._fail(last) if syntax.objects and not blank and len(syntax.headers) == 1 else None

    def _lead(self) -> int:
        """The number of characters before a call's object."""
        assert self._syntax is not None
        marks = (*self._syntax.opens, *(self._syntax.marks if not self._syntax.opens else ()))
        text = self._held.lstrip(BLANK) if not self._syntax.opens else self._held
        at = len(self._held) - len(text) + next((len(mark) for mark in marks if text.startswith(mark)), 0)
        while at < len(self._held) and self._held[at] in BLANK + "[,;":
            at += 1
        return at

    def _object(self, start: int, last: bool) -> Part | None:
        """A call whose name does not come first: it is emitted when its object is complete."""
        _, length = self._scan.feed(self._held[max(start, self._scanned) :])
        self._scanned = max(start, self._scanned) + length
        if not self._scan.ended:
            return self._fail(last) if last else None
        try:
            value = parsed_json(self._held[start : self._scanned])
        except (ValueError, RecursionError):
            return self._fail(last)
        value = value["function"] if isinstance(value.get("function"), dict) else value
        name = value.get("name")
        if not isinstance(name, str) or name not in self._tools:
            return self._fail(last)
        arguments = value.get("arguments", value.get("parameters"))
        if others := {key: value[key] for key in value.keys() - {"name", "arguments", "parameters", *USELESS}}:
            if arguments is None:
                return self._fail(last)
            self._spare = json.dumps(others, ensure_ascii=False)
        if not isinstance(arguments, str):
            arguments = "{}" if arguments is None else json.dumps(arguments, ensure_ascii=False)
        self._held, self._state = self._held[self._scanned :], self._after
        return self._made(name, arguments)

    def _fail(self, last: bool) -> Part:
        """Returns the mark, or the first character, as content; goes on with the rest."""
        assert self._syntax is not None
        self.unparsed += 1
        self._said = True
        if not self._syntax.opens:
            return self._plain(last) or {}
        cut = next((len(mark) for mark in self._syntax.opens if self._held.startswith(mark)), 1)
        text, self._held, self._state = self._blank + self._held[:cut], self._held[cut:], self._content
        self._blank = ""
        return {"content": text} if text else {}

    def _arguments(self, last: bool) -> Part | None:
        """JSON arguments, to their own end."""
        self._held = self._held.lstrip(BLANK)
        if not self._held and not last:
            return None
        self._state = self._object_value if self._held.startswith("{") else self._other_value
        return {}

    def _object_value(self, last: bool) -> Part | None:
        if not self._held:
            return None
        text, length = self._scan.feed(self._held, self._ends, last)
        self._held = self._held[length:]
        if self._scan.ended:
            self._state = self._after
        return self._more(text) if length or self._scan.ended else None

    def _other_value(self, last: bool) -> Part | None:
        """An array, an object in a string, a literal, or a text that is no JSON, to the mark that ends the call. It is
        emitted when it is complete."""
        in_object = self._syntax is None or self._syntax.objects
        if self._value_text or self._held[:1] in ("[", '"'):
            text, length = self._scan.feed(self._held, self._ends, last)
            self._value_text, self._held = self._value_text + text, self._held[length:]
            if not (self._scan.ended or last):
                return None
        elif in_object and (match := _LITERAL.match(self._held + "," * last)):
            self._value_text, self._held = match[0], self._held[match.end() :]
        elif in_object and _LITERAL_BEGUN.fullmatch(self._held) and not last:
            return None
        else:
            cut = min((i for i in map(self._held.find, self._ends) if i >= 0), default=-1)
            if cut < 0 and not last:
                return None
            value, self._held = self._held[: cut if cut >= 0 else None], self._held[cut:] if cut >= 0 else ""
            value = value.rstrip().removesuffix("}" if in_object else "```").rstrip()
            self._value_text = PYTHON_WORDS.get(value, value)
        value, self._state = self._value_text, self._after
        if value.startswith('"') and self._scan.ended:
            value = text_of_string(value)
        return self._more("{}" if value in ("null", "") else value)

    @property
    def _ends(self) -> tuple[str, ...]:
        """Marks that end the arguments of a call, though they be incomplete."""
        syntax = self._syntax
        marks = () if syntax is None else (*syntax.closes, *syntax.opens, *syntax.marks)
        return (*marks, "<|start|>assistant") if self._channels else marks

    def _next_pair(self, last: bool) -> Part | None:
        """The next pair of arguments, or their end; a text between pairs becomes content after the call."""
        syntax = self._syntax
        assert syntax is not None
        assert syntax.pair is not None
        ends, rest = (syntax.end, *syntax.closes), self._held.lstrip()
        if rest.startswith(ends) or (last and not rest):
            self._held = rest.removeprefix(syntax.end)
            self._state, self._scanned = self._after, 0
            return self._more("}" if self._keys else "{}")
        if rest.startswith("{") and not self._keys and not self._spare:  # JSON in place of pairs
            self._state = self._arguments
            return {}
        if rest and not rest.startswith(syntax.pair_mark):
            begin = min((i for i in map(self._held.find, (syntax.pair_mark, *ends)) if i >= 0), default=-1)
            if begin < 0:
                return self._cut_off() if last else None
            self._spare, self._held = self._spare + self._held[:begin], self._held[begin:]
            return {}
        near, self._scanned = max(0, self._scanned - _NEAR), len(self._held)
        assert syntax.pair_close is not None
        if not last and not syntax.pair_close.search(self._held, near):
            return None
        ended = not last or any(mark in self._held for mark in ends)
        match = syntax.pair.match(self._held if ended else self._held + syntax.end)
        if match is None and last and ended and syntax.open_pair is not None:
            match = syntax.open_pair.match(self._held)
        if match is None:
            return self._cut_off() if last else None
        end = self._unclosed(match)
        value = match["value"] if end is None else match["value"][: end - match.start("value")]
        self._held, self._scanned = self._held[match.end() if end is None else end :], 0
        string = match.groupdict().get("string")
        types = self._types.get(match["key"], ()) if string is None else ("string",) if string == "true" else ("any",)
        return self._pair(match["key"], typed_json(value, types))

    def _unclosed(self, match: re.Match[str]) -> int | None:
        """Where a value ends that has no closing mark: where a parameter begins that the tool has and the call has not
        yet."""
        assert self._syntax is not None
        assert self._syntax.pair_begin is not None
        for begin in self._syntax.pair_begin.finditer(match["value"]):
            if begin["key"] in self._types and begin["key"] not in {match["key"], *self._keys}:
                return match.start("value") + begin.start()
        return None

    def _pair(self, key: str, value: str) -> Part:
        before = ", " if self._keys else "{"
        self._keys.append(key)
        return self._more(f"{before}{json.dumps(key, ensure_ascii=False)}: {value}")

    def _cut_off(self) -> Part:
        """What an answer that ends within a pair has of its value, without an end; what is no pair is content."""
        assert self._syntax is not None
        assert self._syntax.pair_begin is not None
        text, self._held, self._state = self._held, "", self._after
        begin = self._syntax.pair_begin.match(text.lstrip())
        if begin is not None and not any(mark in text for mark in (self._syntax.end, *self._syntax.closes)):
            value = text.lstrip()[begin.end() :].removeprefix("\n")
            return self._pair(begin["key"], json.dumps(value, ensure_ascii=False)[:-1])
        self._spare += text
        return self._spared()

    def _spared(self) -> Part:
        """The text within a call that is none of it, as content."""
        text, self._spare = self._spare, ""
        if not text.strip() or self._silent:
            return {}
        self.unparsed += 1
        self._said = True
        return {"content": text}

    def _after(self, last: bool) -> Part | None:
        """Skips what may follow a call: further members and surplus braces, white space, closing marks."""
        syntax = self._syntax
        if self._spare:
            return self._spared()
        if syntax is None:
            return self._plain(last)
        if syntax.objects and _MORE.match(self._held):
            self._scan, self._scanned, self._state = JsonValue(depth=1), 0, self._members
            return {}
        return self._after_members(last)

    def _members(self, last: bool) -> Part | None:
        """Skips further members of a call's object that say nothing, to its end; others are content."""
        self._scanned += self._scan.feed(self._held[self._scanned :])[1]
        if not (self._scan.ended or last):
            return None
        if self._scan.ended:
            members, self._held = self._held[: self._scanned], self._held[self._scanned :]
            self._spare = "" if says_nothing(members) else members
        self._state = self._after_members
        return self._spared()

    def _after_members(self, last: bool) -> Part | None:
        syntax = self._syntax
        assert syntax is not None
        rest, surplus = _SURPLUS.sub("", self._held, count=1), not (syntax.pair or self._closed)
        if not rest and not last:
            return None
        closes = (*syntax.closes, *syntax.marks, *filter(None, (syntax.end,)))
        if any(mark.startswith(rest) and mark != rest for mark in (*closes, *syntax.opens)) and rest and not last:
            return None
        self._held = rest if surplus or rest.startswith((*closes, *syntax.opens)) else self._held.lstrip(BLANK)
        if close := next((mark for mark in closes if rest.startswith(mark)), ""):
            self._held, self._state, self._closed = rest[len(close) :], self._after_members, True
        elif rest.startswith(syntax.opens or "{") or (syntax.objects and rest.startswith("{")):
            self._start_call()
        else:
            self._state, self._at_head = self._content if syntax.opens else self._plain, True
        return {}

    def _forced_arguments(self) -> Part:
        text, self._held = self._held, ""
        return self._more(text) if self.calls else self._made(self._forced, text)

    def _made(self, name: str, arguments: str) -> Part:
        self._blank, self._closed = "", False
        self._types, self._silent = self._tools.get(name, {}), bool(self.calls and not self._parallel)
        if self._silent:
            return {}
        index = self.calls
        self.calls += 1
        function = {"name": name, "arguments": arguments}
        return {"tool_calls": [{"index": index, "id": self._call_id(index), "type": "function", "function": function}]}

    def _more(self, arguments: str) -> Part:
        if self._silent or not arguments:
            return {}
        return {"tool_calls": [{"index": self.calls - 1, "function": {"arguments": arguments}}]}


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


class OutputParts(OutputText):
    """One choice's text as parts: stop strings are matched in the content only."""

    def __init__(
        self,
        detokeniser: Detokeniser,
        parser: ChatParts,
        stops: tuple[str, ...] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        super().__init__(detokeniser, stops, include_stop, min_tokens)
        self.parser = parser
        self.reasoning_tokens = 0

    def push_parts(self, ids: Sequence[int]) -> list[Part]:
        """Returns the parts that these ids complete. Ignores ids after a match."""
        out: list[Part] = []
        for token in ids:
            if self.ended:
                break
            self.n_tokens += 1
            self.reasoning_tokens += self.parser.reasoning
            out += self._until_stop(self.parser.push(self._detokeniser.push((token,))))
        return out

    def finish_parts(self) -> list[Part]:
        if self.ended:
            return []
        out = self._until_stop(self.parser.push(self._detokeniser.finish(), last=True))
        return out if self.ended else [*out, *self._flush()]

    def _until_stop(self, parts: list[Part]) -> list[Part]:
        out: list[Part] = []
        for part in parts:
            if "content" not in part:
                out += [*self._flush(), part]
            elif text := self._settle(part["content"]):
                out.append({"content": text})
            if self.ended:
                break
        return out

    def _flush(self) -> list[Part]:
        tail, self._tail = self._tail, ""
        return [{"content": tail}] if tail else []
