"""fp8 checkpoints in the published layouts: what is read, what is refused, how far answers are from bf16's."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import torch
from laddertron.launchers.cli.__main__ import main
from laddertron.models.config.model_config import from_folder
from laddertron.models.cuda.fp8 import LARGEST, StoredProducts, multiplies_fp8, quantise_rows
from laddertron.models.ops import Norm
from laddertron.models.stages import RankShard
from laddertron.models.weights.checkpoint import CheckpointError
from laddertron.models.weights.load import load
from laddertron.models.weights.mapping import open_source
from safetensors.torch import load_file, save_file
from weights_cases import loaded, shapes

FP8 = torch.float8_e4m3fn
LAYOUTS: dict[str, tuple[dict[str, Any], str, torch.dtype]] = {
    # quantization_config, the scale's shape, its type
    "fbgemm": (
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]},
        "column",
        torch.float32,
    ),
    "compressed_channel": (
        {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
                    "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
                }
            },
            "ignore": ["lm_head"],
            "sparsity_config": {"format": "dense"},
        },
        "column",
        torch.bfloat16,
    ),
    "compressed_tensor": (
        {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {
                "group_0": {
                    "weights": {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True},
                    "input_activations": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False},
                }
            },
        },
        "one",
        torch.bfloat16,
    ),
    "fp8": ({"quant_method": "fp8", "activation_scheme": "static"}, "scalar", torch.float32),
}


def fp8_folder(
    folder: Path, layout: str, leave: str = "lm_head", **recipe: Any
) -> tuple[Path, dict[str, torch.Tensor]]:
    """A bf16 checkpoint with its linear weights quantised as `layout` says (names holding `leave` stay), and what its
    tensors mean, in fp32."""
    checkpoints.save(folder, "llama", dtype="bfloat16", tokenizer=False)
    words, shape, dtype = LAYOUTS[layout]
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    meant: dict[str, torch.Tensor] = {}
    for name, tensor in list(tensors.items()):
        meant[name] = tensor.float()
        if not name.endswith("proj.weight") or leave in name:
            continue
        largest = tensor.float().abs().amax(1, keepdim=True) if shape == "column" else tensor.float().abs().max()
        scale = (largest / LARGEST).to(dtype)
        tensors[name] = (tensor.float() / scale.float()).clamp(-LARGEST, LARGEST).to(FP8)
        tensors[f"{name}_scale"] = scale.view(1) if shape == "one" else scale
        meant[name] = tensors[name].float() * scale.float()
        if shape != "column":
            tensors[name.replace(".weight", ".input_scale")] = torch.tensor(0.01)
    save_file(tensors, folder / "model.safetensors")
    checkpoints.edit_config(folder, quantization_config=words)
    return folder, meant


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fp8_is_widened_exactly_or_kept_as_it_is(tmp_path: Path, layout: str, size: int) -> None:
    """On every rank: widened to fp32 the weights are what format and scale mean; kept, codes and scales are those of
    the file, row for row, and per-rank files give the same of both."""
    folder, meant = fp8_folder(tmp_path / "m", layout)
    c = from_folder(folder)
    for again in (False, True):
        if again:
            assert main(["shard", str(folder), "--set", f"parallel.tensor_parallel_size={size}"]) == 0
        for rank in range(size):
            shard = RankShard(c, size, rank)
            source = open_source(folder, shard)
            wide = loaded(source, shard, torch.float32)
            rows = slice(rank * 96 // size, (rank + 1) * 96 // size)
            heads = slice(rank * 64 // size, (rank + 1) * 64 // size)
            gate = meant["model.layers.1.mlp.gate_proj.weight"][rows]
            assert torch.equal(wide["layers.1.gate_up.weight"][: len(gate)], gate)
            assert torch.equal(wide["layers.1.down.weight"], meant["model.layers.1.mlp.down_proj.weight"][:, rows])
            assert torch.equal(wide["layers.2.o.weight"], meant["model.layers.2.self_attn.o_proj.weight"][:, heads])

            kept = source.quantised_products(shard)
            assert kept == {f"layers.{i}.{p}" for i in range(3) for p in ("qkv", "o", "gate_up", "down")}
            parameters: dict[str, torch.Tensor] = {}
            for name, shape in shapes(shard).items():
                whole = name.removesuffix(".weight") in kept
                parameters[name] = torch.zeros(shape, dtype=FP8 if whole else torch.bfloat16)
                if whole:
                    parameters[f"{name}_scale"] = torch.zeros(shape[0], 1)
            load(source, shard, parameters, quantised=kept)
            for name in ("layers.1.gate_up.weight", "layers.1.down.weight", "layers.0.qkv.weight"):
                kept_value = parameters[name].float() * parameters[f"{name}_scale"]
                assert torch.equal(kept_value, wide[name])
            assert source.rank_bytes(shard, 2, kept) < source.rank_bytes(shard, 2)


def test_layers_that_were_left_alone_stay_so(tmp_path: Path) -> None:
    """FBGEMM leaves attention and outer layers in bf16; a fused product of both kinds is widened."""
    folder, meant = fp8_folder(tmp_path / "m", "fbgemm", leave="self_attn")
    c = from_folder(folder)
    shard = RankShard(c, 1, 0)
    source = open_source(folder, shard)
    assert source.quantised_products(shard) == {f"layers.{i}.{p}" for i in range(3) for p in ("gate_up", "down")}
    folder, meant = fp8_folder(tmp_path / "mixed", "fbgemm", leave="gate_proj")
    source = open_source(folder, shard)
    assert "layers.0.gate_up" not in source.quantised_products(shard)
    wide = loaded(source, shard, torch.float32)["layers.0.gate_up.weight"]
    assert torch.equal(wide[:96], meant["model.layers.0.mlp.gate_proj.weight"])
    assert torch.equal(wide[96:], meant["model.layers.0.mlp.up_proj.weight"])


def refused(folder: Path, *words: str) -> None:
    shard = RankShard(from_folder(folder), 1, 0)
    with pytest.raises(CheckpointError) as caught:
        open_source(folder, shard)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_scales_that_are_missing_or_odd_are_refused(tmp_path: Path) -> None:
    folder, _ = fp8_folder(tmp_path / "m", "fbgemm")
    file, name = folder / "model.safetensors", "model.layers.1.mlp.down_proj.weight"
    tensors = {key: tensor.clone() for key, tensor in load_file(file).items()}
    save_file({k: v for k, v in tensors.items() if k != f"{name}_scale"}, file)
    refused(folder, name, "its scale is missing")
    save_file({**tensors, f"{name}_scale": torch.ones(64, 2)}, file)
    refused(folder, f"{name}_scale", "(64, 2)", "(64, 1)")
    save_file({**tensors, f"{name}_scale_inv": torch.ones(1, 1)}, file)
    refused(folder, "scale_inv", "belongs to nothing")
    save_file(tensors, file)
    checkpoints.edit_config(folder, quantization_config=None)
    refused(folder, "F8_E4M3", "quantization_config")


def test_fp8_products_native_and_widened_agree_with_fp32() -> None:
    """torch._scaled_mm with row scales (here its CPU version), bias, norm and gate; the native product differs by what
    scaling tokens to fp8 costs: some 3 % of the output's size."""
    torch.manual_seed(0)
    weight, bias = torch.randn(64, 96) * 0.05, torch.randn(64)
    scale = weight.abs().amax(1) / LARGEST
    codes = (weight / scale[:, None]).to(FP8)
    x, norm = torch.randn(5, 96).bfloat16(), Norm(torch.rand(96).bfloat16(), 1e-5)
    want = x.float() @ (codes.float() * scale[:, None]).t() + bias
    errors = {}
    for native in (True, False):
        fp8 = StoredProducts(frozenset(), native)
        got = fp8.product(codes, scale, bias.bfloat16(), None, gated=False)(x)
        assert got.dtype == torch.bfloat16
        errors[native] = ((got.float() - want).norm() / want.norm()).item()
        plain = fp8.product(codes, scale, None, norm, gated=False)(x)
        gate, up = plain.float().chunk(2, -1)
        gated = fp8.product(codes, scale, None, norm, gated=True)(x)
        torch.testing.assert_close(gated.float(), torch.nn.functional.silu(gate) * up, rtol=0.02, atol=0.01)
    print(f"relative error: {errors}")
    assert errors[False] < 0.005 < errors[True] < 0.05


