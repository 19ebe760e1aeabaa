"""Latent attention (arXiv 2405.04434, MLA): a token's cache is one latent and one rotated key, the same for all heads.

In absorbed form: the part of the key's projection that belongs to a head is multiplied into its query, that of the
value's into its output, so that heads attend to latents. R: the latent's width, r: the rotated key's.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .attention import KVCache, TorchAttention
from .ops import Norm, rms_norm, rotate
from .stages import RankShard


class LatentCache(KVCache):
    """`latents[l]` is [blocks, block_size, R + r]: the normed latent, then the rotated key. As keys they are of one
    head, and values are their first R columns."""

    values_are_keys = True

    def __init__(
        self, shard: RankShard, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(shard, num_blocks, block_size, dtype, device)
        self.latents = [each.squeeze(1) for each in self.keys]

    def store(self, layer: int, blocks: Tensor, offsets: Tensor, latents: Tensor) -> None:
        """Stores latents [T, R + r] at (blocks[t], offsets[t])."""
        self.latents[layer][blocks, offsets] = self._stored(latents)


class LatentAttention(TorchAttention):
    """The portable backend. `attend` takes [T, (H + 1) * (R + r)]: queries in latent space and the part to be rotated
    of each, then the latent, not yet normed, and the key, not yet rotated -> [T, H * R]. k_norm is the latent's."""

    name = "torch, latent"

    def __init__(self, cache: LatentCache, scale: float) -> None:
        super().__init__(cache, (None,) * len(cache.latents), scale)
        self.latents = cache

    def attend(self, layer: int, qkv: Tensor, q_norm: Norm | None, k_norm: Norm | None) -> Tensor:
        assert k_norm is not None
        queries = self._rotate_and_store(layer, qkv, k_norm)
        return self.latent_attend(queries, layer, k_norm.weight.numel()).flatten(1)

    def _rotate_and_store(self, layer: int, qkv: Tensor, norm: Norm) -> Tensor:
        """Rotated queries [T, H, R + r], once the tokens' latents and keys are stored."""
        layout, rank = self._layout(), norm.weight.numel()
        x = qkv.view(len(qkv), -1, self.latents.latents[layer].shape[2])
        turned = rotate(x[..., rank:], self._cos, self._sin)
        latent = torch.cat((rms_norm(x[:, -1, :rank], norm), turned[:, -1]), -1)
        self.latents.store(layer, layout.blocks, layout.offsets, latent)
        return torch.cat((x[:, :-1, :rank], turned[:, :-1]), -1)

    def latent_attend(self, q: Tensor, layer: int, rank: int) -> Tensor:
        """Rotated queries [T, H, R + r] -> [T, H, R] over what is stored of each token's sequence up to itself."""
        layout, (decode_mask, masks) = self._layout(), self._masks[None]
        parts, decode, start = [], layout.decode, layout.query_start
        if decode:
            # NOTE: heads as rows: torch would copy the one key head for each query head.
            keys = self._gathered(layer, self._decode_table, max(layout.kv_len[:decode]), q.dtype).unsqueeze(1)
            out = scaled_dot_product_attention(q[:decode].unsqueeze(1), keys, keys, decode_mask, scale=self.scale)
            parts.append(out[:, 0, :, :rank])
        for i, mask in enumerate(masks, decode):
            keys = self._gathered(layer, layout.block_table[i : i + 1], layout.kv_len[i], q.dtype)
            queries = q[start[i] : start[i + 1]].transpose(0, 1)
            keys = keys.expand(len(queries), -1, -1)
            out = scaled_dot_product_attention(queries, keys, keys, mask, is_causal=mask is None, scale=self.scale)
            parts.append(out[..., :rank].transpose(0, 1))
        return torch.cat(parts)

    def _gathered(self, layer: int, table: Tensor, length: int, dtype: torch.dtype) -> Tensor:
        """The latents and keys [N, length, R + r] of the sequences in table [N, blocks]."""
        table = table[:, : -(-length // self.cache.block_size)]
        return self.latents.latents[layer][table].flatten(1, 2)[:, :length].to(dtype)
