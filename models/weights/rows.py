"""Which rows of one checkpoint layout's tensors are which rows of another's: stock names on one side, fused tensors on
the other. Pure; models/weights/convert.py copies by it, models/training/state.py loads by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..config.model_config import Layout, ModelConfig
from .slices import expected_shapes


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows [row, row + count) of `tensor`."""

    tensor: str
    row: int
    count: int


def sources(config: ModelConfig, layout: Layout) -> dict[str, tuple[Rows, ...]]:
    """For every tensor of the model in `layout`, from its first row to its last: where the model as it is stored
    (`config.layout`) has them. What is missing on either side raises KeyError."""
    wanted, stored = (_in_stock_names(replace(config, layout=each)) for each in (layout, config.layout))
    where: dict[str, list[tuple[Rows, str, int]]] = {}
    for tensor, parts in stored.items():
        at = 0
        for part in parts:
            where.setdefault(part.tensor, []).append((part, tensor, at))
            at += part.count
    for places in where.values():
        places.sort(key=lambda place: place[0].row)
    return {tensor: tuple(found for part in parts for found in _found(part, where)) for tensor, parts in wanted.items()}


def between(parts: tuple[Rows, ...], first: int, count: int) -> tuple[Rows, ...]:
    """Those of `first` to `first + count` of the rows that `parts` are, one behind the other."""
    found, at = [], 0
    for part in parts:
        low, high = max(first, at), min(first + count, at + part.count)
        if low < high:
            found.append(Rows(part.tensor, part.row + low - at, high - low))
        at += part.count
    return tuple(found)


def _found(part: Rows, where: Mapping[str, list[tuple[Rows, str, int]]]) -> list[Rows]:
    end = part.row + part.count
    return [
        Rows(tensor, at + max(part.row, has.row) - has.row, min(end, has.row + has.count) - max(part.row, has.row))
        for has, tensor, at in where[part.tensor]
        if has.row < end and part.row < has.row + has.count
    ]


def _in_stock_names(config: ModelConfig) -> dict[str, tuple[Rows, ...]]:
    """Each tensor of the layout as rows under stock names."""
    shapes = expected_shapes(config)
    if config.layout == "huggingface":
        return {name: (Rows(name, 0, shape[0]),) for name, shape in shapes.items()}
    return {name: _fused(config, name, shape[0]) for name, shape in shapes.items()}


_PLAIN = {
    "transformer.wte": "model.embed_tokens",
    "transformer.ln_f": "model.norm",
    "lm_head": "lm_head",
    "ln_1": "input_layernorm",
    "ln_2": "post_attention_layernorm",
    "sequence_mixer.c_proj": "self_attn.o_proj",
    "mlp_block.c_proj": "mlp.down_proj",
}


def _fused(config: ModelConfig, name: str, rows: int) -> tuple[Rows, ...]:
    """dolomite's: c_attn is interleaved by key/value group (q..q, k, v), c_fc is [up; gate]."""
    stem, _, leaf = name.rpartition(".")
    prefix = ""
    if stem.startswith("transformer.h."):
        index, stem = stem.removeprefix("transformer.h.").split(".", 1)
        prefix = f"model.layers.{index}."
    if stem == "mlp_block.c_fc":
        return tuple(Rows(f"{prefix}mlp.{half}_proj.{leaf}", 0, config.ffn_size) for half in ("up", "gate"))
    if stem != "sequence_mixer.c_attn":
        return (Rows(f"{prefix}{_PLAIN[stem]}.{leaf}", 0, rows),)
    dim, queries = config.head_dim, config.num_heads // config.num_kv_heads * config.head_dim
    return tuple(
        Rows(f"{prefix}self_attn.{which}_proj.{leaf}", group * count, count)
        for group in range(config.num_kv_heads)
        for which, count in (("q", queries), ("k", dim), ("v", dim))
    )
