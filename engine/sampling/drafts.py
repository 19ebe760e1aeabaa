"""Drafts by prompt look-up (the tokens after an earlier occurrence of the sequence's last tokens), and drafts sampled
from the logits of a draft model or of the model's predicting layer.

Drawn by the rule, edits, grammar and noise with which the sequence's own tokens will be drawn: with the same
Gumbel noise added, two models that think alike draw the same id, so that sampled drafts agree nearly as often as greedy
ones. Keeps a state a slot of its own, which drafts advance and `draft` takes back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...models.attention import StepLayout
from ..batch import Batch, Chunk, NewSequence
from .decide import Array
from .grammar import Grammars, GrammarState
from .logits_shard import make_shard
from .logprobs import Exchange, Scorer
from .penalties import SlotEdits
from .slots import SlotTable
from .step import Step, StepContext

SHORTEST, LONGEST = 2, 4
"""The least number of tokens that must match, and the number from which a longer match is not preferred."""
WINDOW = 1 << 15
"""Number of last tokens that are searched."""


Layout = Callable[[list[Chunk]], tuple[StepLayout, Tensor, Tensor]]
"""Layout, ids and rows of chunks of the runner's slots."""


class ComputedStep(NamedTuple):
    """What a runner tells a Proposer: it has computed `chunks`, and wants `counts` drafts by slot. rows: the chunks in
    the order of the step's rows, with one for each draft that it verified. tokens [slots, positions]: of each slot the
    first `length` are known; those behind may be overwritten."""

    chunks: Sequence[Chunk]
    rows: Sequence[Chunk]
    counts: Mapping[int, int]
    tokens: npt.NDArray[np.int32]
    length: npt.NDArray[np.int64]
    layout: Layout


class Proposer(Protocol):
    """Makes the drafts of every sequence's next step, alike on all ranks that sample. every_step: whether it must be
    asked after steps, too, that no drafts follow."""

    every_step: bool

    def apply(self, batch: Batch) -> None:
        """Applies the changes of slots and blocks."""

    def propose(self, step: ComputedStep) -> Mapping[int, list[int]]:
        """At most counts[slot] drafts of each slot."""


class PromptLookUp:
    """The Proposer that finds drafts in the sequence's own tokens."""

    every_step = False

    def apply(self, batch: Batch) -> None: ...

    def propose(self, step: ComputedStep) -> Mapping[int, list[int]]:
        tokens, length = step.tokens, step.length
        return {slot: look_up(tokens[slot, : length[slot]], most) for slot, most in step.counts.items() if most}


def look_up(ids: npt.NDArray[np.int32], most: int) -> list[int]:
    """At most `most` drafts after known [n]: the ids after the latest of the longest matches of its end, repeated if
    they are too few. [] if nothing matches. A pure function, so every rank gets the same."""
    ids = ids[-WINDOW:]
    count = len(ids)
    if most < 1 or count <= SHORTEST:
        return []
    matches = np.flatnonzero((ids[1:-1] == ids[-1]) & (ids[:-2] == ids[-2])) + SHORTEST
    for length in range(SHORTEST + 1, LONGEST + 1):
        longer = matches[matches >= length]
        longer = longer[ids[longer - length] == ids[count - length]]
        if not len(longer):
            break
        matches = longer
    if not len(matches):
        return []
    behind = ids[matches[-1] :]
    drafts: list[int] = np.resize(behind, most).tolist()
    return drafts


class _Forks(Grammars):
    """The grammars of the sequences, advanced along the drafts."""

    def __init__(self, grammars: Grammars) -> None:
        self.grammars, self.forks = grammars, dict[int, GrammarState]()

    def state(self, slot: int) -> GrammarState:
        if slot not in self.forks:
            self.forks[slot] = self.grammars.state(slot).fork()
        return self.forks[slot]


def _alone(parts: list[Array]) -> list[Array]:
    """The exchange of a group of one."""
    return [part[None] for part in parts]


