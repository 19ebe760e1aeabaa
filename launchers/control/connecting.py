"""A rank's connections to the owner of its job: made and authenticated in both directions."""

from __future__ import annotations

import secrets
import socket
import time

from ...topology.json_codec import ReadError
from . import frames, messages
from .frames import FrameError

CONNECT_S = 30.0


def connect(
    address: str, secret: bytes, rank: int, pulse: bool = False
) -> tuple[socket.socket, frames.FrameReader, frames.FrameWriter]:
    """Connects to the owner at address and authenticates both ends. `pulse`: see messages.Answer. Raises
    ConnectionError naming why."""
    host, _, port = address.rpartition(":")
    deadline, refusals = time.monotonic() + CONNECT_S, 0
    while True:
        connection: socket.socket | None = None
        try:
            connection = socket.create_connection((host.strip("[]"), int(port)), timeout=5.0)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return (connection, *_shake_hands(connection, secret, rank, pulse))
        except (OSError, EOFError) as error:
            if connection is not None:
                connection.close()
            refusals += isinstance(error, EOFError)
            if time.monotonic() > deadline or refusals >= 5:
                raise ConnectionError(f"no control channel to {address}: {error or type(error).__name__}") from error
            time.sleep(0.1)  # nothing tells when a daemon listens again
        except (FrameError, ReadError) as error:
            if connection is not None:
                connection.close()
            raise ConnectionError(f"what answers at {address} is not this launch's daemon: {error}") from error


def _shake_hands(
    connection: socket.socket, secret: bytes, rank: int, pulse: bool
) -> tuple[frames.FrameReader, frames.FrameWriter]:
    reader, writer = frames.FrameReader(), frames.FrameWriter()

    def receive() -> bytes:
        while (payload := reader.next()) is None:
            data = connection.recv(4096)
            if not data:
                raise EOFError("it closed the connection in the handshake: another secret, or too many connections")
            reader.feed(data)
        return payload

    theirs = bytes.fromhex(messages.from_unproven(messages.Challenge, receive()).nonce)
    ours = secrets.token_bytes(frames.NONCE_BYTES)
    mac = frames.answer_mac(secret, theirs, ours, rank, pulse)
    connection.sendall(writer.frame(messages.to_wire(messages.Answer(ours.hex(), rank, mac, pulse))))
    proof = messages.from_unproven(messages.Proof, receive())
    if not frames.same_mac(proof.mac, frames.proof_mac(secret, theirs, ours, rank)):
        raise FrameError("its authentication failed")
    reader.key = frames.direction_key(secret, theirs, ours, "server")
    writer.key = frames.direction_key(secret, theirs, ours, "rank")
    return reader, writer
