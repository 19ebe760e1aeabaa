"""Whether a step is computed as two streams that take turns (models/residual.py), and where it is cut, decided by rank
0. Pure: sizes and seconds are given.

While one stream's all-reduce travels the other computes: max(2 c_half, c_half + L_half) in place of c + L. That pays
where L > 2 c_half - c: nearly always where products bind, seldom where reading weights does. `auto` finds out: in each
class of steps of a like size the two kinds take turns now and then, and the quicker one serves until the next trial.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import sqrt
from statistics import median

from ..batch import Batch, Chunk, in_order, streams

TRIAL = (False, True, True, False, False, True)
"""The steps of a trial, True for two streams: a drift falls on both kinds alike."""
FIRST_PAUSE, LONGEST_PAUSE = 128, 8192
"""Steps of a class between two trials; they become rarer while the same kind wins, so that trials cost less than 1%
even where one kind takes half as long again."""
MARGIN = 0.99
"""Two streams must take less than this share of one stream's time."""


@dataclass(slots=True)
class _Class:
    """Steps of a like size. `left` of them until the next trial; in one, `due` are its steps still to be planned and
    `seconds` what those known took a row, by kind. The first step of all is no part of a trial: it may be cold."""

    wins: bool = False
    left: int = 1
    pause: int = FIRST_PAUSE
    due: list[bool] = field(default_factory=list)
    seconds: dict[bool, list[float]] = field(default_factory=dict)

    def next(self) -> bool:
        if self.due:
            return self.due.pop()
        if not self.seconds:
            if self.left == 0:
                self.due, self.seconds = list(reversed(TRIAL)), {False: [], True: []}
                return self.due.pop()
            self.left -= 1
        return self.wins

    def observe(self, split: bool, seconds: float) -> None:
        found = self.seconds.get(split)
        if found is None or len(found) == TRIAL.count(split):
            return
        found.append(seconds)
        if sum(map(len, self.seconds.values())) == len(TRIAL):
            wins = median(self.seconds[True]) < MARGIN * median(self.seconds[False])
            self.pause = min(2 * self.pause, LONGEST_PAUSE) if wins == self.wins else FIRST_PAUSE
            self.wins, self.left, self.seconds = wins, self.pause, {}


@dataclass(frozen=True, slots=True)
class SplitRule:
    """always: wherever there are two streams to be had. attention_share: what attending to one position costs of what a
    row's products do. whole_decodes: steps of up to so many sequences and no prompt stay whole (recorded ones)."""

    always: bool = False
    attention_share: float = 0.0
    whole_decodes: int = 0


class SplitChoice:
    """`cut` before a step is sent, `observe` when its seconds are known; steps may overlap."""

    def __init__(self, rule: SplitRule) -> None:
        self.steps = 0
        """Steps that were cut."""
        self._rule = rule
        self._classes: dict[tuple[bool, bool, int], _Class] = {}

    def cut(self, batch: Batch) -> int:
        """Batch.split for this step."""
        chunks = in_order(batch.chunks)
        if chunks[-1].count == 1 and len(chunks) <= self._rule.whole_decodes:
            return 0
        row = self._middle(chunks)
        if len(streams(chunks, row)) < 2:
            return 0
        if not self._rule.always and not self._classes.setdefault(_class(batch), _Class()).next():
            return 0
        self.steps += 1
        return row

    def observe(self, batch: Batch, seconds: float) -> None:
        known = self._classes.get(_class(batch))
        if known is not None:
            known.observe(batch.split > 0, seconds / batch.num_tokens)

    def _middle(self, chunks: list[Chunk]) -> int:
        """The row that halves the work: later rows cost more, since they attend to more."""
        share = self._rule.attention_share
        work = [c.count * (1.0 + share * (c.start + c.count / 2)) for c in chunks]
        left, rows = sum(work) / 2, 0
        for chunk, whole in zip(chunks, work, strict=True):
            if whole >= left:
                # n rows of it are n (1 + share (start + n / 2)): the root, written so that a share of 0 is none
                first = 1.0 + share * chunk.start
                return rows + int(2 * left / (first + sqrt(first * first + 2 * share * left)))
            left, rows = left - whole, rows + chunk.count
        return rows


def _class(batch: Batch) -> tuple[bool, bool, int]:
    """Whether prompts outweigh decodes, whether one outweighs all else (it is cut inside, where its later piece attends
    to the earlier one), and the size in half powers of two."""
    rows = batch.num_tokens
    prompts = [chunk.count for chunk in batch.chunks if chunk.count > 1]
    return 2 * sum(prompts) > rows, 2 * max(prompts, default=0) > rows, (rows * rows).bit_length()
