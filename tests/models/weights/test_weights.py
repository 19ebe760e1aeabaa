"""From a checkpoint folder to parameters: what is refused, and that what lands is what was there."""

from __future__ import annotations

import contextlib
import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import checkpoints
import numpy as np
import pytest
import torch
from laddertron.models.config.model_config import from_folder
from laddertron.models.stages import RankShard
from laddertron.models.weights.checkpoint import CheckpointError
from laddertron.models.weights.load import load
from laddertron.models.weights.mapping import open_checkpoint, open_source
from laddertron.models.weights.parallel_reader import reading_threads
from laddertron.models.weights.slices import expected_shapes, plan_fills
from safetensors.torch import load_file, save_file
from waiting import HANG_S
from weights_cases import loaded, shapes


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.save(tmp_path_factory.mktemp("weights") / "llama", "llama_bias", max_shard_size="40KB")


@pytest.fixture
def folder(llama: Path, tmp_path: Path) -> Path:
    """A copy to damage: four shards and an index."""
    copy = tmp_path / "llama"
    copy.mkdir()
    for file in llama.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


def refused(folder: Path, *words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder, from_folder(folder))
    assert all(word in str(caught.value) for word in words), str(caught.value)


def edit(folder: Path, file: str, change: Any) -> None:
    tensors = load_file(folder / file)
    change(tensors)
    save_file(tensors, folder / file)


def first_shard(folder: Path, tensor: str) -> str:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    return str(index["weight_map"][tensor])


Q = "model.layers.1.self_attn.q_proj.weight"


def test_missing_misshapen_extra_and_mistyped_tensors_are_named(folder: Path) -> None:
    open_checkpoint(folder, from_folder(folder))
    file = first_shard(folder, Q)
    index = folder / "model.safetensors.index.json"
    before = (index.read_bytes(), (folder / file).read_bytes())

    def restored() -> None:
        index.write_bytes(before[0])
        (folder / file).write_bytes(before[1])

    edit(folder, file, lambda t: t.pop(Q))
    refused(folder, file, Q, "the index says")
    words = json.loads(index.read_bytes())
    del words["weight_map"][Q]
    index.write_text(json.dumps(words))
    refused(folder, Q, "missing; config.json promises it")
    restored()

    edit(folder, file, lambda t: t.update({Q: t[Q][:-1].clone()}))
    refused(folder, file, Q, "(63, 64)", "(64, 64)")
    restored()
    edit(folder, file, lambda t: t.update({Q: t[Q].to(torch.int8)}))
    refused(folder, file, Q, "stored as I8")
    restored()
    edit(folder, file, lambda t: t.update({Q: t[Q].to(torch.float8_e4m3fn)}))
    refused(folder, file, Q, "quantization_config")
    restored()
    edit(folder, file, lambda t: t.update({Q: t[Q].to(torch.float64)}))
    refused(folder, file, Q, "F64")
    restored()

    words = json.loads(index.read_bytes())
    words["weight_map"]["model.layers.1.self_attn.sinks"] = file
    index.write_text(json.dumps(words))
    edit(folder, file, lambda t: t.update({"model.layers.1.self_attn.sinks": torch.zeros(8)}))
    refused(folder, file, "self_attn.sinks", "belongs to nothing in config.json")
    restored()
    (folder / file).write_bytes(before[1][:-10])
    refused(folder, file, "cut within tensor")
    (folder / file).unlink()
    refused(folder, file, "missing")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.uint8, torch.int64])
