"""What the door answers: bodies, streams and lines, in the shapes that clients of both APIs know."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import pytest
from door import LIMITS, ORIGIN, chat, completion
from laddertron.engine.openai.answers import Answer, EventWriter
from laddertron.engine.openai.batch_input import error_line, output_line
from laddertron.engine.openai.body import Body
from laddertron.engine.openai.errors import ApiError
from laddertron.engine.openai.schema import CHAT
from laddertron.engine.openai.to_engine import to_requests
from laddertron.engine.request import Request, TokenLogprob, TokensEvent
from laddertron.engine.text.tokenizer import TextModel
from tiny_text import write_folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return TextModel.from_folder(write_folder(tmp_path_factory.mktemp("tiny")))


def answer(body: Body, text: TextModel, prompts: list[tuple[int, ...]] | None = None) -> tuple[Answer, list[Request]]:
    if prompts is None:
        prompts = [p if isinstance(p, tuple) else tuple(text.encode(p)) for p in body.prompts] or [(2,)]
    requests = to_requests(body, prompts, replace(LIMITS, max_model_len=500), ORIGIN)
    return Answer(body, requests, text, "id1", 1000), requests


def event(
    request: Request, ids: list[int], choice: int = 0, start: int = 0, finish: Any = None, **more: Any
) -> TokensEvent:
    return TokensEvent(request.request_id, choice, start, tuple(ids), finish, **more)


def test_a_chat_answer_in_openais_shape(text: TextModel) -> None:
    made, (request,) = answer(chat(n=2), text)
    ids = text.encode("ok", False)
    for choice in range(2):
        made.take(event(request, ids[:1], choice, cached_tokens=1))
        assert not made.done
        made.take(event(request, ids[1:], choice, 1, "stop" if choice else "length", stop_token=1 if choice else None))
    assert made.done
    assert made.response() == {
        "id": "chatcmpl-id1",
        "object": "chat.completion",
        "created": 1000,
        "model": "m",
        "choices": [
            {
                "index": i,
                "message": {"role": "assistant", "content": "ok", "refusal": None},
                "logprobs": None,
                "finish_reason": ("length", "stop")[i],
                "stop_reason": None,
            }
            for i in range(2)
        ],
        "usage": {
            "prompt_tokens": 1,
            "completion_tokens": 5,
            "total_tokens": 6,
            "prompt_tokens_details": {"cached_tokens": 1},
        },
    }


def test_a_completion_scores_its_prompt(text: TextModel) -> None:
    """echo with logprobs and max_tokens 0, as evaluation harnesses ask: the prompt's tokens, None for the first."""
    made, (request,) = answer(completion(prompt="and x", echo=True, logprobs=1, max_tokens=0), text)
    scores = tuple(TokenLogprob(t, -0.25, ((t, -0.25), (3, -2.0))) for t in request.prompt[1:])
    made.take(event(request, [], 0, 0, "length", prompt_logprobs=(None, *scores), logprobs=()))
    choice = made.response()["choices"][0]
    assert choice["text"] == "and x"
    assert choice["logprobs"] == {
        "tokens": ["<s>", "and", " ", "x"],
        "token_logprobs": [None, -0.25, -0.25, -0.25],
        "top_logprobs": [None, {"and": -0.25}, {" ": -0.25}, {"x": -0.25}],
        "text_offset": [0, 0, 3, 4],
    }
    assert "prompt_logprobs" not in choice


@pytest.mark.parametrize("tokens", [0, 2])
def test_the_stop_token_has_a_logprob_in_completions_alone(text: TextModel, tokens: int) -> None:
    """Harnesses drop the last entry as that of the token they had to generate: it must be there if that one was an end
    of sequence. It is in no text, nor after a stop string, nor in the chat API (as OpenAI's)."""
    ids = text.encode("ok", False)[:tokens]
    scores = tuple(TokenLogprob(t, -0.5) for t in (*ids, 1))
    for body in (completion(prompt="x", logprobs=0), chat(logprobs=True)):
        made, (request,) = answer(body, text)
        delta = made.take(event(request, ids, 0, 0, "stop", stop_token=1, logprobs=scores))
        assert delta is not None
        choice = made.response()["choices"][0]
        if "text" in choice:
            assert choice["logprobs"]["tokens"] == [text.pieces.show(t) for t in (*ids, 1)]
            assert choice["logprobs"]["token_logprobs"] == [-0.5] * (tokens + 1)
            assert choice["text"] == "ok"[:tokens]
            assert len(delta.logprobs) == tokens + 1
        else:
            assert len(choice["logprobs"]["content"]) == tokens
    made, (request,) = answer(completion(prompt="x", logprobs=0, stop=["k"]), text)
    made.take(event(request, ids, 0, 0, "stop", stop_token=1, logprobs=scores))
    assert len(made.response()["choices"][0]["logprobs"]["tokens"]) == (1 if tokens == 0 else 2)


