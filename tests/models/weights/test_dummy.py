"""Dummy weights: every family and layout from config.json alone, one model whatever the ranks, never mixed with real
ones, never served unasked."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import checkpoints
import lane_checkpoints
import pytest
import torch
import yaml
from engine_cases import CPU, build_on, deployment, forward_all
from laddertron.engine.config.schema import DaemonConfig
from laddertron.engine.run.past import model_digest
from laddertron.engine.step.build import build
from laddertron.launchers.cli.__main__ import main
from laddertron.models.config.model_config import from_folder
from laddertron.models.pages import HeldPages
from laddertron.models.stages import RankShard
from laddertron.models.weights.checkpoint import CheckpointError
from laddertron.models.weights.mapping import open_source
from rank_pool import Rank
from weights_cases import loaded

Ranks = Callable[..., list[Any]]
DUMMY = {"load_format": "dummy"}
FAMILIES = (
    *("llama_tied", "llama_bias", "mistral", "qwen2", "qwen3", "qwen3_moe_mixed", "mixtral", "glm4_moe", "deepseek_v3"),
    *("parallel", "hybrid", "delay2", "llamaLadder_list", "dolomite_bias", "lanes", "lanes_concatenated"),
)


@pytest.fixture(scope="module")
def config_only(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A folder that holds a family's config.json, and nothing else."""

    @cache
    def make(recipe: str) -> Path:
        folder = tmp_path_factory.mktemp("m") / recipe
        if recipe.startswith("lanes"):
            lane_checkpoints.save(folder, head="lane" if recipe == "lanes_concatenated" else "replicate")
        else:
            checkpoints.save(folder, recipe)
        for file in folder.iterdir():
            if file.name != "config.json":
                file.unlink()
        return folder

    return make


def written(tmp_path: Path, folder: Path, **model: Any) -> str:
    file = tmp_path / "deploy.yaml"
    file.write_text(yaml.safe_dump({"model": {"path": str(folder), **DUMMY, **model}, "engine": {"device": "cpu"}}))
    return str(file)


def case_logits(rank: Rank, folder: str, parallel: dict[str, Any]) -> dict[str, Any]:
    d = deployment(folder, rank.size, DUMMY)
    built = build_on(rank, replace(d, parallel=replace(d.parallel, **parallel)))
    mine = forward_all(built, [[5, 9, 30, 41, 7, 12], [2]])
    vocab = built.runner.model.shard.vocab
    return {"first": vocab.start, "logits": mine.float().tolist()}


def logits(said: list[dict[str, Any]], vocab: int) -> torch.Tensor:
    parts = [torch.tensor(one["logits"]) for one in sorted(said, key=lambda one: one["first"])]
    return torch.cat(parts, 1)[:, :vocab]


@pytest.mark.parametrize("recipe", FAMILIES)
def test_every_family_is_one_model_at_tp_1_and_2(ranks: Ranks, config_only: Callable[[str], Path], recipe: str) -> None:
    folder = config_only(recipe)
    vocab = from_folder(folder).vocab_size
    whole, halves = (
        logits(ranks(size, "test_dummy:case_logits", {"folder": str(folder), "parallel": {}}), vocab) for size in (1, 2)
    )
    assert 0.1 < whole.std() < 100, "finite, and no degenerate model"
    assert len(set(whole.argmax(1).tolist())) > 1
    torch.testing.assert_close(halves, whole, rtol=1e-3, atol=1e-3)


def test_experts_have_the_same_weights_in_every_layout(ranks: Ranks, config_only: Callable[[str], Path]) -> None:
    folder, found = config_only("qwen3_moe_mixed"), []
    for layout in ("tensor", "spread"):
        args = {"folder": str(folder), "parallel": {"expert_layout": layout}}
        found.append(logits(ranks(2, "test_dummy:case_logits", args), checkpoints.VOCAB))
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)


