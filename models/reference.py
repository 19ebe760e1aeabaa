"""Every residual wiring in plain single-process torch: the oracle that the parallel code is tested against, and the
model that tools/train/train.py trains. Shares ModelConfig and the checkpoints' tensor names with the rest, and no code.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .config.latent import Latent
from .config.model_config import Experts, ModelConfig, Wiring

Rotation = tuple[Tensor, Tensor]
"""Cosine and sine of every position's angles, [T, head_dim] each."""


def inverse_frequencies(config: ModelConfig, length: int) -> tuple[Tensor, float]:
    """Radians a position for each pair of a head, [head_dim / 2] in fp32, and the factor on cosine and sine.

    `length` is the sequence's: only "dynamic" (NTK-aware) depends on it, beyond the trained length.
    """
    rope, dim = config.rope, config.rope.rotated or config.head_dim
    theta = rope.theta
    if rope.kind == "dynamic" and length > rope.original_max_position_embeddings:
        stretch = rope.factor * length / rope.original_max_position_embeddings - (rope.factor - 1)
        theta *= stretch ** (dim / (dim - 2))
    frequency = theta ** (-torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if rope.kind == "linear":
        return frequency / rope.factor, 1.0
    if rope.kind == "llama3":
        turns = rope.original_max_position_embeddings * frequency / (2 * math.pi)  # over the trained length
        blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        blend = blend.clamp(0, 1)
        return frequency * (blend + (1 - blend) / rope.factor), 1.0
    if rope.kind == "yarn":

        def pair(turns: float) -> float:
            """The (fractional) pair that turns so often over the trained length."""
            return dim * math.log(rope.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low, high = pair(rope.beta_fast), pair(rope.beta_slow)
        if not rope.fractional:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
        blend = 1 - ramp.clamp(0, 1)
        return frequency * (blend + (1 - blend) / rope.factor), rope.attention_factor or 1.0
    return frequency, 1.0


def rotate(x_BHTd: Tensor, cos_Td: Tensor, sin_Td: Tensor) -> Tensor:
    """Turns the pairs (i, i + d/2) of every head's first d dimensions by its position's angle."""
    turned = cos_Td.shape[-1]
    x, rest = x_BHTd[..., :turned], x_BHTd[..., turned:]
    first, second = x.chunk(2, dim=-1)
    return torch.cat((x * cos_Td + torch.cat((-second, first), dim=-1) * sin_Td, rest), -1)


class ReferenceNorm(nn.Module):
    """Root-mean-square norm; the mean is taken in fp32 for every dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float32:
            return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)
        return self.weight * F.rms_norm(x.float(), (x.shape[-1],), None, self.eps).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, window: int | None) -> None:
        super().__init__()
        self.config, self.window = config, window
        d, dim = config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(d, config.num_heads * dim, bias=config.qkv_bias)
        self.k_proj = nn.Linear(d, config.num_kv_heads * dim, bias=config.qkv_bias)
        self.v_proj = nn.Linear(d, config.num_kv_heads * dim, bias=config.qkv_bias)
        self.o_proj = nn.Linear(config.num_heads * dim, d, bias=config.o_bias)
        if config.qk_norm:
            self.q_norm, self.k_norm = ReferenceNorm(dim, config.norm_eps), ReferenceNorm(dim, config.norm_eps)

    def forward(self, x_BTD: Tensor, cos_Td: Tensor, sin_Td: Tensor, rank: int, tp: int) -> Tensor:
        """Rank `rank`'s partial sum among tp: its query heads, the key/value heads they read, its columns of o_proj."""
        c, (b, t, _) = self.config, x_BTD.shape
        heads, group = c.num_heads // tp, c.num_heads // c.num_kv_heads
        first, last = rank * heads // group, ((rank + 1) * heads - 1) // group + 1  # key/value heads in use
        kv = slice(first * c.head_dim, last * c.head_dim)
        q_rows = slice(rank * heads * c.head_dim, (rank + 1) * heads * c.head_dim)

        def project(linear: nn.Linear, rows: slice) -> Tensor:
            bias = None if linear.bias is None else linear.bias[rows]
            return F.linear(x_BTD, linear.weight[rows], bias).view(b, t, -1, c.head_dim)

        q, k, v = project(self.q_proj, q_rows), project(self.k_proj, kv), project(self.v_proj, kv)  # [B, T, H|K, d]
        if c.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (projected.transpose(1, 2) for projected in (q, k, v))  # [B, H|K, T, d]
        q, k = rotate(q, cos_Td, sin_Td), rotate(k, cos_Td, sin_Td)
        if heads != last - first:
            read_by = torch.arange(rank * heads, (rank + 1) * heads, device=q.device) // group - first
            k, v = k[:, read_by], v[:, read_by]  # [B, H, T, d]
        mask = None
        if self.window is not None and self.window < t:
            position = torch.arange(t, device=q.device)
            distance = position[:, None] - position
            mask = (distance >= 0) & (distance < self.window)
        out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=c.attention_scale)
        bias = self.o_proj.bias if rank == 0 else None
        return F.linear(out.transpose(1, 2).reshape(b, t, -1), self.o_proj.weight[:, q_rows], bias)


class LatentAttention(nn.Module):
    """Attention whose keys and values are made of one latent a token, expanded here for every head."""

    def __init__(self, config: ModelConfig, latent: Latent) -> None:
        super().__init__()
        self.config, self.latent = config, latent
        d, c, bias = config.hidden_size, latent, config.qkv_bias
        queries, expanded = config.num_heads * (c.plain + c.rotated), config.num_heads * (c.plain + c.value)
        if c.query_rank:
            self.q_a_proj = nn.Linear(d, c.query_rank, bias=bias)
            self.q_a_layernorm = ReferenceNorm(c.query_rank, c.norm_eps)
            self.q_b_proj = nn.Linear(c.query_rank, queries, bias=False)
        else:
            self.q_proj = nn.Linear(d, queries, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(d, c.width, bias=bias)
        self.kv_a_layernorm = ReferenceNorm(c.rank, c.norm_eps)
        self.kv_b_proj = nn.Linear(c.rank, expanded, bias=False)
        self.o_proj = nn.Linear(config.num_heads * c.value, d, bias=config.o_bias)

    def _rotated(self, x_BHTr: Tensor, cos_Td: Tensor, sin_Td: Tensor) -> Tensor:
        if self.latent.interleaved:
            x_BHTr = torch.cat((x_BHTr[..., ::2], x_BHTr[..., 1::2]), -1)
        return rotate(x_BHTr, cos_Td, sin_Td)

    def forward(self, x_BTD: Tensor, cos_Td: Tensor, sin_Td: Tensor, rank: int, tp: int) -> Tensor:
        """Rank `rank`'s partial sum among tp: its heads."""
        c, (b, t, _), heads = self.latent, x_BTD.shape, self.config.num_heads // tp
        made = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_BTD))) if c.query_rank else self.q_proj(x_BTD)
        latent, key = self.kv_a_proj_with_mqa(x_BTD).split((c.rank, c.rotated), -1)
        expanded = self.kv_b_proj(self.kv_a_layernorm(latent) * c.scale)
        mine = slice(rank * heads, (rank + 1) * heads)
        q, kv = (y.view(b, t, self.config.num_heads, -1)[:, :, mine].transpose(1, 2) for y in (made, expanded))
        k, v = kv.split((c.plain, c.value), -1)
        key = self._rotated(key.unsqueeze(1), cos_Td, sin_Td).expand(-1, heads, -1, -1)
        q = torch.cat((q[..., : c.plain], self._rotated(q[..., c.plain :], cos_Td, sin_Td)), -1)
        k = torch.cat((k, key), -1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.config.attention_scale)
        columns = slice(rank * heads * c.value, (rank + 1) * heads * c.value)
        bias = self.o_proj.bias if rank == 0 else None
        return F.linear(out.transpose(1, 2).reshape(b, t, -1), self.o_proj.weight[:, columns], bias)


