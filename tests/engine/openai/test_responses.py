"""/v1/responses by the openai package, unmodified: text, reasoning, tools and parsed answers, whole and streamed."""

from __future__ import annotations

import contextlib
import json
import re
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import openai
import pydantic
import pytest
from daemon_tools import LIMITS, NAME, OneTokenJob, Served, deployment, lines_of, served, submit, wait_batch
from fake_job import FakeJob
from laddertron.engine.openai.answers import Answer
from laddertron.engine.openai.body import check_body
from laddertron.engine.openai.errors import ApiError
from laddertron.engine.openai.responses import ResponseWriter
from laddertron.engine.openai.responses_body import ResponsesFields
from laddertron.engine.openai.schema import RESPONSES
from laddertron.engine.openai.to_engine import RequestOrigin, to_requests
from laddertron.engine.request import TokensEvent
from laddertron.engine.text.tokenizer import ChatOptions, TextModel
from openai.types.responses import Response, ResponseErrorEvent, ResponseFailedEvent
from tiny_text import byte_level, write_folder
from waiting import HANG_S, until

TEMPLATE = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function|tojson }}</tool_call>{% endfor %}{% endfor %}"
)


class Weather(pydantic.BaseModel):
    """Of a city."""

    city: str


CALL = '<tool_call>{"name": "Weather", "arguments": {"city": "Rome"}}</tool_call>'
ANSWERS = {"plain": "Hello", "thinks": "<think>hm</think>So", "calls": f"<think>hm</think>So{CALL}{CALL}"}
ANSWERS["mixed"] = f"So{CALL}and{CALL}"
TOOL: Any = {"type": "function", "name": "Weather", "parameters": Weather.model_json_schema(), "strict": True}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return TextModel.from_folder(write_folder(tmp_path_factory.mktemp("text"), byte_level(), TEMPLATE))


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, text: TextModel) -> Iterator[Served]:
    script = {}
    for name, answer in ANSWERS.items():
        tools = ({"function": {"name": "Weather"}},) if CALL in answer else None
        prompt = text.encode_chat([{"role": "user", "content": name}], ChatOptions(variables={"tools": tools}))
        script[tuple(prompt)] = (*text.encode(answer, add_special_tokens=False), 1)
    folder = deployment(tmp_path_factory.mktemp("daemon"))
    with served(folder, text.folder, lambda: [FakeJob(LIMITS, script)]) as running:
        yield running


def jsonl(lines: Iterable[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def fields_of(name: str) -> dict[str, Any]:
    tools = {"tools": [TOOL], "parallel_tool_calls": True} if CALL in ANSWERS[name] else {}
    return {"model": NAME, "input": name, "max_output_tokens": 300, **tools}


@pytest.mark.parametrize("name", ANSWERS)
def test_whole_and_streamed_responses_are_equal(daemon: Served, name: str) -> None:
    """The package's stream accumulates the same items from the events, whose numbers rise by one."""
    client = daemon.client()
    whole = client.responses.create(**fields_of(name))
    assert (whole.status, whole.output_text) == ("completed", {"plain": "Hello", "mixed": "Soand"}.get(name, "So"))
    kinds = {"plain": ["message"], "thinks": ["reasoning", "message"], "mixed": ["message", "function_call"] * 2}
    kinds["calls"] = [*kinds["thinks"], "function_call", "function_call"]
    assert [item.type for item in whole.output] == kinds[name]
    assert whole.usage is not None
    assert (whole.usage.output_tokens_details.reasoning_tokens > 0) == ("<think>" in ANSWERS[name])
    with client.responses.stream(**fields_of(name)) as stream:
        events = list(stream)
        last = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events][:3] == [
        "response.created", "response.in_progress", "response.output_item.added",
    ]  # fmt: skip
    assert events[-1].type == "response.completed"
    own = {"id", "call_id", "parsed", "parsed_arguments"}
    bare = [[item.model_dump(exclude=own) for item in response.output] for response in (whole, last)]
    for item in [*bare[0], *bare[1]]:
        for part in item.get("content") or ():
            part.pop("parsed", None)
    assert bare[0] == bare[1]
    calls = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert [call.arguments for call in calls] == ['{"city": "Rome"}'] * ANSWERS[name].count(CALL)


def test_a_response_can_be_parsed_and_sent_back(daemon: Served, text: TextModel) -> None:
    client = daemon.client()
    parsed = client.responses.parse(**{**fields_of("calls"), "tools": [openai.pydantic_function_tool(Weather)]})
    arguments = [item.parsed_arguments for item in parsed.output if item.type == "function_call"]
    assert arguments == [Weather(city="Rome")] * 2
    items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "calls"}]}]
    items += [item.model_dump(exclude_none=True) for item in client.responses.create(**fields_of("calls")).output]
    calls = [item for item in items if item.get("type") == "function_call"]
    ids = enumerate(item["call_id"] for item in calls)
    items += [{"type": "function_call_output", "call_id": call_id, "output": f"sun{n}"} for n, call_id in ids]
    body = check_body({**fields_of("calls"), "input": items, "instructions": "be short"}, RESPONSES)
    prompt = text.render(list(body.messages), ChatOptions(variables=body.template_variables))
    call = '<tool_call>{"name": "Weather", "arguments": {"city": "Rome"}}</tool_call>'
    assert prompt == (
        f"[Weather]<|system|>be short<|user|>calls<|assistant|><think>hm</think>So{call}{call}<|tool|>sun0<|tool|>sun1"
    )