def test_logprobs_in_both_apis_shapes(text: TextModel) -> None:
    """A token that is half a character shows its bytes; minus infinity is written as -9999."""
    half = text.encode("é", False)[0]
    scores = (TokenLogprob(half, -1.5, ((2, -0.5), (half, -1.5))), TokenLogprob(2, float("-inf"), ((3, -0.1),)))
    made, (request,) = answer(chat(logprobs=True, top_logprobs=1), text)
    made.take(event(request, [half, 2], 0, 0, "length", logprobs=scores))
    content = made.response()["choices"][0]["logprobs"]["content"]
    assert content[0]["token"] == "bytes:\\xc3"
    assert content[0]["bytes"] == [0xC3]
    assert [t["logprob"] for t in content[0]["top_logprobs"]] == [-0.5]
    assert content[1]["logprob"] == -9999.0
    made, (request,) = answer(completion(logprobs=1, prompt_logprobs=0), text)
    prompt_scores = (None, *(TokenLogprob(t, -2.0, ((9, -1.0),)) for t in request.prompt[1:]))
    made.take(event(request, [half, 2], 0, 0, "length", logprobs=scores, prompt_logprobs=prompt_scores))
    choice = made.response()["choices"][0]
    assert choice["logprobs"]["top_logprobs"][0] == {text.pieces.show(2): -0.5, "bytes:\\xc3": -1.5}
    assert choice["prompt_logprobs"][0] is None
    shown = text.pieces.show(request.prompt[1])
    want = {str(request.prompt[1]): {"logprob": -2.0, "rank": None, "decoded_token": shown}}
    assert choice["prompt_logprobs"][1] == want
    json.dumps(made.response(), allow_nan=False)


def joined_logprobs(choices: list[dict[str, Any]], name: str) -> list[Any]:
    return list(chain.from_iterable(c["logprobs"][name] for c in choices if c["logprobs"]))


def test_a_stream_says_what_the_whole_says(text: TextModel, run_seed: int) -> None:
    """Chunks joined equal the response: texts, logprobs, finish; the role comes first, usage last, held text waits."""
    rng = random.Random(run_seed)
    bodies = [
        chat(n=2, stop=["ab"], logprobs=True, stream=True, stream_options={"include_usage": True}),
        completion(prompt=["x", "and"], n=2, stop=["ab"], logprobs=2, echo=True, max_tokens=30, stream=True),
    ]
    for body in bodies * 20:
        made, requests = answer(body, text)
        ids = {}
        for request in requests:
            for choice in range(2):
                ids[request.request_id, choice] = text.encode("".join(rng.choice("ab é") for _ in range(12)), False)
        chunks: list[dict[str, Any]] = []
        at = dict.fromkeys(ids, 0)
        scored = set()
        while at:
            key = rng.choice(list(at))
            request = next(r for r in requests if r.request_id == key[0])
            start, n = at[key], rng.randint(1, 4)
            new = ids[key][start : start + n]
            last = start + n >= len(ids[key])
            extra: dict[str, Any] = {}
            if body.echo and key[1] == 0 and key[0] not in scored:
                extra = {"prompt_logprobs": (None, *(TokenLogprob(t, -1.0) for t in request.prompt[1:]))}
            if key[1] == 0 or key[0] in scored or not body.echo:
                scored.add(key[0])
                score = tuple(TokenLogprob(t, -float(i)) for i, t in enumerate(new))
                said = event(request, new, key[1], start, "length" if last else None, logprobs=score, **extra)
                delta = made.take(said, requests.index(request))
                at[key] = start + n
                if delta is not None:
                    chunks += made.chunks(delta)
                if last or (delta is not None and delta.stop_after is not None):
                    del at[key]
        assert made.done
        whole = made.response()
        for choice in whole["choices"]:
            mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]]
            joined = partial(joined_logprobs, mine)
            if body.endpoint == CHAT:
                assert mine[0]["delta"] == {"role": "assistant", "content": ""}
                assert "".join(c["delta"].get("content", "") for c in mine) == choice["message"]["content"]
                assert joined("content") == choice["logprobs"]["content"]
            else:
                assert "".join(c["text"] for c in mine) == choice["text"]
                for name in ("tokens", "token_logprobs", "text_offset"):
                    assert joined(name) == choice["logprobs"][name]
            assert [c["finish_reason"] for c in mine if c["finish_reason"]] == [choice["finish_reason"]]
        if body.include_usage:
            assert made.usage_chunk()["choices"] == []
            assert made.usage_chunk()["usage"] == whole["usage"]
            assert all(c["usage"] is None for c in chunks)


