"""Tool calls and reasoning in each format: split alike in any pieces, and never lost."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any, get_args

import pytest
from door import LIMITS, ORIGIN, chat
from laddertron.engine.config.schema import ToolFormat
from laddertron.engine.openai.answers import Answer
from laddertron.engine.openai.to_engine import to_requests
from laddertron.engine.request import TokensEvent
from laddertron.engine.text.call_values import parameter_types
from laddertron.engine.text.chat_formats import REASONING_FORMATS, TOOL_FORMATS
from laddertron.engine.text.chat_parts import ChatParts, Part, message_of
from laddertron.engine.text.chat_shape import probe_chat
from laddertron.engine.text.tokenizer import ChatOptions, TextModel
from tiny_text import byte_level, write_folder
from tokenizers import AddedToken

ROME: dict[str, Any] = {"city": "Rome"}
OSLO: dict[str, Any] = {
    "city": 'Oslo é"}</tool_call></parameter></arg_value>\n{x',
    "days": 3,
    "wet": None,
    "by": [1, {"a": "]"}],
}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "wet": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
                    "by": {"type": "array"},
                },
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]


def dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def raw(value: Any) -> str:
    return value if isinstance(value, str) else dumped(value)


def objects(calls: list[tuple[str, Any]], key: str = "arguments") -> list[str]:
    return [f'{{"name": "{name}", "{key}": {dumped(given)}}}' for name, given in calls]


def coder(name: str, given: dict[str, Any]) -> str:
    pairs = "".join(f"<parameter={key}>\n{raw(value)}\n</parameter>\n" for key, value in given.items())
    return f"<tool_call>\n<function={name}>\n{pairs}</function>\n</tool_call>"


def glm(name: str, given: dict[str, Any]) -> str:
    pairs = "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{raw(v)}</arg_value>\n" for k, v in given.items())
    return f"\n<tool_call>{name}\n{pairs}</tool_call>"


def dsml(name: str, given: dict[str, Any]) -> str:
    mark = "｜DSML｜"
    pairs = "".join(
        f'<{mark}parameter name="{k}" string="{str(isinstance(v, str)).lower()}">{raw(v)}</{mark}parameter>\n'
        for k, v in given.items()
    )
    return f'<{mark}invoke name="{name}">\n{pairs}</{mark}invoke>\n'


def write(tool_format: str, calls: list[tuple[str, Any]]) -> str:
    """Calls as a model of this format writes them."""
    begin, end = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    one, sep, done = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
    if tool_format in ("hermes", "longcat"):
        tag = "tool_call" if tool_format == "hermes" else "longcat_tool_call"
        return "\n".join(f"<{tag}>\n{call}\n</{tag}>" for call in objects(calls))
    if tool_format in ("llama", "array"):
        listed = objects(calls, "parameters")
        return "; ".join(listed) if tool_format == "llama" else f"[{', '.join(listed)}]"
    if tool_format == "mistral":
        return "".join(f"[TOOL_CALLS]{name}[ARGS]{dumped(given)}" for name, given in calls)
    if tool_format == "deepseek_v3":
        fenced = [f"{one}function{sep}{name}\n```json\n{dumped(given)}\n```{done}" for name, given in calls]
        return f"{begin}{chr(10).join(fenced)}{end}"
    if tool_format == "deepseek_v31":
        return begin + "".join(f"{one}{name}{sep}{dumped(given)}{done}" for name, given in calls) + end
    if tool_format == "kimi":
        said = [
            f"<|tool_call_begin|>functions.{name}:{n}<|tool_call_argument_begin|>{dumped(given)}<|tool_call_end|>"
            for n, (name, given) in enumerate(calls)
        ]
        return f"<|tool_calls_section_begin|>{''.join(said)}<|tool_calls_section_end|>"
    if tool_format == "gpt_oss":
        head, more = "<|start|>assistant<|channel|>commentary to=functions.", " <|constrain|>json<|message|>"
        return "".join(f"{head}{name}{more}{dumped(given)}<|call|>" for name, given in calls)
    if tool_format == "deepseek_v32":
        body = "".join(dsml(name, given) for name, given in calls)
        return f"<｜DSML｜function_calls>\n{body}</｜DSML｜function_calls>"
    return "\n".join((coder if tool_format == "qwen3_coder" else glm)(name, given) for name, given in calls)


def parsed(text: str, places: list[int], **options: Any) -> tuple[Part, ChatParts, list[Part]]:
    parser = ChatParts(lambda n: f"c{n}", **{"tools": parameter_types(TOOLS), **options})
    parts: list[Part] = []
    for start, end in itertools.pairwise(places):
        parts += parser.push(text[start:end], end == len(text))
    return message_of(parts), parser, parts


def read_alike(text: str, seed: int, **options: Any) -> Part:
    """The message of the text, which is the same whole, character by character and cut at random."""
    whole = parsed(text, [0, len(text)], **options)[0]
    rng = random.Random(seed)
    cuts = [list(range(len(text) + 1))]
    cuts += [sorted({0, len(text), *rng.choices(range(len(text)), k=5)}) for _ in range(20)]
    for places in cuts:
        assert parsed(text, places, **options)[0] == whole, places
    return whole


def calls_of(message: Part) -> list[tuple[str, Any]]:
    functions = [call["function"] for call in message.get("tool_calls", [])]
    return [(function["name"], json.loads(function["arguments"])) for function in functions]


def test_every_format_has_a_name_in_the_deployment() -> None:
    assert set(get_args(ToolFormat)) - {"auto", "none"} == set(TOOL_FORMATS) - {"array"}


@pytest.mark.parametrize("tool_format", TOOL_FORMATS)
def test_calls_of_each_format_are_read(tool_format: str, run_seed: int) -> None:
    """One and several, with text before them and reasoning, awkward values, and nothing left over."""
    for calls in ([("weather", ROME)], [("weather", OSLO), ("now", {}), ("weather", ROME)]):
        text = write(tool_format, calls)
        message = read_alike(text, run_seed, tool_format=tool_format)
        assert calls_of(message) == calls, message
        assert (message["content"] or "").strip() == ""
        first = read_alike(text, run_seed, tool_format=tool_format, parallel=False)
        assert calls_of(first) == calls[:1]
    if TOOL_FORMATS[tool_format].opens:
        message = read_alike(f"So{text}", run_seed, tool_format=tool_format)
        assert (message["content"].strip(), calls_of(message)) == ("So", calls)
    message = read_alike(f"<think>hm</think>\n\n{text}", run_seed, tool_format=tool_format, reasoning="think")
    assert (message["reasoning_content"], calls_of(message)) == ("hm", calls)


@pytest.mark.parametrize("tool_format", TOOL_FORMATS)
def test_arguments_are_streamed(tool_format: str) -> None:
    text = write(tool_format, [("weather", OSLO)])
    *_, parts = parsed(text, list(range(len(text) + 1)), tool_format=tool_format)
    deltas = [part["tool_calls"][0] for part in parts if "tool_calls" in part]
    assert len(deltas) > 3
    assert all(delta["index"] == 0 for delta in deltas)
    assert [delta.get("id") for delta in deltas] == ["c0"] + [None] * (len(deltas) - 1)


@pytest.mark.parametrize("tool_format", TOOL_FORMATS)
def test_white_space_of_any_kind_is_read_alike(tool_format: str) -> None:
    """Also such as JSON has not, at each place of an answer."""
    text = write(tool_format, [("weather", ROME), ("now", {})])
    for blank in ("\u00a0", "\x0b", "\x1f", "\u3000"):
        for at in range(len(text) + 1):
            said = text[:at] + blank + text[at:]
            whole, steps = ([0, len(said)], list(range(len(said) + 1)))
            assert parsed(said, whole, tool_format=tool_format)[0] == parsed(said, steps, tool_format=tool_format)[0]


UNIT = {"type": "string", "enum": ["1", "2"]}


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"$ref": "#/$defs/unit"}, "1"),
        ({"allOf": [{"$ref": "#/$defs/unit"}], "default": "1"}, "1"),
        ({"anyOf": [{"$ref": "#/$defs/unit"}, {"type": "null"}]}, "1"),
        ({"$ref": "#/$defs/a~1b%20c"}, "1"),
        ({"const": "1"}, "1"),
        ({"enum": ["1", "2"]}, "1"),
        ({"$ref": "#/$defs/loop"}, 1),
        ({"$ref": "#/$defs/missing"}, 1),
        ({"anyOf": [UNIT, {}]}, 1),
        ({"enum": 7}, 1),
    ],
)
def test_a_value_without_quotes_has_the_type_of_its_parameter(schema: dict[str, Any], value: Any) -> None:
    """As pydantic writes enumerations; one that refers to itself ends."""
    branch = {"$ref": "#/$defs/loop"}
    definitions = {"unit": UNIT, "a/b c": UNIT, "loop": {"anyOf": [branch] * 40}}
    parameters = {"type": "object", "properties": {"unit": schema}, "$defs": definitions}
    tools = parameter_types([{"type": "function", "function": {"name": "now", "parameters": parameters}}])
    text = coder("now", {"unit": "1"})
    assert calls_of(parsed(text, [0, len(text)], tool_format="qwen3_coder", tools=tools)[0]) == [
        ("now", {"unit": value})
    ]


@pytest.mark.parametrize("tool_format", TOOL_FORMATS)
def test_what_is_no_call_is_content_and_counted(tool_format: str, run_seed: int) -> None:
    text = write(tool_format, [("other", ROME)])
    message = read_alike(text, run_seed, tool_format=tool_format)
    assert "tool_calls" not in message
    assert message["content"] == text
    assert parsed(text, [0, len(text)], tool_format=tool_format)[1].unparsed > 0
    for length in range(len(text)):  # cut off anywhere: nothing raises, and no other tool is called
        begun = write(tool_format, [("weather", ROME)])[:length]
        message = parsed(begun, [0, length], tool_format=tool_format)[0]
        assert [call["function"]["name"] for call in message.get("tool_calls", ())] in ([], ["weather"])
        assert "tool_calls" in message or message["content"] == begun
    assert read_alike("Hi <b>, {1} [2]", run_seed, tool_format=tool_format) == {"content": "Hi <b>, {1} [2]"}


@pytest.mark.parametrize(
    ("tool_format", "text", "calls", "content"),
    [
        ("hermes", '<tool_call>{"name": "now", "arguments": {"a": "x\ny"}}}}</tool_call>', [{"a": "x\ny"}], ""),
        ("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>ok', [{}], "ok"),
        ("hermes", '<tool_call>{"name": "now", "arguments": [1, "]"]}</tool_call>', [[1, "]"]], ""),
        ("hermes", '<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}</tool_call>', [{"a": 1}], ""),
        ("hermes", '<tool_call>{"name": "now"}</tool_call>', [{}], ""),
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "now"}</tool_call>', [{"a": 1}], ""),
        ("hermes", '<tool_call>{"name": "now", "arguments": {}, "id": "x", "type": "f"}</tool_call>ok', [{}], "ok"),
        ("hermes", '<tool_call>{"name": "now", "arguments": {}, "n": 1}</tool_call>ok', [{}], ', "n": 1}ok'),
        ("hermes", '<tool_call>{"n": 1, "arguments": {}, "name": "now"}</tool_call>ok', [{}], '{"n": 1}ok'),
        ("hermes", '<tool_call>{"name": "now", "argument": {}}</tool_call>', [],
         '<tool_call>{"name": "now", "argument": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "now", "arguments": None}</tool_call>ok', [{}], "ok"),
        ("hermes", '<tool_call>{"name": "now", "arguments": {}}\n{"name": "now", "arguments": {}}</tool_call>',
         [{}, {}], ""),
        ("hermes", '<tool_call>{"name": "now", "arguments": {"a": 1}</tool_call>ok', [{"a": 1}], "ok"),
        ("hermes", '<tool_call>{"name": "now", "arguments": {}}', [{}], ""),
        ("hermes", "<tool_call>{bad}</tool_call> x", [], "<tool_call>{bad}</tool_call> x"),
        ("hermes", '<tool_call>x</tool_call><tool_call>{"name": "now", "arguments": {}}</tool_call>', [{}],
         "<tool_call>x</tool_call>"),
        ("hermes", '<tool_call>{"name": "now", "arguments": {}, "x": {"a": ["}"]}}</tool_call>, "ok"', [{}],
         ', "x": {"a": ["}"]}}, "ok"'),
        ("hermes", '<tool_call>{"name": "now", "arguments": {}, "x": {</tool_call>', [{}], '"x": {</tool_call>'),
        ("hermes", '<tool_call>{"function": {"name": "now", "arguments": {}}}</tool_call>', [{}], ""),
        ("hermes", '\n\n<tool_call>{"name": "now", "arguments": {}}</tool_call>', [{}], ""),
        ("hermes", '<tool_call>{"name": "now", "arguments": {}}</tool_call>\n```py', [{}], "```py"),
        ("hermes", "\n\n<tool_call>x", [], "\n\n<tool_call>x"),
        ("hermes", "\n\n", [], "\n\n"),
        ("llama", '<|python_tag|>{"name": "now", "parameters": {}}<|python_tag|>{"name": "now", "parameters": {}}',
         [{}, {}], ""),
        ("llama", '<|python_tag|>{"name": "now", "parameters": {}}; {"name": "now", "parameters": {}}', [{}, {}], ""),
        ("llama", '{"a": {"b": "}"}} and', [], '{"a": {"b": "}"}} and'),
        ("llama", 'I say {"name": "now", "parameters": {}}', [], 'I say {"name": "now", "parameters": {}}'),
        ("array", '\r\n[\r{"name": "now", "parameters": {}}\t,\r\n {"name": "now", "parameters": {}}\r\n ]',
         [{}, {}], ""),
        ("mistral", '[TOOL_CALLS] [{"name": "now", "arguments": {}, "id": "123456789"}]', [{}], ""),
        ("mistral", '[TOOL_CALLS]now[CALL_ID]abc[ARGS]{"a": 1}', [{"a": 1}], ""),
        ("mistral", "[TOOL_CALLS]now[ARGS]null[TOOL_CALLS]now[ARGS][1][TOOL_CALLS]now[ARGS]", [{}, [1], {}], ""),
        ("qwen3_coder", "<tool_call><function=weather><parameter=city>Rome</function></tool_call>"
         "<tool_call><function=now><parameter=a>1</parameter></function></function></tool_call></tool_call>ok",
         [{"city": "Rome"}, {"a": 1}], "ok"),
        ("qwen3_coder", "<function=now>\n<parameter=a>\n1\n</parameter>\n</function>", [{"a": 1}], ""),
        ("qwen3_coder", "<tool_call><function=now></function></tool_call>", [{}], ""),
        ("qwen3_coder", "<tool_call><function=weather><parameter=days>\nTrue\n</parameter></tool_call>",
         [{"days": True}], ""),
        ("glm", "<tool_call>weather<arg_key>city</arg_key><arg_value>7</arg_value></tool_call>", [{"city": "7"}], ""),
        ("qwen3_coder", "<function=weather><parameter=city>Rome\n<parameter=days>\n3\n</parameter></function>",
         [{"city": "Rome", "days": 3}], ""),
        ("qwen3_coder", "<function=weather>So <parameter=city>Rome</parameter><parameter=days>3</function>ok",
         [{"city": "Rome", "days": 3}], "So ok"),
        ("qwen3_coder", "<function=weather><parameter=city>a<parameter=city>b<parameter=x>c</parameter></function>",
         [{"city": "a<parameter=city>b<parameter=x>c"}], ""),
        ("glm", "<tool_call>weather<arg_key>city</arg_key><arg_value>Rome<arg_key>days</arg_key><arg_value>3"
         "</arg_value></tool_call>", [{"city": "Rome", "days": 3}], ""),
        ("deepseek_v32", '<｜DSML｜invoke name="weather"><｜DSML｜parameter name="city" string="true">Rome'
         '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter></｜DSML｜invoke>',
         [{"city": "Rome", "days": 3}], ""),
        ("qwen3_coder", '<function=now>{"a": "</function>"}</function>ok', [{"a": "</function>"}], "ok"),
        ("glm", '<tool_call>now\n{"a": 1}\n</tool_call>', [{"a": 1}], ""),
        ("deepseek_v32", '<｜DSML｜invoke name="now">\n{"a": 1}</｜DSML｜invoke>', [{"a": 1}], ""),
        ("deepseek_v3", '<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```\n{"a": 1}\n```<｜tool▁call▁end｜>',
         [{"a": 1}], ""),
        ("glm", "<tool_call>weather<arg_key>city</arg_key><arg_value>Rome</tool_call></tool_call>ok",
         [{"city": "Rome"}], "ok"),
        ("kimi", '<|tool_call_begin|>now:0<|tool_call_argument_begin|>{"a": 1}}<|tool_call_end|>ok', [{"a": 1}], "ok"),
        ("deepseek_v3", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n{}}<｜tool▁call▁end｜>", [{}], ""),
        ("deepseek_v31", "<｜tool▁call▁begin｜>now<｜tool▁sep｜>```json\n{}\n```<｜tool▁call▁end｜>", [{}], ""),
        ("kimi", "<|tool_call_begin|>now:0<|tool_call_argument_begin|>{}<|tool_call_end|>", [{}], ""),
        ("deepseek_v31", "<｜tool▁call▁begin｜>now<｜tool▁sep｜>null<｜tool▁call▁end｜>", [{}], ""),
    ],
)  # fmt: skip
def test_a_call_that_is_written_oddly_is_not_lost(
    tool_format: str, text: str, calls: list[Any], content: str, run_seed: int
) -> None:
    message = read_alike(text, run_seed, tool_format=tool_format)
    assert [given for _, given in calls_of(message)] == calls
    assert (message["content"] or "") == content


ANALYSIS = "<|channel|>analysis<|message|>"
NEXT = "<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.now <|constrain|>json<|message|>{"a": 1}'


@pytest.mark.parametrize(
    ("said", "tool_format", "message"),
    [
        (f"{ANALYSIS}hm{NEXT}<|channel|>final<|message|>Hi", None, {"content": "Hi", "reasoning_content": "hm"}),
        ("<|channel|>final<|message|>Hi <b>", "gpt_oss", {"content": "Hi <b>"}),
        (f"{ANALYSIS}hm{NEXT}<|channel|>fin", "gpt_oss", {"content": "<|channel|>fin", "reasoning_content": "hm"}),
        ("<|channel|>commentary<|message|>Hi<|end|><|start|>", None, {"content": "Hi<|start|>"}),
        ('{"a": 1}', "gpt_oss", {"content": '{"a": 1}'}),  # as a grammar makes it
        (f"{ANALYSIS}hm{NEXT}{CALL}", "gpt_oss", [{"a": 1}]),
        (f' to=functions.now<|channel|>commentary json<|message|>{{"a": 1}}<|call|>{NEXT}{CALL}', "gpt_oss",
         [{"a": 1}, {"a": 1}]),
        (f"<|channel|>commentary<|message|>So{NEXT}{ANALYSIS}b{NEXT}{CALL}}}<|call|>", "gpt_oss", [{"a": 1}]),
        (f"{ANALYSIS}hm{NEXT}{CALL.replace('functions.', '')}<|call|>", "gpt_oss", [{"a": 1}]),
        (f'{ANALYSIS}hm{NEXT} to=now<|channel|>commentary<|message|>{{"a": 1}}<|call|>', "gpt_oss", [{"a": 1}]),
        ("<|channel|>commentary to=web.open code<|message|>x", "gpt_oss",
         {"content": "<|channel|>commentary to=web.open code<|message|>x"}),
        (f'{ANALYSIS}hm{NEXT}[{{"name": "now", "parameters": {{}}}}]', "array", [{}]),
    ],
)  # fmt: skip
def test_messages_of_channels(said: str, tool_format: str | None, message: Any, run_seed: int) -> None:
    """gpt-oss: reasoning, calls and content are messages; those of content lose their heads only."""
    read = read_alike(said, run_seed, tool_format=tool_format, reasoning="gpt_oss")
    assert ([given for _, given in calls_of(read)] if isinstance(message, list) else read) == message


@pytest.mark.parametrize("reasoning", REASONING_FORMATS)
def test_reasoning_of_each_format(reasoning: str, run_seed: int) -> None:
    opens, closes = REASONING_FORMATS[reasoning]
    for thinking, text, message in (
        (False, f" {opens}a{closes}\n\nb", {"content": "b", "reasoning_content": "a"}),
        (False, opens[:4], {"content": opens[:4]}),
        (False, f"a {closes} b", {"content": f"a {closes} b".replace("<|end|>", "")}),  # which ends a message
        (True, f"a{closes}b", {"content": "b", "reasoning_content": "a"}),
        (True, f"\n{opens}a{closes}b", {"content": "b", "reasoning_content": "a"}),
        (True, opens[:4], {"content": "", "reasoning_content": opens[:4]}),
        (True, f"a{closes[:-1]}", {"content": "", "reasoning_content": f"a{closes[:-1]}"}),
    ):
        assert read_alike(text, run_seed, reasoning=reasoning, thinking=thinking) == message


@pytest.mark.parametrize("cut", ["<arg_value>Ro", "<arg_value>Rome</arg_value><arg_key>days</arg_key><arg_value>1"])
def test_a_call_that_is_cut_off_within_a_value_leaves_its_arguments_open(cut: str, run_seed: int) -> None:
    """So that no client takes them for complete ones."""
    message = read_alike(f"<tool_call>weather<arg_key>city</arg_key>{cut}", run_seed, tool_format="glm")
    (call,) = message["tool_calls"]
    assert call["function"]["arguments"] in ('{"city": "Ro', '{"city": "Rome", "days": "1')


def test_a_call_ends_reasoning_that_has_no_closing_mark(run_seed: int) -> None:
    """But not one that is quoted before the mark."""
    call = write("hermes", [("weather", ROME)])
    options: dict[str, Any] = {"tool_format": "hermes", "reasoning": "think", "thinking": True}
    message = read_alike(f"hm {call}", run_seed, **options)
    assert (message["reasoning_content"], calls_of(message)) == ("hm ", [("weather", ROME)])
    message = read_alike(f"hm {call} or</think>no", run_seed, **options)
    assert message == {"content": "no", "reasoning_content": f"hm {call} or"}


@pytest.mark.parametrize(
    ("tool_format", "text", "arguments"),
    [
        ("hermes", r'<tool_call>{"name": "now", "arguments": "C:\dir"}</tool_call>', r'"C:\dir"'),
        ("hermes", r'<tool_call>{"name": "now", "arguments": "\ud800"}</tool_call>', r'"\ud800"'),
        ("gpt_oss", r' to=functions.now<|message|>"C:\dir"<|call|>', r'"C:\dir"'),
        ("gpt_oss", " to=functions.now<|message|>city: Rome<|call|>", "city: Rome"),
        ("gpt_oss", ' to=functions.now<|message|>{"a": 1<|call|>', '{"a": 1'),
        ("gpt_oss", ' to=functions.now<|message|>{"a": [1<|end|>', '{"a": [1'),
        ("gpt_oss", " to=functions.now<|message|>trust me<|call|>", "trust me"),
        ("gpt_oss", " to=functions.now<|message|>7 days", "7 days"),
        ("hermes", '<tool_call>{"name": "now", "arguments": city: Rome}</tool_call>', "city: Rome"),
        ("hermes", '<tool_call>{"name": "now", "arguments": {"a": 1</tool_call>', '{"a": 1'),
        ("mistral", "[TOOL_CALLS]now[ARGS]a: 1", "a: 1"),
        ("kimi", "<|tool_call_begin|>now:0<|tool_call_argument_begin|>a: 1<|tool_call_end|>", "a: 1"),
        ("deepseek_v31", "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{'a': 1}<｜tool▁call▁end｜>", "{'a': 1}"),
        ("qwen3_coder", r'<function=now><parameter=a>"\ud800"</parameter></function>', r'{"a": "\"\\ud800\""}'),
    ],
)
def test_arguments_that_no_text_can_have_are_passed_on(
    tool_format: str, text: str, arguments: str, run_seed: int
) -> None:
    """What is no JSON: the client gets it as the model wrote it."""
    message = read_alike(text, run_seed, tool_format=tool_format)
    (call,) = message["tool_calls"]
    assert (call["function"]["arguments"], message["content"]) == (arguments, None)


@pytest.mark.parametrize("part", ["}{", "</parameter>x", "</arg_value>x"])
def test_a_long_call_costs_what_its_length_does(part: str) -> None:
    """Nothing is read again at each token: the scan continues where it stopped."""
    for tool_format in ("llama", "qwen3_coder", "glm"):
        text = write(tool_format, [("weather", {"city": part * 20_000})])
        parser = ChatParts(str, tool_format, parameter_types(TOOLS))
        parts = [part for at in range(0, len(text), 4) for part in parser.push(text[at : at + 4], at + 4 >= len(text))]
        assert calls_of(message_of(parts)) == [("weather", {"city": part * 20_000})]


def test_white_space_without_end_is_content(run_seed: int) -> None:
    """What may stand before a call is kept back, up to a bound."""
    assert read_alike("\n" * 300, run_seed, tool_format="hermes") == {"content": "\n" * 300}
    parser = ChatParts(str, "hermes", parameter_types(TOOLS))
    assert [parser.push("\n" * 200), parser.push("\n" * 100)] == [[], [{"content": "\n" * 300}]]


# whole answers


TEMPLATE = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}{% for m in messages %}<{{ m.role }}>"
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}[TOOL_CALLS]{{ c.function.name }}[ARGS]"
    "{{ c.function.arguments|tojson }}{% endfor %}{% endfor %}<assistant>{% if thinking %}[THINK]{% endif %}"
)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    tokenizer = byte_level()
    marks = ("[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]")
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    return TextModel.from_folder(write_folder(tmp_path_factory.mktemp("marks"), tokenizer, TEMPLATE))


def answered(text: TextModel, said: str, **fields: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The whole response and the streamed chunks of an answer that arrives token by token."""
    body = chat(tools=TOOLS, max_tokens=40, **fields)
    prompt = tuple(text.encode_chat(list(body.messages), ChatOptions(variables=body.template_variables)))
    answer = Answer(body, to_requests(body, [prompt[-8:]], LIMITS, ORIGIN, text), text, "1", 1)
    ids, chunks = text.encode(said, add_special_tokens=False), []
    for at, token in enumerate(ids):
        delta = answer.take(TokensEvent("r0", 0, at, (token,), "stop" if at + 1 == len(ids) else None, None))
        assert delta is None or answer.error is None
        chunks += answer.chunks(delta) if delta is not None else []
    return answer.response(), chunks


