"""`laddertron adapt`: a checkpoint under another wiring, trained until it answers again. Turns options into settings;
tools/train/adapt.py trains, tools/train/export.py says what came out."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import click

from ....launchers.cli.errors import UsageError, ended_by
from ..training import MODEL, STATES, TEXT, parse_layers, token_files, training_bar, training_device, training_options

EPILOG = """\b
Examples:
  laddertron adapt models/llama-1b -o models/llama-1b-ladder8 \\
    --ladder-layers 8 --text data/ --distil 0.5
  laddertron adapt models/llama-1b -o out --wiring ladder \\
    --text data/ --dtype bfloat16 --recompute
  laddertron adapt models/llama-1b -o out --wiring delay-2 --text data/ \\
    --save-every 500 --resume

Trains in one process, on a GPU if there is one. For models that need several GPUs docs/adapting.md shows how to train
the wirings with Megatron-LM."""


@click.command(epilog=EPILOG, context_settings={"show_default": True})
@click.argument("source", metavar="FROM", type=MODEL)
@click.option("-o", "--out", required=True, type=click.Path(path_type=Path, file_okay=False), help="Folder to write.")
@click.option("--wiring", default="ladder", help="ladder, parallel, delay-2 to delay-7, desync-n, standard.")
@click.option("--ladder-layers", callback=parse_layers, help="Hybrid: the last n layers, or a list, are ladder.")
@click.option("--tensor-parallel-size", type=click.IntRange(1), help="desync: ranks to train for.")
@click.option(
    "--text",
    multiple=True,
    required=True,
    type=TEXT,
    help="UTF-8 text, JSONL with `text` or `messages`, or folders of them.",
)
@click.option("--held-out", multiple=True, type=TEXT, help="Text to evaluate on.  [default: one text in twenty]")
@click.option(
    "--held-out-tokens", type=click.IntRange(2), default=262_144, help="Tokens of the held-out text to use, at most."
)
@click.option("--context", type=click.IntRange(8), help="Tokens of a sequence.  [default: the model's, at most 4096]")
@click.option(
    "--distil",
    type=click.FloatRange(0, 1),
    default=0.0,
    help="Weight in the loss of the KL divergence from the original.",
)
@click.option("--temperature", type=click.FloatRange(0, min_open=True), default=1.0, help="Temperature of --distil.")
@click.option("--top-k", type=click.IntRange(0), default=0, help="Largest logits that --distil uses; 0: all.")
@click.option("--freeze", callback=parse_layers, help="Layers that are not trained; -1: embedding and head.")
@click.option("--recompute", is_flag=True, help="Recompute activations in the backward pass, to save memory.")
@click.option(
    "--micro-batch",
    type=click.IntRange(0),
    default=0,
    help="Sequences that are computed at once; 0: all of --batch.",
)
@click.option("--learning-rate", type=click.FloatRange(0, min_open=True), help="Peak of the schedule.")
@training_options
@ended_by(ValueError)
@ended_by(OSError, FloatingPointError, end=click.ClickException)
def command(source: Path, out: Path, **o: Any) -> None:
    """Retrain the checkpoint FROM for another residual wiring and write it as a folder that declares it.

    Minimizes the next-token loss, and with --distil the KL divergence from the original. The folder gets a model card
    (README.md) and an evaluation record: held-out losses of the original and of the new wiring before and after."""
    if (out / "config.json").exists():
        raise UsageError(f"{out} already contains a model: remove it, or give another folder to -o")
    _adapt(source, out, training_device(o["threads"]), o)


def _adapt(source: Path, out: Path, device: Any, o: dict[str, Any]) -> None:
    from ....engine.text.tokenizer import TextModel
    from ....models.config.model_config import from_folder
    from ....models.config.wiring import retrained
    from ....models.weights.identity import read_weights
    from ....models.weights.rank_files import config_digest
    from .. import adapt
    from ..export import write_card
    from ..fit import Saving, Settings
    from ..loss import Distil
    from ..training_text import files_in

    config = from_folder(source)
    wiring = retrained(config, o["wiring"], o["ladder_layers"], o["tensor_parallel_size"])
    settings = Settings(
        **{key: o[key] for key in ("tokens", "batch", "micro_batch", "seed", "dtype")},
        context=o["context"] or min(4096, config.max_position_embeddings),
        learning_rate=o["learning_rate"] or 2e-5,
        save_dtype=config.dtype,
        distil=Distil(o["distil"], o["temperature"], o["top_k"]),
    )
    states = out / STATES
    if states.exists() and not o["resume"]:
        raise UsageError(f"{states}: an unfinished run: go on with --resume, or remove it")
    files = files_in(o["text"])
    apart = files_in(o["held_out"]) if o["held_out"] else []
    ids_N, held_out_N, digest = token_files(states, TextModel.from_folder(source), files, apart, o["held_out_tokens"])
    frozen = o["freeze"] or ()
    frozen = tuple(range(config.num_layers))[-frozen:] if isinstance(frozen, int) and frozen > 0 else frozen
    frozen = (frozen,) if isinstance(frozen, int) else frozen
    about = {
        "source": source.name,
        "source_digest": f"{config_digest(source)[:8]}{read_weights(source).digest[:8]}",
        "wiring": wiring.name,
        "text_sha256": digest,
        "frozen": list(frozen),
    }
    with training_bar(settings.batch * settings.context) as show:
        adapted = adapt.adapt(
            source,
            wiring,
            settings,
            ids_N,
            held_out_N,
            device,
            frozen=frozen,
            recomputes=o["recompute"],
            saving=Saving(states, o["save_every"], o["resume"], about),
            on_step=show,
            on_model=lambda model: adapt.write(out, source, model, settings.save_dtype),
        )
    names = [str(path) for path in (*o["text"], *o["held_out"])]
    write_card(out, source.name, wiring, settings, adapted, {**about, "text": names})
    shutil.rmtree(states)
    before, untrained, trained = (x.perplexity for x in (adapted.original, adapted.untrained, adapted.trained))
    click.echo(f"{out}: held-out perplexity {before:.3f} original, {untrained:.3f} untrained, {trained:.3f} trained")
