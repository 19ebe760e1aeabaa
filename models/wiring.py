"""Which wiring a checkpoint runs with: what it declares, unless the deployment overrides it. Pure; no torch."""

from __future__ import annotations

from dataclasses import replace

from .config import ModelConfig, Wiring, WiringKind
from .refusal import Refusal


class WiringError(Refusal, ValueError):
    """A wiring that the weights were not trained for, or that cannot be; the message names the key that allows it."""


def choose_wiring(
    config: ModelConfig,
    wanted: str = "auto",
    ladder_layers: int | tuple[int, ...] | None = None,
    allow_untrained: bool = False,
) -> tuple[ModelConfig, list[str]]:
    """The config with its wiring settled, and warnings to show at start.

    wanted: "auto" or a name; ladder_layers (hybrid): the last n, or indices. Raises WiringError.
    """
    declared = config.wiring
    if wanted == "auto":
        return config, []
    if wanted == "no-communication":
        silent: WiringKind = "none"
        warning = "wiring no-communication leaves out every all-reduce: for timings only, its answers mean nothing"
        return replace(config, wiring=Wiring((silent,) * config.num_layers)), [warning]
    chosen = _wiring(wanted, ladder_layers, config.num_layers)
    if chosen.kinds == declared.kinds and not declared.desync_every:
        return config, []
    if ("parallel" in chosen.kinds) != ("parallel" in declared.kinds) or declared.desync_every:
        raise WiringError(
            f"model.wiring={wanted}: these weights are {declared.name}, whose norms and sub-blocks do not fit it: "
            "use wiring auto, or no-communication for timings"
        )
    if not allow_untrained:
        raise WiringError(
            f"model.wiring={wanted}: these weights declare {declared.name}; run so they load and compute, and answer "
            "badly (Llama-3.1-8B-Instruct with 16 layers laddered falls from 84.99 to 10.54 on GSM8K). Train them for "
            "it, or set model.allow_untrained_ladder: true for timings"
        )
    return replace(config, wiring=chosen), [
        f"wiring {chosen.name} on weights that declare {declared.name} (allow_untrained_ladder): expect bad answers"
    ]


def _wiring(wanted: str, ladder_layers: int | tuple[int, ...] | None, num_layers: int) -> Wiring:
    uniform: dict[str, WiringKind] = {"standard": "standard", "parallel": "parallel", "ladder": "ladder"}
    if wanted in uniform:
        return Wiring((uniform[wanted],) * num_layers)
    if wanted != "hybrid":
        raise WiringError(f"model.wiring={wanted}: use auto, standard, parallel, ladder, hybrid or no-communication")
    if ladder_layers is None:
        raise WiringError("model.wiring=hybrid needs model.ladder_layers: the last n layers, or a list of indices")
    if isinstance(ladder_layers, int):
        indices = set(range(max(0, num_layers - ladder_layers), num_layers))
    else:
        indices = set(ladder_layers)
        if any(not 0 <= i < num_layers for i in indices):
            raise WiringError(f"model.ladder_layers={sorted(indices)}: the model's layers are 0 to {num_layers - 1}")
    kinds = (uniform["ladder" if i in indices else "standard"] for i in range(num_layers))
    return Wiring(tuple(kinds))
