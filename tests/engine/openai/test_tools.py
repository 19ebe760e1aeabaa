"""Tool calls and reasoning: what bodies say, what grammars force, what texts are taken apart into."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pydantic
import pytest
from daemon_tools import LIMITS, NAME, Served, deployment, served
from door import chat
from fake_job import FakeJob
from laddertron.engine.openai.errors import ApiError
from laddertron.engine.openai.schema import CHAT
from laddertron.engine.sampling import grammar
from laddertron.engine.text.tokenizer import ChatOptions, TextModel
from tiny_text import byte_level, write_folder

TEMPLATE = (
    "{% for t in tools or [] %}<tool>{{ t.function.name }}</tool>{% endfor %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function|tojson }}</tool_call>{% endfor %}"
    "{% endfor %}<|assistant|>{% if enable_thinking %}<think>{% endif %}"
)
WEATHER = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/City"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"City": {"type": "string", "maxLength": 9}},
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
ROME, OSLO = '{"city": "Rome"}', '{"city": "Oslo é\\"}"}'


def call(name: str, arguments: str, number: int = 0) -> dict[str, Any]:
    return {"id": f"c{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def llama(name: str, arguments: str) -> str:
    return f'{{"name": "{name}", "parameters": {arguments}}}'


BOTH = [call("weather", ROME), call("weather", json.dumps(json.loads(OSLO), ensure_ascii=False), 1)]


@pytest.fixture
def takes(tmp_path: Path) -> Callable[[str | None, str], bool]:
    """Whether a grammar takes a whole text, by the library itself."""
    if not grammar.available:
        pytest.skip("no llguidance")
    write_folder(tmp_path)
    text = TextModel.from_folder(tmp_path)
    slots = grammar.GrammarSlots(tmp_path / "tokenizer.json", text.vocab_size, (1,))

    def whole(spec: str | None, said: str) -> bool:
        assert spec is not None
        grammar.validate(spec)
        slots.admit(0, spec, ())
        for token in (*text.encode(said, add_special_tokens=False), 1):
            if not slots.state(0).allowed(range(text.vocab_size))[token]:
                return False
            slots.state(0).advance(token)
        return True

    return whole


def test_a_required_call_is_grammatical_by_force(takes: Callable[[str | None, str], bool]) -> None:
    """What the grammars take and refuse."""
    required = chat(tools=TOOLS, tool_choice="required").params.grammar
    one = chat(tools=TOOLS, tool_choice="required", parallel_tool_calls=False).params.grammar
    named = chat(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "weather"}}).params.grammar
    for said, by_required, by_one, by_named in (
        (f"[{llama('weather', ROME)}]", True, True, False),
        (f"[{llama('weather', ROME)},{llama('now', '{}')}]", True, False, False),
        (f"[{llama('weather', '{}')}]", False, False, False),
        (f"[{llama('other', ROME)}]", False, False, False),
        ("[]", False, False, False),
        (ROME, False, False, True),
        ('{"city": "much too long"}', False, False, False),
    ):
        assert (takes(required, said), takes(one, said), takes(named, said)) == (by_required, by_one, by_named), said


NODE = {
    "type": "object",
    "properties": {"v": {"type": "integer"}, "w": {"$ref": "#/properties/v"}, "next": {"$ref": "#"}},
    "required": ["v"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("tool_choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_arguments_may_refer_to_their_own_schema(takes: Callable[[str | None, str], bool], tool_choice: Any) -> None:
    """# is the schema of the arguments, also where that stands within the schema of an array of calls."""
    tools = [*TOOLS, {"type": "function", "function": {"name": "f", "parameters": NODE}}]
    spec = chat(tools=tools, tool_choice=tool_choice).params.grammar
    for arguments, fits in (
        ('{"v": 1, "w": 2, "next": {"v": 3}}', True),
        ('{"v": 1, "next": {"w": 3}}', False),
        ('{"v": 1, "w": "2"}', False),
        (f'{{"v": 1, "next": [{llama("now", "{}")}]}}', False),
    ):
        assert takes(spec, f"[{llama('f', arguments)}]" if tool_choice == "required" else arguments) == fits, arguments


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"tool_choice": "auto"}, "tool_choice", "needs tools"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice", "none, auto, required"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "not among"),
        ({"tools": [*TOOLS, TOOLS[1]]}, "tools", "same name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, None, "tools[0].function.name"),
        ({"tools": [{"type": "web"}]}, "tools[0].type", "'function'"),
        ({"tools": TOOLS, "tool_choice": "required", "guided_regex": "a"}, "tool_choice", "cannot be combined"),
        ({"messages": [{"role": "assistant"}]}, "messages[0].content", "missing"),
    ],
)
def test_what_cannot_be_called_is_refused(fields: dict[str, Any], param: str | None, said: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat(**fields)
    assert said in caught.value.message
    assert param is None or caught.value.param == param


# the openai package's own helpers


class Weather(pydantic.BaseModel):
    """Of a city."""

    city: str


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return TextModel.from_folder(write_folder(tmp_path_factory.mktemp("tools"), byte_level(), TEMPLATE))


SAID: list[Any] = [{"role": "user", "content": "sky?"}]
ANSWERS = {
    "auto": ("auto", f"<think>hm</think>\n\nSo {hermes('Weather', ROME)}{hermes('Weather', OSLO)}"),
    "required": ("required", f"[{llama('Weather', ROME)}]"),
    "named": ({"type": "function", "function": {"name": "Weather"}}, ROME),
}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, text: TextModel) -> Iterator[Served]:
    """A daemon whose engine says what is written above, by the prompt that the template makes."""
    folder = write_folder(tmp_path_factory.mktemp("folder"), byte_level(), TEMPLATE)
    script = {}
    for name, (_, answer) in ANSWERS.items():
        options = ChatOptions(variables={"tools": ({"function": {"name": "Weather"}},)})
        prompt = text.encode_chat([{"role": "user", "content": name}], options)
        script[tuple(prompt)] = (*text.encode(answer, add_special_tokens=False), 1)
    jobs = lambda: [FakeJob(LIMITS, script)]  # noqa: E731
    with served(deployment(tmp_path_factory.mktemp("daemon")), folder, jobs) as running:
        yield running


