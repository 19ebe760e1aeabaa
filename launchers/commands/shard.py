"""`laddertron shard`: per-rank files of a checkpoint, so that a restart reads each rank's bytes in one run."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import click


@click.command(short_help="Write per-rank files for the fastest restart.")
@click.argument("model", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--tensor-parallel-size", "--tp", "size", type=click.IntRange(1, 1024), required=True, help="Ranks.")
@click.option("-o", "--output", type=click.Path(file_okay=False, path_type=Path), help="A folder of its own instead.")
@click.option("--embedding", type=click.Choice(["shard", "replicate"]), default="shard", help="parallel.embedding.")
@click.option("--overwrite", is_flag=True, help="Write anew what is there.")
def command(model: Path, size: int, output: Path | None, embedding: str, overwrite: bool) -> None:
    """Write MODEL/laddertron-tpN/rank-*.safetensors: each rank's slices, in the order of loading.

    \b
    A deployment with as many ranks finds them by itself; they are refused once MODEL has changed. With -o they go to
    a folder of their own, with config.json and tokenizer, which needs the checkpoint no more.
      laddertron shard /models/Llama-3.1-70B --tp 8
      laddertron shard /models/Llama-3.1-405B --tp 16 -o /nvme/llama-405b-tp16
    """
    from rich.console import Console

    from ...models.checkpoint import CheckpointError
    from ...models.config import from_folder
    from ...models.shapes import ShapeError, check_shapes
    from ...models.shard import Shard
    from ...models.shard_writer import write_shards
    from ...models.weights import open_checkpoint
    from ...models.weights_shards import shards_folder
    from ..weights_view import byte_bar

    start, home = time.monotonic(), output or model
    try:
        config = from_folder(model)
        check_shapes(config, size)
        source = open_checkpoint(model, config)
        if overwrite:
            shutil.rmtree(shards_folder(home, size), ignore_errors=True)
        with byte_bar(Console(stderr=True), f"{size} ranks") as progress:
            folder = write_shards(
                source,
                [Shard(config, size, rank) for rank in range(size)],
                home,
                replicate_embedding=embedding == "replicate",
                progress=progress,
            )
    except (CheckpointError, ShapeError, OSError, ValueError) as fault:
        raise click.ClickException(str(fault)) from fault
    written, seconds = sum(file.stat().st_size for file in folder.iterdir()), time.monotonic() - start
    click.echo(f"{folder}: {size} files, {written / 1e9:.2f} GB ({written / 1e9 / seconds:.2f} GB/s)")
