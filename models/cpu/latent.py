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
from ..ops import Norm
from .kernels import TYPES, Kernels

MOST_WIDTH = 2048
"""kernels.h's LATENT_WIDEST."""
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
    ) -> None:
        super().__init__(cache, scale, expansion)
        self._kernels, self._space = kernels, space
        self._call = bind(kernels.library.kernels_latents, c_int, c_void_p)
        self._lengths = self._starts = torch.empty(0, dtype=torch.int64)
        self._read = 0

    def prepare(self, layout: StepLayout, cos: Tensor, sin: Tensor) -> None:
        super().prepare(layout, cos, sin)
        layout = self._layout()  # without the expanded chunks
        self._lengths, self._starts = (torch.tensor(x, dtype=torch.int64) for x in (layout.kv_len, layout.query_start))
        self._read = int((layout.positions + 1).sum())

    def attend(self, layer: int, qkv: Tensor, q_norm: Norm | None, k_norm: Norm | None) -> Tensor:
        assert k_norm is not None
        layout, cache, qkv = self._layout(), self.latents.latents[layer], qkv.contiguous()
        width, rank, table = cache.shape[2], k_norm.weight.numel(), layout.block_table
        heads = qkv.shape[1] // width - 1
        out = qkv.new_empty((len(qkv), heads * rank))
        plan = _Latents(
            out.data_ptr(), qkv.data_ptr(), cache.data_ptr(), k_norm.weight.data_ptr(), self._cos.data_ptr(),
            self._sin.data_ptr(), table.data_ptr(), self._starts.data_ptr(), self._lengths.data_ptr(),
            len(layout.kv_len), heads, rank, width - rank, cache.shape[1], table.stride(0), self._space, self.scale,
            k_norm.eps, TYPES[qkv.dtype], self._kernels.threads if self._read * heads * width >= SHARED_WORK else 1,
        )  # fmt: skip
        if self._call(ctypes.addressof(plan)):
            raise MemoryError(f"the kernel of latent attention could not allocate its scratch space, {len(qkv)} tokens")
        return out


def fits_kernels(cache: LatentCache, dtype: torch.dtype) -> bool:
    """Whether CpuLatentAttention can serve: latents in the model's own dtype, fp32, bf16 or fp16, on a CPU."""
    stored = cache.latents[0]
    own = stored.device.type == "cpu" and stored.dtype == dtype and dtype in TYPES
    return own and stored.shape[2] <= MOST_WIDTH
