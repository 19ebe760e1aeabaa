"""The identity of weights: which changes samples show, between folders, ranks and starts."""

from __future__ import annotations

import os
import random
import resource
from dataclasses import replace
from itertools import pairwise
from math import prod
from pathlib import Path

import checkpoints
import pytest
import torch
from laddertron.models.config.known_models import known
from laddertron.models.config.model_config import from_folder
from laddertron.models.stages import RankShard
from laddertron.models.weights import identity
from laddertron.models.weights.checkpoint import CheckpointError, StoredTensor, read_folder
from laddertron.models.weights.identity import (
    BLOCK,
    PAGE,
    PLACES,
    Sample,
    fixed_places,
    odd_one,
    read_sample,
    read_weights,
    salted_places,
    tables_in,
)
from laddertron.models.weights.mapping import Source, open_checkpoint, open_source
from laddertron.models.weights.own_sums import BLOCK as OWN_BLOCK
from laddertron.models.weights.quantised import scale_of
from laddertron.models.weights.rank_files import shards_folder
from laddertron.models.weights.shard_writer import write_shards
from laddertron.models.weights.slices import expected_shapes
from safetensors.torch import load_file, save_file


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Its embedding and head have 41 pages each, other tensors at most 12."""
    return checkpoints.save(tmp_path / "model", "llama_bias", max_shard_size="120KB")


def write(file: Path, at: int, data: bytes) -> None:
    """Overwrites bytes in place; size, inode and times stay."""
    stat = file.stat()
    with file.open("r+b") as stream:
        stream.seek(at)
        stream.write(data)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def flip(stored: StoredTensor, at: int) -> bytes:
    with stored.file.open("rb") as stream:
        stream.seek(at)
        before = stream.read(1)
    write(stored.file, at, bytes([before[0] ^ 0x10]))
    return before


def unsampled(folder: Path, draw: random.Random) -> tuple[int, StoredTensor, int]:
    """A tensor's number, the tensor, and a byte of it that no fixed sample contains."""
    own = [t for table in tables_in(folder) for t in table.tensors]
    places = [
        (number, stored, at)
        for number, stored in enumerate(own)
        for at in range(stored.begin, stored.end)
        if not any(begin <= at < end for begin, end in fixed_places(stored))
    ]
    return draw.choice(places)


def test_descriptors_are_needed_by_file_and_not_by_tensor(tmp_path: Path) -> None:
    """A shell's limit of 1,024 is less than the tensors of a model of 126 layers."""
    save_file({f"model.layers.{i}.w": torch.full((4,), i) for i in range(600)}, tmp_path / "model.safetensors")
    tables = tables_in(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 100, hard))
    try:
        assert len(read_sample(tables).fixed) == 8 * 600
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_another_value_of_any_tensor_is_another_model(folder: Path) -> None:
    """A fine-tune of one tensor alone, for each tensor of the model: a stored identity names it."""
    before = read_weights(folder)
    for stored in read_folder(folder).values():
        data = stored.file.read_bytes()
        tuned = load_file(stored.file)
        tuned[stored.name] += 0.01
        save_file(tuned, stored.file, {"format": "pt"})
        now = read_weights(folder)
        assert now.digest != before.digest
        assert before.difference(read_sample(now.tables)) == f"{stored.file.name}: tensor {stored.name}"
        stored.file.write_bytes(data)
    assert read_weights(folder).digest == before.digest


def test_files_are_named_by_what_differs(folder: Path) -> None:
    before, files = read_weights(folder), sorted(folder.glob("*.safetensors"))
    whole = read_sample(before.tables)
    assert before.difference(whole) == ""
    assert before.difference(replace(whole, files={})) == files[0].name
    name = files[1].name
    assert before.difference(replace(whole, files=whole.files | {name: "0"})) == f"{name}: its size or header"
    assert before.difference(replace(whole, files=whole.files | {"z.safetensors": "0"})).startswith("z.safetensors")
    fewer = {file: header for file, header in whole.files.items() if file != name}
    assert before.difference(replace(whole, files=fewer)) == f"{name}: its presence"
    assert before.difference(Sample(origin="of another")) != ""
    assert before.difference(Sample(origin=before.digest)) == ""
    header = files[0].read_bytes()
    files[0].write_bytes(header.replace(b'"format":"pt"', b'"format":"np"'))
    assert read_weights(folder).digest != before.digest


