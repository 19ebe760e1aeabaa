"""That every element of every checkpoint tensor lands on exactly the ranks that need it: over random models and ranks,
and for a checkpoint of Llama 3.1 405B's shape on sixteen."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from laddertron.models.config.model_config import ModelConfig, from_folder, make_wiring
from laddertron.models.config.shapes import splits
from laddertron.models.stages import RankShard
from laddertron.models.weights.checkpoint import CheckpointError
from laddertron.models.weights.fill import fill_target
from laddertron.models.weights.load import check_cover
from laddertron.models.weights.mapping import open_checkpoint
from laddertron.models.weights.slices import Fill, expected_shapes, plan_fills
from laddertron.models.weights.tensor_reader import Reader
from weights_cases import config, shapes, write_config


def coverage(c: ModelConfig, size: int, replicate: bool = False) -> dict[str, tuple[Any, Any, Any]]:
    """By tensor: edges of rows, edges of columns, and how many ranks hold each rectangle between them."""
    held: dict[str, list[tuple[int, int, int, int]]] = {}
    wanted = expected_shapes(c)
    for rank in range(size):
        for fill in plan_fills(RankShard(c, size, rank), replicate):
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
        shard = RankShard(c, size, rank)
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


def sparse_checkpoint(folder: Path, c: ModelConfig, files: int) -> dict[str, tuple[Path, int]]:
    """Real headers, data that is a hole: 810 GB that take no disk. Returns where each tensor's bytes begin."""
    write_config(folder, c)
    where: dict[str, tuple[Path, int]] = {}
    entries = list(expected_shapes(c).items())
    per_file, weight_map = -(-len(entries) // files), {}
    for number in range(files):
        name = f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        header: dict[str, Any] = {}
        at = 0
        for tensor, shape in entries[number * per_file : (number + 1) * per_file]:
            size = 2 * int(np.prod(shape))
            header[tensor] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + size]}
            weight_map[tensor] = name
            at += size
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        for tensor, entry in header.items():
            where[tensor] = (folder / name, 8 + len(text) + entry["data_offsets"][0])
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
    needed = source.rank_bytes(RankShard(c, 16, 0), 2)  # norms are on every rank, a KV head on two
    assert 1 < needed / (2 * c.num_parameters / 16) < 1.02

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
        shard = RankShard(c, 16, rank)
        need = shapes(shard)
        with Reader() as reader:
            for product in products:
                parameter = torch.full(need[f"layers.77.{product}.weight"], torch.nan, dtype=torch.bfloat16)
                for fill in plan_fills(shard):
                    if fill.parameter != f"layers.77.{product}.weight" or fill.tensor is None:
                        continue
                    target = parameter[fill.row : fill.row + fill.count]
                    fill_target(reader, source.tensors, fill, target)
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