def test_a_batch_of_responses_has_the_same_answers(daemon: Served) -> None:
    """Small lines, equal ones, one too large for the event loop, and one that cannot be served."""
    bodies = {name: fields_of(name) for name in ANSWERS}
    bodies |= {"equal": fields_of("plain"), "large": {**fields_of("plain"), "metadata": {"k": "v" * 70_000}}}
    bodies["bad"] = {**fields_of("plain"), "previous_response_id": "resp_1"}
    lines = {name: {"custom_id": name, "method": "POST", "url": RESPONSES, "body": bodies[name]} for name in bodies}
    client = daemon.client()
    refused = wait_batch(client, submit(client, jsonl(lines.values()), endpoint=RESPONSES).id)
    assert (refused.status, refused.errors.data[0].param) == ("failed", "previous_response_id")
    del lines["bad"]
    batch = wait_batch(client, submit(client, jsonl(lines.values()), endpoint=RESPONSES).id)
    assert (batch.status, batch.request_counts.completed) == ("completed", len(lines))
    for name, line in lines_of(client, batch.output_file_id).items():
        answer = Response.model_validate(line["response"]["body"])
        whole = client.responses.create(**bodies[name])
        assert (answer.object, answer.output_text, answer.status) == ("response", whole.output_text, "completed")
        assert [item.type for item in answer.output] == [item.type for item in whole.output]


def test_an_answer_that_is_cut_off_is_incomplete(daemon: Served) -> None:
    response = daemon.client().responses.create(**{**fields_of("plain"), "max_output_tokens": 2})
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"


def test_a_stream_that_fails_ends_in_openai_s_events(text: TextModel) -> None:
    """The engine's failure after the first token, and a timeout."""
    body = check_body({**fields_of("plain"), "stream": True}, RESPONSES)
    requests = to_requests(body, [(2, 3)], LIMITS, RequestOrigin("r", "run", "key"), text)
    answer, writer = Answer(body, requests, text, "1", 1), ResponseWriter()
    delta = answer.take(TokensEvent("r", 0, 0, tuple(text.encode("Hel", add_special_tokens=False))))
    assert delta is not None
    writer.of(answer, delta)
    answer.error = ApiError("NaN logits", "numerical_error", status=500)
    *_, event = writer.end(answer).decode().split("\n\n")[:-1]
    last = ResponseFailedEvent.model_validate_json(event.partition("data: ")[2])
    assert (last.response.status, last.response.error and last.response.error.code) == ("failed", "server_error")
    assert last.response.output_text == "Hel"
    name, _, data = ResponseWriter().failed(ApiError("late", "request_timeout", status=504)).decode().partition("\n")
    assert name == "event: error"
    assert ResponseErrorEvent.model_validate_json(data.removeprefix("data: ")).code == "request_timeout"


