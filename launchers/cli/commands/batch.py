"""`laddertron batch`: batches on a running server, from a terminal."""

from __future__ import annotations

import json
import os
import secrets
import shlex
import time
from codecs import BOM_UTF8
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..batch_client import ENDED, ApiError, BatchClient
from ..errors import FAILED, OK, UsageError, ended_by, show_warning
from ..run_view import clock, default_errors, progress_console, say, say_error

_URL = "http://127.0.0.1:8000/v1"
_WHY, _SHOWN_MODELS = 100, 5
API_FAILS = ended_by(ApiError, end=click.ClickException)
url_option = click.option("--url", help=f"URL of the API.  [default: OPENAI_BASE_URL, else {_URL}]")
limit_option = click.option("--limit", default=20, show_default=True, type=click.IntRange(1, 10000))


def client_of(url: str | None) -> BatchClient:
    """The client of the server that --url or the environment names, with the environment's key."""
    environ = os.environ
    key = environ.get("LADDERTRON_API_KEY") or environ.get("OPENAI_API_KEY")
    with ended_by(ApiError):
        return BatchClient(url or environ.get("OPENAI_BASE_URL") or _URL, key, away=_warn)


def _warn(error: ApiError) -> None:
    show_warning(f"no answer, asking again: {error}")


def print_table(titles: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> None:
    """As wide as its rows, since a truncated id is useless. A cell beyond the titles is not padded."""
    lines = [titles, *(tuple("".join(c if c.isprintable() else " " for c in cell) for cell in row) for row in rows)]
    wide = [max(map(len, column)) for column in zip(*(line[: len(titles)] for line in lines), strict=True)]
    for line in lines:
        click.echo(" ".join(map(str.ljust, line, (*wide, 0))).rstrip())


def made_at(item: dict[str, Any]) -> str:
    return time.strftime("%m-%d %H:%M", time.localtime(item["created_at"]))


@click.group()
@url_option
@click.pass_context
def command(context: click.Context, url: str | None) -> None:
    """Work with batches on a laddertron daemon, or any server of OpenAI's Batch API.

    The key is read from LADDERTRON_API_KEY or OPENAI_API_KEY.

    \b
      laddertron batch submit prompts.jsonl --wait -o answers.jsonl
      laddertron batch submit prompts.jsonl --reuse batch_1f…
      laddertron batch list
      laddertron batch wait batch_1f…
      laddertron batch fetch batch_1f… -o answers.jsonl
      laddertron batch delete batch_1f…
    """
    context.obj = client_of(url)


@command.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--endpoint", help="Such as /v1/responses.  [default: the first line's url]")
@click.option(
    "--window", default="24h", show_default=True, help="Time until the batch expires, such as 90m, 24h or 7d."
)
@click.option("--metadata", multiple=True, metavar="KEY=VALUE", help="Metadata of the batch; up to 16 pairs.")
@click.option(
    "--reuse", metavar="BATCH", help="Reuse that batch's answers to unchanged lines, compute only the others."
)
@click.option("--wait", is_flag=True, help="Wait until the batch has ended.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="With --wait: write answers here; an existing file is not overwritten.",
)
@click.pass_obj
@API_FAILS
def submit(
    client: BatchClient,
    file: Path,
    endpoint: str | None,
    window: str,
    metadata: tuple[str, ...],
    reuse: str | None,
    wait: bool,
    output: Path | None,
) -> int:
    """Upload FILE and start a batch over it; prints the batch's id."""
    if output is not None and not wait:
        raise UsageError("-o needs --wait (or fetch later)")
    pairs = dict(_pair(word) for word in metadata)
    _check_output(output)
    chosen = _look_at(client, file)
    chosen = endpoint or chosen
    if chosen is None:
        raise UsageError(f"{file}: its lines have no url: set --endpoint")
    console = progress_console()
    with Progress(TextColumn("upload"), BarColumn(), DownloadColumn(), console=console, transient=True) as bar:
        task = bar.add_task("upload", total=file.stat().st_size)
        uploaded = client.upload(file, lambda size: bar.advance(task, size))
    batch = client.create(uploaded["id"], chosen, window, pairs, secrets.token_hex(16), reuse)
    click.echo(batch["id"])
    if not wait:
        return 0
    return _finish(client, _watched(client, batch["id"], output, console), output, console)


@command.command()
@click.argument("batch_id")
@click.pass_obj
@API_FAILS
def status(client: BatchClient, batch_id: str) -> None:
    """Print the batch as JSON, with the seconds left at its pace so far."""
    batch = client.batch(batch_id)
    if (left := seconds_left(batch, time.time())) is not None:
        batch["seconds_left"] = left
    click.echo(json.dumps(batch, indent=1))


@command.command()
@click.argument("batch_id")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write answers here when the batch has ended.")
@click.pass_obj
@API_FAILS
def wait(client: BatchClient, batch_id: str, output: Path | None) -> int:
    """Watch a batch until it has ended. Exit code 0 if it completed, 1 otherwise."""
    _check_output(output)
    console = progress_console()
    return _finish(client, _watched(client, batch_id, output, console), output, console)


@command.command()
@click.argument("batch_id")
@click.pass_obj
@API_FAILS
def cancel(client: BatchClient, batch_id: str) -> None:
    """Cancel a batch; finished lines are kept."""
    click.echo(client.cancel(batch_id)["status"])


@command.command()
@click.argument("batch_id")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="Where answers go.")
@click.pass_obj
@API_FAILS
def fetch(client: BatchClient, batch_id: str, output: Path) -> int:
    """Download a batch's answers, and its errors to OUT.errors.jsonl."""
    _check_kind(output)
    _check_kind(default_errors(output))
    batch = client.batch(batch_id)
    if batch["status"] not in ENDED:
        raise click.ClickException(f"{batch_id} is {batch['status']}: wait for it")
    return _finish(client, batch, output, progress_console(), replace=True)


@command.command()
@click.argument("batch_ids", nargs=-1, required=True)
@click.pass_obj
@API_FAILS
def delete(client: BatchClient, batch_ids: tuple[str, ...]) -> None:
    """Delete ended batches with their answers; input files are kept (laddertron files delete)."""
    for batch_id in batch_ids:
        client.delete("batches", batch_id)


@command.command("list")
@limit_option
@click.pass_obj
@API_FAILS
def show(client: BatchClient, limit: int) -> None:
    """List your batches, newest first."""
    rows = []
    for batch in client.list(limit):
        counts = batch.get("request_counts") or {}
        numbers = [str(counts.get(name, 0)) for name in ("total", "completed", "failed")]
        errors = (batch.get("errors") or {}).get("data") or []
        why = [str(error.get("message"))[:_WHY] for error in errors[:1]]
        rows.append((batch["id"], batch["status"], *numbers, made_at(batch), *why))
    print_table(("id", "status", "lines", "done", "failed", "made"), rows)


def _pair(word: str) -> tuple[str, str]:
    key, equals, value = word.partition("=")
    if not equals or not key:
        raise UsageError(f"--metadata {word!r}: KEY=VALUE")
    return key, value


def _look_at(client: BatchClient, file: Path) -> str | None:
    """The first line's url, if it has one. Refuses before the upload what the server would refuse afterwards."""
    from ....engine.run.files import input_fault  # pydantic, which the other commands need not wait for

    if not file.is_file():
        raise UsageError(f"{file} is not a regular file: its size is sent first, and it is read twice")
    with file.open("rb") as lines:
        if fault := input_fault(file, lines):
            raise UsageError(fault)
        if lines.read(len(BOM_UTF8)) != BOM_UTF8:
            lines.seek(0)
        models, url = set[object](), None
        for number, raw in enumerate(lines, 1):
            if not raw.strip():
                continue
            try:
                line = json.loads(raw)
            except (ValueError, RecursionError) as error:
                raise UsageError(f"{file}:{number}: not JSON: {error}") from error
            if not isinstance(line, dict):
                raise UsageError(f"{file}:{number}: a line must be a JSON object")
            url = url or line.get("url")
            body = line.get("body")
            models.add(str(body["model"]) if isinstance(body, dict) and "model" in body else None)
    served = client.models()
    if None not in models and models.isdisjoint(served):
        asked = ", ".join(sorted(map(str, models))[:_SHOWN_MODELS])
        raise UsageError(
            f"{file}: no line names a served model: the lines have {asked}, the server has {', '.join(served)}"
        )
    return url if isinstance(url, str) else None


def _check_kind(path: Path) -> None:
    """A download is renamed to its name: a device such as /dev/null would be lost, and - would be a file."""
    if str(path) == "-" or not path.name or (path.exists() and not path.is_file()):
        raise UsageError(f"{path} is not a regular file: name one for the answers")


def _check_output(output: Path | None) -> None:
    """Refuses an output that could not be written, or that would replace a file."""
    if output is None:
        return
    for path in (output, default_errors(output)):
        _check_kind(path)
        if path.exists():
            raise UsageError(f"{path} exists: remove it, or name another output")
    if not (output.parent.is_dir() and os.access(output.parent, os.W_OK | os.X_OK)):
        raise UsageError(f"{output} cannot be written: {output.parent} is missing or not writable")


def _watched(client: BatchClient, batch_id: str, output: Path | None, console: Console) -> dict[str, Any]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[text]}", markup=False),
    )
    pace = BatchPace()
    try:
        with Progress(*columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal) as bar:
            task = bar.add_task("waiting", total=None, text="")

            def shown(batch: dict[str, Any]) -> None:
                counts = batch.get("request_counts") or {}
                bar.update(
                    task,
                    description=batch["status"],
                    total=counts.get("total") or None,
                    completed=counts.get("completed", 0) + counts.get("failed", 0),
                    text=pace.text(batch, time.monotonic()),
                )

            def away(error: ApiError) -> None:
                if not console.is_terminal and bar.tasks[0].description != "no response":
                    say(console, f"no response, retrying: {error}")
                bar.update(task, description="no response", text=f"retrying: {error}")

            return client.wait(batch_id, shown, away)
    except (KeyboardInterrupt, ApiError) as error:
        if isinstance(error, ApiError) and error.status in (-1, 404):
            raise
        again = _command_line("wait", batch_id, *(() if output is None else ("-o", str(output))))
        say(console, f"the batch continues; to watch it again, run\n  {again}")
        raise


