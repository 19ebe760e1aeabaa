"""Weights between a model folder and Megatron-core's GPTModel, in the processes that hold the model: one tensor at a
time is gathered from, or split over, the tensor-parallel group. Reads and writes safetensors alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ..config.dialects import declared_words
from ..config.json_fields import read_json
from ..config.model_config import ModelConfig, from_folder
from ..weights.convert import copy_beside, write_model
from ..weights.mapping import open_checkpoint
from ..weights.tensor_reader import Reader
from .layer import SpecError


@dataclass(frozen=True, slots=True)
class Fused:
    """A parameter of GPTModel and the tensors of a folder that it consists of. axis: along which the ranks split it,
    None if each has all of it. qkv: query, key and value heads by group; gated: both halves are split by themselves;
    rows: of the vocabulary, which the ranks' shares may exceed."""

    parameter: str
    tensors: tuple[str, ...]
    axis: int | None
    kind: Literal["plain", "qkv", "gated", "rows"] = "plain"


def parameters_of(config: ModelConfig, has: Mapping[str, Any]) -> Iterator[Fused]:
    """has: the parameters of a GPTModel, by name: Transformer Engine keeps a norm's weight in the product after it."""

    def norm(own: str, product: str) -> str:
        return f"{own}.weight" if f"{own}.weight" in has else f"{product}.layer_norm_weight"

    yield Fused("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), 0, "rows")
    for i in range(config.num_layers):
        ours, theirs = f"model.layers.{i}", f"decoder.layers.{i}"
        attention, mlp = f"{theirs}.self_attention", f"{theirs}.mlp"
        yield Fused(
            norm(f"{theirs}.input_layernorm", f"{attention}.linear_qkv"), (f"{ours}.input_layernorm.weight",), None
        )
        for leaf in ("weight", "bias")[: 1 + config.qkv_bias]:
            names = tuple(f"{ours}.self_attn.{letter}_proj.{leaf}" for letter in "qkv")
            yield Fused(f"{attention}.linear_qkv.{leaf}", names, 0, "qkv")
        for letter in "qk" if config.qk_norm else "":
            name = f"{ours}.self_attn.{letter}_norm.weight"
            yield Fused(f"{attention}.{letter}_layernorm.weight", (name,), None)
        yield Fused(f"{attention}.linear_proj.weight", (f"{ours}.self_attn.o_proj.weight",), 1)
        after = f"{ours}.post_attention_layernorm.weight"
        yield Fused(norm(f"{theirs}.pre_mlp_layernorm", f"{mlp}.linear_fc1"), (after,), None)
        gated = (f"{ours}.mlp.gate_proj.weight", f"{ours}.mlp.up_proj.weight")
        yield Fused(f"{mlp}.linear_fc1.weight", gated, 0, "gated")
        yield Fused(f"{mlp}.linear_fc2.weight", (f"{ours}.mlp.down_proj.weight",), 1)
    yield Fused("decoder.final_layernorm.weight", ("model.norm.weight",), None)
    if not config.tied_embeddings:
        yield Fused("output_layer.weight", ("lm_head.weight",), 0, "rows")


def load_folder(model: Any, folder: Path) -> ModelConfig:
    """Fills this rank's parameters from a folder with stock names. Raises SpecError, CheckpointError or ValueError."""
    model, config = _bare(model), from_folder(folder)
    parameters, stored = dict(model.named_parameters()), open_checkpoint(folder, config).tensors
    group = model.pg_collection.tp
    if config.layout != "huggingface":
        raise SpecError(f"{folder}: tensors in {config.layout} layout: `laddertron convert` it to --format laddertron")
    with Reader() as reader:
        for fused in _checked(config, parameters):
            fused_rows = _fuse(fused, [reader.whole(stored[name]) for name in fused.tensors], config)
            parameter = parameters[fused.parameter]
            if fused.kind == "rows":
                rows = parameter.shape[0] * group.size()
                fused_rows = torch.cat(
                    (fused_rows, fused_rows.new_zeros(rows - len(fused_rows), *fused_rows.shape[1:]))
                )
            with torch.no_grad():
                parameter.copy_(_share(fused, fused_rows, group.size(), group.rank()))
    return config


def export_folder(model: Any, folder: Path, like: Path) -> ModelConfig:
    """Writes the model of one tensor-parallel group, all of whose ranks call it, with its wiring declared. like: a
    folder whose config.json describes the model apart from its wiring, and whose tokenizer is copied."""
    model = _bare(model)
    config = replace(from_folder(like), wiring=model.decoder.layers[0].wiring, layout="huggingface")
    parameters, group = dict(model.named_parameters()), model.pg_collection.tp
    places = {name: fused for fused in _checked(config, parameters) for name in fused.tensors}
    last: tuple[str, Mapping[str, Tensor]] = "", {}

    def tensor(name: str) -> Tensor:
        """Collective; the tensors of one parameter follow each other."""
        nonlocal last
        fused = places[name]
        if last[0] != fused.parameter:
            full = _gathered(fused, parameters[fused.parameter].detach(), group).cpu()
            last = fused.parameter, dict(zip(fused.tensors, _split(fused, full, config), strict=True))
        return last[1][name]

    if group.rank() == 0:
        dtype = parameters["decoder.final_layernorm.weight"].dtype
        words = declared_words(config, read_json(like / "config.json").data, str(dtype).removeprefix("torch."))
        entries = {name: (shape, dtype) for name, shape in _shapes(config, places).items()}

        def fill(name: str, out: Tensor) -> None:
            out.copy_(tensor(name))

        write_model(folder, words, entries, fill)
        copy_beside(like, folder)
    else:
        for name in places:
            tensor(name)
    return config


def _bare(model: Any) -> Any:
    """GPTModel, without the wrappers for data parallelism and half precision."""
    while hasattr(model, "module"):
        model = model.module
    return model


def _checked(config: ModelConfig, parameters: Mapping[str, Any]) -> list[Fused]:
    every = list(parameters_of(config, parameters))
    unlike = {fused.parameter for fused in every} ^ set(parameters)
    if unlike:
        raise SpecError(
            f"GPTModel and config.json differ in {len(unlike)} parameters, the first is {min(unlike)}: give the "
            "config.json of this model"
        )
    return every


def _shapes(config: ModelConfig, places: Mapping[str, Fused]) -> dict[str, tuple[int, ...]]:
    d, q, kv, f = (
        config.hidden_size,
        config.num_heads * config.head_dim,
        config.num_kv_heads * config.head_dim,
        config.ffn_size,
    )
    products = {
        "q_proj": (q, d),
        "k_proj": (kv, d),
        "v_proj": (kv, d),
        "o_proj": (d, q),
        "gate_proj": (f, d),
        "up_proj": (f, d),
        "down_proj": (d, f),
        "embed_tokens": (config.vocab_size, d),
        "lm_head": (config.vocab_size, d),
        "q_norm": (config.head_dim,),
        "k_norm": (config.head_dim,),
    }
    shapes = {}
    for name in places:
        stem, leaf = name.split(".")[-2:]
        shape = products.get(stem, (d,))
        shapes[name] = shape[:1] if leaf == "bias" else shape
    return shapes


def _fuse(fused: Fused, parts: list[Tensor], config: ModelConfig) -> Tensor:
    if fused.kind == "qkv":
        parts = [part.view(config.num_kv_heads, -1, *part.shape[1:]) for part in parts]
        return torch.cat(parts, 1).flatten(0, 1)
    return torch.cat(parts)


def _split(fused: Fused, full: Tensor, config: ModelConfig) -> list[Tensor]:
    """The way back from `_fuse`, without the rows that fill up the vocabulary."""
    if fused.kind == "qkv":
        groups = full.view(config.num_kv_heads, -1, config.head_dim, *full.shape[1:])
        sizes = [config.num_heads // config.num_kv_heads, 1, 1]
        return [part.flatten(0, 2) for part in torch.split(groups, sizes, 1)]
    return [full[: config.vocab_size]] if fused.kind == "rows" else list(full.chunk(len(fused.tensors)))


def _share(fused: Fused, full: Tensor, size: int, rank: int) -> Tensor:
    if fused.kind == "gated":
        return torch.cat([half.chunk(size)[rank] for half in full.chunk(2)])
    return full if fused.axis is None else full.chunk(size, fused.axis)[rank]


def _gathered(fused: Fused, share: Tensor, group: Any) -> Tensor:
    """The way back from `_share`."""
    if fused.axis is None or group.size() == 1:
        return share
    shares = [torch.empty_like(share) for _ in range(group.size())]
    group.allgather([shares], [share.contiguous()]).wait()
    if fused.kind == "gated":
        return torch.cat([half for number in (0, 1) for half in (part.chunk(2)[number] for part in shares)])
    return torch.cat(shares, fused.axis)
