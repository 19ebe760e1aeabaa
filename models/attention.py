"""Paged attention behind one small interface, and its portable backend on torch alone.

A backend is told the step's layout once (`plan`) and then called for every layer (`attend`), which stores the new keys
and values and attends over all of the sequence's. The portable one is right before it is fast.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class StepLayout:
    """Where this step's T tokens belong. N sequences, in token order; `decode` of them, the first ones, have exactly
    one token each. All tensors are int64 on the model's device.

    positions [T]; query_start [N + 1] (host list); kv_len [N] (host list: positions known after this step);
    block_table [N, most blocks of any], padded with 0; blocks, offsets [T]: where each token's keys go.
    """

    positions: Tensor
    query_start: list[int]
    kv_len: list[int]
    block_table: Tensor
    blocks: Tensor
    offsets: Tensor
    decode: int


class AttentionBackend(Protocol):
    name: str

    def plan(self, layout: StepLayout) -> None:
        """Prepares what all layers of the step share."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, H, C], k and v [T, K, C] (rotated) -> [T, H * C]."""


class TorchAttention:
    """Gathers each sequence's blocks and calls scaled_dot_product_attention: decodes together, prompts one by one."""

    name = "torch"

    def __init__(self, cache: KVCache, windows: tuple[int | None, ...], scale: float) -> None:
        """windows: sliding window of each layer in positions, None for full attention."""
        self.cache, self.windows, self.scale = cache, windows, scale
        self.layout: StepLayout | None = None
        self._masks: dict[int | None, tuple[Tensor | None, list[Tensor | None]]] = {}

    def plan(self, layout: StepLayout) -> None:
        self.layout, self._masks = layout, {}
        for window in set(self.windows):
            prompts = [self._mask(i, window) for i in range(layout.decode, len(layout.kv_len))]
            self._masks[window] = (self._decode_mask(window) if layout.decode else None, prompts)

    def _mask(self, i: int, window: int | None) -> Tensor | None:
        """[queries, keys] of a prompt's chunk: True where it may look. None: plainly causal."""
        layout = self._layout()
        first, last = layout.query_start[i], layout.query_start[i + 1]
        if last - first == layout.kv_len[i] and window is None:
            return None
        keys = torch.arange(layout.kv_len[i], device=layout.positions.device)
        distance = layout.positions[first:last, None] - keys
        seen = distance >= 0
        return seen if window is None else seen & (distance < window)

    def _decode_mask(self, window: int | None) -> Tensor:
        """[decodes, 1, 1, keys]."""
        layout = self._layout()
        most = max(layout.kv_len[: layout.decode])
        keys = torch.arange(most, device=layout.positions.device)
        distance = layout.positions[: layout.decode, None] - keys
        seen = distance >= 0
        return (seen if window is None else seen & (distance < window))[:, None, None, :]

    def _layout(self) -> StepLayout:
        if self.layout is None:
            raise RuntimeError("attend before plan")
        return self.layout

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        layout, cache = self._layout(), self.cache
        cache.write(layer, layout.blocks, layout.offsets, k, v)
        decode_mask, prompt_masks = self._masks[self.windows[layer]]
        parts = []
        if layout.decode:
            keys, values = self._gather(layer, layout.block_table[: layout.decode], max(layout.kv_len[: layout.decode]))
            out = self._sdpa(q[: layout.decode].unsqueeze(2), keys, values, decode_mask, causal=False)
            parts.append(out.flatten(1))
        for i, mask in enumerate(prompt_masks, layout.decode):
            first, last = layout.query_start[i], layout.query_start[i + 1]
            queries = q[first:last].transpose(0, 1).unsqueeze(0)
            if mask is None:
                keys, values = (x[first:last].transpose(0, 1).unsqueeze(0) for x in (k, v))
            else:
                keys, values = self._gather(layer, layout.block_table[i : i + 1], layout.kv_len[i])
            out = self._sdpa(queries, keys, values, mask, causal=mask is None)
            parts.append(out[0].transpose(0, 1).flatten(1))
        return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)

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
