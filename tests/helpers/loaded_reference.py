"""The reference model with a folder's tensors, of any layout, read without the engine's loader: an oracle."""

from __future__ import annotations

from pathlib import Path

import torch
from laddertron.models.config.model_config import ModelConfig, from_folder
from laddertron.models.reference import Reference, inverse_frequencies
from safetensors.torch import load_file
from torch import Tensor

__all__ = ["inverse_frequencies", "load", "logits"]


def _from_longcat(name: str) -> str:
    """Two layers are stored as one, whose experts belong to the first."""
    parts = name.split(".")
    if parts[1] != "layers":
        return name
    layer, block = 2 * int(parts[2]), parts[3]
    if block == "mlp":
        rest = ".".join(parts[4:]).replace("router.classifier", "gate").replace("router", "gate")
        return f"model.layers.{layer}.shortcut.{rest}"
    return ".".join(["model.layers", str(layer + int(parts[4])), block.replace("mlps", "mlp"), *parts[5:]])


def _from_dolomite(config: ModelConfig, read: dict[str, Tensor]) -> dict[str, Tensor]:
    """dolomite's fused tensors under the stock names: c_attn is interleaved by key/value group (q..q, k, v), c_fc is
    [up; gate]."""
    out = {}
    plain = {
        "transformer.wte": "model.embed_tokens",
        "transformer.ln_f": "model.norm",
        "lm_head": "lm_head",
        "ln_1": "input_layernorm",
        "ln_2": "post_attention_layernorm",
        "sequence_mixer.c_proj": "self_attn.o_proj",
        "mlp_block.c_proj": "mlp.down_proj",
    }
    group = config.num_heads // config.num_kv_heads
    for name, tensor in read.items():
        stem, _, leaf = name.rpartition(".")  # leaf: weight or bias
        prefix = ""
        if stem.startswith("transformer.h."):
            index, stem = stem.removeprefix("transformer.h.").split(".", 1)
            prefix = f"model.layers.{index}."
        if stem == "sequence_mixer.c_attn":
            grouped = tensor.view(config.num_kv_heads, group + 2, config.head_dim, *tensor.shape[1:])
            parts = {"q": grouped[:, :group], "k": grouped[:, group], "v": grouped[:, group + 1]}
            for letter, part in parts.items():
                out[f"{prefix}self_attn.{letter}_proj.{leaf}"] = part.reshape(-1, *tensor.shape[1:])
        elif stem == "mlp_block.c_fc":
            out[f"{prefix}mlp.up_proj.{leaf}"], out[f"{prefix}mlp.gate_proj.{leaf}"] = tensor.chunk(2)
        else:
            out[f"{prefix}{plain.get(stem, stem)}.{leaf}"] = tensor
    return out


def load(folder: str | Path, dtype: torch.dtype | None = None, config: ModelConfig | None = None) -> Reference:
    """The model in a folder of either layout, in `dtype` (default: config.json's); `config` replaces the folder's, for
    an undeclared wiring. Raises RuntimeError on missing, extra or misshapen tensors."""
    config = config or from_folder(folder)
    model = Reference(config).to(dtype or getattr(torch, config.dtype))
    tensors: dict[str, Tensor] = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        tensors |= load_file(file)
    if config.layout == "dolomite":
        tensors = _from_dolomite(config, tensors)
    if config.layout == "shortcut":
        names = model.state_dict().keys()  # transformers writes matrices for experts that return their input, too
        renamed = {_from_longcat(name): tensor for name, tensor in tensors.items()}
        tensors = {name: tensor for name, tensor in renamed.items() if name in names}
    if config.layout == "mixtral":
        for name in list(tensors):
            parts = name.replace("block_sparse_moe", "mlp").split(".")
            parts[-2] = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}.get(parts[-2], parts[-2])
            tensors[".".join(parts)] = tensors.pop(name)
    if config.tied_embeddings:
        tensors.pop("lm_head.weight", None)
    model.load_state_dict(tensors)
    return model.eval()


@torch.inference_mode()
def logits(model: Reference, ids_BT: Tensor) -> Tensor:
    """[B, T, V], fp32."""
    result: Tensor = model(ids_BT)
    return result.float()
