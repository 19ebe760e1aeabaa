"""Edits a sequence's logits before sampling, on fp32 copies of this rank's columns, in this order:
repetition_penalty (positive logits divided, others multiplied, for ids of prompt or output), frequency_penalty x count
and presence_penalty (ids of the output), logit_bias; then forbidden: all but allowed_token_ids, the id that would end a
bad word, the stop ids until min_tokens are out. Keeps one small state a slot; the sampler owns it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..batch import NewSequence

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


class SlotEdits:
    """One sequence's edits to the columns [first, first + columns) of the vocabulary."""

    def __init__(self, sequence: NewSequence, first: int, columns: int) -> None:
        params = sequence.params
        self.first, self.columns = first, columns
        self.repetition = params.repetition_penalty
        self.frequency = params.frequency_penalty
        self.presence = params.presence_penalty
        self.penalised = params.penalised
        self.min_tokens = params.min_tokens
        bias = {token - first: value for token, value in params.logit_bias if 0 <= token - first < columns}
        self.bias_columns = np.fromiter(bias.keys(), np.int64, len(bias))
        self.bias = np.fromiter(bias.values(), np.float32, len(bias))
        self.stops = self._columns(params.stop_token_ids)
        self.allowed = self._columns(params.allowed_token_ids) if params.allowed_token_ids else None
        self._words: dict[tuple[int, ...], list[int]] = {}  # what goes before -> columns that would end a bad word
        for *before, last in params.bad_word_ids:
            if 0 <= last - first < columns:
                self._words.setdefault(tuple(before), []).append(last - first)
        self.bad_words = bool(params.bad_word_ids)
        """The same on every rank, whichever holds their last ids."""
        self._longest = max(map(len, self._words), default=0)
        self._tail = sequence.tokens[max(sequence.prompt_len, len(sequence.tokens) - self._longest) :]
        self._index: dict[int, int] = {}
        self._seen: Ints = np.empty(64, np.int64)
        self._counts: Floats = np.zeros(64, np.float32)
        if self.penalised:
            if self.repetition != 1.0:
                for token in sequence.tokens[: sequence.prompt_len]:
                    self._note(token, 0)
            for token in sequence.tokens[sequence.prompt_len :]:
                self._note(token, 1)

    def _columns(self, ids: Sequence[int]) -> Ints:
        return np.unique([t - self.first for t in ids if 0 <= t - self.first < self.columns]).astype(np.int64)

    def fork(self) -> SlotEdits:
        later = copy.copy(self)
        later._index, later._seen, later._counts = dict(self._index), self._seen.copy(), self._counts.copy()
        return later

    def append(self, token: int) -> None:
        if self.penalised:
            self._note(token, 1)
        if self._longest:
            self._tail = (*self._tail, token)[-self._longest :]

    def forbidden(self, position: int) -> Ints:
        """Columns forbidden at this output position, in addition to those that are never allowed."""
        ending = [
            c
            for before, last in self._words.items()
            if self._tail[len(self._tail) - len(before) :] == before
            for c in last
        ]
        stops = self.stops if position < self.min_tokens else self.stops[:0]
        return np.concatenate([stops, np.array(ending, np.int64)]) if ending else stops

    def _note(self, token: int, times: int) -> None:
        column = token - self.first
        if not 0 <= column < self.columns:
            return
        at = self._index.setdefault(column, len(self._index))
        if at == len(self._seen):
            self._seen = np.concatenate([self._seen, np.empty_like(self._seen)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._seen[at] = column
        self._counts[at] += times

    @property
    def seen(self) -> tuple[Ints, Floats]:
        """Columns that penalties touch, and how often the output holds each."""
        n = len(self._index)
        return self._seen[:n], self._counts[:n]


def apply(x: Tensor, rows: Ints, edits: Sequence[SlotEdits], positions: Sequence[int]) -> None:
    """Changes rows [R] of x [C, n] (fp32, this rank's columns) in place; `positions` [R]: output tokens so far."""
    _penalise(x, rows, edits)
    _add(x, rows, [e.bias_columns for e in edits], [e.bias for e in edits])
    for row, e in zip(rows.tolist(), edits, strict=True):
        if e.allowed is not None:
            allowed = torch.from_numpy(e.allowed).to(x.device)
            values = x[row, allowed]
            x[row] += -torch.inf  # added, so that NaN and +inf still show
            x[row, allowed] = values
    forbidden = [e.forbidden(p) for e, p in zip(edits, positions, strict=True)]
    _add(x, rows, forbidden, [np.full(len(c), -np.inf, np.float32) for c in forbidden])


def _places(rows: Ints, columns: Sequence[Ints], device: torch.device) -> tuple[Tensor, Tensor]:
    repeated_rows = np.repeat(rows, [len(c) for c in columns])
    return torch.from_numpy(repeated_rows).to(device), torch.from_numpy(np.concatenate(columns)).to(device)


def _add(x: Tensor, rows: Ints, columns: Sequence[Ints], added: Sequence[Floats]) -> None:
    if any(len(c) for c in columns):
        x[_places(rows, columns, x.device)] += torch.from_numpy(np.concatenate(added)).to(x.device)


def _penalise(x: Tensor, rows: Ints, edits: Sequence[SlotEdits]) -> None:
    seen = [e.seen for e in edits]
    columns = [c for c, _ in seen]
    if not any(len(c) for c in columns):
        return
    where = _places(rows, columns, x.device)
    terms = np.array([(e.repetition, e.frequency, e.presence) for e in edits], np.float32)
    repetition, frequency, presence = torch.from_numpy(np.repeat(terms, [len(c) for c in columns], 0).T).to(x.device)
    counts = torch.from_numpy(np.concatenate([c for _, c in seen])).to(x.device)
    value = x[where]
    value = torch.where(value > 0, value / repetition, value * repetition)
    x[where] = value - frequency * counts - presence * (counts > 0)
