"""`laddertron convert`: a model folder in another checkpoint format; models/weights/convert.py writes it."""

from __future__ import annotations

from pathlib import Path

import click

from ....models.config.dialects import DIALECTS
from ....models.weights.checkpoint import CheckpointError
from ..errors import ended_by


@click.command()
@click.argument("source", metavar="FROM", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("target", metavar="TO", type=click.Path(file_okay=False, path_type=Path))
@click.option("--format", "dialect", type=click.Choice(DIALECTS), required=True, help="Format of TO.")
@ended_by(CheckpointError, ValueError)
@ended_by(OSError, end=click.ClickException)
def command(source: Path, target: Path, dialect: str) -> None:
    """Convert the model folder FROM to another format in TO. Tensors keep their bits.

    \b
      hf               a stock Llama, Mistral or Qwen with standard wiring
      laddertron       any wiring, in the key laddertron_wiring; other programs
                       reject the model_type
      llama-ladder     model_type llamaLadder: a Llama whose ladder_layers, all or
                       some, are ladder
      ladder-residual  model_type ladder_residual (dolomite-engine, lm-engine):
                       all layers ladder, fused tensors

    All formats except hf include a modeling file, with which transformers and lm-eval compute the wiring
    (trust_remote_code). A model that the format cannot express is refused.

    \b
      laddertron convert models/from-dolomite models/mine --format laddertron
    """
    from rich.console import Console

    from ....models.weights.convert import convert
    from ..run_view import byte_bar

    with byte_bar(Console(stderr=True), dialect) as progress:
        config = convert(source, target, dialect, progress)
    click.echo(f"{target}: {dialect}, {config.wiring.name} wiring, {config.num_parameters:,} parameters")
