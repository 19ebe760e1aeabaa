"""`laddertron scan`: measures which layers of a checkpoint tolerate laddering, before training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from ....launchers.cli.errors import ended_by
from ...bench.picture import picture
from ..training import MODEL, TEXT, token_file, training_device


@click.command(context_settings={"show_default": True})
@click.argument("source", metavar="FROM", type=MODEL)
@click.option("--text", multiple=True, required=True, type=TEXT, help="UTF-8 text or JSONL.")
@click.option("--context", type=click.IntRange(8), help="Tokens read at once.  [default: the model's, at most 4096]")
@click.option("--tokens", type=click.IntRange(2), default=32_768, help="Tokens of the text to use, at most.")
@click.option("--model", "known", metavar="NAME", help="Known architecture to plan with.  [default: by FROM's name]")
@click.option("--nodes", metavar="SPEC", default="2x8xH100", help="Fabric to plan for.")
@click.option("--batch", type=click.IntRange(1), default=1, help="Sequences that decode.")
@click.option("--most", type=click.FloatRange(0), default=1.0, help="Loss in nats that the recommended layers may add.")
@click.option("--plot", "file", metavar="FILE", help="Draw added loss against speed-up (.png, .svg).")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of the table.")
@click.option("--threads", type=click.IntRange(1), help="CPU threads.  [default: torch's choice]")
@ended_by(ValueError)
@ended_by(OSError, RuntimeError, end=click.ClickException)
def command(source: Path, **o: Any) -> None:
    """Measure how ladder wiring changes the loss of FROM on the text: in each layer alone, and in the last 1, 2, …
    layers, for which `plan` also predicts the speed-up.

    Nothing is trained: the losses rank the layers, but do not predict the quality after training.

    \b
      laddertron scan models/llama-3.1-8b --text notes/ --nodes 2x8xH100
    """
    rows = _scan(source, o, training_device(o["threads"]))
    fit = [row for row in rows if row["layers"] and row["suffix_loss"] - rows[0]["suffix_loss"] <= o["most"]]
    best = max(fit, key=lambda row: row["layers"], default=None)
    words = "no suffix" if best is None else f"ladder_layers: {best['layers']}"
    if o["file"]:
        _plot(rows, Path(o["file"]))
    if o["as_json"]:
        click.echo(json.dumps({"rows": rows, "recommended": best and best["layers"]}, indent=1))
        return
    click.echo(f"{'layer':>6} {'alone':>9}   {'last n':>6} {'loss':>9} {'added':>9} {'speed-up':>9}")
    for row in rows:
        layer = "" if row["layer"] is None else f"{row['layer']:6} {row['alone_loss'] - rows[0]['suffix_loss']:+9.4f}"
        speed = "" if row["speed_up"] is None else f"{row['speed_up']:8.2f}x"
        added = row["suffix_loss"] - rows[0]["suffix_loss"]
        click.echo(f"{layer:>16}   {row['layers']:6} {row['suffix_loss']:9.4f} {added:+9.4f} {speed:>9}")
    click.echo(f"recommended: {words} (adds at most {o['most']:g} nats before training; --most)")


def _plot(rows: list[dict[str, Any]], path: Path) -> None:
    """A point a suffix: the loss that it adds over the speed-up, or over its layers where no speed-up is known."""
    planned = rows[0]["speed_up"] is not None
    across = [row["speed_up"] if planned else row["layers"] for row in rows]
    added = [row["suffix_loss"] - rows[0]["suffix_loss"] for row in rows]
    with picture(path) as axes:
        axes.plot(across, added, marker="o")
        for row, x, y in zip(rows, across, added, strict=True):
            axes.annotate(str(row["layers"]), (x, y), textcoords="offset points", xytext=(4, 5), fontsize="small")
        speed = "predicted speed-up (at a point: laddered layers, from the last)"
        axes.set(xlabel=speed if planned else "laddered layers, from the last", ylabel="added loss, untrained, nats")


def _scan(source: Path, o: dict[str, Any], device: Any) -> list[dict[str, Any]]:
    from ....models.config.model_config import from_folder
    from ..build import load_all
    from ..loss import held_out

    config = from_folder(source)
    if config.wiring.name != "standard":
        raise ValueError(
            f"{source} declares {config.wiring.name} wiring; what laddering costs is asked of a standard model"
        )
    context = o["context"] or min(4096, config.max_position_embeddings)
    ids_N, _ = token_file(source, o["text"], o["tokens"])
    model = load_all(source, device)
    layers = config.num_layers

    def loss(chosen: range) -> float:
        model.ladder(chosen)
        return held_out(model, ids_N, context).loss

    speed = _speed_ups(source, o, layers)
    rows = [{"layers": 0, "suffix_loss": loss(range(0)), "layer": None, "alone_loss": None, "speed_up": speed[0]}]
    for count in range(1, layers + 1):
        layer = layers - count
        alone, suffix = loss(range(layer, layer + 1)), loss(range(layer, layers))
        rows.append(
            {"layers": count, "suffix_loss": suffix, "layer": layer, "alone_loss": alone, "speed_up": speed[count]}
        )
    return rows


def _speed_ups(source: Path, o: dict[str, Any], layers: int) -> list[float | None]:
    """The speed-up of each suffix over standard, as `plan` predicts it; None for an unknown architecture."""
    from ....models.config.known_models import by_folder, known
    from ....models.config.parts import make_wiring
    from ....topology.hardware.presets import preset
    from ...plan.estimate import group_in
    from ...plan.layouts import Work
    from ...plan.plan_source import Asked, from_names
    from ...plan.roofline import Load

    guess = by_folder(source.name)
    name = o["known"] or (guess.name if guess else None)
    if name is None:
        return [None] * (layers + 1)
    if known(name).num_layers != layers:
        raise ValueError(f"{name} has {known(name).num_layers} layers, {source} {layers}: --model another")
    fabric = preset(o["nodes"])
    devices = sum(len(node.devices) for node in fabric.nodes)
    group = group_in(from_names(name, Asked(fabric, Work()), (f"parallel.tensor_parallel_size={devices}",)))
    load = Load(decodes=o["batch"], context=1280)
    wirings = [make_wiring("hybrid", layers, range(layers - count, layers)) for count in range(layers + 1)]
    times = [group.step(load, wiring).total_s for wiring in wirings]
    return [times[0] / time for time in times]