def test_special_tokens_are_marks_and_stop_strings_apply_to_content(text: TextModel) -> None:
    assert (text.chat.tool_format, text.chat.reasoning) == ("mistral", "mistral")
    said = '[THINK]no STOP[/THINK]So[TOOL_CALLS]weather[ARGS]{"city": "STOP"}'
    whole, chunks = answered(text, said, stop="STOP")
    message = whole["choices"][0]["message"]
    assert message["reasoning_content"] == "no STOP"
    assert (message["content"], calls_of(message)) == ("So", [("weather", {"city": "STOP"})])
    assert whole["choices"][0]["finish_reason"] == "tool_calls"
    streamed = message_of(chunk["choices"][0]["delta"] for chunk in chunks)
    assert streamed == {name: message[name] for name in streamed}
    details = whole["usage"]["completion_tokens_details"]
    assert 0 < details["reasoning_tokens"] < whole["usage"]["completion_tokens"]
    stopped, _ = answered(text, "[THINK]a[/THINK]So STOP[TOOL_CALLS]", stop="STOP")
    assert stopped["choices"][0]["message"]["content"] == "So "
    silent, _ = answered(text, said, include_reasoning=False)
    assert "reasoning_content" not in silent["choices"][0]["message"]
    assert silent["choices"][0]["message"]["content"] == "So"


