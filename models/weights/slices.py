"""Maps each parameter of models/llama.py to slices of stored tensors. A layout is a table with a row for each stored
tensor. `plan_fills` makes the Fills that tile every parameter exactly once; `expected_shapes` the checkpoint's shapes.
Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from ..config.lanes import Lanes
from ..config.latent import Index, Latent
from ..config.model_config import Layout, ModelConfig
from ..stages import RankShard, Stage


@dataclass(frozen=True, slots=True)
class Fill:
    """The source of rows [row, row + count) of a parameter: rows [source_row, ...) and columns [source_col,
    source_col + columns) of a checkpoint tensor (columns None: all). `tensor` None: the rows are vocabulary padding,
    zeros. pairs: rows of a head, if the checkpoint rotates pairs (2j, 2j + 1) and the parameter (j, j + pairs / 2);
    else 0. transposed: rows of the parameter are columns of the tensor, unless it has 4-bit codes."""

    parameter: str
    row: int
    count: int
    tensor: str | None
    source_row: int = 0
    source_col: int = 0
    columns: int | None = None
    pairs: int = 0
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """A stored matrix or vector, the parameter whose next rows it fills, and the axes of its rows and columns (None: a
    vector), which determine this rank's share. A tensor with a second `{}` belongs to an expert, and is repeated for
    each expert of the rank.

    when: whether `layer` has it. bias: the field of ModelConfig that tells whether a vector ".bias" belongs to it. at:
    for tensors with several parts, where a row of the axis is stored, in whole heads for axes of heads. fused: a tensor
    of all experts that may replace those of each expert; it may have the parts of several rows, in order. rotated:
    the field of Latent that tells whether the checkpoint rotates neighbouring rows. kind: which parameter it fills.
    interleaved: even rows precede odd ones in the parameter. transposed: stored as [columns, rows].
    """

    parameter: str
    tensor: str
    rows: str
    columns: str | None = None
    when: Callable[[ModelConfig, int], bool] = lambda config, layer: True
    bias: str | None = None
    at: Callable[[ModelConfig, int], int] | None = None
    suffix: str = ".weight"
    fused: str | None = None
    rotated: str = ""
    kind: Literal["weight", "bias"] = "weight"
    interleaved: bool = False
    transposed: bool = False

    @property
    def per_expert(self) -> bool:
        return self.tensor.count("{}") == 2


_AXES: dict[str, Callable[[RankShard], range]] = {
    "hidden": lambda s: range(s.config.hidden_size),
    "joined": lambda s: range(2 * s.config.hidden_size),
    "head": lambda s: range(s.config.head_dim),
    "heads": lambda s: _span(s.first_head, s.num_heads, s.config.head_dim),
    "kv_heads": lambda s: _span(s.first_kv_head, s.num_kv_heads, s.config.head_dim),
    "ffn": lambda s: _span(s.first_ffn, s.ffn_size, 1),
    "experts": lambda s: range(0 if s.config.experts is None else s.config.experts.routed),
    "expert_ffn": lambda s: s.expert_ffn,
    "expert_gate_up": lambda s: _span(s.expert_ffn.start, len(s.expert_ffn), 2),
    "scores": lambda s: _span(s.first_head, s.num_heads, 1),
    "shared_ffn": lambda s: s.shared_ffn,
    "query_rank": lambda s: range(_latent(s.config).query_rank),
    "rank": lambda s: range(_latent(s.config).rank),
    "rotated": lambda s: range(_latent(s.config).rotated),
    "plain_heads": lambda s: _span(s.first_head, s.num_heads, _latent(s.config).plain),
    "rotated_heads": lambda s: _span(s.first_head, s.num_heads, _latent(s.config).rotated),
    "value_heads": lambda s: _span(s.first_head, s.num_heads, _latent(s.config).value),
    "index_heads": lambda s: range(_index(s.config).heads),
    "index_plain": lambda s: range(_latent(s.config).index_plain),
    "rotated_index_heads": lambda s: range(_index(s.config).heads * _latent(s.config).rotated),
    "plain_index_heads": lambda s: range(_index(s.config).heads * _latent(s.config).index_plain),
}
"""A rank's rows or columns of an axis, numbered as in a stored tensor that has only this axis."""


