"""The door: what it takes, what it refuses, and with which words."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from door import LIMITS, ORIGIN, USER, chat, completion
from fake_job import FakeJob
from laddertron.engine.job import EngineJob
from laddertron.engine.openai.answers import event
from laddertron.engine.openai.batch_input import (
    output_line,
)
from laddertron.engine.openai.body import Body, parse_body
from laddertron.engine.openai.errors import ApiError
from laddertron.engine.openai.responses_body import ResponsesFields
from laddertron.engine.openai.schema import CHAT, COMPLETIONS, MODELS, json_schema
from laddertron.engine.openai.to_engine import check_model, default_seed, to_requests
from laddertron.engine.request import ModelLimits, Request, SamplingParams
from laddertron.engine.text.tokenizer import TextModel
from laddertron.topology.json_codec import ReadError, parse
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params as response_params
from tiny_text import write_folder
from waiting import cheapest


def refusal(**fields: Any) -> ApiError:
    """Of a chat body, unless `prompt` is among the fields."""
    with pytest.raises(ApiError) as caught:
        (completion if "prompt" in fields else chat)(**fields)
    return caught.value


# -- JSON


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"\xef\xbb\xbf{}", "byte order mark"),
        (b'{"a": "\xff"}', "byte 7 (0xff) is not UTF-8"),
        (b'{"a": NaN}', "NaN is not JSON"),
        (b'{"a": -Infinity}', "-Infinity is not JSON"),
        (b'{"a": 1e999}', "1e999 is too large"),
        (b'{"a": -1e999}', "too large"),
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "duplicate key 'c'"),
        (b'{"a": "\\ud800"}', "\\ud800, half of a surrogate pair"),
        (b'{"\\udc00": 1}', "half of a surrogate pair"),
        (b"[" * 100_000, "nested deeper than 64"),
        (b'{"a":' * 65 + b"1" + b"}" * 65, "nested deeper than 64 levels at character 321"),
        (b"[" + b"[]," * 70_000 + b"[]]", "more than 65536 arrays"),
        (b"1" * 5000, "too many digits"),
        (b"{'a': 1}", "not JSON: Expecting property name"),
        (b"", "not JSON: Expecting value at character 1"),
        (b"{} {}", "Extra data at character 4"),
        (b'{"a": "tab\there"}', "Invalid control character"),
        (b'{"a": "unfinished', "Unterminated string"),
    ],
)
def test_strict_json_refuses(data: bytes, said: str) -> None:
    with pytest.raises(ReadError) as caught:
        parse(data)
    assert said in str(caught.value)


def test_strict_json_takes_what_is_right() -> None:
    assert parse('{"a": [1, -2.5e3, "é\\ud83e\\udd99", true, null]}'.encode()) == {"a": [1, -2500.0, "é🦙", True, None]}
    assert parse(b'{"a": "' + b"[{" * 100 + b'\\""}') == {"a": "[{" * 100 + '"'}, "brackets in strings do not nest"


def test_no_input_takes_long() -> None:
    """Ten megabytes of each of the worst inputs known: at most a second of processor time each, 400 MB at most."""
    size = 10_000_000
    for data in (
        b"[" * size,
        b'"' * size,
        b'\\"' * (size // 2),
        b"[]," * (size // 3),
        b'{"' * (size // 2),
        b"[1," * 99 + b'"' * size,
    ):

        def faulty(data: bytes = data) -> None:
            with pytest.raises(ReadError):
                parse(data)

        assert cheapest(faulty, 2) < 2


# -- bodies


def test_every_field_reaches_its_place() -> None:
    body = chat(
        temperature=0, top_p=0.5, top_k=-1, min_p=0.1, presence_penalty=-2, frequency_penalty=2, repetition_penalty=1.5,
        logit_bias={"5": -100, "7": 1.5}, seed=-1, n=3, stop="x", stop_token_ids=[3, 4], ignore_eos=True,
        allowed_token_ids=[3, 9],
        include_stop_str_in_output=True, skip_special_tokens=False, min_tokens=2, max_completion_tokens=9,
        logprobs=True, top_logprobs=4, prompt_logprobs=1, user="u", add_generation_prompt=False,
        chat_template_kwargs={"enable_thinking": False}, add_special_tokens=True, truncate_prompt_tokens=5,
        metadata={"a": "b"}, store=True, tools=[], tool_choice="none", service_tier="flex", modalities=["text"],
        bad_words=["and", "x y"], priority=-7, cache_salt="s", return_token_ids=True, return_tokens_as_token_ids=True,
        documents=[{"title": "t"}], reasoning_effort="low", verbosity="high", echo=True,
    )  # fmt: skip
    params = SamplingParams(
        max_tokens=9, seed=2**64 - 1, min_tokens=2, temperature=0.0, top_p=0.5, top_k=0, min_p=0.1,
        presence_penalty=-2.0, frequency_penalty=2.0, repetition_penalty=1.5, logit_bias=((5, -100.0), (7, 1.5)), n=3,
        allowed_token_ids=(3, 9), stop_token_ids=(3, 4), logprobs=4, prompt_logprobs=1,
    )  # fmt: skip
    assert body == Body(
        CHAT, "m", params, messages=({"role": "user", "content": "hi"},), max_tokens=9, seed=2**64 - 1, stop=("x",),
        include_stop_str_in_output=True, ignore_eos=True, skip_special_tokens=False, add_special_tokens=True,
        truncate_prompt_tokens=5, add_generation_prompt=False, bad_words=("and", "x y"), priority=-7,
        cache_salt="s", return_token_ids=True, return_tokens_as_token_ids=True, echo=True,
        template_variables={
            "documents": ({"title": "t"},), "reasoning_effort": "low", "verbosity": "high", "enable_thinking": False,
        },
    )  # fmt: skip
    (request,) = to_requests(body, [(8, 9)], LIMITS, ORIGIN)
    assert request.params == params
    assert (request.order, request.salt) == (-7, "\0s")


def test_harmless_fields_of_other_servers_are_taken() -> None:
    """Whatever they hold: they change nothing. What would change an answer is refused by name."""
    names = [name for name, field in MODELS[CHAT].model_fields.items() if str(field.description).startswith("Ignored")]
    assert {"prompt_cache_key", "safety_identifier", "request_id", "metadata", "store", "prediction"} <= set(names)
    for given in (True, "x", {"a": [1]}, 0.5):
        assert chat(**dict.fromkeys(names, given)) == chat()
    taken: dict[str, Any]
    for taken in ({"detokenize": True}, {"best_of": 3, "n": 3}, {"vllm_xargs": {}}, {"logits_processors": []}):
        assert chat(**taken) == chat(**{key: given for key, given in taken.items() if key == "n"})
    wanted = {"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": True}
    streamed = chat(stream=True, stream_options=wanted)
    assert (streamed.include_usage, streamed.continuous_usage_stats) == (True, True)
    for name, value in (("detokenize", False), ("kv_transfer_params", {"a": 1}), ("vllm_xargs", {"a": 1})):
        assert refusal(**{name: value}).code == "unsupported_parameter"


@pytest.mark.parametrize(
    ("fields", "params"),
    [
        (MODELS[CHAT], chat_params.CompletionCreateParamsBase),
        (MODELS[COMPLETIONS], completion_params.CompletionCreateParamsBase),
        (ResponsesFields, response_params.ResponseCreateParamsBase),
    ],
)
def test_every_field_of_openai_s_package_is_known(fields: Any, params: Any) -> None:
    assert params.__annotations__.keys() <= fields.model_fields.keys()


def test_bad_words_are_spelt_in_both_places(tmp_path: Path) -> None:
    """At a text's beginning and behind a space, where that is a token as well; the engine gets ids, and a request that
    allows nothing else is refused."""
    text = TextModel.from_folder(write_folder(tmp_path))

    def spelt(word: str) -> tuple[int, ...]:
        return tuple(text.encode(word, add_special_tokens=False))

    def requested(**fields: Any) -> Request:
        body = completion(**fields)
        ids = text.bad_word_ids(body.bad_words)
        (made,) = to_requests(body._replace(params=replace(body.params, bad_word_ids=ids)), [(2,)], LIMITS, ORIGIN)
        return made

    request = requested(bad_words=["and", " th", "th"])
    assert request.params.bad_word_ids == (spelt("and"), spelt("th"))
    assert len(spelt("and")) == 1
    assert len(spelt(" th")) == 1 < len(spelt("th")), "as many ids, or the rule is another word's"
    assert requested(bad_words=["x"]).params.bad_word_ids == (spelt("x"),)
    with pytest.raises(ApiError, match="bad_words forbid all of allowed_token_ids"):
        requested(bad_words=["and"], allowed_token_ids=list(spelt("and")))


def test_a_prompt_is_cut_to_its_end() -> None:
    """To so many tokens, or with -1 to what fits beside the answer; a cut prompt is never too long."""
    for keep, asked, kept in ((3, 4, 3), (-1, 4, 60), (-1, None, 63), (70, 4, None)):
        body = completion(truncate_prompt_tokens=keep, max_tokens=asked)
        if kept is None:
            with pytest.raises(ApiError, match="shorten the prompt"):
                to_requests(body, [tuple(range(2, 202))], LIMITS, ORIGIN)
        else:
            (request,) = to_requests(body, [tuple(range(2, 202))], LIMITS, ORIGIN)
            assert request.prompt == tuple(range(202 - kept, 202))


def test_null_counts_as_absent() -> None:
    nulls = {name: None for name in MODELS[CHAT].model_fields if name not in ("model", "messages")}
    assert chat(**nulls) == chat()


@pytest.mark.parametrize(
    ("fields", "param", "code", "said"),
    [
        ({"temprature": 1}, "temprature", "unknown_parameter", "did you mean temperature?"),
        ({"temperature": -1}, "temperature", "invalid_value", "from 0 to 2"),
        ({"temperature": "1"}, "temperature", "invalid_type", "is a string"),
        ({"temperature": True}, "temperature", "invalid_type", "is a boolean"),
        ({"temperature": float("nan")}, "temperature", "invalid_value", "from 0 to 2"),
        ({"top_p": 2}, "top_p", "invalid_value", "from 0 to 1"),
        ({"top_k": -2}, "top_k", "invalid_value", "from -1"),
        ({"n": 10**9}, "n", "invalid_value", "n=1000000000: must be from 1 to 128"),
        ({"n": 10**4000}, "n", "invalid_value", "a very large integer"),
        ({"n": 1.0}, "n", "invalid_type", "an integer is expected"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value", "from 1"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "invalid_value", "differ"),
        ({"max_tokens": 3, "min_tokens": 4}, "min_tokens", "invalid_value", "more than max_tokens=3"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias", "invalid_value", "at most 1024"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "invalid_value", "digits"),
        ({"logit_bias": {"1": 101}}, "logit_bias[1]", "invalid_value", "from -100 to 100"),
        ({"logit_bias": {"1": 1, "01": 2}}, "logit_bias", "invalid_value", "duplicate token 1"),
        ({"logit_bias": {"1": "x"}}, "logit_bias[1]", "invalid_type", "a number is expected"),
        ({"temperature": 10**400}, "temperature", "invalid_value", "from 0 to 2"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "invalid_value", "1 to 16384"),
        ({"allowed_token_ids": [1, "a"]}, "allowed_token_ids[1]", "invalid_type", "an integer"),
        ({"stop": ["x"] * 17}, "stop", "invalid_value", "0 to 16"),
        ({"stop": ""}, "stop[0]", "invalid_value", "1 to 256"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]", "invalid_value", "from 0"),
        ({"seed": 2**64}, "seed", "invalid_value", "must be from"),
        ({"top_logprobs": 3}, "top_logprobs", "invalid_value", "needs logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value", "0 to 20"),
        ({"stream_options": {}}, "stream_options", "invalid_value", "needs stream: true"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "invalid_value", "streamed"),
        ({"best_of": 2}, "best_of", "unsupported_parameter", "set n"),
        ({"use_beam_search": True}, "use_beam_search", "unsupported_parameter", "beam search"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "missing_required_parameter", "is missing"),
        ({"tool_choice": "auto"}, "tool_choice", "invalid_value", "needs tools"),
        ({"audio": {}}, "audio", "unsupported_parameter", "text only"),
        ({"modalities": ["text", "audio"]}, "modalities", "unsupported_parameter", "text only"),
        ({"chat_template": "{{ x }}"}, "chat_template", "unsupported_parameter", "own template"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages", "invalid_value", "may not set"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", None, "both be"),
        ({"messages": []}, "messages", "invalid_value", "0 entries: 1 to 8192"),
        ({"messages": None}, "messages", "missing_required_parameter", "is missing"),
        ({"messages": "hi"}, "messages", "invalid_type", "an array"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role", "invalid_value", "'function'"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role", "invalid_value", "'king'"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "missing_required_parameter", "missing"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "invalid_type", "null"),
        ({"messages": [{**USER[0], "contnet": "x"}]}, "messages[0].contnet", "unknown_parameter", "mean content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]},
            "messages[0].content[0].type", "unsupported_value", "'image_url': only text parts",
        ),
        ({"messages": [*USER, {"role": "assistant", "content": "x", "tool_calls": [{}]}]},
         "messages[1].tool_calls[0].id", "missing_required_parameter", "missing"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "unsupported_value", "'json_object'"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", None, "missing"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "nam": "x"}}},
         "response_format.json_schema.nam", "unknown_parameter", "did you mean name?"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "invalid_value", "exactly one"),
        ({"guided_regex": "a", "guided_json": {}}, None, "invalid_value", "cannot be combined"),
        ({"guided_json": "{"}, "guided_json", "invalid_value", "not JSON"),
        ({"guided_regex": "a\\"}, None, "invalid_value", "middle of an escape"),
        ({"prompt": 7}, "prompt", "invalid_type", "is an integer"),
        ({"prompt": []}, "prompt", "invalid_value", "is empty"),
        ({"prompt": ["a", [1]]}, "prompt[1]", "invalid_type", "an array"),
        ({"prompt": [1, "a"]}, "prompt[1]", "invalid_type", "an integer"),
        ({"prompt": [1, -1]}, "prompt[1]", "invalid_value", "from 0"),
        ({"prompt": ["a"] * 1000, "n": 2}, "n", "invalid_value", "2000 choices"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens", "invalid_value", "needs echo"),
        ({"prompt": "a", "suffix": "b"}, "suffix", "unsupported_parameter", "only continued"),
        ({"prompt": "a", "messages": USER}, "messages", "unknown_parameter", "unknown field 'messages'"),
    ],
)  # fmt: skip
def test_a_bad_field_is_refused_by_name(fields: dict[str, Any], param: str | None, code: str | None, said: str) -> None:
    bad = refusal(**fields)
    assert said in bad.message
    if param is not None:
        assert bad.param == param
    if code is not None:
        assert bad.code == code
    assert bad.to_json()["error"].keys() == {"message", "type", "param", "code"}
    assert len(bad.message) < 400


def test_refusals_are_quick_and_short_whatever_was_sent() -> None:
    """Huge names, values and tables: an answer within 50 ms (of processor time), no echo of what was sent."""
    for fields in (
        {"n": 10**9},
        {"x" * 1_000_000: 1},
        {"temperature": "x" * 1_000_000},
        {"messages": [{"role": "x" * 1_000_000, "content": ""}]},
        {"logit_bias": {str(i): 1 for i in range(100_000)}},
        {"stop": ["y" * 100_000]},
    ):
        assert cheapest(partial(refusal, **fields)) < 0.05
        assert len(json.dumps(refusal(**fields).to_json())) < 500


def test_what_is_too_large_is_refused_before_its_items_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Millions of integers, keys or unknown fields are neither parsed nor validated; commas in texts are no items."""
    many = b",".join([b"1"] * 1_200_000)
    keys = b",".join(b'"%d":1' % i for i in range(1_100_000))
    for part in (b'"prompt":[' + many + b"]", b'"logit_bias":{' + keys + b"}", keys):
        with pytest.raises(ApiError, match="more than 1048576 items and members"):
            parse_body(b'{"model":"m",' + part + b"}", COMPLETIONS)
    assert parse_body(json.dumps({"model": "m", "prompt": "," * 1_200_000}).encode(), COMPLETIONS).prompts
    with monkeypatch.context() as patched:
        patched.setattr(MODELS[COMPLETIONS], "model_validate", Mock(side_effect=AssertionError("looked at")))
        assert refusal(prompt="x", **{f"f{i}": 1 for i in range(1000)}).code == "unknown_parameter"
    assert "at most 1024" in refusal(logit_bias={f"{i}": "x" for i in range(50_000)}).message
    assert "1048576" in refusal(prompt=[1] * (2**20 + 1)).message


