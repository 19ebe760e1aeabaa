"""Parses multipart/form-data as a stream: small fields in memory, the file to disk, everything bounded."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal

from ...openai.errors import ApiError

_MAX_HEADERS = 8192
_MAX_FIELD = 1024
_MAX_PARTS = 16
_BOUNDARY = re.compile(r'boundary=(?:"([^"]{1,70})"|([^\s;",]{1,70}))(?:\s*;|\s*$)', re.IGNORECASE)
_NAME = re.compile(r'[;\s]name="((?:[^"\\\r\n]|\\.)*)"', re.IGNORECASE)
_FILENAME = re.compile(r'[;\s]filename="((?:[^"\\\r\n]|\\.)*)"', re.IGNORECASE)


class FormError(ApiError):
    def __init__(self, message: str) -> None:
        super().__init__(message, "invalid_form", close=True)


def boundary_of(content_type: str) -> bytes:
    kind = content_type.partition(";")[0].strip().lower()
    match = _BOUNDARY.search(content_type)
    if kind != "multipart/form-data" or match is None:
        raise FormError(f"content-type {content_type[:80]!r}: multipart/form-data with a boundary is expected")
    return (match[1] or match[2]).encode("latin-1", "replace")


class FormParser:
    """Call `feed` with the body as it arrives, then `close`. The bytes of the part `file` are passed to `to_file`;
    `fields` has the other parts. Raises FormError."""

    def __init__(self, boundary: bytes, to_file: Callable[[bytes], None]) -> None:
        self._mark = b"\r\n--" + boundary
        self._to_file = to_file
        self._buffer = b"\r\n"  # so that the first boundary looks like every other
        self._state: Literal["preamble", "after", "headers", "body", "end"] = "preamble"
        self._part = ""
        self._value = b""
        self._parts = 0
        self.fields: dict[str, str] = {}
        self.filename: str | None = None

    def feed(self, data: bytes) -> None:
        self._buffer += data
        while self._step():
            pass

    def close(self) -> None:
        if self._state != "end":
            raise FormError("the form is truncated")

    def _step(self) -> bool:
        match self._state:
            case "preamble" | "body":
                return self._body()
            case "after":
                return self._after()
            case "headers":
                return self._headers()
            case _:
                self._buffer = b""
                return False

    def _body(self) -> bool:
        at = self._buffer.find(self._mark)
        if at < 0:
            keep = len(self._mark) - 1  # it may begin here and go on in the next piece
            if len(self._buffer) > keep:
                self._take(self._buffer[:-keep])
                self._buffer = self._buffer[-keep:]
            return False
        self._take(self._buffer[:at])
        if self._state == "body" and self._part != "file":
            if self._part in self.fields:
                raise FormError(f"duplicate field {self._part[:64]!r}")
            self.fields[self._part] = self._value.decode("utf-8", "replace")
        self._buffer, self._state = self._buffer[at + len(self._mark) :], "after"
        return True

    def _take(self, data: bytes) -> None:
        if self._state == "preamble":
            if data.strip():
                raise FormError("the form does not begin with its boundary")
        elif self._part == "file":
            if data:
                self._to_file(data)
        else:
            self._value += data
            if len(self._value) > _MAX_FIELD:
                raise FormError(f"the field {self._part[:64]!r} has more than {_MAX_FIELD} bytes")

    def _after(self) -> bool:
        if len(self._buffer) < 2:
            return False
        if self._buffer.startswith(b"--"):
            self._state = "end"
        elif self._buffer.startswith(b"\r\n"):
            self._buffer, self._state = self._buffer[2:], "headers"
        else:
            raise FormError("a boundary is followed by neither a line break nor an end")
        return True

    def _headers(self) -> bool:
        at = self._buffer.find(b"\r\n\r\n")
        if at < 0 or at > _MAX_HEADERS:
            if len(self._buffer) > _MAX_HEADERS:
                raise FormError("a part's headers are too long")
            return False
        head = self._buffer[:at].decode("utf-8", "replace")
        self._buffer, self._state, self._value = self._buffer[at + 4 :], "body", b""
        self._parts += 1
        if self._parts > _MAX_PARTS:
            raise FormError(f"more than {_MAX_PARTS} parts")
        for line in head.split("\r\n"):
            name, _, value = line.partition(":")
            if "\r" in value or "\n" in value:
                raise FormError("a part's header contains a line break")
            if name.strip().lower() == "content-disposition":
                self._disposition(value)
                return True
        raise FormError("a part has no content-disposition")

    def _disposition(self, value: str) -> None:
        name, filename = _NAME.search(value), _FILENAME.search(value)
        if name is None:
            raise FormError("a part has no name")
        self._part = name[1]
        if self._part == "file":
            if filename is None:
                raise FormError('the part "file" has no filename: send it as a file')
            if self.filename is not None:
                raise FormError("one file a request")
            self.filename = clean_name(filename[1])


def clean_name(name: str) -> str:
    """The name as stored and shown: without folders and control characters, and of limited length."""
    base = re.split(r"[/\\]", name)[-1]
    return "".join(c if c.isprintable() else "_" for c in base)[:255] or "upload"
