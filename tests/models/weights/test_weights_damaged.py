"""Damaged tensors of quantised checkpoints: those with another shape or type are refused before anything is loaded,
those with values that cannot be when they are read; both by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import checkpoints
import pytest
import torch
from laddertron.models.config.model_config import from_folder
from laddertron.models.stages import RankShard
from laddertron.models.weights.checkpoint import CheckpointError
from laddertron.models.weights.mapping import open_checkpoint, open_source
from packing import FORMS, pack_experts, words
from safetensors.torch import load_file, save_file
from test_weights_packed import experts, folders, kept
from weights_cases import loaded

Tensors = dict[str, torch.Tensor]

NAME = "model.layers.1.mlp.experts.3.down_proj."


def damage(folder: Path, change: Callable[[Tensors], object]) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def replaced(leaf: str, by: torch.Tensor) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({f"{NAME}{leaf}": by})


DAMAGES: dict[str, tuple[str, Callable[[Tensors], object], tuple[str, ...]]] = {
    "no scale": ("int4_32", lambda t: t.pop(f"{NAME}weight_scale"), ("INT4 without", "weight_scale")),
    "no codes": ("int4_32", lambda t: t.pop(f"{NAME}weight_packed"), ("down_proj.weight", "missing")),
    "no global scale": ("nvfp4", lambda t: t.pop(f"{NAME}weight_global_scale"), ("NVFP4 without", "global_scale")),
    "no zero points": ("int4_16_zeros", lambda t: t.pop(f"{NAME}weight_zero_point"), ("without", "weight_zero_point")),
    "rows": ("int4_32", lambda t: t.update({f"{NAME}weight_packed": t[f"{NAME}weight_packed"][:8]}), ("I32 (8, 16)",)),
    "groups": (
        "mxfp4",
        lambda t: t.update({f"{NAME}weight_scale": t[f"{NAME}weight_scale"][:, :2].contiguous()}),
        ("U8 (128, 2)", "groups of 32", "(128, 4)"),
    ),
    "type": ("int4_32", lambda t: t.update({f"{NAME}weight_packed": t[f"{NAME}weight_packed"].short()}), ("I16",)),
    "scale's type": (
        "nvfp4", lambda t: t.update({f"{NAME}weight_scale": t[f"{NAME}weight_scale"].float()}), ("F32", "F8_E4M3"),
    ),
    "zero points' shape": (
        "int4_16_zeros",
        lambda t: t.update({f"{NAME}weight_zero_point": t[f"{NAME}weight_zero_point"][:3].contiguous()}),
        ("weight_zero_point", "I32 (3, 8)"),
    ),
    "scales of no rows": (
        "int4_32", lambda t: t.update({f"{NAME}weight_scale": torch.zeros(0, 4)}), ("weight_scale is F32 (0, 4)",),
    ),
    "no columns": (
        "mxfp4",
        lambda t: t.update({f"{NAME}weight_packed": torch.zeros(128, 0, dtype=torch.uint8)}),
        ("weight_packed is U8 (128, 0)", "U8 (128, 64)"),
    ),
    "turned codes": (
        "int4_32",
        lambda t: t.update({f"{NAME}weight_packed": t[f"{NAME}weight_packed"].T.contiguous()}),
        ("I32 (16, 128)",),
    ),
    "turned scales": (
        "int4_32",
        lambda t: t.update({f"{NAME}weight_scale": t[f"{NAME}weight_scale"].T.contiguous()}),
        ("F32 (4, 128)", "(128, 4)"),
    ),
    "flat codes": (
        "nvfp4", lambda t: t.update({f"{NAME}weight_packed": t[f"{NAME}weight_packed"].flatten()}), ("U8 (8192,)",),
    ),
    **{
        f"codes of {columns} columns": (
            "int4_32",
            replaced("weight_packed", words(torch.zeros(128, columns))),
            (f"I32 (128, {-(-columns // 8)})", "I32 (128, 16)"),
        )
        for columns in (119, 129)
    },
    **{
        f"{form}: a byte {more:+}": (
            form,
            replaced("weight_packed", torch.zeros(128, 64 + more, dtype=torch.uint8)),
            (f"U8 (128, {64 + more})", "U8 (128, 64)"),
        )
        for form in ("mxfp4", "nvfp4")
        for more in (-1, 1)
    },
    "global scales": (
        "nvfp4", lambda t: t.update({f"{NAME}weight_global_scale": torch.ones(128)}), ("global_scale is F32 (128,)",),
    ),
    "type of the shape": (
        "int4_32", lambda t: t.update({f"{NAME}weight_shape": torch.ones(2)}), ("weight_shape is F32 (2,)",),
    ),
    "shape of the shape": (
        "int4_32", lambda t: t.update({f"{NAME}weight_shape": torch.ones(3).long()}), ("weight_shape is I64 (3,)",),
    ),
    "order of columns": ("int4_32", lambda t: t.update({f"{NAME}weight_g_idx": torch.arange(128)}), ("weight_g_idx",)),
    "both": ("int4_32", lambda t: t.update({f"{NAME}weight": torch.zeros(128, 128)}), ("belongs to nothing",)),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_tensors_are_refused_by_name(tmp_path: Path, name: str) -> None:
    form, change, said = DAMAGES[name]
    folder, _ = folders(tmp_path, FORMS[form], experts)
    c = from_folder(folder)
    open_checkpoint(folder, c)
    damage(folder, change)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder, c)
    assert "experts.3.down_proj" in str(caught.value)
    assert all(word in str(caught.value) for word in said), str(caught.value)


LAYER = "model.layers.1.mlp.experts.down_proj_"
FUSED: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "no scales": (lambda t: t.pop(f"{LAYER}scales"), "blocks is MXFP4 without .*down_proj_scales"),
    "no codes": (lambda t: t.pop(f"{LAYER}blocks"), r"\.0\.down_proj .* is missing"),
    "experts": (lambda t: t.update({f"{LAYER}blocks": t[f"{LAYER}blocks"][:7]}), r"blocks is U8 \(7, 64, 3, 16\)"),
    "groups": (lambda t: t.update({f"{LAYER}scales": t[f"{LAYER}scales"][..., :2].clone()}), r"8, 64, 2\).*, 64, 3\)"),
    "type": (lambda t: t.update({f"{LAYER}blocks": t[f"{LAYER}blocks"].char()}), "blocks is I8"),
    "scales' type": (lambda t: t.update({f"{LAYER}scales": t[f"{LAYER}scales"].float()}), "scales is F32"),
    "both": (lambda t: t.update({LAYER[:-1]: torch.zeros(8, 96, 64)}), r"down_proj \(8, 96, 64\) belongs to nothing"),
}  # fmt: skip


@pytest.mark.parametrize("name", FUSED)
def test_damaged_experts_of_gpt_oss_are_refused_by_name(tmp_path: Path, name: str) -> None:
    pack_experts(folder := checkpoints.save(tmp_path / "m", "gpt_oss", tokenizer=False))
    change, said = FUSED[name]
    damage(folder, change)
    with pytest.raises(CheckpointError, match=rf"layers\.1\.mlp\.experts.*{said}"):
        open_checkpoint(folder, from_folder(folder))


def test_packed_experts_of_gpt_oss_need_their_quantization_config(tmp_path: Path) -> None:
    pack_experts(folder := checkpoints.save(tmp_path / "m", "gpt_oss", tokenizer=False))
    checkpoints.edit_config(folder, quantization_config=None)
    with pytest.raises(CheckpointError, match=r"layers\.0\..*_blocks is MXFP4, and config\.json has no quant"):
        open_checkpoint(folder, from_folder(folder))
    pack = checkpoints.save(tmp_path / "n", "gpt_oss", tokenizer=False, intermediate_size=80)
    stored = {n: t for n, t in load_file(pack / "model.safetensors").items() if not n.endswith(".down_proj")}
    blocks = torch.zeros(8, 64, 2, 16, dtype=torch.uint8)
    save_file(stored | {f"{LAYER}blocks": blocks, f"{LAYER}scales": blocks[..., 0].clone()}, pack / "model.safetensors")
    checkpoints.edit_config(pack, quantization_config={"quant_method": "mxfp4"})
    with pytest.raises(CheckpointError, match=r"down_proj_blocks: 80 columns % 32 = 16"):
        open_checkpoint(pack, from_folder(pack))


def test_groups_that_do_not_divide_the_columns_are_refused_with_the_arithmetic(tmp_path: Path) -> None:
    folder = checkpoints.save(tmp_path / "m", "qwen3_moe", tokenizer=False)  # 40 columns
    tensors = load_file(folder / "model.safetensors")
    name = f"{NAME}weight"
    tensors |= {f"{name}_packed": words(torch.zeros(64, 40)), f"{name}_scale": torch.ones(64, 2)}
    del tensors[name]
    save_file(tensors, folder / "model.safetensors")
    checkpoints.edit_config(folder, quantization_config=FORMS["int4_32"].words)
    with pytest.raises(CheckpointError, match=r"experts\.3\.down_proj\.weight_packed: 40 columns % 32 = 8, % 8 = 0"):
        open_checkpoint(folder, from_folder(folder))


def put(leaf: str, value: float, row: int = 5) -> Callable[[Tensors], object]:
    """Sets the first and the last value of a row, or an element, of a tensor of NAME."""

    def change(tensors: Tensors) -> None:
        tensor = tensors[f"{NAME}{leaf}"]
        tensor[row].view(-1)[[0, -1]] = torch.tensor(value).to(tensor.dtype)

    return change


def fill(leaf: str, value: float) -> Callable[[Tensors], object]:
    return lambda tensors: tensors[f"{NAME}{leaf}"].copy_(torch.tensor(value))


NAN, INFINITE = float("nan"), float("inf")
VALUES: dict[str, tuple[str, Callable[[Tensors], object], str]] = {
    **{
        f"{form}: {value:g}": (form, put("weight_scale", value), rf"weight_scale has scales from .*({value:g}|nan)")
        for form in ("int4_32", "int4_16_zeros", "int4_row")
        for value in (NAN, INFINITE, -INFINITE, 0.0, -1.0)
    },
    "int4_32: all 0": ("int4_32", fill("weight_scale", 0), "weight_scale has scales from 0 to 0"),
    "nvfp4: NaN": ("nvfp4", put("weight_scale", NAN), "weight_scale has scales from nan to nan"),
    "nvfp4: negative": ("nvfp4", put("weight_scale", -1.0), "weight_scale has scales from -"),
    "nvfp4: all 0": ("nvfp4", fill("weight_scale", 0), "weight_scale has scales from 0 to 0"),
    **{
        f"global scale {value:g}": ("nvfp4", fill("weight_global_scale", value), "weight_global_scale has scales from")
        for value in (NAN, INFINITE, 0.0, -1.0)
    },
    "mxfp4: NaN": ("mxfp4", put("weight_scale", 255), "weight_scale has scales from nan to nan"),
    "shape turned": (
        "int4_32",
        lambda t: t.update({f"{NAME}weight_shape": t[f"{NAME}weight_shape"].flip(0)}),
        r"weight_shape says \[192, 128\], config.json and the packed tensors say \[128, 192\]",
    ),
    "shape by one": ("mxfp4", put("weight_shape", 193, 1), r"weight_shape says \[128, 193\]"),
    "shape of zeros": ("nvfp4", fill("weight_shape", 0), r"weight_shape says \[0, 0\]"),
}


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("rank", [0, 1])
def test_values_that_cannot_be_are_refused_by_name(tmp_path: Path, name: str, rank: int) -> None:
    """By every rank that reads them, whether it keeps the codes or widens them."""
    form, change, said = VALUES[name]
    folder, _ = folders(tmp_path, FORMS[form], experts, moe_intermediate_size=192)
    shard = RankShard(from_folder(folder), 2, rank)
    kept(open_source(folder, shard), shard)
    damage(folder, change)
    source = open_source(folder, shard)
    for read in (kept, loaded):
        with pytest.raises(CheckpointError, match=rf"m/model\.safetensors: tensor {NAME}{said}"):
            read(source, shard)


def test_the_smallest_scales_of_nvfp4_may_be_zero(tmp_path: Path) -> None:
    """Their weights are zero then, as compressed-tensors widens them."""
    folder, _ = folders(tmp_path, FORMS["nvfp4"], experts)
    damage(folder, put("weight_scale", 0.0))
    shard = RankShard(from_folder(folder), 1, 0)
    wide, _ = kept(open_source(folder, shard), shard)
    down = wide["layers.1.experts.down.weight"][3 * 128 :]
    assert not down[5, :16].any()
    assert down[5, 16:32].any()


@pytest.mark.parametrize("shape", ["row", "tensor", "block"])
@pytest.mark.parametrize("value", [NAN, INFINITE, 0.0, -1.0])
def test_fp8_scales_that_cannot_be_are_refused_by_name(tmp_path: Path, shape: str, value: float) -> None:
    folder = checkpoints.save(tmp_path / "m", "llama", dtype="bfloat16", tokenizer=False)
    name, sizes = "model.layers.1.mlp.down_proj.weight", {"row": (64, 1), "tensor": (1,), "block": (4, 3)}
    scale, words = torch.ones(sizes[shape]), {"quant_method": "fp8", "weight_block_size": [16, 32]}
    scale.view(-1)[-1] = value

    def change(tensors: Tensors) -> None:
        tensors |= {name: tensors[name].to(torch.float8_e4m3fn), f"{name}_scale": scale}

    damage(folder, change)
    checkpoints.edit_config(folder, quantization_config=words if shape == "block" else {"quant_method": "fp8"})
    shard = RankShard(from_folder(folder), 1, 0)
    with pytest.raises(CheckpointError, match=rf"tensor {name}_scale has scales from"):
        loaded(open_source(folder, shard), shard)


def test_fp8_scales_may_be_powers_of_two_in_a_byte(tmp_path: Path) -> None:
    """scale_fmt ue8m0: as torch widens them."""
    folder = checkpoints.save(tmp_path / "m", "llama", dtype="bfloat16", tokenizer=False)
    name = "model.layers.1.mlp.down_proj.weight"
    codes = torch.randn(64, 96).to(torch.float8_e4m3fn)
    scale = torch.randint(100, 140, (4, 3), dtype=torch.uint8).view(torch.float8_e8m0fnu)
    damage(folder, lambda tensors: tensors.update({name: codes, f"{name}_scale_inv": scale}))
    words = {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [16, 32]}
    checkpoints.edit_config(folder, quantization_config=words)
    shard = RankShard(from_folder(folder), 1, 0)
    meant = codes.float() * scale.float().repeat_interleave(16, 0).repeat_interleave(32, 1)
    assert torch.equal(loaded(open_source(folder, shard), shard)["layers.1.down.weight"], meant)


def test_experts_of_gpt_oss_with_a_scale_that_is_no_number_are_refused_by_name(tmp_path: Path) -> None:
    pack_experts(folder := checkpoints.save(tmp_path / "m", "gpt_oss", tokenizer=False))
    damage(folder, lambda tensors: tensors[f"{LAYER}scales"][3, 7, 1].fill_(255))
    shard = RankShard(from_folder(folder), 1, 0)
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.experts\.3\.down_proj\w* has scales from nan to nan"):
        loaded(open_source(folder, shard), shard)
