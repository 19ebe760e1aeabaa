"""Manifests and per-rank files: made, verified while loading, refused when they do not fit."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import checkpoints
import pytest
import torch
from laddertron.launchers.cli.__main__ import main
from laddertron.launchers.rank.rank_status import loading_words
from laddertron.models.config.model_config import from_folder
from laddertron.models.stages import RankShard
from laddertron.models.weights import manifest
from laddertron.models.weights.checkpoint import CheckpointError
from laddertron.models.weights.manifest import make_manifest, read_manifest, write_manifest
from laddertron.models.weights.mapping import open_checkpoint, open_source
from laddertron.models.weights.rank_files import shards_folder
from weights_cases import loaded

SIZE = 2
TP = ("--set", f"parallel.tensor_parallel_size={SIZE}")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return checkpoints.save(tmp_path / "model", "llama_bias", max_shard_size="60KB")


def load_all(folder: Path, replicate: bool = False) -> list[dict[str, torch.Tensor]]:
    c = from_folder(folder)
    shards = [RankShard(c, SIZE, rank) for rank in range(SIZE)]
    return [loaded(open_source(folder, shard), shard, replicate_embedding=replicate) for shard in shards]


def flip(file: Path, at: int, bit: int = 0) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1 << bit
    stat = file.stat()
    file.write_bytes(data)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_any_flipped_bit_is_found_by_one_rank_and_named(folder: Path, run_seed: int) -> None:
    """Twenty seeded flips in weights: some rank refuses, naming file and tensor; without a manifest nothing notices
    (that is what it is for)."""
    draw = random.Random(run_seed)
    c = from_folder(folder)
    tensors = open_checkpoint(folder, c).tensors
    write_manifest(folder, make_manifest(folder, block=4096))
    load_all(folder)
    for _ in range(20):
        stored = draw.choice([t for t in tensors.values() if t.end > t.begin])
        at, bit = draw.randrange(stored.begin, stored.end), draw.randrange(8)
        flip(stored.file, at, bit)
        with pytest.raises(CheckpointError) as caught:
            load_all(folder)
        said = str(caught.value)
        assert stored.file.name in said
        assert "damaged" in said
        assert stored.name in said or "more" in said, said
        flip(stored.file, at, bit)
    load_all(folder)
    stored = tensors["model.layers.1.mlp.up_proj.weight"]
    (folder / manifest.NAME).unlink()
    flip(stored.file, stored.begin)
    load_all(folder)


def test_other_files_sizes_and_strangers_are_refused(folder: Path) -> None:
    """config.json and tokenizer are in the manifest, too; a file of another size is refused before it is read."""
    write_manifest(folder, make_manifest(folder))
    assert manifest.NAME not in make_manifest(folder).files
    before = (folder / "config.json").read_text()
    (folder / "config.json").write_text(before.replace("64", "46", 0) + " ")
    with pytest.raises(CheckpointError, match=r"config\.json: \d+ bytes, laddertron\.manifest\.json says"):
        load_all(folder)
    (folder / "config.json").write_text(before)
    flip(folder / "tokenizer.json", 20)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: bytes 0 to"):
        load_all(folder)
    flip(folder / "tokenizer.json", 20)
    listed = json.loads((folder / manifest.NAME).read_text())
    name = next(name for name in listed["files"] if name.endswith(".safetensors"))
    del listed["files"][name]
    (folder / manifest.NAME).write_text(json.dumps(listed))
    with pytest.raises(CheckpointError, match="does not list it"):
        load_all(folder)
    (folder / name).unlink()
    with pytest.raises(CheckpointError, match="missing"):
        load_all(folder)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "bad manifest"),
        ("[]", "bad manifest"),
        ('{"version": 2}', "version 2 is not known"),
        ('{"version": 1, "block": 0, "files": {}}', "from 4096"),
        ('{"version": 1, "block": 4096, "files": {"m": {"size": 5000, "crc32": "00000000"}}}', "take 2 checksums"),
        ('{"version": 1, "block": 4096, "files": {"m": {"size": 1, "crc32": "zzzzzzzz"}}}', "bad manifest"),
        ('{"version": 1, "block": 4096, "files": {"m": {"size": true, "crc32": ""}}}', "integer from 0"),
    ],
)
def test_bad_manifests_are_refused_with_the_mend(tmp_path: Path, text: str, words: str) -> None:
    assert read_manifest(tmp_path) is None
    (tmp_path / manifest.NAME).write_text(text)
    with pytest.raises(CheckpointError, match=words) as caught:
        read_manifest(tmp_path)
    assert "laddertron manifest" in str(caught.value)


def test_the_manifest_command_writes_checks_and_finds(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["manifest", str(folder), "--check"]) == 2
    assert "no manifest" in capsys.readouterr().err
    assert main(["manifest", str(folder)]) == 0
    assert "GB/s" in capsys.readouterr().out
    assert main(["manifest", str(folder), "--check"]) == 0
    flip(next(folder.glob("*.safetensors")), -1)
    assert main(["manifest", str(folder), "--check"]) == 1
    assert "damaged" in capsys.readouterr().err


@pytest.mark.parametrize("replicate", [False, True])
def test_per_rank_files_hold_what_the_checkpoint_gives(
    folder: Path, replicate: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bit for bit, on every rank, without touching the checkpoint; the digest that ranks compare stays the same."""
    want, c = load_all(folder, replicate), from_folder(folder)
    digest = open_source(folder, RankShard(c, SIZE, 0)).digest
    embedding = "replicate" if replicate else "shard"
    assert main(["shard", str(folder), *TP, "--set", f"parallel.embedding={embedding}"]) == 0
    source = open_source(folder, RankShard(c, SIZE, 0))
    assert source.sharded_over == SIZE
    assert source.digest == digest
    got = load_all(folder, replicate)
    for ours, theirs in zip(got, want, strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    with pytest.raises(CheckpointError, match=r"not written with parallel\.embedding"):
        load_all(folder, not replicate)
    assert open_source(folder, RankShard(c, 4, 0)).sharded_over == 0, "other sizes still read the checkpoint"
    assert main(["shard", str(folder), *TP]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert main(["shard", str(folder), "--set", "parallel.tensor_parallel_size=3"]) == 2
    assert "8 heads % 3" in capsys.readouterr().err


def test_stale_or_mixed_per_rank_files_are_refused(folder: Path) -> None:
    c = from_folder(folder)
    shard = RankShard(c, SIZE, 1)
    assert main(["shard", str(folder), *TP]) == 0
    open_source(folder, shard)
    file = next(folder.glob("model-*.safetensors"))
    stat = file.stat()
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    with pytest.raises(CheckpointError, match=rf"stale: .*{file.name} has changed since.*--overwrite"):
        open_source(folder, shard)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    open_source(folder, shard)
    before = (folder / "config.json").read_text()
    checkpoints.edit_config(folder, rms_norm_eps=1e-3)
    with pytest.raises(CheckpointError, match=r"stale: .*config\.json has changed"):
        open_source(folder, shard)
    (folder / "config.json").write_text(before)
    home = shards_folder(folder, SIZE)
    own = (home / "rank-0001.safetensors").read_bytes()
    (home / "rank-0001.safetensors").write_bytes((home / "rank-0000.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match="another rank"):
        open_source(folder, shard)
    (home / "rank-0001.safetensors").write_bytes(own[:-1])
    with pytest.raises(CheckpointError, match="cut within"):
        open_source(folder, shard)
    (home / "rank-0001.safetensors").write_bytes(file.read_bytes())
    with pytest.raises(CheckpointError, match="not written by `laddertron shard`"):
        open_source(folder, shard)
    (home / "rank-0001.safetensors").unlink()
    with pytest.raises(CheckpointError, match="missing"):
        open_source(folder, shard)


def test_a_folder_of_per_rank_files_stands_alone(folder: Path, tmp_path: Path) -> None:
    """Written elsewhere, with config.json and tokenizer: the checkpoint may go."""
    want = load_all(folder)
    out = tmp_path / "fast"
    assert main(["shard", str(folder), *TP, "-o", str(out)]) == 0
    for file in folder.iterdir():
        file.unlink()
    got = load_all(out)
    assert all(torch.equal(got[rank][name], want[rank][name]) for rank in range(SIZE) for name in want[rank])
    assert {"config.json", "tokenizer.json"} <= {file.name for file in out.iterdir()}
    file = shards_folder(out, SIZE) / "rank-0000.safetensors"
    write_manifest(file.parent, make_manifest(file.parent))
    flip(file, -1)
    with pytest.raises(CheckpointError, match="damaged"):
        load_all(out)


def test_words_of_a_load() -> None:
    assert loading_words(0, 2 * 10**9, 0.0) == "weights 0.0 of 2.0 GB"
    assert loading_words(2 * 10**9, 82 * 10**9, 1.0) == "weights 2.0 of 82.0 GB, 2.00 GB/s, 0:40 left"
    assert loading_words(100, 540_000, 0.6) == "weights 0.0 of 0.5 MB"  # no 47 minutes that never come
