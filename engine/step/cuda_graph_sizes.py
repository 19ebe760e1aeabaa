"""Which sizes of decode steps are recorded, and what that holds. Pure; without torch, for plans too."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

MOST_GRAPHED = 512
"""Sequences of the largest graph: beyond, a step is long enough to be launched operator by operator."""
GRAPH_BYTES = 32 << 20
"""For each recorded size: the driver's own record and what the allocator rounds up to. Reports of other engines say 6
to 28 MiB; what ours hold is logged when they are recorded, with what was kept free for them."""


def graph_sizes(most: int) -> tuple[int, ...]:
    """Sizes that steps of 1 to `most` sequences are padded to: powers of two up to 16, then also the halves between
    them, and `most` itself, so that beyond 16 at most a third of a step is padding."""
    most = min(most, MOST_GRAPHED)
    sizes, power = {most}, 1
    while power <= most:
        sizes.add(power)
        if power >= 16:
            sizes.add(power * 3 // 2)
        power *= 2
    return tuple(sorted(size for size in sizes if size <= most))


def padded_size(sizes: Sequence[int], sequences: int) -> int | None:
    """The smallest of `sizes` (rising) that holds so many sequences; None if none does."""
    at = bisect.bisect_left(sizes, sequences)
    return sizes[at] if at < len(sizes) else None
