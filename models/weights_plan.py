"""What a model needs of a checkpoint and where each of its parameters comes from: names, shapes, slices. Pure.

`plan_fills` turns ModelConfig and rank into a list of Fills that tiles every parameter exactly once; `expected_shapes`
says what the checkpoint must hold. Parameter names are those of models/llama.py. Used by models/weights*.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass

from .config import ModelConfig
from .shard import Shard


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
    """How one layout calls the parts of a layer; `{}` is the layer's index."""

    embedding: str
    norm: str
    head: str
    attention_norm: str
    mlp_norm: str
    o: str
    down: str


_HUGGINGFACE = _Names(
    embedding="model.embed_tokens.weight",
    norm="model.norm.weight",
    head="lm_head.weight",
    attention_norm="model.layers.{}.input_layernorm.weight",
    mlp_norm="model.layers.{}.post_attention_layernorm.weight",
    o="model.layers.{}.self_attn.o_proj",
    down="model.layers.{}.mlp.down_proj",
)
_DOLOMITE = _Names(
    embedding="transformer.wte.weight",
    norm="transformer.ln_f.weight",
    head="lm_head.weight",
    attention_norm="transformer.h.{}.ln_1.weight",
    mlp_norm="transformer.h.{}.ln_2.weight",
    o="transformer.h.{}.sequence_mixer.c_proj",
    down="transformer.h.{}.mlp_block.c_proj",
)


def _names(config: ModelConfig) -> _Names:
    return _DOLOMITE if config.layout == "dolomite" else _HUGGINGFACE


def _vocabulary(parameter: str, tensor: str, shard: Shard) -> Iterator[Fill]:
    rows = shard.vocab
    real = max(0, min(rows.stop, shard.config.vocab_size) - rows.start)
    if real:
        yield Fill(parameter, 0, real, tensor, source_row=rows.start)
    if real < len(rows):
        yield Fill(parameter, real, len(rows) - real, None)


def _qkv(shard: Shard, layer: int, suffix: str) -> Iterator[Fill]:
    """The fused projection's rows on this rank: its query heads, its key heads, its value heads."""
    config, dim = shard.config, shard.config.head_dim
    to = f"layers.{layer}.qkv.{suffix}"
    q_rows, kv_rows = shard.num_heads * dim, shard.num_kv_heads * dim
    if config.layout == "huggingface":
        base = f"model.layers.{layer}.self_attn."
        yield Fill(to, 0, q_rows, f"{base}q_proj.{suffix}", shard.first_head * dim)
        yield Fill(to, q_rows, kv_rows, f"{base}k_proj.{suffix}", shard.first_kv_head * dim)
        yield Fill(to, q_rows + kv_rows, kv_rows, f"{base}v_proj.{suffix}", shard.first_kv_head * dim)
        return
    tensor = f"transformer.h.{layer}.sequence_mixer.c_attn.{suffix}"
    per_group = config.num_heads // config.num_kv_heads
    stride = (per_group + 2) * dim
    for i in range(shard.num_heads):
        group, member = divmod(shard.first_head + i, per_group)
        yield Fill(to, i * dim, dim, tensor, group * stride + member * dim)
    for i in range(shard.num_kv_heads):
        source = (shard.first_kv_head + i) * stride + per_group * dim
        yield Fill(to, q_rows + i * dim, dim, tensor, source)
        yield Fill(to, q_rows + kv_rows + i * dim, dim, tensor, source + dim)


def _gate_up(shard: Shard, layer: int, suffix: str) -> Iterator[Fill]:
    to, rows, at = f"layers.{layer}.gate_up.{suffix}", shard.ffn_size, shard.first_ffn
    if shard.config.layout == "huggingface":
        base = f"model.layers.{layer}.mlp."
        yield Fill(to, 0, rows, f"{base}gate_proj.{suffix}", at)
        yield Fill(to, rows, rows, f"{base}up_proj.{suffix}", at)
    else:  # c_fc is [up; gate]
        tensor = f"transformer.h.{layer}.mlp_block.c_fc.{suffix}"
        yield Fill(to, 0, rows, tensor, shard.config.ffn_size + at)
        yield Fill(to, rows, rows, tensor, at)


def plan_fills(shard: Shard, replicate_embedding: bool = False, kept: Set[str] = frozenset()) -> list[Fill]:
    """Every parameter row of this rank, exactly once. A bias behind a row-parallel product belongs to rank 0 alone:
    the all-reduce would otherwise add it size times.

    kept: products such as "layers.3.gate_up" whose weights stay fp8; each has one fp32 scale a row, `weight_scale`.
    """
    fills = _plan(shard, replicate_embedding)
    scales = [
        Fill(f"{fill.parameter}_scale", fill.row, fill.count, scale_of(fill.tensor), fill.source_row)
        for fill in fills
        if fill.tensor is not None and fill.parameter.removesuffix(".weight") in kept
    ]
    return fills + scales


