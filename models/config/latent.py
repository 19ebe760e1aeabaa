"""Latent attention as config.json describes it: DeepSeek-V3's words, which Kimi-K2 uses too. Data only, no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from .json_fields import ConfigFields

FAMILIES = {
    "deepseek_v3": "deepseek_v3",
    "deepseek_v32": "deepseek_v32",
    "glm_moe_dsa": "glm_moe_dsa",
    "kimi_k2": "deepseek_v3",
    "longcat_flash": "longcat_flash",
}
"""Values of model_type, and the family that each is computed as."""
WRAPPED = ("kimi_k25",)
"""Values of model_type whose `text_config` is the language model."""
_COMPUTED: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1},
    "longcat_flash": {
        "attention_method": "MLA",
        "mla_scale_kv_lora": True,
        "mla_scale_q_lora": True,
        "norm_topk_prob": False,
        "rope_interleave": True,
        "router_bias": False,
        "zero_expert_type": "identity",
    },
}
"""The one value of a key that is computed."""
_COMPUTED |= dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), _COMPUTED["deepseek_v3"])
_WORDS = {
    "expert_ffn_hidden_size": "moe_intermediate_size",
    "ffn_hidden_size": "intermediate_size",
    "moe_topk": "num_experts_per_tok",
    "num_layers": "num_hidden_layers",
}
"""LongCat's, and DeepSeek's for the same."""


@dataclass(frozen=True, slots=True)
class Index:
    """Sparse attention (DeepSeek-V3.2, DSA): a token attends to the `topk` positions t with the highest sums over
    `heads` heads of weight x relu(query . key of t), each of `dim` elements, of which the first are rotated.
    interleaved: the checkpoint rotates neighbouring pairs; full: whether a layer chooses positions; else it uses those
    of the last layer that did."""

    heads: int
    dim: int
    topk: int
    interleaved: bool
    full: tuple[bool, ...]

    def parameters(self, hidden: int, query_rank: int) -> int:
        """Elements of a layer that chooses."""
        return query_rank * self.heads * self.dim + hidden * (self.dim + self.heads) + 2 * self.dim


@dataclass(frozen=True, slots=True)
class Latent:
    """A token's keys and values are one latent of `rank` elements, normed, and one rotated key of `rotated`. A query
    head has `plain` elements that are not rotated and `rotated` that are, and yields `value`. Queries are made of a
    latent of `query_rank`, normed too; 0: of the residual. interleaved: the checkpoint rotates neighbouring pairs;
    scale: of the normed latent."""

    rank: int
    rotated: int
    plain: int
    value: int
    query_rank: int
    interleaved: bool
    scale: float = 1.0
    norm_eps: float = 1e-6
    index: Index | None = None

    @property
    def index_interleaved(self) -> bool:
        return self.index is not None and self.index.interleaved

    @property
    def index_plain(self) -> int:
        """Elements of an index key that are not rotated."""
        return 0 if self.index is None else self.index.dim - self.rotated

    @property
    def width(self) -> int:
        """Elements that the cache holds of a token in a layer."""
        return self.rank + self.rotated

    @property
    def shared(self) -> int:
        """Rows of the first product that all heads share."""
        return self.query_rank + self.width

    def parameters(self, hidden: int, heads: int) -> int:
        """Elements of a layer's matrices and norms."""
        queries = heads * (self.plain + self.rotated) * (self.query_rank or hidden)
        expanded = heads * (self.plain + self.value) * self.rank
        norms = self.query_rank + self.rank
        return hidden * (self.shared + heads * self.value) + queries + expanded + norms


LEAST_EXPANDED = 16
"""Tokens of a chunk that may be expanded: drafts and short chunks never are."""
GATHERED = 64 << 20
"""Bytes of scores of positions, or of latents, that torch's sparse attention computes or gathers at once."""
EXPANDED_SPACE = 256 << 20
"""Bytes that expanded keys and values may take: those of one sequence in one layer."""


@dataclass(frozen=True, slots=True)
class Expansion:
    """Which chunks attend in expanded form, on a rank with `heads` heads and numbers of `item` bytes."""

    sizes: Latent
    heads: int
    item: int

    def bytes_for(self, length: int) -> int:
        """Keys, values as made and as wide as keys, and a copy of the latents, of a sequence of `length` positions."""
        s = self.sizes
        return length * self.item * (self.heads * (3 * s.plain + 2 * s.rotated + s.value) + s.width)

    def pays(self, tokens: int, length: int) -> bool:
        """Whether the last `tokens` of `length` positions take fewer multiplications so: all positions' keys and values
        are made, and every token goes through all of them, but heads are narrower than latents."""
        s, key = self.sizes, self.sizes.plain + self.sizes.rotated
        if tokens < LEAST_EXPANDED or s.value > key or self.bytes_for(length) > EXPANDED_SPACE:
            return False
        made = s.rank * (s.plain + s.value)
        absorbed = tokens * made + tokens * (length - tokens / 2) * (s.width + s.rank)
        return length * made + tokens * length * 2 * key < absorbed


