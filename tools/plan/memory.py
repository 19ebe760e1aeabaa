"""A rank's memory in a plan: weights by part, what steps take, reserve, and what is left for keys and values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from ...engine.step.memory import GIB, GPU_CONTEXT, NCCL_BUFFERS, MemoryKeys, working_memory
from ...models.config.model_config import ModelConfig
from ...models.config.quantisation import BYTES, Quantisation, scale_width
from ...models.config.shapes import WHOLE, Sharing
from ...models.stages import RankShard
from ...models.weights.quantised import DEPTH, kept_bytes, may_stay
from ...models.weights.slices import EXPERTS, PRODUCTS, SHARED, product_columns

FP8 = Quantisation("fp8")


@dataclass(frozen=True, slots=True)
class StoredTypes:
    """Storage types: of projections, of all other weights and activations, of KV."""

    weights: str = "bfloat16"
    """A type, or the title of `form` in lower case: then they are quantised."""
    values: str = "bfloat16"
    kv: str = "bfloat16"
    wide: tuple[tuple[str, ...], ...] = ()
    """The products of each layer that are stored as `values` although the weights are quantised; empty: none."""
    form: Quantisation = FP8
    """The form of quantised weights."""

    @property
    def quantised(self) -> bool:
        return self.weights == self.form.title.lower()

    def kept(self) -> tuple[tuple[str, ...], ...]:
        """`wide` if the weights are quantised, else empty."""
        return self.wide if self.quantised else ()

    @property
    def keeps_dense(self) -> bool:
        """Whether products other than experts' are quantised."""
        return self.quantised and not all(set(PRODUCTS) <= {*layer} for layer in self.wide or ((),))

    @property
    def by_scaled_rows(self) -> bool:
        """Whether products other than experts' multiply fp8 with one scale a row."""
        return self.weights == "fp8" and self.form.block is None and self.form.code == "e4m3"

    @property
    def multiplied(self) -> str:
        """The type in which products other than experts' are computed: others are widened in registers."""
        return "fp8" if self.by_scaled_rows else self.values

    @property
    def element_bytes(self) -> float:
        """Bytes of a weight, with its part of a scale."""
        scales = self.form.scale_bytes / self.form.block[1] if self.quantised and self.form.block else 0.0
        return BYTES[self.weights] + scales

    def expert_bytes(self, shard: RankShard) -> int:
        """Bytes of a layer's experts and their scales on a rank, without shared experts, as models/weights/mapping.py
        stores them. A product that is wide in one layer counts as wide in all."""
        if shard.config.experts is None:
            return 0
        d, ffn, count, total = shard.config.hidden_size, len(shard.expert_ffn), len(shard.expert_ids), 0.0
        for product, shape in zip(EXPERTS, ((count * 2 * ffn, d), (count * d, ffn)), strict=True):
            wide = any(product in layer for layer in self.wide) or not may_stay(shape[1], self.form, DEPTH)
            if self.quantised and not wide:
                total += kept_bytes(shape, self.form)
            else:
                total += math.prod(shape) * BYTES[self.values if self.quantised else self.weights]
        return int(total)

    def shared_bytes(self, shard: RankShard) -> int:
        """Bytes of a layer's shared experts on a rank; a form is known by its elements."""
        elements = 3 * shard.config.hidden_size * len(shard.shared_ffn)
        wide = self.quantised and any(SHARED in layer for layer in self.wide)
        return int(elements * (BYTES[self.values] if wide else self.element_bytes))

    def summary(self) -> dict[str, object]:
        """For JSON: `wide` as the number of layers for each product."""
        counts = {product: sum(product in layer for layer in self.kept()) for product in (*PRODUCTS, SHARED, *EXPERTS)}
        wide = {product: count for product, count in counts.items() if count}
        return {"weights": self.weights, "values": self.values, "kv": self.kv, "wide": wide, "block": self.form.block}