class Mlp(nn.Module):
    def __init__(self, config: ModelConfig, size: int | None = None) -> None:
        """size: of the inner dimension, of an expert."""
        super().__init__()
        d, f, bias = config.hidden_size, size or config.ffn_size, config.mlp_bias
        self.gate_proj, self.up_proj = nn.Linear(d, f, bias=bias), nn.Linear(d, f, bias=bias)
        self.down_proj = nn.Linear(f, d, bias=bias)

    def forward(self, x_BTD: Tensor, rank: int, tp: int) -> Tensor:
        """Rank `rank`'s partial sum among tp: its share of the inner dimension."""
        share = self.down_proj.in_features // tp
        mine = slice(rank * share, (rank + 1) * share)

        def project(linear: nn.Linear) -> Tensor:
            return F.linear(x_BTD, linear.weight[mine], None if linear.bias is None else linear.bias[mine])

        inner = F.silu(project(self.gate_proj)) * project(self.up_proj)
        return F.linear(inner, self.down_proj.weight[:, mine], self.down_proj.bias if rank == 0 else None)


def _ranking(scores: Tensor) -> Tensor:
    """Indices by descending score, ties by index."""
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices


class Mixture(nn.Module):
    """A layer's experts, each row through those that the router chooses for it."""

    def __init__(self, config: ModelConfig, experts: Experts) -> None:
        super().__init__()
        self.config = experts
        self.gate = nn.Linear(config.hidden_size, experts.routed, bias=False)
        if experts.router.biased:
            self.gate.register_buffer("e_score_correction_bias", torch.zeros(experts.routed))  # not trained by a loss
        self.experts = nn.ModuleList(Mlp(config, experts.ffn_size) for _ in range(experts.count))
        self.shared_experts = Mlp(config, experts.shared_ffn_size) if experts.shared_ffn_size else None

    def weights(self, x_ND: Tensor) -> Tensor:
        """[N, E]: what each expert's output counts, 0 where it was not chosen."""
        c, router = self.config, self.config.router
        wide = router.wide
        logits = F.linear(x_ND.float(), self.gate.weight.float()) if wide else self.gate(x_ND)
        scores = logits.float().softmax(-1) if router.score == "softmax" else logits.float().sigmoid()
        ranked = scores + self.gate.get_buffer("e_score_correction_bias") if router.biased else scores
        groups = ranked.reshape(len(ranked), router.groups, -1)
        best = groups.topk(min(2, groups.shape[2]), -1).values.sum(-1)  # [N, groups]
        dropped = _ranking(best)[:, router.chosen_groups :]
        groups = groups.scatter(1, dropped[..., None].expand(-1, -1, groups.shape[2]), -math.inf)
        chosen = _ranking(groups.flatten(1))[:, : c.chosen]
        weight = scores.gather(1, chosen)
        if router.normalises:
            weight = weight / (weight.sum(-1, keepdim=True) + router.epsilon)
        weight = weight * router.scale
        if router.rounds:
            weight = weight.to(logits.dtype).float()
        return torch.zeros_like(scores).scatter(1, chosen, weight)

    def forward(self, x_BTD: Tensor, rank: int, tp: int) -> Tensor:
        """Rank `rank`'s partial sum among tp: its share of every expert's inner dimension."""
        x_ND = x_BTD.flatten(0, 1)
        weights, out = self.weights(x_ND), torch.zeros_like(x_ND, dtype=torch.float32)
        if rank == 0:
            out = out + x_ND.float() * weights[:, self.config.count :].sum(1, keepdim=True)
        for expert, weight in zip(self.experts, weights[:, : self.config.count].unbind(1), strict=True):
            rows = weight.nonzero().flatten()  # also none: each expert has a gradient on every rank
            part = expert(x_ND[rows], rank, tp).float() * weight[rows, None]
            out = out.index_add(0, rows, part)
        out = out.to(x_BTD.dtype).view_as(x_BTD)
        return out if self.shared_experts is None else out + self.shared_experts(x_BTD, rank, tp)


