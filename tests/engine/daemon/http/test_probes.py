"""/health, /ready and /metrics: what they say, to whom, and that nothing on the API holds up their own listener."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from daemon_tools import LIMITS, NAME, Served, deployment, line, served, submit, wait_batch
from fake_job import FakeJob
from laddertron.engine.config.schema import LimitsConfig
from laddertron.engine.daemon.http.connections import connections_within
from laddertron.engine.daemon.http.probes import STALLED_S
from laddertron.engine.daemon.keys import add_key
from laddertron.engine.daemon.store import store
from laddertron.engine.daemon.store.store import StoreOptions
from laddertron.engine.metrics.observer import Observer
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from test_store import BadFiles, Failing, failing
from tiny_text import write_folder
from waiting import FOR_EVER_S, HANG_S, until

FEW = replace(
    LimitsConfig(), max_connections=6, max_connections_per_address=6, header_timeout=FOR_EVER_S, body_timeout=FOR_EVER_S
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("tiny"))


def watched() -> Observer:
    return Observer(CollectorRegistry())


def get(daemon: Served, path: str, key: str = "", port: int = 0) -> tuple[int, str]:
    """From the probe listener, where there is one."""
    held = f"authorization: Bearer {key}\r\n" if key else ""
    request = f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{held}\r\n"
    answer = daemon.raw(request.encode(), port or daemon.probe_port)
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split(b" ", 2)[1]) if head else 0, body.decode()


def figures(daemon: Served, name: str) -> float:
    """The sum of a series over its labels."""
    families = text_string_to_metric_families(get(daemon, "/metrics")[1])
    return sum(s.value for family in families for s in family.samples if s.name == f"laddertron_{name}")


@contextlib.contextmanager
def idle(port: int, count: int, data: bytes = b"") -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            made = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=HANG_S))
            made.sendall(data)
        yield


# what they say


class Draining(FakeJob):
    """Goes on draining until it is let go."""

    def __init__(self) -> None:
        super().__init__(LIMITS)
        self.go = threading.Event()

    async def drain(self, timeout_s: float) -> bool:
        await asyncio.to_thread(self.go.wait, HANG_S)
        return True


def test_ready_says_that_the_daemon_drains(folder: Path, tmp_path: Path) -> None:
    with served(deployment(tmp_path), folder, lambda: [Draining()], probes=True) as daemon:
        assert get(daemon, "/ready")[0] == 200
        try:
            daemon.on_loop(daemon.daemon.stop)
            until(lambda: get(daemon, "/ready")[0] == 503)
            for port in (daemon.port, daemon.probe_port):
                assert json.loads(get(daemon, "/ready", port=port)[1])["status"] == "draining"
        finally:
            daemon.jobs[0].go.set()


def test_a_disk_without_a_free_byte_pauses_batches_alone(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A balancer keeps a daemon that answers: /ready is 200 and has the reason why batches pause."""
    config = deployment(tmp_path)
    limits = replace(config.daemon.limits, min_free_disk=1)
    config = replace(config, daemon=replace(config.daemon, limits=limits))
    with served(config, folder, observer=watched()) as daemon:
        assert get(daemon, "/ready")[0] == 200
        monkeypatch.setattr(store, "room_of", lambda folder: (0, 9))
        until(lambda: "0 bytes are free" in json.loads(get(daemon, "/ready")[1])["batches"])
        assert get(daemon, "/ready")[0] == 200
        assert daemon.client().completions.create(model=NAME, prompt="a", max_tokens=2).choices[0].text
        until(lambda: figures(daemon, "disk_free_bytes") == 0)


def test_generation_tokens_are_those_of_usage(folder: Path, tmp_path: Path) -> None:
    """Choices that end by length, a stop id, a stop string in the middle of a step's tokens; interactive, streamed, in
    a batch."""
    jobs = [FakeJob(LIMITS, tokens_a_step=3)]
    with served(deployment(tmp_path), folder, lambda: jobs, observer=watched()) as daemon:
        client, total = daemon.client(), 0
        ask: Any = client.completions.create
        ids = {"extra_body": {"stop_token_ids": list(range(40, 120))}}
        for extra in ({}, {"stop": ["a", "e", " "]}, {"n": 3, "stop": "t"}, ids):
            answer = ask(model=NAME, prompt="say", max_tokens=50, seed=1, **extra)
            total += answer.usage.completion_tokens
            streamed = {"stream": True, "stream_options": {"include_usage": True}, **extra}
            chunks = ask(model=NAME, prompt="say", max_tokens=50, seed=2, **streamed)
            total += [chunk.usage.completion_tokens for chunk in chunks if chunk.usage][-1]
        lines = b"".join(line(f"r{n}", "say", max_tokens=40, stop=["a"], ignore_eos=False) for n in range(20))
        batch = wait_batch(client, submit(client, lines).id)
        for raw in client.files.content(batch.output_file_id).read().splitlines():
            total += json.loads(raw)["response"]["body"]["usage"]["completion_tokens"]
        assert jobs[0].stops, "no choice was ended by a stop string"
        assert figures(daemon, "generation_tokens_total") == total


def test_store_errors_are_counted(folder: Path, tmp_path: Path) -> None:
    files, observer = BadFiles(), watched()
    options = StoreOptions(connect=failing, files=files)
    with served(deployment(tmp_path), folder, store=options, observer=observer) as daemon:
        client = daemon.client()
        assert figures(daemon, "store_errors_total") == 0
        files.write_error = 28
        with pytest.raises(Exception, match="nothing was stored"):
            submit(client, line("a"))
        assert figures(daemon, "store_errors_total") == 1
        files.write_error = 0
        Failing.broken = "disk I/O error"
        try:
            with pytest.raises(Exception, match="nothing was stored"):
                submit(client, line("a"))
            assert figures(daemon, "store_errors_total") >= 2
        finally:
            Failing.broken = ""


