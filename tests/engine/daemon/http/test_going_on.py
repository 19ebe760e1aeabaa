"""Answers while engines die: what a client reads is what it would have read, event by event, and counts once."""

from __future__ import annotations

import copy
import gc
import http.client
import json
import socket
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from daemon_tools import LIMITS, NAME, MortalJob, Served, deployment, line, lines_of, served, submit, wait_batch
from fake_job import FakeJob
from laddertron.engine.daemon.http import server
from laddertron.engine.metrics.observer import Observer
from laddertron.engine.request import TokensEvent
from tiny_text import write_folder
from waiting import HANG_S, until

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SAID = [{"role": "user", "content": "say"}]
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": (COMPLETIONS, {"prompt": "hello", "seed": 1}),
    "drawn by default seed zero": (COMPLETIONS, {"prompt": "hello", "seed": 0, "temperature": 0.7, "top_p": 0.9}),
    "two prompts, n=2": (COMPLETIONS, {"prompt": ["one", "two"], "n": 2, "seed": 2}),
    "logprobs, echo": (COMPLETIONS, {"prompt": "hello", "logprobs": 2, "echo": True, "seed": 3}),
    "prompt logprobs": (COMPLETIONS, {"prompt": "hello", "prompt_logprobs": 1, "seed": 3, "n": 2}),
    "token ids": (COMPLETIONS, {"prompt": "hello", "return_token_ids": True, "seed": 4}),
    "may end by itself": (COMPLETIONS, {"prompt": "hello", "ignore_eos": False, "seed": 5, "min_tokens": 9}),
    "chat": (CHAT, {"messages": SAID, "logprobs": True, "top_logprobs": 2, "seed": 6}),
    "chat, n=3": (CHAT, {"messages": SAID, "n": 3, "seed": 7}),
    "chat, usage": (CHAT, {"messages": SAID, "seed": 8, "stream_options": {"continuous_usage_stats": True}}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("tiny"))


class Dying(MortalJob):
    """Dies behind every `every` steps, of nothing that a request did; counts the tokens that it computes."""

    def __init__(self, every: int) -> None:
        super().__init__(LIMITS, most=1 << 30, hold=True)
        self.every, self.computed = every, 0

    def next_event(self, sequence: Any) -> TokensEvent:
        event = super().next_event(sequence)
        self.computed += len(event.tokens)
        return event

    def step(self) -> None:
        super().step()
        if self.sequences and self.steps % self.every == 0:
            self.die(None, "a link was cut")


class Counting(Observer):
    def __init__(self) -> None:
        super().__init__()
        self.counted = 0

    def tokens(self, replica: int, events: list[TokensEvent], counted: int) -> None:
        self.counted += counted


def answered(daemon: Served, path: str, body: dict[str, Any]) -> Any:
    """The answer, or the events of a stream by their choices, without what is another's in each run: name and time."""
    connection = http.client.HTTPConnection("127.0.0.1", daemon.port, timeout=HANG_S)
    try:
        whole = {"model": NAME, "max_tokens": 40, "ignore_eos": True, **body}
        connection.request("POST", path, json.dumps(whole))
        raw = connection.getresponse().read().decode()
    finally:
        connection.close()
    if not body.get("stream"):
        parts = [json.loads(raw)]
    else:
        *events, done = [event.removeprefix("data: ") for event in raw.split("\n\n") if event]
        assert done == "[DONE]"
        parts = sorted(map(json.loads, events), key=lambda part: [c["index"] for c in part.get("choices", [])] or [99])
    return [{name: value for name, value in part.items() if name not in ("id", "created")} for part in parts]


def ask_all(daemon: Served, bodies: dict[str, tuple[str, dict[str, Any]]], aboard: int) -> dict[str, Any]:
    """All of them at once, answered side by side."""
    job = daemon.jobs[0]
    daemon.on_loop(job.hold)
    with ThreadPoolExecutor(len(bodies)) as pool:
        found = {name: pool.submit(answered, daemon, *asked) for name, asked in bodies.items()}
        until(lambda: len(job.sequences) == aboard or any(one.done() for one in found.values()))
        daemon.on_loop(job.release)
        return {name: one.result() for name, one in found.items()}


