"""`daemon.responses_retention`: responses are stored, continued, referred to, read and deleted, each by its own key."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
from daemon_tools import LIMITS, NAME, OneTokenJob, Served, deployment, lines_of, served, submit, wait_batch
from fake_job import FakeJob
from laddertron.engine.config.schema import LimitsConfig
from laddertron.engine.daemon.keys import add_key, limit_key, read_keys, revoke_key
from laddertron.engine.daemon.store.store import StoreOptions
from laddertron.engine.metrics.observer import Observer
from laddertron.engine.openai.schema import RESPONSES
from laddertron.engine.request import ModelLimits, TokensEvent
from laddertron.engine.text.tokenizer import TextModel
from laddertron.launchers.cli.batch_client import BatchClient
from test_responses import TEMPLATE, TOOL, jsonl
from test_store import Failing, failing
from tiny_text import byte_level, write_folder
from waiting import until

HOUR = 3600.0
LONG = replace(LIMITS, max_model_len=8192)
REPLIES = (
    "Hello",
    "<think>hm</think>So",
    '<think>hm</think><tool_call>{"name": "Weather", "arguments": {"city": "Rome"}}',
)


class Replying(FakeJob):
    """Answers the n-th request by the n-th of REPLIES, and around."""

    def __init__(self, text: TextModel, limits: ModelLimits = LONG) -> None:
        super().__init__(limits)
        self._replies = [(*text.encode(reply, add_special_tokens=False), 1) for reply in REPLIES]

    def submit(self, request: Any) -> None:
        self.script = {request.prompt: self._replies[len(self.submitted) % len(REPLIES)]}
        super().submit(request)


class Failed(FakeJob):
    """Fails at the fourth token of an answer."""

    def next_event(self, sequence: Any) -> TokensEvent:
        if len(sequence.out) < 3:
            return super().next_event(sequence)
        return TokensEvent(sequence.request.request_id, 0, 3, (), "numerical_error", message="NaN logits")


class Evictions(Observer):
    count = 0

    def evicted(self, count: int) -> None:
        self.count += count


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return TextModel.from_folder(write_folder(tmp_path_factory.mktemp("text"), byte_level(), TEMPLATE))


def config(folder: Path, limits: LimitsConfig | None = None, **more: Any) -> Any:
    return deployment(folder, limits, **{"responses_retention": HOUR, **more})


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, text: TextModel) -> Iterator[Served]:
    with served(config(tmp_path_factory.mktemp("daemon")), text.folder, lambda: [Replying(text)]) as running:
        yield running


def prompts(daemon: Served, text: TextModel) -> list[str]:
    return [text.decode(request.prompt, skip_special=False) for request in daemon.jobs[0].submitted]


def create(client: openai.OpenAI, text: Any, *, streamed: bool = False, **fields: Any) -> Any:
    body = {"model": NAME, "input": text, "max_output_tokens": 200, **fields}
    if not streamed:
        return client.responses.create(**body)
    return list(client.responses.create(**body, stream=True))[-1].response


def said(words: str) -> dict[str, str]:
    return {"role": "user", "content": words}


def test_a_conversation_is_continued_as_if_it_were_sent_whole(daemon: Served, text: TextModel) -> None:
    """Random conversations with reasoning, calls and their outputs, continued by previous_response_id, by references to
    items, or by all items, in bodies of any size, whole and streamed: the prompt is the same."""
    seed = random.randrange(1 << 32)
    print("seed", seed)
    draw, client = random.Random(seed), daemon.client()
    for _ in range(3):
        last: Any = None
        items: list[Any] = []
        references: list[Any] = []
        for turn in range(draw.randrange(2, 5)):
            calls = [item.call_id for item in (last.output if last else ()) if item.type == "function_call"]
            new: list[Any] = [{"type": "function_call_output", "call_id": name, "output": "sun"} for name in calls]
            new += [said(f"turn {turn}")] * draw.randrange(not calls, 3)
            more: dict[str, Any] = {"tools": [TOOL], "instructions": draw.choice(["be kind", None])}
            more["metadata"] = {"k": "v" * draw.choice([1, 70_000])}
            before = len(daemon.jobs[0].submitted)
            answers = [
                create(client, way, streamed=draw.random() < 0.5, previous_response_id=previous, **more)
                for way, previous in ((items + new, None), (references + new, None), (new, last and last.id))
            ]
            first, *others = prompts(daemon, text)[before:]
            assert others == [first] * 2
            kinds = [
                [item.type for item in client.responses.input_items.list(answer.id, order="asc", limit=2)]
                for answer in answers
            ]
            assert kinds == [kinds[0]] * 3
            last = draw.choice(answers)
            assert client.responses.retrieve(last.id).to_dict() == last.to_dict()
            items += [*new, *(item.model_dump(exclude_none=True) for item in last.output)]
            references += [*new, *({"type": "item_reference", "id": item.id} for item in last.output)]


def test_an_item_that_was_sent_has_an_id_to_refer_to(daemon: Served, text: TextModel) -> None:
    """Texts and items without types are listed in OpenAI's form, from the last to the first, by pages."""
    client = daemon.client()
    call = {"type": "function_call", "id": "fc_mine", "call_id": "c", "name": "Weather", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "sun"}
    first = create(client, [said("a"), {"role": "assistant", "content": "b"}, call, output])
    listed = client.responses.input_items.list(first.id, limit=3)
    assert [item.type for item in listed.data] == ["function_call_output", "function_call", "message"]
    assert listed.has_more
    items: list[Any] = list(listed)
    assert [item.id for item in items] == [f"{kind}_{first.id[5:]}_i{n}" for kind, n in
                                           (("fco", 3), ("fc", 2), ("msg", 1), ("msg", 0))]  # fmt: skip
    assert [part.type for item in items[2:] for part in item.content] == ["output_text", "input_text"]
    create(client, [{"id": item.id} for item in reversed(items)])
    *_, before, after = prompts(daemon, text)
    assert before == after


