"""A client of the Batch API on the standard library, for any server of that API. Uploads and downloads are streamed."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import secrets
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

ENDED = ("completed", "failed", "expired", "cancelled")
_CHUNK = 1 << 18
_MAX_JSON = 64 << 20
_TRIES = 8
_VARIABLES = "LADDERTRON_API_KEY or OPENAI_API_KEY"
_AWAY = (0, 429, 502, 503, 504, 507)
"""Statuses of a server that is unreachable, or cannot answer now."""


class ApiError(RuntimeError):
    """The server's error; `status`: of HTTP, 0 if the server is unreachable, -1 if its certificate is refused."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class BatchClient:
    """Methods raise ApiError; reads are retried while the server is unreachable or busy, and `away` is called before
    the first retry. `url` ends in /v1; `timeout` in seconds."""

    def __init__(
        self,
        url: str,
        key: str | None = None,
        timeout: float = 60.0,
        away: Callable[[ApiError], None] = lambda error: None,
    ) -> None:
        try:
            parts = urlsplit(url.rstrip("/"))
            good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:  # a port or an address that is none
            good = False
        if not good or not (parts.path.isascii() and parts.path.isprintable() and " " not in parts.path):
            raise ApiError(f"{url!r} must be an http or https URL, such as http://127.0.0.1:8000/v1")
        if key is not None and not (key.isascii() and key.isprintable()):
            raise ApiError(f"the API key in {_VARIABLES} must be printable ASCII: is it complete, without line breaks?")
        self._url, self._key, self._timeout, self._parts, self._away = url, key, timeout, parts, away

    def upload(self, path: Path, sent: Callable[[int], None] = lambda size: None) -> dict[str, Any]:
        """Uploads a file; returns its object. `sent` is called with the bytes of every piece."""
        boundary = secrets.token_hex(16)
        name = path.name.replace('"', "_").replace("\r", "_").replace("\n", "_")
        head = (
            f'--{boundary}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
            f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n'
            f"Content-Type: application/jsonl\r\n\r\n"
        ).encode(errors="replace")  # a name on disk may be no text
        tail = f"\r\n--{boundary}--\r\n".encode()
        size = path.stat().st_size

        def body() -> Iterator[bytes]:
            yield head
            with path.open("rb") as file:
                while chunk := file.read(_CHUNK):
                    yield chunk
                    sent(len(chunk))
            yield tail

        headers = {
            "content-type": f"multipart/form-data; boundary={boundary}",
            "content-length": str(len(head) + size + len(tail)),
        }
        return self._json("POST", "/files", body(), headers)

    def create(
        self,
        file_id: str,
        endpoint: str,
        window: str,
        metadata: dict[str, str] | None,
        repeat_key: str,
        reuse: str | None = None,
    ) -> dict[str, Any]:
        """Creates a batch, once per `repeat_key`. `reuse`: a batch whose answers to the same lines it takes (laddertron
        only)."""
        body: dict[str, Any] = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": window}
        if metadata:
            body["metadata"] = metadata
        if reuse is not None:
            body["reuse_batch_id"] = reuse
        headers = {"content-type": "application/json", "idempotency-key": repeat_key}
        return self._again(lambda: self._json("POST", "/batches", json.dumps(body).encode(), headers))

    def batch(self, batch_id: str) -> dict[str, Any]:
        return self._again(lambda: self._json("GET", f"/batches/{_quoted(batch_id)}"))

    def cancel(self, batch_id: str) -> dict[str, Any]:
        return self._json("POST", f"/batches/{_quoted(batch_id)}/cancel")

    def adopt(self, key: str) -> dict[str, Any]:
        """Gives the files, batches and stored responses of no valid key to this key's id; returns their numbers."""
        return self._json("POST", f"/adopt?key={_quoted(key)}")

    def delete(self, kind: str, name: str) -> None:
        """Deletes one of the `batches` or `files`."""
        self._json("DELETE", f"/{kind}/{_quoted(name)}")

    def list(self, limit: int, kind: str = "batches") -> list[dict[str, Any]]:
        """The newest `batches` or `files`, from as many pages as needed."""
        rows: list[dict[str, Any]] = []
        after = ""
        while len(rows) < limit:
            path = f"/{kind}?limit={min(100, limit - len(rows))}{after}"
            page = self._again(lambda path=path: self._json("GET", path))  # type: ignore[misc]
            rows += page["data"]
            if not page.get("has_more") or not page["data"]:
                break
            after = f"&after={_quoted(page['data'][-1]['id'])}"
        return rows

    def download(self, file_id: str, path: Path, replace: bool = True) -> int:
        """Downloads a file atomically, also to the target of a link; returns its bytes. Raises FileExistsError if the
        path exists and `replace` is False."""
        path = Path(os.path.realpath(path))
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
        size = 0
        try:
            content = self._answer(
                "GET", f"/files/{_quoted(file_id)}/content", f"the download of {file_id} was interrupted: ERROR"
            )
            with temporary.open("wb") as file, content as response:
                while chunk := response.read(_CHUNK):
                    file.write(chunk)
                    size += len(chunk)
                if response.length:  # which http.client leaves to its callers
                    raise http.client.IncompleteRead(b"", response.length)
            if not replace and path.exists():
                raise FileExistsError(f"{path} was created by another program during the download")
            temporary.rename(path)
        finally:
            temporary.unlink(missing_ok=True)
        return size

    def models(self) -> tuple[str, ...]:
        """The names of the server's models."""
        return tuple(str(model["id"]) for model in self._json("GET", "/models")["data"])

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yields the events of a streamed answer as they arrive."""
        headers = {"content-type": "application/json"}
        data = json.dumps({**body, "stream": True}).encode()
        with self._answer("POST", path, f"{path}: the connection was interrupted (ERROR)", data, headers) as response:
            for raw in response:
                if raw.startswith(b"data:") and (data := raw[5:].strip()) != b"[DONE]":
                    event = json.loads(data)
                    if fault := event.get("error"):
                        raise ApiError(str(fault.get("message") if isinstance(fault, dict) else fault))
                    yield event

    def wait(
        self,
        batch_id: str,
        shown: Callable[[dict[str, Any]], None],
        away: Callable[[ApiError], None] = lambda error: None,
        pause: Callable[[float], None] = time.sleep,
        away_s: float = 600.0,
    ) -> dict[str, Any]:
        """Polls until the batch has ended, every 5 s at most. Calls `away` while the server is down, ApiError after
        `away_s`."""
        seconds = 0.2
        silent = 0.0
        while True:
            try:
                batch = self._json("GET", f"/batches/{_quoted(batch_id)}")
            except ApiError as error:
                if error.status not in _AWAY or silent >= away_s:
                    raise
                away(error)
                silent += seconds
            else:
                silent = 0.0
                shown(batch)
                if batch["status"] in ENDED:
                    return batch
            pause(seconds)
            seconds = min(5.0, seconds * 1.3)

    def _again(self, ask: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        for tried in range(_TRIES):
            try:
                return ask()
            except ApiError as error:
                if error.status not in _AWAY:
                    raise
                if not tried:
                    self._away(error)
                time.sleep(min(5.0, 0.25 * 2**tried))
        return ask()

    def _json(
        self, method: str, path: str, body: bytes | Iterator[bytes] | None = None, headers: dict[str, str] | None = None
    ) -> dict[str, Any]:
        broke = f"{method} {path}: the response is not JSON (ERROR)"
        with self._answer(method, path, broke, body, headers or {}) as response:
            value = json.loads(response.read(_MAX_JSON))
        if not isinstance(value, dict):
            raise ApiError(f"{method} {path}: the response is not a JSON object")
        return value

    @contextlib.contextmanager
    def _answer(
        self,
        method: str,
        path: str,
        broke: str,
        body: bytes | Iterator[bytes] | None = None,
        headers: Mapping[str, str] = {},
    ) -> Iterator[http.client.HTTPResponse]:
        """Sends a request; the answer is read inside the context. `broke`: the message, with ERROR, if that fails."""
        if self._key is not None:
            headers = {**headers, "authorization": f"Bearer {self._key}"}
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._parts.hostname or "", self._parts.port, timeout=self._timeout)
        with contextlib.closing(connection):
            try:
                with contextlib.suppress(BrokenPipeError):  # refused before all of it was sent: the answer says why
                    connection.request(method, self._parts.path + path, body, headers)
                response = connection.getresponse()
            except ssl.SSLCertVerificationError as error:
                fix = "name the host of its certificate, or set SSL_CERT_FILE to its authority's"
                raise ApiError(f"{self._url}: {error.verify_message or error}: {fix}", -1) from error
            except (OSError, http.client.HTTPException) as error:
                start = "start the daemon (`laddertron serve`), or give its address by --url or OPENAI_BASE_URL"
                fix = f": {start}" if isinstance(error, ConnectionRefusedError | socket.gaierror) else ""
                raise ApiError(f"{self._url}: {error or type(error).__name__}{fix}") from error
            if response.status == 404 and not self._parts.path.rstrip("/").endswith("/v1"):
                raise ApiError(
                    f"404: {self._url} has no API: give a URL that ends in /v1, such as {self._url.rstrip('/')}/v1", 404
                )
            if response.status >= 300:
                where = f"; it is read from {_VARIABLES}" if response.status == 401 else ""
                raise ApiError(f"{response.status}: {_message(response)}{where}", response.status)
            try:
                yield response
            except (ValueError, OSError, http.client.HTTPException) as error:
                raise ApiError(broke.replace("ERROR", str(error))) from error


def _quoted(name: str) -> str:
    """Quotes an id, which may be any text, as one part of a path."""
    return quote(name, safe="", errors="replace") or "''"


def _message(response: http.client.HTTPResponse) -> str:
    """The error's message; the status' own words where its body is cut off or of another form."""
    raw = b""
    with contextlib.suppress(OSError, http.client.HTTPException):
        raw = response.read(1 << 16)
    try:
        return str(json.loads(raw)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return raw[:200].decode(errors="replace") or response.reason
