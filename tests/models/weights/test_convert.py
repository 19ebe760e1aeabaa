"""Checkpoint formats into one another: bit for bit there and back, refused where a format has no words, and computed by
transformers with the modeling file as the reference computes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import checkpoints
import loaded_reference as reference
import pytest
import torch
import transformers
from click.testing import CliRunner
from laddertron.launchers.cli.__main__ import group
from laddertron.models.config.dialects import DialectError
from laddertron.models.config.model_config import from_folder
from laddertron.models.weights import convert as converting
from laddertron.models.weights.checkpoint import CheckpointError
from laddertron.models.weights.convert import convert
from safetensors.torch import load_file
from torch import Tensor

STOCK = ("llama_tied", "llama_bias", "llama_llama3_rope", "llama_yarn_rope", "mistral", "qwen2_window", "qwen3")
EXPERTS = ("qwen3_moe_mixed", "mixtral", "glm4_moe")


def tensors(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def assert_same(one: Path, other: Path) -> None:
    ours, theirs = tensors(one), tensors(other)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) and ours[name].dtype == theirs[name].dtype for name in ours)


@pytest.mark.parametrize(
    ("recipe", "there", "back"),
    [
        *[(recipe, "laddertron", "hf") for recipe in (*STOCK, *EXPERTS)],
        ("llamaLadder_last", "laddertron", "llama-ladder"),
        ("llamaLadder_list", "laddertron", "llama-ladder"),
        ("hybrid", "llama-ladder", "laddertron"),
        ("delay2", "laddertron", "laddertron"),
        ("ladder", "ladder-residual", "laddertron"),
        ("ladder", "ladder-residual", "llama-ladder"),
    ],
)
def test_there_and_back_is_bitwise(recipe: str, there: str, back: str, tmp_path: Path) -> None:
    """Shards, an index and fused tensors in between: names, types, bits and wiring come back."""
    start = checkpoints.save(tmp_path / "start", recipe, dtype="bfloat16", max_shard_size="60KB")
    convert(start, tmp_path / "there", there)
    convert(tmp_path / "there", tmp_path / "end", back)
    assert_same(start, tmp_path / "end")
    assert from_folder(tmp_path / "end").wiring == from_folder(start).wiring
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (start / name).read_bytes() == (tmp_path / "end" / name).read_bytes()


def test_fused_tensors_come_back_bitwise(tmp_path: Path) -> None:
    """dolomite's layout taken apart and fused again; without the multipliers that other formats have no words for."""
    start = checkpoints.save(tmp_path / "start", "dolomite_bias", tokenizer=False)
    neutral = {"m_emb": None, "m_residual": None, "m_width": None}
    checkpoints.edit_config(start, **neutral)
    data = json.loads((start / "config.json").read_text())
    for mixer in data["sequence_mixer_blocks"]:
        mixer["attention_multiplier"] = None
    (start / "config.json").write_text(json.dumps(data))
    convert(start, tmp_path / "apart", "llama-ladder")
    assert "model.layers.0.self_attn.k_proj.bias" in tensors(tmp_path / "apart")
    convert(tmp_path / "apart", tmp_path / "end", "ladder-residual")
    assert_same(start, tmp_path / "end")


def test_large_models_are_written_in_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(converting, "FILE_BYTES", 40_000)
    start = checkpoints.save(tmp_path / "start", "ladder", tokenizer=False)
    convert(start, tmp_path / "many", "laddertron")
    assert len(list((tmp_path / "many").glob("model-*-of-*.safetensors"))) > 3
    assert_same(start, tmp_path / "many")
    assert torch.equal(reference.load(tmp_path / "many")(IDS), reference.load(start)(IDS))


IDS = torch.randint(6, checkpoints.VOCAB, (2, 40), generator=torch.Generator().manual_seed(3))
COMPUTED: list[Any] = [
    *[(recipe, "laddertron") for recipe in ("llama_llama3_rope", "qwen2_window", *EXPERTS)],
    *[
        (recipe, "laddertron")
        for recipe in ("ladder", "parallel", "hybrid", "delay2", "desync4_tp2", "moe_desync4_tp2")
    ],
    *[("llamaLadder_last", "llama-ladder"), ("hybrid_early", "llama-ladder"), ("dolomite_bias", "ladder-residual")],
]
MORE = [(recipe, "laddertron") for recipe in (*STOCK, *checkpoints.DECLARED, "moe_ladder")]
MORE += [("ladder", "ladder-residual"), ("dolomite", "ladder-residual")]
COMPUTED += [pytest.param(*case, marks=pytest.mark.slow) for case in MORE if case not in COMPUTED]