def refused(call: Callable[[], Any]) -> tuple[int, str | None, str | None]:
    with pytest.raises(openai.APIStatusError) as caught:
        call()
    assert caught.value.type == "invalid_request_error"
    return caught.value.status_code, caught.value.param, caught.value.code


def test_what_is_not_stored_is_refused_by_name(daemon: Served) -> None:
    client = daemon.client()
    stored, passing = create(client, "x"), create(client, "x", store=False)
    assert (stored.store, passing.store) == (True, False)
    own, other = stored.output[0].id, passing.output[0].id
    for name in (passing.id, "resp_1", "x" * 200, "resp_" + "\u00e9"):
        again = partial(create, client, "x", previous_response_id=name)
        assert refused(again)[:2] == (400, "previous_response_id")
        for call in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
            assert refused(partial(call, name))[0] == 404
    wrong = [
        other,
        "fco" + own[own.index("_") :],
        own[:-1] + "7",
        own[:-1] + "i7",
        stored.id,
        "msg_1",
        "resp_x_1",
        "_0",
    ]
    for name in wrong:
        for more in ({}, {"k": "v" * 70_000}):
            body = [said("x"), {"type": "item_reference", "id": name}]
            assert refused(partial(create, client, body, metadata=more)) == (404, "input", "item_not_found"), name
    assert refused(lambda: client.responses.input_items.list(stored.id, after=other))[:2] == (404, "after")
    assert refused(lambda: client.responses.retrieve(stored.id, stream=True))[:2] == (400, "stream")
    assert refused(lambda: create(client, "x", conversation="conv_1"))[:2] == (400, "conversation")
    assert refused(lambda: create(client, "x", background=True))[:2] == (400, "background")


def test_a_deleted_response_ends_the_conversations_that_need_it(daemon: Served) -> None:
    client = daemon.client()
    first = create(client, "one")
    second = create(client, "two", previous_response_id=first.id)
    third = create(client, [{"type": "item_reference", "id": first.output[0].id}])
    client.responses.delete(first.id)
    assert refused(lambda: client.responses.delete(first.id))[0] == 404
    assert client.responses.retrieve(second.id).output == second.output
    with pytest.raises(openai.BadRequestError, match=first.id):
        create(client, "three", previous_response_id=second.id)
    with pytest.raises(openai.NotFoundError, match=first.output[0].id):
        create(client, "three", previous_response_id=third.id)


