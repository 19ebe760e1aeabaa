"""Reads multipart/form-data as it arrives, through python-multipart: small fields in memory, the file to a callback."""

from __future__ import annotations

import re
from collections.abc import Callable
from email.message import Message
from email.utils import collapse_rfc2231_value

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from ...openai.errors import ApiError

_MAX_PREAMBLE = _MAX_HEADERS = 8192
_MAX_FIELD = 1024
_MAX_PARTS = 16


class FormError(ApiError):
    def __init__(self, message: str) -> None:
        super().__init__(message, "invalid_form", close=True)


def boundary_of(content_type: str) -> bytes:
    """The boundary that a content-type names. Raises FormError."""
    kind, options = parse_options_header(content_type)
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not 0 < len(boundary) <= 70:  # RFC 2046, 5.1.1
        raise FormError(f"content-type {content_type[:80]!r}: multipart/form-data with a boundary is expected")
    return boundary


class FormReader:
    """Call `feed` with the body as it arrives, then `close`. The bytes of the part `file` are passed to `to_file`;
    `fields` has the other parts. Raises FormError."""

    def __init__(self, boundary: bytes, to_file: Callable[[bytes], None]) -> None:
        self._first = re.compile(rb"(?:^|\r\n)(--" + re.escape(boundary) + rb")[ \t]*(?=\r\n|--)")
        self._preamble: bytes | None = b""  # None after the first boundary
        self._to_file = to_file
        self._name, self._value = b"", b""  # of the header that is being read
        self._headers: dict[bytes, bytes] = {}
        self._header_bytes = self._parts = 0
        self._part, self._content = "", b""
        self._complete = False
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin,
                "on_header_field": self._header_name,
                "on_header_value": self._header_value,
                "on_header_end": self._header_end,
                "on_headers_finished": self._disposition,
                "on_part_data": self._data,
                "on_part_end": self._end,
                "on_end": self._finish,
            },
            max_header_size=_MAX_HEADERS,
        )

    def feed(self, data: bytes) -> None:
        if self._preamble is not None:
            self._preamble += data
            if (first := self._first.search(self._preamble, 0, _MAX_PREAMBLE)) is None:
                if len(self._preamble) >= _MAX_PREAMBLE:
                    raise FormError(f"no boundary in the form's first {_MAX_PREAMBLE} bytes: line ends are CR LF")
                return
            data, self._preamble = first[1] + self._preamble[first.end() :], None
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise FormError(f"{error}: line ends are CR LF, and a part begins with its headers") from None

    def close(self) -> None:
        if self._preamble is not None:
            raise FormError("the form has no boundary of its content-type, on a line that ends in CR LF")
        if not self._complete:
            raise FormError("the form is truncated: it has no final boundary")

    def _begin(self) -> None:
        self._headers, self._header_bytes, self._content = {}, 0, b""
        self._parts += 1
        if self._parts > _MAX_PARTS:
            raise FormError(f"more than {_MAX_PARTS} parts")

    def _header_name(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _header_end(self) -> None:
        self._header_bytes += len(self._name) + len(self._value)
        if self._header_bytes > _MAX_HEADERS:
            raise FormError(f"a part has more than {_MAX_HEADERS} bytes of headers")
        self._headers[self._name.lower()] = self._value.strip()
        self._name = self._value = b""

    def _disposition(self) -> None:
        encoding = self._headers.get(b"content-transfer-encoding", b"binary").lower()
        if encoding not in (b"binary", b"8bit", b"7bit"):
            raise FormError(f"content-transfer-encoding {encoding[:40]!r}: send the file's own bytes (binary)")
        options = _options(self._headers.get(b"content-disposition", b""))
        if "name" not in options:
            raise FormError("a part has no content-disposition with a name")
        self._part = options["name"]
        if self._part == "file":
            if "filename" not in options:
                raise FormError('the part "file" has no filename: send it as a file')
            if self.filename is not None:
                raise FormError("one file a request")
            self.filename = clean_name(options["filename"])

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._part == "file":
            self._to_file(data[start:end])
            return
        self._content += data[start:end]
        if len(self._content) > _MAX_FIELD:
            raise FormError(f"the field {self._part[:64]!r} has more than {_MAX_FIELD} bytes")

    def _end(self) -> None:
        if self._part == "file":
            return
        if self._part in self.fields:
            raise FormError(f"duplicate field {self._part[:64]!r}")
        self.fields[self._part] = self._content.decode("utf-8", "replace")

    def _finish(self) -> None:
        self._complete = True


def _options(disposition: bytes) -> dict[str, str]:
    """The parameters of a content-disposition; an extended one (`filename*`, RFC 5987) replaces the plain one. Raises
    FormError."""
    if b"\n" in disposition or re.sub(rb"\\.", b"", disposition).count(b'"') % 2:
        raise FormError("a part's content-disposition has a line break or an open quote")
    message = Message()
    message["content-disposition"] = disposition.decode("utf-8", "replace")
    try:
        parameters = message.get_params([], "content-disposition")
        return {name.lower(): collapse_rfc2231_value(value) for name, value in parameters}
    except ValueError as error:  # the number of a continuation
        raise FormError(f"content-disposition: {error}") from None


def clean_name(name: str) -> str:
    """The name as stored and shown: without folders and control characters, and of limited length."""
    base = re.split(r"[/\\]", name)[-1]
    return "".join(c if c.isprintable() else "_" for c in base)[:255] or "upload"
