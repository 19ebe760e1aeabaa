"""A trained model as a folder: weights, config.json that declares the wiring, and what an
adapted one's folder says of itself (README.md, the evaluation record)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...models.config.dialects import declared_words
from ...models.config.model_config import Wiring
from ...models.config.wiring import RECORD, record
from ...models.reference import Reference
from ...models.weights.convert import write_model

if TYPE_CHECKING:
    from .adapt import Adapted
    from .fit import Settings


def export(folder: Path, model: Reference, save_dtype: str, data: Mapping[str, Any]) -> None:
    """Writes the model; `data`: the keys that a stock config.json has of it. config.json comes last: a folder without
    one is not whole."""
    parameters: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    dtype: torch.dtype = getattr(torch, save_dtype)
    # A router's bias decides between scores that are close: it keeps its type.
    types = {n: dtype if isinstance(p, nn.Parameter) else p.dtype for n, p in parameters.items()}
    forms = {n: (tuple(p.shape), types[n]) for n, p in parameters.items()}

    def fill(name: str, out: Tensor) -> None:
        out.copy_(parameters[name].detach())

    write_model(folder, declared_words(model.config, data, save_dtype), forms, fill)


def write_card(
    folder: Path, source: str, wiring: Wiring, settings: Settings, adapted: Adapted, about: Mapping[str, Any]
) -> None:
    """Writes README.md for people and the evaluation record for programs."""
    rows = [
        f"| {name} | {row.loss:.4f} | {row.perplexity:.3f} | {_number(row.divergence)} | {_share(row.agreement)} |"
        for name, row in (
            (f"{source}, as it was", adapted.original),
            (f"{wiring.name}, untrained", adapted.untrained),
            (f"{wiring.name}, trained", adapted.trained),
        )
    ]
    ladder = [i for i, kind in enumerate(wiring.kinds) if kind != "standard"]
    lines = [
        f"# {folder.name}",
        "",
        f"{source} under {wiring.name} wiring (layers {', '.join(map(str, ladder)) or 'none'}), by `laddertron adapt`:",
        f"{adapted.parameters:,} parameters, {adapted.steps:,} steps of {settings.batch} x {settings.context} tokens "
        f"({adapted.steps * settings.batch * settings.context:,}), seed {settings.seed}.",
        "",
        f"Text: {', '.join(about['text'])} (SHA-256 {about['text_sha256'][:16]}…).",
        f"Held out: {adapted.trained.tokens:,} tokens.",
        "",
        "| | held-out loss | perplexity | KL from the original | greedy agreement |",
        "|---|---|---|---|---|",
        *rows,
        "",
        "A held-out loss on text like the training text says little of other tasks: evaluate on yours before serving",
        "(`laddertron evaluate`, lm-eval).",
        "",
        "```json",
        json.dumps({"settings": asdict(settings), **about}, indent=1),
        "```",
    ]
    (folder / "README.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / RECORD).write_text(
        json.dumps(record(asdict(adapted.trained), source, about["text_sha256"]), indent=1) + "\n", encoding="utf-8"
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"