def test_a_stream_that_its_client_leaves_is_cancelled(text: TextModel, tmp_path: Path) -> None:
    """Amid the events, while the engine holds."""
    job = OneTokenJob(LIMITS, text.encode("a", add_special_tokens=False)[0])
    job.pause_at = 3
    with served(deployment(tmp_path), text.folder, lambda: [job]) as running:
        data = json.dumps({"model": NAME, "input": "x", "stream": True}).encode()
        head = f"POST /v1/responses HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(data)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", running.port), timeout=HANG_S) as connection:
            connection.sendall(head.encode() + data)
            seen = b""
            while b"response.output_text.delta" not in seen:
                seen += connection.recv(4096)
            assert job.cancels == []
        until(lambda: len(job.cancels) == 1)
        job.release()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"inputs": "x"}, "inputs"),
    ],
)
def test_what_needs_a_store_or_a_server_s_tool_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        check_body({"model": "m", "input": "x", **fields}, RESPONSES)
    assert caught.value.param == param


def function(**fields: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "name": "f", **fields}]}


def item(kind: str, **fields: Any) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": "x"}, {"type": kind, **fields}]}


CALL_ITEM = {"call_id": "c", "name": "f", "arguments": "{}"}
ALLOWED: dict[str, Any] = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "f"}]}
WRONG: dict[str, dict[str, Any]] = {
    "model": {"model": 7},
    "input": {"input": 7},
    "input[0]": {"input": ["x"]},
    "input[0].role": {"input": [{"role": "tool", "content": "x"}]},
    "input[0].content": {"input": [{"role": "user"}]},
    "input[0].contents": {"input": [{"role": "user", "content": "x", "contents": "x"}]},
    "input[0].content[0].type": {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
    "input[0].content[1].text": {"input": [{"role": "user", "content": [{"type": "input_text", "text": "x"}] * 1 + [
        {"type": "input_text"}]}]},
    "input[0].type": {"input": [{"id": "msg_1"}]},
    "input[1].type": item("web_search_call", id="ws_1"),
    "input[1].call_id": item("function_call", **{**CALL_ITEM, "call_id": 7}),
    "input[1].name": item("function_call", **{**CALL_ITEM, "name": ""}),
    "input[1].arguments": item("function_call", **{**CALL_ITEM, "arguments": {}}),
    "input[1].output": item("function_call_output", call_id="c"),
    "input[1].output[0].type": item("function_call_output", call_id="c", output=[{"type": "input_file"}]),
    "input[1].content[0].text": item("reasoning", content=[{"type": "reasoning_text"}]),
    "input[1].encrypted_content": item("reasoning", summary=[], encrypted_content="gAAA"),
    "instructions": {"instructions": 7},
    "max_output_tokens": {"max_output_tokens": 0},
    "temperature": {"temperature": 3},
    "top_p": {"top_p": -1},
    "top_logprobs": {"top_logprobs": 2},
    "stream": {"stream": 1},
    "tools": function() | {"tools": function()["tools"] * 2},
    "tools[0].type": {"tools": [{"type": "custom", "name": "f"}]},
    "tools[0].name": function(name="a b"),
    "tools[0].description": function(description=7),
    "tools[0].parameters": function(parameters=[]),
    "tools[0].strict": function(strict="yes"),
    "tools[0].output_schema": function(output_schema={}),
    "tool_choice": {"tool_choice": "required"},
    "tool_choice.type": function() | {"tool_choice": {"type": "web_search"}},
    "tool_choice.tools": function() | {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}},
    "tool_choice.mode": function() | {"tool_choice": {"type": "allowed_tools", "mode": "any", "tools": []}},
    "tool_choice.tools[0].type": function() | {"tool_choice": {**ALLOWED, "tools": [{"type": "mcp"}]}},
    "tool_choice.tools[0].name": function() | {"tool_choice": {**ALLOWED, "tools": [{"type": "function"}]}},
    "tool_choice.name": function() | {"tool_choice": {"type": "function"}},
    "parallel_tool_calls": function() | {"parallel_tool_calls": 1},
    "text.format": {"text": {"format": []}},
    "text.format.type": {"text": {"format": {"type": "xml"}}},
    "text.format.schema": {"text": {"format": {"type": "json_schema", "name": "n"}}},
    "text.format.name": {"text": {"format": {"type": "json_schema", "schema": {}, "name": 7}}},
    "text.format.extra": {"text": {"format": {"type": "json_schema", "schema": {}, "extra": 7}}},
    "text.verbosity": {"text": {"verbosity": ""}},
    "reasoning.effort": {"reasoning": {"effort": ""}},
    "truncation": {"truncation": "middle"},
    "include": {"include": ["message.output_text.logprobs"]},
    "metadata": {"metadata": []},
    "user": {"user": "x" * 600},
}  # fmt: skip
CHAT_NAMES = (
    "messages",
    "response_format",
    "max_tokens",
    ".function",
    ".tool_calls",
    "reasoning_effort",
    "json_schema.",
)