def test_without_a_retention_nothing_is_stored(tmp_path: Path, text: TextModel) -> None:
    """Also of a daemon that had one: what it stored stays until it expires."""
    with served(config(tmp_path), text.folder, lambda: [Replying(text)]) as before:
        first = create(before.client(), "x")
    with served(config(tmp_path, responses_retention=None), text.folder, lambda: [Replying(text)]) as running:
        client = running.client()
        assert create(client, "x").store is False
        assert refused(lambda: create(client, "x", store=True))[:2] == (400, "store")
        assert refused(lambda: create(client, "x", previous_response_id=first.id))[:2] == (400, "previous_response_id")
        with pytest.raises(openai.NotFoundError, match=r"daemon\.responses_retention"):
            client.responses.retrieve(first.id)
    with served(config(tmp_path), text.folder, lambda: [Replying(text)]) as again:
        assert again.client().responses.retrieve(first.id).to_dict() == first.to_dict()
        create(again.client(), "y", previous_response_id=first.id)
        assert prompts(again, text)[-1].startswith("<|user|>x<|assistant|>Hello<|user|>y")


def test_another_data_folder_has_them_from_the_export(tmp_path: Path, text: TextModel) -> None:
    places = [config(tmp_path, data_dir=str(tmp_path / name), export_dir=str(tmp_path / "export")) for name in "ab"]
    with served(places[0], text.folder, lambda: [Replying(text)]) as running:
        gone = create(running.client(), "gone")
        first = create(running.client(), "caf\u00e9 \u2028", metadata={"k": "\U0001f600"})
        running.client().responses.delete(gone.id)
    with served(places[1], text.folder, lambda: [Replying(text)]) as running:
        assert running.client().responses.retrieve(first.id).to_dict() == first.to_dict()
        assert refused(lambda: running.client().responses.retrieve(gone.id))[0] == 404


def test_only_its_key_sees_a_response(tmp_path: Path, text: TextModel) -> None:
    keys = tmp_path / "keys.json"
    alice, bob, ops = add_key(keys, "alice")[1], add_key(keys, "bob")[1], add_key(keys, "ops", "admin")[1]
    settings = config(tmp_path, api_key_file=str(keys))
    with served(settings, text.folder, lambda: [Replying(text)], keys=keys) as running:
        mine, other = running.client(alice), running.client(bob)
        first = create(mine, "x")
        item = [{"type": "item_reference", "id": first.output[0].id}]
        for call, status in (
            (lambda: other.responses.retrieve(first.id), 404),
            (lambda: other.responses.delete(first.id), 404),
            (lambda: other.responses.input_items.list(first.id), 404),
            (lambda: create(other, "x", previous_response_id=first.id), 400),
            (lambda: create(other, item), 404),
        ):
            assert refused(call)[0] == status
        assert running.client(ops).responses.retrieve(first.id).id == first.id
        assert create(mine, item).status == "completed"
    revoke_key(keys, "alice")
    with served(settings, text.folder, lambda: [Replying(text)], keys=keys) as running:
        bob_id = next(key.id for key in read_keys(keys) if key.name == "bob")
        assert BatchClient(f"{running.url}/v1", ops).adopt(bob_id)["responses"] == 2
        assert create(running.client(bob), "y", previous_response_id=first.id).status == "completed"