@dataclass(frozen=True, slots=True)
class Memory:
    """One rank. `parts` in bytes, weights first; `kv_bytes`: the KV cache's size (0 if the rest does not fit)."""

    device_bytes: int
    parts: Mapping[str, int]
    kv_bytes: int
    kv_bytes_per_token: int
    kv_tokens: int
    max_model_len: int
    max_num_seqs: int

    @property
    def weight_bytes(self) -> int:
        return sum(size for name, size in self.parts.items() if name.startswith("weights: "))

    @property
    def fits(self) -> bool:
        """True if weights and buffers fit and the KV cache has room for one sequence of the configured length."""
        return self.kv_bytes > 0 and self.kv_tokens > self.max_model_len

    @property
    def largest_context(self) -> int:
        """Positions of the longest sequence that fits alone, regardless of the model's own limit."""
        return max(0, self.kv_tokens - 1)

    def sequences(self, positions: int) -> int:
        """The number of sequences of `positions` positions that fit at once, regardless of slots."""
        return self.kv_tokens // (positions + 1)

    @property
    def verdict(self) -> str:
        """The result in words, with the bytes needed and available."""
        have, used = self.device_bytes, sum(self.parts.values())
        if self.kv_bytes <= 0:
            return (
                f"does not fit: a rank needs {used / GIB:.1f} GiB ({self.weight_bytes / GIB:.1f} of it weights) before "
                f"any KV and has {have / GIB:.1f} GiB"
            )
        if not self.fits:
            return (
                f"does not fit max_model_len={self.max_model_len}: {self.kv_bytes / GIB:.1f} GiB of KV hold "
                f"{self.kv_tokens} positions; use at most {self.largest_context}"
            )
        return f"fits: {self.kv_bytes / GIB:.1f} GiB of {have / GIB:.1f} are left for {self.kv_tokens:,} KV positions"