@pytest.mark.parametrize("name", ANSWERS)
def test_the_openai_package_reads_calls_whole_and_streamed(daemon: Served, name: str) -> None:
    """Its parser gives the tool's own model; its stream's events end in the same message."""
    client, (choice, _) = daemon.client(), ANSWERS[name]
    asked: dict[str, Any] = {
        "model": NAME,
        "messages": [{"role": "user", "content": name}],
        "tools": [openai.pydantic_function_tool(Weather)],
        "tool_choice": choice,
        "max_tokens": 300,
    }
    whole = client.chat.completions.parse(**asked).choices[0]
    cities = [call.function.parsed_arguments for call in whole.message.tool_calls or ()]
    assert cities == [Weather(city="Rome"), Weather(city='Oslo é"}')][: 2 if name == "auto" else 1]
    assert whole.finish_reason == ("stop" if name == "named" else "tool_calls")
    assert whole.message.content == ("So " if name == "auto" else None)
    assert getattr(whole.message, "reasoning_content", None) == ("hm" if name == "auto" else None)
    with client.chat.completions.stream(**asked) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        last = stream.get_final_completion().choices[0]
    assert [event.parsed_arguments for event in done] == cities
    assert last.finish_reason == whole.finish_reason
    assert [one.id for one in last.message.tool_calls or ()] != []
    silent = client.chat.completions.create(**asked, extra_body={"include_reasoning": False})
    assert "reasoning_content" not in silent.choices[0].message.model_dump()


SCHEMA = {"type": "object", "properties": {"to": {"type": "string", "format": "idn-email"}}}
DOUBLED = {"type": "object", "properties": {"to": {"type": "array", "uniqueItems": True}}}


def formatted(schema: dict[str, Any]) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}


@pytest.mark.skipif(not grammar.available, reason="no llguidance")
@pytest.mark.parametrize("stream", [False, True])
def test_a_header_names_what_of_a_schema_is_not_enforced(daemon: Served, stream: bool) -> None:
    asked: dict[str, Any] = {"model": NAME, "messages": SAID, "max_tokens": 3, "stream": stream}
    raw = daemon.client().chat.completions.with_raw_response.create(**asked, response_format=formatted(SCHEMA))
    assert raw.headers["x-laddertron-not-enforced"] == "#/properties/to: format idn-email"


