"""Keys and values of all layers in fixed-size blocks. Tensors only: which block is whose is the scheduler's matter."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from .pages import HugePages
from .rank_shard import RankShard
from .transfer import upload
from .weights.tensor_reader import FP8

_LARGEST = torch.finfo(FP8).max


def block_bytes(shard: RankShard, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block on one rank: block_size positions, all layers, keys and values."""
    per_position = 2 * shard.config.num_layers * shard.num_kv_heads * shard.config.head_dim
    return block_size * per_position * dtype.itemsize


class KVCache:
    """`keys[l]` and `values[l]` are [blocks, K, block_size, C]: a head's positions lie together, as attention reads
    them."""

    def __init__(
        self, shard: RankShard, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        shape = (num_blocks, shard.num_kv_heads, block_size, shard.config.head_dim)
        layers = range(shard.config.num_layers)
        # zeros, not empty: what lies beyond a sequence's end is masked, but NaN times a zero weight is still NaN.
        pages, size = HugePages(), torch.Size(shape).numel() * dtype.itemsize

        def zeros() -> Tensor:
            if device.type == "cpu":
                return pages.take(size).view(dtype).view(shape)
            return torch.zeros(shape, dtype=dtype, device=device)

        self.keys = [zeros() for _ in layers]
        self.values = [zeros() for _ in layers]

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
        for tensor in (*self.keys, *self.values):
            tensor[target] = tensor[source]

    def zero_blocks(self, blocks: Sequence[int]) -> None:
        """Turns NaN and Inf into zeros in these blocks. They will be reused, and a masked position's weight of zero
        times NaN would still be NaN."""
        if not blocks:
            return
        index = upload(np.array(blocks, np.int64), self.keys[0].device)
        for tensor in (*self.keys, *self.values):
            held = tensor[index]
            wide = held.float() if held.dtype == FP8 else held  # torch has no nan_to_num for fp8
            tensor[index] = torch.nan_to_num(wide, nan=0.0, posinf=0.0, neginf=0.0).to(held.dtype)