def test_one_element_outside_the_fixed_samples_shows_in_some_launch(folder: Path, run_seed: int) -> None:
    """The stored identity stays; ranks that read the two copies differ with a salt that draws the place, and the tensor
    is named whether the nodes have one rank each, or one and three."""
    tables = tables_in(folder)
    number, stored, at = unsampled(folder, random.Random(run_seed))
    salt = next(s for s in map(b"%d".__mod__, range(100)) if any(b <= at < e for b, e in salted_places(stored, s)))
    before = read_weights(folder).digest
    first = read_sample(tables, salt)
    parts = [read_sample(tables, salt, part, 3) for part in range(3)]
    flip(stored, at)
    assert read_weights(folder).digest == before
    other = read_sample(tables, salt)
    assert odd_one({0: first, 1: other}) == (1, 0, number)
    assert odd_one({0: other, 1: first, 2: first}) == (0, 1, number)
    odd = odd_one({**dict(enumerate(parts)), 3: other})
    assert odd is not None
    assert (odd.rank, odd.tensor) == (3, number)
    assert odd_one({0: first, **{1 + part: sample for part, sample in enumerate(parts)}}) is None


@pytest.mark.parametrize(
    ("size", "reads", "largest"),
    [(1025 * BLOCK, 2, BLOCK), (700 * PAGE, 1, 2 * PAGE), (40 * PAGE, 1, PAGE), (BLOCK, 1, BLOCK)],
)
def test_every_byte_is_read_in_some_launch(size: int, reads: int, largest: int) -> None:
    """By salted samples of a tensor that begins anywhere in a block: of one with many blocks a launch reads several,
    of a small one few bytes, but one in 512 or more."""
    stored = StoredTensor("w", Path("f"), "I8", (), 100, 100 + size)
    drawn = {place for number in range(20_000) for place in salted_places(stored, b"%d" % number)}
    assert {len(salted_places(stored, b"%d" % number)) for number in range(9)} == {reads}
    assert max(end - begin for begin, end in drawn) == largest
    assert len(drawn) <= 512 * reads + 2
    at = stored.begin
    for begin, end in sorted(drawn):
        assert begin == at
        at = end
    assert at == stored.end


@pytest.mark.parametrize("size", [0, 1, PAGE * PLACES - 50, PAGE * PLACES, 100 * PAGE, 10_000 * PAGE])
@pytest.mark.parametrize("begin", [0, 50, 4000])
def test_places_are_distinct_and_inside(size: int, begin: int) -> None:
    stored = StoredTensor("w", Path("f"), "I8", (size,), begin, begin + size)
    for places in (fixed_places(stored), salted_places(stored, b"salt")):
        assert all(begin <= b < e <= begin + size for b, e in places)
        assert all(one[1] <= two[0] for one, two in pairwise(places))
    if size <= PAGE * (PLACES - 1):
        assert fixed_places(stored) == ([(begin, begin + size)] if size else [])
        assert salted_places(stored, b"salt") == []


