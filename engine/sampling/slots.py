"""The sampler's state: each slot's sampling parameters and position, the same on every rank except for the columns.
SamplingParams become table entries at admission; a SamplingPlan is reused while the same slots run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ..batch import NewSequence
from ..request import MAX_CANDIDATES, SamplingParams, TokenLogprob
from .decide import Array, Filters
from .grammar import Grammars
from .logits_shard import MASS, NOISE, ROW, Rows
from .penalties import SlotEdits

MIN_TEMPERATURE = 1e-5
"""A lower temperature means greedy, as in vLLM."""
FEWEST_CANDIDATES = 32

_SLOT = np.dtype(
    [
        ("live", "?"),
        ("filtered", "?"),
        ("edited", "?"),
        ("top_k", "<i8"),
        ("top_p", "<f8"),
        ("log_min_p", "<f8"),
        ("candidates", "<i8"),
        ("logprobs", "<i8"),
    ]
)


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """The rows of B slots and their constant parameters. `rows` (ROW): scratch space of the step. `groups`: indices of
    filtered rows, with the number of candidates that each rank sends for them. `scored`, `edited`, `masked`: indices of
    rows with log-probabilities, with edits or a grammar, with a grammar. `noisy` [B]: rows with noise over the whole
    shard; None if there are none."""

    at: npt.NDArray[np.int64]
    offset: npt.NDArray[np.int64]
    """The number of earlier rows of the same slot: the row is sampled so many positions later."""
    rows: Rows
    filters: Filters
    groups: tuple[tuple[npt.NDArray[np.int64], int], ...]
    scored: npt.NDArray[np.int64]
    logprobs: npt.NDArray[np.int64]
    edited: npt.NDArray[np.int64]
    masked: npt.NDArray[np.int64]
    noisy: npt.NDArray[np.bool_] | None

    vocab_size: int

    @property
    def most_logprobs(self) -> int:
        """The largest number of most likely ids that a row reports."""
        return min(self.vocab_size, max(0, int(self.logprobs.max(initial=0))))


@dataclass(frozen=True)
class Sampled:
    """Results of the rows of one step, in order. `nonfinite`: the row's logits contain NaN or +inf, or nothing above
    -inf (also if its masks allow no id); its id is 0 and invalid. `failures`: the reason, for those of these rows whose
    own constraints allow no id.
    """

    ids: npt.NDArray[np.int32]
    logprobs: list[TokenLogprob | None]
    nonfinite: npt.NDArray[np.bool_]
    failures: dict[int, str] = field(default_factory=dict)
    taken: npt.NDArray[np.bool_] | None = None
    """Whether each row's id belongs to the sequence: not after a rejected draft. None: all do."""