def test_a_start_that_widens_says_so() -> None:
    """And no other one."""
    (said,) = StoredProducts(frozenset({"layers.0.o"}), native=False).warnings
    assert "widened at each use" in said
    assert StoredProducts(frozenset(), native=True).warnings == ()


def test_rows_are_scaled_one_by_one_and_bounded() -> None:
    x = torch.tensor([[1.0, -2.0], [1000.0, 3000.0], [0.0, 0.0], [math.nan, 1.0]]).bfloat16()
    codes, scale = quantise_rows(x)
    assert torch.equal(scale[:2, 0], torch.tensor([2.0, 3008.0]) / LARGEST)
    assert torch.equal(codes[2].float(), torch.zeros(2)), "no division by zero"
    assert codes[3].float().isnan().any()
    codes, scale = quantise_rows(x, 1200.0)
    assert scale[1].item() == pytest.approx(1200 / LARGEST)
    assert codes[1].float().max() == LARGEST, "what is beyond the bound is clipped"


def test_fp8_on_ranks_answers_as_its_widened_weights_do(tmp_path: Path, ranks: Callable[..., list[Any]]) -> None:
    """A whole engine on CPUs, fp32: an fp8 checkpoint against an unquantised one that holds the same values: token for
    token the same, on 1 and 2 ranks. Against the original bf16 weights, the logits' distance is printed and bounded."""
    folder, meant = fp8_folder(tmp_path / "fp8", "fbgemm")
    plain = checkpoints.save(tmp_path / "plain", "llama", tokenizer=False)
    save_file(meant, plain / "model.safetensors")
    prompts = checkpoints.prompts(4, 12)
    model = {"dtype": "float32"}
    expected = ranks(1, "engine_cases:generate", {"folder": str(plain), "prompts": prompts, "model": model})[0]
    for size in (1, 2):
        asked = {"folder": str(folder), "prompts": prompts, "model": model}
        assert ranks(size, "engine_cases:generate", asked)[0] == expected
    original = checkpoints.save(tmp_path / "bf16", "llama", dtype="bfloat16", tokenizer=False)
    oracle = checkpoints.oracle(original)
    with torch.inference_mode():
        logits = torch.cat([oracle(torch.tensor([prompt])).logits[0] for prompt in prompts])
    save_file({"logits": logits}, tmp_path / "logits.safetensors")
    asked |= {"expected": str(tmp_path / "logits.safetensors")}
    (far,) = ranks(1, "engine_cases:logits_distance", asked)
    print(f"fp8 weights against bf16: logits differ by {far['distance']:.3f} at most, of {far['scale']:.1f}")
    assert 0 < far["distance"] < 0.25 * far["scale"]


