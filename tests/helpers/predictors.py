"""Checkpoints with a layer that predicts further tokens, and transformers' own of it as the oracle."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import checkpoints
import torch
from safetensors.torch import load_file
from torch import nn
from transformers.cache_utils import DynamicCache, MtpCache
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import MtpLayer, MtpModel
from transformers.models.longcat_flash import modeling_longcat_flash as longcat

FAMILIES = ("deepseek_v3", "deepseek_v32", "glm4_moe", "glm_moe_dsa")


def save(folder: Path, family: str, calm: float = 1.0, **words: Any) -> Path:
    """A small checkpoint as published: its last layer, which has experts, is the predicting one. calm: a factor on what
    layers add to their residual. With a small one a token follows from the one before it alone, mostly, and the
    predicting layer says the same."""
    if family == "longcat_flash":
        return _save_longcat(folder)
    layers = words.pop("num_hidden_layers", checkpoints.LAYERS)
    if family == "glm_moe_dsa":
        words = {"indexer_types": ["full"] + ["shared"] * (layers - 1) + ["full"]} | words
    checkpoints.save(folder, family, num_hidden_layers=layers + 1, **words)
    stored = json.loads((folder / "config.json").read_text())
    cut = {key: value[:layers] for key, value in stored.items() if isinstance(value, list) and len(value) == layers + 1}
    checkpoints.edit_config(folder, num_hidden_layers=layers, num_nextn_predict_layers=1, **cut)
    noise, d, block = torch.Generator().manual_seed(1), stored["hidden_size"], f"model.layers.{layers}."

    def joined(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        kind = tensors["model.norm.weight"].dtype
        for name in ("enorm", "hnorm", "shared_head.norm"):
            tensors[f"{block}{name}.weight"] = (1.0 + 0.3 * torch.randn(d, generator=noise)).to(kind)
        tensors[f"{block}eh_proj.weight"] = (1.2 * d**-0.5 * torch.randn(d, 2 * d, generator=noise)).to(kind)
        if calm == 1.0:
            return tensors
        for name in tensors:
            if "o_proj" in name or "down_proj" in name:
                tensors[name] = tensors[name] * calm
        tensors[f"{block}enorm.weight"].fill_(1.0)
        tensors[f"{block}shared_head.norm.weight"] = tensors["model.norm.weight"].clone()
        tensors[f"{block}eh_proj.weight"] *= calm
        tensors[f"{block}eh_proj.weight"][:, :d] += torch.eye(d, dtype=kind)
        return tensors

    checkpoints.edit_tensors(folder, joined)
    return folder


def _longcat(name: str) -> str:
    """Of a tensor of layer 1's first half, the predicting layer's."""
    name = name.replace("model.layers.1.mlps.0.", "model.mtp.layers.0.transformer_layer.mlp.")
    return name.replace("model.layers.1.", "model.mtp.layers.0.").replace(".0.weight", ".weight").replace("n.0.", "n.")


def _save_longcat(folder: Path) -> Path:
    """As published: the predicting layer is dense, with one attention and one MLP."""
    checkpoints.save(folder, "longcat_flash")
    noise, d, block = torch.Generator().manual_seed(1), checkpoints.HIDDEN, "model.mtp.layers.0."

    def joined(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        parts = ("self_attn.0.", "mlps.0.", "input_layernorm.0.", "post_attention_layernorm.0.")
        for name in [n for n in tensors if n.startswith(tuple(f"model.layers.1.{part}" for part in parts))]:
            stored = tensors[name]
            tensors[_longcat(name)] = stored + 0.1 * torch.randn(stored.shape, generator=noise)
        for name in (f"{block}enorm.m", f"{block}hnorm.m", "model.mtp.norm"):
            tensors[f"{name}.weight"] = 1.0 + 0.3 * torch.randn(d, generator=noise)
        return tensors | {f"{block}eh_proj.weight": 0.15 * torch.randn(d, 2 * d, generator=noise)}

    checkpoints.edit_tensors(folder, joined)
    return folder


class _Dense(nn.Module):
    """LongCat's predicting layer of transformers' parts; transformers has none."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.self_attn, self.mlp = longcat.LongcatFlashMLA(config, layer_idx), longcat.LongcatFlashMLP(config)
        self.input_layernorm, self.post_attention_layernorm = (
            longcat.LongcatFlashRMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(2)
        )

    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor, **how: Any) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), attention_mask=attention_mask, **how)[0]
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


