"""A daemon without keys on loopback serves this machine under its own names, and no page whose name was rebound to it;
and what a request names, in every form of its target."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemon_tools import NAME, Served, deployment, served
from laddertron.engine.config.rules import is_loopback
from laddertron.engine.daemon.http.authority import Authority, authority_of, check_local, origin_form
from laddertron.engine.daemon.keys import add_key
from laddertron.engine.openai.errors import ApiError
from tiny_text import write_folder

LOCAL = [
    "localhost",
    "LocalHost:1",
    "localhost.",
    "127.0.0.1:8000",
    "127.9.9.9",
    "[::1]",
    "[0:0::1]:80",
    "[::ffff:127.0.0.1]",
]
FOREIGN = [
    "evil.example",
    "evil.example:8000",
    "127.0.0.1.evil.example",
    "localhost.evil.example",
    "x.localhost",
    "0.0.0.0",  # noqa: S104 - a name in a request
]
FOREIGN += ["127.evil.example", "10.0.0.1", "[::]", "[::ffff:10.0.0.1]", "", "localhost..", "%6cocalhost"]
INVALID = [
    "user@localhost",
    "user:word@localhost:80",
    "localhost:port",
    "localhost:99999",
    "::1",
    "[::1",
    "[evil]",
    "a b",
]
INVALID += [
    "localhost/x",
    "localhost, evil.example",
    "[::1]evil",
    "[::1%25lo]",
    "localhost:80:80",
    "localhost\\",
    "lo\u0441alhost",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Iterator[Served]:
    config = deployment(tmp_path_factory.mktemp("local"), host="My-Box.internal")
    with served(config, folder, probes=True) as running:
        yield running


def ask(
    daemon: Served, target: str, *headers: str, port: int = 0, version: str = "1.1", method: str = "GET"
) -> tuple[int, str]:
    """The status and the body; each header is a whole line."""
    lines = (f"{method} {target} HTTP/{version}", *headers, "connection: close", "", "")
    answer = daemon.raw("\r\n".join(lines).encode(), port)
    return int(answer.split(b" ", 2)[1]), answer.partition(b"\r\n\r\n")[2].decode()


# pure


@pytest.mark.parametrize("text", LOCAL)
def test_names_of_this_machine(text: str) -> None:
    assert is_loopback(authority_of(text).host)
    check_local([text], [], ())


@pytest.mark.parametrize("text", FOREIGN)
def test_names_of_others(text: str) -> None:
    with pytest.raises(ApiError, match="without keys") as caught:
        check_local([text], [], ("my-box",))
    assert caught.value.status == 421


@pytest.mark.parametrize("text", INVALID)
def test_what_is_no_authority(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not host:port|IP|address"):
        authority_of(text)


def test_an_authority_has_one_form() -> None:
    assert authority_of("EXAMPLE.com.:080") == Authority("example.com", 80)
    assert authority_of("[0:0:0::1]:") == Authority("::1", None)
    check_local(["My-Box:80".lower()], [], ("my-box",))
    with pytest.raises(ApiError, match="several hosts"):
        check_local(["localhost", "localhost"], [], ())


def test_a_request_without_a_host_is_of_a_program_unless_it_has_an_origin() -> None:
    check_local([], [], ())
    for origins in (["http://localhost"], ["null"], [""], ["http://a", "http://b"]):
        with pytest.raises(ApiError, match="origin") as caught:
            check_local([], origins, ())
        assert caught.value.status == 403


@pytest.mark.parametrize("origin", ["http://localhost:8000", "HTTP://LOCALHOST:8000", "https://localhost.:8000"])
def test_the_page_of_this_daemon_may_ask(origin: str) -> None:
    check_local(["localhost:8000"], [origin], ())


@pytest.mark.parametrize(
    "origins",
    [
        ["http://evil.example"],
        ["null"],
        [""],
        ["http://localhost:3000"],
        ["http://127.0.0.1:8000"],
        ["localhost:8000"],
        ["file://"],
        ["http://localhost:8000", "http://localhost:8000"],
        ["http://evil@localhost:8000"],
        ["http://localhost:8000/x"],
        ["chrome-extension://localhost:8000"],
    ],
)
def test_other_pages_may_not(origins: list[str]) -> None:
    with pytest.raises(ApiError, match="origin") as caught:
        check_local(["localhost:8000"], origins, ())
    assert caught.value.status == 403


def test_default_ports_of_an_origin() -> None:
    check_local(["localhost"], ["http://localhost"], ())
    check_local(["localhost:80"], ["http://localhost"], ())
    check_local(["localhost"], ["https://localhost:443"], ())
    with pytest.raises(ApiError):
        check_local(["localhost:8000"], ["http://localhost"], ())


@pytest.mark.parametrize(
    ("target", "path", "authority"),
    [
        ("/v1/models?x=http://a", "/v1/models?x=http://a", None),
        ("*", "*", None),
        ("http://a/v1/models", "/v1/models", "a"),
        ("HTTP://A:80/v1/models?b=1", "/v1/models?b=1", "A:80"),
        ("https://[::1]:8000", "/", "[::1]:8000"),
        ("http://a?b", "/?b", "a"),
        ("http://a./x//y", "/x//y", "a."),
        ("//a/x", "//a/x", None),
    ],
)
def test_targets(target: str, path: str, authority: str | None) -> None:
    expected = None if authority is None else authority.encode()
    assert origin_form(b"GET", target.encode()) == (path.encode(), expected)


@pytest.mark.parametrize(
    "target",
    ["v1/models", "http:/a", "http://", "http:///x", "ftp://a/x", "http://u@a/x", "http://a:b/x", "http://a/x#y", "http://[::1/x"],
)  # fmt: skip
def test_targets_that_are_none(target: str) -> None:
    with pytest.raises(ValueError, match=r"neither|host:port"):
        origin_form(b"GET", target.encode())


def test_options_of_the_server() -> None:
    assert origin_form(b"OPTIONS", b"http://a") == (b"*", b"a")


# a daemon


@pytest.mark.parametrize("host", [*LOCAL, "my-box.INTERNAL:8000", "my-box.internal."])
def test_this_machine_is_served(daemon: Served, host: str) -> None:
    for port, path in ((daemon.port, "/v1/models"), (daemon.probe_port, "/metrics")):
        assert ask(daemon, path, f"Host: {host}", port=port)[0] == 200
        assert ask(daemon, path, port=port, version="1.0")[0] == 200


@pytest.mark.parametrize(
    "path", ["/v1/files", "/v1/models", "/", "/health", "/ready", "/metrics", "/openapi.json", "/nowhere"]
)
def test_a_page_with_another_name_reads_nothing(daemon: Served, path: str) -> None:
    for port in (daemon.port, daemon.probe_port):
        for host in FOREIGN:
            status, body = ask(daemon, path, f"Host: {host}", port=port)
            assert (status, json.loads(body)["error"]["code"]) == (421, "misdirected_request")
        status, body = ask(daemon, path, "Host: localhost", "Origin: http://evil.example", port=port)
        assert (status, json.loads(body)["error"]["code"]) == (403, "foreign_origin")
        assert ask(daemon, path, "Origin: http://evil.example", port=port, version="1.0")[0] == 403
        assert ask(daemon, path, "Host: evil.example", port=port, version="1.0")[0] == 421
        for host in ("user@localhost", "localhost:port", "[::1"):
            assert ask(daemon, path, f"Host: {host}", port=port)[0] == 400
        assert ask(daemon, path, port=port)[0] == 400
        assert ask(daemon, path, "Host: localhost", "Host: localhost", port=port)[0] == 400


def test_a_foreign_page_uploads_and_starts_nothing(daemon: Served) -> None:
    for path in ("/v1/files", "/v1/batches", "/v1/completions", "/v1/chat/completions", "/tokenize"):
        head = ("Origin: http://evil.example", "Host: localhost", "content-length: 0")
        assert ask(daemon, path, *head, method="POST")[0] == 403
    assert daemon.client().files.list().data == []


def test_absolute_targets(daemon: Served) -> None:
    """They name the host, whatever the Host field says."""
    here = f"127.0.0.1:{daemon.port}"
    for target in (f"http://{here}/v1/models", f"HTTP://LOCALHOST:{daemon.port}/v1/models", "https://[::1]/v1/models"):
        status, body = ask(daemon, target, "Host: evil.example")
        assert (status, json.loads(body)["data"][0]["id"]) == (200, NAME)
    assert ask(daemon, f"http://{here}", f"Host: {here}")[0] == 200
    assert ask(daemon, f"http://{here}/v1/files?limit=1", f"Host: {here}")[0] == 200
    assert ask(daemon, f"http://{here}/v1/models", version="1.0")[0] == 200
    assert ask(daemon, "http://evil.example/v1/models", f"Host: {here}")[0] == 421
    assert ask(daemon, "http://localhost@evil.example/v1/models", f"Host: {here}")[0] == 400
    assert ask(daemon, f"http://evil@{here}/v1/models", f"Host: {here}")[0] == 400
    assert ask(daemon, f"http://{here}/v1/models", "Host: user@localhost")[0] == 400
    assert ask(daemon, f"http://{here}/v1/models")[0] == 400
    assert ask(daemon, f"ftp://{here}/v1/models", f"Host: {here}")[0] == 400
    assert ask(daemon, "v1/models", f"Host: {here}")[0] == 400
    assert ask(daemon, f"http://{here}/v1/models", "Host: localhost", f"Origin: http://{here}")[0] == 200
    assert ask(daemon, f"http://{here}/v1/models", f"Host: {here}", "Origin: http://localhost")[0] == 403


def test_an_absolute_target_with_a_body(daemon: Served) -> None:
    data = json.dumps({"model": NAME, "prompt": "x", "max_tokens": 2})
    lines = ("Host: localhost", f"content-length: {len(data)}", "connection: close", "", data)
    head = f"POST http://localhost:{daemon.port}/v1/completions HTTP/1.1"
    assert daemon.raw("\r\n".join((head, *lines)).encode()).startswith(b"HTTP/1.1 200")


def test_with_keys_any_name_will_do(folder: Path, tmp_path: Path) -> None:
    """Behind a proxy, in a pod: a page has no key."""
    keys = tmp_path / "keys.json"
    bearer = f"Authorization: Bearer {add_key(keys, 'alice')[1]}"
    with served(deployment(tmp_path, api_key_file=str(keys)), folder, keys=keys, probes=True) as daemon:
        for target in ("/v1/models", "http://api.example/v1/models"):
            assert ask(daemon, target, "Host: api.example", bearer, "Origin: https://chat.example")[0] == 200
        assert ask(daemon, "http://api.example/v1/models", "Host: api.example")[0] == 401
        assert ask(daemon, "/health", "Host: 10.1.2.3:8000")[0] == 200
        assert ask(daemon, "/health", "Host: 10.1.2.3:9000", port=daemon.probe_port)[0] == 200


def test_the_names_of_a_listener_elsewhere_are_not_checked(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """metrics.host may be a pod's address, where daemon.host is loopback and needs no keys."""
    monkeypatch.setattr("laddertron.engine.daemon.service.is_loopback", lambda address: False)
    with served(deployment(tmp_path), folder, probes=True) as daemon:
        assert ask(daemon, "/health", "Host: 10.1.2.3:9000", port=daemon.probe_port)[0] == 200
