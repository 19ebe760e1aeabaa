"""The HTTP door: what is refused, with which status, before anything is allocated; who sees what."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
from daemon_tools import NAME, Served, deployment, line, served, submit, wait_batch
from laddertron.engine.config.schema import LimitsConfig
from laddertron.engine.daemon.http.forms import FormError, FormReader, boundary_of, clean_name
from laddertron.engine.daemon.keys import (
    KeyFileError,
    KeyRing,
    add_key,
    limit_key,
    read_keys,
    revoke_key,
    rotate_key,
)
from laddertron.engine.job import Culprit, JobState
from laddertron.engine.metrics.observer import Observer
from laddertron.engine.text.tokenizer import TextModel
from prometheus_client import CollectorRegistry
from tiny_text import write_folder
from waiting import FOR_EVER_S, HANG_S, cheapest, until

SMALL = replace(
    LimitsConfig(),
    max_body_bytes=200_000,
    max_line_bytes=20_000,
    max_lines=50,
    max_connections=64,
    header_timeout=FOR_EVER_S,
    body_timeout=FOR_EVER_S,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Iterator[Served]:
    observer = Observer(CollectorRegistry())
    with served(deployment(tmp_path_factory.mktemp("small"), SMALL), folder, observer=observer) as running:
        yield running


def ask(
    daemon: Served, method: str, path: str, body: bytes | None = None, **headers: str
) -> tuple[int, dict[str, Any], dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", daemon.port, timeout=HANG_S)
    with contextlib.closing(connection):
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body, names)
        response = connection.getresponse()
        raw = response.read()
        value = json.loads(raw) if "json" in response.headers.get("content-type", "") else {"raw": raw.decode()}
        return response.status, value, dict(response.headers.items())


def form(data: bytes, purpose: str = "batch", name: str = "a.jsonl") -> tuple[bytes, str]:
    head = f'--B\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n{purpose}\r\n--B\r\n'
    head += f'Content-Disposition: form-data; name="file"; filename="{name}"\r\n\r\n'
    return head.encode() + data + b"\r\n--B--\r\n", "multipart/form-data; boundary=B"


def error_of(answer: tuple[int, dict[str, Any], dict[str, str]]) -> tuple[int, str | None]:
    status, value, _ = answer
    assert set(value["error"]) == {"message", "type", "param", "code"}
    return status, value["error"]["code"]


# sizes


def test_bodies_too_large_are_refused_unread(daemon: Served) -> None:
    """By the announced length at once (nothing of the body is sent), and by what comes where no length is given."""
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99999999999\r\nconnection: close\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", daemon.port), timeout=HANG_S) as connection:
        connection.sendall(head)
        assert b" 413 " in connection.recv(65536).splitlines()[0]
    chunked = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    answer = daemon.raw(chunked + (b"1000\r\n" + b"x" * 0x1000 + b"\r\n") * 8 + b"0\r\n\r\n")
    assert b" 413 " in answer.splitlines()[0]
    assert b"body_too_large" in answer
    assert error_of(ask(daemon, "POST", "/v1/completions", b"x" * 21_000)) == (413, "body_too_large")


def test_a_file_too_large_too_long_or_of_too_many_lines(daemon: Served) -> None:
    for data, expected in (
        (b"x\n" * 100_001, (400, "too_many_lines")),
        (b"\n".join(b"x" * 4900 for _ in range(45)), (413, "file_too_large")),
        (b"x" * 21_000 + b"\n", (400, "line_too_long")),
        (line("a") * 51, (400, "too_many_lines")),
    ):
        body, kind = form(data)
        assert error_of(ask(daemon, "POST", "/v1/files", body, content_type=kind)) == expected
    body, kind = form(line("a") * 50)
    assert ask(daemon, "POST", "/v1/files", body, content_type=kind)[0] == 200
    assert not [p for p in Path(daemon.config.daemon.data_dir, "files").iterdir() if p.name.startswith(".")]


def test_what_clients_of_vllm_ask_beside_the_api(daemon: Served, folder: Path) -> None:
    """Ids of texts and chats as requests get them, whatever their size, and back; the version; whether it lives."""
    text = TextModel.from_folder(folder)

    def post(path: str, **body: Any) -> tuple[int, dict[str, Any]]:
        return ask(daemon, "POST", path, json.dumps(body).encode())[:2]

    for prompt in ("the land", "the land " * 2000):
        status, found = post("/tokenize", prompt=prompt, return_token_strs=True)
        assert (status, found["tokens"], found["max_model_len"]) == (200, text.encode(prompt), 512)
        assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
        assert found["token_strs"][0] == "<s>"
        assert post("/detokenize", tokens=found["tokens"][1:]) == (200, {"prompt": prompt})
    said = [{"role": "user", "content": "hi"}]
    assert post("/tokenize", messages=said, model=NAME)[1]["tokens"] == text.encode_chat(said)
    for path, body, code in (
        ("/tokenize", {"prompt": "x", "model": "y"}, "model_not_found"),
        ("/tokenize", {"prompt": ["a", "b"]}, "invalid_value"),
        ("/tokenize", {"prompt": "x", "return_token_strs": 1}, "invalid_type"),
        ("/detokenize", {"tokens": [-1]}, "invalid_value"),
        ("/detokenize", {"tokens": "x"}, "invalid_type"),
    ):
        status, found = post(path, **body)
        assert (status in (400, 404), found["error"]["code"]) == (True, code)
    assert ask(daemon, "GET", "/version")[:2] == (200, {"version": "0"})
    assert ask(daemon, "GET", "/load")[:2] == (200, {"server_load": 0})
    assert ask(daemon, "GET", "/ping")[0] == ask(daemon, "POST", "/ping")[0] == 200


def test_compressed_bodies_are_415(daemon: Served) -> None:
    body = gzip.compress(b'{"model": "tiny", "prompt": "x"}')
    answer = ask(daemon, "POST", "/v1/completions", body, content_encoding="gzip")
    assert error_of(answer)[0] == 415


def test_headers_too_long_are_431(daemon: Served) -> None:
    head = b"GET /health HTTP/1.1\r\nhost: localhost\r\n"
    assert b" 431 " in daemon.raw(head + b"x: " + b"y" * 40_000 + b"\r\n\r\n").splitlines()[0]
    many = b"".join(b"x-%d: y\r\n" % n for n in range(20_000))
    assert b" 431 " in daemon.raw(head + many + b"\r\n").splitlines()[0]
    assert b" 400 " in daemon.raw(b"\x16\x03\x01 nonsense\r\n\r\n").splitlines()[0]


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 10**9},
        {"temperature": -0.5},
        {"top_p": "NaN"},
        {"max_tokens": 10**40},
        {"logit_bias": {str(n): 1 for n in range(1025)}},
        {"prompt": [[1] * 10] * 1025},
        {"stop": ["x"] * 17},
    ],
)
def test_absurd_parameters_are_400_at_once(daemon: Served, fields: dict[str, Any]) -> None:
    """In 50 ms on an idle machine; client and daemon are one process here."""
    body = json.dumps({"model": NAME, "prompt": "x", **fields}).encode()

    def refused() -> None:
        assert error_of(ask(daemon, "POST", "/v1/completions", body))[0] in (400, 413)

    assert cheapest(refused) < 0.25


@pytest.mark.parametrize("raw", [b'{"temperature": NaN}', b'{"a": 1e999}', b"[" * 5000, b'{"a":1,"a":1}', b"\xff", b""])
def test_what_is_not_json_is_400(daemon: Served, raw: bytes) -> None:
    assert error_of(ask(daemon, "POST", "/v1/completions", raw))[0] == 400
    assert error_of(ask(daemon, "POST", "/v1/batches", raw))[0] == 400


# time


def test_what_does_not_come_in_time_is_not_waited_for(folder: Path, tmp_path: Path) -> None:
    """Headers that never end are cut off without a word, a body that never comes is a 408. test_server.py has a crowd
    of them."""
    with served(deployment(tmp_path, replace(SMALL, header_timeout=0.5)), folder) as daemon:
        assert daemon.raw(b"GET / HTTP/1.1\r\nx-a: ") == b""
    with served(deployment(tmp_path, replace(SMALL, body_timeout=0.5)), folder) as daemon:
        late = daemon.raw(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9000\r\n\r\n{")
        assert b" 408 " in late.splitlines()[0]
        assert b"request_timeout" in late


# names


@pytest.mark.parametrize(
    "path",
    [
        "/v1/files/file-../../etc/passwd",
        "/v1/files/..%2f..%2f..%2fetc%2fpasswd",
        "/v1/files/file-..%2f..%2fetc%2fpasswd/content",
        "/v1/files/%00",
        "/v1/batches/batch_%0d%0aset-cookie:x",
        "/v1/models/..%2f",
        "/nowhere",
    ],
)
def test_strange_names_are_404(daemon: Served, path: str) -> None:
    assert error_of(ask(daemon, "GET", path))[0] == 404


def test_file_names_are_names(daemon: Served) -> None:
    """Folders and control characters go; a line break within the header itself is a broken form."""
    for given, kept in (("../../etc/passwd", "passwd"), ("a\tb", "a_b"), ("C:\\x\\y.jsonl", "y.jsonl"), ("", "upload")):
        body, kind = form(line("a"), name=given)
        assert ask(daemon, "POST", "/v1/files", body, content_type=kind)[1]["filename"] == kept
    body, kind = form(line("a"), name="a\r\nx-evil: 1")
    assert error_of(ask(daemon, "POST", "/v1/files", body, content_type=kind)) == (400, "invalid_form")


@pytest.mark.parametrize("cut", [1, 2, 3, 7, 16, 61])
def test_a_form_may_come_in_any_pieces(cut: int) -> None:
    data = b"-B\n\r\n-\r\n--\r\n--A\r\n\r\n--\r\n" * 3  # beginnings of a boundary, and none of them one
    body, kind = form(data)
    got: list[bytes] = []
    parser = FormReader(boundary_of(kind), got.append)
    for at in range(0, len(body), cut):
        parser.feed(body[at : at + cut])
    parser.close()
    assert b"".join(got) == data
    assert (parser.filename, parser.fields) == ("a.jsonl", {"purpose": "batch"})


def part(disposition: str, content: bytes = b"x\n", *headers: str) -> bytes:
    head = "\r\n".join((f"Content-Disposition: form-data; {disposition}", *headers))
    return head.encode() + b"\r\n\r\n" + content + b"\r\n"


def read_form(reader: FormReader, body: bytes, cut: int) -> None:
    for at in range(0, len(body), cut):
        reader.feed(body[at : at + cut])
    reader.close()


FILE = part('name="file"; filename="a.jsonl"')
PLAIN = b"--B\r\n" + part('name="purpose"', b"batch") + b"--B\r\n" + FILE + b"--B--\r\n"


@pytest.mark.parametrize(
    ("body", "kind", "filename"),
    [
        (PLAIN, "boundary=B", "a.jsonl"),
        (PLAIN, 'boundary="B"; charset=utf-8', "a.jsonl"),
        (PLAIN, "charset=utf-8 ;BOUNDARY=B", "a.jsonl"),
        (PLAIN.replace(b"B\r\n", b"a b\r\n").replace(b"--B--", b"--a b--"), 'boundary="a b"', "a.jsonl"),
        (PLAIN.replace(b'"', b""), "boundary=B", "a.jsonl"),
        (
            PLAIN.replace(b'"file"; filename="a.jsonl"', b"file; filename=a.jsonl; filename*=utf-8''a.jsonl"),
            "",
            "a.jsonl",
        ),
        (PLAIN.replace(b'"a.jsonl"', b"\"=?utf-8?B?w6k=?=\"; filename*=utf-8''%C3%A9.jsonl"), "", "é.jsonl"),
        (PLAIN.replace(b'filename="a.jsonl"', b"filename*=UTF-8'en'%e2%82%ac%20x"), "", "€ x"),
        (PLAIN.replace(b"a.jsonl", "é.jsonl".encode()), "", "é.jsonl"),
        (PLAIN.replace(b"a.jsonl", rb"a\"b; c"), "", 'a"b; c'),
        (b"An old mail.\r\n" + PLAIN, "", "a.jsonl"),
        (b"\r\n\r\n" + PLAIN, "", "a.jsonl"),
        (PLAIN.replace(b"--B\r\n", b"--B \t\r\n"), "", "a.jsonl"),
        (PLAIN.replace(b"; ", b" ;  ").replace(b"Disposition: ", b"disposition:\t"), "", "a.jsonl"),
        (PLAIN + b"an epilogue\r\n--B\r\n", "", "a.jsonl"),
        (PLAIN[:-2], "", "a.jsonl"),
        (
            PLAIN.replace(FILE, part('filename="a.jsonl"; name="file"', b"x\n", "Content-Type: text/plain")),
            "",
            "a.jsonl",
        ),
    ],
)
def test_every_client_writes_forms_in_its_own_way(body: bytes, kind: str, filename: str) -> None:
    """Unquoted and extended names, quoted boundaries, preambles, white space: also a byte at a time."""
    for cut in (1, len(body)):
        got: list[bytes] = []
        reader = FormReader(boundary_of("multipart/form-data; " + (kind or "boundary=B")), got.append)
        read_form(reader, body, cut)
        assert (b"".join(got), reader.filename, reader.fields) == (b"x\n", filename, {"purpose": "batch"})


@pytest.mark.parametrize(
    "body",
    [
        PLAIN[:-4],
        PLAIN.replace(b"\r\n", b"\n"),
        PLAIN.replace(b'name="file"', b'name="purpose"'),
        PLAIN.replace(b"\r\n\r\n", b"\r\n"),
        PLAIN.replace(FILE, FILE + b"--B\r\n" + FILE),
        PLAIN.replace(b'; filename="a.jsonl"', b""),
        PLAIN.replace(b'name="purpose"', b""),
        PLAIN.replace(b"batch", b"x" * 1025),
        PLAIN.replace(b"a.jsonl", b"a" * 9000),
        PLAIN.replace(b'"a.jsonl"', b'"a.jsonl'),
        PLAIN.replace(b'"a.jsonl"', b'"a.jsonl"\r\nContent-Transfer-Encoding: base64'),
        PLAIN.replace(b"filename=", b"filename*" + b"9" * 5000 + b"="),
        PLAIN.replace(b"form-data", b"form-data\r\nx-a: " + b"a" * 4000 + b"\r\nx-b: " + b"b" * 4000),
        PLAIN.replace(b"--B\r\n", (b"--B\r\n" + part('name="p"')) * 17, 1),
        b"x" * 9000 + b"\r\n" + PLAIN,
        b"",
    ],
)
def test_broken_forms_are_refused(body: bytes) -> None:
    """The final boundary is required: without it, the end of the file may be missing."""
    for cut in (1, max(1, len(body))):
        reader = FormReader(b"B", lambda data: None)
        with pytest.raises(FormError):
            read_form(reader, body, cut)


def test_a_form_names_its_boundary_and_file_names_are_bounded() -> None:
    for kind in ("", "text/plain", "multipart/form-data", "multipart/form-data; boundary=" + "x" * 100):
        with pytest.raises(FormError):
            boundary_of(kind)
    assert clean_name("x" * 1000) == "x" * 255


# keys


def test_keys_are_digests_at_rest_and_revoked_by_name(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    with pytest.raises(KeyFileError, match="keys add"):
        KeyRing(path)
    key, secret = add_key(path, "alice")
    add_key(path, "bob")
    assert secret not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    ring = KeyRing(path)
    assert ring.holder(secret) == key
    for wrong in ("", secret[:-1], secret + "x", "x" * 5000, key.digest):
        assert ring.holder(wrong) is None
    assert revoke_key(path, "alice").id == key.id
    with pytest.raises(KeyFileError, match="no working key"):
        revoke_key(path, "alice")
    assert KeyRing(path).holder(secret) is None
    assert len(read_keys(path)) == 2
    path.write_text("{}")
    with pytest.raises(KeyFileError, match="not a key file"):
        read_keys(path)


def test_a_rotated_key_keeps_its_id_and_the_old_secret_for_a_while(tmp_path: Path) -> None:
    """A secret that is replaced works until the stated time, the one before it no more; what is revoked opens nothing,
    old secrets included."""
    path, clock = tmp_path / "keys.json", [time.time()]
    key, first = add_key(path, "alice")
    limit_key(path, "alice", {"concurrent_requests": 3})
    renewed, second = rotate_key(path, "alice", 3600.0)
    assert (renewed.id, renewed.limits.concurrent_requests) == (key.id, 3)
    assert second not in path.read_text()
    ring = KeyRing(path, lambda: clock[0])
    assert [ring.holder(secret) for secret in (first, second)] == [renewed, renewed]
    clock[0] = renewed.old_until
    assert [ring.holder(secret) for secret in (first, second)] == [None, renewed]
    third = rotate_key(path, key.id, 3600.0)[1]
    clock[0] = time.time()
    assert [KeyRing(path).holder(secret) is None for secret in (first, second, third)] == [True, False, False]
    fourth = rotate_key(path, key.id, 0.0)[1]
    assert [KeyRing(path).holder(secret) is None for secret in (third, fourth)] == [True, False]
    rotate_key(path, key.id, 3600.0)
    revoke_key(path, "alice")
    assert KeyRing(path).holder(fourth) is None


def test_a_running_daemon_sees_a_revocation_and_a_spoilt_file_lets_nobody_in(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys.json"
    _, one = add_key(path, "one")
    _, two = add_key(path, "two")
    ring = KeyRing(path)
    revoke_key(path, "one")
    ring.refresh()
    assert ring.holder(one) is None
    assert ring.holder(two) is not None
    path.write_text("spoilt")
    ring.refresh()
    assert ring.holder(two) is None
    assert "every API key is refused: " in caplog.text


def test_a_change_of_the_key_file_keeps_its_owner_mode_and_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root changes a key: the daemon, of another user, can still read the file, and so can one that names it without
    the link. What is readable again is read again."""
    (real := tmp_path / "real").mkdir()
    path, link = real / "keys.json", tmp_path / "keys.json"
    secret = add_key(path, "one")[1]
    path.chmod(0o640)
    link.symlink_to(path)
    owners = list[tuple[int, int]]()
    monkeypatch.setattr("os.fchown", lambda descriptor, *owner: owners.append(owner))
    ring = KeyRing(path)
    limit_key(link, "one", {"concurrent_requests": 3})
    assert link.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o640
    assert owners == [(path.stat().st_uid, path.stat().st_gid)]
    with monkeypatch.context() as during:
        during.setattr(Path, "read_text", lambda *_, **__: os.stat("/proc/none"))
        ring.refresh()
        assert ring.holder(secret) is None
    path.chmod(0o644)  # the mend of a file that could not be read changes no byte of it
    ring.refresh()
    assert ring.holder(secret) is not None


