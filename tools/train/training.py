"""Shared by the commands that train: the ranks they run on, options, the bar, and text as token files."""

from __future__ import annotations

import os
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...topology.placement.identity import IdentityError, identify

if TYPE_CHECKING:
    from ...engine.text.tokenizer import TextModel
    from .data_parallel import DataParallel
    from .fit import TrainProgress

MODEL = click.Path(exists=True, file_okay=False, path_type=Path)
TEXT = click.Path(exists=True, path_type=Path)
STATES = "training"
"""Where a folder that is being trained keeps token files and states; gone when the model is whole."""


def parse_layers(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...] | int | None:
    """16: the last 16; 0,2,3: layers, counted from 0."""
    if value is None:
        return None
    try:
        return tuple(int(part) for part in value.split(",")) if "," in value else int(value)
    except ValueError as error:
        raise click.BadParameter(f"{value!r} must be a number (the last n) or layer numbers such as 4,5,6,7") from error


def training_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a command the options of the loop and of the ranks that it runs on."""
    for option in (
        click.option("--tokens", type=click.IntRange(1), default=1_600_000, help="Budget: tokens predicted in all."),
        click.option("--batch", type=click.IntRange(1), default=4, help="Sequences a step, over all ranks."),
        click.option(
            "--seed", type=click.IntRange(0), default=0, help="Seed of the random draws and of the order of the text."
        ),
        click.option(
            "--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", help="Data type of products."
        ),
        click.option("--shards", type=click.IntRange(1), help="Ranks that hold a model together.  [default: all]"),
        click.option("--interface", help="Network interface between nodes.  [default: the host name's address]"),
        click.option("--save-every", type=click.IntRange(0), default=0, help="Steps between two states; 0: none."),
        click.option("--resume", is_flag=True, help="Resume from the last saved state, on any number of ranks."),
        click.option("--threads", type=click.IntRange(1), help="CPU threads of a rank.  [default: torch's choice]"),
    ):
        function = option(function)
    return function


@contextmanager
def training_ranks(
    interface: str | None = None, shards: int | None = None, threads: int | None = None
) -> Iterator[DataParallel]:
    """The ranks that mpirun, srun or torchrun started, or this process alone. What a rank raises ends the job."""
    import torch

    from ...topology.comm.bootstrap import bootstrap_of
    from ...topology.hardware.interfaces import address_of
    from .data_parallel import DataParallel

    if threads:
        torch.set_num_threads(threads)
    try:
        identity = identify()
    except IdentityError as error:
        raise click.UsageError(str(error)) from error
    cuda = torch.cuda.is_available()
    if identity is None or identity.size == 1:
        with DataParallel(device=torch.device("cuda" if cuda else "cpu")) as ranks:
            yield ranks
        return
    try:
        bootstrap = bootstrap_of(identity, os.environ)
        nodes = set(bootstrap.all_gather(identity.node.encode()))
        address = address_of(interface) if interface else "127.0.0.1"
        if len(nodes) > 1 and not interface:
            address = socket.gethostbyname(socket.gethostname())
            if address.startswith("127."):
                raise ValueError(f"{identity.node} resolves to {address}: say --interface, the one to the other nodes")
        if cuda:
            torch.cuda.set_device(identity.local_rank)
        device = torch.device("cuda", identity.local_rank) if cuda else torch.device("cpu")
        with DataParallel(bootstrap, address, device, shards) as ranks:
            yield ranks
    except BaseException as error:
        expected_error = isinstance(error, (ValueError, OSError, FloatingPointError, click.ClickException))
        words = str(error) if expected_error else traceback.format_exc()
        sys.stderr.write(f"laddertron: rank {identity.rank} on {identity.node}: {words}\n")
        sys.stderr.flush()
        os._exit(1)  # the others wait in a collective: the launcher ends them


def token_file(tokenizer: Path, text: Sequence[Path], most: int, ranks: DataParallel) -> tuple[Any, str]:
    """At most so many tokens of the text by that folder's tokenizer, the same on every rank, and the files' digest."""
    from tempfile import TemporaryDirectory

    from ...engine.text.tokenizer import TextModel
    from .tokens import read_tokens, write_tokens
    from .training_text import digest, files_in, pieces

    files = files_in(text)
    with TemporaryDirectory(prefix="laddertron-") as folder:
        file = Path(folder) / "tokens"
        write_tokens(file, pieces(TextModel.from_folder(tokenizer), files), most)
        return read_tokens(file)[:most].copy(), digest(files)


def token_files(
    folder: Path,
    text: TextModel,
    files: Sequence[Path],
    apart: Sequence[Path],
    held_out_tokens: int,
    ranks: DataParallel,
) -> tuple[Any, Any, str]:
    """Ids to train on, held-out ids (`apart`, else one text in twenty), and their digest. Rank 0 writes them once."""
    from .tokens import read_tokens, write_tokens
    from .training_text import digest, pieces

    named = digest([*files, *apart])
    parts = [folder / f"{named[:16]}-{what}.tokens" for what in ("train", "held-out")]

    def write() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if not all(part.is_file() for part in parts):
            write_tokens(parts[0], pieces(text, files, None if apart else False))
            write_tokens(parts[1], pieces(text, apart or files, None if apart else True), held_out_tokens)

    ranks.first_does(write)
    return read_tokens(parts[0]), read_tokens(parts[1]), named


@contextmanager
def training_bar(ranks: DataParallel, tokens_a_step: int) -> Iterator[Callable[[TrainProgress], None]]:
    """Called after each step; rank 0 shows loss, speed and time left."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}  {task.fields[speed]:,.0f} tokens/s"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=ranks.rank != 0) as bar:
        task = bar.add_task("training", total=None, loss=float("nan"), speed=0.0)
        smooth: float | None = None

        def show(progress: TrainProgress) -> None:
            nonlocal smooth
            smooth = progress.loss if smooth is None else 0.95 * smooth + 0.05 * progress.loss
            speed = (bar.tasks[task].speed or 0.0) * tokens_a_step
            bar.update(task, total=progress.steps, completed=progress.step, loss=smooth, speed=speed)

        yield show
