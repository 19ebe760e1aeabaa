"""Mixtures of experts as config.json describes them: how many, of which size, in which layers, and how a family's
router chooses among them. One row of data a family. Data only, no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from .json_fields import ConfigFields


@dataclass(frozen=True, slots=True)
class Router:
    """The choice and weights of a token's experts. wide: the product is computed in fp32, not in the model's type;
    rounds: weights are rounded to the model's type; biased: a stored bias is added to the scores for the choice alone;
    groups, chosen_groups: experts are chosen from the groups whose two best scores have the largest sums; normalises:
    weights are divided by their sum + epsilon; scale: weights are multiplied by it; offset: the product has a bias."""

    score: Literal["softmax", "sigmoid"]
    wide: bool = False
    rounds: bool = False
    biased: bool = False
    groups: int = 1
    chosen_groups: int = 1
    normalises: bool = True
    epsilon: float = 0.0
    scale: float = 1.0
    offset: bool = False


class Clamped(NamedTuple):
    """The gate (up + 1) * gate * sigmoid(alpha * gate), with gate at most `limit` and up within it."""

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True)
class Experts:
    """`count` gated MLPs of `ffn_size`, of which a token uses `chosen`. layers: for each layer, whether it has experts
    instead of its MLP. identities: number of additional experts that return their input; beside: layers have experts in
    addition to their MLP. clamped: the gate if it is not silu; both products then have biases."""

    count: int
    chosen: int
    ffn_size: int
    layers: tuple[bool, ...]
    router: Router
    shared_ffn_size: int = 0
    identities: int = 0
    beside: bool = False
    clamped: Clamped | None = None

    @property
    def routed(self) -> int:
        """The number of experts from which the router chooses."""
        return self.count + self.identities


@dataclass(frozen=True, slots=True)
class _Family:
    """A family's keys: for the number of experts (several names, the published one first), an expert's size, the layers
    with experts, the router, the number of shared experts, the number of identity experts, which layers have in
    addition to their MLP, and the gate if it is not silu."""

    architecture: str
    count: tuple[str, ...]
    ffn: str
    layers: Callable[[ConfigFields, int], tuple[bool, ...]]
    router: Callable[[ConfigFields], Router]
    shared: str | None = None
    identities: str | None = None
    clamped: Callable[[ConfigFields], Clamped | None] = lambda fields: None


def _by_step(fields: ConfigFields, layers: int) -> tuple[bool, ...]:
    step = fields.integer("decoder_sparse_step", 1)
    dense = fields.integers("mlp_only_layers", layers) if "mlp_only_layers" in fields else ()
    return tuple(i not in dense and (i + 1) % step == 0 for i in range(layers))


def _softmax(fields: ConfigFields) -> Router:
    return Router("softmax", rounds=True, normalises=fields.boolean("norm_topk_prob", False))


def _sigmoid(fields: ConfigFields) -> Router:
    return Router(
        "sigmoid",
        wide=True,
        biased=True,
        groups=(groups := fields.integer("n_group", 1)),
        chosen_groups=fields.integer("topk_group", 1, maximum=groups),
        normalises=fields.boolean("norm_topk_prob", True),
        epsilon=1e-20,
        scale=fields.number("routed_scaling_factor", 1.0),
    )


def _but_first(fields: ConfigFields, layers: int) -> tuple[bool, ...]:
    if "mlp_layer_types" in fields:
        types = fields.strings("mlp_layer_types")
        if len(types) != layers or not set(types) <= {"dense", "sparse"}:
            raise fields.fail(f"mlp_layer_types must be {layers} times dense or sparse")
        return tuple(kind == "sparse" for kind in types)
    first = fields.integer("first_k_dense_replace", 1, minimum=0)
    return tuple(i >= first for i in range(layers))


FAMILIES = {
    "qwen3_moe": _Family(
        "Qwen3MoeForCausalLM", ("num_experts", "num_local_experts"), "moe_intermediate_size", _by_step, _softmax
    ),
    "mixtral": _Family(
        "MixtralForCausalLM",
        ("num_local_experts", "num_experts"),
        "intermediate_size",
        lambda fields, layers: (True,) * layers,
        lambda fields: Router("softmax"),
    ),
    "glm4_moe": _Family(
        "Glm4MoeForCausalLM",
        ("n_routed_experts", "num_local_experts"),
        "moe_intermediate_size",
        _but_first,
        _sigmoid,
        "n_shared_experts",
    ),
}
FAMILIES["longcat_flash"] = _Family(
    "LongcatFlashForCausalLM",
    ("n_routed_experts", "num_local_experts"),
    "moe_intermediate_size",
    lambda fields, layers: (True, False) * (layers // 2),
    lambda fields: Router(
        "softmax", wide=True, biased=True, normalises=False, scale=fields.number("routed_scaling_factor", 1.0)
    ),
    identities="zero_expert_num",
)
FAMILIES["gpt_oss"] = replace(
    FAMILIES["mixtral"],
    architecture="GptOssForCausalLM",
    router=lambda fields: Router("softmax", rounds=True, offset=True),
    clamped=lambda fields: Clamped(fields.number("swiglu_alpha", 1.702), fields.number("swiglu_limit", 7.0)),
)
FAMILIES["deepseek_v3"] = replace(FAMILIES["glm4_moe"], architecture="DeepseekV3ForCausalLM")
FAMILIES["deepseek_v32"] = replace(FAMILIES["glm4_moe"], architecture="DeepseekV32ForCausalLM")
FAMILIES["glm_moe_dsa"] = replace(FAMILIES["glm4_moe"], architecture="GlmMoeDsaForCausalLM")
MISSING = {
    "deepseek_v2": "its router",
    "deepseek_v4": "sparse attention",
    "ernie4_5_moe": "its router and shared experts",
    "glm4_moe_lite": "its names of latent attention",
    "glm5_next": "linear attention, hyper-connections and pooled sparse attention",
    "granitemoe": "its multipliers and fused experts",
    "kimi_linear": "linear attention",
    "kimi_k3": "linear attention",
    "llama4": "its router and chunked attention",
    "minimax": "linear attention",
    "minimax_m2": "its norm of queries and keys over all heads together",
    "minimax_m3_vl": "its attention",
    "mimo_v2_flash": "attention sinks, and windows with other heads",
    "nemotron_h": "recurrent layers",
    "olmoe": "its norm of queries and keys over all heads together",
    "phimoe": "its router",
    "qwen2_moe": "its gated shared expert",
    "qwen3_5": "linear attention",
    "qwen3_5_moe": "linear attention",
    "qwen3_next": "linear attention",
    "qwen3_vl_moe": "its vision tower",
    "step3p7": "windows with other heads, and limits of its experts",
}
"""Features of other families of experts that are not supported."""
_WORDS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_intermediate_size")


def read_experts(fields: ConfigFields, family: str, layers: int) -> Experts | None:
    words = FAMILIES.get(family)
    if words is None:
        if used := next((key for key in _WORDS if key in fields), None):
            raise fields.fail(f"{used} says mixture of experts, and {family} is computed as a dense model")
        return None
    given = {key: fields.integer(key) for key in words.count if key in fields}
    if len(set(given.values())) > 1:
        raise fields.fail(f"{' and '.join(f'{k}={v}' for k, v in given.items())} contradict each other")
    count = next(iter(given.values()), 0) or fields.integer(words.count[0])
    identities = fields.integer(words.identities, 0, minimum=0) if words.identities else 0
    chosen = fields.integer("num_experts_per_tok", maximum=count + identities)
    router, has = words.router(fields), words.layers(fields, layers)
    if not any(has):
        return None
    _check_groups(fields, router, count + identities, chosen)
    size = fields.integer(words.ffn)
    shared = 0 if words.shared is None else size * fields.integer(words.shared, 1, minimum=0)
    beside = words.identities is not None
    return Experts(count, chosen, size, has, router, shared, identities, beside, words.clamped(fields))


def _check_groups(fields: ConfigFields, router: Router, count: int, chosen: int) -> None:
    if router.groups > 1 and (count % router.groups or count // router.groups < 2):
        raise fields.fail(f"n_group={router.groups}: {count} experts are not so many groups of two and more")
    if chosen > (most := count // router.groups * router.chosen_groups):
        raise fields.fail(f"num_experts_per_tok={chosen}: topk_group={router.chosen_groups} groups have {most} experts")
