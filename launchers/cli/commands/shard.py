"""`laddertron shard`: per-rank files of a checkpoint, so that a restart reads each rank's bytes in one run."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import click

from ....engine.config.load import load
from ....models.config.json_fields import Refusal
from ....topology.hardware.fabric import counted
from ..errors import ended_by
from ..fabric_source import set_option


@click.command()
@click.argument("config", type=click.Path())
@set_option
@click.option(
    "-o", "--output", type=click.Path(file_okay=False, path_type=Path), help="Write a complete model folder here."
)
@click.option("--overwrite", is_flag=True, help="Overwrite existing files.")
@ended_by(Refusal, ValueError)
@ended_by(OSError, end=click.ClickException)
def command(config: str, overrides: tuple[str, ...], output: Path | None, overwrite: bool) -> None:
    """Write MODEL/laddertron-tpN/rank-*.safetensors: the weights of each rank of CONFIG, in the order of loading.

    A deployment with the same layout uses these files automatically, and refuses them after MODEL has changed.
    -o writes them with config.json and the tokenizer to another folder, which can be served without the checkpoint.

    \b
      laddertron shard deploy.yaml
      laddertron shard deploy.yaml -o /nvme/llama-405b-tp16
      laddertron shard /models/Llama-3.1-70B --set parallel.tensor_parallel_size=8
    """
    from rich.console import Console

    from ....engine.step.share import DTYPES, model_config
    from ....models.config.predictor import whole_in_node
    from ....models.config.shapes import replicates_embedding
    from ....models.stages import RankShard, choose_layers, make_stages, predictor_shard
    from ....models.weights.mapping import open_checkpoint
    from ....models.weights.rank_files import shards_folder
    from ....models.weights.shard_writer import write_shards
    from ..run_view import byte_bar

    d = load(config, overrides)
    start, model, keys = time.monotonic(), Path(d.model.path), d.parallel
    size, stages, home = keys.world.tp, keys.world.stages, output or model
    if keys.dense_path == "node" and d.launch.ranks_per_node is None:
        raise ValueError("parallel.dense_path=node: set launch.ranks_per_node, the number of a group's ranks on a node")
    per_node = min(size, d.launch.ranks_per_node or size)
    if size % per_node:
        left = f"{size} ranks % {per_node} = {size % per_node}"
        raise ValueError(f"launch.ranks_per_node={per_node}: {left}: use a divisor")
    shape, sharing, _ = model_config(d.model, keys, size // per_node)
    itemsize = DTYPES[shape.dtype if d.model.dtype == "auto" else d.model.dtype].itemsize
    replicate = keys.embedding == "replicate"
    if keys.embedding == "auto":
        replicate = replicates_embedding(shape, itemsize, size > per_node)
    parts = make_stages(shape, choose_layers(shape, stages, keys.pipeline_layers))
    shards = [RankShard.of(stage, size, rank, sharing) for stage in parts for rank in range(size)]
    predictors: list[RankShard] = []
    if d.engine.speculation == "mtp":
        alone = whole_in_node(shape, itemsize, size // per_node, per_node)
        predictors = [predictor_shard(shape, shard, per_node if alone else 0) for shard in shards[-size:]]
    source = open_checkpoint(model, shape, predictors[0].stage if predictors else None)
    if overwrite:
        shutil.rmtree(shards_folder(home, size, stages, sharing), ignore_errors=True)
    with byte_bar(Console(stderr=True), counted(size * stages, "rank")) as progress:
        folder = write_shards(
            source, shards, home, replicate_embedding=replicate, predictors=predictors, progress=progress
        )
    written, seconds = sum(file.stat().st_size for file in folder.iterdir()), time.monotonic() - start
    click.echo(
        f"{folder}: {counted(size * stages, 'file')}, {written / 1e9:.2f} GB ({written / 1e9 / seconds:.2f} GB/s)"
    )
