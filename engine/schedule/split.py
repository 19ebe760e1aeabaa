"""Decides on rank 0 whether to split a step into two alternating streams (models/residual.py), and at which row. Pure:
its inputs are sizes and seconds.

One stream's all-reduce overlaps the other's computation: a sub-block takes max(2 c_half, c_half + L_half) instead of
c + L. Splitting is faster if L > 2 c_half - c: usual for compute-bound steps, rare for memory-bound ones. `auto`
measures it: for each class of steps of similar size it runs a trial of both kinds from time to time and uses the faster
kind until the next trial.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import sqrt
from statistics import median

from ..batch import Batch, Chunk, in_order, streams

TRIAL = (False, True, True, False, False, True)
"""The steps of a trial, True for split ones. The symmetric order cancels a linear drift of step times."""
FIRST_PAUSE, LONGEST_PAUSE = 128, 8192
"""Steps of a class between two trials. The pause doubles while the same kind wins: trials then cost less than 1% even
if the other kind takes 1.5 times as long."""
MARGIN = 0.99
"""Split steps are used if they take less than this share of whole steps' time."""


@dataclass(slots=True)
class _Class:
    """State of one class of steps of similar size. `left`: steps until the next trial. During a trial, `due` has its
    steps that are not planned yet (last first) and `seconds` the measured seconds a row, by kind. The first step of a
    class is not measured: it may be a cold start."""

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
        samples = self.seconds.get(split)
        if samples is None or len(samples) == TRIAL.count(split):
            return
        samples.append(seconds)
        if sum(map(len, self.seconds.values())) == len(TRIAL):
            wins = median(self.seconds[True]) < MARGIN * median(self.seconds[False])
            self.pause = min(2 * self.pause, LONGEST_PAUSE) if wins == self.wins else FIRST_PAUSE
            self.wins, self.left, self.seconds = wins, self.pause, {}


@dataclass(frozen=True, slots=True)
class SplitRule:
    """always: split every step that can be split. attention_share: the cost of attending to one position, relative to
    the matrix products of one row. whole_decodes: decode-only steps of up to this many sequences are not split, because
    they replay CUDA graphs."""

    always: bool = False
    attention_share: float = 0.0
    whole_decodes: int = 0


class SplitChoice:
    """Call `cut` before a step is sent and `observe` when its duration is known; several steps may be in flight."""

    def __init__(self, rule: SplitRule) -> None:
        self.steps = 0
        """Number of split steps."""
        self._rule = rule
        self._classes: dict[tuple[bool, bool, int], _Class] = {}

    def cut(self, batch: Batch) -> int:
        """The value of Batch.split for this step; 0: not split."""
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
        timings = self._classes.get(_class(batch))
        if timings is not None:
            timings.observe(batch.split > 0, seconds / batch.num_tokens)

    def _middle(self, chunks: list[Chunk]) -> int:
        """The row that divides the work in halves. Later rows cost more, because they attend to more positions."""
        share = self._rule.attention_share
        work = [c.count * (1.0 + share * (c.start + c.count / 2)) for c in chunks]
        left, rows = sum(work) / 2, 0
        for chunk, chunk_work in zip(chunks, work, strict=True):
            if chunk_work >= left:
                # n rows cost n (1 + share (start + n / 2)); this form of the root also holds for a share of 0
                first = 1.0 + share * chunk.start
                return rows + int(2 * left / (first + sqrt(first * first + 2 * share * left)))
            left, rows = left - chunk_work, rows + chunk.count
        return rows


def _class(batch: Batch) -> tuple[bool, bool, int]:
    """The class of a step: whether prompts have most of its rows, whether one prompt has (then the split is inside it,
    and its second part attends to the first), and its size in half powers of two."""
    rows = batch.num_tokens
    prompts = [chunk.count for chunk in batch.chunks if chunk.count > 1]
    return 2 * sum(prompts) > rows, 2 * max(prompts, default=0) > rows, (rows * rows).bit_length()
