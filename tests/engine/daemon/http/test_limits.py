"""What each key may and has used; and that owners have their turns, however much one of them brings."""

from __future__ import annotations

import asyncio
import json
import socket
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from daemon_tools import NAME, deployment, line, lines_of, read_keys_at_once, served, submit, wait_batch
from fake_job import FakeJob
from laddertron.engine.daemon.keys import KeyFileError, KeyLimits, KeyRing, add_key, limit_key, read_keys, revoke_key
from laddertron.engine.daemon.store.clock import TrustedClock
from laddertron.engine.daemon.store.rows import Tokens
from laddertron.engine.daemon.usage import DAY, Usage, tokens_of
from laddertron.engine.metrics.observer import Observer
from laddertron.engine.openai.errors import ApiError
from prometheus_client import CollectorRegistry
from tiny_text import write_folder
from waiting import HANG_S, until

FORM = (
    b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n' + b"x" * 600 + b"\r\n--b--\r\n"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    read_keys_at_once(monkeypatch)
    return tmp_path / "keys.json"


def say(client: openai.OpenAI, **fields: Any) -> Any:
    return client.completions.create(model=NAME, prompt="say", **{"max_tokens": 8, "seed": 1, **fields})


def refused(ask: Callable[[], Any], limit: str) -> openai.RateLimitError:
    with pytest.raises(openai.RateLimitError) as caught:
        ask()
    assert (caught.value.code, caught.value.param, caught.value.type) == (
        "rate_limit_exceeded",
        limit,
        "rate_limit_error",
    )
    assert int(caught.value.response.headers["retry-after"]) >= 1
    return caught.value


# pure


def usage(limits: KeyLimits, now: list[float]) -> Usage:
    clock = SimpleNamespace(now=lambda: now[0], stamp=lambda: int(now[0]))
    store: Any = SimpleNamespace(clock=clock)
    usage = Usage(store, Observer(), lambda owner: limits)
    usage.monotonic = lambda: now[0]
    return usage


def test_requests_a_minute_against_every_minute() -> None:
    """A client that asks as often as it may, for an hour: what passes in any minute is at most twice the limit (a full
    budget and its refill), in the hour the limit a minute and one budget; and it may ask when it is told to."""
    now = [0.0]
    used, passed = usage(KeyLimits(requests_per_minute=30), now), list[float]()
    while now[0] < 3600:
        try:
            used.enter("a", False)
            used.leave("a")
            passed.append(now[0])
        except ApiError as limit:
            now[0] += limit.retry_after or 0
    assert len(passed) <= 30 * 61
    assert len(passed) >= 30 * 59
    assert max(sum(start <= at < start + 60 for at in passed) for start in range(0, 3600, 7)) <= 60


def test_tokens_a_day_end_with_the_day() -> None:
    now = [10 * DAY + 1000.0]
    used = usage(KeyLimits(tokens_per_day=100), now)
    used.add("a", Tokens(90, 80, 9))
    used.enter("a", True)
    used.add("a", Tokens(1, 0, 0))
    with pytest.raises(ApiError) as caught:
        used.enter("a", True)
    assert caught.value.retry_after == DAY - 1000
    used.enter("a", False)
    used.enter("b", True)
    now[0] += DAY - 1000
    used.enter("a", True)


def test_a_clock_that_jumps_renews_no_day() -> None:
    """Two days ahead and back; and set back for good, from a day that was trusted."""
    wall, monotonic = [10 * DAY + 1000.0], [0.0]
    clock = TrustedClock(None, lambda: wall[0], lambda: monotonic[0])
    store: Any = SimpleNamespace(clock=clock)
    used = Usage(store, Observer(), lambda owner: KeyLimits(tokens_per_day=100))
    used.add("a", Tokens(100, 0, 0))
    for days in (2, -2):
        wall[0] += days * DAY
        assert used.exhausted("a")
    wall[0] += 2 * DAY
    assert used.exhausted("a")
    for moved in (0, DAY):
        wall[0] += moved
        monotonic[0] += moved
        assert used.exhausted("a") == (0 if moved else DAY - 1000)
    wall[0] -= 4 * DAY
    assert not used.exhausted("a")
    wall[0] += DAY
    monotonic[0] += DAY
    assert used.exhausted("a")


@pytest.mark.parametrize(
    ("place", "done", "error", "charged"),
    [(0, False, None, 0), (0, True, "lost", 0), (3, False, None, 13), (3, True, "lost", 13), (0, True, None, 13)],
)
def test_what_was_never_computed_is_not_charged(place: int, done: bool, error: str | None, charged: int) -> None:
    """A request that waited and went; one that was lost half way was computed so far, and so was a prompt alone."""
    answer: Any = SimpleNamespace(
        place=place, done=done, error=error, prompt_tokens=10, cached_tokens=0, completion_tokens=3
    )
    tokens = tokens_of(answer)
    assert tokens.prompt + tokens.completion == charged


def test_what_the_store_did_not_take_is_written_later() -> None:
    now = [5.0 * DAY]
    used, calls = usage(KeyLimits(), now), list[Any]()

    async def write(work: Any) -> None:
        calls.append(work)
        if len(calls) == 1:
            used.add("a", Tokens(1, 1, 1))
            raise OSError("full")

    vars(used.store)["write"] = write
    used.add("a", Tokens(5, 0, 2), requests=2)
    with pytest.raises(OSError, match="full"):
        asyncio.run(used.flush())
    assert used.unwritten == {("a", 5): (3, Tokens(6, 1, 3))}
    asyncio.run(used.flush())
    assert not used.unwritten
    assert len(calls) == 2


def test_a_key_file_with_nonsense_limits_is_refused(keys: Path) -> None:
    add_key(keys, "alice")
    assert "limits" not in keys.read_text()
    assert limit_key(keys, "alice", {"tokens_per_day": 5}).limits == KeyLimits(tokens_per_day=5)
    assert limit_key(keys, "alice", {"stored_bytes": 7}).limits == KeyLimits(tokens_per_day=5, stored_bytes=7)
    assert read_keys(keys)[0].limits == KeyLimits(tokens_per_day=5, stored_bytes=7)
    whole = json.loads(keys.read_text())
    for wrong in ({"tokens_per_day": 0}, {"tokens_per_day": "9"}, {"tokens": 9}, 3):
        whole["keys"][0]["limits"] = wrong
        keys.write_text(json.dumps(whole))
        with pytest.raises(KeyFileError):
            read_keys(keys)


# through the daemon


def test_what_a_revoked_key_left_running_keeps_its_limits(keys: Path) -> None:
    """And so does what runs while the file cannot be read; nobody is let in meanwhile."""
    key, secret = add_key(keys, "alice")
    limit_key(keys, "alice", {"tokens_per_day": 7})
    ring = KeyRing(keys)
    assert ring.limits_of(key.id).tokens_per_day == 7
    revoke_key(keys, "alice")
    assert (ring.holder(secret), ring.limits_of(key.id).tokens_per_day) == (None, 7)
    keys.write_text("no keys")
    assert (ring.holder(secret), ring.limits_of(key.id).tokens_per_day) == (None, 7)


def test_limits_of_requests(folder: Path, tmp_path: Path, keys: Path) -> None:
    """A minute's, and at once; reading is not counted, another key has its own, and the key file is read again."""
    alice, bob = add_key(keys, "alice")[1], add_key(keys, "bob")[1]
    limit_key(keys, "alice", {"requests_per_minute": 2})
    observer = Observer(CollectorRegistry())
    with served(deployment(tmp_path, api_key_file=str(keys)), folder, keys=keys, observer=observer) as daemon:
        mine, theirs = daemon.client(alice), daemon.client(bob)
        for _ in range(2):
            say(mine)
        refused(lambda: say(mine), "requests_per_minute")
        mine.models.list()
        say(theirs)
        limit_key(keys, "alice", {"requests_per_minute": None, "concurrent_requests": 1})
        say(mine)
        daemon.on_loop(daemon.jobs[0].hold)
        body = json.dumps({"model": NAME, "prompt": "x"}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {alice}\r\n"
        with socket.create_connection(("127.0.0.1", daemon.port)) as held:
            before = len(daemon.jobs[0].submitted)
            held.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            until(lambda: len(daemon.jobs[0].submitted) > before)
            refused(lambda: say(mine), "concurrent_requests")
        daemon.on_loop(daemon.jobs[0].release)

        def again() -> bool:
            try:
                return bool(say(mine))
            except openai.RateLimitError:
                return False

        until(again)
        text = observer.render("")[0].decode()
        assert 'limit="requests_per_minute"} 1.0' in text


def test_tokens_a_day_hold_requests_and_batches(folder: Path, tmp_path: Path, keys: Path) -> None:
    """Requests are refused, the lines of a batch wait, and go on once the key may again."""
    alice = add_key(keys, "alice")[1]
    limit_key(keys, "alice", {"tokens_per_day": 10})
    with served(deployment(tmp_path, api_key_file=str(keys)), folder, keys=keys) as daemon:
        client = daemon.client(alice)
        say(client, max_tokens=20, extra_body={"ignore_eos": True})
        wait = int(refused(lambda: say(client), "tokens_per_day").response.headers["retry-after"])
        assert wait <= DAY
        before = len(daemon.jobs[0].submitted)
        batch = submit(client, line("a") + line("b"))
        until(lambda: client.batches.retrieve(batch.id).status == "in_progress")
        assert len(daemon.jobs[0].submitted) == before
        limit_key(keys, "alice", {"tokens_per_day": None})
        assert sorted(lines_of(client, wait_batch(client, batch.id).output_file_id)) == ["a", "b"]


def test_stored_bytes(folder: Path, tmp_path: Path, keys: Path) -> None:
    alice = add_key(keys, "alice")[1]
    limit_key(keys, "alice", {"stored_bytes": 1000})
    export = tmp_path / "export"
    config = deployment(tmp_path, api_key_file=str(keys), export_dir=str(export))
    with served(config, folder, keys=keys) as daemon:
        client = daemon.client(alice)

        def upload(size: int) -> Any:
            return client.files.create(file=("a.jsonl", b"x" * size), purpose="batch")

        first = upload(600)
        refused(lambda: upload(600), "stored_bytes")
        chunked = urllib.request.Request(f"{daemon.url}/v1/files", data=iter([FORM]), method="POST")
        chunked.add_header("content-type", "multipart/form-data; boundary=b")
        chunked.add_header("authorization", f"Bearer {alice}")
        with pytest.raises(urllib.error.HTTPError, match="429"):  # its size is known once it is all there
            urllib.request.urlopen(chunked, timeout=HANG_S)
        for files in (tmp_path / "data" / "files", export / "files"):
            assert [path.name for path in files.iterdir()] == [first.id]
        client.files.delete(first.id)
        upload(700)


def test_usage_is_what_answers_said(folder: Path, tmp_path: Path, keys: Path) -> None:
    """By key and day, interactive and batch, over a restart; a client sees its own, a metrics key all."""
    alice, bob = add_key(keys, "alice")[1], add_key(keys, "bob")[1]
    prometheus = add_key(keys, "prometheus", "metrics")[1]
    config, totals = deployment(tmp_path, api_key_file=str(keys)), dict[str, list[int]]()
    observer = Observer(CollectorRegistry())
    with served(config, folder, keys=keys, observer=observer) as daemon:
        for name, secret, count in (("alice", alice, 3), ("bob", bob, 1)):
            client = daemon.client(secret)
            said = [say(client, n=2).usage for _ in range(count)]
            batch = wait_batch(client, submit(client, b"".join(line(f"r{n}") for n in range(5 * count))).id)
            prompt = batch.usage.input_tokens + sum(one.prompt_tokens for one in said)
            made = batch.usage.output_tokens + sum(one.completion_tokens for one in said)
            totals[name] = [6 * count, prompt, made]
        until(lambda: "key_tokens_total" in observer.render("")[0].decode())
    with served(config, folder, keys=keys) as daemon:
        ids = {key.id: key.name for key in read_keys(keys)}

        def seen(secret: str) -> dict[str, list[int]]:
            head = f"GET /v1/usage HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {secret}\r\n"
            value = json.loads(daemon.raw(f"{head}connection: close\r\n\r\n".encode()).partition(b"\r\n\r\n")[2])
            fields = ("requests", "prompt_tokens", "completion_tokens")
            out: dict[str, list[int]] = {}
            for row in value["data"]:  # two days, where midnight came between
                had = out.setdefault(ids[row["key"]], [0, 0, 0])
                out[ids[row["key"]]] = [a + row[name] for a, name in zip(had, fields, strict=True)]
            return out

        assert seen(alice) == {"alice": totals["alice"]}
        assert seen(prometheus) == totals


def test_an_owner_with_many_batches_has_one_owners_turns(folder: Path, tmp_path: Path, keys: Path) -> None:
    """Five batches of one, one batch of another: while both have lines, each gets about half."""
    alice, bob = add_key(keys, "alice")[1], add_key(keys, "bob")[1]
    with served(deployment(tmp_path, api_key_file=str(keys)), folder, keys=keys) as daemon:
        job: FakeJob = daemon.jobs[0]
        daemon.on_loop(job.hold)
        lines = b"".join(line(f"r{n}", "say") for n in range(100))
        many = [submit(daemon.client(alice), lines) for _ in range(5)]
        one = submit(daemon.client(bob), lines)

        def waits() -> bool:
            return sum(map(len, daemon.daemon.dispatcher.rooms.values())) == 6

        until(lambda: daemon.on_loop(waits))
        aboard = len(job.submitted)
        daemon.on_loop(job.release)
        for client, batch in [(daemon.client(alice), batch) for batch in many] + [(daemon.client(bob), one)]:
            assert wait_batch(client, batch.id).status == "completed"
        bobs = next(key.id for key in read_keys(keys) if key.name == "bob")
        share = [request.owner == bobs for request in job.submitted[aboard : aboard + 120]]
        assert 50 <= sum(share) <= 70, (aboard, sum(share))
