"""A trainer's state on disk: parameters and AdamW's moments in one safetensors file, step and settings in one JSON
file, without the pickles that torch.save writes.
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
from ...models.weights.checkpoint import CheckpointError, read_annotated
from ...models.weights.file_writer import write_tensors
from ...models.weights.tensor_reader import Reader

KEPT = 2
"""States that stay: the newest, and the one before it."""
_MOMENTS = ("exp_avg", "exp_avg_sq")
_TENSORS = "state.safetensors"


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Parameters by name, and their moments by name:moment."""
    tensors = {}
    for name, parameter in model.named_parameters():
        tensors[name] = parameter.detach()
        tensors |= {
            f"{name}:{key}": value for key, value in optimizer.state.get(parameter, {}).items() if key != "step"
        }
    return tensors


def save(folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, about: Mapping[str, Any]) -> None:
    """Writes folder/step-N, whole or not at all, and removes old ones."""
    part, target = folder / f"step-{step:08}.part", folder / f"step-{step:08}"
    for old in (part, target):
        shutil.rmtree(old, ignore_errors=True)
    part.mkdir(parents=True)
    tensors = _tensors(model, optimizer)
    forms = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    write_tensors(part / _TENSORS, forms, lambda name, out: out.copy_(tensors[name]), {})
    with (part / "state.json").open("w") as stream:
        json.dump({"step": step, **about}, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    part.rename(target)
    for old in sorted(folder.glob("step-*[0-9]"))[:-KEPT]:
        shutil.rmtree(old)


def newest(folder: Path) -> Path | None:
    return max((path for path in folder.glob("step-*[0-9]") if (path / "state.json").is_file()), default=None)


def load(state: Path, model: nn.Module, optimizer: torch.optim.Optimizer, about: Mapping[str, Any]) -> int:
    """Fills parameters and moments; returns the step. Raises CheckpointError where the state is of another run than
    `about` says, or incomplete."""
    written = read_json(state / "state.json").data
    for key, value in about.items():
        if written.get(key) != json.loads(json.dumps(value)):
            raise CheckpointError(
                f"{state}: was written with {key}={written.get(key)!r}, this run has {value!r}: go on as it was"
            )
    stored = {tensor.name: tensor for tensor in read_annotated(state / _TENSORS)[1]}
    step = int(written["step"])
    for parameter in model.parameters():
        if parameter.requires_grad:
            moments = {moment: torch.zeros_like(parameter) for moment in _MOMENTS}
            optimizer.state[parameter] = {"step": torch.tensor(float(step)), **moments}
    with Reader() as reader, torch.no_grad():
        for name, target in _tensors(model, optimizer).items():
            if name not in stored:
                raise CheckpointError(f"{state}: {name} is missing: take an older state")
            reader.read(stored[name], 0, 0, target)
    return step