@pytest.mark.parametrize(
    ("name", "itemsize", "counts"),
    [
        ("llama-3.1-405b", 2, (1137, 3411, 24443, 0.00198)),
        ("deepseek-v3", 1, (90485, 181087, 45493, 0.00329)),
    ],
)
def test_a_node_reads_few_bytes_of_a_large_model(name: str, itemsize: int, counts: tuple[int, int, int, float]) -> None:
    """The numbers of docs/weights.md: tensors, fixed reads, salted reads, and their share of all bytes."""
    stored, at = [], 0
    for tensor, shape in expected_shapes(known(name)).items():
        size = prod(shape) * (itemsize if len(shape) == 2 else 2)
        stored.append(StoredTensor(tensor, Path("f"), "I8", shape, at, at := at + size))
        if itemsize == 1 and len(shape) == 2 and "layers." in tensor:
            scale = prod(-(-side // 128) for side in shape) * 4
            stored.append(StoredTensor(scale_of(tensor), Path("f"), "I8", (), at, at := at + scale))
    fixed = [place for one in stored for place in fixed_places(one)]
    salted = [place for one in stored for place in salted_places(one, b"salt")]
    share = sum(end - begin for begin, end in (*fixed, *salted)) / at
    assert (len(stored), len(fixed), len(salted)) == counts[:3]
    assert share == pytest.approx(counts[3], rel=0.01)
    assert share < 0.02


def test_a_file_that_shrinks_while_it_is_sampled_is_named(folder: Path) -> None:
    tables = tables_in(folder)
    last = tables[-1].tensors[-1]
    os.truncate(last.file, last.begin + 1)
    with pytest.raises(CheckpointError, match=f"{last.file}: tensor {last.name} is cut"):
        read_sample(tables)


def test_a_file_that_changes_while_it_is_loaded_is_named(folder: Path) -> None:
    file = next(folder.glob("*.safetensors"))
    stamps = identity.stamps_of(folder.glob("*.safetensors"))
    identity.check_unchanged(stamps)
    os.utime(file, ns=(1, 1))
    with pytest.raises(CheckpointError, match=f"{file}: changed while it was loaded"):
        identity.check_unchanged(stamps)


# per-rank files


@pytest.fixture
def shard(folder: Path) -> RankShard:
    config = from_folder(folder)
    shards = [RankShard(config, 2, rank) for rank in range(2)]
    write_shards(open_checkpoint(folder, config), shards, folder)
    return shards[1]


def test_per_rank_files_carry_the_identity_of_the_checkpoint(folder: Path, shard: RankShard) -> None:
    """The node needs nothing else: it has the digest of the whole checkpoint."""
    digest = read_weights(folder).digest
    for file in folder.glob("model*"):
        file.unlink()
    source = open_source(folder, shard)
    assert source.sample(b"salt", 0, 2) == Sample(origin=digest)
    assert source.digest == digest


def test_a_changed_tensor_of_a_per_rank_file_is_named(folder: Path, shard: RankShard) -> None:
    """Any tensor with another value, in place, at any start: two tensors of equal shape that swap names too."""
    own = open_source(folder, shard).tensors
    for stored in own.values():
        data = stored.file.read_bytes()
        write(stored.file, stored.begin, bytes(stored.end - stored.begin))
        with pytest.raises(CheckpointError, match=f"tensor {stored.name} is not what `laddertron shard` wrote"):
            open_source(folder, shard).sample(b"", 0, 2)
        write(stored.file, 0, data)
    names = [b'"layers.%d.attention_norm.weight"' % layer for layer in (0, 1)]
    assert all(name in data for name in names)
    swapped = data.replace(names[0], MARK).replace(names[1], names[0]).replace(MARK, names[1])
    write(stored.file, 0, swapped)
    with pytest.raises(CheckpointError, match="is not what `laddertron shard` wrote"):
        open_source(folder, shard).sample(b"", 0, 2)


def refused(source: Source, salt: bytes) -> bool:
    try:
        source.sample(salt, 0, 1)
    except CheckpointError as error:
        return "not what `laddertron shard` wrote" in str(error)
    return False


def test_one_element_of_a_per_rank_file_shows_in_some_launch(tmp_path: Path, run_seed: int) -> None:
    """A file of more blocks than a launch reads: with a salt that draws the block, the start is refused; a byte of each
    block once."""
    folder = checkpoints.save(tmp_path / "wide", "llama", hidden_size=512, intermediate_size=4096, vocab_size=VOCAB)
    config = from_folder(folder)
    shard = RankShard(config, 1, 0)
    write_shards(open_checkpoint(folder, config), [shard], folder)
    source, draw = open_source(folder, shard), random.Random(run_seed)
    own = sorted(source.tensors.values(), key=lambda t: t.begin)
    first, last = own[0].begin, own[-1].end
    assert last - first > 20 * OWN_BLOCK
    for block in draw.sample(range((last - first) // OWN_BLOCK), 3):
        at = draw.randrange(first + block * OWN_BLOCK, first + (block + 1) * OWN_BLOCK)
        before = flip(own[0], at)
        assert any(refused(source, b"%d" % number) for number in range(200))
        write(own[0].file, at, before)
    for number in range(9):
        source.sample(b"%d" % number, 0, 1)


VOCAB, MARK = 4096, b"a name that no tensor has"


def test_files_of_an_earlier_version_are_refused_with_the_command(folder: Path, shard: RankShard) -> None:
    file = shards_folder(folder, 2) / "rank-0001.safetensors"
    file.write_bytes(file.read_bytes().replace(b'"samples"', b'"simples"'))
    with pytest.raises(CheckpointError, match=r"has no sums.*laddertron shard .*--overwrite"):
        open_source(folder, shard).sample(b"", 0, 2)


def test_sharding_is_refused_while_the_checkpoint_changes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = from_folder(folder)

    def change(done: int, total: int) -> None:
        os.utime(next(folder.glob("*.safetensors")), ns=(done, done))

    with pytest.raises(CheckpointError, match="changed while it was loaded"):
        write_shards(open_checkpoint(folder, config), [RankShard(config, 1, 0)], folder, progress=change)
    assert not shards_folder(folder, 1).exists()


def own(sample: Sample, tensors: int) -> range:
    return range(sample.part, tensors, sample.parts)


def test_the_tensors_are_divided_without_rest(folder: Path) -> None:
    """Whatever the number of a node's ranks, and with one thread or many, each tensor is read by one of them."""
    tables = tables_in(folder)
    whole = read_sample(tables, b"salt")
    for parts in (1, 2, 3, 7, 64):
        samples = [read_sample(tables, b"salt", part, parts, threads=1 + parts % 3) for part in range(parts)]
        sums = {
            i: sample.fixed[8 * n : 8 * n + 8]
            for sample in samples
            for n, i in enumerate(own(sample, len(whole.fixed) // 8))
        }
        assert "".join(sums[i] for i in sorted(sums)) == whole.fixed
