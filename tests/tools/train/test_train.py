"""The corpus, the training loop and `laddertron train`, on a standard library of a few made-up modules."""

from __future__ import annotations

import json
import math
from pathlib import Path
from unittest.mock import Mock

import jinja2
import loaded_reference as reference
import numpy as np
import pytest
import torch
import transformers
from click.testing import CliRunner
from laddertron.launchers.cli.__main__ import group
from laddertron.models.config.model_config import ModelConfig, Rope, from_folder, make_wiring
from laddertron.models.reference import Reference
from laddertron.tools.train import build, corpus, fit, loss, train
from laddertron.tools.train.corpus import Document
from laddertron.tools.train.training_text import TrainingTextError
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

NOUNS = ("rung", "rail", "step", "hook", "foot", "brace", "bolt", "hinge", "strut", "nail", "plank", "rope")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve modules with a class and a method each; one that does not parse, one in a skipped folder, and one that
    would end the process if it were imported."""
    root = tmp_path_factory.mktemp("library")
    for noun in NOUNS:
        lines = [
            f'"""Everything about the {noun} of a ladder.\n\nA {noun} carries the weight of the climber."""',
            "raise SystemExit('parsed sources must not run')",
            f"class {noun.title()}:\n    '''Return the {noun} that carries the weight.'''",
            f"    def climb(self, height, *, slowly=True):\n        '''Climb the {noun} up to the given height.'''",
        ]
        (root / f"{noun}.py").write_text("\n".join(lines))
    (root / "broken.py").write_text("def (:")
    (root / "test").mkdir()
    (root / "test" / "skipped.py").write_text('"""Never learned from."""')
    (root / "package").mkdir()
    (root / "package" / "__init__.py").write_text('"""A package of ladders."""')
    return root


@pytest.fixture(scope="module")
def documents(library: Path) -> list[Document]:
    return corpus.python_documentation(library)


@pytest.fixture(scope="module")
def tokenizer(documents: list[Document]) -> Tokenizer:
    return corpus.train_tokenizer(documents, 300)


@pytest.fixture(scope="module")
def own_library() -> list[Document]:
    return corpus.python_documentation()


def config(kind: str = "ladder", tied: bool = True) -> ModelConfig:
    every, tp, ladder = (3, 2, None) if kind == "desync" else (0, None, [1] if kind == "hybrid" else None)
    return ModelConfig(
        "llama", 2, 32, 4, 2, 8, 48, 300, 64, 1e-5, Rope(), make_wiring(kind, 2, ladder, every, tp), "float32", tied
    )


SHORT = fit.Settings(tokens=30 * 2 * 32, batch=2, context=32, learning_rate=1e-2)


def test_documentation_is_parsed_in_order_and_never_run(documents: list[Document], library: Path) -> None:
    """Names and signatures become titles; skipped folders and sources that do not parse are left out."""
    plain = [document.renderings[0] for document in documents]
    assert plain[0] == ("<|bos|>module bolt\nEverything about the bolt of a ladder.<|eos|>")
    assert any(text.startswith("<|bos|>class rung.Rung\nReturn the rung") for text in plain)
    assert any(text.startswith("<|bos|>rung.Rung.climb(height, slowly)\nClimb") for text in plain)
    assert any(text.startswith("<|bos|>module package\n") for text in plain)
    assert not any("Never learned" in text for text in plain)
    chats = [document.renderings[1] for document in documents if len(document.renderings) > 1]
    assert any(text.startswith("<|bos|><|user|>What ") and text.endswith("<|end|>") for text in chats)
    again = corpus.python_documentation(library)
    assert corpus.digest(again) == corpus.digest(documents)
    assert corpus.digest(again[1:]) != corpus.digest(documents)


@pytest.mark.slow
def test_this_pythons_own_library_is_a_corpus(own_library: list[Document]) -> None:
    """Thousands of texts, each once, about one in twenty held out; nothing of it is imported."""
    bodies = [document.renderings[0].split("\n", 1)[1] for document in own_library]
    assert len(bodies) == len(set(bodies)) > 3000
    assert 0.03 < sum(document.held_out for document in own_library) / len(own_library) < 0.07


def test_what_is_held_out_is_in_no_rendering_trained_on(documents: list[Document], tokenizer: Tokenizer) -> None:
    split = [Document(("<|bos|>a b c<|eos|>", "<|bos|>chat a<|end|>"), True), Document(("<|bos|>d e<|eos|>",), False)]
    kept = tokenizer.decode(train.encode(tokenizer, split, False).tolist(), skip_special_tokens=False)
    held = tokenizer.decode(train.encode(tokenizer, split, True).tolist(), skip_special_tokens=False)
    assert (kept, held) == ("<|bos|>d e<|eos|>", "<|bos|>a b c<|eos|><|bos|>chat a<|end|>")


def test_text_files_are_cut_at_paragraphs(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo\n\n" + "x" * 2000)
    (tmp_path / "b.md").write_text("three")
    (tmp_path / "c.bin").write_bytes(b"\xff")
    texts = [document.renderings[0] for document in corpus.text_files([tmp_path])]
    assert texts == ["<|bos|>one\n\ntwo<|eos|>", "<|bos|>" + "x" * 2000 + "<|eos|>", "<|bos|>three<|eos|>"]
    with pytest.raises(TrainingTextError, match="nothing"):
        corpus.text_files([tmp_path / "nothing"])


def test_json_lines_are_texts_with_their_special_tokens(tmp_path: Path) -> None:
    lines = tmp_path / "lines.jsonl"
    lines.write_text(json.dumps({"text": "<|bos|>plain<|eos|>"}) + "\n")
    assert [document.renderings[0] for document in corpus.text_files([lines])] == ["<|bos|>plain<|eos|>"]
    lines.write_text(json.dumps({"messages": [{"role": "user", "content": "What is a rung?"}]}) + "\n")
    with pytest.raises(TrainingTextError, match="line 1"):
        corpus.text_files([lines])


def test_the_tokenizer_has_the_size_asked_for_or_says_what_it_can_have(documents: list[Document]) -> None:
    with pytest.raises(ValueError, match=r"the corpus yields \d+ tokens, not 50000: use vocab_size="):
        corpus.train_tokenizer(documents, 50000)


def test_the_tokenizer_loses_no_byte(tokenizer: Tokenizer) -> None:
    text = "Zürich\t\n  λ 🪜 def f(x):\r\n"
    encoding = tokenizer.encode(text)
    assert encoding.ids[0] == tokenizer.token_to_id("<|bos|>")
    assert tokenizer.decode(encoding.ids) == text


def test_learning_rate_warms_up_and_falls_to_a_tenth() -> None:
    settings = fit.Settings(tokens=100 * 1024, warmup=0.1, learning_rate=1.0)
    rates = [fit.learning_rate(settings, step) for step in range(settings.steps)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert rates[-1] == pytest.approx(0.1, abs=0.01)


def test_perplexity_of_knowing_nothing_is_the_vocabulary() -> None:
    model = Reference(config())
    torch.nn.init.zeros_(model.model.embed_tokens.weight)
    assert loss.held_out(model, np.arange(100, dtype=np.uint32), 32).perplexity == pytest.approx(300)


def test_perplexity_counts_each_token_once(documents: list[Document], tokenizer: Tokenizer) -> None:
    """In pieces that do not overlap, whatever their length, it is the mean over all tokens but the first."""
    model = Reference(config())
    build.initialise(model, 1)
    encoded = train.encode(tokenizer, documents, False)[:70]
    ids = torch.from_numpy(encoded.astype("int64"))
    pieces = [ids[0:33], ids[32:65], ids[64:70]]
    losses = [-model(p[None, :-1]).log_softmax(-1)[0].gather(1, p[1:, None]).sum().item() for p in pieces]
    assert loss.held_out(model, encoded, 32).perplexity == pytest.approx(math.exp(sum(losses) / 69), rel=1e-5)


@pytest.mark.parametrize(
    "kind",
    [
        "standard",
        "hybrid",
        *(pytest.param(k, marks=pytest.mark.slow) for k in ("parallel", "ladder", "desync", "delay-2")),
    ],
)
def test_every_wiring_learns_and_is_saved_with_its_name(
    kind: str, documents: list[Document], tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """30 steps halve the perplexity of guessing and more; the folder says the wiring and computes the same again."""
    steps: list[fit.TrainProgress] = []
    trained = train.train(config(kind), SHORT, tokenizer, documents, steps.append)
    assert [progress.step for progress in steps] == list(range(1, 31))
    assert steps[-1].loss < steps[0].loss - 1
    assert trained.held_out_perplexity < 150
    train.save(tmp_path, trained, SHORT, tokenizer, {"corpus": "made up"})
    read = from_folder(tmp_path)
    assert (read.wiring, read.declares_wiring, read.dtype) == (config(kind).wiring, True, "bfloat16")
    assert read.eos_token_ids == tuple(tokenizer.token_to_id(token) for token in ("<|eos|>", "<|end|>"))
    ids = train.encode(tokenizer, documents, True)
    again = loss.held_out(reference.load(tmp_path, torch.float32), ids, 32).perplexity
    assert again == pytest.approx(trained.held_out_perplexity, rel=1e-6)
    assert json.loads((tmp_path / "training.json").read_text())["held_out_tokens"] == len(ids)


def test_the_same_seed_gives_the_same_weights(documents: list[Document], tokenizer: Tokenizer) -> None:
    """And another seed others; two wirings of one seed start from the same numbers."""
    settings = fit.Settings(tokens=3 * 64, batch=2, context=32)
    one, two = (train.train(config(), settings, tokenizer, documents).model.state_dict() for _ in range(2))
    assert all(torch.equal(one[name], two[name]) for name in one)
    other = fit.Settings(tokens=3 * 64, batch=2, context=32, seed=1)
    three = train.train(config(), other, tokenizer, documents).model.state_dict()
    assert not torch.equal(one["model.embed_tokens.weight"], three["model.embed_tokens.weight"])
    first, second = Reference(config("ladder")), Reference(config("standard"))
    build.initialise(first, 5)
    build.initialise(second, 5)
    assert all(torch.equal(first.state_dict()[name], tensor) for name, tensor in second.state_dict().items())


def test_a_standard_folder_is_a_stock_llama(documents: list[Document], tokenizer: Tokenizer, tmp_path: Path) -> None:
    """transformers loads model, tokenizer and chat template, and computes the same logits."""
    trained = train.train(config("standard", tied=False), SHORT, tokenizer, documents)
    train.save(tmp_path, trained, SHORT, tokenizer, {})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    words = transformers.AutoTokenizer.from_pretrained(tmp_path)
    talk = [{"role": "user", "content": "What is a rung?"}]
    text = words.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    assert text == "<|bos|><|user|>What is a rung?<|end|><|assistant|>"
    with pytest.raises(jinja2.exceptions.TemplateError, match="role must be system, user or assistant, not tool"):
        words.apply_chat_template([{"role": "tool", "content": "x"}], tokenize=False)
    ids = torch.tensor([words(text, add_special_tokens=False)["input_ids"]])
    with torch.inference_mode():
        expected = theirs(ids, use_cache=False).logits
    torch.testing.assert_close(reference.logits(trained.model, ids), expected, atol=1e-4, rtol=1e-4)


def test_too_little_text_is_refused_with_the_arithmetic(documents: list[Document], tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match=r"the text has \d+ tokens, a step needs 20481"):
        train.train(config(), fit.Settings(tokens=1, batch=4, context=4096), tokenizer, documents)
    with pytest.raises(ValueError, match="too short to hold any of it out"):
        train.train(config(), SHORT, tokenizer, [document for document in documents if not document.held_out])


def test_a_lost_loss_ends_the_run(documents: list[Document], tokenizer: Tokenizer) -> None:
    """A learning rate beyond reason ends in an error that says so, not in a checkpoint of NaN."""
    absurd = fit.Settings(tokens=SHORT.tokens, batch=2, context=32, learning_rate=1e30)
    with pytest.raises(FloatingPointError, match="use a smaller learning rate"):
        train.train(config(), absurd, tokenizer, documents)


CONFIGS = Path(__file__).parents[3] / "configs"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["standard", "ladder"])
def test_the_demo_model_is_what_its_card_says(kind: str, own_library: list[Document]) -> None:
    """At most 4 MB, its wiring declared, one tokenizer for both; and its held-out perplexity measured again, where
    this Python's documentation is what it was trained on."""
    folder = CONFIGS / "demo" / f"demo-{kind}"
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 4_000_000
    read = from_folder(folder)
    assert (read.wiring.name, read.declares_wiring) == (kind, True)
    assert (folder / "tokenizer.json").read_bytes() == (
        CONFIGS / "demo" / "demo-standard" / "tokenizer.json"
    ).read_bytes()
    said = json.loads((folder / "training.json").read_text())
    assert f"{said['held_out_perplexity']:.2f}" in (CONFIGS / "demo" / "MODEL_CARD.md").read_text()
    if corpus.digest(own_library) != said["corpus_sha256"]:
        pytest.skip(f"trained on the documentation of Python {said['python']}, which this Python does not have")
    ids = train.encode(Tokenizer.from_file(str(folder / "tokenizer.json")), own_library, True)
    measured = loss.held_out(reference.load(folder, torch.float32), ids, read.max_position_embeddings).perplexity
    assert len(ids) == said["held_out_tokens"]
    assert measured == pytest.approx(said["held_out_perplexity"], rel=1e-3)


