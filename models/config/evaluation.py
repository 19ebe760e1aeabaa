"""The evaluation record beside a model's weights: what was measured of it, by `adapt` or `evaluate`. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .model_config import ModelConfig

RECORD = "laddertron.evaluation.json"


def record(found: Mapping[str, Any], original: str | None, text_sha256: str) -> dict[str, Any]:
    return {**found, "perplexity": math.exp(found["loss"]), "original": original, "text_sha256": text_sha256}


def missing_record(folder: Path, config: ModelConfig) -> str | None:
    """What to warn of: weights under another wiring than the stock one that were not evaluated."""
    if config.wiring.name == "standard" or (folder / RECORD).is_file():
        return None
    return (
        f"{folder}: {config.wiring.name} wiring and no {RECORD}: the weights were not evaluated: "
        f"`laddertron evaluate {folder} --text FILE --record`"
    )
