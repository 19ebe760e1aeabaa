"""Shared by the commands that train: options, device, the bar, and text as token files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    import torch

    from ...engine.text.tokenizer import TextModel
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
    """Gives a command the options of the loop."""
    for option in (
        click.option("--tokens", type=click.IntRange(1), default=1_600_000, help="Budget: tokens predicted in all."),
        click.option("--batch", type=click.IntRange(1), default=4, help="Sequences a step."),
        click.option(
            "--seed", type=click.IntRange(0), default=0, help="Seed of the random draws and of the order of the text."
        ),
        click.option(
            "--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", help="Data type of products."
        ),
        click.option("--save-every", type=click.IntRange(0), default=0, help="Steps between two states; 0: none."),
        click.option("--resume", is_flag=True, help="Resume from the last saved state."),
        click.option("--threads", type=click.IntRange(1), help="CPU threads.  [default: torch's choice]"),
    ):
        function = option(function)
    return function


def training_device(threads: int | None = None) -> torch.device:
    """The first GPU, or the CPU with so many threads (None: torch's choice)."""
    import torch

    if threads:
        torch.set_num_threads(threads)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def token_file(tokenizer: Path, text: Sequence[Path], most: int) -> tuple[Any, str]:
    """At most so many tokens of the text by that folder's tokenizer, and the files' digest."""
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
    folder: Path, text: TextModel, files: Sequence[Path], apart: Sequence[Path], held_out_tokens: int
) -> tuple[Any, Any, str]:
    """Ids to train on, held-out ids (`apart`, else one text in twenty), and their digest. Written once."""
    from .tokens import read_tokens, write_tokens
    from .training_text import digest, pieces

    named = digest([*files, *apart])
    parts = [folder / f"{named[:16]}-{what}.tokens" for what in ("train", "held-out")]
    folder.mkdir(parents=True, exist_ok=True)
    if not all(part.is_file() for part in parts):
        write_tokens(parts[0], pieces(text, files, None if apart else False))
        write_tokens(parts[1], pieces(text, apart or files, None if apart else True), held_out_tokens)
    return read_tokens(parts[0]), read_tokens(parts[1]), named


@contextmanager
def training_bar(tokens_a_step: int) -> Iterator[Callable[[TrainProgress], None]]:
    """Called after each step: shows loss, speed and time left."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}  {task.fields[speed]:,.0f} tokens/s"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("training", total=None, loss=float("nan"), speed=0.0)
        smooth: float | None = None

        def show(progress: TrainProgress) -> None:
            nonlocal smooth
            smooth = progress.loss if smooth is None else 0.95 * smooth + 0.05 * progress.loss
            speed = (bar.tasks[task].speed or 0.0) * tokens_a_step
            bar.update(task, total=progress.steps, completed=progress.step, loss=smooth, speed=speed)

        yield show
