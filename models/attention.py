"""Paged attention: the KV cache in fixed-size blocks, the interface of attention backends, and a portable backend in
torch. A backend gets the step's layout once (`prepare`). For every layer `attend` gets the output of the fused
projection, rotates it, stores the new keys and values, and attends to all keys of each sequence.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from .config.shapes import Shape
from .ops import Norm, rms_norm, rotate
from .pages import HugePages
from .stages import RankShard
from .transfer import upload
from .weights.tensor_reader import FP8

_LARGEST = torch.finfo(FP8).max


def block_bytes(shard: RankShard, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block on one rank: block_size positions, all layers, keys and values, or latents and index keys."""
    return block_size * shard.cached_elements * dtype.itemsize


class KVCache:
    """`keys[l]` and `values[l]` are [blocks, K, block_size, C], so that the positions of a head are contiguous."""

    values_are_keys = False

    def __init__(
        self, shard: RankShard, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.scales: tuple[Tensor, Tensor] | None = None
        """Factors of stored keys and stored values, [layers, K] each in fp32; None: 1."""
        self.draft_cache: KVCache | None = None
        """Another cache of the same blocks, which are copied and cleaned with these."""
        shape = (num_blocks, shard.num_kv_heads, block_size, shard.config.head_dim)
        layers, self._pages, self._device = range(shard.config.num_layers), HugePages(), device
        self.keys = [self._zeros(shape, dtype) for _ in layers]
        self.values = self.keys if self.values_are_keys else [self._zeros(shape, dtype) for _ in layers]

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        # not empty: positions after a sequence's end are masked, but NaN times a weight of zero is still NaN.
        if self._device.type == "cpu":
            return self._pages.take(torch.Size(shape).numel() * dtype.itemsize).view(dtype).view(shape)
        return torch.zeros(shape, dtype=dtype, device=self._device)

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of the cache."""
        return self.keys if self.values_are_keys else [*self.keys, *self.values]

    @property
    def _every(self) -> list[Tensor]:
        return self.tensors if self.draft_cache is None else [*self.tensors, *self.draft_cache.tensors]

    def write(self, layer: int, blocks: Tensor, offsets: Tensor, keys: Tensor, values: Tensor) -> None:
        """Stores keys and values [T, K, C] at (blocks[t], offsets[t])."""
        if self.scales is not None:
            keys, values = (x / scale[layer, :, None] for x, scale in zip((keys, values), self.scales, strict=True))
        self.keys[layer][blocks, :, offsets] = self._stored(keys)
        self.values[layer][blocks, :, offsets] = self._stored(values)

    def _stored(self, x: Tensor) -> Tensor:
        """Converts to the cache's dtype. fp8 saturates, so that a large key does not become NaN."""
        dtype = self.keys[0].dtype
        return (x.clamp(-_LARGEST, _LARGEST) if dtype == FP8 else x).to(dtype)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies whole blocks src -> dst in every layer (copy-on-write)."""
        if not pairs:
            return
        source, target = upload(np.array(pairs, np.int64).T.copy(), self.keys[0].device)
        for tensor in self._every:
            tensor[target] = tensor[source]

    def zero_blocks(self, blocks: Sequence[int]) -> None:
        """Replaces NaN and Inf by zeros in these blocks, which will be reused: a masked position has a weight of zero,
        but zero times NaN is NaN."""
        if not blocks:
            return
        index = upload(np.array(blocks, np.int64), self.keys[0].device)
        for tensor in self._every:
            cached = tensor[index]
            wide = cached.float() if cached.dtype == FP8 else cached  # torch has no nan_to_num for fp8
            tensor[index] = torch.nan_to_num(wide, nan=0.0, posinf=0.0, neginf=0.0).to(cached.dtype)


@dataclass(frozen=True, slots=True)
class StepLayout:
    """The layout of a step's T tokens: N sequences in token order, of which the first `decode` have one token each.
    Tensors are int64 on the model's device. positions [T]. query_start [N + 1] and kv_len [N] (positions after this
    step): host lists. block_table: row i, undefined after the sequence's own blocks, is sequence i's, or row rows[i] of
    a table of all slots, whose last row has the scratch block. blocks, offsets [T]: where each token's keys are stored.
    chained: some decodes are consecutive tokens of one sequence, so all keys must be stored before any of them
    attends."""

    positions: Tensor
    query_start: list[int]
    kv_len: list[int]
    block_table: Tensor
    blocks: Tensor
    offsets: Tensor
    decode: int
    chained: bool = False
    rows: NDArray[np.int64] | None = None


class AttentionBackend(Protocol):
    name: str

    def prepare(self, layout: StepLayout, cos: Tensor, sin: Tensor) -> None:
        """Prepares a step for all layers. cos, sin: of the tokens' rotary angles, [T, 1, R / 2], fp32."""

    def attend(self, layer: int, qkv: Tensor, q_norm: Norm | None, k_norm: Norm | None) -> Tensor:
        """qkv [T, (H + 2K) * C], before QK norm and rotation -> outputs [T, H * C]."""

    def twin(self) -> AttentionBackend:
        """A second backend over the same cache with its own plan, for a step's second stream."""