_UNITS: dict[str, Callable[[ModelConfig], int]] = {
    "heads": lambda c: c.head_dim,
    "kv_heads": lambda c: c.head_dim,
    "plain_heads": lambda c: _latent(c).plain,
    "rotated_heads": lambda c: _latent(c).rotated,
    "value_heads": lambda c: _latent(c).value,
    "rotated_index_heads": lambda c: _latent(c).rotated,
    "plain_index_heads": lambda c: _latent(c).index_plain,
}
"""Rows per head."""


def _latent(config: ModelConfig) -> Latent:
    assert config.latent is not None
    return config.latent


def _index(config: ModelConfig) -> Index:
    index = _latent(config).index
    assert index is not None
    return index


def _span(first: int, count: int, unit: int) -> range:
    return range(first * unit, (first + count) * unit)


def _has_mlp_norm(config: ModelConfig, layer: int) -> bool:
    return config.wiring.kinds[layer] != "parallel"


def _has_qk_norm(config: ModelConfig, layer: int) -> bool:
    return config.qk_norm


def _has_bias(config: ModelConfig, layer: int) -> bool:
    return config.experts is not None and config.experts.layers[layer] and config.experts.router.biased


def _has_shared(config: ModelConfig, layer: int) -> bool:
    return config.experts is not None and config.experts.layers[layer] and config.experts.shared_ffn_size > 0


def _in_head(part: str, other: str, first: bool) -> Callable[[ModelConfig, int], int]:
    """Where a tensor whose heads have two parts (fields of Latent) stores a row of `part`; first: it is the first."""

    def at(config: ModelConfig, row: int) -> int:
        own, beside = (int(getattr(_latent(config), name)) for name in (part, other))
        head, inside = divmod(row, own)
        return head * (own + beside) + (0 if first else beside) + inside

    return at


def _in_group(place: int | None) -> Callable[[ModelConfig, int], int]:
    """Where dolomite's c_attn stores a row: for each group its query heads, its key, its value. place: 0 for the key
    and 1 for the value, which follow the query heads; None: a query head."""

    def at(config: ModelConfig, row: int) -> int:
        queries, (head, inside) = config.num_heads // config.num_kv_heads, divmod(row, config.head_dim)
        group, member = divmod(head, queries) if place is None else (head, queries + place)
        return (group * (queries + 2) + member) * config.head_dim + inside

    return at


_LAYER = "model.layers.{}."
_FUSED = "transformer.h.{}."


def _experts(block: str, gate: str, up: str, down: str, router: str = "gate.", weight: str = "") -> tuple[Row, ...]:
    """Rows of a layer's experts with a family's names. router, weight: the router's names below `block`, and its
    matrix's below that."""
    mixed, every = ModelConfig.has_experts, f"{_LAYER}{block}.experts."
    expert, shared = f"{every}{{}}.", f"{_LAYER}{block}.shared_experts."
    return (
        Row("experts.router", f"{_LAYER}{block}.{router}{weight}weight", "experts", "hidden", when=mixed, suffix=""),
        Row("experts.bias", f"{_LAYER}{block}.{router}e_score_correction_bias", "experts", when=_has_bias, suffix=""),
        Row("experts.shared_gate_up", f"{shared}gate_proj", "shared_ffn", "hidden", when=_has_shared),
        Row("experts.shared_gate_up", f"{shared}up_proj", "shared_ffn", "hidden", when=_has_shared),
        Row("experts.shared_down", f"{shared}down_proj", "hidden", "shared_ffn", when=_has_shared),
        Row("experts.gate_up", f"{expert}{gate}", "expert_ffn", "hidden", when=mixed, fused=f"{every}gate_up_proj"),
        Row("experts.gate_up", f"{expert}{up}", "expert_ffn", "hidden", when=mixed, fused=f"{every}gate_up_proj"),
        Row("experts.down", f"{expert}{down}", "hidden", "expert_ffn", when=mixed, fused=f"{every}down_proj"),
    )


