"""API keys and their limits: `sk-lt-` and 256 random bits, shown once, stored as digests, compared in constant time.
Imports nothing of the extra `engine`, without which `laddertron keys` runs.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ...topology.json_codec import build, unbuild
from .store.disk import NewFile, make_folder

log = logging.getLogger(__name__)

KeyKind = Literal["client", "metrics", "admin"]
_PREFIX = "sk-lt-"
MAX_KEY = 256


class KeyFileError(ValueError):
    """The key file cannot be used; the message names it and the fix."""


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """Limits of one key; None: unlimited."""

    requests_per_minute: int | None = None
    concurrent_requests: int | None = None
    tokens_per_day: int | None = None
    stored_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if (value := getattr(self, name)) is not None and (type(value) is not int or value < 1):
                raise ValueError(f"limits.{name}={value!r}: an integer above 0, or leave it out")


NO_LIMITS = KeyLimits()


@dataclass(frozen=True, slots=True)
class Key:
    """`id`: the holder's name in logs and the store. `digest`: BLAKE2b-256 of the key, hex. `kind`: whether it opens
    the API, the API with the files and batches of all owners, or /metrics. `old_digest`: of the previous secret, valid
    until `old_until` (unix seconds)."""

    id: str
    name: str
    digest: str
    created_at: int
    revoked_at: int | None = None
    kind: KeyKind = "client"
    limits: KeyLimits = NO_LIMITS
    old_digest: str | None = None
    old_until: int = 0


def digest_of(key: str) -> str:
    return hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=32, person=b"laddertron key").hexdigest()


def read_keys(path: Path) -> list[Key]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return [build(Key, entry) for entry in data["keys"]]
    except FileNotFoundError:
        raise KeyFileError(f"{path} is missing: `laddertron keys add {path} NAME` creates it") from None
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise KeyFileError(f"{path} is not a key file ({error}): restore it, or create a new one") from None


def _write(path: Path, keys: list[Key]) -> None:
    """Writes the keys to `path`, or to the target of a link. The owner stays the same if root changes the file."""
    with NewFile(path.resolve(), os) as file:
        file.keep_access()
        file.write(json.dumps({"keys": [unbuild(key) for key in keys]}, indent=1).encode() + b"\n")
        file.commit()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Locks the file, so that concurrent commands do not lose changes."""
    make_folder(path.parent, mode=0o777)
    path = path.resolve()
    with os.fdopen(os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o600)) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def add_key(path: Path, name: str, kind: KeyKind = "client") -> tuple[Key, str]:
    """Adds a key; returns its entry and the key itself, which is stored nowhere. Raises KeyFileError."""
    with _locked(path):
        keys = read_keys(path) if path.exists() else []
        secret = _new_secret()
        key = Key(f"key_{secrets.token_hex(6)}", name, digest_of(secret), int(time.time()), kind=kind)
        _write(path, [*keys, key])
    return key, secret


def _new_secret() -> str:
    return _PREFIX + secrets.token_urlsafe(32)


def rotate_key(path: Path, which: str, old_seconds: float) -> tuple[Key, str]:
    """Gives an entry a new secret; returns the entry and the secret, which is stored nowhere. The previous secret is
    valid for `old_seconds` more, earlier ones are not. Files, batches, limits and usage belong to the id and stay.
    Raises KeyFileError."""
    secret, until = _new_secret(), int(time.time() + old_seconds)

    def renewed(key: Key) -> Key:
        old_digest = key.digest if old_seconds else None
        return replace(key, digest=digest_of(secret), old_digest=old_digest, old_until=until if old_digest else 0)

    return _change(path, which, renewed), secret


def revoke_key(path: Path, which: str) -> Key:
    """Revokes a key by id, or by name if it is unique; its entry stays. Raises KeyFileError."""
    return _change(path, which, lambda key: replace(key, revoked_at=int(time.time())))


def limit_key(path: Path, which: str, limits: dict[str, int | None]) -> Key:
    """Sets the given limits; None removes one. Raises KeyFileError."""
    return _change(path, which, lambda key: replace(key, limits=replace(key.limits, **limits)))


def _change(path: Path, which: str, change: Callable[[Key], Key]) -> Key:
    with _locked(path):
        keys = read_keys(path)
        matches = [k for k in keys if k.revoked_at is None and which in (k.id, k.name)]
        if len(matches) != 1:
            what = "no working key" if not matches else f"{len(matches)} keys, name one by its id"
            raise KeyFileError(f"{which!r}: {what} ({path})")
        made = change(matches[0])
        _write(path, [made if k.id == made.id else k for k in keys])
    return made


class KeyRing:
    """The keys of a running daemon. `holder(key)` is None unless the key is valid; if the file becomes unreadable, no
    key is. The daemon calls `refresh` each second on a thread, as the file's disk may not answer. `wall`: unix
    seconds."""

    def __init__(self, path: Path, wall: Callable[[], float] = time.time) -> None:
        self.path, self.wall = path, wall
        self._take(read_keys(path))
        self._stamp = self._look()

    def holder(self, key: str) -> Key | None:
        digest, holder = digest_of(key[:MAX_KEY]), None
        now = self.wall()
        for candidate in self._keys if self._readable else ():  # all of them, whichever matches
            old = hmac.compare_digest(candidate.old_digest or "", digest) and now < candidate.old_until
            if hmac.compare_digest(candidate.digest, digest) or old:
                holder = candidate
        return holder if len(key) <= MAX_KEY else None

    def valid_ids(self) -> frozenset[str]:
        return frozenset(key.id for key in self._keys)

    def works(self, key: Key, secret: str) -> bool:
        """Whether a key from `holder` is still valid, and its secret with this digest. While the file is unreadable: as
        it was before."""
        now = self.wall()
        return any(
            current.id == key.id
            and (current.digest == secret or (current.old_digest == secret and now < current.old_until))
            for current in self._keys
        )

    def revoked(self, key_id: str) -> bool:
        """Whether the file says so; a key that it does not contain is not."""
        return key_id in self._revoked

    def _take(self, keys: list[Key]) -> None:
        self._keys = [key for key in keys if key.revoked_at is None]
        self._revoked = {key.id for key in keys if key.revoked_at is not None}
        # what a key left running when it was revoked, or when the file became unreadable, keeps its limits
        self._limits = {key.id: key.limits for key in keys}
        self._readable = True

    def limits_of(self, key_id: str) -> KeyLimits:
        return self._limits.get(key_id, NO_LIMITS)

    def _look(self) -> tuple[int, int, int]:
        try:
            status = self.path.stat()
        except OSError:
            return 0, 0, 0
        return status.st_ctime_ns, status.st_size, status.st_ino

    def refresh(self) -> None:
        """Reads the file again if it has changed."""
        if (stamp := self._look()) != self._stamp:
            self._stamp = stamp
            try:
                self._take(read_keys(self.path))
            except KeyFileError as error:
                self._readable = False
                log.error("every API key is refused: %s", error, extra={"event": "keys"})
