"""Writes per-rank files (read by rank_files.py): each rank's parameters, fused and sliced; one in memory at a time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence, Set
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from ...topology.json_codec import unbuild
from ..config.dialects import MODELING_FILE
from ..config.quantisation import scale_shape
from ..stages import RankShard
from .checkpoint import CheckpointError, read_header
from .file_writer import Entries, replace_metadata, write_tensors
from .fill import fill_target
from .identity import check_unchanged, read_sample, stamps_of, tables_of
from .load import module_of
from .mapping import Source
from .own_sums import BLOCKS, SAMPLES, BlockSums, unknown_sums
from .quantised import is_quantised, is_scale, scale_fills, scaled_by, zero_of
from .rank_files import METADATA, PREDICTOR, ShardOrigin, config_digest, file_name, folder_of, layers_of, stamps
from .slices import Fill, plan_fills
from .tensor_reader import DTYPES, Reader

BESIDE = (
    "generation_config.json",
    "tokenizer.json",
    "tiktoken.model",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "special_tokens_map.json",
)
"""Files of a model folder that do not depend on how the weights are written."""
COPIED = ("config.json", MODELING_FILE, *BESIDE)
"""Files that make a folder of per-rank files a model folder."""


def write_shards(
    source: Source,
    shards: list[RankShard],
    home: Path,
    *,
    replicate_embedding: bool = False,
    predictors: Sequence[RankShard] = (),
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Writes a file for each rank into a folder under `home`, atomically; returns the folder. `shards`: of all ranks,
    stage by stage. predictors: the last ranks' shares of the predicting layer. progress(done, total) in bytes.

    Raises CheckpointError if the folder exists.
    """
    size, target = shards[0].size, folder_of(home, shards[0])
    if target.exists():
        raise CheckpointError(f"{target}: is there already: remove it, or say --overwrite")
    part = target.with_name(f"{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    files = stamps_of(stored.file for stored in source.tensors.values())
    names = [file.name for file in files]
    origin = ShardOrigin(
        source.digest, config_digest(source.folder), size, replicate_embedding, stamps(source.folder, names)
    )
    plans = [_parameters(source, shard, replicate_embedding) for shard in shards]
    for plan, predictor in zip(plans[len(plans) - len(predictors) :], predictors, strict=True):
        layer = _parameters(source, predictor, replicate_embedding and not predictor.samples)
        plan |= {PREDICTOR + name: parameter for name, parameter in layer.items()}
    total = sum(prod(shape) * dtype.itemsize for plan in plans for _, shape, dtype in plan.values())
    done = 0

    def written(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, total)

    for shard, plan in zip(shards, plans, strict=True):
        metadata = {METADATA: json.dumps(unbuild(origin)), "rank": str(shard.rank)} | layers_of(shard)
        entries = {name: (shape, dtype) for name, (_, shape, dtype) in plan.items()}
        with Reader() as reader:

            def fill(name: str, parameter: Tensor, plan: _Plan = plan, reader: Reader = reader) -> None:
                for part in plan[name][0]:
                    fill_target(reader, source.tensors, part, parameter[part.row : part.row + part.count])

            _write_with_sums(part / file_name(shard), entries, fill, metadata, written)
    check_unchanged(files)
    if home != source.folder:
        for name in COPIED:
            if (source.folder / name).is_file() and not (home / name).exists():
                shutil.copyfile(source.folder / name, home / name)
    part.rename(target)
    return target


def _write_with_sums(
    path: Path,
    entries: Entries,
    fill: Callable[[str, Tensor], object],
    metadata: dict[str, str],
    progress: Callable[[int], None],
) -> None:
    size = sum(prod(shape) * dtype.itemsize for shape, dtype in entries.values())
    unknown = metadata | unknown_sums(len(entries), size)
    blocks = BlockSums()
    write_tensors(path, entries, fill, unknown, progress, blocks.add)
    sums = {SAMPLES: read_sample(tables_of(read_header(path))).fixed, BLOCKS: blocks.finish()}
    replace_metadata(path, entries, unknown, metadata | sums)


_Plan = dict[str, tuple[list[Fill], tuple[int, ...], torch.dtype]]


def _parameters(source: Source, shard: RankShard, replicate_embedding: bool) -> _Plan:
    """The fills, shape and type of each parameter, in the order of layers."""
    quantised = source.quantised_products(shard)
    plan: dict[str, list[Fill]] = {}
    fills = plan_fills(shard, replicate_embedding)
    zeros = source.quantisation is not None and source.quantisation.zeros
    for fill in fills + scale_fills(fills, quantised, zeros):
        plan.setdefault(fill.parameter, []).append(fill)
    default: torch.dtype = getattr(torch, shard.config.dtype)
    return {
        name: (plan[name], _shape(source, plan[name], quantised), _dtype(source, default, name, plan[name], quantised))
        for name in sorted(plan, key=_layer)
    }


def _layer(parameter: str) -> int:
    module = module_of(parameter)
    return (
        int(module.removeprefix("layers.")) if module.startswith("layers.") else -1 if module == "embedding" else 2**31
    )


def _shape(source: Source, fills: list[Fill], quantised: Set[str]) -> tuple[int, ...]:
    rows = max(fill.row + fill.count for fill in fills)
    real = next((fill for fill in fills if fill.tensor is not None), None)
    if real is None or real.tensor is None:
        raise ValueError(f"parameter {fills[0].parameter} is padding alone")
    stored = source.tensors[real.tensor]
    if len(stored.shape) != 2 and not is_scale(real.parameter):
        return (rows,)
    weight = source.tensors[scaled_by(real.tensor)] if is_scale(real.parameter) else stored
    transposed = real.transposed and weight.code is None
    columns = real.columns or weight.shape[0 if transposed else 1] * weight.per_byte
    if is_scale(real.parameter):
        return scale_shape((rows, columns), source.block)
    return rows, columns // (stored.per_byte if real.parameter.removesuffix(".weight") in quantised else 1)


def _dtype(source: Source, default: torch.dtype, name: str, fills: list[Fill], quantised: Set[str]) -> torch.dtype:
    """The stored type; `default` if a fused product has several, or must be widened."""
    if is_scale(name) and source.quantisation is not None:
        scale: torch.dtype = getattr(torch, source.quantisation.scale_type)
        return torch.int8 if name == zero_of(scaled_by(name)) else scale
    stored = [source.tensors[fill.tensor] for fill in fills if fill.tensor is not None]
    if len({s.dtype for s in stored}) > 1 or (
        is_quantised(stored[0]) and name.removesuffix(".weight") not in quantised
    ):
        return default
    return DTYPES[stored[0].dtype]
