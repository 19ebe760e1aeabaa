"""ModelConfig: what a checkpoint folder's config.json says, in the field's terms. Data only, no torch.

Read by everyone from `plan` (which has no torch) to the ranks. `from_folder` is strict: an architecture, activation or
rope scaling that the model code does not compute exactly is refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

WiringKind = Literal["standard", "parallel", "ladder", "desync", "none"]
Layout = Literal["huggingface", "dolomite"]


@dataclass(frozen=True, slots=True)
class Wiring:
    """How each layer's two sub-blocks read and write the residual: one kind a layer (a mix of standard and ladder is
    the paper's hybrid). `desync_every` is desync-n's n (0 unless every layer is desync; 2L % n may be non-zero: the
    last reduce happens before the final norm). `trained_tp` is the tensor-parallel size desync weights belong to."""

    kinds: tuple[WiringKind, ...]
    desync_every: int = 0
    trained_tp: int | None = None

    @property
    def name(self) -> str:
        """standard, parallel, ladder, hybrid, desync-n or no-communication."""
        distinct = set(self.kinds)
        if distinct == {"none"}:
            return "no-communication"
        if distinct == {"desync"}:
            return f"desync-{self.desync_every}"
        if len(distinct) > 1:
            return "hybrid"
        return next(iter(distinct))


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding. kind "default", "linear", "dynamic", "llama3" or "yarn"; the factors as transformers names
    them. `rotary_dim` may be smaller than head_dim (partial rotary)."""

    theta: float = 10000.0
    kind: Literal["default", "linear", "dynamic", "llama3", "yarn"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One dense decoder. L = num_layers, D = hidden_size, H = num_heads, K = num_kv_heads, V = vocab_size."""

    family: str  # model_type as the checkpoint says it: llama, llamaLadder, ladder_residual, mistral, qwen2, qwen3
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
    dtype: Literal["float32", "bfloat16", "float16"]
    tied_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: tuple[int | None, ...] = ()  # one a layer; () means none anywhere
    residual_multiplier: float = 1.0  # m_residual: scales every sub-block's output before it joins the residual
    embedding_multiplier: float = 1.0  # m_emb
    logits_divisor: float = 1.0  # m_width
    attention_scale: float | None = None  # None: head_dim ** -0.5
    layout: Layout = "huggingface"
    declares_wiring: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    @property
    def num_parameters(self) -> int:
        """Elements of all weights; a tied head is counted once."""
        d, q, kv = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = d * (q + 2 * kv) + q * d
        attention += (q + 2 * kv) * self.qkv_bias + d * self.o_bias + 2 * self.head_dim * self.qk_norm
        mlp = 3 * d * self.ffn_size + (2 * self.ffn_size + d) * self.mlp_bias
        norms = sum(d if kind == "parallel" else 2 * d for kind in self.wiring.kinds)
        head = 0 if self.tied_embeddings else self.vocab_size * d
        return self.vocab_size * d + self.num_layers * (attention + mlp) + norms + d + head