@pytest.mark.skipif(not grammar.available, reason="no llguidance")
def test_a_schema_is_refused_by_field_place_and_keyword(daemon: Served) -> None:
    asked: dict[str, Any] = {"model": NAME, "messages": SAID, "max_tokens": 3}
    tool = {"type": "function", "function": {"name": "f", "parameters": DOUBLED}}
    for more, param, place in (
        ({"response_format": formatted(DOUBLED)}, "response_format", "#/properties/to"),
        ({"extra_body": {"guided_json": DOUBLED}}, "guided_json", "#/properties/to"),
        ({"tools": [tool], "tool_choice": "required"}, "tools", "#/$defs/f/properties/to"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            daemon.client().chat.completions.create(**{**asked, **more})
        assert caught.value.param == param
        assert f"{place}: uniqueItems: " in str(caught.value)


@pytest.mark.skipif(not grammar.available, reason="no llguidance")
@pytest.mark.parametrize("thinking", [False, True])
def test_reasoning_and_calls_may_precede_a_grammar(daemon: Served, thinking: bool) -> None:
    """Calls only where the choice is the model's; with tools and a format, it may call or answer."""
    asked: dict[str, Any] = {
        "model": NAME, "messages": [{"role": "user", "content": "auto"}], "max_tokens": 300,
        "tools": [openai.pydantic_function_tool(Weather)],
        "extra_body": {"chat_template_kwargs": {"enable_thinking": thinking}},
    }  # fmt: skip
    for more, calls in (
        ({"response_format": formatted(SCHEMA)}, ["<tool_call>"]),
        ({"tool_choice": "required"}, []),
        ({"response_format": formatted(SCHEMA), "tool_choice": "none"}, []),
    ):
        daemon.client().chat.completions.create(**asked, **more)
        spec = json.loads(daemon.jobs[0].submitted[-1].params.grammar or "")
        assert spec["preamble"] == {"reasoning": ["<think>", "</think>"], "thinking": thinking, "calls": calls}


def test_definitions_of_one_name_belong_to_their_tools(takes: Callable[[str | None, str], bool]) -> None:
    """With and without an `$id`, to which references may be written."""
    tools = []
    for number, (kind, known) in enumerate((("integer", {}), ("boolean", {"$id": "http://example.org/b"}))):
        where = f"{known.get('$id', '')}#/$defs/v"
        parameters = {"type": "object", "properties": {"v": {"$ref": where}}, "$defs": {"v": {"type": kind}}, **known}
        tools.append({"type": "function", "function": {"name": f"t{number}", "parameters": parameters}})
    spec = chat(tools=tools, tool_choice="required").params.grammar
    for name, value, fits in (("t0", "1", True), ("t1", "true", True), ("t0", "true", False), ("t1", "1", False)):
        assert takes(spec, f"[{llama(name, json.dumps({'v': json.loads(value)}))}]") == fits


def test_results_of_calls_go_back_into_the_prompt(text: TextModel) -> None:
    """As templates take them: arguments as an object, tools by name."""
    said = [
        *SAID,
        {"role": "assistant", "content": None, "tool_calls": [call("weather", ROME)]},
        {"role": "tool", "tool_call_id": "c0", "content": "rain"},
    ]
    body = chat(messages=said, tools=TOOLS)
    prompt = text.render(list(body.messages), ChatOptions(variables=body.template_variables))
    rome = '{"name": "weather", "arguments": {"city": "Rome"}}'
    assert prompt == (
        f"<tool>weather</tool><tool>now</tool><|user|>sky?<|assistant|><tool_call>{rome}</tool_call><|tool|>rain<|assistant|>"
    )
    assert "tools" not in (chat(tools=TOOLS, tool_choice="none").template_variables or {})
    assert (text.chat.tool_format, text.chat.reasoning, body.endpoint) == ("hermes", "think", CHAT)


def test_strict_tools_that_the_model_calls_freely_are_named_as_not_enforced() -> None:
    tools = [{"type": "function", "function": {"name": "f", "strict": True}}]
    assert chat(tools=tools).unenforced == ("strict of tools: with tool_choice auto",)
    assert chat(tools=tools, tool_choice="required").unenforced == ()
    assert chat(tools=[{"type": "function", "function": {"name": "f", "strict": False}}]).unenforced == ()


FUNCTION: dict[str, Any] = {"type": "function", "function": {"name": "f"}}
NAMED = {"type": "function", "function": {"name": "f"}}
CHOICE_FORMS: tuple[tuple[Any, str | None], ...] = (
    ("none", None), ("auto", None), ("required", None), (NAMED, None), ("any", "tool_choice"), (7, "tool_choice"),
    ([], "tool_choice"), ({}, "tool_choice.type"), ({"type": "function"}, "tool_choice.function"),
    ({"type": "function", "function": {"name": "g"}}, "tool_choice"), ({"type": "web_search"}, "tool_choice.type"),
    ({"type": "function", "function": {"name": "f", "x": 1}}, "tool_choice.function.x"),
    ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}, None),
    ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}, "tool_choice.allowed_tools.tools"),
    ({"type": "custom", "custom": {"name": "f"}}, "tool_choice.type"),
)  # fmt: skip
TOOL_KINDS: tuple[tuple[Any, str | None], ...] = (
    (FUNCTION, None), ({"type": "function", "function": {"name": "f", "strict": True, "parameters": {}}}, None),
    ({"type": "web_search"}, "tools[0].type"), ({"type": "custom", "custom": {"name": "f"}}, "tools[0].type"),
    ({"type": "mcp", "server_label": "x"}, "tools[0].type"), ({}, "tools[0].type"), ("f", "tools[0]"), (7, "tools[0]"),
    ({"type": "function"}, "tools[0].function"), ({"type": "function", "function": {}}, "tools[0].function.name"),
    ({"type": "function", "function": {"name": "f", "strict": 1}}, "tools[0].function.strict"),
)  # fmt: skip
SENT_CALLS: tuple[tuple[dict[str, Any], str | None], ...] = (
    ({"id": "c", "function": {"name": "f", "arguments": ""}}, None),
    ({"id": "c", "type": "function", "index": 0, "function": {"name": "f", "arguments": '{"cut', "x": 1}}, None),
    ({"id": "c", "type": "custom", "custom": {"name": "f", "input": "x"}}, "type"),
    ({"type": "function", "function": {"name": "f", "arguments": "{}"}}, "id"),
    ({"id": "c", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}, "function.arguments"),
    ({"id": "c", "type": "function", "function": {"name": "", "arguments": "{}"}}, "function.name"),
)


