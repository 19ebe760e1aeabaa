"""A model to train, from nothing or from a checkpoint: made without memory, then filled tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from ...models.config.model_config import ModelConfig, Wiring, from_folder
from ...models.reference import Layer, Reference
from ...models.weights.fill import fill_target
from ...models.weights.mapping import open_checkpoint
from ...models.weights.rows import sources
from ...models.weights.slices import Fill
from ...models.weights.tensor_reader import Reader

CPU = torch.device("cpu")


def build(
    config: ModelConfig, device: torch.device = CPU, frozen: Collection[int] = (), recomputes: bool = False
) -> Reference:
    """Unfilled fp32 parameters. `frozen`: layers (-1: embedding, norm, head)."""
    with torch.device("meta"):
        model = Reference(config)
    for layer in model.model.layers:
        assert isinstance(layer, Layer)
        layer.recomputes = recomputes
        layer.requires_grad_(layer.index not in frozen)
    if -1 in frozen:
        for name, parameter in model.named_parameters():
            if ".layers." not in name:
                parameter.requires_grad_(False)
    return model.to_empty(device=device)


def initialise(model: Reference, seed: int) -> None:
    """Normal weights of deviation 0.5 / sqrt(D); what writes to the residual is smaller by sqrt of how often it is
    written to. Every wiring draws the same numbers for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    deviation = 0.5 / math.sqrt(model.config.hidden_size)
    for name, parameter in model.named_parameters():
        drawn = torch.zeros(parameter.shape) if name.endswith("bias") else torch.ones(parameter.shape)
        if parameter.ndim == 2:
            writes = name.endswith(("o_proj.weight", "down_proj.weight"))
            scale = deviation / math.sqrt(2 * model.config.num_layers) if writes else deviation
            nn.init.normal_(drawn, std=scale, generator=generator)
        parameter.detach().copy_(drawn)


def load(model: Reference, folder: Path) -> None:
    """Fills the model from the checkpoint, widened. A parallel layer's one norm is made of a sequential layer's two by
    moving both into the products behind them, which changes nothing that is computed; the other way the norm is used
    twice. Raises CheckpointError."""
    stored_as = from_folder(folder)
    source = open_checkpoint(folder, stored_as)
    parts = sources(stored_as, "huggingface")
    with Reader() as reader, torch.no_grad():

        def read(name: str, target: Tensor) -> None:
            at = 0
            for part in parts[name]:
                fill = Fill(name, 0, part.count, part.tensor, part.row)
                fill_target(reader, source.tensors, fill, target[at : at + part.count])
                at += part.count

        for name, buffer in model.named_buffers():
            read(name, buffer)
        for name, parameter in model.named_parameters():
            target, from_name = parameter.detach(), name
            if name not in parts:  # the second norm, of weights that had one
                from_name = name.replace("post_attention_layernorm", "input_layernorm")
            read(from_name, target)
            if (norm := _folded(model.config, stored_as, name)) is None:
                continue
            if norm == name:
                target.fill_(1.0)
            else:
                scale = torch.empty(model.config.hidden_size, device=target.device)
                read(norm, scale)
                target.mul_(scale)


def load_all(folder: Path, device: torch.device = CPU) -> Reference:
    """A checkpoint as it is, frozen, in fp32. Raises ValueError for a model of lanes."""
    config = from_folder(folder)
    if config.lanes is not None:
        raise ValueError(f"{folder}: a model of lanes: serve it, and evaluate it with lm-eval (docs/adapting.md)")
    model = build(replace(config, layout="huggingface"), device)
    load(model, folder)
    return model.requires_grad_(False).eval()


def _folded(config: ModelConfig, stored_as: ModelConfig, name: str) -> str | None:
    """The norm that is multiplied into this weight where a sequential layer becomes a parallel one; itself, for the
    norm that stays as ones."""
    if ".layers." not in name:
        return None
    prefix, _, stem = name.partition(".layers.")[2].partition(".")
    index = int(prefix)
    if config.wiring.kinds[index] != "parallel" or stored_as.wiring.kinds[index] == "parallel":
        return None
    here = f"model.layers.{index}."
    if stem == "input_layernorm.weight":
        return name
    if stem.startswith("self_attn.") and stem[10:] in ("q_proj.weight", "k_proj.weight", "v_proj.weight"):
        return f"{here}input_layernorm.weight"
    if stem.startswith("mlp.") and stem.split(".")[-2] in ("gate_proj", "up_proj", "gate"):
        return f"{here}post_attention_layernorm.weight"
    return None


def adapted(config: ModelConfig, wiring: Wiring) -> ModelConfig:
    """The model under another wiring, as stock names say it. Raises ValueError for what annealing or saving cannot."""
    if config.lanes is not None:
        raise ValueError("a model of lanes belongs to its own wiring: other ones are not trained from it")
    if config.latent is not None:
        raise ValueError("latent attention has no words in the format that is written: refused")
    scaled = (config.residual_multiplier, config.embedding_multiplier, config.logits_divisor)
    if set(scaled) != {1.0} or config.attention_scale not in (None, config.head_dim**-0.5):
        raise ValueError("a ladder_residual model with multipliers has no words in the format that is written: refused")
    if config.layout == "dolomite" and (config.sliding_window or config.qkv_bias != config.o_bias):
        raise ValueError("a Llama, as which this ladder_residual is written, has no words for its windows or biases")
    if wiring.desync_every and (config.o_bias or config.mlp_bias):
        raise ValueError("desync with an output bias is not defined (whose rank's residual would it join?)")
    return replace(config, wiring=wiring, layout="huggingface", attention_scale=None, declares_wiring=True)
