"""A small model that drafts for the large one: whole on every rank that samples, so that it needs no all-reduce. Its
keys share the large model's block numbers, tables and prefixes. It computes prompts after the large model, and new
decodes when drafts are due or a piece is full. The next step verifies its drafts. All ranks must draft alike: it
computes as under `deterministic`, and the step's digest covers the drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ... import __version__
from ...models.attention import KVCache, StepLayout, block_bytes
from ...models.attention_choice import make_attention, make_cache
from ...models.config.model_config import ModelConfig, from_folder
from ...models.config.shapes import check_draft
from ...models.cpu.kernels import Kernels
from ...models.lanes import model_class
from ...models.ops_choice import make_ops
from ...models.stages import RankShard
from ...models.weights.mapping import open_source
from ...topology.comm.collectives import Alone
from ...topology.comm.groups import Communicator
from ...topology.hardware import cpu_tier
from ..batch import Batch, Chunk, in_order
from ..sampling.drafts import ComputedStep, DraftDraws
from ..sampling.grammar import Grammars
from .kv_capacity import CapacityError

PIECE = 32
"""The most tokens of a decode left uncomputed while it gets no drafts: together they cost little more than one."""
REDONE = 2 * PIECE
"""Positions of a shared prefix that are computed again: the draft model may not have computed the last ones of the
sequence that left it."""


class DraftWeights:
    """Opens the draft model's folder. Raises OSError, ValueError, CheckpointError or ShapeError."""

    def __init__(self, folder: Path, config: ModelConfig, dtype: torch.dtype, length: int) -> None:
        self.config, self.dtype = from_folder(folder), dtype
        check_draft(self.config, config, length)
        self._shard = RankShard(self.config, 1, 0)
        self.source = open_source(folder, self._shard, self.config)
        self.bytes = self.source.rank_bytes(self._shard, dtype.itemsize)

    def block_bytes(self, block_size: int) -> int:
        return block_bytes(self._shard, block_size, self.dtype)

    def load(
        self, positions: int, num_blocks: int, block_size: int, max_slots: int, grammars: Grammars | None
    ) -> DraftModel:
        """Loads the model on this rank's CPU."""
        device, deterministic = torch.device("cpu"), Kernels.find() is not None
        group: Any = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
        ops = make_ops(device, self.dtype, deterministic=deterministic)
        model = model_class(self.config)(
            self.config, group, Alone(), ops, dtype=self.dtype, device=device, positions=positions
        )
        model.load(self.source)
        cache = make_cache(self._shard, num_blocks, block_size, self.dtype, device)
        attention, _ = make_attention("auto", self._shard, cache, self.dtype, deterministic, model.sinks)
        size = self.config.vocab_size
        draws = DraftDraws(size, range(size), max_slots, device, grammars)

        def compute(layout: StepLayout, tokens: Tensor, rows: Tensor) -> Tensor:
            return model.forward(tokens, layout, attention, rows)

        return DraftModel(compute, cache, draws, max_slots)


def check_alike(communicator: Communicator, device: torch.device, key: str, would: str) -> None:
    """Raises CapacityError if ranks have different CPU tiers, or GPUs if those compute, or versions of torch or
    laddertron: their own decisions could differ. key, would: for the error, the key that requires equality, and what
    would differ."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        count = torch.cuda.get_device_properties(device).multi_processor_count  # libraries choose kernels by it
        tier, kind = f"{major}.{minor} with {count} multiprocessors", "on GPUs of capability"
        fix = "use hosts with the same GPUs"
    else:
        tier = "torch alone" if (kernels := Kernels.find()) is None else kernels.tier
        kind = "in the CPU tiers"
        fix = f"set {cpu_tier.VARIABLE} to one that all of them have, in launch.env"
    own = np.frombuffer(f"{tier} (torch {torch.__version__}, laddertron {__version__})".ljust(96).encode(), np.uint8)
    tiers = sorted({bytes(gathered).decode().strip() for gathered in communicator.gather(own[:96])})
    if len(tiers) > 1:
        raise CapacityError(
            f"{key}: ranks compute {kind} {' and '.join(tiers)}, and would {would} differently: {fix}, and install "
            "the same versions"
        )


class DraftModel:
    """The draft model of one rank. The runner informs it of all changes of slots and blocks."""

    every_step = True

    def __init__(
        self,
        compute: Callable[[StepLayout, Tensor, Tensor], Tensor],
        cache: KVCache,
        draws: DraftDraws,
        max_slots: int,
    ) -> None:
        self._compute, self.cache, self._draws = compute, cache, draws
        self._computed = np.zeros(max_slots, np.int64)  # positions whose keys are there; -1: as many as are shared

    def apply(self, batch: Batch) -> None:
        for slot in batch.released:
            self._draws.release(slot)
        for sequence in batch.admitted:
            self._computed[sequence.slot] = -1
            self._draws.admit(sequence)

    def propose(self, step: ComputedStep) -> dict[int, list[int]]:
        """Computes prompts as far as the step did, and makes `counts` drafts for each slot."""
        counts, layout = step.counts, step.layout
        due = in_order(self._due(step.chunks, counts, step.length))
        if not due:
            return {}
        logits = self._compute(*layout(due))
        for chunk in due:
            self._computed[chunk.slot] = chunk.start + chunk.count

        def more(slots: list[int]) -> Tensor:
            later = [Chunk(slot, int(self._computed[slot]), 1, True) for slot in slots]
            self._computed[slots] += 1
            return self._compute(*layout(later))

        drawn = {chunk.slot: counts[chunk.slot] for chunk in due if chunk.samples}
        return self._draws.draft(logits, drawn, step.tokens, step.length, more)

    def _due(self, chunks: Iterable[Chunk], counts: Mapping[int, int], length: NDArray[np.int64]) -> Iterable[Chunk]:
        for chunk in chunks:
            slot, written = chunk.slot, int(length[chunk.slot])
            if self._computed[slot] < 0:
                self._computed[slot] = max(0, chunk.start - REDONE)
            start = min(int(self._computed[slot]), written - 1)  # resumes after the last accepted draft
            drafts = counts[slot] > 0
            end = written if drafts else chunk.start + chunk.count
            decodes = chunk.samples and chunk.count == 1
            if drafts or not decodes or end - start >= PIECE:
                yield Chunk(slot, start, end - start, drafts)