def read_latent(words: ConfigFields, family: str) -> tuple[ConfigFields, Latent, float]:
    """The words that describe the rest of the model, with attention in absorbed form: heads of one width over one key
    head; its latents; and the scale of its scores. Raises ValueError."""
    for key, value in _COMPUTED[family].items():
        if key in words and (given := words.data[key]) != value:
            raise words.fail(f"{key}={given!r} is not computed here; {value!r} is")
    if paired := family == "longcat_flash":
        words = _as_deepseek(words)
    heads = words.integer("num_attention_heads")
    if (kv_heads := words.integer("num_key_value_heads", heads)) != heads:
        raise words.fail(f"num_key_value_heads={kv_heads} must be num_attention_heads={heads}: all share one latent")
    latent = Latent(
        rank=words.integer("kv_lora_rank"),
        rotated=words.integer("qk_rope_head_dim"),
        plain=words.integer("qk_nope_head_dim"),
        value=words.integer("v_head_dim"),
        query_rank=words.integer("q_lora_rank") if "q_lora_rank" in words else 0,
        interleaved=words.boolean("rope_interleave", True),
    )
    if family in ("deepseek_v32", "glm_moe_dsa"):
        latent = replace(latent, index=_read_index(words, latent, shares=family == "glm_moe_dsa"))
    for key, size in (("kv_lora_rank", latent.rank), ("qk_rope_head_dim", latent.rotated)):
        if size % 2:
            raise words.fail(f"{key}={size} must be even")
    scale = _scale(words, latent)
    if paired:
        hidden, made = words.integer("hidden_size"), words.integer("q_lora_rank")
        latent, scale = replace(latent, scale=(hidden / latent.rank) ** 0.5), scale * (hidden / made) ** 0.5
    if words.boolean("attention_bias", False) and not latent.query_rank:
        raise words.fail("attention_bias with q_lora_rank null is not computed here; false is")
    absorbed = {"head_dim": latent.width, "num_key_value_heads": heads}
    return ConfigFields(words.where, {**words.data, **absorbed}), latent, scale


def _read_index(words: ConfigFields, latent: Latent, shares: bool) -> Index:
    """shares: the family has layers without an indexer, and rotates neighbouring pairs of the index."""
    layers = words.integer("num_hidden_layers")
    if not latent.query_rank:
        raise words.fail("q_lora_rank is null: the indexer's queries are made of the queries' latent")
    dim, types = words.integer("index_head_dim"), ["full"] * layers
    if dim < latent.rotated:
        raise words.fail(f"index_head_dim={dim} must be at least qk_rope_head_dim={latent.rotated}")
    if shares and "indexer_types" in words:
        types = list(words.strings("indexer_types"))
    elif shares and "index_topk_pattern" in words:
        pattern = words.data["index_topk_pattern"]
        types = [{"F": "full", "S": "shared"}.get(one, one) for one in pattern]
    elif shares:
        every, offset = words.integer("index_topk_freq", 1), words.integer("index_skip_topk_offset", 2, minimum=0)
        types = ["shared" if max(i - offset + 1, 0) % every else "full" for i in range(layers)]
    if len(types) != layers or types[0] != "full" or not set(types) <= {"full", "shared"}:
        raise words.fail(f"indexer_types: {types}: must be {layers} times full or shared, the first of them full")
    full = tuple(kind == "full" for kind in types)
    return Index(words.integer("index_n_heads"), dim, words.integer("index_topk"), shares, full)


def _as_deepseek(words: ConfigFields) -> ConfigFields:
    """A LongCat's words as a DeepSeek's: a layer of two attentions and two MLPs is two layers."""
    given = {other: words.integer(key) for key, other in _WORDS.items()}
    given["num_hidden_layers"] *= 2
    return ConfigFields(words.where, {**words.data, **given})


def _scale(words: ConfigFields, latent: Latent) -> float:
    """The scale by a query head's own width, also where it is absorbed; a stretched rotation has its mscale squared on
    it."""
    scale = float((latent.plain + latent.rotated) ** -0.5)
    named = next((key for key in ("rope_scaling", "rope_parameters") if key in words), None)
    if named is None:
        return scale
    rope = words.object(named)
    kind = rope.string("rope_type", rope.string("type", "default"))
    if kind == "default" or not rope.data.get("mscale_all_dim"):
        return scale
    factor = rope.number("factor")
    stretched = 1.0 if factor <= 1.0 else 0.1 * rope.number("mscale_all_dim") * math.log(factor) + 1.0
    return scale * stretched**2