def _clamped_experts(block: str) -> tuple[Row, ...]:
    """GPT-OSS's: products as [in, out], with the columns of gate and up alternating, and biases."""
    experts, router = f"{_LAYER}{block}.experts.", f"{_LAYER}{block}.router."
    mixed = ModelConfig.has_experts
    rows = [
        Row("experts.router", f"{router}weight", "experts", "hidden", suffix="", when=mixed),
        Row("experts.router", f"{router}bias", "experts", suffix="", when=mixed, kind="bias"),
    ]
    for product, outputs, inputs in (("gate_up", "expert_gate_up", "hidden"), ("down", "hidden", "expert_ffn")):
        paired, name, tensor = product == "gate_up", f"experts.{product}", f"{product}_proj"
        row = Row(name, f"{experts}{{}}.{tensor}", outputs, inputs, mixed, suffix="", fused=f"{experts}{tensor}")
        row = replace(row, interleaved=paired, transposed=True)
        bias = replace(row, tensor=f"{row.tensor}_bias", fused=f"{row.fused}_bias", kind="bias", transposed=False)
        rows += [row, bias]
    return tuple(rows)


_NORMS = (
    Row("attention_norm", f"{_LAYER}input_layernorm", "hidden"),
    Row("mlp_norm", f"{_LAYER}post_attention_layernorm", "hidden", when=_has_mlp_norm),
)
_ATTENTION = (
    Row("qkv", f"{_LAYER}self_attn.q_proj", "heads", "hidden", bias="qkv_bias"),
    Row("qkv", f"{_LAYER}self_attn.k_proj", "kv_heads", "hidden", bias="qkv_bias"),
    Row("qkv", f"{_LAYER}self_attn.v_proj", "kv_heads", "hidden", bias="qkv_bias"),
    Row("q_norm", f"{_LAYER}self_attn.q_norm", "head", when=_has_qk_norm),
    Row("k_norm", f"{_LAYER}self_attn.k_norm", "head", when=_has_qk_norm),
    Row("o", f"{_LAYER}self_attn.o_proj", "hidden", "heads", bias="o_bias"),
    Row("sinks", f"{_LAYER}self_attn.sinks", "scores", when=lambda config, layer: config.sinks, suffix=""),
)
_PLAIN, _TURNED = _in_head("plain", "rotated", True), _in_head("rotated", "plain", False)


def _after_latent(config: ModelConfig, row: int) -> int:
    return _latent(config).rank + row


def _latent_attention(block: str) -> tuple[Row, ...]:
    """Rows of a layer's latent attention. In each product the first parts of all heads precede the second parts."""
    bias = "qkv_bias"

    def with_queries(config: ModelConfig, layer: int) -> bool:
        return _latent(config).query_rank > 0

    def without(config: ModelConfig, layer: int) -> bool:
        return not with_queries(config, layer)

    direct, made = f"{block}q_proj", f"{block}q_b_proj"
    both, pair = f"{block}kv_a_proj_with_mqa", f"{block}kv_b_proj"
    return (
        Row("latent.down", f"{block}q_a_proj", "query_rank", "hidden", when=with_queries, bias=bias),
        Row("latent.down", direct, "plain_heads", "hidden", when=without, at=_PLAIN),
        Row("latent.down", direct, "rotated_heads", "hidden", when=without, at=_TURNED, rotated="interleaved"),
        Row("latent.down", both, "rank", "hidden", bias=bias),
        Row("latent.down", both, "rotated", "hidden", bias=bias, at=_after_latent, rotated="interleaved"),
        Row("latent.q_norm", f"{block}q_a_layernorm", "query_rank", when=with_queries),
        Row("latent.q", made, "plain_heads", "query_rank", when=with_queries, at=_PLAIN),
        Row("latent.q", made, "rotated_heads", "query_rank", when=with_queries, at=_TURNED, rotated="interleaved"),
        Row("latent.norm", f"{block}kv_a_layernorm", "rank"),
        Row("latent.keys", pair, "plain_heads", "rank", at=_in_head("plain", "value", True)),
        Row("latent.values", pair, "value_heads", "rank", at=_in_head("value", "plain", False)),
        Row("o", f"{block}o_proj", "hidden", "value_heads", bias="o_bias"),
    )


