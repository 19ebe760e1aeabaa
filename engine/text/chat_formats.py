"""Formats in which models write tool calls and reasoning, as declarations for the parser in chat_parts.py."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_NAME = r"(?P<name>[\w.:/-]+)"
_OBJECT = r'\{\s*"name"\s*:\s*"(?P<name>(?:[^"\\]|\\.)*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*'


@dataclass(frozen=True, slots=True)
class ToolSyntax:
    """One format. `opens`: marks before a call, none if calls stand at the answer's beginning; `headers`: patterns from
    there to the arguments; `objects`: whether a call is a JSON object with name and arguments, of which several may
    follow one mark; `closes`: marks that may follow a call; `marks`: further marks, which are special tokens in some
    tokenizers. Arguments are JSON, or pairs: `pair` matches one, which `pair_close` ends, `open_pair` the last one
    without it, `pair_begin` one up to its value. A pair begins with `pair_mark`, and `end` ends them all. A search for
    `pair_close` is quick where `pair` is not."""

    opens: tuple[str, ...]
    headers: tuple[re.Pattern[str], ...]
    objects: bool = True
    closes: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()
    pair: re.Pattern[str] | None = None
    open_pair: re.Pattern[str] | None = None
    pair_begin: re.Pattern[str] | None = None
    pair_mark: str = ""
    pair_close: re.Pattern[str] | None = None
    end: str = ""


def _objects(*opens: str, closes: tuple[str, ...] = (), more: str = "") -> ToolSyntax:
    start = "|".join(map(re.escape, opens)) or "(?:)"
    headers = [re.compile(rf"(?:{start})?[\s\[,;]*{_OBJECT}")]
    if more:
        headers.append(re.compile(rf"(?:{start})\s*{more}"))
    return ToolSyntax(opens, tuple(headers), closes=closes)


def _named(opens: tuple[str, ...], header: str, closes: tuple[str, ...], marks: tuple[str, ...]) -> ToolSyntax:
    start = "|".join(map(re.escape, opens))
    return ToolSyntax(opens, (re.compile(rf"(?:(?:{start})\s*)+{header}"),), False, closes, marks)


def _pairs(opens: tuple[str, ...], header: str, pair: str, close: str, end: str, *closes: str) -> ToolSyntax:
    """`pair` ends before the value, which ends at a closing mark that another pair or the call's end follows, and does
    not extend into another call."""
    ends = "|".join(map(re.escape, (end, *closes)))
    after = rf"{re.escape(end)}\s*(?:(?:{ends})\s*)*(?:{'|'.join(map(re.escape, opens))})"
    mark = pair.partition("(?P")[0]
    following = rf"{mark}|{ends}"
    value = rf"\s*{pair}(?P<value>(?:(?!{after}).)*?)"
    closed, unclosed = rf"{re.escape(close)}(?=\s*(?:{following}))", rf"(?=\s*(?:{ends}))"
    strict, lax = (re.compile(value + rest, re.DOTALL) for rest in (closed, unclosed))
    begin = re.compile(pair)
    return ToolSyntax(
        opens, (re.compile(header),), False, closes, (), strict, lax, begin, mark, re.compile(closed), end
    )


_V3_BEGIN, _V3_CALL, _V3_SEP = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
_V3_ENDS = ("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")
_FENCE = r'(?:```(?:json)?\s*)?(?=[{\["]|null)'
_KIMI = ("<|tool_calls_section_begin|>", "<|tool_call_begin|>")
_DSML = "<｜DSML｜"

TOOL_FORMATS: dict[str, ToolSyntax] = {
    "hermes": _objects("<tool_call>", closes=("</tool_call>",)),
    "longcat": _objects("<longcat_tool_call>", closes=("</longcat_tool_call>",)),
    "qwen3_coder": _pairs(
        ("<tool_call>", "<seed:tool_call>", "<function="), rf"(?:<(?:seed:)?tool_call>\s*)?<function={_NAME}>",
        "<parameter=(?P<key>[^>]+)>", "</parameter>", "</function>", "</tool_call>", "</seed:tool_call>",
    ),
    "glm": _pairs(
        ("<tool_call>",), rf"<tool_call>\s*{_NAME}\s*(?=<arg_key>|</tool_call>|\{{)",
        r"<arg_key>(?P<key>[^<]*)</arg_key>\s*<arg_value>", "</arg_value>", "</tool_call>",
    ),
    "deepseek_v32": _pairs(
        (f"{_DSML}function_calls>", f"{_DSML}tool_calls>", f"{_DSML}invoke name="),
        rf'(?:{_DSML}(?:function|tool)_calls>\s*)?{_DSML}invoke name="{_NAME}">',
        f'{_DSML}parameter name="(?P<key>[^"]+)"(?: string="(?P<string>true|false)")?>',
        "</｜DSML｜parameter>", "</｜DSML｜invoke>", "</｜DSML｜function_calls>", "</｜DSML｜tool_calls>",
    ),
    "deepseek_v31": _named((_V3_BEGIN, _V3_CALL), rf"{_NAME}\s*{_V3_SEP}\s*{_FENCE}", _V3_ENDS, (_V3_SEP,)),
    "deepseek_v3": _named((_V3_BEGIN, _V3_CALL), rf"function{_V3_SEP}{_NAME}\s*{_FENCE}", _V3_ENDS, (_V3_SEP,)),
    "kimi": _named(
        _KIMI, r"(?:functions\.)?(?P<name>[\w.-]+?)(?::\d+)?\s*<\|tool_call_argument_begin\|>\s*",
        ("<|tool_call_end|>", "<|tool_calls_section_end|>"), ("<|tool_call_argument_begin|>",),
    ),
    "mistral": _objects(
        "[TOOL_CALLS]", more=r"(?P<name>[\w.-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\]\s*|(?=\{))"
    ),
    "gpt_oss": ToolSyntax(("<|channel|>commentary to=functions.",), (), False, ("<|call|>", "<|end|>")),
    "llama": ToolSyntax((), _objects("<|python_tag|>").headers, marks=("<|python_tag|>",)),
    "array": _objects(),
}  # fmt: skip
"""Their order is that in which a template's own calls are tried. `array`: what a grammar makes of a required call."""