@pytest.mark.parametrize("make", [chat, completion])
@pytest.mark.parametrize("usage", [False, True])
def test_events_are_the_chunks_rendered(text: TextModel, make: Any, usage: bool) -> None:
    """The short way of plain text gives the bytes of the long one, for text that must be escaped as well, with choices
    mixed, held-back text, and an end."""
    options = {"stream": True, "stream_options": {"include_usage": True}} if usage else {"stream": True}
    body = make(n=2, stop=["zz"], **options)
    (long, (request,)), (short, _) = answer(body, text), answer(body, text)
    writer, said, rng = EventWriter(), ["", ""], random.Random(3)
    ids = text.encode('a"b\\c\né\u2028 😀zy end', False)
    for start in range(len(ids)):
        for choice in rng.sample(range(2), 2):
            finish = "length" if start == len(ids) - 1 else None
            one = event(request, ids[start : start + 1], choice, start, finish)
            expected, delta = long.take(one), short.take(one)
            assert expected is not None
            assert delta is not None
            chunks = long.chunks(expected)
            rendered = [
                json.dumps(chunk, ensure_ascii=False, separators=(",", ":")).replace("\u2028", "\\u2028")
                for chunk in chunks
            ]
            assert writer.of(short, delta) == "".join(f"data: {one}\n\n" for one in rendered).encode()
            for part in (chunk["choices"][0] for chunk in chunks):
                said[choice] += part["text"] if "text" in part else part["delta"].get("content", "")
    assert said == [long.response()["choices"][0].get("text") or 'a"b\\c\né\u2028 😀zy end'] * 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("make", [chat, completion])
def test_token_ids_beside_the_text(text: TextModel, make: Any, stream: bool) -> None:
    """Prompt and answer as ids, the end token among them; logprobs by names that no two tokens share. In a stream the
    prompt's come first, and what is held back for a stop string has its ids all the same."""
    scored = {"logprobs": True} if make is chat else {"logprobs": 0}
    body = make(return_token_ids=True, return_tokens_as_token_ids=True, stop=["kk"], stream=stream, **scored)
    made, (request,) = answer(body, text, [(5, 6)])
    ids = text.encode("ok", False)
    chunks: list[dict[str, Any]] = []
    for at in range(3):
        new, end = ids[at : at + 1], {"finish": "stop", "stop_token": 1} if at == 2 else {}
        delta = made.take(
            event(request, new, 0, at, logprobs=tuple(TokenLogprob(t, -1.0) for t in (new or [1])), **end)
        )
        assert delta is not None
        if stream:
            data = EventWriter().of(made, delta).decode().split("\n\n")[:-1]
            chunks += [json.loads(one.removeprefix("data: ")) for one in data]
    whole = made.response()
    choice = whole["choices"][0]
    assert choice["token_ids"] == [*ids, 1]
    prompt = whole if make is chat else choice
    assert list(prompt["prompt_token_ids"]) == [5, 6]
    names = [f"token_id:{token}" for token in (*ids, 1)]
    if make is chat:
        assert [one["token"] for one in choice["logprobs"]["content"]] == names[:-1]
        assert bytes(choice["logprobs"]["content"][0]["bytes"]) == text.pieces.raw(ids[0])
    else:
        assert choice["logprobs"]["tokens"] == names
    if stream:
        first = chunks[0] if make is chat else chunks[0]["choices"][0]
        assert first["prompt_token_ids"] == [5, 6]
        assert [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", ())] == [*ids, 1]
        assert sum("prompt_token_ids" in json.dumps(chunk) for chunk in chunks) == 1


def test_an_echoed_chat_begins_with_what_it_continues(text: TextModel) -> None:
    """Only where the answer is by the role of the last message."""
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "well"}]
    for fields, want in (
        ({"messages": said, "continue_final_message": True, "echo": True}, "wellok"),
        ({"messages": said, "continue_final_message": True}, "ok"),
        ({"messages": said, "echo": True}, "wellok"),
        ({"echo": True}, "ok"),
    ):
        made, (request,) = answer(chat(**fields), text)
        delta = made.take(event(request, text.encode("ok", False), 0, 0, "length"))
        assert delta is not None
        streamed = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in made.chunks(delta))
        assert (made.response()["choices"][0]["message"]["content"], streamed) == (want, want)


