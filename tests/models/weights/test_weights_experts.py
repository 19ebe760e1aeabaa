"""Experts in a checkpoint: each rank's share of them, tensors of all experts, and scales by block."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import checkpoints
import pytest
import torch
from laddertron.engine.config.load import read
from laddertron.engine.step.memory import MemoryKeys
from laddertron.launchers.cli.__main__ import main
from laddertron.models import ops_choice
from laddertron.models.config.model_config import from_folder
from laddertron.models.config.quantisation import scale_shape
from laddertron.models.config.shapes import Sharing
from laddertron.models.stages import RankShard
from laddertron.models.weights.checkpoint import CheckpointError
from laddertron.models.weights.load import load
from laddertron.models.weights.mapping import Source, open_checkpoint, open_source
from laddertron.models.weights.rank_files import sizes_of
from laddertron.models.weights.slices import expected_shapes, plan_fills
from laddertron.tools.plan.layouts import Work
from laddertron.tools.plan.memory import memory
from laddertron.tools.plan.plan_source import Asked, from_deployment
from laddertron.topology.hardware.presets import preset
from safetensors.torch import load_file, save_file
from weights_cases import loaded, read_and_sharded, shapes

FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize(("spread", "per_node"), [(False, 0), (True, 0), (True, 2), (False, 1)])
@pytest.mark.parametrize("recipe", ["qwen3_moe_mixed", "mixtral", "glm4_moe"])
def test_every_rank_has_its_share(tmp_path: Path, recipe: str, spread: bool, per_node: int) -> None:
    """Four ranks, on two nodes where the dense path is held once a node: every row against safetensors' own reader,
    every tensor used, and each expert's share held by all ranks together exactly once."""
    folder = checkpoints.save(tmp_path / "m", recipe, tokenizer=False)
    c, stored = from_folder(folder), load_file(folder / "model.safetensors")
    seen: dict[str, int] = {}
    for rank in range(4):
        shard = RankShard(c, 4, rank, None, spread, per_node)
        parameters = loaded(open_source(folder, shard), shard)
        assert not any(p.isnan().any() for p in parameters.values())
        for fill in plan_fills(shard):
            got = parameters[fill.parameter][fill.row : fill.row + fill.count]
            if fill.tensor is None:
                continue
            want = stored[fill.tensor][fill.source_row : fill.source_row + fill.count]
            want = want if fill.columns is None else want[:, fill.source_col : fill.source_col + fill.columns]
            assert torch.equal(got, want), fill
            seen[fill.tensor] = seen.get(fill.tensor, 0) + want.numel()
    assert seen.keys() == expected_shapes(c).keys()
    copies = 4 // (per_node or 4)
    for name, count in seen.items():
        once = "experts." in name or name == "lm_head.weight"
        if name.endswith("proj.weight") or once or "embed" in name:
            assert count == stored[name].numel() * (1 if once else copies), name


