"""What proxies and browsers need: HEAD, preflights, streams that are neither buffered nor silent."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemon_tools import LIMITS, NAME, Served, deployment, served
from fake_job import FakeJob
from laddertron.engine.daemon.http import generate
from laddertron.engine.daemon.http.connections import ServerOptions
from laddertron.engine.daemon.http.server import make_server
from laddertron.engine.daemon.keys import add_key
from tiny_text import write_folder
from waiting import HANG_S

PAGE = "https://app.example"


@pytest.fixture(scope="module")
def secret(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    file = tmp_path_factory.mktemp("keys") / "keys.json"
    return file, add_key(file, "alice")[1]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, secret: tuple[Path, str]) -> Iterator[Served]:
    config = deployment(tmp_path_factory.mktemp("daemon"), cors_origins=(PAGE,))
    folder = write_folder(tmp_path_factory.mktemp("tiny"))
    with served(config, folder, lambda: [FakeJob(LIMITS)], keys=secret[0]) as running:
        yield running


def asked(daemon: Served, method: str, path: str, **headers: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", daemon.port)
    connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    return connection.getresponse()


@pytest.mark.parametrize("path", ["/health", "/ready", "/v1/models", f"/v1/models/{NAME}", "/v1/files", "/docs"])
def test_head_is_answered_wherever_get_is(daemon: Served, secret: tuple[Path, str], path: str) -> None:
    key = {"authorization": f"Bearer {secret[1]}"}
    head, get = (asked(daemon, method, path, **key) for method in ("HEAD", "GET"))
    assert (head.status, head.getheader("content-type")) == (get.status, get.getheader("content-type"))
    assert (head.read(), head.status) == (b"", 200)


def test_a_preflight_is_answered_before_keys_and_only_to_the_page(daemon: Served, secret: tuple[Path, str]) -> None:
    wants = {"access_control_request_method": "POST", "access_control_request_headers": "authorization"}
    answer = asked(daemon, "OPTIONS", "/v1/chat/completions", origin=PAGE, **wants)
    assert (answer.status, answer.getheader("access-control-allow-origin")) == (200, PAGE)
    other = asked(daemon, "OPTIONS", "/v1/chat/completions", origin="https://other.example", **wants)
    assert other.getheader("access-control-allow-origin") is None
    assert asked(daemon, "GET", "/v1/models", origin=PAGE).status == 401
    models = asked(daemon, "GET", "/v1/models", origin=PAGE, authorization=f"Bearer {secret[1]}")
    assert (models.status, models.getheader("access-control-allow-origin")) == (200, PAGE)
    assert "retry-after" in (models.getheader("access-control-expose-headers") or "")


def test_another_model_is_not_found_by_its_code(daemon: Served, secret: tuple[Path, str]) -> None:
    answer = asked(daemon, "GET", "/v1/models/x", authorization=f"Bearer {secret[1]}")
    assert (answer.status, json.loads(answer.read())["error"]["code"]) == (404, "model_not_found")


def test_a_stream_is_not_buffered_and_a_silent_one_sends_comments(
    daemon: Served, secret: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """nginx reads the field; its timeout is a minute without a byte."""
    monkeypatch.setattr(generate, "ALIVE_SECONDS", 0.0)
    body = {"model": NAME, "prompt": "a", "max_tokens": 3, "stream": True, "ignore_eos": True}
    connection = http.client.HTTPConnection("127.0.0.1", daemon.port)
    headers = {"authorization": f"Bearer {secret[1]}", "content-type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    answer = connection.getresponse()
    assert answer.getheader("x-accel-buffering") == "no"
    events = answer.read().decode().split("\n\n")
    assert ": keep-alive" in events
    assert "data: [DONE]" in events


def test_a_slash_at_the_end_is_answered_without_a_redirect(daemon: Served, secret: tuple[Path, str]) -> None:
    """A redirect would name http:// where a proxy serves https://; without a key, the path is as closed as without the
    slash."""
    key = {"authorization": f"Bearer {secret[1]}"}
    for path in ("/v1/models/", "/v1/files/", "/v1/batches//", "/health/", f"/v1/models/{NAME}/"):
        plain, slash = asked(daemon, "GET", path.rstrip("/"), **key), asked(daemon, "GET", path, **key)
        assert (slash.status, slash.read()) == (200, plain.read())
    assert asked(daemon, "GET", "/v1/files/").status == 401


def test_an_idle_connection_is_kept_for_keep_alive(tmp_path: Path) -> None:
    assert make_server(None, ServerOptions()).config.timeout_keep_alive == 75
    config = deployment(tmp_path, keep_alive=1.0)
    with served(config, write_folder(tmp_path / "tiny"), lambda: [FakeJob(LIMITS)]) as running:
        connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=HANG_S)
        for _ in range(2):  # the second one comes on the same connection
            connection.request("GET", "/health")
            connection.getresponse().read()
            sock = connection.sock
        assert sock.recv(1) == b""


def test_a_refused_method_names_all_that_a_path_takes(daemon: Served, secret: tuple[Path, str]) -> None:
    key = {"authorization": f"Bearer {secret[1]}"}
    for path, allowed in (("/v1/files", "GET, HEAD, POST"), ("/v1/files/x", "DELETE, GET, HEAD"), ("/docs", "GET")):
        answer = asked(daemon, "PUT", path, **key)
        assert (answer.status, answer.getheader("allow")) == (405, allowed)
