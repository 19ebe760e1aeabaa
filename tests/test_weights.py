"""From a checkpoint folder to parameters: what is refused, that every element of it lands somewhere exactly once, and
that what lands is what was there."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import checkpoints
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from laddertron.models.checkpoint import CheckpointError
from laddertron.models.config import ModelConfig, from_folder, make_wiring
from laddertron.models.readers import Reader
from laddertron.models.shapes import splits
from laddertron.models.shard import Shard
from laddertron.models.weights import check_cover, check_folder, fill_target, open_checkpoint, open_source
from laddertron.models.weights_plan import Fill, expected_shapes, plan_fills
from safetensors.torch import load_file, save_file
from weights_cases import config, loaded, shapes, write_config


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
        check_folder(folder, from_folder(folder))
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
    check_folder(folder, from_folder(folder))
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


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": 4}, ("model.layers.3.", "missing")),
        ({"num_hidden_layers": 2}, ("model.layers.2.", "belongs to nothing")),
        ({"hidden_size": 128, "head_dim": 8}, ("model.embed_tokens.weight", "shape (323, 64)", "(323, 128)")),
        ({"num_key_value_heads": 8}, ("k_proj", "shape (32, 64)", "(64, 64)")),
        ({"tie_word_embeddings": True, "attention_bias": False}, ("bias", "belongs to nothing")),
        ({"vocab_size": 324}, ("embed_tokens", "(323, 64)", "(324, 64)")),
    ],
)
def test_another_models_config_is_refused_by_the_first_tensor_that_differs(
    folder: Path, changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    checkpoints.edit_config(folder, **changes)
    refused(folder, *words)


def test_laddertron_run_on_a_damaged_folder_ends_with_one_clear_line(folder: Path, tmp_path: Path) -> None:
    """A truncated shard, from the command line to the ranks and back: within 10 s (of which imports take most),
    non-zero, one line with the file and the tensor, no traceback of ours."""
    file = first_shard(folder, Q)
    (folder / file).write_bytes((folder / file).read_bytes()[:-10])
    (tmp_path / "deploy.yaml").write_text(f"model:\n  path: {folder}\nlaunch:\n  oversubscribe: true\n")
    body = {"prompt": "x", "max_tokens": 1}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "llama", **body}}
    (tmp_path / "in.jsonl").write_text(json.dumps(line) + "\n")
    words = ["run", str(tmp_path / "deploy.yaml"), "-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl")]
    start = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-m", "laddertron.launchers.cli", *words], capture_output=True, text=True, timeout=60
    )
    took = time.monotonic() - start
    said = [text for text in ended.stderr.splitlines() if text.startswith("failed:")]
    assert ended.returncode != 0
    assert len(said) == 1, ended.stderr
    assert file in said[0]
    assert "cut within tensor" in said[0]
    assert "Traceback" not in ended.stderr
    print(f"took {took:.1f} s; 10 is the bar on a machine of one's own")
    assert took < 30, took


# ---- every element once ----


def coverage(c: ModelConfig, size: int, replicate: bool = False) -> dict[str, tuple[Any, Any, Any]]:
    """By tensor: edges of rows, edges of columns, and how many ranks hold each rectangle between them."""
    held: dict[str, list[tuple[int, int, int, int]]] = {}
    wanted = expected_shapes(c)
    for rank in range(size):
        for fill in plan_fills(Shard(c, size, rank), replicate):
            if fill.tensor is not None:
                width = wanted[fill.tensor][1] if len(wanted[fill.tensor]) == 2 else 1
                columns = (fill.source_col, fill.source_col + (fill.columns or width))
                held.setdefault(fill.tensor, []).append((fill.source_row, fill.source_row + fill.count, *columns))
    out = {}
    for name, rectangles in held.items():
        rows = np.unique([r for rectangle in rectangles for r in rectangle[:2]])
        columns_ = np.unique([k for rectangle in rectangles for k in rectangle[2:]])
        count = np.zeros((len(rows) - 1, len(columns_) - 1), int)
        for top, bottom, left, right in rectangles:
            a, b = np.searchsorted(rows, (top, bottom))
            x, y = np.searchsorted(columns_, (left, right))
            count[a:b, x:y] += 1
        out[name] = (rows, columns_, count)
    return out


def copies(c: ModelConfig, size: int, name: str, rows: Any) -> Any:
    """How many ranks must hold the rows beginning at `rows`."""
    if name.endswith(("norm.weight", "ln_1.weight", "ln_2.weight", "ln_f.weight")):
        return np.full(len(rows), size)
    each = max(1, size // c.num_kv_heads)
    if "k_proj" in name or "v_proj" in name:
        return np.full(len(rows), each)
    if "c_attn" in name:  # q .. q, k, v in each group
        group = c.num_heads // c.num_kv_heads
        return np.where(rows // c.head_dim % (group + 2) >= group, each, 1)
    return np.ones(len(rows), int)


@st.composite
def models(draw: st.DrawFn) -> tuple[ModelConfig, int]:
    size = draw(st.integers(1, 16))
    kv = draw(st.sampled_from([k for k in range(1, 17) if k % size == 0 or size % k == 0]))
    group = draw(st.sampled_from([g for g in range(1, 65) if kv * g % size == 0 and kv * g <= 64]))
    layout = draw(st.sampled_from(["huggingface", "dolomite"]))
    parallel = draw(st.booleans()) and layout == "huggingface"
    c = config(
        num_layers=draw(st.integers(1, 3)),
        num_heads=kv * group,
        num_kv_heads=kv,
        head_dim=draw(st.sampled_from([2, 4, 6])),
        hidden_size=draw(st.integers(1, 20)),
        ffn_size=size * draw(st.integers(1, 5)),
        vocab_size=draw(st.integers(1, 100)),
        tied_embeddings=draw(st.booleans()),
        qkv_bias=draw(st.booleans()),
        o_bias=draw(st.booleans()),
        mlp_bias=draw(st.booleans()),
        qk_norm=draw(st.booleans()) and layout == "huggingface",
        layout=layout,
    )
    if parallel:
        c = config(
            **{**{k: getattr(c, k) for k in c.__dataclass_fields__}, "wiring": make_wiring("parallel", c.num_layers)}
        )
    return c, size


@settings(max_examples=150, deadline=None, print_blob=True)
@given(models())
def test_every_element_of_every_tensor_lands_exactly_where_it_must(drawn: tuple[ModelConfig, int]) -> None:
    """Any model on any ranks: each element on one rank, key/value heads on as many as share them, norms on all; and
    each rank's parameters are tiled without gap or overlap."""
    c, size = drawn
    assert splits(c, size)
    wanted, found = expected_shapes(c), coverage(c, size)
    assert found.keys() == wanted.keys()
    for name, (rows, columns, count) in found.items():
        width = wanted[name][1] if len(wanted[name]) == 2 else 1
        assert (rows[0], rows[-1], columns[0], columns[-1]) == (0, wanted[name][0], 0, width), name
        assert (count == copies(c, size, name, rows[:-1])[:, None]).all(), (name, count)
    for rank in range(size):
        shard = Shard(c, size, rank)
        parameters = {name: torch.empty(shape, device="meta") for name, shape in shapes(shard).items()}
        check_cover(plan_fills(shard), parameters)


