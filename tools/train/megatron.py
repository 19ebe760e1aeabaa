"""Converts Megatron-core's distributed checkpoints into model folders, and back, on the ranks of torchrun, as many as
there shall be shares. Megatron-core itself reads them, and unpickles their metadata: no other command here does so.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist

from ...launchers.cli.errors import ended_by
from ...models.config.model_config import ModelConfig, from_folder
from ...models.config.wiring import retrained
from .training import parse_layers

FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
NEW = click.Path(exists=False, path_type=Path)


def save_checkpoint(model: Any, folder: Path) -> None:
    """All ranks call it. Beside the tensors it has what Megatron-LM's `--load` with `--finetune` reads."""
    from megatron.core import dist_checkpointing

    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
    dist.barrier()
    sizes = Namespace(tensor_model_parallel_size=dist.get_world_size(), pipeline_model_parallel_size=1)
    common = {"args": sizes, "checkpoint_version": 3.0, "iteration": 0}
    dist_checkpointing.save({"model": model.sharded_state_dict(), **common}, str(folder))


def load_checkpoint(model: Any, folder: Path) -> None:
    """All ranks call it; the checkpoint may have been written by any number of them."""
    from megatron.core import dist_checkpointing

    state = dist_checkpointing.load({"model": model.sharded_state_dict()}, str(folder))
    model.load_state_dict(state["model"])


@contextmanager
def groups() -> Iterator[Any]:
    """torchrun's ranks as one tensor-parallel group: on GPUs if there are any, else on CPUs."""
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    parallel_state.initialize_model_parallel(dist.get_world_size())
    if torch.cuda.is_available():
        model_parallel_cuda_manual_seed(0)
    try:
        yield ProcessGroupCollection.use_mpu_process_groups()
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def build(config: ModelConfig, collection: Any) -> Any:
    from ...models.megatron.gpt import make_gpt

    return make_gpt(config, collection, use_cpu_initialization=not torch.cuda.is_available())


@click.group(help=__doc__)
def main() -> None:
    pass


@main.command()
@click.argument("checkpoint", type=FOLDER)
@click.argument("out", type=NEW)
@click.option("--like", type=FOLDER, required=True, help="Folder with the model's config.json and tokenizer.")
@click.option("--wiring", required=True, help="Wiring that the model was trained for.")
@click.option("--ladder-layers", callback=parse_layers, help="Of a hybrid: the last n layers, or a list.")
@ended_by(ValueError)
@ended_by(OSError, end=click.ClickException)
def to_folder(checkpoint: Path, out: Path, like: Path, wiring: str, ladder_layers: Any) -> None:
    """Write the folder OUT from CHECKPOINT (an iter_… folder). Unpickles: use only checkpoints that you trust."""
    from ...models.megatron.weights import export_folder

    config = from_folder(like)
    with groups() as collection:
        model = build(replace(config, wiring=retrained(config, wiring, ladder_layers)), collection)
        load_checkpoint(model, checkpoint)
        export_folder(model, out, like)


@main.command("from-folder")
@click.argument("folder", type=FOLDER)
@click.argument("checkpoint", type=NEW)
@ended_by(ValueError)
@ended_by(OSError, end=click.ClickException)
def to_checkpoint(folder: Path, checkpoint: Path) -> None:
    """Write a distributed checkpoint from FOLDER."""
    from ...models.megatron.weights import load_folder

    if find_spec("psutil") is None:
        raise click.ClickException("psutil is not installed, without which Megatron-core's writers hang: install it")
    if not torch.cuda.is_available():
        raise click.ClickException("no GPU: Megatron-core writes distributed checkpoints on GPUs alone")
    with groups() as collection:
        model = build(from_folder(folder), collection)
        load_folder(model, folder)
        save_checkpoint(model, checkpoint)


if __name__ == "__main__":
    main()
