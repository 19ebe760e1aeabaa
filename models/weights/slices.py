"""What a model needs of a checkpoint and where each of its parameters comes from: names, shapes, slices. Pure.

`plan_fills` turns ModelConfig and rank into a list of Fills that tiles every parameter exactly once; `expected_shapes`
says what the checkpoint must hold. Parameter names are those of models/llama.py. Used by models/weights*.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..config.model_config import ModelConfig
from ..stages import RankShard


@dataclass(frozen=True, slots=True)
class Fill:
    """Rows [row, row + count) of a parameter come from rows [source_row, ...) and columns [source_col, source_col +
    columns) of a checkpoint tensor (columns None: all). `tensor` None: the rows are vocabulary padding, zeros."""

    parameter: str
    row: int
    count: int
    tensor: str | None
    source_row: int = 0
    source_col: int = 0
    columns: int | None = None


@dataclass(frozen=True, slots=True)
class _Names:
    """How one layout calls its tensors; `{}` is the layer's index. Of products (PRODUCTS) without the suffix, several
    where the checkpoint does not fuse them."""

    embedding: str
    norm: str
    head: str
    attention_norm: str
    mlp_norm: str
    qkv: tuple[str, ...]
    o: tuple[str]
    gate_up: tuple[str, ...]
    down: tuple[str]


_HUGGINGFACE = _Names(
    embedding="model.embed_tokens.weight",
    norm="model.norm.weight",
    head="lm_head.weight",
    attention_norm="model.layers.{}.input_layernorm.weight",
    mlp_norm="model.layers.{}.post_attention_layernorm.weight",
    qkv=tuple(f"model.layers.{{}}.self_attn.{part}_proj" for part in "qkv"),
    o=("model.layers.{}.self_attn.o_proj",),
    gate_up=("model.layers.{}.mlp.gate_proj", "model.layers.{}.mlp.up_proj"),
    down=("model.layers.{}.mlp.down_proj",),
)
_DOLOMITE = _Names(
    embedding="transformer.wte.weight",
    norm="transformer.ln_f.weight",
    head="lm_head.weight",
    attention_norm="transformer.h.{}.ln_1.weight",
    mlp_norm="transformer.h.{}.ln_2.weight",
    qkv=("transformer.h.{}.sequence_mixer.c_attn",),  # by group: its query heads, its key, its value
    o=("transformer.h.{}.sequence_mixer.c_proj",),
    gate_up=("transformer.h.{}.mlp_block.c_fc",),  # [up; gate]
    down=("transformer.h.{}.mlp_block.c_proj",),
)
_QK_NORM = "model.layers.{}.self_attn.{}.weight"
PRODUCTS = ("qkv", "o", "gate_up", "down")


def _names(config: ModelConfig) -> _Names:
    return _DOLOMITE if config.layout == "dolomite" else _HUGGINGFACE


def _vocabulary(parameter: str, tensor: str, shard: RankShard) -> Iterator[Fill]:
    rows = shard.vocab
    real = max(0, min(rows.stop, shard.config.vocab_size) - rows.start)
    if real:
        yield Fill(parameter, 0, real, tensor, source_row=rows.start)
    if real < len(rows):
        yield Fill(parameter, real, len(rows) - real, None)


def _qkv(shard: RankShard, layer: int, suffix: str) -> Iterator[Fill]:
    """The fused projection's rows on this rank: its query heads, its key heads, its value heads."""
    config, dim = shard.config, shard.config.head_dim
    to = f"layers.{layer}.qkv.{suffix}"
    q_rows, kv_rows = shard.num_heads * dim, shard.num_kv_heads * dim
    first, *others = (f"{part.format(_stored_layer(shard, layer))}.{suffix}" for part in _names(config).qkv)
    if others:
        yield Fill(to, 0, q_rows, first, shard.first_head * dim)
        for i, tensor in enumerate(others):
            yield Fill(to, q_rows + i * kv_rows, kv_rows, tensor, shard.first_kv_head * dim)
        return
    per_group = config.num_heads // config.num_kv_heads
    stride = (per_group + 2) * dim
    for i in range(shard.num_heads):
        group, member = divmod(shard.first_head + i, per_group)
        yield Fill(to, i * dim, dim, first, group * stride + member * dim)
    for i in range(shard.num_kv_heads):
        source = (shard.first_kv_head + i) * stride + per_group * dim
        yield Fill(to, q_rows + i * dim, dim, first, source)
        yield Fill(to, q_rows + kv_rows + i * dim, dim, first, source + dim)


def _gate_up(shard: RankShard, layer: int, suffix: str) -> Iterator[Fill]:
    to, rows, at = f"layers.{layer}.gate_up.{suffix}", shard.ffn_size, shard.first_ffn
    names = _names(shard.config).gate_up
    gate, *others = (f"{part.format(_stored_layer(shard, layer))}.{suffix}" for part in names)
    up = others[0] if others else gate
    yield Fill(to, 0, rows, gate, at if others else shard.config.ffn_size + at)
    yield Fill(to, rows, rows, up, at)


