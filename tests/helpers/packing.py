"""Quantises matrices as compressed-tensors documents its formats, in plain torch: the tensors of a checkpoint, and the
values that they mean."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import checkpoints
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


@dataclass(frozen=True)
class Form:
    """A format of compressed-tensors; group 0: one scale a row."""

    format: str
    group: int
    zeros: bool = False

    @property
    def words(self) -> dict[str, Any]:
        """quantization_config."""
        kind = {"num_bits": 4, "type": "int" if self.format == "pack-quantized" else "float"}
        strategy = "tensor_group" if self.format.startswith("nvfp4") else "group" if self.group else "channel"
        weights = {**kind, "strategy": strategy, "symmetric": not self.zeros, "group_size": self.group or None}
        return {
            "quant_method": "compressed-tensors",
            "format": self.format,
            "config_groups": {"a": {"targets": ["Linear"], "weights": weights}},
        }

    def tensors(self, weight: Tensor, scales: torch.dtype = torch.float32) -> tuple[dict[str, Tensor], Tensor]:
        """The parts of a weight [rows, columns] by the end of their names, and what they mean, in fp32."""
        rows, columns = weight.shape
        group = self.group or columns
        parts: dict[str, Tensor] = {"weight_shape": torch.tensor([rows, columns])}
        grouped = weight.float().view(rows, -1, group)
        largest = grouped.abs().amax(-1)
        if self.format == "pack-quantized":
            scale = (largest / 7).to(scales)
            zero = torch.randint(-3, 4, scale.shape) if self.zeros else torch.zeros(scale.shape, dtype=torch.int64)
            codes = (grouped / scale.float().unsqueeze(-1)).round().add(zero.unsqueeze(-1)).clamp(-8, 7)
            values = (codes - zero.unsqueeze(-1)) * scale.float().unsqueeze(-1)
            parts["weight_packed"] = words((codes.view(rows, columns) + 8).int())
            if self.zeros:
                parts["weight_zero_point"] = words((zero + 8).int().t().contiguous()).t().contiguous()
            return parts | {"weight_scale": scale}, values.view(rows, columns)
        if self.format.startswith("mxfp4"):
            exponent = (largest / 4).log2().floor().clamp(-126, 126) + 127
            parts["weight_scale"], scale = exponent.to(torch.uint8), (exponent - 127).exp2()
        else:
            whole = torch.tensor([448 * 6.0 / float(weight.abs().max())])
            parts["weight_scale"] = (largest / 6 * whole).to(torch.float8_e4m3fn)
            parts["weight_global_scale"], scale = whole, parts["weight_scale"].float() / whole
        near = (grouped / scale.unsqueeze(-1)).unsqueeze(-1) - E2M1
        picked = near.abs().argmin(-1).view(rows, columns)
        parts["weight_packed"] = (picked[:, 0::2] | picked[:, 1::2] << 4).to(torch.uint8)
        return parts, (E2M1[picked].view(grouped.shape) * scale.unsqueeze(-1)).view(rows, columns)


FORMS = {
    "int4_32": Form("pack-quantized", 32),
    "int4_16_zeros": Form("pack-quantized", 16, True),
    "int4_8": Form("pack-quantized", 8),
    "int4_row": Form("pack-quantized", 0),
    "int4_row_zeros": Form("pack-quantized", 0, True),
    "mxfp4": Form("mxfp4-pack-quantized", 32),
    "nvfp4": Form("nvfp4-pack-quantized", 16),
}


def words(codes: Tensor) -> Tensor:
    """Unsigned 4-bit codes [rows, columns], eight in an int32, the first in the lowest bits; the last one is padded."""
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % 8)).view(len(codes), -1, 8).long()
    return (padded << torch.arange(0, 32, 4)).sum(-1).to(torch.int32)


def quantise(
    folder: Path, form: Form, chosen: Callable[[str], bool], scales: torch.dtype = torch.float32, prefix: str = ""
) -> dict[str, Tensor]:
    """Quantises the chosen matrices of a checkpoint in place; returns what its tensors mean, in fp32. prefix: of every
    tensor's name."""
    torch.manual_seed(5)
    meant, stored = dict[str, Tensor](), dict[str, Tensor]()
    for name, tensor in load_file(folder / "model.safetensors").items():
        meant[name] = tensor.float()
        if chosen(name):
            parts, meant[name] = form.tensors(tensor, scales)
            stored |= {f"{prefix}{name.removesuffix('weight')}{part}": value for part, value in parts.items()}
        else:
            stored[prefix + name] = tensor.clone()
    save_file(stored, folder / "model.safetensors")
    checkpoints.edit_config(folder, quantization_config=form.words)
    return meant


def twins(
    tmp_path: Path, recipe: str, form: Form, chosen: Callable[[str], bool], **overrides: Any
) -> tuple[Path, Path]:
    """A quantised checkpoint in fp32, and a plain one with the values that it means."""
    plain = checkpoints.save(tmp_path / "plain", recipe, **overrides)
    folder = checkpoints.save(tmp_path / "packed", recipe, **overrides)
    save_file(quantise(folder, form, chosen), plain / "model.safetensors", metadata={"format": "pt"})
    return folder, plain


def pack_experts(folder: Path) -> None:
    """Writes the experts of a gpt_oss checkpoint in place as they are published: MXFP4 in one tensor of codes and one
    of scales a layer."""
    torch.manual_seed(5)
    stored = load_file(folder / "model.safetensors")
    for name in [name for name in stored if name.endswith(("gate_up_proj", "down_proj"))]:
        parts = [FORMS["mxfp4"].tensors(expert)[0] for expert in stored.pop(name).transpose(1, 2)]
        codes, scales = (torch.stack([part[f"weight_{leaf}"] for part in parts]) for leaf in ("packed", "scale"))
        stored |= {f"{name}_blocks": codes.view(*scales.shape, 16), f"{name}_scales": scales}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    wide = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    checkpoints.edit_config(folder, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": wide})


def rewrite_config(folder: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(change(json.loads(file.read_text()))))
