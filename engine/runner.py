"""One rank's model and cache: obeys a Batch, returns the ids that every rank drew.

Mirrors the slots (tokens, block tables) that rank 0's plans speak of; decides nothing. Called by engine/engine.py on
rank 0 and by the follower loop on the others; all of them see the same Batches in the same order.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..models.attention import AttentionBackend, StepLayout
from ..models.kv_cache import KVCache
from ..models.llama import LlamaModel
from .batch import Batch, Chunk, StepResult
from .graphs import DecodeGraphs
from .request import TokenLogprob
from .sampler import Sampler
from .steptimes import StepTimes

_HOST = torch.device("cpu")


class Patience:
    """Sets the group's collective timeout by the times of its steps."""

    def __init__(self, times: StepTimes, set_timeout: Callable[[float], None]) -> None:
        self.times, self._set_timeout = times, set_timeout
        self.set_to, self._started = times.first, 0.0
        set_timeout(times.first)

    def before(self, tokens: int) -> None:
        limit = self.times.limit(tokens)
        if not 0.8 < limit / self.set_to < 1.25:
            self._set_timeout(limit)
            self.set_to = limit
        self._started = time.monotonic()

    def after(self, tokens: int) -> None:
        self.times.observe(tokens, time.monotonic() - self._started)


class Runner:
    """State: `tokens` [slots, positions] int32 and `blocks` [slots, blocks a sequence] int32, on the host."""

    def __init__(
        self,
        model: LlamaModel,
        cache: KVCache,
        attention: AttentionBackend,
        sampler: Sampler,
        *,
        max_slots: int,
        max_model_len: int,
        patience: Patience | None = None,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        self.model, self.cache, self.attention, self.sampler = model, cache, attention, sampler
        self.device = model.norm.weight.device
        self.size = cache.block_size
        # One position more than the model has: the surplus token of an optimistic step lands there.
        self.tokens = np.zeros((max_slots, max_model_len + 1), np.int32)
        self.length = np.zeros(max_slots, np.int64)
        self.blocks = np.zeros((max_slots, -(-(max_model_len + 1) // self.size)), np.int32)
        self.num_blocks = np.zeros(max_slots, np.int64)
        self._prompt_top = [0] * max_slots
        self._patience, self._graphs = patience, graphs

    @property
    def graphed(self) -> bool:
        """Whether decode steps are recorded ones."""
        return self._graphs is not None

    def run(self, batch: Batch, on_travelling: Callable[[], None] | None = None) -> StepResult:
        """Applies the Batch and computes its chunks. Raises DesyncError if ranks disagreed about the step before.

        on_travelling: see LlamaModel.forward.
        """
        self._apply(batch)
        if not batch.chunks:
            self.sampler.flush()
            return StepResult(())
        if self._patience is not None:
            self._patience.before(batch.num_tokens)
        with torch.inference_mode():
            chunks = sorted(batch.chunks, key=lambda chunk: chunk.count != 1)  # decodes first; a stable sort
            logits = self._forward(chunks, on_travelling)
            result = self._draw(batch, chunks, logits)
        if self._patience is not None:
            self._patience.after(batch.num_tokens)
        return result

    def _forward(self, chunks: list[Chunk], on_travelling: Callable[[], None] | None) -> Tensor:
        """Logits [R, V / tp] of the rows that are sampled or scored."""
        graphs = self._graphs
        if graphs is None or chunks[-1].count != 1 or not graphs.fits(len(chunks)):
            layout, tokens, rows = self._layout(chunks)
            return self.model.forward(tokens, layout, self.attention, rows, on_travelling)
        layout, tokens, rows = self._layout(chunks, _HOST)
        logits = graphs.run(layout, tokens)
        if on_travelling is not None:
            on_travelling()  # the device has the whole step by now
        return logits if len(rows) == len(chunks) else logits[rows.to(self.device)]

    def _apply(self, batch: Batch) -> None:
        for slot in batch.released:
            self.sampler.release(slot)
            self.length[slot] = self.num_blocks[slot] = 0
        for sequence in batch.admitted:
            slot, count = sequence.slot, len(sequence.tokens)
            self.tokens[slot, :count] = sequence.tokens
            self.length[slot], self.num_blocks[slot] = count, 0
            self._prompt_top[slot] = sequence.params.prompt_logprobs or 0
            self.sampler.admit(sequence)
        for slot, blocks in batch.blocks:
            have = int(self.num_blocks[slot])
            self.blocks[slot, have : have + len(blocks)] = blocks
            self.num_blocks[slot] = have + len(blocks)
        self.cache.copy(batch.copies)

    def _layout(self, chunks: list[Chunk], device: torch.device | None = None) -> tuple[StepLayout, Tensor, Tensor]:
        """The step's layout, its token ids [T], and the rows whose logits are needed [R]; on the model's device unless
        another is named."""

        def place(values: NDArray[np.integer]) -> Tensor:
            return torch.from_numpy(values.astype(np.int64)).to(device or self.device, non_blocking=True)

        slots = np.array([chunk.slot for chunk in chunks])
        starts = np.array([chunk.start for chunk in chunks])
        counts = np.array([chunk.count for chunk in chunks])
        ends = starts + counts
        decode = int(np.count_nonzero(counts == 1))
        if decode == len(chunks):
            slot_of, positions = slots, starts
        else:
            slot_of = np.repeat(slots, counts)
            first = np.repeat(np.cumsum(counts) - counts, counts)
            positions = np.arange(len(slot_of)) - first + np.repeat(starts, counts)
        most = -(-int(ends.max()) // self.size)
        query_start = [0, *np.cumsum(counts).tolist()]
        rows = [
            row
            for chunk, first_row, after in zip(chunks, query_start, query_start[1:], strict=False)
            for row in (range(first_row, after) if chunk.prompt_logprobs else (after - 1,) if chunk.samples else ())
        ]
        layout = StepLayout(
            positions=place(positions),
            query_start=query_start,
            kv_len=ends.tolist(),
            block_table=place(self.blocks[slots, :most]),
            blocks=place(self.blocks[slot_of, positions // self.size]),
            offsets=place(positions % self.size),
            decode=decode,
        )
        return layout, place(self.tokens[slot_of, positions]), place(np.array(rows, np.int64))

    def _draw(self, batch: Batch, chunks: list[Chunk], logits: Tensor) -> StepResult:
        """Samples and scores; appends what was drawn to the slots."""
        scored: dict[int, list[TokenLogprob]] = {}
        slots, sampled = [chunk.slot for chunk in chunks if chunk.samples], logits
        if any(chunk.prompt_logprobs for chunk in chunks):
            sampled, scored = self._score(chunks, logits)
        poisoned = {slot for slot, scores in scored.items() if any(math.isnan(score.logprob) for score in scores)}
        if not slots:
            self.sampler.flush()
            self._heal(poisoned)
            return StepResult((), nonfinite=poisoned, prompt_logprobs=scored)
        drawn = self.sampler.sample(sampled, slots)
        at = self.length[slots]
        self.tokens[slots, at] = drawn.ids
        self.length[slots] = np.minimum(at + 1, self.tokens.shape[1] - 1)
        failures = {slots[row]: why for row, why in drawn.failures.items()}
        poisoned |= {slots[row] for row in np.flatnonzero(drawn.nonfinite)}
        self._heal(poisoned - failures.keys())
        ids = dict(zip(slots, drawn.ids.tolist(), strict=True))
        return StepResult(
            tokens=[ids[chunk.slot] for chunk in batch.chunks if chunk.samples],
            nonfinite=poisoned,
            failures=failures,
            logprobs={slot: p for slot, p in zip(slots, drawn.logprobs, strict=True) if p is not None},
            prompt_logprobs=scored,
        )

    def _heal(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self.cache.heal(self.blocks[slot, : self.num_blocks[slot]].tolist())

    def _score(self, chunks: list[Chunk], logits: Tensor) -> tuple[Tensor, dict[int, list[TokenLogprob]]]:
        """Splits logits rows into those to sample from and those to score against the prompt's next token."""
        picked, scored, row = [], {}, 0
        for chunk in chunks:
            count = chunk.count if chunk.prompt_logprobs else int(chunk.samples)
            if chunk.prompt_logprobs:
                # The chunk's last position has a next token only if the prompt goes on behind it.
                known = min(chunk.count, int(self.length[chunk.slot]) - chunk.start - 1)
                targets = self.tokens[chunk.slot, chunk.start + 1 : chunk.start + 1 + known]
                top = self._prompt_top[chunk.slot]
                scored[chunk.slot] = self.sampler.score(logits[row : row + known], targets, top) if known else []
            row += count
            if chunk.samples:
                picked.append(row - 1)
        return logits[picked], scored