def test_cover_faults_are_found() -> None:
    """The guard itself: a gap, an overlap, a short parameter, one that nothing fills."""
    p = {"a": torch.empty(4, 2)}
    check_cover([Fill("a", 0, 3, "x"), Fill("a", 3, 1, None)], p)
    for fills, words in (
        ([Fill("a", 0, 2, "x"), Fill("a", 3, 1, "x")], "row 2 is filled never"),
        ([Fill("a", 0, 3, "x"), Fill("a", 2, 2, "x")], "row 2 is filled twice"),
        ([Fill("a", 0, 3, "x")], "3 of its 4 rows"),
        ([], "filled by nothing"),
        ([Fill("a", 0, 4, "x"), Fill("b", 0, 4, "x")], "b is unknown"),
    ):
        with pytest.raises(CheckpointError, match=words):
            check_cover(fills, p)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("recipe", ["llama_bias", "qwen3", "dolomite_bias"])
def test_what_lands_is_what_was_there(tmp_path: Path, recipe: str, size: int) -> None:
    """Every rank's slices, put together again, against the tensors as safetensors' own reader gives them."""
    shards = "1GB" if recipe.startswith("dolomite") else "60KB"
    folder = checkpoints.save(tmp_path / "m", recipe, max_shard_size=shards, tokenizer=False)
    c = from_folder(folder)
    ranks = [loaded(open_source(folder, Shard(c, size, rank)), Shard(c, size, rank)) for rank in range(size)]
    stored: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        stored |= load_file(file)
    seen = set()
    for rank, parameters in enumerate(ranks):
        assert not any(p.isnan().any() for p in parameters.values())
        for fill in plan_fills(Shard(c, size, rank)):
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
        [loaded(open_source(folder, s), s, dtype)["layers.0.down.weight"] for s in (Shard(c, 2, 0), Shard(c, 2, 1))], 1
    )
    assert torch.equal(down, want["model.layers.0.mlp.down_proj.weight"].to(dtype))


def test_modules_come_one_after_the_other(llama: Path) -> None:
    """What may be repacked at once: each module is told once, whole, before the next layer is begun."""
    c = from_folder(llama)
    shard = Shard(c, 2, 1)
    parameters = {name: torch.full(s, torch.nan) for name, s in shapes(shard).items()}
    told: list[str] = []
    filled: list[int] = []

    def on_module(module: str) -> None:
        told.append(module)
        own = [p for name, p in parameters.items() if name.startswith(f"{module}.")]
        assert own
        assert not any(p.isnan().any() for p in own)
        filled.append(sum(not p.isnan().any() for p in parameters.values()))

    from laddertron.models.weights import load

    steps: list[tuple[int, int]] = []
    load(open_source(llama, shard), shard, parameters, on_module=on_module, progress=lambda *at: steps.append(at))
    assert sorted(told) == ["embedding", "head", "layers.0", "layers.1", "layers.2", "norm"]
    layers = [name for name in told if name.startswith("layers.")]
    assert len(set(layers)) == 3
    counts = [sum(name.startswith(f"{module}.") for name in parameters) for module in told]
    assert filled == list(np.cumsum(counts)), "nothing of a later module was read before"
    assert steps[-1][0] == steps[-1][1] == sum(p.numel() * 4 for p in parameters.values())
    assert steps == sorted(steps)


