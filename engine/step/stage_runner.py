"""One rank's part of a pipeline stage: executes a Batch as runner.py does, but passes hidden rows to the next stage,
and sampled ids from the last back to the first. The first stage waits only for the ids that a Batch needs; the stages
between need none.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...topology.comm.pipeline import Pipeline
from ..batch import Batch, Chunk, NewSequence, StepResult, decode_result, encode_result, in_order
from .engine import Ahead
from .runner import PendingStep, Runner


class NoDraws:
    """The sampler of a stage that draws nothing."""

    latest: Tensor | None = None

    def admit(self, sequence: NewSequence) -> None: ...

    def release(self, slot: int) -> None: ...


class StageRunner(Runner):
    """`index`: of the rank in its stage's group. Index 0 reports all results, the others ids alone."""

    def __init__(self, *args: Any, pipeline: Pipeline, index: int, **keys: Any) -> None:
        super().__init__(*args, **keys)
        self._pipeline, self._index = pipeline, index
        self._on_their_way: deque[PendingStep] = deque()
        # what a wait between stages is for may stand behind any of these
        self._sizes: deque[int] = deque(maxlen=2 * pipeline.stages + 2)

    def run(self, batch: Batch, ahead: Ahead | None = None) -> StepResult | None:
        """As Runner.run: on the first stage the results of steps before are given to `ahead`, all that have come. A
        Batch without chunks, which proves the step before it, is waited for by all stages."""
        for slot in batch.released:
            self._due[slot] = -1
            for step in self._on_their_way:
                step.released.add(slot)
        self._apply(batch)
        began = time.monotonic()
        if self._pipeline.first:
            return self._run_first(batch, ahead, began)
        if not batch.chunks:
            result = StepResult(())
            if self._pipeline.last:
                self.sampler.flush()
        else:
            with torch.inference_mode():
                result = self._run_chunks(batch)
            self._observe(batch, began)
        if self._pipeline.last:
            self._pipeline.send_back(encode_result(result, ids_alone=self._index > 0))
        return result

    def wait_result(self) -> StepResult | None:
        """The first stage's oldest result that is still on its way; None if none is. Raises as `run`."""
        return self._receive() if self._on_their_way else None

    def _run_first(self, batch: Batch, ahead: Ahead | None, began: float) -> StepResult | None:
        known = list[StepResult]()
        if batch.chunks:
            needed = [(chunk.slot, chunk.start) for chunk in batch.chunks if chunk.count == 1]
            while any(self._due[slot] == position for slot, position in needed):
                known.append(self._receive())
            while self._on_their_way and self._pipeline.arrived():
                known.append(self._receive())
            with torch.inference_mode():
                self._run_chunks(batch, None if ahead is None else lambda: ahead(known))
            slots = [chunk.slot for chunk in batch.chunks if chunk.samples]
            at = self._lengthen(slots)
            self._due[slots] = at
            self._on_their_way.append(PendingStep(batch, slots, at, began))
            self._observe(batch, began)
            return None
        while self._on_their_way:
            known.append(self._receive())
        if ahead is not None:
            ahead(known)
        return decode_result(self._pipeline.receive_back())

    def _run_chunks(self, batch: Batch, on_travelling: Any = None) -> StepResult:
        if self._patience is not None:
            self._sizes.append(batch.num_tokens)
            self._patience.before(max(self._sizes))
        chunks = in_order(batch.chunks)
        out = self._forward(chunks, on_travelling, batch.split)
        if self._pipeline.last:
            return self._draw(batch, chunks, out)
        self._drain()  # what follows waits for a device without a limit
        self._heal(out, chunks)
        return StepResult(())

    def _heal(self, hidden: Tensor, chunks: Sequence[Chunk]) -> None:
        """Zeroes what is NaN or Inf in the keys and values of sequences whose rows are: the last stage reports them,
        but by then their blocks here may be another's."""
        if bool(torch.isfinite(hidden.sum(dtype=torch.float32))):
            return
        bad = (~torch.isfinite(hidden).all(-1)).cpu().numpy()
        owner = np.repeat([chunk.slot for chunk in chunks], [chunk.count for chunk in chunks])
        self._zero_sequences(set(owner[bad].tolist()))

    def _receive(self) -> StepResult:
        step = self._on_their_way.popleft()
        result = decode_result(self._pipeline.receive_back())
        for slot, position, token in zip(step.slots, step.at, result.tokens, strict=True):
            if slot not in step.released:  # else it may be in use again
                self.tokens[slot, position] = token
                self._due[slot] = -1
        return result