class DraftDraws:
    """Samples drafts."""

    def __init__(
        self,
        vocab_size: int,
        ids: range,
        max_slots: int,
        device: torch.device,
        grammars: Grammars | None,
        exchange: Exchange = _alone,
        drain: Callable[[], None] = lambda: None,
    ) -> None:
        """ids: of this rank's columns, as in Sampler. grammars: of the rank's sampler, which advances them along the
        sampled tokens. exchange: gathers from the ranks that have the other columns. drain: waits for the device before
        the host reads logits, at most for the timeout of a collective."""
        self._drain = drain
        self._forks = None if grammars is None else _Forks(grammars)
        first, columns = ids.start, max(0, min(ids.stop, vocab_size) - ids.start)
        self._slots = SlotTable(vocab_size, first, columns, max_slots, self._forks)
        work = make_shard(first, device)
        scorer = Scorer(vocab_size, first, columns, work, exchange)
        self._context = StepContext(work, scorer, self._slots, exchange, exchange)
        self._before: dict[int, SlotEdits] = {}
        self._known = np.zeros(max_slots, np.int64)  # tokens that the slot's state has

    def admit(self, sequence: NewSequence) -> None:
        """Fills a slot."""
        unscored = replace(sequence.params, logprobs=None, return_digest=False)
        self._slots.admit(replace(sequence, params=unscored))
        self._known[sequence.slot] = len(sequence.tokens)

    def release(self, slot: int) -> None:
        """Empties a slot (an empty one stays empty)."""
        self._slots.release(slot)

    def draft(
        self,
        logits_BV: Tensor,
        counts: Mapping[int, int],
        tokens: npt.NDArray[np.int32],
        length: npt.NDArray[np.int64],
        more: Callable[[list[int]], Tensor],
    ) -> dict[int, list[int]]:
        """Samples counts[slot] >= 1 drafts of each slot, the first from logits [B, columns], in the order of `counts`.
        more(slots): the logits after these slots' drafts so far, which are in `tokens` after the known ones."""
        drafts: dict[int, list[int]] = {slot: [] for slot in counts}
        for slot in counts:
            self._follow(slot, tokens[slot, self._known[slot] : length[slot]].tolist())
        slots = list(counts)
        while slots:
            for slot, drawn in zip(slots, self._draw(logits_BV, slots), strict=True):
                tokens[slot, length[slot] + len(drafts[slot])] = drawn
                drafts[slot].append(drawn)
            slots = [slot for slot in slots if len(drafts[slot]) < counts[slot]]
            if slots:
                logits_BV = more(slots)
        self._rewind(counts)
        return drafts

    def _follow(self, slot: int, drawn: Sequence[int]) -> None:
        """Advances the slot's sequence by the tokens sampled since the last call."""
        self._known[slot] += len(drawn)
        self._slots.position[slot] += len(drawn)
        if slot in self._slots.edits:
            for token in drawn:
                self._slots.edits[slot].append(token)

    def _draw(self, logits_BV: Tensor, slots: Sequence[int]) -> list[int]:
        """Samples the next draft of each slot, from logits [B, columns] after the previous one."""
        for slot in slots:
            if slot in self._slots.edits and slot not in self._before:
                self._before[slot] = self._slots.edits[slot]
                self._slots.edits[slot] = self._before[slot].fork()
        plan = self._slots.sampling_plan(slots)
        self._drain()
        drawn = Step(self._context, plan, logits_BV[:, : self._slots.columns]).run()
        self._slots.append(plan, drawn)
        ids: list[int] = drawn.ids.tolist()
        return ids

    def _rewind(self, drafted: Mapping[int, int]) -> None:
        """Removes each slot's number of drafts from the state: it is not known yet which are accepted."""
        for slot, count in drafted.items():
            self._slots.position[slot] -= count
        self._slots.edits |= self._before
        self._before.clear()
        if self._forks is not None:
            self._forks.forks.clear()
