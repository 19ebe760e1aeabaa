"""Architectures by name, for `plan`: `known("llama-3.1-405b")` is the ModelConfig of the published
config.json. `by_folder` guesses one from a folder's name. No torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from typing import Literal

from .experts import Clamped, Experts, Router
from .lanes import Lanes
from .latent import Index, Latent
from .model_config import Dtype, ModelConfig, make_wiring
from .parts import Rope, Wiring
from .quantisation import GPT_OSS, Quantisation

_PLAIN = Rope()
_V3_LATENT = Latent(rank=512, rotated=64, plain=128, value=128, query_rank=1536, interleaved=True)
_V32_LATENT = replace(_V3_LATENT, index=Index(64, 128, 2048, False, (True,) * 61))
_GLM5_INDEX = Index(32, 128, 2048, True, (True,) * 78)
_GLM5_LATENT = Latent(512, 64, 192, 256, query_rank=2048, interleaved=True, index=_GLM5_INDEX)
_LLAMA3 = Rope(500000.0, "llama3", 8.0, 1.0, 4.0, 8192)


def architecture(
    family: str, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocabulary: int, positions: int,
    rope: Rope = _PLAIN, *, head_dim: int | None = None, tied: bool = False, wiring: str | Wiring = "standard",
    dtype: Dtype = "bfloat16",
) -> ModelConfig:  # fmt: skip
    wired = make_wiring(wiring, layers) if isinstance(wiring, str) else wiring
    return ModelConfig(
        family=family,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim or hidden // heads,
        ffn_size=ffn,
        vocab_size=vocabulary,
        max_position_embeddings=positions,
        norm_eps=1e-5,
        rope=rope,
        wiring=wired,
        dtype=dtype,
        tied_embeddings=tied,
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        declares_wiring=wired.name != "standard",
    )


def _mixture(
    family: str, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocabulary: int, positions: int,
    rope: Rope, experts: int, chosen: int, expert_ffn: int, *, dense: int = 0, shared: int = 0,
    scale: float = 2.5,
) -> ModelConfig:  # fmt: skip
    """A mixture of experts by its sizes; dense: the first layers without experts; scale: of a sigmoid's weights."""
    router = Router("softmax", rounds=family == "qwen3_moe")
    if family in ("glm4_moe", "deepseek_v3"):
        router = Router("sigmoid", wide=True, biased=True, epsilon=1e-20, scale=scale)
    has = tuple(i >= dense for i in range(layers))
    return replace(
        architecture(family, layers, hidden, heads, kv_heads, ffn, vocabulary, positions, rope, head_dim=128),
        experts=Experts(experts, chosen, expert_ffn, has, router, shared),
        qkv_bias=family == "glm4_moe",
        qk_norm=family in ("glm4_moe", "qwen3_moe"),
        ignored_layers=int(family == "glm4_moe"),
    )


def _latent(
    layers: int, hidden: int, heads: int, ffn: int, vocabulary: int, positions: int, factor: float, experts: int, *,
    dense: int, scale: float, latent: Latent = _V3_LATENT, ahead: int = 1,
) -> ModelConfig:  # fmt: skip
    """DeepSeek-V3's form; ahead: its layers that predict further tokens."""
    rope = Rope(kind="yarn", factor=factor, original_max_position_embeddings=4096, rotated=64)
    stock = _mixture(
        "deepseek_v3", layers, hidden, heads, 1, ffn, vocabulary, positions, rope, experts, 8, 2048, dense=dense,
        shared=2048, scale=scale,
    )  # fmt: skip
    return replace(stock, latent=latent, head_dim=latent.width, layout="latent", ignored_layers=ahead)


def _longcat() -> ModelConfig:
    """28 stored layers of two attentions, two MLPs and experts are 56 of one each."""
    latent = Latent(512, 64, 128, 128, query_rank=1536, interleaved=True, scale=(6144 / 512) ** 0.5)
    router = Router("softmax", wide=True, biased=True, normalises=False, scale=6.0)
    stock = architecture("longcat_flash", 56, 6144, 64, 1, 12288, 131072, 131072, Rope(1e7, rotated=64), head_dim=576)
    return replace(
        stock,
        latent=latent,
        experts=Experts(512, 12, 2048, (True, False) * 28, router, identities=256, beside=True),
        wiring=Wiring(("shortcut", "standard") * 28),
        declares_wiring=True,
        layout="shortcut",
    )