def scale_of(tensor: str) -> str:
    """The name of an fp8 tensor's scale."""
    return f"{tensor}_scale"


def _plan(shard: Shard, replicate_embedding: bool) -> list[Fill]:
    config, names = shard.config, _names(shard.config)
    d = config.hidden_size
    if replicate_embedding:
        fills = [Fill("embedding.weight", 0, config.vocab_size, names.embedding)]
    else:
        fills = list(_vocabulary("embedding.weight", names.embedding, shard))
    for layer in range(config.num_layers):
        here = f"layers.{layer}."
        fills.append(Fill(f"{here}attention_norm.weight", 0, d, names.attention_norm.format(layer)))
        fills.extend(_qkv(shard, layer, "weight"))
        if config.qkv_bias:
            fills.extend(_qkv(shard, layer, "bias"))
        if config.qk_norm:
            for which in ("q_norm", "k_norm"):
                source = f"model.layers.{layer}.self_attn.{which}.weight"
                fills.append(Fill(f"{here}{which}.weight", 0, config.head_dim, source))
        heads = shard.num_heads * config.head_dim
        fills.append(
            Fill(f"{here}o.weight", 0, d, f"{names.o.format(layer)}.weight", 0, shard.rank * heads, columns=heads)
        )
        if config.wiring.kinds[layer] != "parallel":
            fills.append(Fill(f"{here}mlp_norm.weight", 0, d, names.mlp_norm.format(layer)))
        fills.extend(_gate_up(shard, layer, "weight"))
        down = f"{names.down.format(layer)}.weight"
        fills.append(Fill(f"{here}down.weight", 0, d, down, 0, shard.first_ffn, columns=shard.ffn_size))
        if config.mlp_bias:
            fills.extend(_gate_up(shard, layer, "bias"))
        if shard.rank == 0 and config.o_bias:
            fills.append(Fill(f"{here}o.bias", 0, d, f"{names.o.format(layer)}.bias"))
        if shard.rank == 0 and config.mlp_bias:
            fills.append(Fill(f"{here}down.bias", 0, d, f"{names.down.format(layer)}.bias"))
    fills.append(Fill("norm.weight", 0, d, names.norm))
    if not config.tied_embeddings or replicate_embedding:
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
    for layer in range(config.num_layers):
        shapes[names.attention_norm.format(layer)] = (d,)
        if config.wiring.kinds[layer] != "parallel":
            shapes[names.mlp_norm.format(layer)] = (d,)
        if config.layout == "huggingface":
            base = f"model.layers.{layer}."
            outputs = {"self_attn.q_proj": q, "self_attn.k_proj": kv, "self_attn.v_proj": kv}
            mlp = {"mlp.gate_proj": f, "mlp.up_proj": f}
        else:
            base = f"transformer.h.{layer}."
            outputs, mlp = {"sequence_mixer.c_attn": q + 2 * kv}, {"mlp_block.c_fc": 2 * f}
        for group, bias in ((outputs, config.qkv_bias), (mlp, config.mlp_bias)):
            for part, rows in group.items():
                shapes[f"{base}{part}.weight"] = (rows, d)
                if bias:
                    shapes[f"{base}{part}.bias"] = (rows,)
        if config.qk_norm:
            shapes[f"{base}self_attn.q_norm.weight"] = shapes[f"{base}self_attn.k_norm.weight"] = (dim,)
        shapes[f"{names.o.format(layer)}.weight"] = (d, q)
        shapes[f"{names.down.format(layer)}.weight"] = (d, f)
        if config.o_bias:
            shapes[f"{names.o.format(layer)}.bias"] = (d,)
        if config.mlp_bias:
            shapes[f"{names.down.format(layer)}.bias"] = (d,)
    return shapes


PRODUCTS = ("qkv", "o", "gate_up", "down")


def sources_of(config: ModelConfig, layer: int, product: str) -> tuple[str, ...]:
    """The checkpoint tensors whose rows make up one product's weight."""
    if product in ("o", "down"):
        names = _names(config)
        return (f"{(names.o if product == 'o' else names.down).format(layer)}.weight",)
    if config.layout == "dolomite":
        part = "sequence_mixer.c_attn" if product == "qkv" else "mlp_block.c_fc"
        return (f"transformer.h.{layer}.{part}.weight",)
    parts: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    if product == "gate_up":
        parts = ("mlp.gate_proj", "mlp.up_proj")
    return tuple(f"model.layers.{layer}.{part}.weight" for part in parts)


def head_of(config: ModelConfig) -> str:
    """The head's tensor: a tied checkpoint may carry a copy of it."""
    return _names(config).head
