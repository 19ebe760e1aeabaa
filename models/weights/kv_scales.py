"""Reads the factors of an fp8 KV cache from a checkpoint: for the keys and for the values of a layer one number, or one
a KV head, as calibration by compressed-tensors (llm-compressor) and ModelOpt stores them.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from ..stages import RankShard
from .checkpoint import CheckpointError
from .mapping import Source
from .quantised import PLAIN
from .slices import sources_of
from .tensor_reader import Reader

_NAMES = ("{0}_scale", "{0}_proj.{0}_scale", "{0}_proj.output_scale", "attn.{0}_scale")
"""Of the scale of keys or values, below the attention's name."""


def read_kv_scales(source: Source, shard: RankShard) -> tuple[Tensor, Tensor] | None:
    """Reads the factors of keys and of values, [layers, K] each in fp32, of this rank's KV heads. None if the source
    has none: per-rank files have none. Raises CheckpointError, also if a layer has none although another has."""
    names = [] if source.sharded_over else [_names(source, shard, layer) for layer in range(shard.config.num_layers)]
    absent = [layer for layer, pair in enumerate(names) if "" in pair]
    if len(absent) == len(names):
        return None
    if absent:
        raise CheckpointError(
            f"{source.folder}: layer {absent[0]} of {len(names)} has no k_scale or no v_scale, and others have both: "
            "use engine.kv_cache_dtype auto, or calibrate every layer"
        )
    with Reader() as reader:
        keys, values = (
            torch.stack([_read(reader, source, shard, name) for name in one]) for one in zip(*names, strict=True)
        )
    return keys, values


def _names(source: Source, shard: RankShard, layer: int) -> tuple[str, str]:
    """The tensors with the scales of a layer's keys and values; "" for none."""
    if not (projections := sources_of(shard, layer, "qkv")):  # of lanes, whose tensors have no names by layer
        return "", ""
    attention = projections[0].rsplit(".", 2)[0]

    def name(letter: str) -> str:
        names = (f"{attention}.{name.format(letter)}" for name in _NAMES)
        return next((name for name in names if name in source.tensors), "")

    return name("k"), name("v")


def _read(reader: Reader, source: Source, shard: RankShard, name: str) -> Tensor:
    stored, heads = source.tensors[name], shard.config.num_kv_heads
    if stored.dtype not in PLAIN or prod(stored.shape) not in (1, heads):
        raise CheckpointError(
            f"{stored.file}: tensor {name} is {stored.dtype} {stored.shape}; one number or {heads} (one a KV head) in "
            f"{', '.join(PLAIN)} are read"
        )
    values = reader.whole(stored).float().view(-1).expand(heads)
    if not bool((values.isfinite() & (values > 0)).all()):
        raise CheckpointError(
            f"{stored.file}: tensor {name} has {values.min():g} to {values.max():g}; a scale is above 0 and finite: "
            "use engine.kv_cache_dtype auto, or calibrate again"
        )
    return values[shard.first_kv_head : shard.first_kv_head + shard.num_kv_heads]
