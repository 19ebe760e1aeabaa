"""Folders that must be refused before a byte of them is used: every message names file and tensor."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from laddertron.models.weights import checkpoint
from laddertron.models.weights.checkpoint import CheckpointError, read_folder, read_header

Header = dict[str, Any]


def good() -> Header:
    return {
        "a.weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b.weight": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
    }


def write(file: Path, header: Header | bytes, data: bytes = bytes(32)) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return file


def refused(call: Callable[[], object], *words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        call()
    said = str(caught.value)
    assert all(word in said for word in words), said
    assert said.isprintable(), "one clear line"
    assert len(said) < 1000


def test_a_sound_file_is_read(tmp_path: Path) -> None:
    tensors = read_header(write(tmp_path / "m.safetensors", {"__metadata__": {"format": "pt"}, **good()}))
    assert [(t.name, t.dtype, t.shape, t.end - t.begin) for t in tensors] == [
        ("a.weight", "F32", (2, 3), 24),
        ("b.weight", "BF16", (4,), 8),
    ]


def change(name: str, **keys: Any) -> Header:
    header = good()
    header[name] = {**header[name], **keys}
    return header


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (change("b.weight", data_offsets=[20, 28]), ("b.weight", "overlap")),
        (change("b.weight", data_offsets=[0, 8]), ("a.weight", "overlap")),
        (change("b.weight", shape=[3], data_offsets=[26, 32]), ("b.weight", "gap")),
        (change("b.weight", shape=[40], data_offsets=[24, 104]), ("b.weight", "truncated")),
        (change("b.weight", shape=[3], data_offsets=[24, 30]), ("truncated or damaged", "more than its tensors")),
        (change("a.weight", shape=[2, 4]), ("a.weight", "takes 32 bytes, 24")),
        (change("a.weight", shape=[-2, -3]), ("a.weight", "natural numbers")),
        (change("a.weight", shape=[True, 6]), ("a.weight", "natural numbers")),
        (change("a.weight", shape=[2.0, 3]), ("a.weight", "natural numbers")),
        (change("a.weight", shape=[1] * 2000 + [6]), ("a.weight", "8 at most")),
        (change("a.weight", shape=[2**63, 2**63]), ("a.weight", "natural numbers")),
        (change("a.weight", shape="6"), ("a.weight", "natural numbers")),
        (change("a.weight", data_offsets=[0]), ("a.weight", "data_offsets")),
        (change("a.weight", data_offsets=[24, 0]), ("a.weight", "takes 24 bytes, -24")),
        (change("a.weight", dtype="F64"), ("a.weight", "F64", "BF16")),
        (change("a.weight", dtype="\x1b[2J"), ("a.weight",)),
        ({"a\nforged line": 1}, ("forged",)),
        ({"a.weight": {"dtype": "F32"}}, ("a.weight", "shape is missing")),
        (b"[1]", ("not an object",)),
        (b"{nonsense", ("bad safetensors header",)),
        (b"\xff\xfe{}", ("bad safetensors header",)),
        (b'{"a.weight": ' + b"[" * 100_000, ("bad safetensors header",)),
        (b'{"a": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}, "a": {}}', ("duplicate key 'a'",)),
    ],
)
def test_bad_headers_are_refused_by_file_and_tensor(tmp_path: Path, header: Header | bytes, words: Any) -> None:
    file = write(tmp_path / "m.safetensors", header)
    refused(lambda: read_header(file), str(file), *words)


def test_truncated_files_name_the_tensor_that_is_cut(tmp_path: Path) -> None:
    """Cut at every length: never a crash, always the file's name."""
    file = write(tmp_path / "m.safetensors", good())
    whole = file.read_bytes()
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        refused(lambda: read_header(file), str(file))
    file.write_bytes(whole[:-1])
    refused(lambda: read_header(file), "cut within tensor b.weight")