class Captured(AttentionBackend, Protocol):
    """A backend of a recorded step. `replayable`: whether the last plan launches what was captured; if not, the step
    must be computed eagerly. Equal on all ranks."""

    replayable: bool


@runtime_checkable
class Capturable(Protocol):
    """A backend whose steps can be captured and replayed (engine/step/cuda_graphs.py). It reads nothing after a
    sequence's last position, so a step may start before the previous step's ids, or NaN, are known
    (engine/step/runner.py)."""

    def captured(self, shapes: Sequence[Shape], most_blocks: int) -> dict[Shape, Captured]:
        """Backends for steps of exactly so many decodes and, if the second number is not 0, MOST_PROMPTS prompts
        (workspace.py) of at most so many rows together, with at most most_blocks blocks per sequence. `prepare` is not
        captured: it is called before each replay, with the captured tensors of the tokens and a block table whose last
        row is the scratch block's. The plan of the capture has all rows.
        `attend` is captured and may read only tensors with fixed addresses; its output for rows after the last prompt
        does not depend on earlier steps."""


def rotate_and_store(
    cache: KVCache,
    layer: int,
    qkv: Tensor,
    norms: tuple[Norm | None, Norm | None],
    angles: tuple[Tensor, Tensor],
    blocks: Tensor,
    offsets: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Splits qkv [T, (H + 2K) * C], normalises queries and keys, rotates them by angles [T, 1, R / 2], and stores keys
    and values at (blocks[t], offsets[t]). Returns queries [T, H, C], keys and values [T, K, C]."""
    kv_heads, dim = cache.keys[layer].shape[1::2]
    x = qkv.view(len(qkv), -1, dim)
    heads = x.shape[1] - 2 * kv_heads
    q, k, v = x[:, :heads], x[:, heads : heads + kv_heads], x[:, heads + kv_heads :]
    q_norm, k_norm = norms
    q = q if q_norm is None else rms_norm(q, q_norm)
    k = k if k_norm is None else rms_norm(k, k_norm)
    q, k = rotate(q, *angles), rotate(k, *angles)
    cache.write(layer, blocks, offsets, k, v)
    return q, k, v


class TorchAttention:
    """Gathers each sequence's blocks and calls scaled_dot_product_attention: once for all decodes, once per prompt."""

    name = "torch"
    _masks_prompts = _masks_decodes = True
    """Whether `prepare` makes masks for prompts and for decodes."""
    sinks: Sequence[Tensor] = ()
    """Each layer's [H] in fp32: a score that counts in the softmax, without a value; none where the model has none."""

    def __init__(self, cache: KVCache, windows: tuple[int | None, ...], scale: float) -> None:
        """windows: each layer's sliding window in positions; None: full attention."""
        self.cache, self.windows, self.scale = cache, windows, scale
        self.layout: StepLayout | None = None
        self._cos = self._sin = torch.empty(0)
        self._decode_table = torch.empty(0, dtype=torch.int64)
        self._masks: dict[int | None, tuple[Tensor | None, list[Tensor | None]]] = {}

    def prepare(self, layout: StepLayout, cos: Tensor, sin: Tensor) -> None:
        self.layout, self._cos, self._sin, self._masks = layout, cos, sin, {}
        for window in set(self.windows):
            prompts: list[Tensor | None] = []
            if self._masks_prompts:
                prompts = [self._prompt_mask(i, window) for i in range(layout.decode, len(layout.kv_len))]
            decode = self._decode_mask(window) if layout.decode and self._masks_decodes else None
            self._masks[window] = (decode, prompts)
        if layout.decode and self._masks_decodes:
            self._decode_table = self._own_blocks(layout)

    def twin(self) -> TorchAttention:
        return copy.copy(self)  # a plan replaces its tensors and never writes into them

    def _own_blocks(self, layout: StepLayout) -> Tensor:
        """The decodes' block table [decodes, most], padded with each sequence's own first block: masked values are
        multiplied by zero, and NaN of another sequence would remain NaN."""
        lengths, size = layout.kv_len[: layout.decode], self.cache.block_size
        table = layout.block_table[: layout.decode, : -(-max(lengths) // size)]
        counts = upload(-(-np.array(lengths)[:, None] // size), table.device)
        return torch.where(torch.arange(table.shape[1], device=table.device) < counts, table, table[:, :1])

    def _prompt_mask(self, i: int, window: int | None) -> Tensor | None:
        """The mask [queries, keys] of a prompt's chunk, True where a query may attend; None: causal."""
        layout = self._layout()
        first, last = layout.query_start[i], layout.query_start[i + 1]
        if last - first == layout.kv_len[i] and (window is None or window >= layout.kv_len[i]):
            return None
        return self._seen(layout.positions[first:last, None], layout.kv_len[i], window)

    def _decode_mask(self, window: int | None) -> Tensor:
        """The mask [decodes, 1, 1, keys]."""
        layout = self._layout()
        most = max(layout.kv_len[: layout.decode])
        return self._seen(layout.positions[: layout.decode, None], most, window)[:, None, None, :]

    @staticmethod
    def _seen(positions: Tensor, keys: int, window: int | None) -> Tensor:
        distance = positions - torch.arange(keys, device=positions.device)
        return distance >= 0 if window is None else (distance >= 0) & (distance < window)

    def _layout(self) -> StepLayout:
        if self.layout is None:
            raise RuntimeError("attend before plan")
        return self.layout

    def attend(self, layer: int, qkv: Tensor, q_norm: Norm | None, k_norm: Norm | None) -> Tensor:
        decode, tokens = self._layout().decode, qkv.shape[0]
        if decode == tokens:
            return self._decode(layer, qkv, q_norm, k_norm)
        prompts = self._prompts(layer, qkv, q_norm, k_norm)
        if decode == 0:
            return prompts
        return torch.cat((self._decode(layer, qkv, q_norm, k_norm), prompts))

    def _write(
        self, layer: int, qkv: Tensor, norms: tuple[Norm | None, Norm | None], first: int, last: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Stores the keys and values of tokens [first, last); returns their rotated queries [T, H, C] and keys and
        values [T, K, C]."""
        layout = self._layout()
        angles = self._cos[first:last], self._sin[first:last]
        where = layout.blocks[first:last], layout.offsets[first:last]
        return rotate_and_store(self.cache, layer, qkv[first:last], norms, angles, *where)

    def _decode(self, layer: int, qkv: Tensor, q_norm: Norm | None, k_norm: Norm | None) -> Tensor:
        layout = self._layout()
        q, _, _ = self._write(layer, qkv, (q_norm, k_norm), 0, layout.decode)
        keys, values = self._gather(layer, self._decode_table, max(layout.kv_len[: layout.decode]))
        return self._sdpa(layer, q.unsqueeze(2), keys, values, self._masks[self.windows[layer]][0]).flatten(1)

    def _prompts(self, layer: int, qkv: Tensor, q_norm: Norm | None, k_norm: Norm | None) -> Tensor:
        layout = self._layout()
        start, decode = layout.query_start, layout.decode
        q, k, v = self._write(layer, qkv, (q_norm, k_norm), start[decode], start[-1])
        parts = []
        for i, mask in enumerate(self._masks[self.windows[layer]][1], decode):
            first, last = start[i] - start[decode], start[i + 1] - start[decode]
            queries = q[first:last].transpose(0, 1).unsqueeze(0)
            if mask is None:
                keys, values = (x[first:last].transpose(0, 1).unsqueeze(0) for x in (k, v))
            else:
                keys, values = self._gather(layer, layout.block_table[i : i + 1], layout.kv_len[i])
            out = self._sdpa(layer, queries, keys, values, mask)
            parts.append(out[0].transpose(0, 1).flatten(1))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _gather(self, layer: int, table: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Gathers keys and values [N, K, length, C] of the sequences in table [N, blocks]."""
        size = self.cache.block_size
        table = table[:, : -(-length // size)]
        keys, values = (
            stored[table].transpose(1, 2).flatten(2, 3)[:, :, :length]
            for stored in (self.cache.keys[layer], self.cache.values[layer])
        )
        if self.cache.scales is not None:
            of_keys, of_values = (scale[layer, :, None, None] for scale in self.cache.scales)
            return keys.float() * of_keys, values.float() * of_values
        return keys, values

    def _sdpa(self, layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """q [N, H, T, C], k and v [N, K, length, C]; mask: None: causal."""
        k, v, causal = k.to(q.dtype), v.to(q.dtype), mask is None
        if self.sinks:  # one more position, whose score is the sink and whose value is zero
            mask, causal = self._with_sinks(layer, q, k, mask), False
            k, v = pad(k, (0, 0, 0, 1)), pad(v, (0, 0, 0, 1))
        gqa = q.shape[1] != k.shape[1]
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=self.scale, enable_gqa=gqa)

    def _with_sinks(self, layer: int, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
        """The summand [N, H, T, length + 1] of scores."""
        seen = q.new_ones((q.shape[2], k.shape[2]), dtype=torch.bool).tril() if mask is None else mask
        added = torch.zeros(seen.shape, dtype=q.dtype, device=q.device).masked_fill_(~seen, -torch.inf)
        sinks = self.sinks[layer].to(q.dtype).view(1, -1, 1, 1).expand(*q.shape[:3], 1)
        return torch.cat((added.expand(*q.shape[:3], -1), sinks), -1)
