"""A trained model as a folder: weights, config.json that declares the wiring, what stands beside them, and what it was
made of (training.json, README.md)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...models.config.dialects import dialect_of, to_dialect
from ...models.config.parts import declaration
from ...models.reference import Reference
from ...models.weights.convert import write_model
from .data_parallel import DataParallel, whole


def export(
    folder: Path, model: Reference, save_dtype: str, data: Mapping[str, Any], ranks: DataParallel | None = None
) -> None:
    """Rank 0 writes; all ranks call it, and give their rows of one tensor after the other. `data`: the keys that a
    stock config.json has of this model. config.json comes last: a folder without one is not whole."""
    ranks, config = ranks or DataParallel(), model.config
    parameters = dict(model.named_parameters())
    dtype: torch.dtype = getattr(torch, save_dtype)
    if ranks.rank != 0:
        for parameter in parameters.values():
            whole(parameter.detach())
    else:
        words = to_dialect(config, data, dialect_of(config))
        words |= {"laddertron_wiring": declaration(config.wiring), "torch_dtype": save_dtype}
        words.pop("dtype", None)

        def fill(name: str, out: Tensor) -> None:
            out.copy_(whole(parameters[name].detach()))

        write_model(folder, words, {n: (tuple(p.shape), dtype) for n, p in parameters.items()}, fill)
    ranks.barrier()
