"""Attention on a CPU by C kernels: models/cpu/attend.c for decodes, models/cpu/attend_prompts.c for bf16 prompts. Torch
computes the prompts that this kernel does not: other types and head dimensions, processors without AVX-512 BF16 and,
unless `deterministic`, with AMX.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int32, c_int64, c_void_p
from dataclasses import replace

import torch
from torch import Tensor

from ...topology.hardware import cpu_tier
from ..attention import KVCache, StepLayout, TorchAttention
from ..ops import Norm, Product, RunningSum
from .kernels import TYPES, Kernels
from .product import FEW_TOKENS, CpuProduct, sub_block

MOST_HEAD_DIM = 1024
"""The largest head dimension: the decode kernel's scratch space for one head."""
SHARED_WORK = 1024
"""Positions times KV heads of a step above which attention uses the other threads."""


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("keys", "values", "q_norm", "k_norm", "sinks")),
        ("window", c_int64),
        ("eps", c_float),
        ("type", c_int32),
    ]


class _Step(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("cos", "sin", "table", "length")),
        *((name, c_int64) for name in ("rows", "kv_heads", "dim", "rotary", "block_size", "table_stride")),
        ("scale", c_float),
        ("threads", c_int32),
    ]


class _Prompts(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("out", "qkv", "keys", "values", "cos", "sin", "q_norm", "k_norm")),
        *((name, c_void_p) for name in ("table", "start", "length")),
        *((name, c_int64) for name in ("sequences", "heads", "kv_heads", "dim", "rotary", "block_size")),
        *((name, c_int64) for name in ("table_stride", "window")),
        ("scale", c_float),
        ("eps", c_float),
        ("next", c_int64),
        ("failed", c_int),
        ("sinks", c_void_p),
    ]