def seconds_left(batch: dict[str, Any], now: float) -> int | None:
    """The seconds left at the batch's mean pace, if it is in progress and has results; `now` in unix seconds."""
    counts, began = batch.get("request_counts") or {}, batch.get("in_progress_at")
    done: int = counts.get("completed", 0) + counts.get("failed", 0)
    if batch["status"] != "in_progress" or not began or not done:
        return None
    per_line: float = max(0.0, now - began) / done
    return round((int(counts["total"]) - done) * per_line)


class BatchPace:
    """The speed of a watched batch, from its counts since it was first seen in progress."""

    def __init__(self) -> None:
        self._first: tuple[float, int, int] | None = None

    def text(self, batch: dict[str, Any], now: float) -> str:
        """`2 failed, 340 tokens/s, 0:30 left`, as far as it can be known; `now` in monotonic seconds."""
        counts = batch.get("request_counts") or {}
        failed, tokens = counts.get("failed", 0), (batch.get("usage") or {}).get("output_tokens", 0)
        done = counts.get("completed", 0) + failed
        parts = [f"{failed} failed"] if failed else []
        if batch["status"] == "in_progress":
            began, first_done, first_tokens = self._first = self._first or (now, done, tokens)
            if now > began and tokens > first_tokens:
                parts.append(f"{(tokens - first_tokens) / (now - began):,.0f} tokens/s")
            if now > began and done > first_done:
                parts.append(f"{clock((counts['total'] - done) * (now - began) / (done - first_done))} left")
        return ", ".join(parts)