def test_header_bombs_are_refused_before_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Announced beyond the file; and within it, but beyond any use (a sparse file)."""
    file = tmp_path / "m.safetensors"
    file.write_bytes(struct.pack("<Q", 2**62) + b"{}")
    refused(lambda: read_header(file), "header of 4611686018427387904 announced")
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", 99 << 20))
        stream.truncate(100 << 20)
    refused(lambda: read_header(file), "at most 16777216 are read")


def test_pointers_pickles_and_other_formats_are_refused_with_the_mend(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    refused(lambda: read_folder(tmp_path), str(file), "git lfs pull")
    file.rename(tmp_path / "pytorch_model.bin")
    refused(lambda: read_folder(tmp_path), "pickled", "save_pretrained")
    (tmp_path / "pytorch_model.bin").unlink()
    refused(lambda: read_folder(tmp_path), "empty")
    (tmp_path / "config.json").write_text("{}")
    refused(lambda: read_folder(tmp_path), "no *.safetensors")
    for name in (".metadata", "common.pt", "metadata.json"):
        (tmp_path / name).write_text("")
        refused(lambda: read_folder(tmp_path), "Megatron-core distributed checkpoint", "to-folder")
        (tmp_path / name).unlink()
    (tmp_path / "iter_0000100").mkdir()
    refused(lambda: read_folder(tmp_path), "to-folder", str(tmp_path))
    refused(lambda: read_folder(tmp_path / "nowhere"), "no such model folder")


def index(folder: Path, weight_map: Any) -> Path:
    file = folder / "model.safetensors.index.json"
    file.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return file


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "/etc/x.safetensors", "a/b.safetensors", "a\\b.safetensors", "m.bin", "", None, 3]
)
def test_index_names_stay_in_the_folder(tmp_path: Path, name: object) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    write(tmp_path / "secret.safetensors", good())
    file = index(folder, {"a.weight": name})
    refused(lambda: read_folder(folder), str(file), "a.weight", "bare *.safetensors")


def test_links_stay_in_the_folder_or_its_hub_cache(tmp_path: Path) -> None:
    """A link out of the folder is refused, for a shard and for the index; a hub cache's snapshot, whose files are links
    into the same cache's blobs, is read."""
    secret = write(tmp_path / "secret.safetensors", good())
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(secret)
    refused(lambda: read_folder(folder), "model.safetensors", str(secret), "outside the model folder")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(tmp_path / "gone.safetensors")
    refused(lambda: read_folder(folder), "leads nowhere")
    (folder / "model.safetensors").unlink()
    outside = index(tmp_path, {"a.weight": "m.safetensors"})
    (folder / outside.name).symlink_to(outside)
    refused(lambda: read_folder(folder), outside.name, "outside the model folder")

    cache = tmp_path / "models--a--b"
    (cache / "blobs").mkdir(parents=True)
    (cache / "snapshots" / "0123").mkdir(parents=True)
    write(cache / "blobs" / "abcdef", good())
    (cache / "snapshots" / "0123" / "model.safetensors").symlink_to(Path("../../blobs/abcdef"))
    assert set(read_folder(cache / "snapshots" / "0123")) == {"a.weight", "b.weight"}


def test_an_index_and_its_files_agree_or_are_refused(tmp_path: Path) -> None:
    one, two = "model-1.safetensors", "model-2.safetensors"
    write(tmp_path / one, {"a.weight": good()["a.weight"]}, bytes(24))
    write(tmp_path / two, {"b.weight": {**good()["b.weight"], "data_offsets": [0, 8]}}, bytes(8))
    file = index(tmp_path, {"a.weight": one, "b.weight": two})
    assert {name: t.file.name for name, t in read_folder(tmp_path).items()} == {"a.weight": one, "b.weight": two}
    index(tmp_path, {"a.weight": one, "b.weight": "model-3.safetensors"})
    refused(lambda: read_folder(tmp_path), "model-3.safetensors", "missing")
    index(tmp_path, {"a.weight": two, "b.weight": one})
    refused(lambda: read_folder(tmp_path), "tensor a.weight is missing", two)
    index(tmp_path, {"a.weight": one, "b.weight": two, "c.weight": two})
    refused(lambda: read_folder(tmp_path), "tensor c.weight is missing", two)
    index(tmp_path, {"a.weight": one})
    assert set(read_folder(tmp_path)) == {"a.weight"}, "a file that the index does not name is not read"
    write(tmp_path / one, good())
    refused(lambda: read_folder(tmp_path), "tensor b.weight is not in", one)
    index(tmp_path, {"a.weight": one, "b.weight": two})
    refused(lambda: read_folder(tmp_path), "tensor b.weight is also in", one)
    for text, words in (
        ('{"weight_map": {"a": "m.safetensors", "a": "m.safetensors"}}', "duplicate key"),
        ('{"weight_map": []}', "not an object"),
        ("{}", "weight_map is missing"),
        ("[" * 100_000, "bad index"),
        ("version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
    ):
        file.write_text(text)
        refused(lambda: read_folder(tmp_path), file.name, words)
    os.truncate(file, checkpoint.MAX_INDEX_BYTES + 1)
    refused(lambda: read_folder(tmp_path), "67108864 bytes that an index may have")


def test_a_consolidated_copy_beside_a_single_file_is_not_read(tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", good())
    write(tmp_path / "consolidated.safetensors", {"other": {"dtype": "F32", "shape": [8], "data_offsets": [0, 32]}})
    assert set(read_folder(tmp_path)) == {"a.weight", "b.weight"}


def test_a_name_that_no_file_can_have(tmp_path: Path) -> None:
    """The system would refuse it as an OSError of its own."""
    name = "é" * 200 + ".safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    refused(lambda: read_folder(tmp_path), "longer than a file's may be")
