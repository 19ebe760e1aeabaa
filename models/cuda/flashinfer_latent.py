"""Attention over latents by FlashInfer's MLA wrapper on CUDA: decodes and prompts in one call, in absorbed form.

laddertron rotates, norms and writes into the cache. Plans are made like those of models/cuda/flashinfer.py: on the
host, once a step, outside of any graph. Equivalent to models/latent.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..attention import Captured, StepLayout
from ..config.latent import Latent
from ..config.shapes import Shape
from ..latent import LatentAttention, LatentCache
from ..ops import Norm
from ..transfer import carry, pinned
from .flashinfer import Contexts, contexts, pages, unfit_device
from .workspace import latent_partial_bytes, latent_unfit, prompts_of

Store = Callable[[LatentCache, int, Tensor, Norm, tuple[Tensor, Tensor], Tensor, Tensor], Tensor]
"""A replacement of LatentAttention._rotate_and_store; it may overwrite the given queries with the rotated ones."""


def unfit(
    device: torch.device, capability: tuple[int, int], dtype: torch.dtype, latent: Latent, heads: int
) -> str | None:
    """The reason why FlashInfer cannot run this model on this device, or None. heads: of this rank."""
    return unfit_device(device, capability, dtype) or latent_unfit(latent, heads)


class FlashInferLatent(LatentAttention):
    name = "flashinfer, latent"
    replayable = True
    _padding: Tensor | None = None
    """Which rows of a recorded step with prompts are padding, [T, 1, 1]: their outputs are zeroed."""
    _captured: list[int] | None = None
    """The plan with which it was recorded."""

    def __init__(
        self,
        cache: LatentCache,
        scale: float,
        heads: int,
        dtype: torch.dtype,
        latent: Latent,
        library: Any,
        store: Store | None = None,
    ) -> None:
        """heads: this rank's; dtype: of queries, latents and outputs; library: the module `flashinfer`; store: None
        uses torch."""
        super().__init__(cache, scale)
        self._mla, self._store, self._rank = library.mla, store, latent.rank
        device = cache.latents[0].device
        hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
        self._backend = "fa3" if hopper else "fa2"
        self._options = {
            "num_heads": heads,
            "head_dim_ckv": latent.rank,
            "head_dim_kpe": latent.rotated,
            "page_size": cache.block_size,
            "causal": True,
            "sm_scale": scale,
            "q_data_type": dtype,
            "kv_data_type": dtype,
        }
        size = latent_partial_bytes(latent.rank) if device.type == "cuda" else 1024
        self._workspace = torch.zeros(size, dtype=torch.uint8, device=device)
        self._make_wrapper()

    def _make_wrapper(self) -> None:
        event: Any = torch.cuda.Event
        self._planned = event() if self._workspace.is_cuda else None
        self._wrapper = self._mla.BatchMLAPagedAttentionWrapper(self._workspace, backend=self._backend)

    def twin(self) -> FlashInferLatent:
        """A copy with its own wrapper. Both share the workspace, because they compute on one stream."""
        other = copy.copy(self)
        other._make_wrapper()
        return other

    def prepare(self, layout: StepLayout, cos: Tensor, sin: Tensor) -> None:
        self.layout, self._cos, self._sin = layout, cos, sin
        device, read_contexts = self._workspace.device, contexts(layout)
        starts = np.asarray(layout.query_start, np.int32)
        if self._padding is not None:
            read_contexts, starts = _with_padding(layout, read_contexts, len(self._padding))
            tokens = layout.query_start[-1]
            self._padding[:tokens], self._padding[tokens:] = False, True
        if self._planned is not None:
            self._planned.synchronize()  # until the last plan was copied from its pinned memory
        indptr, indices, _ = pages(layout.block_table, read_contexts, self.cache.block_size, device)
        lengths = pinned(read_contexts[1].astype(np.int32), device)
        table = self._mla.MLAPlanMetadata.csr(pinned(starts, device), indptr, carry(indices, device), lengths)
        self._wrapper.plan(metadata=table, **self._options)
        if self._padding is not None:
            plan = list(map(int, self._wrapper._plan_info))
            self._captured = self._captured or plan
            self.replayable = plan == self._captured
        if self._planned is not None:
            self._planned.record()

    def attend(self, layer: int, qkv: Tensor, q_norm: Norm | None, k_norm: Norm | None) -> Tensor:
        assert k_norm is not None
        layout, latents = self._layout(), self.latents.latents[layer]
        if self._store is None:
            q = self._rotate_and_store(layer, qkv, k_norm)
        else:
            angles = self._cos, self._sin
            q = self._store(self.latents, layer, qkv, k_norm, angles, layout.blocks, layout.offsets)
        out = q.new_empty((*q.shape[:2], self._rank))
        self._wrapper.run(query=q, kv_cache=latents, out=out)
        return (out if self._padding is None else out.masked_fill_(self._padding, 0.0)).flatten(1)

    def captured(self, shapes: Sequence[Shape], most_blocks: int) -> dict[Shape, Captured]:
        """Like FlashInferAttention.captured, with padding as one more prompt."""
        sequences = {shape: shape[0] + prompts_of(shape) + bool(shape[1]) for shape in shapes}
        most, device = max(sequences.values()), self._workspace.device
        starts, indptr, lengths = (torch.zeros(most + 1, dtype=torch.int32, device=device) for _ in range(3))
        # The prompt of a step of padding alone may be longer than a sequence.
        padding = -(-max(rows for _, rows in shapes) // self.cache.block_size) + most
        indices = torch.zeros(max(most * most_blocks, padding), dtype=torch.int32, device=device)

        def of(shape: Shape) -> FlashInferLatent:
            recorded, size = copy.copy(self), sequences[shape]
            if shape[1]:
                recorded._padding = torch.zeros((sum(shape), 1, 1), dtype=torch.bool, device=device)
            recorded._wrapper = self._mla.BatchMLAPagedAttentionWrapper(
                self._workspace,
                use_cuda_graph=True,
                qo_indptr=starts[: size + 1],
                kv_indptr=indptr[: size + 1],
                kv_indices=indices,
                kv_len_arr=lengths[:size],
                backend=self._backend,
            )
            return recorded

        return {shape: of(shape) for shape in shapes}


def _with_padding(
    layout: StepLayout, read_contexts: Contexts, rows: int
) -> tuple[Contexts, np.ndarray[Any, np.dtype[np.int32]]]:
    """Contexts and query starts with the padding up to `rows` rows as one more prompt over the scratch block. The
    library chooses its kernel by the average number of rows, which is then equal in all steps of a shape."""
    tokens, scratch = layout.query_start[-1], len(layout.block_table) - 1
    indices, lengths = read_contexts
    contexts = np.append(indices, scratch), np.append(lengths, max(1, rows - tokens))
    return contexts, np.array([*layout.query_start, rows], np.int32)
