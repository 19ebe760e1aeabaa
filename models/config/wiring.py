"""Which wiring a checkpoint runs with: what it declares, unless the deployment overrides it. Pure; no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from .json_fields import Refusal
from .model_config import ModelConfig, Wiring, make_wiring
from .parts import MAX_DELAY

WIRINGS = ("auto", "standard", "parallel", "ladder", "hybrid", *(f"delay-{d}" for d in range(2, MAX_DELAY + 1)))
WIRINGS = (*WIRINGS, "no-communication")
"""The wirings that a deployment may name."""


class WiringError(Refusal, ValueError):
    """A wiring that the weights were not trained for, or that cannot be; the message names the key that allows it."""


def choose_wiring(
    config: ModelConfig,
    name: str = "auto",
    ladder_layers: int | tuple[int, ...] | None = None,
    allow_untrained: bool = False,
) -> tuple[ModelConfig, list[str]]:
    """The config with its wiring settled, and warnings to show at start.

    name: "auto" or a name; ladder_layers (hybrid): the last n, or indices. Raises WiringError.
    """
    declared = config.wiring
    if name == "auto":
        return config, []
    if name == "no-communication" and declared.name != "shortcut":
        warning = "wiring no-communication leaves out every all-reduce: for timings only, its answers mean nothing"
        silent = replace(make_wiring("none", config.num_layers), lanes=declared.lanes)
        return replace(config, wiring=silent), [warning]
    if declared.name == "shortcut":
        raise WiringError(f"model.wiring={name}: these weights' experts have a shortcut of their own: use wiring auto")
    chosen = wiring_named(name, ladder_layers, config.num_layers)
    if chosen == declared:
        return config, []
    fixed = declared.desync_every or declared.lanes is not None
    if ("parallel" in chosen.kinds) != ("parallel" in declared.kinds) or fixed:
        raise WiringError(
            f"model.wiring={name}: these weights are {declared.name}, whose norms and sub-blocks do not fit it: "
            "use wiring auto, or no-communication for timings"
        )
    if not allow_untrained:
        raise WiringError(
            f"model.wiring={name}: these weights declare {declared.name}; run so they load and compute, and answer "
            "badly (Llama-3.1-8B-Instruct with 16 layers laddered falls from 84.99 to 10.54 on GSM8K). Train them for "
            "it, or set model.allow_untrained_ladder: true for timings"
        )
    return replace(config, wiring=chosen), [
        f"wiring {chosen.name} on weights that declare {declared.name} (allow_untrained_ladder): expect bad answers"
    ]


def check_split(wiring: Wiring, split_steps: str) -> None:
    """Raises WiringError where steps are to be split that overlap by themselves."""
    if split_steps == "always" and not wiring.waits:
        raise WiringError(
            f"split_steps=always: wiring {wiring.name} overlaps without it, or never waits; standard and "
            "parallel do not: use auto or never"
        )


def retrained(
    config: ModelConfig,
    name: str,
    layers: int | tuple[int, ...] | None = None,
    tensor_parallel_size: int | None = None,
) -> Wiring:
    """The wiring that weights are to be trained for: a name, or layers to ladder (the last n, or indices), which make a
    hybrid. Raises WiringError or ValueError."""
    if layers is not None:
        if name not in ("ladder", "hybrid"):
            raise WiringError(f"wiring {name} with ladder layers: layers belong to ladder and hybrid")
        return wiring_named("hybrid", layers, config.num_layers)
    if name in ("auto", "hybrid", "none", "no-communication"):
        raise WiringError(f"wiring {name} cannot be trained for: name one, or the layers that are to be ladder")
    return make_wiring(name, config.num_layers, tensor_parallel_size=tensor_parallel_size)


def wiring_named(name: str, ladder_layers: int | tuple[int, ...] | None, num_layers: int) -> Wiring:
    """ladder_layers: of a hybrid, the last n layers or indices. Raises WiringError."""
    if name != "hybrid":
        try:
            return make_wiring(name, num_layers)
        except ValueError as error:
            names = "auto, standard, parallel, ladder, hybrid, delay-d or no-communication"
            raise WiringError(f"model.wiring={name}: {error}: use {names}") from error
    if ladder_layers is None:
        raise WiringError("model.wiring=hybrid needs model.ladder_layers: the last n layers, or a list of indices")
    if isinstance(ladder_layers, int):
        indices = set(range(max(0, num_layers - ladder_layers), num_layers))
    else:
        indices = set(ladder_layers)
        if any(not 0 <= i < num_layers for i in indices):
            raise WiringError(f"model.ladder_layers={sorted(indices)}: the model's layers are 0 to {num_layers - 1}")
    return make_wiring("hybrid", num_layers, indices)


RECORD = "laddertron.evaluation.json"


def record(measured: Mapping[str, Any], original: str | None, text_sha256: str) -> dict[str, Any]:
    return {**measured, "perplexity": math.exp(measured["loss"]), "original": original, "text_sha256": text_sha256}


def missing_record(folder: Path, config: ModelConfig) -> str | None:
    """A warning of weights under another wiring than their family's that were not evaluated. Weights of shortcuts and
    lanes have no other wiring."""
    if config.wiring.name in ("standard", "shortcut", "lanes") or (folder / RECORD).is_file():
        return None
    return (
        f"{folder}: {config.wiring.name} wiring and no {RECORD}: the weights were not evaluated: "
        f"`laddertron evaluate {folder} --text FILE --record`"
    )
