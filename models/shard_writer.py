"""Writes per-rank files for the fastest restart: each rank's parameters, fused and sliced, one behind the other.

Holds one parameter at a time. Read back by models/weights_shards.py. Called by `laddertron shard`.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from math import prod
from pathlib import Path

import torch

from .checkpoint import DTYPES, CheckpointError
from .readers import FP8, Reader, byte_view
from .shard import Shard
from .weights import Source
from .weights_fill import fill_target
from .weights_load import module_of
from .weights_plan import Fill, plan_fills
from .weights_shards import METADATA, Origin, config_digest, file_name, shards_folder, stamps

_WORDS = {dtype: word for word, dtype in DTYPES.items()}
COPIED = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
)
"""What makes a folder of per-rank files a model folder of its own."""


def write_shards(
    source: Source,
    shards: list[Shard],
    home: Path,
    *,
    replicate_embedding: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """One file a rank under `home`, whole or not at all; returns their folder. progress(done, total) in bytes.

    Raises CheckpointError where files for as many ranks are there already.
    """
    target = shards_folder(home, len(shards))
    if target.exists():
        raise CheckpointError(f"{target}: is there already: remove it, or say --overwrite")
    part = target.with_name(f"{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    names = sorted({stored.file.name for stored in source.tensors.values()})
    origin = Origin(
        source.digest, config_digest(source.folder), len(shards), replicate_embedding, stamps(source.folder, names)
    )
    plans = [_parameters(source, shard, replicate_embedding) for shard in shards]
    total = sum(prod(shape) * dtype.itemsize for plan in plans for _, shape, dtype in plan.values())
    done = 0
    for shard, plan in zip(shards, plans, strict=True):
        metadata = {METADATA: json.dumps(origin.to_json()), "rank": str(shard.rank)}
        with (part / file_name(shard.rank)).open("wb") as stream, Reader() as reader:
            stream.write(_header(plan, metadata))
            for fills, shape, dtype in plan.values():
                parameter = torch.zeros(shape, dtype=dtype)
                for fill in fills:
                    fill_target(reader, source.tensors, fill, parameter[fill.row : fill.row + fill.count])
                stream.write(byte_view(parameter.view(-1).view(torch.uint8)))
                done += parameter.numel() * dtype.itemsize
                if progress is not None:
                    progress(done, total)
            stream.flush()
            os.fsync(stream.fileno())
    if home != source.folder:
        for name in COPIED:
            if (source.folder / name).is_file() and not (home / name).exists():
                shutil.copyfile(source.folder / name, home / name)
    part.rename(target)
    return target


_Plan = dict[str, tuple[list[Fill], tuple[int, ...], torch.dtype]]


def _parameters(source: Source, shard: Shard, replicate_embedding: bool) -> _Plan:
    """Each parameter's fills, shape and type, layer by layer."""
    kept = source.kept_fp8(shard.config)
    plan: dict[str, list[Fill]] = {}
    for fill in plan_fills(shard, replicate_embedding, kept):
        plan.setdefault(fill.parameter, []).append(fill)
    names = sorted(plan, key=lambda name: _layer(name))
    return {name: (plan[name], _shape(source, plan[name]), _dtype(source, shard, name, plan[name])) for name in names}


def _layer(parameter: str) -> int:
    module = module_of(parameter)
    return (
        int(module.removeprefix("layers.")) if module.startswith("layers.") else -1 if module == "embedding" else 2**31
    )


def _shape(source: Source, fills: list[Fill]) -> tuple[int, ...]:
    rows = max(fill.row + fill.count for fill in fills)
    real = next((fill for fill in fills if fill.tensor is not None), None)
    if real is None or real.tensor is None:
        raise ValueError(f"parameter {fills[0].parameter} is padding alone")
    stored = source.tensors[real.tensor]
    if len(stored.shape) != 2 or real.parameter.endswith("_scale"):
        return (rows,)
    return (rows, real.columns or stored.shape[1])


def _dtype(source: Source, shard: Shard, name: str, fills: list[Fill]) -> torch.dtype:
    if name.endswith("_scale"):
        return torch.float32
    found = {DTYPES[source.tensors[fill.tensor].dtype] for fill in fills if fill.tensor is not None}
    if len(found) == 1 and (found != {FP8} or name.removesuffix(".weight") in source.kept_fp8(shard.config)):
        return found.pop()
    return getattr(torch, shard.config.dtype)  # type: ignore[no-any-return]


def _header(plan: _Plan, metadata: dict[str, str]) -> bytes:
    entries: dict[str, object] = {"__metadata__": metadata}
    at = 0
    for name, (_, shape, dtype) in plan.items():
        size = prod(shape) * dtype.itemsize
        entries[name] = {"dtype": _WORDS[dtype], "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(entries).encode()
    text += b" " * (-(len(text) + 8) % 4096)  # parameters begin on a page: they can be mapped in any type
    return len(text).to_bytes(8, "little") + text
