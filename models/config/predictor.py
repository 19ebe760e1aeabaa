"""A checkpoint's layer that predicts one token more (multi-token prediction, MTP, arXiv 2412.19437), as a model of one
layer. Data only, no torch.
"""

from __future__ import annotations

from dataclasses import replace

from .model_config import Layout, ModelConfig
from .parts import make_wiring
from .shapes import ShapeError, splits

_LAYOUTS: dict[Layout, Layout] = {
    "huggingface": "predictor",
    "latent": "latent_predictor",
    "shortcut": "shortcut_predictor",
}

EXTRA_READ = 64 << 20
"""Bytes that a rank reads from its memory in about the time of four messages over Ethernet, at nominal rates."""


def whole_in_node(config: ModelConfig, itemsize: int, nodes: int, per_node: int) -> bool:
    """Whether each node of a group of `nodes` x `per_node` ranks has the whole predicting layer, with embedding and
    head, at `itemsize` bytes an element: no message between nodes then drafts, where split over the group each draft
    costs four (embedding, two sub-blocks, the draw). It is whole if it splits over a node's ranks, and what a rank then
    reads more for a draft takes less time than these. Raises ShapeError."""
    layer = predictor_of(config)
    inputs = layer.vocab_size + 3 * layer.ffn_size_used + 2 * layer.hidden_size
    read = layer.attention_parameters + inputs * layer.hidden_size
    quicker = itemsize * read * (nodes - 1) <= EXTRA_READ * nodes * per_node
    return nodes > 1 and quicker and splits(layer, per_node)


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