@pytest.mark.parametrize("native", [False, True])
def test_models_that_keep_fp8_compute_what_widened_ones_do(
    tmp_path: Path, ranks: Callable[..., list[Any]], native: bool
) -> None:
    """What a GPU holds, here on two CPU ranks: twelve fp8 products; widened at each use the logits are those of weights
    widened once, natively they differ by what fp8 activations cost."""
    folder, _ = fp8_folder(tmp_path / "m", "compressed_channel")
    for far in ranks(
        2, "weights_cases:fp8_distance", {"folder": str(folder), "prompts": [[7, 9, 11, 13]], "native": native}
    ):
        print(far)
        assert far["kept"] == 12
        assert far["distance"] < (0.25 if native else 1e-5) * far["scale"]
        assert not native or far["distance"] > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_fp8_products_on_a_gpu_agree_with_fp32() -> None:
    """Native where the device is of compute capability 9.0 or more, widened in any case."""
    device = torch.device("cuda")
    torch.manual_seed(0)
    weight, x = torch.randn(256, 512, device=device) * 0.05, torch.randn(16, 512, device=device).bfloat16()
    scale = weight.abs().amax(1) / LARGEST
    codes = (weight / scale[:, None]).to(FP8)
    want = x.float() @ (codes.float() * scale[:, None]).t()
    for native in {False, multiplies_fp8(device)}:
        got = StoredProducts(frozenset(), native).product(codes, scale, None, None, gated=False)(x)
        assert (got.float() - want).norm() / want.norm() < (0.05 if native else 0.005)