def test_the_seed_decides_on_the_weights(config_only: Callable[[str], Path]) -> None:
    """The same seed twice is the same; another one, another tensor or another row is not."""
    folder = config_only("llama_bias")
    shard = RankShard(from_folder(folder), 1, 0)
    first, same, other = (loaded(open_source(folder, shard, seed=seed), shard) for seed in (3, 3, 4))
    for name, values in first.items():
        assert torch.equal(values, same[name])
        assert torch.equal(values, other[name]) == (values.ndim == 1), name
    gate = first["layers.0.gate_up.weight"]
    assert not torch.equal(gate, first["layers.1.gate_up.weight"])
    assert len({tuple(row.tolist()) for row in gate}) == len(gate)
    assert first["layers.0.qkv.bias"].abs().max() == 0
    assert first["norm.weight"].min() == 1 == first["norm.weight"].max()
    assert abs(gate.std() * checkpoints.HIDDEN**0.5 - 1) < 0.05


def case_mixed(rank: Rank, folder: str) -> dict[str, Any]:
    """A launch that stands by beside dummy weights, and becomes one of the checkpoint's."""
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    dummy, found = replace(deployment(folder, 1, DUMMY), daemon=DaemonConfig(standby=1)), []
    real = replace(dummy, model=replace(dummy.model, load_format="auto"))
    other = replace(dummy, engine=replace(dummy.engine, seed=1))
    held = build(dummy, rank.communicator, CPU)
    for d in (dummy, real, other):
        taken = build(d, rank.communicator, CPU, weights_file=os.dup(held.weights_file))
        pages = taken.runner.model.ops.pages
        found.append(isinstance(pages, HeldPages) and pages.filled)
    return {"taken_over": found, "held": held.weights_file >= 0}


def test_a_standby_takes_over_the_weights_of_its_own_format_alone(ranks: Ranks, tmp_path: Path) -> None:
    said = ranks(1, "test_dummy:case_mixed", {"folder": str(checkpoints.save(tmp_path / "m"))})[0]
    if not said["held"]:
        pytest.skip("no C kernels: packed weights are not retained")
    assert said["taken_over"] == [True, False, False]


def test_a_reload_or_resumed_run_sees_another_model(tmp_path: Path) -> None:
    folder = str(checkpoints.save(tmp_path / "m"))
    assert model_digest(deployment(folder, 1)) != model_digest(deployment(folder, 1, DUMMY))


Said = pytest.CaptureFixture[str]


def test_config_json_alone_passes_check(tmp_path: Path, config_only: Callable[[str], Path], capsys: Said) -> None:
    assert main(["check", written(tmp_path, config_only("glm4_moe"))]) == 0
    said = capsys.readouterr()
    assert ": OK: glm4_moe, tp 1" in said.out
    assert "weights are random, answers mean nothing" in said.err


@pytest.mark.parametrize("command", ["serve", "run"])
def test_answers_are_refused_unless_allowed(
    tmp_path: Path, config_only: Callable[[str], Path], command: str, capsys: Said
) -> None:
    """Allowed, the next fault is the missing tokenizer: the refusal is gone."""
    words = [command, *(["-i", "in.jsonl", "-o", "out.jsonl"] if command == "run" else [])]
    folder = config_only("qwen2")
    capsys.readouterr()
    for allowed, key, text in (
        (False, "model.load_format", "set model.allow_dummy: true"),
        (True, "model.path", "tokenizer.json"),
    ):
        assert main([*words, written(tmp_path, folder, allow_dummy=allowed)]) == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert f": {key}: " in line
        assert text in line


def test_what_cannot_be_drawn_is_one_line(tmp_path: Path, config_only: Callable[[str], Path], capsys: Said) -> None:
    fields = json.loads((config_only("llama_bias") / "config.json").read_text())
    (tmp_path / "m").mkdir()
    capsys.readouterr()
    for change, text in (
        ({"model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"]}, "qwen3_next"),
        ({"quantization_config": {"quant_method": "fp8"}}, "remove quantization_config"),
    ):
        (tmp_path / "m" / "config.json").write_text(json.dumps(fields | change))
        assert main(["check", written(tmp_path, tmp_path / "m")]) == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert ": model.path: " in line
        assert text in line
    blocks = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "m" / "config.json").write_text(json.dumps(fields | {"quantization_config": blocks}))
    shard = RankShard(from_folder(tmp_path / "m"), 1, 0)
    assert loaded(open_source(tmp_path / "m", shard, seed=0), shard), "those are widened while loading"
    with pytest.raises(CheckpointError, match="safetensors"):
        open_source(tmp_path / "m", shard)