def test_a_batch_s_responses_are_stored_and_continued(daemon: Served, text: TextModel) -> None:
    """Equal lines, which are computed once, each have their own; a line whose conversation is unknown fails alone."""
    client = daemon.client()
    first = create(client, "start")
    body = {"model": NAME, "input": "go", "temperature": 0, "max_output_tokens": 200}
    continued = {**body, "previous_response_id": first.id}
    bodies = {"a": body, "b": body, "off": {**body, "store": False}, "on": continued, "gone": continued}
    bodies["large"] = {**continued, "metadata": {"k": "v" * 70_000}}
    bodies["item"] = {**body, "input": [{"type": "item_reference", "id": first.output[0].id}, said("go")]}
    bodies["gone"] = {**body, "previous_response_id": "resp_1"}
    bodies["lost"] = {**body, "input": [{"id": first.output[0].id + "7"}]}
    lines = [{"custom_id": n, "method": "POST", "url": RESPONSES, "body": given} for n, given in bodies.items()]
    batch = wait_batch(client, submit(client, jsonl(lines), endpoint=RESPONSES).id)
    errors = {name: entry["response"]["body"]["error"] for name, entry in lines_of(client, batch.error_file_id).items()}
    assert {name: error["code"] for name, error in errors.items()} == {
        "gone": "previous_response_not_found", "lost": "item_not_found",
    }  # fmt: skip
    answers = {name: entry["response"]["body"] for name, entry in lines_of(client, batch.output_file_id).items()}
    assert len({answer["id"] for answer in answers.values()}) == len(answers) == 6
    for name, answer in answers.items():
        if name == "off":
            assert refused(partial(client.responses.retrieve, answer["id"]))[0] == 404
        else:
            assert client.responses.retrieve(answer["id"]).to_dict() == answer
    client.responses.delete(first.id)
    assert refused(lambda: create(client, "x", previous_response_id=answers["on"]["id"]))[0] == 400
    create(client, "on", previous_response_id=answers["b"]["id"])
    assert prompts(daemon, text)[-1].startswith("<|user|>go<|assistant|>")


def test_a_stream_that_its_client_leaves_is_not_stored(tmp_path: Path, text: TextModel) -> None:
    job = OneTokenJob(LONG, text.encode("a", add_special_tokens=False)[0])
    job.pause_at = 3
    with served(config(tmp_path), text.folder, lambda: [job]) as running:
        client = running.client()
        stream = client.responses.create(model=NAME, input="x", stream=True, max_output_tokens=50)
        left = next(event.response.id for event in stream if event.type == "response.created")
        for event in stream:
            if event.type == "response.output_text.delta":
                break
        stream.close()
        until(lambda: len(job.cancels) == 1)
        assert refused(lambda: client.responses.retrieve(left))[0] == 404
        assert refused(lambda: create(client, "x", previous_response_id=left))[0] == 400
        running.on_loop(job.release)


def test_a_failed_answer_cannot_be_continued(tmp_path: Path, text: TextModel) -> None:
    """One that fails amid its stream is stored as it was sent."""
    with served(config(tmp_path), text.folder, lambda: [Failed(LONG)]) as running:
        client = running.client()
        last = create(client, "bad", streamed=True)
        assert last.status == "failed"
        assert client.responses.retrieve(last.id).to_dict() == last.to_dict()
        assert client.responses.input_items.list(last.id).data[0].type == "message"
        assert refused(lambda: create(client, "x", previous_response_id=last.id))[2] == "previous_response_failed"
        with pytest.raises(openai.InternalServerError):
            create(client, "bad")


def test_the_least_recently_used_give_way(tmp_path: Path, text: TextModel) -> None:
    """A conversation that goes on is used as a whole; what has no room is gone by name, counted and logged."""
    now, observer = 1e9, Evictions()
    limits = LimitsConfig(max_responses_bytes=40_000)
    store = StoreOptions(wall=lambda: now)
    with served(config(tmp_path, limits), text.folder, lambda: [Replying(text)], store, observer=observer) as running:
        client = running.client()
        root, idle = create(client, "root"), create(client, "idle")
        last = root
        for turn in range(12):
            now += 100.0
            last = create(client, f"turn {turn}", previous_response_id=last.id)
            create(client, "other " + "x" * 3000)
        assert refused(lambda: client.responses.retrieve(idle.id))[0] == 404
        assert client.responses.retrieve(root.id).id == root.id
        assert prompts(running, text)[-2].startswith("<|user|>root")
        assert observer.count > 0
        with sqlite3.connect(tmp_path / "data" / "store.db") as db:
            assert db.execute("SELECT sum(bytes) FROM responses").fetchone()[0] <= 40_000 * 65 / 64


