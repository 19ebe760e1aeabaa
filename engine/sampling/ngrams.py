"""Drafts by prompt look-up: what followed the last time that a sequence ended as it does now.

A pure function of the sequence's known tokens, so that every rank derives the same drafts by itself. Summaries, edits
and answers that quote their prompt repeat it; so do loops.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

SHORTEST, LONGEST = 2, 4
"""Tokens that must match, and from where on a longer match is no better."""
WINDOW = 1 << 15
"""Tokens looked back."""


def look_up(known: npt.NDArray[np.int32], most: int) -> list[int]:
    """At most `most` ids to follow known [n]: those behind the latest of the longest matches of its end, gone through
    again from there where they are too few. [] where nothing matches."""
    known = known[-WINDOW:]
    count = len(known)
    if most < 1 or count <= SHORTEST:
        return []
    found = np.flatnonzero((known[1:-1] == known[-1]) & (known[:-2] == known[-2])) + SHORTEST
    for length in range(SHORTEST + 1, LONGEST + 1):
        longer = found[found >= length]
        longer = longer[known[longer - length] == known[count - length]]
        if not len(longer):
            break
        found = longer
    if not len(found):
        return []
    behind = known[found[-1] :]
    drafts: list[int] = np.resize(behind, most).tolist()
    return drafts