def refused_param(**fields: Any) -> str | None:
    """The field that a body is refused for; None if it is served."""
    try:
        chat(**fields)
    except ApiError as bad:
        return bad.param
    return None


@pytest.mark.parametrize(("choice", "param"), CHOICE_FORMS, ids=str)
def test_every_form_of_a_choice_is_served_or_refused_by_name(choice: Any, param: str | None) -> None:
    assert refused_param(tools=[FUNCTION], tool_choice=choice) == param


@pytest.mark.parametrize(("tool", "param"), TOOL_KINDS, ids=str)
def test_every_kind_of_tool_is_served_or_refused_by_name(tool: Any, param: str | None) -> None:
    assert refused_param(tools=[tool]) == param


@pytest.mark.parametrize(("call", "param"), SENT_CALLS, ids=str)
def test_every_call_sent_back_is_served_or_refused_by_name(call: Any, param: str | None) -> None:
    turn = {"role": "assistant", "content": None, "tool_calls": [call]}
    place = None if param is None else f"messages[0].tool_calls[0].{param}"
    assert refused_param(messages=[turn, {"role": "tool", "tool_call_id": "c", "content": "x"}]) == place


def test_a_format_of_content_does_not_hinder_a_required_call() -> None:
    """As in OpenAI's API: an answer that must call has no content; grammars that are vLLM's alone are refused."""
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
    for choice in ("required", NAMED):
        alone = chat(tools=[FUNCTION], tool_choice=choice)
        both = chat(tools=[FUNCTION], tool_choice=choice, response_format=form)
        assert (both.params.grammar, both.grammar_param) == (alone.params.grammar, "tools")
        assert refused_param(tools=[FUNCTION], tool_choice=choice, guided_json={}) == "tool_choice"