def test_answers_can_be_sent_back(text: TextModel, run_seed: int) -> None:
    """Whole and streamed messages of generated answers, cut off anywhere, render with all of their calls."""
    rng = random.Random(run_seed)
    for _ in range(20):
        calls = [("weather", {"city": f"q{rng.randrange(10**6)}"}) for _ in range(rng.randrange(1, 3))]
        said = rng.choice(["", "Look"]) + write("mistral", calls)
        said = said[: rng.randrange(len(said) - 4, len(said) + 1)]
        whole, chunks = answered(text, said)
        streamed = message_of(chunk["choices"][0]["delta"] for chunk in chunks)
        for message in (whole["choices"][0]["message"], {"role": "assistant", **streamed}):
            answers = [
                {"role": "tool", "tool_call_id": call["id"], "content": "sun"} for call in message.get("tool_calls", ())
            ]
            body = chat(messages=[{"role": "user", "content": "x"}, message, *answers], tools=TOOLS)
            prompt = text.render(list(body.messages), ChatOptions(variables=body.template_variables))
            for _, given in calls[: len(message.get("tool_calls", ())) - 1]:
                assert given["city"] in prompt
            assert message.get("content") is None or message["content"] in prompt


@pytest.mark.parametrize("tool_format", ["hermes", "qwen3_coder", "deepseek_v31", "longcat"])
def test_the_format_is_found_by_the_template_s_own_calls(tool_format: str, tmp_path: Path) -> None:
    call = write(tool_format, [("zqlookup", {"zqkey": "zqvalue0"})]).replace("zqvalue0", "{{ v }}")
    loop = "{% for c in m.tool_calls or [] %}{% set v = c.function.arguments.zqkey %}" + call + "{% endfor %}"
    loop = loop.replace("zqlookup", "{{ c.function.name }}")
    head = "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}{% for m in messages %}<{{ m.role }}>"
    template = head + "{{ m.content or '' }}" + loop + "{% endfor %}<assistant>"
    found = TextModel.from_folder(write_folder(tmp_path, byte_level(), template)).chat
    assert found.tool_format == tool_format
    assert found.with_formats("glm", "none") != found
    assert len(probe_chat()) == 3