def test_tensors_that_are_no_parameters_are_listed_and_not_read(
    folder: Path, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    """Scales of a KV cache, masks, counters: by what they are, not by a list of names. A bias or scale of the model's
    own products is refused."""
    file = first_shard(folder, Q)
    index = folder / "model.safetensors.index.json"
    before = (index.read_bytes(), (folder / file).read_bytes())

    def with_extra(**extra: torch.Tensor) -> None:
        index.write_bytes(before[0])
        (folder / file).write_bytes(before[1])
        words = json.loads(before[0])
        words["weight_map"] |= dict.fromkeys(extra, file)
        index.write_text(json.dumps(words))
        edit(folder, file, lambda t: t.update(extra))

    attention = "model.layers.1.self_attn."
    names = [attention + leaf for leaf in ("kv_scale", "prob_scale", "k_cache_zero", "attn.masked_bias")]
    with_extra(**{name: torch.ones((), dtype=dtype) for name in names}, **{f"{attention}causal": torch.ones(4, 4) > 0})
    open_checkpoint(folder, from_folder(folder))
    assert "4 tensors that config.json does not need, not read" in caplog.text
    assert f"{attention}kv_scale" in caplog.text
    with_extra(**{f"{attention}q_proj.weight_scale": torch.ones((), dtype=dtype)})
    refused(folder, "q_proj.weight_scale", "belongs to nothing")
    with_extra(**{"model.norm.bias": torch.ones(64).to(dtype)})
    refused(folder, "model.norm.bias", "belongs to nothing")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": 4}, ("model.layers.3.", "missing")),
        ({"num_hidden_layers": 2}, ("model.layers.2.", "belongs to nothing")),
        ({"hidden_size": 128, "head_dim": 8}, ("model.embed_tokens.weight", "shape (323, 64)", "(323, 128)")),
        ({"num_key_value_heads": 8}, ("k_proj", "shape (32, 64)", "(64, 64)")),
        ({"attention_bias": False}, ("bias", "belongs to nothing")),
        ({"tie_word_embeddings": True}, ("lm_head.weight is not model.embed_tokens.weight", "set that to false")),
        ({"vocab_size": 324}, ("embed_tokens", "(323, 64)", "(324, 64)")),
    ],
)
def test_another_models_config_is_refused_by_the_first_tensor_that_differs(
    folder: Path, changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    checkpoints.edit_config(folder, **changes)
    refused(folder, *words)


def test_a_copy_of_a_tied_head_may_stand_beside_the_embedding(folder: Path) -> None:
    """Some checkpoints hold one; transformers computes with a head that is no copy."""
    checkpoints.edit_config(folder, tie_word_embeddings=True)
    file, embedding = first_shard(folder, "lm_head.weight"), "model.embed_tokens.weight"
    table = load_file(folder / first_shard(folder, embedding))[embedding]
    edit(folder, file, lambda t: t.update({"lm_head.weight": table.clone()}))
    open_checkpoint(folder, from_folder(folder))
    table[-1, -1] += 1
    edit(folder, file, lambda t: t.update({"lm_head.weight": table.clone()}))
    refused(folder, file, "lm_head.weight is not")
    edit(folder, file, lambda t: t.update({"lm_head.weight": table[:-1].clone()}))
    refused(folder, file, "lm_head.weight is not")


def marked(word: str) -> list[int]:
    """Processes that have it in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdecimal() and word.encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def test_laddertron_run_on_a_damaged_folder_ends_with_one_clear_line(folder: Path, tmp_path: Path) -> None:
    """A truncated shard, from the command line to the ranks and back: exit code 1, one line with the file and the
    tensor, no traceback of ours, and no rank or launcher is left."""
    file = first_shard(folder, Q)
    (folder / file).write_bytes((folder / file).read_bytes()[:-10])
    (tmp_path / "deploy.yaml").write_text(f"model:\n  path: {folder}\nlaunch:\n  oversubscribe: true\n")
    body = {"prompt": "x", "max_tokens": 1}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "llama", **body}}
    (tmp_path / "in.jsonl").write_text(json.dumps(line) + "\n")
    words = ["run", str(tmp_path / "deploy.yaml"), "-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl")]
    ended = subprocess.run(
        [sys.executable, "-m", "laddertron.launchers.cli", *words],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        env={**os.environ, "LADDERTRON_TEST_OF": str(tmp_path)},
    )
    said = [text for text in ended.stderr.splitlines() if text.startswith("error:")]
    assert ended.returncode == 1
    assert not marked(f"LADDERTRON_TEST_OF={tmp_path}")
    assert len(said) == 1, ended.stderr
    assert file in said[0]
    assert "cut within tensor" in said[0]
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("recipe", ["llama_bias", "qwen3", "dolomite_bias"])
def test_what_lands_is_what_was_there(tmp_path: Path, recipe: str, size: int) -> None:
    """Every rank's slices, put together again, against the tensors as safetensors' own reader gives them."""
    shards = "1GB" if recipe.startswith("dolomite") else "60KB"
    folder = checkpoints.save(tmp_path / "m", recipe, max_shard_size=shards, tokenizer=False)
    c = from_folder(folder)
    ranks = [loaded(open_source(folder, RankShard(c, size, rank)), RankShard(c, size, rank)) for rank in range(size)]
    stored: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        stored |= load_file(file)
    seen = set()
    for rank, parameters in enumerate(ranks):
        assert not any(p.isnan().any() for p in parameters.values())
        for fill in plan_fills(RankShard(c, size, rank)):
            got = parameters[fill.parameter][fill.row : fill.row + fill.count]
            if fill.tensor is None:
                assert not got.any()
                continue
            seen.add(fill.tensor)
            want = stored[fill.tensor][fill.source_row : fill.source_row + fill.count]
            want = want if fill.columns is None else want[:, fill.source_col : fill.source_col + fill.columns]
            assert torch.equal(got, want), fill
    assert seen == expected_shapes(c).keys()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_types_and_unaligned_files_are_converted(tmp_path: Path, dtype: torch.dtype) -> None:
    """The format does not promise alignment: a header of odd length puts every tensor on odd bytes."""
    folder = checkpoints.save(tmp_path / "m", "llama", tokenizer=False)
    file = folder / "model.safetensors"
    want = {name: tensor.clone() for name, tensor in load_file(file).items()}
    data = file.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    file.write_bytes(struct.pack("<Q", length + 1) + data[8 : 8 + length] + b" " + data[8 + length :])
    c = from_folder(folder)
    down = torch.cat(
        [
            loaded(open_source(folder, s), s, dtype)["layers.0.down.weight"]
            for s in (RankShard(c, 2, 0), RankShard(c, 2, 1))
        ],
        1,
    )
    assert torch.equal(down, want["model.layers.0.mlp.down_proj.weight"].to(dtype))


def test_modules_come_one_after_the_other(llama: Path) -> None:
    """What may be repacked at once: each module is told once, whole, in order, and of later ones no more has been read
    by then than the few pieces that are read ahead."""
    c = from_folder(llama)
    shard = RankShard(c, 2, 1)
    parameters = {name: torch.full(s, torch.nan) for name, s in shapes(shard).items()}
    told: list[str] = []
    filled: list[int] = []

    def on_module(module: str) -> None:
        told.append(module)
        own = [p for name, p in parameters.items() if name.startswith(f"{module}.")]
        assert own
        assert not any(p.isnan().any() for p in own)
        filled.append(sum(not p.isnan().any() for p in parameters.values()))

    steps: list[tuple[int, int]] = []
    load(open_source(llama, shard), shard, parameters, on_module=on_module, progress=lambda *at: steps.append(at))
    assert sorted(told) == ["embedding", "head", "layers.0", "layers.1", "layers.2", "norm"]
    layers = [name for name in told if name.startswith("layers.")]
    assert len(set(layers)) == 3
    counts = [sum(name.startswith(f"{module}.") for name in parameters) for module in told]
    early = [n - done for n, done in zip(filled, np.cumsum(counts), strict=True)]
    assert all(0 <= n <= reading_threads() + 3 for n in early), early
    assert steps[-1][0] == steps[-1][1] == sum(p.numel() * 4 for p in parameters.values())
    assert steps == sorted(steps)