def test_every_route_but_probes_wants_a_key_and_each_owner_sees_their_own(folder: Path, tmp_path: Path) -> None:
    """Two holders: one's files and batches do not exist for the other, in every verb; the audit says who did what."""
    path = tmp_path / "keys.json"
    _, alice_secret = add_key(path, "alice")
    _, bob_secret = add_key(path, "bob")
    with served(deployment(tmp_path, api_key_file=str(path)), folder, keys=path) as daemon:
        schema = ask(daemon, "GET", "/openapi.json", authorization=f"Bearer {alice_secret}")[1]
        routes = [(m.upper(), p.replace("{", "").replace("}", "")) for p, ops in schema["paths"].items() for m in ops]
        assert len(routes) >= 16
        for method, route in [*routes, ("GET", "/docs"), ("GET", "/openapi.json"), ("GET", "/nowhere")]:
            expected = 200 if route in ("/health", "/ready", "/ping") else 401
            assert ask(daemon, method, route)[0] == expected, (method, route)
            for wrong in ("Bearer wrong", alice_secret, f"Basic {alice_secret}"):
                assert ask(daemon, method, route, authorization=wrong)[0] == expected, (method, route)
        alice, bob = daemon.client(alice_secret), daemon.client(bob_secret)
        with pytest.raises(openai.AuthenticationError):
            daemon.client("sk-lt-wrong").models.list()
        batch = wait_batch(alice, submit(alice, line("a")).id)
        for call, name in (
            (bob.files.retrieve, batch.input_file_id),
            (bob.files.content, batch.output_file_id),
            (bob.files.delete, batch.output_file_id),
            (bob.batches.retrieve, batch.id),
            (bob.batches.cancel, batch.id),
        ):
            with pytest.raises(openai.NotFoundError):
                call(name)
        with pytest.raises(openai.BadRequestError):
            bob.batches.create(input_file_id=batch.input_file_id, endpoint="/v1/completions", completion_window="24h")
        assert bob.files.list().data == []
        assert bob.batches.list().data == []
        assert len(alice.files.list().data) == 2
        # a new secret, the same id: what alice made is still hers, under both
        renewed = rotate_key(path, "alice", 3600.0)[1]
        until(lambda: ask(daemon, "GET", "/v1/models", authorization=f"Bearer {renewed}")[0] == 200)
        for secret in (alice_secret, renewed):
            assert daemon.client(secret).batches.retrieve(batch.id).output_file_id == batch.output_file_id