class CpuAttention(TorchAttention):
    """One kernel call per layer for the decodes and one for the prompts: QK norm, rotation, cache write, attention. In
    a step of decodes alone the products around it are in the same call."""

    name = "cpu"
    _masks_decodes = False

    def __init__(self, cache: KVCache, windows: tuple[int | None, ...], scale: float, kernels: Kernels) -> None:
        super().__init__(cache, windows, scale)
        self.kernels = kernels
        self._lengths = self._starts = torch.empty(0, dtype=torch.int64)
        self._prompt_threads = kernels.threads
        stored = cache.keys[0]
        self._layers: dict[int, tuple[int, _Layer, Norm | None, Norm | None]] = {}
        """The address of each layer's structure, what keeps it, and the norms that it points to."""
        self._step = _Step()
        self._stages: tuple[int, ...] = (0,)
        """kernels.h's stages of the decodes."""
        self._own_prompts = stored.dtype == torch.bfloat16 and kernels.has_prompts(stored.shape[3]) == 1
        self._own_prompts &= kernels.deterministic or cpu_tier.current() != "amx"
        self._masks_prompts = not self._own_prompts

    def prepare(self, layout: StepLayout, cos: Tensor, sin: Tensor) -> None:
        super().prepare(layout, cos, sin)
        self._lengths = torch.tensor(layout.kv_len, dtype=torch.int64)
        self._starts = torch.tensor(layout.query_start, dtype=torch.int64)
        self._stages = (1, 2) if layout.chained else (0,)
        keys, table = self.cache.keys[0], layout.block_table
        work = sum(layout.kv_len[: layout.decode]) * keys.shape[1]
        self._step = _Step(
            self._cos.data_ptr(), self._sin.data_ptr(), table.data_ptr(), self._lengths.data_ptr(), layout.decode,
            keys.shape[1], keys.shape[3], 2 * self._cos.shape[-1], self.cache.block_size, table.stride(0), self.scale,
            self.kernels.threads if work >= SHARED_WORK else 1,
        )  # fmt: skip

    def sub_block(
        self,
        layer: int,
        residual: Tensor | RunningSum,
        qkv: Product,
        o: Product,
        q_norm: Norm | None,
        k_norm: Norm | None,
    ) -> Tensor:
        """o(attend(qkv(residual)))."""
        layout = self._layout()
        few = layout.decode == len(layout.positions) <= FEW_TOKENS and self._stages == (0,)
        if few and isinstance(qkv, CpuProduct) and isinstance(o, CpuProduct):
            return sub_block(qkv, o, residual, (self._layer(layer, q_norm, k_norm), ctypes.addressof(self._step)))
        return o(self.attend(layer, qkv(residual), q_norm, k_norm))  # type: ignore[arg-type]  # a product after a norm

    def _layer(self, layer: int, q_norm: Norm | None, k_norm: Norm | None) -> int:
        address, _, *norms = self._layers.get(layer, (0, None, None, None))
        if not address or norms[0] is not q_norm or norms[1] is not k_norm:
            keys, values = self.cache.keys[layer], self.cache.values[layer]
            made = _Layer(
                keys.data_ptr(),
                values.data_ptr(),
                None if q_norm is None else q_norm.weight.data_ptr(),
                None if k_norm is None else k_norm.weight.data_ptr(),
                self._sinks_of(layer),
                self.windows[layer] or 0,
                0.0 if q_norm is None else q_norm.eps,
                TYPES[keys.dtype],
            )
            address = ctypes.addressof(made)
            self._layers[layer] = address, made, q_norm, k_norm
        return address

    def _decode(self, layer: int, qkv: Tensor, q_norm: Norm | None, k_norm: Norm | None) -> Tensor:
        step, width = self._step, qkv.shape[1]
        out = qkv.new_empty((step.rows, width - 2 * step.kv_heads * step.dim))
        addresses = self._layer(layer, q_norm, k_norm), ctypes.addressof(step), out.data_ptr(), qkv.data_ptr()
        if any(self.kernels.attend(*addresses, width, stage) for stage in self._stages):
            raise MemoryError("the attention kernel could not allocate its scratch space")
        return out

    def _sinks_of(self, layer: int) -> int | None:
        return self.sinks[layer].data_ptr() if self.sinks else None

    def _prompts(self, layer: int, qkv: Tensor, q_norm: Norm | None, k_norm: Norm | None) -> Tensor:
        if not self._own_prompts:
            return super()._prompts(layer, qkv, q_norm, k_norm)
        layout, cache = self._layout(), self.cache
        keys, values, decode = cache.keys[layer], cache.values[layer], layout.decode
        kv_heads, dim = keys.shape[1], keys.shape[3]
        heads = qkv.shape[1] // dim - 2 * kv_heads
        out = qkv.new_empty((qkv.shape[0], heads * dim))  # row t is token t's; the rows of decodes are unused
        table = layout.block_table[decode:]
        plan = _Prompts(
            out.data_ptr(), qkv.data_ptr(), keys.data_ptr(), values.data_ptr(),
            self._cos.data_ptr(), self._sin.data_ptr(),
            None if q_norm is None else q_norm.weight.data_ptr(),
            None if k_norm is None else k_norm.weight.data_ptr(),
            table.data_ptr(), self._starts[decode:].data_ptr(), self._lengths[decode:].data_ptr(),
            len(layout.kv_len) - decode, heads, kv_heads, dim, 2 * self._cos.shape[-1], cache.block_size,
            table.stride(0), self.windows[layer] or 0, self.scale, 0.0 if q_norm is None else q_norm.eps, 0, 0,
            self._sinks_of(layer),
        )  # fmt: skip
        if self.kernels.attend_prompts(ctypes.addressof(plan), self._prompt_threads):
            raise MemoryError("the attention kernel could not allocate its scratch space")
        return out[decode:]


class RowAttention(CpuAttention):
    """Attention with `parallel.deterministic`: one kernel for every token (the prompt kernel if it supports the type,
    else the decode kernel), which divides a context into parts independently of the rest of the step. All keys and
    values of a step are stored before any token attends."""

    name = "cpu, a row by itself"

    def prepare(self, layout: StepLayout, cos: Tensor, sin: Tensor) -> None:
        if self._own_prompts:
            super().prepare(replace(layout, decode=0), cos, sin)
            first = layout.query_start
            met = sum(n * (b - a) for n, a, b in zip(layout.kv_len, first, first[1:], strict=False))
            work = met * self.cache.keys[0].shape[1]
            self._prompt_threads = self.kernels.threads if work >= SHARED_WORK else 1
            return
        tokens, starts = len(layout.positions), torch.tensor(layout.query_start)
        one_each = replace(
            layout,
            query_start=list(range(tokens + 1)),
            kv_len=(layout.positions + 1).tolist(),
            block_table=layout.block_table.repeat_interleave(starts.diff(), 0),
            decode=tokens,
            chained=layout.chained or layout.decode < tokens,
        )
        super().prepare(one_each, cos, sin)

    def attend(self, layer: int, qkv: Tensor, q_norm: Norm | None, k_norm: Norm | None) -> Tensor:
        return (self._prompts if self._own_prompts else self._decode)(layer, qkv, q_norm, k_norm)


def fits_kernels(cache: KVCache, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether CpuAttention supports this cache: on a CPU, in the model's dtype, which is fp32, bf16 or fp16."""
    stored = cache.keys[0]
    return stored.device.type == "cpu" and stored.dtype == dtype and dtype in TYPES and head_dim <= MOST_HEAD_DIM
