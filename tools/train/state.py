"""A trainer's state on disk: each rank's rows of parameters and AdamW's moments in a safetensors file, step and
settings in one JSON; another number of ranks can read it. torch's Distributed Checkpoint is not used: its metadata is a
pickle.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...models.config.json_fields import read_json
from ...models.weights.checkpoint import CheckpointError, StoredTensor, read_annotated
from ...models.weights.file_writer import write_tensors
from ...models.weights.tensor_reader import Reader
from .data_parallel import DataParallel, local

KEPT = 2
"""States that stay: the newest, and the one before it."""
_MOMENTS = ("exp_avg", "exp_avg_sq")


def _parts(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, tuple[Tensor, int]]:
    """Name -> this rank's rows, and how many rows there are in all."""
    parts = {}
    for name, parameter in model.named_parameters():
        parts[name] = local(parameter.detach()), parameter.shape[0]
        for moment in _MOMENTS:
            moments = optimizer.state.get(parameter, {})
            if moment in moments:
                parts[f"{name}:{moment}"] = local(moments[moment]), parameter.shape[0]
    return parts


def save(
    folder: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    about: Mapping[str, Any],
    ranks: DataParallel,
) -> None:
    """Writes folder/step-N, whole or not at all, and removes old ones. All ranks call it; the first copy's write."""
    part, target = folder / f"step-{step:08}.part", folder / f"step-{step:08}"

    def clear() -> None:
        shutil.rmtree(part, ignore_errors=True)
        shutil.rmtree(target, ignore_errors=True)
        part.mkdir(parents=True)

    ranks.first_does(clear)
    if ranks.replica == 0:
        tensors = _parts(model, optimizer)
        first = {name: ranks.rows(count).start for name, (_, count) in tensors.items()}
        write_tensors(
            part / f"rank-{ranks.place:05}.safetensors",
            {name: (tuple(tensor.shape), tensor.dtype) for name, (tensor, _) in tensors.items()},
            lambda name, out: out.copy_(tensors[name][0]),
            {"first_rows": json.dumps(first)},
        )
    ranks.barrier()

    def name_it() -> None:
        with (part / "state.json").open("w") as stream:
            json.dump({"step": step, "shards": ranks.shards, **about}, stream, indent=1)
            stream.flush()
            os.fsync(stream.fileno())
        part.rename(target)
        for old in sorted(folder.glob("step-*[0-9]"))[:-KEPT]:
            shutil.rmtree(old)

    ranks.first_does(name_it)


def newest(folder: Path) -> Path | None:
    return max((path for path in folder.glob("step-*[0-9]") if (path / "state.json").is_file()), default=None)


def load(
    state: Path, model: nn.Module, optimizer: torch.optim.Optimizer, about: Mapping[str, Any], ranks: DataParallel
) -> int:
    """Fills this rank's rows from files of any number of ranks; returns the step. Raises CheckpointError where the
    state is of another run than `about` says, or incomplete."""
    written = read_json(state / "state.json").data
    for key, value in about.items():
        if written.get(key) != json.loads(json.dumps(value)):
            raise CheckpointError(
                f"{state}: was written with {key}={written.get(key)!r}, this run has {value!r}: go on as it was"
            )
    where: dict[str, list[tuple[int, StoredTensor]]] = {}
    for file in sorted(state.glob("rank-*.safetensors")):
        metadata, tensors = read_annotated(file)
        first = json.loads(metadata["first_rows"])
        for stored in tensors:
            where.setdefault(stored.name, []).append((first[stored.name], stored))
    step = int(written["step"])
    for parameter in model.parameters():
        if parameter.requires_grad:
            moments = {moment: torch.zeros_like(parameter) for moment in _MOMENTS}
            optimizer.state[parameter] = {"step": torch.tensor(float(step)), **moments}
    with Reader() as reader, torch.no_grad():
        for name, (target, count) in _parts(model, optimizer).items():
            mine = ranks.rows(count)
            filled = 0
            for first_row, stored in where.get(name, ()):
                low, high = max(mine.start, first_row), min(mine.stop, first_row + stored.shape[0])
                if low < high:
                    reader.read(stored, low - first_row, 0, target[low - mine.start : high - mine.start])
                    filled += high - low
            if filled != len(mine):
                raise CheckpointError(f"{state}: {len(mine) - filled} rows of {name} are missing: take an older state")
    return step
