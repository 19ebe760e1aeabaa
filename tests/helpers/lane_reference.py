"""A model of lanes (delayed tensor parallelism) in plain single-process torch: the oracle that the parallel code is
tested against. Parameters have the checkpoint's names and shapes. Shares ModelConfig
with the rest, and no code. Tensors: B sequences, T tokens, L lanes, D hidden, d of a head.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from laddertron.models.config.lanes import Lanes
from laddertron.models.config.model_config import ModelConfig
from torch import Tensor, nn


class LaneNorm(nn.Module):
    """Root-mean-square norm over D; the scale is [D], or [L, D] and called `scale`."""

    def __init__(self, config: ModelConfig, count: int | None) -> None:
        super().__init__()
        self.eps, self.name = config.norm_eps, "weight" if count is None else "scale"
        shape = (config.hidden_size,) if count is None else (count, config.hidden_size)
        self.register_parameter(self.name, nn.Parameter(torch.ones(shape)))

    def forward(self, x: Tensor) -> Tensor:
        normed = F.rms_norm(x.float(), (x.shape[-1],), None, self.eps).to(x.dtype)
        return normed * self.get_parameter(self.name)


class LaneLinear(nn.Module):
    """One linear layer a lane: weight [L, out, in]."""

    def __init__(self, lanes: int, outputs: int, inputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(lanes, outputs, inputs))

    def forward(self, x_BTLi: Tensor) -> Tensor:
        return torch.einsum("btli,loi->btlo", x_BTLi, self.weight)


def turned(x_BTHd: Tensor, angle_Td: Tensor) -> Tensor:
    """Turns the pairs (2j, 2j + 1) of every head by its position's angle."""
    cos, sin = (f(angle_Td)[:, None].to(x_BTHd.dtype) for f in (torch.cos, torch.sin))
    even, odd = x_BTHd[..., 0::2], x_BTHd[..., 1::2]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)


def steps_of(config: ModelConfig) -> Tensor:
    """Radians a position for each pair of a head, Llama 3's scaling included."""
    rope, dim = config.rope, config.head_dim
    step = rope.theta ** (-torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if rope.kind != "llama3":
        return step
    turns = rope.original_max_position_embeddings * step / (2 * math.pi)
    blend = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return step * (blend + (1 - blend) / rope.factor)


class LaneAttention(nn.Module):
    def __init__(self, config: ModelConfig, lanes: int, window: int | None) -> None:
        super().__init__()
        self.config, self.window = config, window
        d, q, kv = config.hidden_size, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.wq, self.wk, self.wv = (LaneLinear(lanes, out // lanes, d) for out in (q, kv, kv))
        self.wo = LaneLinear(lanes, d, q // lanes)

    def forward(self, x_BTLD: Tensor, angle_Td: Tensor) -> Tensor:
        b, t, lanes, _ = x_BTLD.shape
        q, k, v = (w(x_BTLD).reshape(b, t, -1, self.config.head_dim) for w in (self.wq, self.wk, self.wv))
        q, k = turned(q, angle_Td), turned(k, angle_Td)
        distance = torch.arange(t)[:, None] - torch.arange(t)
        seen = (distance >= 0) & (distance < (self.window or t))
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], 1) for tensor in (k, v))
        scores = (q @ k.transpose(-1, -2)).float() * self.config.head_dim**-0.5
        out = scores.masked_fill(~seen.to(q.device), -math.inf).softmax(-1).to(v.dtype) @ v
        joined: Tensor = self.wo(out.transpose(1, 2).reshape(b, t, lanes, -1))
        return joined


class LaneMlp(nn.Module):
    def __init__(self, config: ModelConfig, lanes: int) -> None:
        super().__init__()
        d, f = config.hidden_size, config.ffn_size // lanes
        self.w1, self.w3, self.w2 = LaneLinear(lanes, f, d), LaneLinear(lanes, f, d), LaneLinear(lanes, d, f)

    def forward(self, x_BTLD: Tensor) -> Tensor:
        out: Tensor = self.w2(F.silu(self.w1(x_BTLD)) * self.w3(x_BTLD))
        return out


class LaneLayer(nn.Module):
    def __init__(self, config: ModelConfig, lanes: Lanes, index: int) -> None:
        super().__init__()
        scales = lanes.count if lanes.norm_each else None
        self.attention_norm, self.ffn_norm = LaneNorm(config, scales), LaneNorm(config, scales)
        window = config.sliding_window[index] if config.sliding_window else None
        self.attention, self.feed_forward = LaneAttention(config, lanes.count, window), LaneMlp(config, lanes.count)


class LaneHead(nn.Module):
    """`linear` [V, L * D] on the concatenated lanes."""

    def __init__(self, config: ModelConfig, lanes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(lanes * config.hidden_size, config.vocab_size, bias=False)

    def forward(self, x_BTLD: Tensor) -> Tensor:
        out: Tensor = self.linear(x_BTLD.flatten(2))
        return out


class _Decoder(nn.Module):
    def __init__(self, config: ModelConfig, lanes: Lanes) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(LaneLayer(config, lanes, index) for index in range(config.num_layers))
        self.norm = LaneNorm(config, lanes.count if lanes.norm_each and not lanes.sum_first else None)


class LaneReference(nn.Module):
    """The whole model; `state_dict()` has the checkpoint's names (a tied head has none)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.lanes is not None
        self.config, self.lanes = config, config.lanes
        self.model = _Decoder(config, self.lanes)
        if self.lanes.head == "lane":
            self.lm_head: nn.Module = LaneHead(config, self.lanes.count)
        elif self.lanes.head == "vocab_parallel":
            self.lm_head = LaneLinear(self.lanes.count, config.vocab_size // self.lanes.count, config.hidden_size)
        elif not config.tied_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Logits [B, T, V], every position seeing itself and those before."""
        lanes = self.lanes
        x = self.model.tok_embeddings(ids_BT)[:, :, None].expand(-1, -1, lanes.count, -1)
        angle = torch.outer(torch.arange(ids_BT.shape[1], dtype=torch.float32), steps_of(self.config)).to(x.device)
        earlier: dict[tuple[int, str], Tensor] = {}
        for index, layer in enumerate(self.model.layers):
            assert isinstance(layer, LaneLayer)
            y = earlier[index, "attention"] = layer.attention(layer.attention_norm(x), angle)
            x = x + self._joined(y, index, earlier.get((index - lanes.delay, "attention")), lanes.attention)
            y = earlier[index, "mlp"] = layer.feed_forward(layer.ffn_norm(x))
            x = x + self._joined(y, index, earlier.get((index - lanes.delay, "mlp")), lanes.mlp)
        return self._head(x)

    def _joined(self, y_BTLD: Tensor, index: int, past_BTLD: Tensor | None, exchanged: bool) -> Tensor:
        """The addend of each lane after a sub-block."""
        if index < self.lanes.delay and self.lanes.early:
            return y_BTLD.sum(2, keepdim=True)
        if past_BTLD is None or not exchanged:
            return y_BTLD * math.sqrt(self.lanes.count)
        return y_BTLD + past_BTLD.sum(2, keepdim=True) - past_BTLD

    def _head(self, x_BTLD: Tensor) -> Tensor:
        norm = self.model.norm
        if self.lanes.head != "replicate":
            out: Tensor = self.lm_head(norm(x_BTLD))
            return out.flatten(2)
        mixed = norm(x_BTLD.sum(2)) if self.lanes.sum_first else norm(x_BTLD).mean(2)
        table = self.model.tok_embeddings if self.config.tied_embeddings else self.lm_head
        return F.linear(mixed, table.get_parameter("weight"))
