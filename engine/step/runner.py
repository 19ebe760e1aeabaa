"""One rank's model and cache: executes a Batch and returns the sampled ids. All ranks execute the same Batches in the
same order and mirror the slots (tokens, block tables) of rank 0's plans. If the sampler runs on the device, a step
starts before the previous step's ids are on the host.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...models.attention import AttentionBackend, Capturable, KVCache, StepLayout
from ...models.llama import LlamaModel, StepPart
from ...models.transfer import upload
from ..batch import Batch, Chunk, StepResult, in_order, streams
from ..request import TokenLogprob
from ..sampling.device_sampler import fed_by, feed
from ..sampling.drafts import ComputedStep, Proposer
from ..sampling.sampler import Sampled, Sampler
from ..schedule.sequence import end_position
from .cuda_graphs import StepGraphs
from .engine import Ahead, CollectiveTimeouts
from .memory import MIXED_PROMPTS

_HOST = torch.device("cpu")


@dataclass(slots=True)
class PendingStep:
    """A step whose ids are not on the host yet. `at` [B]: the positions of the ids in `slots`. `released`: slots that
    were released since, and `blocks` their blocks."""

    batch: Batch
    slots: list[int]
    at: NDArray[np.int64]
    began: float
    blocks: list[int] = field(default_factory=list)
    released: set[int] = field(default_factory=set)


class Runner:
    """State on the host: `tokens` [slots, positions] int32 and `blocks` [slots, blocks per sequence] int32."""

    def __init__(
        self,
        model: LlamaModel,
        cache: KVCache,
        attention: AttentionBackend,
        sampler: Sampler,
        *,
        max_slots: int,
        max_model_len: int,
        proposer: Proposer | None = None,
        speculates: bool = False,
        drain: Callable[[], None] = lambda: None,
    ) -> None:
        """speculates: whether plans may have drafts. proposer: makes them, on ranks that sample. drain: waits for the
        device before the host reads logits, at most for the timeout of a collective."""
        self.model, self.cache, self.attention, self.sampler = model, cache, attention, sampler
        self.device = model.rotary.cos.device
        self.size = cache.block_size
        # One position more than the model has, for the surplus token of a step that was planned ahead.
        self.tokens = np.zeros((max_slots, max_model_len + 1), np.int32)
        self.length = np.zeros(max_slots, np.int64)
        self.blocks = np.zeros((max_slots, -(-(max_model_len + 1) // self.size)), np.int32)
        self.num_blocks = np.zeros(max_slots, np.int64)
        self.page_table: Tensor | None = None
        """`blocks` on the device, for attention that reads its page table from there: a step then changes the new
        blocks alone. One more row, as long as the largest recorded prompt, has the scratch block."""
        if isinstance(attention, Capturable):
            width = max(self.blocks.shape[1], -(-MIXED_PROMPTS[-1] // self.size))
            self.page_table = torch.full(
                (max_slots + 1, width), cache.num_blocks - 1, dtype=torch.int32, device=self.device
            )
        self._prompt_top = [0] * max_slots
        self._end = np.zeros(max_slots, np.int64)  # the most positions that the slot's sequence computes
        self.proposer, self._speculates, self._drain = proposer, speculates, drain
        self.proposed: dict[int, list[int]] = {}
        """The drafts of each slot's next step."""
        self.warmed_up(None, None)
        self._second: AttentionBackend | None = None
        self.pending_step: PendingStep | None = None
        # The position of each slot's id that is not on the host yet; -1 for none.
        self._due = np.full(max_slots, -1, np.int64)
        self._known_at = 0.0
        self._replayed = False  # whether the step's logits are the buffer of the recorded sampling graphs
        self._unseen = set[int]()  # slots whose last chunk sampled nothing

    def warmed_up(self, timeouts: CollectiveTimeouts | None, graphs: StepGraphs | None) -> None:
        """Sets timeouts and graphs after warm-up: earlier steps compiled kernels, so their times are not used."""
        self.timeouts, self._graphs = timeouts, graphs

    @property
    def graphed(self) -> bool:
        return self._graphs is not None

    def run(self, batch: Batch, ahead: Ahead | None = None) -> StepResult | None:
        """Applies the Batch and computes its chunks. Returns their result, or None while it is on the device: then the
        next `run` passes it to its `ahead`, or `wait_result` returns it. ahead is called once while this step is in
        flight, with the previous result if that was pending; host work in it overlaps with the step. Raises
        DesyncError if the ids of the latest known step differ between ranks."""
        self.apply_changes(batch)
        if not batch.chunks:
            pending = self.wait_result()
            if ahead is not None:
                ahead(() if pending is None else (pending,))
            self.sampler.flush()
            return StepResult(())
        began = time.monotonic()
        if self.timeouts is not None:
            self.timeouts.before(batch.num_tokens)
        overlaps = self.sampler.latest is not None
        early = None if ahead is None or overlaps else partial(ahead, ())
        with torch.inference_mode():
            drafted = self._draft(batch)
            chunks, split = self._rows(batch, drafted)
            logits = self._forward(chunks, early, split)
            settled = self._settle()
            drawing = overlaps and not self._proposes(batch, drafted) and self._start(batch, chunks, logits, began)
            if ahead is not None and early is None:
                ahead(() if settled is None else (settled,))
            if drawing:
                return None
            result = self._draw(batch, chunks, logits, drafted)
            self._propose(batch, chunks)
        self._observe(batch, began)
        return result

    def _draft(self, batch: Batch) -> dict[int, int] | None:
        """Writes the proposed drafts after the known tokens of decodes; returns their numbers by slot. None if there
        are none and every decode starts where its plan says."""
        if not self._speculates:
            return None
        decodes = [chunk for chunk in batch.chunks if chunk.samples and chunk.count == 1]
        if not any(chunk.drafts or chunk.start != self._last(chunk.slot) for chunk in decodes):
            return None
        counts = {chunk.slot: 0 for chunk in batch.chunks}
        for slot, most in ((chunk.slot, chunk.drafts) for chunk in decodes):
            drafts, length = self.proposed.get(slot, [])[: self._draftable(slot, most)], int(self.length[slot])
            self.tokens[slot, length : length + len(drafts)] = drafts
            counts[slot] = len(drafts)
        return counts

    def _proposes(self, batch: Batch, drafted: dict[int, int] | None) -> bool:
        """Whether the step's ids are needed before the next step: some are verified drafts, or are to be followed by
        drafts."""
        if drafted is not None or self.proposer is None:
            return drafted is not None
        return self.proposer.every_step or any(chunk.proposals for chunk in batch.chunks)

    def _draftable(self, slot: int, most: int) -> int:
        return min(most, max(0, int(self._end[slot] - self.length[slot])))

    def _last(self, slot: int) -> int:
        """The position of the slot's last known token. A sequence that has reached its end computes its last position
        again, because its blocks have no room for another."""
        return int(min(self.length[slot], self._end[slot])) - 1

    def _rows(self, batch: Batch, drafted: dict[int, int] | None) -> tuple[list[Chunk], int]:
        """The chunks to compute, in order, and the rows of the first stream: a decode starts at its last known token,
        and each draft is one more row."""
        chunks, split = in_order(batch.chunks), batch.split
        if drafted is None:
            return chunks, split
        split += sum(drafted[chunk.slot] for chunk in chunks[:split])
        rows: list[Chunk] = []
        for chunk in chunks:
            if chunk.count > 1 or not chunk.samples:
                rows.append(chunk)
                continue
            start = self._last(chunk.slot)
            rows += [chunk._replace(start=start + row) for row in range(drafted[chunk.slot] + 1)]
        return rows, split

    def _propose(self, batch: Batch, rows: Sequence[Chunk]) -> None:
        if self.proposer is None:
            return
        counts = {chunk.slot: self._draftable(chunk.slot, chunk.proposals) for chunk in batch.chunks}
        step = ComputedStep(batch.chunks, rows, counts, self.tokens, self.length, self.layout_of)
        proposals = self.proposer.propose(step)
        for chunk in batch.chunks:
            if chunk.samples:
                self.proposed[chunk.slot] = self.sampler.drafted(chunk.slot, proposals.get(chunk.slot, []))

    def wait_result(self) -> StepResult | None:
        """Waits for the pending result; None if none is pending. Raises as `run`."""
        with torch.inference_mode():
            return self._settle()

    def _observe(self, batch: Batch, began: float) -> None:
        """Records a finished step: its time counts from its start, or from the end of the previous step if later."""
        now = time.monotonic()
        if self.timeouts is not None:
            self.timeouts.after(batch.num_tokens, now - max(began, self._known_at))
        self._known_at = now

    def _forward(self, chunks: list[Chunk], during_collective: Callable[[], None] | None, split: int = 0) -> Tensor:
        """Computes the logits [R, V / tp] of the rows that are sampled or scored."""
        graphs, self._replayed = self._graphs, False
        shape = None if graphs is None or split else graphs.shape(chunks)
        if graphs is not None and shape is not None:
            layout, tokens, rows = self.layout_of(chunks, _HOST)
            logits = graphs.run(shape, layout, tokens, rows)
            self._known_at = max(self._known_at, graphs.recorded_at)  # a recording is no part of a step's time
            if logits is not None:
                if during_collective is not None:
                    during_collective()  # the whole step is queued on the device
                self._replayed = len(rows) == len(logits) or not self.model.shard.samples
                return logits if self._replayed else logits[upload(rows.numpy(), self.device)]
        parts = zip(streams(chunks, split) if split else [chunks], self._attentions(), strict=False)
        return self.model.forward_streams([self._stream(*part) for part in parts], during_collective)

    def _attentions(self) -> Iterator[AttentionBackend]:
        yield self.attention
        if self._second is None:
            self._second = self.attention.twin()
        yield self._second

    def _stream(self, chunks: list[Chunk], attention: AttentionBackend) -> StepPart:
        layout, tokens, rows = self.layout_of(chunks)
        if self.pending_step is not None and self.sampler.latest is not None:
            tokens = feed(tokens, self.sampler.latest)
        return StepPart(tokens, layout, attention, rows)

    def apply_changes(self, batch: Batch) -> None:
        for slot in batch.released:
            self.sampler.release(slot)
            if slot in self._unseen:
                self._unseen.remove(slot)
                self._zero_unchecked(slot)
            if self._due[slot] >= 0 and self.pending_step is not None:
                self.pending_step.blocks += self.blocks[slot, : self.num_blocks[slot]].tolist()
                self._due[slot] = -1
            self.length[slot] = self.num_blocks[slot] = 0
            self.proposed.pop(slot, None)
        for sequence in batch.admitted:
            slot, count = sequence.slot, len(sequence.tokens)
            self.tokens[slot, :count] = sequence.tokens
            self.length[slot], self.num_blocks[slot] = count, 0
            self._prompt_top[slot] = sequence.params.prompt_logprobs or 0
            self._end[slot] = end_position(sequence.prompt_len, sequence.params.max_tokens, self.tokens.shape[1] - 1)
            self.sampler.admit(sequence)
        places: list[int] = []
        for slot, blocks in batch.blocks:
            have = int(self.num_blocks[slot])
            self.blocks[slot, have : have + len(blocks)] = blocks
            self.num_blocks[slot] = have + len(blocks)
            if self.page_table is not None:
                first = slot * self.page_table.shape[1] + have
                places += range(first, first + len(blocks))
        if self.page_table is not None and places:
            new = [block for _, blocks in batch.blocks for block in blocks]
            at, values = upload(np.array((places, new), np.int64), self.device)
            self.page_table.view(-1)[at] = values.int()
        self.cache.copy(batch.copies)
        if self.proposer is not None:
            self.proposer.apply(batch)

    def layout_of(self, chunks: list[Chunk], device: torch.device | None = None) -> tuple[StepLayout, Tensor, Tensor]:
        """The step's layout, its token ids [T] (placeholders for `feed` if an id is only on the device), and the rows
        [R] whose logits are needed; on the model's device unless `device` is given."""

        def place(values: NDArray[np.integer]) -> Tensor:
            return upload(values.astype(np.int64), device or self.device)

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
        tokens = self.tokens[slot_of, positions]
        if self.pending_step is not None:
            tokens = np.where(self._due[slot_of] == positions, fed_by(slot_of), tokens)
        recorded = self.page_table
        query_start = [0, *np.cumsum(counts).tolist()]
        rows = [
            row
            for chunk, first_row, after in zip(chunks, query_start, query_start[1:], strict=False)
            for row in (range(first_row, after) if chunk.prompt_logprobs else (after - 1,) if chunk.samples else ())
        ]
        layout = StepLayout(
            positions=place(positions),
            chained=decode > 1 and bool((slots[1:decode] == slots[: decode - 1]).any()),
            query_start=query_start,
            kv_len=ends.tolist(),
            block_table=place(self.blocks[slots, : -(-int(ends.max()) // self.size)]) if recorded is None else recorded,
            rows=None if recorded is None else slots,
            blocks=place(self.blocks[slot_of, positions // self.size]),
            offsets=place(positions % self.size),
            decode=decode,
        )
        return layout, place(tokens), place(np.array(rows, np.int64))

    def _start(self, batch: Batch, chunks: list[Chunk], logits: Tensor, began: float) -> bool:
        """Starts sampling on the device; the ids are then pending. False if these rows cannot be sampled there."""
        if any(chunk.prompt_logprobs for chunk in chunks):
            return False
        slots = self._sampled(chunks)
        if not slots or not self.sampler.start(logits, slots, self._replayed):
            return False
        at = self._lengthen(slots)
        self._due[slots] = at
        self.pending_step = PendingStep(batch, slots, at, began)
        return True

    def _sampled(self, chunks: Sequence[Chunk]) -> list[int]:
        slots = [chunk.slot for chunk in chunks if chunk.samples]
        if len(slots) < len(chunks):
            self._unseen.update(chunk.slot for chunk in chunks if not chunk.samples)
        if self._unseen:
            self._unseen.difference_update(slots)
        return slots

    def _lengthen(self, slots: Sequence[int]) -> NDArray[np.int64]:
        """Reserves the positions of the slots' next ids, and returns them."""
        at = self.length[slots]
        self.length[slots] = np.minimum(at + 1, self.tokens.shape[1] - 1)
        return at

    def _settle(self) -> StepResult | None:
        pending, self.pending_step = self.pending_step, None
        if pending is None:
            return None
        drawn = self.sampler.finish()
        slots = np.asarray(pending.slots)
        current = np.flatnonzero(self._due[slots] >= 0)  # the other slots were released and may be reused
        self.tokens[slots[current], pending.at[current]] = drawn.ids[current]
        self._due[slots] = -1
        poisoned = {pending.slots[row] for row in np.flatnonzero(drawn.nonfinite)}
        if poisoned:
            # Another sequence may use released blocks by now. It has not read the zeroed values: backends with which
            # steps overlap read nothing after a sequence's last position (build.py).
            self._zero_sequences(poisoned.intersection(slots[current].tolist()))
            self.cache.zero_blocks(pending.blocks)
        self._observe(pending.batch, pending.began)
        return self._result(pending.batch, pending.slots, drawn, poisoned, {})

    def _draw(
        self, batch: Batch, chunks: list[Chunk], logits: Tensor, drafted: dict[int, int] | None = None
    ) -> StepResult:
        """Samples and scores, on the host where the device cannot; appends the sampled ids to the slots."""
        scored: dict[int, list[TokenLogprob]] = {}
        slots, sampled, fed = self._sampled(chunks), logits, None
        if drafted is not None:
            fed = self.tokens[slots, [chunk.start + chunk.count - 1 for chunk in chunks if chunk.samples]]
        scores = any(chunk.prompt_logprobs for chunk in chunks)
        started = bool(slots) and not scores and self.sampler.start(logits, slots, self._replayed, fed)
        if not started:
            self._drain()
        if scores:
            sampled, scored = self._score(chunks, logits)
        poisoned = {slot for slot, scores in scored.items() if any(math.isnan(score.logprob) for score in scores)}
        if not slots:
            self.sampler.flush()
            self._zero_sequences(poisoned)
            return StepResult((), nonfinite=poisoned, prompt_logprobs=scored)
        drawn = self.sampler.finish() if started else self.sampler.sample(sampled, slots, fed)
        if drafted is not None:
            return self._take(batch, chunks, drawn, drafted, poisoned, scored)
        self.tokens[slots, self._lengthen(slots)] = drawn.ids
        poisoned |= {slots[row] for row in np.flatnonzero(drawn.nonfinite)}
        self._zero_sequences(poisoned - {slots[row] for row in drawn.failures})
        return self._result(batch, slots, drawn, poisoned, scored)

    def _take(
        self,
        batch: Batch,
        chunks: list[Chunk],
        drawn: Sampled,
        drafted: dict[int, int],
        poisoned: set[int],
        scored: dict[int, list[TokenLogprob]],
    ) -> StepResult:
        """The result of a step with drafts: each slot's tokens up to the first rejected draft, and the token in its
        place. Keys and values computed after it will be overwritten."""
        assert drawn.taken is not None
        given: dict[int, list[tuple[int, TokenLogprob | None]]] = {}
        failures: dict[int, str] = {}
        rows = [chunk.slot for chunk in chunks if chunk.samples]
        for row, slot in enumerate(rows):
            if not drawn.taken[row]:
                if drawn.nonfinite[row]:
                    self._zero_sequences([slot])  # its keys may be NaN, and another sequence may read them
                continue
            given.setdefault(slot, []).append((int(drawn.ids[row]), drawn.logprobs[row]))
            if drawn.nonfinite[row]:
                poisoned.add(slot)
            if row in drawn.failures:
                failures[slot] = drawn.failures[row]
            if self.length[slot] <= self._end[slot]:
                self.tokens[slot, self.length[slot]] = drawn.ids[row]
                self.length[slot] += 1
        self._zero_sequences(poisoned - failures.keys())
        return StepResult(
            tokens=[given[chunk.slot][0][0] for chunk in batch.chunks if chunk.samples],
            nonfinite=poisoned,
            more={slot: tokens[1:] for slot, tokens in given.items() if len(tokens) > 1},
            drafted={slot: count for slot, count in drafted.items() if count},
            failures=failures,
            logprobs={slot: tokens[0][1] for slot, tokens in given.items() if tokens[0][1] is not None},
            prompt_logprobs=scored,
        )

    @staticmethod
    def _result(
        batch: Batch, slots: list[int], drawn: Sampled, poisoned: set[int], scored: dict[int, list[TokenLogprob]]
    ) -> StepResult:
        ids = dict(zip(slots, drawn.ids.tolist(), strict=True))
        return StepResult(
            tokens=[ids[chunk.slot] for chunk in batch.chunks if chunk.samples],
            nonfinite=poisoned,
            failures={slots[row]: why for row, why in drawn.failures.items()},
            logprobs={slot: p for slot, p in zip(slots, drawn.logprobs, strict=True) if p is not None},
            prompt_logprobs=scored,
        )

    def _zero_sequences(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self.cache.zero_blocks(self._table(slot))

    def _zero_unchecked(self, slot: int) -> None:
        """Zeroes non-finite values in the blocks of a sequence that leaves unchecked. Shared blocks are not changed:
        the sequences that continue with them must detect the failure."""
        count, self.num_blocks[slot] = int(self.num_blocks[slot]), 0
        shared = {block for other in np.flatnonzero(self.num_blocks) for block in self._table(int(other))}
        self.cache.zero_blocks([block for block in self.blocks[slot, :count].tolist() if block not in shared])

    def _table(self, slot: int) -> list[int]:
        table: list[int] = self.blocks[slot, : self.num_blocks[slot]].tolist()
        return table

    def _score(self, chunks: list[Chunk], logits: Tensor) -> tuple[Tensor, dict[int, list[TokenLogprob]]]:
        """Splits logits rows into those to sample from and those to score against the prompt's next token."""
        picked, scored, row = [], {}, 0
        for chunk in chunks:
            count = chunk.count if chunk.prompt_logprobs else int(chunk.samples)
            if chunk.prompt_logprobs:
                # The chunk's last position has a next token only if the prompt continues after it.
                targeted = min(chunk.count, int(self.length[chunk.slot]) - chunk.start - 1)
                targets = self.tokens[chunk.slot, chunk.start + 1 : chunk.start + 1 + targeted]
                top = self._prompt_top[chunk.slot]
                scored[chunk.slot] = self.sampler.score(logits[row : row + targeted], targets, top) if targeted else []
            row += count
            if chunk.samples:
                picked.append(row - 1)
        return logits[picked], scored