def test_a_key_s_stored_bytes_count_its_responses(tmp_path: Path, text: TextModel) -> None:
    """Its own oldest give way; if its files leave no room, a response that would be stored is refused before it is
    computed."""
    keys = tmp_path / "keys.json"
    secret, other = add_key(keys, "alice")[1], add_key(keys, "bob")[1]
    limit_key(keys, "alice", {"stored_bytes": 10_000})
    settings = config(tmp_path, api_key_file=str(keys))
    with served(settings, text.folder, lambda: [Replying(text)], keys=keys) as running:
        client = running.client(secret)
        bobs = create(running.client(other), "x" * 3000)
        answers = [create(client, "x" * 3000) for _ in range(4)]
        assert refused(lambda: client.responses.retrieve(answers[0].id))[0] == 404
        assert client.responses.retrieve(answers[-1].id).id == answers[-1].id
        assert running.client(other).responses.retrieve(bobs.id).id == bobs.id
        client.files.create(file=("in.jsonl", b"{}\n" + b" " * 8000), purpose="batch")
        computed = len(running.jobs[0].submitted)
        with pytest.raises(openai.RateLimitError) as caught:
            create(client, "x" * 3000)
        assert (caught.value.code, caught.value.param) == ("rate_limit_exceeded", "stored_bytes")
        assert len(running.jobs[0].submitted) == computed
        assert create(client, "x" * 3000, store=False).status == "completed"


def test_an_expired_response_is_deleted(tmp_path: Path, text: TextModel) -> None:
    """`responses_retention` after it was last used."""
    now = 1e9
    settings, store = config(tmp_path, responses_retention=100.0), StoreOptions(wall=lambda: now)
    with served(settings, text.folder, lambda: [Replying(text)], store) as running:
        client = running.client()
        used, idle = create(client, "used"), create(client, "idle")
    now += 70
    with served(settings, text.folder, lambda: [Replying(text)], store) as running:
        assert _is(running.client(), idle.id)
        create(running.client(), "x", previous_response_id=used.id)
    now += 40
    with served(settings, text.folder, lambda: [Replying(text)], store) as running:
        until(partial(_is, running.client(), idle.id, False))
        assert _is(running.client(), used.id)


def _is(client: openai.OpenAI, name: str, stored: bool = True) -> bool:
    """Whether a response is stored, or with `stored=False` that it is not."""
    try:
        client.responses.retrieve(name)
    except openai.NotFoundError:
        return not stored
    return stored


def test_a_damaged_response_is_never_continued(tmp_path: Path, text: TextModel) -> None:
    with served(config(tmp_path), text.folder, lambda: [Replying(text)]) as running:
        first = create(running.client(), "before")
    with sqlite3.connect(tmp_path / "data" / "store.db") as db:
        db.execute("UPDATE responses SET input = replace(input, 'before', 'behind')")
    with served(config(tmp_path), text.folder, lambda: [Replying(text)]) as running:
        client = running.client()
        for call in (lambda: client.responses.retrieve(first.id),
                     lambda: create(client, "x", previous_response_id=first.id)):  # fmt: skip
            with pytest.raises(openai.InternalServerError, match=first.id) as caught:
                call()
            assert caught.value.code == "row_damaged"
        client.responses.delete(first.id)
        assert refused(lambda: client.responses.retrieve(first.id))[0] == 404


def test_an_answer_is_sent_once_it_is_stored(tmp_path: Path, text: TextModel) -> None:
    """While the store's commits fail, a whole answer is an error and a stream ends as failed; later ones are refused
    before they are computed, until the disk works again."""
    with served(config(tmp_path), text.folder, lambda: [Replying(text)], StoreOptions(connect=failing)) as running:
        client = running.client()
        Failing.broken = "disk I/O error"
        try:
            last = create(client, "x", streamed=True)
            assert (last.status, last.error.code) == ("failed", "server_error")
            with pytest.raises(openai.InternalServerError) as caught:
                create(client, "x")
            assert (caught.value.status_code, caught.value.code) == (507, "insufficient_storage")
            until(lambda: running.daemon.services.batches.gate.why)
            computed = len(running.jobs[0].submitted)
            with pytest.raises(openai.InternalServerError, match="store: false"):
                create(client, "x", streamed=True)
            assert len(running.jobs[0].submitted) == computed
            assert create(client, "x", store=False).status == "completed"
        finally:
            Failing.broken = ""
        until(lambda: not running.daemon.services.batches.gate.why)
        assert _is(client, create(client, "x").id)