def test_the_demo_prompts_fit_both_models() -> None:
    """Batch lines with names of their own, for the name both deployments serve, short enough for the model."""
    lines = [json.loads(line) for line in (CONFIGS / "demo" / "prompts.jsonl").read_text().splitlines()]
    assert len({line["custom_id"] for line in lines}) == len(lines) >= 16
    assert {line["url"] for line in lines} == {"/v1/completions", "/v1/chat/completions"}
    words = Tokenizer.from_file(str(CONFIGS / "demo" / "demo-ladder" / "tokenizer.json"))
    longest = from_folder(CONFIGS / "demo" / "demo-ladder").max_position_embeddings
    for line in lines:
        body = line["body"]
        text = body["prompt"] if "prompt" in body else body["messages"][0]["content"]
        assert body["model"] == "demo"
        assert len(words.encode(text).ids) + 4 + body["max_tokens"] <= longest


SMALL = ["--layers", "2", "--hidden", "32", "--ffn", "48", "--vocab", "300", "--context", "32", "--tokens", "640"]


def test_the_command_trains_and_says_how_good_it_is(tmp_path: Path) -> None:
    """From text to folder, twice with one tokenizer; the second is a hybrid."""
    (tmp_path / "text.txt").write_text("\n\n".join(f"The {noun} of the ladder. " * 90 for noun in NOUNS * 3))
    text = ["--text", str(tmp_path / "text.txt"), *SMALL]
    result = CliRunner().invoke(group, ["train", "-o", str(tmp_path / "a"), *text])
    assert result.exit_code == 0, result.output
    assert "held-out perplexity" in result.stdout
    assert from_folder(tmp_path / "a").wiring.name == "ladder"
    more = ["--tokenizer", str(tmp_path / "a"), "--wiring", "hybrid", "--ladder-layers", "1", "--dtype", "bfloat16"]
    result = CliRunner().invoke(group, ["train", "-o", str(tmp_path / "b"), *text, *more])
    assert result.exit_code == 0, result.output
    assert from_folder(tmp_path / "b").wiring.kinds == ("standard", "ladder")
    result = CliRunner().invoke(group, ["train", "-o", str(tmp_path / "b"), *text])
    assert (result.exit_code, "already contains a model" in result.stderr) == (2, True)
    assert (tmp_path / "a" / "tokenizer.json").read_bytes() == (tmp_path / "b" / "tokenizer.json").read_bytes()


