"""4-bit weights of a checkpoint: what a rank reads, keeps and widens, and what is refused."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import torch
from laddertron.models.config.dialects import DialectError
from laddertron.models.config.model_config import from_folder
from laddertron.models.config.quantisation import read_quantisation
from laddertron.models.layers import Linear
from laddertron.models.ops_choice import make_stored_products
from laddertron.models.packed import packed_of, replace_parameters
from laddertron.models.stages import RankShard
from laddertron.models.weights.checkpoint import CheckpointError
from laddertron.models.weights.convert import convert
from laddertron.models.weights.load import load
from laddertron.models.weights.mapping import Source, open_checkpoint, open_source
from laddertron.models.weights.slices import EXPERTS
from packing import FORMS, Form, pack_experts, quantise, words
from safetensors.torch import load_file, save_file
from weights_cases import loaded, read_and_sharded, shapes

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {"hidden_size": 128, "moe_intermediate_size": 128, "intermediate_size": 192, "head_dim": 16}


def experts(name: str) -> bool:
    return ".experts." in name


def projections(name: str) -> bool:
    return name.endswith("proj.weight")


def folders(tmp_path: Path, form: Form, chosen: Callable[[str], bool], **quantised: Any) -> tuple[Path, Path]:
    """A quantised checkpoint in bf16, and one with the values that it means in fp32."""
    plain = checkpoints.save(tmp_path / "plain", "qwen3_moe_mixed", tokenizer=False, **SIZES)
    folder = checkpoints.save(tmp_path / "m", "qwen3_moe_mixed", dtype="bfloat16", tokenizer=False, **SIZES)
    save_file(quantise(folder, form, chosen, **quantised), plain / "model.safetensors")
    return folder, plain


def kept(source: Source, shard: RankShard, dtype: torch.dtype = torch.bfloat16) -> tuple[dict[str, torch.Tensor], int]:
    """A rank's parameters, loaded in `dtype`, in fp32, where products stay quantised as on a CPU widened from what is
    in memory; and its bytes."""
    stored = make_stored_products(source, shard, CPU)
    assert stored is not None
    parameters: dict[str, torch.Tensor] = {}
    layers = dict[str, Linear]()
    for name, shape in shapes(shard).items():
        product = name.removesuffix(".weight")
        parameters[name] = torch.zeros(shape, dtype=dtype)
        if product in stored.products:
            layers[product] = Linear(torch.zeros(shape, dtype=dtype), None)
            replace_parameters(layers[product], stored.quantisation)
            parameters |= {f"{product}.{part}": p.data for part, p in layers[product].named_parameters()}
    load(source, shard, parameters, quantised=stored.products)
    size = sum(p.nbytes for p in parameters.values())
    wide = {n: p.float() for n, p in parameters.items() if n.endswith("bias") or n.rpartition(".")[0] not in layers}
    for product, layer in layers.items():
        packed = packed_of(layer)
        assert packed is not None
        wide[f"{product}.weight"] = packed.widened(torch.float32)
    return wide, size


@pytest.mark.parametrize(("size", "spread", "per_node"), [(1, False, 0), (2, False, 0), (4, True, 2), (8, False, 4)])
@pytest.mark.parametrize("form", FORMS)
def test_codes_are_kept_or_widened_exactly(tmp_path: Path, form: str, size: int, spread: bool, per_node: int) -> None:
    """On every rank, from the checkpoint and from per-rank files: kept, codes, scales and zero points mean what the
    format says; widened to fp32 likewise. The bytes that the engine counts are those of the parameters."""
    folder, plain = folders(tmp_path, FORMS[form], projections)
    c = from_folder(folder)
    expected = {"qkv", "o", "gate_up", "down"} if per_node != 4 and size < 8 else set()
    shards = [RankShard(c, size, rank, None, spread, per_node) for rank in (0, size - 1)]
    for again, shard, source in read_and_sharded(folder, shards):
        meant = loaded(open_source(plain, shard), shard, torch.float32)
        wide, held = kept(source, shard)
        stored = make_stored_products(source, shard, CPU)
        assert stored is not None
        assert expected <= {name.split(".", 2)[2] for name in stored.products}
        for name, tensor in meant.items():
            own = tensor if name.rpartition(".")[0] in stored.products else tensor.bfloat16().float()
            assert torch.equal(wide[name], own), name
        if not again:
            direct = loaded(source, shard, torch.float32)
            plainly = {n for n in direct if n.rpartition(".")[0] in source.quantised_products(shard, None)}
            assert all(torch.equal(direct[name], meant[name]) for name in plainly)
        padding = 2 * 2 * c.hidden_size * max(0, shard.vocab.stop - c.vocab_size)
        padding = padding if not again and per_node in (0, size) else 0
        if not again and per_node in (0, size):
            assert source.rank_bytes(shard, 2, stored.products) == held - padding


@pytest.mark.parametrize(("size", "spread"), [(1, False), (2, False), (4, False), (4, True)])
def test_gpt_oss_as_published_is_kept_exactly(tmp_path: Path, size: int, spread: bool) -> None:
    """Against transformers' widened experts, from the checkpoint and from per-rank files: codes and scales, 4.5 bits a
    weight, are what a rank holds, gate and up no longer alternate, and biases are unchanged."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    plain = checkpoints.save(tmp_path / "plain", "gpt_oss", tokenizer=False)
    pack_experts(folder := checkpoints.save(tmp_path / "m", "gpt_oss", tokenizer=False))
    stored = load_file(folder / "model.safetensors")
    for name in [name.removesuffix("_blocks") for name in stored if name.endswith("_blocks")]:
        blocks, scales = stored.pop(f"{name}_blocks"), stored.pop(f"{name}_scales")
        stored[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file(stored, plain / "model.safetensors")
    c = from_folder(folder)
    for _, shard, source in read_and_sharded(
        folder, [RankShard(c, size, rank, None, spread) for rank in (0, size - 1)]
    ):
        products = make_stored_products(source, shard, CPU)
        assert products is not None
        assert products.products == {f"layers.{i}.{p}" for i in range(c.num_layers) for p in EXPERTS}
        assert source.rank_bytes(shard, 4, products.products) < 0.5 * source.rank_bytes(shard, 4)
        wide, _ = kept(source, shard, torch.float32)
        meant = loaded(open_source(plain, shard), shard)
        assert wide.keys() == meant.keys()
        assert all(torch.equal(wide[name], tensor) for name, tensor in meant.items())


@pytest.mark.parametrize("columns", [40, 20])
def test_cuts_within_a_group_and_within_a_byte(tmp_path: Path, columns: int) -> None:
    """Random sizes of ranks' shares: a share of a group repeats its scale; odd shares are widened."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    torch.manual_seed(seed)
    inner = 8 * columns  # 8 ranks with 40 or 20 columns each, of groups of 32
    sizes = {**SIZES, "moe_intermediate_size": inner}
    plain = checkpoints.save(tmp_path / "plain", "qwen3_moe", tokenizer=False, **sizes)
    folder = checkpoints.save(tmp_path / "m", "qwen3_moe", tokenizer=False, **sizes)
    save_file(quantise(folder, FORMS["int4_32"], experts), plain / "model.safetensors")
    c = from_folder(folder)
    for rank in range(8):
        shard = RankShard(c, 8, rank)
        source = open_source(folder, shard)
        meant = loaded(open_source(plain, shard), shard)
        wide, _ = kept(source, shard)
        stored = make_stored_products(source, shard, CPU)
        assert stored is not None
        assert bool(stored.products) == (columns % 8 == 0), "4 columns share a scale: no kernel's step"
        direct = loaded(source, shard)
        for name, tensor in meant.items():
            own = wide if name.rpartition(".")[0] in stored.products else direct
            assert torch.equal(own[name], tensor), name


NAME = "model.layers.1.mlp.experts.3.down_proj."


def damage(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


DAMAGES: dict[str, tuple[str, Callable[[dict[str, torch.Tensor]], object], tuple[str, ...]]] = {
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
FUSED: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], str]] = {
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


def test_packed_weights_are_not_converted(tmp_path: Path) -> None:
    folder, _ = folders(tmp_path, FORMS["int4_32"], experts)
    with pytest.raises(DialectError, match=r"4-bit weights \(model\.layers\.\d+\.mlp\.experts\.\d+\."):
        convert(folder, tmp_path / "out", "laddertron")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("scales", ["bfloat16", "float16", "float32"])
def test_scales_keep_their_stored_type(tmp_path: Path, scales: str) -> None:
    folder, _ = folders(tmp_path, FORMS["int4_32"], experts, scales=getattr(torch, scales))
    q = open_checkpoint(folder, from_folder(folder)).quantisation
    assert q is not None
    assert (q.scale_type, q.block, q.per_byte) == (scales, (1, 32), 2)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_bits": 8}, "8-bit int by group"),
        ({"group_size": 24}, "group_size=24"),
        ({"strategy": "tensor"}, "by tensor"),
        *[({"actorder": order}, "weight_g_idx") for order in ("group", "GROUP", "dynamic", True)],
        ({"type": "float"}, "4-bit float"),
    ],
)
def test_other_forms_of_codes_are_refused_by_name(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    form = FORMS["int4_32"].words
    form["config_groups"]["a"]["weights"] |= change
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": form}))
    with pytest.raises(ValueError, match=r"config\.json: quantization_config") as caught:
        read_quantisation(tmp_path)
    assert said in str(caught.value)


@pytest.mark.parametrize("form", ["int4_32", "int4_16_zeros", "int4_row_zeros", "mxfp4", "nvfp4"])
def test_formats_are_those_of_compressed_tensors(form: str) -> None:
    """The library widens what these tests write to the values that they mean."""
    library = pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    assert library
    weights = FORMS[form].words["config_groups"]["a"]["weights"]
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
    parts, meant = FORMS[form].tensors(torch.randn(72, 64))
    if form.startswith(("mxfp4", "nvfp4")):
        parts.pop("weight_shape")
    found = BaseCompressor.get_value_from_registry(FORMS[form].format).decompress(parts, scheme)["weight"]
    torch.testing.assert_close(found.float(), meant, rtol=1e-6 if "int4" in form else 2**-8, atol=0)
