"""One rank's part of a pipeline stage: executes a Batch like runner.py, but sends hidden rows to the next stage, and
sampled ids with the drafts of the next step from the last stage back to the first. The first stage waits only for the
ids that a Batch needs; the stages between get the number of a sequence's tokens and drafts with its rows.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...models.transfer import Arriving
from ...topology.comm.pipeline import NEXT, PREVIOUS, Pipeline
from ..batch import Batch, Chunk, NewSequence, StepResult, decode_result, encode_result
from ..sampling.device_sampler import Fetch
from .cuda_graphs import StepGraphs
from .engine import Ahead, CollectiveTimeouts
from .runner import PendingStep, Runner


class NoDraws:
    """The sampler of a stage that does not sample."""

    latest: Tensor | None = None

    def admit(self, sequence: NewSequence) -> None: ...

    def release(self, slot: int) -> None: ...


CHECKS_BEHIND = 2
"""Steps for which a stage does not wait for the device. More cannot be in flight: plans of attention wait for it."""


@dataclass(frozen=True, slots=True)
class _Check:
    """A number for each row of a step, in flight to the host: 0, or NaN if the row has NaN or Inf. The sequence of each
    row, and the sequences' blocks."""

    batch: Batch
    began: float
    read: Arriving
    owners: NDArray[np.int64]
    blocks: NDArray[np.int32]
    num_blocks: NDArray[np.int64]


