"""Paged attention: keys and values in fixed-size blocks, one small interface over them, and its portable backend in
torch. A backend gets the step's layout once (`plan`) and is then called for every layer (`attend`) with the fused
projection's output: it rotates, stores the new keys and values and attends over all of the sequence's.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .ops import Norm, rms_norm, rotate
from .pages import HugePages
from .stages import RankShard
from .transfer import upload
from .weights.tensor_reader import FP8

_LARGEST = torch.finfo(FP8).max


def block_bytes(shard: RankShard, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block on one rank: block_size positions, all layers, keys and values, or latents."""
    return block_size * shard.config.num_layers * shard.kv_elements * dtype.itemsize


class KVCache:
    """`keys[l]` and `values[l]` are [blocks, K, block_size, C]: a head's positions are contiguous, as attention reads
    them."""

    values_are_keys = False

    def __init__(
        self, shard: RankShard, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        shape = (num_blocks, shard.num_kv_heads, block_size, shard.config.head_dim)
        layers = range(shard.config.num_layers)
        # zeros, not empty: what is beyond a sequence's end is masked, but NaN times a zero weight is still NaN.
        pages, size = HugePages(), torch.Size(shape).numel() * dtype.itemsize

        def zeros() -> Tensor:
            if device.type == "cpu":
                return pages.take(size).view(dtype).view(shape)
            return torch.zeros(shape, dtype=dtype, device=device)

        self.keys = [zeros() for _ in layers]
        self.values = self.keys if self.values_are_keys else [zeros() for _ in layers]

    @property
    def tensors(self) -> list[Tensor]:
        """All that is stored."""
        return self.keys if self.values_are_keys else [*self.keys, *self.values]

    def write(self, layer: int, blocks: Tensor, offsets: Tensor, keys: Tensor, values: Tensor) -> None:
        """Stores keys and values [T, K, C] at (blocks[t], offsets[t])."""
        self.keys[layer][blocks, :, offsets] = self._stored(keys)
        self.values[layer][blocks, :, offsets] = self._stored(values)

    def _stored(self, x: Tensor) -> Tensor:
        """In the cache's dtype. fp8 is unscaled and saturates: a key beyond its range must not become NaN."""
        dtype = self.keys[0].dtype
        return (x.clamp(-_LARGEST, _LARGEST) if dtype == FP8 else x).to(dtype)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies whole blocks src -> dst in every layer (copy-on-write)."""
        if not pairs:
            return
        source, target = upload(np.array(pairs, np.int64).T.copy(), self.keys[0].device)
        for tensor in self.tensors:
            tensor[target] = tensor[source]

    def zero_blocks(self, blocks: Sequence[int]) -> None:
        """Turns NaN and Inf into zeros in these blocks. They will be reused, and a masked position's weight of zero
        times NaN would still be NaN."""
        if not blocks:
            return
        index = upload(np.array(blocks, np.int64), self.keys[0].device)
        for tensor in self.tensors:
            held = tensor[index]
            wide = held.float() if held.dtype == FP8 else held  # torch has no nan_to_num for fp8
            tensor[index] = torch.nan_to_num(wide, nan=0.0, posinf=0.0, neginf=0.0).to(held.dtype)


@dataclass(frozen=True, slots=True)
class StepLayout:
    """Where this step's T tokens belong. N sequences, in token order; `decode` of them, the first ones, have one
    token each. All tensors are int64 on the model's device. positions [T]; query_start [N + 1] (host list); kv_len
    [N] (host list: positions known after this step); block_table [N, most blocks of any], anything behind a
    sequence's own blocks; blocks, offsets [T]: where each token's keys go. chained: some decodes are consecutive
    tokens of one sequence, so that all keys must be stored before any of them attends."""

    positions: Tensor
    query_start: list[int]
    kv_len: list[int]
    block_table: Tensor
    blocks: Tensor
    offsets: Tensor
    decode: int
    chained: bool = False


class AttentionBackend(Protocol):
    name: str

    def plan(self, layout: StepLayout, cos: Tensor, sin: Tensor) -> None:
        """Prepares what all layers of the step share. cos, sin: the tokens' rotary angles [T, 1, R / 2], fp32."""

    def attend(self, layer: int, qkv: Tensor, q_norm: Norm | None, k_norm: Norm | None) -> Tensor:
        """[T, (H + 2K) * C], heads of queries, keys, values, not yet normed or rotated -> [T, H * C]."""

    def twin(self) -> AttentionBackend:
        """Another one over the same cache, with a plan of its own: for a step's second stream."""


@runtime_checkable
class Capturable(Protocol):
    """A backend whose decode steps may be captured and replayed (engine/step/cuda_graphs.py), and which reads nothing
    of a block that is behind its sequence's last position, be it NaN: a step under it may be set off before the one
    before is known (engine/step/runner.py)."""

    def captured(self, sizes: Sequence[int], most_blocks: int) -> dict[int, AttentionBackend]:
        """Backends for steps of exactly so many decodes, of at most most_blocks blocks a sequence. Their `plan` is
        called before each replay, never captured, with the captured tensors of tokens and a block table on the host;
        `attend` is captured, and may read nothing of a step but tensors that stay where they are."""


def rotate_and_store(
    cache: KVCache,
    layer: int,
    qkv: Tensor,
    norms: tuple[Norm | None, Norm | None],
    angles: tuple[Tensor, Tensor],
    blocks: Tensor,
    offsets: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Splits qkv [T, (H + 2K) * C], norms and rotates queries and keys by angles [T, 1, R / 2], and stores keys and
    values at (blocks[t], offsets[t]). Returns queries [T, H, C], keys and values [T, K, C]."""
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
    """Gathers each sequence's blocks and calls scaled_dot_product_attention: decodes together, prompts one by one."""

    name = "torch"
    _masks_prompts = _masks_decodes = True
    """Whether a plan makes masks for them."""

    def __init__(self, cache: KVCache, windows: tuple[int | None, ...], scale: float) -> None:
        """windows: sliding window of each layer in positions, None for full attention."""
        self.cache, self.windows, self.scale = cache, windows, scale
        self.layout: StepLayout | None = None
        self._cos = self._sin = torch.empty(0)
        self._decode_table = torch.empty(0, dtype=torch.int64)
        self._masks: dict[int | None, tuple[Tensor | None, list[Tensor | None]]] = {}

    def plan(self, layout: StepLayout, cos: Tensor, sin: Tensor) -> None:
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
        return copy.copy(self)  # what a plan holds is replaced, never written into

    def _own_blocks(self, layout: StepLayout) -> Tensor:
        """The decodes' block table [decodes, most], filled up with each one's own first block: what is masked is still
        multiplied by its weight of zero, and another sequence's NaN must not come in that way."""
        lengths, size = layout.kv_len[: layout.decode], self.cache.block_size
        table = layout.block_table[: layout.decode, : -(-max(lengths) // size)]
        held = upload(-(-np.array(lengths)[:, None] // size), table.device)
        return torch.where(torch.arange(table.shape[1], device=table.device) < held, table, table[:, :1])

    def _prompt_mask(self, i: int, window: int | None) -> Tensor | None:
        """[queries, keys] of a prompt's chunk: True where it may look. None: plainly causal."""
        layout = self._layout()
        first, last = layout.query_start[i], layout.query_start[i + 1]
        if last - first == layout.kv_len[i] and (window is None or window >= layout.kv_len[i]):
            return None
        return self._seen(layout.positions[first:last, None], layout.kv_len[i], window)

    def _decode_mask(self, window: int | None) -> Tensor:
        """[decodes, 1, 1, keys]."""
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
        """Rotated queries [T, H, C] and keys, and values [T, K, C] of tokens [first, last), once they are stored."""
        layout = self._layout()
        angles = self._cos[first:last], self._sin[first:last]
        where = layout.blocks[first:last], layout.offsets[first:last]
        return rotate_and_store(self.cache, layer, qkv[first:last], norms, angles, *where)

    def _decode(self, layer: int, qkv: Tensor, q_norm: Norm | None, k_norm: Norm | None) -> Tensor:
        layout = self._layout()
        q, _, _ = self._write(layer, qkv, (q_norm, k_norm), 0, layout.decode)
        keys, values = self._gather(layer, self._decode_table, max(layout.kv_len[: layout.decode]))
        return self._sdpa(q.unsqueeze(2), keys, values, self._masks[self.windows[layer]][0], causal=False).flatten(1)

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
            out = self._sdpa(queries, keys, values, mask, causal=mask is None)
            parts.append(out[0].transpose(0, 1).flatten(1))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _gather(self, layer: int, table: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values [N, K, length, C] of the sequences in table [N, blocks]."""
        size = self.cache.block_size
        table = table[:, : -(-length // size)]
        keys, values = (
            stored[table].transpose(1, 2).flatten(2, 3)[:, :, :length]
            for stored in (self.cache.keys[layer], self.cache.values[layer])
        )
        return keys, values

    def _sdpa(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, causal: bool) -> Tensor:
        k, v = k.to(q.dtype), v.to(q.dtype)
        gqa = q.shape[1] != k.shape[1]
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=self.scale, enable_gqa=gqa)
