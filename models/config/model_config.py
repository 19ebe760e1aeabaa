"""ModelConfig: a checkpoint folder's config.json in the field's terms. `from_folder` refuses by name an architecture,
activation or rope scaling that the model code does not compute exactly. No torch.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from . import experts as moe
from . import latent as mla
from .experts import Experts
from .json_fields import ConfigFields, read_json
from .lanes import Lanes, is_laneformer, read_lanes
from .latent import Latent
from .parts import Rope, Wiring, WiringKind, declared_wiring, ladder_last, make_wiring, read_rope
from .quantisation import read_quantisation

__all__ = ["Dtype", "Experts", "Layout", "ModelConfig", "Rope", "Wiring", "WiringKind", "from_folder", "make_wiring"]

Layout = Literal[
    "huggingface", "mixtral", "gpt_oss", "dolomite", "laneformer", "latent", "shortcut",
    "predictor", "latent_predictor", "shortcut_predictor",
]  # fmt: skip
Dtype = Literal["float32", "bfloat16", "float16"]
T = TypeVar("T")
STOCK_FAMILIES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    **{family: words.architecture for family, words in moe.FAMILIES.items()},
}
"""Families that transformers has, and its class of each. `model_type: laddertron` is one of them, named in
`laddertron_family`, under a name that stops programs which do not know its wiring."""
_SIZES = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 128},
    "mixtral": {"rope_theta": 1e6},
    "glm4_moe": {"partial_rotary_factor": 0.5},
    "gpt_oss": {
        "head_dim": 64,
        "attention_bias": True,
        "sliding_window": 128,
        "rms_norm_eps": 1e-5,
        "torch_dtype": "bfloat16",
        "rope_theta": 150000.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    "deepseek_v3": _SIZES | {"first_k_dense_replace": 3, "n_group": 8, "routed_scaling_factor": 2.5, "topk_group": 4},
    "glm_moe_dsa": {
        **_SIZES,
        "q_lora_rank": 2048,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk": 2048,
        "rms_norm_eps": 1e-5,
        "first_k_dense_replace": 3,
        "routed_scaling_factor": 2.5,
    },
    "longcat_flash": _SIZES
    | {"rms_norm_eps": 1e-5, "rope_theta": 1e7, "routed_scaling_factor": 6.0, "zero_expert_num": 256},
}
DEFAULTS["deepseek_v32"] = DEFAULTS["deepseek_v3"] | {"index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048}
"""A family's values of keys that are not given, as transformers has them, where they are not every family's."""
OWN_LAYOUTS: dict[str, Layout] = {"mixtral": "mixtral", "gpt_oss": "gpt_oss"}
"""Families with names of their own for the tensors of experts."""
MAX_LAYERS = 4096
"""Far above any model: one wiring kind a layer is held in memory."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder. L = num_layers, D = hidden_size, H = num_heads, K = num_kv_heads, V = vocab_size."""

    family: str  # model_type as the checkpoint says it: llama, llamaLadder, ladder_residual, mistral, qwen3_moe, …
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    max_position_embeddings: int
    norm_eps: float
    rope: Rope
    wiring: Wiring
    dtype: Dtype
    tied_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sinks: bool = False  # a learned score for each head in the softmax's denominator
    sliding_window: tuple[int | None, ...] = ()  # one a layer, itself counted; () means none anywhere
    residual_multiplier: float = 1.0  # m_residual: scales every sub-block's output before it joins the residual
    embedding_multiplier: float = 1.0  # m_emb
    logits_divisor: float = 1.0  # m_width
    attention_scale: float | None = None  # None: head_dim ** -0.5
    layout: Layout = "huggingface"
    declares_wiring: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    experts: Experts | None = None
    latent: Latent | None = None  # then head_dim is the width of its cache, as of a query in absorbed form, and K is 1
    ignored_layers: int = 0  # stored behind the others, for prediction of several tokens

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and self.experts.layers[layer]

    def has_mlp(self, layer: int) -> bool:
        return not self.has_experts(layer) or (self.experts is not None and self.experts.beside)

    @property
    def longest_context(self) -> int:
        """The longest sequence that may be asked for: what the declared scaling of rotary embeddings stretches the
        trained length to, if that is more than max_position_embeddings. `dynamic` serves the original length."""
        rope, most = self.rope, self.max_position_embeddings
        if rope.kind == "dynamic" and rope.original_max_position_embeddings:
            return min(most, rope.original_max_position_embeddings)
        stretched = int(rope.factor * rope.original_max_position_embeddings) if rope.kind in ("yarn", "linear") else 0
        return max(most, stretched)

    @property
    def ffn_size_used(self) -> float:
        """The inner dimension that a token goes through, on average over the layers."""
        if (e := self.experts) is None:
            return self.ffn_size
        mixed = sum(e.layers) / self.num_layers
        chosen = e.chosen * e.count / e.routed
        return mixed * (chosen * e.ffn_size + e.shared_ffn_size) + (1 - mixed * (not e.beside)) * self.ffn_size

    @property
    def lanes(self) -> Lanes | None:
        return self.wiring.lanes

    @property
    def ignored(self) -> tuple[str, ...]:
        """Prefixes of tensors for prediction of several tokens."""
        if self.layout == "shortcut":
            return ("model.mtp.",)
        return tuple(f"model.layers.{self.num_layers + i}." for i in range(self.ignored_layers))

    @property
    def attention_parameters(self) -> int:
        """Elements of a layer's attention."""
        d, q, kv = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        if self.latent is not None:
            return self.latent.parameters(d, self.num_heads) + d * self.o_bias + self.latent.shared * self.qkv_bias
        bias = (q + 2 * kv) * self.qkv_bias + d * self.o_bias + self.num_heads * self.sinks
        return d * (q + 2 * kv) + q * d + bias + 2 * self.head_dim * self.qk_norm

    @property
    def num_parameters(self) -> int:
        """Elements of all weights; a tied head is counted once."""
        d, attention = self.hidden_size, self.attention_parameters
        dense = 3 * d * self.ffn_size + (2 * self.ffn_size + d) * self.mlp_bias
        mlps = self.num_layers * dense
        if (e := self.experts) is not None:
            one = 3 * d * (e.count * e.ffn_size + e.shared_ffn_size)
            one += e.routed * (d + e.router.biased + e.router.offset)
            one += 0 if e.clamped is None else e.count * (2 * e.ffn_size + d)
            mlps += sum(e.layers) * (one - dense * (not e.beside))
        if self.latent is not None and (index := self.latent.index) is not None:
            mlps += sum(index.full) * index.parameters(d, self.latent.query_rank)
        norms = sum(d if kind == "parallel" else 2 * d for kind in self.wiring.kinds)
        head, last = 0 if self.tied_embeddings else self.vocab_size * d, d
        if self.lanes is not None:
            scales = self.lanes.count if self.lanes.norm_each else 1
            norms, last = norms * scales, d if self.lanes.sum_first else d * scales
            head *= self.lanes.count if self.lanes.head == "lane" else 1
        return self.vocab_size * d + self.num_layers * attention + mlps + norms + last + head


