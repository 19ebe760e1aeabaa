"""`evaluate` and `scan` on small folders; what `check` says of weights that nobody has measured."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import checkpoints
import lane_checkpoints
import loaded_reference as reference
import pytest
import torch
from click.testing import CliRunner
from laddertron.engine.text.tokenizer import TextModel
from laddertron.models.config.model_config import from_folder, make_wiring
from laddertron.models.config.wiring import RECORD, missing_record
from laddertron.tools.train.commands.evaluate import command as evaluate
from laddertron.tools.train.commands.scan import command as scan
from torch.nn import functional

TEXT = "The rung of a ladder carries the climber.\n"


def loss_of(folder: Path, wiring: str | None = None, layers: list[int] | None = None) -> float:
    """By the reference, the whole text at once."""
    config = from_folder(folder)
    if wiring is not None:
        config = replace(config, wiring=make_wiring(wiring, config.num_layers, layers))
    text = TextModel.from_folder(folder)
    ids = torch.tensor([[*text.encode(TEXT.strip()), *text.eos_ids[:1]]])
    logits = reference.logits(reference.load(folder, config=config), ids[:, :-1])
    return float(functional.cross_entropy(logits[0], ids[0, 1:]))


def test_folders_stand_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss as the reference has it; an original agrees with itself; the table fits 80 columns; the record silences the
    warning."""
    (tmp_path / "text.txt").write_text(TEXT)
    one, two = (checkpoints.save(tmp_path / name, name) for name in ("llama", "ladder"))
    words = [str(one), str(two), "--text", str(tmp_path / "text.txt"), "--original", str(one)]
    result = CliRunner().invoke(evaluate, [*words, "--json"])
    assert result.exit_code == 0, result.output
    first, second = json.loads(result.stdout)
    assert (first["loss"], second["loss"]) == pytest.approx((loss_of(one), loss_of(two)), rel=1e-5)
    assert (first["agreement"], first["divergence"]) == (1.0, pytest.approx(0.0, abs=1e-6))
    assert second["divergence"] > 0.01
    assert second["perplexity"] == pytest.approx(math.exp(second["loss"]))
    assert "the weights were not evaluated" in (missing_record(two, from_folder(two)) or "")
    assert missing_record(one, from_folder(one)) is None
    with monkeypatch.context() as during:
        during.setattr("os.access", lambda path, mode: mode != os.W_OK or path != two)
        during.setattr("laddertron.tools.train.build.load_all", None)
        refused = CliRunner().invoke(evaluate, [*words, "--record"])
    assert (refused.exit_code, f"--record {two / RECORD}: cannot write there" in refused.stderr) == (2, True)
    table = CliRunner().invoke(evaluate, [*words, "--record"]).stdout
    assert max(map(len, table.splitlines())) <= 80
    assert missing_record(two, from_folder(two)) is None
    assert json.loads((two / RECORD).read_text())["original"] == "llama"


def test_other_tokenizers_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    one, two = (checkpoints.save(tmp_path / name, name) for name in ("llama", "ladder"))
    checkpoints.save_tokenizer(two, vocab=290)
    result = CliRunner().invoke(evaluate, [str(one), str(two), "--text", str(tmp_path / "text.txt")])
    assert (result.exit_code, "has another tokenizer than" in result.stderr) == (2, True)


def test_lanes_are_refused_and_need_no_record(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    folder = lane_checkpoints.save(tmp_path / "lanes")
    result = CliRunner().invoke(evaluate, [str(folder), "--text", str(tmp_path / "text.txt")])
    assert (result.exit_code, "a model of lanes: serve it" in result.stderr) == (2, True)
    assert missing_record(folder, from_folder(folder)) is None


def test_a_scan_ladders_each_layer_and_each_suffix(tmp_path: Path) -> None:
    """Against checkpoints that declare just these layers; the last suffix is ladder throughout."""
    (tmp_path / "text.txt").write_text(TEXT)
    folder = checkpoints.save(tmp_path / "m", "llama")
    result = CliRunner().invoke(scan, [str(folder), "--text", str(tmp_path / "text.txt"), "--json", "--most", "99"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["recommended"] == 3
    rows = found["rows"]
    assert [row["layer"] for row in rows] == [None, 2, 1, 0]
    for row in rows[1:]:
        assert row["alone_loss"] == pytest.approx(loss_of(folder, "hybrid", [row["layer"]]), rel=1e-5)
        assert row["suffix_loss"] == pytest.approx(loss_of(folder, "hybrid", list(range(row["layer"], 3))), rel=1e-5)
    assert rows[0]["suffix_loss"] == pytest.approx(loss_of(folder), rel=1e-5)
    drawn = tmp_path / "scan.svg"
    asked = [str(folder), "--text", str(tmp_path / "text.txt"), "--most", "99", "--plot", str(drawn)]
    table = CliRunner().invoke(scan, asked).stdout
    assert "<svg" in drawn.read_text()
    assert table.splitlines()[-1].startswith("recommended: ladder_layers: 3")
    wrong = [str(folder), "--text", str(tmp_path / "text.txt"), "--model", "llama-3.1-8b"]
    assert "llama-3.1-8b has 32 layers" in CliRunner().invoke(scan, wrong).stderr


def test_what_laddering_gains_is_planned(tmp_path: Path) -> None:
    """Speed-ups of the suffixes rise from 1."""
    from laddertron.tools.train.commands.scan import _speed_ups

    found = _speed_ups(tmp_path / "llama-3.1-8b", {"known": None, "nodes": "2x4xH100", "batch": 1}, 32)
    assert found[0] == 1.0
    assert found == sorted(found, key=lambda x: x or 0.0)
    assert (found[-1] or 0.0) > 1.05
