"""Maps rows of one checkpoint layout's tensors to rows of another's; both fill the same parameters. Pure. Used by
models/weights/convert.py to copy and by tools/train/build.py to load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import itemgetter

from ..config.model_config import Layout, ModelConfig
from ..stages import RankShard
from .slices import plan_fills


@dataclass(frozen=True, slots=True)
class Rows:
    tensor: str
    row: int
    count: int


def sources(config: ModelConfig, layout: Layout) -> dict[str, tuple[Rows, ...]]:
    """For each tensor in `layout`, its rows in the stored model (`config.layout`). Raises KeyError."""
    tensors, stored = (_in_parameters(replace(config, layout=layout_name)) for layout_name in (layout, config.layout))
    where: dict[str, list[tuple[Rows, str, int]]] = {}
    for tensor, parts in stored.items():
        at = 0
        for part in parts:
            where.setdefault(part.tensor, []).append((part, tensor, at))
            at += part.count
    for places in where.values():
        places.sort(key=lambda place: place[0].row)
    return {tensor: tuple(rows for part in parts for rows in _found(part, where)) for tensor, parts in tensors.items()}


def _found(part: Rows, where: Mapping[str, list[tuple[Rows, str, int]]]) -> list[Rows]:
    end = part.row + part.count
    return [
        Rows(tensor, at + max(part.row, has.row) - has.row, min(end, has.row + has.count) - max(part.row, has.row))
        for has, tensor, at in where[part.tensor]
        if has.row < end and part.row < has.row + has.count
    ]


def _in_parameters(config: ModelConfig) -> dict[str, tuple[Rows, ...]]:
    """For each tensor of the layout, the rows of parameters that it fills."""
    parts: dict[str, list[tuple[int, Rows]]] = {}
    for fill in plan_fills(RankShard(config, 1, 0)):
        if fill.tensor is not None:
            parts.setdefault(fill.tensor, []).append((fill.source_row, Rows(fill.parameter, fill.row, fill.count)))
    return {name: tuple(rows for _, rows in sorted(numbered, key=itemgetter(0))) for name, numbered in parts.items()}