def _gpt_oss(layers: int, experts: int) -> ModelConfig:
    rope = Rope(150000.0, "yarn", 32.0, original_max_position_embeddings=4096, fractional=True)
    router = Router("softmax", rounds=True, offset=True)
    return replace(
        architecture("gpt_oss", layers, 2880, 64, 8, 2880, 201088, 131072, rope, head_dim=64),
        experts=Experts(experts, 4, 2880, (True,) * layers, router, clamped=Clamped(1.702, 7.0)),
        qkv_bias=True,
        o_bias=True,
        sinks=True,
        sliding_window=(128, None) * (layers // 2),
        layout="gpt_oss",
    )


@cache
def known_models() -> dict[str, ModelConfig]:
    ladder = "ladder_residual"
    return {
        "llama-3.2-1b": architecture("llama", 16, 2048, 32, 8, 8192, 128256, 131072, _LLAMA3, tied=True),
        "llama-3.2-3b": architecture("llama", 28, 3072, 24, 8, 8192, 128256, 131072, _LLAMA3, tied=True),
        "llama-3.1-8b": architecture("llama", 32, 4096, 32, 8, 14336, 128256, 131072, _LLAMA3),
        "llama-3.1-70b": architecture("llama", 80, 8192, 64, 8, 28672, 128256, 131072, _LLAMA3),
        "llama-3.3-70b": architecture("llama", 80, 8192, 64, 8, 28672, 128256, 131072, _LLAMA3),
        "llama-3.1-405b": architecture("llama", 126, 16384, 128, 8, 53248, 128256, 131072, _LLAMA3),
        "llama-2-7b": architecture("llama", 32, 4096, 32, 32, 11008, 32000, 4096),
        "llama-2-13b": architecture("llama", 40, 5120, 40, 40, 13824, 32000, 4096),
        "llama-2-70b": architecture("llama", 80, 8192, 64, 8, 28672, 32000, 4096),
        "codellama-34b": architecture("llama", 48, 8192, 64, 8, 22016, 32000, 16384, Rope(1e6)),
        "mistral-7b": architecture("mistral", 32, 4096, 32, 8, 14336, 32768, 32768, Rope(1e6)),
        "mistral-large-123b": architecture("mistral", 88, 12288, 96, 8, 28672, 32768, 131072, Rope(1e6)),
        "qwen2.5-7b": architecture("qwen2", 28, 3584, 28, 4, 18944, 152064, 32768, Rope(1e6)),
        "qwen2.5-32b": architecture("qwen2", 64, 5120, 40, 8, 27648, 152064, 32768, Rope(1e6)),
        "qwen2.5-72b": architecture("qwen2", 80, 8192, 64, 8, 29568, 152064, 32768, Rope(1e6)),
        "qwen3-8b": architecture("qwen3", 36, 4096, 32, 8, 12288, 151936, 40960, Rope(1e6), head_dim=128),
        "qwen3-32b": architecture("qwen3", 64, 5120, 64, 8, 25600, 151936, 40960, Rope(1e6), head_dim=128),
        "qwen3-30b-a3b": _mixture("qwen3_moe", 48, 2048, 32, 4, 6144, 151936, 40960, Rope(1e6), 128, 8, 768),
        "qwen3-235b-a22b": _mixture("qwen3_moe", 94, 4096, 64, 4, 12288, 151936, 40960, Rope(1e6), 128, 8, 1536),
        "qwen3-coder-480b": _mixture("qwen3_moe", 62, 6144, 96, 8, 8192, 151936, 262144, Rope(1e7), 160, 8, 2560),
        "mixtral-8x22b": _mixture("mixtral", 56, 6144, 48, 8, 16384, 32768, 65536, Rope(1e6), 8, 2, 16384),
        "glm-4.6": _mixture(
            "glm4_moe", 92, 5120, 96, 8, 12288, 151552, 202752, Rope(1e6), 160, 8, 1536, dense=3, shared=1536
        ),
        "deepseek-v3": _latent(61, 7168, 128, 18432, 129280, 163840, 40.0, 256, dense=3, scale=2.5),
        "deepseek-v3.2": _latent(
            61, 7168, 128, 18432, 129280, 163840, 40.0, 256, dense=3, scale=2.5, latent=_V32_LATENT
        ),
        "glm-5": replace(
            _latent(78, 6144, 64, 12288, 154880, 202752, 1.0, 256, dense=3, scale=2.5, latent=_GLM5_LATENT),
            rope=Rope(1e6, rotated=64),
        ),
        "kimi-k2": _latent(61, 7168, 64, 18432, 163840, 131072, 32.0, 384, dense=1, scale=2.827, ahead=0),
        **dict.fromkeys(
            ("kimi-k2-thinking", "kimi-k2.5", "kimi-k2.7"),
            _latent(61, 7168, 64, 18432, 163840, 262144, 64.0, 384, dense=1, scale=2.827, ahead=0),
        ),
        "longcat-flash": _longcat(),
        "gpt-oss-20b": _gpt_oss(24, 32),
        "gpt-oss-120b": _gpt_oss(36, 128),
        "laneformer-2b": replace(
            architecture("laneformer_tp", 15, 3072, 32, 16, 12288, 32000, 4096),
            wiring=Wiring(("lanes",) * 15, lanes=Lanes(count=8, delay=2, layers=15)),
            sliding_window=(*(512,) * 10, *(None,) * 5),
            layout="laneformer",
            declares_wiring=True,
        ),
        "ladder-1b": architecture(ladder, 40, 1536, 24, 24, 4096, 49152, 2048, tied=True, wiring="ladder"),
        "ladder-3b": architecture(ladder, 40, 2304, 36, 36, 9216, 49152, 2048, tied=True, wiring="ladder"),
    }


def known(name: str) -> ModelConfig:
    """The architecture called `name` (capitals do not matter). Raises ValueError with the nearest names."""
    table = known_models()
    config = table.get(name.lower())
    if config is None:
        near = get_close_matches(name.lower(), list(table), n=1, cutoff=0.5)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise ValueError(f"model {name!r}: known are {', '.join(table)}{hint}")
    return config


def published_fp8(name: str) -> tuple[tuple[str, ...], ...]:
    """The products of each layer that the fp8 checkpoint published for the architecture `name` keeps in bfloat16; empty
    where none is known. Meta's of 405B keeps attention, and the MLP of the first and the last layer."""
    if name.lower() != "llama-3.1-405b":
        return ()
    ends = {0, known(name).num_layers - 1}
    return tuple(("qkv", "o", "gate_up", "down") if i in ends else ("qkv", "o") for i in range(max(ends) + 1))


def assumed_fp8(config: ModelConfig) -> Quantisation:
    """The usual form of a model's fp8 weights: of mixtures of experts by blocks of 128 x 128."""
    return Quantisation("fp8") if config.experts is None else FP8_BLOCKS


@dataclass(frozen=True, slots=True)
class Guess:
    """Guessed from a folder's name: the architecture, the form of quantised weights, and how layers are wired."""

    name: str
    config: ModelConfig
    form: Quantisation | None
    how: Literal["stock", "ladder", "hybrid"]


FP8_BLOCKS = Quantisation("fp8", block=(128, 128))
_INT4 = Quantisation("compressed-tensors", False, block=(1, 32), code="int4", scale="bfloat16")
PUBLISHED = {
    **dict.fromkeys(("deepseek-v3", "deepseek-v3.2", "kimi-k2"), FP8_BLOCKS),
    **dict.fromkeys(("kimi-k2-thinking", "kimi-k2.5", "kimi-k2.7"), _INT4),
    **dict.fromkeys(("gpt-oss-20b", "gpt-oss-120b"), GPT_OSS),
}
"""The forms of weights that are published in no other; of 4 bits experts alone."""
_SEPARATORS = re.compile(r"[^a-z0-9.]+")


def by_folder(folder: str) -> Guess | None:
    """The longest known name that the folder's name begins with or holds as whole words; its words `fp8`, `bf16` (of a
    model published in fp8), `hybrid` and `ladder` count as well (hybrid: the second half of the layers is ladder). None
    if nothing fits."""
    words = "-" + _SEPARATORS.sub("-", folder.lower()).replace("meta-llama", "llama") + "-"
    table = known_models()
    name = max((n for n in table if f"-{n}-" in words), key=len, default=None)
    if name is None:
        return None
    config, form = table[name], PUBLISHED.get(name)
    if "-fp8-" in words:
        form = assumed_fp8(config)
    elif "-bf16-" in words:
        form = None
    if "-hybrid-" in words:
        return Guess(name, replace(config, wiring=half_ladder(config)), form, "hybrid")
    if "-ladder-" in words:
        wiring = make_wiring("ladder", config.num_layers)
        return Guess(name, replace(config, wiring=wiring, declares_wiring=True), form, "ladder")
    return Guess(name, config, form, "stock")


def half_ladder(config: ModelConfig) -> Wiring:
    """The paper's retrofit: the last half of the layers ladder, the rest standard."""
    layers = config.num_layers
    return make_wiring("hybrid", layers, range(layers - layers // 2, layers))
