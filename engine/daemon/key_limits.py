"""Limits of one API key, from the key file. Imports nothing: `laddertron keys` runs without the extra `engine`."""

from __future__ import annotations

from dataclasses import dataclass


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