Streams = tuple[Tensor, ...]
"""The residual as it was after each of the latest sub-blocks, newest last; under desync, each rank's."""


def _lags(wiring: Wiring, index: int) -> tuple[int, int]:
    """How many sub-blocks ago the residual was that a layer's attention and MLP read."""
    d = wiring.delay
    return {"standard": (0, 0), "parallel": (0, 1), "ladder": (1, 1), "delay": (d, d)}.get(wiring.kinds[index], (0, 0))


class Layer(nn.Module):
    """A layer's two sub-blocks, each with its own norm; a parallel layer has one for both. One unit of sharding and of
    activation checkpointing."""

    def __init__(self, config: ModelConfig, index: int, tp: int = 1) -> None:
        super().__init__()
        self.index, self.tp, self.wiring = index, tp, config.wiring
        self.lags = _lags(config.wiring, index)
        self.scale, self.recomputes = config.residual_multiplier, False
        self.input_layernorm = ReferenceNorm(config.hidden_size, config.norm_eps)
        window = config.sliding_window[index] if config.sliding_window else None
        latent = config.latent
        self.self_attn = Attention(config, window) if latent is None else LatentAttention(config, latent)
        if config.wiring.kinds[index] != "parallel":
            self.post_attention_layernorm = ReferenceNorm(config.hidden_size, config.norm_eps)
        mixture = Mixture(config, config.experts) if config.experts and config.has_experts(index) else None
        self.mlp = Mlp(config) if mixture is None or config.has_mlp(index) else mixture
        if mixture is not self.mlp:
            self.shortcut = mixture

    def attention_of(self, x: Tensor, turn: Rotation, rank: int = 0, tp: int = 1) -> Tensor:
        out: Tensor = self.self_attn(self.input_layernorm(x), *turn, rank, tp) * self.scale
        return out

    def mlp_of(self, x: Tensor, rank: int = 0, tp: int = 1) -> Tensor:
        norm = getattr(self, "post_attention_layernorm", self.input_layernorm)
        out: Tensor = self.mlp(norm(x), rank, tp) * self.scale
        return out

    def forward(self, streams: Streams, turn: Rotation) -> Streams:
        if self.wiring.desync_every or self.wiring.kinds[0] == "none":
            through = self._drift
        elif self.wiring.name == "shortcut":
            through = self._beside
        else:
            through = self._read
        if self.recomputes and torch.is_grad_enabled():
            again: Streams = checkpoint(through, streams, turn, use_reentrant=False)
            return again
        return through(streams, turn)

    def _read(self, streams: Streams, turn: Rotation) -> Streams:
        for place, lag in enumerate(self.lags):
            x = streams[-1 - lag]
            output = self.mlp_of(x) if place else self.attention_of(x, turn)
            streams = (*streams, streams[-1] + output)[-len(streams) :]
        return streams

    def _beside(self, streams: Streams, turn: Rotation) -> Streams:
        """In every other layer the experts read the input of its MLP, and are added after the next layer."""
        late, x = streams
        x = x + self.attention_of(x, turn)
        y = x + self.mlp_of(x)
        if self.shortcut is None:
            return late, y + late
        return self.shortcut(self.post_attention_layernorm(x), 0, 1), y

    def _drift(self, streams: Streams, turn: Rotation) -> Streams:
        """desync-n: one residual for each of tp ranks, summed after every n-th sub-block and the last; none: never."""
        x, every, tp, last = streams, self.wiring.desync_every, self.tp, 2 * len(self.wiring.kinds)
        for number in (2 * self.index + 1, 2 * self.index + 2):
            if number % 2:
                partial = [self.attention_of(x[rank], turn, rank, tp) for rank in range(tp)]
            else:
                partial = [self.mlp_of(x[rank], rank, tp) for rank in range(tp)]
            if every and (number % every == 0 or number == last):
                x = (torch.stack([f + r / tp for f, r in zip(partial, x, strict=True)]).sum(0),) * tp
            else:
                x = tuple(f + r for f, r in zip(partial, x, strict=True))
        return x