def memory(
    config: ModelConfig,
    size: int,
    stored: StoredTypes,
    keys: MemoryKeys,
    device_bytes: int,
    stages: int = 1,
    sharing: Sharing = WHOLE,
) -> Memory:
    """The memory of one rank of a group of `size` that has all layers or, in a pipeline of `stages`, those of the
    largest stage and one of the embedding and head."""
    c, shard = config, RankShard(config, size, 0, None, *sharing)
    apart = 0 < keys.predictor_ranks < size
    layers = -(-c.num_layers // stages)
    linear, other, kv = BYTES[stored.weights], BYTES[stored.values], BYTES[stored.kv]
    d, dim = c.hidden_size, c.head_dim
    outputs = shard.attention_outputs
    elements = {**shard.attention_elements, "gate_up": 2 * d * shard.ffn_size, "down": d * shard.ffn_size}
    expanded = elements.pop("kv_b", 0)
    if c.latent is not None and not keys.gpu and not keys.deterministic:  # a second, transposed copy of the keys' part
        expanded += shard.num_heads * c.latent.plain * c.latent.rank
    wide = _fullest_part([sum(elements.get(p, 0) for p in layer) for layer in stored.kept()], stored.kept(), layers)
    wide_layers = {product: sum(product in layer for layer in wide) for product in PRODUCTS}
    has = () if c.experts is None else c.experts.layers
    beside = c.experts is not None and c.experts.beside  # in every other layer, so in half of a stage's
    mixed = -(-layers * sum(has) // c.num_layers) if beside else min(layers, sum(has))
    dense = layers if beside else layers - mixed
    of = {"qkv": layers, "o": layers, "gate_up": dense, "down": dense}
    product_bytes = {
        p: n * (of[p] * linear + min(of[p], wide_layers[p]) * (other - linear)) for p, n in elements.items()
    }
    router, int8_scales = _expert_elements(shard)
    biases = outputs * c.qkv_bias + d * c.o_bias + 2 * dim * c.qk_norm + (2 * shard.ffn_size + d) * c.mlp_bias
    biases += c.latent.rank + c.latent.query_rank if c.latent is not None else 0
    biases += shard.num_heads * c.sinks
    scales = shard.num_lanes if c.lanes is not None and c.lanes.norm_each else 1
    norms = (sum(d if kind == "parallel" else 2 * d for kind in c.wiring.kinds) * layers // c.num_layers + d) * scales
    rows = shard.padded_vocab // size
    embedding = c.vocab_size if keys.replicate_embedding else len(shard.embedded)
    # A tied head is the embedding's shard; with a replicated embedding the head is stored separately.
    head = rows if shard.has_head(keys.replicate_embedding) else 0
    if stages > 1:
        both = keys.predictor is not None and not apart  # it embeds what the last stage samples
        embedding, head = embedding + head if both else max(embedding, head), 0
    head *= c.lanes.count if c.lanes is not None and c.lanes.head == "lane" else 1
    scaled, scale_bytes = {"qkv": outputs, "o": d, "gate_up": 2 * shard.ffn_size, "down": d}, 4
    if stored.quantised:
        scaled, scale_bytes = _scales(shard, elements, stored.form), stored.form.scale_bytes
    elif stored.weights != "int8":
        scaled = {}
    scales = sum(scale_bytes * n * max(0, of[product] - wide_layers[product]) for product, n in scaled.items())
    scales += 4 * mixed * int8_scales if stored.weights == "int8" else 0
    working = working_memory(config, size, other, keys, sharing)
    rotary = (keys.max_model_len + 1) * dim * 4 * 2
    parts = {
        "weights: embedding": int(embedding * d * other),
        "weights: attention": int(product_bytes["qkv"] + product_bytes["o"] + layers * expanded * other),
        "weights: MLP": int(product_bytes["gate_up"] + product_bytes["down"]),
        "weights: experts": int(mixed * (stored.expert_bytes(shard) + stored.shared_bytes(shard))),
        "weights: router": int(mixed * router * other),
        "weights: norms, biases, scales": int((norms + layers * biases) * other + scales),
        "weights: head": int(head * d * other),
        **working | {"activations": working["activations"] + rotary},
    }
    per_token = int(layers * shard.cached_elements / c.num_layers * kv)
    if keys.draft_model is not None:
        draft = keys.draft_model
        parts["weights: draft model"] = int(draft.num_parameters * other)
        per_token += int(RankShard(draft, 1, 0).cached_elements * other)
    if keys.predictor is not None:
        one, plain = replace(stored, wide=stored.wide[-1:]), replace(keys, predictor=None)
        ranks, shared = (keys.predictor_ranks, WHOLE) if apart else (size, sharing)
        layer = memory(keys.predictor, ranks, one, replace(plain, replicate_embedding=False), device_bytes, 1, shared)
        ends = 0 if apart else layer.parts["weights: embedding"] + layer.parts["weights: head"]
        parts["weights: predicting layer"] = layer.weight_bytes - ends + int((2 * d + 2) * d * other)
        per_token += layer.kv_bytes_per_token
    reserve = 0
    if keys.gpu:
        parts["CUDA context"] = GPU_CONTEXT
        parts["NCCL buffers"] = NCCL_BUFFERS if size > 1 else 0
        reserve = int(device_bytes * (1.0 - keys.utilization))
    parts["reserve"] = reserve
    left = device_bytes - sum(parts.values())
    kv_limit = keys.kv_cache_memory
    budget = max(0, left if kv_limit is None else min(left, kv_limit))
    tokens_held = budget // (per_token * keys.block_size) * keys.block_size
    return Memory(device_bytes, parts, budget, per_token, tokens_held, keys.max_model_len, keys.max_num_seqs)


def _scales(shard: RankShard, elements: Mapping[str, int], q: Quantisation) -> dict[str, int]:
    """The number of scales of each product of a layer that is quantised."""
    columns, numbers = product_columns(shard), dict[str, int]()
    for product, size in elements.items():
        if product == "qkv" and (latent := shard.config.latent) is not None:
            first = shard.config.hidden_size * latent.shared
            made = columns["latent.q"] if latent.query_rank else columns["latent.down"]
            numbers[product] = first // scale_width(columns["latent.down"], q.block)
            numbers[product] += (size - first) // scale_width(made, q.block)
        elif product in columns:
            numbers[product] = size // scale_width(columns[product], q.block)
    return numbers


def _expert_elements(shard: RankShard) -> tuple[int, int]:
    """A rank's share of a layer of experts: elements of the router, int8 scales."""
    e, d = shard.config.experts, shard.config.hidden_size
    if e is None:
        return 0, 0
    inner, shared = len(shard.expert_ids) * len(shard.expert_ffn), len(shard.shared_ffn)
    outputs = 2 * (inner + shared) + d * (len(shard.expert_ids) + (shared > 0))
    biases = 0 if e.clamped is None else len(shard.expert_ids) * (2 * len(shard.expert_ffn) + d)
    return e.routed * (d + e.router.biased + e.router.offset) + biases, outputs


def _fullest_part(sizes: Sequence[int], wide: Sequence[tuple[str, ...]], layers: int) -> Sequence[tuple[str, ...]]:
    """The `layers` consecutive entries of `wide` with the greatest sum of `sizes`."""
    sums = [0, *accumulate(sizes)]
    first = max(range(max(0, len(sizes) - layers) + 1), key=lambda i: sums[min(i + layers, len(sizes))] - sums[i])
    return wide[first : first + layers]
