"""What a link takes for a message, and how large a message may be for the native transport to send it whole. Data."""

from __future__ import annotations

from dataclasses import dataclass

WHOLE_BYTES = 128 << 10
"""Above this the native transport has no strategy but pipeline: no buffer of its holds more."""


@dataclass(frozen=True, slots=True)
class LinkCost:
    """Seconds until the first byte arrives, and bytes/s after it."""

    latency_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        if self.latency_s < 0 or self.bytes_per_s <= 0:
            raise ValueError(f"latency {self.latency_s} s must be 0 or more, {self.bytes_per_s} bytes/s more than 0")