# ---- 405B ----


def sparse_checkpoint(folder: Path, c: ModelConfig, files: int) -> dict[str, tuple[Path, int]]:
    """Real headers, data that is a hole: 810 GB that take no disk. Returns where each tensor's bytes begin."""
    write_config(folder, c)
    where: dict[str, tuple[Path, int]] = {}
    entries = list(expected_shapes(c).items())
    per_file, weight_map = -(-len(entries) // files), {}
    for number in range(files):
        name = f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        header, at = {}, 0
        for tensor, shape in entries[number * per_file : (number + 1) * per_file]:
            size = 2 * int(np.prod(shape))
            header[tensor] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + size]}
            weight_map[tensor] = name
            at += size
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        for tensor, entry in header.items():
            where[tensor] = (folder / name, 8 + len(text) + entry["data_offsets"][0])  # type: ignore[index]
        with (folder / name).open("wb") as stream:
            stream.write(struct.pack("<Q", len(text)) + text)
            stream.truncate(8 + len(text) + at)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return where


def marks(shape: tuple[int, ...]) -> Iterator[tuple[int, int, float]]:
    """Row, column and value of what is written into a hole: the corners of each sixteenth."""
    rows, columns = shape
    for part in range(16):
        for row in (part * rows // 16, (part + 1) * rows // 16 - 1):
            for column in (part * columns // 16, (part + 1) * columns // 16 - 1):
                yield row, column, float(1 + part * 4 + (row % 2) * 2 + column % 2)


def test_405b_over_sixteen_ranks(tmp_path: Path) -> None:
    """A checkpoint of Llama 3.1 405B's shape (810 GB of holes under 191 real headers): sixteen plans cover every
    element of every tensor, each once, key/value heads twice, norms on all; and a layer of rank 0 and of rank 15 loads
    from where it must."""
    c = config(
        num_layers=126,
        hidden_size=16384,
        num_heads=128,
        num_kv_heads=8,
        head_dim=128,
        ffn_size=53248,
        vocab_size=128256,
        max_position_embeddings=131072,
        dtype="bfloat16",
    )
    where = sparse_checkpoint(tmp_path, c, 191)
    assert 811e9 < sum(file.stat().st_size for file in tmp_path.glob("*.safetensors")) < 812e9
    assert from_folder(tmp_path).num_parameters == c.num_parameters == 405853388800
    source = open_checkpoint(tmp_path, from_folder(tmp_path))
    assert source.rank_bytes(2, 16, False) == 2 * c.num_parameters // 16

    wanted, found = expected_shapes(c), coverage(c, 16)
    assert found.keys() == wanted.keys() == source.tensors.keys()
    for name, (rows, columns, count) in found.items():
        width = wanted[name][1] if len(wanted[name]) == 2 else 1
        assert (rows[0], rows[-1], columns[0], columns[-1]) == (0, wanted[name][0], 0, width), name
        assert (count == copies(c, 16, name, rows[:-1])[:, None]).all(), name

    layer = "model.layers.77."
    for name, shape in wanted.items():
        if name.startswith(layer) and len(shape) == 2:
            file, begin = where[name]
            with file.open("r+b") as stream:
                for row, column, value in marks(shape):
                    stream.seek(begin + 2 * (row * shape[1] + column))
                    stream.write(np.float32(value).tobytes()[2:])  # bf16: the upper half
    for rank, products in ((0, ("qkv", "o", "gate_up", "down")), (15, ("o", "qkv"))):
        shard = Shard(c, 16, rank)
        need = shapes(shard)
        with Reader() as reader:
            for product in products:
                parameter = torch.full(need[f"layers.77.{product}.weight"], torch.nan, dtype=torch.bfloat16)
                for fill in plan_fills(shard):
                    if fill.parameter != f"layers.77.{product}.weight" or fill.tensor is None:
                        continue
                    target = parameter[fill.row : fill.row + fill.count]
                    fill_target(reader, source, fill, target)
                    width = fill.columns or target.shape[1]
                    for row, column, value in marks(wanted[fill.tensor]):
                        r, k = row - fill.source_row, column - fill.source_col
                        if 0 <= r < fill.count and 0 <= k < width:
                            assert target[r, k] == value, (fill, row, column)
                    # What is not marked is a hole: zeros.
                    expected = sum(
                        value
                        for row, column, value in set(marks(wanted[fill.tensor]))
                        if 0 <= row - fill.source_row < fill.count and 0 <= column - fill.source_col < width
                    )
                    assert torch.count_nonzero(target) > 0
                    assert target.sum(dtype=torch.float32).item() == expected
