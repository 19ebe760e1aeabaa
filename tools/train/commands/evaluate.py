"""`laddertron evaluate`: compares the loss of model folders on a text."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from ....launchers.cli.errors import check_output, ended_by
from ..training import MODEL, TEXT, token_file, training_device


@click.command(context_settings={"show_default": True})
@click.argument("folders", nargs=-1, required=True, type=MODEL)
@click.option("--text", multiple=True, required=True, type=TEXT, help="UTF-8 text or JSONL.")
@click.option("--original", type=MODEL, help="Model with which to compare the others.")
@click.option("--context", type=click.IntRange(8), help="Tokens read at once.  [default: the models', at most 4096]")
@click.option("--tokens", type=click.IntRange(2), default=262_144, help="Tokens of the text to use, at most.")
@click.option("--record", is_flag=True, help="Write the record that `check` and `serve` look for into each folder.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of the table.")
@click.option("--threads", type=click.IntRange(1), help="CPU threads.  [default: torch's choice]")
@ended_by(ValueError)
@ended_by(OSError, end=click.ClickException)
def command(folders: tuple[Path, ...], **o: Any) -> None:
    """Measure the perplexity of each of FOLDERS on the text; with --original, also the mean KL divergence of the next
    token from that model, and how often both predict the same token.

    Folders must have the same tokenizer: otherwise losses per token are not comparable. Computes in fp32, with each
    folder's declared wiring, in one process, on a GPU if there is one.

    \b
      laddertron evaluate models/standard models/ladder --text notes/ \\
        --original models/standard --record
    """
    rows = _rows(folders, o, training_device(o["threads"]))
    click.echo(json.dumps(rows, indent=1) if o["as_json"] else "\n".join(_table(rows)))


def _rows(folders: tuple[Path, ...], o: dict[str, Any], device: Any) -> list[dict[str, Any]]:
    import torch

    from ....models.config.model_config import from_folder
    from ....models.config.wiring import RECORD, record
    from ..build import load_all
    from ..loss import held_out

    original: Path | None = o["original"]
    everyone = [*([original] if original else []), *folders]
    first = everyone[0]
    for other in everyone[1:]:
        if (other / "tokenizer.json").read_bytes() != (first / "tokenizer.json").read_bytes():
            raise ValueError(f"{other} has another tokenizer than {first}: their losses a token are not comparable")
    if o["record"]:
        for folder in folders:
            check_output(folder / RECORD, "--record")
    length = o["context"] or min(4096, *(from_folder(folder).max_position_embeddings for folder in everyone))
    ids_N, digest = token_file(first, o["text"], o["tokens"])
    compared = load_all(original, device) if original else None
    rows = []
    with torch.no_grad():
        for folder in folders:
            model = load_all(folder, device)
            loss_fields = asdict(held_out(model, ids_N, length, compared))
            row = record(loss_fields, original.name if original else None, digest)
            rows.append({"folder": folder.name, "wiring": model.config.wiring.name, **row})
            if o["record"]:
                (folder / RECORD).write_text(json.dumps(row, indent=1) + "\n", encoding="utf-8")
    return rows


def _table(rows: list[dict[str, Any]]) -> list[str]:
    wide = min(26, max(6, *(len(row["folder"]) for row in rows)))
    lines = [f"{'folder':<{wide}} {'wiring':<10} {'loss':>8} {'perplexity':>11} {'KL':>8} {'agreement':>10}"]
    for row in rows:
        apart, same = row["divergence"], row["agreement"]
        beside = f"{apart:8.4f} {same:10.1%}" if apart is not None else f"{'':>8} {'':>10}"
        lines.append(
            f"{row['folder'][:wide]:<{wide}} {row['wiring']:<10} {row['loss']:8.4f} {row['perplexity']:11.3f} {beside}"
        )
    return [*lines, f"{rows[0]['tokens']:,} tokens; KL and agreement against {rows[0]['original'] or 'nothing'}"]
