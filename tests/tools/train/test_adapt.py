"""Adapting: losses, states, data; the command from folder to folder."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import checkpoints
import loaded_reference as reference
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from laddertron.engine.text.tokenizer import TextModel
from laddertron.models.config.model_config import from_folder, make_wiring
from laddertron.models.config.wiring import RECORD
from laddertron.models.weights.checkpoint import CheckpointError
from laddertron.tools.train import state
from laddertron.tools.train.adapt import adapt, write
from laddertron.tools.train.build import build, load
from laddertron.tools.train.commands.adapt import command
from laddertron.tools.train.fit import Saving, Settings
from laddertron.tools.train.loss import Distil, divergence, held_out
from laddertron.tools.train.tokens import UNTAUGHT, Batches, read_tokens, write_tokens
from laddertron.tools.train.training_text import TrainingTextError, pieces
from safetensors.torch import load_file, save

SHORT = Settings(tokens=50 * 4 * 16, batch=4, context=16, learning_rate=3e-3, save_dtype="float32")
FEW = replace(SHORT, tokens=5 * 2 * 8, batch=2, context=8)
IDS = np.random.default_rng(5).integers(6, 60, 2000).astype(np.uint32)


def run(folder: Path, wiring: str, settings: Settings, saving: Saving | None = None, held: int = 200) -> dict[str, Any]:
    losses: list[float] = []
    found = adapt(
        folder, make_wiring(wiring, checkpoints.LAYERS), settings, IDS, IDS[:held], saving=saving,
        on_step=lambda progress: losses.append(progress.loss),
    )  # fmt: skip
    return {"losses": losses, "after": found.trained.loss, "before": found.untrained.loss}


def test_a_wiring_is_learned(tmp_path: Path) -> None:
    """50 steps with distillation: the held-out loss falls. In micro-batches the losses are the same within 1e-4."""
    folder = checkpoints.save(tmp_path / "m", "llama")
    settings = replace(SHORT, distil=Distil(0.5, 2.0, 20))
    whole, cut = (run(folder, "ladder", replace(settings, micro_batch=size)) for size in (0, 1))
    assert whole["after"] < whole["before"] - 0.5
    assert cut["losses"] == pytest.approx(whole["losses"], rel=1e-4)


def test_a_mixture_is_adapted(tmp_path: Path) -> None:
    """To ladder, with more experts than a step's rows choose."""
    found = run(checkpoints.save(tmp_path / "m", "qwen3_moe", num_local_experts=16), "ladder", FEW, held=17)
    assert found["after"] < found["before"]


def test_an_adapted_mixture_is_read_again(tmp_path: Path) -> None:
    """Its wiring and its experts; rounded to bfloat16 but for a router's biases, which decide between near scores."""
    folder, out = checkpoints.save(tmp_path / "m", "glm4_moe"), tmp_path / "out"
    adapt(
        folder, make_wiring("ladder", checkpoints.LAYERS), replace(FEW, save_dtype="bfloat16"), IDS, IDS[:40],
        on_model=lambda model: write(out, folder, model, "bfloat16"),
    )  # fmt: skip
    read = from_folder(out)
    assert (read.wiring.name, read.experts) == ("ladder", from_folder(folder).experts)
    stored, before = load_file(out / "model.safetensors"), load_file(folder / "model.safetensors")
    biases = {name for name in before if name.endswith("e_score_correction_bias")}
    assert len(biases) == 2
    assert {tensor.dtype for name, tensor in stored.items() if name not in biases} == {torch.bfloat16}
    assert all(torch.equal(stored[name], before[name]) for name in biases)


def test_latent_attention_is_refused_before_training(tmp_path: Path) -> None:
    for recipe in ("deepseek_v3", "longcat_flash"):
        folder = checkpoints.save(tmp_path / recipe, recipe, tokenizer=False)
        with pytest.raises(ValueError, match="latent attention has no words in the format that is written"):
            adapt(folder, make_wiring("ladder", 3), SHORT, IDS, IDS[:200])


class _Stop(Exception):
    pass