# the rest


def test_ready_docs_metrics(daemon: Served) -> None:
    status, value, headers = ask(daemon, "GET", "/ready")
    assert (status, value["status"]) == (200, "ready")
    assert headers["x-request-id"].startswith("req_")
    assert "<script" not in ask(daemon, "GET", "/docs")[1]["raw"]
    assert error_of(ask(daemon, "PUT", "/v1/files"))[0] == 405
    ask(daemon, "GET", "/v1/files/file-1")
    text = ask(daemon, "GET", "/metrics")[1]["raw"]
    assert 'laddertron_http_requests_total{code="404",route="/v1/files/{file_id}"}' in text
    assert "file-1" not in text
    assert "laddertron_store_writable 1.0" in text


def test_an_engine_that_is_not_ready_is_503_everywhere(folder: Path, tmp_path: Path) -> None:
    with served(deployment(tmp_path), folder) as daemon:
        job = daemon.jobs[0]
        client = daemon.client()
        assert client.completions.create(model=NAME, prompt="x").choices
        daemon.on_loop(lambda: job.report_state("suspect", "rank 1 on node-b is silent"))
        status, value, _ = ask(daemon, "GET", "/ready")
        assert (status, value["reason"]) == (503, "rank 1 on node-b is silent")
        with pytest.raises(openai.InternalServerError) as busy:
            client.completions.create(model=NAME, prompt="x")
        assert busy.value.status_code == 503
        assert busy.value.response.headers["retry-after"] == "5"
        assert ask(daemon, "GET", "/health")[0] == 200


