"""An answer's pieces as server-sent events, in bytes. A stream's cost is paid here once a token and client, so a piece
of plain text is put into a frame cut once from a rendered chunk. Knows the Answer; neither HTTP nor sockets.
"""

from __future__ import annotations

import json
from json.encoder import encode_basestring as quoted
from typing import Any

from .choice import Delta
from .responses import Answer

_MARK = "\N{OBJECT REPLACEMENT CHARACTER}text\N{OBJECT REPLACEMENT CHARACTER}"
_render = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode

DONE = b"data: [DONE]\n\n"


def event(value: dict[str, Any]) -> bytes:
    return b"data: " + _render(value).encode() + b"\n\n"


class EventWriter:
    """The events of one body's answer."""

    def __init__(self) -> None:
        self._frames: dict[int, tuple[bytes, bytes]] = {}

    def of(self, answer: Answer, delta: Delta) -> bytes:
        """What a delta shows; b"" while text is held back."""
        alike = not (answer.divided or answer.body.return_token_ids or answer.body.continuous_usage_stats)
        if delta.finish is not None or delta.logprobs or not (alike and answer.begun(delta.choice)):
            return b"".join([event(chunk) for chunk in answer.chunks(delta)])
        if not delta.text:
            return b""
        before, after = self._frames.get(delta.choice) or self._cut(answer, delta.choice)
        return before + quoted(delta.text).encode() + after

    def _cut(self, answer: Answer, choice: int) -> tuple[bytes, bytes]:
        (chunk,) = answer.chunks(Delta(choice, _MARK))
        before, _, after = event(chunk).rpartition(quoted(_MARK).encode())
        self._frames[choice] = before, after
        return before, after