def test_resuming_is_bitwise_and_refuses_another_run(tmp_path: Path) -> None:
    folder = checkpoints.save(tmp_path / "m", "llama")
    whole = run(folder, "delay-2", SHORT)
    losses: list[float] = []

    def note(progress: Any) -> None:
        losses.append(progress.loss)
        if len(losses) == 27:
            raise _Stop

    saving = Saving(tmp_path / "s", 5, True, {"text": "random"})
    with pytest.raises(_Stop):
        adapt(folder, make_wiring("delay-2", 3), SHORT, IDS, IDS[:200], saving=saving, on_step=note)
    assert sorted(path.name for path in (tmp_path / "s").iterdir()) == ["step-00000020", "step-00000025"]
    again = run(folder, "delay-2", SHORT, saving)
    assert losses[:25] + again["losses"] == whole["losses"]
    assert again["after"] == whole["after"]
    with pytest.raises(CheckpointError, match=r"was written with settings=.* go on as it was"):
        run(folder, "delay-2", replace(SHORT, seed=1), saving)
    newest = state.newest(tmp_path / "s")
    assert newest is not None
    (newest / "state.safetensors").write_bytes(save({}))
    with pytest.raises(CheckpointError, match=r"model.embed_tokens.weight is missing: take an older state"):
        run(folder, "delay-2", SHORT, saving)


@pytest.mark.parametrize(
    ("recipe", "wiring"),
    [
        *[("llama", "parallel"), ("llama", "desync-1"), ("dolomite_bias", "standard")],
        *[("glm4_moe", "parallel"), ("mixtral", "standard")],
    ],
)
def test_weights_are_carried_over(recipe: str, wiring: str, tmp_path: Path) -> None:
    """A parallel layer of a sequential one's weights reads the same normed inputs (both norms moved into products): it
    computes what the old weights do with its lags. Other layouts are read by rows."""
    folder = checkpoints.save(tmp_path / "m", recipe, tokenizer=False)
    tp = 2 if wiring == "desync-1" else None
    wired = make_wiring(wiring, 3, tensor_parallel_size=tp)
    model = build(replace(from_folder(folder), wiring=wired, layout="huggingface"))
    load(model, folder)
    standard = make_wiring("standard", 3)
    expected = reference.load(folder, config=replace(from_folder(folder), wiring=standard))
    if wiring == "parallel":
        expected.copies = 2
        for layer in expected.model.layers:
            layer.lags = (0, 1)  # type: ignore[assignment]
    ids = torch.from_numpy(IDS[None, :40].astype(np.int64))
    torch.testing.assert_close(model(ids), expected(ids), atol=1e-4, rtol=1e-4)


def test_distillation_against_its_definition() -> None:
    """KL(p | q) of softened distributions; of the top k, over those tokens alone; nothing where nothing is taught."""
    torch.manual_seed(0)
    ours, theirs = torch.randn(2, 3, 7), torch.randn(2, 3, 7)
    taught = torch.tensor([[True, False, True], [True, True, True]])
    p, q = (x.div(2.0).softmax(-1) for x in (theirs, ours))
    expected = ((p * (p / q).log()).sum(-1) * taught).sum() * 4
    torch.testing.assert_close(divergence(ours, theirs, taught, Distil(1.0, 2.0)), expected)
    assert float(divergence(theirs, theirs, taught, Distil(1.0, 2.0, 3))) == pytest.approx(0.0, abs=1e-6)
    assert float(divergence(ours, theirs, taught, Distil(1.0, 2.0, 3))) != pytest.approx(float(expected))


def test_answers_alone_are_taught(tmp_path: Path) -> None:
    """A conversation through the template: the ids are the whole, taught are the assistant's words and their end."""
    text = TextModel.from_folder(checkpoints.save(tmp_path, "llama"))
    talk = [
        {"role": r, "content": c}
        for r, c in (("user", "a rung?"), ("assistant", "yes"), ("user", "b"), ("assistant", "no"))
    ]
    file = tmp_path / "talk.jsonl"
    file.write_text(json.dumps({"messages": talk}) + "\n" + json.dumps({"text": "plain"}) + "\n")
    (ids, taught), (plain, whole) = pieces(text, [file])
    assert taught is not None
    said = text.decode([i for i, t in zip(ids, taught, strict=True) if t], skip_special=False)
    assert said == "yes<|end|>no<|end|>"
    assert (whole, text.decode(plain)) == (None, "plain")
    count = write_tokens(tmp_path / "t", pieces(text, [file]))
    read = read_tokens(tmp_path / "t")
    assert len(read) == count == len(ids) + len(plain)
    assert [bool(i & UNTAUGHT) for i in read[: len(ids)]] == [not t for t in taught]


