"""Frames of the control channel: 4 bytes of length (checked before anything is allocated), 16 of seal, then a message.

Handshake, each step one unsealed frame of at most HANDSHAKE_LIMIT bytes:
  server -> rank   challenge {nonce}
  rank -> server   answer {nonce, rank, mac}    mac over both nonces and the rank
  server -> rank   proof {mac}
Afterwards every frame is sealed with a key made from the secret, both nonces and the direction, over a counter that
both sides keep: a frame cannot be forged, replayed, reordered or carried over from another connection or launch.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import Literal

HANDSHAKE_LIMIT = 1024
MESSAGE_LIMIT = 64 << 20
"""The longest message once a peer is known: a prompt of 9 million ids, or 100,000 prompt positions with 20 logprobs."""
SECRET_BYTES = NONCE_BYTES = 32
_LENGTH = struct.Struct(">I")
_COUNTER = struct.Struct(">QI")
_SEAL_BYTES = 16

Side = Literal["server", "rank"]


class FrameError(ValueError):
    """Invalid frame: the connection must be closed."""


def _mac(secret: bytes, label: str, *parts: bytes) -> bytes:
    return hmac.digest(secret, b"laddertron 1 " + label.encode() + b"".join(parts), hashlib.sha256)


def answer_mac(secret: bytes, server_nonce: bytes, rank_nonce: bytes, rank: int, pulse: bool = False) -> str:
    """The rank's proof that it knows the secret, as hex. `pulse`: see messages.Answer."""
    return _mac(secret, "pulse" if pulse else "answer", server_nonce, rank_nonce, _LENGTH.pack(rank)).hex()


def proof_mac(secret: bytes, server_nonce: bytes, rank_nonce: bytes, rank: int) -> str:
    """The server's proof that it knows the secret, as hex."""
    return _mac(secret, "proof", server_nonce, rank_nonce, _LENGTH.pack(rank)).hex()


def same_mac(a: str, b: str) -> bool:
    return hmac.compare_digest(a.encode(errors="replace"), b.encode(errors="replace"))


def direction_key(secret: bytes, server_nonce: bytes, rank_nonce: bytes, sender: Side) -> bytes:
    return _mac(secret, "seal " + sender, server_nonce, rank_nonce)


def sealed_bytes(payload: bytes) -> int:
    """The length of the sealed frame of a payload."""
    return _LENGTH.size + _SEAL_BYTES + len(payload)


class FrameWriter:
    """Makes frames of payloads, in the order of sending; unsealed until `key` is set."""

    def __init__(self) -> None:
        self.key: bytes | None = None
        self._count = 0

    def frame(self, payload: bytes) -> bytes:
        """Makes the next frame. Raises ValueError for a payload beyond the limit."""
        limit = HANDSHAKE_LIMIT if self.key is None else MESSAGE_LIMIT
        if len(payload) > limit:
            raise ValueError(f"a message of {len(payload)} bytes is longer than {limit}")
        if self.key is None:
            return _LENGTH.pack(len(payload)) + payload
        seal = hmac.digest(self.key, _COUNTER.pack(self._count, len(payload)) + payload, hashlib.sha256)
        self._count += 1
        return _LENGTH.pack(len(payload)) + seal[:_SEAL_BYTES] + payload


class FrameReader:
    """Extracts payloads from bytes; frames must be sealed once `key` is set. Buffers one message and the rest of one
    read."""

    def __init__(self) -> None:
        self.key: bytes | None = None
        self._count = 0
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def next(self) -> bytes | None:
        """The next payload, or None until more is fed. Raises FrameError if it is too long or its seal is wrong."""
        buffer = self._buffer
        if len(buffer) < 4:
            return None
        (length,) = _LENGTH.unpack_from(buffer)
        limit, start = (HANDSHAKE_LIMIT, 4) if self.key is None else (MESSAGE_LIMIT, 4 + _SEAL_BYTES)
        if length > limit:
            raise FrameError(f"a frame of {length} bytes is longer than {limit}")
        if len(buffer) < start + length:
            return None
        payload = bytes(memoryview(buffer)[start : start + length])
        if self.key is not None:
            seal = hmac.digest(self.key, _COUNTER.pack(self._count, length) + payload, hashlib.sha256)[:_SEAL_BYTES]
            if not hmac.compare_digest(seal, bytes(memoryview(buffer)[4:start])):
                raise FrameError(f"frame {self._count} has a wrong seal")
            self._count += 1
        del buffer[: start + length]
        return payload
