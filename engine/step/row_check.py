"""Checks that a row's result does not depend on the rest of its step, as `parallel.deterministic` guarantees. Computes
sequences alone, then in random steps: chunks of random lengths and order, some preempted and recomputed, some resumed
from full blocks, every other step in two streams. Every sub-block's sum must have the same bits. All ranks run this
with the same seed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from random import Random

import numpy as np
import torch
from torch import Tensor

from ..batch import Batch, Chunk, NewSequence, in_order
from ..request import SamplingParams
from ..sampling.digest import Digests, row_digests
from .runner import Runner

NAMED_ROWS = (1, 2, 7, 64, 65, 300)
"""Row counts at which code paths change: every other case limits its steps to one of these."""
_PREEMPTED, _HITS = 0.05, 0.3

Trace = list[tuple[str, Digests]]
"""The outputs of each sub-block, in order, and the logits: name and digests of the rows [T]."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first bits that differ in a case. `step` counts from 0 within it; `place` as "layer 3 mlp"; `rows` of the
    step; `position` in the sequence."""

    case: int
    step: int
    place: str
    rows: int
    sequence: int
    position: int

    def __str__(self) -> str:
        return (
            f"case {self.case}, step {self.step} ({self.rows} rows): {self.place} of sequence {self.sequence}, "
            f"position {self.position}, differs from the result alone"
        )


@dataclass(slots=True)
class _Going:
    """A sequence in a case: in `slot`, with `done` tokens computed; `hit`: whether it was already considered for a
    restart with its own full blocks as cached prefix."""

    slot: int
    sequence: int
    done: int = 0
    hit: bool = False


class RowCheck:
    """Runs the check on a runner that is otherwise unused. sequences: token ids; each must fit the runner's cache."""

    def __init__(self, runner: Runner, sequences: list[list[int]]) -> None:
        self.runner, self.sequences = runner, sequences
        self._most = -(-max(map(len, sequences)) // runner.size)
        self._slots = min(len(runner.length), runner.cache.keys[0].shape[0] // self._most)
        self._step = 0
        self._alone: dict[int, Trace] = {}

    def run(self, cases: int, seed: int) -> Iterator[Difference | None]:
        """Yields a result for each case; None if all bits are equal."""
        random = Random(seed)
        for case in range(cases):
            rows = random.choice(NAMED_ROWS) if case % 2 == 0 else random.randint(1, 300)
            yield self._case(case, rows, random)

    def digests(self, sequence: int) -> list[tuple[str, list[int]]]:
        """The name and the rows' digests of each sub-block and the head, for a sequence computed alone: equal in all
        layouts that guarantee the same bits. All ranks call it at once."""
        self._reference(sequence)
        return [(name, rows.tolist()) for name, rows in self._alone[sequence]]

    def _case(self, case: int, most_rows: int, random: Random) -> Difference | None:
        count = min(self._slots, random.choice((most_rows, max(1, most_rows // 16))))  # full steps, of decodes too
        going = [_Going(slot, random.randrange(len(self.sequences))) for slot in range(count)]
        for one in going:  # the reference first: it uses the same cache
            self._reference(one.sequence)
        self._admit(going)
        first: tuple[int, int, Difference] | None = None
        for step in itertools.count():  # to its end in any case: other ranks may have found nothing
            chunks = self._schedule(going, most_rows, random)
            if not chunks:
                return None if first is None else first[2]
            chunks = in_order(chunks)
            rows = sum(chunk.count for chunk in chunks)
            trace, row = self._forward(chunks, random.choice((0, random.randrange(rows)))), 0
            for chunk in chunks:
                sequence = going[chunk.slot].sequence
                diff = self._differs(trace, row, chunk, sequence)
                if diff is not None and (first is None or (step, diff[0]) < first[:2]):
                    first = (
                        step,
                        diff[0],
                        Difference(case, step, trace[diff[0]][0], rows, sequence, diff[1]),
                    )
                row += chunk.count
        raise AssertionError("a case has an end")

    def _schedule(self, going: list[_Going], most_rows: int, random: Random) -> list[Chunk]:
        chunks, left = [], most_rows
        decodes = random.random() < 0.3
        for one in random.sample(going, len(going)):
            length = len(self.sequences[one.sequence])
            if one.done and random.random() < _PREEMPTED / len(going):
                one.done = 0
            if one.done == length and not one.hit:
                one.hit, keep = True, random.random() < _HITS
                one.done = random.randrange(length) // self.runner.size * self.runner.size if keep else length
            todo = length - one.done
            count = min(left, todo, 1 if decodes or random.random() < 0.3 else random.randint(1, todo or 1))
            if count:
                chunks.append(Chunk(one.slot, one.done, count, samples=False, prompt_logprobs=True))
                one.done, left = one.done + count, left - count
        return chunks

    def _admit(self, going: list[_Going]) -> None:
        """Admits each sequence into a slot with its own blocks, permuted so that places differ between cases."""
        admitted, blocks = [], []
        for one in going:
            tokens = tuple(self.sequences[one.sequence])
            params = SamplingParams(max_tokens=1, seed=0, temperature=0.0)
            admitted.append(NewSequence(one.slot, 0, len(tokens), tokens, params))
            blocks.append((one.slot, tuple(range(one.slot * self._most, (one.slot + 1) * self._most))[::-1]))
        self.runner.apply_changes(Batch(self._step, tuple(range(self._slots)), tuple(admitted), tuple(blocks), (), ()))

    def _reference(self, sequence: int) -> None:
        if sequence not in self._alone:
            self._admit([_Going(0, sequence)])
            tokens = len(self.sequences[sequence])
            self._alone[sequence] = self._forward([Chunk(0, 0, tokens, samples=False, prompt_logprobs=True)])

    def _forward(self, chunks: list[Chunk], split: int = 0) -> Trace:
        runner = self.runner
        trace: dict[str, list[Tensor]] = {}
        model = runner.model
        parts = {name: getattr(model, name) for name in ("attention", "mlp", "attention_and_mlp", "shortcut")}

        def traced(name: str, layer: int, residual: Tensor) -> Tensor:
            out: Tensor = parts[name](layer, residual)
            # the all-reduce is in place: in the end it is the sum
            trace.setdefault(f"layer {model.stage.first_layer + layer} {name}", []).append(
                out if out.ndim == 2 else out.transpose(0, 1).flatten(1)
            )
            return out

        self._step += 1
        with torch.inference_mode():
            try:
                for name in parts:
                    setattr(model, name, partial(traced, name))
                logits = runner._forward(chunks, None, split)
            finally:
                for name in parts:
                    delattr(model, name)
        digests = [(name, row_digests(torch.cat(streams))) for name, streams in trace.items()]
        return [*digests, ("logits", runner.sampler.digests(logits))] if model.shard.samples else digests

    def _differs(self, trace: Trace, row: int, chunk: Chunk, sequence: int) -> tuple[int, int] | None:
        """The first differing entry of the trace and the position, or None. A decode step in a CUDA graph has only the
        logits."""
        alone = dict(self._alone[sequence])
        for number, (name, got) in enumerate(trace):
            if name not in alone:
                continue
            a, b = got[row : row + chunk.count], alone[name][chunk.start : chunk.start + chunk.count]
            if not np.array_equal(a, b):
                return number, chunk.start + int((a != b).argmax())
        return None
