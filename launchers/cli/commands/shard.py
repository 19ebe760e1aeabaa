"""`laddertron shard`: per-rank files of a checkpoint, so that a restart reads each rank's bytes in one run."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import click

from ....models.config.json_fields import Refusal
from ....topology.hardware.fabric import counted
from ..errors import ended_by


@click.command()
@click.argument("model", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--tensor-parallel-size", "--tp", "size", type=click.IntRange(1, 1024), required=True, help="Ranks.")
@click.option(
    "--pipeline-parallel-size", "--pp", "stages", type=click.IntRange(1, 256), default=1, help="Pipeline stages."
)
@click.option("--pipeline-layers", metavar="N,N,…", default="", help="parallel.pipeline_layers, if it is set.")
@click.option(
    "--expert-layout", type=click.Choice(["auto", "tensor", "spread"]), default="auto", help="parallel.expert_layout."
)
@click.option("--dense-path", type=click.Choice(["whole", "node"]), default="whole", help="parallel.dense_path.")
@click.option(
    "--ranks-per-node", type=click.IntRange(1), help="Ranks of a group on each node, for --dense-path node and --mtp."
)
@click.option(
    "-o", "--output", type=click.Path(file_okay=False, path_type=Path), help="Write a complete model folder here."
)
@click.option("--embedding", type=click.Choice(["shard", "replicate"]), default="shard", help="parallel.embedding.")
@click.option("--mtp", is_flag=True, help="Also the layer that drafts with engine.speculation: mtp.")
@click.option("--overwrite", is_flag=True, help="Overwrite existing files.")
@ended_by(Refusal, ValueError)
@ended_by(OSError, end=click.ClickException)
def command(
    model: Path, size: int, stages: int, pipeline_layers: str, expert_layout: str, dense_path: str,
    ranks_per_node: int | None, output: Path | None, embedding: str, mtp: bool, overwrite: bool,
) -> None:  # fmt: skip
    """Write MODEL/laddertron-tpN/rank-*.safetensors: each rank's weights, in the order of loading.

    A deployment with the same number of ranks uses these files automatically, and refuses them after MODEL has changed.
    -o writes them with config.json and the tokenizer to another folder, which can be served without the checkpoint.

    \b
      laddertron shard /models/Llama-3.1-70B --tp 8
      laddertron shard /models/Llama-3.1-405B --tp 8 --pp 2
      laddertron shard /models/Llama-3.1-405B --tp 16 -o /nvme/llama-405b-tp16
      laddertron shard /models/DeepSeek-V3 --tp 16 --dense-path node \\
        --ranks-per-node 8
    """
    import torch
    from rich.console import Console

    from ....models.config.model_config import from_folder
    from ....models.config.predictor import whole_in_node
    from ....models.config.shapes import check_shapes, share
    from ....models.stages import RankShard, choose_layers, make_stages, predictor_shard
    from ....models.weights.mapping import open_checkpoint
    from ....models.weights.rank_files import shards_folder
    from ....models.weights.shard_writer import write_shards
    from ..run_view import byte_bar

    start, home = time.monotonic(), output or model
    config = from_folder(model)
    if dense_path == "node" and ranks_per_node is None:
        raise ValueError("--dense-path node needs --ranks-per-node: the number of a group's ranks on each node")
    per_node = ranks_per_node or size
    if size % per_node:
        raise ValueError(f"--ranks-per-node {per_node}: {size} ranks % {per_node} = {size % per_node}: use a divisor")
    sharing = share(config, expert_layout, dense_path, size // per_node, per_node)
    check_shapes(config, size, sharing)
    layer_counts = tuple(int(n) for n in pipeline_layers.split(",") if n)
    parts = make_stages(config, choose_layers(config, stages, layer_counts))
    shards = [RankShard.of(stage, size, rank, sharing) for stage in parts for rank in range(size)]
    predictors: list[RankShard] = []
    if mtp:
        alone = whole_in_node(config, getattr(torch, config.dtype).itemsize, size // per_node, per_node)
        predictors = [predictor_shard(config, shard, per_node if alone else 0) for shard in shards[-size:]]
    source = open_checkpoint(model, config, predictors[0].stage if predictors else None)
    if overwrite:
        shutil.rmtree(shards_folder(home, size, stages, sharing), ignore_errors=True)
    with byte_bar(Console(stderr=True), counted(size * stages, "rank")) as progress:
        folder = write_shards(
            source,
            shards,
            home,
            replicate_embedding=embedding == "replicate",
            predictors=predictors,
            progress=progress,
        )
    written, seconds = sum(file.stat().st_size for file in folder.iterdir()), time.monotonic() - start
    click.echo(
        f"{folder}: {counted(size * stages, 'file')}, {written / 1e9:.2f} GB ({written / 1e9 / seconds:.2f} GB/s)"
    )
