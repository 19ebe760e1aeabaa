"""The identity of a deployment's model, and what ranks of nodes with different copies report of it."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import checkpoints
import pytest
from engine_cases import CPU, deployment
from laddertron.engine.config.schema import DaemonConfig, Deployment, EngineConfig, ModelSection
from laddertron.engine.identity import (
    DRAFT,
    MODEL,
    ModelIdentity,
    between_ranks,
    from_owner,
    headers_of,
    identity_of,
    small_files,
)
from laddertron.engine.step import build as builder
from laddertron.engine.step.build import build
from laddertron.engine.step.loading import held_weights
from laddertron.engine.text.tokenizer import TextError, TextModel
from laddertron.engine.text.worker import answer
from laddertron.models.config.model_config import from_folder
from laddertron.models.stages import RankShard
from laddertron.models.weights.checkpoint import CheckpointError
from laddertron.models.weights.identity import Sample, read_sample, tables_in
from laddertron.models.weights.manifest import make_manifest, write_manifest
from laddertron.models.weights.mapping import open_checkpoint
from laddertron.models.weights.shard_writer import write_shards
from laddertron.topology.json_codec import build as from_json
from laddertron.topology.json_codec import unbuild
from rank_pool import Rank
from test_weights_identity import flip, unsampled

Ranks = Callable[..., list[Any]]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return checkpoints.save(tmp_path / "model", "llama")


def of(model: Path, **engine: Any) -> Deployment:
    return Deployment(ModelSection(path=str(model)), engine=EngineConfig(**engine))


def tune(folder: Path) -> None:
    checkpoints.edit_tensors(folder, lambda tensors: tensors | {"model.norm.weight": tensors["model.norm.weight"] * 2})


def template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages }}")


def reheaded(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes().replace(b'"format":"pt"', b'"format":"np"'))


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "config": (lambda folder: checkpoints.edit_config(folder, rms_norm_eps=1e-3), "config.json differs"),
    "theta": (lambda folder: checkpoints.edit_config(folder, rope_theta=5e5), "config.json differs"),
    "generation": (lambda folder: (folder / "generation_config.json").write_text("{}"), "generation_config.json "),
    "tokenizer": (lambda folder: (folder / "tokenizer.json").write_text("{}"), "tokenizer.json differs"),
    "special": (lambda folder: (folder / "special_tokens_map.json").write_text("[]"), "special_tokens_map.json "),
    "template": (template, "chat_template.jinja is not expected"),
    "tensor": (tune, "model.safetensors: tensor model.norm.weight differs"),
    "header": (reheaded, "model.safetensors: its size or header differs"),
    "manifest": (lambda folder: write_manifest(folder, make_manifest(folder)), "laddertron.manifest.json is not"),
    "missing": (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_each_change_is_another_model_and_is_named(model: Path, change: str) -> None:
    """For answers stored before, and for a rank that starts after: named by file, by tensor where weights changed."""
    before, (make, words) = identity_of(of(model)), CHANGES[change]
    make(model)
    assert identity_of(of(model)).digest != before.digest
    digests, weights = small_files(of(model)), tables_in(model)
    found = from_owner(before, 3, digests, {MODEL: read_sample(weights) if weights else Sample(parts=1)})
    assert found is not None
    assert found.rank == 3
    assert words in found.text


def test_an_unchanged_folder_is_the_same_model(model: Path, tmp_path: Path) -> None:
    """Copied elsewhere, with other times, for other ranks and with a draft model."""
    before = identity_of(of(model))
    os.utime(model / "model.safetensors", (1, 1))
    moved = model.rename(tmp_path / "moved")
    assert identity_of(of(moved)).digest == before.digest
    assert identity_of(of(moved, draft_model=str(moved), speculation="model")).digest == before.digest
    assert identity_of(of(moved, seed=1)).digest != before.digest
    assert from_owner(before, 0, small_files(of(moved)), headers_of(of(moved))) is None
    own = {MODEL: read_sample(tables_in(moved), b"salt")}
    assert from_owner(before, 0, small_files(of(moved)), own) is None
    assert between_ranks(before, {0: own, 1: own}) is None


def test_a_changed_draft_model_is_named(model: Path, tmp_path: Path) -> None:
    draft = checkpoints.save(tmp_path / "draft", "llama")
    keys = of(model, draft_model=str(draft), speculation="model")
    before = identity_of(keys)
    own = {MODEL: read_sample(tables_in(model)), DRAFT: read_sample(tables_in(draft))}
    assert from_owner(before, 0, small_files(keys), own) is None
    tune(draft)
    own[DRAFT] = read_sample(tables_in(draft))
    found = from_owner(before, 0, small_files(keys), own)
    assert found is not None
    assert found.text == "draft model: model.safetensors: tensor model.norm.weight differs"
    checkpoints.edit_config(draft, rope_theta=5e5)
    found = from_owner(before, 0, small_files(keys), own)
    assert found is not None
    assert found.text == "draft model: config.json differs"


def test_a_rank_that_reports_no_samples_is_refused(model: Path) -> None:
    before, own = identity_of(of(model)), {MODEL: read_sample(tables_in(model))}
    for silent in ({}, headers_of(of(model))):
        found = between_ranks(before, {0: own, 1: silent})
        assert found is not None
        assert (found.rank, found.text) == (1, "it reported no samples of its weights")


def test_another_tokenizer_folder_is_covered(model: Path, tmp_path: Path) -> None:
    other = checkpoints.save(tmp_path / "other", "llama")
    keys = replace(of(model), model=ModelSection(path=str(model), tokenizer=str(other)))
    before = identity_of(keys)
    template(other)
    assert identity_of(keys).digest != before.digest
    found = from_owner(before, 0, small_files(keys), {})
    assert found is not None
    assert found.text.startswith("tokenizer: chat_template.jinja is not expected")


# per-rank files


def test_per_rank_files_of_other_weights_are_refused(model: Path) -> None:
    """Next to the checkpoint, or instead of it, on the owner's host and on a rank's."""
    config = from_folder(model)
    write_shards(open_checkpoint(model, config), [RankShard(config, 1, 0)], model)
    complete = identity_of(of(model))
    weights = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").unlink()
    alone = identity_of(of(model))
    assert alone.digest == complete.digest
    origin = complete.weights[MODEL].digest
    for owner in (complete, alone):
        assert from_owner(owner, 0, small_files(of(model)), {MODEL: Sample(origin=origin)}) is None
        found = from_owner(owner, 0, small_files(of(model)), {MODEL: Sample(origin="0" * 32)})
        assert found is not None
        assert found.text == "the origin of its per-rank file differs"
    (model / "model.safetensors").write_bytes(weights)
    tune(model)
    found = from_owner(identity_of(of(model)), 0, small_files(of(model)), {MODEL: Sample(origin=origin)})
    assert found is not None


# ranks


def case_samples(rank: Rank, folders: list[str], salt: str, per_node: int = 2) -> dict[str, Any]:
    """What a rank whose host has this folder reports: of its own share of the node."""
    with rank.connect(per_node) as communicator:
        built = build(deployment(folders[rank.rank], rank.size), communicator, CPU, salt=salt.encode())
    return {part: unbuild(sample) for part, sample in built.samples.items()}


def reported(answers: list[dict[str, Any]]) -> dict[int, dict[str, Sample]]:
    parts = ({part: from_json(Sample, sample) for part, sample in one.items()} for one in answers)
    return dict(enumerate(parts))


def test_ranks_on_one_node_read_each_place_once(ranks: Ranks, model: Path) -> None:
    samples = reported(ranks(2, "test_model_identity:case_samples", {"folders": [str(model)] * 2, "salt": "s"}))
    assert [(one[MODEL].part, one[MODEL].parts) for one in samples.values()] == [(0, 2), (1, 2)]
    tensors = sum(len(table.tensors) for table in tables_in(model))
    assert sum(len(one[MODEL].fixed) for one in samples.values()) == 8 * tensors
    assert between_ranks(identity_of(of(model)), samples) is None


def test_one_element_on_one_of_two_nodes_is_named(ranks: Ranks, model: Path, tmp_path: Path, run_seed: int) -> None:
    """Outside the fixed samples of an otherwise equal copy: the salted sample of the launch shows it, and the refusal
    names the rank and the tensor. The stored identity is that of the other copy."""
    copy = Path(shutil.copytree(model, tmp_path / "copy"))
    _, stored, at = unsampled(copy, random.Random(run_seed))
    flip(stored, at)
    assert identity_of(of(copy)).digest == identity_of(of(model)).digest
    args = {"folders": [str(model), str(copy)], "salt": "s", "per_node": 1}
    samples = reported(ranks(2, "test_model_identity:case_samples", args))
    found = between_ranks(identity_of(of(model)), samples)
    assert found is not None
    assert (found.rank, found.other) == (1, 0)
    assert found.text == f"model.safetensors: tensor {stored.name} differs"


def case_changed(rank: Rank, folder: str) -> str:
    """The file changes once a rank has read its samples."""
    load = vars(builder)["load_weights"]

    def changed(*args: Any) -> None:
        load(*args)
        os.utime(Path(folder) / "model.safetensors", ns=(1, 1))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "load_weights", changed)
        try:
            build(deployment(folder, 1), rank.communicator, CPU)
        except CheckpointError as error:
            return str(error)
    return ""


def test_a_file_that_changes_while_a_rank_loads_is_refused(ranks: Ranks, model: Path) -> None:
    (said,) = ranks(1, "test_model_identity:case_changed", {"folder": str(model)})
    assert "model.safetensors: changed while it was loaded" in said


def test_retained_weights_are_those_that_their_rank_read() -> None:
    """Of a folder that looks the same by size and time, but was read as another model: loaded, not mapped."""
    source: Any = SimpleNamespace(tensors={})
    alone: Any = SimpleNamespace(rank=0, pipeline=None, layout=SimpleNamespace(per_node=1))
    d = replace(deployment("nowhere", 1), daemon=DaemonConfig(standby=1))
    first: Any = held_weights(source, d.model, d.parallel, alone, -1, "a")
    first.seal([])
    for identity, filled in (("a", True), ("b", False)):
        taken: Any = held_weights(source, d.model, d.parallel, alone, os.dup(first.file), identity)
        assert taken.filled == filled


# text workers


def test_grammars_of_another_tokenizer_are_refused(model: Path) -> None:
    """A worker reads the tokenizer a second time, for its first grammar."""
    pytest.importorskip("llguidance")
    text = TextModel.from_folder(model)
    data = json.loads((model / "tokenizer.json").read_text())
    (model / "tokenizer.json").write_text(json.dumps(data | {"truncation": None}, indent=1))
    spec = json.dumps({"grammars": [{"lark_grammar": 'start: "a"'}]})
    assert "tokenizer.json changed since this process read it" in answer(text, {"grammar": spec}, 64)["error"]


def test_a_tokenizer_that_changes_while_it_is_read_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def changing(folder: Path, config: Any) -> dict[str, str]:
        (folder / "tokenizer_config.json").write_text("{}")
        return {}

    monkeypatch.setattr("laddertron.engine.text.tokenizer.template_sources", changing)
    with pytest.raises(TextError, match=r"tokenizer_config.json: changed while it was read"):
        TextModel.from_folder(model)


def test_identities_without_weights_compare_small_files(model: Path) -> None:
    """load_format dummy reads config.json alone."""
    keys = replace(of(model), model=ModelSection(path=str(model), load_format="dummy"))
    identity: ModelIdentity = identity_of(keys)
    assert identity.weights == {}
    assert between_ranks(identity, {0: {}, 1: {}}) is None
    checkpoints.edit_config(model, rope_theta=5e5)
    assert from_owner(identity, 0, small_files(keys), {}) is not None