@pytest.fixture(scope="module")
def calm(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(deployment(tmp_path_factory.mktemp("calm")), folder, lambda: [FakeJob(LIMITS)]) as daemon:
        yield daemon


def with_stops(calm: Served) -> dict[str, tuple[str, dict[str, Any]]]:
    """The bodies, and some that stop in the middle of what they say, at a string that several tokens make up."""
    bodies = copy.deepcopy(BODIES)
    for seed in (11, 12):
        asked = {"prompt": "stop", "seed": seed}
        (found,) = answered(calm, COMPLETIONS, asked)
        text = found["choices"][0]["text"]
        at = len(text) // 2
        bodies[f"stop {seed}"] = (COMPLETIONS, {**asked, "stop": [text[at : at + 3], "never said"]})
    return bodies


@pytest.mark.parametrize("stream", [True, False], ids=["streams", "whole"])
@pytest.mark.parametrize("every", [1, 3, 7])
def test_nothing_is_lost_nothing_twice(folder: Path, tmp_path: Path, calm: Served, every: int, stream: bool) -> None:
    """Ten bodies of every kind while engines die again and again: the events of an undisturbed run, one by one, with
    the same usage; no token is computed twice, none is counted twice."""
    bodies = with_stops(calm)
    if stream:
        del bodies["prompt logprobs"]  # cannot be streamed
    for _, body in bodies.values():
        body["stream"] = stream
        body["stream_options"] = {**body.get("stream_options", {}), "include_usage": True} if stream else None
    aboard = sum(
        len(b["prompt"]) * b["n"] if isinstance(b.get("prompt"), list) else b.get("n", 1) for _, b in bodies.values()
    )
    expected = ask_all(calm, bodies, aboard)
    observer = Counting()
    with served(deployment(tmp_path), folder, lambda: [Dying(every)], observer=observer) as daemon:
        found = ask_all(daemon, bodies, aboard)
        job = daemon.jobs[0]
        assert job.deaths >= 40 // every
        attempts = Counter(request.request_id.partition("#")[0] for request in job.submitted)
        assert max(attempts.values()) > 40 // every
        for name, events in expected.items():
            assert found[name] == events, name
        completion = sum(events[-1]["usage"]["completion_tokens"] for events in found.values())
        assert observer.counted == completion
        # behind a stop string, tokens are under way until the engine hears of it
        assert completion - 1 <= job.computed <= completion + 2 * 9


@pytest.mark.parametrize("every", [1, 5])
def test_lines_of_a_batch_keep_what_they_have(folder: Path, tmp_path: Path, calm: Served, every: int) -> None:
    """Engines die again and again: the undisturbed answers, and no token is computed twice."""
    lines = b"".join(line(f"r-{n}", f"say {n}", max_tokens=5 + n % 30, seed=n, n=1 + n % 2) for n in range(40))
    client = calm.client()
    expected = lines_of(client, wait_batch(client, submit(client, lines).id).output_file_id)
    with served(deployment(tmp_path), folder, lambda: [Dying(every)]) as daemon:
        job, client = daemon.jobs[0], daemon.client()
        daemon.on_loop(job.release)
        batch = wait_batch(client, submit(client, lines).id)
        found = lines_of(client, batch.output_file_id)
        assert job.deaths >= 30 // every
        assert found.keys() == expected.keys()
        for name, answer in found.items():
            assert answer["response"]["body"]["choices"] == expected[name]["response"]["body"]["choices"]
        tokens = sum(answer["response"]["body"]["usage"]["completion_tokens"] for answer in found.values())
        assert job.computed == tokens


def test_a_stream_ends_with_the_reason_once_nothing_will_run_any_more(folder: Path, tmp_path: Path) -> None:
    """The restarts are used up amid a stream: what came, then `engine_lost`."""
    with served(deployment(tmp_path), folder, lambda: [MortalJob(LIMITS, most=2)]) as daemon:
        job = daemon.jobs[0]
        job.pause_at = 5
        with ThreadPoolExecutor(1) as pool:
            body = {"prompt": "hello", "stream": True, "seed": 1}
            asked = pool.submit(answered, daemon, COMPLETIONS, body)
            until(lambda: job.steps == 5)
            for _ in range(2):
                daemon.on_loop(lambda: job.die(None, "a link was cut"))
            *pieces, last = asked.result()
        assert len(pieces) >= 1
        assert last["error"]["code"] == "engine_lost"
        assert "2 failures in a row" in last["error"]["message"]
        assert daemon.join() == 1


def test_an_end_for_the_disks_sake_answers_every_open_request(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. A stream is under way, a whole answer and a batch's lines are computed, half of an upload has come. 2. The log
    is removed: the stream ends with `engine_lost`, the others are 503 with the API's error; the exit code is 1 and the
    log has no traceback."""
    monkeypatch.setattr(server, "_GRACEFUL_SECONDS", 0.2)
    head = b"POST /v1/files HTTP/1.1\r\nhost: localhost\r\ncontent-type: multipart/form-data; boundary=b\r\n"
    with served(deployment(tmp_path), folder, lambda: [MortalJob(LIMITS)]) as daemon, ThreadPoolExecutor(2) as pool:
        job = daemon.jobs[0]
        job.pause_at = 5
        stream = pool.submit(answered, daemon, COMPLETIONS, {"prompt": "hello", "stream": True, "seed": 1})
        until(lambda: job.steps == 5)
        whole = pool.submit(answered, daemon, COMPLETIONS, {"prompt": "hello", "seed": 1})
        submit(daemon.client(), line("a") + line("b"))
        until(lambda: len(job.sequences) == 4)
        with socket.create_connection(("127.0.0.1", daemon.port), timeout=HANG_S) as upload:
            upload.sendall(head + b"expect: 100-continue\r\ncontent-length: 900\r\n\r\n")
            assert b"100" in upload.recv(100)
            (tmp_path / "data" / "store.db-wal").unlink()
            daemon.on_loop(daemon.daemon.services.store.check_there)
            refused = b"".join(iter(lambda: upload.recv(1 << 16), b""))
        *_, last = stream.result()
        (answer,) = whole.result()
        assert daemon.join() == 1
    for error in (last["error"], answer["error"]):
        assert error["code"] == "engine_lost"
        assert "store.db-wal was removed" in error["message"]
    assert refused.startswith(b"HTTP/1.1 503 ")
    assert json.loads(refused.partition(b"\r\n\r\n")[2])["error"]["code"] == "not_ready"
    gc.collect()  # a task's exception that was never retrieved is logged when the task is freed
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []


def test_results_that_a_lost_disk_does_not_take_leave_no_traceback(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Lines of a batch are answered after the log was removed: the daemon ends with the reason alone."""
    with served(deployment(tmp_path), folder, lambda: [MortalJob(LIMITS)]) as daemon:
        job = daemon.jobs[0]
        job.pause_at = 3
        submit(daemon.client(), b"".join(line(f"r{n}") for n in range(5)))
        until(lambda: job.steps == 3)
        (tmp_path / "data" / "store.db-wal").unlink()
        daemon.on_loop(job.release)
        assert daemon.join() == 1
    assert "store.db-wal was removed" in caplog.text
    gc.collect()
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []


def test_a_stream_that_outlasts_the_drain_ends_with_the_reason(folder: Path, tmp_path: Path) -> None:
    with served(deployment(tmp_path), folder, lambda: [MortalJob(LIMITS)]) as daemon, ThreadPoolExecutor(1) as pool:
        job = daemon.jobs[0]
        job.pause_at = 5
        asked = pool.submit(answered, daemon, COMPLETIONS, {"prompt": "hello", "stream": True, "seed": 1})
        until(lambda: job.steps == 5)
        assert daemon.stop() == 0
        *_, last = asked.result()
    assert last["error"]["code"] == "engine_lost"
    assert "daemon.drain_timeout" in last["error"]["message"]


def test_a_loss_while_the_daemon_stops_ends_a_stream(folder: Path, tmp_path: Path) -> None:
    """Nothing is begun again while it drains: the stream ends with the reason."""
    with served(deployment(tmp_path), folder, lambda: [MortalJob(LIMITS)]) as daemon:
        job = daemon.jobs[0]
        job.pause_at = 5
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(answered, daemon, COMPLETIONS, {"prompt": "hello", "stream": True, "seed": 1})
            until(lambda: job.steps == 5)

            def die_draining() -> None:
                daemon.daemon.dispatcher.draining = True
                job.die()

            daemon.on_loop(die_draining)
            *_, last = asked.result()
        assert last["error"]["code"] == "engine_lost"
