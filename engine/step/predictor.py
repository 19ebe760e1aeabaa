"""Drafts by the model's predicting layer (models/predictor.py), on the ranks that sample. It computes the rows of a
step after the model, with the tokens known then; those of decodes without drafts only when their block is full. So each
full block holds its keys and values beside the model's. A row depends on one token more than the model's, and so do the
digests by which blocks are shared (engine/schedule/sequence.py). Rows of drafts are computed again, as the model's are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...models.attention import AttentionBackend, KVCache, block_bytes
from ...models.attention_choice import make_attention, make_cache
from ...models.config.model_config import ModelConfig
from ...models.cpu.kernels import Kernels
from ...models.cuda.fp8 import StoredProducts
from ...models.llama import LlamaModel
from ...models.ops_choice import make_ops, make_stored_products
from ...models.predictor import Predictor
from ...models.stages import RankShard
from ...models.transfer import upload
from ...models.weights.load import NOTHING
from ...models.weights.mapping import Source
from ...topology.comm.groups import Communicator, Deterministic
from ..batch import Batch, Chunk, in_order
from ..sampling.drafts import ComputedStep, DraftDraws, Layout
from ..sampling.sampler import Sampler, exchanged


class PredictorShare:
    """A rank's share of the predicting layer, of headers that were checked."""

    def __init__(
        self,
        shard: RankShard,
        source: Source,
        dtype: torch.dtype,
        weights: str,
        deterministic: Deterministic,
        device: torch.device,
    ) -> None:
        """shard: of models/stages.py's predictor_shard. source: of the model. weights: as `model.weights`."""
        source = source.of_predictor(shard)
        self._shard, self._source, self.in_node = shard, source, shard.samples
        # nodes that draft by themselves must draft alike, with any number of threads
        deterministic = deterministic or (self.in_node and device.type == "cpu" and Kernels.find() is not None)
        self._deterministic: Deterministic = deterministic
        self._ops = make_ops(device, dtype, weights, deterministic)
        self._stored: StoredProducts | None = make_stored_products(source, self._shard, device, deterministic, weights)
        products = frozenset[str]() if self._stored is None else self._stored.products
        self.bytes = source.rank_bytes(self._shard, dtype.itemsize, products, self._ops.matrix_bytes)

    @property
    def config(self) -> ModelConfig:
        return self._shard.config

    def block_bytes(self, block_size: int, kv_dtype: torch.dtype) -> int:
        return block_bytes(self._shard, block_size, kv_dtype)

    def load(
        self,
        model: LlamaModel,
        num_blocks: int,
        block_size: int,
        kv_dtype: torch.dtype,
        max_slots: int,
        sampler: Sampler,
        communicator: Communicator,
        attention: str = "auto",
    ) -> PredictorDrafts:
        """attention: as of make_attention."""
        reduce, exchange, ids = model.all_reduce, sampler.exchange, model.shard.vocab
        if self.in_node:
            assert communicator.node_reduce is not None
            reduce, gathers, ids = communicator.node_reduce, communicator.node_gathers, self._shard.vocab
            exchange = partial(exchanged, lambda payload: gathers.start(payload).wait())
        everywhere = self._deterministic == "everywhere"
        predictor = Predictor(model, self._shard, reduce, self._ops, self._stored, everywhere)
        predictor.load(self._source, verify=NOTHING)
        vocab_size, device = model.config.vocab_size, model.rotary.cos.device
        draws = DraftDraws(vocab_size, ids, max_slots, device, sampler.grammars, exchange, communicator.drain)
        cache = make_cache(predictor.shard, num_blocks, block_size, kv_dtype, device)
        made, _ = make_attention(attention, predictor.shard, cache, model.dtype, bool(self._deterministic))
        return PredictorDrafts(model, predictor, cache, made, draws)


class PredictorDrafts:
    """The Proposer of the predicting layer."""

    every_step = True

    def __init__(
        self,
        model: LlamaModel,
        predictor: Predictor,
        cache: KVCache,
        attention: AttentionBackend,
        draws: DraftDraws,
    ) -> None:
        self._model, self._predictor, self._draws = model, predictor, draws
        self._device, self.cache, self._attention = model.rotary.cos.device, cache, attention
        self._held: dict[int, tuple[int, list[Tensor]]] = {}
        """Of each slot the model's states whose rows are not computed yet, and the position of the first."""

    def apply(self, batch: Batch) -> None:
        for slot in batch.released:
            self._draws.release(slot)
            self._held.pop(slot, None)
        for sequence in batch.admitted:
            self._draws.admit(sequence)

    def propose(self, step: ComputedStep) -> dict[int, list[int]]:
        """Computes the rows that are due, and makes `counts` drafts for each slot."""
        chunks, rows, counts, tokens, length, layout = step
        self._hold(rows, length)
        due, given, size = list[Chunk](), dict[int, Tensor](), self.cache.block_size
        for chunk in chunks:
            slot, (start, pieces) = chunk.slot, self._held.get(chunk.slot, (0, []))
            end, decodes = start + sum(map(len, pieces)), chunk.samples and chunk.count == 1
            if pieces and decodes and not counts[slot] and end // size == start // size:
                pieces[-1] = pieces[-1].clone()  # of the whole step's
            elif pieces:
                due.append(Chunk(slot, start, end - start, counts[slot] > 0 and end == length[slot] - 1))
                given[slot] = torch.cat(self._held.pop(slot)[1])
        if not due:
            return {}
        due = in_order(due)
        behind = np.concatenate([tokens[c.slot, c.start + 1 : c.start + 1 + c.count] for c in due])
        logits, states = self._predict(torch.cat([given[chunk.slot] for chunk in due]), behind, layout, due)
        drawn = {chunk.slot: counts[chunk.slot] for chunk in due if chunk.samples}
        row_of, at = {slot: row for row, slot in enumerate(drawn)}, {slot: int(length[slot]) - 1 for slot in drawn}

        def more(slots: list[int]) -> Tensor:
            nonlocal states, row_of
            own = states[upload(np.array([row_of[slot] for slot in slots]), self._device)]
            later = [Chunk(slot, at[slot], 1, True) for slot in slots]
            for slot in slots:
                at[slot] += 1
            behind = np.array([tokens[slot, at[slot]] for slot in slots])
            logits, states = self._predict(own, behind, layout, later)
            row_of = {slot: row for row, slot in enumerate(slots)}
            return logits

        return self._draws.draft(logits, drawn, tokens, length, more)

    def _hold(self, rows: Sequence[Chunk], length: NDArray[np.int64]) -> None:
        """Holds the model's states of the step's rows, as far as the next token is known."""
        first = 0
        for row in rows:
            start, states = self._held.get(row.slot, (row.start, []))
            if start + sum(map(len, states)) != row.start:  # a sequence at its end computes its last position again
                start, states = row.start, []
            if (count := min(row.count, int(length[row.slot]) - 1 - row.start)) > 0:
                self._held[row.slot] = start, [*states, self._model.states[first : first + count]]
            first += row.count

    def _predict(
        self, states: Tensor, behind: NDArray[np.int32], layout: Layout, chunks: list[Chunk]
    ) -> tuple[Tensor, Tensor]:
        laid_out, _, rows = layout(chunks)
        ids = upload(behind.astype(np.int64), self._device)
        return self._predictor.predict(states, ids, laid_out, self._attention, rows)