REASONING_FORMATS: dict[str, tuple[str, str]] = {
    "think": ("<think>", "</think>"),
    "kimi": ("◁think▷", "◁/think▷"),
    "mistral": ("[THINK]", "[/THINK]"),
    "longcat": ("<longcat_think>", "</longcat_think>"),
    "seed": ("<seed:think>", "</seed:think>"),
    "gpt_oss": ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
}
"""The marks around reasoning, which the prompt or the answer opens."""

CHANNEL_MARKS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>")
"""Of gpt_oss, whose answers are messages that name their channel, and the function if they are calls."""
CHANNEL_HEADS = ("<|channel|>", " to=", "<|start|>assistant")
"""With which a message begins."""
CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
HEAD = re.compile(
    r"<\|start\|>assistant|<\|channel\|>\s*(?:analysis|commentary|final)?|\bto=\S+?(?=<\||\s|$)"
    r"|<\|constrain\|>|\b(?:json|code)\b"
)
"""What a message's head may have."""
RECIPIENT = re.compile(r"\bto=(?:functions\.)?(\S+?)(?=<\||\s|$)")


def marks_of(tool_format: str | None, reasoning: str | None) -> frozenset[str]:
    """Texts that are marks to the parser, though they be special tokens."""
    marks = set(REASONING_FORMATS[reasoning]) if reasoning is not None else set[str]()
    if tool_format is not None:
        syntax = TOOL_FORMATS[tool_format]
        marks |= {*syntax.opens, *syntax.closes, *syntax.marks, "[ARGS]", "[CALL_ID]"}
    if "gpt_oss" in (tool_format, reasoning):
        marks |= {*CHANNEL_MARKS}
    return frozenset(marks)


def call_marks(tool_format: str, tools: Iterable[str]) -> list[str]:
    """Texts with which an answer begins that is a call; of formats without marks the beginnings of a call's object."""
    syntax = TOOL_FORMATS[tool_format]
    if syntax.opens:
        return list(syntax.opens)
    return [*syntax.marks, *(f'{{"name":{space}"{name}"' for name in tools for space in ("", " "))]
