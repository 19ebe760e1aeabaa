"""Paged attention by FlashInfer on CUDA (the extra `cuda`). Blocks of the cache are its pages, in its HND layout.

laddertron computes QK norm and rotation and writes into the cache; the library only reads the cache. Plans are made on
the host, once a step and window, outside of any graph; `captured` makes backends for decode steps of one padded size
with persistent buffers. Implements the interface of models/attention.py.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..attention import Captured, KVCache, StepLayout, TorchAttention, rotate_and_store
from ..config.shapes import Shape
from ..ops import Norm
from ..transfer import carry, pinned, upload
from .workspace import HEAD_DIMS, TENSOR_CORES_FROM, most_rows, partial_bytes, prompts_of

OLDEST = 0, 7, 2
"""The first version whose partial results fit into workspace.py's reserve and that has MLAPlanMetadata."""
QUERY_DTYPES = (torch.float16, torch.bfloat16)

Pages = tuple[Tensor, Tensor, Tensor]
Contexts = tuple[np.ndarray[Any, np.dtype[Any]], np.ndarray[Any, np.dtype[Any]]]
"""The block table's row and the number of positions of each of n contexts."""
Norms = tuple[Norm | None, Norm | None]
Store = Callable[[KVCache, int, Tensor, Norms, tuple[Tensor, Tensor], Tensor, Tensor], Tensor]
"""A replacement of models/attention.py's rotate_and_store that returns only the queries, times the factors of the
stored keys that they meet."""


def store_by_torch(cache: KVCache, layer: int, *arguments: Any) -> Tensor:
    queries = rotate_and_store(cache, layer, *arguments)[0]
    if cache.scales is None:
        return queries
    return (queries * of_queries(cache.scales[0][layer], queries.shape[1])).to(queries.dtype)


