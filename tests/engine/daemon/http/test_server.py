"""The listener's own bounds and TLS: a client that does not read, two hundred slow ones, a certificate."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
import uvicorn
from daemon_tools import NAME, Served, deployment, line, lines_of, served, submit, wait_batch
from laddertron.engine.config.schema import LimitsConfig
from laddertron.engine.daemon.http.connections import ServerOptions
from laddertron.engine.daemon.http.server import listen, make_server
from laddertron.engine.daemon.http.tls import TlsFault, check_pair
from laddertron.launchers.cli import __main__ as cli
from laddertron.launchers.cli.batch_client import ApiError, BatchClient
from openai import OpenAI
from tiny_text import write_folder
from waiting import FOR_EVER_S, HANG_S, until

ROOT = Path(__file__).resolve().parents[4]
QUICK = replace(LimitsConfig(), max_connections=512, header_timeout=1.0, body_timeout=1.0)
HEADS = (
    b"GET / HTTP/1.1\r\nx-a: ",
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9000\r\n\r\n",
    b"",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("tiny"))


# time


class Slow:
    """A connection that sends a head, then a byte four times a second (without a head nothing at all), until it is cut
    off."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes) -> None:
        self._writer, self._head = writer, head
        self.cut_off = asyncio.ensure_future(reader.read(1 << 16))

    async def dribble(self) -> None:
        with contextlib.suppress(ConnectionError):
            while not self.cut_off.done():
                if self._head:
                    self._writer.write(b"x")
                await asyncio.wait({self.cut_off}, timeout=0.25)

    def close(self) -> None:
        self.cut_off.cancel()
        self._writer.close()


async def slow_ones(port: int, count: int = 200) -> list[Slow]:
    made = []
    for head in itertools.islice(itertools.cycle(HEADS), count):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head)
        made.append(Slow(reader, writer, head))
    return made


def test_two_hundred_slow_sockets_keep_nobody_waiting(folder: Path, tmp_path: Path) -> None:
    """Headers that never end, bodies that never come, connections that say nothing: others are answered while all of
    them last, which is for ever."""

    async def run(port: int) -> None:
        slow = await slow_ones(port)
        dribbling = asyncio.gather(*(one.dribble() for one in slow))
        for _ in range(20):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            assert (await asyncio.wait_for(reader.read(1 << 16), HANG_S)).startswith(b"HTTP/1.1 200")
            writer.close()
        assert not any(one.cut_off.done() for one in slow)
        dribbling.cancel()
        for one in slow:
            one.close()

    patient = replace(QUICK, header_timeout=FOR_EVER_S, body_timeout=FOR_EVER_S)
    with served(deployment(tmp_path, patient), folder) as daemon:
        asyncio.run(run(daemon.port))


@pytest.mark.parametrize(
    "limits", [QUICK, pytest.param(LimitsConfig(), marks=pytest.mark.slow)], ids=["quick", "shipped"]
)
def test_two_hundred_slow_sockets_are_closed(folder: Path, tmp_path: Path, limits: LimitsConfig) -> None:
    """A byte now and then buys no time: all are cut off."""

    async def run(port: int) -> None:
        slow = await slow_ones(port)
        await asyncio.wait_for(asyncio.gather(*(one.dribble() for one in slow)), HANG_S)
        for one in slow:
            one.close()

    with served(deployment(tmp_path, limits), folder) as daemon:
        asyncio.run(run(daemon.port))