def from_folder(path: str | Path) -> ModelConfig:
    """The model in a Hugging Face folder (config.json, and generation_config.json if there is one). Raises
    FileNotFoundError, or ValueError naming file, key, value and what is allowed."""
    folder = Path(path)
    fields = read_json(folder / "config.json")
    if fields.string("model_type") in mla.WRAPPED:
        inherited = {key: fields.data[key] for key in ("dtype", "torch_dtype", "quantization_config") if key in fields}
        text = fields.object("text_config")
        fields = ConfigFields(text.where, {**inherited, **text.data})
    family = fields.string("model_type")
    if is_laneformer(fields):
        config = _laneformer(fields, family, _stop_ids(folder, fields))
    elif family in mla.FAMILIES:
        config = _latent(fields, mla.FAMILIES[family], _stop_ids(folder, fields))
    elif family == "ladder_residual":
        config = _dolomite(fields, _stop_ids(folder, fields))
    elif family in (*STOCK_FAMILIES, "llamaLadder", "laddertron"):
        config = _huggingface(fields, family, _stop_ids(folder, fields))
    else:
        names = sorted(
            {
                *STOCK_FAMILIES,
                *mla.FAMILIES,
                *mla.WRAPPED,
                "llamaLadder",
                "ladder_residual",
                "laddertron",
                "laneformer_tp",
            },
            key=str.lower,
        )
        missing = moe.MISSING.get(family.removesuffix("_text"))
        raise fields.fail(
            f"model_type {family!r} is not computed here{f' (missing: {missing})' if missing else ''}; "
            f"{', '.join(names[:-1])} and {names[-1]} are"
        )
    read_quantisation(folder)  # refuses what is not read
    if "laddertron_model" in fields and not _describes(fields.data["laddertron_model"], description(config)):
        raise fields.fail(
            "laddertron_model, by which the modeling file computes, describes another model than the other keys: write "
            "the folder again with `laddertron convert`"
        )
    if config.wiring.desync_every and (config.o_bias or config.mlp_bias):
        raise fields.fail("desync with an output bias is not defined (whose rank's residual would it join?)")
    return config