@pytest.mark.parametrize("param", WRONG)
def test_an_error_names_the_field_that_was_sent(param: str) -> None:
    """In `param` and in the message, which names no field of the chat that the body becomes."""
    with pytest.raises(ApiError) as caught:
        check_body({"model": "m", "input": "x", **WRONG[param]}, RESPONSES)
    assert caught.value.param == param
    assert param in caught.value.message or param.rpartition(".")[2] in caught.value.message
    assert not any(name in caught.value.message for name in CHAT_NAMES), caught.value.message


CHECKED = [n for n, field in ResponsesFields.model_fields.items() if not str(field.description).startswith("Ignored")]


@pytest.mark.parametrize("name", CHECKED)
@pytest.mark.parametrize("value", [7.5, [[]], {"\u00e9": 1}, [7]], ids=str)
def test_a_value_of_another_type_is_refused_by_the_field_s_name(name: str, value: Any) -> None:
    """Or by a name within it, which no name of a type follows."""
    with pytest.raises(ApiError) as caught:
        check_body({"model": "m", "input": "x", **function(), name: value}, RESPONSES)
    assert re.match(rf"{name}\b(?!\.(str|list|dict|tuple))", caught.value.param or ""), caught.value.param


def test_every_field_is_refused_by_its_name_in_some_case() -> None:
    known = {name for name in ResponsesFields.model_fields if ResponsesFields.model_fields[name].description is None}
    refused = {"store", "previous_response_id", "conversation", "background", "prompt", "moderation"}
    refused |= {"context_management", "image", "access_programs", "background_options"}
    tried = {re.split(r"[.\[]", param)[0] for param in WRONG}
    assert known - refused == tried - {"include"}
    for name in refused:
        with pytest.raises(ApiError, match=name) as caught:
            check_body({"model": "m", "input": "x", name: {"id": "x"}}, RESPONSES)
        assert caught.value.param == name


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"input": "x" * 2000}, "input", "context_length_exceeded"),
        ({"input": [{"role": "user", "content": "x" * 2000}]}, "input", "context_length_exceeded"),
        ({"max_output_tokens": 5000}, "input", "context_length_exceeded"),
        ({"text": {"format": {"type": "json_schema", "name": "n", "schema": {"not": {}}}}}, "text.format", None),
        ({"tools": [{**TOOL, "parameters": {"not": {}}}], "tool_choice": "required"}, "tools", None),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice", None),
    ],
)
def test_a_refusal_after_the_form_names_the_field_too(
    daemon: Served, fields: dict[str, Any], param: str, code: str | None
) -> None:
    """By a text worker, of a small and of a large body, and by the model's limits."""
    for more in ({}, {"metadata": {"k": "v" * 70_000}}):
        with pytest.raises(openai.BadRequestError) as caught:
            daemon.client().responses.create(**{**fields_of("plain"), **fields, **more})
        assert caught.value.param == param
        assert code is None or caught.value.code == code
        assert not any(name in caught.value.message.partition("'param'")[0] for name in CHAT_NAMES)