def _longcat_layer(folder: Path, model: Any) -> Any:
    layer = MtpLayer(model.config, _Dense, longcat.LongcatFlashRMSNorm, 0).eval()
    tensors = load_file(folder / "model.safetensors")
    for name, parameter in layer.named_parameters():
        short = name.replace("mtp_block.mlp", "transformer_layer.mlp").removeprefix("mtp_block.")
        short = {"enorm.weight": "enorm.m.weight", "hnorm.weight": "hnorm.m.weight"}.get(short, short)
        stored = "model.mtp.norm.weight" if name == "post_norm.weight" else f"model.mtp.layers.0.{short}"
        parameter.data.copy_(tensors[stored])

    def forward(_: int, states: torch.Tensor, positions: torch.Tensor, cache: Any, input_ids: torch.Tensor) -> Any:
        embeds, past = model.model.embed_tokens(input_ids), cache.get_seq_length()
        mask = torch.full((embeds.shape[1], past + embeds.shape[1]), -torch.inf).triu(past + 1)
        turns = model.model.rotary_emb(embeds, position_ids=positions)
        return layer(embeds, states, turns, mask[None, None], positions, cache)

    return SimpleNamespace(forward_layer=forward, _project_to_logits=model.lm_head)


def _model(folder: Path) -> Any:
    model = checkpoints.oracle(folder)
    layers = model.config.num_hidden_layers
    model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{layers}\..*"]  # of the published model alone
    model.config.num_mtp_layers = 1
    return model


def accepted_by_transformers(folder: Path, prompt: list[int], most: int) -> tuple[list[int], int]:
    """The answer of `most` ids, with one draft a step, and how many drafts were accepted."""
    model, steps = _model(folder), []
    model.register_forward_hook(lambda *_: steps.append(1))
    model.generation_config.eos_token_id = None
    made = model.generate(torch.tensor([prompt]), use_mtp=True, do_sample=False, max_new_tokens=most)
    return made[0, len(prompt) :].tolist(), most - len(steps)


def oracle(folder: Path) -> Callable[[list[int], list[int]], list[torch.Tensor]]:
    """Known ids and drafts -> the logits from which each draft is the most likely, by transformers in fp32."""
    model = _model(folder)
    if model.config.model_type == "longcat_flash":
        return _drafting(model, _longcat_layer(folder, model), DynamicCache)
    for key in ("layer_types", "mlp_layer_types"):
        if (kinds := getattr(model.config, key, None)) is not None:
            setattr(model.config, f"mtp_{key}", kinds[-1:])
    mtp = MtpModel.from_pretrained(model).eval()

    def causal(layer: int, embeds: torch.Tensor, cache: MtpCache, positions: torch.Tensor) -> dict[str, Any]:
        """transformers' own has no mask for sparse attention."""
        mask = create_causal_mask(mtp.config, embeds, None, cache, position_ids=positions, layer_idx=layer)
        return {"attention_mask": mask}

    mtp.create_masks_for_mtp_layer = causal
    # a layer that chooses positions also returns these
    mtp.layers[0].mtp_block.register_forward_hook(lambda _, __, out: out[0] if isinstance(out, tuple) else out)
    return _drafting(model, mtp, lambda: MtpCache(config=model.config.get_mtp_config()))


def _drafting(
    model: Any, mtp: Any, new_cache: Callable[[], Any]
) -> Callable[[list[int], list[int]], list[torch.Tensor]]:
    def logits(ids: list[int], drafts: list[int]) -> list[torch.Tensor]:
        cache = new_cache()
        states = model.model(torch.tensor([ids[:-1]])).last_hidden_state
        behind, positions, out = torch.tensor([ids[1:]]), torch.arange(1, len(ids))[None], []
        for draft in drafts:
            states = mtp.forward_layer(0, states, positions, cache, input_ids=behind)[:, -1:]
            out.append(mtp._project_to_logits(states)[0, 0])
            behind, positions = torch.tensor([[draft]]), positions[:, -1:] + 1
        return out

    return logits
