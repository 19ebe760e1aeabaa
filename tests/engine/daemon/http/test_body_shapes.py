"""No shape of a body up to the limit takes more of the event loop's processor time in one turn than STALL_S."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from daemon_tools import LIMITS, NAME, Served, deployment, line, served, submit, wait_batch
from door import LIMITS as SMALL
from door import ORIGIN, chat, completion
from fake_job import FakeJob
from laddertron.engine.openai import body_worker
from laddertron.engine.openai.body import Body
from laddertron.engine.openai.errors import ApiError
from laddertron.engine.openai.to_engine import MAX_VALUES, to_requests
from laddertron.engine.request import Request
from laddertron.engine.text.tokenizer import TextModel
from laddertron.launchers.control.messages import Submit, to_wire
from test_fair_shares import STALL_S, watched
from tiny_text import write_folder
from waiting import HANG_S

BASE: dict[str, Any] = {"model": NAME, "max_tokens": 2}
WIDE = replace(LIMITS, max_model_len=40_000, max_num_seqs=64, kv_tokens=1 << 24)
MANY = {f"key {number}": 1 for number in range(500_000)}
WORDS = {"properties": dict.fromkeys(map(str, range(9000)), 1)}
SHAPES: dict[str, dict[str, Any]] = {
    "metadata of many keys": {"prompt": "x", "metadata": MANY},
    "metadata of long strings": {"prompt": "x", "metadata": ['"\n\u00e9' * 1000] * 800},
    "metadata that is deep": {"prompt": "x", "metadata": [json.loads("[" * 30 + "]" * 30)] * 2000},
    "ignored in another field": {"prompt": "x", "stream": True, "stream_options": {"include_obfuscation": MANY}},
    "logit_bias": {"prompt": "x", "logit_bias": {str(number): 1 for number in range(500_000)}},
    "stop": {"prompt": "x", "stop": ["a"] * 1_000_000},
    "texts": {"prompt": ["ab " * 10_000] * (body_worker.MAX_IDS // 30_001)},
    "texts in the answer": {"prompt": ["ab " * 10_000] * 100, "echo": True},
    "texts that are cut": {"prompt": ["ab " * 20_000] * 100, "echo": True, "truncate_prompt_tokens": 9},
    "ids": {"prompt": [[1] * 900] * 1000},
    "ids in the answer": {"prompt": [[9] * 1000] * 1000, "echo": True},
    "ids of a few prompts": {"prompt": [[1] * 39_990] * 25},
    "ids of parameters": {"prompt": ["x"] * 1000, "allowed_token_ids": [1] * 16_000},
    "messages": {"messages": [{"role": "user", "content": "x"}] * 4000},
    "a long message": {"messages": [{"role": "user", "content": "ab " * 3_000_000}]},
    "an ignored field of a chat": {"messages": [{"role": "user", "content": "x"}], "prediction": MANY},
    "variables": {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"a": MANY}},
    "tools": {
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{"type": "function", "function": {"name": f"f{n}", "parameters": WORDS}} for n in range(100)],
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("tiny"))


class EncodingJob(FakeJob):
    """Encodes requests on the event loop, as a launch of ranks does."""

    def submit(self, request: Request) -> None:
        to_wire(Submit(request))
        super().submit(request)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Iterator[Served]:
    with served(deployment(tmp_path_factory.mktemp("shapes")), folder, lambda: [EncodingJob(WIDE)], probes=True) as it:
        yield it


def post(daemon: Served, path: str, data: bytes, how: str) -> int:
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{how}\r\n\r\n"
    return int(daemon.raw(head.encode() + data).split(b" ", 2)[1])


@pytest.mark.parametrize("shape", SHAPES)
def test_a_large_body(daemon: Served, shape: str) -> None:
    body = {**BASE, **SHAPES[shape]}
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    data = json.dumps(body, ensure_ascii=False).encode()
    assert 50_000 < len(data) < 10_000_000
    with watched(daemon, HANG_S):
        assert post(daemon, path, data, f"content-length: {len(data)}") in (200, 400)


@pytest.mark.parametrize("more", [{}, {"echo": True}, {"return_token_ids": True}])
def test_a_prompt_of_a_million_ids(tmp_path: Path, folder: Path, more: dict[str, Any]) -> None:
    """In half the time of the other shapes, for it is one request: nothing can be done between two."""
    longest = replace(WIDE, max_model_len=1 << 21)
    data = json.dumps({**BASE, "prompt": [200] * 1_000_000, **more}, separators=(",", ":")).encode()
    with (
        served(deployment(tmp_path), folder, lambda: [EncodingJob(longest)], probes=True) as daemon,
        watched(daemon, HANG_S, STALL_S / 2),
    ):
        assert post(daemon, "/v1/completions", data, f"content-length: {len(data)}") == 200


@pytest.mark.parametrize("shape", ["metadata of many keys", "texts in the answer", "texts that are cut", "ids"])
def test_a_large_line(daemon: Served, shape: str) -> None:
    with watched(daemon, HANG_S):
        batch = submit(daemon.client(), line("a", **SHAPES[shape]))
        assert wait_batch(daemon.client(), batch.id).request_counts.completed == 1


@pytest.mark.parametrize("size", [1, 3, 50])
def test_a_body_of_small_chunks(daemon: Served, size: int) -> None:
    """In all forms: JSON and a form; the chunks come faster than they are parsed."""
    data = json.dumps({**BASE, "prompt": "x", "metadata": "x" * 100_000}).encode()
    form = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    form += (
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n' + b"x" * 100_000 + b"\r\n--b--\r\n"
    )
    for path, body, more in (
        ("/v1/completions", data, ""),
        ("/v1/files", form, "content-type: multipart/form-data; boundary=b\r\n"),
    ):
        parts = (body[at : at + size] for at in range(0, len(body), size))
        chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
        with watched(daemon, HANG_S):
            assert post(daemon, path, chunks, f"{more}transfer-encoding: chunked") == 200


def test_many_requests_in_one_piece(daemon: Served) -> None:
    request = b"GET /nowhere HTTP/1.1\r\nhost: localhost\r\n\r\n"
    with watched(daemon, HANG_S):
        last = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
        assert daemon.raw(request * 300 + last).count(b"HTTP/1.1 404") == 300


# pure

TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"x": name}}} for name in ("a", "b")]


@pytest.mark.parametrize(
    "body",
    [
        completion(),
        completion(prompt=["a", "b"], echo=True, n=3, seed=-5, user="u", metadata={"a": 1}),
        completion(prompt=[[5, 6], [7]], echo=True, logprobs=3, logit_bias={"7": 2, "8": -1.5}, stop=["x", "y"]),
        completion(allowed_token_ids=[1, 2], bad_words=["no"], min_tokens=2, max_tokens=9, stop_token_ids=[3]),
        completion(stream=True, stream_options={"include_usage": True, "include_obfuscation": {"a": [1]}}),
        completion(guided_json={"type": "object"}, truncate_prompt_tokens=4, echo=True, priority=-2, cache_salt="s"),
        chat(tools=TOOLS, parallel_tool_calls=False),
        chat(tools=TOOLS, tool_choice="required"),
        chat(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "b"}}, include_reasoning=False),
        chat(echo=True, continue_final_message=True, messages=[{"role": "assistant", "content": "so"}]),
        chat(chat_template_kwargs={"a": 1}, documents=[{"b": 2}], logprobs=True, top_logprobs=2),
    ],
)  # fmt: skip
def test_a_body_from_a_worker_is_the_one_that_was_checked(body: Body) -> None:
    """But for what its prompts alone needed; and it has only what can go through JSON."""
    made = body_worker.unpacked(json.loads(json.dumps(body_worker.packed(body))))
    tools = tuple({"function": {"name": tool["function"]["name"]}} for tool in body.tools)
    last = tuple({"role": m["role"], "content": m["content"] if body.echo else ""} for m in body.messages[-1:])
    sent = made.prompts if body.truncate_prompt_tokens is not None or not body.echo else tuple(
        text if isinstance(text, str) else () for text in body.prompts
    )  # fmt: skip
    assert made == body._replace(tools=tools, messages=last, prompts=sent, template_variables=None)


def test_types_of_parameters_that_are_strings_are_kept_and_bounded() -> None:
    """The event loop needs no other types, and reads only so many parameters."""

    def tools(count: int) -> list[Any]:
        properties = {str(n): {"type": ["string", "null"]} for n in range(count)} | {"n": {"type": "integer"}}
        return [{"type": "function", "function": {"name": "a", "parameters": {"properties": properties}}}]

    (sent,) = body_worker.packed(chat(tools=tools(2)))["tools"]
    assert sent["function"]["parameters"]["properties"] == {
        **{str(n): {"type": ["string", "null"]} for n in range(2)}, "n": {},
    }  # fmt: skip
    with pytest.raises(ApiError) as refused:
        body_worker.packed(chat(tools=tools(body_worker.MAX_PARAMETERS + 1)))
    assert refused.value.param == "tools"


def test_parameters_that_all_prompts_repeat_are_bounded() -> None:
    body = completion(prompt=["x"] * 100, allowed_token_ids=[1] * 16_384)
    most = MAX_VALUES // 16_384
    assert len(to_requests(body, [(2,)] * most, SMALL, ORIGIN)) == most
    with pytest.raises(ApiError, match=f"{most + 1} prompts with 16384 token ids"):
        to_requests(body, [(2,)] * (most + 1), SMALL, ORIGIN)


def test_the_ids_of_one_body_are_bounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_worker, "MAX_IDS", 100)
    here = body_worker.DirectEncoder(TextModel.from_folder(folder), 50)
    assert len(body_worker.prepared(completion(prompt=[[1] * 20] * 5), here, 50)["ids"]) == 5
    with pytest.raises(ApiError, match="6 prompts have 120 tokens in total: at most 100"):
        body_worker.prepared(completion(prompt=[[1] * 20] * 6), here, 50)
    cut = body_worker.prepared(completion(prompt=[[1] * 20] * 6, truncate_prompt_tokens=3), here, 50)
    assert [len(ids) for ids in cut["ids"]] == [3] * 6