# to whom


def test_probes_need_no_key_and_tell_nothing_secret(folder: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    alice, prometheus = add_key(keys, "alice")[1], add_key(keys, "prometheus", "metrics")[1]
    with served(deployment(tmp_path, api_key_file=str(keys)), folder, keys=keys, probes=True) as daemon:
        daemon.on_loop(lambda: daemon.jobs[0].report_state("suspect", "rank 1 on node-b is silent"))
        for port in (daemon.port, daemon.probe_port):
            assert get(daemon, "/health", port=port) == (200, '{"status":"alive"}')
            assert get(daemon, "/ready", port=port) == (503, '{"status":"not_ready"}')
            assert get(daemon, "/ready", "sk-lt-wrong", port) == (503, '{"status":"not_ready"}')
            for key in (alice, prometheus):
                assert "node-b" in get(daemon, "/ready", key, port)[1]


@pytest.mark.parametrize("probes", [False, True])
def test_metrics_takes_its_own_kind_of_key(folder: Path, tmp_path: Path, probes: bool) -> None:
    keys = tmp_path / "keys.json"
    alice, prometheus = add_key(keys, "alice")[1], add_key(keys, "prometheus", "metrics")[1]
    with served(deployment(tmp_path, api_key_file=str(keys)), folder, keys=keys, probes=probes) as daemon:
        assert [get(daemon, "/metrics", key)[0] for key in ("", alice, prometheus)] == [401, 403, 200]
        assert [get(daemon, "/v1/models", key, daemon.port)[0] for key in ("", alice, prometheus)] == [401, 200, 403]
        if probes:
            assert get(daemon, "/v1/models", alice)[0] == 404
            assert get(daemon, "/metrics", prometheus, daemon.port)[0] in (403, 404)


# nothing holds them up


def test_the_probe_listener_answers_while_the_daemons_loop_is_held(folder: Path, tmp_path: Path) -> None:
    """Held until it has been asked three times: whatever the API does, probes and scrapes go on."""
    with served(deployment(tmp_path), folder, observer=watched(), probes=True) as daemon:
        asked, held = threading.Event(), threading.Event()

        def hold() -> bool:
            held.set()
            return asked.wait(HANG_S)

        daemon.loop.call_soon_threadsafe(hold)
        assert held.wait(HANG_S)
        try:
            assert [get(daemon, path)[0] for path in ("/health", "/ready", "/metrics")] == [200, 200, 200]
            daemon.daemon.services.samples.looked -= STALLED_S
            assert get(daemon, "/health") == (503, '{"status":"stalled"}')
        finally:
            asked.set()
        until(lambda: get(daemon, "/health")[0] == 200)


def test_connections_do_not_starve_the_probe_listener(folder: Path, tmp_path: Path) -> None:
    """Every connection of the API is taken by one that has asked, and 1,024 silent ones came to the probes' own."""
    asked = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n"
    with (
        served(deployment(tmp_path, FEW), folder, probes=True) as daemon,
        idle(daemon.port, 6, asked),
        idle(daemon.probe_port, 1024),
    ):
        until(lambda: get(daemon, "/health", port=daemon.port)[0] == 503)
        for path in ("/health", "/ready", "/metrics"):
            until(lambda path=path: get(daemon, path)[0] == 200)  # type: ignore[misc]


def test_connections_keep_within_the_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raised as far as the system lets it, and no connection more than fits: the probes' could not be accepted."""
    limits = {"now": (256, 1100)}
    monkeypatch.setattr("resource.getrlimit", lambda which: limits["now"])
    monkeypatch.setattr("resource.setrlimit", lambda which, pair: limits.update(now=pair))
    assert connections_within(100) == 100
    assert limits["now"] == (612, 1100)
    assert connections_within(1024) == 588
    assert limits["now"] == (1100, 1100)


def test_hostile_bodies_beside_a_batch(folder: Path, tmp_path: Path) -> None:
    """40 connections with a million integers each: all are refused, probes and scrapes are answered throughout, every
    line of the batch too, and no more bytes of bodies are held than may be."""
    limits = replace(LimitsConfig(), max_held_bytes=8_000_000)
    body = b'{"model": "tiny", "prompt": [' + b"1," * 999_999 + b"1]}"
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    statuses: list[int] = []
    with served(deployment(tmp_path, limits), folder, observer=watched(), probes=True) as daemon:

        def attack() -> None:
            statuses.append(int(daemon.raw(head.encode() + body).split(b" ", 2)[1]))

        threads = [threading.Thread(target=attack) for _ in range(40)]
        for thread in threads:
            thread.start()
        client = daemon.client()
        batch = submit(client, b"".join(line(f"r{n}") for n in range(50)))
        most = 0
        while any(thread.is_alive() for thread in threads):
            assert [get(daemon, path)[0] for path in ("/health", "/ready", "/metrics")] == [200, 200, 200]
            most = max(most, daemon.daemon.services.bodies.bytes_open)
        for thread in threads:
            thread.join()
        assert wait_batch(client, batch.id).request_counts.completed == 50
        assert most <= limits.max_held_bytes
    assert len(statuses) == 40
    assert set(statuses) <= {400, 429}
    assert 400 in statuses