def description(config: ModelConfig) -> dict[str, Any]:
    """The value of `laddertron_model` in config.json: the config that models/weights/modeling_laddertron.py reads,
    independent of the checkpoint's format."""
    apart = ("family", "declares_wiring", "eos_token_ids", "bos_token_id", "dtype")
    plain: dict[str, Any] = json.loads(json.dumps({k: v for k, v in asdict(config).items() if k not in apart}))
    return plain


def _describes(stored: Any, own: Any) -> bool:
    """Whether a stored description is `own`; it may lack keys that are false or empty there, which are newer."""
    if not isinstance(stored, dict) or not isinstance(own, dict):
        return bool(stored == own)
    return stored.keys() <= own.keys() and all(
        _describes(stored[key], value) if key in stored else not value for key, value in own.items()
    )


def _stop_ids(folder: Path, config: ConfigFields) -> tuple[int, ...]:
    """EOS ids of generation_config.json, then those of config.json that it does not name."""
    last = config.integer("vocab_size") - 1
    places = [config]
    if (folder / "generation_config.json").is_file():
        places.insert(0, read_json(folder / "generation_config.json"))
    ids = [i for place in places if "eos_token_id" in place for i in place.integers("eos_token_id", last)]
    return tuple(dict.fromkeys(ids))


def _dtype(fields: ConfigFields) -> Dtype:
    name = fields.string("dtype", fields.string("torch_dtype", "float32")).removeprefix("torch.")
    match name:
        case "float32" | "bfloat16" | "float16":
            return name
    raise fields.fail(f"dtype {name!r} is not computed here; float32, bfloat16 and float16 are")


def _grouped(fields: ConfigFields, num_heads: int, num_kv_heads: int) -> None:
    if num_heads % num_kv_heads:
        where = "num_attention_heads, num_key_value_heads"
        raise fields.fail(f"{where}: {num_heads} heads are not a multiple of {num_kv_heads} key/value heads")


def _windows(fields: ConfigFields, family: str, num_layers: int) -> tuple[int | None, ...]:
    """The sliding window of each layer, as transformers resolves the families' different words for it."""
    if family not in ("mistral", "mixtral", "gpt_oss") and not family.startswith("qwen"):
        return ()
    used = not family.startswith("qwen") or fields.boolean("use_sliding_window", False)
    default = None if family == "mixtral" else 4096
    windowed = used and fields.data.get("sliding_window", default) is not None  # null: none, absent: the default
    window = fields.integer("sliding_window", default) if windowed else None
    if family in ("mistral", "mixtral", "qwen3_moe"):
        if family == "mistral" and "layer_types" in fields:
            raise fields.fail("layer_types in a mistral model is not computed here: one window for all layers is")
        return () if window is None else (window,) * num_layers
    if "layer_types" not in fields and family == "gpt_oss":
        slides = [i % 2 == 0 for i in range(num_layers)]
    elif "layer_types" not in fields:
        first = fields.integer("max_window_layers", 28, minimum=0)
        slides = [i >= first for i in range(num_layers)]
    else:
        types = fields.strings("layer_types")
        if len(types) != num_layers or not set(types) <= {"full_attention", "sliding_attention"}:
            raise fields.fail(f"layer_types must be {num_layers} times full_attention or sliding_attention")
        slides = [kind == "sliding_attention" for kind in types]
        if any(slides) and window is None:
            raise fields.fail("layer_types: sliding_attention, but use_sliding_window is false or sliding_window null")
    if window is None or not any(slides):
        return ()
    return tuple(window if sliding else None for sliding in slides)


def _defaulted(fields: ConfigFields, family: str) -> ConfigFields:
    """With the family's DEFAULTS. Null is a value of latent attention's families: no queries' rank, no groups."""
    given = [key for key in fields.data if key in fields or family in mla.FAMILIES.values()]
    absent = {key: value for key, value in DEFAULTS.get(family, {}).items() if key not in given}
    return ConfigFields(fields.where, {**fields.data, **absent})


