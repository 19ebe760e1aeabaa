"""A checkpoint's layer that predicts one token more (multi-token prediction, MTP, arXiv 2412.19437), as a model of one
layer. Data only, no torch.
"""

from __future__ import annotations

from dataclasses import replace

from .model_config import Layout, ModelConfig
from .parts import make_wiring
from .shapes import ShapeError

_LAYOUTS: dict[Layout, Layout] = {
    "huggingface": "predictor",
    "latent": "latent_predictor",
    "shortcut": "shortcut_predictor",
}


def predictor_of(config: ModelConfig) -> ModelConfig:
    """The predicting layer of a model: with experts if any layer has them instead of its MLP, and with an index of its
    own. Raises ShapeError if the model has none."""
    layout = _LAYOUTS.get(config.layout)
    if layout is None or not config.ignored:
        raise ShapeError(
            f"mtp: this {config.family} has no layer that predicts further tokens (num_nextn_predict_layers in its "
            "config.json): use ngram, or model with a draft_model"
        )
    experts, latent = config.experts, config.latent
    if experts is not None:
        experts = None if experts.beside else replace(experts, layers=(True,))
    if latent is not None and latent.index is not None:
        latent = replace(latent, index=replace(latent.index, full=(True,)))
    return replace(
        config,
        num_layers=1,
        wiring=make_wiring("standard", 1),
        layout=layout,
        experts=experts,
        latent=latent,
        ignored_layers=0,
    )