class _Decoder(nn.Module):
    def __init__(self, config: ModelConfig, tp: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, index, tp) for index in range(config.num_layers))
        self.norm = ReferenceNorm(config.hidden_size, config.norm_eps)


class Reference(nn.Module):
    """The model in one process; `state_dict()` has the stock Hugging Face names (a tied head has none). `tp` matters
    to desync (default: the size that the weights declare) and no-communication (the output is rank 0's)."""

    def __init__(self, config: ModelConfig, tp: int | None = None) -> None:
        super().__init__()
        if config.sinks or (config.latent is not None and config.latent.index is not None):
            raise ValueError(
                f"{config.family}: attention sinks and sparse attention are served, not trained or compared"
            )
        self.config = config
        self.tp = tp or config.wiring.trained_tp or 1
        for what, size in (("heads", config.num_heads), ("FFN", config.ffn_size)):
            if size % self.tp:
                raise ValueError(f"{what} {size} % tensor_parallel_size {self.tp} = {size % self.tp}, must be 0")
        self.model = _Decoder(config, self.tp)
        self.drifts = bool(config.wiring.desync_every) or config.wiring.kinds[0] == "none"
        lags = [lag for index in range(config.num_layers) for lag in _lags(config.wiring, index)]
        self.copies = self.tp if self.drifts else 1 + max(lags) + (config.wiring.name == "shortcut")
        """Copies of the embedded stream at the start: the longest lag, or one a rank."""
        if not config.tied_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def ladder(self, layers: Collection[int]) -> None:
        """Switches these layers to ladder with the same standard weights, for trials; `config` stays standard."""
        for layer in self.model.layers:
            assert isinstance(layer, Layer)
            layer.lags = (1, 1) if layer.index in layers else (0, 0)
        self.copies = 2

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Logits [B, T, V] in the weights' dtype, every position seeing itself and those before."""
        x_BTD = self.model.embed_tokens(ids_BT) * self.config.embedding_multiplier
        if torch.is_autocast_enabled(x_BTD.device.type):
            x_BTD = x_BTD.float()
        frequency, factor = inverse_frequencies(self.config, ids_BT.shape[1])
        angle = torch.outer(torch.arange(ids_BT.shape[1], dtype=torch.float32), torch.cat((frequency, frequency)))
        cos, sin = ((f(angle) * factor).to(x_BTD) for f in (torch.cos, torch.sin))
        streams: Streams = (x_BTD,) * self.copies
        for layer in self.model.layers:
            streams = layer(streams, (cos, sin))
        # Every wiring's last stream is complete; no-communication's is rank 0's, of which the output is meaningless.
        stream = streams[0] if self.drifts else streams[-1]
        head = self.model.embed_tokens.weight if self.config.tied_embeddings else self.lm_head.weight
        return F.linear(self.model.norm(stream), head) / self.config.logits_divisor