def _huggingface(fields: ConfigFields, family: str, eos: tuple[int, ...]) -> ModelConfig:
    families = [name for name in STOCK_FAMILIES if name not in mla.FAMILIES]
    if family == "laddertron" and (family := fields.string("laddertron_family", "llama")) not in families:
        raise fields.fail(f"laddertron_family {family!r} must be one of {', '.join(families)}")
    fields = _defaulted(fields, family)
    if (activation := fields.string("hidden_act", "silu")) not in ("silu", "swish"):
        raise fields.fail(f"hidden_act {activation!r} is not computed here; silu is")
    layers, hidden = fields.integer("num_hidden_layers", maximum=MAX_LAYERS), fields.integer("hidden_size")
    heads = fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads", heads if family.startswith("llama") else None)
    _grouped(fields, heads, kv_heads)
    head_dim = fields.integer("head_dim", hidden // heads or 1)
    if "head_dim" not in fields and hidden % heads:
        raise fields.fail(
            f"hidden_size={hidden} is not a multiple of num_attention_heads={heads}; head_dim is not given"
        )
    if head_dim % 2:
        raise fields.fail(f"head_dim={head_dim} must be even: rotary embedding turns pairs")
    max_positions = fields.integer("max_position_embeddings")
    declared = "laddertron_wiring" in fields
    if family == "llamaLadder":
        if declared:
            raise fields.fail("llamaLadder declares its wiring in ladder_layers; laddertron_wiring conflicts with it")
        wiring = ladder_last(fields, layers)
    elif "ladder_layers" in fields:
        raise fields.fail(f"ladder_layers belongs to model_type llamaLadder, not {family}; or use laddertron_wiring")
    elif declared:
        wiring = declared_wiring(fields.object("laddertron_wiring"), layers)
    else:
        wiring = make_wiring("standard", layers)
    bias = family not in ("qwen2", "mistral", "mixtral") and fields.boolean("attention_bias", False)
    return ModelConfig(
        family=family,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_size=fields.integer("intermediate_size"),
        vocab_size=fields.integer("vocab_size"),
        max_position_embeddings=max_positions,
        norm_eps=fields.number("rms_norm_eps"),
        rope=read_rope(fields, max_positions, head_dim, "partial_rotary_factor" in DEFAULTS.get(family, ())),
        wiring=wiring,
        dtype=_dtype(fields),
        tied_embeddings=fields.boolean("tie_word_embeddings", False),
        qkv_bias=bias or family == "qwen2",
        o_bias=bias and family != "glm4_moe",
        mlp_bias=family.startswith("llama") and fields.boolean("mlp_bias", False),
        qk_norm=family in ("qwen3", "qwen3_moe") or (family == "glm4_moe" and fields.boolean("use_qk_norm", False)),
        sinks=family == "gpt_oss",
        sliding_window=_windows(fields, family, layers),
        declares_wiring=declared or family == "llamaLadder",
        eos_token_ids=eos,
        bos_token_id=_bos(fields),
        layout=OWN_LAYOUTS.get(fields.string("model_type"), "huggingface"),
        experts=moe.read_experts(fields, family, layers),
        ignored_layers=fields.integer("num_nextn_predict_layers", 0, minimum=0, maximum=MAX_LAYERS),
    )


def _latent(fields: ConfigFields, family: str, eos: tuple[int, ...]) -> ModelConfig:
    words, latent, scale = mla.read_latent(_defaulted(fields, family), family)
    config = _huggingface(words, family, eos)
    rope = replace(config.rope, rotated=latent.rotated)
    config = replace(config, num_kv_heads=1, rope=rope, attention_scale=scale, latent=latent, layout="latent")
    if family != "longcat_flash":
        return config
    kinds: tuple[WiringKind, ...] = ("shortcut", "standard") * (config.num_layers // 2)
    return replace(config, wiring=Wiring(kinds), declares_wiring=True, layout="shortcut")


def _laneformer(fields: ConfigFields, family: str, eos: tuple[int, ...]) -> ModelConfig:
    words, lanes, windows = read_lanes(fields)
    config = _huggingface(words, "llama", eos)
    if config.rope.kind not in ("default", "llama3"):
        raise fields.fail(f"rope_type {config.rope.kind!r} is not what a laneformer computes; default and llama3 are")
    kind: WiringKind = "lanes"
    return replace(
        config,
        family=family,
        wiring=Wiring((kind,) * config.num_layers, lanes=lanes),
        sliding_window=windows,
        layout="laneformer",
        declares_wiring=True,
    )


def _bos(fields: ConfigFields) -> int | None:
    last = fields.integer("vocab_size") - 1
    return fields.integer("bos_token_id", minimum=0, maximum=last) if "bos_token_id" in fields else None


def _same(fields: ConfigFields, key: str, values: list[T]) -> T:
    if any(value != values[0] for value in values):
        raise fields.fail(f"{key} differs between layers ({values[0]!r}, …); one value for all layers is computed here")
    return values[0]


def _dolomite(fields: ConfigFields, eos: tuple[int, ...]) -> ModelConfig:
    """dolomite-engine's and lm-engine's ladder_residual: a block description for each layer's mixer and MLP."""
    layers, hidden = fields.integer("num_layers", maximum=MAX_LAYERS), fields.integer("hidden_size")
    for key, needed in (("normalization_function", "rmsnorm"), ("position_embedding_type", "rope")):
        if (value := fields.string(key)) != needed:
            raise fields.fail(f"{key} {value!r} is not computed here; {needed} is")
    mixers, mlps = fields.objects("sequence_mixer_blocks", layers), fields.objects("mlp_blocks", layers)
    for mixer in mixers:
        if (kind := mixer.string("sequence_mixer_type", "softmax_attention")) != "softmax_attention":
            raise mixer.fail(f"sequence_mixer_type {kind!r} is not computed here; softmax_attention is")
        for key in ("attention_gate", "exclusive_self_attention", "attention_multiplier_method"):
            if mixer.data.get(key):
                raise mixer.fail(f"{key} is not computed here")
    for mlp in mlps:
        if (kind := mlp.string("mlp_type", "MLP")) != "MLP":
            raise mlp.fail(f"mlp_type {kind!r} is not computed here; MLP is")
        if (activation := mlp.string("activation_function")) != "swiglu":
            raise mlp.fail(f"activation_function {activation!r} is not computed here; swiglu is")
        for key in ("use_interleaved_weights", "use_interleaved_weights_for_mlp"):
            if mlp.boolean(key, False):
                raise mlp.fail(f"{key}=true is not read here; c_fc must be [up; gate]")
    heads = _same(fields, "num_attention_heads", [m.integer("num_attention_heads") for m in mixers])
    kv_heads = _same(fields, "num_key_value_heads", [m.integer("num_key_value_heads") for m in mixers])
    _grouped(fields, heads, kv_heads)
    if hidden % heads or (hidden // heads) % 2:
        raise fields.fail(f"hidden_size={hidden} must be an even multiple of num_attention_heads={heads}")
    head_dim = hidden // heads
    for place, key in ((fields, "rope_dim"), *((m, "head_dim") for m in mixers)):
        if place.integer(key, head_dim) != head_dim:
            raise place.fail(f"{key}={place.data[key]} other than hidden_size / num_attention_heads = {head_dim}")
    bias = _same(fields, "add_bias", [m.boolean("add_bias", False) for m in mixers])
    scales = [m.number("attention_multiplier") if "attention_multiplier" in m else None for m in mixers]
    windows = tuple(m.integer("sliding_window") if "sliding_window" in m else None for m in mixers)
    max_positions = fields.integer("max_position_embeddings")
    if "rope_scaling" in fields:
        # These engines know one scaling, YaRN, and may leave its name out.
        scaling = fields.object("rope_scaling")
        if (kind := scaling.string("rope_type", scaling.string("type", "yarn"))) not in ("yarn", "default"):
            raise scaling.fail(f"rope_type {kind!r} is not what a ladder_residual model computes; yarn is")
        fields = ConfigFields(fields.where, {**fields.data, "rope_scaling": {**scaling.data, "rope_type": kind}})
    return ModelConfig(
        family="ladder_residual",
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_size=_same(fields, "intermediate_size", [m.integer("intermediate_size") for m in mlps]),
        vocab_size=fields.integer("vocab_size"),
        max_position_embeddings=max_positions,
        norm_eps=fields.number("layer_norm_epsilon"),
        rope=read_rope(fields, max_positions),
        wiring=make_wiring("ladder", layers),
        dtype=_dtype(fields),
        tied_embeddings=fields.boolean("tie_word_embeddings", True),
        qkv_bias=_same(fields, "qkv_bias", [m.boolean("qkv_bias", bias) for m in mixers]),
        o_bias=bias,
        mlp_bias=_same(fields, "add_bias", [m.boolean("add_bias", False) for m in mlps]),
        sliding_window=() if set(windows) == {None} else windows,
        residual_multiplier=fields.number("m_residual", 1.0),
        embedding_multiplier=fields.number("m_emb", 1.0),
        logits_divisor=fields.number("m_width", 1.0),
        attention_scale=_same(fields, "attention_multiplier", scales),
        layout="dolomite",
        declares_wiring=True,
        eos_token_ids=eos,
        bos_token_id=_bos(fields),
    )