def test_ready_names_the_culprit_to_who_has_a_key(folder: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    _, key = add_key(keys, "a")
    culprit: dict[str, Any] = {"rank": 3, "node": "node-b", "stage": 1, "device": "cuda:1", "collective": "reduce 7"}
    with served(deployment(tmp_path), folder, keys=keys) as daemon:
        job = daemon.jobs[0]
        until(lambda: job.state.phase == "ready")
        job.state = JobState("restarting", "rank 3 is gone", 1, job.limits, Culprit(**culprit))
        status, value, _ = ask(daemon, "GET", "/ready", Authorization=f"Bearer {key}")
        assert status == 503
        (replica,) = value["replicas"]
        assert {name: replica[name] for name in culprit} == culprit
        assert ask(daemon, "GET", "/ready")[1] == {"status": "not_ready"}


def test_a_client_that_goes_away_takes_its_request_along(folder: Path, tmp_path: Path) -> None:
    """One stream and one whole answer, left in the middle: both are cancelled in the engine."""
    with served(deployment(tmp_path), folder) as daemon:
        job = daemon.jobs[0]
        daemon.on_loop(job.hold)
        for stream in (True, False):
            body = json.dumps({"model": NAME, "prompt": "x", "max_tokens": 300, "stream": stream}).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n".encode()
            with socket.create_connection(("127.0.0.1", daemon.port)) as connection:
                connection.sendall(head + body)
                until(lambda: len(job.submitted) == len(job.cancels) + 1)
            until(lambda: len(job.submitted) == len(job.cancels))
        assert daemon.on_loop(lambda: daemon.daemon.dispatcher.in_flight) == 0


def test_the_daemon_needs_no_torch_and_no_mpi() -> None:
    code = (
        "import sys; import laddertron.launchers.serve, laddertron.launchers.cli.commands.serve, "
        "laddertron.launchers.cli.commands.batch, laddertron.launchers.cli.commands.keys; "
        "print(sorted({'torch', 'mpi4py', 'megatron', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ})
    assert out.stdout.strip() == "[]"
