"""4-bit weights of a checkpoint: what a rank reads, keeps and widens, and what is refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import torch
from laddertron.models.config.dialects import DialectError
from laddertron.models.config.model_config import from_folder
from laddertron.models.layers import Linear
from laddertron.models.ops_choice import make_stored_products
from laddertron.models.packed import packed_of, replace_parameters
from laddertron.models.stages import RankShard
from laddertron.models.weights.convert import convert
from laddertron.models.weights.load import load
from laddertron.models.weights.mapping import Source, open_checkpoint, open_source
from laddertron.models.weights.slices import EXPERTS
from packing import FORMS, Form, pack_experts, quantise
from safetensors.torch import load_file, save_file
from weights_cases import loaded, read_and_sharded, shapes

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {"hidden_size": 128, "moe_intermediate_size": 128, "intermediate_size": 192, "head_dim": 16}


def experts(name: str) -> bool:
    return ".experts." in name


def projections(name: str) -> bool:
    return name.endswith("proj.weight")


def folders(
    tmp_path: Path, form: Form, chosen: Callable[[str], bool], moe_intermediate_size: int = 128, **quantised: Any
) -> tuple[Path, Path]:
    """A quantised checkpoint in bf16, and one with the values that it means in fp32."""
    sizes = SIZES | {"moe_intermediate_size": moe_intermediate_size}
    plain = checkpoints.save(tmp_path / "plain", "qwen3_moe_mixed", tokenizer=False, **sizes)
    folder = checkpoints.save(tmp_path / "m", "qwen3_moe_mixed", dtype="bfloat16", tokenizer=False, **sizes)
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