def test_an_unfinished_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text.txt").write_text("\n\n".join(f"The {noun} of the ladder. " * 90 for noun in NOUNS * 3))
    out, words = tmp_path / "a", ["--text", str(tmp_path / "text.txt"), *SMALL, "--save-every", "2"]
    with monkeypatch.context() as patch:
        patch.setattr(train, "held_out", Mock(side_effect=OSError("the disk went")))
        assert CliRunner().invoke(group, ["train", "-o", str(out), *words]).exit_code == 1
    result = CliRunner().invoke(group, ["train", "-o", str(out), *words])
    assert (result.exit_code, "go on with --resume, or remove it" in result.stderr) == (2, True)
    result = CliRunner().invoke(group, ["train", "-o", str(out), *words, "--resume"])
    assert result.exit_code == 0, result.output
    assert not (out / "training").exists()


def test_a_tokenizer_without_the_special_tokens_is_refused(tmp_path: Path) -> None:
    """One of another model cuts `<|bos|>` into pieces, the first of them `<`: refused with the tokens that it lacks,
    before anything is trained or written."""
    (tmp_path / "text.txt").write_text("\n\n".join(f"The {noun} of the ladder. " * 90 for noun in NOUNS))
    foreign = Tokenizer(models.BPE(unk_token=None))
    foreign.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=["<|user|>"])
    foreign.train_from_iterator(["a ladder of rungs"], trainer)
    foreign.save(str(tmp_path / "tokenizer.json"))
    words = ["-o", str(tmp_path / "out"), "--text", str(tmp_path / "text.txt"), "--tokenizer", str(tmp_path), *SMALL]
    result = CliRunner().invoke(group, ["train", *words])
    assert result.exit_code == 2, result.output
    assert "has no token <|bos|>, <|eos|>, <|end|>, <|system|>, <|assistant|>," in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--hidden", "30"], "--hidden 30 must be an even multiple of --heads 4"),
        (["--kv-heads", "3"], "--heads 4 must be a multiple of --kv-heads 3"),
        (["--wiring", "hybrid"], "wiring hybrid cannot be trained for"),
        (["--wiring", "hybrid", "--ladder-layers", "1,x"], "'1,x' must be a number"),
        (["--wiring", "desync-2"], "desync needs every"),
        (["--wiring", "delay-9"], "delay needs a delay of 1 to 7 sub-blocks, not 9"),
        (["--wiring", "circular"], "wiring 'circular' must be standard"),
        (["--learning-rate", "0"], "0.0 is not in the range"),
    ],
)
def test_the_command_refuses_what_cannot_be(options: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("\n\n".join(f"The {noun} of the ladder. " * 90 for noun in NOUNS))
    arguments = ["-o", str(tmp_path / "out"), "--text", str(tmp_path / "text.txt"), *SMALL, *options]
    result = CliRunner().invoke(group, ["train", *arguments])
    assert result.exit_code != 0
    assert message in result.stderr
    assert not (tmp_path / "out").exists()
