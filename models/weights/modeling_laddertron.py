"""A Llama and its kin behind any residual wiring, for transformers: copied into model folders with config.json, whose
`auto_map` names it, and is loaded with trust_remote_code=True. Computes what `laddertron_model` there describes, in one
process and in plain torch. Written by laddertron (Apache-2.0); no part of laddertron is needed to run it.
"""

# mypy: ignore-errors
import math

import torch
import torch.nn.functional as F
from torch import nn
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast


class LaddertronConfig(PretrainedConfig):
    model_type = "laddertron"


class LlamaLadderConfig(PretrainedConfig):
    model_type = "llamaLadder"


class LadderResidualConfig(PretrainedConfig):
    model_type = "ladder_residual"
    attribute_map = {"num_hidden_layers": "num_layers"}  # noqa: RUF012


class Norm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x):
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


def frequencies(m):
    """Radians a position for each pair of a head, and the factor on cosine and sine."""
    rope, dim = m["rope"], m["rope"]["rotated"] or m["head_dim"]
    kind, factor, original = rope["kind"], rope["factor"], rope["original_max_position_embeddings"]
    frequency = rope["theta"] ** (-torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if kind == "linear":
        return frequency / factor, 1.0
    if kind == "llama3":
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        blend = ((original * frequency / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
        return frequency * (blend + (1 - blend) / factor), 1.0
    if kind == "yarn":
        low, high = (
            dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope["theta"]))
            for turns in (rope["beta_fast"], rope["beta_slow"])
        )
        if not rope.get("fractional"):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        blend = 1 - ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
        return frequency * (blend + (1 - blend) / factor), rope["attention_factor"] or 1.0
    return frequency, 1.0  # dynamic too, up to the trained length


def rotate(x, cos, sin):
    x, rest = x.split((cos.shape[-1], x.shape[-1] - cos.shape[-1]), -1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((x * cos + torch.cat((-second, first), dim=-1) * sin, rest), -1)


class Attention(nn.Module):
    """Attention of `tp` ranks at once, each with its own input and heads: desync's residuals differ; elsewhere tp is
    1."""

    def __init__(self, m, index, tp):
        super().__init__()
        self.m, self.index, self.tp = m, index, tp
        self.window = m["sliding_window"][index] if m["sliding_window"] else None
        d, dim, heads, kv = m["hidden_size"], m["head_dim"], m["num_heads"], m["num_kv_heads"]
        self.group = heads // kv
        if m["layout"] == "dolomite":
            self.c_attn = nn.Linear(d, (heads + 2 * kv) * dim, bias=m["qkv_bias"])
            self.c_proj = nn.Linear(heads * dim, d, bias=m["o_bias"])
        else:
            for name, count in (("q", heads), ("k", kv), ("v", kv)):
                setattr(self, f"{name}_proj", nn.Linear(d, count * dim, bias=m["qkv_bias"]))
            self.o_proj = nn.Linear(heads * dim, d, bias=m["o_bias"])
        if m["qk_norm"]:
            self.q_norm, self.k_norm = Norm(dim, m["norm_eps"]), Norm(dim, m["norm_eps"])

    def project(self, x, rank):
        """[B, H | K, T, d] of the rank's heads, and of the key/value heads that they read."""
        b, t, dim, heads = *x.shape[:2], self.m["head_dim"], self.m["num_heads"] // self.tp
        first, last = rank * heads // self.group, ((rank + 1) * heads - 1) // self.group + 1
        if self.m["layout"] == "dolomite":
            grouped = self.c_attn(x).view(b, t, self.m["num_kv_heads"], self.group + 2, dim)
            parts = grouped[..., : self.group, :].flatten(2, 3), grouped[..., self.group, :], grouped[..., -1, :]
        else:
            parts = tuple(proj(x).view(b, t, -1, dim) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (
            parts[0][:, :, rank * heads : (rank + 1) * heads],
            parts[1][:, :, first:last],
            parts[2][:, :, first:last],
        )
        if self.m["qk_norm"]:
            q, k = self.q_norm(q), self.k_norm(k)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def forward(self, xs, turn, cache, padding):
        parts = [self.project(x, rank) for rank, x in enumerate(xs)]
        counts = [k.shape[1] for _, k, _ in parts]
        q = torch.cat([rotate(q, *turn) for q, _, _ in parts], 1)
        k = torch.cat([rotate(k, *turn) for _, k, _ in parts], 1)
        v = torch.cat([v for _, _, v in parts], 1)
        length = q.shape[2]
        if cache is not None:
            length += cache.get_seq_length(self.index)
            k, v = cache.update(k, v, self.index)
        key_positions = torch.arange(length - k.shape[2], length, device=q.device)
        asks = torch.arange(length - q.shape[2], length, device=q.device)
        distance = asks[:, None] - key_positions
        seen = distance >= 0
        if self.window is not None:
            seen = seen & (distance < self.window)
        seen = seen[None, None]
        if padding is not None:
            seen = seen & padding[:, None, None, -k.shape[2] :].bool() | (distance == 0)
        outs, heads, at = [], self.m["num_heads"] // self.tp, 0
        proj = self.c_proj if self.m["layout"] == "dolomite" else self.o_proj
        for rank, count in enumerate(counts):
            first = rank * heads // self.group
            reads = torch.arange(rank * heads, (rank + 1) * heads, device=q.device) // self.group - first + at
            mine = slice(rank * heads, (rank + 1) * heads)
            out = F.scaled_dot_product_attention(
                q[:, mine], k[:, reads], v[:, reads], seen, scale=self.m["attention_scale"]
            )
            columns = slice(mine.start * self.m["head_dim"], mine.stop * self.m["head_dim"])
            outs.append(F.linear(out.transpose(1, 2).flatten(2), proj.weight[:, columns], None if rank else proj.bias))
            at += count
        return outs


class Mlp(nn.Module):
    def __init__(self, m, tp, size=None):
        super().__init__()
        d, f, bias = m["hidden_size"], size or m["ffn_size"], m["mlp_bias"]
        self.tp, self.share, self.fused = tp, f // tp, m["layout"] == "dolomite"
        if self.fused:
            self.c_fc, self.c_proj = nn.Linear(d, 2 * f, bias=bias), nn.Linear(f, d, bias=bias)
        else:
            self.gate_proj, self.up_proj = nn.Linear(d, f, bias=bias), nn.Linear(d, f, bias=bias)
            self.down_proj = nn.Linear(f, d, bias=bias)

    def part(self, x, rank):
        down = self.c_proj if self.fused else self.down_proj
        up, gate = self.c_fc(x).chunk(2, -1) if self.fused else (self.up_proj(x), self.gate_proj(x))
        mine = slice(rank * self.share, (rank + 1) * self.share)
        return F.linear((F.silu(gate) * up)[..., mine], down.weight[:, mine], None if rank else down.bias)

    def forward(self, xs):
        return [self.part(x, rank) for rank, x in enumerate(xs)]


def ranking(scores):
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices


class Mixture(nn.Module):
    def __init__(self, m, tp):
        super().__init__()
        e = self.e = m["experts"]
        self.gate = nn.Linear(m["hidden_size"], e["count"], bias=False)
        if e["router"]["biased"]:
            self.gate.e_score_correction_bias = nn.Parameter(torch.zeros(e["count"]))
        self.experts = nn.ModuleList(Mlp(m, tp, e["ffn_size"]) for _ in range(e["count"]))
        self.shared_experts = Mlp(m, tp, e["shared_ffn_size"]) if e["shared_ffn_size"] else None

    def choose(self, x):
        """Experts [N, k] of rows [N, D], ties to the lower index, and their weights."""
        r = self.e["router"]
        logits = F.linear(x.float(), self.gate.weight.float()) if r["wide"] else self.gate(x)
        scores = logits.float().softmax(-1) if r["score"] == "softmax" else logits.float().sigmoid()
        ranked = scores + self.gate.e_score_correction_bias if r["biased"] else scores
        if r["groups"] > 1:
            groups = ranked.view(len(ranked), r["groups"], -1)
            best = groups.topk(2, -1).values.sum(-1)
            drop = ranking(best)[:, r["chosen_groups"] :, None].expand(-1, -1, groups.shape[2])
            ranked = groups.scatter(1, drop, -math.inf).flatten(1)
        chosen = ranking(ranked)[:, : self.e["chosen"]]
        weight = scores.gather(1, chosen)
        if r["normalises"]:
            weight = weight / (weight.sum(-1, keepdim=True) + r["epsilon"])
        weight = weight * r["scale"]
        return chosen, weight.to(logits.dtype).float() if r["rounds"] else weight

    def forward(self, xs):
        outs = []
        for rank, x in enumerate(xs):
            rows = x.flatten(0, 1)
            chosen, weight = self.choose(rows)
            out = torch.zeros(rows.shape, dtype=torch.float32, device=x.device)
            for number in chosen.unique().tolist():
                at, slot = torch.where(chosen == number)
                out.index_add_(0, at, self.experts[number].part(rows[at], rank).float() * weight[at, slot, None])
            out = out.to(x.dtype).view_as(x)
            outs.append(out if self.shared_experts is None else out + self.shared_experts.part(x, rank))
        return outs


class Layer(nn.Module):
    def __init__(self, m, index, tp):
        super().__init__()
        wiring, kind = m["wiring"], m["wiring"]["kinds"][index]
        d, fused = wiring["delay"], m["layout"] == "dolomite"
        names = ("ln_1", "ln_2", "sequence_mixer", "mlp_block")
        stock = ("input_layernorm", "post_attention_layernorm", "self_attn", "mlp")
        self.names = names if fused else stock
        self.scale, self.tp, self.every = m["residual_multiplier"], tp, wiring["desync_every"]
        self.place, self.last = 2 * index, 2 * m["num_layers"]
        self.lags = {"parallel": (0, 1), "ladder": (1, 1), "delay": (d, d)}.get(kind, (0, 0))
        if kind == "parallel":
            self.names = (self.names[0], self.names[0], *self.names[2:])
        for name in set(self.names[:2]):
            setattr(self, name, Norm(m["hidden_size"], m["norm_eps"]))
        setattr(self, self.names[2], Attention(m, index, tp))
        mixed = m["experts"] and m["experts"]["layers"][index]
        setattr(self, self.names[3], Mixture(m, tp) if mixed else Mlp(m, tp))

    def forward(self, streams, turn, cache, padding):
        """streams: the residual as it was after each of the latest sub-blocks, newest last; under desync, each rank's.
        A sub-block reads the one that its lag names."""
        norms, mixer, mlp = [getattr(self, name) for name in self.names[:2]], *map(self.__getattr__, self.names[2:])
        for half, (norm, lag) in enumerate(zip(norms, self.lags)):  # noqa: B905
            xs = [norm(x) for x in (streams if self.every else streams[-1 - lag :][:1])]
            outs = [out * self.scale for out in (mlp(xs) if half else mixer(xs, turn, cache, padding))]
            if not self.every:
                streams = (*streams, streams[-1] + outs[0])[-len(streams) :]
                continue
            number = self.place + half + 1
            if number % self.every == 0 or number == self.last:
                streams = (sum(out + x / self.tp for out, x in zip(outs, streams)),) * self.tp  # noqa: B905
            else:
                streams = tuple(out + x for out, x in zip(outs, streams))  # noqa: B905
        return streams


class Decoder(nn.Module):
    def __init__(self, m, tp):
        super().__init__()
        self.names = ("wte", "h", "ln_f") if m["layout"] == "dolomite" else ("embed_tokens", "layers", "norm")
        setattr(self, self.names[0], nn.Embedding(m["vocab_size"], m["hidden_size"]))
        setattr(self, self.names[1], nn.ModuleList(Layer(m, index, tp) for index in range(m["num_layers"])))
        setattr(self, self.names[2], Norm(m["hidden_size"], m["norm_eps"]))


class LaddertronForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = LaddertronConfig
    _no_split_modules = ["Layer"]  # noqa: RUF012
    _supports_sdpa = True

    def __init__(self, config):
        super().__init__(config)
        m = self.described = config.laddertron_model
        wiring = m["wiring"]
        tp = wiring["trained_tp"] or 1
        self.copies = tp if wiring["desync_every"] else 1 + max(wiring["delay"], 1)
        self.base = "transformer" if m["layout"] == "dolomite" else "model"
        setattr(self, self.base, Decoder(m, tp))
        if not m["tied_embeddings"]:
            self.lm_head = nn.Linear(m["hidden_size"], m["vocab_size"], bias=False)
        self.post_init()

    def _init_weights(self, module):
        """Weights come from the checkpoint."""

    def get_input_embeddings(self):
        decoder = getattr(self, self.base)
        return getattr(decoder, decoder.names[0])

    def forward(
        self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, inputs_embeds=None,
        labels=None, use_cache=None, logits_to_keep=0, **ignored,
    ):  # fmt: skip
        m, decoder = self.described, getattr(self, self.base)
        _, layers, norm = (getattr(decoder, name) for name in decoder.names)
        x = self.get_input_embeddings()(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache()
        past = 0 if past_key_values is None else past_key_values.get_seq_length()
        if position_ids is None:
            position_ids = torch.arange(past, past + x.shape[1], device=x.device)[None]
        frequency, factor = frequencies(m)
        angle = position_ids[:, None, :, None].float() * torch.cat((frequency, frequency)).to(x.device)
        turn = (angle.cos() * factor).to(x.dtype), (angle.sin() * factor).to(x.dtype)
        streams = (x * m["embedding_multiplier"],) * self.copies
        for layer in layers:
            streams = layer(streams, turn, past_key_values, attention_mask)
        rows = norm(streams[-1][:, -logits_to_keep:] if logits_to_keep else streams[-1])
        head = self.get_input_embeddings().weight if m["tied_embeddings"] else self.lm_head.weight
        logits = F.linear(rows, head) / m["logits_divisor"]
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values)


class LlamaLadderForCausalLM(LaddertronForCausalLM):
    config_class = LlamaLadderConfig


class LadderResidualForCausalLM(LaddertronForCausalLM):
    config_class = LadderResidualConfig
