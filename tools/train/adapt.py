"""A checkpoint under another wiring, trained until it answers again: what `laddertron adapt` does, after arXiv
2501.06589 (there: 16 of 32 layers, 3B tokens). Knows ids, not text."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...models.config.dialects import stock_json
from ...models.config.json_fields import read_json
from ...models.config.model_config import Wiring, from_folder
from ...models.reference import Reference
from ...models.weights.convert import copy_beside
from .build import CPU, adapted, build, load, load_all
from .export import export
from .fit import Saving, Settings, TrainProgress, fit
from .loss import HeldOut, held_out
from .tokens import Batches


@dataclass(frozen=True, slots=True)
class Adapted:
    """Held-out text under the original, under the new wiring before training, and after."""

    original: HeldOut
    untrained: HeldOut
    trained: HeldOut
    parameters: int
    steps: int


def adapt(
    source: Path,
    wiring: Wiring,
    settings: Settings,
    ids_N: np.ndarray,
    held_out_N: np.ndarray,
    device: torch.device = CPU,
    *,
    frozen: Collection[int] = (),
    recomputes: bool = False,
    saving: Saving | None = None,
    on_step: Callable[[TrainProgress], None] = lambda progress: None,
    on_model: Callable[[Reference], None] = lambda model: None,
) -> Adapted:
    """Trains `source` under `wiring`. `on_model` gets the rounded model. Raises ValueError, FloatingPointError."""
    config = adapted(from_folder(source), wiring)
    batches = Batches(ids_N, settings.batch, settings.context, settings.seed)
    teacher = load_all(source, device)
    original = held_out(teacher, held_out_N, settings.context)
    model = build(config, device, frozen, recomputes)
    load(model, source)
    untrained = held_out(model, held_out_N, settings.context, teacher)
    distils = settings.distil.weight > 0
    fit(model, batches, settings, teacher if distils else None, saving, on_step)
    trained = held_out(model, held_out_N, settings.context, teacher)
    on_model(model)
    return Adapted(original, untrained, trained, config.num_parameters, settings.steps)


def write(folder: Path, source: Path, model: Reference, save_dtype: str) -> None:
    """The folder of the trained model, but for its card."""
    folder.mkdir(parents=True, exist_ok=True)
    copy_beside(source, folder)
    data: Mapping[str, Any] = read_json(source / "config.json").data
    if from_folder(source).layout == "dolomite":
        data = stock_json(model.config, data)
    stock = {key: value for key, value in data.items() if key != "quantization_config"}  # widened weights are saved
    export(folder, model, save_dtype, stock)
