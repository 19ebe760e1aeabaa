"""`laddertron train`: a Llama of any wiring from fresh weights. Turns options into settings, shows progress;
tools/train/train.py trains."""

from __future__ import annotations

import platform
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ....launchers.cli.errors import UsageError, ended_by
from ..training import MODEL, STATES, TEXT, parse_layers, training_bar, training_device, training_options

if TYPE_CHECKING:
    from ....models.config.model_config import ModelConfig

EPILOG = """\b
Examples:
  laddertron train -o models/ladder --wiring ladder
  laddertron train -o models/standard --wiring standard \\
    --tokenizer models/ladder
  laddertron train -o models/late --wiring hybrid --ladder-layers 4,5,6,7
  laddertron train -o models/mine --text notes/ --tokens 10000000
  laddertron train -o models/draft --teacher models/mine \\
    --text answers.jsonl --layers 2 --hidden 64

Trains in one process, on a GPU if there is one. Without --text the model learns from the docstrings of Python's
standard library. Compare only models that were trained with the same text, tokenizer, budget and seed."""


def _model(options: dict[str, Any], vocab_size: int) -> ModelConfig:
    from ....models.config.known_models import architecture
    from ....models.config.wiring import retrained

    hidden, heads, kv_heads = options["hidden"], options["heads"], options["kv_heads"]
    if hidden % (2 * heads):
        raise ValueError(f"--hidden {hidden} must be an even multiple of --heads {heads}")
    if heads % kv_heads:
        raise ValueError(f"--heads {heads} must be a multiple of --kv-heads {kv_heads}")
    model = architecture(
        "llama", options["layers"], hidden, heads, kv_heads, options["ffn"], vocab_size, options["context"],
        tied=True, dtype="float32",
    )  # fmt: skip
    wiring = retrained(model, options["wiring"], options["ladder_layers"], options["tensor_parallel_size"])
    return replace(model, wiring=wiring, declares_wiring=True)


@click.command(epilog=EPILOG, context_settings={"show_default": True})
@click.option("-o", "--out", required=True, type=click.Path(path_type=Path, file_okay=False), help="Folder to write.")
@click.option(
    "--wiring",
    default="ladder",
    help="How sub-blocks read the residual: standard, parallel, ladder, hybrid, delay-2 to delay-7, desync-n.",
)
@click.option("--ladder-layers", callback=parse_layers, help="hybrid: the last n layers, or a list, are ladder.")
@click.option("--tensor-parallel-size", type=click.IntRange(1), default=None, help="desync: ranks to train for.")
@click.option("--layers", type=click.IntRange(1), default=6)
@click.option("--hidden", type=click.IntRange(2), default=96)
@click.option("--heads", type=click.IntRange(1), default=4)
@click.option("--kv-heads", type=click.IntRange(1), default=4)
@click.option("--ffn", type=click.IntRange(1), default=256)
@click.option("--vocab", type=click.IntRange(300), default=2048, help="Size of a newly trained tokenizer.")
@click.option(
    "--tokenizer",
    type=MODEL,
    help="Use the tokenizer of this folder, which this command wrote, instead of training one.",
)
@click.option(
    "--text",
    multiple=True,
    type=TEXT,
    help="UTF-8 text, JSONL with `text`, or folders of them.  [default: Python's documentation]",
)
@click.option(
    "--teacher",
    type=MODEL,
    help="Train a draft model for this model: learn its next-token distribution, with its tokenizer.",
)
@click.option(
    "--context", type=click.IntRange(8), default=256, help="Maximum tokens of a sequence, in training and serving."
)
@click.option("--learning-rate", type=click.FloatRange(0, min_open=True), default=5e-3, help="Peak of the schedule.")
@training_options
@ended_by(ValueError)
@ended_by(OSError, FloatingPointError, end=click.ClickException)
def command(out: Path, **o: Any) -> None:
    """Train a Llama with any residual wiring and write it as a Hugging Face folder that declares it."""
    if (out / "model.safetensors").exists():
        raise UsageError(f"{out} already contains a model: remove it, or give another folder to -o")
    _train(out, training_device(o["threads"]), o)


def _train(out: Path, device: Any, o: dict[str, Any]) -> None:
    import torch
    from tokenizers import Tokenizer

    from .. import corpus, state, train
    from ..build import load_all
    from ..fit import Saving, Settings
    from ..loss import Distil

    _model(o, o["vocab"])  # what cannot be is refused before anything is written
    text, teacher, states = o["text"], o["teacher"], out / STATES
    named = ("tokens", "batch", "context", "learning_rate", "seed", "dtype")
    settings = Settings(**{key: o[key] for key in named}, distil=Distil(1.0 if teacher else 0.0))
    documents = corpus.text_files(text) if text else corpus.python_documentation()
    given = o["tokenizer"] or teacher
    own = (given or states) / "tokenizer.json"
    if not o["resume"] and state.newest(states) is not None:
        raise UsageError(f"{states}: an unfinished run: go on with --resume, or remove it")
    if not given and not (o["resume"] and own.is_file()):
        states.mkdir(parents=True, exist_ok=True)
        own.write_text(corpus.train_tokenizer(documents, o["vocab"]).to_str(pretty=True), encoding="utf-8")
    words = Tokenizer.from_file(str(own))
    config = _model(o, words.get_vocab_size())
    about = {
        "corpus": [str(path) for path in text] or ["Python's standard library documentation"],
        "corpus_sha256": corpus.digest(documents),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "parameters": config.num_parameters,
    }
    click.echo(
        f"{config.wiring.name} Llama of {config.num_parameters:,} parameters; {len(documents):,} documents;"
        f" {settings.steps:,} steps of {settings.batch} x {settings.context} tokens",
        err=True,
    )
    same = {"corpus_sha256": about["corpus_sha256"], "wiring": config.wiring.name, "parameters": config.num_parameters}
    with training_bar(settings.batch * settings.context) as show:
        taught_by = load_all(teacher, device) if teacher else None
        saving = Saving(states, o["save_every"], o["resume"], same)
        trained = train.train(config, settings, words, documents, show, device, saving, taught_by)
    train.save(out, trained, settings, words, about)
    shutil.rmtree(states, ignore_errors=True)
    agreement = "" if trained.agreement is None else f", agrees with {teacher} on {trained.agreement:.1%}"
    over = f"over {trained.held_out_tokens:,} tokens{agreement}"
    click.echo(f"{out}: held-out perplexity {trained.held_out_perplexity:.3f} {over}")