def _stored_layer(shard: RankShard, layer: int) -> int:
    """What the checkpoint calls a stage's own layer."""
    return layer if shard.stage is None else shard.stage.first_layer + layer


def plan_fills(shard: RankShard, replicate_embedding: bool = False) -> list[Fill]:
    """Every parameter row of this rank, exactly once. A bias behind a row-parallel product belongs to rank 0 alone:
    the all-reduce would otherwise add it size times."""
    config, names = shard.config, _names(shard.config)
    d = config.hidden_size
    fills: list[Fill] = []
    if shard.embeds and replicate_embedding:
        fills.append(Fill("embedding.weight", 0, config.vocab_size, names.embedding))
    elif shard.embeds:
        fills.extend(_vocabulary("embedding.weight", names.embedding, shard))
    for layer in range(config.num_layers):
        here, stored = f"layers.{layer}.", _stored_layer(shard, layer)
        fills.append(Fill(f"{here}attention_norm.weight", 0, d, names.attention_norm.format(stored)))
        fills.extend(_qkv(shard, layer, "weight"))
        if config.qkv_bias:
            fills.extend(_qkv(shard, layer, "bias"))
        if config.qk_norm:
            for which in ("q_norm", "k_norm"):
                fills.append(Fill(f"{here}{which}.weight", 0, config.head_dim, _QK_NORM.format(stored, which)))
        heads = shard.num_heads * config.head_dim
        (o,), (down,) = ((part.format(stored) for part in parts) for parts in (names.o, names.down))
        fills.append(Fill(f"{here}o.weight", 0, d, f"{o}.weight", 0, shard.rank * heads, columns=heads))
        if config.wiring.kinds[layer] != "parallel":
            fills.append(Fill(f"{here}mlp_norm.weight", 0, d, names.mlp_norm.format(stored)))
        fills.extend(_gate_up(shard, layer, "weight"))
        fills.append(Fill(f"{here}down.weight", 0, d, f"{down}.weight", 0, shard.first_ffn, columns=shard.ffn_size))
        if config.mlp_bias:
            fills.extend(_gate_up(shard, layer, "bias"))
        if shard.rank == 0 and config.o_bias:
            fills.append(Fill(f"{here}o.bias", 0, d, f"{o}.bias"))
        if shard.rank == 0 and config.mlp_bias:
            fills.append(Fill(f"{here}down.bias", 0, d, f"{down}.bias"))
    if shard.samples:
        fills.append(Fill("norm.weight", 0, d, names.norm))
    if shard.has_head(replicate_embedding):
        head = names.embedding if config.tied_embeddings else names.head
        fills.extend(_vocabulary("head.weight", head, shard))
    return fills


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that the checkpoint must hold, with its shape."""
    names, d, dim = _names(config), config.hidden_size, config.head_dim
    q, kv, f = config.num_heads * dim, config.num_kv_heads * dim, config.ffn_size
    shapes: dict[str, tuple[int, ...]] = {names.embedding: (config.vocab_size, d), names.norm: (d,)}
    if not config.tied_embeddings:
        shapes[names.head] = (config.vocab_size, d)
    products = (
        (names.qkv, (q, kv, kv), d, config.qkv_bias),
        (names.o, (d,), q, config.o_bias),
        (names.gate_up, (f, f), d, config.mlp_bias),
        (names.down, (d,), f, config.mlp_bias),
    )
    for layer in range(config.num_layers):
        shapes[names.attention_norm.format(layer)] = (d,)
        if config.wiring.kinds[layer] != "parallel":
            shapes[names.mlp_norm.format(layer)] = (d,)
        for parts, outputs, inputs, bias in products:
            fused = outputs if len(parts) == len(outputs) else (sum(outputs),)
            for part, rows in zip(parts, fused, strict=True):
                shapes[f"{part.format(layer)}.weight"] = (rows, inputs)
                if bias:
                    shapes[f"{part.format(layer)}.bias"] = (rows,)
        if config.qk_norm:
            for which in ("q_norm", "k_norm"):
                shapes[_QK_NORM.format(layer, which)] = (dim,)
    return shapes


def sources_of(config: ModelConfig, layer: int, product: str) -> tuple[str, ...]:
    """The checkpoint tensors whose rows make up one product's weight."""
    parts: tuple[str, ...] = getattr(_names(config), product)
    return tuple(f"{part.format(layer)}.weight" for part in parts)


def head_of(config: ModelConfig) -> str:
    """The head's tensor: a tied checkpoint may carry a copy of it."""
    return _names(config).head
