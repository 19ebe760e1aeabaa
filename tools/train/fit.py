"""The training loop for models from scratch and adapted ones: AdamW on fp32 weights, warm-up and decay, accumulation,
clipping, distillation, saved states. In one process, on a GPU or the CPU: Megatron-core trains over several
(models/megatron/). The same settings, text, torch and number of threads give the same weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from ...models.config.model_config import Dtype
from ...models.reference import Reference
from . import state
from .loss import Distil, divergence, next_token
from .tokens import Batches


@dataclass(frozen=True, slots=True)
class Settings:
    """How to train. `tokens` is the budget: tokens predicted in all; `batch` a step's sequences, of which
    `micro_batch` are computed at once (0: all); `warmup` the share of steps that warms up."""

    tokens: int
    batch: int = 4
    micro_batch: int = 0
    context: int = 256
    learning_rate: float = 5e-3
    warmup: float = 0.05
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0
    dtype: Literal["float32", "bfloat16"] = "float32"
    save_dtype: Dtype = "bfloat16"
    distil: Distil = field(default_factory=Distil)

    @property
    def steps(self) -> int:
        return max(1, self.tokens // (self.batch * self.context))


@dataclass(frozen=True, slots=True)
class TrainProgress:
    """After a step: the mean loss of a token in it (nats; of the sum that is minimised), and the learning rate."""

    step: int
    steps: int
    loss: float
    learning_rate: float


@dataclass(frozen=True, slots=True)
class Saving:
    """Where states go and how often (0: never), and what must be the same for a run to go on from one."""

    folder: Path
    every: int
    resume: bool
    about: Mapping[str, Any]


def learning_rate(settings: Settings, step: int) -> float:
    """Linear warm-up, then a cosine down to a tenth of the peak; step counts from 0."""
    warm = max(1, round(settings.warmup * settings.steps))
    if step < warm:
        return settings.learning_rate * (step + 1) / warm
    way = (step - warm) / max(1, settings.steps - warm)
    return settings.learning_rate * (0.55 + 0.45 * math.cos(math.pi * way))


def fit(
    model: Reference,
    batches: Batches,
    settings: Settings,
    teacher: nn.Module | None = None,
    saving: Saving | None = None,
    on_step: Callable[[TrainProgress], None] = lambda progress: None,
) -> None:
    """Trains in place, where the model is, and rounds to what is saved. Raises FloatingPointError if the loss is lost,
    CheckpointError if there is a state that this run cannot go on from."""
    device = next(model.parameters()).device
    micro = min(settings.micro_batch or settings.batch, settings.batch)
    taught_ones = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in taught_ones if p.ndim == 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in taught_ones if p.ndim != 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], betas=(0.9, 0.95), fused=True)
    about = {"settings": asdict(settings), **(saving.about if saving else {})}
    first = 0
    if saving and saving.resume and (newest := state.newest(saving.folder)) is not None:
        first = state.load(newest, model, optimizer, about)
    mixed = torch.autocast(device.type, torch.bfloat16, enabled=settings.dtype == "bfloat16")
    weight = settings.distil.weight if teacher is not None else 0.0
    for step in range(first, settings.steps):
        rate = learning_rate(settings, step)
        for group in optimizer.param_groups:
            group["lr"] = rate
        ids, taught = (tensor.to(device) for tensor in batches.rows(step))
        count = taught.sum().double().clamp(min=1.0)
        total = torch.zeros((), dtype=torch.float64, device=device)
        for at in range(0, settings.batch, micro):
            some, targets = ids[at : at + micro], taught[at : at + micro]
            with mixed:
                logits = model(some[:, :-1])
                loss = (1 - weight) * next_token(logits, some, targets)
                if teacher is not None and weight:
                    with torch.no_grad():
                        expected = teacher(some[:, :-1])
                    loss = loss + weight * divergence(logits, expected, targets, settings.distil)
            (loss / count.float()).backward()  # type: ignore[no-untyped-call]
            total += loss.detach().double()
        nn.utils.clip_grad_norm_(taught_ones, settings.clip)
        optimizer.step()
        optimizer.zero_grad()
        value = float(total / count)
        if not math.isfinite(value):
            raise FloatingPointError(f"loss {value} at step {step}: use a smaller learning rate than {rate:g}")
        if saving and saving.every and (step + 1) % saving.every == 0:
            state.save(saving.folder, step + 1, model, optimizer, about)
        on_step(TrainProgress(step + 1, settings.steps, value, rate))
    for parameter in model.parameters():
        parameter.data.copy_(parameter.data.to(getattr(torch, settings.save_dtype)))