class StageRunner(Runner):
    """`index`: the rank's index in its stage's group. Index 0 reports whole results, the others only ids."""

    def __init__(self, *args: Any, pipeline: Pipeline, index: int, fetch: Fetch | None = None, **keys: Any) -> None:
        """fetch: copies to the host without waiting, on a GPU whose attention reads nothing after a sequence's last
        position; then rows are checked two steps later. None: a stage before the last waits for each of its steps."""
        self.checks: deque[_Check] = deque()
        super().__init__(*args, **keys)
        self._pipeline, self._index, self._fetch = pipeline, index, fetch
        self._in_flight: deque[PendingStep] = deque()
        # a wait between stages may include the steps of any of these sizes
        self._sizes: deque[int] = deque(maxlen=2 * pipeline.stages + 2)

    def run(self, batch: Batch, ahead: Ahead | None = None) -> StepResult | None:
        """Like Runner.run. On the first stage `ahead` is called with all results of earlier steps that have arrived.
        All stages wait for a Batch without chunks, which confirms the step before it."""
        for slot in batch.released:
            self._due[slot] = -1
            for step in self._in_flight:
                step.released.add(slot)
        self.apply_changes(batch)
        began = time.monotonic()
        if self._pipeline.first:
            return self._run_first(batch, ahead, began)
        if not batch.chunks:
            result = StepResult(())
            self._end_checks()
            if self._pipeline.last:
                self.sampler.flush()
        else:
            with torch.inference_mode():
                result = self._run_chunks(batch, began)
        if self._pipeline.last:
            proposed = {c.slot: ids for c in batch.chunks if c.samples and (ids := self.proposed.get(c.slot))}
            self._pipeline.send_back(encode_result(replace(result, proposed=proposed), ids_alone=self._index > 0))
        return result

    def wait_result(self) -> StepResult | None:
        """Waits on the first stage for the oldest result in flight; None if there is none. Raises like `run`."""
        return self._receive() if self._in_flight else None

    def _run_first(self, batch: Batch, ahead: Ahead | None, began: float) -> StepResult | None:
        results = list[StepResult]()
        if batch.chunks:
            needed = [chunk.slot for chunk in batch.chunks if chunk.count == 1]
            while any(self._due[slot] >= 0 for slot in needed):
                results.append(self._receive())
            while self._in_flight and self._pipeline.arrived():
                results.append(self._receive())
            with torch.inference_mode():
                self._run_chunks(batch, began, None if ahead is None else lambda: ahead(results))
            slots = [chunk.slot for chunk in batch.chunks if chunk.samples]
            at = self._lengthen(slots)
            self._due[slots] = at
            self._in_flight.append(PendingStep(batch, slots, at, began))
            return None
        while self._in_flight:
            results.append(self._receive())
        self._end_checks()
        if ahead is not None:
            ahead(results)
        return decode_result(self._pipeline.receive_back())

    def _run_chunks(self, batch: Batch, began: float, during_collective: Any = None) -> StepResult:
        if self.timeouts is not None:
            self._sizes.append(batch.num_tokens)
            self.timeouts.before(max(self._sizes))
        self.pass_lengths(batch)
        drafted = self._draft(batch)
        chunks, split = self._rows(batch, drafted)
        out = self._forward(chunks, during_collective, split)
        if self._pipeline.last:
            result = self._draw(batch, chunks, out, drafted)
            self._propose(batch, chunks)
            self._observe(batch, began)
            return result
        if self._fetch is None:
            self._drain()  # the next line waits for the device without a timeout
            self._zero_nonfinite(out, chunks)
            self._observe(batch, began)
            return StepResult(())
        slots = np.array([chunk.slot for chunk in chunks])
        owners = np.repeat(np.arange(len(slots)), [chunk.count for chunk in chunks])
        read = self._fetch((out * 0).sum(-1, dtype=torch.float32))
        self.checks.append(_Check(batch, began, read, owners, self.blocks[slots], self.num_blocks[slots]))
        if len(self.checks) > CHECKS_BEHIND:
            self._zero_blocks(self.checks.popleft())
        return StepResult(())

    def pass_lengths(self, batch: Batch) -> None:
        """Tells the stages between how many tokens and drafts each decode has. The last stage knows."""
        slots = [chunk.slot for chunk in batch.chunks if chunk.samples and chunk.count == 1]
        if not (self._speculates and slots) or self._pipeline.last:
            return
        if self._pipeline.first:
            counts = np.array([(self.length[slot], len(self.proposed.get(slot, ()))) for slot in slots], np.int32)
        else:
            counts = np.frombuffer(self._pipeline.receive_back(PREVIOUS), np.int32).reshape(len(slots), 2)
            for slot, (length, drafts) in zip(slots, counts.tolist(), strict=True):
                self.length[slot], self.proposed[slot] = length, [0] * drafts
        if self._pipeline.stage < self._pipeline.stages - 2:
            self._pipeline.send_back(counts.tobytes(), NEXT)  # by the hosts: on a GPU the boundary takes device memory

    def warmed_up(self, timeouts: CollectiveTimeouts | None, graphs: StepGraphs | None) -> None:
        self._end_checks()
        super().warmed_up(timeouts, graphs)

    def _end_checks(self) -> None:
        """Before a pause, which would count as the time of the steps whose checks are in flight."""
        if self.checks:
            self._drain()  # the reads wait for the device without a timeout
        while self.checks:
            self._zero_blocks(self.checks.popleft())

    def _zero_blocks(self, check: _Check) -> None:
        """_zero_nonfinite for a step whose blocks other sequences may use by now: they read no values of this one."""
        bad = np.isnan(check.read())
        self._observe(check.batch, check.began)
        for row in set(check.owners[bad].tolist()):
            self.cache.zero_blocks(check.blocks[row, : check.num_blocks[row]].tolist())

    def _zero_nonfinite(self, hidden: Tensor, chunks: Sequence[Chunk]) -> None:
        """Zeroes non-finite keys and values of sequences with non-finite rows. The last stage reports these sequences,
        but by then another sequence may use their blocks on this stage."""
        if bool(torch.isfinite(hidden.sum(dtype=torch.float32))):
            return
        bad = (~torch.isfinite(hidden).all(-1)).cpu().numpy()
        owner = np.repeat([chunk.slot for chunk in chunks], [chunk.count for chunk in chunks])
        self._zero_sequences(set(owner[bad].tolist()))

    def _receive(self) -> StepResult:
        step = self._in_flight.popleft()
        result = decode_result(self._pipeline.receive_back())
        for slot, position, token in zip(step.slots, step.at, result.tokens, strict=True):
            if slot in step.released:
                continue  # another sequence may use it
            room = max(1, int(self._end[slot]) + 1 - position)
            ids = [token, *(more for more, _ in result.more.get(slot, ()))][:room]
            self.tokens[slot, position : position + len(ids)] = ids
            self.length[slot] = min(position + len(ids), self.tokens.shape[1] - 1)
            self.proposed[slot] = list(result.proposed.get(slot, ()))
            self._due[slot] = -1
        return result
