"""The order in which a job's lines are submitted: those that share a prefix one after another, so that the prefix is
computed once. Pure; prefetch.py calls it."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from .batch_input import BatchLine
from .errors import ApiError

Prompts = list[tuple[int, ...]]
Key = tuple[str, tuple[int, ...], int]  # salt, first prompt, number of the line

LEAST_SHARED = 64
"""Tokens of a prefix, beyond what all lines share, for which lines leave the order of the file."""
PATIENCE = 4
"""A line is next once this many times the look-ahead's lines were taken before it."""
_RECENT = 256


class PreparedLine(NamedTuple):
    """A line with its prompts' ids or its error. `shared`: tokens of its first prompt that lines to come begin with;
    `group`: the same number for lines that share most of their prompts."""

    line: BatchLine
    prompts: Prompts | ApiError
    shared: int = 0
    group: int = 0


class LineOrder:
    """At most `most` lines that are ready. `take` follows their tree of prefixes depth first, then takes lines added
    since that share a prefix with recent ones. Where there are none it takes, in turn, the line that was added first
    and the longest, so that long and short lines mix."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lines: dict[int, tuple[Key, PreparedLine, int]] = {}  # by number, in the order of `add`
        self._sorted: list[Key] = []
        self._longest: list[tuple[int, int]] = []
        self._late: deque[int] = deque(maxlen=most)
        self._recent: deque[Key] = deque()  # the last ones taken, and the same sorted
        self._recent_sorted: list[Key] = []
        self._groups: dict[int, int] = {}  # theirs, by number of the line
        self._last: Key | None = None
        self._taken = self._jumps = self._last_group = 0

    def __len__(self) -> int:
        return len(self._lines)

    def add(self, line: BatchLine, prompts: Prompts) -> None:
        assert line.body is not None
        key = line.body.cache_salt, prompts[0], line.number
        self._lines[line.number] = key, PreparedLine(line, prompts), self._taken
        insort(self._sorted, key)
        if _nearest(self._recent_sorted, key)[1] >= self._least_shared():
            self._late.append(line.number)
        if len(self._longest) > 2 * len(self._lines) + 64:
            self._longest = [entry for entry in self._longest if entry[1] in self._lines]
            heapq.heapify(self._longest)
        heapq.heappush(self._longest, (-len(prompts[0]) - (line.body.max_tokens or 0), line.number))

    def take(self) -> PreparedLine:
        key = self._next()
        del self._sorted[bisect_left(self._sorted, key)]
        _, ready, _ = self._lines.pop(key[2])
        self._taken += 1
        before, shared = _nearest(self._recent_sorted, key)
        if before is not None and 2 * shared >= len(key[1]):
            group = self._groups[before[2]]
        else:
            group = self._last_group = self._last_group + 1
        self._recent.append(key)
        insort(self._recent_sorted, key)
        self._groups[key[2]] = group
        if len(self._recent) > _RECENT:
            oldest = self._recent.popleft()
            del self._recent_sorted[bisect_left(self._recent_sorted, oldest)], self._groups[oldest[2]]
        return ready._replace(shared=_nearest(self._sorted, key)[1], group=group)

    def _next(self) -> Key:
        oldest, _, taken_before = next(iter(self._lines.values()))
        if self._taken - taken_before >= PATIENCE * self._most:
            return oldest  # and the next one follows the same prefix as before
        self._last = self._following() or self._jump(oldest)
        return self._last

    def _following(self) -> Key | None:
        """The line that shares the longest prefix with the last one; else one that shares one with a recent one."""
        if self._last is not None:
            key, shared = _nearest(self._sorted, self._last)
            if key is not None and (shared >= self._least_shared() or key[:2] == self._last[:2]):
                return key  # equal prompts may have one answer
        while self._late:
            if (number := self._late.popleft()) in self._lines:
                return self._lines[number][0]
        return None

    def _jump(self, oldest: Key) -> Key:
        self._jumps += 1
        if self._jumps % 2:
            return oldest
        while self._longest[0][1] not in self._lines:
            heapq.heappop(self._longest)
        return self._lines[self._longest[0][1]][0]

    def _least_shared(self) -> int:
        return LEAST_SHARED + _shared(self._sorted[0], self._sorted[-1])


def _nearest(keys: list[Key], key: Key) -> tuple[Key | None, int]:
    """The one of the sorted keys that shares the longest prefix with `key`, and this prefix's tokens."""
    at = bisect_left(keys, key)
    neighbours = [(other, _shared(key, other)) for other in keys[max(0, at - 1) : at + 1]]
    return max(neighbours, key=lambda neighbour: neighbour[1], default=(None, 0))


def _shared(one: Key, other: Key) -> int:
    return shared_length(one[1], other[1]) if one[0] == other[0] else 0


def shared_length(one: Sequence[int], other: Sequence[int]) -> int:
    """The number of tokens of the common prefix, by bisection, because slices are compared in C."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
