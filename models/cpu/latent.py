"""Attention over latents on a CPU by the C kernels (models/cpu/latent.c). Means what models/latent.py means.

Prompts, decodes and drafts by one kernel, in which a row does not depend on the others: under `deterministic` too.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from ...topology.transport.native import bind
from ..attention import StepLayout
from ..config.latent import Expansion
from ..latent import LatentAttention, LatentCache
from ..ops import Norm, rotate
from .kernels import TYPES, Kernels

MOST_WIDTH = 2048
"""kernels.h's LATENT_WIDEST, and twice index.c's INDEX_WIDEST."""
SPACE = 16 << 20
"""Bytes of a call's sums of chunks: a step that has more is computed in waves."""
SHARED_WORK = 1 << 20
"""Positions times heads times width from which a layer's attention is worth waking the other threads for."""


class _Latents(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("out", "x", "cache", "norm", "cos", "sin", "table", "start", "length")),
        *((name, c_int64) for name in ("sequences", "heads", "rank", "rotary", "block_size", "table_stride")),
        ("space", c_int64),
        ("scale", c_float),
        ("eps", c_float),
        ("type", c_int32),
        ("threads", c_int32),
        ("chosen", c_void_p),
        ("seen", c_void_p),
        ("topk", c_int64),
    ]


class _Index(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("chosen", "digest", "q", "weight", "keys", "table", "start", "length")),
        *((name, c_int64) for name in ("sequences", "heads", "dim", "topk", "block_size", "table_stride", "space")),
        ("type", c_int32),
        ("threads", c_int32),
    ]


class CpuLatentAttention(LatentAttention):
    """One kernel call a layer: the latent's norm, rotation, cache write and attention."""

    name = "cpu, latent"
    _masks_prompts = _masks_decodes = False

    def __init__(
        self,
        cache: LatentCache,
        scale: float,
        kernels: Kernels,
        *,
        space: int = SPACE,
        expansion: Expansion | None = None,
        topk: int | None = None,
    ) -> None:
        super().__init__(cache, scale, expansion, topk)
        self._kernels, self._space = kernels, space
        self._call = bind(kernels.library.kernels_latents, c_int, c_void_p)
        self._index_call = bind(kernels.library.kernels_index, c_int, c_void_p)
        self._lengths = self._starts = self._attended = torch.empty(0, dtype=torch.int64)
        self._read = 0

    def prepare(self, layout: StepLayout, cos: Tensor, sin: Tensor) -> None:
        super().prepare(layout, cos, sin)
        layout = self._layout()  # without the expanded chunks
        self._lengths, self._starts = (torch.tensor(x, dtype=torch.int64) for x in (layout.kv_len, layout.query_start))
        positions = layout.positions + 1
        self._attended = positions if self._topk is None else positions.clamp(max=self._topk)
        self._read = int(self._attended.sum())

    def attend(self, layer: int, qkv: Tensor, q_norm: Norm | None, k_norm: Norm | None) -> Tensor:
        assert k_norm is not None
        layout, cache, qkv = self._layout(), self.latents.latents[layer], qkv.contiguous()
        width, rank, table = cache.shape[2], k_norm.weight.numel(), layout.block_table
        heads = qkv.shape[1] // width - 1
        out = qkv.new_empty((len(qkv), heads * rank))
        chosen = self._own_choice() if self.sparse else None
        plan = _Latents(
            out.data_ptr(), qkv.data_ptr(), cache.data_ptr(), k_norm.weight.data_ptr(), self._cos.data_ptr(),
            self._sin.data_ptr(), table.data_ptr(), self._starts.data_ptr(), self._lengths.data_ptr(),
            len(layout.kv_len), heads, rank, width - rank, cache.shape[1], table.stride(0), self._space, self.scale,
            k_norm.eps, TYPES[qkv.dtype], self._kernels.threads if self._read * heads * width >= SHARED_WORK else 1,
            *((None, None, 0) if chosen is None else (chosen.data_ptr(), self._attended.data_ptr(), chosen.shape[1])),
        )  # fmt: skip
        if self._call(ctypes.addressof(plan)):
            raise MemoryError(f"the kernel of latent attention could not allocate its scratch space, {len(qkv)} tokens")
        return out

    def _own_choice(self) -> Tensor:
        """The choice of the rows that `attend` takes."""
        return self.chosen[self.absorbed] if self.expanded else self.chosen

    def choose(self, layer: int, queries: Tensor, weights: Tensor) -> Tensor:
        (layout, cos, sin), keys, topk = self._rows, self.latents.index_keys[layer], self._topk
        assert keys is not None
        assert topk is not None
        tokens, heads, dim = queries.shape
        queries, weights = rotate(queries, cos, sin).contiguous(), weights.contiguous()
        self.chosen = torch.empty((tokens, topk), dtype=torch.int32)
        digest = torch.empty(tokens, dtype=torch.int64)
        starts, lengths = (torch.tensor(x, dtype=torch.int64) for x in (layout.query_start, layout.kv_len))
        plan = _Index(
            self.chosen.data_ptr(), digest.data_ptr(), queries.data_ptr(), weights.data_ptr(), keys.data_ptr(),
            layout.block_table.data_ptr(), starts.data_ptr(), lengths.data_ptr(), len(layout.kv_len), heads, dim, topk,
            keys.shape[1], layout.block_table.stride(0), self._space, TYPES[queries.dtype], self._kernels.threads,
        )  # fmt: skip
        if self._index_call(ctypes.addressof(plan)):
            raise MemoryError(f"the kernel of the index could not allocate its scratch space, {tokens} tokens")
        return digest


def fits_kernels(cache: LatentCache, dtype: torch.dtype) -> bool:
    """Whether CpuLatentAttention can serve: latents in the model's own dtype, fp32, bf16 or fp16, on a CPU."""
    stored = cache.latents[0]
    own = stored.device.type == "cpu" and stored.dtype == dtype and dtype in TYPES
    wide = max([stored.shape[2] // 2, *(keys.shape[2] for keys in cache.index_keys if keys is not None)])
    return own and wide <= MOST_WIDTH // 2