def remote(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> transformers.PreTrainedModel:
    """As lm-eval would load it; copies of the code go to a folder of the test's own."""
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "code"))
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=True).eval()


@pytest.mark.parametrize(("recipe", "dialect"), COMPUTED)
def test_transformers_computes_the_declared_wiring(
    recipe: str, dialect: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits within 1e-4 of the reference, to which the engine is held; greedy answers of a batch padded on the left,
    through the cache, as without either."""
    convert(checkpoints.save(tmp_path / "start", recipe, tokenizer=False), tmp_path / "m", dialect)
    theirs, ours = remote(tmp_path / "m", monkeypatch, tmp_path), reference.load(tmp_path / "start")
    with torch.inference_mode():
        torch.testing.assert_close(theirs(IDS).logits, reference.logits(ours, IDS), atol=1e-4, rtol=1e-4)
    prompts = checkpoints.prompts(3, longest=9)
    longest = max(map(len, prompts))
    padded = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    options = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    answers = theirs.generate(padded, attention_mask=mask, **options)[:, longest:]
    for prompt, tokens in zip(prompts, answers.tolist(), strict=True):
        known = reference.logits(ours, torch.tensor([prompt + tokens]))[0, len(prompt) - 1 : -1]
        assert known.argmax(-1).tolist() == tokens


def test_programs_that_do_not_know_the_wiring_are_stopped(tmp_path: Path) -> None:
    """Without trust_remote_code transformers refuses, in place of computing a plain Llama."""
    convert(checkpoints.save(tmp_path / "start", "ladder", tokenizer=False), tmp_path / "m", "laddertron")
    with pytest.raises(ValueError, match="trust_remote_code"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m", trust_remote_code=False)


@pytest.mark.parametrize(
    ("recipe", "dialect", "message"),
    [
        ("ladder", "hf", "a stock llama has no words for ladder wiring"),
        ("delay2", "llama-ladder", "llamaLadder has no words for delay-2 wiring"),
        ("qwen3", "llama-ladder", "llamaLadder is a Llama, this is qwen3"),
        ("hybrid", "ladder-residual", "no words for hybrid wiring"),
        ("dolomite", "laddertron", "m_residual, m_emb, m_width, attention_multiplier of this ladder_residual model"),
    ],
)
def test_what_a_format_cannot_say_is_refused(recipe: str, dialect: str, message: str, tmp_path: Path) -> None:
    start = checkpoints.save(tmp_path / "start", recipe, tokenizer=False)
    with pytest.raises(DialectError, match=message):
        convert(start, tmp_path / "m", dialect)
    assert not (tmp_path / "m").exists()


def test_a_folder_that_contradicts_itself_is_refused(tmp_path: Path) -> None:
    """The modeling file's description and the keys that everyone else reads must say one model."""
    convert(checkpoints.save(tmp_path / "start", "ladder", tokenizer=False), tmp_path / "m", "laddertron")
    checkpoints.edit_config(tmp_path / "m", laddertron_wiring={"kind": "standard"})
    with pytest.raises(ValueError, match="by which the modeling file computes, describes another model"):
        from_folder(tmp_path / "m")


def test_the_command_says_what_it_wrote_and_overwrites_nothing(tmp_path: Path) -> None:
    start = checkpoints.save(tmp_path / "start", "ladder", tokenizer=False)
    words = [str(start), str(tmp_path / "m"), "--format", "laddertron"]
    result = CliRunner().invoke(group, ["convert", *words])
    assert result.exit_code == 0, result.output
    assert "laddertron, ladder wiring" in result.stdout
    result = CliRunner().invoke(group, ["convert", *words])
    assert (result.exit_code, "is there already" in result.stderr) == (2, True)
    with pytest.raises(CheckpointError, match="is there already"):
        convert(start, tmp_path / "m", "hf")
