"""Identifies what answers a run's lines, so that `--resume` does not mix the answers of two models."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from ...models.weights.manifest import sampled_digest
from ..config.schema import Deployment
from ..text.tokenizer import text_digest

_BYTES = 5


def model_digest(deployment: Deployment) -> str:
    """10 hex digits of the weights, config.json, the tokenizer and chat template, and the settings that decide which
    tokens are drawn. How the model is spread is not part of it: a run may resume on other ranks. Raises OSError."""
    model, engine = deployment.model, deployment.engine
    settings = model.dtype, model.weights, model.wiring, model.ladder_layers, engine.kv_cache_dtype, engine.seed
    made = () if deployment.dummy_seed is None else (model.load_format,)
    weights, text = sampled_digest(Path(model.path), _BYTES), text_digest(Path(deployment.text_folder))
    return hashlib.blake2b(json.dumps([settings, weights, text, *made]).encode(), digest_size=_BYTES).hexdigest()
