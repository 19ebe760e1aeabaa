"""Drafts by prompt look-up (what followed the last time that a sequence ended as it does now), and drafts drawn from a
draft model's logits, of which every rank has whole rows: no gather.

Drawn by the rule, edits, grammar and noise with which the sequence's own tokens will be drawn: with the same
Gumbel noise added, two models that think alike draw the same id, so that sampled drafts agree nearly as often as greedy
ones. Keeps a state a slot of its own, since those of engine/sampling/sampler.py hold a shard's columns alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..batch import NewSequence
from .decide import Array
from .grammar import Grammars, GrammarState
from .logits_shard import make_shard
from .logprobs import Scorer
from .penalties import SlotEdits
from .slots import SlotTable
from .step import Step, StepContext

SHORTEST, LONGEST = 2, 4
"""Tokens that must match, and from where on a longer match is no better."""
WINDOW = 1 << 15
"""Tokens looked back."""


def look_up(known: npt.NDArray[np.int32], most: int) -> list[int]:
    """At most `most` ids to follow known [n]: those behind the latest of the longest matches of its end, gone through
    again from there where they are too few. [] where nothing matches. A pure function: every rank derives the same."""
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


class _Forks(Grammars):
    """The grammars of the sequences, gone on along the drafts."""

    def __init__(self, grammars: Grammars) -> None:
        self.grammars, self.forks = grammars, dict[int, GrammarState]()

    def state(self, slot: int) -> GrammarState:
        if slot not in self.forks:
            self.forks[slot] = self.grammars.state(slot).fork()
        return self.forks[slot]


class DraftDraws:
    """`draw` as often as there are drafts, then `rewind`."""

    def __init__(self, vocab_size: int, max_slots: int, device: torch.device, grammars: Grammars | None) -> None:
        """grammars: those of the rank's sampler, which goes on along the tokens that are drawn."""
        self._forks = None if grammars is None else _Forks(grammars)
        self._slots = SlotTable(vocab_size, 0, vocab_size, max_slots, self._forks)
        work = make_shard(0, device)
        self._context = StepContext(work, Scorer(vocab_size, 0, vocab_size, work, _alone), self._slots, _alone, _alone)
        self._before: dict[int, SlotEdits] = {}

    def admit(self, sequence: NewSequence) -> None:
        """Fills a slot."""
        unscored = replace(sequence.params, logprobs=None, return_digest=False)
        self._slots.admit(replace(sequence, params=unscored))

    def release(self, slot: int) -> None:
        """Empties a slot (an empty one stays empty)."""
        self._slots.release(slot)

    def follow(self, slot: int, drawn: Sequence[int]) -> None:
        """The tokens that were drawn for the slot's sequence since it entered, or since the last call."""
        self._slots.position[slot] += len(drawn)
        if slot in self._slots.edits:
            for token in drawn:
                self._slots.edits[slot].append(token)

    def draw(self, logits_BV: Tensor, slots: Sequence[int]) -> list[int]:
        """The next draft of each slot, from logits [B, vocabulary] behind the one before."""
        for slot in slots:
            if slot in self._slots.edits and slot not in self._before:
                self._before[slot] = self._slots.edits[slot]
                self._slots.edits[slot] = self._before[slot].fork()
        plan = self._slots.plan(slots)
        drawn = Step(self._context, plan, logits_BV[:, : self._slots.columns]).run()
        self._slots.append(plan, drawn)
        ids: list[int] = drawn.ids.tolist()
        return ids

    def rewind(self, drafted: dict[int, int]) -> None:
        """Forgets the drafts drawn, so many of each slot: which of them are right is not known yet."""
        for slot, count in drafted.items():
            self._slots.position[slot] -= count
        self._slots.edits |= self._before
        self._before.clear()
        if self._forks is not None:
            self._forks.forks.clear()


def _alone(parts: list[Array]) -> list[Array]:
    """The gather of a group of one."""
    return [part[None] for part in parts]