def test_per_rank_files_of_nodes_need_the_ranks_of_a_node(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = checkpoints.save(tmp_path / "m", "glm4_moe", tokenizer=False)
    assert (
        main(["shard", str(folder), "--set", "parallel.tensor_parallel_size=4", "--set", "parallel.dense_path=node"])
        == 2
    )
    assert "parallel.dense_path=node: set launch.ranks_per_node" in capsys.readouterr().err
    assert not [*folder.glob("laddertron-tp4*")]


@pytest.mark.parametrize(
    ("words", "spread", "per_node"),
    [
        (("parallel.expert_layout=spread",), True, 0),
        (("parallel.dense_path=node", "launch.ranks_per_node=2"), True, 2),
        (("parallel.dense_path=node", "launch.ranks_per_node=1", "parallel.expert_layout=tensor"), False, 1),
    ],
)
def test_per_rank_files_hold_the_share_of_each_layout(
    tmp_path: Path, words: tuple[str, ...], spread: bool, per_node: int
) -> None:
    """And no other layout of as many ranks takes them."""
    folder = checkpoints.save(tmp_path / "m", "glm4_moe", dtype="bfloat16", tokenizer=False)
    c = from_folder(folder)
    keys = ("parallel.tensor_parallel_size=4", "parallel.embedding=shard", *words)
    assert main(["shard", str(folder), *(f"--set={key}" for key in keys)]) == 0
    for rank in range(4):
        shard = RankShard(c, 4, rank, None, spread, per_node)
        source = open_source(folder, shard)
        got, want = loaded(source, shard), loaded(open_checkpoint(folder, c), shard)
        assert source.sharded_over == 4
        assert all(torch.equal(got[name], tensor) for name, tensor in want.items())
    assert open_source(folder, RankShard(c, 4, 0)).sharded_over == 0
    shard = RankShard(c, 4, 0, None, spread, per_node)
    assert main(["shard", str(folder), *sizes_of(shard).split()]) == 2, "the files are there"
    assert main(["shard", str(folder), *sizes_of(shard).split(), "--overwrite"]) == 0


def fuse(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Experts as one tensor [E, 2F, D] and one [E, D, F] a layer."""
    out = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in range(checkpoints.LAYERS):
        prefix = f"model.layers.{layer}.mlp.experts."
        parts = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
        count = len(parts) // 3
        both = [torch.cat((parts[f"{e}.gate_proj.weight"], parts[f"{e}.up_proj.weight"])) for e in range(count)]
        out[f"{prefix}gate_up_proj"] = torch.stack(both)
        out[f"{prefix}down_proj"] = torch.stack([parts[f"{e}.down_proj.weight"] for e in range(count)])
    return out


@pytest.mark.parametrize("spread", [False, True])
def test_fused_experts_are_read_as_those_of_each(tmp_path: Path, spread: bool) -> None:
    folder = checkpoints.save(tmp_path / "m", "qwen3_moe", tokenizer=False)
    shard = RankShard(from_folder(folder), 2, 1, None, spread)
    want = loaded(open_source(folder, shard), shard)
    checkpoints.edit_tensors(folder, fuse)
    got = loaded(open_source(folder, shard), shard)
    assert want.keys() == got.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in want.items())


def test_fused_experts_of_another_shape_are_refused(tmp_path: Path) -> None:
    folder = checkpoints.save(tmp_path / "m", "qwen3_moe", tokenizer=False)
    name = "model.layers.0.mlp.experts.down_proj"
    checkpoints.edit_tensors(folder, lambda tensors: (t := fuse(tensors)) | {name: t[name][:4]})
    with pytest.raises(CheckpointError, match=rf"{name} is F32 \(4, 64, 40\); config.json says \(8, 64, 40\)"):
        open_checkpoint(folder, from_folder(folder))


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("suffix", ["_scale_inv", "_scale"])
def test_scales_by_block_are_widened_exactly(tmp_path: Path, suffix: str, size: int) -> None:
    """Blocks of 24 x 28 meet neither the matrices' ends nor the ranks' cuts. The oracle has a scale an element."""
    folder = checkpoints.save(tmp_path / "m", "qwen3_moe_mixed", dtype="bfloat16", tokenizer=False)
    rows, columns = 24, 28
    meant: dict[str, torch.Tensor] = {}

    def quantise(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        torch.manual_seed(5)
        out = dict(tensors)
        for name, tensor in tensors.items():
            meant[name] = tensor.float()
            if name.endswith("proj.weight"):
                shape = -(-tensor.shape[0] // rows), -(-tensor.shape[1] // columns)
                out[name] = (tensor.float() * 100).to(FP8)
                scale = out[f"{name}{suffix}"] = torch.rand(shape) / 100
                row, column = (torch.arange(length) for length in tensor.shape)
                meant[name] = out[name].float() * scale[(row // rows)[:, None], column // columns]
        return out

    checkpoints.edit_tensors(folder, quantise)
    words: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [rows, columns]}
    if suffix == "_scale":
        group = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [rows, columns]}
        words = {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": group}}}
    checkpoints.edit_config(folder, quantization_config=words)
    plain = checkpoints.save(tmp_path / "plain", "qwen3_moe_mixed", tokenizer=False)
    save_file(meant, plain / "model.safetensors")
    c = from_folder(folder)
    for rank in range(size):
        shard = RankShard(c, size, rank)
        source = open_source(folder, shard)
        got, want = (loaded(s, shard, torch.float32) for s in (source, open_source(plain, shard)))
        assert all(torch.equal(got[name], tensor) for name, tensor in want.items())
        assert source.quantised_products(shard) == frozenset(), "no step of a kernel has one scale"


FORMS: dict[str, tuple[dict[str, Any], tuple[int, int] | None]] = {
    "tensor": ({"quant_method": "fp8"}, None),
    "channel": ({"quant_method": "fbgemm_fp8"}, None),
    "block": ({"quant_method": "fp8", "weight_block_size": [96, 128]}, (96, 128)),
}


def fp8_experts(folder: Path, form: str) -> Path:
    """A checkpoint whose experts alone are fp8. Rows of blocks do not meet the matrices' ends."""
    checkpoints.save(folder, "qwen3_moe", dtype="bfloat16", tokenizer=False, moe_intermediate_size=256)
    words, _ = FORMS[form]

    def quantise(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        torch.manual_seed(6)
        out = dict(tensors)
        for name, tensor in tensors.items():
            if ".experts." in name:
                rows, columns = tensor.shape
                shape = {"tensor": (), "channel": (rows, 1)}.get(form, (-(-rows // 96), -(-columns // 128)))
                out[name], out[f"{name}_scale"] = (tensor.float() * 100).to(FP8), torch.rand(shape) / 100
        return out

    checkpoints.edit_tensors(folder, quantise)
    checkpoints.edit_config(folder, quantization_config=words)
    return folder


def kept_as_on_a_gpu(source: Source, shard: RankShard) -> dict[str, torch.Tensor]:
    """A rank's parameters, of which experts stay fp8 where they may."""
    kept = source.quantised_products(shard)
    parameters = {}
    for name, shape in shapes(shard).items():
        product = name.removesuffix(".weight")
        parameters[name] = torch.zeros(shape, dtype=FP8 if product in kept else torch.bfloat16)
        if product in kept:
            parameters[f"{name}_scale"] = torch.zeros(scale_shape(shape, source.block))
    load(source, shard, parameters, quantised=kept)
    return parameters


@pytest.mark.parametrize(
    ("size", "spread", "per_node"), [(1, False, 0), (4, False, 0), (2, True, 0), (4, True, 2), (8, False, 4)]
)
@pytest.mark.parametrize("form", FORMS)
def test_fp8_experts_are_kept_as_stored(tmp_path: Path, form: str, size: int, spread: bool, per_node: int) -> None:
    """Codes times scales are the widened weights, from the checkpoint and from per-rank files; a quarter of the columns
    is half a block, an eighth a quarter. The bytes that the engine counts and those that
    `plan` does are those of the parameters."""
    folder = fp8_experts(tmp_path / "m", form)
    c = from_folder(folder)
    question = from_deployment(read(str(folder), []), Asked(preset("1x8xH100"), Work()))
    planned = memory(c, size, question.stored, MemoryKeys(), 85 << 30, 1, Sharing(spread, per_node))
    shards = [RankShard(c, size, rank, None, spread, per_node) for rank in (0, size - 1)]
    for again, shard, source in read_and_sharded(folder, shards):
        products = ("experts.gate_up", "experts.down")
        assert source.quantised_products(shard) == {f"layers.{i}.{p}" for i in range(3) for p in products}
        got, wide = kept_as_on_a_gpu(source, shard), loaded(source, shard, torch.float32)
        for product in source.quantised_products(shard):
            codes, scale = got[f"{product}.weight"], got[f"{product}.weight_scale"]
            each = scale.repeat_interleave(codes.shape[1] // scale.shape[1], 1)
            assert torch.equal(codes.float() * each, wide[f"{product}.weight"])
        held = sum(p.nbytes for p in got.values())
        padding = 0 if again or shard.rank == 0 else 2 * 2 * c.hidden_size * (shard.vocab.stop - c.vocab_size)
        assert held == planned.weight_bytes
        assert source.rank_bytes(shard, 2, source.quantised_products(shard)) == held - max(0, padding)


def test_a_gpu_without_a_kernel_for_fp8_widens_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Capability 8.0, no Triton, and a share of columns that has no scales of its own: the start log says each."""
    folder, cuda = fp8_experts(tmp_path / "m", "block"), torch.device("cuda")
    c = from_folder(folder)
    triton: Any = object()
    for capability, kernels, size, kept, said in (
        ((9, 0), triton, 4, 6, ""),
        ((8, 9), triton, 4, 6, ""),
        ((8, 0), triton, 4, 0, "compute capability 8.9"),
        ((9, 0), None, 4, 0, "need Triton"),
        ((9, 0), triton, 8, 6, ""),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        monkeypatch.setattr(ops_choice, "_triton_ops", lambda found=kernels: found)
        shard = RankShard(c, size, 0)
        stored = ops_choice.make_stored_products(open_source(folder, shard), shard, cuda)
        assert stored is not None
        assert len(stored.products) == kept
        assert not stored.widens
        assert [said in warning for warning in stored.warnings] == [True] * bool(said)
    # The same blocks where the experts are stored in bfloat16: nothing is widened.
    checkpoints.edit_tensors(
        folder,
        lambda tensors: {
            name: tensor.to(torch.bfloat16) if tensor.dtype == FP8 and ".experts." in name else tensor
            for name, tensor in tensors.items()
            if not ("_scale" in name and ".experts." in name)
        },
    )
    stored = ops_choice.make_stored_products(open_source(folder, shard), shard, cuda)
    assert stored is not None
    assert (stored.products, stored.warnings) == (frozenset(), ())


def test_scales_of_another_block_are_refused(tmp_path: Path) -> None:
    folder = checkpoints.save(tmp_path / "m", "qwen3_moe", tokenizer=False)
    name = "model.layers.1.mlp.experts.3.down_proj.weight"
    words: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    checkpoints.edit_config(folder, quantization_config=words)
    scale = {f"{name}_scale_inv": torch.ones(2, 3)}
    checkpoints.edit_tensors(folder, lambda tensors: {**tensors, name: tensors[name].to(FP8), **scale})
    with pytest.raises(CheckpointError, match=rf"{name}_scale is F32 \(2, 3\); one number or \(2, 2\) is read"):
        open_checkpoint(folder, from_folder(folder))


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_without_shared_experts_theirs_have_no_elements(tmp_path: Path) -> None:
    folder = checkpoints.save(tmp_path / "m", "glm4_moe", tokenizer=False, n_shared_experts=0)
    stored = load_file(folder / "model.safetensors")
    assert stored["model.layers.1.mlp.shared_experts.down_proj.weight"].numel() == 0
    open_checkpoint(folder, from_folder(folder))


def test_layers_of_token_prediction_are_ignored(tmp_path: Path) -> None:
    """As many as config.json says stand behind the model's own; one more belongs to nothing."""
    folder = checkpoints.save(tmp_path / "m", "glm4_moe", tokenizer=False)
    layers = checkpoints.LAYERS
    names = [f"model.layers.{layers}.eh_proj.weight", f"model.layers.{layers}.mlp.gate.weight"]
    checkpoints.edit_tensors(folder, lambda tensors: tensors | {name: torch.ones(2, 2) for name in names})
    with pytest.raises(CheckpointError, match=r"eh_proj\.weight .* belongs to nothing"):
        open_checkpoint(folder, from_folder(folder))
    checkpoints.edit_config(folder, num_nextn_predict_layers=1)
    shard = RankShard(from_folder(folder), 1, 0)
    loaded(open_source(folder, shard), shard)
