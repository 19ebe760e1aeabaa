"""The daemon's certificate and key, tried before anything is launched. Knows what may be wrong with PEM files."""

from __future__ import annotations

import os
import ssl
from pathlib import Path


class TlsFault(ValueError):
    """The pair cannot be used; `key` is the configuration's key to blame (tls_cert or tls_key)."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key


class _Encrypted(Exception):
    """The library asked for a passphrase."""


def check_pair(cert: str, key: str) -> None:
    """Raises TlsFault unless a server can be had with them."""
    for name, path in (("tls_cert", cert), ("tls_key", key)):
        try:
            with Path(path).open("rb") as file:
                file.read(1)
        except OSError as error:
            raise TlsFault(name, f"{path}: {error.strerror}: give a PEM file that this user can read") from None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_verify_locations(cert)
    except ssl.SSLError:
        raise TlsFault(
            "tls_cert", f"{cert}: no certificate in it: give the chain in PEM form, the server's certificate first"
        ) from None

    def no_passphrase() -> str:
        raise _Encrypted

    try:
        context.load_cert_chain(cert, key, no_passphrase)
    except _Encrypted:
        message = f"{key}: passphrases are not supported: give a key without one (mode 0600)"
        raise TlsFault("tls_key", message) from None
    except ssl.SSLError as error:
        if error.reason in ("EE_KEY_TOO_SMALL", "CA_MD_TOO_WEAK"):  # what this machine's OpenSSL asks of certificates
            why = error.reason.lower().replace("_", " ")
            message = f"{cert}: too weak ({why}): give one with RSA of 2048 bits or more, signed by SHA-256"
            raise TlsFault("tls_cert", message) from None
        if error.reason == "KEY_VALUES_MISMATCH":
            message = f"{key}: does not match the first certificate in {cert}: give its key"
        else:
            message = f"{key}: no usable private key ({error.reason or error}): give one in PEM form"
        raise TlsFault("tls_key", message) from None


def load_pair(context: ssl.SSLContext, cert: bytes, key: bytes) -> None:
    """Loads a pair from memory: OpenSSL reads only files, and the pair's own disk may not answer. Raises OSError."""
    descriptors = [os.memfd_create(name, os.MFD_CLOEXEC) for name in ("cert", "key")]
    try:
        for descriptor, content in zip(descriptors, (cert, key), strict=True):
            os.write(descriptor, content)
        context.load_cert_chain(*(f"/proc/self/fd/{descriptor}" for descriptor in descriptors))
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