def _command_line(*words: str) -> str:
    """A batch command for the server that this one asks."""
    parent = click.get_current_context().parent
    url = None if parent is None else parent.params["url"]
    return shlex.join(["laddertron", "batch", *(() if url is None else ("--url", url)), *words])


def _finish(
    client: BatchClient, batch: dict[str, Any], output: Path | None, console: Console, replace: bool = False
) -> int:
    for error in ((batch.get("errors") or {}).get("data") or [])[:20]:
        say_error(console, f"{error.get('code')}: {error.get('message')}")
    if output is not None:
        for file_id, path in (
            (batch.get("output_file_id"), output),
            (batch.get("error_file_id"), default_errors(output)),
        ):
            if file_id:
                try:
                    size = client.download(file_id, path, replace)
                except (ApiError, OSError) as error:
                    again = output.with_name(f"{batch['id']}.jsonl") if isinstance(error, FileExistsError) else output
                    say_error(console, f"{path} could not be fetched: {error}: fetch it again with")
                    say(console, f"  {_command_line('fetch', batch['id'], '-o', str(again))}")
                    return FAILED
                say(console, f"{path}: {size} bytes")
    counts = batch.get("request_counts") or {}
    say(
        console,
        f"{batch['status']}: {counts.get('completed', 0)} of {counts.get('total', 0)} answered, "
        f"{counts.get('failed', 0)} failed",
    )
    if output is None and batch.get("output_file_id"):
        say(console, f"fetch the answers with\n  {_command_line('fetch', batch['id'], '-o', 'answers.jsonl')}")
    return OK if batch["status"] == "completed" else FAILED