def test_usage_so_far_in_every_chunk(text: TextModel) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    made, (request,) = answer(completion(stream=True, stream_options=options), text, [(5, 6)])
    writer, found = EventWriter(), []
    for at, token in enumerate(text.encode("abcd", False)):
        delta = made.take(event(request, [token], 0, at, "length" if at == 3 else None))
        assert delta is not None
        found.append(json.loads(writer.of(made, delta).removeprefix(b"data: "))["usage"])
    assert [usage["completion_tokens"] for usage in found] == [1, 2, 3, 4]
    assert found[-1] == made.usage_chunk()["usage"]


@pytest.mark.parametrize("start", [0, 5], ids=["repeated", "after a gap"])
def test_tokens_that_do_not_follow_the_last_ones_are_a_fault(text: TextModel, start: int) -> None:
    made, (request,) = answer(chat(), text)
    a, b = text.encode("ab", False)
    made.take(event(request, [a]))
    made.take(event(request, [a, b], 0, start))
    assert made.error is not None
    assert (made.error.code, made.done) == ("engine_error", True)


@pytest.mark.parametrize(
    ("finish", "code", "status"),
    [
        ("numerical_error", "numerical_error", 500),
        ("error", "engine_error", 500),
        ("timeout", "request_timeout", None),
        ("cancelled", "batch_cancelled", None),
    ],
)
def test_a_failed_choice_fails_its_line(text: TextModel, finish: Any, code: str, status: int | None) -> None:
    made, (request,) = answer(chat(n=2), text)
    made.take(event(request, [3], 0, 0, "length"))
    made.take(event(request, [], 1, 0, finish, message="why"))
    assert made.done
    assert made.error is not None
    out = json.loads(error_line("a", "id1", made.error))
    if status is None:
        assert (out["response"], out["error"]) == (None, {"code": code, "message": "why"})
    else:
        assert out["response"]["status_code"] == status
        assert out["response"]["body"]["error"]["code"] == code


def test_output_lines_in_the_batch_apis_form() -> None:
    assert json.loads(output_line("r-1", "x", 200, {"a": "é\u2028\n"})) == {
        "id": "batch_req_x",
        "custom_id": "r-1",
        "response": {"status_code": 200, "request_id": "req_x", "body": {"a": "é\u2028\n"}},
        "error": None,
    }
    assert output_line("r-1", "x", 200, {"a": "\n"}).count(b"\n") == 1
    refused = json.loads(error_line(None, "x", ApiError("m", param="p", code="c"), 7))
    assert refused["response"]["body"]["error"] == {
        "message": "m", "type": "invalid_request_error", "param": "p", "code": "c", "line": 7,
    }  # fmt: skip


def test_user_stop_ids_show_as_the_reason(text: TextModel) -> None:
    made, (request,) = answer(chat(stop_token_ids=[2], include_stop_str_in_output=True), text)
    made.take(event(request, [3], 0, 0, "stop", stop_token=2))
    choice = made.response()["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", 2)
    assert choice["message"]["content"] == text.pieces.show(3) + text.pieces.show(2)
    assert made.completion_tokens == 2


@pytest.mark.parametrize("make", [chat, completion])
def test_a_digest_of_the_logits_comes_with_each_choice(text: TextModel, make: Any) -> None:
    """Whole and streamed, of every drawn row, the stop token's among them; log-probabilities are not shown for it."""

    def digest(last: int, stream: bool) -> str:
        made, (request,) = answer(make(return_digest=True, stream=stream), text, [(5, 6)])
        assert request.params.logprobs == 0
        (token,) = text.encode("o", False)
        chunks = list[Any]()
        for at, (new, number) in enumerate([([token], 2**64 - 1), ([], last)]):
            end = {"finish": "stop", "stop_token": 1} if at else {}
            scored = (TokenLogprob((new or [1])[0], -1.0, (), number),)
            delta = made.take(event(request, new, 0, at, logprobs=scored, **end))
            assert delta is not None
            data = EventWriter().of(made, delta).decode().split("\n\n")[:-1]
            chunks += [json.loads(one.removeprefix("data: "))["choices"][0] for one in data]
        choice = chunks[-1] if stream else made.response()["choices"][0]
        assert choice["logprobs"] is None
        found: str = choice["digest"]
        assert len(found) == 32
        return found

    assert digest(3, stream=False) == digest(3, stream=True) != digest(4, stream=False)
    made, (request,) = answer(make(), text, [(5, 6)])
    made.take(event(request, [2], 0, 0, "length"))
    assert "digest" not in made.response()["choices"][0]