def _indexer(block: str) -> tuple[Row, ...]:
    """Rows of a layer's indexer, which every rank has. The rotated parts of all heads precede the others."""

    def chooses(config: ModelConfig, layer: int) -> bool:
        index = _latent(config).index
        return index is not None and index.full[layer]

    def behind(config: ModelConfig, row: int) -> int:
        return _latent(config).rotated + row

    turned, first, rest = "index_interleaved", "rotated", "index_plain"
    queries, keys, made, key = "latent.index_q", "latent.index_k", f"{block}wq_b", f"{block}wk"
    one, other = _in_head("rotated", "index_plain", True), _in_head("index_plain", "rotated", False)
    rows = [
        Row(queries, made, "rotated_index_heads", "query_rank", chooses, at=one, rotated=turned),
        Row(queries, made, "plain_index_heads", "query_rank", chooses, at=other),
        Row(keys, key, first, "hidden", chooses, rotated=turned),
        Row(keys, key, rest, "hidden", chooses, at=behind),
        Row("latent.index_weights", f"{block}weights_proj", "index_heads", "hidden", chooses),
    ]
    weight = Row("latent.index_norm", f"{block}k_norm", first, when=chooses, rotated=turned)
    for part in (weight, replace(weight, kind="bias", suffix=".bias")):
        rows += [part, replace(part, rows=rest, at=behind, rotated="")]
    return tuple(rows)


def _mlp(block: str) -> tuple[Row, ...]:
    return (
        Row("gate_up", f"{block}gate_proj", "ffn", "hidden", when=ModelConfig.has_mlp, bias="mlp_bias"),
        Row("gate_up", f"{block}up_proj", "ffn", "hidden", when=ModelConfig.has_mlp, bias="mlp_bias"),
        Row("down", f"{block}down_proj", "hidden", "ffn", when=ModelConfig.has_mlp, bias="mlp_bias"),
    )


def _join(layer: str, norms: str, last_norm: str) -> tuple[Row, ...]:
    """What a predicting layer has beside a layer's own: the norms and product of what it joins, and its last norm."""
    return (
        Row("embedding_norm", f"{layer}enorm{norms}", "hidden"),
        Row("state_norm", f"{layer}hnorm{norms}", "hidden"),
        Row("join", f"{layer}eh_proj", "hidden", "joined"),
        Row("last_norm", last_norm, "hidden"),
    )