class SlotTable:
    """The state of max_slots slots; this rank's columns are the ids [first, first + columns)."""

    def __init__(self, vocab_size: int, first: int, columns: int, max_slots: int, grammars: Grammars | None) -> None:
        self.vocab_size, self.first, self.columns, self.grammars = vocab_size, first, columns, grammars
        self.edits: dict[int, SlotEdits] = {}
        self.grammatical: set[int] = set()
        self.digested: set[int] = set()
        """Slots whose requests have return_digest."""
        self.position = np.zeros(max_slots, np.int64)
        self._rows: Rows = np.zeros(max_slots, ROW)
        self._slots = np.zeros(max_slots, _SLOT)
        self._last: tuple[tuple[int, ...], SamplingPlan] | None = None

    def admit(self, sequence: NewSequence) -> None:
        """Fills a slot. Raises ValueError if it is in use, or if grammars are needed and unavailable."""
        slot, params = sequence.slot, sequence.params
        if self._slots["live"][slot]:
            raise ValueError(f"slot {slot} is taken: release it before admitting another sequence")
        if params.grammar is not None:
            if self.grammars is None:
                raise ValueError("a request with a grammar, but no grammar library: install laddertron[grammar]")
            self.grammars.admit(slot, params.grammar, sequence.tokens[sequence.prompt_len :])
            self.grammatical.add(slot)
        if params.return_digest:
            self.digested.add(slot)
        if params.edits:
            self.edits[slot] = SlotEdits(sequence, self.first, self.columns)
        row, state = self._rows[slot : slot + 1], self._slots[slot : slot + 1]
        resolve_row(params, self.vocab_size, row, state)
        row["choice"] = sequence.choice
        state["edited"] = slot in self.edits or slot in self.grammatical
        self.position[slot] = len(sequence.tokens) - sequence.prompt_len
        self._last = None

    def release(self, slot: int) -> None:
        """Empties a slot; no effect on an empty one."""
        self._slots[slot] = np.zeros((), _SLOT)
        self.edits.pop(slot, None)
        self.digested.discard(slot)
        if slot in self.grammatical and self.grammars is not None:
            self.grammatical.discard(slot)
            self.grammars.release(slot)
        self._last = None

    def sampling_plan(self, slots: Sequence[int]) -> SamplingPlan:
        """The plan of rows in the order of `slots`. The rows of one slot (several with drafts) must be adjacent. Raises
        ValueError for an empty slot."""
        key = tuple(slots)
        if self._last is not None and self._last[0] == key:
            return self._last[1]
        at = np.asarray(key, np.int64)
        state, rows = self._slots[at], self._rows[at]
        if not state["live"].all():
            raise ValueError(f"slot {at[~state['live']][0]} is empty: admit a sequence before sampling it")
        filtered = np.flatnonzero(state["filtered"])
        candidates = state["candidates"][filtered]
        noisy = (rows["flags"] & NOISE) != 0
        plan = SamplingPlan(
            at=at,
            offset=_offsets(at),
            rows=rows,
            filters=Filters(rows["inv_temperature"], state["top_k"], state["top_p"], state["log_min_p"]),
            groups=tuple((filtered[candidates == k], int(k)) for k in np.unique(candidates)),
            scored=np.flatnonzero(state["logprobs"] >= 0),
            logprobs=state["logprobs"],
            edited=np.flatnonzero(state["edited"]),
            masked=np.flatnonzero([slot in self.grammatical for slot in key]),
            noisy=noisy if noisy.any() else None,
            vocab_size=self.vocab_size,
        )
        self._last = key, plan
        return plan

    def edits_of(self, plan: SamplingPlan, rows: Sequence[int], fed: Array | None) -> list[SlotEdits]:
        """The edits of some of the plan's rows: the slot's, extended by the drafts before the row. fed [B]: with
        drafts, the input id of each row."""
        edits: list[SlotEdits] = []
        for row in rows:
            if plan.offset[row] and fed is not None:
                edits.append(edits[-1].fork())
                edits[-1].append(int(fed[row]))
            else:
                edits.append(self.edits[int(plan.at[row])])
        return edits

    def advance(self, plan: SamplingPlan) -> None:
        """Moves the slot of each row to the next output position."""
        self.position[plan.at] += 1

    def append(self, plan: SamplingPlan, sampled: Sampled) -> None:
        """Appends one sampled id per row; with drafts only those of the rows in `taken`."""
        if sampled.taken is None:
            self.advance(plan)
        else:
            np.add.at(self.position, plan.at[sampled.taken], 1)
        for row in plan.edited.tolist():
            if sampled.taken is not None and not sampled.taken[row]:
                continue
            slot, token = int(plan.at[row]), int(sampled.ids[row])
            if slot in self.edits:
                self.edits[slot].append(token)
            if slot in self.grammatical and self.grammars is not None and not sampled.nonfinite[row]:
                self.grammars.state(slot).advance(token)


def _offsets(at: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    row = np.arange(len(at))
    begins = np.concatenate(([True], at[1:] != at[:-1]))[: len(at)]
    return row - np.maximum.accumulate(np.where(begins, row, 0))


def resolve_row(params: SamplingParams, vocab_size: int, row: Rows, state: Array) -> None:
    """Writes a request's sampling parameters into its entries (arrays of one element) of the slot tables."""
    row[:] = np.zeros(1, ROW)
    state[:] = np.zeros(1, _SLOT)
    top_k = 0 if params.top_k >= vocab_size else max(0, params.top_k)
    greedy = params.temperature < MIN_TEMPERATURE or top_k == 1
    filtered = not greedy and (top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0)
    row["inv_temperature"] = 0.0 if greedy else 1.0 / params.temperature
    row["seed"] = params.seed
    row["reference"] = np.nan
    candidates = FEWEST_CANDIDATES
    while candidates < min(top_k, MAX_CANDIDATES):
        candidates *= 2
    if not greedy and not filtered:
        row["flags"] = NOISE
    elif filtered and params.top_p < 1.0 and (top_k == 0 or top_k > candidates):
        row["flags"] = MASS
    state["live"], state["filtered"] = True, filtered
    state["top_k"], state["top_p"] = top_k, params.top_p
    state["log_min_p"] = math.log(params.min_p) if params.min_p > 0.0 else -np.inf
    state["candidates"] = candidates
    state["logprobs"] = -1 if params.logprobs is None else params.logprobs