def test_messages_are_checked_and_kept_as_sent() -> None:
    """Contents as text or parts; what servers add to an assistant's turn is no error."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    function = {"name": "f", "arguments": '{"a": ', "strict": True}
    answer = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "audio": None,
        "annotations": [],
        "reasoning": "so",
        "tool_calls": [{"index": 0, "id": "c", "type": "function", "function": function, "extra": {}}],
        "provider": {"anything": 1},
    }
    extras = {"annotations": [], "id": "p", "index": 0}
    refusals = [{"type": "text", "text": "a", **extras}, {"type": "refusal", "refusal": "no", **extras}]
    silent = {"id": "c", "type": None, "function": {"name": "f", "arguments": None}}
    body = chat(
        messages=[
            {"role": "developer", "content": "d", "name": "n"},
            {"role": "user", "content": parts},
            answer,
            {"role": "assistant", "refusal": "never"},
            {"role": "assistant", "content": refusals},
            {"role": "assistant", "content": [], "tool_calls": [silent, {**silent, "function": {"name": "f"}}]},
            {"role": "assistant", "content": None, "reasoning_content": "hm"},
        ]
    )
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": '}}
    assert body.messages == (
        {"role": "system", "content": "d", "name": "n"},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "reasoning_content": "so", "tool_calls": [call]},
        {"role": "assistant", "content": "never"},
        {"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "no"}]},
        {"role": "assistant", "content": "", "tool_calls": [{**call, "function": {"name": "f", "arguments": ""}}] * 2},
        {"role": "assistant", "content": "", "reasoning_content": "hm"},
    )
    assert body.ignored_fields == 3
    with pytest.raises(ApiError, match=r"unknown field 'messages\[0\]\.content\[0\]\.id'"):
        chat(messages=[{"role": "user", "content": [{"type": "text", "text": "a", "id": "p"}]}])
    with pytest.raises(ApiError, match=r"unknown field 'messages.*provider'"):
        chat(messages=[{"role": "user", "content": "x", "provider": 1}])


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        (
            {"guided_json": {}, "guided_whitespace_pattern": " ?"},
            {"json_schema": {"x-guidance": {"whitespace_pattern": " ?"}}},
        ),
        (
            {"structured_outputs": {"json": {"a": 1}, "disable_any_whitespace": True, "disable_fallback": True}},
            {"json_schema": {"a": 1, "x-guidance": {"whitespace_flexible": False}}},
        ),
        (
            {"structured_outputs": {"json": {"items": [{"properties": {}}]}, "disable_additional_properties": True}},
            {"json_schema": {"items": [{"additionalProperties": False, "properties": {}}]}},
        ),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, {"json_schema": {"type": "object"}}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "array"}}}},
            {"json_schema": {"type": "array"}},
        ),
        ({"guided_json": '{"type": "null"}'}, {"json_schema": {"type": "null"}}),
        ({"guided_choice": ["a", 'b"']}, {"lark_grammar": 'start: "a" | "b\\""'}),
        ({"guided_regex": "a/b\\/c\\\\/"}, {"lark_grammar": "start: /a\\/b\\/c\\\\\\//"}),
        ({"guided_grammar": 'start: "x"'}, {"lark_grammar": 'start: "x"'}),
        ({"structured_outputs": {"regex": "a+"}}, {"lark_grammar": "start: /a+/"}),
    ],
)
def test_structured_output_becomes_one_grammar(fields: dict[str, Any], grammar: dict[str, Any] | None) -> None:
    found = chat(**fields).params.grammar
    assert found is None if grammar is None else json.loads(found or "") == {"grammars": [grammar]}


def test_the_schema_describes_what_is_taken() -> None:
    """Every default-shaped example that the schema allows is allowed; jsonschema agrees on a sample of both kinds."""
    validator = pytest.importorskip("jsonschema").Draft202012Validator
    for endpoint, base in ((CHAT, {"model": "m", "messages": USER}), (COMPLETIONS, {"model": "m", "prompt": "x"})):
        schema = json_schema(endpoint)
        validator.check_schema(schema)
        check = validator(schema)
        assert check.is_valid(base)
        assert not check.is_valid({**base, "temperature": 3})
        assert not check.is_valid({**base, "unknown": 3})
        assert check.is_valid({**base, "stop": ["x"], "seed": 4, "user": None})


# -- requests


def test_the_default_seed_is_the_runs_and_the_lines() -> None:
    want = int.from_bytes(hashlib.blake2b(b"run-0\0a").digest()[:8], "little")
    assert default_seed("run-0", "a") == want
    assert to_requests(chat(), [(1,)], LIMITS, ORIGIN)[0].params.seed == want
    assert to_requests(chat(seed=5), [(1,)], LIMITS, ORIGIN)[0].params.seed == 5
    two = to_requests(completion(prompt=["a", "b"]), [(1,), (2,)], LIMITS, ORIGIN)
    assert [r.request_id for r in two] == ["r0", "r0.1"]
    assert two[0].params.seed != two[1].params.seed


def test_what_the_model_cannot_do_is_refused_with_the_numbers() -> None:
    def said(body: Body, prompt: tuple[int, ...] = (2,), limits: ModelLimits = LIMITS) -> ApiError:
        with pytest.raises(ApiError) as caught:
            to_requests(body, [prompt], limits, ORIGIN)
        return caught.value

    bad = said(chat(max_tokens=60), (2,) * 10)
    assert bad.code == "context_length_exceeded"
    assert bad.message.startswith("this model's maximum context length is 64 tokens, the prompt has 10 and 60 more")
    assert said(chat(), (2,) * 64).code == "context_length_exceeded"
    assert "KV cache holds 32" in said(chat(max_tokens=30), (2,) * 10, replace(LIMITS, kv_tokens=32)).message
    assert said(chat(n=9)).param == "n"
    assert said(completion(), (300,)).message == "prompt: token 300 is beyond the vocabulary of 300"
    assert said(chat(stop_token_ids=[300])).param == "stop_token_ids"
    assert said(chat(logit_bias={"300": 1})).param == "logit_bias"
    assert said(chat(allowed_token_ids=[2, 300])).param == "allowed_token_ids"
    assert said(chat(allowed_token_ids=[2, 1], stop_token_ids=[2], min_tokens=1)).param == "allowed_token_ids"
    assert "empty" in said(completion(), ()).message
    with pytest.raises(ApiError) as caught:
        check_model(chat(), "tiny")
    assert (caught.value.status, caught.value.code) == (404, "model_not_found")


def test_max_tokens_and_ends_have_their_defaults() -> None:
    text = Mock(eos_ids=(1, 7))
    (request,) = to_requests(chat(), [(2,) * 10], LIMITS, ORIGIN, text)
    assert (request.params.max_tokens, request.params.stop_token_ids) == (54, (1, 7))
    (request,) = to_requests(completion(stop_token_ids=[9]), [(2,)], LIMITS, ORIGIN, text)
    assert (request.params.max_tokens, request.params.stop_token_ids) == (16, (1, 7, 9))
    (request,) = to_requests(completion(ignore_eos=True), [(2,) * 60], LIMITS, ORIGIN, text)
    assert (request.params.max_tokens, request.params.stop_token_ids) == (4, ())
    scored = completion(echo=True, logprobs=3, max_tokens=0)
    (request,) = to_requests(scored, [(2,) * 64], LIMITS, ORIGIN)
    assert (request.params.max_tokens, request.params.prompt_logprobs, request.params.logprobs) == (0, 3, 3)


def test_http_bodies_are_parsed_strictly() -> None:
    assert parse_body(json.dumps({"model": "m", "messages": USER}).encode(), CHAT) == chat()
    for data in (b"\x1f\x8b\x08", b"", b'{"model": "m", "model": "n"}'):
        with pytest.raises(ApiError) as caught:
            parse_body(data, CHAT)
        assert (caught.value.code, caught.value.status) == ("invalid_json", 400)


def test_the_fake_job_keeps_the_protocol() -> None:
    """What other tests build on is an EngineJob for the type checker too."""
    job: EngineJob = FakeJob(LIMITS)
    assert job.state.phase == "starting"


def test_top_p_of_zero_is_the_most_likely_token() -> None:
    assert 0 < chat(top_p=0).params.top_p < 1e-6
    assert chat(top_p=0.5).params.top_p == 0.5


def test_bounds_are_those_of_the_field_itself() -> None:
    """A content of too many parts names the limit of parts, not that of messages."""
    parts = [{"type": "text", "text": "a"}] * 5000
    with pytest.raises(ApiError, match="0 to 4096 are allowed"):
        chat(messages=[{"role": "user", "content": parts}])


def test_characters_that_some_take_for_line_breaks_are_escaped() -> None:
    text = "a\u2028b\u2029c\x85d"
    line = output_line("c", "1", 200, {"text": text})
    for encoded in (line.decode(), event({"text": text}).decode().removeprefix("data: ")):
        assert encoded.splitlines() == [encoded.rstrip("\n"), *([""] if encoded.endswith("\n\n") else [])]
        assert text in json.dumps(json.loads(encoded), ensure_ascii=False)


def test_text_parts_of_other_clients_are_text() -> None:
    """Parts of the Responses API, and what clients add for other servers' caches."""
    parts: list[Any] = [
        {"type": kind, "text": "a", "cache_control": {"type": "ephemeral"}} for kind in ("text", "input_text")
    ]
    parts.append({"type": "output_text", "text": "a", "annotations": [], "logprobs": []})
    body = chat(messages=[{"role": "user", "content": parts, "cache_control": {}}])
    assert body.messages == ({"role": "user", "content": [{"type": "text", "text": "a"}] * 3},)
    bad = refusal(messages=[{"role": "user", "content": [{"type": "input_text", "txt": "a"}]}])
    assert bad.param == "messages[0].content[0].text"
