"""The cost of a message on a link and of an all-reduce on an emulated fabric (topology/comm/emulated.py keeps to it),
and the largest messages of strategies whose buffers are fixed. Data."""

from __future__ import annotations

from dataclasses import dataclass

WHOLE_BYTES = 128 << 10
"""Above this the native transport has no strategy but pipeline: no buffer of its holds more."""
ONE_SHOT_BYTES = 4 << 20
"""The largest message of one_shot: for larger ones a library's bandwidth counts, and its calls do not."""

SIZES = tuple(round(256 * 2 ** (step / 4)) for step in range(4 * 19))
"""Message sizes at which strategies are chosen: 256 B to 128 MiB, four for each doubling."""


def in_two_shots(nbytes: int, ranks: int) -> bool:
    """Whether one_shot sums a message inside a node of `ranks` GPUs by two kernels: each adds a part, then gathers the
    others' sums. A GPU reads 2 (ranks - 1) / ranks messages rather than ranks - 1: it pays once the difference is more
    than what a GPU reads while a second kernel starts and its flags travel, about 1 MiB in 4 us. Not measured."""
    return nbytes * (ranks - 1) * (ranks - 2) > ranks << 20


@dataclass(frozen=True, slots=True)
class LinkCost:
    """Seconds until the first byte arrives, and bytes/s after it."""

    latency_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        if self.latency_s < 0 or self.bytes_per_s <= 0:
            raise ValueError(f"latency {self.latency_s} s must be 0 or more, {self.bytes_per_s} bytes/s more than 0")


@dataclass(frozen=True, slots=True)
class Emulation:
    """The cost of one all-reduce of n bytes: latency_s + n / bytes_per_s, or by one of `others` where that is cheaper
    (a library has protocols for small and for large messages). The wire carries one message at a time; the latencies of
    several overlap. `name` says which fabric is meant."""

    name: str
    latency_s: float
    bytes_per_s: float = float("inf")
    others: tuple[LinkCost, ...] = ()

    def __post_init__(self) -> None:
        if not (0 <= self.latency_s < 60 and self.bytes_per_s > 0):
            raise ValueError(f"emulation {self.name}: latency_s in [0, 60) and bytes_per_s > 0, got {self}")

    @property
    def label(self) -> str:
        return f"emulated {self.name}"

    def parts(self, nbytes: int) -> tuple[float, float]:
        """(latency, time on the wire) of a message of nbytes, in seconds."""
        prices = (LinkCost(self.latency_s, self.bytes_per_s), *self.others)
        best = min(prices, key=lambda price: price.latency_s + nbytes / price.bytes_per_s)
        return best.latency_s, nbytes / best.bytes_per_s

    def seconds(self, nbytes: int) -> float:
        """One all-reduce of nbytes, alone on the wire."""
        return sum(self.parts(nbytes))