def test_a_client_that_does_not_read_is_cut_off() -> None:
    """An answer without end to a client that never reads: the connection is aborted, and the application learns it."""
    heard: list[str] = []

    async def endless(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        gone = asyncio.ensure_future(receive())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not gone.done():
            await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
            await asyncio.sleep(0)
        heard.append((await gone)["type"])

    async def run() -> None:
        options = ServerOptions(write_timeout=0.3)
        listener = listen("127.0.0.1", 0)
        server = make_server(endless, options)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        with socket.create_connection(listener.getsockname()) as client:
            client.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
            async with asyncio.timeout(HANG_S):
                while not heard:
                    await asyncio.sleep(0.02)
        server.should_exit = True
        await serving

    asyncio.run(run())
    assert heard == ["http.disconnect"]


# TLS


def make_pair(folder: Path, name: str, *more: str) -> tuple[str, str]:
    """A self-signed certificate for 127.0.0.1, and its key."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl here to make a certificate with")
    cert, key = str(folder / f"{name}.pem"), str(folder / f"{name}.key")
    words = ["req", "-x509", "-days", "1"]
    if "-newkey" not in more:
        words += ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    names = ["-subj", "/CN=laddertron", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(
        [openssl, *words, *names, *(more or ("-nodes",)), "-keyout", key, "-out", cert], check=True, capture_output=True
    )
    return cert, key


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return make_pair(tmp_path_factory.mktemp("tls"), "good")


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory, folder: Path, pair: tuple[str, str]) -> Iterator[Served]:
    config = deployment(tmp_path_factory.mktemp("secure"), tls_cert=pair[0], tls_key=pair[1])
    with served(config, folder) as daemon:
        yield daemon


def test_the_openai_client_over_tls(secure: Served, pair: tuple[str, str], tmp_path: Path) -> None:
    """With the certificate trusted: a stream and a batch from end to end."""
    trust = ssl.create_default_context(cafile=pair[0])
    with httpx2.Client(verify=trust) as http:
        client = OpenAI(base_url=f"https://127.0.0.1:{secure.port}/v1", api_key="none", max_retries=0, http_client=http)
        whole = {"ignore_eos": True}
        chunks = client.completions.create(model=NAME, prompt="x", max_tokens=4, stream=True, extra_body=whole)
        assert [c.choices[0].finish_reason for c in chunks][-1] == "length"
        batch = wait_batch(client, submit(client, line("a") + line("b")).id)
        assert lines_of(client, batch.output_file_id).keys() == {"a", "b"}


def test_who_does_not_trust_the_certificate_or_speaks_plainly_gets_nothing(secure: Served) -> None:
    client = OpenAI(base_url=f"https://127.0.0.1:{secure.port}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.APIConnectionError):
        client.models.list()
    assert b"200" not in secure.raw(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")


def test_the_batch_client_over_tls(secure: Served, pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It trusts what the system trusts, and SSL_CERT_FILE. A certificate that it does not trust, or of another name, is
    not asked for again."""
    monkeypatch.setattr("time.sleep", None)
    for trusted, host, why in (("/dev/null", "127.0.0.1", "self-signed"), (pair[0], "localhost", "Hostname mismatch")):
        monkeypatch.setenv("SSL_CERT_FILE", trusted)
        with pytest.raises(ApiError, match=f"{why}.* set SSL_CERT_FILE"):
            BatchClient(f"https://{host}:{secure.port}/v1").list(1)
    assert BatchClient(f"https://127.0.0.1:{secure.port}/v1").list(1) is not None


def test_a_renewed_certificate_serves_new_connections(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a restart; one that cannot be used leaves the earlier one."""
    monkeypatch.setattr("laddertron.engine.daemon.http.server._RENEWAL_TICKS", 1)
    cert, key = make_pair(tmp_path, "live")
    new = [Path(path).read_bytes() for path in make_pair(tmp_path, "new")]
    with served(deployment(tmp_path, tls_cert=cert, tls_key=key), folder) as daemon:
        at = "127.0.0.1", daemon.port
        before = ssl.get_server_certificate(at)
        Path(cert).write_bytes(new[0])
        until(lambda: "the earlier certificate stays in use" in caplog.text)
        assert ssl.get_server_certificate(at) == before
        Path(key).write_bytes(new[1])
        until(lambda: ssl.get_server_certificate(at).encode() == new[0])


def test_a_certificate_renewed_during_the_start_is_seen(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("laddertron.engine.daemon.http.server._RENEWAL_TICKS", 1)
    live, new = make_pair(tmp_path, "live"), make_pair(tmp_path, "new")
    load = uvicorn.Config.load

    def load_then_renew(config: uvicorn.Config) -> None:
        load(config)
        for one, other in zip(live, new, strict=True):
            Path(one).write_bytes(Path(other).read_bytes())

    monkeypatch.setattr(uvicorn.Config, "load", load_then_renew)
    with served(deployment(tmp_path, tls_cert=live[0], tls_key=live[1]), folder) as daemon:
        until(lambda: ssl.get_server_certificate(("127.0.0.1", daemon.port)) == Path(new[0]).read_text())


@pytest.mark.parametrize(
    ("fault", "key", "words"),
    [
        ("missing", "tls_key", "No such file"),
        ("mismatch", "tls_key", "does not match the first certificate"),
        ("no key", "tls_key", "no usable private key"),
        ("no certificate", "tls_cert", "no certificate in it"),
        ("encrypted", "tls_key", "passphrases are not supported"),
        ("weak", "tls_cert", "too weak"),
    ],
)
def test_a_pair_that_cannot_be_used_is_named(
    fault: str, key: str, words: str, pair: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By `serve` before anything is launched and by `check`, with exit code 2 and the config's key."""
    cert, private = pair
    match fault:
        case "missing":
            private = str(tmp_path / "nowhere.key")
        case "mismatch":
            private = make_pair(tmp_path, "other")[1]
        case "no key":
            private = cert
        case "no certificate":
            cert = private
        case "encrypted":
            cert, private = make_pair(tmp_path, "locked", "-passout", "pass:secret")
        case "weak":
            cert, private = make_pair(tmp_path, "weak", "-newkey", "rsa:512", "-nodes")
    with pytest.raises(TlsFault, match=words) as said:
        check_pair(cert, private)
    assert said.value.key == key
    sets = [f"daemon.data_dir={tmp_path / 'data'}", "daemon.port=0", f"daemon.tls_cert={cert}"]
    words_of = [word for one in (*sets, f"daemon.tls_key={private}") for word in ("--set", one)]
    for command in ("serve", "check"):
        assert cli.main([command, str(ROOT / "configs" / "demo.yaml"), *words_of]) == 2
        shown = capsys.readouterr().err
        assert f"daemon.{key}: " in shown
        assert words.lower() in shown.lower()
    assert not (tmp_path / "data").exists()