_MTP = "model.mtp.layers.{}."
_JOIN = _join(_LAYER, "", f"{_LAYER}shared_head.norm")
_MLP = _mlp(f"{_LAYER}mlp.")
_MOE = _experts("mlp", "gate_proj", "up_proj", "down_proj")
_ROWS: dict[Layout, tuple[Row, ...]] = {
    "huggingface": (*_NORMS, *_ATTENTION, *_MLP, *_MOE),
    "latent": (
        *_NORMS,
        *_latent_attention(f"{_LAYER}self_attn."),
        *_indexer(f"{_LAYER}self_attn.indexer."),
        *_MLP,
        *_MOE,
    ),
    "shortcut": (
        Row("attention_norm", f"{_LAYER}input_layernorm.%", "hidden"),
        Row("mlp_norm", f"{_LAYER}post_attention_layernorm.%", "hidden"),
        *_latent_attention(f"{_LAYER}self_attn.%."),
        *_mlp(f"{_LAYER}mlps.%."),
        *_experts("mlp", "gate_proj", "up_proj", "down_proj", "router.", "classifier."),
    ),
    "mixtral": (*_NORMS, *_ATTENTION, *_experts("block_sparse_moe", "w1", "w3", "w2")),
    "gpt_oss": (*_NORMS, *_ATTENTION, *_clamped_experts("mlp")),
    "shortcut_predictor": (
        Row("attention_norm", f"{_MTP}input_layernorm", "hidden"),
        Row("mlp_norm", f"{_MTP}post_attention_layernorm", "hidden"),
        *_latent_attention(f"{_MTP}self_attn."),
        *_mlp(f"{_MTP}transformer_layer.mlp."),
        *_join(_MTP, ".m", "model.mtp.norm"),
    ),
    "laneformer": (),  # see _lane_fills
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
_ROWS |= {"predictor": (*_ROWS["huggingface"], *_JOIN), "latent_predictor": (*_ROWS["latent"], *_JOIN)}
_ENDS = dict.fromkeys(_ROWS, ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"))
_ENDS["dolomite"] = ("transformer.wte.weight", "transformer.ln_f.weight", "lm_head.weight")
"""The embedding, the final norm and the head."""
_LANE_EMBEDDING = "model.tok_embeddings.weight"
PRODUCTS, EXPERTS = ("qkv", "o", "gate_up", "down"), ("experts.gate_up", "experts.down")
SHARED = "experts.shared_down"
KEPT = (*PRODUCTS, "latent.down", "latent.q", "experts.shared_gate_up", SHARED, *EXPERTS)
"""The products of a layer that may stay quantised."""


def _tensors(config: ModelConfig, layer: int, experts: Iterable[int]) -> Iterator[tuple[Row, str, str]]:
    """Yields the table's rows for a layer, the suffix of the parameter, and the tensor's name without the layer's
    number; rows of experts last, expert by expert."""
    rows = [row for row in _ROWS[config.layout] if row.when(config, layer)]
    for row in rows:
        if not row.per_expert:
            yield row, row.kind, f"{row.tensor}{row.suffix}"
            if row.bias is not None and getattr(config, row.bias):
                yield row, "bias", f"{row.tensor}.bias"
    of_experts = [row for row in rows if row.per_expert]
    for expert in experts if of_experts else ():
        for row in of_experts:
            yield row, row.kind, f"{row.tensor.format('{}', expert)}{row.suffix}"


def _vocabulary(parameter: str, tensor: str, rows: range, vocab_size: int) -> Iterator[Fill]:
    real = max(0, min(rows.stop, vocab_size) - rows.start)
    if real:
        yield Fill(parameter, 0, real, tensor, source_row=rows.start)
    if real < len(rows):
        yield Fill(parameter, real, len(rows) - real, None)


def _layer_fills(shard: RankShard, layer: int) -> Iterator[Fill]:
    config, stored = shard.config, _stored_layer(shard, layer)
    filled: dict[str, int] = {}
    for row, suffix, name in _tensors(config, layer, shard.expert_ids):
        columns = None if row.columns is None else _AXES[row.columns](shard)
        part = columns is not None and row.columns != "hidden"
        others = shard.dense_rank if not row.per_expert else shard.rank and not shard.spread
        if suffix == "bias" and part and others:
            continue  # only one rank adds it, else the all-reduce would multiply it
        parameter, rows = f"layers.{layer}.{row.parameter}.{suffix}", _AXES[row.rows](shard)
        step = _UNITS[row.rows](config) if row.at and row.rows in _UNITS else len(rows)
        pairs = _latent(config).rotated if row.rotated and getattr(_latent(config), row.rotated) else 0
        pairs = len(rows) if row.interleaved else pairs
        for first in rows[:: step or 1]:  # none of an empty part
            at, to = first if row.at is None else row.at(config, first), filled.get(parameter, 0)
            fill = Fill(parameter, to, step, _named(config, name, stored), at, pairs=pairs, transposed=row.transposed)
            if columns is not None and part and suffix == "weight":
                fill = replace(fill, source_col=columns.start, columns=len(columns))
            yield fill
            filled[parameter] = to + step


def _named(config: ModelConfig, tensor: str, layer: int, *expert: int) -> str:
    """The name of a layer's tensor. If two layers are stored as one, `%` is the layer's number in the pair."""
    if config.layout != "shortcut":
        return tensor.format(layer, *expert)
    return tensor.format(layer // 2, *expert).replace("%", str(layer % 2))


def _stored_layer(shard: RankShard, layer: int) -> int:
    """The number in the checkpoint of a stage's layer."""
    return layer if shard.stage is None else shard.stage.first_layer + layer


def plan_fills(shard: RankShard, replicate_embedding: bool = False) -> list[Fill]:
    """Plans fills of every parameter row of this rank, exactly once. Only rank 0 has the bias of a row-parallel
    product."""
    config, embedding, fills = shard.config, embedding_of(shard.config), list[Fill]()
    if shard.embeds and replicate_embedding:
        fills.append(Fill("embedding.weight", 0, config.vocab_size, embedding))
    elif shard.embeds:
        fills.extend(_vocabulary("embedding.weight", embedding, shard.embedded, config.vocab_size))
    if config.lanes is not None:
        fills.extend(_lane_fills(shard, config.lanes))
    else:
        for layer in range(config.num_layers):
            fills.extend(_layer_fills(shard, layer))
        if shard.samples:
            fills.append(Fill("norm.weight", 0, config.hidden_size, _ENDS[config.layout][1]))
    if shard.has_head(replicate_embedding):
        stored = embedding if config.tied_embeddings else head_of(config)
        fills.extend(_vocabulary("head.weight", stored, shard.vocab, config.vocab_size))
    return fills


def expected_shapes(config: ModelConfig, predictor: Stage | None = None) -> dict[str, tuple[int, ...]]:
    """Every tensor that the checkpoint must have, with its shape. predictor: the predicting layer, if it is used."""
    if config.lanes is not None:
        return _lane_shapes(config, config.lanes)
    embedding, norm, head = _ENDS[config.layout]
    shapes: dict[str, tuple[int, ...]] = {embedding: (config.vocab_size, config.hidden_size)}
    shapes[norm] = (config.hidden_size,)
    if not config.tied_embeddings:
        shapes[head] = (config.vocab_size, config.hidden_size)
    for shard, layer, stored in _whole_layers(config, predictor):
        for row, suffix, tensor in _tensors(shard.config, layer, shard.expert_ids):
            name = _named(shard.config, tensor, stored)
            rows = shapes.get(name, (0,))[0] + len(_AXES[row.rows](shard))
            columns = () if row.columns is None or suffix == "bias" else (len(_AXES[row.columns](shard)),)
            shapes[name] = (*columns, rows) if row.transposed else (rows, *columns)
    return shapes


def _whole_layers(config: ModelConfig, predictor: Stage | None) -> Iterator[tuple[RankShard, int, int]]:
    """Yields each layer and then the predicting one: the whole model that it belongs to, its number there and in the
    checkpoint."""
    for layer in range(config.num_layers):
        yield RankShard(config, 1, 0), layer, layer
    if predictor is not None:
        yield RankShard(predictor.config, 1, 0, predictor), 0, predictor.first_layer


def fused_experts(
    config: ModelConfig, predictor: Stage | None = None
) -> Iterator[tuple[str, list[list[str]], tuple[int, ...]]]:
    """Yields tensors [E, parts * rows, columns] that may replace those of each expert: the name, for every expert the
    names of its parts, and the shape of a part. predictor: the predicting layer, if it is used."""
    for full, layer, stored in _whole_layers(config, predictor):
        c, parts = full.config, dict[str, list[Row]]()
        for row in _ROWS[c.layout]:
            if row.fused is not None and row.when(c, layer):
                parts.setdefault(_named(c, row.fused, stored), []).append(row)
        for fused, rows in parts.items():
            axes = (rows[0].rows, *(() if rows[0].kind == "bias" else (rows[0].columns or rows[0].rows,)))
            shape = tuple(len(_AXES[axis](full)) for axis in (axes[::-1] if rows[0].transposed else axes))
            names = [[_named(c, f"{row.tensor}{row.suffix}", stored, e) for row in rows] for e in full.expert_ids]
            yield fused, names, shape


def sources_of(shard: RankShard, layer: int, product: str) -> tuple[str, ...]:
    """The checkpoint tensors that form one product's weight."""
    config, stored = shard.config, _stored_layer(shard, layer)
    experts = range(config.experts.count) if config.experts is not None and product in EXPERTS else ()
    suffixes = ((row.parameter, suffix, name) for row, suffix, name in _tensors(config, layer, experts))
    return tuple(dict.fromkeys(_named(config, name, stored) for *what, name in suffixes if what == [product, "weight"]))


def product_columns(shard: RankShard) -> dict[str, int]:
    """The number of columns on a rank of each product that may stay quantised."""
    rows = [row for row in _ROWS[shard.config.layout] if row.parameter in KEPT and row.columns is not None]
    latent, has = shard.config.latent is not None, shard.config.experts is not None
    return {
        row.parameter: len(_AXES[row.columns or ""](shard))
        for row in rows
        if (latent or not row.parameter.startswith("latent.")) and (has or not row.parameter.startswith("experts."))
    }


def head_of(config: ModelConfig) -> str:
    """The name of the head's tensor; a tied checkpoint may have a copy."""
    if config.lanes is not None:
        return "lm_head.linear.weight" if config.lanes.head == "lane" else "lm_head.weight"
    return _ENDS[config.layout][2]


def embedding_of(config: ModelConfig) -> str:
    """The name of the embedding's tensor."""
    return _LANE_EMBEDDING if config.lanes is not None else _ENDS[config.layout][0]


def _lane_fills(shard: RankShard, lanes: Lanes) -> list[Fill]:
    """Fills of the layers and the last norm. A stored tensor has a matrix for each lane, [L, out, in], and is read as
    [L * out, in]. A parameter has the matrices of this rank's lanes in order; fused products lane by lane."""
    config, d, dim = shard.config, shard.config.hidden_size, shard.config.head_dim
    first, mine = shard.first_lane, shard.num_lanes
    q, kv, f = (size // lanes.count for size in (config.num_heads * dim, config.num_kv_heads * dim, config.ffn_size))
    fills: list[Fill] = []

    def norm(to: str, tensor: str, per_lane: bool) -> None:
        one = Fill(to, 0, mine, f"{tensor}.scale", first) if per_lane else Fill(to, 0, d, f"{tensor}.weight")
        fills.append(one)

    for layer in range(config.num_layers):
        here, there = f"layers.{layer}.", _LAYER.format(_stored_layer(shard, layer))
        norm(f"{here}attention_norm.weight", f"{there}attention_norm", lanes.norm_each)
        norm(f"{here}mlp_norm.weight", f"{there}ffn_norm", lanes.norm_each)
        for place, lane in enumerate(range(first, first + mine)):
            at = place * (q + 2 * kv)
            for name, to, rows in (("wq", at, q), ("wk", at + q, kv), ("wv", at + q + kv, kv)):
                pairs = dim if name != "wv" else 0
                source = f"{there}attention.{name}.weight"
                fills.append(Fill(f"{here}qkv.weight", to, rows, source, lane * rows, pairs=pairs))
            for name, to in (("w1", place * 2 * f), ("w3", place * 2 * f + f)):
                fills.append(Fill(f"{here}gate_up.weight", to, f, f"{there}feed_forward.{name}.weight", lane * f))
        fills.append(Fill(f"{here}o.weight", 0, mine * d, f"{there}attention.wo.weight", first * d))
        fills.append(Fill(f"{here}down.weight", 0, mine * d, f"{there}feed_forward.w2.weight", first * d))
    if shard.samples:
        norm("norm.weight", "model.norm", lanes.norm_each and not lanes.sum_first)
    return fills


def _lane_shapes(config: ModelConfig, lanes: Lanes) -> dict[str, tuple[int, ...]]:
    d, dim, count = config.hidden_size, config.head_dim, lanes.count
    q, kv, f = (size // count for size in (config.num_heads * dim, config.num_kv_heads * dim, config.ffn_size))
    shapes: dict[str, tuple[int, ...]] = {_LANE_EMBEDDING: (config.vocab_size, d)}

    def norm(name: str, per_lane: bool) -> None:
        shapes[f"{name}.{'scale' if per_lane else 'weight'}"] = (count, d) if per_lane else (d,)

    for layer in range(config.num_layers):
        here = _LAYER.format(layer)
        norm(f"{here}attention_norm", lanes.norm_each)
        norm(f"{here}ffn_norm", lanes.norm_each)
        shapes |= {
            f"{here}attention.{name}.weight": (count, rows, d) for name, rows in (("wq", q), ("wk", kv), ("wv", kv))
        }
        shapes |= {f"{here}feed_forward.{name}.weight": (count, f, d) for name in ("w1", "w3")}
        shapes[f"{here}attention.wo.weight"] = (count, d, q)
        shapes[f"{here}feed_forward.w2.weight"] = (count, d, f)
    norm("model.norm", lanes.norm_each and not lanes.sum_first)
    if not config.tied_embeddings:
        wide, by_lane = (config.vocab_size, count * d), (count, config.vocab_size // count, d)
        shapes[head_of(config)] = {"lane": wide, "vocab_parallel": by_lane}.get(lanes.head, (config.vocab_size, d))
    return shapes