def test_what_a_server_sent_is_taken_back(text: TextModel) -> None:
    """Items with all the fields that OpenAI sends, and unknown ones, which are counted; nothing of the text is lost."""
    own = {"id": "x_1", "status": "completed"}
    items = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "q"}], **own},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "r1"}], "encrypted_content": None, **own},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "r2"}], **own},
        {"type": "reasoning", "summary": [], "id": "rs_3"},
        {
            "type": "message", "role": "assistant", "phase": "commentary", **own,
            "content": [
                {"type": "output_text", "text": "a1", "annotations": [{"type": "url_citation"}], "logprobs": []},
                {"type": "refusal", "refusal": "a2"},
            ],
        },
        {"type": "function_call", **CALL_ITEM, "namespace": "n", **own},
        {"type": "function_call", **CALL_ITEM, "call_id": "d", **own, "arguments": '{"trunc'},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "o1"}], **own},
        {"type": "function_call_output", "call_id": "d", "output": ""},
        {"role": "assistant", "content": "a3"},
        {"role": "developer", "content": "d"},
        {"type": None, "role": "user", "content": "q2"},
    ]  # fmt: skip
    body = check_body({"model": "m", "input": items}, RESPONSES)
    assert body.ignored_fields == 2
    assert [message["role"] for message in body.messages] == [
        "user", "assistant", "tool", "tool", "assistant", "system", "user",
    ]  # fmt: skip
    turn = body.messages[1]
    assert turn["reasoning_content"] == "r1\nr2"
    assert [part["text"] for part in turn["content"]] == ["a1", "a2"]
    assert [(call["id"], call["function"]["arguments"]) for call in turn["tool_calls"]] == [
        ("c", "{}"),
        ("d", '{"trunc'),
    ]
    assert [message.get("tool_call_id") for message in body.messages[2:4]] == ["c", "d"]
    prompt = text.render(list(body.messages), ChatOptions(variables=body.template_variables))
    for said in ("q", "r1\nr2", "a1\na2", "o1", "a3", "d", "q2", "trunc"):
        assert said in prompt


SHAPES: tuple[Any, ...] = (7, "x", {"a": 1}, [1], [None], [[]], [{"text": 5}], [{"text": None}], [{"type": []}])


@pytest.mark.parametrize("kind", ["message", "function_call", "function_call_output", "reasoning", [], 3])
@pytest.mark.parametrize("name", ["role", "content", "summary", "name", "arguments", "call_id", "output"])
def test_an_item_of_any_shape_is_taken_or_refused(kind: Any, name: str) -> None:
    """An error of Python's own would be a fault of the server's to the client."""
    for value in SHAPES:
        body = {"model": "m", "input": [{"type": kind, name: value}, {"role": "user", "content": "x"}]}
        with contextlib.suppress(ApiError):
            check_body(body, RESPONSES)


def test_reasoning_without_text_is_refused_by_its_place() -> None:
    for name, value, place in (("content", "abc", ""), ("summary", [{"text": 5}], "[0].text")):
        with pytest.raises(ApiError) as caught:
            check_body({"model": "m", "input": [{"type": "reasoning", name: value}]}, RESPONSES)
        assert caught.value.param == f"input[0].{name}{place}"


def test_a_reference_to_an_item_names_the_setting_of_the_client() -> None:
    with pytest.raises(ApiError, match="store: false") as caught:
        check_body({"model": "m", "input": [{"type": "item_reference", "id": "msg_1"}]}, RESPONSES)
    assert caught.value.param == "input[0].type"


def test_fields_become_those_of_a_chat() -> None:
    schema = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    body = check_body(
        {
            "model": "m", "input": "x", "store": False, "text": {"format": schema}, "reasoning": {"effort": "low"},
            "max_output_tokens": 7, "temperature": 0, "tool_choice": "auto",
        },
        RESPONSES,
    )  # fmt: skip
    assert (body.max_tokens, body.params.temperature) == (7, 0)
    assert body.params.grammar is not None
    assert body.template_variables == {"reasoning_effort": "low"}
    assert body.responses is not None
    assert body.responses["text"]["format"] == schema


def test_allowed_tools_restrict_what_is_called_and_not_what_is_shown() -> None:
    """The template renders all tools, which keeps the prompt's prefix; the grammar and the parser know the allowed."""
    tools = [{"type": "function", "name": name, "parameters": {}} for name in "fgh"]
    allowed = [{"type": "function", "name": name} for name in "hf"]
    for mode in ("auto", "required"):
        choice = {"type": "allowed_tools", "mode": mode, "tools": allowed}
        body = check_body({"model": "m", "input": "x", "tools": tools, "tool_choice": choice}, RESPONSES)
        assert [tool["function"]["name"] for tool in body.tools] == ["f", "h"]
        assert body.tool_choice == mode
        assert body.template_variables is not None
        assert [tool["function"]["name"] for tool in body.template_variables["tools"]] == ["f", "g", "h"]
        grammar = body.params.grammar or ""
        assert ('"f"' in grammar, '"g"' in grammar, '"h"' in grammar) == (mode == "required", False, mode == "required")
        assert body.responses is not None
        assert body.responses["tool_choice"] == choice