def of_queries(scale: Tensor, heads: int) -> Tensor:
    """The factors [H, 1] of query heads, from those of KV heads [K]."""
    return scale.repeat_interleave(heads // len(scale)).unsqueeze(1)


def prompt_kernel(capability: tuple[int, int], kv_dtype: torch.dtype) -> str:
    """The kernel of the library that computes prompts: FA3 exists for Hopper alone. Decodes are computed by FA2's."""
    if capability[0] != 9:
        return "FA2"
    return "FA2, as FA3 reads no fp8 keys for 16-bit queries" if kv_dtype.itemsize == 1 else "FA3"


def too_old(version: str) -> str | None:
    """The reason why this version of the library cannot be used, or None."""
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    if numbers is None or tuple(map(int, numbers.groups())) >= OLDEST:
        return None
    oldest = ".".join(map(str, OLDEST))
    return f"its version {version} is older than {oldest}: install flashinfer-python {oldest} or newer"


def unfit_device(device: torch.device, capability: tuple[int, int], dtype: torch.dtype) -> str | None:
    """The reason why FlashInfer cannot run on this device, or None. capability: of the CUDA device."""
    if device.type != "cuda":
        return f"it needs a CUDA device, not {device.type}"
    if capability < (8, 0):
        return f"it needs compute capability 8.0, this GPU has {capability[0]}.{capability[1]}"
    if dtype not in QUERY_DTYPES:
        return f"it computes in bfloat16 or float16, not {str(dtype).removeprefix('torch.')}"
    return None


def unfit(device: torch.device, capability: tuple[int, int], dtype: torch.dtype, head_dim: int) -> str | None:
    """The reason why FlashInfer cannot run this model on this device, or None."""
    if reason := unfit_device(device, capability, dtype):
        return reason
    if head_dim not in HEAD_DIMS:
        return f"it has kernels for head dimensions {', '.join(map(str, HEAD_DIMS))}, not {head_dim}"
    return None


def contexts(layout: StepLayout) -> Contexts:
    """The context of each sequence."""
    rows = np.arange(len(layout.kv_len)) if layout.rows is None else layout.rows
    return rows, np.asarray(layout.kv_len, np.int64)


def contexts_of_tokens(layout: StepLayout) -> Contexts:
    """The context of each token, which ends with the token itself."""
    counts = np.diff(layout.query_start)
    behind = np.repeat(np.asarray(layout.kv_len) - layout.query_start[1:], counts)
    return np.repeat(contexts(layout)[0], counts), behind + np.arange(1, layout.query_start[-1] + 1)


def pages(table: Tensor, contexts: Contexts, size: int, device: torch.device) -> Pages:
    """FlashInfer's page table of n contexts in blocks of `size` positions, int32: indptr [n + 1] and the number of
    positions in each last page [n] on the host, pinned for `device`; the page indices [indptr[n]] on the block table's
    device, where they are gathered: the host's work does not grow with them."""
    rows, lengths = contexts
    counts = -(-lengths // size)
    indptr = np.concatenate(([0], np.cumsum(counts)))
    # Page j of sequence i is entry (i, j) of the block table; a flat index, since a mask would synchronize the device.
    first, repeats = upload(np.stack((rows * table.shape[1] - indptr[:-1], counts)), table.device)
    total = int(indptr[-1])
    flat = torch.repeat_interleave(first, repeats, output_size=total).add_(torch.arange(total, device=table.device))
    indices = table.flatten()[flat].int()
    last_page = lengths - (counts - 1) * size
    return pinned(indptr.astype(np.int32), device), indices, pinned(last_page.astype(np.int32), device)


class FlashInferAttention(TorchAttention):
    """Uses the decode wrapper for decodes and the prefill wrapper for longer chunks; one of each for every window."""

    name = "flashinfer"
    by_row = False
    """Whether every token is computed as a decode of its own."""
    replayable = True
    _out: Tensor | None = None
    """The outputs of a recorded step with prompts, for all layers in turn: rows after the last prompt stay zero."""
    _captured: list[list[int]] | None = None
    """The plans for prompts with which a step was recorded."""

    def __init__(
        self,
        cache: KVCache,
        windows: tuple[int | None, ...],
        scale: float,
        heads: int,
        dtype: torch.dtype,
        library: Any,
        store: Store = store_by_torch,
    ) -> None:
        """heads: this rank's query heads; dtype: of queries and outputs; library: the module `flashinfer`."""
        super().__init__(cache, windows, scale)
        self._library, self.store = library, store
        kv_heads, dim = cache.keys[0].shape[1::2]
        self._shape = heads, kv_heads, dim, cache.block_size
        self._dtypes = {"q_data_type": dtype, "kv_data_type": cache.keys[0].dtype}
        self._tensor_cores = self.by_row or heads // kv_heads >= TENSOR_CORES_FROM
        self._workspace = self._room()
        self._value_scales = None if cache.scales is None else [of_queries(scale, heads) for scale in cache.scales[1]]
        self._make_wrappers()

    def _room(self, *recorded: int) -> Tensor:
        """Allocates the workspace for partial results, of partial_bytes."""
        device = self.cache.keys[0].device
        size = partial_bytes(*self._shape[:3], *recorded) if device.type == "cuda" else 1024
        return torch.zeros(size, dtype=torch.uint8, device=device)

    def _make_wrappers(self) -> None:
        event: Any = torch.cuda.Event
        self._planned = event() if self._workspace.is_cuda else None
        self._decoders = {window: self._decoder() for window in set(self.windows)}
        self._prefillers = {
            window: self._library.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "HND")
            for window in set(self.windows)
        }

    def twin(self) -> FlashInferAttention:
        """A copy with its own wrappers. Both share the workspace, because they compute on one stream."""
        other = copy.copy(self)
        other._make_wrappers()
        return other

    def _decoder(self, **buffers: Any) -> Any:
        return self._library.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, "HND", use_tensor_cores=self._tensor_cores, **buffers
        )

    def _options(self, window: int | None) -> dict[str, Any]:
        """Plan options. FlashInfer's window counts positions to the left of a token; ours includes the token."""
        return {"sm_scale": self.scale, "window_left": -1 if window is None else window - 1, **self._dtypes}

    def prepare(self, layout: StepLayout, cos: Tensor, sin: Tensor) -> None:
        self.layout, self._cos, self._sin = layout, cos, sin
        device, (rows, lengths) = self.cache.keys[0].device, contexts(layout)
        decode, sequences = layout.decode, len(lengths)
        self._wait_for_last_plan()
        if decode:
            self._plan_decodes((rows[:decode], lengths[:decode]))
        if decode < sequences:
            after = rows[decode:], lengths[decode:]
            indptr, indices, last_page = pages(layout.block_table, after, self.cache.block_size, device)
            starts = np.asarray(layout.query_start[decode:], np.int32) - layout.query_start[decode]
            given = pinned(starts, device), indptr, carry(indices, device), last_page, *self._shape
            seq_lens = pinned(lengths[decode:].astype(np.int32), device)  # else the wrapper computes and copies its own
            for window, wrapper in self._prefillers.items():
                wrapper.plan(*given, causal=True, seq_lens=seq_lens, **self._options(window))
        if self._out is not None:
            self._compare_plans(layout.query_start[-1])
        self._note_plan()

    def _compare_plans(self, tokens: int) -> None:
        assert self._out is not None
        self._out[tokens:].zero_()
        plans = [list(map(int, wrapper._plan_info)) for wrapper in self._prefillers.values()]
        if self._captured is None:
            self._captured = plans
        self.replayable = plans == self._captured

    def _wait_for_last_plan(self) -> None:
        """Waits until the last plan was copied from the wrappers' pinned memory, which the next plan overwrites: the
        host must not run two steps ahead."""
        if self._planned is not None:
            self._planned.synchronize()

    def _note_plan(self) -> None:
        if self._planned is not None:
            self._planned.record()

    def _plan_decodes(self, contexts: Contexts) -> None:
        device = self.cache.keys[0].device
        indptr, indices, last_page = pages(self._layout().block_table, contexts, self.cache.block_size, device)
        # A captured wrapper would copy indices from the host only after all queued work of the device.
        table = indptr, carry(indices, device), last_page
        for window, wrapper in self._decoders.items():
            wrapper.plan(*table, *self._shape, **self._options(window))

    def attend(self, layer: int, qkv: Tensor, q_norm: Norm | None, k_norm: Norm | None) -> Tensor:
        layout, tokens, window = self._layout(), len(qkv), self.windows[layer]
        decode, angles = layout.decode, (self._cos, self._sin)
        q = self.store(self.cache, layer, qkv, (q_norm, k_norm), angles, layout.blocks, layout.offsets)
        stored = self.cache.keys[layer], self.cache.values[layer]
        out = torch.empty_like(q) if self._out is None else self._out
        for wrappers, rows in ((self._decoders, slice(0, decode)), (self._prefillers, slice(decode, tokens))):
            if rows.start == rows.stop:
                continue
            scores = wrappers[window].run(q[rows], stored, out=out[rows], return_lse=bool(self.sinks))
            if self.sinks:  # the library's sums of exponentials are logarithms to base 2
                share = torch.sigmoid(scores[1] * math.log(2) - self.sinks[layer])
                out[rows].mul_(share.nan_to_num_(0.0).unsqueeze(-1))
        if self._value_scales is not None:
            out.mul_(self._value_scales[layer])
        return out.flatten(1)

    def captured(self, shapes: Sequence[Shape], most_blocks: int) -> dict[Shape, Captured]:
        """Makes a backend for each shape. They share their buffers, so prepare and replay one step at a time. Between
        replays only `prepare` changes the buffers."""
        rows, recording, device = most_rows(shapes), copy.copy(self), self.cache.keys[0].device
        if device.type == "cuda" and partial_bytes(*self._shape[:3], *rows) > len(self._workspace):
            recording._workspace = self._room(*rows)
        decoders = recording._captured_decoders({size for size, _ in shapes if size}, most_blocks)
        prefillers = recording._captured_prefillers(shapes, most_blocks)
        heads, _, dim, _ = self._shape
        out = torch.zeros(
            (max(map(sum, shapes)) if any(rows[1:]) else 0, heads, dim),
            dtype=self._dtypes["q_data_type"],
            device=device,
        )

        def of(shape: Shape) -> FlashInferAttention:
            recorded = copy.copy(recording)
            recorded._decoders = decoders.get(shape[0], {})
            if shape[1]:
                recorded._prefillers, recorded._out = prefillers[shape], out[: sum(shape)]
            return recorded

        return {shape: of(shape) for shape in shapes}

    def _table_buffers(self, most: int, most_blocks: int, rows: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """For `most` sequences of most_blocks blocks. rows: of the prompt that a step of padding alone has, beside
        sequences of one row; it may be longer than a sequence."""
        device, pages = self.cache.keys[0].device, max(most * most_blocks, -(-rows // self.cache.block_size) + most)
        indptr, indices = (torch.zeros(n, dtype=torch.int32, device=device) for n in (most + 1, pages))
        return indptr, indices, torch.ones(most, dtype=torch.int32, device=device)

    def _captured_decoders(self, sizes: set[int], most_blocks: int) -> dict[int, dict[int | None, Any]]:
        indptr, indices, last_page = self._table_buffers(max(sizes, default=0), most_blocks)
        return {
            size: {
                window: self._decoder(
                    use_cuda_graph=True,
                    paged_kv_indptr_buffer=indptr[: size + 1],
                    paged_kv_indices_buffer=indices,
                    paged_kv_last_page_len_buffer=last_page[:size],
                )
                for window in self._decoders
            }
            for size in sizes
        }

    def _captured_prefillers(self, shapes: Sequence[Shape], most_blocks: int) -> dict[Shape, dict[int | None, Any]]:
        """The wrappers of each shape with prompts or drafts. A wrapper takes as many rows as its first plan has, which
        therefore must have all. Drafts are computed by FA2, as decodes are: it splits a context among multiprocessors
        and reads it once for all query heads and rows of a tile, which FA3 does not."""
        most = max(map(prompts_of, shapes))
        indptr, indices, last_page = self._table_buffers(most, most_blocks, max(rows for _, rows in shapes))
        starts = torch.zeros_like(indptr)

        def made(prompts: int, backend: str) -> dict[int | None, Any]:
            return {
                window: self._library.BatchPrefillWithPagedKVCacheWrapper(
                    self._workspace,
                    "HND",
                    use_cuda_graph=True,
                    qo_indptr_buf=starts[: prompts + 1],
                    paged_kv_indptr_buf=indptr[: prompts + 1],
                    paged_kv_indices_buf=indices,
                    paged_kv_last_page_len_buf=last_page[:prompts],
                    backend=backend,
                )
                for window in self._prefillers
            }

        kinds = {(bool(shape[0]), shape[1]): prompts_of(shape) for shape in shapes if shape[1]}
        wrappers = {kind: made(prompts, "auto" if kind[0] else "fa2") for kind, prompts in kinds.items()}
        return {shape: wrappers[bool(shape[0]), shape[1]] for shape in shapes if shape[1]}


class FlashInferRows(FlashInferAttention):
    """`parallel.deterministic`: computes every token as a decode by the tensor-core kernel and never splits its context
    among multiprocessors, which makes FlashInfer's results independent of the batch."""

    name = "flashinfer, a row by itself"
    by_row = True

    def _options(self, window: int | None) -> dict[str, Any]:
        return {**super()._options(window), "disable_split_kv": True}

    def prepare(self, layout: StepLayout, cos: Tensor, sin: Tensor) -> None:
        tokens = len(layout.positions)
        self.layout, self._cos, self._sin = replace(layout, decode=tokens), cos, sin
        rows, lengths = contexts_of_tokens(layout)
        if padding := tokens - len(rows):  # of a recorded step with prompts: each attends to the scratch block alone
            scratch = len(layout.block_table) - 1
            rows = np.concatenate((rows, np.full(padding, scratch)))
            lengths = np.concatenate((lengths, np.ones(padding, np.int64)))
        self._wait_for_last_plan()
        self._plan_decodes((rows, lengths))
        self._note_plan()

    def captured(self, shapes: Sequence[Shape], most_blocks: int) -> dict[Shape, Captured]:
        alone = super().captured([(sum(shape), 0) for shape in shapes], most_blocks)
        return {shape: alone[sum(shape), 0] for shape in shapes}