@pytest.mark.parametrize(
    ("line", "message"),
    [("{", "line 1: is not JSON"), ('{"txt": "x"}', "needs `text`, a string, or `messages`"), ("\xff", "is not UTF-8")],
)
def test_what_is_not_training_text_is_refused(line: str, message: str, tmp_path: Path) -> None:
    text = TextModel.from_folder(checkpoints.save(tmp_path, "llama"))
    (tmp_path / "x.jsonl").write_bytes(line.encode("latin-1"))
    with pytest.raises(TrainingTextError, match=message):
        list(pieces(text, [tmp_path / "x.jsonl"]))


def test_batches_depend_on_the_step_alone() -> None:
    """An epoch sees each piece once; too little text is refused."""
    batches = Batches(np.arange(1000, dtype=np.uint32), 4, 16, 3)
    assert torch.equal(batches.rows(7)[0], batches.rows(7)[0])
    firsts = torch.cat([batches.rows(step)[0][:, 0] for step in range(batches.per_epoch)])
    assert len(set(firsts.tolist())) == len(firsts)
    with pytest.raises(ValueError, match="the text has 60 tokens, a step needs 81"):
        Batches(np.arange(60, dtype=np.uint32), 4, 16, 0)


def test_held_out_counts_what_is_taught() -> None:
    """Untaught tokens are read and not counted; a model agrees with itself."""
    model = build(from_folder(Path(__file__).parents[3] / "configs" / "demo" / "demo-ladder"))
    load(model, Path(__file__).parents[3] / "configs" / "demo" / "demo-ladder")
    marked = IDS[:100].copy()
    marked[50:] |= np.uint32(UNTAUGHT)
    half = held_out(model, marked, 128, original=model)
    assert half.tokens == 49
    assert half.loss == pytest.approx(held_out(model, IDS[:50], 128).loss, rel=1e-5)
    assert half.agreement == 1.0
    assert half.divergence == pytest.approx(0.0, abs=1e-6)


@pytest.mark.slow  # resuming bit for bit is asserted above, in one process
def test_a_killed_command_goes_on_to_the_same_weights(tmp_path: Path) -> None:
    """SIGKILL once a state is there: --resume loses at most --save-every steps, and nothing of the result."""
    folder = checkpoints.save(tmp_path / "m", "llama")
    text = tmp_path / "text.txt"
    text.write_text("".join(f"Rung {i} bears the next.\n\n" * 9 for i in range(60)))
    program = [sys.executable, "-m", "laddertron.launchers.cli", "adapt", str(folder), "--text", str(text)]
    program += ["--tokens", "6400", "--batch", "2", "--context", "16", "--save-every", "7", "--threads", "1"]
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    with subprocess.Popen([*program, "-o", str(killed)], stderr=subprocess.PIPE) as process:
        try:
            while state.newest(killed / "training") is None:
                assert process.poll() is None, process.communicate()[1].decode()
        finally:
            process.kill()
    assert process.returncode == -signal.SIGKILL
    reached = state.newest(killed / "training")
    assert reached is not None
    assert not (killed / "config.json").exists()
    for out, more in ((killed, ["--resume"]), (whole, [])):
        done = subprocess.run([*program, "-o", str(out), *more], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
    assert (killed / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_the_command_adapts_a_folder(tmp_path: Path) -> None:
    """From a stock folder to one that declares its wiring, with card and record."""
    folder = checkpoints.save(tmp_path / "m", "llama")
    (tmp_path / "text.txt").write_text(
        "".join(f"The rung {i} of a ladder carries the climber.\n\n" * 9 for i in range(60))
    )
    words = ["--text", str(tmp_path / "text.txt"), "--held-out", str(tmp_path / "text.txt"), "--held-out-tokens", "300"]
    words += ["--tokens", "640", "--batch", "2", "--context", "16", "--save-every", "5", "--threads", "1"]
    out = tmp_path / "out"
    result = CliRunner().invoke(
        command, [str(folder), "-o", str(out), "--ladder-layers", "2", "--distil", "0.5", *words]
    )
    assert result.exit_code == 0, result.output
    read = from_folder(out)
    assert (read.wiring.kinds, read.declares_wiring) == (("standard", "ladder", "ladder"), True)
    assert json.loads((out / "config.json").read_text())["model_type"] == "laddertron"
    assert "hybrid, untrained" in (out / "README.md").read_text()
    assert json.loads((out / RECORD).read_text())["original"] == "m"
    assert not (out / "training").exists()
    result = CliRunner().invoke(command, [str(folder), "-o", str(out), *words])
    assert (result.exit_code, "already contains a model" in result.stderr) == (2, True)
