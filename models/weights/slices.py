"""What a model needs of a checkpoint and where each of its parameters comes from: names, shapes, slices. Pure.

A layout is a table of rows, one a stored tensor. `plan_fills` turns table, ModelConfig and rank into a list of Fills
that tiles every parameter exactly once; `expected_shapes` says what the checkpoint must hold. Parameter names are those
of models/llama.py. Used by models/weights*.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from ..config.model_config import Layout, ModelConfig
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
class Row:
    """A stored matrix or vector, the parameter whose next rows it fills, and the axes of its rows and columns (None: a
    vector), which say what of it this rank holds.

    when: whether `layer` has it. bias: the field of ModelConfig that says whether a vector ".bias" belongs to it. at:
    where a row of the axis is stored, in whole heads for axes of heads: for tensors that hold several parts.
    """

    parameter: str
    tensor: str
    rows: str
    columns: str | None = None
    when: Callable[[ModelConfig, int], bool] = lambda config, layer: True
    bias: str | None = None
    at: Callable[[ModelConfig, int], int] | None = None


_AXES: dict[str, Callable[[RankShard], range]] = {
    "hidden": lambda s: range(s.config.hidden_size),
    "head": lambda s: range(s.config.head_dim),
    "heads": lambda s: _span(s.first_head, s.num_heads, s.config.head_dim),
    "kv_heads": lambda s: _span(s.first_kv_head, s.num_kv_heads, s.config.head_dim),
    "ffn": lambda s: _span(s.first_ffn, s.ffn_size, 1),
}
"""The rows or columns of an axis on a rank, as a stored tensor of its own numbers them."""


def _span(first: int, count: int, unit: int) -> range:
    return range(first * unit, (first + count) * unit)


def _has_mlp_norm(config: ModelConfig, layer: int) -> bool:
    return config.wiring.kinds[layer] != "parallel"


def _has_qk_norm(config: ModelConfig, layer: int) -> bool:
    return config.qk_norm


def _in_group(place: int | None) -> Callable[[ModelConfig, int], int]:
    """Where dolomite's c_attn holds a row: group by group, a group's query heads, its key, its value. place: of the key
    and the value behind the query heads; None: the query heads."""

    def at(config: ModelConfig, row: int) -> int:
        queries, (head, inside) = config.num_heads // config.num_kv_heads, divmod(row, config.head_dim)
        group, member = divmod(head, queries) if place is None else (head, queries + place)
        return (group * (queries + 2) + member) * config.head_dim + inside

    return at


_LAYER = "model.layers.{}."
_FUSED = "transformer.h.{}."
_ROWS: dict[Layout, tuple[Row, ...]] = {
    "huggingface": (
        Row("attention_norm", f"{_LAYER}input_layernorm", "hidden"),
        Row("qkv", f"{_LAYER}self_attn.q_proj", "heads", "hidden", bias="qkv_bias"),
        Row("qkv", f"{_LAYER}self_attn.k_proj", "kv_heads", "hidden", bias="qkv_bias"),
        Row("qkv", f"{_LAYER}self_attn.v_proj", "kv_heads", "hidden", bias="qkv_bias"),
        Row("q_norm", f"{_LAYER}self_attn.q_norm", "head", when=_has_qk_norm),
        Row("k_norm", f"{_LAYER}self_attn.k_norm", "head", when=_has_qk_norm),
        Row("o", f"{_LAYER}self_attn.o_proj", "hidden", "heads", bias="o_bias"),
        Row("mlp_norm", f"{_LAYER}post_attention_layernorm", "hidden", when=_has_mlp_norm),
        Row("gate_up", f"{_LAYER}mlp.gate_proj", "ffn", "hidden", bias="mlp_bias"),
        Row("gate_up", f"{_LAYER}mlp.up_proj", "ffn", "hidden", bias="mlp_bias"),
        Row("down", f"{_LAYER}mlp.down_proj", "hidden", "ffn", bias="mlp_bias"),
    ),
    "dolomite": (
        Row("attention_norm", f"{_FUSED}ln_1", "hidden"),
        Row("qkv", f"{_FUSED}sequence_mixer.c_attn", "heads", "hidden", bias="qkv_bias", at=_in_group(None)),
        Row("qkv", f"{_FUSED}sequence_mixer.c_attn", "kv_heads", "hidden", bias="qkv_bias", at=_in_group(0)),
        Row("qkv", f"{_FUSED}sequence_mixer.c_attn", "kv_heads", "hidden", bias="qkv_bias", at=_in_group(1)),
        Row("o", f"{_FUSED}sequence_mixer.c_proj", "hidden", "heads", bias="o_bias"),
        Row("mlp_norm", f"{_FUSED}ln_2", "hidden", when=_has_mlp_norm),
        # stored as [up; gate]
        Row("gate_up", f"{_FUSED}mlp_block.c_fc", "ffn", "hidden", bias="mlp_bias", at=lambda c, row: c.ffn_size + row),
        Row("gate_up", f"{_FUSED}mlp_block.c_fc", "ffn", "hidden", bias="mlp_bias", at=lambda c, row: row),
        Row("down", f"{_FUSED}mlp_block.c_proj", "hidden", "ffn", bias="mlp_bias"),
    ),
}
_ENDS: dict[Layout, tuple[str, str, str]] = {
    "huggingface": ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"),
    "dolomite": ("transformer.wte.weight", "transformer.ln_f.weight", "lm_head.weight"),
}
"""The embedding, the final norm and the head."""
PRODUCTS = ("qkv", "o", "gate_up", "down")


def _tensors(config: ModelConfig, layer: int) -> Iterator[tuple[Row, str]]:
    """The rows of the table that a layer has, with the suffix of each tensor."""
    for row in _ROWS[config.layout]:
        if row.when(config, layer):
            yield row, "weight"
            if row.bias is not None and getattr(config, row.bias):
                yield row, "bias"


def _vocabulary(parameter: str, tensor: str, shard: RankShard) -> Iterator[Fill]:
    rows = shard.vocab
    real = max(0, min(rows.stop, shard.config.vocab_size) - rows.start)
    if real:
        yield Fill(parameter, 0, real, tensor, source_row=rows.start)
    if real < len(rows):
        yield Fill(parameter, real, len(rows) - real, None)


def _layer_fills(shard: RankShard, layer: int) -> Iterator[Fill]:
    config = shard.config
    stored = layer if shard.stage is None else shard.stage.first_layer + layer
    filled: dict[str, int] = {}
    for row, suffix in _tensors(config, layer):
        columns = None if row.columns is None else _AXES[row.columns](shard)
        part = columns is not None and row.columns != "hidden"
        if suffix == "bias" and part and shard.rank:
            continue  # the all-reduce would add it once a rank
        parameter, rows = f"layers.{layer}.{row.parameter}.{suffix}", _AXES[row.rows](shard)
        step = config.head_dim if row.at is not None and "heads" in row.rows else len(rows)
        for first in rows[::step]:
            at, to = first if row.at is None else row.at(config, first), filled.get(parameter, 0)
            fill = Fill(parameter, to, step, f"{row.tensor.format(stored)}.{suffix}", at)
            if columns is not None and part and suffix == "weight":
                fill = replace(fill, source_col=columns.start, columns=len(columns))
            yield fill
            filled[parameter] = to + step


def plan_fills(shard: RankShard, replicate_embedding: bool = False) -> list[Fill]:
    """Every parameter row of this rank, exactly once. A bias behind a row-parallel product belongs to rank 0 alone."""
    config, (embedding, norm, head) = shard.config, _ENDS[shard.config.layout]
    fills: list[Fill] = []
    if shard.embeds and replicate_embedding:
        fills.append(Fill("embedding.weight", 0, config.vocab_size, embedding))
    elif shard.embeds:
        fills.extend(_vocabulary("embedding.weight", embedding, shard))
    for layer in range(config.num_layers):
        fills.extend(_layer_fills(shard, layer))
    if shard.samples:
        fills.append(Fill("norm.weight", 0, config.hidden_size, norm))
    if shard.has_head(replicate_embedding):
        fills.extend(_vocabulary("head.weight", embedding if config.tied_embeddings else head, shard))
    return fills


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that the checkpoint must hold, with its shape."""
    (embedding, norm, head), whole = _ENDS[config.layout], RankShard(config, 1, 0)
    shapes: dict[str, tuple[int, ...]] = {embedding: (config.vocab_size, config.hidden_size)}
    shapes[norm] = (config.hidden_size,)
    if not config.tied_embeddings:
        shapes[head] = (config.vocab_size, config.hidden_size)
    for layer in range(config.num_layers):
        for row, suffix in _tensors(config, layer):
            name = f"{row.tensor.format(layer)}.{suffix}"
            rows = shapes.get(name, (0,))[0] + len(_AXES[row.rows](whole))
            columns = () if row.columns is None or suffix == "bias" else (len(_AXES[row.columns](whole)),)
            shapes[name] = (rows, *columns)
    return shapes


def sources_of(config: ModelConfig, layer: int, product: str) -> tuple[str, ...]:
    """The checkpoint tensors whose rows make up one product's weight."""
    names = (row.tensor for row, suffix in _tensors(config, layer) if (row.parameter, suffix) == (product, "weight"))
    return tuple(dict.fromkeys(f"{name.format(layer)}.weight" for name in names))


def head_of(config: ModelConfig) -> str:
    """The head's tensor: a tied checkpoint may carry a copy of it."""
    return _ENDS[config.layout][2]
